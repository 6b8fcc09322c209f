"""Real processes over gloo against one, all scenes in one start of the processes."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines.training.checkpoint import SavedTensors

# Two more processes on a machine that others use too.
pytestmark = pytest.mark.timeout(240)

_PROGRAM = Path(__file__).with_name("rank_program.py")

QUICK = ("uneven", "num_mini_batches", "scored", "resumed")
"""The scenes of the quick run; each of the others takes two seconds on three ranks, and is slow."""


class Outcome:
    """What the scenes left behind, on one rank and on two."""

    def __init__(self, one: Path, two: Path) -> None:
        self.one = one
        self.two = two

    @staticmethod
    def report(folder: Path, scene: str, rank: int = 0) -> Any:
        return json.loads((folder / f"{scene}.{rank}.json").read_text())


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    saved = SavedTensors(folder)
    return dict(saved.full(saved.specs.values()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def program() -> Any:
    spec = importlib.util.spec_from_file_location("rank_program", _PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def _running(alone: Any, folder: Path, *, ranks: int, scenes: Iterable[str]) -> Iterator[None]:
    """The scenes, in ``ranks`` processes meanwhile; they must end well."""
    port = _free_port()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(_PROGRAM), alone.model, alone.deep, str(folder)),
                *(str(rank), str(port), str(ranks), *scenes),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        yield
        outputs = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)


@pytest.fixture(scope="module")
def alone(program: Any, model_folder: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One rank, in this process."""
    deep = model_folder("qwen2", tied=False, vocab_size=62, num_hidden_layers=4)
    return program.Rank(model_folder("qwen2", vocab_size=62), deep, tmp_path_factory.mktemp("one"), rank=0)


def _played(program: Any, alone: Any, two: Path, scenes: Iterable[str]) -> Outcome:
    """The scenes on two ranks, and on one those that have the same outcome there."""
    (two / "in_the_way").write_text("a file where a folder is wanted")
    for scene in program.SHARED_SCENES:
        if scene.__name__ in scenes:
            scene(alone)
    with _running(alone, two, ranks=2, scenes=scenes):
        pass
    return Outcome(alone.folder, two)


@pytest.fixture(scope="module")
def outcome(program: Any, alone: Any, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    two = tmp_path_factory.mktemp("two")
    engine = alone.engine(num_mini_batches=2)
    engine.update(alone.rows(4, split=8))
    engine.save(two / "from_one_rank")
    engine.close()
    return _played(program, alone, two, QUICK)


@pytest.fixture(scope="module")
def more(program: Any, alone: Any, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The outcome of the scenes that are slow."""
    scenes = [name for name in program.SCENES if name not in QUICK]
    return _played(program, alone, tmp_path_factory.mktemp("more"), scenes)


def _check_same_updates(
    one: Path, several: Path, scene: str, *, ranks: int, metrics: float = 1e-4, weights: float = 1e-6
) -> None:
    expected = Outcome.report(one, scene)
    for rank in range(ranks):
        for found, single in zip(Outcome.report(several, scene, rank), expected, strict=True):
            assert found == pytest.approx(single, rel=metrics, abs=metrics / 100)
        assert Outcome.report(several, scene, rank) == Outcome.report(several, scene, 0)
    whole, parted = (saved_tensors(folder / scene) for folder in (one, several))
    assert whole.keys() == parted.keys()
    left, right = (torch.cat([tensors[name].flatten() for name in whole]) for tensors in (whole, parted))
    assert (right - left).norm() <= weights * left.norm()


@pytest.mark.parametrize("scene", ["uneven", "num_mini_batches"])
def test_two_ranks_make_the_update_of_one(outcome: Outcome, scene: str) -> None:
    """Metrics to 1e-4; the weights after three updates to 1e-6 of their norm, in float32."""
    _check_same_updates(outcome.one, outcome.two, scene, ranks=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scene",
    [
        "empty",
        "by_row",
        "whole_batch",
        "whole_rows",
        "whitened",
        "mesh_dp_replicate",
        "mesh_cp",
        "mesh_tp",
        "mesh_pp",
        "staged",
        "sgd",
        "muon",
        "adafactor",
        "quantised",
        "critic",
        "compared",
        "supervised",
    ],
)
def test_two_ranks_make_every_update_of_one(more: Outcome, scene: str) -> None:
    """torch's Muon computes in bfloat16, so what a sum of gradients rounds otherwise makes a thousand times as much."""
    tolerances = {"metrics": 1e-3, "weights": 1e-3} if scene == "muon" else {}
    _check_same_updates(more.one, more.two, scene, ranks=2, **tolerances)


@pytest.mark.slow
def test_stages_have_the_adapters_and_the_reference_of_one_rank(more: Outcome) -> None:
    for scene in ("staged.reference", "staged.woken"):
        for rank in range(2):
            assert more.report(more.two, scene, rank) == pytest.approx(more.report(more.one, scene), abs=1e-5)
    for name in ("adapters", "base"):
        one, *both = (
            load_file(folder / f"staged.{name}.{rank}")
            for folder, rank in ((more.one, 0), (more.two, 0), (more.two, 1))
        )
        for two in both:
            assert list(two) == list(one)
            assert all(torch.allclose(two[each], one[each], atol=1e-6) for each in one)


@pytest.mark.slow
def test_a_loss_that_fails_in_the_last_stage_is_raised_on_all(more: Outcome) -> None:
    here, there = (more.report(more.two, "staged.failed", rank) for rank in range(2))
    assert here == "EngineError: the loss failed on rank 1 (of 1 that failed); see its error"
    assert there == more.report(more.one, "staged.failed") == "ZeroDivisionError: the user's loss divides by 0"


@pytest.mark.slow
def test_an_optimizer_of_whole_matrices_is_refused_where_they_are_divided(more: Outcome) -> None:
    for rank in range(2):
        assert "'muon' computes with whole matrices" in more.report(more.two, "undivided", rank)


@pytest.mark.slow
@pytest.mark.usefixtures("outcome", "more")  # what one rank did
def test_four_ranks_make_the_update_of_one(alone: Any, tmp_path: Path) -> None:
    scenes = ["uneven", "by_row", "num_mini_batches", "scored"]
    with _running(alone, tmp_path, ranks=4, scenes=scenes):
        pass
    for scene in scenes[:-1]:
        _check_same_updates(alone.folder, tmp_path, scene, ranks=4)
    for name, expected in Outcome.report(alone.folder, "scored").items():
        parts = [Outcome.report(tmp_path, "scored", rank)[name] for rank in range(4)]
        assert [len(part) for part in parts] == [30, 27, 0, 14]
        assert [score for part in parts for score in part] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_work_is_spread_evenly_however_the_rows_were_held(more: Outcome) -> None:
    """All rows are on rank 0, with 14, 11, 9, 6, 3, 3, 1 and 0 tokens to train: 47 in each of three updates."""
    computed = [sum(more.report(more.two, "empty.computed", rank)) / 3 for rank in range(2)]
    assert sum(computed) == pytest.approx(47, abs=1)  # stand-ins score a token each
    assert computed == pytest.approx([23.5, 23.5], abs=3)


def test_tokens_and_rows_are_counted_over_both_ranks(outcome: Outcome) -> None:
    for metrics in outcome.report(outcome.two, "num_mini_batches", 1):
        assert metrics["tokens_trained"] == 47
        assert metrics["rows"] == 8


def test_each_rank_gets_the_log_probs_of_its_own_rows(outcome: Outcome) -> None:
    whole = outcome.report(outcome.one, "scored")
    for name, expected in whole.items():
        parts = [outcome.report(outcome.two, "scored", rank)[name] for rank in range(2)]
        assert [len(part) for part in parts] == [57, 14]
        assert parts[0] + parts[1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_each_rank_gets_the_values_of_its_own_rows(more: Outcome) -> None:
    parts = [more.report(more.two, "critic.values", rank) for rank in range(2)]
    assert [len(part) for part in parts] == [57, 14]
    assert parts[0] + parts[1] == pytest.approx(more.report(more.one, "critic.values"), abs=1e-5)


def test_a_checkpoint_does_not_depend_on_the_number_of_ranks(outcome: Outcome) -> None:
    saved, again = (saved_tensors(outcome.two / each) for each in ("from_one_rank", "resharded"))
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[each], again[each]) for each in saved)
    first, second = outcome.report(outcome.two, "resumed")
    assert first == second
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        before, after = (outcome.two / each / name for each in ("went_on_first", "went_on_second"))
        assert before.read_bytes() == after.read_bytes()


def test_a_snapshot_is_written_as_it_was_while_training_goes_on(outcome: Outcome) -> None:
    """Files and export that are written two updates later are those that the engine itself wrote at that moment."""
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", "trainer.json"):
        before, after = (outcome.two / each / name for each in ("resharded", "snapshot"))
        assert before.read_bytes() == after.read_bytes()
    before, after = (
        load_file(outcome.two / each / "model.safetensors") for each in ("exported_first", "exported_late")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for rank in range(2):
        assert outcome.report(outcome.two, "superseded", rank).startswith("CheckpointError")
        assert outcome.report(outcome.two, "prepared", rank)


def test_both_ranks_get_full_tensors_and_rank_0_exports_them(outcome: Outcome) -> None:
    exported = AutoModelForCausalLM.from_pretrained(outcome.two / "exported", dtype=torch.float32)
    shapes = {name: list(parameter.shape) for name, parameter in exported.named_parameters()}
    assert outcome.report(outcome.two, "published", 0) == shapes
    assert outcome.report(outcome.two, "published", 1) == shapes
    saved = saved_tensors(outcome.two / "went_on_second")
    assert all(torch.equal(parameter, saved[name]) for name, parameter in exported.named_parameters())


@pytest.mark.slow
def test_an_error_on_one_rank_is_raised_on_both_and_both_can_continue(more: Outcome) -> None:
    here, there = (more.report(more.two, "errors", rank) for rank in range(2))
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
    assert rank_0[5] == "EngineError: the loss failed on rank 1 (of 1 that failed); see its error"
    assert rank_1[5] == "ZeroDivisionError: the user's loss divides by 0"
    assert rank_0[6] == rank_1[6] == "True"  # long before the collectives' deadline
    assert rank_0[7] == "EngineError: load failed on rank 1 (of 1 that failed); see its error"
    assert rank_1[7] == "CheckpointError: gone"
    assert rank_0[8] == rank_1[8]
    assert rank_1[8].startswith("EngineError: the weights are a mixture")
    assert rank_0[9] == rank_1[9] == "InvalidDataError: some ranks have the column margins, others do not"
    assert len(rank_0) == len(rank_1) == 10


@pytest.mark.slow
def test_each_rank_reads_its_own_shards_and_a_damaged_file_is_an_error_on_both(more: Outcome) -> None:
    here, there = (more.report(more.two, "loaded", rank) for rank in range(2))
    assert here == "EngineError: loading the model failed on rank 1 (of 1 that failed); see its error"
    assert there.startswith("ConfigError: ")
    assert "model.safetensors cannot be read" in there
    stored = load_file(more.two / "damaged.0" / "model.safetensors")
    saved = saved_tensors(more.two / "loaded")
    assert all(torch.equal(saved[name], tensor) for name, tensor in stored.items())
