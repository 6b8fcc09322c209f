"""The local backend: workers as objects in this process, for debuggers, notebooks and tests, without Ray."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

from asyncrl.data.plan import Header, Plan
from asyncrl.data.proto import DataProto
from asyncrl.errors import Origin, WorkerDiedError
from asyncrl.runtime import ControllerLoop
from asyncrl.single_controller.call import AttemptLost, Call, Failed, HeldValue, Reply, ReturnedBatch, shapes_of
from asyncrl.single_controller.host import WorkerHost
from asyncrl.single_controller.invocation import Invocation
from asyncrl.single_controller.restart import Restart
from asyncrl.single_controller.streams import RankStream
from asyncrl.single_controller.worker import WorkerContext
from asyncrl.single_controller.worker_group import ClassWithInitArgs, WorkerGroup


class _Killed(Exception):
    """The worker that ran a call was killed."""


class LocalWorkerGroup(WorkerGroup):
    """Workers in this process. Methods behave as on Ray, except that Python objects among the arguments are shared.

    Synchronous methods of a rank run in a thread of that rank, ``async def`` methods on the controller loop. Batches,
    tensors and arrays among the arguments are copied; arrays of objects keep their objects.

        >>> with LocalWorkerGroup(ClassWithInitArgs(Greeter), world_size=2) as greeters:
        ...     greeters.greet("hi").result()
        ['hi, from 0 of 2', 'hi, from 1 of 2']

    Args:
        loop: ``"current"`` runs everything on the event loop that is running now, in a fixed order: then ``await`` is
            the only way to wait, and by default synchronous methods run on the loop too.
        inline: run synchronous methods on the loop, without threads. Default: only with ``loop="current"``.
        restart: the policy for killed workers (:meth:`kill`); None leaves them dead.

    Raises:
        DispatchError: as :class:`WorkerGroup`.
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
        self._streams: dict[RankStream, WorkerHost] = {}
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
        """Treat the worker of a rank as dead from now on, like a process that received SIGKILL: for tests.

        A synchronous method that runs in its thread runs on; its result is dropped.
        """
        self._loop.call(self._kill_rank, rank)

    def _kill_rank(self, rank: int) -> None:
        if self._hosts[rank] not in self._killed:
            self._stop_host(self._hosts[rank])
            self._restarts.died(rank, self._restarts.incarnations[rank], self._death(rank, "its lifetime"))

    def _stop_host(self, host: WorkerHost) -> None:
        self._killed.add(host)
        host.stop()
        for task, runs_in in list(self._calls.items()):
            if runs_in is host:
                task.cancel()
        for stream, runs_in in list(self._streams.items()):
            if runs_in is host:
                stream.lose(AttemptLost(_Killed()))

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
        with self._order.lock:
            for rank in ranks:
                self._hosts[rank].begin_at(self._order.next_sequence(rank))
        return failures

    def _submit(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            host = self._calls.pop(task)
            if task.cancelled():  # before its turn, and perhaps before its first step
                invocation.handle_reply(
                    rank, AttemptLost(_Killed() if host in self._killed else asyncio.CancelledError())
                )
            elif (error := task.exception()) is not None:  # the method returned a malformed batch
                invocation.handle_reply(rank, Failed.of(error, arguments=shapes_of(call.arguments)))

        task = asyncio.get_running_loop().create_task(self._run(rank, call, sequence, invocation))
        self._calls[task] = self._hosts[rank]
        task.add_done_callback(ended)

    async def _run(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> None:
        host = self._hosts[rank]
        reply: Reply = None if host in self._killed else await host.call(call, sequence)
        if host in self._killed:
            reply = AttemptLost(_Killed())
        if call.keep_batch and isinstance(reply, DataProto):
            invocation.handle_reply(rank, ReturnedBatch(Header.of(reply)), HeldValue(reply))
        else:
            invocation.handle_reply(rank, reply)

    def _open_stream(self, rank: int, call: Call, sequence: int) -> RankStream:
        host = self._hosts[rank]

        def on_end(_by_rank: bool) -> None:
            del self._streams[stream]
            host.skip(sequence)

        stream = RankStream(host.stream(call, sequence), on_end)
        self._streams[stream] = host
        if host in self._killed:
            stream.lose(AttemptLost(_Killed()))
        return stream

    def _explain(self, rank: int, method: str, error: BaseException) -> BaseException:
        return self._death(rank, method) if isinstance(error, _Killed) else error

    def _cancel(self, rank: int, sequence: int) -> None:
        self._on_loop(self._hosts[rank].cancel, sequence)

    def _skip(self, rank: int, sequence: int) -> None:
        self._on_loop(self._hosts[rank].skip, sequence)

    def _on_loop(self, change: Callable[[int], None], sequence: int) -> None:
        """Change a host where its tasks run: another thread would not wake the loop, and would race with it."""
        if self._loop.is_here:
            change(sequence)
        else:
            self._loop.notify(change, sequence)

    def _store(self, value: Any) -> Any:
        # Copied, as on Ray: the caller may write into its own batch.
        return Plan.of(value.clone()) if isinstance(value, DataProto) else value

    async def _close_workers(self) -> list[Failed | None]:
        return await asyncio.gather(*(host.close() for host in self._hosts))

    async def _kill(self) -> None:
        self._finalizer()


def _stop(hosts: Sequence[WorkerHost]) -> None:
    for host in hosts:
        host.stop()
