"""A rollout engine in another process, which ends with this one, however this one ends.

engine = RemoteEngine("path/to/model", engine="transformers")
engine = RemoteEngine("path/to/model", engine="vllm", python=".venv-vllm/bin/python")
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from msgspec.structs import replace

from asyncrl.errors import AsyncRLError, CodecError, EngineClosedError, EngineError, WeightError, WeightVersionError
from asyncrl.interfaces import (
    EngineHealth,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    OutOfProcessEngine,
    RolloutEngineStatistics,
)
from asyncrl.plugins import part_path
from asyncrl.runtime import in_thread
from asyncrl.single_controller.children import children, kill_stopped
from asyncrl.weights import TransportSpec, WeightManifest
from engines.rollout.remote.protocol import (
    PROTOCOL,
    Abort,
    Answer,
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
    Order,
    Pause,
    Prepare,
    Resume,
    Sleep,
    Wake,
    Welcome,
)

if TYPE_CHECKING:
    import torch

_HEALTH_GRACE_S = 1.0  # what the answer to a probe may need beyond the probe's own deadline
_STANDARD_ERROR = 2  # by number: in a notebook sys.stderr is no file
_SOURCE_ROOT = Path(__file__).parents[3]


@dataclass(slots=True, eq=False)
class _Connection:
    frames: Frames
    process: asyncio.subprocess.Process
    streams: dict[int, asyncio.Queue[Chunk | AsyncRLError]] = field(default_factory=dict)
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)


class RemoteEngine:
    """Client of an engine in another process, an OutOfProcessEngine and SleepingEngine of :mod:`asyncrl.interfaces`.

    Args:
        model_path, engine, options: the hosted engine's first argument, its entry point or dotted path, its keywords.
        python: interpreter of the process, for engines with an environment of their own; this one's by default.
        transport: where the engine's process pulls weights from.
        weight_version, dtype, threads, seed, max_adapter_rank: options of a run for every engine; passed on where not
            None.
        start_s: most seconds that loading the model may take.
        close_s: most seconds that the process may take to end by itself when it is closed; then it is killed.
        log_path: where the process writes its output; by default, this process's standard error.
        environment: environment variables of the process, added to this one's.
    """

    pulls_weights: ClassVar[bool] = True
    proves_commits: ClassVar[bool] = True
    sleep_options: ClassVar[Mapping[str, Any]] = {}
    """The hosted engine's are ``options`` of its own."""

    def __init__(
        self,
        model_path: str,
        *,
        engine: str = "transformers",
        options: Mapping[str, Any] | None = None,
        python: str | None = None,
        transport: TransportSpec | None = None,
        weight_version: int | None = None,
        dtype: str | None = None,
        threads: int | None = None,
        seed: int | None = None,
        max_adapter_rank: int | None = None,
        start_s: float = 600.0,
        close_s: float = 10.0,
        log_path: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        given = {"weight_version": weight_version, "dtype": dtype, "threads": threads, "seed": seed}
        given["max_adapter_rank"] = max_adapter_rank
        given = {name: value for name, value in given.items() if value is not None}
        if python is not None:  # where entry points of this environment are not known
            engine = part_path("asyncrl.rollout_engines", engine, path="rollout.options.engine")
            if transport is not None:
                name = part_path("asyncrl.weight_transports", transport.name, path="weights.transport")
                transport = dataclasses.replace(transport, name=name)
        self._launch = Launch(
            engine=engine, model_path=model_path, options={**given, **(options or {})}, transport=transport
        )
        self._name = f"engine {engine}"
        self._python = python
        self._start_s = start_s
        self._close_s = close_s
        self._log_path = log_path
        self._environment = dict(environment or {})
        self._starting = asyncio.Lock()
        self._connection: _Connection | None = None
        self._reading: asyncio.Task[None] | None = None
        self._statistics: RolloutEngineStatistics | None = None
        self._version = weight_version or 0
        self._ended = asyncio.Event()
        self._ended_because = ""
        self._closed = False

    # ------------------------------------------------------------------------------------------------ start and close

    @property
    def weight_version(self) -> int:
        """Return the version that the next token will be sampled under, as of the last message."""
        return self._version

    @property
    def pid(self) -> int | None:
        return None if self._connection is None else self._connection.process.pid

    async def start(self) -> None:
        """Start the process, and wait until it serves.

        Raises:
            EngineError: it died, or could not load the model.
            ConfigError: the hosted engine does not take its options.
        """
        async with self._starting:
            self._check_open()
            if self._connection is not None:
                return
            try:
                async with asyncio.timeout(self._start_s):
                    self._connection = await self._connect()
            except TimeoutError:
                raise EngineError(f"{self._name} did not start within {self._start_s:g} s") from None
            self._reading = asyncio.create_task(self._read(self._connection), name=f"reading {self._name}")

    async def _connect(self) -> _Connection:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, children.starting(f"the process of {self._name}"):
            process = await self._start_process(theirs.fileno())
        children.add(process.pid, f"the process {process.pid} of {self._name}")
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        frames = Frames(reader, writer, receives=EngineMessage)
        try:
            frames.send(Hello(protocol=PROTOCOL, launch=self._launch))
            answer = await frames.receive()
            if answer is None:
                raise EngineError(f"{self._name} ended while it started: {await _cause(process)}")
            if isinstance(answer, Failed):
                raise answer.error()
            if not isinstance(answer, Welcome) or answer.protocol != PROTOCOL:
                raise EngineError(f"{self._name} does not speak protocol {PROTOCOL}")
        except BaseException:
            frames.abort()
            await _end(process, within_s=0.0)
            raise
        self._update(answer.statistics)
        return _Connection(frames=frames, process=process)

    async def _start_process(self, descriptor: int) -> asyncio.subprocess.Process:
        environment = {**os.environ, **self._environment}
        # Another environment need not have asyncrl installed: it gets the one that runs here. But not together with all
        # that is installed beside it: `asyncrl engine install` links asyncrl into the environments it makes.
        if self._python is None or _SOURCE_ROOT.name not in ("site-packages", "dist-packages"):
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(_SOURCE_ROOT), *filter(None, [environment.get("PYTHONPATH", "")])]
            )
        python = self._python or sys.executable
        with ExitStack() as files:
            log: Any = _STANDARD_ERROR
            if self._log_path is not None:
                log = files.enter_context(await asyncio.to_thread(Path(self._log_path).open, "ab"))
            try:
                return await asyncio.create_subprocess_exec(
                    *(python, "-m", "engines.rollout.remote.process"),
                    *(f"--descriptor={descriptor}", f"--parent={os.getpid()}"),
                    pass_fds=(descriptor,),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C in a terminal is for us; some engines' processes would end at it
                )
            except OSError as error:
                raise EngineError(f"{python} cannot be started: {error.strerror}") from error

    async def close(self) -> None:
        self._closed = True
        async with self._starting:
            connection, reading = self._connection, self._reading
            if connection is None or reading is None:
                self._ended.set()
                return
            connection.frames.abort()  # a process that reads no more would never take what is queued
            await _end(connection.process, within_s=self._close_s)
            await reading

    async def wait_ended(self) -> str:
        await self._ended.wait()
        return self._ended_because

    async def _read(self, connection: _Connection) -> None:
        """Pass each message to its call until the connection ends; then fail every call with the cause."""
        try:
            while (message := await connection.frames.receive()) is not None:
                self._handle(connection, message)
            cause = "" if self._closed else await _cause(connection.process)  # close() gives the process its own time
        except CodecError as error:
            cause = str(error)
        self._ended_because = (
            "it was closed" if self._closed else f"{self._name} (process {connection.process.pid}) is gone: {cause}"
        )
        self._ended.set()
        for call in {*connection.streams, *connection.answers}:
            _fail(connection, call, self._ended_error())

    def _handle(self, connection: _Connection, message: EngineMessage) -> None:
        if isinstance(message, Failed):
            _fail(connection, message.call, message.error())
        elif isinstance(message, Chunk):
            if message.statistics is not None:
                self._update(message.statistics)
            if (stream := connection.streams.get(message.call)) is not None:
                stream.put_nowait(message)
        elif isinstance(message, Answer):
            self._update(message.statistics)
            if (answer := connection.answers.get(message.call)) is not None and not answer.done():
                answer.set_result(message.value)

    def _update(self, statistics: RolloutEngineStatistics) -> None:
        self._statistics = statistics
        self._version = max(self._version, statistics.weight_version)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")

    def _serving(self) -> _Connection:
        self._check_open()
        if self._connection is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        if self._ended.is_set():
            raise self._ended_error()
        return self._connection

    def _ended_error(self) -> EngineError:
        if self._closed:
            return EngineClosedError("the engine was closed meanwhile")
        return EngineError(self._ended_because)

    # ---------------------------------------------------------------------------------------------------------- calls

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        connection = self._serving()
        sampling = request.sampling
        if sampling.seed is not None:  # 64 bits of it count, and more do not fit into a message
            request = replace(request, sampling=replace(sampling, seed=sampling.seed & (2**64 - 1)))
        call = next(connection.numbers)
        stream = connection.streams[call] = asyncio.Queue()
        ended = False
        try:
            connection.frames.send(Generate(call, request))
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
                    prompt_log_probs=message.prompt_log_probs,
                    prompt_top_log_probs=message.prompt_top_log_probs,
                )
        finally:
            del connection.streams[call]
            if not ended:
                connection.frames.send(Cancel(call))

    async def _call(self, make: type[Order], *arguments: Any) -> Any:
        connection = self._serving()
        call = next(connection.numbers)
        answer = connection.answers[call] = asyncio.get_running_loop().create_future()
        try:
            connection.frames.send(make(call, *arguments))
            return await answer
        except asyncio.CancelledError:
            connection.frames.send(Cancel(call))
            raise
        finally:
            del connection.answers[call]

    async def abort(self, request_id: str) -> bool:
        return bool(await self._call(Abort, request_id))

    async def pause(self) -> None:
        await self._call(Pause)

    async def resume(self) -> None:
        await self._call(Resume)

    async def sleep(self) -> None:
        """As the hosted engine's; raises EngineError where it is no SleepingEngine."""
        await self._call(Sleep)

    async def wake(self) -> None:
        await self._call(Wake)

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Publish the tensors through the engine's transport, and have the process pull them."""
        self._serving()
        await publish_into(self, tensors, version=version, spec=self._launch.transport)

    async def fetch_weights(self, manifest: WeightManifest) -> None:
        await self._call(Prepare, manifest)

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        await self._call(Commit, version, kv_cache)

    async def health(self, deadline_s: float) -> EngineHealth:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            async with asyncio.timeout(deadline_s + _HEALTH_GRACE_S):
                return msgspec.convert(await self._call(Health, deadline_s), EngineHealth)
        except TimeoutError:
            error = f"no answer within {deadline_s + _HEALTH_GRACE_S:g} s"
        except EngineError as failure:
            error = str(failure)
        return EngineHealth(healthy=False, latency_s=loop.time() - begin, weight_version=self._version, error=error)

    def statistics(self) -> RolloutEngineStatistics:
        """Return the statistics of the last answer or ended request."""
        if self._statistics is None:
            raise EngineError("the engine has not been started: await engine.start() first")
        return self._statistics


async def publish_into(
    engine: OutOfProcessEngine, tensors: Mapping[str, torch.Tensor], *, version: int, spec: TransportSpec | None
) -> None:
    """Publish tensors through a transport made for this purpose, and have ``engine`` pull them.

    Raises:
        WeightVersionError: ``version`` is not newer than the engine's.
        WeightError: there is no transport, or as :meth:`OutOfProcessEngine.fetch_weights`.
    """
    if version <= engine.weight_version:  # a fetch of the version that is held does nothing, whatever its bytes
        raise WeightVersionError(
            f"weight version {version} does not follow version {engine.weight_version}: versions grow"
        )
    if spec is None:
        raise WeightError("the engine was made without a transport, so it takes no weights: give transport=")
    transport = await in_thread(spec.make)
    try:
        manifest = await in_thread(transport.publish, tensors.items(), version=version)
        await engine.fetch_weights(manifest)
    finally:
        await in_thread(transport.close)


def _fail(connection: _Connection, call: int, error: AsyncRLError) -> None:
    if (stream := connection.streams.get(call)) is not None:
        stream.put_nowait(error)
    if (answer := connection.answers.get(call)) is not None and not answer.done():
        answer.set_exception(error)


async def _cause(process: asyncio.subprocess.Process) -> str:
    """Return why a process that hung up has ended; one that has not ended within a second is killed."""
    status = await _end(process, within_s=1.0)
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"it exited with status {status}"


async def _end(process: asyncio.subprocess.Process, *, within_s: float) -> int:
    try:
        async with asyncio.timeout(within_s):
            return await process.wait()
    except TimeoutError:
        await asyncio.to_thread(kill_stopped, process.pid)
        return await process.wait()
    except asyncio.CancelledError:  # it is not watched from now on
        kill_stopped(process.pid)
        raise
    finally:
        children.remove(process.pid)
