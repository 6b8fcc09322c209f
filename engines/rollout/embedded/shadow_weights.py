"""The next version of the weights, beside the one that serves.

The shadow is filled while decoding goes on and becomes the model by exchanging pointers, so the pause does not grow
with the size of the model. Tensors that were lent are served from where they lie; of others there is a copy, in memory
that an earlier one has left.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from asyncrl.errors import WeightVersionError
from engines.rollout.model_tensors import ModelTensors

__all__ = ["ShadowWeights"]


class ShadowWeights:
    """Two-phase update of one model's parameters and persistent buffers.

    What fits is said by :class:`~engines.rollout.model_tensors.ModelTensors`. Another floating dtype is cast.

    Args:
        model: the model that serves.
        version: what it holds now.
    """

    def __init__(self, model: torch.nn.Module, *, version: int) -> None:
        self.version = version
        self.prepared: int | None = None
        self._tensors = ModelTensors(model)
        self._shadow = _Version()
        self._serves = _Version()
        self._device = next(iter(self._tensors.live.values())).device
        self._room: dict[str, torch.Tensor] = {}  # memory of copies that serve no more

    def verify(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Check names, shapes, dtypes and version before anything is written.

        Raises:
            WeightMismatchError, WeightVersionError.
        """
        self._tensors.verify(tensors, version=version, held=self.version)

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        stop: threading.Event,
        lease: ExitStack | None = None,
    ) -> Generator[int]:
        """Fill the shadow, one tensor per item; yields their bytes. Verified tensors only.

        With a ``lease``, parameters that are just as the model has them are not copied: they stay valid until it is
        closed, which is done when none of them will be served any more.

        When ``stop`` is set the shadow stays incomplete and nothing is prepared.
        """
        self._forget()
        if lease is not None:
            self._shadow.lease = lease
        try:
            for name, tensor in tensors.items():
                owner = self._tensors.owners[name]
                if owner in self._shadow.tensors:
                    continue
                if stop.is_set():
                    return
                live = self._tensors.live[owner]
                if lease is not None and owner in self._tensors.required and _alike(tensor, live):
                    self._shadow.tensors[owner] = tensor
                    self._shadow.lent.add(owner)
                else:
                    self._shadow.tensors[owner] = self._copy(owner, tensor)
                yield live.nbytes
            if any(live.is_cuda for live in self._tensors.live.values()):
                torch.cuda.current_stream().synchronize()
            self.prepared = version
        finally:
            if self.prepared is None:
                self._forget()
            elif not self._shadow.lent:
                self._shadow.lease.close()

    def swap(self, version: int) -> None:
        """Make the shadow the model. Between two steps only.

        Raises:
            WeightVersionError: ``version`` is not the prepared one.
        """
        if version != self.prepared:
            held = "none is" if self.prepared is None else f"version {self.prepared} is"
            raise WeightVersionError(f"cannot commit weight version {version}: {held} prepared")
        lent = self._shadow.lent | self._serves.lent
        for owner, tensor in self._shadow.tensors.items():
            # Any: assigning `data` is torch's own way to swap storage under a Parameter
            live: Any = self._tensors.live[owner]
            if owner not in lent:
                self._room[owner] = live.data
            live.data = tensor
        self._shadow.tensors.clear()
        self._serves.lease.close()
        self._serves, self._shadow = self._shadow, _Version()
        self.version = version
        self.prepared = None

    def sleep(self) -> None:
        """Leave the device for the host, and give back what does not serve. Versions may come meanwhile."""
        self._room.clear()
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        """Back to the device, with what was prepared meanwhile."""
        self._room.clear()
        self._move(self._device)

    def close(self) -> None:
        """Free everything; the model is of no use afterwards."""
        self._forget()
        self._room.clear()
        for live in self._tensors.live.values():
            live.data = torch.empty(0, dtype=live.dtype)
        self._serves.lease.close()

    def _move(self, device: torch.device) -> None:
        for owner, live in self._tensors.live.items():
            if live.device != device:
                live.data = live.data.to(device)
                self._serves.lent.discard(owner)
        for owner in [owner for owner, tensor in self._shadow.tensors.items() if tensor.device != device]:
            self._shadow.tensors[owner] = self._shadow.tensors[owner].to(device)
            self._shadow.lent.discard(owner)
        for version in (self._serves, self._shadow):
            if not version.lent:
                version.lease.close()

    def _forget(self) -> None:
        self.prepared = None
        for owner, tensor in self._shadow.tensors.items():
            if owner not in self._shadow.lent:
                self._room[owner] = tensor
        self._shadow.tensors.clear()
        self._shadow.lease.close()
        self._shadow = _Version()

    def _copy(self, owner: str, tensor: torch.Tensor) -> torch.Tensor:
        room = self._room.pop(owner, None)
        if room is None:
            room = torch.empty_like(self._tensors.live[owner], requires_grad=False)
        with torch.no_grad():
            return room.copy_(tensor)


class _Version:
    """The tensors of a version, and which of them lie in memory that is lent to it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.lent: set[str] = set()
        self.lease = ExitStack()


def _alike(tensor: torch.Tensor, live: torch.Tensor) -> bool:
    return tensor.device == live.device and tensor.dtype == live.dtype and tensor.is_contiguous()
