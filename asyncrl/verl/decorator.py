"""``register`` with verl's defaults: calls block, and ``ALL_TO_ALL`` scatters lists and copies what is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from asyncrl.single_controller import decorator
from asyncrl.single_controller.decorator import mark, registration_of
from asyncrl.single_controller.dispatch import CustomDispatch, Dispatch, DispatchMode, Execute
from asyncrl.single_controller.dispatch_functions import collect_all_to_all, dispatch_one_to_all

__all__ = ["ALL_TO_ALL", "register"]

F = TypeVar("F", bound=Callable[..., Any])


def _scatter_or_copy(group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def is_entry_for_each(value: Any) -> bool:
        return isinstance(value, list) and len(cast("list[object]", value)) == group.world_size

    if all(map(is_entry_for_each, (*args, *kwargs.values()))):
        return args, kwargs
    return dispatch_one_to_all(group, *args, **kwargs)


ALL_TO_ALL = CustomDispatch(dispatch_fn=_scatter_or_copy, collect_fn=collect_all_to_all)
"""Lists as long as the group are scattered if all arguments are such lists; otherwise all are copied."""


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[F], F]:
    """:func:`asyncrl.register` with verl's default, ``blocking=True``, and verl's ``ALL_TO_ALL``.

        >>> class Counter(Worker):
        ...     @register()
        ...     def add(self, x):
        ...         return self.rank + x
        >>> with LocalWorkerGroup(ClassWithInitArgs(Counter), world_size=2) as counters:
        ...     counters.add([10, 20]), counters.add(10)  # an entry for each rank; the same for all
        ([10, 21], [10, 11])

    Raises:
        DispatchError: options that do not go together.
    """
    scatters = dispatch_mode is Dispatch.ALL_TO_ALL
    mode = Dispatch.RANK_ZERO if scatters and execute_mode is Execute.RANK_ZERO else dispatch_mode
    offer = decorator.register(mode, execute_mode, blocking, materialize_futures)

    def decorate(method: F) -> F:
        offered = offer(method)
        registration = registration_of(offered)
        if registration is not None and (mode is Dispatch.ALL_TO_ALL or isinstance(mode, dict)):
            # Collect functions written for verl take batches, not futures of them.
            own = mode if isinstance(mode, dict) else ALL_TO_ALL
            mark(offered, replace(registration, dispatch_mode=own, returns_batch=False))
        return offered

    return decorate
