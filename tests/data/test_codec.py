"""The codec: every batch comes back bit by bit, and no other bytes become a batch."""

from __future__ import annotations

import math
import pickle
import struct
import sys
from decimal import Decimal
from types import SimpleNamespace

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.extra import numpy as npst

from asyncrl.data import DataProto
from asyncrl.data.codec import Encoded, decode, encode
from asyncrl.data.ragged import offsets_of, values_of
from asyncrl.errors import CodecError

LAW = settings(max_examples=60, deadline=None)

TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=5)
    | st.binary(max_size=5)
    | st.builds(np.float32, st.floats(width=32))
    | npst.arrays(st.sampled_from([np.int16, np.float64, "U2", "S3", "M8[ms]"]), st.sampled_from([(), (0,), (2, 3)])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(-3, 3), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def batches(draw: st.DrawFn) -> DataProto:
    """Any batch: 0 to 4 rows, dense and ragged tensors of any dtype and shape, arrays, objects."""
    rows = draw(st.integers(0, 4))
    random = np.random.default_rng(draw(st.integers(0, 9)))

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        size = math.prod(shape) * dtype.itemsize
        if size == 0:
            return torch.zeros(shape, dtype=dtype)
        if dtype == torch.bool:
            return torch.from_numpy(random.integers(0, 2, shape).astype(bool))
        return torch.from_numpy(random.integers(0, 256, size, dtype=np.uint8)).view(dtype).reshape(shape)

    columns: dict[str, torch.Tensor] = {}
    sizes = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    offsets = torch.tensor([0, *np.cumsum(sizes, dtype=np.int64)])
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(TORCH_DTYPES))
        trailing = draw(st.sampled_from([(), (0,), (2,), (2, 1)]))
        if draw(st.booleans()):
            values = tensor((sum(sizes), *trailing), dtype)
            columns[f"ragged {number}"] = torch.nested.nested_tensor_from_jagged(values, offsets)
        else:
            columns[f"tensor {number}"] = tensor((rows, *trailing), dtype)
    arrays: dict[str, np.ndarray] = {}
    for number in range(draw(st.integers(0, 2))):
        shape = (rows, *draw(st.sampled_from([(), (0,), (2,)])))
        arrays[f"array {number}"] = draw(
            npst.arrays(st.sampled_from(["i4", ">f8", "U3", "S2", "m8[s]", "?", "c8"]), shape)
        )
    if draw(st.booleans()):
        objects = np.empty(rows, dtype=object)
        for row in range(rows):
            objects[row] = draw(plain)
        arrays["objects"] = objects
    info = draw(st.dictionaries(st.text(max_size=4) | st.integers(0, 3), plain, max_size=2))
    return DataProto.from_dict(tensors=columns, non_tensors=arrays, meta_info=info, auto_padding=draw(st.booleans()))


def back(encoded: Encoded) -> DataProto:
    return decode(encoded.header, encoded.buffers)


def column(data: DataProto, name: str = "x") -> torch.Tensor:
    assert data.batch is not None
    return data.batch[name]


@LAW
@given(batches())
def test_every_batch_comes_back(data: DataProto) -> None:
    encoded = encode(data)
    for decoded in (
        back(encoded),
        decode(bytearray(encoded.header), [bytes(buffer) for buffer in encoded.buffers]),
        decode(encoded.header, encoded.buffers, copy=True),
        pickle.loads(pickle.dumps(data, 5)),
        pickle.loads(pickle.dumps(data, 3)),
    ):
        assert decoded == data
        assert (decoded.batch is None) == (data.batch is None)
        assert decoded.auto_padding == data.auto_padding
        assert decoded.schema == data.schema
        assert encode(decoded).header == encoded.header


def test_nothing_is_copied_either_way() -> None:
    x = torch.arange(8, dtype=torch.float32)
    ids = [torch.tensor([1, 2]), torch.tensor([3])]
    data = DataProto.from_dict(tensors={"x": x.reshape(2, 4), "ids": ids}, non_tensors={"n": np.arange(2)})
    decoded = back(encode(data))
    assert column(decoded).data_ptr() == x.data_ptr()
    assert values_of(column(decoded, "ids")).data_ptr() == values_of(column(data, "ids")).data_ptr()
    assert decoded.non_tensor_batch["n"].ctypes.data == data.non_tensor_batch["n"].ctypes.data
    own = decode(encode(data).header, encode(data).buffers, copy=True)
    assert column(own).data_ptr() != x.data_ptr()


def test_a_slice_encodes_its_own_bytes_and_not_its_parents() -> None:
    """Peer: a sliced view pickles its whole parent storage."""
    data = DataProto.from_dict(tensors={"x": torch.zeros(1000, 1000)}, non_tensors={"n": np.zeros((1000, 100))})
    assert encode(data[3:5]).size_bytes < 2 * 4000 + 2 * 800 + 200
    assert len(pickle.dumps(data[3:5], 5)) < 10_200
    transposed = DataProto.from_dict(tensors={"x": torch.arange(6).reshape(2, 3).T})
    assert back(encode(transposed)) == transposed


def test_ragged_columns_send_shared_offsets_once_and_share_them_again() -> None:
    rows = [torch.ones(2), torch.ones(1)]
    data = DataProto.from_dict(tensors={"a": rows, "b": rows})
    encoded = encode(data)
    assert sorted(buffer.nbytes for buffer in encoded.buffers) == [12, 12, 24]
    decoded = back(encoded)
    assert offsets_of(column(decoded, "a")) is offsets_of(column(decoded, "b"))


def test_gradients_and_conjugates_and_expansions_are_plain_data() -> None:
    data = DataProto.from_dict(
        tensors={
            "grad": torch.ones(2, requires_grad=True) * 2,
            "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
            "expanded": torch.ones(1, 3).expand(2, 3),
        }
    )
    assert back(encode(data)) == data
    assert not column(back(encode(data)), "grad").requires_grad


@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag[1:],
        torch.tensor([[1 + 2j, 3 - 1j]]).conj()[:, 1],
        torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)[:, 1],
        torch.tensor([[1.0, 2.0]])[:, 1],
    ],
    ids=["negated", "one of two", "conjugated", "one row of a bfloat16 column", "one row of a float32 column"],
)
def test_the_stride_of_a_single_row_does_not_matter(rows: torch.Tensor) -> None:
    data = DataProto.from_dict(tensors={"x": rows})
    assert column(back(encode(data)), "x").tolist() == rows.tolist()


@pytest.mark.parametrize(
    "value",
    [float("nan"), -0.0, 2**64, -(2**63) - 1, "\ud800", "é", b"\xff", (1, [2, (3,)]), {1: {"a": None}, (1, 2): 3}, {},
     np.float16(1.5), np.datetime64("2026-01-01"), np.str_("text"), np.array([None, [1]], dtype=object)],
)  # fmt: skip
def test_values_come_back_as_the_type_they_were(value: object) -> None:
    data = DataProto.from_dict(non_tensors={"o": [value, [value]]}, meta_info={"v": value})
    decoded = back(encode(data))
    assert decoded == data
    assert type(decoded.meta_info["v"]) is type(value)


def test_the_payload_of_a_nan_survives() -> None:
    (nan,) = struct.unpack("d", struct.pack("Q", 0x7FF8DEAD00000001))
    decoded = back(encode(DataProto(meta_info={"v": nan})))
    assert struct.pack("d", decoded.meta_info["v"]) == struct.pack("Q", 0x7FF8DEAD00000001)


def test_tensors_in_meta_info_are_writable_copies() -> None:
    info = {
        "t": torch.ones(2, 2),
        "r": [torch.nested.nested_tensor_from_jagged(torch.ones(3), torch.tensor([0, 1, 3]))],
    }
    encoded = encode(DataProto(meta_info=info))
    decoded = decode(bytes(encoded.header), [])
    assert decoded == DataProto(meta_info=info)
    decoded.meta_info["t"].add_(1)
    assert info["t"].sum() == 4


class Subclass(str):
    pass


@pytest.mark.parametrize("value", [object(), {1, 2}, Decimal(1), Subclass("x"), len, SimpleNamespace(), np.void(b"ab")])
def test_a_value_that_cannot_be_encoded_raises_with_its_name(value: object) -> None:
    with pytest.raises(CodecError, match="column 'answer': "):
        encode(DataProto.from_dict(non_tensors={"answer": [1, [value]]}))
    with pytest.raises(CodecError, match="meta_info 'extra': "):
        encode(DataProto(meta_info={"extra": {"deep": value}}))


def test_columns_that_cannot_be_encoded_are_named() -> None:
    for array in (np.ma.masked_array([1.0]), np.zeros(1, dtype="i4,f8"), np.zeros(1, dtype=np.longdouble)):
        with pytest.raises(CodecError, match=r"column 'a': .* cannot be encoded"):
            encode(DataProto(non_tensor_batch={"a": array}))
    with pytest.raises(CodecError, match=r"column 'x': a torch\.sparse_coo tensor"):
        encode(DataProto.from_dict(tensors={"x": torch.eye(2).to_sparse()}))
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(CodecError, match="nested more than"):
        encode(DataProto(meta_info={"circle": circle}))
    with pytest.raises(CodecError, match="not text"):
        encode(DataProto(non_tensor_batch={"\ud800": np.zeros(1)}))


# ----------------------------------------------------------------------------------------------------------- read-only


def read_only() -> DataProto:
    data = DataProto.from_dict(
        tensors={"x": torch.arange(4.0), "ids": [torch.arange(size) for size in (1, 0, 2, 1)]},
        non_tensors={"n": np.arange(4)},
    )
    encoded = encode(data)
    return decode(encoded.header, [bytes(buffer) for buffer in encoded.buffers])


def test_memory_that_others_read_is_marked() -> None:
    data = read_only()
    assert data.read_only
    assert "read-only" in repr(data)
    for view in (data[1:3], data.select(["ids"]), data.chunk(2)[0]):
        assert view.read_only
    with pytest.raises(ValueError, match="read-only"):
        data.non_tensor_batch["n"][0] = 1
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        column(data).add_(1)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        column(data, "ids").add_(1)


def test_a_small_batch_arrives_writable_by_value() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    arrived = pickle.loads(pickle.dumps(DataProto.from_dict(non_tensors={"n": array}), protocol=5))
    assert not arrived.read_only
    assert arrived.non_tensor_batch["n"].tolist() == [0, 1, 2]


def test_copies_of_it_are_ordinary() -> None:
    for copied in (
        read_only().writable(),
        read_only()[[0, 1]],
        read_only().repeat(2),
        DataProto.concat([read_only()] * 2),
    ):
        assert not copied.read_only
        column(copied).add_(1)
        column(copied, "ids").add_(1)
        copied.non_tensor_batch["n"][0] = 1
    data = read_only().writable()
    assert data.writable() is data
    assert data == read_only()


def test_arithmetic_on_it_is_possible() -> None:
    backoff = column(read_only(), "ids") * 2
    assert values_of(backoff).tolist() == [0, 0, 2, 0]
    weights = torch.ones(4, requires_grad=True)
    (weights * column(read_only().writable())).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_unaligned_buffers_are_copied() -> None:
    encoded = encode(DataProto.from_dict(tensors={"x": torch.arange(3)}, non_tensors={"n": np.arange(3)}))
    shifted = [memoryview(bytearray(b"." + buffer))[1:] for buffer in encoded.buffers]
    decoded = decode(encoded.header, shifted)
    assert decoded == back(encoded)
    assert column(decoded).data_ptr() % 8 == 0
    assert decoded.non_tensor_batch["n"].flags.aligned


# ----------------------------------------------------------------------------------------------------- malformed bytes


def sample() -> Encoded:
    return encode(
        DataProto.from_dict(
            tensors={"x": torch.arange(3), "ids": [torch.arange(size) for size in (1, 0, 2)]},
            non_tensors={"n": np.zeros((3, 2)), "o": [1, (2,), {3: np.zeros(2)}]},
            meta_info={"t": (1, 2), "big": 2**70},
        )
    )


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_header_is_a_codec_error_or_another_batch(draw: st.DataObject) -> None:
    encoded = sample()
    header = bytearray(encoded.header)
    for _ in range(draw.draw(st.integers(1, 3))):
        header[draw.draw(st.integers(0, len(header) - 1))] = draw.draw(st.integers(0, 255))
    if draw.draw(st.booleans()):
        header = header[: draw.draw(st.integers(0, len(header)))]
    try:
        decoded = decode(bytes(header), encoded.buffers)
    except CodecError:
        return
    decoded.check_consistency()
    repr(decoded)


def test_headers_that_claim_more_than_the_buffers_hold_raise() -> None:
    encoded = encode(DataProto.from_dict(tensors={"x": torch.arange(3)}))
    fields = msgspec.msgpack.decode(encoded.header)
    huge = 2**40
    for change, message in (
        ({5: [["x", "int64", [huge], 0, None]]}, "needs 8796093022208 bytes, there are 24"),
        ({5: [["x", "int64", [0, huge, huge, huge], 0, None]]}, "needs 0 bytes"),
        ({5: [["x", "int64", [3], 7, None]]}, "buffer 7 does not exist"),
        ({5: [["x", "int64", [3], 0, 0]]}, "offsets must"),
        ({5: [["x", "object", [3], 0, None]]}, "unknown tensor dtype"),
        ({5: [["x", "int64", [-3], 0, None]]}, "Expected `int` >= 0"),
        ({6: [["n", "O", [3], 0, None]]}, "unknown array dtype"),
        ({6: [["n", "object", [huge], None, []]]}, "cannot reshape"),
        ({6: [["n", "<U999999999", [huge], 0, None]]}, "no array of"),
        ({4: [8]}, "1 buffers of 8 bytes"),
        ({1: 4}, "does not have the 4 rows"),
        ({2: False}, "tensors without a batch"),
        ({0: 99}, "version 99"),
        ({7: []}, "meta_info is no dictionary"),
    ):
        changed = [change.get(number, field) for number, field in enumerate(fields)]
        with pytest.raises(CodecError, match=message):
            decode(msgspec.msgpack.encode(changed), encoded.buffers)


@pytest.mark.parametrize(
    ("code", "content"),
    [
        (6, ["<i8", [2**40], 2**43]),
        (8, ["int64", [2**40], 2**43]),
        (8, ["int64", [2**40], b"12345678"]),
        (5, [[2**40], []]),
        (5, [[-1], [1]]),
        (5, [[2], "ab"]),
        (7, ["<U5", b""]),
        (7, [["<U5"], b""]),
        (2, [1, 2]),
        (2, [[[1], 2]]),
        (9, [1, 2]),
        (1, {}),
        (99, []),
    ],
)
def test_values_of_a_wrong_form_raise(code: int, content: object) -> None:
    fields = msgspec.msgpack.decode(encode(DataProto()).header)
    fields[7] = {"v": msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))}
    with pytest.raises(CodecError):
        decode(msgspec.msgpack.encode(fields), [])


def test_bytes_that_are_no_header_raise() -> None:
    deep = b"\x91" * 100_000
    for header in (b"", b"\xc1", b"\xdd\x7f\xff\xff\xff", deep, pickle.dumps("not this"), sys.version.encode()):
        with pytest.raises(CodecError):
            decode(header, [])
