"""The next version of the weights, verified, in shared memory: another process of this machine loads it from there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.errors import WeightError, WeightVersionError
from engines.rollout.model_tensors import ModelTensors

__all__ = ["StagedWeights"]

_ALIGNMENT = 64


class StagedWeights:
    """One block of shared memory with room for every tensor of a model, allocated once and used for each version.

    Args:
        tensors: what the model has; on the ``meta`` device they cost nothing. A tensor of another floating dtype is
            cast to the model's.
        version: what the model holds now.
    """

    def __init__(self, tensors: ModelTensors, *, version: int) -> None:
        self.version = version
        self.prepared: int | None = None
        self._tensors = tensors
        self._views: dict[str, torch.Tensor] = {}
        self._filled: list[str] = []

    @classmethod
    def of_model(cls, model_path: str, *, dtype: torch.dtype, version: int) -> StagedWeights:
        """For a folder or hub id, from its configuration alone.

        Raises:
            WeightError: transformers does not know the model, or names its tensors otherwise than its checkpoint does
                (an engine that loads by the checkpoint's names would pass over them).
        """
        import transformers

        try:
            config: Any = transformers.AutoConfig.from_pretrained(model_path)  # Any: partial annotations
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise WeightError(f"{model_path} cannot be given weights: {type(error).__name__}: {error}") from error
        tensors = ModelTensors(model)
        known = _checkpoint_names(Path(model_path))
        if known and (other := sorted(tensors.required - known)):
            raise WeightError(
                f"{model_path} cannot be given weights: {len(other)} of its tensors ({other[0]}, ...) have other names "
                f"in the checkpoint"
            )
        return cls(tensors, version=version)

    def verify(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Check names, shapes, dtypes and version before anything is written.

        Raises:
            WeightMismatchError, WeightVersionError.
        """
        self._tensors.verify(tensors, version=version, held=self.version)

    def write(self, tensors: Mapping[str, torch.Tensor], *, version: int, stop: threading.Event) -> Iterator[int]:
        """Copy into the block, one tensor per item; yields the bytes copied. Verified tensors only.

        When ``stop`` is set the block stays incomplete and nothing is prepared.
        """
        self.prepared = None
        self._filled = []
        views = self._room()
        for name, tensor in tensors.items():
            owner = self._tensors.owners[name]
            if owner in self._filled:
                continue
            if stop.is_set():
                return
            with torch.no_grad():
                views[owner].copy_(tensor)
            self._filled.append(owner)
            yield views[owner].nbytes
        self.prepared = version

    def staged(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """The prepared tensors by checkpoint name, views of the block.

        Raises:
            WeightVersionError: ``version`` is not the prepared one.
        """
        if version != self.prepared:
            held = "none is" if self.prepared is None else f"version {self.prepared} is"
            raise WeightVersionError(f"cannot commit weight version {version}: {held} prepared")
        return [(name, self._views[name]) for name in self._filled]

    def committed(self, version: int) -> None:
        """The model holds ``version`` now."""
        self.version = version
        self.prepared = None

    def _room(self) -> dict[str, torch.Tensor]:
        if not self._views:
            offsets: dict[str, int] = {}
            end = 0
            for name, live in self._tensors.live.items():
                offsets[name] = end
                end += -(-live.nbytes // _ALIGNMENT) * _ALIGNMENT
            block = torch.empty(end, dtype=torch.uint8, device="cpu").share_memory_()
            self._views = {
                name: block[offsets[name] : offsets[name] + live.nbytes].view(live.dtype).view(live.shape)
                for name, live in self._tensors.live.items()
            }
        return self._views


def _checkpoint_names(folder: Path) -> frozenset[str]:
    """Names in a folder's safetensors; empty where it has none, or is no folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return frozenset(json.loads(index.read_text())["weight_map"])
    file = folder / "model.safetensors"
    if not file.is_file():
        return frozenset()
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return frozenset(opened.keys())
