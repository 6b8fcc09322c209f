"""Checks that the engines share: of their options when they are made, and of their health while they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

from asyncrl.errors import ConfigError, EngineError
from asyncrl.interfaces import EngineHealth
from asyncrl.model_folder import check_model


def check_options(dtype: str, dtypes: Collection[str], **counts: int | None) -> None:
    """Raise :class:`ConfigError` if ``dtype`` is not one of ``dtypes``, or a count is less than 1."""
    if dtype not in dtypes:
        raise ConfigError(f"dtype must be one of {', '.join(dtypes)}, got {dtype!r}", path="dtype")
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}", path=name)


def check_heads(model_path: str, ranks: int, *, key: str) -> None:
    """Raise ConfigError unless the attention heads of a model's folder can be spread equally over ``ranks``."""
    if ranks > 1 and Path(model_path, "config.json").is_file():
        heads = getattr(check_model(model_path, key="model_path").get_text_config(), "num_attention_heads", 0)
        if heads % ranks:
            remedy = f"use a divisor of {heads}"
            raise ConfigError(f"{ranks} ranks cannot share the model's {heads} heads", path=key, remedy=remedy)


async def check_health(
    probe: Callable[[], Awaitable[None]], version: Callable[[], int], *, deadline_s: float
) -> EngineHealth:
    """Return the health of an engine whose ``probe`` generates one token or raises EngineError."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    error = ""
    try:
        async with asyncio.timeout(deadline_s):
            await probe()
    except TimeoutError:
        error = f"no token within {deadline_s} s"
    except EngineError as failure:
        error = str(failure)
    return EngineHealth(healthy=not error, latency_s=loop.time() - begin, weight_version=version(), error=error)


def check_adapters_awake(max_adapter_rank: int | None, *, sleep_mode: bool) -> None:
    """Raise :class:`ConfigError` for an engine that would have to keep adapters while it sleeps."""
    if max_adapter_rank is not None and sleep_mode:
        raise ConfigError(
            "an engine that sleeps (sleep_mode) does not keep adapters (max_adapter_rank): publish them merged into "
            'the weights (weights.adapters = "merged")',
            path="max_adapter_rank",
            remedy="merged",
        )


def check_sleep_mode(sleep_mode: bool) -> None:
    """Raise EngineError where the engine's memory was not allocated so that it can be freed for a while."""
    if not sleep_mode:
        raise EngineError("the engine cannot sleep: it was made without sleep_mode=True")
