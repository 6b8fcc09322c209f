"""Whole runs whose replay buffer lives in a worker of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config import Config
from asyncrl.tasks.run import train
from asyncrl.trainer.driver import Driver


@pytest.mark.slow
def test_a_run_with_its_buffer_elsewhere_ends_in_the_same_weights(small_config: Callable[..., Config], tmp_path: Path):
    weights = []
    for name, kind in (("here", "replay"), ("there", "buffers.remote:RemoteReplayBuffer")):
        config = small_config(
            runs=str(tmp_path / name),
            max_staleness=0,
            rollout={"options": {"max_running_requests": 1}},
            env={"options": {"fails_on": [2]}},
            buffer={"kind": kind},
            checkpoint={"every": 2},
        )
        summary = train(config)
        tokens = summary["tokens"]
        assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values()) + tokens["in_flight"]
        assert tokens["dropped"]["environment_failed"] > 0
        (run,) = config.runs.glob("small-2*")
        weights.append(load_file(run / "checkpoints" / "step-000003" / "model" / "model.safetensors"))
    here, there = weights
    assert here.keys() == there.keys()
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replay", "remote"])
def test_the_buffer_of_a_run_is_asked_for_what_the_run_has_recorded(
    small_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, kind: str
):
    run = Driver.run
    steps: list[int] = []

    async def asked(self: Driver) -> None:
        await run(self)
        await self.journal.ledger.durable()
        found = await asyncio.to_thread(self.buffer.query, "step >= 1")
        steps.extend(found.batch["step"].tolist())

    monkeypatch.setattr(Driver, "run", asked)
    config = small_config(buffer={"kind": kind})
    train(config)
    assert Counter(steps) == dict.fromkeys((1, 2, 3), config.trainer.groups_per_step * config.trainer.group_size)


class Stopped(Exception):
    pass


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("buffers.remote:RemoteReplayBuffer", {}),
        ("buffers.remote:RemoteReplayBuffer", {"samples_per_insert": 1.0}),  # more groups come back than it would admit
        ("replay", {"eviction": "oldest", "keep_groups": 2}),  # and more than it would keep
    ],
)
def test_batches_that_are_taken_again_wait_for_their_groups_to_be_there_again(
    small_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
):
    """Step 3 comes after the last checkpoint, and stands in the ledger."""
    config = small_config(steps=5, buffer={"kind": kind, "options": options}, checkpoint={"every": 2})
    update = Driver._update

    async def stopping(self: Driver, at: int, groups: Any) -> Any:
        if at == 4:
            raise Stopped
        return await update(self, at, groups)

    with monkeypatch.context() as patch:
        patch.setattr(Driver, "_update", stopping)
        with pytest.raises(Stopped):
            train(config)
    (run,) = config.runs.glob("small-2*")
    summary = train(config, resume=run)
    assert summary["weight_version"] == 5
