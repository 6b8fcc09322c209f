"""Published weights: the manifest of a version, the fingerprint of its tensors, and the contract of a transport.

A fingerprint is the XXH3-128 of every tensor's name, shape, dtype and XXH3-64 checksum, in publication order: equal for
equal tensors, whatever their version and location. A manifest has all of that, so that its fingerprint costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec
import xxhash

from asyncrl.errors import WeightMismatchError
from asyncrl.plugins import make_part, offered_options

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: ``size_bytes`` bytes at ``offset`` (a multiple of 64) of the published block, and how to read them.

    ``name`` is that in the model's checkpoint, ``shape`` the full (unsharded) one, ``dtype`` torch's name without the
    prefix (``bfloat16``), ``checksum`` the XXH3-64 of the bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size_bytes: int
    checksum: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer computes for some fixed tokens under a version: an engine that serves it gives the same.

    ``log_probs`` are those of the tokens from the second on, at temperature 1. ``tolerance`` is what rounding may
    explain, in nats for each nat of a log-prob (:func:`rounding_error`).
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    tolerance: float


ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "tf32": 2.0**-11, "bfloat16": 2.0**-9}
"""Largest relative error of one rounding, by dtype; ``tf32`` is what a GPU may make of float32 in a product."""


def rounding_error(matrices: int, dtype: str) -> float:
    """Return the standard deviation of the difference of one log-prob between two programs, for each nat of it.

    Each of the two rounds about twice for every matrix of the model, its activations each time by at most ``ROUNDOFF``;
    independent errors add up like a random walk (Higham and Mary 2019, doi:10.1137/18M1226312), and a relative error of
    the logits moves a log-prob by its own size.

    >>> f"{rounding_error(211, 'float32'):.1e} {rounding_error(211, 'bfloat16'):.3f}"  # a model of 30 layers
    '1.7e-06 0.057'
    """
    return ROUNDOFF[dtype] * math.sqrt(2 * 2 * matrices)


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """What the tensors of a manifest are, where they are no weights but low-rank matrices beside some.

        W' = W + (alpha / rank) * B @ A        A: [rank, inputs], B: [outputs, rank]

    for every pair of tensors ``base_model.model.MODULE.lora_A.weight`` and ``...lora_B.weight``: the names in peft's
    files. ``base`` are the weights W beside which they were trained, as they would be published (offsets mean nothing):
    an engine has to have been started with the same. It is empty where they are not known. Requests choose an adapter
    by ``name``; those that name none get the one with the empty name, or the weights alone.
    """

    rank: int
    alpha: float
    name: str = ""
    base: tuple[TensorEntry, ...] = ()


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the weights: small and serialisable, sent from the publisher to the pullers.

    Attributes:
        version: number of the published weights, from 0, increasing.
        transport: entry-point name of the transport that holds the bytes.
        location: where, in the transport's own format.
        tensors: in publication order.
        checked_bytes: of the tensors that serve, which an engine compares with these.
        canary: what the engine has to compute; None if it may compute anything.
        chain: what the version is made of, where that is not one block: a full version, then deltas in order.
        adapter: what the tensors are, if they are an adapter's: the version then changes no other weights.
        beside: the versions of other adapters that serve together with this one.
    """

    version: int
    transport: str
    location: str
    tensors: tuple[TensorEntry, ...]
    checked_bytes: int = 1 << 30
    canary: Canary | None = None
    chain: tuple[WeightManifest, ...] = ()
    adapter: Adapter | None = None
    beside: tuple[WeightManifest, ...] = ()

    @property
    def computed_with(self) -> tuple[TensorEntry, ...]:
        """Return all tensors that an engine computes with under the version: of an adapter, those of its base too."""
        return self.tensors if self.adapter is None else (*self.adapter.base, *self.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.tensors)

    @property
    def digest(self) -> bytes:
        """Return 16 bytes (XXH3-128) that identify the version and every tensor's entry, whatever their location."""
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode((self.version, self.tensors)))

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> WeightManifest:
        """Return the manifest of encoded bytes; raise :class:`WeightMismatchError` if they are none."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise WeightMismatchError(f"{len(data)} bytes are no weight manifest: {error}") from error


def manifest_fingerprint(manifest: WeightManifest) -> str:
    """Return the fingerprint of the tensors that are computed with under a manifest, as 32 hexadecimal digits."""
    return _digest((entry.name, entry.shape, entry.dtype, entry.checksum) for entry in manifest.computed_with)


def joined(parts: Sequence[WeightManifest | None]) -> WeightManifest:
    """Return the manifest of a version from those of the trainer's ranks: rank zero's, with the locations of all.

    Ranks that hold nothing of the version have None.
    """
    first, *others = [part for part in parts if part is not None]
    return msgspec.structs.replace(first, location=" ".join(part.location for part in (first, *others)))


def lacking(manifest: WeightManifest, held: Mapping[str, int]) -> list[WeightManifest]:
    """Return the adapters that serve under a version and are newer than those ``held`` (versions by name)."""
    parts = (*manifest.beside, manifest)
    return [part for part in parts if part.adapter and held.get(part.adapter.name, -1) < part.version]


def dtype_and_checksum(tensor: Tensor) -> tuple[str, int]:
    """Return the dtype and the checksum that the :class:`TensorEntry` of a full tensor has."""
    checksum = xxhash.xxh3_64()
    for chunk in host_chunks(tensor):
        checksum.update(chunk)
    return str(tensor.dtype).removeprefix("torch."), checksum.intdigest()


def host_chunks(tensor: Tensor, *, size_bytes: int = 4 << 20) -> Iterator[memoryview]:
    """Yield the bytes of a full tensor in row-major order, ``size_bytes`` at a time.

    A chunk is valid until the next one is asked for: those of a device come through two buffers of pinned memory, of
    which one is filled while the other is read. Elsewhere they are the tensor's own memory where it is row-major.
    """
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    chunks = plain.split(size_bytes) if len(plain) else ()
    if not plain.is_cuda:
        yield from (chunk.cpu().numpy().data for chunk in chunks)
        return
    stream = torch.cuda.Stream(plain.device)  # beside what the device computes, if that was begun later
    stream.wait_stream(torch.cuda.current_stream(plain.device))
    buffers = [torch.empty(len(chunk), dtype=torch.uint8, pin_memory=True) for chunk in chunks[:2]]
    arriving: list[tuple[Tensor, Any]] = []
    for number in range(len(chunks) + 1):
        if number < len(chunks):
            with torch.cuda.stream(stream):
                buffer = buffers[number % 2][: len(chunks[number])].copy_(chunks[number], non_blocking=True)
            arriving.append((buffer, stream.record_event()))
        if number:
            buffer, arrival = arriving.pop(0)
            arrival.synchronize()
            yield buffer.numpy().data


def entries_of(tensors: Iterable[tuple[str, Tensor]]) -> tuple[TensorEntry, ...]:
    """Return the entries of full tensors that are not published, read one at a time; their offsets are 0."""

    def entry(name: str, tensor: Tensor) -> TensorEntry:
        dtype, checksum = dtype_and_checksum(tensor)
        shape, size_bytes = tuple(tensor.shape), tensor.numel() * tensor.itemsize
        return TensorEntry(name=name, shape=shape, dtype=dtype, offset=0, size_bytes=size_bytes, checksum=checksum)

    return tuple(entry(name, tensor) for name, tensor in tensors)


def _digest(entries: Iterable[tuple[str, tuple[int, ...], str, int]]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(list(entries)))


class WeightTransport(Protocol):
    """Carries one version of the weights from the trainer to the engines.

    The publisher calls :meth:`publish`, sends the manifest to the pullers by other means, and calls :meth:`release`
    when they have left their ``with`` blocks, which may be at the commit of the next version (:class:`ZeroCopyEngine`).
    A puller that still reads a released version is not disturbed.

    >>> from asyncrl.plugins import load_part
    >>> transport = load_part("asyncrl.weight_transports", "shared_memory")(namespace="example")
    >>> manifest = transport.publish([("bias", torch.tensor([1.0, 2.0]))], version=1)
    >>> manifest.version, manifest.tensors[0].name, manifest.tensors[0].size_bytes
    (1, 'bias', 8)
    >>> with transport.pull(manifest) as tensors:
    ...     tensors["bias"].tolist()
    [1.0, 2.0]
    >>> transport.release(1)
    >>> transport.close()
    """

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int) -> WeightManifest:
        """Make the tensors available under ``version``. Versions increase; a bounded number of them is held.

        Raises:
            WeightVersionError: ``version`` is not newer than the last one published.
        """
        ...

    def pull(self, manifest: WeightManifest) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Return verified tensors by name, valid inside the ``with`` block, without a copy if the transport allows it.

        Raises:
            WeightMismatchError: bytes differ from the manifest's checksum, or tensors are missing.
            WeightError: the version is not available any more.
        """
        ...

    def release(self, version: int) -> None:
        """Free the memory of ``version``. Idempotent."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...


@runtime_checkable
class DeltaTransport(WeightTransport, Protocol):
    """Optional capability: publish what a version changes, where that is little. It takes the option ``delta``."""

    def rebase(self) -> None:
        """Publish the next version as a full one: a reader could not use the last."""


@runtime_checkable
class AnnouncingTransport(WeightTransport, Protocol):
    """Optional capability: pools that belong to no run find its newest version (``asyncrl serve --follow``).

    It takes the option ``kept_versions``: with 0 nothing is announced, otherwise as many released versions stay.
    """

    def announce(self, manifest: WeightManifest) -> None:
        """Name a version that was published here as the newest one. It stays at least until another one is named.

        Called from any thread, once at a time. What fails is logged; the next version is named later.
        """

    def announced(self) -> WeightManifest | None:
        """Return the version that was named last, by whatever publisher, for :meth:`pull`; None if there is none.

        Raises:
            WeightError: it cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSpec:
    """How both sides, publisher and pullers, make a transport. Picklable.

    ``namespace`` separates this run's weights from those of other runs; ``options`` are from ``[weights.options]``.
    With ``delta``, a publisher that can do so publishes differences. A transport that takes ``rank`` and ``ranks`` is
    ``divided``: every trainer rank publishes, and holds a part.
    """

    name: Any  # a Part; msgspec, which reads it in an engine's process, has no type for that
    namespace: str
    options: Mapping[str, Any] = field(default_factory=dict)
    delta: bool = False

    @property
    def divided(self) -> bool:
        return bool(self.offered({"rank": 0}))

    def make(self, *, rank: int = 0, ranks: int = 1) -> WeightTransport:
        """Return the transport of a publisher's rank, or of a puller."""
        transport: WeightTransport = make_part(
            _GROUP,
            self.name,
            options={**(self.offered({"delta": True}) if self.delta else {}), **self.options},
            path=_PATH,
            namespace=self.namespace,
            **self.offered({"rank": rank, "ranks": ranks}),
        )
        return transport

    def offered(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the options that the transport takes."""
        return offered_options(_GROUP, self.name, options, path=_PATH)


_GROUP, _PATH = "asyncrl.weight_transports", "weights.transport"
