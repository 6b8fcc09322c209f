"""Two real processes over gloo against one, all scenes in one start of the processes."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

# Two more processes on a machine that others use too.
pytestmark = pytest.mark.timeout(240)

_PROGRAM = Path(__file__).with_name("rank_program.py")


class Outcome:
    """What the scenes left behind, on one rank and on two."""

    def __init__(self, one: Path, two: Path) -> None:
        self.one = one
        self.two = two

    @staticmethod
    def report(folder: Path, scene: str, rank: int = 0) -> Any:
        return json.loads((folder / f"{scene}.{rank}.json").read_text())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def outcome(model_folder: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    spec = importlib.util.spec_from_file_location("rank_program", _PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)

    model = model_folder("qwen2")
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    alone = program.Rank(model, one, rank=0, port=0)
    engine = alone.engine(minibatches=2)
    engine.update(alone.rows(4, split=8))
    engine.save(two / "from_one_rank")
    engine.close()
    (two / "in_the_way").write_text("a file where a folder is wanted")

    port = _free_port()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(_PROGRAM), model, str(two), str(rank), str(port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for scene in program.SHARED_SCENES:
        scene(alone)
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return Outcome(one, two)


@pytest.mark.parametrize(
    "scene", ["uneven", "empty", "by_row", "minibatches", "whole_batch", "whole_rows", "supervised"]
)
def test_two_ranks_make_the_update_of_one(outcome: Outcome, scene: str) -> None:
    """Metrics to 1e-4; the weights after three updates to 1e-6 of their norm, in float32."""
    expected = outcome.report(outcome.one, scene)
    for rank in range(2):
        for found, single in zip(outcome.report(outcome.two, scene, rank), expected, strict=True):
            assert found == pytest.approx(single, rel=1e-4, abs=1e-6)
    assert outcome.report(outcome.two, scene, 0) == outcome.report(outcome.two, scene, 1)
    one = load_file(outcome.one / scene / "model.safetensors")
    two = load_file(outcome.two / scene / "model.safetensors")
    assert one.keys() == two.keys()
    whole, parted = (torch.cat([weights[name].flatten() for name in one]) for weights in (one, two))
    assert (parted - whole).norm() <= 1e-6 * whole.norm()


def test_tokens_and_rows_are_counted_over_both_ranks(outcome: Outcome) -> None:
    for metrics in outcome.report(outcome.two, "minibatches", 1):
        assert metrics["tokens_trained"] == 47
        assert metrics["rows"] == 8


def test_each_rank_gets_the_log_probs_of_its_own_rows(outcome: Outcome) -> None:
    whole = outcome.report(outcome.one, "scored")
    for name, expected in whole.items():
        parts = [outcome.report(outcome.two, "scored", rank)[name] for rank in range(2)]
        assert [len(part) for part in parts] == [57, 14]
        assert parts[0] + parts[1] == pytest.approx(expected, abs=1e-5)


def test_a_checkpoint_does_not_know_how_many_ranks_wrote_it(outcome: Outcome) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        saved, again = (load_file(outcome.two / each / name) for each in ("from_one_rank", "resharded"))
        assert saved.keys() == again.keys()
        assert all(torch.equal(saved[each], again[each]) for each in saved)
    first, second = outcome.report(outcome.two, "resumed")
    assert first == second
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (outcome.two / "went_on_first" / name).read_bytes() == (
            outcome.two / "went_on_second" / name
        ).read_bytes()


def test_both_ranks_see_full_tensors_and_rank_0_exports_them(outcome: Outcome) -> None:
    exported = AutoModelForCausalLM.from_pretrained(outcome.two / "exported", dtype=torch.float32)
    shapes = {name: list(parameter.shape) for name, parameter in exported.named_parameters()}
    assert outcome.report(outcome.two, "published", 0) == shapes
    assert outcome.report(outcome.two, "published", 1) == shapes
    saved = load_file(outcome.two / "went_on_second" / "model.safetensors")
    assert all(torch.equal(parameter, saved[name]) for name, parameter in exported.named_parameters())


def test_a_rank_that_fails_takes_the_other_with_it_and_both_go_on(outcome: Outcome) -> None:
    here, there = (outcome.report(outcome.two, "errors", rank) for rank in range(2))
    assert here["goes_on"]
    assert there["goes_on"]
    rank_0, rank_1 = here["said"], there["said"]
    assert rank_0[0] == "EngineError: reading the batch failed on rank 1 (of 1 that failed); see its error"
    assert rank_1[0].startswith("InvalidDataError: loss_mask of row 0 is True for its first token")
    assert rank_0[1] == rank_1[1]
    assert "some ranks have the columns" in rank_0[1]
    assert rank_0[2] == rank_1[2]
    assert rank_0[2].startswith("EngineError: loss is nan at optimizer step 0")
    assert rank_0[3].startswith("NotADirectoryError")
    assert rank_1[3].startswith("EngineError: writing")
    assert rank_0[4].startswith("CheckpointError")
    assert len(rank_0) == len(rank_1) == 5
