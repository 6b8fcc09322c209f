from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.algorithms import PolicyObjective, TokenLosses
from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from asyncrl.errors import CheckpointError, ConfigError, EngineClosedError, EngineError, InvalidDataError, SchemaError
from asyncrl.interfaces import MeteredTrainingEngine, TrainerUsage, TrainingEngine
from asyncrl.io import DurableFiles
from asyncrl.trainer.checkpoint import Checkpoints, DriverState, read_driver_state, step_of
from asyncrl.trainer.workers import EngineGroup
from engines.training import checkpoint
from engines.training.checkpoint import SavedTensors
from engines.training.fsdp_engine import FSDPEngine, peak_tflops
from engines.training.packing import assign_minibatches

Trajectories = Callable[..., DataProto]
LENGTHS = [9, 4, 17, 6, 6, 12, 3, 14]

MakeEngine = Callable[..., FSDPEngine]

DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
"""One rank in float32 holds plain tensors, in bfloat16 FSDP's."""


@pytest.fixture
def engine(model_folder: Callable[..., str]) -> Iterator[MakeEngine]:
    made: list[FSDPEngine] = []

    def make(
        family: str = "llama", *, path: str | None = None, objective: PolicyObjective | None = None, **options: Any
    ) -> FSDPEngine:
        settings = {"lr": 1e-2, "device": "cpu"} | options
        made.append(FSDPEngine(path or model_folder(family), objective=objective or PolicyObjective(), **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert not dist.is_initialized()


def _weights(engine: TrainingEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# ---------------------------------------------------------------------------------------------------------- log-probs


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_plain_forward_row_by_row(
    engine: MakeEngine, trajectories: Trajectories, model_folder: Callable[..., str], family: str, temperature: float
) -> None:
    batch = trajectories([*LENGTHS, 1])
    scored = engine(family, max_tokens_per_microbatch=25, temperature=temperature).log_probs(batch)
    plain = AutoModelForCausalLM.from_pretrained(model_folder(family), dtype=torch.float32)
    assert batch.batch is not None
    assert scored.batch is not None
    assert sorted(scored.batch.keys()) == ["entropy", "log_probs"]
    for ids, log_probs, entropy in zip(
        rows_of(batch.batch["input_ids"]),
        rows_of(scored.batch["log_probs"]),
        rows_of(scored.batch["entropy"]),
        strict=True,
    ):
        with torch.no_grad():
            log_p = (plain(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(dim=-1)
        assert log_probs[0] == entropy[0] == 0.0
        assert log_probs.dtype == torch.float32
        assert torch.allclose(log_probs[1:], log_p.gather(1, ids[1:, None]).squeeze(1), atol=1e-5)
        assert torch.allclose(entropy[1:], -(log_p.exp() * log_p).sum(dim=1), atol=1e-5)


def test_log_probs_of_no_rows(engine: MakeEngine, trajectories: Trajectories) -> None:
    assert len(engine().log_probs(trajectories(LENGTHS)[0:0])) == 0


# ------------------------------------------------------------------------------------------------------------- update


def test_metrics_of_a_first_step_by_hand(engine: MakeEngine, trajectories: Trajectories) -> None:
    """On policy (behaviour = current) the ratio is 1, so the loss is minus the mean advantage of a token."""
    trainer = engine(lr=0.0)
    batch = trajectories(LENGTHS)
    scored = trainer.log_probs(batch)
    assert scored.batch is not None
    assert batch.batch is not None
    batch = batch.with_columns(behaviour_log_probs=scored.batch["log_probs"])
    metrics = trainer.update(batch)
    trained = torch.tensor([max(0, length - 3) for length in LENGTHS])
    advantages = batch.batch["advantages"]
    assert metrics["loss"] == pytest.approx(-float((trained * advantages).sum() / trained.sum()), rel=1e-5)
    assert metrics["tokens_trained"] == trained.sum() == 47
    assert metrics["rows"] == 8
    assert metrics["ratio"] == pytest.approx(1.0)
    assert metrics["behaviour_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["lr"] == 0.0
    assert metrics["grad_norm"] > 0
    mask = torch.cat(rows_of(batch.batch["loss_mask"]))
    assert metrics["entropy"] == pytest.approx(
        float(torch.cat(rows_of(scored.batch["entropy"]))[mask].mean()), rel=1e-5
    )


def test_microbatches_and_ragged_advantages_change_nothing(engine: MakeEngine, trajectories: Trajectories) -> None:
    batch = trajectories(LENGTHS)
    assert batch.batch is not None
    ragged = [value.expand(length) for value, length in zip(batch.batch["advantages"], LENGTHS, strict=True)]
    # A large epsilon keeps Adam from magnifying the rounding of gradients that are nearly 0.
    one, many = engine(eps=1e-3), engine(eps=1e-3, max_tokens_per_microbatch=10)
    for seed in range(3):
        first = one.update(trajectories(LENGTHS, seed=seed))
        second = many.update(trajectories(LENGTHS, seed=seed))
        assert second == pytest.approx(first, rel=1e-4, abs=1e-6)
    for left, right in zip(_weights(one).values(), _weights(many).values(), strict=True):
        assert (left - right).norm() <= 1e-6 * left.norm()
    assert many.update(trajectories(LENGTHS, advantages=ragged)) == pytest.approx(one.update(batch), rel=1e-3, abs=1e-5)


def test_the_same_calls_give_the_same_bits(engine: MakeEngine, trajectories: Trajectories) -> None:
    runs = []
    for _ in range(2):
        trainer = engine(num_mini_batches=2, epochs=2, max_tokens_per_microbatch=30)
        metrics = [trainer.update(trajectories(LENGTHS, seed=seed)) for seed in range(2)]
        runs.append((metrics, _weights(trainer)))
    assert runs[0][0] == runs[1][0]
    assert _same(runs[0][1], runs[1][1])


def test_proximal_log_probs_are_those_before_the_first_of_several_steps(
    engine: MakeEngine, trajectories: Trajectories
) -> None:
    batch = trajectories(LENGTHS)
    implicit, explicit = (engine(num_mini_batches=2, epochs=2) for _ in range(2))
    scored = explicit.log_probs(batch)
    assert scored.batch is not None
    given = batch.with_columns(proximal_log_probs=scored.batch["log_probs"])
    first, second = implicit.update(batch), explicit.update(given)
    assert first == second
    assert _same(_weights(implicit), _weights(explicit))
    # Later steps have moved away from it, and every token is counted once, though used twice.
    assert first["policy_kl"] > 0
    assert first["ratio"] != 1.0
    assert first["tokens_trained"] == 47


def test_minibatches_and_epochs_are_optimizer_steps(engine: MakeEngine, trajectories: Trajectories) -> None:
    trainer = engine(num_mini_batches=3, epochs=2, lr=6.0, lr_scheduler_type="linear", warmup_steps=6, total_steps=1000)
    assert trainer.update(trajectories(LENGTHS))["lr"] == 6.0  # the last of 6 steps ends the warm-up
    # Two rows make two num_mini_batches of one row; the third is empty and no step.
    assert trainer.update(trajectories([8, 8]))["lr"] == pytest.approx(6.0 * (1 - 3 / 994))


def test_reference_divergence_is_measured_and_demanded(engine: MakeEngine, trajectories: Trajectories) -> None:
    policy, reference = engine(objective=PolicyObjective(kl_coef=0.5), lr=0.1), engine()
    batch = trajectories(LENGTHS)
    with pytest.raises(SchemaError, match="'reference_log_probs' is missing"):
        policy.update(batch)
    scored = reference.log_probs(batch)
    assert scored.batch is not None
    batch = batch.with_columns(reference_log_probs=scored.batch["log_probs"])
    assert policy.update(batch)["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert policy.update(batch)["reference_kl"] > 1e-3


def test_bfloat16_computes_roughly_the_same_and_keeps_float32_weights(
    engine: MakeEngine, trajectories: Trajectories
) -> None:
    full, half = engine(), engine(dtype="bfloat16")
    batch = trajectories(LENGTHS)
    assert half.update(batch)["loss"] == pytest.approx(full.update(batch)["loss"], rel=0.05, abs=0.02)
    assert {tensor.dtype for tensor in _weights(half).values()} == {torch.float32}
    assert not _same(_weights(half), _weights(full))


def test_a_batch_that_cannot_be_used_is_refused_before_any_step(engine: MakeEngine, trajectories: Trajectories) -> None:
    trainer = engine()
    before = _weights(trainer)
    with pytest.raises(EngineError, match="loss is nan at optimizer step 0"):
        trainer.update(trajectories([8, 8], advantages=torch.tensor([1.0, torch.nan])))
    with pytest.raises(InvalidDataError, match="no token to train on"):
        trainer.update(trajectories([3, 2]))
    assert _same(before, _weights(trainer))

    fresh, batch = engine(), trajectories(LENGTHS)
    assert trainer.update(batch) == fresh.update(batch)
    assert _same(_weights(trainer), _weights(fresh))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Faulty(PolicyObjective):
    """Raises in the second micro-batch."""

    calls: list[int] = field(default_factory=list)

    def token_losses(self, **columns: Any) -> TokenLosses:  # type: ignore[override]
        self.calls.append(1)
        if len(self.calls) == 2:
            raise ArithmeticError("a bug in an objective")
        return PolicyObjective.token_losses(self, **columns)


@DTYPES
def test_an_error_between_forward_and_backward_does_not_change_the_next_step(
    engine: MakeEngine, trajectories: Trajectories, dtype: str
) -> None:
    trainer = engine(objective=_Faulty(), max_tokens_per_microbatch=20, dtype=dtype)
    with pytest.raises(ArithmeticError):
        trainer.update(trajectories(LENGTHS, seed=1))
    fresh = engine(max_tokens_per_microbatch=20, dtype=dtype)
    for seed in range(2):
        assert trainer.update(trajectories(LENGTHS, seed=seed)) == fresh.update(trajectories(LENGTHS, seed=seed))
    assert _same(_weights(trainer), _weights(fresh))


def test_steps_before_one_that_is_not_finite_have_been_made(engine: MakeEngine, trajectories: Trajectories) -> None:
    trainer, same = engine(num_mini_batches=2), engine(num_mini_batches=2)
    assigned = assign_minibatches(len(LENGTHS), num_mini_batches=2, seed=trainer._derived_seed())
    advantages = torch.ones(len(LENGTHS))
    advantages[assigned.index(1)] = math.nan
    with pytest.raises(EngineError, match="loss is nan at optimizer step 1: only the steps before it were made"):
        trainer.update(trajectories(LENGTHS, advantages=advantages))
    assert not _same(_weights(trainer), _weights(same))


def test_read_only_batches_are_fine(engine: MakeEngine, trajectories: Trajectories) -> None:
    with torch.inference_mode():
        batch = trajectories(LENGTHS)
    trainer = engine()
    assert trainer.update(batch)["tokens_trained"] == 47
    assert trainer.supervise(batch)["tokens"] == 47


# ---------------------------------------------------------------------------------------------------------- supervise


def test_a_small_supervised_run_memorises_its_rows(engine: MakeEngine, trajectories: Trajectories) -> None:
    trainer, batch = engine(lr=2e-2, lr_scheduler_type="cosine", warmup_steps=3, total_steps=40), trajectories(LENGTHS)
    history = [trainer.supervise(batch) for _ in range(40)]
    assert sorted(history[0]) == ["accuracy", "grad_norm", "loss", "lr", "tokens"]
    assert history[0]["loss"] > 4.0
    assert history[0]["accuracy"] < 0.2
    assert history[-1]["loss"] < 0.2
    assert history[-1]["accuracy"] == 1.0
    scored = trainer.log_probs(batch)
    assert scored.batch is not None
    assert batch.batch is not None
    mask = torch.cat(rows_of(batch.batch["loss_mask"]))
    assert torch.cat(rows_of(scored.batch["log_probs"]))[mask].mean() > -0.2


# ------------------------------------------------------------------------------------------------------------ weights


def test_named_tensors_are_the_checkpoint_with_tied_weights_once(
    engine: MakeEngine, model_folder: Callable[..., str]
) -> None:
    tied, free = engine(), engine(path=model_folder("llama", tied=False), publish_dtype="bfloat16")
    assert "lm_head.weight" not in _weights(tied)
    assert "lm_head.weight" in _weights(free)
    plain = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)
    assert _same(_weights(tied), {name: each.detach() for name, each in plain.named_parameters()})
    assert {tensor.dtype for tensor in _weights(free).values()} == {torch.bfloat16}


def test_a_mixture_of_experts_is_published_under_the_names_of_its_checkpoint(
    engine: MakeEngine, trajectories: Trajectories, model_folder: Callable[..., str], tmp_path: Path
) -> None:
    """The module holds one tensor for all experts, the checkpoint three for each."""
    path = model_folder(
        "qwen3_moe", tied=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    )
    trainer, batch = engine(path=path), trajectories(LENGTHS)
    assert _same(_weights(trainer), load_file(Path(path) / "model.safetensors"))
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in _weights(trainer)
    trainer.update(batch)
    trainer.save(tmp_path / "checkpoint")
    trainer.export(tmp_path / "export")
    exported = engine(path=str(tmp_path / "export"))
    assert _same(_weights(exported), _weights(trainer))
    exported.load(tmp_path / "checkpoint")
    assert exported.update(batch) == trainer.update(batch)


def test_an_exported_folder_is_the_model(
    engine: MakeEngine, trajectories: Trajectories, model_folder: Callable[..., str], tmp_path: Path
) -> None:
    (source := tmp_path / "source").mkdir()
    for path in Path(model_folder("qwen3")).iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "tokenizer.json").write_text("{}")
    trainer, batch = engine(path=str(source)), trajectories(LENGTHS)
    trainer.update(batch)
    trainer.export(tmp_path / "export")
    assert (tmp_path / "export" / "tokenizer.json").read_text() == "{}"
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "float32"
    again = engine(path=str(tmp_path / "export"))
    assert _same(_weights(again), _weights(trainer))
    left, right = again.log_probs(batch).batch, trainer.log_probs(batch).batch
    assert left is not None
    assert right is not None
    assert torch.equal(left["log_probs"].values(), right["log_probs"].values())


# -------------------------------------------------------------------------------------------------------- checkpoints


@DTYPES
def test_save_load_continue_equals_continue_bit_for_bit(
    engine: MakeEngine, trajectories: Trajectories, a_folder: Path, dtype: str
) -> None:
    options = {
        "dtype": dtype,
        "num_mini_batches": 2,
        "lr_scheduler_type": "cosine",
        "total_steps": 20,
        "weight_decay": 0.1,
    }
    straight = engine(**options)
    batches = [trajectories(LENGTHS, seed=seed) for seed in range(4)]
    for batch in batches[:2]:
        straight.update(batch)
    straight.save(a_folder)
    resumed = engine(**options, seed=99)  # the seed of the saved run wins
    resumed.log_probs(batches[0])  # gathered weights must not outlive the load
    resumed.load(a_folder)
    assert _same(_weights(resumed), _weights(straight))
    for batch in batches[2:]:
        assert resumed.update(batch) == straight.update(batch)
    assert _same(_weights(resumed), _weights(straight))
    assert sorted(path.name for path in a_folder.iterdir()) == [
        "manifest.json",
        "rank-00000.safetensors",
        "trainer.json",
    ]


def test_a_checkpoint_before_the_first_step(engine: MakeEngine, trajectories: Trajectories, a_folder: Path) -> None:
    first, second = engine(), engine()
    first.save(a_folder)
    second.update(trajectories(LENGTHS))
    second.load(a_folder)
    assert second.update(trajectories(LENGTHS)) == first.update(trajectories(LENGTHS))
    assert _same(_weights(first), _weights(second))


def test_a_checkpoint_that_is_damaged_or_of_another_model_changes_nothing(
    engine: MakeEngine, trajectories: Trajectories, a_folder: Path, tmp_path: Path
) -> None:
    trainer = engine()
    trainer.update(trajectories(LENGTHS))
    trainer.save(a_folder)
    trainer.update(trajectories(LENGTHS))
    before = _weights(trainer)
    content = bytearray((a_folder / "rank-00000.safetensors").read_bytes())
    content[-5] ^= 1
    (a_folder / "rank-00000.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is damaged"):
        trainer.load(a_folder)
    with pytest.raises(CheckpointError, match="nowhere is not a complete checkpoint"):
        trainer.load(tmp_path / "nowhere")
    engine("qwen2").save(tmp_path / "other")
    with pytest.raises(CheckpointError, match="a qwen2, here it is a llama"):
        trainer.load(tmp_path / "other")
    assert _same(before, _weights(trainer))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16"},
        {"lora": {"rank": 2, "alpha": 4.0}},
        {"optimizer": "adafactor"},
        {"optimizer": "muon"},
        pytest.param(
            {"optimizer": "adamw_8bit"}, marks=pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
        ),
        {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
        {"optimizer": "sgd"},
    ],
)
def test_snapshots_are_copied_into_the_memory_that_was_prepared(
    engine: MakeEngine,
    model_folder: Callable[..., str],
    trajectories: Trajectories,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    """Before the first step they are of weights alone; only matrices of 4096 numbers have moments of 8 bits."""

    def full(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
        return [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]

    monkeypatch.setattr(checkpoint, "host_memory", full)
    policy = engine(path=model_folder("llama", intermediate_size=256), **options)
    policy.prepare_snapshots()
    prepared = dict(policy._memory.tensors)
    assert not any(each.count_nonzero() for each in prepared.values()), "every page has been written to"
    early = policy.snapshot().shards
    policy.update(trajectories(LENGTHS))
    late = policy.snapshot().shards
    assert late.keys() == prepared.keys()
    assert all(late[name] is each for name, each in prepared.items())
    assert early.keys() == {name for name, _ in policy._model.tensors_by_name()}
    assert all(early[name] is prepared[name] for name in early)


def test_memory_is_prepared_once(engine: MakeEngine, trajectories: Trajectories) -> None:
    policy = engine()
    assert policy._memory.tensors == {}
    policy.update(trajectories(LENGTHS))
    shards = policy.snapshot().shards
    held = {name: shard.clone() for name, shard in shards.items()}
    policy.prepare_snapshots()
    assert _same(dict(shards), held)
    assert all(policy.snapshot().shards[name] is shard for name, shard in shards.items())


def test_too_little_memory_is_an_error_of_the_snapshot(engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = engine()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "host_memory", Mock(side_effect=RuntimeError("can't allocate memory")))
        policy.prepare_snapshots()
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            policy.snapshot()
    assert _same(dict(policy.snapshot().shards), _weights(policy))


class Died(BaseException):
    """Ends a write where a process would have died."""


class OneRank:
    """An engine as the group of its only rank."""

    def __init__(self, engine: FSDPEngine) -> None:
        self._engine = engine

    async def snapshot(self, folder: Path, model: Path | None = None) -> None:
        self._snapshot = self._engine.snapshot()

    async def write_snapshot(self, folder: Path) -> list[Any]:
        return [self._snapshot.write(folder)]

    async def export_snapshot(self, saved: Path, folder: Path) -> None:
        self._snapshot.export(saved, folder)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_write_that_dies_at_any_point_leaves_the_checkpoint_before(
    engine: MakeEngine, trajectories: Trajectories, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    points = [0, 1 - every]  # reached so far, and the one to die at

    def reached(moment: str, path: Path) -> None:
        points[0] += 1
        if points[0] == points[1]:
            raise Died(f"{moment} {path}")

    monkeypatch.setattr(FSDPEngine, "files", DurableFiles(reached))
    trainer, other = engine(), engine()
    checkpoints = Checkpoints(tmp_path, keep=2, files=DurableFiles(reached))
    state = DriverState(
        step=1, next_group_id=2, outstanding=(), generated=0, trained=0, dropped={}, staleness={}, history={}
    )
    weights: dict[int, dict[str, torch.Tensor]] = {}
    for step in (1, 2):
        trainer.update(trajectories(LENGTHS, seed=step))
        weights[step] = _weights(trainer)
        if step == 1:
            asyncio.run(checkpoints.save(cast("EngineGroup", OneRank(trainer)), state, step=step))
    deaths: dict[int, int] = {1: 0, 2: 0}
    alive = False
    while not alive:
        points[:] = 0, points[1] + every
        try:
            asyncio.run(checkpoints.save(cast("EngineGroup", OneRank(trainer)), state, step=2))
            alive = True
        except Died:
            newest = checkpoints.latest()
            other.load(newest / "trainer")
            assert _same(_weights(other), weights[step_of(newest)])
            assert read_driver_state(newest) == state
            deaths[step_of(newest)] += 1
        shutil.rmtree(tmp_path / "step-000002", ignore_errors=True)
    assert sum(deaths.values()) > 60 // every
    assert deaths[1] > 8 * deaths[2]  # the second counts once it has its name


def test_a_folder_that_cannot_be_written(engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="file"):
        engine().save(tmp_path / "file" / "checkpoint")


# --------------------------------------------------------------------------------------------------------- life cycle


def test_an_engine_that_is_half_loaded_can_only_load(
    engine: MakeEngine, trajectories: Trajectories, a_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, batch = engine(), trajectories(LENGTHS)
    policy.save(a_folder)
    with pytest.raises(CheckpointError):
        policy.load(a_folder / "nowhere")
    policy.update(batch)  # nothing has been changed
    with monkeypatch.context() as patch:
        patch.setattr(SavedTensors, "read", Mock(side_effect=CheckpointError("gone")))
        with pytest.raises(CheckpointError, match="gone"):
            policy.load(a_folder)
    for call in (lambda: policy.update(batch), policy.prepare_snapshots, policy.snapshot, policy.sleep):
        with pytest.raises(EngineError, match="the weights are a mixture"):
            call()
    policy.load(a_folder)
    policy.update(batch)


def test_engines_share_a_process_and_leave_it_clean(engine: MakeEngine, trajectories: Trajectories) -> None:
    policy, reference = engine(), engine()
    batch = trajectories(LENGTHS)
    policy.update(batch)
    policy.close()
    policy.close()
    with pytest.raises(EngineClosedError, match="closed"):
        policy.update(batch)
    assert dist.is_initialized()
    assert len(reference.log_probs(batch)) == 8


def test_an_engine_of_one_rank_leaves_no_group_in_a_process_of_several(engine: MakeEngine) -> None:
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        groups = dist.distributed_c10d._world.pg_map
        alone = engine()
        assert len(groups) == 2
        alone.close()
        assert len(groups) == 1
    finally:
        dist.destroy_process_group()


def test_engines_in_two_threads_do_not_disturb_each_other(engine: MakeEngine, trajectories: Trajectories) -> None:
    alone, left, right = (engine(max_tokens_per_microbatch=30) for _ in range(3))

    def train(trainer: FSDPEngine) -> list[dict[str, float]]:
        return [trainer.update(trajectories(LENGTHS, seed=seed)) for seed in range(4)]

    expected = train(alone)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(train, (left, right))) == [expected, expected]


def test_options_that_cannot_be_used_are_refused(engine: MakeEngine, tmp_path: Path) -> None:
    for options, message in (
        ({"num_mini_batches": 0}, "num_mini_batches is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"betas": (0.9, 1.0)}, "betas is 1.0"),
        ({"eps": math.nan}, "eps is nan"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"layout": "pad"}, "layout is 'pad'"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"world_size": 2}, "2 ranks need master_port"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine(**options)
    with pytest.raises(OSError, match="nowhere"):
        engine(path=str(tmp_path / "nowhere"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_gives_what_the_cpu_gives(engine: MakeEngine, trajectories: Trajectories, dtype: str) -> None:
    batch = trajectories(LENGTHS)
    expected = engine(device="cpu").update(batch)
    found = engine(device="cuda", dtype=dtype).update(batch)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3 if dtype == "float32" else 0.05, abs=0.02)
    assert found["tokens_trained"] == 47


# -------------------------------------------------------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, 3),  # forward, and twice as much backward
        ({"num_mini_batches": 2}, 4),  # log-probs of before, too
        ({"lora": {"rank": 4, "alpha": 8.0}}, 2),  # frozen weights have no gradients
    ],
    ids=["whole", "mini-batches", "adapters"],
)
def test_usage_is_what_the_passes_of_an_update_need(
    engine: MakeEngine, trajectories: Trajectories, options: dict[str, Any], passes: int
) -> None:
    made = engine(**options)
    assert isinstance(made, MeteredTrainingEngine)
    made.update(trajectories(LENGTHS))
    first = made.usage()
    of, lengths = made._model.row_cost, [length for length in LENGTHS if length > 3]
    cost = passes * sum(of.of(length, length - 3) for length in lengths)
    if "lora" in options:  # but attention, which has no weights, needs as much as ever
        cost += sum(of.per_pair * length * (length + 1) / 2 for length in lengths)
    assert first.tflop == pytest.approx(2 * cost / 1e12, rel=1e-4)  # whole multiply-adds are counted
    made.log_probs(trajectories(LENGTHS))  # no part of an update
    assert made.usage() == first
    made.update(trajectories(LENGTHS))
    second = made.usage().since(first)
    assert second.tflop == pytest.approx(first.tflop)
    assert second.metrics().keys() == {"tflops", "memory_peak_gb"}


def test_what_a_device_can_do_gives_the_share_that_is_used() -> None:
    used = TrainerUsage(update_s=2.0, tflop=400.0, peak_tflops=1000.0, memory_peak_gb=3.0)
    assert used.metrics() == {"tflops": 200.0, "memory_peak_gb": 3.0, "mfu": 0.2}
    later = TrainerUsage(update_s=4.0, tflop=500.0, peak_tflops=1000.0, memory_peak_gb=4.0)
    assert later.since(used).metrics() == {"tflops": 50.0, "memory_peak_gb": 4.0, "mfu": 0.05}


def test_what_devices_can_do_is_known_by_their_names() -> None:
    names = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA H20", "NVIDIA A100-SXM4-80GB")
    assert [peak_tflops(name) for name in names] == [989.0, 756.0, 989.0, 148.0, 312.0]
    assert [peak_tflops(f"NVIDIA {name} NVL") for name in ("H100", "H200")] == [835.0, 835.0]
    assert [peak_tflops(name) for name in ("NVIDIA RTX A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb")] == [None, None]
