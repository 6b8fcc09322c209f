"""Rows that share a prefix get the log-probs, values and gradients of rows apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.algorithms import PolicyObjective
from asyncrl.data import DataProto
from engines.training import passes
from engines.training.fsdp_engine import FSDPEngine
from engines.training.model import PolicyModel, load_policy_model
from engines.training.packing import PackedMicroBatch, PackedRows, Rectangle, plan_microbatches
from engines.training.partition import RowCost
from engines.training.prefixes import Bunch, bunches_of, plan_shared
from engines.training.value_engine import FSDPValueEngine

from .conftest import in_float64

BY_TOKENS = RowCost(per_token=1.0, per_scored_token=0.0, per_pair=0.0)


def _rows(*texts: str, scored_from: int = 1) -> PackedRows:
    ids = [torch.tensor([ord(letter) - 96 for letter in text]) for text in texts]
    batch = DataProto.from_dict(
        tensors={"input_ids": ids, "loss_mask": [torch.arange(len(each)) >= scored_from for each in ids]}
    )
    return PackedRows.read(batch, vocabulary=61)


def _groups(*, prompts: int, rows: int, prompt: int, answer: int, seed: int = 0) -> PackedRows:
    draw = torch.Generator().manual_seed(seed)
    ids: list[Tensor] = []
    for _ in range(prompts):
        shared = torch.randint(0, 61, (prompt,), generator=draw)
        for row in range(rows):
            ids.append(torch.cat([shared, torch.randint(0, 61, (answer + row % 3,), generator=draw)]))
    mask = [torch.arange(len(each)) >= prompt for each in ids]
    return PackedRows.read(DataProto.from_dict(tensors={"input_ids": ids, "loss_mask": mask}), vocabulary=61)


def test_a_prefix_is_packed_once() -> None:
    rows = _rows("abcde", "xy", "abcfgh", "abcde", scored_from=3)
    (plan,) = plan_shared(rows, range(4), max_tokens=100, cost=BY_TOKENS) or []
    # "abcde" twice and "abcfgh" share "abc"; nothing is shared with "xy".
    assert plan.rectangles == (
        Rectangle((1,), 2),
        Rectangle((), 3),
        Rectangle((2,), 3, 1),
        Rectangle((0, 3), 2, 1),
    )
    packed = rows.pack(plan)
    assert "".join(chr(96 + int(each)) for each in packed.input_ids) == "xyabcfghdede"
    assert packed.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 3, 4, 3, 4]
    assert packed.rectangles == ((1, 2), (1, 3), (1, 3), (2, 2))
    assert packed.prefixes == (None, None, 1, 1)
    # "f", "d" and "d" are predicted at the one cell of "c".
    assert packed.rows.tolist() == [2, 2, 2, 0, 0, 3, 3]
    assert "".join(chr(96 + int(each)) for each in packed.targets) == "fghdede"
    assert packed.predictors.tolist() == [4, 5, 6, 4, 8, 4, 10]


def test_rows_that_are_prefixes_of_others_and_scored_tokens_inside_one() -> None:
    rows = _rows("abc", "abcd", "abc", scored_from=1)
    (plan,) = plan_shared(rows, range(3), max_tokens=100, cost=BY_TOKENS) or []
    packed = rows.pack(plan)
    assert packed.input_ids.tolist() == [1, 2, 3, 4]
    assert packed.rows.tolist() == [1, 1, 1, 0, 0, 2, 2]
    assert packed.targets.tolist() == [2, 3, 4, 2, 3, 2, 3]
    assert packed.predictors.tolist() == [0, 1, 2, 0, 1, 0, 1]


def test_nothing_is_shared_where_it_does_not_pay() -> None:
    assert plan_shared(_rows("abcd", "efgh"), range(2), max_tokens=100, cost=BY_TOKENS) is None
    # Attention alone: with a mask, six times eight pairs a row instead of 36 of a triangle.
    pairs = RowCost(per_token=0.0, per_scored_token=0.0, per_pair=1.0)
    assert plan_shared(_rows("abcdefgh", "abijklmn"), range(2), max_tokens=100, cost=pairs) is None
    assert plan_shared(_rows("abcdefgh", "abcdefgn"), range(2), max_tokens=100, cost=pairs) is not None
    # One token in 21 of two rows is less than a twentieth of the work.
    assert plan_shared(_rows("a" + 10 * "b", "a" + 9 * "c"), range(2), max_tokens=100, cost=BY_TOKENS) is None
    assert plan_shared(_rows("abcd", "abcd"), [], max_tokens=100, cost=BY_TOKENS) is None


def test_a_common_beginning_of_all_rows_does_not_hide_those_of_groups() -> None:
    """Two tokens of a template, then prompts of four; rows of the groups alternate."""
    rows = _rows("zzabcdp", "zzefghq", "zzabcdr", "zzefghs")
    assert sorted(bunches_of(rows, range(4), max_tokens=100, cost=BY_TOKENS), key=lambda each: each.rows) == [
        Bunch((0, 2), 6),
        Bunch((1, 3), 6),
    ]


def test_a_bunch_fits_a_micro_batch() -> None:
    rows = _rows("abcdef", "abcdeg", "abcdeh", "abcdei")
    bunches = bunches_of(rows, range(4), max_tokens=7, cost=BY_TOKENS)
    assert sorted(len(bunch.rows) for bunch in bunches) == [2, 2]
    plans = plan_shared(rows, range(4), max_tokens=7, cost=BY_TOKENS) or []
    assert [len(rows.pack(plan).input_ids) for plan in plans] == [7, 7]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=7), st.integers(1, 20))
def test_every_row_is_computed_once_and_nothing_more_is_saved_by_any_division(texts: list[str], budget: int) -> None:
    rows = _rows(*texts)
    bunches = bunches_of(rows, range(len(texts)), max_tokens=budget, cost=BY_TOKENS)
    assert sorted(row for bunch in bunches for row in bunch.rows) == list(range(len(texts)))
    for bunch in bunches:
        assert len({texts[row][: bunch.prefix] for row in bunch.rows}) == 1

    ordered = sorted(texts)

    def most(start: int) -> float:
        if start == len(ordered):
            return 0.0
        found = most(start + 1)
        for end in range(start + 2, len(ordered) + 1):
            alike = ordered[start:end]
            common = len(next(iter(alike)))
            while len({text[:common] for text in alike}) > 1:
                common -= 1
            tokens, saved = sum(map(len, alike)), (len(alike) - 1) * common
            if tokens - saved <= budget:
                found = max(found, saved - 0.05 * tokens + most(end))
        return found

    saved = [
        (len(bunch.rows) - 1) * bunch.prefix - 0.05 * sum(len(texts[row]) for row in bunch.rows)
        for bunch in bunches
        if len(bunch.rows) > 1
    ]
    assert sum(saved) == pytest.approx(most(0))
    plans = plan_shared(rows, range(len(texts)), max_tokens=budget, cost=BY_TOKENS)
    for plan in plans or []:
        packed = rows.pack(plan)
        cells = sum(count * length for count, length in packed.rectangles)
        assert len(packed.input_ids) == cells
        assert cells <= budget or len(plan.rows) == 1
        assert packed.positions[packed.predictors].tolist() == [
            int(token) - sum(map(len, texts[: int(row)])) - 1
            for token, row in zip(packed.tokens, packed.rows, strict=True)
        ]
        assert torch.equal(rows.input_ids[packed.tokens - 1], packed.input_ids[packed.predictors])


def _scores_and_gradients(
    model: PolicyModel, packed: list[PackedMicroBatch], rows: PackedRows
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs [T] in the precision of the model, and the gradient of their sum under fixed weights."""
    model.zero_grad()
    scores = torch.zeros(len(rows.input_ids), dtype=torch.float64)
    direction = torch.sin(torch.arange(len(scores), dtype=torch.float64))
    for each in packed:
        states = model.hidden_states(
            each.input_ids, each.positions, rectangles=each.rectangles, prefixes=each.prefixes
        ).index_select(0, each.predictors)
        log_p = model.logits_of(states).log_softmax(dim=-1)
        found = log_p.gather(1, each.targets[:, None]).squeeze(1)
        (found * direction[each.tokens]).sum().backward()
        scores[each.tokens] = found.detach()
    return scores, {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen3", {"tied": False}),
        ("gemma2", {"sliding_window": 5, "attn_logit_softcapping": 2.0}),  # shorter than the prompts
        ("mistral", {"sliding_window": 12}),  # longer than the prompts, shorter than the rows
    ],
)
def test_gradients_are_those_of_rows_apartin_float64(
    model_folder: Callable[..., str], family: str, options: dict[str, Any], checkpointing: bool
) -> None:
    folder = model_folder(family, **options)
    model = in_float64(load_policy_model(folder, layout="packed", gradient_checkpointing=checkpointing))
    rows = _groups(prompts=2, rows=4, prompt=9, answer=5)
    members = range(len(rows))
    apart = plan_microbatches(rows.lengths, max_tokens=1000, overhead_tokens=0)
    plans = plan_shared(rows, members, max_tokens=40, cost=BY_TOKENS)
    assert plans is not None
    assert sum(len(rows.pack(plan).input_ids) for plan in plans) < sum(rows.lengths) - 2 * 3 * 8
    expected, theirs = _scores_and_gradients(model, [rows.pack(plan) for plan in apart], rows)
    found, mine = _scores_and_gradients(model, [rows.pack(plan) for plan in plans], rows)
    assert torch.allclose(found, expected, rtol=0, atol=1e-10)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (mine[name] - gradient).norm() <= 1e-10 * gradient.norm(), name


def _batch(rows: PackedRows) -> DataProto:
    ids, mask = (list(column.split(rows.lengths)) for column in (rows.input_ids, rows.mask))
    draw = torch.Generator().manual_seed(1)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "loss_mask": mask,
            "behaviour_log_probs": [-4.0 + torch.rand(len(each), generator=draw) for each in ids],
            "advantages": torch.randn(len(ids), generator=draw),
        }
    )


def test_an_update_log_probs_and_values_are_those_of_rows_apart(
    model_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the engines' own choice; then with the choice taken from them."""
    folder, batch = model_folder("llama"), _batch(_groups(prompts=2, rows=4, prompt=12, answer=4))
    found: list[list[Any]] = []
    for shared in (True, False):
        if not shared:
            monkeypatch.setattr(passes, "plan_shared", lambda *_, **__: None)
        options = {"lr": 1e-2, "eps": 1e-3, "device": "cpu", "max_tokens_per_microbatch": 64}
        engine = FSDPEngine(folder, objective=PolicyObjective(entropy_coef=0.1), **options)
        critic = FSDPValueEngine(folder, **options)
        cells: list[int] = []
        for each in (engine, critic):
            each._model.register_forward_pre_hook(lambda _, inputs, cells=cells: cells.append(len(inputs[0])))
        scored, values = engine.log_probs(batch).batch, critic.values(batch).batch
        assert scored is not None
        assert values is not None
        columns = [scored["log_probs"].values(), scored["entropy"].values(), values["values"].values()]
        found.append([sum(cells), columns, engine.update(batch), [each for _, each in engine.named_tensors()]])
        engine.close()
        critic.close()
    (few, mine, update, weights), (many, theirs, updated, expected) = found
    assert few < 0.6 * many
    for one, other in zip([*mine, *weights], [*theirs, *expected], strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)
    assert update == pytest.approx(updated, rel=1e-4, abs=1e-6)
