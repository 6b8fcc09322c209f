"""Low-rank adapters beside a model's weights: several serve at a time, each for the rows of one pass that name it.

    y = W x                       every token, one product
    y += (alpha / rank) * B A x   the tokens of each adapter, two thin products

The weights stay as they are, so rows of several adapters, and rows without one, share every pass.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from asyncrl.errors import WeightError
from asyncrl.weights import TensorEntry, WeightManifest
from engines.rollout.model_tensors import ModelTensors, adapter_name, check_base, check_prepared, checksums


@dataclass(frozen=True, slots=True, eq=False)
class ServedAdapter:
    """``pairs`` are A and B by the module beside which they lie; ``tensors`` the same by published name."""

    version: int
    scale: float
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    tensors: Mapping[str, torch.Tensor]


class Adapters:
    """Those of one model that serve, by name, and those that are prepared.

    Another floating dtype is cast to the model's. :meth:`prepare` is called in a thread, the others between two steps.
    """

    def __init__(self, model: torch.nn.Module, *, max_rank: int | None = None) -> None:
        self.serving: dict[str, ServedAdapter] = {}
        self.prepared: int | None = None
        self._max_rank = max_rank
        self._tensors = ModelTensors(model)
        self._modules = dict(model.named_modules())
        self._adapted: set[str] = set()
        self._base: tuple[TensorEntry, ...] = ()
        self._shadow: dict[str, ServedAdapter] = {}
        self._places: list[tuple[ServedAdapter, torch.Tensor | None]] = []

    @property
    def version(self) -> int:
        """Return the newest version of those that serve; -1 without any."""
        return max((each.version for each in self.serving.values()), default=-1)

    def version_of(self, name: str, *, weights: int) -> int:
        """Return the version that a row of this adapter is sampled under; without one, that of the ``weights``."""
        adapter = self.serving.get(name)
        return weights if adapter is None else adapter.version

    def prepare(
        self,
        parts: Sequence[tuple[WeightManifest, Mapping[str, torch.Tensor]]],
        *,
        version: int,
        weights: int,
        stop: threading.Event,
    ) -> None:
        """Check and copy adapters; ``weights`` is the version of the weights. What was prepared before is dropped.

        When ``stop`` is set nothing is prepared.
        """
        self.prepared, self._shadow = None, {}
        shadow: dict[str, ServedAdapter] = {}
        for manifest, tensors in parts:
            assert manifest.adapter is not None
            name, last = manifest.adapter.name, self.serving.get(manifest.adapter.name)
            modules = self._tensors.check_adapter(
                manifest,
                held=weights if last is None else last.version,
                modules=last.pairs if last is not None else (),
                base=self._base,
                max_rank=self._max_rank,
            )
            if manifest.adapter.base != self._base:
                base = [entry.name for entry in manifest.adapter.base]
                check_base(manifest, self._tensors.checksums(base))
                self._base = manifest.adapter.base
            copies: dict[str, torch.Tensor] = {}
            pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
            for module in modules:
                like = self._tensors.live[self._tensors.owners[f"{module}.weight"]]
                names = adapter_name(module, "A"), adapter_name(module, "B")
                copies |= {each: tensors[each].to(like.device, like.dtype, copy=True) for each in names}
                pairs[module] = copies[names[0]], copies[names[1]]
            scale = manifest.adapter.alpha / manifest.adapter.rank
            shadow[name] = ServedAdapter(manifest.version, scale, pairs, copies)
        if not stop.is_set():
            self.prepared, self._shadow = version, shadow

    def swap(self, version: int) -> frozenset[str]:
        """Have the prepared adapters serve; return their names. Raises as :func:`check_prepared`."""
        check_prepared(version, self.prepared)
        changed, self._shadow, self.prepared = self._shadow, {}, None
        self.serving |= changed
        for module in {module for each in changed.values() for module in each.pairs} - self._adapted:
            self._adapted.add(module)
            self._modules[module].register_forward_hook(self._hook(module))
        return frozenset(changed)

    def move(self, device: torch.device) -> None:
        """Move those that serve, and those that are prepared, to where the weights are now."""
        for adapter in (*self.serving.values(), *self._shadow.values()):
            for tensor in adapter.tensors.values():
                tensor.data = tensor.data.to(device)

    @contextmanager
    def of_pass(self, names: Sequence[str]) -> Iterator[None]:
        """Apply adapters to the tokens of the pass inside the block: ``names`` has that of each token."""
        if self.serving:
            places: dict[str, list[int]] = defaultdict(list)
            for place, name in enumerate(names):
                places[name].append(place)
            self._places = [
                (
                    adapter,
                    None if len(places) == 1 else torch.tensor(at, device=next(iter(adapter.tensors.values())).device),
                )
                for name, at in places.items()
                if (adapter := self.serving.get(name)) is not None
            ]
        try:
            yield
        finally:
            self._places = []

    def checksums(self, name: str) -> dict[str, tuple[str, int]]:
        """Return the dtype and the checksum of the tensors of an adapter that serves, by published name; in threads."""
        if name not in self.serving:
            raise WeightError(f"no adapter {name!r} serves")
        return checksums(self.serving[name].tensors)

    def _hook(self, module: str) -> Any:  # Any: torch's own type of hooks
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            for adapter, places in self._places:
                pair = adapter.pairs.get(module)
                if pair is None:
                    continue
                a, b = pair
                dim = inputs[0].dim() - 2  # [1, T, inputs], or [T, inputs] of a model that flattens its batch
                states = inputs[0] if places is None else inputs[0].index_select(dim, places)
                change = (states @ a.T @ b.T).mul_(adapter.scale)
                output = output + change if places is None else output.index_add(dim, places, change)
            return output

        return add
