"""The rules that a run checks of itself, each held against the defect that it is there for."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch

import asyncrl
import asyncrl.trainer.invariants
from asyncrl.algorithms.advantages import AdvantageEstimator
from asyncrl.config import Config
from asyncrl.data import DataProto
from asyncrl.errors import AsyncRLError, InvariantError, SchemaError
from asyncrl.interfaces import GroupSummary, SelectedGroup
from asyncrl.rollout.trajectory import check_seeds, derive_seed
from asyncrl.staleness import AdmissionLaw, Certificate
from asyncrl.tasks.run import train
from asyncrl.trainer.group import Group
from asyncrl.trainer.invariants import (
    GroupBook,
    check_bound,
    check_certificate,
    check_log_probs,
    check_served,
    check_stamps,
)
from asyncrl.trainer.learner import Advantages
from engines.rollout.transformers.generation import Generation
from engines.rollout.transformers.weights import ShadowWeights


def summary(group_id: int, *, rewards: tuple[float, ...] = (0.0, 1.0), version: int = 0) -> GroupSummary:
    return GroupSummary(
        group_id=group_id,
        rows=len(rewards),
        oldest_version=version,
        tokens=len(rewards),
        version_tokens={version: len(rewards)},
        rewards=rewards,
        lengths=(1,) * len(rewards),
    )


def selected(*group_ids: int, uses: int = 0) -> list[SelectedGroup]:
    return [SelectedGroup(summary=summary(each), rows=DataProto(), uses=uses) for each in group_ids]


def test_the_example_runs() -> None:
    ran = doctest.testmod(asyncrl.trainer.invariants)
    assert (ran.failed, ran.attempted > 0) == (0, True)


@pytest.mark.parametrize("overdue_after", [None, 2])
def test_the_book_admits_what_the_law_admits(overdue_after: int | None) -> None:
    law = AdmissionLaw(2, max_staleness=1, overdue_after=overdue_after)
    book = GroupBook(groups_per_step=2, max_staleness=1, overdue_after=overdue_after)
    for step in range(1, 9):
        while law.may_issue():
            book.issued(group_id := law.issue(), served=law.version)
            if group_id % 4:  # the others stay out, and give their places away where that is allowed
                law.finished_group(group_id)
                book.sampled(group_id)
        with pytest.raises(InvariantError, match="sampling runs at most max_staleness = 1 versions ahead, but group"):
            GroupBook(
                groups_per_step=2,
                max_staleness=1,
                overdue_after=overdue_after,
                live={*book.live},
                _used=book._used,
                _out=book._out.copy(),
                _overdue={*book._overdue},
            ).issued(law.next_group_id, served=law.version)
        book.trained(step, selected(*sorted(each for each in book.live if overdue_after is None or each % 4)[:2]))
        law.published(step)


def test_a_group_is_trained_on_once_and_in_order() -> None:
    book = GroupBook(groups_per_step=2, max_staleness=2, max_uses=1, in_order=True, live={3, 4, 5, 6})
    with pytest.raises(InvariantError, match=r"takes the oldest groups, but step 1 got groups \[3, 5\], not \[3, 4\]"):
        book.trained(1, selected(3, 5))
    book.trained(1, selected(4, 3))
    with pytest.raises(InvariantError, match="neither trained on nor dropped, but step 2 got group 3"):
        book.trained(2, selected(3, 5))
    with pytest.raises(InvariantError, match="at most 1 times, but step 2 got group 3 after 1 uses"):
        book.trained(2, selected(3, uses=1))
    book.dropped(5)
    with pytest.raises(InvariantError, match="step 2 got group 5"):
        book.trained(2, selected(5, 6), recorded=True)


def test_a_group_that_a_buffer_loses_is_missed() -> None:
    book = GroupBook(groups_per_step=1, max_staleness=2)
    book.issued(0, served=0)
    book.issued(1, served=0)
    book.check_pending(2)
    book.completed(0)
    book.check_pending(1)
    with pytest.raises(InvariantError, match="the buffer waits for 2 groups, and only 1 are not complete"):
        book.check_pending(2)


def test_stamps_versions_and_bound() -> None:
    check_stamps(summary(0, version=2), served=2)
    with pytest.raises(InvariantError, match="group 0, dispatched at version 3, has tokens of version 2"):
        check_stamps(summary(0, version=2), served=3)
    check_served(4, law=4, pool=4)
    with pytest.raises(InvariantError, match="after step 4 the admission law has version 4 and the pool version 3"):
        check_served(4, law=4, pool=3)
    old = Certificate(groups=1, rows=1, tokens=3, histogram={3: 3})
    check_bound(old, step=9, max_staleness=3)
    with pytest.raises(InvariantError, match="step 9 has tokens 3 versions old"):
        check_bound(old, step=9, max_staleness=2)


def test_trainer_and_certificate_count_alike() -> None:
    certificate = Certificate(groups=1, rows=1, tokens=10, histogram={0: 2, 5: 3, 7: 5})
    check_certificate(certificate, {"tokens_trained": 10.0})
    check_certificate(certificate, {"tokens_trained": 10.0, "share_staleness_0": 0.2, "share_staleness_5_to_8": 0.8})
    with pytest.raises(InvariantError, match="it counted 9 tokens in its rows and the certificate 10"):
        check_certificate(certificate, {"tokens_trained": 9.0})
    with pytest.raises(InvariantError, match=r"its rows have \{'1': 2, '5_to_8': 8\} tokens by staleness"):
        check_certificate(
            certificate, {"tokens_trained": 10.0, "share_staleness_1": 0.2, "share_staleness_5_to_8": 0.8}
        )


def test_log_probs_of_another_version() -> None:
    check_log_probs([1e-7, 0.0], version=3, limit=1e-5)
    for wrong in (0.1, float("nan")):
        with pytest.raises(InvariantError, match="version 3, but 2 recorded tokens differ"):
            check_log_probs([wrong, 0.0], version=3, limit=1e-5)


def test_seeds_follow_from_run_group_and_row() -> None:
    seeds = [derive_seed(7, "train", 5, row) for row in range(3)]
    check_seeds(seeds, run_seed=7, purpose="train", group_id=5)
    with pytest.raises(InvariantError, match="row 2 of group 5 came with 9 instead of"):
        check_seeds([*seeds[:2], 9], run_seed=7, purpose="train", group_id=5)


def advantages(compute: Callable[..., torch.Tensor]) -> tuple[Advantages, list[Group]]:
    groups = [Group(group_id=each, summary=summary(each, rewards=(0.1 * each, 1.0))) for each in range(3)]
    return Advantages(estimator=AdvantageEstimator("own", compute, {})), groups


def test_advantages_do_not_depend_on_the_order_of_groups() -> None:
    made, groups = advantages(lambda rewards, **_: rewards - rewards.mean())
    made.check_order(groups, made.of(groups))
    shifted, groups = advantages(lambda rewards, **_: rewards.roll(2))
    with pytest.raises(InvariantError, match="depends on the batch and not on the order of its groups, but row"):
        shifted.check_order(groups, shifted.of(groups))


def test_a_row_finds_its_own_group_and_reward_where_advantages_are_joined() -> None:
    made, groups = advantages(lambda rewards, **_: rewards)
    rows = DataProto.from_dict({"group_id": torch.tensor([0, 0, 1, 1, 2, 2]), "rewards": torch.tensor([0.0, 1.0] * 3)})
    with pytest.raises(SchemaError, match="'rewards'"):
        rows.union(made.of(groups).columns)
    with pytest.raises(SchemaError, match="'group_id'"):
        rows.union(made.of(groups[::-1]).columns)


def test_a_replay_finds_an_engine_that_kept_its_weights(
    small_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    swap = ShadowWeights.swap

    def number_alone(self: ShadowWeights, version: int) -> None:
        self._shadow.tensors.clear()
        swap(self, version)

    async def unread(*_: object) -> None:
        """An engine whose live tensors cannot be read, or the run itself would notice."""

    monkeypatch.setattr(ShadowWeights, "swap", number_alone)
    monkeypatch.setattr("asyncrl.rollout.live_weights.check_live_weights", unread)
    config = small_config(steps=2, max_staleness=0, eval={"tasks": 0}, weights={"canary_tokens": 0})
    train(config)
    (run,) = config.runs.glob("small-2*")
    with asyncrl.Recording(run) as recording, pytest.raises(InvariantError, match="engines sample version 1 from"):
        recording.replay()


def test_a_run_whose_engine_computes_something_else_ends_with_its_name(
    small_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are those that were published; what the engine computes with them is not."""
    commit = Generation.commit

    def untied(self: Generation, version: int, **given: Any) -> None:
        commit(self, version, **given)
        head = self.decoder.model.get_output_embeddings()
        head.register_forward_hook(lambda _module, _inputs, logits: logits * 1.01)

    monkeypatch.setattr(Generation, "commit", untied)
    with pytest.raises(AsyncRLError, match="fixed tokens differ from the trainer's by"):
        train(small_config(steps=2, max_staleness=0, eval={"tasks": 0}))
