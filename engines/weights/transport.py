"""What all weight transports share: versions and their life cycle, the layout of a version's bytes, and their checks.

A version of the weights is one block of bytes:

    0          64            offset of tensor 0 (a multiple of 64)         ...          end (a multiple of 64)
    | header   | bytes, zeros up to the next multiple of 64 | bytes, zeros | ...        |

The header follows from the manifest, so a reader knows every byte of it beforehand. It is written last: a block whose
writer died half-way has none.
"""

from __future__ import annotations

import logging
import os
import re
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Generic, TypeVar

import msgspec
import numpy as np
import torch
import xxhash

from asyncrl.errors import ConfigError, WeightError, WeightMismatchError, WeightVersionError
from asyncrl.weights import TensorEntry, WeightManifest, manifest_fingerprint
from engines.weights.delta import NAME as DELTA
from engines.weights.delta import DeltaEncoder, apply_delta

_log = logging.getLogger(__name__)

ALIGNMENT = 64
HEADER_SIZE_BYTES = 64


@dataclass(frozen=True)
class PlacedTensor:
    name: str
    tensor: torch.Tensor
    offset: int

    @property
    def size_bytes(self) -> int:
        return self.tensor.nbytes

    @cached_property
    def data(self) -> memoryview:
        """The bytes, all of them in the host's memory; :func:`~asyncrl.weights.host_chunks` yields them in pieces."""
        return tensor_bytes(self.name, self.tensor)

    def entry(self, checksum: int) -> TensorEntry:
        return TensorEntry(
            name=self.name,
            shape=tuple(self.tensor.shape),
            dtype=str(self.tensor.dtype).removeprefix("torch."),
            offset=self.offset,
            size_bytes=self.size_bytes,
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
        _check_plain(name, tensor)
        batch.append(PlacedTensor(name, tensor, offset))
        offset = aligned(offset + batch[-1].size_bytes)
        reached += batch[-1].size_bytes
        if reached >= size_bytes:
            yield batch
            batch, reached = [], 0
    yield batch


def tensor_bytes(name: str, tensor: torch.Tensor) -> memoryview:
    """Return the elements of a plain strided tensor in row-major order, without a copy if they lie so in memory."""
    _check_plain(name, tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def _check_plain(name: str, tensor: torch.Tensor) -> None:
    if hasattr(tensor, "full_tensor"):
        raise WeightError(f"{name} is sharded (DTensor); publish full tensors: call full_tensor() on every rank")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        raise WeightError(f"{name} is not a plain tensor with data: {tensor.layout}, {tensor.dtype}, {tensor.device}")


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


# -------------------------------------------------------------------------------------------------------------- deltas

_LONGEST_CHAIN = 64
_LARGEST_SHARE = 0.5
"""Share of the full version that the deltas of a chain may have together: a late reader fetches them all."""


class DeltaChain:
    """The publisher's side: holds the last version, and decides which ones are full."""

    def __init__(self) -> None:
        self._encoder = DeltaEncoder()
        self._links: list[WeightManifest] = []
        self._made_of: dict[int, frozenset[int]] = {}

    def rebase(self) -> None:
        self._links = []

    def needed(self, held: Collection[int]) -> set[int]:
        """Return the versions that those held, and the next one, are made of."""
        self._made_of = {version: links for version, links in self._made_of.items() if version in held}
        return {link.version for link in self._links}.union(*self._made_of.values())

    def publish(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        version: int,
        write: Callable[[Iterable[tuple[str, torch.Tensor]], int], WeightManifest],
    ) -> WeightManifest:
        """Publish through ``write`` what the version changes, or all of it: if that is less, or has to be."""
        links, self._links = self._links, []  # after an error the next version is a full one
        most_bytes = -1.0
        if links and len(links) <= _LONGEST_CHAIN:
            most_bytes = _LARGEST_SHARE * links[0].size_bytes - sum(link.size_bytes for link in links[1:])
        try:
            placed = (part for batch in in_batches(tensors, size_bytes=1) for part in batch)
            found = ((part.entry(0), part.tensor, np.frombuffer(part.data, dtype=np.uint8)) for part in placed)
            entries, delta = self._encoder.take(found, most_bytes=most_bytes)
        except BaseException:
            self._encoder.forget()
            raise
        if delta is None or len(delta) > most_bytes:
            manifest = write(self._encoder.copies.items(), version)
            self._links = [manifest]
        else:
            carried = write([(DELTA, torch.from_numpy(delta))], version)
            self._links = [*links, carried]
            manifest = msgspec.structs.replace(carried, tensors=tuple(entries))
        self._made_of[version] = frozenset(link.version for link in self._links)
        return msgspec.structs.replace(manifest, chain=tuple(self._links))


@dataclass(slots=True, eq=False)
class _Held:
    """The tensors of a version that a reader has; ``fingerprint`` is what they should have."""

    version: int
    fingerprint: str
    tensors: dict[str, torch.Tensor]


class DeltaReader:
    """The reader's side: keeps the tensors of up to two versions, and fetches what is between them and a newer one.

    Two, because an engine may serve from one while the next is made. ``read`` fetches and verifies a link.
    """

    def __init__(self, read: Callable[[WeightManifest], Mapping[str, torch.Tensor]]) -> None:
        self._read = read
        self._idle: list[_Held] = []
        self._lock = threading.Lock()

    @contextmanager
    def read(self, manifest: WeightManifest) -> Iterator[dict[str, torch.Tensor]]:
        """Make the version of what is held, or of its full version if that fails."""
        base, *_ = manifest.chain
        with self._lock:
            usable = [each for each in self._idle if base.version <= each.version < manifest.version]
            held = max(usable, key=lambda each: each.version, default=None)
            if held is not None:
                self._idle.remove(held)
        if held is not None:
            try:
                self._advance(held, manifest)
            except WeightMismatchError as error:
                _log.warning("version %d is fetched from its full version: %s", manifest.version, error)
                held = None
            except BaseException:
                self._keep(held)  # a link could not be fetched: what was reached is whole
                raise
        if held is None:
            held = _Held(base.version, manifest_fingerprint(base), dict(self._read(base)))
            try:
                self._advance(held, manifest)
            except WeightMismatchError:
                raise
            except BaseException:
                self._keep(held)
                raise
        try:
            yield held.tensors
        finally:
            self._keep(held)

    def _keep(self, held: _Held) -> None:
        with self._lock:
            self._idle = [*self._idle, held][-2:]

    def _advance(self, held: _Held, manifest: WeightManifest) -> None:
        for link in manifest.chain[1:]:
            if link.version > held.version:
                delta = self._read(link).get(DELTA)
                if delta is None:
                    raise WeightMismatchError(f"version {link.version} in the chain of {manifest.version} is no delta")
                held.fingerprint = apply_delta(delta.numpy(), held.tensors, base=held.fingerprint, manifest=manifest)
                held.version = link.version

        def is_right(entry: TensorEntry) -> bool:
            data = held.tensors[entry.name].reshape(-1).view(torch.uint8).numpy().data
            return len(data) == entry.size_bytes and xxhash.xxh3_64_intdigest(data) == entry.checksum

        if held.tensors.keys() != {entry.name for entry in manifest.tensors}:
            raise WeightMismatchError(f"the chain of version {manifest.version} begins with other tensors")
        check_tensors(manifest.tensors, is_right, manifest=manifest)


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


_REMOVING_S = 30.0


class Removals:
    """Removes what was released, one after another. Nothing waits for that: neither a publication nor the process."""

    def __init__(self) -> None:
        self._due: deque[Callable[[], object]] = deque()  # the first one is under way
        self._running = False
        self._lock = threading.Lock()

    def add(self, remove: Callable[[], object]) -> None:
        with self._lock:
            self._due.append(remove)
            if self._running:
                return
            try:
                threading.Thread(target=self._run, name="removing released weights", daemon=True).start()
                self._running = True
            except RuntimeError as error:  # no thread can be started
                _log.warning("released weights stay for now: %s", error)

    def _run(self) -> None:
        more = True
        while more:
            try:
                self._due[0]()
            except FileNotFoundError:  # the publisher has ended, and removes everything
                pass
            except Exception as error:  # noqa: BLE001 - whatever it is, the next version can be removed
                _log.warning("released weights stay: %s", error)
            with self._lock:
                self._due.popleft()
                more = self._running = bool(self._due)


def remove_in_time(remove: Callable[[], object], *, what: str) -> None:
    """Remove what a publisher leaves. What takes longer than 30 s is left to a thread that ends with the process."""
    thread = threading.Thread(target=remove, name=f"removing {what}", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # at the end of an interpreter no thread can be started
        remove()
        return
    thread.join(_REMOVING_S)
    if thread.is_alive():
        _log.warning("%s may stay: it was not removed in %g s", what, _REMOVING_S)


class VersionedTransport(Generic[PlaceT]):
    """Base of the transports: versions grow, at most ``max_versions`` are held, and publications are serialised.

    A derived class writes, reads and frees versions, and declares ``name`` (its entry point) and ``medium``. ``PlaceT``
    is what it needs to free a version. Calls block. ``namespace`` is the run's name: letters, digits, ``_``, ``.`` and
    ``-``. ``location`` is the pattern of the locations that manifests of this namespace have.
    """

    name: ClassVar[str]
    medium: ClassVar[str]

    def __init__(self, *, namespace: str, max_versions: int, location: str, delta: bool = False) -> None:
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
        self._chain = DeltaChain() if delta else None
        self._released: set[int] = set()
        """Versions that are held as links of newer ones alone."""
        self._readers = DeltaReader(self._read)

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(self._held)

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int) -> WeightManifest:
        """Write the tensors as they come. If that fails, nothing is published, and the version can be tried again."""
        with self._lock:
            self._check(version)
            if self._chain is None:
                manifest, self._held[version] = self._write(tensors, version)
            else:
                manifest = self._chain.publish(tensors, version, self._write_held)
                self._free_unneeded()
            self._last = version
            return manifest

    def rebase(self) -> None:
        """Publish the next version as a full one; without deltas every one is."""
        if self._chain is not None:
            self._chain.rebase()

    def _write_held(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightManifest:
        manifest, self._held[version] = self._write(tensors, version)
        return manifest

    def _free_unneeded(self) -> None:
        """Free released versions that no version which is held, or comes next, is made of."""
        needed = set() if self._chain is None else self._chain.needed(set(self._held) - self._released)
        for version in sorted(self._released - needed):
            self._released.discard(version)
            if (place := self._held.pop(version, None)) is not None:
                self._free(version, place)

    def _check(self, version: int) -> None:
        """Raise :class:`WeightVersionError` or :class:`WeightError` unless ``version`` may be published now."""
        if self._closed:
            raise WeightError(f"version {version} cannot be published: the transport is closed")
        if version <= self._last:
            raise WeightVersionError(f"versions only grow: {version} cannot be published after {self._last}")
        held = [each for each in self._held if each not in self._released]
        if len(held) >= self.max_versions:
            raise WeightError(
                f"version {version} cannot be published: {self.max_versions} versions are held "
                f"({', '.join(map(str, held))}); release one first"
            )

    @contextmanager
    def pull(self, manifest: WeightManifest) -> Iterator[Mapping[str, torch.Tensor]]:
        if not manifest.chain:
            yield MappingProxyType(self._read(manifest))
            return
        for link in manifest.chain:
            self._located(link)
        check_layout(manifest)
        with self._readers.read(manifest) as tensors:
            yield MappingProxyType(tensors)

    def release(self, version: int) -> None:
        """Free a version once none that is held is made of it. Waits for no removal that may take long."""
        with self._lock:
            self._let_go(version)
            self._free_unneeded()

    def _let_go(self, version: int) -> None:
        if version in self._held:
            self._released.add(version)

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
        """Free what no version is made of. Called under the lock: what may take long is left to :class:`Removals`."""
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
