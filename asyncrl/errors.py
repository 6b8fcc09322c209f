"""Every error asyncrl raises on purpose.

    AsyncRLError
    ├── ConfigError                 a configuration value that cannot be used
    ├── InvalidDataError            rows, columns or bytes that break a rule
    │   ├── ContextLengthError      a prompt that leaves no room to generate
    │   ├── SchemaError             columns, shapes or dtypes do not fit together
    │   └── CodecError              bytes that are not what they claim to be
    ├── InfrastructureError         a process, machine, transport or engine failed; safe to retry elsewhere
    │   ├── WorkerDiedError         the process behind a rank is gone
    │   ├── GroupClosedError        the worker group was shut down
    │   ├── ResourceError           the cluster lacks requested resources
    │   ├── EngineError             a rollout or training engine failed
    │   │   ├── EngineClosedError   ... because it was closed
    │   │   ├── RequestAbortedError ... because this request was aborted
    │   │   └── ContinuationError   ... to go on where another replica ended; safe to repeat from the beginning
    │   ├── RolloutsLostError       the same rollouts were lost with one replica after the other
    │   ├── WeightError             weights could not be published or pulled
    │   │   ├── WeightMismatchError     ... they differ from their manifest
    │   │   ├── LiveWeightsError        ... an engine serves other ones than it was sent
    │   │   ├── WeightVersionError      ... their version does not follow the one held
    │   │   └── VersionLostError        ... a version was pinned, and no replica has it any more
    │   ├── BufferClosedError       the replay buffer is closed
    │   └── DeadlineError           a wait passed its deadline (also a TimeoutError)
    ├── EnvironmentFailure          an environment or one of its tools failed; never a reward
    │   ├── EnvironmentDeadlineError    ... by taking too long
    │   └── SandboxError                ... because a sandbox failed, or there was none in time
    ├── UserCodeError               a function given by the user raised
    │   ├── WorkerError             ... inside a worker method; carries rank, method and remote traceback
    │   └── RewardError             ... inside a reward function
    ├── DispatchError               a call that cannot be split over the ranks of a group
    ├── CheckpointError             a checkpoint is missing, damaged or of another run
    │   └── StorageError                ... or its store has no such bucket, refuses, or cannot be reached
    ├── InvariantError              a rule that a run checks of itself does not hold: a defect of asyncrl or of a part
    │   └── TokenBalanceError           ... tokens were lost or counted twice
    ├── LedgerError                 a run's ledger cannot be written or is of another kind
    ├── RecordingError              a recorded run lacks what was requested
    └── RunStoppedError             the run was stopped before its last step; it can be resumed

Where several ranks of a call fail independently, their errors become one :class:`RankErrors`: an ExceptionGroup that is
also an instance of the nearest class common to all of them, so that an ``except`` that catches each of them catches it.

The branches separate causes: infrastructure is retried, an environment's failure costs its rollout, user code and bad
data end the run under their own names. Every class takes its message first and everything else by keyword with a
default, so that it survives pickling with its attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The worker that an error comes from.

    Attributes:
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

    ``origin`` is the worker that it comes from; None if it was raised in this process.
    """

    origin: Origin | None = None

    def copy_with_note(self, note: str) -> Self:
        """Return a copy with one more note, for the next future that fails with it; the original keeps its notes."""
        again = copy.copy(self)
        again.__notes__ = [*getattr(self, "__notes__", ()), note]
        return again


class ConfigError(AsyncRLError):
    """A configuration value that cannot be used.

    Attributes:
        path: dotted path of the key (``trainer.lr``), or the file when the file itself is the problem.
        remedy: what is allowed there, or the nearest key that exists; also a note, which tracebacks show.
    """

    def __init__(self, message: str, *, path: str = "", remedy: str = "") -> None:
        super().__init__(message)
        if remedy and remedy not in message:
            self.add_note(remedy)
        self.path = path
        self.remedy = remedy


class InvalidDataError(AsyncRLError, ValueError):
    """Rows, columns or bytes that break a rule."""


class ContextLengthError(InvalidDataError):
    """A prompt that leaves no room to generate in the model's context."""


class SchemaError(InvalidDataError):
    """Columns, shapes or dtypes that do not fit together."""


class CodecError(InvalidDataError):
    """Bytes that are not what they claim to be (wrong magic, truncated, checksum, unknown dtype)."""


class InfrastructureError(AsyncRLError):
    """A process, machine, transport or engine failed. The work can be repeated elsewhere."""


class WorkerDiedError(InfrastructureError):
    """The process behind a rank is gone.

    ``method`` is the call that waited for it, if any; ``cause`` the reason, as far as it is known (exit code, signal,
    out of memory); ``node`` the machine of the process.
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


class GroupClosedError(InfrastructureError): ...


class ResourceError(InfrastructureError):
    """The cluster lacks requested resources. The message shows both."""


class EngineError(InfrastructureError): ...


class EngineClosedError(EngineError): ...


class RequestAbortedError(EngineError):
    """This request was aborted. ``tokens_generated`` had been sampled by then, and count as dropped."""

    def __init__(self, message: str, *, tokens_generated: int = 0) -> None:
        super().__init__(message)
        self.tokens_generated = tokens_generated


class ContinuationError(EngineError):
    """The engine cannot go on with what another replica began. No replica is to blame, nor is the request."""


class WeightError(InfrastructureError): ...


class WeightMismatchError(WeightError):
    """Received weights differ from their manifest (name, shape, dtype or checksum)."""


class LiveWeightsError(WeightError):
    """An engine says that it serves a version, and its tensors are not those that were published."""


class WeightVersionError(WeightError):
    """A weight version that does not follow the one held. Versions only increase."""


class VersionLostError(WeightError):
    """No replica has a pinned version any more: those pinned to it are gone, and the others have newer weights."""


class BufferClosedError(InfrastructureError):
    """The replay buffer is closed: it accepts and returns no groups any more."""


class DeadlineError(InfrastructureError, TimeoutError):
    """A wait for ``waiting_for`` passed its deadline of ``timeout_s``."""

    def __init__(self, message: str, *, waiting_for: str = "", timeout_s: float = 0.0) -> None:
        super().__init__(message)
        self.waiting_for = waiting_for
        self.timeout_s = timeout_s


class RolloutsLostError(InfrastructureError):
    """Every replica that ran these rollouts died or failed, the last one while it had no other work.

    They may be the reason, so their prompt is dropped; many such losses in a row have another one.
    """


class EnvironmentFailure(AsyncRLError):
    """An environment or one of its tools failed. The rollout is dropped and counted; it never gets a reward.

    ``tokens_generated`` had been sampled for the rollout before the failure; ``causes`` are those of all attempts, with
    their counts (:class:`asyncrl.foreign.Failures`).
    """

    def __init__(
        self, message: str, *, tokens_generated: int = 0, causes: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        super().__init__(message)
        self.tokens_generated = tokens_generated
        self.causes = causes or {}


class EnvironmentDeadlineError(EnvironmentFailure): ...


class SandboxError(EnvironmentFailure):
    """A sandbox failed: it could not be made, died, or gave no answer. How a program in it ends is no failure."""


class UserCodeError(AsyncRLError):
    """A function given by the user raised."""


class WorkerError(UserCodeError):
    """A worker method raised. Attributes are those of :class:`Origin`; ``rank`` is the one that raised first."""

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

    ``how`` is ``raised``, ``value`` (no number), ``deadline`` or ``died`` (its process exited, or one after the other
    was killed); empty for any other reason.
    """

    def __init__(self, message: str, *, how: str = "") -> None:
        super().__init__(message)
        self.how = how


class DispatchError(AsyncRLError, ValueError):
    """A call that cannot be split over the ranks of its group."""


class CheckpointError(AsyncRLError): ...


class StorageError(CheckpointError):
    """A store has no such bucket, refuses, or cannot be reached. The message has the URL, never a credential."""


class InvariantError(AsyncRLError):
    """A rule that a run checks of itself does not hold: a defect of asyncrl, of an engine or of another part."""


class TokenBalanceError(InvariantError):
    """A run's tokens do not add up: generated = trained + dropped + in flight."""


class LedgerError(AsyncRLError): ...


class RecordingError(AsyncRLError):
    """A recorded run lacks what was requested. ``lacks`` and the message have a sentence for each lack."""

    def __init__(self, message: str, *, lacks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.lacks = lacks


class RunStoppedError(AsyncRLError):
    """The run was stopped before its last step; it can be resumed."""


class RankErrors(ExceptionGroup[Exception], AsyncRLError):
    """Several ranks of one call failed independently; ``exceptions`` has their errors by rank.

    :meth:`of` makes it as a subclass that also derives from the nearest class of this module common to all members: two
    ranks that raise SchemaErrors make a group that ``except SchemaError`` catches, and ``except* SchemaError`` splits.
    Attributes (``rank``, ``method``, ``remote_traceback``, ...) are those of the first member.
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
        """Return the error that a call fails with, from the errors of its ranks, by rank.

        A single error is returned as it is. Where processes died, their errors explain those of the other ranks, which
        become notes. Where the members have no common class to catch them by, the first error has the others as notes.
        """
        died: list[BaseException] = [error for error in errors if isinstance(error, WorkerDiedError)]
        reasons = died or list(errors)
        failure, included = reasons[0], reasons[:1]
        members = [error for error in reasons if isinstance(error, Exception)]
        if len(members) == len(reasons) > 1 and (group := _group_class(_nearest(members))) is not None:
            failure = group(f"{len(members)} of {ranks} ranks failed in {call}; first: {_first_line(failure)}", members)
            included = reasons
        for error in errors:
            if all(error is not each for each in included):
                failure.add_note(f"also {type(error).__name__}: {_first_line(error)}")
        return failure

    def derive(self, excs: Sequence[Exception], /) -> ExceptionGroup[Exception]:  # type: ignore[override]
        group = _group_class(_nearest(excs)) or ExceptionGroup
        return group(self.message, excs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.message, list(self.exceptions), {**vars(self)})


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _unpickled(message: str, errors: list[Exception], attributes: dict[str, Any]) -> ExceptionGroup[Exception]:
    group = (_group_class(_nearest(errors)) or RankErrors)(message, errors)
    group.__dict__.update(attributes)
    return group


def _nearest(errors: Sequence[BaseException]) -> type[BaseException]:
    return next(each for each in type(errors[0]).__mro__ if all(isinstance(error, each) for error in errors))


_group_classes: dict[type[BaseException], type[RankErrors] | None] = {AsyncRLError: RankErrors}


def _group_class(common: type[BaseException]) -> type[RankErrors] | None:
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
