"""The two phases of a weight update, as vLLM's workers carry them out."""

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncrl.errors as error_tree
from asyncrl.errors import EngineError, WeightError, WeightVersionError
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.transport import TransportSpec
from engines.rollout.vllm_adapter.confirmation import Confirmations
from engines.rollout.vllm_adapter.starting import StartedLLM

__all__ = ["GONE", "WeightUpdates"]

GONE = "vLLM's engine core is gone; see the engine's log"


class WeightUpdates:
    """Fetches versions into every rank, and loads what was fetched.

    Args:
        started: the running vLLM.
        folder: that only this user enters.

    Attributes:
        prepared: version that every rank holds and has verified; None if there is none.
    """

    def __init__(self, started: StartedLLM, folder: Path) -> None:
        self._started = started
        self._confirmations = Confirmations(folder)
        self.prepared: int | None = None

    async def open(self, spec: TransportSpec) -> None:
        """Give every rank its end of the transport."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        told = {"name": spec.name, "namespace": spec.namespace, "options": dict(spec.options)}
        await self._started.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=told))
        await self._confirmations.open()

    async def close(self) -> None:
        """Hear no more."""
        await self._confirmations.close()

    async def fetch(self, manifest: WeightManifest, *, after: int) -> None:
        """Have every rank pull and verify a version, while decoding goes on.

        Raises:
            WeightVersionError: it is not newer than ``after``.
            WeightMismatchError: a name, shape, dtype or byte is wrong.
            WeightError: the bytes are not available.
        """
        started, version = self._started, manifest.version
        if version <= after:
            raise WeightVersionError(f"weight version {version} does not follow version {after}: versions grow")
        names = started.layout.check(manifest)
        self.prepared = None
        number = self._confirmations.expect()
        order = (manifest.encode(), names, self._confirmations.address, number)
        await self._call("asyncrl_begin_fetch", *order)
        gathering = asyncio.ensure_future(self._confirmations.gather(number, ranks=started.ranks))
        try:
            await asyncio.wait([gathering, started.llm.output_handler], return_when=asyncio.FIRST_COMPLETED)
            if not gathering.done():
                raise EngineError(GONE)
        finally:
            gathering.cancel()
        for answer in gathering.result():
            if answer.kind:
                await self._call("asyncrl_drop_fetch")
                raise getattr(error_tree, answer.kind, WeightError)(answer.message)
        self.prepared = version

    def check(self, version: int) -> None:
        """Whether ``version`` can be loaded.

        Raises:
            WeightVersionError: it is not the prepared one.
        """
        if version != self.prepared:
            held = "none is" if self.prepared is None else f"version {self.prepared} is"
            raise WeightVersionError(f"cannot commit weight version {version}: {held} prepared")

    async def load(self, version: int) -> None:
        """Load the prepared version, and label what is sampled from now on. Only while nothing runs."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._started.llm
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        await llm.finish_weight_update(weight_version=str(version))
        self.prepared = None

    async def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of the worker extension on every rank."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._started.llm.collective_rpc(method, args=arguments)
        except EngineDeadError as error:
            raise EngineError(GONE) from error
