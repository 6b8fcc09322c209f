"""Every policy loss against plain loops over rows: values, gradients by finite differences, masks, order, batches."""

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from asyncrl.algorithms import (
    CISPO,
    DAPO,
    GMPO,
    GSPO,
    M2PO,
    PPO,
    SAPO,
    TOPR,
    ClipCov,
    KLCov,
    NoCorrection,
    PolicyLoss,
    PolicyObjective,
    TokenLosses,
)
from asyncrl.errors import ConfigError, SchemaError

Token = dict[str, float]
Row = list[Token]
COLUMNS = ("current", "proximal", "behaviour", "advantage")


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ppo(loss: Any, row: Row, frozen: Row) -> list[float]:
    answer = []
    for token in row:
        ratio = math.exp(token["current"] - token["proximal"])
        advantage = token["advantage"]
        worth = min(ratio * advantage, clip(ratio, 1 - loss.clip_ratio_low, 1 + loss.clip_ratio_high) * advantage)
        if getattr(loss, "dual_clip", None) is not None and advantage < 0:
            worth = max(worth, loss.dual_clip * advantage)
        answer.append(-worth)
    return answer


def gspo(loss: Any, row: Row, frozen: Row) -> list[float]:
    """The sequence form of the paper: one ratio for the row, differentiated as it stands."""
    ratio = math.exp(statistics.fmean(token["current"] - token["proximal"] for token in row))
    clipped = clip(ratio, 1 - loss.clip_ratio_low, 1 + loss.clip_ratio_high)
    return [-min(ratio * token["advantage"], clipped * token["advantage"]) for token in row]


def gmpo(loss: Any, row: Row, frozen: Row) -> list[float]:
    advantage = statistics.fmean(token["advantage"] for token in row)
    sign = math.copysign(1.0, advantage)
    logs = []
    for token in row:
        free = token["current"] - token["proximal"]
        logs.append(sign * min(sign * free, sign * clip(free, -loss.clip_ratio_low, loss.clip_ratio_high)))
    return [-advantage * math.exp(statistics.fmean(logs))] * len(row)


def cispo(loss: Any, row: Row, frozen: Row) -> list[float]:
    answer = []
    for token, held in zip(row, frozen, strict=True):
        weight = clip(math.exp(held["current"] - held["proximal"]), 1 - loss.clip_ratio_low, 1 + loss.clip_ratio_high)
        answer.append(-weight * token["advantage"] * token["current"])
    return answer


def sapo(loss: Any, row: Row, frozen: Row) -> list[float]:
    answer = []
    for token in row:
        ratio = math.exp(token["current"] - token["proximal"])
        t = loss.positive_temperature if token["advantage"] > 0 else loss.negative_temperature
        answer.append(-token["advantage"] * (4 / t) / (1 + math.exp(-t * (ratio - 1))))
    return answer


def topr(loss: Any, row: Row, frozen: Row) -> list[float]:
    ratio = math.exp(sum(held["current"] - held["behaviour"] for held in frozen))
    answer = []
    for token in row:
        weight = 1.0 if token["advantage"] >= 0 else min(ratio, loss.cap)
        answer.append(-weight * token["advantage"] * token["current"])
    return answer


def covariances(batch: list[Row]) -> dict[tuple[int, int], float]:
    """Of log-prob at the start of the step and advantage, by (row, token)."""
    places = [(i, t) for i, row in enumerate(batch) for t in range(len(row))]
    log_prob = statistics.fmean(batch[i][t]["proximal"] for i, t in places)
    advantage = statistics.fmean(batch[i][t]["advantage"] for i, t in places)
    return {(i, t): (batch[i][t]["proximal"] - log_prob) * (batch[i][t]["advantage"] - advantage) for i, t in places}


def prepare_kl_cov(loss: Any, batch: list[Row]) -> None:
    found = covariances(batch)
    count = max(1, int(loss.share * len(found)))
    chosen = sorted(found, key=lambda place: -found[place])[:count]
    for i, row in enumerate(batch):
        for t, token in enumerate(row):
            token["held_back"] = float((i, t) in chosen)


def kl_cov(loss: Any, row: Row, frozen: Row) -> list[float]:
    answer = []
    for token in row:
        log_ratio = token["current"] - token["proximal"]
        penalty = loss.coefficient * max(abs(log_ratio) - 1e-4, 0.0) if token["held_back"] else 0.0
        answer.append(penalty - math.exp(log_ratio) * token["advantage"])
    return answer


def prepare_clip_cov(loss: Any, batch: list[Row]) -> None:
    """Every candidate is taken out here: the share is chosen large enough."""
    for (i, t), covariance in covariances(batch).items():
        batch[i][t]["held_back"] = float(loss.low < covariance < loss.high)


def clip_cov(loss: Any, row: Row, frozen: Row) -> list[float]:
    free, held = ppo(loss, row, frozen), ppo(loss, frozen, frozen)
    return [h if token["held_back"] else f for token, f, h in zip(row, free, held, strict=True)]


def prepare_m2po(loss: Any, batch: list[Row]) -> None:
    """Drop the largest squared log-ratio until the mean of the rest is below the bound."""
    squared = {
        (i, t): (token["proximal"] - token["behaviour"]) ** 2
        for i, row in enumerate(batch)
        for t, token in enumerate(row)
    }
    left = sorted(squared, key=lambda place: squared[place])
    while len(left) > 1 and statistics.fmean(squared[place] for place in left) >= loss.threshold:
        left.pop()
    for i, row in enumerate(batch):
        for t, token in enumerate(row):
            token["kept"] = float((i, t) in left)


def m2po(loss: Any, row: Row, frozen: Row) -> list[float]:
    return [-token["kept"] * math.exp(token["current"] - token["behaviour"]) * token["advantage"] for token in row]


Plain = Callable[[Any, Row, Row], list[float]]
Prepare = Callable[[Any, list[Row]], None] | None
CASES: list[tuple[PolicyLoss, Plain, Prepare]] = [
    (PPO(), ppo, None),
    (PPO(clip_ratio_low=0.1, clip_ratio_high=0.6, dual_clip=1.5), ppo, None),
    (DAPO(), ppo, None),
    (GSPO(), gspo, None),
    (GSPO(clip_ratio_low=0.3, clip_ratio_high=0.3), gspo, None),
    (GMPO(), gmpo, None),
    (GMPO(clip_ratio_low=0.1, clip_ratio_high=2.0), gmpo, None),
    (CISPO(), cispo, None),
    (CISPO(clip_ratio_low=0.3, clip_ratio_high=0.1), cispo, None),
    (SAPO(), sapo, None),
    (SAPO(positive_temperature=2.0, negative_temperature=0.5), sapo, None),
    (TOPR(), topr, None),
    (TOPR(cap=0.2), topr, None),
    (KLCov(share=0.25), kl_cov, prepare_kl_cov),
    (KLCov(coefficient=0.3), kl_cov, prepare_kl_cov),
    (ClipCov(share=1.0, low=0.05, high=0.4), clip_cov, prepare_clip_cov),
    (M2PO(), m2po, prepare_m2po),
    (M2PO(threshold=1.0), m2po, prepare_m2po),
]
IDS = [f"{type(loss).__name__}-{number}" for number, (loss, _, _) in enumerate(CASES)]


def some_batch(*, seed: int, lengths: tuple[int, ...] = (3, 1, 5, 2)) -> list[Row]:
    """Ragged rows; the tokens of a row share its advantage. No value lies on an edge of a clip."""
    draw = random.Random(seed)
    batch = []
    for length in lengths:
        advantage = draw.uniform(-2, 2)
        batch.append(
            [
                {
                    "current": draw.uniform(-2, 0),
                    "proximal": draw.uniform(-2, 0),
                    "behaviour": draw.uniform(-2, 0),
                    "advantage": advantage,
                }
                for _ in range(length)
            ]
        )
    return batch


def packed(batch: list[Row], name: str) -> torch.Tensor:
    return torch.tensor([token[name] for row in batch for token in row], dtype=torch.float64)


def row_index(batch: list[Row]) -> torch.Tensor:
    return torch.tensor([number for number, row in enumerate(batch) for _ in row])


def prepared_columns(objective: PolicyObjective, batch: list[Row], *, seed: int = 0) -> dict[str, torch.Tensor]:
    if not objective.prepares:
        return {}
    return objective.prepare(
        proximal_log_probs=packed(batch, "proximal"),
        behaviour_log_probs=packed(batch, "behaviour"),
        advantages=packed(batch, "advantage"),
        rows=row_index(batch),
        seed=seed,
    )


def losses(loss: PolicyLoss, batch: list[Row], *, current: torch.Tensor | None = None) -> TokenLosses:
    objective = PolicyObjective(loss=loss, correction=NoCorrection())
    return objective.token_losses(
        current_log_probs=packed(batch, "current") if current is None else current,
        proximal_log_probs=packed(batch, "proximal"),
        behaviour_log_probs=packed(batch, "behaviour"),
        advantages=packed(batch, "advantage"),
        mask=torch.ones(len(packed(batch, "current")), dtype=torch.bool),
        rows=row_index(batch),
        prepared=prepared_columns(objective, batch),
    )


@pytest.mark.parametrize(("loss", "plain", "prepare"), CASES, ids=IDS)
@pytest.mark.parametrize("seed", range(6))
def test_equals_plain_loops(loss: PolicyLoss, plain: Plain, prepare: Prepare, seed: int) -> None:
    batch = some_batch(seed=seed)
    if prepare is not None:
        prepare(loss, batch)
    expected = [value for row in batch for value in plain(loss, row, row)]
    assert losses(loss, batch).loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("loss", "plain", "prepare"), CASES, ids=IDS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gradient_by_finite_differences(loss: PolicyLoss, plain: Plain, prepare: Prepare, seed: int) -> None:
    batch = some_batch(seed=seed)
    if prepare is not None:
        prepare(loss, batch)
    weights = [0.7, 1.3, 0.4, 2.0]  # of rows, as an aggregation gives them
    current = packed(batch, "current").requires_grad_()
    per_token = torch.tensor([weight for weight, row in zip(weights, batch, strict=True) for _ in row])
    (losses(loss, batch, current=current).loss * per_token).sum().backward()
    assert current.grad is not None
    step, slopes = 1e-6, []
    for i, row in enumerate(batch):
        for t in range(len(row)):
            values = []
            for sign in (1, -1):
                moved = [dict(token) for token in row]
                moved[t]["current"] += sign * step
                values.append(weights[i] * sum(plain(loss, moved, row)))
            slopes.append((values[0] - values[1]) / (2 * step))
    assert current.grad.tolist() == pytest.approx(slopes, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("loss", "plain", "prepare"), CASES, ids=IDS)
def test_masked_tokens_padding_and_order_change_nothing(loss: PolicyLoss, plain: Plain, prepare: Prepare) -> None:
    batch = some_batch(seed=3)
    straight = losses(loss, batch)
    objective = PolicyObjective(loss=loss, correction=NoCorrection())
    prepared = prepared_columns(objective, batch)
    count = len(row_index(batch))
    order = torch.randperm(count + 4, generator=torch.Generator().manual_seed(1))

    def dirty(column: torch.Tensor, rubbish: float = math.nan) -> torch.Tensor:
        return torch.cat([column, torch.full((4,), rubbish, dtype=column.dtype)])[order]

    current = dirty(packed(batch, "current")).requires_grad_()
    # Two masked tokens belong to a real row, two to a row of their own, which is masked whole.
    rows = torch.cat([row_index(batch), torch.tensor([0, 0, 77, 77])])[order]
    mask = torch.cat([torch.ones(count, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)])[order]
    got = objective.token_losses(
        current_log_probs=current,
        proximal_log_probs=dirty(packed(batch, "proximal")),
        behaviour_log_probs=dirty(packed(batch, "behaviour")),
        advantages=dirty(packed(batch, "advantage")),
        mask=mask,
        rows=rows,
        prepared={name: dirty(column) for name, column in prepared.items()},
    )
    got.loss.sum().backward()
    assert current.grad is not None
    clean = torch.cat([straight.loss, torch.zeros(4)])[order]
    torch.testing.assert_close(got.loss, clean, rtol=1e-12, atol=1e-12)
    assert bool(current.grad[~mask].eq(0).all())
    assert bool(current.grad.isfinite().all())
    for name, metric in got.metrics.items():
        torch.testing.assert_close(
            metric, torch.cat([straight.metrics[name], torch.zeros(4)])[order].to(metric.dtype), rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(("loss", "plain", "prepare"), CASES, ids=IDS)
def test_rows_can_be_computed_in_any_micro_batches(loss: PolicyLoss, plain: Plain, prepare: Prepare) -> None:
    """The whole batch prepares; then each row alone gives what all rows together give."""
    batch = some_batch(seed=4)
    together = losses(loss, batch).loss
    objective = PolicyObjective(loss=loss, correction=NoCorrection())
    prepared, first, alone = prepared_columns(objective, batch), 0, []
    for row in batch:
        part = slice(first, first + len(row))
        first += len(row)
        alone.append(
            objective.token_losses(
                current_log_probs=packed([row], "current"),
                proximal_log_probs=packed([row], "proximal"),
                behaviour_log_probs=packed([row], "behaviour"),
                advantages=packed([row], "advantage"),
                mask=torch.ones(len(row), dtype=torch.bool),
                rows=row_index([row]),
                prepared={name: column[part] for name, column in prepared.items()},
            ).loss
        )
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("loss", "plain", "prepare"), CASES, ids=IDS)
def test_on_policy_all_are_the_plain_policy_gradient(loss: PolicyLoss, plain: Plain, prepare: Prepare) -> None:
    batch = some_batch(seed=5)
    for row in batch:
        for token in row:
            token["current"] = token["behaviour"] = token["proximal"]
    current = packed(batch, "current").requires_grad_()
    got = losses(loss, batch, current=current)
    got.loss.sum().backward()
    assert current.grad is not None
    expected = -packed(batch, "advantage")
    if isinstance(loss, ClipCov):
        expected = torch.where(got.metrics["held_back"] > 0, 0.0, expected)
    if isinstance(loss, TOPR):
        expected = torch.where(expected > 0, expected * min(1.0, loss.cap), expected)
    torch.testing.assert_close(current.grad, expected, rtol=1e-12, atol=1e-12)
    assert got.metrics["ratio"].eq(1.0).all()
    assert got.metrics["policy_kl"].eq(0.0).all()


def test_the_clip_fraction_of_each_loss() -> None:
    one = {"proximal": 0.0, "behaviour": 0.0}
    # ratios 1.5 and 0.5 of good and bad tokens
    batch = [
        [{**one, "current": math.log(ratio), "advantage": advantage}]
        for ratio in (1.5, 0.5)
        for advantage in (1.0, -1.0)
    ]
    clipped = {
        PPO(): [1.0, 0.0, 0.0, 1.0],
        PPO(dual_clip=1.2): [1.0, 1.0, 0.0, 1.0],
        GSPO(): [1.0, 0.0, 0.0, 1.0],
        GMPO(): [1.0, 0.0, 0.0, 1.0],
        GMPO(clip_ratio_low=0.7, clip_ratio_high=0.42): [0.0, 0.0, 0.0, 0.0],
        CISPO(): [1.0, 1.0, 0.0, 0.0],
        CISPO(clip_ratio_low=0.2): [1.0, 1.0, 1.0, 1.0],
        TOPR(): [0.0, 1.0, 0.0, 0.0],
        TOPR(cap=0.4): [0.0, 1.0, 0.0, 1.0],
        M2PO(threshold=0.2): [0.0, 0.0, 1.0, 1.0],  # log 1.5 squared is 0.164, log 0.5 squared 0.48
    }
    for loss, expected in clipped.items():
        assert (
            losses(loss, [[{**row[0], "behaviour": 0.0}] for row in moved(loss, batch)])
            .metrics["clip_fraction"]
            .tolist()
            == expected
        ), loss
    gates = losses(SAPO(positive_temperature=1.0, negative_temperature=2.0), batch).metrics["gate"].tolist()
    sigmoid = [1 / (1 + math.exp(-t * x)) for t, x in ((1.0, 0.5), (2.0, 0.5), (1.0, -0.5), (2.0, -0.5))]
    assert gates == pytest.approx([4 * s * (1 - s) for s in sigmoid])


def moved(loss: PolicyLoss, batch: list[Row]) -> list[Row]:
    """M2PO looks at the start of the step: there the tokens have moved already."""
    if not isinstance(loss, M2PO):
        return batch
    return [[{**token, "proximal": token["current"]} for token in row] for row in batch]


def test_the_four_corners_of_the_clip() -> None:
    corners = [
        (1.5, 1.0, -1.2, 0.0),  # good token, already likelier: clipped
        (0.5, 1.0, -0.5, -0.5),  # good token, made unlikelier: free to come back
        (1.5, -1.0, 1.5, 1.5),  # bad token, made likelier: free to come back
        (0.5, -1.0, 0.8, 0.0),  # bad token, already unlikelier: clipped
    ]
    for ratio, advantage, value, slope in corners:
        token = {"current": math.log(ratio), "proximal": 0.0, "behaviour": 0.0, "advantage": advantage}
        current = packed([[token]], "current").requires_grad_()
        got = losses(PPO(), [[token]], current=current).loss
        got.sum().backward()
        assert current.grad is not None
        assert (float(got.detach()), float(current.grad)) == pytest.approx((value, slope))
    hopeless = {"current": math.log(5.0), "proximal": 0.0, "behaviour": 0.0, "advantage": -1.0}
    assert losses(PPO(dual_clip=3.0), [[hopeless]]).loss.tolist() == [3.0]


# ------------------------------------------------------------------------------------------- columns of the whole batch


def spread(count: int) -> list[Row]:
    """Tokens whose covariances are all different and partly high."""
    draw = random.Random(9)
    return [
        [{"current": 0.0, "proximal": draw.uniform(-4, 0), "behaviour": 0.0, "advantage": draw.uniform(-3, 3)}]
        for _ in range(count)
    ]


def test_clip_cov_draws_a_share_of_the_candidates() -> None:
    loss, batch = ClipCov(share=0.05, low=0.5, high=2.0), spread(200)
    candidates = {i for (i, _), value in covariances(batch).items() if 0.5 < value < 2.0}
    assert len(candidates) > 20
    objective = PolicyObjective(loss=loss, correction=NoCorrection())
    held_back = prepared_columns(objective, batch, seed=1)["held_back"]
    chosen = set(held_back.nonzero().flatten().tolist())
    assert len(chosen) == 10
    assert chosen < candidates
    again = prepared_columns(objective, batch, seed=1)["held_back"]
    other = prepared_columns(objective, batch, seed=2)["held_back"]
    assert again.equal(held_back)
    assert not other.equal(held_back)


def test_clip_cov_takes_one_at_least_and_no_more_than_there_are() -> None:
    batch = spread(50)
    tiny = PolicyObjective(loss=ClipCov(share=1e-4, low=0.5), correction=NoCorrection())
    assert float(prepared_columns(tiny, batch)["held_back"].sum()) == 1.0
    none = PolicyObjective(loss=ClipCov(low=100.0, high=101.0), correction=NoCorrection())
    assert float(prepared_columns(none, batch)["held_back"].sum()) == 0.0


def test_kl_cov_takes_the_highest_covariances() -> None:
    batch = spread(40)
    found = covariances(batch)
    highest = sorted(range(40), key=lambda i: -found[i, 0])[:4]
    column = prepared_columns(PolicyObjective(loss=KLCov(share=0.1)), batch)["held_back"]
    assert sorted(column.nonzero().flatten().tolist()) == sorted(highest)
    assert set(column.tolist()) == {0.0, 1.0}
    default = prepared_columns(PolicyObjective(loss=KLCov()), batch)["held_back"]
    assert default.nonzero().flatten().tolist() == highest[:1]
    held_back = losses(KLCov(share=0.1), batch).metrics["held_back"]
    assert held_back.nonzero().flatten().tolist() == sorted(highest)


def test_m2po_leaves_out_outliers_only() -> None:
    gaps = [0.1, -0.1, 3.0, 0.2, -2.0]  # squares 0.01, 0.01, 9, 0.04, 4: without the two large ones the mean is 0.02
    batch = [[{"current": 0.0, "proximal": gap, "behaviour": 0.0, "advantage": 1.0}] for gap in gaps]
    kept = prepared_columns(PolicyObjective(loss=M2PO()), batch)["kept"]
    assert kept.tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert kept.dtype == torch.float32
    far = [[{**row[0], "proximal": 5.0}] for row in batch]
    assert prepared_columns(PolicyObjective(loss=M2PO()), far)["kept"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]
    exact = [[{**row[0], "proximal": 0.5}] for row in batch]
    assert prepared_columns(PolicyObjective(loss=M2PO(threshold=0.25)), exact)["kept"].tolist() == [1.0, 0, 0, 0, 0]


def test_missing_columns_are_asked_for() -> None:
    batch = some_batch(seed=0)
    columns = {
        "current_log_probs": packed(batch, "current"),
        "proximal_log_probs": packed(batch, "proximal"),
        "behaviour_log_probs": packed(batch, "behaviour"),
        "advantages": packed(batch, "advantage"),
        "mask": torch.ones(11, dtype=torch.bool),
    }
    with pytest.raises(SchemaError, match=r"M2PO needs what prepare\(\) found"):
        PolicyObjective(loss=M2PO()).token_losses(**columns)
    with pytest.raises(SchemaError, match="needs rows, the row of each token"):
        PolicyObjective(loss=GSPO()).token_losses(**columns)
    with pytest.raises(SchemaError, match=r"rows must be \(11,\) integers like the mask, got torch.float32 of \(11,\)"):
        PolicyObjective(loss=GSPO()).token_losses(**columns, rows=torch.zeros(11))
    with pytest.raises(SchemaError, match="rows must be"):
        PolicyObjective(loss=GSPO()).token_losses(**columns, rows=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(SchemaError, match="rows must be"):
        PolicyObjective(loss=GSPO()).token_losses(**columns, rows=torch.zeros(11, dtype=torch.bool))
    with pytest.raises(SchemaError, match="kept has shape"):
        PolicyObjective(loss=M2PO()).token_losses(**columns, prepared={"kept": torch.ones(3)})
    with pytest.raises(NotImplementedError, match="PPO prepares nothing"):
        PPO().prepare(None, seed=0)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="advantages has shape"):
        PolicyObjective(loss=M2PO()).prepare(
            proximal_log_probs=torch.zeros(2),
            behaviour_log_probs=torch.zeros(2),
            advantages=torch.zeros(3),
            rows=torch.zeros(2, dtype=torch.int64),
            seed=0,
        )


def test_the_capabilities_a_loss_declares() -> None:
    every = [loss for loss, _, _ in CASES]
    assert {type(loss) for loss in every if loss.corrects} == {TOPR, M2PO}
    assert {type(loss) for loss in every if loss.prepares} == {ClipCov, KLCov, M2PO}
    assert {type(loss) for loss in every if loss.needs_several_steps} == {KLCov}


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        (PPO, "clip_ratio_low", 1.1),
        (PPO, "clip_ratio_low", -0.1),
        (PPO, "clip_ratio_high", -0.1),
        (PPO, "clip_ratio_high", math.inf),
        (PPO, "clip_ratio_high", math.nan),
        (PPO, "dual_clip", 1.0),
        (PPO, "clip_ratio_low", True),
        (GSPO, "clip_ratio_low", 1.1),
        (GSPO, "clip_ratio_low", -0.1),
        (GSPO, "clip_ratio_high", -1.0),
        (GMPO, "clip_ratio_low", -0.1),
        (GMPO, "clip_ratio_high", -0.1),
        (CISPO, "clip_ratio_low", 1.1),
        (CISPO, "clip_ratio_low", -0.1),
        (CISPO, "clip_ratio_high", -0.1),
        (SAPO, "positive_temperature", 0.0),
        (SAPO, "negative_temperature", 0.0),
        (TOPR, "cap", 0.0),
        (ClipCov, "clip_ratio_low", 1.1),
        (ClipCov, "clip_ratio_high", -0.1),
        (ClipCov, "share", 0.0),
        (ClipCov, "share", 1.1),
        (ClipCov, "high", 1.0),
        (KLCov, "share", 0.0),
        (KLCov, "share", 1.1),
        (KLCov, "coefficient", -0.1),
        (M2PO, "threshold", 0.0),
    ],
)
def test_options_outside_their_range_are_refused(kind: Any, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{option} is {value}; a finite number") as caught:
        kind(**{option: value})
    assert caught.value.path == option
    assert caught.value.remedy


def test_the_edges_of_the_ranges_are_allowed() -> None:
    PPO(clip_ratio_low=0.0, clip_ratio_high=0.0, dual_clip=1.01)
    PPO(clip_ratio_low=1.0)
    GSPO(clip_ratio_low=0.0, clip_ratio_high=0.0)
    GSPO(clip_ratio_low=1.0)
    GMPO(clip_ratio_low=0.0, clip_ratio_high=0.0)
    CISPO(clip_ratio_low=0.0, clip_ratio_high=0.0)
    ClipCov(share=1.0, clip_ratio_low=0.0, clip_ratio_high=0.0)
    ClipCov(clip_ratio_low=1.0)
    KLCov(share=1.0, coefficient=0.0)
    with pytest.raises(ConfigError) as caught:
        PPO(clip_ratio_low=2.0)
    assert caught.value.remedy == "a finite number of at least 0 and at most 1"
    with pytest.raises(ConfigError) as caught:
        SAPO(positive_temperature=-1.0)
    assert caught.value.remedy == "a finite number above 0"


def test_the_published_defaults() -> None:
    assert (PPO().clip_ratio_low, PPO().clip_ratio_high, PPO().dual_clip) == (0.2, 0.2, None)
    assert (DAPO().clip_ratio_low, DAPO().clip_ratio_high) == (0.2, 0.28)
    assert (GSPO().clip_ratio_low, GSPO().clip_ratio_high) == (3e-4, 4e-4)
    assert (GMPO().clip_ratio_low, GMPO().clip_ratio_high) == (0.4, 0.4)
    assert (CISPO().clip_ratio_low, CISPO().clip_ratio_high) == (1.0, 0.28)
    assert (SAPO().positive_temperature, SAPO().negative_temperature) == (1.0, 1.05)
    assert TOPR().cap == 1.0
    assert (ClipCov().clip_ratio_low, ClipCov().clip_ratio_high, ClipCov().share, ClipCov().low, ClipCov().high) == (
        0.2,
        0.2,
        2e-4,
        1.0,
        5.0,
    )
    assert (KLCov().share, KLCov().coefficient) == (2e-4, 1.0)
    assert M2PO().threshold == 0.04
