"""The names and shapes that an update of the weights must have, known before anything is written.

vLLM merges what a checkpoint has apart (query, key and value are one matrix) and finds a wrong name half-way through a
load, when the old weights are gone. So updates are compared with the model as transformers lays it out, without data.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.errors import EngineError, WeightMismatchError
from asyncrl.weights.manifest import TensorEntry, WeightManifest

__all__ = ["CheckpointLayout"]


class CheckpointLayout:
    """Parameters by checkpoint name; several names of one tensor (tied embeddings) are one.

    Args:
        model: a causal language model, perhaps on the meta device.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._owners: dict[str, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        first: dict[int, str] = {}
        persistent = set(model.state_dict())
        parameters = list(model.named_parameters(remove_duplicate=False))
        buffers = [(n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in persistent]
        for name, tensor in [*parameters, *buffers]:
            self._owners[name] = first.setdefault(id(tensor), name)
            self._tensors[name] = tensor
        self._required = {self._owners[name] for name, _ in parameters}

    @classmethod
    def of(cls, model_path: str) -> CheckpointLayout:
        """The layout of a folder's model. Blocks.

        Raises:
            EngineError: transformers does not know the model.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config: Any = AutoConfig.from_pretrained(model_path)  # Any: a class per family
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(config)
            model.tie_weights()
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise EngineError(
                f"{model_path} is no causal language model that transformers knows, so its updates cannot be checked: "
                f"{type(error).__name__}: {error}"
            ) from error
        return cls(model)

    def check(self, manifest: WeightManifest) -> dict[str, str]:
        """The name that vLLM is to be told for each tensor of the manifest.

        Raises:
            WeightMismatchError: a name, shape or dtype is not the model's.
        """
        version = manifest.version
        names = [entry.name for entry in manifest.tensors]
        unknown = sorted(name for name in names if name not in self._owners)
        missing = sorted(self._required - {self._owners[name] for name in names if name in self._owners})
        if unknown or missing:
            raise WeightMismatchError(
                f"weights of version {version} do not fit the model: "
                f"unknown names {_few(unknown)}, missing names {_few(missing)}"
            )
        taken: dict[str, TensorEntry] = {}
        for entry in manifest.tensors:
            tensor = self._tensors[entry.name]
            if tuple(entry.shape) != tuple(tensor.shape):
                raise WeightMismatchError(
                    f"{entry.name} of version {version} has shape {tuple(entry.shape)}, the model's is "
                    f"{tuple(tensor.shape)}"
                )
            dtype = getattr(torch, entry.dtype, None)
            if not isinstance(dtype, torch.dtype) or dtype.is_floating_point != tensor.is_floating_point():
                raise WeightMismatchError(
                    f"{entry.name} of version {version} has dtype {entry.dtype}, the model's is {tensor.dtype}"
                )
            other = taken.setdefault(self._owners[entry.name], entry)
            if other.checksum != entry.checksum:
                raise WeightMismatchError(
                    f"{other.name} and {entry.name} are one tensor in the model, but differ in version {version}"
                )
        return {entry.name: owner for owner, entry in taken.items()}


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
