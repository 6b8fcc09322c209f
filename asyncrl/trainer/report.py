"""What a run reports: its steps while it trains, its status while it waits, its summary at the end.

``RUN/status.json`` is written every few seconds while a run trains; ``asyncrl why RUN`` reads it. A wait of the trainer
that lasts too long is logged with all that is known of its cause, and then ended with an error.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.errors import ConfigError, DeadlineError, InfrastructureError
from asyncrl.interfaces import TextTracker, Tracker
from asyncrl.runtime import shield_until_done
from asyncrl.telemetry.progress import Progress
from asyncrl.telemetry.report import trajectory_text
from asyncrl.telemetry.run_directory import RunDirectory, to_json
from asyncrl.telemetry.timeline import PAUSED, Timeline

if TYPE_CHECKING:  # asyncrl why reads a status without them
    from asyncrl.trainer.evaluation import EvaluationResult
    from asyncrl.trainer.journal import TokenBalance
    from asyncrl.trainer.learner import StepRecord

_log = logging.getLogger(__name__)

_SAVE_EVERY_S = 5.0
MOST_SHOWN = 20
"""Pieces of work that a status lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessSummary:
    """Tokens trained on by their staleness; the histogram's keys are text, as JSON's are."""

    max: int
    histogram: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """What a run came to: the content of ``summary.json``, and what the report at its end is made of.

    Attributes:
        scores: of each evaluation, its ``step``, the ``version`` and ``newest_version`` of its tokens, ``success`` and
            ``reward``.
        unscored: why steps that were to be evaluated have no score, by step.
        unsaved: why checkpoints that were due were not written, or not to ``checkpoint.url``, by step.
        success_before: held-out success before the first step (None if it was not evaluated); ``success_after`` the
            last.
        reward_first: mean reward of the first step (None without one); ``reward_last`` of the last.
        wall_s: time of all phases; ``phases_s`` of each.
        weight_version: that the pool serves.
        overlap_share: share of the time in which two stages or more were at work.
        staleness: of the tokens trained on; ``max_staleness`` is the bound, in versions.
        tokens: the token equation.
        tokens_per_s: tokens trained on per second of training, both of this process.
        trainer: of its updates since it was last loaded (:class:`asyncrl.interfaces.TrainerUsage`), of the first rank
            ``update_s``, ``tflops`` a second, and ``mfu`` where it is known; ``memory_peak_gb`` of each rank. Empty if
            the engine does not tell.
        continued: trajectories that went on from an interrupted process, their tokens, and why others were restarted.
        waits: seconds by stage and reason.
        idle: percent of the training by process and cause (:mod:`asyncrl.telemetry.idle`).
        episodes: where the time of all episodes went (:class:`asyncrl.rollout.work.EpisodeTimes`).
        work_s: seconds by stage; groups side by side add up.
        advice: the bottleneck (:class:`asyncrl.telemetry.adviser.Advice`); None if the run was healthy or short.
        failures: failed attempts of episodes, by cause: their count, and the traceback of the first.
    """

    name: str
    seed: int
    success_before: float | None
    success_after: float | None
    reward_first: float | None
    reward_last: float | None
    wall_s: float
    phases_s: Mapping[str, float]
    steps: int
    weight_version: int
    overlap_share: float
    staleness: StalenessSummary
    max_staleness: int
    tokens: TokenBalance
    tokens_per_s: float
    trainer: Mapping[str, Any]
    continued: Mapping[str, Any]
    waits: Mapping[str, Mapping[str, float]]
    failures: Mapping[str, Mapping[str, Any]]
    idle: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    episodes: Mapping[str, float] = field(default_factory=dict)
    work_s: Mapping[str, float] = field(default_factory=dict)
    advice: Mapping[str, Any] | None = None
    scores: Sequence[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    unscored: Mapping[str, str] = field(default_factory=dict)
    unsaved: Mapping[str, str] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        return asdict(self)


class Recorder:
    """Writes the metrics, trajectories and scores of a run to its folder, the trackers and the display.

    ``history`` is what the summary needs at the end and a checkpoint carries: scores, steps without one, and rewards.
    """

    def __init__(
        self, run: RunDirectory, progress: Progress, tracker: Tracker, *, history: dict[str, Any] | None = None
    ) -> None:
        self._run = run
        self._progress = progress
        self._tracker = tracker
        self._stepped_s = time.monotonic()
        self.history: dict[str, Any] = history or {"evaluations": [], "rewards": []}
        # A score that came after the checkpoint of its step is in the metrics alone.
        known = {record["step"] for record in self.history["evaluations"]}
        for line in run.metrics() if run.resumed else ():
            if "eval/success" in line and line["step"] not in known:
                known.add(line["step"])
                self.history["evaluations"].append(_score(line, step=line["step"]))

    def supervised(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step of the warm start."""
        self._log({f"sft/{name}": value for name, value in metrics.items()}, step=0, version=0)
        self._progress.update(loss=metrics["loss"])
        self._progress.advance()

    def stepped(self, record: StepRecord) -> None:
        now_s = time.monotonic()
        tokens_per_s = sum(record.lengths) / max(now_s - self._stepped_s, 1e-9)
        self._stepped_s = now_s
        self.history["rewards"].append(record.reward_mean)
        self._log({**record.metrics(), "tokens_per_s": tokens_per_s}, step=record.step, version=record.step)
        self._progress.update(
            reward=record.reward_mean,
            tokens_per_s=tokens_per_s,
            staleness=record.certificate.maximum,
            queue_depth=record.groups_ready,
        )
        self._progress.advance()

    def evaluated(self, result: EvaluationResult, *, step: int) -> None:
        self.history["evaluations"].append(_score(result.metrics(), step=step))
        self._log(result.metrics(), step=step, version=result.weight_version)
        self._progress.update(success=result.success)
        failed = f", {result.failed} more failed" if result.failed else ""
        assert self.last_score is not None
        self._progress.note(
            f"held-out success {result.success:.3f} on {result.tasks} tasks{failed} ({_versions(self.last_score)})"
        )

    def unscored(self, step: int, reason: str) -> None:
        """Record that the evaluation of a step has no score."""
        self.history.setdefault("unscored", []).append((step, reason))
        _log.warning("step %d has no score: %s", step, reason)
        self._progress.note(f"step {step} has no score: {reason}")

    def unsaved(self, step: int, reason: str) -> None:
        """Record that the checkpoint of a step was not written."""
        self.history.setdefault("unsaved", []).append((step, reason))
        _log.warning("the checkpoint of step %d was not written, the one before stays: %s", step, reason)
        self._progress.note(f"the checkpoint of step {step} was not written: {reason}")

    @property
    def last_score(self) -> Mapping[str, Any] | None:
        return self.history["evaluations"][-1] if self.history["evaluations"] else None

    def sampled(self, trajectory: dict[str, Any], *, step: int, group_id: int) -> None:
        record = {"step": step, "group_id": group_id, **trajectory}
        self._run.log_trajectory(record)
        if isinstance(self._tracker, TextTracker):
            self._tracker.log_text("trajectory", trajectory_text(record), step=step)

    def _log(self, metrics: Mapping[str, float], *, step: int, version: int) -> None:
        self._run.log_metrics(metrics, step=step, version=version)
        self._tracker.log(metrics, step=step)


def _score(metrics: Mapping[str, Any], *, step: int) -> dict[str, Any]:
    """Return the record of a score from the metrics of its evaluation."""
    oldest = int(metrics.get("eval/version", step))
    return {
        "step": step,
        "version": oldest,
        "newest_version": int(metrics.get("eval/newest_version", oldest)),
        "success": metrics["eval/success"],
        "reward": metrics["eval/reward_mean"],
    }


def _versions(score: Mapping[str, Any]) -> str:
    """Return the weight versions of a score as text."""
    oldest, newest = (score.get(name, score["step"]) for name in ("version", "newest_version"))
    return f"weight version {oldest}" if oldest == newest else f"weight versions {oldest} to {newest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A wait that is going on; ``deadline_s`` is when it is ended, None if only what it waits for ends it."""

    owner: str
    reason: str
    for_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """A piece of work that is going on."""

    stage: str
    name: str
    for_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One moment ``at`` (seconds since the epoch) of a run; ``pid`` is the process of the driver.

    ``waits`` and ``work`` (at most 20) have the longest first; ``causes`` are sentences about what the admission law,
    the buffer and the pool wait for. ``idle`` and ``advice`` are those of :class:`RunSummary` until now, ``score`` is
    the last of its ``scores``. ``failed`` is the error that has ended the run, if one has.
    """

    pid: int
    at: float
    step: int
    steps: int
    waits: tuple[Waiting, ...]
    work: tuple[Doing, ...]
    causes: tuple[str, ...]
    idle: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    advice: Mapping[str, Any] | None = None
    score: Mapping[str, Any] | None = None
    failed: str = ""

    def sentences(self) -> list[str]:
        lines = [f"step {self.step} of {self.steps} is done"]
        if self.score is not None:
            lines[0] += f"; held-out success {self.score['success']:.3f} ({_versions(self.score)})"
        lines += [str(self.advice["sentence"])] if self.advice is not None and "sentence" in self.advice else []
        for wait in self.waits:
            end = "" if wait.deadline_s is None else f"; it is ended after {wait.deadline_s:g} s"
            lines.append(f"{wait.owner} has waited {_time(wait.for_s)} for {wait.reason}{end}")
        return [*lines, *self.causes, *(f"{work.stage}: {work.name}, for {_time(work.for_s)}" for work in self.work)]


class Watch:
    """Writes the status of a run every few seconds, and ends a stall. Takes its time from the running loop.

    ``done`` returns how many of the ``steps`` are done, ``causes`` sentences about what the parts wait for, for which
    ``ask`` asks the workers, ``measured`` ``idle`` and ``advice`` of the status, ``score`` its score;
    ``stall_timeout_s`` is the longest wait of the trainer, without the time until which it was ``paused``. The timeline
    is saved at ``timeline_path``, so seldom that it takes at most 1 % of the time.
    """

    def __init__(
        self,
        path: Path,
        *,
        timeline: Timeline,
        steps: int,
        done: Callable[[], int],
        causes: Callable[[], Iterable[str]],
        stall_timeout_s: float,
        measured: Callable[[], Mapping[str, Any]] = dict,
        score: Callable[[], Mapping[str, Any] | None] = lambda: None,
        ask: Callable[[], Awaitable[None]] | None = None,
        paused: Callable[[], bool] = lambda: False,
        every_s: float = 2.0,
        timeline_path: Path | None = None,
    ) -> None:
        self._path = path
        self._timeline_path = timeline_path
        self._save_again_s = float("-inf")
        self._timeline = timeline
        self._steps = steps
        self._done = done
        self._causes = causes
        self._measured = measured
        self._score = score
        self._ask = ask
        self._paused = paused
        self._paused_until_s = float("-inf")
        self._stall_timeout_s = stall_timeout_s
        self._every_s = every_s
        self._logged: set[tuple[str, str]] = set()
        self._unwritten: set[Path] = set()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch while the block runs; a stall ends the block with :class:`DeadlineError` (in an exception group).

        An error that ends the block is in the log and in the status that it leaves.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                looking = tasks.create_task(self._watch(), name="watch")
                try:
                    yield
                finally:
                    looking.cancel()
        except Exception as error:
            failed = _first_line(error)
            _log.info("the run failed: %s", failed)
            with suppress(OSError):  # a full disk may be the reason
                await shield_until_done(
                    asyncio.to_thread(write_status, self._path, replace(self.look(), failed=failed))
                )
            raise

    async def _watch(self) -> None:
        while True:
            if self._ask is not None:
                with suppress(TimeoutError, InfrastructureError):  # of a worker that does not answer, or dies now
                    async with asyncio.timeout(self._every_s):
                        await self._ask()
            status = self.look()
            await self._write(self._path, functools.partial(write_status, self._path, status))
            self._check_deadlines(status)
            await self._save_timeline()
            await asyncio.sleep(self._every_s)

    async def _save_timeline(self) -> None:
        begin_s = time.monotonic()
        if self._timeline_path is not None and begin_s >= self._save_again_s:
            await self._write(self._timeline_path, functools.partial(self._timeline.save, self._timeline_path))
            end_s = time.monotonic()
            self._save_again_s = end_s + max(_SAVE_EVERY_S, 100 * (end_s - begin_s))

    async def _write(self, path: Path, write: Callable[[], None]) -> None:
        """Write a file to its end: the watch that comes next writes the same ones. A full disk ends no run."""
        try:
            await shield_until_done(asyncio.to_thread(write))
        except OSError as error:
            if path not in self._unwritten:
                _log.warning("%s is not up to date until it can be written: %s", path, error)
            self._unwritten.add(path)
        else:
            self._unwritten.discard(path)

    def look(self) -> RunStatus:
        now_s, paused = asyncio.get_running_loop().time(), self._paused()
        if paused:  # nothing begins meanwhile, whatever the trainer waits for
            self._paused_until_s = now_s
        waits = [
            Waiting(
                owner=owner,
                reason=reason,
                for_s=for_s,
                deadline_s=self._stall_timeout_s + max(for_s - (now_s - self._paused_until_s), 0.0)
                if owner == "train" and reason != PAUSED and not paused
                else None,
            )
            for owner, reasons in self._timeline.current_waits().items()
            for reason, for_s in reasons.items()
        ]
        work = [Doing(stage=stage, name=name, for_s=for_s) for stage, name, for_s in self._timeline.open_spans()]
        return RunStatus(
            pid=os.getpid(),
            at=time.time(),
            step=self._done(),
            steps=self._steps,
            waits=tuple(sorted(waits, key=lambda wait: -wait.for_s)),
            work=tuple(work[:MOST_SHOWN]),
            causes=tuple(self._causes()),
            score=self._score(),
            **{name: value for name, value in self._measured().items() if name in ("idle", "advice")},
        )

    def _check_deadlines(self, status: RunStatus) -> None:
        now = {(wait.owner, wait.reason) for wait in status.waits}
        self._logged &= now
        for wait in status.waits:
            if wait.deadline_s is None or wait.for_s < wait.deadline_s / 10:
                continue
            _, *reasons = status.sentences()
            why = "; ".join(reasons)
            if (wait.owner, wait.reason) not in self._logged:
                self._logged.add((wait.owner, wait.reason))
                _log.warning("a long wait: %s", why)
            if wait.for_s >= wait.deadline_s:
                _log.error("a wait is ended: %s", why)
                raise DeadlineError(
                    f"{wait.owner} waited {_time(wait.for_s)} for {wait.reason} (telemetry.stall_timeout_s = "
                    f"{self._stall_timeout_s:g}):\n  " + "\n  ".join(reasons),
                    waiting_for=wait.reason,
                    timeout_s=self._stall_timeout_s,
                )


def write_status(path: Path, status: RunStatus) -> None:
    """Replace the file as a whole; only its owner may read it."""
    draft = path.with_name(path.name + ".part")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(to_json(status)))
    draft.replace(path)


def read_status(path: Path) -> RunStatus:
    """Read what :func:`write_status` wrote.

    Raises:
        OSError: the file does not exist.
        ConfigError: it is not a status.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunStatus)
    except (msgspec.MsgspecError, IsADirectoryError) as error:
        raise ConfigError(f"{path} is not the status of a run: {error!r}", path="run") from error


class _Advice(msgspec.Struct):
    sentence: str


class _Results(msgspec.Struct):
    advice: _Advice | None


def read_advice(path: Path) -> list[str]:
    """Return the sentence of the advice in ``summary.json``, if there is one.

    Raises:
        OSError: the file does not exist.
        ConfigError: it is not a summary.
    """
    try:
        advice = msgspec.json.decode(path.read_bytes(), type=_Results).advice
    except (msgspec.MsgspecError, IsADirectoryError) as error:
        raise ConfigError(f"the run has ended, but {path} is damaged: {error!r}", path="run") from error
    return [advice.sentence] if advice is not None else []


def _first_line(error: BaseException) -> str:
    """Return class and first line of an error, or of the first one of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _time(time_s: float) -> str:
    return f"{time_s:.1f} s" if time_s < 60 else f"{time_s:.0f} s"
