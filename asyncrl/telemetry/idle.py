"""What every process of a run did or waited for while it trained: shares by cause that sum to 100 %.

At any moment a process has one cause: the first that applies of

- trainer: ``publication`` (it publishes), ``update``, ``checkpoint``, ``hand-over`` (of devices that it shares with
  rollouts), ``pause``, ``evaluation``, ``publication`` (it waits for the one before, or until older versions are
  released); while it waits for groups, where they are: ``rollouts``, ``reward``, ``reference``, ``values``, and
  ``publication`` or ``prompts`` if there are none.
- reward, reference, critic, driver: their own work (``prompts`` of the driver); ``rollouts`` while groups are being
  sampled; then as a replica.
- replica: ``restart`` (dead or starting), ``weights`` (fenced until the next version), its groups; without groups, why
  none is issued: ``pause``, ``buffer`` (no room in it), ``end of the run``, ``prompts`` (they are being made), and at
  the staleness bound ``publication`` or ``checkpoint`` if that is under way, else ``staleness bound``; ``no group``
  while all groups are on other replicas.

The time that a replica has groups is divided by the measurement of its worker (:mod:`asyncrl.rollout.work`):
``generate``, ``environment`` (no row generates), ``episodes`` (templates, encoding), and ``transfer``, the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import TypeAlias

Activity: TypeAlias = str | tuple[str, str]
"""A stage that works, or a stage and the reason for which it waits."""

NOT_RECORDED = "not recorded"

_TRAINER: dict[Activity, str] = {
    ("publish", "trainer"): "publication",
    "train": "update",
    "checkpoint": "checkpoint",
    ("train", "checkpoint"): "checkpoint",
    ("train", "hand-over"): "hand-over",
    ("train", "pause"): "pause",
    ("train", "evaluation"): "evaluation",
    ("train", "publication"): "publication",
    ("train", "release"): "publication",
}
_GROUPS: dict[Activity, str] = {
    "rollout": "rollouts",
    "reward": "reward",
    "reference": "reference",
    "values": "values",
    "baseline": "rollouts",
    "train": "update",
    "checkpoint": "checkpoint",
    "publish": "publication",
    "prompts": "prompts",
}
_ISSUE: dict[Activity, str] = {
    ("issue", "pause"): "pause",
    ("issue", "room in the buffer"): "buffer",
    ("issue", "end of the run"): "end of the run",
    "prompts": "prompts",
}
_VERSION: dict[Activity, str] = {
    "publish": "publication",
    "checkpoint": "checkpoint",
    ("train", "checkpoint"): "checkpoint",
}
_STAGES = {"reward": "reward", "reference": "reference", "critic": "values", "driver": "prompts"}
BUSY = "busy"


def _first(causes: Mapping[Activity, str], now: Collection[Activity]) -> str | None:
    return next((cause for activity, cause in causes.items() if activity in now), None)


def trainer_cause(now: Collection[Activity]) -> str:
    cause = _first(_TRAINER, now)
    if cause is None and ("train", "rollouts") in now:
        cause = _first(_GROUPS, now) or "rollouts"
    return cause or NOT_RECORDED


def idle_cause(now: Collection[Activity]) -> str:
    """Return why a replica that serves has no group."""
    cause = _first(_ISSUE, now)
    if cause is None and ("issue", "staleness bound") in now:
        cause = _first(_VERSION, now) or "staleness bound"
    return cause or "no group"


class ProcessTimes:
    """Seconds of every process by cause. Pure: the caller brings the times, which must not go back.

    >>> times = ProcessTimes()
    >>> times.begin(0.0)
    >>> times.changed({("train", "rollouts"), "rollout"}, 0.0)
    >>> times.changed({"train"}, 3.0)
    >>> times.seconds(4.0)
    {'trainer': {'rollouts': 3.0, 'update': 1.0}}
    """

    def __init__(self) -> None:
        self._idle = idle_cause(())
        self._seen: set[str] = {"trainer"}
        self._causes: dict[str, str] = dict.fromkeys(("trainer", *_STAGES), NOT_RECORDED)
        self._idle_replicas: set[str] = set()
        self._since_s: dict[str, float] = {}
        self._seconds: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._begun_s: float | None = None
        self._ended_s: float | None = None

    def begin(self, at_s: float) -> None:
        """Count from now on, from 0."""
        self._seconds.clear()
        self._begun_s, self._ended_s = at_s, None
        self._since_s = dict.fromkeys(self._causes, at_s)

    def end(self, at_s: float) -> None:
        """Count no more."""
        self._settle(at_s)
        self._ended_s = at_s

    def changed(self, now: Collection[Activity], at_s: float) -> None:
        """Take what goes on from ``at_s`` on."""
        idle = idle_cause(now)
        self._set("trainer", trainer_cause(now), at_s)
        for process, stage in _STAGES.items():
            if stage in now:
                self._seen.add(process)
            self._set(process, stage if stage in now else "rollouts" if "rollout" in now else idle, at_s)
        if idle != self._idle:
            self._idle = idle
            for name in self._idle_replicas:
                self._set(name, idle, at_s)

    def replica(self, name: str, state: str, at_s: float) -> None:
        """Take the state of a replica: ``busy``, ``idle``, ``restart`` or ``weights``."""
        self._seen.add(name)
        if state == "idle":
            self._idle_replicas.add(name)
        else:
            self._idle_replicas.discard(name)
        self._set(name, self._idle if state == "idle" else state, at_s)

    def seconds(self, now_s: float) -> dict[str, dict[str, float]]:
        """Return the seconds by process and cause; each process has those of the whole time."""
        if self._begun_s is None:
            return {}
        now_s = now_s if self._ended_s is None else self._ended_s
        self._settle(now_s)
        total_s, found = now_s - self._begun_s, {}
        replicas = sorted(self._seen - {"trainer", *_STAGES}, key=lambda name: (len(name), name))
        for process in ("trainer", *_STAGES, *replicas):
            if process in self._seen:
                causes = dict(self._seconds[process])
                rest_s = total_s - sum(causes.values())
                if rest_s > 1e-9 * total_s:
                    causes[NOT_RECORDED] = causes.get(NOT_RECORDED, 0.0) + rest_s
                found[process] = causes
        return found

    def _set(self, process: str, cause: str, at_s: float) -> None:
        if self._begun_s is not None and self._ended_s is None:
            since_s = self._since_s.setdefault(process, at_s)
            if at_s > since_s:
                self._seconds[process][self._causes[process]] += at_s - since_s
                self._since_s[process] = at_s
        self._causes[process] = cause

    def _settle(self, at_s: float) -> None:
        for process, cause in self._causes.items():
            self._set(process, cause, at_s)


def idle_shares(
    seconds: Mapping[str, Mapping[str, float]], work: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the share of every cause in the time of each process, in percent, the largest first.

    ``seconds`` are those of :meth:`ProcessTimes.seconds`; ``work`` has by replica the seconds ``generate_s``,
    ``environment_s`` and ``episodes_s`` by which its busy time is divided.

    >>> idle_shares({"replica": {"busy": 3.0, "publication": 1.0}}, {"replica": {"generate_s": 2.0}})
    {'replica': {'generate': 50.0, 'transfer': 25.0, 'publication': 25.0}}
    """
    found = {}
    for process, causes in seconds.items():
        parts = dict(causes)
        left_s = parts.pop(BUSY, 0.0)
        for cause in ("generate", "environment", "episodes"):
            part_s = min(left_s, work.get(process, {}).get(f"{cause}_s", 0.0))
            parts |= {cause: part_s} if part_s else {}
            left_s -= part_s
        parts |= {"transfer": left_s} if left_s > 0 else {}
        total_s = sum(parts.values())
        shares = {cause: 100 * part_s / total_s for cause, part_s in parts.items()} if total_s else {}
        found[process] = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return found
