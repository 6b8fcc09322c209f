"""A whole run whose replay buffer lives in a worker of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from asyncrl.config import Config
from asyncrl.pipeline.run import train


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
