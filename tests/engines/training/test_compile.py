"""What torch.compile makes of a trainer computes what the trainer computes without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from asyncrl.errors import ConfigError
from engines.training import model
from engines.training.fsdp_engine import FSDPEngine
from engines.training.log_probs import Extras, Head, token_log_probs
from engines.training.packed_attention import packed_attention

MakeEngine = Callable[..., FSDPEngine]
LENGTHS = [9, 4, 17, 6, 6, 12, 3, 14]
TRACED = "aot_eager"
"""The backend that traces and differentiates as the default one does, and calls torch's own kernels."""

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CASES: dict[str, dict[str, Any]] = {
    "sharded, checkpointing": {"gradient_checkpointing": True, "dtype": "bfloat16", "layers": 9},
    "lora": {"lora": {"rank": 2, "alpha": 4.0}},
    "windows and caps": {"family": "gemma2"},
    "padded": {"layout": "padded"},
}
MARKS = {"sharded, checkpointing": pytest.mark.slow}


@pytest.fixture
def engine(model_folder: Callable[..., str]) -> Iterator[MakeEngine]:
    made: list[FSDPEngine] = []

    def make(family: str = "llama", layers: int = 2, **options: Any) -> FSDPEngine:
        settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "device": "cpu"} | options
        sizes = {"num_hidden_layers": layers} | ({"sliding_window": 5} if family == "gemma2" else {})
        folder = model_folder(family, **sizes)
        made.append(FSDPEngine(folder, objective=PolicyObjective(entropy_coef=0.01), **settings))
        return made[-1]

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield make
    for each in made:
        each.close()
    torch.compiler.reset()


class Trained(NamedTuple):
    metrics: list[dict[str, float]]
    tensors: list[Tensor]  # log-probs and entropies after the updates, and weights

    def check(self, expected: Trained, *, rel: float) -> None:
        for mine, theirs in zip(self.metrics, expected.metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=rel, abs=rel)
        for found, wanted in zip(self.tensors, expected.tensors, strict=True):
            assert float((found - wanted).norm()) <= rel * float(wanted.norm())


def trained(engine: FSDPEngine, trajectories: Callable[..., DataProto]) -> Trained:
    """Make updates on streams of several lengths, of which the third is computed by the code of the second.

    Between them the engine sleeps: its weights come back in other memory.
    """
    metrics: list[dict[str, float]] = []
    for step in range(3):
        with torch.compiler.set_stance("fail_on_recompile") if step > 1 else nullcontext():
            metrics.append(engine.update(trajectories(LENGTHS[step:], seed=step)))
            engine.sleep()
            engine.wake()
    tensors: list[Tensor] = []
    scored = [engine.log_probs] + ([engine.reference_log_probs] if engine.lora is not None else [])
    for score in scored:
        found = score(trajectories(LENGTHS[:5], seed=9)).batch
        assert found is not None
        tensors += [found["log_probs"].values(), found["entropy"].values()]
    return Trained(metrics, tensors + [tensor.cpu().clone() for _, tensor in engine.named_tensors()])


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, pytest.mark.long)) for case in CASES])
def test_updates_and_scores_are_those_without_it(
    engine: MakeEngine, trajectories: Callable[..., DataProto], monkeypatch: pytest.MonkeyPatch, case: str
):
    calls: list[int] = []

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return packed_attention(*given, **named)

    monkeypatch.setattr(model, "packed_attention", counted)
    compiled, plain = engine(**CASES[case], compile=TRACED), engine(**CASES[case])
    exact = CASES[case].get("dtype") != "bfloat16"
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # which is below nine layers
        found = trained(compiled, trajectories)
    found.check(trained(plain, trajectories), rel=1e-5 if exact else 2e-2)
    if case == "sharded, checkpointing":  # three updates, whose forward passes are computed twice, and scores
        assert len(calls) == 9 * (3 * 2 + 1)
    assert bool(calls) == (case != "padded")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 5  # parts of a layer, and those of the head


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs a C++ compiler")
def test_generated_code_computes_the_same(engine: MakeEngine, trajectories: Callable[..., DataProto]):
    compiled, plain = (engine(max_tokens_per_microbatch=40, temperature=0.7, compile=each) for each in (True, False))
    trained(compiled, trajectories).check(trained(plain, trajectories), rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {}),
        ("bfloat16", {"gradient_checkpointing": True}),
        ("bfloat16", {"lora": {"rank": 2, "alpha": 4.0}}),
    ],
)
def test_generated_kernels_compute_the_same(
    engine: MakeEngine, trajectories: Callable[..., DataProto], dtype: str, options: dict[str, Any]
):
    compiled, plain = (engine(device="cuda", dtype=dtype, **options, compile=each) for each in (True, False))
    rel = 1e-3 if dtype == "float32" else 5e-2
    trained(compiled, trajectories).check(trained(plain, trajectories), rel=rel)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_passes_over_logits_are_compiled_once_for_any_number_of_tokens(device: str):
    torch.compiler.reset()
    weight = torch.randn(61, 8, device=device).requires_grad_()

    def scored(tokens: int, extras: Extras, backend: str | None) -> list[Tensor]:
        draw = torch.Generator().manual_seed(tokens)
        hidden = torch.randn(tokens, 8, generator=draw).to(device).requires_grad_()
        targets = torch.randint(0, 61, (tokens,), generator=draw).to(device)
        head = Head(weight, scale=0.5, softcap=4.0)
        scores = token_log_probs(
            hidden,
            targets,
            head=head,
            vocabulary=61,
            extras=extras,
            temperature=0.7,
            chunk_bytes=4 * 61 * 5,
            kept_bytes=4 * 61 * 5,
            backend=backend,
        )
        loss = scores.log_probs.sum() + (0.1 * scores.entropy.sum() if extras == "entropy_gradient" else 0.0)
        return [*(each.detach() for each in scores), *torch.autograd.grad(loss, (hidden, weight))]

    backend = TRACED if device == "cpu" else "inductor"
    kinds: tuple[Extras, ...] = ("entropy_gradient", "correct")
    for extras in kinds:
        for tokens in (12, 9, 33):  # in chunks of 5
            with nullcontext() if tokens == 12 else torch.compiler.set_stance("fail_on_recompile"):
                found = scored(tokens, extras, backend)
            for mine, theirs in zip(found, scored(tokens, extras, None), strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


def test_what_cannot_be_compiled_is_refused(engine: MakeEngine):
    with pytest.raises(ConfigError, match="compile is 'fast'") as error:
        engine(compile="fast")
    assert "inductor" in error.value.remedy
    with pytest.raises(ConfigError, match=r"compile with mesh\.tp = 2"):
        engine(compile=True, world_size=2, master_port=1, mesh={"tp": 2})
