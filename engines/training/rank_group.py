"""The ranks of one trainer: their process groups, the mesh they form, and the collectives beside those of gradients."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.errors import ConfigError, EngineError
from asyncrl.mesh import MeshShape

ResultT = TypeVar("ResultT")

# torch keeps one default process group per process, so these are of the process, too.
_lock = threading.Lock()
_users = 0
# Servers listen until the process ends: closing and opening a port again would race with the other ranks.
_servers: dict[tuple[str, int], Store] = {}
_groups_made: dict[tuple[str, int], int] = {}
_meshes = itertools.count()


class RankGroup:
    """One rank's membership in a process group: its device, its place in the mesh, and collectives.

    The first engine of a process makes torch's default process group, later ones join it, and the last one to close
    destroys it. A default group that existed before is used and not destroyed. A single rank needs no network: its
    store is in memory.

    Rows are divided over ``data_size`` ranks; the ``shape.copies`` ranks of one ``data_rank`` have the same rows. Sums
    and exchanges of what belongs to rows are among the ranks that hold different ones.

    Attributes:
        mesh: what FSDP shards weights over; of two dimensions if there are replicas.
        tp: the ranks that divide each product; None if there is one.
        pp: the ranks that divide the layers, and have the same rows; None if there is one.
        stage_rank, stage_size: this rank's number among those that have the same layers, and how many they are.
        cp: the ranks that divide the tokens of a row; None if there is one.
        ep: the ranks that divide the experts of a layer; None if there is one.
        expert_mesh: what FSDP shards the experts of a rank over, as ``mesh``; the same without ``ep``.

    Raises:
        ConfigError: no port for several ranks, a default group of another size exists, or a mesh of another size.
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
        shape: Mapping[str, int] | MeshShape | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} of {world_size}", remedy="0 <= rank < world_size")
        self.shape = MeshShape.of(shape, world_size=world_size)
        self.rank = rank
        self.world_size = world_size
        self.data_rank = self.shape.data_rank(rank)
        self.data_size = self.shape.data_size
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
        self._group = self._data = self._stage = group
        self.stage_size = world_size // self.shape.pp
        self.stage_rank = rank % self.stage_size
        self._made: list[ProcessGroup] = [] if group is dist.group.WORLD else [group]
        self.tp: DeviceMesh | None = None
        self.cp: ProcessGroup | None = None
        self.pp: ProcessGroup | None = None
        self.ep: DeviceMesh | None = None
        if self.data_size == world_size and self.shape.dp_replicate == self.shape.ep == 1:
            self.mesh = self.expert_mesh = DeviceMesh.from_group(group, self.device.type)
            self._meshes = [self.mesh]
        else:
            self._make_mesh(timedelta(seconds=timeout_s))

    def _make_mesh(self, timeout: timedelta) -> None:
        """Make the groups of ranks that differ in some dimensions only, and the mesh of FSDP and tensor parallelism."""
        shape = self.shape
        ranks = torch.arange(self.world_size).view(shape.pp, shape.dp_replicate, shape.dp_shard, shape.cp, shape.tp)

        def group_over(*dimensions: int, ranks: Tensor = ranks) -> ProcessGroup:
            order = [each for each in range(ranks.ndim) if each not in dimensions]
            size = math.prod(ranks.shape[each] for each in dimensions)
            members = ranks.permute(*order, *dimensions).reshape(-1, size).tolist()
            group = dist.new_subgroups_by_enumeration(members, timeout=timeout)[0]
            assert isinstance(group, ProcessGroup)
            self._made.append(group)
            return group

        self._data = group_over(1, 2)
        self.cp = group_over(3) if shape.cp > 1 else None
        if shape.pp > 1:
            self.pp, self._stage = group_over(0), group_over(1, 2, 3, 4)
            self.from_last_stage(torch.zeros(1))  # connects its ranks, which send in pairs from then on
        stage = self.rank // self.stage_size
        # Names of this mesh alone: DTensor's caches take one of equal sizes and names for the same, whose groups may be
        # closed.
        number = next(_meshes)
        replicas, shards, parts, owners = (f"{name}_{number}" for name in ("replicas", "shards", "parts", "owners"))
        sharded = (replicas, shards) if shape.dp_replicate > 1 else (shards,)
        whole = DeviceMesh.from_group(
            [group_over(1), group_over(2, 3), group_over(4)],
            self.device.type,
            mesh=ranks[stage].flatten(1, 2),
            mesh_dim_names=(replicas, shards, parts),
        )
        self._meshes = [whole]
        self.mesh = self.expert_mesh = whole[sharded]
        self.tp = whole[parts] if shape.tp > 1 else None
        if shape.ep > 1:
            apart = ranks.view(shape.pp, shape.dp_replicate, -1, shape.ep, shape.tp)
            whole = DeviceMesh.from_group(
                [group_over(each, ranks=apart) for each in range(1, apart.ndim)],
                self.device.type,
                mesh=apart[stage],
                mesh_dim_names=(replicas, shards, owners, parts),
            )
            self._meshes.append(whole)
            self.expert_mesh, self.ep = whole[sharded], whole[owners]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each number over the data ranks, in float64."""
        return self._sum(values, self._data, self.data_size)

    def sum_over_all(self, values: Sequence[float]) -> list[float]:
        """Sum each number over all ranks, in float64."""
        return self._sum(values, self._group, self.world_size)

    def _sum(self, values: Sequence[float], group: ProcessGroup, size: int) -> list[float]:
        if size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, group=group)
        summed: list[float] = tensor.tolist()
        return summed

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the integers of every data rank, by data rank; every one has the same number of them."""
        if self.data_size == 1:
            return [list(values)]
        return [part.tolist() for part in self._all_gather(torch.tensor(values, dtype=torch.int64))]

    def gather_from_stage(self, values: Sequence[int]) -> list[list[int]]:
        """Return the integers of every rank with these layers, by ``stage_rank``; all have the same number of them."""
        mine = torch.tensor(values, dtype=torch.int64, device=self.device)
        parts = [torch.empty_like(mine) for _ in range(self.stage_size)]
        dist.all_gather(parts, mine, group=self._stage)
        return [part.tolist() for part in parts]

    def from_stage(self, tensor: Tensor, place: int) -> Tensor:
        """Fill ``tensor`` with that of the rank ``place`` of :attr:`pp`; without it, return the tensor."""
        if self.pp is None:
            return tensor
        sent = tensor.to(self.device).contiguous()
        dist.broadcast(sent, group=self.pp, group_src=place)
        return sent.to(tensor.device)

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        return self.from_stage(tensor, self.shape.pp - 1)

    def gather_lists(self, values: Sequence[int]) -> list[list[int]]:
        """Return the integers of every data rank, by data rank; they may have different numbers of them."""
        if self.data_size == 1:
            return [list(values)]
        counts = [count for (count,) in self.gather([len(values)])]
        padded = self.gather([*values, *[0] * (max(counts) - len(values))]) if max(counts) else [[] for _ in counts]
        return [each[:count] for each, count in zip(padded, counts, strict=True)]

    def gather_column(self, column: Tensor, lengths: Sequence[int]) -> Tensor:
        """Concatenate every data rank's ``column`` [lengths[rank]], by rank, on every rank; float64 on the CPU."""
        mine = column.to(device="cpu", dtype=torch.float64)
        if self.data_size == 1:
            return mine
        padded = torch.zeros(max(lengths), dtype=torch.float64)
        padded[: len(mine)] = mine
        parts = self._all_gather(padded)
        return torch.cat([part[:length].cpu() for part, length in zip(parts, lengths, strict=True)])

    def all_to_all(self, rows: Tensor, *, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Send ``sends[rank]`` rows of a CPU matrix [sum of sends, C] to each data rank; return those received."""
        found = torch.empty(sum(receives), rows.shape[1], dtype=rows.dtype, device=self.device)
        dist.all_to_all_single(found, rows.to(self.device).contiguous(), list(receives), list(sends), group=self._data)
        return found.cpu()

    def raise_together(self, error: Exception | None, *, doing: str) -> None:
        """Raise ``error`` on the ranks that have one, and :class:`EngineError` on all others.

        Without it, a rank that fails alone leaves the others waiting in their next collective.
        """
        flags = [0.0] * self.world_size
        flags[self.rank] = float(error is not None)
        failed = [rank for rank, flag in enumerate(self.sum_over_all(flags)) if flag]
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
        parts = [torch.empty_like(mine) for _ in range(self.data_size)]
        dist.all_gather(parts, mine, group=self._data)
        return parts

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # DTensor's caches keep the mesh for ever, and the mesh would keep its group: sockets, threads, and a name that
        # the next group could not have.
        for mesh in self._meshes:
            getattr(mesh, "_pg_registry", {}).clear()
        for group in self._made if dist.is_initialized() else ():
            dist.destroy_process_group(group)
        del self._group, self._data, self._stage, self._made, self.cp, self.pp
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
        uncaught = sys.excepthook
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        sys.excepthook = uncaught  # torch's puts [rank0]: before each line of it, once more for every process group
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
