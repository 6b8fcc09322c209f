"""What is said between an engine process and whoever drives it: frames of msgpack over a Unix socket, no pickle.

    frame = 4 bytes big-endian length | message
    driver: Hello, then calls, each with a number of its own, in any order and any number at a time
    engine: Welcome or Refused once, then for each call chunks (Generate) or one Answer, or one Failed

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
    PauseMode,
    RolloutEngineStatistics,
    TopLogProbs,
)
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.transport import TransportSpec

__all__ = [
    "MAX_FRAME_BYTES",
    "PROTOCOL",
    "Abort",
    "Answer",
    "Call",
    "Cancel",
    "Chunk",
    "Commit",
    "DriverMessage",
    "EngineMessage",
    "Failed",
    "Frames",
    "Generate",
    "Health",
    "Hello",
    "Launch",
    "Pause",
    "Prepare",
    "Resume",
    "Sleep",
    "Statistics",
    "Wake",
    "Welcome",
    "error_of",
]

PROTOCOL = 3
MAX_FRAME_BYTES = 32 << 20  # a prompt of a million tokens takes five of them, a manifest of 10,000 tensors one
_LENGTH = struct.Struct(">I")


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is to host.

    Attributes:
        engine: entry point or dotted path of a :class:`~asyncrl.interfaces.RolloutEngine`.
        model_path: its first argument.
        options: its keyword arguments.
        transport: where it pulls weights from; None if it never gets any.
    """

    engine: str
    model_path: str
    options: dict[str, Any] = {}
    transport: TransportSpec | None = None


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message. ``launch`` is given to a process that has no engine yet, and only to such a one."""

    protocol: int
    launch: Launch | None


class Generate(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Stream one request."""

    call: int
    request: GenerationRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nobody waits for this call any more; it gets no answer."""

    call: int


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered with a bool."""

    call: int
    request_id: str


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered when decoding has stopped."""

    call: int
    mode: PauseMode


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give the memory back; see SleepingEngine."""

    call: int


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take it again."""

    call: int


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Go on decoding."""

    call: int


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pull, verify and shadow a version."""

    call: int
    manifest: WeightManifest


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Swap the shadow in."""

    call: int
    version: int
    kv_cache: KVCachePolicy


class Health(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered with an EngineHealth."""

    call: int
    deadline_s: float


class Statistics(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answered with nothing: the statistics come with every answer."""

    call: int


Call: TypeAlias = Generate | Abort | Pause | Resume | Sleep | Wake | Prepare | Commit | Health | Statistics
DriverMessage: TypeAlias = Hello | Cancel | Call


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine serves."""

    protocol: int
    pid: int
    statistics: RolloutEngineStatistics


class Chunk(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Tokens of a Generate call; the one with a finish reason ends it, and brings statistics along."""

    call: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    statistics: RolloutEngineStatistics | None = None
    top_log_probs: tuple[TopLogProbs, ...] = ()


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The call is done. ``value`` is JSON-like; what it means depends on the call."""

    call: int
    statistics: RolloutEngineStatistics
    value: Any = None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The call raised. ``call`` is -1 when it was the Hello. ``kind`` is a class of :mod:`asyncrl.errors`."""

    call: int
    kind: str
    message: str


EngineMessage: TypeAlias = Welcome | Chunk | Answer | Failed


def error_of(failed: Failed) -> AsyncRLError:
    """The error that was raised on the other side; one that asyncrl does not know becomes an EngineError."""
    kind = getattr(error_tree, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, AsyncRLError):
        return kind(failed.message)
    return EngineError(f"{failed.kind}: {failed.message}")


class Frames:
    """One end of the conversation: messages in, messages out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, receives: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._encoder = msgspec.msgpack.Encoder()

    async def receive(self) -> Any:
        """The next message; None when the other side is gone.

        Raises:
            CodecError: the bytes are no message, or more than allowed. Nothing can be read after this.
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
        """Queue a message; into the void when the other side is gone.

        Raises:
            CodecError: it is larger than the other side accepts.
        """
        data = self._encoder.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise CodecError(f"a message of {len(data)} bytes cannot be sent; {MAX_FRAME_BYTES} are allowed")
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def drain(self) -> None:
        """Wait until the other side has taken most of what was sent."""
        try:
            await self._writer.drain()
        except ConnectionError:
            return  # the reading side learns of it and tells

    async def close(self) -> None:
        """Hang up."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return
