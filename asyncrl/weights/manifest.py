"""What a published version of the weights consists of: enough to fetch it, and to know that it arrived whole."""

from __future__ import annotations

import math

import msgspec
import xxhash

from asyncrl.errors import WeightMismatchError

__all__ = ["TensorEntry", "WeightManifest"]


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: where its bytes lie in the published block and how to read them.

    Attributes:
        name: parameter name as in the model's checkpoint.
        shape: full (unsharded) shape.
        dtype: torch's name without the prefix (``float32``, ``bfloat16``).
        offset: first byte within the block; a multiple of 64.
        size_bytes: length in bytes.
        checksum: xxh3-64 of the bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size_bytes: int
    checksum: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version of the weights: travels from publisher to pullers, small and serialisable.

    Attributes:
        version: number of the published weights, from 0, growing.
        transport: entry-point name of the transport that holds the bytes.
        location: where, in the transport's own words.
        tensors: every tensor, in publication order.
    """

    version: int
    transport: str
    location: str
    tensors: tuple[TensorEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Payload bytes of all tensors."""
        return sum(entry.size_bytes for entry in self.tensors)

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for the version and every tensor's entry (xxh3-128), not for where they lie."""
        return xxhash.xxh3_128_digest(msgspec.msgpack.encode((self.version, self.tensors)))

    def encode(self) -> bytes:
        """Bytes for the wire; :meth:`decode` reads them."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> WeightManifest:
        """Counterpart of :meth:`encode`.

        Raises:
            WeightMismatchError: these bytes are no manifest.
        """
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise WeightMismatchError(f"{len(data)} bytes are no weight manifest: {error}") from error
