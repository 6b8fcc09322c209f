"""The two phases of a weight update of vLLM: fetching into every rank, then loading.

A call into vLLM's workers stops decoding while it runs. So a call only begins a fetch; it goes on in a thread of each
rank, which reports its end through a Unix socket in a folder that only this user can open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import asyncrl.errors as error_tree
from asyncrl.errors import EngineError, WeightError, WeightMismatchError
from asyncrl.runtime import shield_until_done
from asyncrl.weights import TransportSpec, WeightManifest
from engines.rollout.model_tensors import AdapterVersions, check_prepared
from engines.rollout.vllm.launch import GONE, StartedLLM

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

_log = logging.getLogger(__name__)

NOT_PROVEN = "vLLM does not compute with what was published: "
"""Begins what a rank says of such a load. vLLM passes on the text of a rank's error, and not its class."""


class Confirmation(msgspec.Struct, frozen=True, array_like=True):
    """The end of one rank's fetch. ``kind`` is the error's class in :mod:`asyncrl.errors`, or empty."""

    number: int
    rank: int
    kind: str = ""
    message: str = ""


def confirm(address: str, confirmation: Confirmation) -> None:
    with socket.socket(socket.AF_UNIX) as connection, _shortened(address) as path:
        connection.connect(path)
        connection.sendall(msgspec.msgpack.encode(confirmation))


@contextlib.contextmanager
def _shortened(address: str) -> Iterator[str]:
    """Yield a path of the same Unix socket that fits their 107 bytes, however long the path of its folder is."""
    folder, name = os.path.split(address)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


class Confirmations:
    """Receives confirmations through a socket in ``folder``, from every process that may enter it.

    Fetches are numbered, so that late confirmations of an earlier one are not counted.
    """

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "confirmations")
        self._server: asyncio.Server | None = None
        self._opened = contextlib.ExitStack()
        self._number = 0
        self._received: asyncio.Queue[Confirmation] = asyncio.Queue()

    async def open(self) -> None:
        path = self._opened.enter_context(_shortened(self.address))
        self._server = await asyncio.start_unix_server(self._receive, path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._opened.close()

    def expect(self) -> int:
        self._number += 1
        return self._number

    async def gather(self, number: int, *, ranks: int) -> list[Confirmation]:
        received: list[Confirmation] = []
        while len(received) < ranks:
            confirmation = await self._received.get()
            if confirmation.number == number:
                received.append(confirmation)
        return received

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self._received.put_nowait(msgspec.msgpack.decode(await reader.read(), type=Confirmation))
        finally:
            writer.close()


class WeightUpdates:
    """Fetches versions into every rank, and loads the one that all have fetched and verified (``prepared``).

    Only this user may enter ``folder``. An engine that was started for ``adapters`` takes these alone: vLLM's own load
    of weights does not know the modules that it puts around those that may be adapted.
    """

    def __init__(self, started: StartedLLM, folder: Path, *, adapters: AdapterVersions | None = None) -> None:
        self._started = started
        self._adapters = adapters
        self._parts: list[WeightManifest] = []
        self._confirmations = Confirmations(folder)
        self.prepared: int | None = None

    async def open(self, spec: TransportSpec) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        init_info = {"name": spec.name, "namespace": spec.namespace, "options": dict(spec.options)}
        await self._started.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))
        await self._confirmations.open()
        if self._adapters is None:
            model = self._started.llm.model_config.model
            if not any(await self._call("asyncrl_learn", model)):
                _log.warning("no tensor of %s is found in vLLM as it is: the canary alone proves its weights", model)

    async def close(self) -> None:
        await self._confirmations.close()

    async def fetch(self, manifest: WeightManifest, *, after: int) -> None:
        """Have every rank pull and verify a version, while decoding goes on.

        Raises:
            WeightVersionError: it is not newer than ``after``.
            WeightMismatchError: a name, shape, dtype or byte is wrong.
            WeightError: the bytes are not available.
        """
        started, adapters = self._started, self._adapters
        if (manifest.adapter is None) != (adapters is None):
            made = "without adapters (max_adapter_rank)" if adapters is None else "for adapters, which it takes alone"
            what = "full weights" if manifest.adapter is None else "an adapter"
            raise WeightMismatchError(f"version {manifest.version} is {what}, and vLLM was started {made}")
        names: dict[str, str] = {}
        if adapters is None:
            names = started.tensors.check_manifest(manifest, held=after)
        else:
            self._parts = await asyncio.to_thread(adapters.check, manifest)
        parts = [msgspec.structs.replace(part, beside=()).encode() for part in self._parts]
        self.prepared = None
        number = self._confirmations.expect()
        address = self._confirmations.address
        gathering = asyncio.ensure_future(self._confirmations.gather(number, ranks=started.ranks))
        try:
            await self._call("asyncrl_begin_fetch", manifest.encode(), names, address, number, parts)
            await asyncio.wait([gathering, started.llm.output_handler], return_when=asyncio.FIRST_COMPLETED)
            if not gathering.done():
                raise EngineError(GONE)
        except asyncio.CancelledError:
            await self._drop()
            raise
        finally:
            gathering.cancel()
        for confirmation in gathering.result():
            if confirmation.kind:
                await self._drop()
                raise getattr(error_tree, confirmation.kind, WeightError)(confirmation.message)
        self.prepared = manifest.version

    async def _drop(self) -> None:
        """Have every rank release what it has fetched, and what it is fetching when it has that."""
        gone, ended = EngineError(GONE), self._started.llm.output_handler
        with contextlib.suppress(Exception):  # what ended the fetch is raised; and where vLLM is gone, nothing is left
            await shield_until_done(self._call("asyncrl_drop_fetch"), ended=ended, ended_error=gone)

    def check(self, version: int) -> None:
        check_prepared(version, self.prepared)

    async def load(self, version: int) -> frozenset[str] | None:
        """Load the prepared version, and label what is sampled from now on. Only while nothing runs.

        Return the names of the adapters that changed; None where the weights did.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        llm = self._started.llm
        if self._adapters is not None:
            await self._call("asyncrl_load_adapters", self._adapters.numbers)
            await llm.update_weight_version(str(version))
            self.prepared = None
            return self._adapters.committed(self._parts)
        await llm.start_weight_update()
        await llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        await llm.finish_weight_update(weight_version=str(version))
        self.prepared = None
        return None

    async def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Return what each worker returns."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return list(await self._started.llm.collective_rpc(method, args=arguments))
        except EngineDeadError as error:
            raise EngineError(GONE) from error
