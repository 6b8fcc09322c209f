"""Every error asyncrl raises on purpose.

    AsyncRLError
    ├── ConfigError                 a configuration value that cannot be used
    ├── InvalidDataError            rows, columns or bytes that break a rule
    │   ├── SchemaError             columns, shapes or dtypes do not fit together
    │   └── CodecError              bytes that are not what they claim to be
    ├── InfrastructureError         a process, machine, transport or engine failed; safe to retry elsewhere
    │   ├── WorkerDiedError         the process behind a rank is gone
    │   ├── GroupClosedError        the worker group was shut down
    │   ├── ResourceError           the cluster cannot give what was asked for
    │   │   └── OverloadedError     ... at the moment: says when to ask again
    │   ├── EngineError             a rollout or training engine failed
    │   │   ├── EngineClosedError   ... because it was closed
    │   │   └── RequestAbortedError ... because this request was aborted
    │   ├── RolloutsLostError       the same rollouts were lost with one replica after the other
    │   ├── WeightError             weights could not be published or pulled
    │   │   ├── WeightMismatchError     ... they differ from their manifest
    │   │   └── WeightVersionError      ... their version does not follow the one held
    │   ├── BufferClosedError       the replay buffer takes and gives nothing any more
    │   └── DeadlineError           a wait passed its deadline (also a TimeoutError)
    ├── EnvironmentFailure          an environment or one of its tools failed; never a reward
    │   └── EnvironmentDeadlineError    ... by taking too long
    ├── UserCodeError               a function given by the user raised
    │   ├── WorkerError             ... inside a worker method; carries rank, method and remote traceback
    │   └── RewardError             ... inside a reward function
    ├── DispatchError               a call that cannot be split over the ranks of a group
    ├── CheckpointError             a checkpoint is missing, damaged or of another run
    ├── LedgerError                 a run's ledger cannot be written or is of another kind
    └── RecordingError              a recorded run lacks what was asked of it

Where several ranks of a call fail, each for itself, they are one :class:`RankErrors`: an ExceptionGroup that is also of
the nearest class that all of them are of, so that an ``except`` that catches each of them catches it.

The branches answer "whose fault": infrastructure is retried, an environment's failure costs its rollout, user code
and bad data end the run with their name. Every class takes its message first and everything else by keyword with a
default, which is what makes it survive pickling with its attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = [
    "AsyncRLError",
    "BufferClosedError",
    "CheckpointError",
    "CodecError",
    "ConfigError",
    "DeadlineError",
    "DispatchError",
    "EngineClosedError",
    "EngineError",
    "EnvironmentDeadlineError",
    "EnvironmentFailure",
    "GroupClosedError",
    "InfrastructureError",
    "InvalidDataError",
    "OverloadedError",
    "RecordingError",
    "RequestAbortedError",
    "ResourceError",
    "RewardError",
    "RolloutsLostError",
    "SchemaError",
    "UserCodeError",
    "WeightError",
    "WeightMismatchError",
    "WeightVersionError",
    "WorkerDiedError",
    "WorkerError",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where in a worker group an error comes from.

    Attributes:
        group: name of the worker group.
        rank: which of its workers.
        method: method that was called.
        node: machine and process of the worker.
        arguments: what the rank was called with: shapes of batches and arrays, other values shortened.
        remote_traceback: formatted traceback of the worker's process.
    """

    group: str
    rank: int
    method: str
    node: str = ""
    arguments: str = ""
    remote_traceback: str = ""


class AsyncRLError(Exception):
    """Root of the tree: ``except AsyncRLError`` catches what asyncrl raises on purpose and nothing else.

    Attributes:
        origin: the worker it comes from; None if it was raised here.
    """

    origin: Origin | None = None

    def on_its_way(self, note: str) -> Self:
        """The same error with a note more, for the next future on its way: each tells its own way."""
        again = copy.copy(self)
        again.__notes__ = [*getattr(self, "__notes__", ()), note]
        return again


class ConfigError(AsyncRLError):
    """A configuration value that cannot be used.

    Attributes:
        path: dotted path of the key (``trainer.lr``), or the file when the file itself is the problem.
        remedy: what is allowed there, or the nearest key that exists.
    """

    def __init__(self, message: str, *, path: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.path = path
        self.remedy = remedy


class InvalidDataError(AsyncRLError, ValueError):
    """Rows, columns or bytes that break a rule."""


class SchemaError(InvalidDataError):
    """Columns, shapes or dtypes that do not fit together."""


class CodecError(InvalidDataError):
    """Bytes that are not what they claim to be (wrong magic, truncated, checksum, unknown dtype)."""


class InfrastructureError(AsyncRLError):
    """A process, machine, transport or engine failed. The work can be done again elsewhere."""


class WorkerDiedError(InfrastructureError):
    """The process behind a rank is gone.

    Attributes:
        group: name of the worker group.
        rank: rank whose process died.
        method: call that was waiting for it, if any.
        cause: what is known of the death (exit code, signal, out of memory).
        node: machine the process was on.
    """

    def __init__(
        self, message: str, *, group: str = "", rank: int = -1, method: str = "", cause: str = "", node: str = ""
    ) -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank
        self.method = method
        self.cause = cause
        self.node = node


class GroupClosedError(InfrastructureError):
    """The worker group was shut down: before the call, or while it was going on."""


class ResourceError(InfrastructureError):
    """The cluster cannot give what was asked for. The message shows both."""


class OverloadedError(ResourceError):
    """A bounded queue is full: nothing was begun, and asking again later may succeed.

    Attributes:
        retry_after_s: when to ask again, from the rate at which work has been finished.
        tenant: whose queue is full; empty if it is everybody's.
    """

    def __init__(self, message: str, *, retry_after_s: float = 1.0, tenant: str = "") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.tenant = tenant


class EngineError(InfrastructureError):
    """A rollout or training engine failed."""


class EngineClosedError(EngineError):
    """The engine was closed; it takes no more requests."""


class RequestAbortedError(EngineError):
    """This request was aborted.

    Attributes:
        tokens_generated: tokens that had been sampled by then; whoever counts tokens must count these as dropped.
    """

    def __init__(self, message: str, *, tokens_generated: int = 0) -> None:
        super().__init__(message)
        self.tokens_generated = tokens_generated


class WeightError(InfrastructureError):
    """Weights could not be published or pulled."""


class WeightMismatchError(WeightError):
    """Received weights differ from their manifest (name, shape, dtype or checksum)."""


class WeightVersionError(WeightError):
    """A weight version that does not follow the one held. Versions only grow."""


class BufferClosedError(InfrastructureError):
    """The replay buffer is closed: it takes and gives nothing any more."""


class DeadlineError(InfrastructureError, TimeoutError):
    """A wait passed its deadline.

    Attributes:
        waiting_for: what the wait was for, in words.
        timeout_s: how long it lasted.
    """

    def __init__(self, message: str, *, waiting_for: str = "", timeout_s: float = 0.0) -> None:
        super().__init__(message)
        self.waiting_for = waiting_for
        self.timeout_s = timeout_s


class RolloutsLostError(InfrastructureError):
    """Every replica that was given these rollouts died or failed, the last one with nothing else to do.

    They may be the reason, so their prompt is given up; many in a row are not.
    """


class EnvironmentFailure(AsyncRLError):
    """An environment or one of its tools failed. The rollout is dropped and counted; it is never given a reward.

    Attributes:
        tokens_generated: tokens sampled for the rollout before the failure.
    """

    def __init__(self, message: str, *, tokens_generated: int = 0) -> None:
        super().__init__(message)
        self.tokens_generated = tokens_generated


class EnvironmentDeadlineError(EnvironmentFailure):
    """An environment took longer than its deadline."""


class UserCodeError(AsyncRLError):
    """A function given by the user raised."""


class WorkerError(UserCodeError):
    """A worker method raised.

    Attributes:
        group: name of the worker group.
        rank: rank that raised first.
        method: method that was called.
        remote_traceback: formatted traceback of the worker's process.
        node: machine and process of the worker.
        arguments: what the rank was called with, as shapes and short values.
    """

    def __init__(
        self,
        message: str,
        *,
        group: str = "",
        rank: int = -1,
        method: str = "",
        remote_traceback: str = "",
        node: str = "",
        arguments: str = "",
    ) -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank
        self.method = method
        self.remote_traceback = remote_traceback
        self.node = node
        self.arguments = arguments


class RewardError(UserCodeError):
    """A reward function raised, returned something that is no number, passed its deadline or ended its process.

    Attributes:
        how: ``raised``, ``value`` (no number), ``deadline`` or ``died`` (its process exited, or one after the other was
            killed); empty where it is neither.
    """

    def __init__(self, message: str, *, how: str = "") -> None:
        super().__init__(message)
        self.how = how


class DispatchError(AsyncRLError, ValueError):
    """A call that cannot be split over the ranks of its group."""


class CheckpointError(AsyncRLError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class LedgerError(AsyncRLError):
    """The ledger of a run cannot be opened, written or read."""


class RecordingError(AsyncRLError):
    """A recorded run lacks what was asked of it. The message has everything that is missing.

    Attributes:
        lacks: what is missing, one sentence each.
    """

    def __init__(self, message: str, *, lacks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.lacks = lacks


class RankErrors(ExceptionGroup[Exception], AsyncRLError):
    """Several ranks of one call failed, each for itself; ``exceptions`` has their errors by rank.

    Made by :meth:`of`, as a subclass that is also of the nearest class of this module that all members are of: two
    ranks that raise SchemaErrors make a group that ``except SchemaError`` catches, and ``except* SchemaError`` takes
    apart. Attributes (``rank``, ``method``, ``remote_traceback``, ...) are those of the first member.
    """

    def __new__(cls, message: str, errors: Sequence[Exception]) -> RankErrors:  # noqa: PYI034  derive gives another class
        made: RankErrors = super().__new__(cls, message, errors)
        return made

    def __init__(self, message: str, errors: Sequence[Exception]) -> None:
        # Not the __init__ of the other base: its attributes are the first member's.
        BaseException.__init__(self, message, list(errors))
        self.__dict__.update({name: value for name, value in vars(errors[0]).items() if name != "__notes__"})
        self.__cause__ = errors[0].__cause__

    @staticmethod
    def of(errors: Sequence[BaseException], *, call: str, ranks: int) -> BaseException:
        """What a call failed with, from the errors of its ranks, by rank.

        One error is itself. Where processes died, they explain what the other ranks saw of it, which becomes notes.
        Where no group could be caught as its members are, the first error has the others as notes.
        """
        died: list[BaseException] = [error for error in errors if isinstance(error, WorkerDiedError)]
        reasons = died or list(errors)
        failure, told = reasons[0], reasons[:1]
        members = [error for error in reasons if isinstance(error, Exception)]
        if len(members) == len(reasons) > 1 and (group := _group_class(_nearest(members))) is not None:
            first_line = (str(failure).splitlines() or [""])[0]
            failure, told = (
                group(f"{len(members)} of {ranks} ranks failed in {call}; first: {first_line}", members),
                reasons,
            )
        for error in errors:
            if all(error is not each for each in told):
                failure.add_note(f"also {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        return failure

    def derive(self, excs: Sequence[Exception], /) -> ExceptionGroup[Exception]:  # type: ignore[override]
        """The same for some of the members; ``except*`` asks."""
        group = _group_class(_nearest(excs)) or ExceptionGroup
        return group(self.message, excs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.message, list(self.exceptions), {**vars(self)})


def _again(message: str, errors: list[Exception], attributes: dict[str, Any]) -> ExceptionGroup[Exception]:
    group = (_group_class(_nearest(errors)) or RankErrors)(message, errors)
    group.__dict__.update(attributes)
    return group


def _nearest(errors: Sequence[BaseException]) -> type[BaseException]:
    """The nearest class of the first error that all errors are of."""
    return next(each for each in type(errors[0]).__mro__ if all(isinstance(error, each) for error in errors))


_group_classes: dict[type[BaseException], type[RankErrors] | None] = {AsyncRLError: RankErrors}


def _group_class(common: type[BaseException]) -> type[RankErrors] | None:
    """The class of groups that ``except common`` catches; None if there can be none."""
    if issubclass(common, RankErrors):
        return common
    if not issubclass(common, AsyncRLError):
        return None
    if common not in _group_classes:
        members = {"__module__": __name__, "__doc__": RankErrors.__doc__}
        try:
            _group_classes[common] = type(f"{common.__name__}s", (RankErrors, common), members)
        except TypeError:  # a layout of its own, as OSError has
            _group_classes[common] = None
    return _group_classes[common]
