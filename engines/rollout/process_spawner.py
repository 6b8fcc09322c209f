"""Forks engines' processes from one that has everything imported: a replica that died is back in tenths of a second.

    spawner = ProcessSpawner("transformers", "path/to/model")
    engine = RemoteEngine("path/to/model", engine="transformers", spawner=spawner)

A process of an engine spends nearly all of its start importing torch and transformers: four seconds of processor time,
which the replicas that are alive lack meanwhile. The spawner (``python -m engines.rollout.process_spawner``) imports
them once and forks; replicas share the pages of what was imported.

Forking is sound because of what the spawner does *not* do. It has one thread (it counts them, and refuses to fork with
more: locks that another thread holds at that moment would stay locked for ever in the child), no event loop, no
OpenMP region before (whose threads a fork does not copy), no CUDA, no sockets but its own, and it loads no model and
no tokenizer. An engine says with a static method ``import_for_fork(model_path)`` that it may be forked, and imports
there what its processes will need; the spawner does not fork others.

It is nobody's single point of failure: a forked process watches the process that it works for, not the spawner. The
kernel kills it, however busy it is, when the last writing end of a pipe closes that only that process holds (O_ASYNC
with F_SETSIG). A spawner that dies is started again by the next fork.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import gc
import logging
import os
import select
import selectors
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asyncrl.errors import AsyncRLError, EngineError
from asyncrl.parts import load_part
from engines.rollout.engine_process import die_with_parent, log_to_standard_error, serve_parent

__all__ = ["ForkedProcess", "ProcessSpawner", "main"]

_log = logging.getLogger(__name__)
_STANDARD_ERROR = 2  # by number: in a notebook sys.stderr is no file
_PACKET_BYTES = 1 << 16
_SOURCE_ROOT = Path(__file__).parents[2]
_UNSEEN = 255  # the status of a process that ended without the spawner to see it; asyncio's word for it, too


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The spawner: everything is imported. ``problem`` tells why nothing will be forked; empty if it will.

    ``expected``: that is no surprise, for the engine is not made for it.
    """

    problem: str = ""
    expected: bool = False


class Fork(msgspec.Struct, tag=True, frozen=True):
    """To the spawner, with three descriptors: the engine's socket, the reading end of the pipe, standard error."""

    number: int


class Forked(msgspec.Struct, tag=True, frozen=True):
    """It is done, and a descriptor of the process comes along (pidfd); or, with a ``problem``, it is not."""

    number: int
    pid: int = 0
    problem: str = ""


class Exited(msgspec.Struct, tag=True, frozen=True):
    """A forked process ended; ``status`` as of :func:`os.waitstatus_to_exitcode`."""

    pid: int
    status: int


_told: msgspec.msgpack.Decoder[Ready | Forked | Exited] = msgspec.msgpack.Decoder(Ready | Forked | Exited)
_asked: msgspec.msgpack.Decoder[Fork] = msgspec.msgpack.Decoder(Fork)


# ------------------------------------------------------------------------------------- where the processes are wanted


@dataclass(slots=True, eq=False)
class ForkedProcess:
    """A forked process, seen from the one that it works for; as much of ``asyncio.subprocess.Process`` as is needed.

    Attributes:
        pid: of it.
        alive: writing end of the pipe: the kernel kills the process when this is closed.
        watched: its pidfd: names it and no other process that gets its number later.
        returncode: once it has ended: its exit status, or the negative number of the signal that killed it.
    """

    pid: int
    alive: int
    watched: int
    returncode: int | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self) -> int:
        """Its exit status."""
        await self.ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """SIGKILL, if it has not ended."""
        if self.returncode is None:
            signal.pidfd_send_signal(self.watched, signal.SIGKILL)

    def end(self, status: int) -> None:
        """It is over."""
        self.returncode = status
        os.close(self.alive)
        os.close(self.watched)
        self.ended.set()


@dataclass(slots=True, eq=False)
class _Spawner:
    """A running one."""

    process: asyncio.subprocess.Process
    socket: socket.socket
    ready: asyncio.Future[str]
    forking: dict[int, tuple[asyncio.Future[ForkedProcess], int]] = field(default_factory=dict)
    forked: dict[int, ForkedProcess] = field(default_factory=dict)


class ProcessSpawner:
    """A spawner and the processes it forked. Started by the first :meth:`fork`, on whose event loop it stays.

    Args:
        engine: entry point or dotted path of the engine that the forked processes host.
        model_path: folder or hub id of the model that they load; what it needs is imported.
        environment: environment variables of the spawner, so of all that it forks, added to this process's.
    """

    def __init__(self, engine: str, model_path: str, *, environment: Mapping[str, str] | None = None) -> None:
        self._engine = engine
        self._model_path = model_path
        self._environment = dict(environment or {})
        self._starting = asyncio.Lock()
        self._spawner: _Spawner | None = None
        self._numbers = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the spawner; None while there is none."""
        return None if self._spawner is None else self._spawner.process.pid

    async def fork(self, descriptor: int, *, log: int) -> ForkedProcess | None:
        """A process that hosts what it is told through the socket ``descriptor``, and writes to ``log``.

        None if this engine cannot be forked: it needs a process made from scratch then.

        Raises:
            EngineError: the spawner cannot be started, or died meanwhile.
        """
        async with self._starting:
            if self._closed:
                raise EngineError("the spawner is closed")
            spawner = self._spawner = self._spawner or await self._start()
        if await asyncio.shield(spawner.ready):
            return None
        forked: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._numbers += 1
        number = self._numbers
        reading, writing = os.pipe2(os.O_CLOEXEC)
        spawner.forking[number] = forked, writing
        try:
            socket.send_fds(spawner.socket, [msgspec.msgpack.encode(Fork(number))], [descriptor, reading, log])
            return await forked
        except OSError as error:
            raise EngineError(f"the spawner of {self._engine} does not listen: {error.strerror}") from error
        finally:
            os.close(reading)
            if spawner.forking.pop(number, None) is not None:  # nobody took it: what comes of it is killed
                os.close(writing)

    async def close(self) -> None:
        """End the spawner. What it forked goes on."""
        self._closed = True
        async with self._starting:
            if (spawner := self._spawner) is not None:
                self._hang_up(spawner, "it was closed")
                await spawner.process.wait()

    async def _start(self) -> _Spawner:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # numpy's BLAS starts a thread for each core when it is imported, and an engine computes nothing with it.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **self._environment}
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(_SOURCE_ROOT), *filter(None, [environment.get("PYTHONPATH", "")])]
        )
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "engines.rollout.process_spawner", self._engine, self._model_path),
                *(f"--descriptor={theirs.fileno()}", f"--parent={os.getpid()}"),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=_STANDARD_ERROR,
                env=environment,
                start_new_session=True,
            )
        ours.setblocking(False)
        spawner = _Spawner(process, ours, loop.create_future())
        loop.add_reader(ours, self._read, spawner)
        return spawner

    def _read(self, spawner: _Spawner) -> None:
        while self._spawner is spawner:
            try:
                packet, descriptors, _, _ = socket.recv_fds(spawner.socket, _PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            if packet:
                self._handle(spawner, _told.decode(packet), descriptors)
            else:
                self._hang_up(spawner, "it died")

    def _handle(self, spawner: _Spawner, message: Ready | Forked | Exited, descriptors: list[int]) -> None:
        match message:
            case Ready(problem=problem, expected=expected):
                spawner.ready.set_result(problem)
                if problem:
                    level = logging.INFO if expected else logging.WARNING
                    _log.log(level, "processes of %s are made one by one, and slowly: %s", self._engine, problem)
            case Exited(pid=pid, status=status):
                if (process := spawner.forked.pop(pid, None)) is not None:
                    process.end(status)
            case Forked(number=number, pid=pid, problem=problem):
                asked = spawner.forking.get(number)
                if asked is None or asked[0].done():  # nobody wants it any more
                    for descriptor in descriptors:
                        os.close(descriptor)
                elif problem:
                    asked[0].set_exception(EngineError(f"the spawner of {self._engine} could not fork: {problem}"))
                else:
                    del spawner.forking[number]
                    process = spawner.forked[pid] = ForkedProcess(pid, asked[1], descriptors[0])
                    asked[0].set_result(process)

    def _hang_up(self, spawner: _Spawner, reason: str) -> None:
        """The spawner is gone; the next fork starts another one, but if this is closed."""
        loop = asyncio.get_running_loop()
        self._spawner = None
        loop.remove_reader(spawner.socket)
        spawner.socket.close()
        gone = EngineError(f"the spawner of {self._engine} is gone: {reason}")
        if not spawner.ready.done():
            spawner.ready.set_exception(gone)
            spawner.ready.exception()  # whoever waits is told; that nobody does is no mistake
        for forked, _ in spawner.forking.values():
            if not forked.done():
                forked.set_exception(gone)
        for process in spawner.forked.values():
            loop.add_reader(process.watched, _orphan_ended, loop, process)


def _orphan_ended(loop: asyncio.AbstractEventLoop, process: ForkedProcess) -> None:
    """Its spawner, which would know its status, is gone."""
    loop.remove_reader(process.watched)
    process.end(_UNSEEN)


# --------------------------------------------------------------------------------------------------------- the spawner


def _import(engine: str, model_path: str) -> Ready:
    """Import what the engine's processes need, so that they can be forked."""
    part = load_part("asyncrl.rollout_engines", engine, path="engine.name")
    imports = getattr(part, "import_for_fork", None)
    if imports is None:
        return Ready(f"{engine} does not say what to import", expected=True)
    imports(model_path)
    return Ready(_unsound())


def _unsound() -> str:
    threads = len(list(Path("/proc/self/task").iterdir()))
    return f"{threads} threads run, whose locks a fork would leave locked for ever" if threads > 1 else ""


def _spawn(control: socket.socket) -> int | None:
    """Fork what is asked for until the driver hangs up (None). In a forked process: the socket of its engine."""
    waking, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    with selectors.DefaultSelector() as waits:
        waits.register(control, selectors.EVENT_READ)
        waits.register(waking, selectors.EVENT_READ)
        while True:
            for key, _ in waits.select():
                if key.fileobj == waking:
                    os.read(waking, _PACKET_BYTES)
                    _reap(control)
                    continue
                packet, descriptors, _, _ = socket.recv_fds(control, _PACKET_BYTES, 3)
                if not packet:
                    return None
                number, problem, pid = _asked.decode(packet).number, _unsound(), 0
                if not problem:
                    pid = os.fork()
                    if pid == 0:
                        for inherited in (waits.fileno(), control.detach(), waking, woken):
                            os.close(inherited)
                        return _become_engine(*descriptors)
                _answer(control, Forked(number, pid, problem))
                for descriptor in descriptors:
                    os.close(descriptor)


def _answer(control: socket.socket, message: Forked | Exited | Ready) -> None:
    packet = msgspec.msgpack.encode(message)
    if not isinstance(message, Forked) or message.problem:
        control.send(packet)
        return
    watched = os.pidfd_open(message.pid)  # before it is reaped: it is this process and no other
    socket.send_fds(control, [packet], [watched])
    os.close(watched)


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _answer(control, Exited(pid, os.waitstatus_to_exitcode(status)))


def _become_engine(engine: int, alive: int, log: int) -> int:
    """In a forked process: it ends with the one that it works for, and nothing of the spawner's is left."""
    fcntl.fcntl(alive, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)
    hung_up = select.poll()
    hung_up.register(alive)
    if hung_up.poll(0):  # before the kernel was asked to tell
        os._exit(1)
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # Python's own is seeded again by every fork; torch's begins alike in every process
    return engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the spawner, and whatever it forks; see the module's page."""
    parser = argparse.ArgumentParser(prog="process_spawner", description="Fork engines' processes.")
    parser.add_argument("engine", help="entry point or dotted path")
    parser.add_argument("model", help="folder or hub id")
    parser.add_argument("--descriptor", type=int, required=True, help="socket of the process that wants them")
    parser.add_argument("--parent", type=int, required=True, help="that process")
    given = parser.parse_args(arguments)
    log_to_standard_error()
    die_with_parent(given.parent)
    with socket.socket(fileno=given.descriptor) as control:
        try:
            ready = _import(given.engine, given.model)
        except AsyncRLError as error:  # the engine's own process will say so better
            ready = Ready(str(error), expected=True)
        gc.collect()
        gc.freeze()  # a collection would write to pages that are shared
        try:
            _answer(control, ready)
        except (BrokenPipeError, ConnectionResetError):  # whoever wanted processes has left
            return 0
        descriptor = _spawn(control)
    if descriptor is not None:
        asyncio.run(serve_parent(descriptor))
    return 0


if __name__ == "__main__":
    sys.exit(main())
