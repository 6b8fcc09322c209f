from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl.errors import ConfigError
from asyncrl.mesh import MeshShape
from engines.training.memory import plan_memory
from engines.training.optimizer import LearningRate, OptimizerName, Schedule, ShardedOptimizer, clipping_scale


def _rates(steps: int, lr_scheduler_type: Schedule, warmup_steps: int, total_steps: int | None) -> list[float]:
    rate = LearningRate(
        peak=8.0, lr_scheduler_type=lr_scheduler_type, warmup_steps=warmup_steps, total_steps=total_steps
    )
    return [rate.at(step) for step in range(steps)]


def test_learning_rates_by_hand() -> None:
    assert _rates(5, "constant", 4, None) == [2.0, 4.0, 6.0, 8.0, 8.0]
    assert _rates(8, "linear", 2, 6) == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0, 0.0]
    # Half a cosine over four steps: 1, (1 + cos 45)/2, 1/2, (1 - cos 45)/2, 0.
    assert _rates(6, "cosine", 0, 4) == pytest.approx([8.0, 4 + 4 * math.sqrt(0.5), 4.0, 4 - 4 * math.sqrt(0.5), 0, 0])


def test_a_learning_rate_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ConfigError, match="total_steps, which is None"):
        LearningRate(peak=1.0, lr_scheduler_type="linear")
    with pytest.raises(ConfigError, match="total_steps, which is 5"):
        LearningRate(peak=1.0, lr_scheduler_type="cosine", warmup_steps=5, total_steps=5)
    with pytest.raises(ConfigError, match="lr is nan"):
        LearningRate(peak=math.nan)
    with pytest.raises(ConfigError, match="'sine' does not exist"):
        LearningRate(peak=1.0, lr_scheduler_type="sine")  # type: ignore[arg-type]


def test_clipping() -> None:
    assert clipping_scale(5.0, None) == 1.0
    assert clipping_scale(0.5, 1.0) == 1.0
    assert clipping_scale(4.0, 1.0) == 0.25


def _optimizer() -> tuple[nn.Parameter, nn.Parameter, ShardedOptimizer]:
    matrix, bias = nn.Parameter(torch.full((2, 2), 10.0)), nn.Parameter(torch.full((2,), 10.0))
    return matrix, bias, ShardedOptimizer([("matrix", matrix), ("bias", bias)], weight_decay=0.5, betas=(0.5, 0.75))


def test_two_steps_by_hand() -> None:
    matrix, bias, adamw = _optimizer()
    matrix.grad, bias.grad = torch.full((2, 2), 3.0), torch.full((2,), -3.0)
    assert adamw.squared_gradient_norm() == pytest.approx(4 * 9 + 2 * 9)
    adamw.step(lr=0.1)
    # The first step is lr * sign(gradient), and the matrix also loses lr * decay = 5% of itself.
    assert matrix.detach().numpy() == pytest.approx(10 * 0.95 - 0.1)
    assert bias.detach().numpy() == pytest.approx(10 + 0.1)
    assert matrix.grad is None

    # A gradient of 8, scaled by 1/8 to 1: exp_avg = 0.5 * 1.5 + 0.5 = 1.25, over 1 - 0.5**2 = 0.75: 5/3;
    # exp_avg_sq = 0.75 * (0.25 * 9) + 0.25 = 1.9375, over 1 - 0.75**2 = 0.4375: 4.4285...
    matrix.grad = torch.full((2, 2), 8.0)
    before = matrix.detach().clone()
    adamw.step(lr=0.2, gradient_scale=1 / 8)
    expected = before * 0.9 - 0.2 * (5 / 3) / math.sqrt(1.9375 / 0.4375)
    assert torch.allclose(matrix, expected)
    assert bias.detach().numpy() == pytest.approx(10.1)  # no gradient, no step
    assert adamw.steps() == {"matrix": 2, "bias": 1}


def test_training_continues_from_restored_moments() -> None:
    matrix, bias, adamw = _optimizer()
    matrix.grad, bias.grad = torch.rand(2, 2), torch.rand(2)
    adamw.step(lr=0.1)
    other_matrix, other_bias, other = _optimizer()
    with torch.no_grad():
        other_matrix.copy_(matrix)
        other_bias.copy_(bias)
    moments = {name: {each: tensor.clone() for each, tensor in pair.items()} for name, pair in adamw.moments().items()}
    other.restore(moments, adamw.steps())
    for parameter, twin in ((matrix, other_matrix), (bias, other_bias)):
        parameter.grad = torch.rand(parameter.shape)
        twin.grad = parameter.grad.clone()
    adamw.step(lr=0.1)
    other.step(lr=0.1)
    assert torch.equal(matrix, other_matrix)
    assert torch.equal(bias, other_bias)


def test_frozen_parameters_are_ignored() -> None:
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    adamw = ShardedOptimizer([("frozen", frozen), ("free", nn.Parameter(torch.ones(2)))])
    adamw.step(lr=1.0)
    assert adamw.moments() == {}
    assert torch.equal(frozen, torch.ones(2, 2))


@pytest.fixture
def pair() -> tuple[nn.Parameter, nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(64, 64, generator=draw)), nn.Parameter(torch.randn(64, generator=draw))


def _by_torch(name: str, matrix: Tensor, bias: Tensor) -> list[torch.optim.Optimizer]:
    match name:
        case "sgd":
            sgd = torch.optim.SGD([matrix, bias], lr=0.01, momentum=0.9)
            sgd.register_step_pre_hook(lambda *_: setattr(matrix, "data", matrix * (1.0 - 0.01 * 0.1)))
            return [sgd]
        case "adafactor":
            groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [bias]}]
            return [torch.optim.Adafactor(groups, lr=0.01, d=2.0)]
        case "muon":
            muon = torch.optim.Muon([matrix], lr=0.01, weight_decay=0.1, ns_steps=3, adjust_lr_fn="match_rms_adamw")
            return [muon, torch.optim.AdamW([bias], lr=0.01, weight_decay=0.0, betas=(0.9, 0.95))]
        case _:
            from torchao.optim import AdamW8bit

            groups = [{"params": [matrix], "weight_decay": 0.1}, {"params": [bias], "weight_decay": 0.0}]
            return [AdamW8bit(groups, lr=0.01, betas=(0.9, 0.95))]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"momentum": 0.9}),
        ("adafactor", {"d": 2.0}),
        ("muon", {"ns_steps": 3}),
        pytest.param("adamw_8bit", {}, marks=pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")),
    ],
)
def test_optimizers_are_torchs_and_go_on_bit_for_bit_from_what_was_saved(
    name: OptimizerName, options: dict[str, Any], pair: tuple[nn.Parameter, nn.Parameter]
) -> None:
    matrix, bias = pair
    settings: dict[str, Any] = {"weight_decay": 0.1, "name": name, "options": options}
    ours = ShardedOptimizer([("matrix", matrix), ("bias", bias)], **settings)
    theirs = matrix.detach().clone(), bias.detach().clone()
    by_torch = _by_torch(name, *theirs)
    twins = nn.Parameter(torch.empty(64, 64)), nn.Parameter(torch.empty(64))
    twin = ShardedOptimizer([("matrix", twins[0]), ("bias", twins[1])], **settings)
    for step in range(3):
        for each, its, copy in zip(pair, theirs, twins, strict=True):
            each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(step))
            its.grad, copy.grad = each.grad.clone(), each.grad.clone()
        ours.step(lr=0.01)
        with torch.compiler.set_stance("force_eager"):
            for optimizer in by_torch:
                optimizer.step()
        assert all(torch.equal(each, its) for each, its in zip(pair, theirs, strict=True))
        if step == 2:
            twin.step(lr=0.01)
            assert all(torch.equal(each, copy) for each, copy in zip(pair, twins, strict=True))
        for copy, each in zip(twins, pair, strict=True):
            copy.data.copy_(each.data)
        found, empty = ours.moments(), twin.empty_moments(["matrix", "bias"])
        for key, parts in found.items():
            assert {each: part.shape for each, part in parts.items()} == {
                each: part.shape for each, part in empty[key].items()
            }
            for each, part in parts.items():
                empty[key][each].copy_(part)
        twin.restore(empty, ours.steps())
    assert ours.steps() == {"matrix": 3, "bias": 3}


def test_the_weight_decay_of_gradient_descent_has_no_momentum() -> None:
    matrix = nn.Parameter(torch.ones(1, 1))
    sgd = ShardedOptimizer([("matrix", matrix)], name="sgd", weight_decay=0.2, options={"momentum": 0.5})
    found: list[float] = []
    for gradient in (1.0, 0.0):
        matrix.grad = torch.full((1, 1), gradient)
        sgd.step(lr=0.5)
        found.append(float(matrix.detach()))
    assert found == pytest.approx([0.9 - 0.5, 0.4 * 0.9 - 0.5 * 0.5])
    assert float(sgd.moments()["matrix"]["momentum_buffer"]) == 0.5


def test_embeddings_are_left_to_adamw_by_muon(pair: tuple[nn.Parameter, nn.Parameter]) -> None:
    embedding = nn.Parameter(torch.ones(4, 4))
    muon = ShardedOptimizer([("matrix", pair[0]), ("embedding", embedding)], name="muon", apart=[embedding])
    pair[0].grad, embedding.grad = torch.ones(64, 64), torch.ones(4, 4)
    muon.step(lr=0.1)
    assert {name: sorted(parts) for name, parts in muon.moments().items()} == {
        "matrix": ["momentum_buffer"],
        "embedding": ["exp_avg", "exp_avg_sq"],
    }


def test_what_an_optimizer_does_not_have_is_refused_by_name(pair: tuple[nn.Parameter, nn.Parameter]) -> None:
    parameters = [("matrix", pair[0]), ("bias", pair[1])]
    with pytest.raises(ConfigError, match="'lion' does not exist") as refused:
        ShardedOptimizer(parameters, name="lion")  # type: ignore[arg-type]
    assert "muon" in refused.value.remedy
    with pytest.raises(ConfigError, match="'sgd' has no option 'momentun'") as refused:
        ShardedOptimizer(parameters, name="sgd", options={"momentun": 0.9})
    assert "momentum" in refused.value.remedy
    with pytest.raises(ConfigError, match="'adamw' has no option 'betas'"):
        ShardedOptimizer(parameters, options={"betas": (0.5, 0.5)})
    with pytest.raises(ConfigError, match="'adamw' has no option 'amsgrad'") as refused:
        ShardedOptimizer(parameters, options={"amsgrad": True})
    assert refused.value.remedy == "betas and eps are fields of the engine"
    with pytest.raises(ConfigError, match="'muon': momentum should be"):
        ShardedOptimizer(parameters, name="muon", options={"momentum": -1.0})


@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
def test_a_plan_of_memory_counts_the_codes_and_scales_of_8_bits(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    plans = [
        plan_memory(str(tmp_path), shape=MeshShape(), max_tokens=256, row_tokens=64, optimizer=each)
        for each in ("adamw", "adamw_8bit")
    ]
    whole, codes = (each.moments / each.weights for each in plans)
    assert whole == pytest.approx(2, rel=0.01)
    assert codes == pytest.approx(2 * (1 / 4 + 1 / 256), rel=0.1), "a byte for each, and a scale for 256"
