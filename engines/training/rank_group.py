"""The ranks of one trainer: their process group, and the collectives beside those of gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.errors import ConfigError, EngineError

ResultT = TypeVar("ResultT")

# torch keeps one default process group per process, so these are of the process, too.
_lock = threading.Lock()
_users = 0
# Servers listen until the process ends: closing and opening a port again would race with the other ranks.
_servers: dict[tuple[str, int], Store] = {}
_groups_made: dict[tuple[str, int], int] = {}


class RankGroup:
    """One rank's membership in a process group: its device, the mesh for FSDP, and collectives.

    The first engine of a process makes torch's default process group, later ones join it, and the last one to close
    destroys it. A default group that existed before is used and not destroyed. A single rank needs no network: its
    store is in memory.

    Raises:
        ConfigError: no port for several ranks, or a default group of another size exists.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        master_addr: str = "127.0.0.1",
        master_port: int | None = None,
        device: str = "auto",
        timeout_s: float = 1800.0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size}", remedy="0 <= rank < world_size")
        self.rank = rank
        self.world_size = world_size
        self.device = _device_of(rank, device)
        self._owner = _join(rank, world_size, master_addr, master_port, self.device, timeout_s)
        self._closed = False
        if dist.get_world_size() == world_size:
            if dist.get_rank() != rank:
                if self._owner:
                    _leave()
                raise ConfigError(f"rank {rank} was asked for, but this process is rank {dist.get_rank()} already")
            group = dist.group.WORLD
        else:
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)
        self._group = group
        self.mesh = DeviceMesh.from_group(group, self.device.type)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each number over the ranks, in float64."""
        if self.world_size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, group=self._group)
        summed: list[float] = tensor.tolist()
        return summed

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the integers of every rank, by rank; every rank has the same number of them."""
        if self.world_size == 1:
            return [list(values)]
        return [part.tolist() for part in self._all_gather(torch.tensor(values, dtype=torch.int64))]

    def gather_lists(self, values: Sequence[int]) -> list[list[int]]:
        """Return the integers of every rank, by rank; ranks may have different numbers of them."""
        if self.world_size == 1:
            return [list(values)]
        counts = [count for (count,) in self.gather([len(values)])]
        padded = self.gather([*values, *[0] * (max(counts) - len(values))]) if max(counts) else [[] for _ in counts]
        return [each[:count] for each, count in zip(padded, counts, strict=True)]

    def gather_column(self, column: Tensor, lengths: Sequence[int]) -> Tensor:
        """Concatenate every rank's ``column`` [lengths[rank]], by rank, on every rank; float64 on the CPU."""
        mine = column.to(device="cpu", dtype=torch.float64)
        if self.world_size == 1:
            return mine
        padded = torch.zeros(max(lengths), dtype=torch.float64)
        padded[: len(mine)] = mine
        parts = self._all_gather(padded)
        return torch.cat([part[:length].cpu() for part, length in zip(parts, lengths, strict=True)])

    def all_to_all(self, rows: Tensor, *, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send ``sends[rank]`` rows of a CPU matrix [sum of sends, C] to each rank; return [sum of receives, C]."""
        found = torch.empty(sum(receives), rows.shape[1], dtype=rows.dtype, device=self.device)
        dist.all_to_all_single(found, rows.to(self.device).contiguous(), list(receives), list(sends), group=self._group)
        return found.cpu()

    def raise_together(self, error: Exception | None, *, doing: str) -> None:
        """Raise ``error`` on the ranks that have one, and :class:`EngineError` on all others.

        Without it, a rank that fails alone leaves the others waiting in their next collective.
        """
        failed = [rank for rank, (flag,) in enumerate(self.gather([error is not None])) if flag]
        if error is not None:
            raise error
        if failed:
            raise EngineError(f"{doing} failed on rank {failed[0]} (of {len(failed)} that failed); see its error")

    def call_together(
        self, function: Callable[[], ResultT], *, doing: str, catch: type[Exception] = Exception
    ) -> ResultT:
        """Return the result of ``function``, or raise on every rank if it raises ``catch`` on any."""
        error: Exception | None = None
        result: list[ResultT] = []
        try:
            result.append(function())
        except catch as raised:
            error = raised
        self.raise_together(error, doing=doing)
        return result[0]

    def _all_gather(self, mine: Tensor) -> list[Tensor]:
        mine = mine.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine, group=self._group)
        return parts

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # DTensor's caches keep the mesh for ever, and the mesh would keep its group: sockets, threads, and a name that
        # the next group could not have.
        getattr(self.mesh, "_pg_registry", {}).clear()
        del self._group
        if self._owner:
            _leave()


def _device_of(rank: int, device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        if torch.cuda.device_count() == 0:
            raise ConfigError(f"device {device!r}: no CUDA device is visible", path="device", remedy="'cpu' or 'auto'")
        if ":" not in device:
            chosen = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(chosen)
    return chosen


def _join(
    rank: int, world_size: int, master_addr: str, master_port: int | None, device: torch.device, timeout_s: float
) -> bool:
    """Make or join the default group; True if an engine made it, so that :func:`_leave` must be called."""
    global _users  # noqa: PLW0603  # mirrors torch's own process-wide group
    with _lock:
        if dist.is_initialized():
            if dist.get_world_size() != world_size and world_size != 1:
                raise ConfigError(
                    f"{world_size} ranks were asked for, but this process already belongs to a torch process group of "
                    f"{dist.get_world_size()}",
                    remedy="use the same world size for all engines of a process, or 1",
                )
            if _users == 0:
                return False
            _users += 1
            return True
        timeout = timedelta(seconds=timeout_s)
        if world_size == 1:
            store: Store = HashStore()
        elif master_port is None:
            raise ConfigError(f"{world_size} ranks need master_port to meet at", path="master_port")
        else:
            store = _meeting_point(master_addr, master_port, rank, world_size, timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        _users = 1
        return True


def _meeting_point(master_addr: str, master_port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a store for one process group. Groups that follow each other at one port get prefixes of their own."""
    address = (master_addr, master_port)
    if address not in _servers:
        _servers[address] = TCPStore(master_addr, master_port, world_size, is_master=rank == 0, timeout=timeout)
    _groups_made[address] = _groups_made.get(address, 0) + 1
    return PrefixStore(f"trainer/{_groups_made[address]}", _servers[address])


def _leave() -> None:
    global _users  # noqa: PLW0603  # as above
    with _lock:
        _users -= 1
        if _users == 0 and dist.is_initialized():
            dist.destroy_process_group()
