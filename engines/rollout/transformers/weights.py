"""The next version of the weights, beside the one that serves.

The shadow is filled while decoding goes on and becomes the model by exchanging pointers, so the pause does not grow
with the size of the model. Tensors that were leased are served from where they lie; others are copied, into memory that
an earlier version used.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from engines.rollout.model_tensors import ModelTensors, check_prepared


class ShadowWeights:
    """Two-phase update of one model's parameters and persistent buffers, which hold ``version``.

    Another floating dtype is cast to the model's.
    """

    def __init__(self, model: torch.nn.Module, *, version: int) -> None:
        self.version = version
        self.prepared: int | None = None
        self._tensors = ModelTensors(model)
        self._shadow = _Version()
        self._serving = _Version()
        self._device = next(iter(self._tensors.live.values())).device
        self._free: dict[str, torch.Tensor] = {}  # memory of copies that are not used any more

    def write(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int,
        stop: threading.Event,
        lease: ExitStack | None = None,
    ) -> None:
        """Check the tensors and fill the shadow with them.

        With a ``lease``, parameters whose device, dtype and layout are the model's are not copied: they stay valid
        until the lease, which is taken over, is closed: when none of them will be served any more.

        When ``stop`` is set the shadow stays incomplete and nothing is prepared.
        """
        self._tensors.check(tensors, version=version, held=self.version)
        self._discard()
        if lease is not None:
            self._shadow.lease = lease.pop_all()
        try:
            for name, tensor in tensors.items():
                owner = self._tensors.owners[name]
                if owner in self._shadow.tensors:
                    continue
                if stop.is_set():
                    return
                live = self._tensors.live[owner]
                if lease is not None and owner in self._tensors.required and _same_layout(tensor, live):
                    self._shadow.tensors[owner] = tensor
                    self._shadow.leased.add(owner)
                else:
                    self._shadow.tensors[owner] = self._copy(owner, tensor)
            if any(live.is_cuda for live in self._tensors.live.values()):
                torch.cuda.current_stream().synchronize()
            self.prepared = version
        finally:
            if self.prepared is None:
                self._discard()
            elif not self._shadow.leased:
                self._shadow.lease.close()

    def swap(self, version: int) -> None:
        """Make the shadow the model, between two steps. Raises as :func:`check_prepared`."""
        check_prepared(version, self.prepared)
        leased = self._shadow.leased | self._serving.leased
        for owner, tensor in self._shadow.tensors.items():
            # Any: assigning `data` is torch's own way to swap storage under a Parameter
            live: Any = self._tensors.live[owner]
            if owner not in leased:
                self._free[owner] = live.data
            live.data = tensor
        self._shadow.tensors.clear()
        self._serving.lease.close()
        self._serving, self._shadow = self._shadow, _Version()
        self.version = version
        self.prepared = None

    def checksums(self, names: Collection[str]) -> dict[str, tuple[str, int]]:
        """Return the dtype and the checksum of live tensors, by published name; none is swapped meanwhile."""
        return self._tensors.checksums(names)

    def sleep(self) -> None:
        """Move the weights to the host, and free what does not serve. Versions may be prepared meanwhile."""
        self._free.clear()
        self._move(torch.device("cpu"))

    def wake(self) -> None:
        self._free.clear()
        self._move(self._device)

    def close(self) -> None:
        self._discard()
        self._free.clear()
        for live in self._tensors.live.values():
            live.data = torch.empty(0, dtype=live.dtype)
        self._serving.lease.close()

    def _move(self, device: torch.device) -> None:
        for owner, live in self._tensors.live.items():
            if live.device != device:
                live.data = _moved(live.data, device)
                self._serving.leased.discard(owner)
        for owner in [owner for owner, tensor in self._shadow.tensors.items() if tensor.device != device]:
            self._shadow.tensors[owner] = _moved(self._shadow.tensors[owner], device)
            self._shadow.leased.discard(owner)
        for version in (self._serving, self._shadow):
            if not version.leased:
                version.lease.close()

    def _discard(self) -> None:
        self.prepared = None
        for owner, tensor in self._shadow.tensors.items():
            if owner not in self._shadow.leased:
                self._free[owner] = tensor
        self._shadow.tensors.clear()
        self._shadow.lease.close()
        self._shadow = _Version()

    def _copy(self, owner: str, tensor: torch.Tensor) -> torch.Tensor:
        memory = self._free.pop(owner, None)
        if memory is None:
            memory = torch.empty_like(self._tensors.live[owner], requires_grad=False)
        with torch.no_grad():
            return memory.copy_(tensor)


class _Version:
    """The tensors of a version; those named in ``leased`` are valid until ``lease`` is closed."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.leased: set[str] = set()
        self.lease = ExitStack()


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to ``device``; to the host into pinned memory, which torch keeps for the next time: copies are fast then."""
    if tensor.is_cuda and device.type == "cpu":
        return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor)
    return tensor.to(device)


def _same_layout(tensor: torch.Tensor, live: torch.Tensor) -> bool:
    return tensor.device == live.device and tensor.dtype == live.dtype and tensor.is_contiguous()
