"""GroupMethod: a registered method of the workers, as their group offers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from asyncrl.data.future import DataProtoFuture
from asyncrl.single_controller.call import Arguments
from asyncrl.single_controller.decorator import Registration
from asyncrl.single_controller.scatter import leaves

if TYPE_CHECKING:
    from asyncrl.single_controller.retry import Retry

__all__ = ["GroupMethod", "declared_rows"]


class GroupMethod(Protocol):
    """A registered method of the workers, as a method of their group.

    >>> group.greet("hi").result()
    ['hi, from 0 of 2', 'hi, from 1 of 2']
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A future of the result; a stream, if the method yields; the result itself, if it is ``blocking``."""

    def options(
        self, *, blocking: bool | None = None, deadline_s: float | None = None, retries: int | Retry | None = None
    ) -> GroupMethod:
        """The same for calls with these options; None leaves what was registered.

            >>> group.greet.options(deadline_s=10.0, blocking=True)("hi")[1]
            'hi, from 1 of 2'

        Raises:
            DispatchError: they do not suit the method.
        """
        ...


def declared_rows(registration: Registration, arguments: Arguments) -> int | None:
    """The rows that the result of a call will have, if that is known already."""
    if registration.rows is None:
        return None
    for leaf in leaves(arguments):
        if isinstance(leaf, DataProtoFuture) and not leaf.knows_rows:
            return None
    return registration.rows(*arguments.args, **arguments.kwargs)
