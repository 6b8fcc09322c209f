"""Models of worker groups with the same methods and real futures: replicas, the trainer, rewards."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.data.future import Future
from asyncrl.data.plan import Header, Plan, blocks_of
from asyncrl.errors import EnvironmentFailure, WeightVersionError, WorkerDiedError
from asyncrl.interfaces import GroupSummary, KVCachePolicy, Message
from asyncrl.rollout.trajectory import Trajectory, Turn, encode_rows, trajectories_to_batch
from asyncrl.rollout.work import EpisodeTimes
from asyncrl.runtime import ControllerLoop, TaskOwner
from asyncrl.simulation.model import Fault, ModelledDecoder, Scenario
from asyncrl.trainer.learner import TRAINED_COLUMNS
from asyncrl.weights import WeightManifest


class RolledOut:
    """The rows of a group as a block of a plan, which become tensors only when they are fetched.

    ``versions`` has for each row the number of tokens by the version that sampled them.
    """

    __slots__ = ("__weakref__", "group_id", "versions")

    def __init__(self, group_id: int, versions: Sequence[Counter[int]]) -> None:
        self.group_id = group_id
        self.versions = tuple(versions)

    @classmethod
    def of(cls, rows: DataProto) -> list[RolledOut]:
        """Return the groups of rows that :meth:`trajectories` made, in their order."""
        assert rows.batch is not None
        groups: dict[int, list[Counter[int]]] = {}
        columns = (rows.batch[name].unbind() for name in ("input_ids", "weight_versions", "loss_mask"))
        for tokens, stamps, sampled in zip(*columns, strict=True):
            groups.setdefault(int(tokens[0]), []).append(Counter(stamps[sampled].tolist()))
        return [cls(group_id, versions) for group_id, versions in groups.items()]

    @property
    def version_tokens(self) -> Counter[int]:
        """Number of tokens of the group by version."""
        total: Counter[int] = Counter()
        for row in self.versions:
            total.update(row)
        return total

    def rows(self) -> DataProto:
        """Return the columns of :mod:`asyncrl.interfaces`: a prompt of one token, then sampled ones, oldest first."""
        rows = trajectories_to_batch(self.trajectories(), group_id=self.group_id)
        return rows.select([*TRAINED_COLUMNS, "group_id", "rewards"], [], [])

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories for a ledger; the token of the prompt is the group_id."""
        found = []
        for number, row in enumerate(self.versions):
            stamps = (-1, *sorted(row.elements()))
            message: Message = {"role": "assistant", "content": ""}
            found.append(
                Trajectory(
                    task={"group_id": self.group_id},
                    token_ids=(self.group_id,) * len(stamps),
                    loss_mask=tuple(stamp >= 0 for stamp in stamps),
                    behaviour_log_probs=tuple(-float(stamp >= 0) for stamp in stamps),
                    weight_versions=stamps,
                    reward=float((self.group_id + number) % 2),
                    turns=(Turn(start=1, end=len(stamps), finish_reason="stop", message=message),),
                    finish_reason="done",
                )
            )
        return found

    @classmethod
    def get_all(cls, blocks: Sequence[RolledOut]) -> list[DataProto]:
        return [block.rows() for block in blocks]

    @classmethod
    async def fetch_all(cls, blocks: Sequence[RolledOut]) -> list[DataProto]:
        return cls.get_all(blocks)


_SCHEMA = RolledOut(0, [Counter({0: 1})]).rows().schema.any_rows()


@dataclass(slots=True)
class _Calls:
    """Makes the futures that a modelled part returns."""

    loop: ControllerLoop = field(default_factory=ControllerLoop.current)
    owner: TaskOwner = field(init=False)

    def __post_init__(self) -> None:
        self.owner = TaskOwner(self.loop)

    def batch(self, label: str, make: Callable[[], Coroutine[Any, Any, Plan]]) -> DataProtoFuture:
        return DataProtoFuture(self.loop, label).run(make, self.owner)

    def value(self, label: str, make: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        return Future(self.loop, label).run(make, self.owner)


class ModelledReplica:
    """The model of a worker group of rollout workers.

    The durations of a rollout are drawn from its group_id and row, so they do not depend on its replica or time.
    ``take_fault`` removes and returns the fault of a kind that is due at a group_id or step, if the run has one.
    """

    world_size = 1

    def __init__(self, scenario: Scenario, name: str, *, take_fault: Callable[..., Fault | None]) -> None:
        self._scenario = scenario
        self.name = name
        self._take_fault = take_fault
        self._calls = _Calls()
        self.decoder = ModelledDecoder(tokens_per_s=1 / scenario.token_s, saturation=scenario.saturation)
        self.delivered: Counter[str] = Counter()
        self._times = EpisodeTimes()
        self._unfinished: dict[tuple[str, int], Counter[int]] = {}
        self._slowed = 0
        self.awake = False
        """Whether its memory is on its devices."""
        self._paused = False

    @property
    def used_s(self) -> float:
        """Time of the decoding so far in seconds of full speed."""
        return self.decoder.used_until_now()

    async def aclose(self) -> None:
        """End the replica and cancel its calls."""
        self.awake = False
        await self._calls.owner.cancel_all()

    def start(self, model_path: str, weight_version: int) -> Future[Any]:
        async def begin() -> list[float]:
            self.decoder.commit(weight_version)
            self.awake = True
            return [0.0]

        return self._calls.value(f"{self.name}.start", begin)

    def sleep(self) -> Future[Any]:
        async def sleep() -> list[None]:
            self._set_pace(awake=False)
            if self._take_fault(self.decoder.weight_version, "hand-over"):
                raise WorkerDiedError(f"{self.name} died while it fell asleep", group=self.name)
            await asyncio.sleep(self._scenario.hand_over_s)
            self.awake = False
            return [None]

        return self._calls.value(f"{self.name}.sleep", sleep)

    def wake(self) -> Future[Any]:
        async def wake() -> list[None]:
            self.awake = True
            await asyncio.sleep(self._scenario.hand_over_s)
            if self._take_fault(self.decoder.weight_version, "hand-over"):
                raise WorkerDiedError(f"{self.name} died while it woke", group=self.name)
            self._set_pace(awake=True)
            return [None]

        return self._calls.value(f"{self.name}.wake", wake)

    def _set_pace(self, *, awake: bool) -> None:
        self._paused = not awake
        self.decoder.set_pace(0.0 if self._paused else 0.1 if self._slowed else 1.0)

    def rollout(self, prompts: DataProto) -> DataProtoFuture:
        assert prompts.batch is not None
        group_id, rows = int(prompts.batch["group_id"][0]), len(prompts)
        roll_out = self._roll_out if prompts.meta_info["purpose"] == "train" else self._answer
        return self._calls.batch(f"{self.name}.rollout", lambda: roll_out(group_id, rows))

    def prepare_weights(self, manifest: WeightManifest) -> Future[Any]:
        async def prepare() -> list[float]:
            if self._take_fault(manifest.version, "weights"):
                raise WorkerDiedError(f"{self.name} died while it fetched version {manifest.version}", group=self.name)
            await asyncio.sleep(self._scenario.prepare_s)
            return [self._scenario.prepare_s]

        return self._calls.value(f"{self.name}.prepare_weights", prepare)

    def commit_weights(self, version: int, kv_cache: KVCachePolicy = "keep") -> Future[Any]:
        async def commit() -> list[float]:
            await asyncio.sleep(self._scenario.commit_s)
            self.decoder.commit(version)
            return [self._scenario.commit_s]

        return self._calls.value(f"{self.name}.commit_weights", commit)

    def engine_statistics(self) -> Future[Any]:
        async def count() -> dict[str, Any]:
            return {
                "engine": {},
                "delivered": dict.fromkeys(("train", "eval"), 0) | self.delivered,
                "in_flight": {
                    purpose: sum(made.total() for (of, _), made in self._unfinished.items() if of == purpose)
                    for purpose in ("train", "eval")
                },
            }

        return self._calls.value(f"{self.name}.statistics", count)

    async def _roll_out(self, group_id: int, rows: int) -> Plan:
        scenario = self._scenario
        if self._take_fault(group_id, "crash"):
            raise WorkerDiedError(f"{self.name} died during group_id {group_id}", group=self.name)
        if self._take_fault(group_id, "freeze"):
            await asyncio.get_running_loop().create_future()
        slow = self._take_fault(group_id, "slow")
        if slow:
            self._slowed += 1
            self._set_pace(awake=not self._paused)
        failing = self._take_fault(group_id, "environment")
        try:
            versions, made = await self._rows("train", group_id, rows)
        finally:
            if slow:
                self._slowed -= 1
                self._set_pace(awake=not self._paused)
        if failing:
            raise EnvironmentFailure(f"the environment of group_id {group_id} failed", tokens_generated=made.total())
        block = RolledOut(group_id, versions)
        summary = _summary(block, made)
        meta: dict[str, Any] = {"summary": asdict(summary), "wasted_tokens": 0, "times": dict(self._times.totals)}
        if self._take_fault(group_id, "garbage"):
            broken = [
                {"tokens": summary.tokens + 1},
                {"version_tokens": {1 << 20: summary.tokens}},
                {"group_id": group_id + 1},
            ]
            meta["summary"] |= random.Random(scenario.seed ^ group_id).choice(broken)  # noqa: S311
        if scenario.ledger:
            trajectories = block.trajectories()
            batch = trajectories_to_batch(trajectories, group_id=group_id)
            batch.meta_info |= meta | {"record": encode_rows(trajectories)}
            return Plan.of(batch)
        return Plan.shard(block, Header(rows=rows, schema=_SCHEMA, meta_info=meta, size_bytes=16 * summary.tokens))

    async def _answer(self, group_id: int, rows: int) -> Plan:
        """Answer held-out tasks."""
        if self._take_fault(self.decoder.weight_version, "evaluation"):
            raise WorkerDiedError(f"{self.name} died during an evaluation", group=self.name)
        versions, made = await self._rows("eval", group_id, rows)
        block = RolledOut(group_id, versions)
        meta: dict[str, Any] = {"summary": asdict(_summary(block, made)), "wasted_tokens": 0}
        return Plan.shard(block, Header(rows=rows, schema=_SCHEMA, meta_info=meta, size_bytes=16 * made.total()))

    async def _rows(self, purpose: str, group_id: int, rows: int) -> tuple[list[Counter[int]], Counter[int]]:
        """Run the rollouts of a call; return the number of tokens by version, of each and of all."""
        made = self._unfinished[purpose, group_id] = Counter()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._row(purpose, group_id, row, made)) for row in range(rows)]
        finally:
            del self._unfinished[purpose, group_id]
        return [task.result() for task in tasks], made

    async def _row(self, purpose: str, group_id: int, row: int, made: Counter[int]) -> Counter[int]:
        """Run one rollout: turns of tokens, each followed by the environment's time."""
        scenario = self._scenario
        dice = scenario.dice(group_id, row)
        tokens = scenario.length(dice)
        turns = min(scenario.turns, tokens)
        versions: Counter[int] = Counter()
        with self._times.episode():
            for turn in range(turns):
                with self._times.request() as delivered:
                    sampled = await self.decoder.generate(tokens // turns + (turn < tokens % turns))
                    delivered.append(sampled.total())
                versions.update(sampled)
                made.update(sampled)
                self.delivered[purpose] += sampled.total()
                pause_s = scenario.turn_s.sample(dice)
                if pause_s:
                    with self._times.at("environment"):
                        await asyncio.sleep(pause_s)
        return versions


def _summary(block: RolledOut, made: Counter[int]) -> GroupSummary:
    return GroupSummary(
        group_id=block.group_id,
        rows=len(block.versions),
        oldest_version=min(made),
        tokens=made.total(),
        version_tokens=dict(sorted(made.items())),
        rewards=tuple(float((block.group_id + row) % 2) for row in range(len(block.versions))),
        lengths=tuple(row.total() for row in block.versions),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The batch of one update, counted from its rows and not from the driver's state.

    Attributes:
        step: training step, from 1.
        oldest: the staleness of the oldest token of each group, masked or not.
        staleness: number of tokens in the loss, by trainer version minus sampling version.
        masked: number of tokens that are masked out of the loss.
    """

    step: int
    group_ids: tuple[int, ...]
    oldest: tuple[int, ...]
    staleness: Counter[int]
    masked: int


class ModelledTrainer:
    """The model of a worker group of one trainer rank. Calls run one after another.

    With ``fetch``, it fetches every batch, masks it with the code of the real trainer, and counts the loss mask.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        take_fault: Callable[..., Fault | None],
        weight_version: int = 0,
        fetch: bool = False,
    ) -> None:
        self._scenario = scenario
        self._take_fault = take_fault
        self._fetch = fetch
        self._calls = _Calls()
        self._turn = asyncio.Lock()
        self._version = weight_version
        self._dice = random.Random(scenario.seed + weight_version)  # noqa: S311
        self.trained: list[Trained] = []
        self.published: set[int] = set()
        self.awake = not scenario.shared_devices
        """Whether its memory is on its devices."""

    def update(self, batch: DataProtoFuture, oldest_version: int | None = None, credit: object = None) -> Future[Any]:
        return self._calls.value("trainer.update", lambda: self._update(batch, oldest_version))

    def sleep(self) -> Future[Any]:
        return self._calls.value("trainer.sleep", lambda: self._hand_over(awake=False))

    def wake(self) -> Future[Any]:
        return self._calls.value("trainer.wake", lambda: self._hand_over(awake=True))

    async def _hand_over(self, *, awake: bool) -> list[None]:
        async with self._turn:
            self.awake = True  # in between, too
            await asyncio.sleep(self._scenario.hand_over_s)
            self.awake = awake
            return [None]

    def _check_awake(self) -> None:
        if not self.awake:
            raise AssertionError("the trainer computes while it is asleep")

    def publish(self, version: int, rebase: bool = False) -> Future[Any]:
        async def publish() -> list[WeightManifest]:
            async with self._turn:
                self._check_awake()
                if version != self._version:
                    raise WeightVersionError(f"publish({version}) was called at version {self._version}")
                await asyncio.sleep(self._scenario.publish_s)
                self.published.add(version)
                return [WeightManifest(version=version, transport="modelled", location="", tensors=())]

        return self._calls.value("trainer.publish", publish)

    def release(self, version: int) -> Future[Any]:
        async def release() -> list[None]:
            self.published.remove(version)
            return [None]

        return self._calls.value("trainer.release", release)

    async def aclose(self) -> None:
        """End the trainer and cancel its calls."""
        await self._calls.owner.cancel_all()

    async def _update(self, batch: DataProtoFuture, oldest_version: int | None) -> list[dict[str, float]]:
        async with self._turn:
            self._check_awake()
            step = self._version + 1
            if self._take_fault(step, "trainer"):
                raise WorkerDiedError(f"the trainer died in step {step}", group="trainer")
            plan = await batch.plan()
            if self._scenario.ledger:
                groups = RolledOut.of(await batch)
            else:
                groups = [block for block in blocks_of(plan.node) if isinstance(block, RolledOut)]
            staleness: Counter[int] = Counter()
            masked = 0
            for group in groups:
                for version, tokens in group.version_tokens.items():
                    if oldest_version is not None and version < oldest_version:
                        masked += tokens
                    else:
                        staleness[self._version - version] += tokens
            if self._fetch:
                _check_loss_mask(await batch, oldest_version, tokens=staleness.total())
            await asyncio.sleep(self._scenario.update_s.sample(self._dice))
            self._version = step
            group_ids = tuple(group.group_id for group in groups)
            oldest = tuple(step - 1 - min(group.version_tokens) for group in groups)
            self.trained.append(
                Trained(step=step, group_ids=group_ids, oldest=oldest, staleness=staleness, masked=masked)
            )
            return [{"tokens_trained": float(staleness.total()), "loss": 0.0}]


class ModelledRewards:
    """The model of a reward model, which takes ``reward_s``."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._calls = _Calls()
        self._dice = random.Random(scenario.seed)  # noqa: S311

    async def aclose(self) -> None:
        """End the reward model and cancel its calls."""
        await self._calls.owner.cancel_all()

    def score(self, rows: DataProtoFuture) -> DataProtoFuture:
        async def score() -> Plan:
            header = await rows.header()
            assert self._scenario.reward_s is not None
            await asyncio.sleep(self._scenario.reward_s.sample(self._dice))
            rewards = [float(row % 2) for row in range(header.rows)]
            return Plan.of(DataProto.from_dict(tensors={"scores": torch.tensor(rewards)}))

        return self._calls.batch("reward.score", score)


def _check_loss_mask(batch: DataProto, oldest_version: int | None, *, tokens: int) -> None:
    from asyncrl.trainer.workers import mask_stale_tokens

    masked = batch if oldest_version is None else mask_stale_tokens(batch, oldest_version)
    assert masked.batch is not None
    counted = int(np.asarray(masked.batch["loss_mask"].values()).sum())
    if counted != tokens:
        raise AssertionError(f"the loss mask has {counted} tokens, and {tokens} of the batch are within the bound")
