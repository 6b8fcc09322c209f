"""The local backend: workers as objects of this process, for debuggers, notebooks and tests. Needs no Ray."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from typing import Any, Literal

from asyncrl.data.plan import Header, Plan
from asyncrl.data.proto import DataProto
from asyncrl.single_controller.call import Call, Failed, Lost, ReturnedBatch
from asyncrl.single_controller.controller_loop import ControllerLoop
from asyncrl.single_controller.host import WorkerHost
from asyncrl.single_controller.invocation import Invocation
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


class LocalWorkerGroup(WorkerGroup):
    """Workers in this process. Methods behave as on Ray; only Python objects among the arguments are shared.

    Plain methods of a rank run in a thread of that rank, ``async def`` methods on the controller loop.

    Args:
        cls_with_init: class and arguments.
        world_size: number of workers.
        name: for messages; the class's name if empty.
        loop: ``"current"`` runs everything on the event loop that is running now, in a fixed order: then ``await`` is
            the only way to wait, and by default plain methods run on the loop too.
        inline: run plain methods on the loop, without threads. Default: only with ``loop="current"``.
    """

    def __init__(
        self,
        cls_with_init: ClassWithInitArgs,
        *,
        world_size: int = 1,
        name: str = "",
        loop: Literal["background", "current"] = "background",
        inline: bool | None = None,
    ) -> None:
        controller = ControllerLoop.current() if loop == "current" else ControllerLoop.default()
        super().__init__(cls_with_init, world_size=world_size, name=name, loop=controller)
        on_loop = loop == "current" if inline is None else inline
        self._hosts = [WorkerHost(inline=on_loop) for _ in range(world_size)]
        self._calls: set[asyncio.Task[Any]] = set()
        self._finalizer = weakref.finalize(self, _stop, self._hosts)
        self._begin()

    async def _start(self) -> list[Failed | None]:
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
            for rank in range(self.world_size)
        ]
        return await asyncio.gather(
            *(
                host.construct(init.cls, init.args, init.kwargs, context)
                for host, context in zip(self._hosts, contexts, strict=True)
            )
        )

    def _submit(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> None:
        task = asyncio.get_running_loop().create_task(self._run(rank, call, sequence, invocation))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _run(self, rank: int, call: Call, sequence: int, invocation: Invocation) -> None:
        try:
            reply = await self._hosts[rank].call(call, sequence)
        except BaseException as error:
            invocation.came(rank, Lost(error))
            raise
        if call.keep_batch and isinstance(reply, DataProto):
            invocation.came(rank, ReturnedBatch(Header.of(reply)), _LocalBlock(reply))
        else:
            invocation.came(rank, reply)

    def _explain(self, rank: int, method: str, sequence: int, error: BaseException) -> BaseException:
        return error

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
