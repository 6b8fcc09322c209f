"""Weights from trainer ranks to engine ranks through process groups of gloo, by the memory of their hosts.

Every trainer rank keeps its rows of each tensor of a version, as FSDP divides them
(:func:`engines.weights.resharding.divided`), and listens at an address of its own, which the manifest's location names.
An engine rank that pulls asks each trainer rank for the slices that it needs of what that rank holds. They form a
process group of two for this pull alone, whose members find each other through the connection of the order:

    engine rank                              trainer rank
      key; order: version, slices  -->         a thread; the trainer's own work goes on
      answer                       <--         what is refused, or the size of pieces
      group of two, made anew      ---
      pieces, one after another    <--         copies of them together have at most a bucket
      digest of all pieces         <--
      it is the same               -->         the transfer is over

Because a group has two members and lives for one pull, an engine rank that dies, stops or joins late concerns no
other, while fewer than eight take their parts from a trainer rank at a time (others wait for a place), and a trainer
rank waits for none. Every wait of a pull, on both sides, ends with its deadline; the error or warning then names the
rank that was waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import msgspec
import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from asyncrl.errors import WeightError, WeightMismatchError
from asyncrl.weights import TensorEntry, WeightManifest
from engines.weights.resharding import Region, common, divided, pieces, plan, volume, whole, within
from engines.weights.transport import (
    DTYPES,
    HEADER_SIZE_BYTES,
    VersionedTransport,
    aligned,
    check_layout,
    check_tensors,
    tensor_bytes,
)

_log = logging.getLogger(__name__)

Group: TypeAlias = Any  # a backend of torch, whose stubs lack send and recv
_TRAINER, _ENGINE = 0, 1  # ranks of a group of two
_AT_ONCE = 8
"""Engine ranks that a trainer rank sends to at a time; a piece for each of them fits into the bucket."""


class _Order(msgspec.Struct, frozen=True):
    """What an engine rank asks a trainer rank for: ``regions`` of tensors, by name, of what that rank holds.

    ``digest`` is the manifest's, ``taker`` the process that asks.
    """

    version: int
    digest: bytes
    taker: str
    regions: list[tuple[str, Region]]


class _Answer(msgspec.Struct, frozen=True):
    piece_bytes: int = 0
    refusal: str = ""
    differs: bool = False


class _Deadline:
    def __init__(self, deadline_s: float) -> None:
        self._ends_s = time.monotonic() + deadline_s

    @property
    def left(self) -> timedelta:
        """Return the time left; a millisecond when there is none: to torch, nothing stands for no deadline."""
        return timedelta(seconds=max(self._ends_s - time.monotonic(), 1e-3))


class _Meeting(Store):
    """A connection between two ranks, which is the store (in torch's sense) through which they form a group.

    What one side sets the other gets; nothing is set twice. Torch's own ``TCPStore`` waits for a stopped process
    without a deadline, and listens at every address of the machine.
    """

    def __init__(self, connection: socket.socket, deadline: _Deadline) -> None:
        super().__init__()
        self._connection, self._deadline = connection, deadline
        self._held: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        held = self._held[key] = value.encode() if isinstance(value, str) else value
        message = msgspec.msgpack.encode((key, held))
        self._connection.settimeout(self._deadline.left.total_seconds())
        self._connection.sendall(_LENGTH.pack(len(message)) + message)

    def get(self, key: str) -> bytes:
        while key not in self._held:
            (length,) = _LENGTH.unpack(_receive(self._connection, _LENGTH.size, self._deadline))
            if length > _LONGEST_MESSAGE:
                raise ConnectionError(f"a message of {length} bytes is no order for weights")
            message = _receive(self._connection, length, self._deadline)
            other, value = msgspec.msgpack.decode(message, type=tuple[str, bytes])
            self._held[other] = value
        return self._held[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


def _receive(connection: socket.socket, size: int, deadline: _Deadline) -> bytes:
    taken = bytearray()
    while len(taken) < size:
        connection.settimeout(deadline.left.total_seconds())
        part = connection.recv(size - len(taken))
        if not part:
            raise ConnectionError("it has closed the connection")
        taken += part
    return bytes(taken)


_LENGTH = struct.Struct("<I")
_LONGEST_MESSAGE = 16 << 20
_MOST_CONNECTIONS = 1024
"""Of a trainer rank, strangers' included: each has a thread, and further ones are closed."""
_KEY_S = 10.0
"""Most seconds until a connection has sent the key; nothing else is read before."""
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class _Part:
    """What a rank holds of a tensor: ``tensor`` is the region ``place`` of the whole."""

    tensor: torch.Tensor
    place: Region


class CollectiveTransport(VersionedTransport[int]):
    """Implements :class:`asyncrl.weights.WeightTransport` for trainer ranks and engines that reach each other by TCP.

    All trainer ``ranks`` publish the same tensors in the same order. Of a full one each keeps its part. Of one that is
    sharded (DTensor) over rows each keeps its shard, and rank 0 hashes the rows that the others send it, from host to
    host and a piece at a time: no rank has a full tensor. The manifest of a version is that of rank 0 with the
    locations of all (:func:`asyncrl.weights.joined`). A rank needs memory for its part of ``max_versions`` versions and
    for a bucket. A puller has the tensors that it asked for, and a piece of a bucket.

    Args:
        rank, ranks: this trainer rank, and their number.
        address: of this machine, which engines reach and this rank listens at; by default that of the Ray node, and
            without Ray the loopback address.
        deadline_s: seconds that a pull may take, both ends alike.
        bucket_bytes: memory of a trainer rank for copies of what is being sent.
    """

    name = "collective"
    medium = "with trainer ranks"

    def __init__(
        self,
        *,
        namespace: str,
        max_versions: int = 2,
        rank: int = 0,
        ranks: int = 1,
        address: str | None = None,
        deadline_s: float = 120.0,
        bucket_bytes: int = 64 << 20,
    ) -> None:
        part = rf"{re.escape(namespace)}\.[0-9a-f]{{32}}/[0-9]+@[\w.:-]+:[0-9]+"
        super().__init__(namespace=namespace, max_versions=max_versions, location=f"{part}(?: {part})*")
        if bucket_bytes < _AT_ONCE * 8 or not deadline_s > 0:
            raise ValueError(
                f"bucket_bytes is at least {_AT_ONCE * 8}, deadline_s positive; got {bucket_bytes} and {deadline_s}"
            )
        self.rank, self.ranks = rank, ranks
        self._address = address
        self._deadline_s = deadline_s
        self._piece_bytes = bucket_bytes // _AT_ONCE
        self._hosts: tuple[object, dist.ProcessGroup | None] = (None, None)  # torch's default group, one of gloo beside
        self._sender: _Sender | None = None

    def pull_regions(self, manifest: WeightManifest, wanted: Mapping[str, Region]) -> dict[str, torch.Tensor]:
        """Return regions of tensors, by name: what an engine rank needs that does not hold whole ones.

        What arrives is compared with what the trainer ranks read from their parts; the manifest's checksums are of
        whole tensors.

        Raises:
            WeightMismatchError: the version is not the manifest's, or was damaged on its way.
            WeightError: the version is not available any more, or a trainer rank did not send it in time.
        """
        self._located(manifest)
        check_layout(manifest)
        entries = {entry.name: entry for entry in manifest.tensors}
        found = {
            name: torch.empty([b - a for a, b in region], dtype=DTYPES[entries[name].dtype])
            for name, region in wanted.items()
        }
        locations = manifest.location.split(" ")
        held = {
            name: [divided(entries[name].shape, 0, rank=rank, ranks=len(locations)) for rank in range(len(locations))]
            for name in wanted
        }
        orders: list[list[tuple[str, Region]]] = [[] for _ in locations]
        for name, region in wanted.items():
            for each in plan(held[name], region):
                orders[each.rank].append((name, each.region))
        pull = _Pull(
            manifest=manifest,
            wanted=wanted,
            found=found,
            deadline=_Deadline(self._deadline_s),
        )
        first = secrets.randbelow(len(locations))  # not all engines begin with the same rank
        for rank in (*range(first, len(locations)), *range(first)):
            if rank and not orders[rank]:  # rank 0 has to confirm that the manifest is that of the version
                continue
            try:
                pull.receive(locations[rank], orders[rank])
            except (RuntimeError, OSError, msgspec.MsgspecError) as error:
                raise WeightError(
                    f"version {manifest.version} is not available: trainer rank {rank} of {len(locations)} "
                    f"({locations[rank].rpartition('@')[2]}) did not send its part within {self._deadline_s:g} s: "
                    f"{_first_line(error)}"
                ) from error
        return found

    def _read(self, manifest: WeightManifest) -> Mapping[str, torch.Tensor]:
        read = self.pull_regions(manifest, {entry.name: whole(entry.shape) for entry in manifest.tensors})

        def is_right(entry: TensorEntry) -> bool:
            return xxhash.xxh3_64_intdigest(tensor_bytes(entry.name, read[entry.name])) == entry.checksum

        check_tensors(manifest.tensors, is_right, manifest=manifest)
        return read

    def _write(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[WeightManifest, int]:
        parts: dict[str, _Part] = {}
        entries: list[TensorEntry] = []
        sharded: dict[str, DeviceMesh] = {}
        offset = HEADER_SIZE_BYTES
        for name, tensor in tensors:
            if name in parts:
                raise WeightError(f"tensor {name} was published twice in one version")
            place = divided(tensor.shape, 0, rank=self.rank, ranks=self.ranks)
            if isinstance(tensor, DTensor) and not self._is_sharded_alike(tensor):
                from engines.training.checkpoint import full_tensor

                tensor = full_tensor(tensor)  # noqa: PLW2901
            if isinstance(tensor, DTensor):
                shard, checksum, sharded[name] = tensor.to_local(), 0, tensor.device_mesh
            else:
                checksum = 0 if self.rank else xxhash.xxh3_64_intdigest(tensor_bytes(name, tensor))
                is_scalar_elsewhere = len(place) != tensor.dim()
                shard = tensor.new_empty(0) if is_scalar_elsewhere else tensor[within(place, whole(tensor.shape))]
            parts[name] = _Part(torch.empty(shard.shape, dtype=shard.dtype).copy_(shard), place)
            entry = TensorEntry(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                offset=offset,
                size_bytes=tensor.numel() * tensor.itemsize,
                checksum=checksum,
            )
            entries.append(entry)
            offset = aligned(offset + entry.size_bytes)
            del tensor, shard  # while the next one is gathered
        checksums = self._checksums([entry for entry in entries if entry.name in sharded], parts, sharded)
        entries = [
            msgspec.structs.replace(entry, checksum=checksums.get(entry.name, entry.checksum)) for entry in entries
        ]
        if self._sender is None:
            try:
                self._sender = _Sender(
                    self._address or _address(),
                    namespace=self.namespace,
                    deadline_s=self._deadline_s,
                    piece_bytes=self._piece_bytes,
                )
            except OSError as error:
                raise WeightError(f"trainer rank {self.rank} cannot listen at {self._address}: {error}") from error
            weakref.finalize(self, self._sender.close)
        manifest = self._manifest(version, self._sender.location(version), () if self.rank else entries)
        digest = b"" if self.rank else manifest.digest  # the others have no checksums
        self._sender.versions[version] = (digest, parts)
        return manifest, version

    def _is_sharded_alike(self, tensor: DTensor) -> bool:
        mesh = tensor.device_mesh
        return mesh.ndim == 1 and mesh.size() == self.ranks and tensor.placements == (Shard(0),)

    def _checksums(
        self, entries: Sequence[TensorEntry], parts: Mapping[str, _Part], meshes: Mapping[str, DeviceMesh]
    ) -> dict[str, int]:
        """Hash all rows of tensors on rank 0, by name; nothing on the others, which send theirs. Collective.

        Those of several small tensors come together, those of a large one in pieces.
        """
        found: dict[str, int] = {}
        group = self._host_group(meshes[entries[0].name]) if entries and self.ranks > 1 else None

        def sizes(bucket: Sequence[TensorEntry], rank: int) -> list[int]:
            places = (divided(entry.shape, 0, rank=rank, ranks=self.ranks) for entry in bucket)
            return [volume(place) * DTYPES[entry.dtype].itemsize for entry, place in zip(bucket, places, strict=True)]

        def exchange(bucket: Sequence[TensorEntry]) -> None:
            digests = [xxhash.xxh3_64() for _ in bucket]
            mine = [parts[entry.name].tensor.reshape(-1).view(torch.uint8) for entry in bucket]
            if self.rank:
                for piece in (mine[0] if len(mine) == 1 else torch.cat(mine)).split(self._piece_bytes):
                    if len(piece):
                        dist.send(piece, group=group, group_dst=0)
                return
            for digest, data in zip(digests, mine, strict=True):
                digest.update(data.numpy().data)
            for sender in range(1, self.ranks):
                each = sizes(bucket, sender)
                for start in range(0, sum(each), self._piece_bytes):
                    piece = torch.empty(min(self._piece_bytes, sum(each) - start), dtype=torch.uint8)
                    dist.recv(piece, group=group, group_src=sender)
                    for digest, data in zip(digests, piece.split(each) if len(bucket) > 1 else (piece,), strict=True):
                        digest.update(data.numpy().data)
            found.update((entry.name, digest.intdigest()) for entry, digest in zip(bucket, digests, strict=True))

        bucket, filled = list[TensorEntry](), 0
        for entry in entries:
            (size,) = sizes([entry], 0)  # that of no rank is larger
            if bucket and filled + size > self._piece_bytes:
                exchange(bucket)
                bucket, filled = [], 0
            bucket.append(entry)
            filled += size
        if bucket:
            exchange(bucket)
        return found

    def _host_group(self, mesh: DeviceMesh) -> dist.ProcessGroup:
        """Return a group of the trainer's ranks that sends from host to host; made once for torch's default group."""
        group = mesh.get_group()
        if dist.get_backend(group) == "gloo":
            return group
        world, hosts = self._hosts
        if hosts is None or world is not dist.group.WORLD:
            hosts = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._deadline_s))
            assert isinstance(hosts, dist.ProcessGroup)
            self._hosts = dist.group.WORLD, hosts
        return hosts

    def _free(self, version: int, place: int) -> None:
        if self._sender is not None:
            self._sender.versions.pop(place, None)

    def _close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pull:
    """One pull of an engine rank: the regions ``wanted`` arrive in the tensors ``found``."""

    manifest: WeightManifest
    wanted: Mapping[str, Region]
    found: Mapping[str, torch.Tensor]
    deadline: _Deadline

    def receive(self, location: str, regions: list[tuple[str, Region]]) -> None:
        """Receive regions from the trainer rank at a location."""
        key, _, rest = location.partition("/")
        version, _, address = rest.partition("@")
        host, _, port = address.rpartition(":")
        order = _Order(
            version=int(version),
            digest=self.manifest.digest,
            taker=f"process {os.getpid()} of {socket.gethostname()}",
            regions=regions,
        )
        left_s = self.deadline.left.total_seconds()
        with socket.create_connection((host, int(port)), timeout=left_s) as connection:
            connection.sendall(key.encode())
            meeting = _Meeting(connection, self.deadline)
            meeting.set("order", msgspec.msgpack.encode(order))
            answer = msgspec.msgpack.decode(meeting.get("answer"), type=_Answer)
            if answer.refusal:
                kind = WeightMismatchError if answer.differs else WeightError
                raise kind(f"version {self.manifest.version} {answer.refusal}")
            digest = xxhash.xxh3_64()
            if regions:
                group = _group(meeting, _ENGINE, connection.getsockname()[0], self.deadline)
                for name, region in regions:
                    self._receive_region(group, name, region, answer.piece_bytes, digest)
            if meeting.get("digest") != digest.digest():
                raise WeightMismatchError(f"version {self.manifest.version} from {address} was damaged on its way")
            meeting.set("taken", b"")

    def _receive_region(
        self, group: Group, name: str, region: Region, piece_bytes: int, digest: xxhash.xxh3_64
    ) -> None:
        target = self.found[name]
        for piece in pieces(region, most=piece_bytes // target.itemsize):
            part = target[within(piece, self.wanted[name])]
            taken = part if part.is_contiguous() else part.new_empty(part.shape)
            data = taken.reshape(-1).view(torch.uint8)
            group.recv([data], _TRAINER, 0).wait(self.deadline.left)
            digest.update(data.numpy().data)
            if taken is not part:
                part.copy_(taken)


class _Sender:
    """One trainer rank's end: each order is taken and answered in a thread of its own.

    ``versions`` has, for each version that is held, the manifest's digest (nothing but on rank 0) and the parts.
    """

    def __init__(self, address: str, *, namespace: str, deadline_s: float, piece_bytes: int) -> None:
        self.versions: dict[int, tuple[bytes, Mapping[str, _Part]]] = {}
        self._address, self._deadline_s = address, deadline_s
        self._piece_bytes = piece_bytes
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
        self._listening = listening
        self._key = f"{namespace}.{secrets.token_hex(16)}"
        self._places = threading.BoundedSemaphore(_AT_ONCE)
        self._sending: dict[socket.socket, threading.Thread] = {}
        self._closed = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="orders for weights", daemon=True)
        self._accepting.start()

    def location(self, version: int) -> str:
        return f"{self._key}/{version}@{self._address}:{self._listening.getsockname()[1]}"

    def close(self) -> None:
        """Take no order any more; transfers that run end at the latest at their deadline. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self.versions.clear()
        self._listening.shutdown(socket.SHUT_RDWR)  # which ends accept()
        self._accepting.join()
        self._listening.close()
        soon = _Deadline(1.0)
        for connection, thread in tuple(self._sending.items()):
            with contextlib.suppress(OSError):  # closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=soon.left.total_seconds())

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError as error:
                if self._closed.wait(_PAUSE_S):
                    return
                _log.warning("an order for weights was not taken: %s", error)  # too many open files, for one
                continue
            if len(self._sending) >= _MOST_CONNECTIONS:
                connection.close()
                continue
            thread = threading.Thread(target=self._send, args=(connection,), name="sending weights", daemon=True)
            self._sending[connection] = thread
            try:
                thread.start()
            except RuntimeError as error:  # the system has no thread left
                del self._sending[connection]
                connection.close()
                _log.warning("an order for weights was not taken: %s", error)

    def _send(self, connection: socket.socket) -> None:
        deadline, order = _Deadline(self._deadline_s), None
        try:
            with connection:
                key = self._key.encode()
                given = _receive(connection, len(key), _Deadline(min(_KEY_S, self._deadline_s)))
                if not secrets.compare_digest(given, key):
                    return
                meeting = _Meeting(connection, deadline)
                order = msgspec.msgpack.decode(meeting.get("order"), type=_Order)
                threading.current_thread().name = f"weights for {order.taker}"
                if self._places.acquire(timeout=deadline.left.total_seconds()):
                    try:
                        self._answer(meeting, order, deadline)
                    finally:
                        self._places.release()
        except (RuntimeError, OSError, msgspec.MsgspecError) as error:
            if not self._closed.is_set() and order is not None:
                _log.warning(
                    "%s did not take its part of version %d within %g s: %s",
                    order.taker,
                    order.version,
                    self._deadline_s,
                    _first_line(error),
                )
        finally:
            del self._sending[connection]

    def _answer(self, meeting: _Meeting, order: _Order, deadline: _Deadline) -> None:
        digest, parts = self.versions.get(order.version, (None, {}))
        answer = _Answer(piece_bytes=self._piece_bytes)
        if digest is None:
            answer = _Answer(refusal="was released")
        elif digest not in (b"", order.digest) or not all(_holds(parts, *each) for each in order.regions):
            answer = _Answer(refusal="is not the manifest's", differs=True)
        meeting.set("answer", msgspec.msgpack.encode(answer))
        if answer.refusal:
            return
        sent = xxhash.xxh3_64()
        if order.regions:
            group = _group(meeting, _TRAINER, self._address, deadline)
            for data in self._pieces(parts, order.regions):
                sent.update(data.numpy().data)
                group.send([data], _ENGINE, 0).wait(deadline.left)
        meeting.set("digest", sent.digest())
        meeting.get("taken")

    def _pieces(self, parts: Mapping[str, _Part], regions: Sequence[tuple[str, Region]]) -> Iterator[torch.Tensor]:
        """Yield the bytes of each piece, without a copy where they lie together."""
        for name, region in regions:
            part = parts[name]
            for piece in pieces(region, most=self._piece_bytes // part.tensor.itemsize):
                yield part.tensor[within(piece, part.place)].contiguous().reshape(-1).view(torch.uint8)


def _holds(parts: Mapping[str, _Part], name: str, region: Region) -> bool:
    return name in parts and common(parts[name].place, region) == region


def _group(store: Store, rank: int, address: str, deadline: _Deadline) -> Group:
    """Make a process group of two beside the process's own; it is gone with its last reference."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # noqa: SLF001  torch has no public way to choose the address
    options._devices = [gloo.create_device(hostname=address)]  # noqa: SLF001
    # Gloo waits five times as long for the first connection, and for ever with 0 ms.
    options._timeout = max(deadline.left / 5, timedelta(milliseconds=1))  # noqa: SLF001
    options._threads = 1  # noqa: SLF001
    try:
        return gloo(store, rank, 2, options)
    finally:
        del options  # its device would call a connection that is gone, while an error keeps this frame


def _address() -> str:
    """Return the address of this node in its Ray cluster; without one, the loopback address."""
    ray: Any = sys.modules.get("ray")
    return str(ray.util.get_node_ip_address()) if ray is not None and ray.is_initialized() else "127.0.0.1"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__
