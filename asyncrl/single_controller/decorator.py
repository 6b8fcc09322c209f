"""``@register``: which methods of a worker class its group offers, and how their calls are split and collected."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from asyncrl.errors import DispatchError
from asyncrl.single_controller.dispatch import PROTO_MODES, Dispatch, DispatchMode, Execute
from asyncrl.single_controller.mesh import MeshDispatch

__all__ = ["Registration", "mark", "register", "registrations"]

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__asyncrl_registration__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """How a worker group calls one method. ``returns_batch``: its result is a DataProtoFuture."""

    name: str
    dispatch_mode: DispatchMode
    execute_mode: Execute = Execute.ALL
    blocking: bool = False
    materialize_futures: bool = True
    pad: bool = True
    read_only: bool = False
    returns_batch: bool = False


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = False,
    materialize_futures: bool = True,
    *,
    pad: bool = True,
    read_only: bool = False,
) -> Callable[[F], F]:
    """Offer a worker method (``def`` or ``async def``) through its group. The method itself stays as it is.

    Args:
        dispatch_mode: how arguments are split and results collected.
        execute_mode: which ranks run it.
        blocking: wait for the value instead of returning a future; ``group.method(..., blocking=...)`` overrides it.
        materialize_futures: give the method batches. If False, it gets a DataProtoFuture for every batch and awaits
            what it needs.
        pad: where rows do not divide, repeat rows so that all ranks get equally many, and take theirs off the result.
            If False, shares differ by one row.
        read_only: the method promises not to write into the tensors of its batches, nor to train on them: it gets them
            as they lie in shared memory, without a copy (see :attr:`DataProto.read_only`).
    """
    if not isinstance(dispatch_mode, Dispatch | MeshDispatch) and not (
        isinstance(dispatch_mode, dict) and dispatch_mode.keys() == {"dispatch_fn", "collect_fn"}
    ):
        raise DispatchError(
            f"dispatch_mode must be a Dispatch or {{'dispatch_fn': ..., 'collect_fn': ...}}, got {dispatch_mode!r}"
        )
    if isinstance(dispatch_mode, MeshDispatch) and execute_mode is Execute.RANK_ZERO:
        raise DispatchError(f"mesh {dispatch_mode.mesh_name!r} needs all its ranks: execute_mode must be Execute.ALL")
    if not isinstance(execute_mode, Execute):
        raise DispatchError(f"execute_mode must be an Execute, got {execute_mode!r}")

    def decorate(method: F) -> F:
        custom = isinstance(dispatch_mode, dict)
        joins = not custom and (isinstance(dispatch_mode, MeshDispatch) or dispatch_mode in PROTO_MODES)
        single = custom or dispatch_mode is Dispatch.RANK_ZERO or execute_mode is Execute.RANK_ZERO
        registration = Registration(
            name=method.__name__,
            dispatch_mode=dispatch_mode,
            execute_mode=Execute.RANK_ZERO if dispatch_mode is Dispatch.RANK_ZERO else execute_mode,
            blocking=blocking,
            materialize_futures=materialize_futures,
            pad=pad,
            read_only=read_only,
            returns_batch=joins or (single and _returns_batch(method)),
        )
        return mark(method, registration)

    return decorate


def mark(method: F, registration: Registration) -> F:
    """Offer a method as ``registration`` says."""
    setattr(method, _ATTRIBUTE, registration)
    return method


def registrations(worker_class: type) -> dict[str, Registration]:
    """Registered methods of a class and its parents, by name."""
    found: dict[str, Registration] = {}
    for name, member in inspect.getmembers(worker_class):
        registration = getattr(member, _ATTRIBUTE, None)
        if isinstance(registration, Registration):
            found[name] = registration
    return found


def _returns_batch(method: Callable[..., Any]) -> bool:
    annotation = inspect.signature(method).return_annotation
    # By name: a worker class that never sees a batch is loaded without torch.
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__qualname__", "")
    return bool(name.split(".")[-1] == "DataProto")
