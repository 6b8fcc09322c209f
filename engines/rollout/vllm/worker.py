"""Code that runs inside vLLM's workers: a weight transfer backend that pulls versions by manifest.

    begin_fetch            (any time)  a thread pulls and verifies the version; its bytes stay mapped as the shadow
    start, update, finish  (paused)    vLLM's own three calls: the mapped bytes are loaded layer by layer

vLLM imports this module in every worker because it is named as ``worker_extension_cls``; that is also the moment at
which a backend has to be registered, hence the one statement at its end.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.metrics.loggers import StatLoggerBase

from asyncrl.errors import AsyncRLError, LiveWeightsError, WeightVersionError
from asyncrl.weights import TransportSpec, WeightManifest, WeightTransport
from engines.rollout.model_tensors import adapted_module, adapter_name, model_folder
from engines.rollout.vllm.weights import NOT_PROVEN, Confirmation, confirm

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

BACKEND = "asyncrl_manifest"
_LONGEST_STEP_S = 60.0
_COMPARED_BYTES = 128 << 20
_LEARNED_BYTES = 2 << 30


@dataclass
class InitInfo(WeightTransferInitInfo):
    name: str
    namespace: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: int


class _Fetch:
    """Pulls one version in a thread, and keeps its bytes mapped until they are released.

    ``names`` are vLLM's names of the manifest's tensors; ``report`` is called in the thread with the error or None.
    Of a version that is made of adapters, the ``parts`` are pulled.
    """

    def __init__(
        self,
        transport: WeightTransport,
        manifest: WeightManifest,
        names: Mapping[str, str],
        report: Callable[[Exception | None], None],
        parts: Sequence[WeightManifest] = (),
    ) -> None:
        self.adapters: list[tuple[WeightManifest, dict[str, torch.Tensor]]] = []
        self._parts = parts
        self.version = manifest.version
        self.tensors: dict[str, torch.Tensor] | None = None
        self._transport = transport
        self._manifest = manifest
        self._names = names
        self._report = report
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._ended = self._released = False
        threading.Thread(target=self._run, name=f"fetching weights {self.version}", daemon=True).start()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            for part in self._parts:
                with self._transport.pull(part) as pulled:
                    self.adapters.append((part, {name: tensor.clone() for name, tensor in pulled.items()}))
                del pulled
            if not self._parts:
                pulled = self._stack.enter_context(self._transport.pull(self._manifest))
                self.tensors = {vllm_name: pulled[name] for name, vllm_name in self._names.items()}
                del pulled
        except Exception as raised:  # noqa: BLE001 - reported
            error = raised
        with self._lock:
            self._ended = True
            if self._released:
                self._close()
        self._report(error)

    def release(self) -> None:
        """Unmap the bytes, at the latest when the thread ends; do not wait for it."""
        with self._lock:
            self._released = True
            if self._ended:
                self._close()

    def _close(self) -> None:
        self.tensors = None
        self._stack.close()


class ManifestTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Fetches versions through one rank's end of the transport, and loads them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._transport: WeightTransport | None = None
        self._fetch: _Fetch | None = None
        self._known: dict[str, list[str]] = {}

    def learn(self, folder: str) -> int:
        """Find the parameters whose place in the checkpoint is known: those that are equal now. Return their number.

        The folder is that of the model which serves. What vLLM packs, shards or transforms is not among them.
        """
        parts = {
            name: _parts(name, getattr(self.model, "packed_modules_mapping", {}))
            for name, _ in self.model.named_parameters()
        }
        held = _read(model_folder(folder), {part for each in parts.values() for part in each})
        self._known = {name: parts[name] for name, equal in self._compared(parts, held) if equal}
        return len(self._known)

    def _compared(
        self, parts_of: Mapping[str, list[str]], tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, bool]]:
        """Yield the names of parameters that ``tensors`` have all parts of, and whether they are equal."""
        live = dict(self.model.named_parameters())
        for name, parts in parts_of.items():
            found = [tensors[part] for part in parts if part in tensors and tensors[part].dim()]
            if len(found) < len(parts) or not live[name].numel() or len({each.shape[1:] for each in found}) > 1:
                continue
            expected = torch.cat(found) if len(found) > 1 else found[0]
            own = live[name].data[: len(expected)]  # a vocabulary may be padded
            cast = expected.to(own.device, own.dtype)
            yield name, own.shape == cast.shape and torch.equal(own, cast)

    def _chosen(self, version: int) -> dict[str, list[str]]:
        """Return known parameters of bounded size, others for each version: decoding waits for their comparison."""
        sizes = {name: live.nbytes for name, live in self.model.named_parameters() if name in self._known}
        names, left = list(sizes), _COMPARED_BYTES
        random.Random(version).shuffle(names)  # noqa: S311 (reproducible, not secret)
        chosen: dict[str, list[str]] = {}
        for name in names:
            if sizes[name] <= left:
                chosen[name] = self._known[name]
                left -= sizes[name]
        return chosen

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._transport = TransportSpec(
            name=init_info.name, namespace=init_info.namespace, options=init_info.options
        ).make()

    def begin_fetch(
        self,
        manifest: WeightManifest,
        names: Mapping[str, str],
        report: Callable[[Exception | None], None],
        parts: Sequence[WeightManifest] = (),
    ) -> None:
        assert self._transport is not None, "init_transfer_engine comes first"
        self.drop_fetch()
        self._fetch = _Fetch(self._transport, manifest, names, report, parts)

    def load_adapters(self, manager: Any, numbers: Mapping[str, int]) -> None:
        """Have vLLM's ``manager`` (of one rank; Any: vLLM's own) apply the fetched adapters, in place of those before.

        What it computes with is compared with what was published, on a rank that has all of it.

        Raises:
            WeightVersionError: none is fetched.
            LiveWeightsError: vLLM does not compute with what was published.
        """
        if self._fetch is None or not self._fetch.adapters:
            raise WeightVersionError("this rank holds no fetched adapter")
        inner = manager._adapter_manager  # noqa: SLF001  vLLM reads adapters from files alone
        for manifest, tensors in self._fetch.adapters:
            adapter = manifest.adapter
            assert adapter is not None
            number = numbers[adapter.name]
            modules = sorted({adapted_module(name) for name in tensors})
            config = {"r": adapter.rank, "lora_alpha": adapter.alpha, "target_modules": modules}
            lora = LoRAModel.from_lora_tensors(
                lora_model_id=number,
                tensors={name: tensor.clone() for name, tensor in tensors.items()},  # vLLM scales them in place
                peft_helper=PEFTHelper.from_dict(config),
                device="cpu",
                dtype=manager.lora_config.lora_dtype,
            )
            inner.remove_adapter(number)
            inner.add_adapter(lora)
            inner.activate_adapter(number)
            if (wrong := _not_applied(inner, number, manifest, tensors)) is not None:
                raise LiveWeightsError(
                    f"{NOT_PROVEN}adapter {adapter.name!r} of version {manifest.version}, beside {wrong}"
                )
        self.drop_fetch()

    def drop_fetch(self) -> None:
        if self._fetch is not None:
            self._fetch.release()
            self._fetch = None

    def start_weight_update(self) -> None:
        if self._fetch is None or self._fetch.tensors is None:
            raise WeightVersionError("this rank holds no fetched weight version")
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, on machines without an accelerator too."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the fetched version; vLLM converts, merges and packs layer by layer."""
        fetch = self._fetch
        if fetch is None or fetch.tensors is None or fetch.version != update_info.version:
            raise WeightVersionError(f"weight version {update_info.version} is not the fetched one")
        self.model.load_weights(iter(fetch.tensors.items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_heads(self.model)
        fetch = self._fetch
        if fetch is not None and fetch.tensors is not None:
            for name, equal in self._compared(self._chosen(fetch.version), fetch.tensors):
                if not equal:
                    raise LiveWeightsError(f"{NOT_PROVEN}parameter {name} of weight version {fetch.version}")
        self.drop_fetch()

    def shutdown(self) -> None:
        self.drop_fetch()
        if self._transport is not None:
            self._transport.close()
            self._transport = None


class WorkerExtension:
    """Methods that vLLM mixes into its worker, to be called through ``collective_rpc``."""

    rank: int
    weight_transfer_engine: Any
    model_runner: Any

    def asyncrl_load_adapters(self, numbers: dict[str, int]) -> None:
        self.weight_transfer_engine.load_adapters(self.model_runner.lora_manager, numbers)

    def asyncrl_begin_fetch(
        self, manifest: bytes, names: dict[str, str], address: str, number: int, parts: Sequence[bytes] = ()
    ) -> None:
        rank = self.rank

        def report(error: Exception | None) -> None:
            kind = "" if error is None else type(error).__name__ if isinstance(error, AsyncRLError) else "WeightError"
            message = "" if error is None else str(error) or type(error).__name__
            confirm(address, Confirmation(number=number, rank=rank, kind=kind, message=message))

        adapters = [WeightManifest.decode(part) for part in parts]
        self.weight_transfer_engine.begin_fetch(WeightManifest.decode(manifest), names, report, adapters)

    def asyncrl_learn(self, folder: str) -> int:
        return int(self.weight_transfer_engine.learn(folder))

    def asyncrl_drop_fetch(self) -> None:
        self.weight_transfer_engine.drop_fetch()


def _parts(name: str, mapping: Mapping[str, list[str]]) -> list[str]:
    """Return the checkpoint's names of what vLLM concatenates to a parameter."""
    for fused, parts in mapping.items():
        if f".{fused}." in name:
            return [name.replace(f".{fused}.", f".{part}.") for part in parts]
    return [name]


def _not_applied(
    manager: Any, number: int, manifest: WeightManifest, tensors: Mapping[str, torch.Tensor]
) -> str | None:
    """Return the first module beside which vLLM's matrices are not those of an adapter; None if all are.

    A rank that has a part of each leaves them to the canary. Any: vLLM's own manager of adapters.
    """
    assert manifest.adapter is not None
    slot, scale = manager.lora_index_to_id.index(number), manifest.adapter.alpha / manifest.adapter.rank
    fused = {
        part: (whole, at) for whole, parts in manager.packed_modules_mapping.items() for at, part in enumerate(parts)
    }
    for module in sorted({adapted_module(name) for name in tensors}):
        prefix, _, last = module.rpartition(".")
        whole, at = fused.get(last, (last, 0))
        layer = manager.modules.get(f"{prefix}.{whole}")
        if layer is None or at >= len(layer.lora_a_stacked):
            return module
        for stacked, matrix, factor in ((layer.lora_a_stacked, "A", 1.0), (layer.lora_b_stacked, "B", scale)):
            published = tensors[adapter_name(module, matrix)]
            held = stacked[at][slot, 0]
            if layer.tp_size > 1:
                continue
            rows, columns = published.shape
            expected = published.to(held.device, held.dtype) * factor
            if rows > held.shape[0] or not torch.equal(held[:rows, :columns], expected):
                return module
    return None


def _read(folder: Path, names: set[str]) -> dict[str, torch.Tensor]:
    """Return those tensors of a model's folder, of bounded size together; none where it has no safetensors."""
    found: dict[str, torch.Tensor] = {}
    left = _LEARNED_BYTES
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(names & set(file.keys())):
                tensor = file.get_tensor(name)
                left -= tensor.nbytes
                if left < 0:
                    return found
                found[name] = tensor
    return found


def pack_tied_heads(model: torch.nn.Module) -> None:
    """Pack heads that share the embedding's tensor again after a load.

    On a CPU vLLM keeps a packed copy of such a head, which gets no weights of its own and would keep the old ones.
    """
    sharing: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.numel() and hasattr(module, "quant_method"):  # a packed layer's is empty
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        for module in modules[1:]:
            module.quant_method.process_weights_after_loading(module)


class SchedulerMeter(StatLoggerBase):
    """Keeps the newest figures of vLLM's scheduler, and counts steps and the seconds in which requests ran.

    vLLM calls :meth:`factory` for its stat logger, which is this meter.
    """

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.kv_cache_usage = 0.0
        self.decode_steps = 0
        self.busy_s = 0.0
        self._last_s: float | None = None

    def factory(self, vllm_config: Any, engine_index: int = 0) -> SchedulerMeter:
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Count a step. Any: vLLM calls these types unstable."""
        now = time.monotonic()
        if scheduler_stats is None:
            return
        self.kv_cache_usage = float(scheduler_stats.kv_cache_usage)
        self.decode_steps += 1
        if self._last_s is not None:
            self.busy_s += min(now - self._last_s, _LONGEST_STEP_S)
        self._last_s = now if scheduler_stats.num_running_reqs else None

    def log_engine_initialized(self) -> None:
        """Required by the base class."""


WeightTransferEngineFactory.register_engine(BACKEND, ManifestTransferEngine)
