"""A rollout engine that lives in another process: one that is started here, or one that somebody else started.

    engine = RemoteEngine("path/to/model", engine="transformers")            # a process of its own
    engine = RemoteEngine("path/to/model", engine="vllm", python=".venv-vllm/bin/python")
    engine = RemoteEngine("", address="/run/user/1000/engine.sock")          # a server

The process ends with this one, whatever ends it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from asyncrl.errors import AsyncRLError, CodecError, ConfigError, EngineClosedError, EngineError, WeightError
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    PauseMode,
    RolloutEngineStatistics,
)
from asyncrl.parts import part_path
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.transport import TransportSpec
from engines.rollout.engine_protocol import (
    PROTOCOL,
    Abort,
    Answer,
    Call,
    Cancel,
    Chunk,
    Commit,
    EngineMessage,
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
    error_of,
)
from engines.rollout.process_spawner import ForkedProcess, ProcessSpawner

if TYPE_CHECKING:
    import torch

__all__ = ["RemoteEngine"]

_HEALTH_GRACE_S = 1.0  # what the answer to a probe may need beyond the probe's own deadline
_STANDARD_ERROR = 2  # by number: in a notebook sys.stderr is no file
_SOURCE_ROOT = Path(__file__).parents[2]

_Process: TypeAlias = asyncio.subprocess.Process | ForkedProcess


@dataclass(slots=True, eq=False)
class _Conversation:
    """An open connection, and who waits for what."""

    frames: Frames
    process: _Process | None
    pid: int
    streams: dict[int, asyncio.Queue[Chunk | AsyncRLError]] = field(default_factory=dict)
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)


class RemoteEngine:
    """A :class:`~asyncrl.interfaces.SeparateEngine`: everything is done by an engine in another process.

    Args:
        model_path: the hosted engine's first argument.
        engine: its entry point or dotted path.
        options: its keyword arguments.
        python: interpreter of the process, for engines with an environment of their own; this one's by default.
        address: Unix socket of an engine that is served already; nothing is started then, and ``close`` only hangs up.
        transport: where the engine's process pulls weights from.
        weight_version, dtype, threads, seed: options that a run gives to every engine; passed on where not None.
        start_s: how long loading the model may take.
        close_s: how long the process may take to end by itself when it is told to; then it is killed.
        log_path: where the process writes what it prints; by default, this process's standard error.
        environment: environment variables of the process, added to this one's.
        spawner: forks the process, if this engine can be forked; see :meth:`spawner`. It has an environment of its own.
    """

    def __init__(
        self,
        model_path: str,
        *,
        engine: str = "transformers",
        options: Mapping[str, Any] | None = None,
        python: str | None = None,
        address: str | None = None,
        transport: TransportSpec | None = None,
        weight_version: int | None = None,
        dtype: str | None = None,
        threads: int | None = None,
        seed: int | None = None,
        start_s: float = 600.0,
        close_s: float = 10.0,
        log_path: str | None = None,
        environment: Mapping[str, str] | None = None,
        spawner: ProcessSpawner | None = None,
    ) -> None:
        given = {"weight_version": weight_version, "dtype": dtype, "threads": threads, "seed": seed}
        own = {name: value for name, value in given.items() if value is not None}
        if python is not None:  # where entry points of this environment are not known
            engine = part_path("asyncrl.rollout_engines", engine, path="rollout.options.engine")
            if transport is not None:
                name = part_path("asyncrl.weight_transports", transport.name, path="weights.transport")
                transport = replace(transport, name=name)
        self._launch = Launch(
            engine=engine, model_path=model_path, options={**own, **(options or {})}, transport=transport
        )
        if address is not None and python is not None:
            raise ConfigError("python names what to start, address what is started already: give one", path="address")
        self._python = python
        self._address = address
        self._start_s = start_s
        self._close_s = close_s
        self._log_path = log_path
        self._environment = dict(environment or {})
        self._spawner = spawner
        if spawner is not None and (python or address or environment):
            raise ConfigError("a spawner forks processes of this Python and of its own environment", path="spawner")
        self._first_version = weight_version or 0
        self._starting = asyncio.Lock()
        self._conversation: _Conversation | None = None
        self._reading: asyncio.Task[None] | None = None
        self._statistics: RolloutEngineStatistics | None = None
        self._version = self._first_version
        self._gone = ""
        self._ended = asyncio.Event()
        self._closed = False

    @staticmethod
    def spawner(engine: str, model_path: str) -> ProcessSpawner:
        """Makes processes for any number of engines, and of those that take the places of dead ones, quickly."""
        return ProcessSpawner(engine, model_path)

    # ------------------------------------------------------------------------------------------------------- life

    @property
    def weight_version(self) -> int:
        """Version the next token will be sampled under, as of the last message."""
        return self._version

    @property
    def pid(self) -> int | None:
        """Process that hosts the engine; None before the start."""
        return None if self._conversation is None else self._conversation.pid

    async def start(self) -> None:
        """Start the process (or connect), and wait until it serves.

        Raises:
            EngineError: it died, could not load the model, or nobody answers at the address.
            ConfigError: the hosted engine's options are not its own.
        """
        async with self._starting:
            self._check_open()
            if self._conversation is not None:
                return
            try:
                async with asyncio.timeout(self._start_s):
                    self._conversation = await self._begin()
            except TimeoutError:
                raise EngineError(f"{self._name()} did not start within {self._start_s:g} s") from None
            self._reading = asyncio.create_task(self._read(self._conversation), name=f"reading {self._name()}")

    async def _begin(self) -> _Conversation:
        process = None
        if self._address is not None:
            try:
                reader, writer = await asyncio.open_unix_connection(self._address)
            except OSError as error:
                raise EngineError(f"nobody serves an engine at {self._address}: {error.strerror}") from error
        else:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                process = await self._spawn(theirs.fileno())
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        frames = Frames(reader, writer, receives=EngineMessage)
        try:
            frames.send(Hello(protocol=PROTOCOL, launch=None if process is None else self._launch))
            answer = await frames.receive()
            if answer is None:
                raise EngineError(f"{self._name()} ended while it started: {await _cause(process)}")
            if isinstance(answer, Failed):
                raise error_of(answer)
            if not isinstance(answer, Welcome) or answer.protocol != PROTOCOL:
                raise EngineError(f"{self._name()} does not speak protocol {PROTOCOL}")
        except BaseException:
            await frames.close()
            if process is not None:
                await _end(process, within_s=0.0)
            raise
        self._take(answer.statistics)
        return _Conversation(frames=frames, process=process, pid=answer.pid)

    async def _spawn(self, descriptor: int) -> _Process:
        if self._log_path is None:
            return await self._made(descriptor, log=_STANDARD_ERROR)
        log = await asyncio.to_thread(Path(self._log_path).open, "ab")
        with log:
            return await self._made(descriptor, log=log.fileno())

    async def _made(self, descriptor: int, *, log: int) -> _Process:
        if self._spawner is not None and (forked := await self._spawner.fork(descriptor, log=log)) is not None:
            return forked
        environment = {**os.environ, **self._environment}
        # Another environment need not have asyncrl installed: it gets the one that runs here. But not together with all
        # that is installed beside it: `asyncrl engine install` links asyncrl into the environments it makes.
        if self._python is None or _SOURCE_ROOT.name not in ("site-packages", "dist-packages"):
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(_SOURCE_ROOT), *filter(None, [environment.get("PYTHONPATH", "")])]
            )
        try:
            return await asyncio.create_subprocess_exec(
                self._python or sys.executable,
                "-m",
                "engines.rollout.engine_process",
                f"--descriptor={descriptor}",
                f"--parent={os.getpid()}",
                pass_fds=(descriptor,),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal is for us: some engines' own processes would end at it
            )
        except OSError as error:
            raise EngineError(f"{self._python or sys.executable} cannot be started: {error.strerror}") from error

    async def close(self) -> None:
        """Hang up, and end the process if it was started here."""
        self._closed = True
        async with self._starting:
            conversation, reading = self._conversation, self._reading
            if conversation is None or reading is None:
                self._ended.set()
                return
            await conversation.frames.close()
            if conversation.process is not None:
                await _end(conversation.process, within_s=self._close_s)
            await reading

    async def wait_ended(self) -> str:
        await self._ended.wait()
        return self._gone

    async def _read(self, conversation: _Conversation) -> None:
        """Hand out what arrives, until nothing does; then everybody who waits learns why."""
        try:
            while (message := await conversation.frames.receive()) is not None:
                self._handle(conversation, message)
            cause = await _cause(conversation.process)
        except CodecError as error:
            cause = str(error)
        self._gone = (
            "it was closed" if self._closed else f"{self._name()} (process {conversation.pid}) is gone: {cause}"
        )
        self._ended.set()
        for call in list(conversation.streams):
            conversation.streams[call].put_nowait(self._gone_error())
        for future in conversation.answers.values():
            if not future.done():
                future.set_exception(self._gone_error())

    def _handle(self, conversation: _Conversation, message: EngineMessage) -> None:
        if isinstance(message, Chunk):
            if message.statistics is not None:
                self._take(message.statistics)
            if (stream := conversation.streams.get(message.call)) is not None:
                stream.put_nowait(message)
        elif isinstance(message, Answer):
            self._take(message.statistics)
            if (future := conversation.answers.get(message.call)) is not None and not future.done():
                future.set_result(message.value)
        elif isinstance(message, Failed):
            if (stream := conversation.streams.get(message.call)) is not None:
                stream.put_nowait(error_of(message))
            if (future := conversation.answers.get(message.call)) is not None and not future.done():
                future.set_exception(error_of(message))

    def _take(self, statistics: RolloutEngineStatistics) -> None:
        self._statistics = statistics
        self._version = max(self._version, statistics.weight_version)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def _serving(self) -> _Conversation:
        self._check_open()
        if self._conversation is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        if self._ended.is_set():
            raise self._gone_error()
        return self._conversation

    def _gone_error(self) -> EngineError:
        return EngineClosedError("the engine was closed meanwhile") if self._closed else EngineError(self._gone)

    def _name(self) -> str:
        return f"engine at {self._address}" if self._address is not None else f"engine {self._launch.engine}"

    # --------------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        conversation = self._serving()
        sampling = request.sampling
        if sampling.seed is not None:  # 64 bits of it count, and more do not fit into a message
            request = replace(request, sampling=replace(sampling, seed=sampling.seed & (2**64 - 1)))
        call = next(conversation.numbers)
        stream = conversation.streams[call] = asyncio.Queue()
        ended = False
        try:
            conversation.frames.send(Generate(call, request))
            while not ended:
                message = await stream.get()
                if isinstance(message, AsyncRLError):
                    ended = True
                    raise message
                ended = message.finish_reason is not None
                yield GenerationChunk(
                    token_ids=message.token_ids,
                    log_probs=message.log_probs,
                    weight_versions=message.weight_versions,
                    finish_reason=message.finish_reason,
                    top_log_probs=message.top_log_probs,
                )
        finally:
            del conversation.streams[call]
            if not ended:
                conversation.frames.send(Cancel(call))

    async def _ask(self, make: type[Call], *arguments: Any) -> Any:
        """Send a call and wait for its answer; a caller that goes away takes the call back."""
        conversation = self._serving()
        call = next(conversation.numbers)
        answer = conversation.answers[call] = asyncio.get_running_loop().create_future()
        try:
            conversation.frames.send(make(call, *arguments))
            return await answer
        except asyncio.CancelledError:
            conversation.frames.send(Cancel(call))
            raise
        finally:
            del conversation.answers[call]

    async def abort(self, request_id: str) -> bool:
        return bool(await self._ask(Abort, request_id))

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._ask(Pause, mode)

    async def resume(self) -> None:
        await self._ask(Resume)

    async def sleep(self) -> None:
        """As the hosted engine's.

        Raises:
            EngineError: it is none that can sleep.
        """
        await self._ask(Sleep)

    async def wake(self) -> None:
        """As the hosted engine's."""
        await self._ask(Wake)

    # ---------------------------------------------------------------------------------------------------- weights

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Publish the tensors through a transport of this engine's own, and have the process pull them."""
        self._serving()
        if self._launch.transport is None:
            raise WeightError("the engine was made without a transport: it cannot be given weights")
        transport = await asyncio.to_thread(self._launch.transport.make)
        try:
            manifest = await asyncio.to_thread(transport.publish, tensors.items(), version=version)
            await self.fetch_weights(manifest)
        finally:
            await asyncio.to_thread(transport.close)

    async def fetch_weights(self, manifest: WeightManifest) -> None:
        await self._ask(Prepare, manifest)

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        await self._ask(Commit, version, kv_cache)

    # ----------------------------------------------------------------------------------------------- observation

    async def health(self, deadline_s: float) -> EngineHealth:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with asyncio.timeout(deadline_s + _HEALTH_GRACE_S):
                return msgspec.convert(await self._ask(Health, deadline_s), EngineHealth)
        except TimeoutError:
            error = f"no answer within {deadline_s + _HEALTH_GRACE_S:g} s"
        except EngineError as failure:
            error = str(failure)
        return EngineHealth(healthy=False, latency_s=loop.time() - begin, weight_version=self._version, error=error)

    async def refresh(self) -> RolloutEngineStatistics:
        """Statistics of this moment."""
        await self._ask(Statistics)
        return self.statistics()

    def statistics(self) -> RolloutEngineStatistics:
        """As of the last answer or the last request that ended; :meth:`refresh` asks for newer ones."""
        if self._statistics is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        return self._statistics


async def _cause(process: _Process | None) -> str:
    """Why a process that hung up is gone; waits for its end a moment, and ends it."""
    if process is None:
        return "it hung up"
    status = await _end(process, within_s=1.0)
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"it exited with status {status}"


async def _end(process: _Process, *, within_s: float) -> int:
    """The status of a process, which is killed if it does not end by itself in time."""
    try:
        async with asyncio.timeout(within_s):
            return await process.wait()
    except TimeoutError:
        process.kill()
        return await process.wait()
