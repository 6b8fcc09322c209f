"""The local backend: workers as objects of this process, for debuggers, notebooks and tests. Needs no Ray."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any, Literal

from asyncrl.data.plan import Header, Plan
from asyncrl.data.proto import DataProto
from asyncrl.errors import Origin, WorkerDiedError
from asyncrl.single_controller.call import Call, Failed, Lost, Reply, ReturnedBatch
from asyncrl.single_controller.controller_loop import ControllerLoop
from asyncrl.single_controller.host import WorkerHost
from asyncrl.single_controller.invocation import Invocation
from asyncrl.single_controller.restart import Restart
from asyncrl.single_controller.streams import Source
from asyncrl.single_controller.worker import WorkerContext
from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup

__all__ = ["LocalWorkerGroup"]


class _LocalBlock:
    """A payload in this process."""

    __slots__ = ("data",)

    def __init__(self, data: DataProto) -> None:
        self.data = data

    @classmethod
    def get_all(cls, blocks: Sequence[_LocalBlock]) -> list[DataProto]:
        return [block.data for block in blocks]

    @classmethod
    async def fetch_all(cls, blocks: Sequence[_LocalBlock]) -> list[DataProto]:
        return cls.get_all(blocks)


class _Killed(Exception):
    """The worker that ran a call is dead."""


class LocalWorkerGroup(WorkerGroup):
    """Workers in this process. Methods behave as on Ray; only Python objects among the arguments are shared.

    Plain methods of a rank run in a thread of that rank, ``async def`` methods on the controller loop.

        >>> with LocalWorkerGroup(ClassWithInitArgs(Greeter), world_size=2) as greeters:
        ...     greeters.greet("hi").result()
        ['hi, from 0 of 2', 'hi, from 1 of 2']

    Args:
        cls_with_init: class and arguments.
        world_size: number of workers.
        name: for messages; the class's name if empty.
        loop: ``"current"`` runs everything on the event loop that is running now, in a fixed order: then ``await`` is
            the only way to wait, and by default plain methods run on the loop too.
        inline: run plain methods on the loop, without threads. Default: only with ``loop="current"``.
        restart: what to do when a worker is killed (:meth:`kill`); None leaves it dead.

    Raises:
        DispatchError: a registered method has the name of one that groups have of their own, or is split over a mesh
            and its class is no :class:`Worker`.
    """

    def __init__(
        self,
        cls_with_init: ClassWithInitArgs,
        *,
        world_size: int = 1,
        name: str = "",
        loop: Literal["background", "current"] = "background",
        inline: bool | None = None,
        restart: Restart | None = None,
    ) -> None:
        controller = ControllerLoop.current() if loop == "current" else ControllerLoop.default()
        super().__init__(cls_with_init, world_size=world_size, name=name, loop=controller, restart=restart)
        self._inline = loop == "current" if inline is None else inline
        self._hosts = [WorkerHost(inline=self._inline) for _ in range(world_size)]
        self._killed: weakref.WeakSet[WorkerHost] = weakref.WeakSet()
        self._calls: dict[asyncio.Task[Any], WorkerHost] = {}
        self._sources: dict[Source, WorkerHost] = {}
        self._finalizer = weakref.finalize(self, _stop, self._hosts)
        self._begin()

    async def _start(self) -> list[Failed | None]:
        return await self._construct(range(self.world_size))

    async def _construct(self, ranks: Sequence[int]) -> list[Failed | None]:
        init = self.cls_with_init
        contexts = [
            WorkerContext(
                rank=rank,
                world_size=self.world_size,
                local_rank=rank,
                local_world_size=self.world_size,
                group_name=self.name,
                master_addr="127.0.0.1",
                master_port=0,
            )
            for rank in ranks
        ]
        return await asyncio.gather(
            *(
                self._hosts[rank].construct(init.cls, init.args, init.kwargs, context)
                for rank, context in zip(ranks, contexts, strict=True)
            )
        )

    def kill(self, rank: int) -> None:
        """Let the worker of a rank be dead from now on, as if it had a process that got SIGKILL: for tests.

        What a plain method is doing in its thread goes on there; nobody hears of it any more.

            >>> mortals = LocalWorkerGroup(ClassWithInitArgs(Greeter), world_size=2)
            >>> mortals.ready().result()
            >>> mortals.kill(1)
            >>> mortals.greet("hi").exception()
            WorkerDiedError('the worker of rank 1 of Greeter was killed during greet')
            >>> mortals.shutdown()
        """
        self._loop.call(self._end_life, rank)

    def _end_life(self, rank: int) -> None:
        if self._hosts[rank] not in self._killed:
            self._stop_host(self._hosts[rank])
            self._lives.died(rank, self._lives.incarnations[rank], self._death(rank, "its life"))

    def _stop_host(self, host: WorkerHost) -> None:
        self._killed.add(host)
        host.stop()
        for task, runs_in in list(self._calls.items()):
            if runs_in is host:
                task.cancel()
        for source, runs_in in list(self._sources.items()):
            if runs_in is host:
                source.lose(Lost(_Killed()))

    def _death(self, rank: int, method: str) -> WorkerDiedError:
        message = f"the worker of rank {rank} of {self.name} was killed during {method}"
        error = WorkerDiedError(message, group=self.name, rank=rank, method=method, cause="killed")
        error.origin = Origin(group=self.name, rank=rank, method=method)
        return error

    async def _replace(self, ranks: Sequence[int], prepare: str) -> list[Failed | None]:
        for rank in ranks:
            self._stop_host(self._hosts[rank])
            self._hosts[rank] = WorkerHost(inline=self._inline)
        failures = await self._construct(ranks)
        if prepare and not any(failures):
            failures = await asyncio.gather(*(self._hosts[rank].prepare(prepare) for rank in ranks))
        with self._line.lock:
            for rank in ranks:
                self._hosts[rank].begin_at(self._line.next(rank))
        return failures

    def _submit(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            host = self._calls.pop(task)
            if task.cancelled():  # perhaps before its first step, and has told nobody
                invocation.came(rank, Lost(_Killed() if host in self._killed else asyncio.CancelledError()))

        task = asyncio.get_running_loop().create_task(self._run(rank, call, sequence, invocation))
        self._calls[task] = self._hosts[rank]
        task.add_done_callback(ended)

    async def _run(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> None:
        host = self._hosts[rank]
        try:
            reply: Reply = Lost(_Killed()) if host in self._killed else await host.call(call, sequence)
        except BaseException as error:
            invocation.came(rank, Lost(_Killed() if host in self._killed else error))
            raise
        if host in self._killed:
            reply = Lost(_Killed())
        if call.keep_batch and isinstance(reply, DataProto):
            invocation.came(rank, ReturnedBatch(Header.of(reply)), _LocalBlock(reply))
        else:
            invocation.came(rank, reply)

    def _open_stream(self, rank: int, call: Call, sequence: int) -> Source:
        host = self._hosts[rank]

        def over(_through: bool) -> None:
            del self._sources[source]
            host.skip(sequence)

        source = Source(host.stream(call, sequence), over)
        self._sources[source] = host
        if host in self._killed:
            source.lose(Lost(_Killed()))
        return source

    def _explain(self, rank: int, method: str, sequence: int, error: BaseException) -> BaseException:
        return self._death(rank, method) if isinstance(error, _Killed) else error

    def _cancel(self, rank: int, sequence: int) -> None:
        self._hosts[rank].cancel(sequence)

    def _skip(self, rank: int, sequence: int) -> None:
        self._hosts[rank].skip(sequence)

    def _store(self, value: Any) -> Any:
        # Copied, as Ray would: the caller may go on writing into its own.
        return Plan.of(value.clone()) if isinstance(value, DataProto) else value

    async def _close_workers(self) -> list[Failed | None]:
        return await asyncio.gather(*(host.close() for host in self._hosts))

    def _kill(self) -> None:
        self._finalizer()


def _stop(hosts: Sequence[WorkerHost]) -> None:
    for host in hosts:
        host.stop()
