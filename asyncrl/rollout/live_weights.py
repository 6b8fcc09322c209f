"""Weights are checked where they serve: after a commit, some live tensors have to be those that the trainer published.

The manifest of a version has the checksum of every tensor, as the trainer published it. An engine whose tensors can be
read (:class:`asyncrl.interfaces.LiveWeightsEngine`) is asked for the checksums of a few of them, others for every
version, once it says that it serves the version. Where an engine fuses, renames or casts tensors, no live one is the
published one; there the check is that of the bytes that it received (:meth:`asyncrl.weights.WeightTransport.pull`).
"""

from __future__ import annotations

import random

from asyncrl.errors import LiveWeightsError
from asyncrl.interfaces import KVCachePolicy, LiveWeightsEngine, RolloutEngine
from asyncrl.weights import TensorEntry, WeightManifest

_CHECKED_BYTES = 8 << 20
"""Bytes that are read for one version, beyond the first tensor: a millisecond."""

_LARGEST_BYTES = 64 << 20
"""Larger tensors are checked only where all are: they would pause decoding."""


async def commit_into(
    engine: RolloutEngine, version: int, *, kv_cache: KVCachePolicy, manifest: WeightManifest | None
) -> None:
    """Commit the prepared version, unless ``engine`` serves it already, and check some of its live tensors.

    Raises:
        LiveWeightsError: the engine serves other tensors than those of the ``manifest``.
        WeightVersionError: ``version`` is not the prepared one.
    """
    if engine.weight_version != version:
        await engine.commit_weights(version, kv_cache=kv_cache)
    if manifest is not None and manifest.version == version and isinstance(engine, LiveWeightsEngine):
        await check_live_weights(engine, manifest)


async def check_live_weights(engine: LiveWeightsEngine, manifest: WeightManifest) -> None:
    """Check the live tensors of ``engine`` that :func:`sampled_entries` names; those that it cast are left out.

    Raises:
        LiveWeightsError: one of them is not the published one.
    """
    entries = sampled_entries(manifest)
    live = await engine.live_checksums([entry.name for entry in entries])
    for entry in entries:
        dtype, checksum = live[entry.name]
        if dtype == entry.dtype and checksum != entry.checksum:
            raise LiveWeightsError(
                f"the engine says that it serves weight version {manifest.version}, but its tensor {entry.name} has "
                f"checksum {checksum:016x}, and the trainer published {entry.checksum:016x}: a defect of the engine, "
                "or memory that something else writes to"
            )


def sampled_entries(manifest: WeightManifest) -> list[TensorEntry]:
    """Return some of the tensors, in an order of their own for each version: in time, every one has its turn."""
    entries = [each for each in manifest.tensors if each.size_bytes <= _LARGEST_BYTES] or list(manifest.tensors)
    random.Random(manifest.version).shuffle(entries)  # noqa: S311 (reproducible, not secret)
    chosen: list[TensorEntry] = []
    left = _CHECKED_BYTES
    for entry in entries:
        if chosen and entry.size_bytes > left:
            continue
        chosen.append(entry)
        left -= entry.size_bytes
    return chosen
