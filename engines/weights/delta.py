"""Bit-exact differences between two versions of the weights, for transports whose bytes travel.

After a step of reinforcement learning in bfloat16 about two weights in a hundred have changed, nearly always to the
next number above or below. A delta has the places that changed and what was added to their bits:

    per tensor   gaps between the places, a byte each; 255 and more in four bytes, apart
                 two bits for each place: +1, -1, or a difference of one byte or of the whole width, apart

Versions form a chain: a full one, then deltas, each to the version before. A delta names both by fingerprint, so a
foreign one or one out of order is refused before it is applied; the tensors of the result are verified like those of a
full version. Transports carry a delta as a tensor of bytes, with a manifest of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from asyncrl.errors import WeightMismatchError
from asyncrl.weights import TensorEntry, WeightManifest, manifest_fingerprint

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[Any]  # of the width of an element

NAME = "delta"
"""Name of the tensor of bytes that is a delta."""

_WIDE_GAP = 255
_PIECE_BYTES = 4 << 20
_THREADS = 2


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """What changed in elements ``start...`` of tensor number ``tensor``: the lengths of the arrays that follow."""

    tensor: int
    start: int
    places: int
    wide_gaps: int
    small: int
    wide: int


class _Index(msgspec.Struct, frozen=True, kw_only=True):
    """The head of a delta. Fingerprints are those of :func:`asyncrl.weights.manifest_fingerprint`."""

    base: str
    result: str
    parts: list[_Part]


def _width(entry: TensorEntry) -> int:
    """Return the bytes of an element; 1 where integers of its width do not exist."""
    width = entry.size_bytes // entry.numel if entry.numel else 1
    return width if width in (1, 2, 4, 8) else 1


def _integers(data: Bytes, width: int) -> Integers:
    return data.view(f"i{width}")


def _changes(old: Integers, new: Integers) -> tuple[Integers, Integers]:
    """Return the places at which they differ and what was added there, and make ``old`` equal to ``new``.

    Eight bytes are compared at a time; of those that differ, the elements.
    """
    per_word = 8 // old.itemsize
    shift = per_word.bit_length() - 1
    whole = len(old) // per_word * per_word
    before, after = old[:whole].view(np.int64), new[:whole].view(np.int64)
    words = np.flatnonzero(before != after)
    fresh = after.take(words)
    added = fresh.view(old.dtype) - before.take(words).view(old.dtype)  # wraps around
    before[words] = fresh
    changed = np.flatnonzero(added)
    places = (words.take(changed >> shift) << shift) + (changed & (per_word - 1))
    rest = new[whole:] - old[whole:]
    old[whole:] = new[whole:]
    last = np.flatnonzero(rest)
    return np.concatenate([places, whole + last]), np.concatenate([added.take(changed), rest[last]])


_Encoded: TypeAlias = tuple[_Part, list[Bytes]]


def _encode(tensor: int, start: int, old: Integers, new: Integers) -> _Encoded | None:
    """Encode what differs, and make ``old`` equal to ``new``."""
    places, added = _changes(old, new)
    if not len(places):
        return None
    gaps = np.diff(places, prepend=-1) - 1
    wide_gaps = gaps.take(np.flatnonzero(gaps >= _WIDE_GAP)).astype(np.uint32)
    is_less = added == -1
    others = (added != 1) & ~is_less
    at = np.flatnonzero(others)
    rest = added.take(at)
    is_wide = (rest < -128) | (rest > 127)
    is_less[at[is_wide]] = True
    small, wide = rest[~is_wide].astype(np.int8), rest[is_wide]
    arrays = [
        np.minimum(gaps, _WIDE_GAP).astype(np.uint8),
        wide_gaps.view(np.uint8),
        np.packbits(is_less),
        np.packbits(others),
        small.view(np.uint8),
        wide.view(np.uint8),
    ]
    return _Part(tensor, start, len(places), len(wide_gaps), len(small), len(wide)), arrays


def _replace(tensor: int, start: int, old: Integers, new: Integers) -> None:
    old[:] = new


def _lengths(part: _Part, width: int) -> list[int]:
    bits = -(-part.places // 8)
    return [part.places, 4 * part.wide_gaps, bits, bits, part.small, width * part.wide]


def _apply(part: _Part, arrays: Sequence[Bytes], elements: Integers) -> None:
    gaps, wide_gaps, high, low, small, wide = arrays
    steps = gaps.astype(np.int64)
    steps[gaps == _WIDE_GAP] = wide_gaps.view(np.uint32)
    places = np.cumsum(steps + 1) - 1
    second = np.unpackbits(high, count=part.places).view(bool)
    others = np.unpackbits(low, count=part.places).view(bool)
    added = 1 - 2 * second.astype(elements.dtype)
    added[others & ~second] = small.view(np.int8)
    added[others & second] = wide.view(elements.dtype)
    elements[places] += added


class DeltaEncoder:
    """Holds the bytes of the last version, and encodes what the next one changes."""

    def __init__(self) -> None:
        self.copies: dict[str, torch.Tensor] = {}
        self._entries: tuple[TensorEntry, ...] = ()

    def forget(self) -> None:
        """Hold no version: the next one is a full one."""
        self.copies, self._entries = {}, ()

    def take(
        self, tensors: Iterable[tuple[TensorEntry, torch.Tensor, Bytes]], *, most_bytes: float
    ) -> tuple[list[TensorEntry], Bytes | None]:
        """Hold the next version; return its entries, and the delta to it, None if it has other tensors or more bytes.

        What changes is encoded up to ``most_bytes`` (negative: nothing); behind them tensors are only copied. The
        entries come without checksums, which are computed on the way.
        """
        entries: list[TensorEntry] = []
        encoded: list[_Encoded] = []
        waiting: deque[tuple[TensorEntry, Future[int], list[Future[_Encoded | None]]]] = deque()
        before = {(entry.name, entry.shape, entry.dtype) for entry in self._entries}
        known, size_bytes = True, 0

        def finish(most: int) -> None:
            nonlocal size_bytes
            while len(waiting) > most:
                entry, checksum, pieces = waiting.popleft()
                entries.append(msgspec.structs.replace(entry, checksum=checksum.result()))
                for piece in pieces:
                    if (found := piece.result()) is not None:
                        size_bytes += sum(map(len, found[1]))
                        encoded.append(found)
                    if size_bytes > most_bytes:
                        encoded.clear()

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="encode-weights") as threads:
            for number, (entry, tensor, data) in enumerate(tensors):
                pieces: list[Future[_Encoded | None]] = []
                if (entry.name, entry.shape, entry.dtype) in before:
                    width = _width(entry)
                    old = _integers(self.copies[entry.name].reshape(-1).view(torch.uint8).numpy(), width)
                    new, step = _integers(data, width), _PIECE_BYTES // width
                    change = _encode if size_bytes <= most_bytes else _replace
                    pieces = [
                        threads.submit(change, number, start, old[start : start + step], new[start : start + step])
                        for start in range(0, len(old), step)
                    ]
                else:
                    known = False
                    self.copies[entry.name] = tensor.detach().cpu().contiguous().clone()
                waiting.append((entry, threads.submit(xxhash.xxh3_64_intdigest, data.data), pieces))
                finish(2 * _THREADS)
            finish(0)
        same = known and len(entries) == len(self._entries) and size_bytes <= most_bytes
        self.copies = {entry.name: self.copies[entry.name] for entry in entries}
        base, self._entries = self._entries, tuple(entries)
        return entries, _joined(base, entries, encoded) if same else None


def _joined(base: Sequence[TensorEntry], result: Sequence[TensorEntry], encoded: Sequence[_Encoded]) -> Bytes:
    index = _Index(base=_fingerprint(base), result=_fingerprint(result), parts=[part for part, _ in encoded])
    head = msgspec.msgpack.encode(index)
    size = np.frombuffer(len(head).to_bytes(8, "little"), dtype=np.uint8)
    return np.concatenate(
        [size, np.frombuffer(head, dtype=np.uint8), *(array for _, arrays in encoded for array in arrays)]
    )


def _fingerprint(entries: Sequence[TensorEntry]) -> str:
    return manifest_fingerprint(WeightManifest(version=0, transport="", location="", tensors=tuple(entries)))


def apply_delta(delta: Bytes, tensors: dict[str, torch.Tensor], *, base: str, manifest: WeightManifest) -> str:
    """Change tensors whose fingerprint is ``base`` in place; return the fingerprint that they should have then.

    ``manifest`` has their names, shapes and dtypes. Only the head is checked: verify the result. After an error the
    tensors are of no version.

    Raises:
        WeightMismatchError: it is the delta to another version than ``base``, or no delta to such tensors.
    """
    try:
        return _apply_all(delta, tensors, base, manifest.tensors)
    except (ValueError, IndexError, OverflowError, msgspec.MsgspecError) as error:
        raise WeightMismatchError(f"{len(delta)} bytes are no delta of these weights: {error}") from error


def _apply_all(delta: Bytes, tensors: Mapping[str, torch.Tensor], base: str, entries: Sequence[TensorEntry]) -> str:
    at = 8 + int.from_bytes(delta[:8].tobytes(), "little")
    index = msgspec.msgpack.decode(delta[8:at].tobytes(), type=_Index)
    if index.base != base:
        raise WeightMismatchError(
            f"a delta to weights {index.result} begins at weights {index.base}, and {base} are held: it is of another "
            "run, or out of order"
        )
    jobs = []
    for part in index.parts:
        entry = entries[part.tensor]
        width = _width(entry)
        arrays = []
        for length in _lengths(part, width):
            arrays.append(delta[at : at + length])
            at += length
        elements = _integers(tensors[entry.name].reshape(-1).view(torch.uint8).numpy(), width)[part.start :]
        jobs.append((part, arrays, elements))
    if at != len(delta):
        raise ValueError(f"their index says {at}")
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="apply-delta") as threads:
        list(threads.map(lambda job: _apply(*job), jobs))
    return index.result
