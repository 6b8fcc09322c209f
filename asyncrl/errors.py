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
    └── LedgerError                 a run's ledger cannot be written or is of another kind

The branches answer "whose fault": infrastructure is retried, an environment's failure costs its rollout, user code
and bad data end the run with their name. Every class takes its message first and everything else by keyword with a
default, which is what makes it survive pickling with its attributes.
"""

from __future__ import annotations

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
    "RequestAbortedError",
    "ResourceError",
    "RewardError",
    "SchemaError",
    "UserCodeError",
    "WeightError",
    "WeightMismatchError",
    "WeightVersionError",
    "WorkerDiedError",
    "WorkerError",
]


class AsyncRLError(Exception):
    """Root of the tree: ``except AsyncRLError`` catches what asyncrl raises on purpose and nothing else."""


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
    """

    def __init__(self, message: str, *, group: str = "", rank: int = -1, method: str = "", cause: str = "") -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank
        self.method = method
        self.cause = cause


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
    """

    def __init__(
        self, message: str, *, group: str = "", rank: int = -1, method: str = "", remote_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.group = group
        self.rank = rank
        self.method = method
        self.remote_traceback = remote_traceback


class RewardError(UserCodeError):
    """A reward function raised, returned something that is no number, or passed its deadline."""


class DispatchError(AsyncRLError, ValueError):
    """A call that cannot be split over the ranks of its group."""


class CheckpointError(AsyncRLError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class LedgerError(AsyncRLError):
    """The ledger of a run cannot be opened, written or read."""
