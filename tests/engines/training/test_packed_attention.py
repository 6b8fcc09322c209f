from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines.training import packed_attention as packed
from engines.training.packed_attention import RowLayout, packed_attention

LAYER = cast(Any, SimpleNamespace())
DEVICES = [
    pytest.param("cpu", torch.float64),
    pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def _stream(lengths: list[int], *, heads: int, groups: int, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(len(lengths))
    total = sum(lengths)
    query = torch.randn(1, heads * groups, total, size, generator=draw, dtype=torch.float64)
    key, value = torch.randn(2, 1, heads, total, size, generator=draw, dtype=torch.float64)
    return query, key, value


def _by_hand(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], *, window: int | None, softcap: float | None
) -> Tensor:
    """Token by token, head by head."""
    groups = query.shape[1] // key.shape[1]
    rows: list[Tensor] = []
    start = 0
    for length in lengths:
        for place in range(length):
            first = 0 if window is None else max(0, place - window + 1)
            seen = slice(start + first, start + place + 1)
            heads = []
            for head in range(query.shape[1]):
                scores = key[0, head // groups, seen] @ query[0, head, start + place] / math.sqrt(query.shape[-1])
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                heads.append(scores.softmax(dim=0) @ value[0, head // groups, seen])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)[None]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(1, 2),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 7)),
    st.one_of(st.none(), st.floats(0.5, 3.0)),
)
def test_every_token_attends_to_its_own_row(
    rectangles: list[tuple[int, int]], heads: int, groups: int, window: int | None, softcap: float | None
) -> None:
    lengths = [length for rows, length in rectangles for _ in range(rows)]
    query, key, value = _stream(lengths, heads=heads, groups=groups)
    rows = RowLayout.of(rectangles, device=torch.device("cpu"))
    found, _ = packed_attention(LAYER, query, key, value, asyncrl_rows=rows, sliding_window=window, softcap=softcap)
    expected = _by_hand(query, key, value, lengths, window=window, softcap=softcap)
    assert found.shape == expected.shape
    assert torch.allclose(found, expected, atol=1e-6)  # the soft-capped softmax is float32
    assert rows.windows == [window]


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("window", [None, 3])
def test_gradients_are_those_of_rows_alone(device: str, dtype: torch.dtype, window: int | None) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    rectangles = [(2, 7), (1, 5), (3, 2)]
    lengths = [7, 7, 5, 2, 2, 2]
    leaves = [each.to(device, dtype).requires_grad_() for each in _stream(lengths, heads=2, groups=2, size=16)]
    rows = RowLayout.of(rectangles, device=torch.device(device))
    packed, _ = packed_attention(LAYER, *leaves, asyncrl_rows=rows, sliding_window=window)
    direction = torch.linspace(-1, 1, packed.numel(), device=device, dtype=dtype).view(packed.shape)
    found = torch.autograd.grad((packed * direction).sum(), leaves)

    alone = []
    start = 0
    for length in lengths:
        row = [each[:, :, start : start + length] for each in leaves]
        alone.append(packed_attention(LAYER, row[0], row[1], row[2], sliding_window=window)[0])
        start += length
    apart = torch.cat(alone, dim=1)
    expected = torch.autograd.grad((apart * direction).sum(), leaves)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    assert torch.allclose(packed, apart, atol=tolerance)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=tolerance)


def _kernel_of_torch_2_11(*asked: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
    """One kernel for all rows, which groups no heads."""
    query, key, value, starts = asked[:4]
    assert query.shape == key.shape
    assert window_size[1] == 0  # nothing after the token itself
    window = None if window_size[0] < 0 else window_size[0] + 1
    lengths = starts.diff().tolist()
    streams = [each.transpose(0, 1).unsqueeze(0) for each in (query, key, value)]
    return _by_hand(*streams, lengths, window=window, softcap=None)[0]


def _kernel_of_torch_2_12(*asked: Any, enable_gqa: bool, **options: Any) -> Tensor:
    query, key, value, *rest = asked
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa == (groups > 1)
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    return _kernel_of_torch_2_11(query, key, value, *rest, **options)


@pytest.mark.parametrize("kernel", [_kernel_of_torch_2_11, _kernel_of_torch_2_12])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_kernels_of_several_torch_versions_get_the_arguments_they_support(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, groups: int, window: int | None
) -> None:
    lengths = [7, 7, 5]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(packed, "_varlen_parameters", packed._varlen_parameters.__wrapped__)
    monkeypatch.setattr(packed, "_has_varlen_kernel", lambda *_: True)
    query, key, value = _stream(lengths, heads=2, groups=groups)
    rows = RowLayout.of([(2, 7), (1, 5)], device=torch.device("cpu"))
    found, _ = packed_attention(LAYER, query, key, value, asyncrl_rows=rows, sliding_window=window)
    assert torch.allclose(found, _by_hand(query, key, value, lengths, window=window, softcap=None))


def test_values_of_another_size_than_queries_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_varlen_parameters", lambda: {"window_size"})
    query, value = torch.empty(1, 2, 4, 96, dtype=torch.bfloat16), torch.empty(1, 2, 4, 64, dtype=torch.bfloat16)
    assert packed._has_varlen_kernel(query, query, "cuda")
    assert not packed._has_varlen_kernel(query, value, "cuda")


@pytest.mark.parametrize(
    "asked", [{"attention_mask": torch.ones(1)}, {"s_aux": torch.ones(1)}, {"dropout": 0.1}, {"is_causal": False}]
)
def test_unsupported_arguments_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="packed attention is causal"):
        packed_attention(LAYER, *_stream([3], heads=1, groups=1), **asked)
