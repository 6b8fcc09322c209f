"""A folder of safetensors and JSON, written whole or not at all, and checked before it is read.

    folder/
      manifest.json           size and xxh3-64 of every other file
      trainer.json            counters
      model.safetensors       full float32 weights by checkpoint name
      optimizer.safetensors   full moments: exp_avg.NAME, exp_avg_sq.NAME

Tensors are written one after the other, so nobody ever holds more than one full tensor beside the shards. The format
knows nothing of ranks: any number of them can read it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from asyncrl.errors import CheckpointError

__all__ = [
    "TensorSpec",
    "check_tensors",
    "read_json",
    "read_tensors",
    "replace_folder",
    "seal",
    "verify",
    "write_json",
    "write_tensors",
]

FORMAT = 1
_MANIFEST = "manifest.json"
_BLOCK_BYTES = 2**24
_SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorSpec(NamedTuple):
    """A tensor that will be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def write_tensors(
    path: Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[torch.Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file, one tensor in memory at a time.

    Args:
        path: the file.
        specs: what ``tensors`` will yield, in the same order; safetensors begins with the table of contents.
        tensors: values, on any device.
        metadata: free text; Hugging Face readers want ``{"format": "pt"}``.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        header[spec.name] = {
            "dtype": _SAFETENSORS_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.size_bytes],
        }
        offset += spec.size_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for spec, tensor in zip(specs, tensors, strict=True):
            if tensor.dtype != spec.dtype or tuple(tensor.shape) != spec.shape:
                raise CheckpointError(f"{spec.name} was announced as {spec}, got {tensor.dtype} {tuple(tensor.shape)}")
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            file.write(flat.view(torch.uint8).numpy().data)
        _sync(file)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of ``folder`` when the block ends without an error.

    At no moment is ``folder`` half written; after a crash it is the old one, the new one, or (between two renames)
    missing with the old one beside it as ``.NAME.old``.
    """
    folder = folder.absolute()
    partial = folder.with_name(f".{folder.name}.partial")
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync_folder(partial)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    partial.rename(folder)
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def seal(folder: Path) -> None:
    """Write the manifest of all files that are there."""
    files = {
        path.name: {"size_bytes": path.stat().st_size, "xxh3_64": _checksum(path)}
        for path in sorted(folder.iterdir())
        if path.name != _MANIFEST
    }
    write_json(folder / _MANIFEST, {"format": FORMAT, "files": files})


def verify(folder: Path) -> None:
    """Raise :class:`CheckpointError` unless every file is the one that was sealed."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a checkpoint: there is no such folder")
    manifest = read_json(folder / _MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder / _MANIFEST} is not a manifest of format {FORMAT}")
    try:
        files = {name: (int(entry["size_bytes"]), str(entry["xxh3_64"])) for name, entry in manifest["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / _MANIFEST} is damaged: {error!r}") from error
    for name, (size_bytes, checksum) in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != size_bytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, the manifest says {size_bytes}")
        if _checksum(path) != checksum:
            raise CheckpointError(f"{path} is damaged: its checksum differs from the manifest's")


def check_tensors(path: Path, specs: Sequence[TensorSpec]) -> None:
    """Raise :class:`CheckpointError` unless the file can be read and holds exactly the tensors of ``specs``."""
    with _opened(path) as file:
        _compare(path, specs, file)


def read_tensors(path: Path, names: Sequence[str]) -> Iterator[torch.Tensor]:
    """These tensors of a file, one at a time, on the CPU."""
    with _opened(path) as file:
        for name in names:
            yield file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write plain JSON."""
    with path.open("wb") as file:
        file.write(json.dumps(value, indent=2, sort_keys=True).encode())
        _sync(file)


def read_json(path: Path) -> Any:
    """Read JSON.

    Raises:
        CheckpointError: missing or malformed.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _compare(path: Path, specs: Sequence[TensorSpec], file: Any) -> None:
    expected = {spec.name: spec for spec in specs}
    found = set(file.keys())
    if missing := sorted(expected.keys() - found):
        raise CheckpointError(f"{path} is of another model: it has no {missing[0]} (nor {len(missing) - 1} others)")
    if surplus := sorted(found - expected.keys()):
        raise CheckpointError(f"{path} is of another model: it has {surplus[0]} (and {len(surplus) - 1} others)")
    for name, spec in expected.items():
        piece = file.get_slice(name)
        if tuple(piece.get_shape()) != spec.shape or piece.get_dtype() != _SAFETENSORS_NAMES[spec.dtype]:
            raise CheckpointError(
                f"{path} is of another model: {name} is {piece.get_dtype()} {tuple(piece.get_shape())}, "
                f"here it is {_SAFETENSORS_NAMES[spec.dtype]} {spec.shape}"
            )


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _sync(file: BinaryIO | Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
