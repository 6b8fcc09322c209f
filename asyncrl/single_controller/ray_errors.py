"""What Ray's exceptions mean to a group's callers."""

from __future__ import annotations

import ray.exceptions

from asyncrl.errors import Origin, WorkerDiedError, WorkerError
from asyncrl.single_controller.ray_store import first_line

__all__ = ["DEATHS", "explained"]

DEATHS = (
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.ActorUnschedulableError,
    ray.exceptions.ActorPlacementGroupRemoved,
)


def explained(error: BaseException, *, group: str, rank: int, method: str, node: str) -> BaseException:
    """The failure of ``group.method`` on ``rank`` as one of ours, if it is one of Ray's."""
    explained: BaseException
    if isinstance(error, DEATHS):
        cause = _cause(error)
        message = f"the process of rank {rank} of {group} died during {method}: {cause}"
        explained = WorkerDiedError(message, group=group, rank=rank, method=method, cause=cause, node=node)
        explained.origin = Origin(group=group, rank=rank, method=method, node=node)
    elif isinstance(error, ray.exceptions.RayError):
        message = (
            f"{group}.{method} failed on rank {rank} on the way there or back: {first_line(error)}\n"
            "(an argument that cannot be loaded there, or a value that cannot be pickled or loaded here)"
        )
        explained = WorkerError(message, group=group, rank=rank, method=method, remote_traceback=str(error))
    else:
        return error
    explained.__cause__ = error
    return explained


def _cause(error: ray.exceptions.RayError) -> str:
    """What Ray knows of a death, in one line."""
    text = str(error)
    for marker in ("Worker exit detail:", "Worker exit type:", "The actor is dead because"):
        _, found, rest = text.partition(marker)
        if found:
            return rest.strip().splitlines()[0].split(" Some common causes")[0]
    return first_line(error)
