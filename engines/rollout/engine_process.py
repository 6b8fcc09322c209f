"""Hosts a rollout engine in a process of its own, behind a Unix socket.

    python -m engines.rollout.engine_process --listen /run/user/1000/engine.sock --engine transformers MODEL

serves whoever may open the socket (mode 0600: this user). A process that
:class:`engines.rollout.remote_engine.RemoteEngine` starts inherits one end of a socket pair instead, is told through
it what to host, and ends with it: when its parent dies, the kernel kills it.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import stat
import sys
import traceback
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, cast

from asyncrl.errors import AsyncRLError, CodecError, ConfigError, EngineError, InvalidDataError
from asyncrl.garbage import settle_memory
from asyncrl.interfaces import GenerationChunk, RolloutEngine, SeparateEngine, SleepingEngine, WeightTransport
from asyncrl.parts import load_part, make_part
from asyncrl.rollout.weight_fetch import fetch_into
from asyncrl.weights.transport import TransportSpec
from engines.rollout.engine_protocol import (
    PROTOCOL,
    Abort,
    Answer,
    Call,
    Cancel,
    Chunk,
    Commit,
    DriverMessage,
    Failed,
    Frames,
    Generate,
    Health,
    Hello,
    Launch,
    Pause,
    Prepare,
    Resume,
    Sleep,
    Statistics,
    Wake,
    Welcome,
)
from engines.rollout.tied_process import end_with

__all__ = ["EngineHost", "die_with_parent", "log_to_standard_error", "main", "serve_parent"]

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
ENGINE_PROCESS = "ASYNCRL_ENGINE_PROCESS"
"""Environment variable of the processes that an engine starts: the number of the one that they work for."""


class EngineHost:
    """An engine and the conversations about it.

    Attributes:
        gone: why the engine ended by itself; empty while it has not.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.gone = ""
        part = load_part("asyncrl.rollout_engines", launch.engine, path="engine.name")
        fetches = "transport" in signature(part).parameters  # by itself, in processes of its own
        given: dict[str, Any] = {"transport": launch.transport} if fetches else {}
        self._engine: RolloutEngine = make_part(
            "asyncrl.rollout_engines",
            launch.engine,
            launch.model_path,
            options=launch.options,
            path="engine.name",
            **given,
        )
        self._transport: WeightTransport | None = None
        if launch.transport is not None and not fetches:
            self._transport = launch.transport.make()

    async def start(self) -> None:
        """Load the model."""
        await self._engine.start()
        settle_memory()

    async def close(self) -> None:
        """Free everything."""
        await self._engine.close()
        if self._transport is not None:
            self._transport.close()

    async def converse(self, frames: Frames) -> None:
        """Welcome a driver and do what it asks until it hangs up; what it had running is cancelled then."""
        engine = self._engine
        frames.send(Welcome(protocol=PROTOCOL, pid=os.getpid(), statistics=engine.statistics()))
        running: dict[int, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as calls:
            watching = calls.create_task(self._hang_up_when_gone(frames))
            while (message := await frames.receive()) is not None:
                if isinstance(message, Cancel):
                    if message.call in running:
                        running[message.call].cancel()
                    continue
                if isinstance(message, Hello) or message.call in running:
                    break  # out of order: not a driver of this protocol
                running[message.call] = task = calls.create_task(self._answer(message, frames))
                task.add_done_callback(partial(_forget, running, message.call))
            watching.cancel()
            for task in running.values():
                task.cancel()

    async def wait_ended(self) -> None:
        """Wait until the engine is gone, for one that has processes of its own; for ever, if it has none."""
        if isinstance(self._engine, SeparateEngine):
            self.gone = await self._engine.wait_ended()
            _log.error("the engine is gone: %s", self.gone)
        else:
            await asyncio.get_running_loop().create_future()

    async def _hang_up_when_gone(self, frames: Frames) -> None:
        await self.wait_ended()
        await frames.close()

    async def _answer(self, call: Call, frames: Frames) -> None:
        try:
            if isinstance(call, Generate):
                await self._generate(call, frames)
            else:
                value = await self._do(call)
                frames.send(Answer(call.call, self._engine.statistics(), value))
        except AsyncRLError as error:
            frames.send(Failed(call.call, type(error).__name__, str(error)))
        except Exception as error:  # noqa: BLE001 - told to the driver, with its place in this process's log
            traceback.print_exc()
            frames.send(Failed(call.call, type(error).__name__, str(error)))

    async def _generate(self, call: Generate, frames: Frames) -> None:
        stream = cast("AsyncGenerator[GenerationChunk, None]", self._engine.generate(call.request))
        async with aclosing(stream):
            async for chunk in stream:
                statistics = None if chunk.finish_reason is None else self._engine.statistics()
                frames.send(
                    Chunk(
                        call.call,
                        chunk.token_ids,
                        chunk.log_probs,
                        chunk.weight_versions,
                        chunk.finish_reason,
                        statistics,
                        chunk.top_log_probs,
                    )
                )
                await frames.drain()

    async def _do(self, call: Abort | Pause | Resume | Sleep | Wake | Prepare | Commit | Health | Statistics) -> Any:
        engine = self._engine
        match call:
            case Abort(request_id=request_id):
                return await engine.abort(request_id)
            case Pause(mode=mode):
                return await engine.pause(mode)
            case Resume():
                return await engine.resume()
            case Sleep() | Wake():
                if not isinstance(engine, SleepingEngine):
                    raise EngineError(f"{type(engine).__name__} cannot give its memory back: it does not sleep")
                return await (engine.sleep() if isinstance(call, Sleep) else engine.wake())
            case Prepare(manifest=manifest):
                return await fetch_into(engine, manifest, transport=self._transport)
            case Commit(version=version, kv_cache=kv_cache):
                return await engine.commit_weights(version, kv_cache=kv_cache)
            case Health(deadline_s=deadline_s):
                return asdict(await engine.health(deadline_s))
            case Statistics():
                return None


def _forget(running: dict[int, asyncio.Task[None]], call: int, _task: asyncio.Task[None]) -> None:
    del running[call]


async def serve_parent(descriptor: int) -> None:
    """Host what the parent says, until it hangs up."""
    # While any process holds a copy, the parent does not hear that this one has died.
    os.set_inheritable(descriptor, False)
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))
    frames = Frames(reader, writer, receives=DriverMessage)
    hello = await frames.receive()
    if hello is None:
        return
    host = None
    try:
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL or hello.launch is None:
            raise InvalidDataError(f"expected a Hello of protocol {PROTOCOL} that says what to host")
        host = EngineHost(hello.launch)
        await host.start()
    except AsyncRLError as error:
        frames.send(Failed(-1, type(error).__name__, str(error)))
    except Exception as error:  # noqa: BLE001 - told to the parent, with its place in this process's log
        traceback.print_exc()
        frames.send(Failed(-1, "EngineError", f"{type(error).__name__}: {error}"))
    else:
        await host.converse(frames)
    await frames.close()
    if host is not None:
        if host.gone:
            os._exit(1)  # what is left to be closed waits for what is gone; the parent waits for this process
        await host.close()


async def _serve_all(path: Path, launch: Launch) -> None:
    """Host an engine for every driver that connects, until SIGTERM or SIGINT."""
    host = EngineHost(launch)
    await host.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def driver(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = Frames(reader, writer, receives=DriverMessage)
        try:
            hello = await frames.receive()
            if isinstance(hello, Hello) and hello.protocol == PROTOCOL and hello.launch is None:
                await host.converse(frames)
            else:
                frames.send(Failed(-1, "InvalidDataError", f"expected a Hello of protocol {PROTOCOL}, without Launch"))
        except* CodecError as errors:  # a conversation has tasks, and fails as a group of them
            _log.warning("a driver was hung up on: %s", errors.exceptions[0])
        finally:
            await frames.close()

    server = await asyncio.start_unix_server(driver, sock=_bind(path))
    try:
        _log.info("engine %s of %s serves at %s", launch.engine, launch.model_path, path)
        async with asyncio.TaskGroup() as waits:
            ending = waits.create_task(host.wait_ended())
            ending.add_done_callback(lambda task: stop.set())
            await stop.wait()
            ending.cancel()
    finally:
        server.close()
        await host.close()
    if host.gone:
        sys.exit(1)


def _bind(path: Path) -> socket.socket:
    """A socket at ``path`` that only this user may open. A dead one's place is taken, a living one's not."""
    if path.exists():
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} is there and is no socket", path="--listen")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise ConfigError(f"an engine serves at {path} already", path="--listen")
        path.unlink()
    bound = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        bound.bind(str(path))
    finally:
        os.umask(before)
    return bound


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, however busy it is then (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be asked about
        os._exit(1)


def log_to_standard_error() -> None:
    """Vendors' warnings, and what we have to say, whatever level a vendor sets later."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    for ours in ("asyncrl", "engines", "__main__"):
        logging.getLogger(ours).setLevel(logging.INFO)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; see the module's page."""
    parser = argparse.ArgumentParser(prog="engine_process", description="Host a rollout engine behind a Unix socket.")
    parser.add_argument("model", nargs="?", default="", help="model folder")
    parser.add_argument("--listen", type=Path, help="serve at this path, mode 0600")
    parser.add_argument("--engine", default="transformers", help="entry point or dotted path")
    parser.add_argument("--options", type=json.loads, default={}, help="keyword arguments of the engine, as JSON")
    parser.add_argument("--transport", default="shared_memory", help="where weights are pulled from")
    parser.add_argument("--namespace", help="namespace of the weights; without it the engine gets none")
    parser.add_argument("--descriptor", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    log_to_standard_error()
    os.environ[ENGINE_PROCESS] = str(os.getpid())
    if given.descriptor is not None:
        die_with_parent(given.parent)
        asyncio.run(serve_parent(given.descriptor))
    elif given.listen is None or not given.model:
        parser.error("--listen PATH and a model are needed")
    else:
        transport = None
        if given.namespace is not None:
            transport = TransportSpec(name=given.transport, namespace=given.namespace)
        launch = Launch(engine=given.engine, model_path=given.model, options=given.options, transport=transport)
        try:
            asyncio.run(_serve_all(given.listen, launch))
        finally:
            given.listen.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
if __name__ == "__mp_main__":  # multiprocessing imports this first in a process that an engine spawns
    end_with(int(os.environ[ENGINE_PROCESS]))
