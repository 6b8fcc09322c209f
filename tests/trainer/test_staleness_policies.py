"""Policies for the slow ones: what a name means, who holds a place, which tokens are masked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncrl.data import DataProto
from asyncrl.data.ragged import ragged_from_list
from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.interfaces import GroupSummary
from asyncrl.staleness import POLICIES, AdmissionLaw, certify, check_summary, merge, staleness_policy
from asyncrl.trainer.workers import mask_stale_tokens


def issue_all(law: AdmissionLaw) -> list[int]:
    group_ids = []
    while law.may_issue():
        group_ids.append(law.issue())
    return group_ids


def test_a_bound_of_zero_always_waits():
    for name in POLICIES:
        assert staleness_policy(name, max_staleness=0).name == "wait"
        assert staleness_policy(name, max_staleness=1).name == name
    with pytest.raises(ConfigError, match="no staleness policy is called 'hope'"):
        staleness_policy("hope", max_staleness=1)


def test_which_tokens_each_policy_trains_on():
    oldest = {name: policy.oldest_version(9, max_staleness=4) for name, policy in POLICIES.items()}
    assert oldest == {"mask": 5, "wait": None, "drop": None, "correct": None}
    assert POLICIES["mask"].oldest_version(2, max_staleness=4) == 0
    assert {name for name, policy in POLICIES.items() if policy.keeps_groups} == {"mask", "correct"}


def test_an_overdue_group_gives_its_place_away_until_it_comes():
    law = AdmissionLaw(2, max_staleness=1, overdue_after=2)
    assert issue_all(law) == [0, 1, 2, 3]
    for version in (1, 2):  # group_id 0 is slow; the others are trained on
        law.finished_group(2 * version - 1)
        law.published(version)
        issue_all(law)
    assert (law.overdue, law.live) == (0, 8)
    law.published(3)  # group_ids 0 and 2 have been out since version 0: more than 2 versions
    assert law.overdue == 2
    assert len(issue_all(law)) == 2 + 2
    assert law.live == 12
    law.finished_group(0)
    assert law.overdue == 1
    assert not law.may_issue()


def test_at_most_one_window_of_places_is_given_away():
    law = AdmissionLaw(1, max_staleness=1, overdue_after=1)
    assert (law.lead, law.window) == (2, 4)
    issue_all(law)
    for version in range(1, 20):  # nothing ever finishes, though versions pass
        law.published(version)
        issue_all(law)
        assert law.live - version <= law.window


def test_a_dropped_group_is_not_overdue():
    law = AdmissionLaw(1, max_staleness=0, overdue_after=1)
    issue_all(law)
    law.published(2)
    assert law.overdue == 1
    law.dropped(0)
    assert law.overdue == 0


def group(group_id: int, version_tokens: dict[int, int]) -> GroupSummary:
    tokens = sum(version_tokens.values())
    return GroupSummary(
        group_id=group_id,
        rows=2,
        oldest_version=min(version_tokens),
        tokens=tokens,
        version_tokens=version_tokens,
        rewards=(0.0, 1.0),
        lengths=(tokens, 0),
    )


def test_the_certificate_tells_what_was_masked():
    groups = [group(0, {1: 40, 6: 20}), group(1, {7: 20})]
    certificate = certify(groups, trainer_version=8, oldest_version=4, dropped_rows=2, dropped_tokens=20)
    assert certificate.histogram == {1: 20, 2: 20}
    assert (certificate.tokens, certificate.masked_tokens, certificate.maximum) == (40, 40, 2)
    assert certificate.masked_share == 0.5
    assert certificate.waste == 0.6  # 40 masked and 20 dropped of 100
    assert certificate.mean_length_trained == 20.0  # a masked token belongs to a trajectory that was trained on
    assert certificate.length_ratio == pytest.approx(20 / (100 / 6))
    assert merge([certificate, certificate]).masked_tokens == 80


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"group_id": 4}, "group 3 was answered with rows of group 4"),
        ({"tokens": 61}, "group 3 has 61 tokens, but its versions .* count 60"),
        ({"lengths": (60, 1)}, "and its rows 61"),
        ({"rewards": (0.0,)}, "2 rows, 1 rewards, 2 lengths"),
    ],
)
def test_a_rollout_that_contradicts_itself_is_refused(change: dict[str, object], rule: str):
    honest = group(3, {1: 40, 6: 20})
    check_summary(honest, group_id=3)
    with pytest.raises(InvalidDataError, match=rule):
        check_summary(replace(honest, **change), group_id=3)  # type: ignore[arg-type]


def test_masking_takes_old_tokens_out_of_the_loss_and_nothing_else():
    batch = DataProto.from_dict(
        tensors={
            "input_ids": ragged_from_list([torch.tensor([5, 6, 7]), torch.tensor([8, 9])]),
            "loss_mask": ragged_from_list([torch.tensor([False, True, True]), torch.tensor([False, True])]),
            "weight_versions": ragged_from_list(
                [torch.tensor([-1, 3, 4], dtype=torch.int32), torch.tensor([-1, 2], dtype=torch.int32)]
            ),
            "advantages": torch.tensor([0.5, -0.5]),
        }
    )
    masked = mask_stale_tokens(batch, 4)
    assert masked.batch is not None
    assert batch.batch is not None
    assert masked.batch["loss_mask"].values().tolist() == [False, False, True, False, False]
    assert batch.batch["loss_mask"].values().tolist() == [False, True, True, False, True]
    assert masked.batch["input_ids"].values().tolist() == [5, 6, 7, 8, 9]
    assert masked.batch["advantages"].tolist() == [0.5, -0.5]
