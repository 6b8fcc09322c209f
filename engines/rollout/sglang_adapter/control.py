"""Orders to a running SGLang, each answered between two of its steps."""

# SGLang lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import torch

from asyncrl.errors import EngineError, WeightError
from asyncrl.owned_folder import OwnedFolder
from engines.rollout.sglang_adapter.launching import SGLangOptions, launch
from engines.rollout.sglang_adapter.request import SGLangRequest

__all__ = ["SGLangControl"]


class SGLangControl:
    """A running SGLang; made where :func:`engines.rollout.sglang_adapter.launching.launch` may be called, and blocks.

    Attributes:
        manager: SGLang's side in this process, which takes requests. Any: it has no typed interface.
    """

    def __init__(self, options: SGLangOptions) -> None:
        self._ranks = options.tensor_parallel
        self._folder = OwnedFolder("sglang")
        self._engine = launch(options, self._folder.path)
        self.manager: Any = self._engine.tokenizer_manager
        loads = self.manager.load_snapshot_reader
        if loads.read_all():  # mapped now on both sides: its name is not needed, and nobody would remove the file
            Path(loads.path).unlink(missing_ok=True)
        self.manager.auto_create_handle_loop()
        self._half_loaded = False

    async def close(self) -> None:
        """End SGLang's processes."""
        tasks = list(self.manager.asyncio_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._engine.shutdown)
        await asyncio.to_thread(self._folder.close)

    async def freeze(self, mode: Literal["in_place", "retract"]) -> None:
        """Take no more steps. ``retract`` gives the room of running requests back: they compute it again."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self.manager.pause_generation(PauseGenerationReqInput(mode=mode))

    async def heard(self) -> None:
        """Every order so far has been followed."""
        await self.manager.get_internal_state()

    async def thaw(self) -> None:
        """Go on."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self.manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    async def load(self, named: Sequence[tuple[str, torch.Tensor]], *, version: int, flush: bool) -> None:
        """Have it load tensors in shared memory, while it is frozen. ``flush`` empties the cache.

        Raises:
            WeightError: it did not. What it holds now is not known.
        """
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )
        from sglang.srt.utils import MultiprocessingSerializer

        manager = self.manager
        if self._half_loaded:  # it knows one update at a time
            await manager.end_weight_update(EndWeightUpdateReqInput(), None)
        payloads = [MultiprocessingSerializer.serialize(list(named)) for _ in range(self._ranks)]
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, flush_cache=flush, weight_version=str(version)
        )
        self._half_loaded = True
        for call, order in (
            (manager.begin_weight_update, BeginWeightUpdateReqInput()),
            (manager.update_weights_from_tensor, update),
            (manager.end_weight_update, EndWeightUpdateReqInput()),
        ):
            done, message = await call(order, None)
            if not done:
                raise WeightError(f"SGLang did not take version {version}: {message}")
        self._half_loaded = False

    async def probe(self, number: int) -> None:
        """Generate a token.

        Raises:
            EngineError: none came.
        """
        async with aclosing(self.manager.generate_request(SGLangRequest.probe(number), None)) as pieces:
            async for piece in pieces:
                if piece["output_ids"]:
                    return
        raise EngineError("SGLang generated no token for the probe")

    @property
    def capacity_tokens(self) -> int:
        """Room for keys and values."""
        return sum(load.max_total_num_tokens for load in self._loads())

    @property
    def decode_steps(self) -> int:
        """So far; told a little late."""
        return int(sum(load.decode_moments[0] for load in self._loads() if load.decode_moments))

    def _loads(self) -> list[Any]:
        return list(self.manager.load_snapshot_reader.read_all())
