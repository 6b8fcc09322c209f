"""Detached groups: worker groups that outlive their program, and how other programs find them.

The actors of a detached group carry names in the namespace ``asyncrl``: ``GROUP:RANK.CREATED@PLACEMENT_GROUP``, where
CREATED orders the processes that a rank has had and PLACEMENT_GROUP is the id of the placement group they occupy. So
the cluster itself is the only register of groups and of the placement groups they use.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import ray
import ray.util
from ray import PlacementGroupID
from ray.util.placement_group import PlacementGroup, remove_placement_group

from asyncrl.errors import ResourceError
from asyncrl.single_controller.ray.resource_pool import Placement, RayResourcePool
from asyncrl.single_controller.worker import WorkerContext

if TYPE_CHECKING:
    from asyncrl.single_controller.ray.backend import RayClassWithInitArgs

# Ray leaves the types of handles, references and placement groups partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false

NAMESPACE = "asyncrl"

DISMISS_TIMEOUT_S = 5.0
"""Within this time a worker that can reply has replied, on a busy machine too."""

# Ray types the handle of a class that it decorates; it would take RayHost's methods for ordinary ones.
Handle: TypeAlias = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedState:
    """What a program needs to attach to a detached group; every worker of the group keeps it.

    ``contexts``, ``placements`` and ``nodes`` (addresses) are by rank; ``demand`` is the resources of one actor.
    """

    init: RayClassWithInitArgs
    contexts: list[WorkerContext]
    placements: list[Placement]
    nodes: list[str]
    demand: dict[str, Any]


class DetachedPool(RayResourcePool):
    """The placement groups of a detached group, in another program than the one that created them."""

    def __init__(self, placements: Sequence[Placement], *, group: str) -> None:
        super().__init__([len(placements)], name_prefix=group, detached=True)
        self._placed = list(placements)
        self._group = group

    def check(self) -> None:
        """Do nothing: the placement groups exist."""

    def acquire(self) -> list[PlacementGroup]:
        return list({placement.group.id: placement.group for placement in self._placed}.values())

    def release(self) -> None:
        """Remove the placement groups that no other detached group uses."""
        free((group_id(each) for each in self.acquire()), group=self._group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ActorName:
    group: str
    rank: int
    created: int
    placement_group: str

    def __str__(self) -> str:
        return f"{self.group}:{self.rank}.{self.created:x}@{self.placement_group}"

    @classmethod
    def parsed(cls, text: str) -> _ActorName | None:
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        group, rank, created, placement_group = found.groups()
        return cls(group=group, rank=int(rank), created=int(created, 16), placement_group=placement_group)


_NAME = re.compile(r"(.+):(\d+)\.([0-9a-f]+)@([0-9a-f]+)", re.DOTALL)


def new_actor_name(group: str, rank: int, placement: Placement) -> str:
    name = _ActorName(group=group, rank=rank, created=time.time_ns(), placement_group=group_id(placement.group))
    return str(name)


def check_detached(group: str, pool: RayResourcePool) -> None:
    """Raise :class:`ResourceError` if a group cannot be detached under this name, on this pool."""
    if not group:
        raise ResourceError("a detached worker group needs a name, by which other programs find it")
    if not pool.detached:
        raise ResourceError(
            f"{group} cannot be detached: its placement groups end with this program; {pool!r} needs detached=True"
        )
    if any(name.group == group for name in _names()):
        raise ResourceError(_exists_already(group))


def check_first(group: str, name: str) -> None:
    """Raise :class:`ResourceError` if another program has created a group of this name just before."""
    first = min((each for each in _names() if each.group == group and each.rank == 0), key=lambda each: each.created)
    if str(first) != name:
        raise ResourceError(_exists_already(group))


def _exists_already(group: str) -> str:
    return (
        f"a detached worker group {group!r} exists on this cluster already: attach to it "
        f"(RayWorkerGroup.attach({group!r})) or end it (RayWorkerGroup.end_detached({group!r}))"
    )


def find(group: str) -> list[Handle]:
    """Return the actors of a detached group, by rank, up to the last that has a name.

    Raises:
        ResourceError: there is none, or one before the last is missing.
    """
    names = sorted((name for name in _names() if name.group == group), key=lambda name: name.created)
    if not names:
        others = ", ".join(sorted({name.group for name in _names()})) or "none"
        raise ResourceError(f"no detached worker group {group!r} exists on this cluster; existing ones: {others}")
    latest = {name.rank: name for name in names}
    handles: list[Handle] = []
    for rank in range(max(latest) + 1):
        try:
            handles.append(_handle(latest[rank]))
        except (KeyError, ValueError):
            raise has_died(group, rank) from None
    return handles


def has_died(group: str, rank: int) -> ResourceError:
    return ResourceError(
        f"the worker of rank {rank} of the detached group {group!r} has died: end the rest with "
        f"RayWorkerGroup.end_detached({group!r}) and create the group again"
    )


def end(group: str) -> int:
    """Kill every actor of a detached group, complete or not, and free its resources; return how many there were.

    Programs that call the group are notified first, so that they do not replace its workers. A program that is
    replacing them at the moment sees afterwards that the placement groups are gone, or has named its actors by then:
    those are found here.
    """
    names = [name for name in _names() if name.group == group]
    placement_groups = {name.placement_group for name in names}
    _dismiss(names, f"it was ended by RayWorkerGroup.end_detached({group!r})")
    _kill(names)
    free(placement_groups, group=group)
    _kill([name for name in _names() if name.group == group and name.placement_group in placement_groups])
    return len(names)


def _dismiss(names: Iterable[_ActorName], why: str) -> None:
    replies: list[Any] = []
    for name in names:
        with contextlib.suppress(ValueError):  # the actor has died meanwhile
            replies.append(_handle(name).dismiss.remote(why))
    if replies:  # an actor that waits for resources, or hangs, never replies
        ray.wait(replies, num_returns=len(replies), timeout=DISMISS_TIMEOUT_S)


def _kill(names: Iterable[_ActorName]) -> None:
    for name in names:
        with contextlib.suppress(ValueError):  # as above
            ray.kill(_handle(name))


def free(placement_groups: Iterable[str], *, group: str) -> None:
    """Remove those of these placement groups that no actor of another detached group uses."""
    used = {name.placement_group for name in _names() if name.group != group}
    for each in set(placement_groups) - used:
        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(each))))


def _names() -> list[_ActorName]:
    """Return the names of all detached actors of all groups."""
    listed: Any = ray.util.list_named_actors(all_namespaces=True)  # dictionaries, not names
    names = [_ActorName.parsed(each["name"]) for each in listed if each["namespace"] == NAMESPACE]
    return [name for name in names if name is not None]


def _handle(name: _ActorName) -> Handle:
    return ray.get_actor(str(name), namespace=NAMESPACE)


def group_id(group: PlacementGroup) -> str:
    return str(group.id.hex())
