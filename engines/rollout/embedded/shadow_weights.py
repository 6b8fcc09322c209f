"""The next version of the weights, beside the one that serves.

The shadow is written while decoding goes on and becomes the model by exchanging pointers, so the pause does not grow
with the size of the model. What served before becomes the next shadow: after the first update nothing is allocated.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
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
        self._shadow: dict[str, torch.Tensor] = {}
        self._filled: set[str] = set()

    def verify(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Check names, shapes, dtypes and version before anything is written.

        Raises:
            WeightMismatchError, WeightVersionError.
        """
        self._tensors.verify(tensors, version=version, held=self.version)

    def write(self, tensors: Mapping[str, torch.Tensor], *, version: int, stop: threading.Event) -> Iterator[int]:
        """Copy into the shadow, one tensor per item; yields the bytes copied. Verified tensors only.

        When ``stop`` is set the shadow stays incomplete and nothing is prepared.
        """
        self.prepared = None
        self._filled.clear()
        for name, tensor in tensors.items():
            owner = self._tensors.owners[name]
            if owner in self._filled:
                continue
            if stop.is_set():
                return
            live = self._tensors.live[owner]
            if owner not in self._shadow:
                self._shadow[owner] = torch.empty_like(live, requires_grad=False)
            with torch.no_grad():
                self._shadow[owner].copy_(tensor)
            self._filled.add(owner)
            yield live.nbytes
        if any(live.is_cuda for live in self._tensors.live.values()):
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
            # Any: assigning `data` is torch's own way to swap storage under a Parameter
            live: Any = self._tensors.live[owner]
            live.data, self._shadow[owner] = self._shadow[owner], live.data
        self.version = version
        self.prepared = None
