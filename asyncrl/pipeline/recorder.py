"""Writes down what the loop tells: metrics, samples and scores, to the run's folder, the trackers and the screen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from asyncrl.interfaces import TextTracker, Tracker
from asyncrl.pipeline.evaluation import EvaluationResult
from asyncrl.pipeline.training_plan import StepRecord
from asyncrl.telemetry.progress import Progress
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.trajectory_text import trajectory_text

__all__ = ["Recorder"]


class Recorder:
    """An :class:`asyncrl.pipeline.driver.Observer`.

    Attributes:
        history: what the summary needs at the end, and a checkpoint carries over: scores by step, rewards by step.
    """

    def __init__(
        self, run: RunDirectory, progress: Progress, tracker: Tracker, *, history: dict[str, Any] | None = None
    ) -> None:
        self._run = run
        self._progress = progress
        self._tracker = tracker
        self._stepped_s = time.monotonic()
        self.history: dict[str, Any] = history or {"evaluations": [], "rewards": []}
        # A score that came after its step's checkpoint stands in the metrics alone.
        known = {record["step"] for record in self.history["evaluations"]}
        for line in run.metrics() if run.resumed else ():
            if "eval/success" in line and line["step"] not in known:
                known.add(line["step"])
                score = {"step": line["step"], "success": line["eval/success"], "reward": line["eval/reward_mean"]}
                self.history["evaluations"].append(score)

    def supervised(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step of the warm start is done."""
        self._log({f"sft/{name}": value for name, value in metrics.items()}, step=0, version=0)
        self._progress.update(loss=metrics["loss"])
        self._progress.advance()

    def stepped(self, record: StepRecord) -> None:
        """As :meth:`asyncrl.pipeline.driver.Observer.stepped`."""
        reward = sum(record.rewards) / len(record.rewards)
        now_s, tokens = time.monotonic(), sum(record.lengths)
        tokens_per_s = tokens / max(now_s - self._stepped_s, 1e-9)
        self._stepped_s = now_s
        self.history["rewards"].append(reward)
        metrics = {
            "reward_mean": reward,
            "length_mean": tokens / len(record.lengths),
            "tokens_per_s": tokens_per_s,
            **record.certificate.as_metrics(),
            "groups_ready": record.buffer_ready,
            "groups_pending": record.buffer_pending,
            "groups_without_signal": _groups_without_signal(record),
            **{f"reward/{name}": value for name, value in record.reward_parts.items()},
            **{f"train/{name}": value for name, value in record.metrics.items()},
        }
        self._log(metrics, step=record.step, version=record.weight_version)
        self._progress.update(
            reward=reward,
            tokens_per_s=tokens_per_s,
            staleness=record.certificate.maximum,
            queue_depth=record.buffer_ready,
        )
        self._progress.advance()

    def evaluated(self, result: EvaluationResult, *, step: int) -> None:
        """As :meth:`asyncrl.pipeline.driver.Observer.evaluated`."""
        self.history["evaluations"].append({"step": step, "success": result.success, "reward": result.reward_mean})
        metrics = {
            "eval/success": result.success,
            "eval/reward_mean": result.reward_mean,
            "eval/tokens_mean": result.tokens_mean,
            "eval/tasks": float(result.tasks),
            "eval/failed": float(result.failed),
            **{f"eval/reward/{name}": value for name, value in result.reward_parts.items()},
        }
        self._log(metrics, step=step, version=result.weight_version)
        self._progress.update(success=result.success)
        failed = f", {result.failed} more failed" if result.failed else ""
        self._progress.note(
            f"held-out success {result.success:.3f} on {result.tasks} tasks{failed} "
            f"(weight version {result.weight_version})"
        )

    def sampled(self, trajectory: dict[str, Any], *, step: int, slot: int) -> None:
        """As :meth:`asyncrl.pipeline.driver.Observer.sampled`."""
        record = {"step": step, "slot": slot, **trajectory}
        self._run.log_trajectory(record)
        if isinstance(self._tracker, TextTracker):
            self._tracker.log_text("trajectory", trajectory_text(record), step=step)

    def _log(self, metrics: Mapping[str, float], *, step: int, version: int) -> None:
        self._run.log_metrics(metrics, step=step, version=version)
        self._tracker.log(metrics, step=step)


def _groups_without_signal(record: StepRecord) -> float:
    """Share of the groups whose rows all got the same reward: their advantages are 0."""
    rows_per_group = len(record.rewards) // max(record.certificate.groups, 1)
    starts = range(0, len(record.rewards), rows_per_group)
    flat = Counter(len(set(record.rewards[start : start + rows_per_group])) == 1 for start in starts)
    return flat[True] / max(record.certificate.groups, 1)
