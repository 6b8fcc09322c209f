"""Engines of ``benchmarks/pool.py`` that count what they sample in a file, which outlives a SIGKILL."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

from asyncrl.testing import VersionEchoEngine
from asyncrl.weights import TransportSpec
from engines.rollout.sglang.engine import SGLangEngine
from engines.rollout.transformers.engine import TransformersEngine
from engines.rollout.transformers.generation import Counters
from engines.rollout.vllm.engine import VLLMEngine

__all__ = ["CountedSGLang", "CountedTelltale", "CountedTransformers", "CountedVLLM", "sampled_tokens"]

_COUNT = struct.Struct("<q")


class Tally:
    """A number in a file of its own, written in memory that the kernel keeps when the process dies."""

    def __init__(self, folder: str) -> None:
        descriptor, _ = tempfile.mkstemp(suffix=".tokens", dir=folder)
        os.ftruncate(descriptor, _COUNT.size)
        self._map = mmap.mmap(descriptor, _COUNT.size)
        os.close(descriptor)

    def write(self, tokens: int) -> None:
        _COUNT.pack_into(self._map, 0, tokens)


def sampled_tokens(folder: Path) -> int:
    """What all engines have counted in ``folder``."""
    return sum(_COUNT.unpack(file.read_bytes())[0] for file in folder.glob("*.tokens"))


class TalliedCounters(Counters):
    """The engine's own counters, which write the tokens to a tally in the thread that samples them."""

    def __init__(self, tally: Tally) -> None:
        object.__setattr__(self, "_tally", tally)
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "tokens_generated":
            self._tally.write(value)


class CountedTransformers(TransformersEngine):
    def __init__(self, model_path: str, *, count_in: str, **options: Any) -> None:
        super().__init__(model_path, **options)
        self._count_in = count_in

    def _load(self) -> Any:
        generation = super()._load()
        generation.counters = TalliedCounters(Tally(self._count_in))
        return generation


class CountedVLLM(VLLMEngine):
    def __init__(
        self, model_path: str, *, count_in: str, transport: TransportSpec | None = None, **options: Any
    ) -> None:
        self._tally = Tally(count_in)
        super().__init__(model_path, transport=transport, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "_tokens_generated":
            self._tally.write(value)


class CountedSGLang(SGLangEngine):
    def __init__(self, model_path: str, *, count_in: str, **options: Any) -> None:
        self._tally = Tally(count_in)
        super().__init__(model_path, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "_tokens":
            self._tally.write(value)


class CountedTelltale(VersionEchoEngine):
    def __init__(self, model_path: str = "", *, count_in: str, **options: Any) -> None:
        super().__init__(model_path, **options)
        self._tally = Tally(count_in)
        self._sampled = 0

    def token(self, scripted: int) -> int:
        self._sampled += 1
        self._tally.write(self._sampled)
        return super().token(scripted)
