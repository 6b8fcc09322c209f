"""DataProto: what a batch is, what its methods do, and the laws they keep."""

from __future__ import annotations

import copy
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict

from asyncrl.data import DataProto, fold_batch_dim, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto
from asyncrl.data.ragged import lengths, offsets_of, rows_of
from asyncrl.errors import SchemaError

LAW = settings(max_examples=30, deadline=None)


def made(rows: int, *, seed: int = 0) -> DataProto:
    """A batch with a column of every kind, different in every row, with empty ragged rows among them."""
    random = np.random.default_rng(seed)
    sizes = random.integers(0, 4, rows)
    return DataProto.from_dict(
        tensors={
            "input_ids": [torch.arange(size) + 10 * row for row, size in enumerate(sizes)]
            if rows
            else torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.int64), torch.zeros(1).long()),
            "log_probs": [torch.from_numpy(random.standard_normal(size)).float() for size in sizes]
            if rows
            else torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.zeros(1).long()),
            "rewards": torch.arange(rows, dtype=torch.float32),
            "pixels": torch.arange(rows * 6).reshape(rows, 2, 3).to(torch.bfloat16),
        },
        non_tensors={
            "answer": [[row, None] if row % 2 else f"row {row}" for row in range(rows)],
            "score": np.arange(rows) / 4,
        },
        meta_info={"step": 3},
    )


def rewards(data: DataProto) -> list[float]:
    assert data.batch is not None
    result: list[float] = data.batch["rewards"].tolist()
    return result


batches = st.builds(made, st.integers(0, 7), seed=st.integers(0, 3))


# -------------------------------------------------------------------------------------------------------------- making


def test_columns_of_a_batch() -> None:
    data = DataProto.from_dict(
        tensors={"input_ids": [torch.tensor([1, 2, 3]), torch.tensor([4])], "rewards": torch.tensor([1.0, 0.0])},
        non_tensors={"answer": ["yes", "no"]},
        meta_info={"step": 1},
    )
    assert len(data) == 2
    assert data.batch is not None
    assert data.batch["input_ids"].is_nested
    assert [row.tolist() for row in rows_of(data.batch["input_ids"])] == [[1, 2, 3], [4]]
    assert data.non_tensor_batch["answer"].tolist() == ["yes", "no"]
    # 4 ids of 8 bytes, 3 offsets of 8, 2 rewards of 4, 2 pointers of 8.
    assert data.size_bytes == 32 + 24 + 8 + 16
    assert str(data.schema) == "rows: 2\ninput_ids: ragged int64[*]\nrewards: tensor float32\nanswer: object"


def test_constructor_as_of_a_dataclass() -> None:
    batch = TensorDict({"rewards": torch.ones(2)}, batch_size=[2])
    data = DataProto(batch=batch, non_tensor_batch={"uid": np.array(["a", "b"])}, meta_info={"step": 1})
    data.rename("rewards", "scores")
    assert "rewards" in list(batch.keys()), "the caller's TensorDict stays as it was"
    assert len(DataProto()) == 0


def test_from_single_dict_sorts_columns_by_kind() -> None:
    data = DataProto.from_single_dict(
        {
            "ids": [torch.tensor([1]), torch.tensor([2, 3])],
            "x": torch.zeros(2),
            "uid": np.array(["a", "b"]),
            "o": [1, 2],
        }
    )
    assert [column.kind for column in data.schema.columns] == ["ragged", "tensor", "array", "object"]


def test_a_tensordict_there_and_back() -> None:
    data = made(3).select(non_tensor_batch_keys=["answer"])
    assert DataProto.from_tensordict(data.to_tensordict()) == data


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"tensors": {"a": torch.zeros(2), "b": torch.zeros(3)}}, "'b' has 3 rows, column 'a' has 2"),
        ({"tensors": {"a": torch.zeros(2)}, "non_tensors": {"b": [1]}}, "'b' has 1 rows, the batch has 2"),
        ({"tensors": {"a": torch.zeros(2)}, "non_tensors": {"a": [1, 2]}}, "'a' is both"),
        ({"tensors": {"a": torch.tensor(1)}}, "0-d tensor"),
        ({"tensors": {"a": [1, 2]}}, "'a' of the batch must be a tensor"),
        ({"tensors": {"a": [torch.zeros(1), torch.zeros(1, 2)]}}, "'a': rows of a ragged column must agree"),
        ({"non_tensors": {"a": np.array(1)}}, "0-d array"),
        ({"non_tensors": {"a": "text"}}, "got str"),
        ({"non_tensors": {"a": torch.zeros(2)}}, "belongs to the batch"),
        ({"tensors": {"a": torch.zeros(2, 2)}, "num_batch_dims": 2}, "one batch dimension"),
    ],
)
def test_columns_that_are_no_batch_raise(columns: dict[str, object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        DataProto.from_dict(**columns)  # type: ignore[arg-type]


def test_a_wrong_column_set_later_is_found_by_the_next_operation() -> None:
    data = made(3)
    data.non_tensor_batch["late"] = np.zeros(2)
    with pytest.raises(SchemaError, match="'late' has 2 rows"):
        data.select_idxs([0])


def test_ragged_columns_of_equal_lengths_can_be_computed_with() -> None:
    data = made(4)
    assert data.batch is not None
    assert offsets_of(data.batch["input_ids"]) is offsets_of(data.batch["log_probs"])
    for changed in (data[1:3], data[[3, 0]], DataProto.concat([data, data]), data.repeat(2), data.clone()):
        assert changed.batch is not None
        total = changed.batch["input_ids"] + changed.batch["log_probs"]
        assert torch.equal(lengths(total), lengths(changed.batch["input_ids"]))


def test_foreign_forms_of_nested_tensors_are_normalised() -> None:
    values = torch.arange(6)
    holes = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 6]), lengths=torch.tensor([1, 2]))
    strided = torch.nested.nested_tensor([torch.tensor([7]), torch.tensor([8, 9])])
    data = DataProto.from_dict(tensors={"holes": holes, "strided": strided})
    assert data.batch is not None
    assert [row.tolist() for row in rows_of(data.batch["holes"])] == [[0], [3, 4]]
    assert [row.tolist() for row in rows_of(data.batch["strided"])] == [[7], [8, 9]]


# ---------------------------------------------------------------------------------------------------------------- rows


def test_a_row() -> None:
    item = made(3)[1]
    assert item.batch is not None
    assert item.batch["rewards"].item() == 1.0
    assert item.non_tensor_batch == {"answer": [1, None], "score": 0.25}
    assert item.meta_info == {"step": 3}
    with pytest.raises(IndexError, match="row 3 is out of range for 3 rows"):
        made(3)[3]


def test_a_batch_can_be_iterated_row_by_row() -> None:
    assert [item.non_tensor_batch["score"] for item in made(3)] == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    "index",
    [
        [2, -4, 2],
        (2, 0, 2),
        np.array([2, 0, 2]),
        torch.tensor([2, 0, 2], dtype=torch.int32),
        np.array([2, 0, 2], dtype=np.uint8),
    ],
)
def test_rows_by_integers(index: object) -> None:
    assert rewards(made(4).select_idxs(index)) == [2.0, 0.0, 2.0]  # type: ignore[arg-type]
    assert rewards(made(4)[index]) == [2.0, 0.0, 2.0]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "mask", [[True, False, True], np.array([True, False, True]), torch.tensor([True, False, True])]
)
def test_rows_by_a_mask(mask: object) -> None:
    assert rewards(made(3)[mask]) == [0.0, 2.0]  # type: ignore[call-overload]


def test_indices_that_select_nothing() -> None:
    assert len(made(3)[[]]) == 0
    assert len(made(3)[torch.zeros(3, dtype=torch.bool)]) == 0
    for index, error in (([4], IndexError), ([-4], IndexError), ([True], IndexError), ([0.5], TypeError)):
        with pytest.raises(error):
            made(3).select_idxs(index)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        made(3)["rewards"]  # type: ignore[index]


def test_a_negative_step() -> None:
    """Peer: a negative step fails."""
    assert rewards(made(5)[::-2]) == [4.0, 2.0, 0.0]
    assert made(5)[::-1][::-1] == made(5)


@LAW
@given(
    batches,
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-9, 9),
    st.none() | st.integers(-3, 3).filter(lambda step: step != 0),
)
def test_slicing_is_that_of_a_list(data: DataProto, start: int | None, end: int | None, step: int | None) -> None:
    expected = list(range(len(data)))[start:end:step]
    assert data.slice(start, end, step) == data.select_idxs(expected)


@LAW
@given(batches, st.data())
def test_selecting_twice_is_selecting_once(data: DataProto, draw: st.DataObject) -> None:
    rows = st.lists(st.integers(0, max(0, len(data) - 1)), max_size=0 if len(data) == 0 else 6)
    first = draw.draw(rows)
    second = draw.draw(st.lists(st.integers(0, max(0, len(first) - 1)), max_size=6 if first else 0))
    assert data.select_idxs(first).select_idxs(second) == data.select_idxs([first[row] for row in second])


@LAW
@given(batches, st.integers(1, 5))
def test_chunks_put_together_are_the_batch(data: DataProto, chunks: int) -> None:
    data.auto_padding = True
    parts = data.chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert DataProto.concat(parts) == data


@LAW
@given(batches.filter(len), st.integers(1, 5))
def test_splits_put_together_are_the_batch(data: DataProto, size: int) -> None:
    parts = data.split(size)
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert DataProto.concat(parts) == data


@LAW
@given(batches, st.integers(0, 3))
def test_repeating(data: DataProto, times: int) -> None:
    rows = range(len(data))
    assert data.repeat(times, interleave=False) == data.select_idxs([*rows] * times)
    assert data.repeat(times) == data.select_idxs([row for row in rows for _ in range(times)])
    assert data.sample_level_repeat([times] * len(data)) == data.repeat(times)


def test_repeating_each_row_its_own_number_of_times() -> None:
    for times in ([2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])):
        assert rewards(made(3).sample_level_repeat(times)) == [0.0, 0.0, 2.0]
    with pytest.raises(SchemaError, match="one integer >= 0 for each of the 3 rows"):
        made(3).sample_level_repeat([1, 2])


@LAW
@given(batches, st.randoms())
def test_reordering_back(data: DataProto, random: object) -> None:
    order = list(range(len(data)))
    random.shuffle(order)  # type: ignore[attr-defined]
    original = data.clone()
    data.reorder(torch.tensor(order, dtype=torch.int64))
    assert data == original.select_idxs(order)
    data.reorder(np.argsort(order))
    assert data == original


@LAW
@given(batches.filter(len), st.integers(1, 5))
def test_unpadding_undoes_padding(data: DataProto, divisor: int) -> None:
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert unpad_dataproto(padded, pad_size) == data


def test_padding_appends_a_row_in_place() -> None:
    data = made(2)
    data.padding(2)
    assert rewards(data) == [0.0, 1.0, 1.0, 1.0]
    data.padding(1, "first")
    assert rewards(data) == [0.0, 1.0, 1.0, 1.0, 0.0]
    with pytest.raises(SchemaError, match="'first' or 'last'"):
        data.padding(1, "middle")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="cannot pad 0 rows"):
        made(0).padding(1)


def test_unfolding_columns_into_rows() -> None:
    pairs = DataProto.from_dict(
        tensors={"ids": torch.arange(8).reshape(2, 4), "reward": torch.tensor([1.0, 2.0])},
        non_tensors={"uid": np.array(["a", "b"])},
    )
    data = pairs.unfold_column_chunks(2, split_keys=["ids"])
    assert data.batch is not None
    assert data.batch["ids"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert data.batch["reward"].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert data.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert pairs.unfold_column_chunks(2) == pairs.repeat(2)
    with pytest.raises(SchemaError, match="cannot be cut into 3"):
        pairs.unfold_column_chunks(3, split_keys=["ids"])


def test_folding_and_unfolding_rows() -> None:
    data = made(6).select(["rewards", "pixels"])
    folded = fold_batch_dim(data, 2)
    assert folded.batch is not None
    assert folded.batch["rewards"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert folded.non_tensor_batch["answer"].shape == (2, 3)
    assert unfold_batch_dim(folded) == data
    with pytest.raises(SchemaError, match="ragged columns"):
        fold_batch_dim(made(6), 2)


# ------------------------------------------------------------------------------------------------------------- columns


def test_selecting_columns() -> None:
    data = made(2)
    part = data.select(["rewards"], ["answer"], [])
    assert part.schema.names == ("rewards", "answer")
    assert part.meta_info == {}
    assert data.select() == data
    with pytest.raises(SchemaError, match=r"batch has no \['reward'\]: it has \['input_ids'"):
        data.select(["reward"])


def test_popping_columns_takes_all_or_nothing() -> None:
    data = made(2)
    with pytest.raises(SchemaError):
        data.pop(["rewards"], ["missing"])
    assert data == made(2)
    taken = data.pop(["rewards"], ["answer"], ["step"])
    assert taken.schema.names == ("rewards", "answer")
    assert taken.meta_info == {"step": 3}
    assert data.schema.names == ("input_ids", "log_probs", "pixels", "score")
    assert data.meta_info == {}


def test_renaming_columns() -> None:
    data = made(2)
    assert data.rename(["rewards", "answer"], ["scores", "solution"]) is data
    assert data.schema.names == ("input_ids", "log_probs", "scores", "pixels", "solution", "score")
    data.rename(["scores", "pixels"], ["pixels", "scores"])
    assert data.schema["pixels"].shape == ()
    with pytest.raises(SchemaError, match="one name"):
        data.rename("scores", "pixels")
    with pytest.raises(SchemaError, match=r"\['absent'\] are not in the batch"):
        data.rename("absent", "present")


def test_union_adds_columns() -> None:
    data = made(2).select(["rewards"], [])
    assert data.union(made(2)) is data
    assert data == made(2)


def test_union_without_tensors() -> None:
    """Peer: AttributeError."""
    left = DataProto.from_dict(non_tensors={"a": [1, 2]})
    right = DataProto.from_dict(non_tensors={"b": [3, 4]})
    assert left.union(right).schema.names == ("a", "b")
    assert DataProto().union(made(3)) == made(3)
    assert left.union(DataProto.from_dict(tensors={"x": torch.zeros(2)})).schema.names == ("x", "a", "b")


def test_union_that_conflicts_names_the_column_and_changes_nothing() -> None:
    data = made(2)
    other = made(2).with_columns(score=np.array([0.0, 9.0]), extra=torch.zeros(2))
    with pytest.raises(SchemaError, match=r"\['score'\] are in both batches of a union and differ"):
        data.union(other)
    with pytest.raises(SchemaError, match="meta_info 'step' differs: 3 here, 4 in the other"):
        data.union(DataProto(meta_info={"step": 4}))
    with pytest.raises(SchemaError, match="the same number of rows on both sides, got 2 and 3"):
        data.union(made(3))
    assert data == made(2)


def test_union_compares_bits() -> None:
    nan = DataProto.from_dict(tensors={"x": torch.tensor([float("nan")])}, non_tensors={"y": [float("nan")]})
    assert nan.clone().union(nan.clone()) == nan
    with pytest.raises(SchemaError, match="differ"):
        DataProto.from_dict(tensors={"x": torch.tensor([0.0])}).union(
            DataProto.from_dict(tensors={"x": torch.tensor([-0.0])})
        )


@pytest.mark.parametrize("kind", ["U", "S"])
def test_the_width_of_text_makes_no_difference(kind: str) -> None:
    wide, narrow, other = (
        DataProto.from_dict(non_tensors={"name": np.array(names).astype(kind)})
        for names in (["a", "b", "a long name"], ["a", "b"], ["a", "c"])
    )
    assert wide[:2] == narrow
    assert wide[:2].union(narrow) == narrow
    assert narrow != other
    with pytest.raises(SchemaError, match="differ"):
        wide[:2].union(other)
    text, octets = (DataProto.from_dict(non_tensors={"name": np.array(["a"]).astype(each)}) for each in "US")
    assert text != octets


def test_with_columns_makes_a_new_batch() -> None:
    data = made(2)
    more = data.with_columns(advantages=torch.ones(2), tags=["a", ["b"]], rewards=[torch.ones(1), torch.ones(2)])
    assert more.schema["rewards"].kind == "ragged"
    assert more.schema["tags"].kind == "object"
    assert data == made(2)
    with pytest.raises(SchemaError, match="has 3 rows"):
        data.with_columns(advantages=torch.ones(3))
    with pytest.raises(SchemaError, match="have 3 rows, the batch has 2"):
        DataProto.from_dict(tensors={"x": torch.ones(2)}).with_columns(x=torch.ones(3))


def test_equality_is_of_bits_dtypes_and_meta_info() -> None:
    data = made(3)
    assert data == data.clone()
    assert data != "a batch"
    assert data != data.with_columns(rewards=data.batch["rewards"].double())  # type: ignore[index]
    assert data != data.with_columns(score=np.array([0.0, 0.5, 0.25]))
    assert data != DataProto(data.batch, data.non_tensor_batch, {"step": 4})
    assert data != data[:2]


def test_copies() -> None:
    data = made(3)
    view, own = copy.copy(data), copy.deepcopy(data)
    data.batch["rewards"].zero_()  # type: ignore[index]
    assert rewards(view) == [0.0, 0.0, 0.0]
    assert rewards(own) == [0.0, 1.0, 2.0]


def test_bare_import_of_the_package_is_light() -> None:
    program = (
        "import sys, asyncrl.data\n"
        "assert 'torch' not in sys.modules\n"
        "from asyncrl.data import DataProto, Schema\n"
        "import asyncrl.data.codec, asyncrl.data.disk\n"
        "heavy = {'ray', 'transformers', 'tensordict', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
