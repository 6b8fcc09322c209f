"""An evaluation on a pinned replica beside training, with a publication every second.

    python benchmarks/evaluation.py [--json] [--seconds 10] [--rounds 3]

Rollout workers run side by side in this process. Their engines decode eight requests at a time, a token of each every
50 ms, whatever the machine: so replicas are what limits the throughput, and not its cores. Every token is the number of
the version that sampled it: foreign tokens are counted from these, not from the versions that workers record.

Three cases take turns. Two replicas train; three, of which one is pinned for one evaluation after the other; and two
that evaluate without a pin, where a score is of several versions and training has fewer slots. The pinned replica
trains, too, between two evaluations. Figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.interfaces import GenerationChunk, GenerationRequest, SamplingParams
from asyncrl.rollout.pool import Pin, RolloutPool
from asyncrl.rollout.trajectory import prompt_rows
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.single_controller import ClassWithInitArgs
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.testing import EchoFactory, VersionEchoEngine
from asyncrl.trainer.evaluation import evaluate
from asyncrl.weights import TransportSpec, WeightManifest
from engines.training.scratch import make_scratch_tokenizer

SLOTS, TOKEN_S, TOKENS = 8, 0.05, 24
TRAINING_REPLICAS, GROUPS_EACH, GROUP_SIZE, TASKS = 2, 3, 8, 32
FIRST_VERSION = 100  # above the tokens that end a turn
PUBLISH_EVERY_S = 1.0


class SlottedEngine(VersionEchoEngine):
    """Decodes ``SLOTS`` requests at a time; the others wait."""

    def __init__(self, model_path: str = "", *, weight_version: int = 0, **_: Any) -> None:
        super().__init__(model_path, weight_version=weight_version, token_s=TOKEN_S)
        self._slots = asyncio.Semaphore(SLOTS)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        async with self._slots:
            async for chunk in super().generate(request):
                yield chunk


@dataclass(slots=True)
class WitnessPool:
    """The pool as an evaluation sees it; keeps the tokens of every answer."""

    pool: RolloutPool
    tokens: list[int] = field(default_factory=list[int])

    @property
    def weight_version(self) -> int:
        return self.pool.weight_version

    def pinned(self, replicas: int) -> Any:
        return self.pool.pinned(replicas)

    async def rollout(self, prompts: DataProto, *, pin: Pin | None = None) -> DataProtoFuture:
        answered = await self.pool.rollout(prompts, pin=pin)
        rows = await answered.select(["input_ids", "loss_mask"], [], [])
        assert rows.batch is not None
        for ids, sampled in zip(rows.batch["input_ids"].unbind(), rows.batch["loss_mask"].unbind(), strict=True):
            self.tokens += ids[sampled].tolist()
        return answered


@dataclass(slots=True)
class Measured:
    """One case: training tokens per second, evaluations that ended, their foreign tokens, seconds of publications."""

    tokens_per_s: float = 0.0
    scores: int = 0
    tokens: int = 0
    foreign: int = 0
    publish_s: list[float] = field(default_factory=list[float])


async def measure(model: str, *, replicas: int, evaluates: bool, pinned: int, seconds: float) -> Measured:
    """Train for some seconds, with evaluations one after another if it ``evaluates``."""
    spec = RolloutSpec(
        engine=SlottedEngine,
        environment=EchoFactory,
        transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="evaluation"),
        limits=EpisodeLimits(max_turns=1, max_seq_len=1024),
        sampling=SamplingParams(max_new_tokens=TOKENS),
    )
    found = Measured()
    async with AsyncExitStack() as stack:
        groups = {}
        for number in range(replicas):
            name = f"replica-{number}"
            groups[name] = LocalWorkerGroup(ClassWithInitArgs(RolloutWorker, spec), name=name)
            stack.push_async_callback(groups[name].aclose)
        pool = RolloutPool(groups)
        await pool.start(model, weight_version=FIRST_VERSION)
        stack.push_async_callback(pool.aclose)
        numbers = count()

        async def train() -> None:
            while True:
                group_id = next(numbers)
                rows = prompt_rows(
                    [{"word": f"word{group_id}"}] * GROUP_SIZE,
                    group_id=group_id,
                    seeds=range(GROUP_SIZE),
                    purpose="train",
                )
                await pool.rollout(rows)

        async def publish() -> None:
            for version in count(FIRST_VERSION + 1):
                await asyncio.sleep(PUBLISH_EVERY_S)
                begun_s = time.perf_counter()
                await pool.publish(WeightManifest(version=version, transport="empty", location="", tensors=()))
                found.publish_s.append(time.perf_counter() - begun_s)

        async def score() -> None:
            while True:
                witness = WitnessPool(pool)
                result = await evaluate(
                    cast("RolloutPool", witness), EchoFactory(), tasks=TASKS, seed=0, replicas=pinned
                )
                found.scores += 1
                found.tokens += len(witness.tokens)
                found.foreign += sum(token != result.weight_version for token in witness.tokens)

        work = [train() for _ in range(TRAINING_REPLICAS * GROUPS_EACH)]
        tasks = [asyncio.ensure_future(each) for each in (*work, publish(), *([score()] if evaluates else []))]
        try:
            await asyncio.sleep(1.0)  # until all slots are taken
            before, begun_s = await pool.token_counts("train"), time.perf_counter()
            ended, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            after, took_s = await pool.token_counts("train"), time.perf_counter() - begun_s
            for task in ended:
                task.result()  # raises: none of them ends
            found.tokens_per_s = (after.delivered - before.delivered) / took_s
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
    return found


CASES: dict[str, dict[str, Any]] = {
    "none": {"replicas": TRAINING_REPLICAS, "evaluates": False, "pinned": 0},
    "pinned": {"replicas": TRAINING_REPLICAS + 1, "evaluates": True, "pinned": 1},
    "shared": {"replicas": TRAINING_REPLICAS, "evaluates": True, "pinned": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    measured: dict[str, list[Measured]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as model:
        words = [EchoFactory().demonstration(index) for index in range(8)]
        make_scratch_tokenizer(words, vocab_size=320).save_pretrained(model)
        for _ in range(options.rounds):
            for case, setting in CASES.items():
                measured[case].append(asyncio.run(measure(model, **setting, seconds=options.seconds)))
    figures = [
        _figure("publications", sum(len(each.publish_s) for each in measured["pinned"]), "beside pinned evaluations"),
        _figure("scores", sum(each.scores for each in measured["pinned"]), "of pinned replicas"),
    ]
    foreign, tokens = (sum(getattr(each, name) for each in measured["pinned"]) for name in ("foreign", "tokens"))
    figures.append(_figure("foreign_tokens", foreign, f"of {tokens} tokens", goal="0", holds=foreign == 0 < tokens))
    ratios = {
        case: statistics.median(
            each.tokens_per_s / none.tokens_per_s for each, none in zip(measured[case], measured["none"], strict=True)
        )
        for case in ("pinned", "shared")
    }
    kept = ratios["pinned"] >= 0.97
    figures.append(_figure("throughput", ratios["pinned"], "of training without", goal=">= 0.97", holds=kept))
    for case in CASES:
        each_s = [took_s for each in measured[case] for took_s in each.publish_s]
        figures.append(_figure(f"publish_ms, {case}", 1e3 * statistics.median(each_s), "ms, median"))
    figures.append(_figure("throughput, shared", ratios["shared"], "of training without"))
    share = sum(each.foreign for each in measured["shared"]) / max(sum(each.tokens for each in measured["shared"]), 1)
    figures.append(_figure("foreign share, shared", share, "of the tokens of a score"))
    fails = [figure for figure in figures if figure["holds"] is False]
    if options.json:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        print(json.dumps({"machine": machine, "figures": figures}))
    else:
        for figure in figures:
            holds = "" if figure["goal"] is None else f"  goal {figure['goal']}: {figure['holds']}"
            print(f"{figure['name']:24s} {figure['value']:>10.4g} {figure['unit']}{holds}")
    sys.exit(1 if fails else 0)


def _figure(
    name: str, value: float, unit: str, *, goal: str | None = None, holds: bool | None = None
) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "floor": None, "ratio": None, "goal": goal, "holds": holds}


if __name__ == "__main__":
    main()
