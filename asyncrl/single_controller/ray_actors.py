"""The Ray actors of a group: what has to be freed, and how those that outlive their program are found again.

A detached group's actors carry names in the namespace ``asyncrl``: ``GROUP:RANK.BORN@PLACES``, where BORN orders the
processes that a rank has had and PLACES is the placement group that it sits in. So the cluster itself knows which
groups there are and who else sits where: there is no register beside it that could say otherwise.
"""

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import ray
import ray.util
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, remove_placement_group

from asyncrl.errors import ResourceError
from asyncrl.single_controller.ray_class import RayClassWithInitArgs
from asyncrl.single_controller.ray_resource_pool import RayResourcePool, Seat
from asyncrl.single_controller.worker import WorkerContext

__all__ = [
    "NAMESPACE",
    "Actors",
    "Handle",
    "Standing",
    "StandingPool",
    "check_detached",
    "check_first",
    "end",
    "find",
    "new_name",
]

NAMESPACE = "asyncrl"

DISMISSED_WITHIN_S = 5.0
"""A worker that can answer has done so by then, on a busy machine too."""

# Ray types the handle of a class that it decorates; it would take RayHost's methods for ordinary ones.
Handle: TypeAlias = Any


class Actors:
    """What has to be freed: actors, and a share of a pool."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.pool: RayResourcePool | None = None
        self._lock = threading.Lock()
        self._left = False
        self._session = _session()

    @property
    def reachable(self) -> bool:
        """Whether this process has still to do with them, and is connected to the cluster they were started on."""
        return not self._left and ray.is_initialized() and _session() == self._session

    def free(self) -> None:
        """End them. Idempotent; from any thread."""
        with self._lock:
            handles, self.handles = self.handles, []
            pool, self.pool = self.pool, None
        if not self.reachable:
            return
        for handle in handles:
            ray.kill(handle)
        if pool is not None:
            pool.release()

    def let_go(self) -> None:
        """Leave them to themselves, or to another program."""
        self._left = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a program needs to go on with a detached group: every worker of the group keeps it.

    Attributes:
        made: class, arguments and options.
        contexts: of each rank.
        seats: of each rank.
        nodes: address of each rank's node.
        demand: resources of one actor.
    """

    made: RayClassWithInitArgs
    contexts: list[WorkerContext]
    seats: list[Seat]
    nodes: list[str]
    demand: dict[str, Any]


class StandingPool(RayResourcePool):
    """The seats of a detached group, as another program finds them."""

    def __init__(self, seats: Sequence[Seat], *, group: str) -> None:
        super().__init__([len(seats)], name_prefix=group, detached=True)
        self._seats = list(seats)
        self._group = group

    def check(self) -> None:
        """Nothing to check: they are there."""

    def acquire(self) -> list[PlacementGroup]:
        """The placement groups."""
        return list({seat.group.id: seat.group for seat in self._seats}.values())

    def seats(self) -> list[Seat]:
        """Where each rank is."""
        return list(self._seats)

    def release(self) -> None:
        """Remove the placement groups in which no other detached group sits."""
        free(map(_places, self.acquire()), group=self._group)


def new_name(group: str, rank: int, seat: Seat) -> str:
    """A name for a detached actor that is about to be made."""
    return str(_Name(group=group, rank=rank, born=time.time_ns(), places=_places(seat.group)))


def check_detached(group: str, pool: RayResourcePool) -> None:
    """Raise :class:`ResourceError` if a group cannot be made detached under this name, on this pool."""
    if not group:
        raise ResourceError("a detached worker group needs a name, by which other programs find it")
    if not pool.detached:
        raise ResourceError(f"{group} cannot be detached: its seats end with this program, make {pool!r} detached too")
    if any(name.group == group for name in _names()):
        raise ResourceError(_taken(group))


def check_first(group: str, name: str) -> None:
    """Raise :class:`ResourceError` if another program has made a group of this name at the same time, but earlier."""
    first = min((each for each in _names() if each.group == group and each.rank == 0), key=lambda each: each.born)
    if str(first) != name:
        raise ResourceError(_taken(group))


def _taken(group: str) -> str:
    return (
        f"there is a detached worker group {group!r} on this cluster already: go on with it "
        f"(RayWorkerGroup.attach({group!r})) or end it (RayWorkerGroup.end_detached({group!r}))"
    )


def find(group: str) -> list[Handle]:
    """The actors of a detached group, by rank.

    Raises:
        ResourceError: there is no such group, or not all of it.
    """
    names = sorted((name for name in _names() if name.group == group), key=lambda name: name.born)
    if not names:
        others = sorted({name.group for name in _names()})
        known = f"those there are: {', '.join(others)}" if others else "there is none at all"
        raise ResourceError(f"there is no detached worker group {group!r} on this cluster; {known}")
    latest = {name.rank: name for name in names}
    handles: list[Handle] = []
    for rank in range(max(latest) + 1):
        try:
            handles.append(_handle(latest[rank]))
        except (KeyError, ValueError):
            raise ResourceError(
                f"the worker of rank {rank} of the detached group {group!r} is gone: end what is left with "
                f"RayWorkerGroup.end_detached({group!r}) and make the group again"
            ) from None
    return handles


def end(group: str) -> int:
    """Kill every actor of a detached group, whole or not, and free its seats; how many there were.

    Programs that call the group are told before, so that they do not make its workers again. One that is at it already
    sees afterwards that the seats are gone, or has named its actors by then: those are found here.
    """
    names = [name for name in _names() if name.group == group]
    places = {name.places for name in names}
    _dismiss(names, f"somebody has ended it: RayWorkerGroup.end_detached({group!r})")
    _kill(names)
    free(places, group=group)
    _kill([name for name in _names() if name.group == group and name.places in places])
    return len(names)


def _dismiss(names: Iterable[_Name], why: str) -> None:
    told: list[Any] = []
    for name in names:
        with contextlib.suppress(ValueError):  # it has died by itself meanwhile
            told.append(_handle(name).dismiss.remote(why))
    if told:  # one that waits for a seat, or hangs, never answers
        ray.wait(told, num_returns=len(told), timeout=DISMISSED_WITHIN_S)


def _kill(names: Iterable[_Name]) -> None:
    for name in names:
        with contextlib.suppress(ValueError):  # as above
            ray.kill(_handle(name))


def free(places: Iterable[str], *, group: str) -> None:
    """Remove those of these placement groups in which no actor of another detached group sits."""
    taken = {name.places for name in _names() if name.group != group}
    for each in set(places) - taken:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(each))))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Name:
    """Of a detached actor, taken apart."""

    group: str
    rank: int
    born: int
    places: str

    def __str__(self) -> str:
        return f"{self.group}:{self.rank}.{self.born:x}@{self.places}"

    @classmethod
    def parsed(cls, text: str) -> _Name | None:
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        return cls(group=found["group"], rank=int(found["rank"]), born=int(found["born"], 16), places=found["places"])


_NAME = re.compile(r"(?P<group>.+):(?P<rank>\d+)\.(?P<born>[0-9a-f]+)@(?P<places>[0-9a-f]+)", re.DOTALL)


def _names() -> list[_Name]:
    """Of every detached actor of every group."""
    listed: Any = ray.util.list_named_actors(all_namespaces=True)  # dictionaries, not names
    return [
        name for each in listed if each["namespace"] == NAMESPACE and (name := _Name.parsed(each["name"])) is not None
    ]


def _handle(name: _Name) -> Handle:
    return ray.get_actor(str(name), namespace=NAMESPACE)


def _places(group: PlacementGroup) -> str:
    return str(group.id.hex())


def _session() -> str:
    return str(ray.get_runtime_context().get_node_id())
