"""The policy loss against plain Python, its gradient by finite differences, and what masks keep out."""

import dataclasses
import inspect
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.algorithms import PPO, KLCov, NoCorrection, PolicyObjective, TruncatedImportance
from asyncrl.errors import ConfigError, SchemaError

COLUMNS = ("current", "proximal", "behaviour", "reference", "entropy", "advantage")


def plain_loss(objective: PolicyObjective, token: dict[str, float]) -> float:
    assert isinstance(objective.loss, PPO)
    ratio = math.exp(token["current"] - token["proximal"])
    clipped = min(max(ratio, 1 - objective.loss.clip_ratio_low), 1 + objective.loss.clip_ratio_high)
    weight = 1.0
    if isinstance(objective.correction, TruncatedImportance):
        weight = min(math.exp(token["proximal"] - token["behaviour"]), objective.correction.cap)
    gap = token["current"] - token["reference"]
    divergence = {"k1": gap, "k2": gap**2 / 2, "k3": math.exp(-gap) - 1 + gap}[objective.kl_estimator]
    return (
        -weight * min(ratio * token["advantage"], clipped * token["advantage"])
        + objective.kl_coef * divergence
        - objective.entropy_coef * token["entropy"]
    )


def losses(objective: PolicyObjective, tokens: list[dict[str, float]], mask: Any = None, **other: Any) -> Any:
    column = {name: torch.tensor([token[name] for token in tokens], dtype=torch.float64) for name in COLUMNS}
    arguments: dict[str, Any] = {
        "current_log_probs": column["current"],
        "proximal_log_probs": column["proximal"],
        "behaviour_log_probs": column["behaviour"],
        "reference_log_probs": column["reference"],
        "entropy": column["entropy"],
        "advantages": column["advantage"],
        "mask": torch.ones(len(tokens), dtype=torch.bool) if mask is None else torch.as_tensor(mask),
    }
    return objective.token_losses(**{**arguments, **other})


def some_tokens(count: int, *, seed: int = 0) -> list[dict[str, float]]:
    draw = random.Random(seed)
    return [
        {
            "current": draw.uniform(-3, 0),
            "proximal": draw.uniform(-3, 0),
            "behaviour": draw.uniform(-3, 0),
            "reference": draw.uniform(-3, 0),
            "entropy": draw.uniform(0, 2),
            "advantage": draw.uniform(-2, 2),
        }
        for _ in range(count)
    ]


log_prob = st.floats(-6, 0)
one_token = st.fixed_dictionaries(
    {
        "current": log_prob,
        "proximal": log_prob,
        "behaviour": log_prob,
        "reference": log_prob,
        "entropy": st.floats(0, 3),
        "advantage": st.floats(-3, 3),
    }
)
objectives = st.builds(
    PolicyObjective,
    loss=st.builds(PPO, clip_ratio_low=st.floats(0, 1), clip_ratio_high=st.floats(0, 2)),
    correction=st.just(NoCorrection()) | st.builds(TruncatedImportance, cap=st.floats(1, 10)),
    kl_coef=st.floats(0, 1),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    entropy_coef=st.floats(0, 1),
)


@given(objectives, st.lists(one_token, min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_equals_plain_python(objective: PolicyObjective, tokens: list[dict[str, float]]) -> None:
    got = losses(objective, tokens).loss.tolist()
    assert got == pytest.approx([plain_loss(objective, token) for token in tokens], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_by_finite_differences(estimator: Any) -> None:
    objective = PolicyObjective(kl_coef=0.3, kl_estimator=estimator, entropy_coef=0.1, loss=PPO(clip_ratio_high=0.5))
    tokens = some_tokens(40)
    current = torch.tensor([token["current"] for token in tokens], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([token["entropy"] for token in tokens], dtype=torch.float64, requires_grad=True)
    losses(objective, tokens, current_log_probs=current, entropy=entropy).loss.sum().backward()
    step = 1e-6
    for name, gradient in (("current", current.grad), ("entropy", entropy.grad)):
        assert gradient is not None
        slopes = [
            (
                plain_loss(objective, {**token, name: token[name] + step})
                - plain_loss(objective, {**token, name: token[name] - step})
            )
            / (2 * step)
            for token in tokens
        ]
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-7)


def test_only_the_current_policy_and_the_entropy_get_a_gradient() -> None:
    tokens = some_tokens(6)
    leaves = {
        f"{name}_log_probs": torch.tensor([token[name] for token in tokens], requires_grad=True)
        for name in ("current", "proximal", "behaviour", "reference")
    }
    leaves["advantages"] = torch.ones(6, requires_grad=True)
    losses(PolicyObjective(kl_coef=0.1), tokens, **leaves).loss.sum().backward()
    assert leaves.pop("current_log_probs").grad is not None
    assert all(leaf.grad is None for leaf in leaves.values())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.2, 0.0),  # good token, already likelier: clipped
        (0.5, 1.0, -0.5, -0.5),  # good token, made unlikelier: free to come back
        (1.5, -1.0, 1.5, 1.5),  # bad token, made likelier: free to come back
        (0.5, -1.0, 0.8, 0.0),  # bad token, already unlikelier: clipped
    ],
)
def test_the_four_corners_of_the_clip(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    current = torch.tensor([math.log(ratio)], requires_grad=True)
    zero = torch.zeros(1)
    got = PolicyObjective().token_losses(
        current_log_probs=current,
        proximal_log_probs=zero,
        behaviour_log_probs=zero,
        advantages=torch.tensor([advantage]),
        mask=torch.tensor([True]),
    )
    got.loss.sum().backward()
    assert got.loss.item() == pytest.approx(loss)
    assert current.grad is not None
    assert float(current.grad) == pytest.approx(gradient)
    assert float(got.metrics["clip_fraction"]) == (1.0 if gradient == 0.0 else 0.0)


def test_first_step_on_policy_is_the_plain_policy_gradient() -> None:
    current = torch.tensor([-0.3, -1.7, -2.9], requires_grad=True)
    same = current.detach().clone()
    advantages = torch.tensor([1.0, -2.0, 0.5])
    got = PolicyObjective(kl_coef=0.1).token_losses(
        current_log_probs=current,
        proximal_log_probs=same,
        behaviour_log_probs=same,
        reference_log_probs=same,
        advantages=advantages,
        mask=torch.ones(3, dtype=torch.bool),
    )
    got.loss.sum().backward()
    assert got.metrics["ratio"].tolist() == [1.0, 1.0, 1.0]
    assert got.metrics["behaviour_weight"].tolist() == [1.0, 1.0, 1.0]
    for name in ("policy_kl", "behaviour_kl", "reference_kl", "clip_fraction"):
        assert got.metrics[name].tolist() == [0.0, 0.0, 0.0], name
    assert current.grad is not None
    assert current.grad.equal(-advantages)


def test_an_old_token_weighs_by_how_likely_it_still_is_up_to_the_cap() -> None:
    proximal = torch.log(torch.tensor([0.5, 0.5, 0.5]))
    behaviour = torch.log(torch.tensor([1.0, 0.4, 0.1]))
    got = PolicyObjective(correction=TruncatedImportance(cap=2.0)).token_losses(
        current_log_probs=proximal,
        proximal_log_probs=proximal,
        behaviour_log_probs=behaviour,
        advantages=torch.ones(3),
        mask=torch.ones(3, dtype=torch.bool),
    )
    torch.testing.assert_close(got.metrics["behaviour_weight"], torch.tensor([0.5, 1.25, 2.0]))
    torch.testing.assert_close(got.loss, torch.tensor([-0.5, -1.25, -2.0]))
    # k3 of proximal / behaviour = 1/2, 5/4, 5: r - 1 - log r
    expected = [r - 1 - math.log(r) for r in (0.5, 1.25, 5.0)]
    assert got.metrics["behaviour_kl"].tolist() == pytest.approx(expected, rel=1e-5)


def test_how_far_a_step_has_moved() -> None:
    got = PolicyObjective().token_losses(
        current_log_probs=torch.log(torch.tensor([0.2, 0.9])),
        proximal_log_probs=torch.log(torch.tensor([0.4, 0.6])),
        behaviour_log_probs=torch.log(torch.tensor([0.4, 0.6])),
        advantages=torch.ones(2),
        mask=torch.ones(2, dtype=torch.bool),
    )
    # r = current / proximal = 1/2 and 3/2: r - 1 - log r, the estimate of KL(proximal || current)
    assert got.metrics["policy_kl"].tolist() == pytest.approx([math.log(2) - 0.5, 0.5 - math.log(1.5)], rel=1e-5)
    assert got.metrics["behaviour_kl"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rubbish", [math.nan, math.inf, -math.inf])
def test_nothing_outside_the_mask_reaches_loss_metrics_or_gradient(rubbish: float) -> None:
    tokens = some_tokens(4)
    objective = PolicyObjective(kl_coef=0.2, entropy_coef=0.1)
    dirty = [token if i % 2 else dict.fromkeys(COLUMNS, rubbish) for i, token in enumerate(tokens)]
    mask = [bool(i % 2) for i in range(4)]
    current = torch.tensor([token["current"] for token in dirty], dtype=torch.float64, requires_grad=True)
    entropy = torch.tensor([token["entropy"] for token in dirty], dtype=torch.float64, requires_grad=True)
    got = losses(objective, dirty, mask, current_log_probs=current, entropy=entropy)
    got.loss.sum().backward()
    assert got.loss[::2].tolist() == [0.0, 0.0]
    assert got.loss[1::2].tolist() == pytest.approx([plain_loss(objective, token) for token in tokens[1::2]])
    assert all(metric[::2].tolist() == [0.0, 0.0] for metric in got.metrics.values())
    for leaf in (current, entropy):
        assert leaf.grad is not None
        assert leaf.grad[::2].tolist() == [0.0, 0.0]
        assert leaf.grad[1::2].isfinite().all()


def test_a_fully_masked_batch_has_loss_and_gradient_zero() -> None:
    current = torch.full((5,), math.nan, requires_grad=True)
    got = losses(PolicyObjective(), some_tokens(5), [False] * 5, current_log_probs=current)
    got.loss.sum().backward()
    assert got.loss.tolist() == [0.0] * 5
    assert current.grad is not None
    assert current.grad.tolist() == [0.0] * 5


def test_nan_inside_the_mask_stays_visible() -> None:
    tokens = some_tokens(2)
    tokens[0]["behaviour"] = math.nan
    got = losses(PolicyObjective(), tokens)
    assert got.loss[0].isnan()
    assert got.loss[1].isfinite()


def test_permutation_padding_and_shape_change_no_tokens_loss() -> None:
    tokens = some_tokens(6)
    objective = PolicyObjective(kl_coef=0.2)
    straight = losses(objective, tokens).loss
    order = [3, 1, 5, 0, 2, 4]
    assert losses(objective, [tokens[i] for i in order]).loss.equal(straight[order])
    padded = losses(objective, [*tokens, dict.fromkeys(COLUMNS, math.nan)], [True] * 6 + [False]).loss
    assert padded[:6].equal(straight)
    as_rows = {
        name: torch.tensor([token[key] for token in tokens], dtype=torch.float64).reshape(2, 3)
        for name, key in [
            ("current_log_probs", "current"),
            ("proximal_log_probs", "proximal"),
            ("behaviour_log_probs", "behaviour"),
            ("reference_log_probs", "reference"),
            ("advantages", "advantage"),
        ]
    }
    assert objective.token_losses(**as_rows, mask=torch.ones(2, 3, dtype=torch.bool)).loss.flatten().equal(straight)


def test_extreme_ratios_stay_finite() -> None:
    current = torch.tensor([0.0, -500.0], requires_grad=True)
    got = PolicyObjective(kl_coef=1.0).token_losses(
        current_log_probs=current,
        proximal_log_probs=torch.tensor([-500.0, 0.0]),
        behaviour_log_probs=torch.tensor([-900.0, -900.0]),
        reference_log_probs=torch.tensor([-500.0, 0.0]),
        advantages=torch.tensor([-1.0, -1.0]),
        mask=torch.tensor([True, True]),
    )
    got.loss.sum().backward()
    assert got.loss.isfinite().all()
    assert current.grad is not None
    assert current.grad.isfinite().all()


def test_bfloat16_log_probs_are_subtracted_in_float32() -> None:
    column = torch.tensor([-1.0], dtype=torch.bfloat16)
    got = PolicyObjective().token_losses(
        current_log_probs=column,
        proximal_log_probs=torch.tensor([-1.001]),
        behaviour_log_probs=column,
        advantages=torch.tensor([1.0]),
        mask=torch.tensor([True]),
    )
    assert got.loss.dtype == torch.float32
    assert float(got.metrics["ratio"]) == pytest.approx(math.exp(0.001), rel=1e-6)


def test_the_three_policies_can_only_be_named() -> None:
    kinds = {p.kind for p in inspect.signature(PolicyObjective.token_losses).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    with pytest.raises(TypeError, match="positional"):
        PolicyObjective().token_losses(*[torch.zeros(1)] * 5)  # type: ignore[call-arg]


def test_only_the_current_policy_gets_a_gradient() -> None:
    names = ("current_log_probs", "proximal_log_probs", "behaviour_log_probs", "advantages")
    columns = {name: torch.tensor([-1.0, -0.5], requires_grad=True) for name in names}
    got = losses(PolicyObjective(), some_tokens(2), **columns)
    got.loss.sum().backward()
    assert [name for name in names if columns[name].grad is not None] == ["current_log_probs"]
    assert not any(column.requires_grad for column in got.metrics.values())


def test_columns_that_do_not_fit_are_named() -> None:
    tokens = some_tokens(3)
    with pytest.raises(SchemaError, match=r"behaviour_log_probs has shape \(2,\), the mask \(3,\)"):
        losses(PolicyObjective(), tokens, behaviour_log_probs=torch.zeros(2))
    with pytest.raises(SchemaError, match="advantages must be floating"):
        losses(PolicyObjective(), tokens, advantages=torch.ones(3, dtype=torch.int64))
    with pytest.raises(SchemaError, match="mask must be boolean"):
        losses(PolicyObjective(), tokens, mask=torch.ones(3))
    with pytest.raises(SchemaError, match=r"kl_coef is 0\.1, which needs reference_log_probs"):
        losses(PolicyObjective(kl_coef=0.1), tokens, reference_log_probs=None)
    with pytest.raises(SchemaError, match=r"entropy_coef is 0\.1, which needs entropy"):
        losses(PolicyObjective(entropy_coef=0.1), tokens, entropy=None)


@pytest.mark.parametrize("name", ["proximal_log_probs", "behaviour_log_probs", "advantages"])
def test_columns_of_a_whole_batch_that_do_not_fit_are_named(name: str) -> None:
    columns = {each: torch.zeros(3) for each in ("proximal_log_probs", "behaviour_log_probs", "advantages")}
    columns[name] = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(SchemaError, match=f"^{name} must be floating"):
        PolicyObjective(loss=KLCov()).prepare(**columns, rows=torch.zeros(3, dtype=torch.int64), seed=0)


def test_metrics_are_those_of_the_columns_given() -> None:
    got = losses(PolicyObjective(), some_tokens(2), reference_log_probs=None, entropy=None)
    assert set(got.metrics) == {
        "ratio",
        "clip_fraction",
        "policy_kl",
        "behaviour_weight",
        "behaviour_rejected",
        "behaviour_ratio",
        "behaviour_ratio_squared",
        "behaviour_kl",
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"anchor": "current"},
        {"kl_coef": -1.0},
        {"kl_coef": math.nan},
        {"entropy_coef": -1.0},
        {"kl_estimator": "k4"},
        {"loss_agg_mode": "mean"},
        {"loss_agg_mode": "fixed_length"},
        {"fixed_length": 10},
    ],
    ids=str,
)
def test_values_outside_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        PolicyObjective(**wrong)
    assert caught.value.remedy


def test_its_aggregation_weighs_the_tokens() -> None:
    objective = PolicyObjective(loss_agg_mode="fixed_length", fixed_length=10)
    assert objective.token_weights(torch.tensor([2, 0]), total_tokens=5, total_rows=2).tolist() == pytest.approx(
        [0.05, 0.0]
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        objective.anchor = "behaviour"  # type: ignore[misc]
