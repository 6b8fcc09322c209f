"""What runs inside vLLM's workers: a weight transfer backend that pulls versions by manifest.

    begin_fetch     (any time)      a thread pulls and verifies the version; its bytes stay mapped: they are the shadow
    start, update, finish           (paused) vLLM's own three calls: the mapped bytes are loaded layer by layer

vLLM imports this module in every worker because it is named as ``worker_extension_cls``; that is also the moment at
which a backend has to be registered, hence the one statement at its end.
"""

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.errors import AsyncRLError, WeightVersionError
from asyncrl.interfaces import WeightTransport
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.transport import TransportSpec
from engines.rollout.vllm_adapter.confirmation import Confirmation, confirm
from engines.rollout.vllm_adapter.tied_heads import pack_tied_heads

__all__ = ["BACKEND", "ManifestTransferEngine", "WorkerExtension"]

BACKEND = "asyncrl_manifest"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """A transport's specification, as plain values."""

    name: str
    namespace: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which of the fetched versions; there is one."""

    version: int


class _Fetch:
    """Pulls one version in a thread, and keeps its bytes mapped until they are released.

    Args:
        transport: this rank's end.
        manifest: what to pull.
        names: what vLLM is told for each name of the manifest.
        tell: called in the thread when it is done, with the error or None.
    """

    def __init__(
        self,
        transport: WeightTransport,
        manifest: WeightManifest,
        names: Mapping[str, str],
        tell: Callable[[Exception | None], None],
    ) -> None:
        self.version = manifest.version
        self.tensors: dict[str, torch.Tensor] | None = None
        self._transport = transport
        self._manifest = manifest
        self._names = names
        self._tell = tell
        self._stack = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._ended = self._released = False
        threading.Thread(target=self._run, name=f"fetching weights {self.version}", daemon=True).start()

    def _run(self) -> None:
        error: Exception | None = None
        try:
            pulled = self._stack.enter_context(self._transport.pull(self._manifest))
            self.tensors = {told: pulled[name] for name, told in self._names.items()}
            del pulled
        except Exception as raised:  # noqa: BLE001 - told to whoever ordered it
            error = raised
        with self._lock:
            self._ended = True
            if self._released:
                self._close()
        self._tell(error)

    def release(self) -> None:
        """Let go of the bytes, at the latest when the thread ends; does not wait for it."""
        with self._lock:
            self._released = True
            if self._ended:
                self._close()

    def _close(self) -> None:
        self.tensors = None
        self._stack.close()


class ManifestTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One rank's end of the transport, and the loading of what came through it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._transport: WeightTransport | None = None
        self._fetch: _Fetch | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Make this end of the transport."""
        self._transport = TransportSpec(
            name=init_info.name, namespace=init_info.namespace, options=init_info.options
        ).make()

    def begin_fetch(
        self,
        manifest: WeightManifest,
        names: Mapping[str, str],
        tell: Callable[[Exception | None], None],
    ) -> None:
        """Pull and verify a version in a thread; ``tell`` is called there with the error, or None."""
        assert self._transport is not None, "init_transfer_engine comes first"
        self.drop_fetch()
        self._fetch = _Fetch(self._transport, manifest, names, tell)

    def drop_fetch(self) -> None:
        """Forget what was fetched and not loaded."""
        if self._fetch is not None:
            self._fetch.release()
            self._fetch = None

    def start_weight_update(self) -> None:
        """Nothing is touched unless a whole version is here."""
        if self._fetch is None or self._fetch.tensors is None:
            raise WeightVersionError("no fetched weight version is held by this rank")
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class does, on machines without an accelerator too."""
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
        """Put the new layers in place."""
        finalize_layerwise_reload(self.model, self.model_config)
        pack_tied_heads(self.model)
        self.drop_fetch()

    def shutdown(self) -> None:
        """Let go of everything."""
        self.drop_fetch()
        if self._transport is not None:
            self._transport.close()
            self._transport = None


class WorkerExtension:
    """Methods that vLLM mixes into its worker, to be called through ``collective_rpc``."""

    rank: int
    weight_transfer_engine: Any

    def asyncrl_begin_fetch(self, manifest: bytes, names: dict[str, str], address: str, number: int) -> None:
        """Fetch a version in a thread; the end of it is told at ``address``."""
        rank = self.rank

        def tell(error: Exception | None) -> None:
            kind = "" if error is None else type(error).__name__ if isinstance(error, AsyncRLError) else "WeightError"
            message = "" if error is None else str(error) or type(error).__name__
            confirm(address, Confirmation(number=number, rank=rank, kind=kind, message=message))

        self.weight_transfer_engine.begin_fetch(WeightManifest.decode(manifest), names, tell)

    def asyncrl_drop_fetch(self) -> None:
        """Forget what was fetched and not loaded."""
        self.weight_transfer_engine.drop_fetch()


WeightTransferEngineFactory.register_engine(BACKEND, ManifestTransferEngine)
