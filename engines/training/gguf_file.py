"""A GGUF file's header, read in one pass, and its tensors as float32.

The ``gguf`` package reads headers item by item through numpy, which for a vocabulary and its merges takes seconds; the
layout is simple (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Blocks of quantised numbers are that
package's business.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.errors import ConfigError

__all__ = ["GGUFFile", "TensorInfo"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: its shape (outermost first), ggml's number of its type, and its first byte."""

    shape: tuple[int, ...]
    kind: int
    start: int


class GGUFFile:
    """The header of a file, little-endian, version 2 or 3.

    Attributes:
        metadata: values by key; arrays are lists. Any: what the file says.
        tensors: by name.

    Raises:
        ConfigError: it is no such file, or ends early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self.metadata, self.tensors = self._header()
        except (struct.error, IndexError, UnicodeDecodeError, KeyError) as error:
            raise ConfigError(f"{path} is damaged: {error}", path="model.options.source") from error

    def _header(self) -> tuple[Mapping[str, Any], Mapping[str, TensorInfo]]:
        """Any: what the file says."""
        if self._bytes[:4] != _MAGIC:
            raise ConfigError(f"{self.path} is no GGUF file", path="model.options.source")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise ConfigError(
                f"{self.path} is of GGUF version {version}; 2 and 3 are read", path="model.options.source"
            )
        tensors, pairs = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        infos = [self._tensor() for _ in range(tensors)]
        alignment = int(metadata.get("general.alignment", _ALIGNMENT))
        data = -(-self._at // alignment) * alignment
        return metadata, {name: TensorInfo(info.shape, info.kind, data + info.start) for name, info in infos}

    def _tensor(self) -> tuple[str, TensorInfo]:
        name = self._string()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))
        return name, TensorInfo(shape[::-1], self._number("I"), self._number("Q"))

    def _number(self, kind: str) -> Any:
        """Any: a number of that kind."""
        (value,) = struct.unpack_from(f"<{kind}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _string(self) -> str:
        length = self._number("Q")
        text = self._bytes[self._at : self._at + length].decode()
        self._at += length
        return text

    def _value(self, kind: int) -> Any:
        """Any: what the file says."""
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        inner, count = self._number("I"), self._number("Q")
        if inner in _NUMBERS:
            values = struct.unpack_from(f"<{count}{_NUMBERS[inner]}", self._bytes, self._at)
            self._at += struct.calcsize(f"<{count}{_NUMBERS[inner]}")
            return list(values)
        item: Callable[[], Any] = self._string if inner == _STRING else lambda: self._value(inner)
        return [item() for _ in range(count)]

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor, dequantised.

        Raises:
            ConfigError: the gguf package cannot read its type.
        """
        from gguf import GGMLQuantizationType, quant_shape_to_byte_shape
        from gguf.quants import dequantize

        info = self.tensors[name]
        try:
            kind = GGMLQuantizationType(info.kind)
            shape = quant_shape_to_byte_shape(info.shape, kind)
            raw = np.frombuffer(self._bytes, np.uint8, count=int(np.prod(shape)), offset=info.start).reshape(shape)
            return np.ascontiguousarray(dequantize(raw, kind), dtype=np.float32)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"{self.path}: {name} cannot be read: {error}", path="model.options.source") from error
