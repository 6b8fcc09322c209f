"""What all weight transports share: versions and their life cycle, the layout of a version's bytes, and their checks.

A version of the weights is one block of bytes:

    0          64            offset of tensor 0 (a multiple of 64)         ...          end (a multiple of 64)
    | header   | bytes, zeros up to the next multiple of 64 | bytes, zeros | ...        |

The header follows from the manifest, so a reader knows every byte of it beforehand. It is written last: a block whose
writer died half-way has none.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Generic, TypeVar

import torch
import xxhash

from asyncrl.errors import ConfigError, WeightError, WeightMismatchError, WeightVersionError
from asyncrl.weights import TensorEntry, WeightManifest

ALIGNMENT = 64
HEADER_SIZE_BYTES = 64


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    name: str
    tensor: torch.Tensor
    offset: int
    data: memoryview

    def entry(self, checksum: int) -> TensorEntry:
        return TensorEntry(
            name=self.name,
            shape=tuple(self.tensor.shape),
            dtype=str(self.tensor.dtype).removeprefix("torch."),
            offset=self.offset,
            size_bytes=len(self.data),
            checksum=checksum,
        )


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def in_batches(tensors: Iterable[tuple[str, torch.Tensor]], *, size_bytes: int) -> Iterator[list[PlacedTensor]]:
    """Yield the tensors at successive offsets, in batches of at least ``size_bytes`` (the last one may be smaller)."""
    batch: list[PlacedTensor] = []
    reached = 0
    names: set[str] = set()
    offset = HEADER_SIZE_BYTES
    for name, tensor in tensors:
        if name in names:
            raise WeightError(f"tensor {name} was published twice in one version")
        names.add(name)
        data = tensor_bytes(name, tensor)
        batch.append(PlacedTensor(name, tensor, offset, data))
        offset = aligned(offset + len(data))
        reached += len(data)
        if reached >= size_bytes:
            yield batch
            batch, reached = [], 0
    yield batch


def tensor_bytes(name: str, tensor: torch.Tensor) -> memoryview:
    """Return the elements of a plain strided tensor in row-major order, without a copy if they lie so in memory."""
    if hasattr(tensor, "full_tensor"):
        raise WeightError(f"{name} is sharded (DTensor); publish full tensors: call full_tensor() on every rank")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        raise WeightError(f"{name} is not a plain tensor with data: {tensor.layout}, {tensor.dtype}, {tensor.device}")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


DTYPES: Mapping[str, torch.dtype] = {
    name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)
}

# xxh3, copies and page faults run without the interpreter lock; beyond four threads the memory is the limit.
_THREADS = min(4, os.cpu_count() or 1)
_THREADS_PAY_FROM_BYTES = 16 << 20
_CHUNK_SIZE_BYTES = 1 << 20  # stays in the second-level cache between copy and checksum


def check_layout(manifest: WeightManifest) -> None:
    """Check that a manifest's dtypes and shapes fill their bytes, and that neither places nor names occur twice."""
    names: set[str] = set()
    end = HEADER_SIZE_BYTES
    for entry in manifest.tensors:
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise WeightMismatchError(f"{entry.name} has the unknown dtype {entry.dtype!r}")
        if any(size < 0 for size in entry.shape) or entry.numel * dtype.itemsize != entry.size_bytes:
            raise WeightMismatchError(
                f"{entry.name}: shape {entry.shape} of {entry.dtype} does not fill {entry.size_bytes} bytes"
            )
        if entry.offset % ALIGNMENT or entry.offset < end:
            raise WeightMismatchError(f"{entry.name} begins at byte {entry.offset}; expected a multiple of 64 >= {end}")
        if entry.name in names:
            raise WeightMismatchError(f"{entry.name} is in the manifest twice")
        names.add(entry.name)
        end = entry.offset + entry.size_bytes


def check_tensors(
    entries: Sequence[TensorEntry], is_right: Callable[[TensorEntry], bool], *, manifest: WeightManifest
) -> None:
    """Raise :class:`WeightMismatchError` unless ``is_right`` for all entries; use threads where that is faster."""
    rest = iter(entries)  # each thread takes one tensor at a time: the largest may be half of the model

    def find_wrong() -> list[str]:
        return [entry.name for entry in rest if not is_right(entry)]

    if _THREADS == 1 or sum(entry.size_bytes for entry in entries) < _THREADS_PAY_FROM_BYTES:
        wrong = set(find_wrong())
    else:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify-weights") as threads:
            found = [threads.submit(find_wrong) for _ in range(_THREADS)]
        wrong = {name for each in found for name in each.result()}
    damaged = [entry.name for entry in entries if entry.name in wrong]
    if damaged:
        raise WeightMismatchError(
            f"version {manifest.version}: {len(damaged)} of {len(manifest.tensors)} tensors differ from their "
            f"checksum ({', '.join(damaged[:3])}{', ...' if len(damaged) > 3 else ''}); publish the version again"
        )


def checked_copy(data: memoryview, entry: TensorEntry) -> torch.Tensor | None:
    """Copy the bytes of a tensor and check them as they are copied; return None if they are not the entry's."""
    if len(data) != entry.size_bytes:
        return None
    copy = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    if entry.size_bytes == 0:
        return copy
    target = copy.reshape(-1).view(torch.uint8)
    checksum = xxhash.xxh3_64()
    for start in range(0, len(data), _CHUNK_SIZE_BYTES):
        chunk = data[start : start + _CHUNK_SIZE_BYTES]
        target.numpy()[start : start + len(chunk)] = chunk
        checksum.update(chunk)
    return copy if checksum.intdigest() == entry.checksum else None


_HEADER = struct.Struct("<8sIIQQ16s")  # magic, format, tensors, version, size of the block, digest of the manifest
_MAGIC = b"asyncrlW"
_FORMAT = 1


def block_size(manifest: WeightManifest) -> int:
    if not manifest.tensors:
        return HEADER_SIZE_BYTES
    last = manifest.tensors[-1]
    return aligned(last.offset + last.size_bytes)


def header(manifest: WeightManifest) -> bytes:
    fields = _HEADER.pack(
        _MAGIC, _FORMAT, len(manifest.tensors), manifest.version, block_size(manifest), manifest.digest
    )
    return fields.ljust(HEADER_SIZE_BYTES, b"\0")


def verify(block: memoryview, manifest: WeightManifest) -> None:
    check_layout(manifest)
    if len(block) != block_size(manifest):
        raise WeightMismatchError(
            f"version {manifest.version}: the block has {len(block)} bytes, its manifest says {block_size(manifest)}"
        )
    if block[:HEADER_SIZE_BYTES] != header(manifest):
        raise WeightMismatchError(
            f"version {manifest.version}: the block at {manifest.location} is incomplete, or not the manifest's"
        )
    end = HEADER_SIZE_BYTES
    for entry in manifest.tensors:
        _check_zeros(block[end : entry.offset], before=entry.name)
        end = entry.offset + entry.size_bytes
    _check_zeros(block[end:], before="the end")

    def is_right(entry: TensorEntry) -> bool:
        return xxhash.xxh3_64_intdigest(block[entry.offset : entry.offset + entry.size_bytes]) == entry.checksum

    check_tensors(manifest.tensors, is_right, manifest=manifest)


def tensor_views(block: memoryview, manifest: WeightManifest) -> tuple[dict[str, torch.Tensor], list[memoryview]]:
    """Return tensors over the bytes of a verified block, and the slices of it that they keep alive."""
    tensors: dict[str, torch.Tensor] = {}
    slices: list[memoryview] = []
    for entry in manifest.tensors:
        dtype = DTYPES[entry.dtype]
        if entry.size_bytes == 0:
            tensors[entry.name] = torch.empty(entry.shape, dtype=dtype)
            continue
        part = block[entry.offset : entry.offset + entry.size_bytes]
        slices.append(part)
        tensors[entry.name] = torch.frombuffer(part, dtype=dtype).reshape(entry.shape)
    return tensors, slices


def _check_zeros(gap: memoryview, *, before: str) -> None:
    if len(gap) >= ALIGNMENT or any(gap):
        raise WeightMismatchError(f"the {len(gap)} bytes before {before} must be padding")


PlaceT = TypeVar("PlaceT")
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,100}")


def existing_folder(directory: str | Path, *, remedy: str) -> Path:
    """Return the path of ``weights.options.directory``; raise :class:`ConfigError` if there is no such folder."""
    path = Path(directory)
    if not path.is_dir():
        raise ConfigError(
            f"directory = {str(path)!r}: no such folder on this machine",
            path="weights.options.directory",
            remedy=remedy,
        )
    return path


class VersionedTransport(Generic[PlaceT]):
    """Base of the transports: versions grow, at most ``max_versions`` are held, and publications are serialised.

    A derived class writes, reads and frees versions, and declares ``name`` (its entry point) and ``medium``. ``PlaceT``
    is what it needs to free a version. Calls block. ``namespace`` is the run's name: letters, digits, ``_``, ``.`` and
    ``-``. ``location`` is the pattern of the locations that manifests of this namespace have.
    """

    name: ClassVar[str]
    medium: ClassVar[str]

    def __init__(self, *, namespace: str, max_versions: int, location: str) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise ValueError(f"a namespace is 1..100 letters, digits, '_', '.' or '-', got {namespace!r}")
        if max_versions < 1:
            raise ValueError(f"max_versions must be at least 1, got {max_versions}")
        self.namespace = namespace
        self.max_versions = max_versions
        self._held: dict[int, PlaceT] = {}
        """The place of each version's bytes, oldest first."""
        self._last = -1
        self._closed = False
        self._location = re.compile(location)
        self._lock = threading.Lock()

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(self._held)

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int) -> WeightManifest:
        """Write the tensors as they come. If that fails, nothing is published, and the version can be tried again."""
        with self._lock:
            self._check(version)
            manifest, self._held[version] = self._write(tensors, version)
            self._last = version
            return manifest

    def _check(self, version: int) -> None:
        """Raise :class:`WeightVersionError` or :class:`WeightError` unless ``version`` may be published now."""
        if self._closed:
            raise WeightError(f"version {version} cannot be published: the transport is closed")
        if version <= self._last:
            raise WeightVersionError(f"versions only grow: {version} cannot be published after {self._last}")
        if len(self._held) >= self.max_versions:
            raise WeightError(
                f"version {version} cannot be published: {self.max_versions} versions are held "
                f"({', '.join(map(str, self._held))}); release one first"
            )

    @contextmanager
    def pull(self, manifest: WeightManifest) -> Iterator[Mapping[str, torch.Tensor]]:
        yield MappingProxyType(self._read(manifest))

    def release(self, version: int) -> None:
        with self._lock:
            place = self._held.pop(version, None)
            if place is not None:
                self._free(version, place)

    def close(self) -> None:
        """Free everything; also done when the interpreter exits."""
        with self._lock:
            self._close()
            self._held.clear()
            self._closed = True

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[WeightManifest, PlaceT]:
        raise NotImplementedError

    def _read(self, manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
        raise NotImplementedError

    def _free(self, version: int, place: PlaceT) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _manifest(self, version: int, location: str, entries: Iterable[TensorEntry]) -> WeightManifest:
        return WeightManifest(version=version, transport=self.name, location=location, tensors=tuple(entries))

    def _located(self, manifest: WeightManifest) -> re.Match[str]:
        """Match the manifest's location; raise :class:`WeightError` if this transport does not have the version."""
        found = self._location.fullmatch(manifest.location)
        if manifest.transport != self.name or found is None:
            raise WeightError(
                f"version {manifest.version} lies at {manifest.transport}:{manifest.location}, not {self.medium} of "
                f"namespace {self.namespace!r}"
            )
        return found
