"""What a step tells of how far apart the policies are, against plain Python, in any cut."""

import math
import random
import statistics

import pytest
import torch

from asyncrl.algorithms import IcePop, NoCorrection, PolicyObjective, TruncatedImportance
from asyncrl.algorithms.objective import STALENESS_BUCKETS


def averages(objective: PolicyObjective, parts: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Means over all tokens of metrics that were computed part by part."""
    sums: dict[str, float] = {}
    tokens = 0
    for part in parts:
        got = objective.token_losses(**part, mask=torch.ones(len(part["advantages"]), dtype=torch.bool))
        tokens += len(part["advantages"])
        for name, values in got.metrics.items():
            sums[name] = sums.get(name, 0.0) + float(values.double().sum())
    return {name: total / tokens for name, total in sums.items()}


def some_tokens(count: int) -> dict[str, torch.Tensor]:
    draw = random.Random(1)
    behaviour = [draw.uniform(-2, 0) for _ in range(count)]
    return {
        "current_log_probs": torch.tensor([b + draw.uniform(-0.6, 0.6) for b in behaviour], dtype=torch.float64),
        "proximal_log_probs": torch.tensor([b + draw.uniform(-0.6, 0.6) for b in behaviour], dtype=torch.float64),
        "behaviour_log_probs": torch.tensor(behaviour, dtype=torch.float64),
        "advantages": torch.tensor([draw.choice([-1.0, 1.0]) for _ in range(count)], dtype=torch.float64),
        "staleness": torch.tensor([draw.choice([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 9.0, 40.0]) for _ in range(count)]),
    }


def test_equals_plain_python_whatever_the_cut() -> None:
    tokens = some_tokens(60)
    objective = PolicyObjective(correction=TruncatedImportance(cap=1.2))
    whole = objective.report(averages(objective, [tokens]))
    parts = [{name: column[part] for name, column in tokens.items()} for part in (slice(0, 7), slice(7, 60))]
    assert objective.report(averages(objective, parts)) == pytest.approx(whole, rel=1e-12)

    def expected(chosen: list[int]) -> dict[str, float]:
        gaps = [float(tokens["proximal_log_probs"][i] - tokens["behaviour_log_probs"][i]) for i in chosen]
        ratios = [math.exp(gap) for gap in gaps]
        steps = [math.exp(float(tokens["current_log_probs"][i] - tokens["proximal_log_probs"][i])) for i in chosen]
        stopped = [
            (step > 1.2 and tokens["advantages"][i] > 0) or (step < 0.8 and tokens["advantages"][i] < 0)
            for i, step in zip(chosen, steps, strict=True)
        ]
        return {
            "behaviour_kl": statistics.fmean(r - 1 - g for r, g in zip(ratios, gaps, strict=True)),
            "behaviour_ratio": statistics.fmean(ratios),
            "effective_sample_share": sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios)),
            "clip_fraction": statistics.fmean(float(each) for each in stopped),
        }

    everything = expected(list(range(60)))
    assert {name: whole[name] for name in everything} == pytest.approx(everything, rel=1e-9)
    members: dict[str, list[int]] = {}
    for i, behind in enumerate(tokens["staleness"].tolist()):
        bucket = "5_to_8" if 5 <= behind <= 8 else "9_up" if behind >= 9 else str(int(behind))
        members.setdefault(bucket, []).append(i)
    assert set(members) == {"0", "1", "2", "3", "4", "5_to_8", "9_up"}
    for bucket, chosen in members.items():
        reported = {f"{name}_staleness_{bucket}": value for name, value in expected(chosen).items()}
        reported[f"share_staleness_{bucket}"] = len(chosen) / 60
        assert {name: whole[name] for name in reported} == pytest.approx(reported, rel=1e-6), bucket
    assert {name for name in whole if "_staleness_" in name} == {
        f"{name}_staleness_{bucket}" for bucket in members for name in (*everything, "share")
    }
    assert "behaviour_ratio_squared" not in whole


def test_on_policy_every_sample_counts_whole() -> None:
    same = torch.full((4,), -1.0)
    tokens = dict.fromkeys(("current_log_probs", "proximal_log_probs", "behaviour_log_probs"), same)
    objective = PolicyObjective()
    got = objective.report(averages(objective, [{**tokens, "advantages": torch.ones(4), "staleness": torch.zeros(4)}]))
    assert got == {
        "ratio": 1.0,
        "policy_kl": 0.0,
        "clip_fraction": 0.0,
        "behaviour_kl": 0.0,
        "behaviour_ratio": 1.0,
        "behaviour_weight": 1.0,
        "behaviour_rejected": 0.0,
        "effective_sample_share": 1.0,
        "share_staleness_0": 1.0,
        "clip_fraction_staleness_0": 0.0,
        "behaviour_kl_staleness_0": 0.0,
        "behaviour_ratio_staleness_0": 1.0,
        "effective_sample_share_staleness_0": 1.0,
    }


def test_one_heavy_token_is_nearly_the_whole_sample() -> None:
    tokens = {
        "current_log_probs": torch.zeros(4),
        "proximal_log_probs": torch.tensor([0.0, -30.0, -30.0, -30.0]),
        "behaviour_log_probs": torch.zeros(4),
        "advantages": torch.ones(4),
    }
    objective = PolicyObjective(correction=NoCorrection())
    assert objective.report(averages(objective, [tokens]))["effective_sample_share"] == pytest.approx(0.25)


def test_the_share_a_correction_rejects_is_reported() -> None:
    tokens = {
        "current_log_probs": torch.zeros(4),
        "proximal_log_probs": torch.log(torch.tensor([0.4, 0.6, 4.0, 6.0])),
        "behaviour_log_probs": torch.zeros(4),
        "advantages": torch.ones(4),
    }
    objective = PolicyObjective(correction=IcePop())
    got = objective.report(averages(objective, [tokens]))
    assert got["behaviour_rejected"] == 0.5
    assert got["behaviour_weight"] == pytest.approx((0.6 + 4.0) / 4)
    assert got["behaviour_ratio"] == pytest.approx(11.0 / 4)


def test_without_staleness_no_bucket_is_reported_and_other_names_stay() -> None:
    tokens = {name: column for name, column in some_tokens(5).items() if name != "staleness"}
    objective = PolicyObjective()
    got = objective.report(averages(objective, [tokens]))
    assert not [name for name in got if "staleness" in name]
    assert PolicyObjective().report({"something": 3.0}) == {"something": 3.0}
    assert (
        PolicyObjective().report({"behaviour_ratio": 0.0, "behaviour_ratio_squared": 0.0})["effective_sample_share"]
        == 0.0
    )


def test_every_staleness_lies_in_exactly_one_bucket() -> None:
    for behind in range(200):
        assert sum(first <= behind <= last for _, first, last in STALENESS_BUCKETS) == 1, behind
