"""Which tensors a model has, and whether a version of the weights fits them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from asyncrl.errors import WeightMismatchError, WeightVersionError

__all__ = ["ModelTensors"]


class ModelTensors:
    """The parameters and persistent buffers of a model, each once.

    Tensors shared under several names (tied embeddings) are one: any of the names will do, and if several come they
    must agree. Persistent buffers may come or not.

    Args:
        model: as transformers makes it; tensors on the ``meta`` device do.

    Attributes:
        owners: the first name of each name's tensor.
        live: the model's tensors by first name.
        required: first names of parameters.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.owners: dict[str, str] = {}
        self.live: dict[str, torch.Tensor] = {}
        first: dict[int, str] = {}
        persistent = set(model.state_dict())
        parameters = list(model.named_parameters(remove_duplicate=False))
        buffers = [(n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in persistent]
        for name, tensor in [*parameters, *buffers]:
            owner = first.setdefault(id(tensor), name)
            self.owners[name] = owner
            self.live[owner] = tensor
        self.required = {self.owners[name] for name, _ in parameters}

    def verify(self, tensors: Mapping[str, torch.Tensor], *, version: int, held: int) -> None:
        """Check names, shapes, dtypes and that ``version`` is newer than the one ``held``. A floating dtype may differ.

        Raises:
            WeightMismatchError, WeightVersionError.
        """
        if version <= held:
            raise WeightVersionError(f"weight version {version} does not follow version {held}: versions grow")
        unknown = sorted(name for name in tensors if name not in self.owners)
        missing = sorted(self.required - {self.owners[name] for name in tensors if name in self.owners})
        if unknown or missing:
            raise WeightMismatchError(
                f"weights of version {version} do not fit the model: "
                f"unknown names {_few(unknown)}, missing names {_few(missing)}"
            )
        by_owner: dict[str, str] = {}
        for name, tensor in tensors.items():
            owner = self.owners[name]
            live = self.live[owner]
            if tensor.shape != live.shape:
                raise WeightMismatchError(
                    f"{name} of version {version} has shape {tuple(tensor.shape)}, the model's is {tuple(live.shape)}"
                )
            if tensor.dtype != live.dtype and not (tensor.is_floating_point() and live.is_floating_point()):
                raise WeightMismatchError(
                    f"{name} of version {version} has dtype {tensor.dtype}, the model's is {live.dtype}"
                )
            other = by_owner.setdefault(owner, name)
            if other != name and not torch.equal(tensors[other], tensor):
                raise WeightMismatchError(
                    f"{other} and {name} are one tensor in the model, but differ in version {version}"
                )


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
