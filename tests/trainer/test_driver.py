"""The loop on fakes and a virtual clock: what overlaps, what is dropped, what ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import EnvironmentFailure, RolloutsLostError, VersionLostError, WeightError
from asyncrl.interfaces import DroppedGroup, GroupSummary
from asyncrl.ledger import Committed, Dropped, RecordedGroup, Recovered
from asyncrl.rollout.publication import Ended
from asyncrl.staleness import POLICIES, AdmissionLaw, certify
from asyncrl.telemetry.timeline import Timeline
from asyncrl.testing import EchoFactory
from asyncrl.testing.clock import run_virtually
from asyncrl.trainer.checkpoint import DriverState
from asyncrl.trainer.driver import Driver, TrainingPlan
from asyncrl.trainer.evaluation import EvaluationPlan
from asyncrl.trainer.group import Group
from asyncrl.trainer.journal import Journal
from asyncrl.trainer.learner import StepRecord
from asyncrl.trainer.recovery import driver_state
from asyncrl.weights import WeightManifest
from buffers.replay import AsyncReplayBuffer

SAMPLING_S, UPDATE_S = 10.0, 10.0
GROUPS = 2


class Parts:
    """Stages, learner, trainer, pool and observer in one; sampling and updates take ten seconds each."""

    environments = EchoFactory()
    reward = None

    def __init__(self, buffer: AsyncReplayBuffer, *, fails: dict[int, BaseException] | None = None) -> None:
        self.buffer = buffer
        self.journal = Journal()
        self.timeline = Timeline()
        self.pool = self.trainer = self
        self.weight_version = 0
        self.fails = fails or {}
        self.events: list[tuple[float, str]] = []
        self.batches: list[list[int]] = []
        self.records: list[StepRecord] = []
        self.unsaved_steps: dict[int, str] = {}

    def _note(self, event: str) -> None:
        self.events.append((asyncio.get_running_loop().time(), event))

    # stages

    async def sample(self, group: Group, *, show: bool = False) -> Any:
        version = self.weight_version
        self._note(f"sample {group.group_id}")
        await asyncio.sleep(SAMPLING_S)
        if (failure := self.fails.get(group.group_id)) is not None:
            return failure, None
        group.summary, group.rows = summary(group.group_id, version=version), _rows()
        return None, {"text": ""} if show else None

    async def complete(self, group: Group) -> None:
        self.buffer.put(group.known, group.sampled_rows)

    # learner

    def oldest_version(self, step: int) -> None:
        return None

    async def learn(self, step: int, groups: list[Group], *, first: bool, drops: Any) -> StepRecord:
        self._note(f"train {step}")
        await asyncio.sleep(UPDATE_S)
        self.batches.append([group.group_id for group in groups])
        summaries = [group.known for group in groups]
        certificate = certify(summaries, trainer_version=step - 1, dropped_rows=drops.rows, dropped_tokens=drops.tokens)
        return StepRecord(
            step=step,
            trainer_metrics={"tokens_trained": float(certificate.tokens)},
            certificate=certificate,
            reused=certify([], trainer_version=step - 1),
            rewards=tuple(summary.rewards[0] for summary in summaries),
            lengths=tuple(summary.lengths[0] for summary in summaries),
            rows=tuple(summary.rows for summary in summaries),
        )

    # trainer and pool

    @property
    def needed_versions(self) -> frozenset[int]:
        return frozenset({self.weight_version})

    async def publish(self, version: Any) -> Any:
        if isinstance(version, int):
            return [WeightManifest(version=version, transport="none", location="", tensors=())]
        self.weight_version = version.version
        return Ended(version=version.version, committed=(), fenced={})

    def take_proofs(self) -> list[Any]:
        return []

    async def release(self, version: int) -> None: ...

    def explain(self) -> list[str]:
        return ["pool: fine"]

    # observer

    def stepped(self, record: StepRecord) -> None:
        self.records.append(record)

    def evaluated(self, result: Any, *, step: int) -> None:
        self._note(f"evaluated {step}")

    def unsaved(self, step: int, reason: str) -> None:
        self.unsaved_steps[step] = reason

    def unscored(self, step: int, reason: str) -> None:
        self._note(f"no score {step}: {reason}")

    def sampled(self, trajectory: Any, *, step: int, group_id: int) -> None:
        self._note(f"shown {group_id}")


def _rows() -> DataProtoFuture:
    return DataProtoFuture.of(DataProto.from_dict({"x": torch.zeros(1)}))


def summary(group_id: int, *, version: int) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        rows=1,
        oldest_version=version,
        tokens=4,
        version_tokens={version: 4},
        rewards=(1.0,),
        lengths=(4,),
    )


def driver(
    *, max_staleness: int, steps: int = 3, fails: dict[int, BaseException] | None = None, **options: Any
) -> tuple[Driver, Parts]:
    window = GROUPS * (max_staleness + 1)
    buffer = AsyncReplayBuffer(capacity=window, max_staleness=max_staleness)
    parts: Any = Parts(buffer, fails=fails)
    parts.advantages = SimpleNamespace(kl_coef=None, kl_start=None)
    parts.policy = POLICIES["wait"]
    made = Driver(
        plan=TrainingPlan(steps=steps, groups_per_step=GROUPS, group_size=1, **options),
        law=AdmissionLaw(GROUPS, max_staleness=max_staleness, total_groups=steps * GROUPS),
        stages=parts,
        learner=parts,
        observer=parts,
    )
    return made, parts


def finish(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(3600):
            await story

    run_virtually(bounded())


@pytest.mark.parametrize(("max_staleness", "end_s"), [(0, 60.0), (1, 40.0), (2, 40.0)])
def test_one_number_makes_it_synchronous_or_overlapping(max_staleness: int, end_s: float) -> None:
    """Three steps of ten seconds sampling and ten training: in turns they take sixty, overlapping forty."""
    made, parts = driver(max_staleness=max_staleness)

    async def story() -> None:
        await made.run()
        parts._note("end")

    finish(story())
    assert parts.batches == [[0, 1], [2, 3], [4, 5]]
    assert parts.events[-1] == (end_s, "end")
    stalest = max(record.certificate.maximum for record in parts.records)
    assert stalest == min(max_staleness, 2)
    assert made.groups == {}
    assert made.balance(generated=24, in_flight=0).difference == 0


def test_a_group_that_fails_is_dropped_and_a_later_one_takes_its_place() -> None:
    failure = EnvironmentFailure("broken", tokens_generated=3)
    made, parts = driver(max_staleness=0, fails={1: failure, 4: RolloutsLostError("replicas died")})
    finish(made.run())
    assert parts.batches == [[0, 2], [3, 5], [6, 7]]
    assert made.journal.dropped_tokens == {"environment_failed": 3}
    assert [(record.certificate.dropped_rows, record.certificate.dropped_tokens) for record in parts.records] == [
        (1, 3),
        (1, 0),
        (0, 0),
    ]
    assert made.balance(generated=27, in_flight=0).difference == 0


def test_a_group_keeps_its_task_and_baseline_until_its_last_use() -> None:
    """Each step takes the lowest numbers, and each group is trained on twice."""
    made, parts = driver(max_staleness=3, steps=4, max_uses=2)
    buffer = AsyncReplayBuffer(capacity=8, max_staleness=3, selection="fifo_ready", max_uses=2)
    sample = parts.sample

    async def sampled(group: Group, *, show: bool = False) -> Any:
        group.baseline_reward = float(group.group_id)
        return await sample(group, show=show)

    parts.buffer, parts.sample = buffer, sampled  # type: ignore[method-assign]
    learned: list[list[tuple[int, float | None]]] = []
    made.tasks = SimpleNamespace(  # type: ignore[assignment]
        choose=lambda group_id, horizon: 100 + group_id,
        learned=lambda step, groups: learned.append([(each.task_number, each.baseline_reward) for each in groups]),
    )
    finish(made.run())
    assert parts.batches == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert learned == [[(100, 0.0), (101, 1.0)]] * 2 + [[(102, 2.0), (103, 3.0)]] * 2
    assert made.reused == {}


def test_recorded_groups_go_on_with_the_weights_that_sampled_them() -> None:
    """A critic and a greedy baseline depend on the weights: steps 1 and 2 are recorded, and group 4 for the third."""
    versions = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}
    calm, parts = driver(max_staleness=0)
    recorded = {
        group_id: RecordedGroup(summary=summary(group_id, version=version), rows=DataProto(), rewarded=False)
        for group_id, version in versions.items()
    }
    found = Recovered(next_group_id=5, waiting={}, batches={1: (1, 0), 2: (2, 3)}, groups=recorded, dropped_tokens={})
    parts.journal = Journal(cast("Any", SimpleNamespace(recovered=found, append=lambda *_, **__: True)))
    groups = {
        group_id: Group(group_id=group_id, summary=each.summary, rows=_rows()) for group_id, each in recorded.items()
    }
    law = AdmissionLaw(GROUPS, max_staleness=0, total_groups=6, first_group_id=5, held=versions)
    parts.buffer = AsyncReplayBuffer(capacity=5, max_staleness=0)
    sample = parts.sample
    went_on: dict[int, int] = {}

    async def sampled(group: Group, *, show: bool = False) -> Any:
        if group.rows is None:
            return await sample(group, show=show)
        went_on[group.group_id] = parts.weight_version
        return None, None

    parts.sample = sampled  # type: ignore[method-assign]
    finish(dataclasses.replace(calm, law=law, groups=groups).run())
    assert parts.batches == [[1, 0], [2, 3], [4, 5]]
    assert went_on == versions
    assert found.groups == {}  # rows are not kept for the life of the run


@pytest.mark.parametrize(
    ("failure", "dropped"),
    [(EnvironmentFailure("no greedy answer"), True), (RolloutsLostError("no greedy answer"), False)],
)
def test_a_recorded_group_whose_baseline_fails_ends_the_run(
    failure: EnvironmentFailure | RolloutsLostError, dropped: bool
) -> None:
    """Where the environment failed the batch cannot be repeated, so the ledger has a drop; after a resume it can be."""
    calm, parts = driver(max_staleness=0, fails={2: failure})
    found = Recovered(next_group_id=4, waiting={}, batches={1: (0, 1), 2: (2, 3)}, groups={}, dropped_tokens={})
    recorded: list[Any] = []
    ledger = SimpleNamespace(recovered=found, append=lambda *events, **_: recorded.extend(events))
    parts.journal = Journal(cast("Any", ledger))
    groups = {
        group_id: Group(group_id=group_id, summary=summary(group_id, version=0), rows=_rows(), reserved_uses=1)
        for group_id in range(4)
    }
    law = AdmissionLaw(GROUPS, max_staleness=0, total_groups=6, first_group_id=4, held=groups)
    parts.buffer = AsyncReplayBuffer(capacity=4, max_staleness=0)
    with pytest.raises(ExceptionGroup) as caught:
        finish(dataclasses.replace(calm, law=law, groups=groups).run())
    assert caught.group_contains(type(failure), match="no greedy answer")
    assert (Dropped(group_id=2, reason="baseline_failed", tokens=4) in recorded) is dropped
    assert bool(getattr(failure, "__notes__", ())) is dropped


def test_a_recorded_group_that_was_used_before_ends_the_run_with_the_failure_of_its_baseline() -> None:
    """Step 1 used group 1 before the checkpoint, and the recorded step 2 uses it again."""
    failure = EnvironmentFailure("no greedy answer")
    calm, parts = driver(max_staleness=0, fails={1: failure})
    found = Recovered(next_group_id=3, waiting={}, batches={2: (1, 2)}, groups={}, dropped_tokens={})
    recorded: list[Any] = []
    ledger = SimpleNamespace(recovered=found, append=lambda *events, **_: recorded.extend(events))
    parts.journal = Journal(cast("Any", ledger))
    groups = {
        group_id: Group(
            group_id=group_id, summary=summary(group_id, version=0), rows=_rows(), uses=uses, reserved_uses=1
        )
        for group_id, uses in ((1, 1), (2, 0))
    }
    law = AdmissionLaw(GROUPS, max_staleness=0, total_groups=4, first_version=1, first_group_id=3, held=[2])
    parts.buffer = AsyncReplayBuffer(capacity=4, max_staleness=0, max_uses=2)
    parts.weight_version = 1
    started = dataclasses.replace(calm, law=law, groups={2: groups[2]}, reused={1: groups[1]})
    with pytest.raises(ExceptionGroup) as caught:
        finish(started.run())
    assert caught.group_contains(EnvironmentFailure, match="no greedy answer")
    assert not any(isinstance(event, Dropped) for event in recorded)
    assert "resume with fewer steps" in failure.__notes__[0]


def test_half_a_character_in_what_failed_does_not_keep_a_checkpoint_from_being_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("ERROR", logger="asyncrl.trainer.journal")  # in a report, half a character ends xdist
    made, parts = driver(max_staleness=0)
    parts.journal.count_failures({"ValueError": {"count": 1, "example": "cannot use \ud83d"}})
    balance = made.balance(generated=0, in_flight=0)
    state = driver_state(made, balance, step=0, history={"unscored": [(1, "no \udc80")]})
    read = msgspec.json.decode(msgspec.json.encode(state), type=DriverState).history
    assert read["failures"]["ValueError"] == {"count": 1, "example": "cannot use \\ud83d"}
    assert read["unscored"] == [[1, "no \\udc80"]]


class LateDrops(AsyncReplayBuffer):
    """Drops are heard of when the buffer is settled, as from a buffer in another process."""

    _late: list[DroppedGroup]

    def on_drop(self, listener: Callable[[DroppedGroup], None]) -> None:
        self._late, self._listener = [], listener
        super().on_drop(self._late.append)

    async def settled(self) -> None:
        late, self._late[:] = [*self._late], []
        for each in late:
            self._listener(each)


def test_a_drop_that_is_heard_of_after_the_selection_breaks_no_order() -> None:
    """Group 0 is dropped while 1 and 2 are ready, so the step that waited takes these."""
    made, parts = driver(max_staleness=1, fails={0: RolloutsLostError("replicas died")}, in_order=True)
    parts.buffer = LateDrops(capacity=4, max_staleness=1)
    sample = parts.sample

    async def slow_first(group: Group, *, show: bool = False) -> Any:
        if group.group_id == 0:
            await asyncio.sleep(SAMPLING_S)
        return await sample(group, show=show)

    parts.sample = slow_first  # type: ignore[method-assign]
    finish(made.run())
    assert parts.batches == [[1, 2], [3, 4], [5, 6]]


def test_groups_that_fail_one_after_another_end_the_run_by_name() -> None:
    fails: dict[int, BaseException] = {group_id: EnvironmentFailure(f"broken {group_id}") for group_id in range(100)}
    made, parts = driver(max_staleness=0, fails=fails)
    with pytest.raises(ExceptionGroup) as caught:
        finish(made.run())
    assert caught.group_contains(EnvironmentFailure, match="broken 4")  # the fifth, with two groups a step
    assert parts.batches == []


def test_a_version_is_published_while_the_next_step_trains() -> None:
    made, parts = driver(max_staleness=1)

    async def slowly(manifest: Any) -> Any:
        if isinstance(manifest, int):
            return [WeightManifest(version=manifest, transport="none", location="", tensors=())]
        await asyncio.sleep(5.0)
        parts.weight_version = manifest.version
        return Ended(version=manifest.version, committed=(), fenced={})

    parts.publish = slowly  # type: ignore[method-assign]
    finish(made.run())
    trained = [at for at, event in parts.events if event.startswith("train")]
    assert trained == [10.0, 20.0, 35.0]  # step 2 does not wait for version 1; the groups of step 3 do


def test_older_versions_are_released_beside_the_run_and_before_the_next_publication() -> None:
    """A release takes longer than a step: no group waits for it, and never are more than two versions held."""
    made, parts = driver(max_staleness=0, steps=4)
    held: list[int] = []
    publish = parts.publish

    async def noted(version: Any) -> Any:
        if isinstance(version, int):
            parts._note(f"publish {version}")
            held.append(version)
            assert len(held) <= 2
        return await publish(version)

    async def release(version: int) -> None:
        await asyncio.sleep(25.0)
        held.remove(version)

    parts.publish, parts.release = noted, release  # type: ignore[method-assign]
    finish(made.run())
    when = {event: at for at, event in parts.events}
    assert (when["publish 2"], when["sample 4"]) == (40.0, 40.0)
    assert (when["train 3"], when["publish 3"]) == (50.0, 65.0)  # version 1 is held until then
    assert held == [4]
    assert made.timeline.busy_s("release") > 0
    assert "release" in made.timeline.wait_s()["train"]


def test_a_version_that_cannot_be_released_is_named_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    made, parts = driver(max_staleness=0, steps=3)
    asked: list[int] = []

    async def release(version: int) -> None:
        asked.append(version)
        if len(asked) == 1:
            raise WeightError("the store is away")

    parts.release = release  # type: ignore[method-assign]
    finish(made.run())
    assert "version 1 is not released: the store is away" in caplog.text
    assert asked == [1, 1, 2]


def test_a_version_that_fenced_a_replica_is_followed_by_a_whole_one() -> None:
    made, parts = driver(max_staleness=0, steps=4)
    whole: list[int] = []

    async def publish(manifest: Any, rebase: bool = False) -> Any:
        if isinstance(manifest, int):
            whole.extend([manifest] if rebase else [])
            return [WeightManifest(version=manifest, transport="none", location="", tensors=())]
        parts.weight_version = manifest.version
        fenced = {"b": "a delta of another run"} if manifest.version == 2 else {}
        return Ended(version=manifest.version, committed=(), fenced=fenced)

    parts.publish = publish  # type: ignore[method-assign]
    finish(made.run())
    assert whole == [3]


@pytest.mark.parametrize("announces", [True, False])
def test_a_version_is_announced_once_it_serves(announces: bool) -> None:
    """No replica could take version 2: they are coming back."""
    made, parts = driver(max_staleness=0, steps=3, announces=announces)
    announced: list[int] = []

    async def publish(manifest: Any) -> Any:
        if isinstance(manifest, int):
            return [WeightManifest(version=manifest, transport="none", location="", tensors=())]
        parts.weight_version = manifest.version
        committed = () if manifest.version == 2 else ("a",)
        return Ended(version=manifest.version, committed=committed, fenced={})

    async def announce(manifest: WeightManifest) -> None:
        assert parts.weight_version == manifest.version
        announced.append(manifest.version)

    parts.publish, parts.announce = publish, announce  # type: ignore[method-assign]
    finish(made.run())
    assert announced == ([1, 3] if announces else [])


def test_checkpoints_and_evaluations_stand_between_steps() -> None:
    saved: list[int] = []

    async def save(of: Driver, step: int) -> Any:
        saved.append(step)

        async def write() -> None:
            assert made.stages.pool.weight_version == step  # its weights serve, and the next update takes longer

        return write

    made, parts = driver(
        max_staleness=1,
        steps=4,
        checkpoint_every=2,
        evaluation=EvaluationPlan(tasks=1, every=1),
        trajectories_per_step=1,
    )
    made.save_checkpoint = save

    async def evaluate() -> Any:
        return None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "evaluate", lambda self, replicas: evaluate())
        finish(made.run())
    assert saved == [2, 4]
    assert [event for _, event in parts.events if event.startswith("evaluated")] == [
        "evaluated 1",
        "evaluated 2",
        "evaluated 3",
    ]
    assert [event for _, event in parts.events if event.startswith("shown")] == [
        "shown 0",
        "shown 2",
        "shown 4",
        "shown 6",
    ]


def test_a_checkpoint_is_written_beside_the_steps_that_follow_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write takes 2.5 updates; that of step 3 fails: it is named, and nothing else changes."""
    made, parts = driver(max_staleness=2, steps=6, checkpoint_every=2)
    began_s: dict[int, float] = {}
    sealed: list[Any] = []
    monkeypatch.setattr(Journal, "record", lambda _, *events, rows=None: sealed.extend(events))

    async def save(of: Driver, step: int) -> Any:
        clock = asyncio.get_running_loop().time
        assert len(began_s) == sum(isinstance(event, Committed) for event in sealed) + len(parts.unsaved_steps)
        began_s[step] = clock()

        async def write() -> None:
            await asyncio.sleep(2.5 * UPDATE_S)
            if step == 4:
                raise OSError(f"no space left for step {step}")

        return write

    made.save_checkpoint = save
    finish(made.run())
    assert list(began_s) == [2, 4, 6]
    for first, second in ((2, 4), (4, 6)):  # two steps, and half a one of waiting
        assert began_s[second] - began_s[first] == pytest.approx(2.5 * UPDATE_S)
    assert [event.step for event in sealed if isinstance(event, Committed)] == [2, 6]
    assert parts.unsaved_steps == {4: "OSError: no space left for step 4"}
    updates = [at for at, event in parts.events if event.startswith("train")]
    assert updates[2] < began_s[2] + 2.5 * UPDATE_S  # step 3 had begun before step 2 was sealed


def test_an_interrupted_run_seals_the_checkpoint_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for write_s, commits in ((3.0, [2]), (60.0, [])):
        made, _ = driver(max_staleness=2, steps=6, checkpoint_every=2)
        sealed: list[Any] = []
        monkeypatch.setattr(Journal, "record", lambda _, *events, into=sealed, rows=None: into.extend(events))
        taken: list[int] = []

        async def save(of: Driver, step: int, taken: list[int] = taken, write_s: float = write_s) -> Any:
            taken.append(step)
            return functools.partial(asyncio.sleep, write_s)

        async def interrupted(made: Driver = made, taken: list[int] = taken) -> None:
            running = asyncio.ensure_future(made.run())
            while not taken:
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

        made.save_checkpoint = save
        finish(interrupted())
        assert [event.step for event in sealed if isinstance(event, Committed)] == commits
        assert made.write_cut_off == (not commits)


def test_while_it_is_paused_nothing_begins_whatever_was_waited_for() -> None:
    made, parts = driver(max_staleness=0, steps=2)

    async def ordered() -> None:
        running = asyncio.ensure_future(made.run())
        await asyncio.sleep(5)
        made.pause()  # the third group waits for the first version; the first step has begun
        await asyncio.sleep(40)
        assert [event for _, event in parts.events] == ["sample 0", "sample 1", "train 1"]
        made.resume()
        await running

    finish(ordered())
    assert [event for event in parts.events if event[1] in ("train 1", "sample 2", "train 2")] == [
        (10.0, "train 1"),
        (45.0, "sample 2"),
        (55.0, "train 2"),
    ]


def test_a_run_that_is_paused_in_its_last_step_is_not_paused_after_it() -> None:
    made, _ = driver(max_staleness=0, steps=1)

    async def ordered() -> None:
        running = asyncio.ensure_future(made.run())
        await asyncio.sleep(5)
        made.pause()
        assert made.paused
        await running
        assert not made.paused

    finish(ordered())


def test_pinned_evaluations_do_not_hold_checkpoints_up_and_take_turns() -> None:
    saved: list[int] = []

    async def save(of: Driver, step: int) -> Any:
        saved.append(step)
        assert of.evaluating == ({1} if step > 1 else set())
        return functools.partial(asyncio.sleep, 0)

    made, parts = driver(
        max_staleness=1, steps=4, checkpoint_every=1, evaluation=EvaluationPlan(tasks=1, every=1, replicas=1)
    )
    made.save_checkpoint = save

    async def evaluate(self: Driver, *, replicas: int) -> Any:
        while saved != [1, 2, 3, 4]:
            await asyncio.sleep(0.1)
        raise VersionLostError(f"version 1 is lost with its {replicas} replica")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Driver, "evaluate", evaluate)
        finish(made.run())
    assert [event for _, event in parts.events if event.startswith("no score")] == [
        "no score 2: the evaluation of step 1 was still under way",
        "no score 3: the evaluation of step 1 was still under way",
        "no score 1: version 1 is lost with its 1 replica",
    ]
    assert not made.evaluating


def test_an_error_of_a_step_ends_everything() -> None:
    made, parts = driver(max_staleness=2)

    async def broken(*_: Any, **__: Any) -> StepRecord:
        raise ValueError("loss is no number")

    parts.learn = broken  # type: ignore[method-assign]
    with pytest.raises(ExceptionGroup) as caught:
        finish(made.run())
    assert caught.group_contains(ValueError, match="loss is no number")


def test_it_explains_what_everything_waits_for() -> None:
    made, _ = driver(max_staleness=0)
    assert made.explain() == ["admission: group 0 may be issued", *made.buffer.explain(), "pool: fine"]


def test_an_interrupted_step_is_finished_where_that_takes_about_as_long_as_the_one_before():
    """Steps of random lengths, interrupted at random: short ones have 2 s, others twice the last, at most 10 s."""

    async def interrupted(last_s: float, takes_s: float, at_s: float) -> tuple[bool, float]:
        finished: list[bool] = []
        clock = asyncio.get_running_loop().time
        begun_s = clock()

        async def step() -> None:
            await asyncio.sleep(takes_s)
            finished.append(True)

        driver: Any = SimpleNamespace(_step_s=last_s)
        running = asyncio.ensure_future(Driver._finish_if_interrupted(driver, step()))
        await asyncio.sleep(at_s)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return bool(finished), clock() - begun_s

    draw = random.Random(3)
    for _ in range(300):
        last_s, takes_s = (10 ** draw.uniform(-2, 1.5) for _ in range(2))
        at_s = draw.random() * takes_s
        left_s, patience_s = takes_s - at_s, min(max(2 * last_s, 2.0), 10.0)
        finished, took_s = run_virtually(interrupted(last_s, takes_s, at_s))
        assert finished is (left_s <= patience_s)
        assert took_s == pytest.approx(at_s + min(left_s, patience_s))
