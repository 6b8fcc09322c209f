"""Defects measured in other implementations of DataProto, which this one must not have: one test each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from asyncrl.data import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from asyncrl.data.codec import decode, encode
from asyncrl.errors import SchemaError


def numbered(rows: int) -> DataProto:
    return DataProto.from_dict(tensors={"x": torch.arange(rows)}, meta_info={"step": 1})


def column(data: DataProto, name: str = "x") -> torch.Tensor:
    assert data.batch is not None
    return data.batch[name]


def test_chunks_do_not_share_meta_info() -> None:
    data = numbered(4)
    first, second = data.chunk(2)
    first.meta_info["step"] = 2
    assert (second.meta_info, data.meta_info) == ({"step": 1}, {"step": 1})


def test_chunks_are_views_as_documented() -> None:
    data = numbered(4)
    data.chunk(2)[1].batch["x"][0] = 9  # type: ignore[index]
    assert column(data).tolist() == [0, 1, 9, 3]


def test_containers_are_never_shared() -> None:
    data = numbered(4)
    for derived in (data.slice(), data.select(), data.chunk(1)[0], data.with_columns(), DataProto.concat([data])):
        derived.batch["new"] = torch.zeros(4)  # type: ignore[index]
        derived.meta_info["new"] = 1
        derived.non_tensor_batch["other"] = np.zeros(4)
    assert data == numbered(4)


def test_from_dict_leaves_the_dictionaries_of_the_caller() -> None:
    tensors, lists, info = {"x": torch.zeros(2)}, {"o": [1, 2]}, {"step": 1}
    data = DataProto.from_dict(tensors=tensors, non_tensors=lists, meta_info=info, auto_padding=True)
    assert lists == {"o": [1, 2]}
    assert info == {"step": 1}
    assert list(tensors) == ["x"]
    assert data.meta_info == info
    assert data.is_padding_enabled()


def test_lists_of_equal_length_stay_one_dimensional() -> None:
    data = DataProto.from_dict(non_tensors={"o": [[1, 2], [3, 4]], "a": [np.zeros(2), np.ones(2)]})
    assert data.non_tensor_batch["o"].shape == (2,)
    assert data.non_tensor_batch["o"].tolist() == [[1, 2], [3, 4]]
    assert data.non_tensor_batch["a"].shape == (2,)


def test_the_iterator_keeps_dtypes_shapes_and_ragged_columns() -> None:
    data = DataProto.from_dict(
        tensors={"x": torch.arange(4), "ids": [torch.arange(size) for size in (2, 0, 1, 3)]},
        non_tensors={
            "o": [[1, 2], [3, 4], [5], [6]],
            "n": np.arange(4, dtype=np.int16),
            "u": [np.zeros(1), None, 1, 2],
        },
    )
    for shuffle in (False, True):
        for mini in data.make_iterator(2, epochs=2, seed=1, dataloader_kwargs={"shuffle": shuffle}):
            assert mini.schema.any_rows() == data.schema.any_rows()
            assert mini.non_tensor_batch["o"].shape == (2,)
            assert mini.non_tensor_batch["n"].dtype == np.int16
            assert mini == data.select_idxs(column(mini))


def test_the_iterator_gives_views() -> None:
    data = numbered(4)
    minis = list(data.make_iterator(2, epochs=1))
    assert column(minis[1]).data_ptr() == column(data)[2:].data_ptr()
    assert minis[0].meta_info is not minis[1].meta_info


def test_the_iterator_shuffles_like_a_data_loader() -> None:
    generator = torch.Generator()
    generator.manual_seed(5)
    loader = DataLoader(range(6), batch_size=2, shuffle=True, generator=generator)  # type: ignore[arg-type]
    expected = [rows.tolist() for _ in range(3) for rows in loader]
    minis = numbered(6).make_iterator(2, epochs=3, seed=5, dataloader_kwargs={"shuffle": True})
    assert [column(mini).tolist() for mini in minis] == expected


def test_the_iterator_refuses_at_once() -> None:
    with pytest.raises(SchemaError, match="5 rows cannot be cut into mini-batches of 2"):
        numbered(5).make_iterator(2, epochs=1)
    with pytest.raises(SchemaError, match="num_workers"):
        numbered(4).make_iterator(2, epochs=1, dataloader_kwargs={"num_workers": 2})
    assert [len(mini) for mini in numbered(5).make_iterator(2, 1, dataloader_kwargs={"drop_last": True})] == [2, 2]


def test_concat_of_nothing() -> None:
    with pytest.raises(SchemaError, match="concat needs at least one batch"):
        DataProto.concat([])


def test_concat_of_different_columns_names_the_batch() -> None:
    other = DataProto.from_dict(tensors={"y": torch.zeros(2)})
    with pytest.raises(SchemaError, match=r"batch 2 does not fit batch 0 in concat:\ncolumn 'x' is missing"):
        DataProto.concat([numbered(1), numbered(1), other])
    with pytest.raises(SchemaError, match="column 'x' is tensor float32, expected tensor int64"):
        DataProto.concat([numbered(1), DataProto.from_dict(tensors={"x": torch.zeros(2)})])


def test_concat_with_arrays_in_meta_info() -> None:
    info = {"table": np.array([1.0, np.nan]), "weights": torch.ones(2)}
    data = DataProto.concat([DataProto(meta_info=dict(info)), DataProto(meta_info=dict(info))])
    assert data.meta_info["table"] is info["table"]
    with pytest.raises(SchemaError, match=r"meta_info 'table' differs: .* in batch 0, .* in batch 1"):
        DataProto.concat([DataProto(meta_info=info), DataProto(meta_info={"table": np.zeros(2)})])


def test_concat_of_metrics_with_different_keys() -> None:
    data = DataProto.concat(
        [
            DataProto(meta_info={"metrics": {"loss": 1.0}}),
            DataProto(meta_info={"metrics": [{"loss": 2.0, "kl": 3.0}, {"kl": 4.0}]}),
            DataProto(meta_info={"metrics": None}),
        ]
    )
    assert data.meta_info == {"metrics": {"loss": [1.0, 2.0], "kl": [3.0, 4.0]}}


def test_five_rows_into_four_chunks() -> None:
    data = DataProto.from_dict(tensors={"x": torch.arange(5)}, auto_padding=True)
    assert [column(part).tolist() for part in data.chunk(4)] == [[0, 1], [2], [3], [4]]
    assert [len(part) for part in data[:2].chunk(4)] == [1, 1, 0, 0]
    with pytest.raises(SchemaError, match="5 rows cannot be cut into 4 equal chunks"):
        numbered(5).chunk(4)


def test_one_wire_format_encodes_zero_width_tensors_too() -> None:
    data = DataProto.from_dict(tensors={"empty": torch.zeros(3, 0), "none": torch.zeros(3, 2, 0, dtype=torch.bool)})
    encoded = encode(data)
    assert decode(encoded.header, encoded.buffers) == data


def test_padding_leaves_the_batch_of_the_caller() -> None:
    data = numbered(7)
    padded, pad_size = pad_dataproto_to_divisor(data, 4)
    assert (len(data), len(padded), pad_size) == (7, 8, 1)
    assert pad_dataproto_to_divisor(data, 7) == (data, 0)
    assert column(pad_dataproto_to_divisor(numbered(2), 7)[0]).tolist() == [0, 1, 0, 1, 0, 1, 0]


def test_unpadding_copies_nothing() -> None:
    padded = DataProto.from_dict(tensors={"x": torch.zeros(8, 1 << 20, dtype=torch.uint8)})
    assert column(unpad_dataproto(padded, 1)).data_ptr() == column(padded).data_ptr()
    with pytest.raises(SchemaError, match=r"pad_size must lie in 0\.\.8"):
        unpad_dataproto(padded, 9)
