"""The next version of the weights, verified, in shared memory, from where SGLang's processes load it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import torch

from asyncrl.errors import WeightError
from engines.rollout.model_tensors import ModelTensors, adapted_module, adapter_name, check_prepared

_ALIGNMENT = 64


class StagedWeights:
    """One block of shared memory with room for every tensor of a model, allocated once and used for each version.

    Tensors of another floating dtype are cast to the model's.
    """

    def __init__(self, tensors: ModelTensors, *, version: int) -> None:
        self.version = version
        self.prepared: int | None = None
        self._tensors = tensors
        self._views: dict[str, torch.Tensor] = {}
        self._filled: list[str] = []

    @classmethod
    def of_model(cls, model_path: str, *, dtype: torch.dtype, version: int) -> StagedWeights:
        """Return the staging memory of a folder's or hub id's model.

        Raises:
            WeightError: transformers does not support the model, or its names of tensors are not the checkpoint's
                (SGLang, which loads by the latter, would skip them).
        """
        tensors = ModelTensors.of_config(model_path, dtype=dtype)
        known = _checkpoint_names(Path(model_path))
        if known and (other := sorted(tensors.required - known)):
            raise WeightError(
                f"{model_path} cannot be given weights: {len(other)} of its tensors ({other[0]}, ...) have other names "
                f"in the checkpoint"
            )
        return cls(tensors, version=version)

    def write(self, tensors: Mapping[str, torch.Tensor], *, version: int, stop: threading.Event) -> None:
        """Copy the tensors into the block after :meth:`ModelTensors.check`; prepare nothing when ``stop`` is set."""
        self._tensors.check(tensors, version=version, held=self.version)
        self.prepared = None
        self._filled = []
        views = self._allocated()
        for name, tensor in tensors.items():
            owner = self._tensors.owners[name]
            if owner in self._filled:
                continue
            if stop.is_set():
                return
            with torch.no_grad():
                views[owner].copy_(tensor)
            self._filled.append(owner)
        self.prepared = version

    def staged(self, version: int) -> list[tuple[str, torch.Tensor]]:
        """Return the prepared tensors by checkpoint name, views of the block. Raises as :func:`check_prepared`."""
        check_prepared(version, self.prepared)
        return [(name, self._views[name]) for name in self._filled]

    def committed(self, version: int) -> None:
        self.version = version
        self.prepared = None

    def _allocated(self) -> dict[str, torch.Tensor]:
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


_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules that are one in SGLang, which fails at an adapter of some of them without the others."""


def completed(
    adapter: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor], *, rank: int
) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors in shared memory, with zeros for modules that SGLang needs beside those adapted.

    ``like`` has the shapes of the model's weights.
    """
    found = {name: tensor.clone() for name, tensor in adapter.items()}
    for name in adapter:
        prefix, _, last = adapted_module(name).rpartition(".")
        for other in next((group for group in _FUSED if last in group), ()):
            weight = like.get(f"{prefix}.{other}.weight")
            if weight is not None:
                outputs, inputs = weight.shape
                for matrix, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    zeros = torch.zeros(shape, dtype=adapter[name].dtype)
                    found.setdefault(adapter_name(f"{prefix}.{other}", matrix), zeros)
    return {name: tensor.share_memory_() for name, tensor in found.items()}


def _checkpoint_names(folder: Path) -> frozenset[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return frozenset(json.loads(index.read_text())["weight_map"])
    file = folder / "model.safetensors"
    if not file.is_file():
        return frozenset()
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        return frozenset(opened.keys())
