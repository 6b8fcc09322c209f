"""The next version of the weights, beside the one that serves.

The shadow is written while decoding goes on and becomes the model by exchanging pointers, so the pause does not grow
with the size of the model. What served before becomes the next shadow: after the first update nothing is allocated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from asyncrl.errors import WeightMismatchError, WeightVersionError

__all__ = ["ShadowWeights"]


class ShadowWeights:
    """Two-phase update of one model's parameters and persistent buffers.

    Tensors shared under several names (tied embeddings) are one: any of the names will do, and if several come they
    must agree. Persistent buffers may come or not. A tensor of another floating dtype is cast.

    Args:
        model: the model that serves.
        version: what it holds now.
    """

    def __init__(self, model: torch.nn.Module, *, version: int) -> None:
        self.version = version
        self.prepared: int | None = None
        self._names: dict[str, str] = {}
        self._live: dict[str, torch.Tensor] = {}
        self._shadow: dict[str, torch.Tensor] = {}
        self._required: set[str] = set()
        first: dict[int, str] = {}
        persistent = set(model.state_dict())
        parameters = list(model.named_parameters(remove_duplicate=False))
        buffers = [(n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in persistent]
        for name, tensor in [*parameters, *buffers]:
            owner = first.setdefault(id(tensor), name)
            self._names[name] = owner
            self._live[owner] = tensor
        self._required = {self._names[name] for name, _ in parameters}
        self._filled: set[str] = set()

    def verify(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Check names, shapes, dtypes and version before anything is written.

        Raises:
            WeightMismatchError, WeightVersionError.
        """
        if version <= self.version:
            raise WeightVersionError(f"weight version {version} does not follow version {self.version}: versions grow")
        unknown = sorted(name for name in tensors if name not in self._names)
        missing = sorted(self._required - {self._names[name] for name in tensors if name in self._names})
        if unknown or missing:
            raise WeightMismatchError(
                f"weights of version {version} do not fit the model: "
                f"unknown names {_few(unknown)}, missing names {_few(missing)}"
            )
        by_owner: dict[str, str] = {}
        for name, tensor in tensors.items():
            owner = self._names[name]
            live = self._live[owner]
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

    def write(self, tensors: Mapping[str, torch.Tensor], *, version: int, stop: threading.Event) -> Iterator[int]:
        """Copy into the shadow, one tensor per item; yields the bytes copied. Verified tensors only.

        When ``stop`` is set the shadow stays incomplete and nothing is prepared.
        """
        self.prepared = None
        self._filled.clear()
        for name, tensor in tensors.items():
            owner = self._names[name]
            if owner in self._filled:
                continue
            if stop.is_set():
                return
            live = self._live[owner]
            if owner not in self._shadow:
                self._shadow[owner] = torch.empty_like(live, requires_grad=False)
            with torch.no_grad():
                self._shadow[owner].copy_(tensor)
            self._filled.add(owner)
            yield live.nbytes
        if any(live.is_cuda for live in self._live.values()):
            torch.cuda.current_stream().synchronize()
        self.prepared = version

    def swap(self, version: int) -> None:
        """Exchange shadow and model. Between two steps only.

        Raises:
            WeightVersionError: ``version`` is not the prepared one.
        """
        if version != self.prepared:
            held = "none is" if self.prepared is None else f"version {self.prepared} is"
            raise WeightVersionError(f"cannot commit weight version {version}: {held} prepared")
        for owner in self._filled:
            live: Any = self._live[owner]  # Any: assigning `data` is torch's own way to swap storage under a Parameter
            live.data, self._shadow[owner] = self._shadow[owner], live.data
        self.version = version
        self.prepared = None


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
