"""Messages between an engine's process and the driver that uses it: frames of msgpack over a Unix socket, no pickle.

    frame = 4 bytes big-endian length | message
    driver: Hello, then calls, each with its own number, in any order and any number at a time
    engine: Welcome or Failed once, then for each call one Answer or one Failed; before the end of Generate, chunks

Weights do not pass here: Prepare carries the manifest, and the engine pulls the bytes through its own transport.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any, TypeAlias

import msgspec

import asyncrl.errors as error_tree
from asyncrl.errors import AsyncRLError, CodecError, EngineError
from asyncrl.interfaces import (
    FinishReason,
    GenerationRequest,
    KVCachePolicy,
    RolloutEngineStatistics,
    TopLogProbs,
)
from asyncrl.weights import TransportSpec, WeightManifest

PROTOCOL = 8
MAX_FRAME_BYTES = 32 << 20  # a prompt of a million tokens takes five of them, a manifest of 10,000 tensors one
_LENGTH = struct.Struct(">I")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    model_path: str
    options: dict[str, Any] = {}
    transport: TransportSpec | None = None


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Subclasses are encoded as an array that begins with their name."""


class _Numbered(_Message, frozen=True):
    call: int


class Hello(_Message, frozen=True):
    """The driver's first message: which engine to host."""

    protocol: int
    launch: Launch


class Cancel(_Numbered, frozen=True):
    """Stop this call, which gets no answer."""


class Generate(_Numbered, frozen=True):
    request: GenerationRequest


class Abort(_Numbered, frozen=True):
    request_id: str


class Pause(_Numbered, frozen=True):
    pass


class Resume(_Numbered, frozen=True):
    pass


class Sleep(_Numbered, frozen=True):
    pass


class Wake(_Numbered, frozen=True):
    pass


class Prepare(_Numbered, frozen=True):
    manifest: WeightManifest


class Commit(_Numbered, frozen=True):
    version: int
    kv_cache: KVCachePolicy


class Health(_Numbered, frozen=True):
    deadline_s: float


Order: TypeAlias = Abort | Pause | Resume | Sleep | Wake | Prepare | Commit | Health
Call: TypeAlias = Generate | Order
DriverMessage: TypeAlias = Hello | Cancel | Call


class Welcome(_Message, frozen=True):
    protocol: int
    statistics: RolloutEngineStatistics


class Chunk(_Numbered, frozen=True):
    """Tokens of a Generate call. The chunk with a finish reason ends the call, and carries statistics."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    statistics: RolloutEngineStatistics | None = None
    top_log_probs: tuple[TopLogProbs, ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top_log_probs: tuple[TopLogProbs, ...] = ()


class Answer(_Numbered, frozen=True):
    """The call is done. ``value`` is JSON-like; its meaning depends on the call."""

    statistics: RolloutEngineStatistics
    value: Any = None


class Failed(_Numbered, frozen=True):
    """The call raised an error of class ``kind``; ``call`` is -1 for the Hello."""

    kind: str
    message: str

    def error(self) -> AsyncRLError:
        """Return the error; an EngineError where ``kind`` is not in :mod:`asyncrl.errors`."""
        kind = getattr(error_tree, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, AsyncRLError):
            return kind(self.message)
        return EngineError(f"{self.kind}: {self.message}")


EngineMessage: TypeAlias = Welcome | Chunk | Answer | Failed


class Frames:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, receives: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()

    async def receive(self) -> Any:
        """Return the next message; None when the other end is closed.

        Raises:
            CodecError: the bytes are no message, or too many. Nothing can be read after this.
        """
        try:
            (size_bytes,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if size_bytes > MAX_FRAME_BYTES:
                raise CodecError(f"a frame of {size_bytes} bytes was announced; {MAX_FRAME_BYTES} are allowed")
            return self._decoder.decode(await self._reader.readexactly(size_bytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except (msgspec.MsgspecError, ValueError) as error:
            raise CodecError(f"a frame is no message of the engine protocol: {error}") from error

    def send(self, message: DriverMessage | EngineMessage) -> None:
        """Queue a message; drop it when the other end is closed.

        Raises:
            CodecError: it is larger than the other end accepts.
        """
        data = self._encoder.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise CodecError(f"a message of {len(data)} bytes cannot be sent; {MAX_FRAME_BYTES} are allowed")
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def drain(self) -> None:
        try:
            await self._writer.drain()
        except ConnectionError:
            return  # receive() returns None then

    async def close(self) -> None:
        """Hang up when the other end has taken what is queued."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return

    def abort(self) -> None:
        """Hang up at once, without what is queued."""
        self._writer.transport.abort()
