"""The first phase of a weight update for one engine: its bytes are pulled, verified and shadowed."""

from __future__ import annotations

import asyncio

from asyncrl.errors import WeightError
from asyncrl.interfaces import AdoptingEngine, RolloutEngine, SeparateEngine, WeightTransport
from asyncrl.weights.manifest import WeightManifest

__all__ = ["fetch_into"]


async def fetch_into(engine: RolloutEngine, manifest: WeightManifest, *, transport: WeightTransport | None) -> None:
    """Prepare the published version on ``engine``: by itself if it can, else through ``transport``, from a thread.

    Raises:
        WeightError: the bytes are not available or not the manifest's, or there is no transport to pull them.
    """
    if isinstance(engine, SeparateEngine):
        await engine.fetch_weights(manifest)
        return
    if transport is None:
        raise WeightError(f"version {manifest.version} cannot be fetched: no transport was given")
    pulled = transport.pull(manifest)
    if isinstance(engine, AdoptingEngine):
        await engine.adopt_weights(pulled, version=manifest.version)
        return
    tensors = await asyncio.to_thread(pulled.__enter__)
    try:
        await engine.prepare_weights(tensors, version=manifest.version)
    finally:
        del tensors
        pulled.__exit__(None, None, None)
