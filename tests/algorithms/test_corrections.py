"""Corrections against plain loops over rows, and how they go together with anchors and losses."""

import math
import random
from typing import Any

import pytest
import torch

from asyncrl.algorithms import (
    CISPO,
    PPO,
    Correction,
    IcePop,
    MaskedImportance,
    NoCorrection,
    PolicyObjective,
    PolicyTokens,
    Rejection,
    TruncatedImportance,
    anchor_log_probs,
)
from asyncrl.errors import ConfigError, SchemaError

Row = list[tuple[float, float]]  # anchor and behaviour of each token


def plain(correction: Any, row: Row) -> list[float]:
    gaps = [anchor - behaviour for anchor, behaviour in row]
    level = getattr(correction, "level", "token")
    if level == "sequence":
        gaps = [sum(gaps)] * len(row)
    elif level == "geometric":
        gaps = [sum(gaps) / len(row)] * len(row)
    ratios = [math.exp(gap) for gap in gaps]
    match correction:
        case NoCorrection():
            return [1.0] * len(row)
        case TruncatedImportance():
            return [min(ratio, correction.cap) for ratio in ratios]
        case MaskedImportance():
            return [ratio if correction.low <= ratio <= correction.high else 0.0 for ratio in ratios]
        case Rejection():
            return [1.0 if correction.low <= ratio <= correction.high else 0.0 for ratio in ratios]
    raise AssertionError(correction)


CORRECTIONS: list[Correction] = [
    NoCorrection(),
    TruncatedImportance(),
    TruncatedImportance(cap=1.0, level="sequence"),
    TruncatedImportance(cap=1.2, level="geometric"),
    MaskedImportance(),
    MaskedImportance(low=0.6, high=1.5, level="token"),
    MaskedImportance(low=0.9, high=1.1, level="geometric"),
    IcePop(),
    IcePop(low=0.8, high=1.2),
    Rejection(),
    Rejection(low=0.7, high=1.4, level="token"),
    Rejection(low=0.4, high=3.0, level="sequence"),
]


def some_rows(*, seed: int) -> list[Row]:
    draw = random.Random(seed)
    rows = []
    for length in (3, 1, 4, 2, 2):
        drift = draw.uniform(-0.5, 0.5)
        rows.append([(a, a + drift + draw.uniform(-0.7, 0.7)) for a in (draw.uniform(-2, 0) for _ in range(length))])
    return rows


def tokens_of(rows: list[Row], mask: torch.Tensor | None = None) -> PolicyTokens:
    anchor = torch.tensor([a for row in rows for a, _ in row], dtype=torch.float64)
    return PolicyTokens(
        current=anchor,
        anchor=anchor,
        proximal=anchor,
        behaviour=torch.tensor([b for row in rows for _, b in row], dtype=torch.float64),
        advantages=anchor,
        mask=torch.ones(len(anchor), dtype=torch.bool) if mask is None else mask,
        row_index=torch.tensor([number for number, row in enumerate(rows) for _ in row]),
    )


@pytest.mark.parametrize("correction", CORRECTIONS, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_equals_plain_loops(correction: Correction, seed: int) -> None:
    rows = some_rows(seed=seed)
    expected = [weight for row in rows for weight in plain(correction, row)]
    assert correction(tokens_of(rows)).tolist() == pytest.approx(expected, rel=1e-9)


def test_bounds_belong_to_the_band() -> None:
    rows: list[Row] = [[(math.log(0.5), 0.0)], [(math.log(2.0), 0.0)], [(math.log(0.25), 0.0)], [(math.log(4.0), 0.0)]]
    tokens = tokens_of(rows)
    assert MaskedImportance(low=0.5, high=2.0)(tokens).tolist() == pytest.approx([0.5, 2.0, 0.0, 0.0])
    assert Rejection()(tokens).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert MaskedImportance()(tokens).tolist() == pytest.approx([0.5, 2.0, 0.25, 0.0])
    assert IcePop()(tokens).tolist() == pytest.approx([0.5, 2.0, 0.0, 4.0])
    assert TruncatedImportance()(tokens).tolist() == pytest.approx([0.5, 2.0, 0.25, 2.0])


def test_rows_count_their_own_tokens_only() -> None:
    """Two tokens of a row are masked: they change neither the product nor the mean of the others."""
    rows: list[Row] = [[(0.2, 0.0), (0.0, 0.0), (0.4, 0.0), (0.0, 0.0)], [(-1.0, 0.0), (0.0, 0.0)]]
    mask = torch.tensor([True, False, True, False, True, False])
    tokens = tokens_of(rows, mask)
    product = TruncatedImportance(cap=9.0, level="sequence")(tokens)[mask].tolist()
    assert product == pytest.approx([math.exp(0.6)] * 2 + [math.exp(-1.0)])
    mean = TruncatedImportance(cap=9.0, level="geometric")(tokens)[mask].tolist()
    assert mean == pytest.approx([math.exp(0.3)] * 2 + [math.exp(-1.0)])


def test_a_token_that_is_no_number_stays_visible() -> None:
    tokens = tokens_of([[(math.nan, 0.0), (0.0, 0.0)]])
    for correction in (TruncatedImportance(), IcePop(), Rejection(level="token"), Rejection(), MaskedImportance()):
        assert correction(tokens)[0].isnan()


def test_only_the_current_policy_gets_a_gradient() -> None:
    tokens = tokens_of([[(0.1, 0.0), (0.2, 0.0)]])
    leaf = tokens.anchor.clone().requires_grad_()
    leaning = PolicyTokens(
        current=leaf,
        anchor=leaf,
        proximal=leaf,
        behaviour=tokens.behaviour,
        advantages=tokens.advantages,
        mask=tokens.mask,
        row_index=tokens.row_index,
    )
    for correction in CORRECTIONS:
        assert not correction(leaning).requires_grad


def test_the_capabilities_a_correction_declares() -> None:
    assert [type(each) for each in CORRECTIONS if not each.corrects] == [NoCorrection]
    assert (TruncatedImportance().cap, TruncatedImportance().level) == (2.0, "token")
    assert (MaskedImportance().low, MaskedImportance().high, MaskedImportance().level) == (0.0, 2.0, "sequence")
    assert (IcePop().low, IcePop().high, IcePop().level) == (0.5, 5.0, "token")
    assert (Rejection().low, Rejection().high, Rejection().level) == (0.5, 2.0, "geometric")


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (TruncatedImportance, {"cap": 0.9}, "cap"),
        (TruncatedImportance, {"cap": math.inf}, "cap"),
        (TruncatedImportance, {"level": "row"}, "level"),
        (MaskedImportance, {"low": -0.1}, "low"),
        (MaskedImportance, {"low": 1.1}, "low"),
        (MaskedImportance, {"high": 0.9}, "high"),
        (MaskedImportance, {"level": "row"}, "level"),
        (Rejection, {"low": 1.1}, "low"),
        (Rejection, {"high": 0.9}, "high"),
        (Rejection, {"level": "row"}, "level"),
        (IcePop, {"low": -1.0}, "low"),
    ],
)
def test_options_outside_their_range_are_refused(kind: Any, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}") as caught:
        kind(**options)
    assert caught.value.path == key
    assert caught.value.remedy
    TruncatedImportance(cap=1.0)
    MaskedImportance(low=1.0, high=1.0)


# -------------------------------------------------------------------------------------------------------------- anchors


def test_the_three_centres() -> None:
    current, proximal, behaviour = (torch.tensor([value]) for value in (-2.5, -2.0, -4.0))
    given = {"current": current, "proximal": proximal, "behaviour": behaviour}
    assert anchor_log_probs("proximal", **given, staleness=None).tolist() == [-2.0]
    assert anchor_log_probs("behaviour", **given, staleness=None).tolist() == [-4.0]
    # a fresh sample's centre is the policy that sampled; after two versions a third of it is left
    for age, expected in ((0.0, -4.0), (1.0, -3.25), (2.0, -3.0)):
        got = anchor_log_probs("interpolated", **given, staleness=torch.tensor([age]))
        assert got.tolist() == pytest.approx([expected])
    with pytest.raises(SchemaError, match="'interpolated' needs staleness"):
        anchor_log_probs("interpolated", **given, staleness=None)
    leaf = current.clone().requires_grad_()
    for anchor in ("proximal", "behaviour", "interpolated"):
        got = anchor_log_probs(anchor, current=leaf, proximal=leaf, behaviour=leaf, staleness=torch.zeros(1))  # type: ignore[arg-type]
        assert not got.requires_grad


def columns(count: int = 6, *, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    made = {
        name: -torch.rand(count, generator=draw, dtype=torch.float64)
        for name in ("current_log_probs", "proximal_log_probs", "behaviour_log_probs")
    }
    return {
        **made,
        "advantages": torch.randn(count, generator=draw, dtype=torch.float64),
        "mask": torch.ones(count, dtype=torch.bool),
        "staleness": torch.arange(count),
        "rows": torch.arange(count) // 2,
    }


@pytest.mark.parametrize("anchor", ["proximal", "behaviour", "interpolated"])
def test_ratio_times_weight_is_the_whole_importance_ratio(anchor: Any) -> None:
    """Wherever the centre lies: with nothing clipped or capped the gradient is that of current / behaviour."""
    given = {name: column for name, column in columns().items() if name != "staleness"}
    current = given.pop("current_log_probs").requires_grad_()
    objective = PolicyObjective(
        loss=PPO(clip_ratio_low=1.0, clip_ratio_high=1e9), correction=TruncatedImportance(cap=1e9)
    )
    objective = PolicyObjective(loss=objective.loss, correction=objective.correction, anchor=anchor)
    got = objective.token_losses(current_log_probs=current, **given, staleness=torch.arange(6.0))
    got.loss.sum().backward()
    whole = (current.detach() - given["behaviour_log_probs"]).exp()
    assert current.grad is not None
    torch.testing.assert_close(current.grad, -whole * given["advantages"])
    torch.testing.assert_close(got.loss.detach(), -whole * given["advantages"])


def test_a_correction_weighs_the_loss_but_neither_kl_nor_entropy() -> None:
    given = columns()
    given["staleness"] = given["staleness"].double()
    reference, entropy = given["current_log_probs"] - 0.5, torch.full((6,), 2.0, dtype=torch.float64)
    bare = PolicyObjective(loss=CISPO(), correction=NoCorrection()).token_losses(**given).loss
    both = PolicyObjective(
        loss=CISPO(), correction=TruncatedImportance(cap=1.1), kl_coef=3.0, entropy_coef=0.5
    ).token_losses(**given, reference_log_probs=reference, entropy=entropy)
    weight = (given["proximal_log_probs"] - given["behaviour_log_probs"]).exp().clamp(max=1.1)
    k3 = math.exp(-0.5) - 1 + 0.5
    torch.testing.assert_close(both.loss, weight * bare + 3.0 * k3 - 0.5 * 2.0)
    torch.testing.assert_close(both.metrics["behaviour_weight"], weight)


def test_the_objective_declares_the_columns_it_needs() -> None:
    assert PolicyObjective().columns == ("behaviour_log_probs", "advantages")
    assert PolicyObjective(kl_coef=0.1, anchor="interpolated").columns == (
        "behaviour_log_probs",
        "advantages",
        "reference_log_probs",
        "staleness",
    )
