"""Modelled parts with the faces of worker groups: replicas, the trainer, rewards. Their futures are real ones."""

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
from asyncrl.data.nodes import blocks_of
from asyncrl.data.pending import Future
from asyncrl.data.plan import Header, Plan
from asyncrl.data.ragged import ragged_from_list
from asyncrl.errors import EnvironmentFailure, WeightVersionError, WorkerDiedError
from asyncrl.interfaces import GroupSummary, KVCachePolicy, Message
from asyncrl.rollout.record import encode_rows
from asyncrl.rollout.trajectory import Trajectory, Turn, trajectories_to_batch
from asyncrl.simulation.decoder import ModelledDecoder
from asyncrl.simulation.scenario import Fault, Scenario
from asyncrl.single_controller.controller_loop import ControllerLoop, TaskOwner
from asyncrl.weights.manifest import WeightManifest

__all__ = ["ModelledReplica", "ModelledRewards", "ModelledTrainer", "RolledOut", "Trained"]


class RolledOut:
    """The rows of a group, where they lie: made into tensors only for those who fetch them.

    Attributes:
        slot: number of the prompt.
        versions: for each row its tokens by the version that sampled them.
    """

    __slots__ = ("__weakref__", "slot", "versions")

    def __init__(self, slot: int, versions: Sequence[Counter[int]]) -> None:
        self.slot = slot
        self.versions = tuple(versions)

    @classmethod
    def of(cls, rows: DataProto) -> list[RolledOut]:
        """The groups that lie in rows of :meth:`trajectories`, in their order."""
        assert rows.batch is not None
        groups: dict[int, list[Counter[int]]] = {}
        columns = (rows.batch[name].unbind() for name in ("input_ids", "weight_versions", "loss_mask"))
        for tokens, stamps, sampled in zip(*columns, strict=True):
            groups.setdefault(int(tokens[0]), []).append(Counter(stamps[sampled].tolist()))
        return [cls(slot, versions) for slot, versions in groups.items()]

    @property
    def version_tokens(self) -> Counter[int]:
        """Tokens of the group by version."""
        total: Counter[int] = Counter()
        for row in self.versions:
            total.update(row)
        return total

    def rows(self) -> DataProto:
        """The columns of :mod:`asyncrl.interfaces`; a prompt of one token, then the sampled ones, oldest first."""
        stamps = [[-1, *sorted(row.elements())] for row in self.versions]
        sampled = [torch.tensor([stamp >= 0 for stamp in row]) for row in stamps]
        return DataProto.from_dict(
            tensors={
                "input_ids": ragged_from_list([torch.ones(len(row), dtype=torch.int64) for row in stamps]),
                "loss_mask": ragged_from_list(sampled),
                "behaviour_log_probs": ragged_from_list([-mask.float() for mask in sampled]),
                "weight_versions": ragged_from_list([torch.tensor(row, dtype=torch.int32) for row in stamps]),
            }
        )

    def trajectories(self) -> list[Trajectory]:
        """The same, as a ledger keeps them: the prompt is one token, the slot."""
        found = []
        for number, row in enumerate(self.versions):
            stamps = (-1, *sorted(row.elements()))
            message: Message = {"role": "assistant", "content": ""}
            found.append(
                Trajectory(
                    task={"slot": self.slot},
                    token_ids=(self.slot,) * len(stamps),
                    loss_mask=tuple(stamp >= 0 for stamp in stamps),
                    behaviour_log_probs=tuple(-float(stamp >= 0) for stamp in stamps),
                    weight_versions=stamps,
                    reward=float((self.slot + number) % 2),
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
    """What a modelled part answers with: futures of the loop that runs it."""

    loop: ControllerLoop = field(default_factory=ControllerLoop.current)
    owner: TaskOwner = field(init=False)

    def __post_init__(self) -> None:
        self.owner = TaskOwner(self.loop, name="simulation")

    def batch(self, label: str, make: Callable[[], Coroutine[Any, Any, Plan]]) -> DataProtoFuture:
        return DataProtoFuture(self.loop, label).run(make, self.owner)

    def value(self, label: str, make: Callable[[], Coroutine[Any, Any, Any]]) -> Future[Any]:
        return Future(self.loop, label).run(make, self.owner)


class ModelledReplica:
    """A worker group of rollout workers, as the pool sees it.

    What a rollout takes is drawn from its slot and row, so it does not depend on when or where it runs.

    Args:
        scenario: lengths, times and faults.
        name: its name.
        strike: takes a fault that is due out of those to come; each happens once.
    """

    def __init__(self, scenario: Scenario, name: str, *, strike: Callable[..., Fault | None]) -> None:
        self._scenario = scenario
        self.name = name
        self._strike = strike
        self._calls = _Calls()
        self.decoder = ModelledDecoder(tokens_per_s=1 / scenario.token_s, saturation=scenario.saturation)
        self.delivered = 0
        self.finished: Counter[str] = Counter()
        self._unfinished: dict[int, Counter[int]] = {}
        self._slowed = 0

    # ------------------------------------------------------------------------------------------- calls of the pool

    @property
    def used_s(self) -> float:
        """Seconds at full speed that what was decoded so far took."""
        return self.decoder.used_until_now()

    async def aclose(self) -> None:
        """The process ends, with everything it was doing."""
        await self._calls.owner.cancel_all()

    def start(self, model_path: str, weight_version: int) -> Future[Any]:
        async def begin() -> list[float]:
            self.decoder.commit(weight_version)
            return [0.0]

        return self._calls.value(f"{self.name}.start", begin)

    def rollout(self, prompts: DataProto) -> DataProtoFuture:
        assert prompts.batch is not None
        slot, rows = int(prompts.batch["slot"][0]), len(prompts)
        return self._calls.batch(f"{self.name}.rollout", lambda: self._roll_out(slot, rows))

    def prepare_weights(self, manifest: WeightManifest) -> Future[Any]:
        async def prepare() -> list[float]:
            if self._strike(manifest.version, "weights"):
                raise WorkerDiedError(f"{self.name} died while it fetched version {manifest.version}", group=self.name)
            await asyncio.sleep(self._scenario.prepare_s)
            return [self._scenario.prepare_s]

        return self._calls.value(f"{self.name}.prepare_weights", prepare)

    def commit_weights(self, version: int, kv_cache: KVCachePolicy = "keep") -> Future[Any]:
        async def commit() -> list[float]:
            self.decoder.commit(version)
            return [0.0]

        return self._calls.value(f"{self.name}.commit_weights", commit)

    def engine_statistics(self) -> Future[Any]:
        async def count() -> dict[str, Any]:
            return {
                "engine": {},
                "delivered": {"train": self.delivered, "eval": 0},
                "in_flight": {"train": sum(group.total() for group in self._unfinished.values()), "eval": 0},
            }

        return self._calls.value(f"{self.name}.statistics", count)

    # ------------------------------------------------------------------------------------------------------ the model

    async def _roll_out(self, slot: int, rows: int) -> Plan:
        scenario = self._scenario
        if self._strike(slot, "crash"):
            raise WorkerDiedError(f"{self.name} died under slot {slot}", group=self.name)
        if self._strike(slot, "freeze"):
            await asyncio.get_running_loop().create_future()
        slow = self._strike(slot, "slow")
        if slow:
            self._slowed += 1
            self.decoder.set_pace(0.1)
        failing = self._strike(slot, "environment")
        made = self._unfinished[slot] = Counter()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._row(slot, row, made)) for row in range(rows)]
        finally:
            del self._unfinished[slot]
            if slow:
                self._slowed -= 1
                self.decoder.set_pace(0.1 if self._slowed else 1.0)
        if failing:
            raise EnvironmentFailure(f"the environment of slot {slot} failed", tokens_generated=made.total())
        block = RolledOut(slot, [task.result() for task in tasks])
        summary = GroupSummary(
            slot=slot,
            rows=rows,
            oldest_version=min(made),
            tokens=made.total(),
            version_tokens=dict(sorted(made.items())),
            rewards=tuple(float((slot + row) % 2) for row in range(rows)),
            lengths=tuple(row.total() for row in block.versions),
        )
        meta: dict[str, Any] = {"summary": asdict(summary), "wasted_tokens": 0}
        if self._strike(slot, "garbage"):
            broken = [{"tokens": summary.tokens + 1}, {"version_tokens": {1 << 20: summary.tokens}}, {"slot": slot + 1}]
            meta["summary"] |= random.Random(scenario.seed ^ slot).choice(broken)  # noqa: S311
        self.finished.update(rows=rows, tokens=summary.tokens)
        if scenario.ledger:
            trajectories = block.trajectories()
            batch = trajectories_to_batch(trajectories, slot=slot)
            batch.meta_info |= meta | {"record": encode_rows(trajectories)}
            return Plan.of(batch)
        return Plan.shard(block, Header(rows=rows, schema=_SCHEMA, meta_info=meta, size_bytes=16 * summary.tokens))

    async def _row(self, slot: int, row: int, made: Counter[int]) -> Counter[int]:
        """One rollout: turns of tokens, each followed by the environment."""
        scenario = self._scenario
        dice = scenario.dice(slot, row)
        tokens = scenario.length(dice)
        turns = min(scenario.turns, tokens)
        versions: Counter[int] = Counter()
        for turn in range(turns):
            sampled = await self.decoder.generate(tokens // turns + (turn < tokens % turns))
            versions.update(sampled)
            made.update(sampled)
            self.delivered += sampled.total()
            pause_s = scenario.turn_s.sample(dice)
            if pause_s:
                await asyncio.sleep(pause_s)
        return versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What one update was really given, counted from the rows and not from what the driver thinks of them.

    Attributes:
        step: training step, from 1.
        slots: groups, in the batch's order.
        oldest: for each of them the staleness of its oldest token, masked or not.
        staleness: tokens in the loss, by trainer version minus sampling version.
        masked: tokens left out of it.
    """

    step: int
    slots: tuple[int, ...]
    oldest: tuple[int, ...]
    staleness: Counter[int]
    masked: int


class ModelledTrainer:
    """A worker group of one trainer rank, as the driver sees it. Calls run one after another.

    Args:
        scenario: times and faults.
        strike: takes a fault that is due out of those to come.
        weight_version: version to begin with.
        fetch: fetch every batch, mask it with the code of the real trainer, and count its loss mask.
    """

    def __init__(
        self, scenario: Scenario, *, strike: Callable[..., Fault | None], weight_version: int = 0, fetch: bool = False
    ) -> None:
        self._scenario = scenario
        self._strike = strike
        self._fetch = fetch
        self._calls = _Calls()
        self._turn = asyncio.Lock()
        self._version = weight_version
        self._dice = random.Random(scenario.seed + weight_version)  # noqa: S311
        self.trained: list[Trained] = []
        self.published: set[int] = set()

    def update(self, batch: DataProtoFuture, oldest_version: int | None = None, credit: object = None) -> Future[Any]:
        return self._calls.value("trainer.update", lambda: self._update(batch, oldest_version))

    def publish(self, version: int) -> Future[Any]:
        async def publish() -> list[WeightManifest]:
            async with self._turn:
                if version != self._version:
                    raise WeightVersionError(f"version {self._version} was to be published as {version}")
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
        """The process ends, with everything it was doing."""
        await self._calls.owner.cancel_all()

    async def _update(self, batch: DataProtoFuture, oldest_version: int | None) -> list[dict[str, float]]:
        async with self._turn:
            step = self._version + 1
            if self._strike(step, "trainer"):
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
            slots = tuple(group.slot for group in groups)
            oldest = tuple(step - 1 - min(group.version_tokens) for group in groups)
            self.trained.append(Trained(step=step, slots=slots, oldest=oldest, staleness=staleness, masked=masked))
            return [{"tokens_trained": float(staleness.total()), "loss": 0.0}]


class ModelledRewards:
    """A reward model that takes its time."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._calls = _Calls()
        self._dice = random.Random(scenario.seed)  # noqa: S311

    async def aclose(self) -> None:
        """The process ends, with everything it was doing."""
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
    from asyncrl.pipeline.masking import mask_older

    masked = batch if oldest_version is None else mask_older(batch, oldest_version)
    assert masked.batch is not None
    counted = int(np.asarray(masked.batch["loss_mask"].values()).sum())
    if counted != tokens:
        raise AssertionError(f"{counted} tokens are in the loss mask of a batch with {tokens} young enough")
