"""Hosts a rollout engine in a process of its own, behind a Unix socket.

The process, which :class:`engines.rollout.remote.engine.RemoteEngine` starts, inherits one end of a socket pair,
receives through it which engine to host, and ends with its parent: the kernel kills it when the parent dies.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from asyncrl.errors import AsyncRLError, EngineError, InvalidDataError
from asyncrl.interfaces import GenerationChunk, OutOfProcessEngine, RolloutEngine, SleepingEngine
from asyncrl.plugins import load_part, make_part
from asyncrl.rollout.live_weights import commit_into
from asyncrl.rollout.replica import fetch_into
from asyncrl.runtime import freeze_gc
from asyncrl.weights import WeightManifest, WeightTransport
from engines.rollout.remote.protocol import (
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
    Order,
    Pause,
    Prepare,
    Resume,
    Sleep,
    Wake,
    Welcome,
)

_log = logging.getLogger(__name__)
_ENGINES = "asyncrl.rollout_engines"
_PR_SET_PDEATHSIG = 1
_PROCESS_ID = "ASYNCRL_ENGINE_PROCESS"
"""Environment variable for the processes that an engine starts: the id of the engine's own process."""


class EngineHost:
    """An engine and the connection to it. ``failure`` is set when the engine has ended by itself, to the cause."""

    def __init__(self, launch: Launch) -> None:
        self.failure = ""
        pulls = load_part(_ENGINES, launch.engine, path="engine.name").pulls_weights
        given: dict[str, Any] = {"transport": launch.transport} if pulls else {}
        self._engine: RolloutEngine = make_part(
            _ENGINES, launch.engine, launch.model_path, options=launch.options, path="engine.name", **given
        )
        self._transport: WeightTransport | None = None
        self._manifest: WeightManifest | None = None
        if launch.transport is not None and not pulls:
            self._transport = launch.transport.make()

    async def start(self) -> None:
        await self._engine.start()
        freeze_gc()

    async def close(self) -> None:
        await self._engine.close()
        if self._transport is not None:
            self._transport.close()

    async def serve(self, frames: Frames) -> None:
        """Carry out a driver's calls until the connection ends; calls that still run are cancelled then."""
        frames.send(Welcome(protocol=PROTOCOL, statistics=self._engine.statistics()))
        running: dict[int, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._hang_up_when_ended(frames))
            while (message := await frames.receive()) is not None:
                if isinstance(message, Cancel):
                    if message.call in running:
                        running[message.call].cancel()
                    continue
                if isinstance(message, Hello) or message.call in running:
                    break  # not a driver of this protocol
                running[message.call] = task = tasks.create_task(self._answer(message, frames))
                task.add_done_callback(partial(_discard, running, message.call))
            watching.cancel()
            for task in running.values():
                task.cancel()

    async def wait_ended(self) -> None:
        """Wait until the engine has ended by itself, as one with processes of its own may; for ever with others."""
        if not isinstance(self._engine, OutOfProcessEngine):
            await asyncio.get_running_loop().create_future()
            return
        self.failure = await self._engine.wait_ended()
        _log.error("the engine has ended: %s", self.failure)

    async def _hang_up_when_ended(self, frames: Frames) -> None:
        await self.wait_ended()
        await frames.close()

    async def _answer(self, call: Call, frames: Frames) -> None:
        try:
            if isinstance(call, Generate):
                await self._generate(call, frames)
            else:
                value = await self._carry_out(call)
                frames.send(Answer(call.call, self._engine.statistics(), value))
        except AsyncRLError as error:
            frames.send(Failed(call.call, type(error).__name__, str(error)))
        except Exception as error:  # noqa: BLE001 - sent to the driver; this process's log shows where it came from
            traceback.print_exc()
            frames.send(Failed(call.call, type(error).__name__, str(error)))

    async def _generate(self, call: Generate, frames: Frames) -> None:
        stream = cast("AsyncGenerator[GenerationChunk, None]", self._engine.generate(call.request))
        async with aclosing(stream):
            async for chunk in stream:
                frames.send(
                    Chunk(
                        call.call,
                        chunk.token_ids,
                        chunk.log_probs,
                        chunk.weight_versions,
                        chunk.finish_reason,
                        None if chunk.finish_reason is None else self._engine.statistics(),
                        chunk.top_log_probs,
                        chunk.prompt_log_probs,
                        chunk.prompt_top_log_probs,
                    )
                )
                await frames.drain()

    async def _carry_out(self, order: Order) -> Any:
        engine = self._engine
        match order:
            case Abort(request_id=request_id):
                return await engine.abort(request_id)
            case Pause():
                return await engine.pause()
            case Resume():
                return await engine.resume()
            case Sleep() | Wake():
                if not isinstance(engine, SleepingEngine):
                    raise EngineError(f"{type(engine).__name__} cannot give its memory back: it does not sleep")
                return await (engine.sleep() if isinstance(order, Sleep) else engine.wake())
            case Prepare(manifest=manifest):
                self._manifest = manifest
                return await fetch_into(engine, manifest, transport=self._transport)
            case Commit(version=version, kv_cache=kv_cache):
                # The driver compares the canary: through the protocol, as any request.
                await commit_into(engine, version, kv_cache=kv_cache, manifest=self._manifest, canary=False)
                return None
            case Health(deadline_s=deadline_s):
                return asdict(await engine.health(deadline_s))


def _discard(running: dict[int, asyncio.Task[None]], call: int, _task: asyncio.Task[None]) -> None:
    del running[call]


async def serve_parent(descriptor: int) -> None:
    """Host the engine that the parent's Hello names, until the parent hangs up."""
    # As long as a child of this process holds a copy, the parent does not notice that this process has died.
    os.set_inheritable(descriptor, False)
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor))
    frames = Frames(reader, writer, receives=DriverMessage)
    hello = await frames.receive()
    if hello is None:
        return
    host = None
    try:
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            raise InvalidDataError(f"expected a Hello of protocol {PROTOCOL}")
        host = EngineHost(hello.launch)
        await host.start()
    except AsyncRLError as error:
        frames.send(Failed(-1, type(error).__name__, str(error)))
    except Exception as error:  # noqa: BLE001 - sent to the parent; this process's log shows where it came from
        traceback.print_exc()
        frames.send(Failed(-1, "EngineError", f"{type(error).__name__}: {error}"))
    else:
        await host.serve(frames)
    await frames.close()
    if host is not None:
        if host.failure:
            os._exit(1)  # closing would wait for the processes that have died, and the parent waits for this one
        await host.close()


# ------------------------------------------------------------------------------------------ processes that end together


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process, however busy it is, when the thread that made it ends (Linux)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def end_with(process: int) -> None:
    """Kill this process when ``process`` ends; at once if it has ended.

    For processes that vendors make, from threads that end before the process does.
    """
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)

    def watch() -> None:
        ended.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watching the engine's process", daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser(prog="engine_process", description="Host a rollout engine for its parent.")
    parser.add_argument("--descriptor", type=int, required=True, help="this end of the socket pair")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    for ours in ("asyncrl", "engines", "__main__"):  # whatever level a vendor sets later
        logging.getLogger(ours).setLevel(logging.INFO)
    os.environ[_PROCESS_ID] = str(os.getpid())
    die_with_parent(given.parent)
    asyncio.run(serve_parent(given.descriptor))


if __name__ == "__main__":
    main()
if __name__ == "__mp_main__":  # multiprocessing imports this first in a process that an engine spawns
    end_with(int(os.environ[_PROCESS_ID]))
