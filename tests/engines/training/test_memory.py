"""What is planned of memory is what an update has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from asyncrl.errors import ConfigError
from asyncrl.mesh import MemoryPlan, MeshShape
from engines.training import memory
from engines.training.fsdp_engine import FSDPEngine
from engines.training.lora import LoRA
from engines.training.memory import plan_memory
from engines.training.model import ComputeDtype
from engines.training.packed_attention import _band

TOKENS, ROW = 512, 16
LORA = LoRA(rank=4, alpha=8.0)


def rows_of(vocabulary: int) -> DataProto:
    """Rows of about 16 tokens, for two micro-batches and some more."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(8, 25, (9 * TOKENS // (4 * ROW),), generator=draw).tolist()
    return DataProto.from_dict(
        tensors={
            "input_ids": [torch.randint(0, vocabulary, (length,), generator=draw) for length in lengths],
            "loss_mask": [torch.arange(length) >= 4 for length in lengths],
            "behaviour_log_probs": [-5.0 * torch.ones(length) for length in lengths],
            "advantages": torch.randn(len(lengths), generator=draw),
        }
    )


def most_allocated(call: Callable[[], object]) -> int:
    """Return the most bytes that torch's allocator on the CPU gave out meanwhile, beside those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    assert profiled.profiler is not None
    events = [each for each in profiled.profiler.kineto_results.events() if each.name() == "[memory]"]
    size = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        size += event.nbytes()
        most = max(most, size)
    return most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {"gradient_checkpointing": True}), ("qwen3", {"dtype": "bfloat16", "lora": LORA})],
)
def test_a_plan_of_one_rank_is_what_its_allocator_gives_out(
    model_folder: Callable[..., str], family: str, options: dict[str, Any]
) -> None:
    folder = model_folder(family, tied=False, vocab_size=512, hidden_size=64, num_hidden_layers=5)
    plan = plan_memory(folder, shape=MeshShape(), max_tokens=TOKENS, row_tokens=ROW, scored=0.75, **options)
    engine = FSDPEngine(
        folder, objective=PolicyObjective(), lr=1e-3, device="cpu", max_tokens_per_microbatch=TOKENS, **options
    )
    batch = rows_of(512)
    engine.update(batch)  # the first one allocates moments
    before = sum(each.nbytes for each in engine._model.parameters())
    before += sum(each.nbytes for pair in engine._optimizer.moments().values() for each in pair.values())
    found = before + most_allocated(lambda: engine.update(batch))
    engine.close()
    assert plan.total == pytest.approx(found, rel=0.1)


SIZES: dict[str, Any] = {"tied": False, "vocab_size": 64}
ROWS = {"shape": MeshShape(), "max_tokens": TOKENS, "row_tokens": 64}


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "bfloat16")])
@pytest.mark.slow
def test_layers_with_windows_need_as_much_each(
    model_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch, device: str, dtype: ComputeDtype
) -> None:
    """What three and four layers need says what six do: one mask is made for all of them, and for no other trace."""
    folder = model_folder("mistral", sliding_window=20, num_hidden_layers=6, **SIZES)
    plan = plan_memory(folder, device_type=device, dtype=dtype, **ROWS)
    assert not isinstance(_band(64, 64, 20, torch.device("cpu")), FakeTensor)
    monkeypatch.setattr(memory, "_LAYERS", 6)
    assert plan_memory(folder, device_type=device, dtype=dtype, **ROWS) == plan


def test_a_window_on_a_gpu_is_the_kernels(model_folder: Callable[..., str]) -> None:
    plans = [
        plan_memory(model_folder("mistral", sliding_window=window, **SIZES), device_type="cuda", dtype=dtype, **ROWS)
        for dtype in ("bfloat16", "float32")
        for window in (20, None)
    ]
    assert plans[0] == plans[1]
    assert plans[2].activations > plans[3].activations  # no kernel, but a mask


def test_soft_capped_scores_are_those_of_rows(model_folder: Callable[..., str]) -> None:
    folder = model_folder("gemma2", **SIZES)
    rows, whole = (
        plan_memory(folder, device_type="cuda", dtype="bfloat16", **ROWS | {"row_tokens": length})
        for length in (64, TOKENS)
    )
    # Of each layer at least one matrix of scores in float32 is kept: 4 heads, 512 tokens, as many tokens as a row has.
    assert whole.activations - rows.activations >= 2 * 4 * 4 * TOKENS * (TOKENS - 64)


def test_rows_are_laid_as_in_an_update() -> None:
    assert memory._rectangles(512, 100, "packed") == ((5, 100), (1, 12))
    assert memory._rectangles(500, 100, "packed") == ((4, 100), (1, 100))  # two calls, as for rows of many lengths
    assert memory._rectangles(512, 100, "padded") == ((5, 100),)


def test_weights_gradients_and_moments_are_divided_by_the_mesh(model_folder: Callable[..., str]) -> None:
    folder = model_folder("llama", tied=False, vocab_size=64)
    whole, part = (
        plan_memory(folder, shape=shape, max_tokens=64, row_tokens=16)
        for shape in (MeshShape(), MeshShape(dp_replicate=2, dp_shard=2, tp=2))
    )
    # Two embeddings of 64 * 32; in each layer attention of 32 * (32 + 16 + 16 + 32), three matrices of 32 * 48, two
    # norms, which tp leaves whole; one norm at the end.
    matrices, norms = 2 * 64 * 32 + 2 * (32 * 96 + 3 * 32 * 48), 5 * 32
    assert whole.gradients == 4 * (matrices + norms)
    assert part.gradients == 4 * (matrices // 4 + norms // 2)
    steps = 4 * 21  # of every tensor
    assert (whole.moments, part.moments) == (2 * whole.gradients + steps, 2 * part.gradients + steps)
    assert whole.gathered == 0 < part.gathered
    assert part.host == part.weights + part.moments


def test_what_cannot_be_planned_is_refused(model_folder: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="does not divide"):
        plan_memory(model_folder("llama"), shape=MeshShape(tp=3), max_tokens=64, row_tokens=16)
    with pytest.raises(ConfigError, match="memory of stages is not planned"):
        plan_memory(model_folder("llama"), shape=MeshShape(pp=2), max_tokens=64, row_tokens=16)
    assert not torch.distributed.is_initialized()


def test_no_weights_are_read_to_refuse_a_mixture(model_folder: Callable[..., str], tmp_path: Path) -> None:
    shutil.copy(Path(model_folder("mixtral")) / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="mixtral is a mixture, or read as a whole: its memory is not planned"):
        plan_memory(str(tmp_path), shape=MeshShape(), max_tokens=64, row_tokens=16)
    assert not torch.distributed.is_initialized()


def a_plan(shape: MeshShape) -> MemoryPlan:
    """160 bytes of a rank's own, divided by dp_shard, cp and tp; 40 of activations, divided by cp and tp."""
    if shape.tp > 2:
        raise ConfigError("it does not divide the heads")
    held = {"gathered": 0, "head": 0, "activations": 40 // shape.copies}
    divided = shape.dp_shard * shape.copies
    return MemoryPlan(shape=shape, weights=40 // divided, gradients=40 // divided, moments=80 // divided, **held)


@pytest.mark.parametrize(
    ("most", "nearest"),
    [
        (120, MeshShape(dp_shard=2)),  # instead of replicas: 80 + 40
        (100, MeshShape(tp=2)),  # 80 + 20
        (50, MeshShape(cp=4)),  # twice the ranks: 40 + 10
        (1, None),
    ],
)
def test_the_nearest_mesh_that_fits(most: int, nearest: MeshShape | None) -> None:
    found = a_plan(MeshShape(dp_replicate=2)).fitting(most, a_plan, most_ranks=4)
    assert (found and found.shape) == nearest
