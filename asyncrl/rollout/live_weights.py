"""Weights are proven where they serve: after a commit, an engine shows that it computes with what was published.

Two kinds of evidence, both from what the publisher's manifest says of the version:

fingerprint  the checksums of the live tensors (:class:`asyncrl.interfaces.LiveWeightsEngine`): exact, of all tensors or
             of others for every version (``checked_bytes``). Tensors that the engine cast are left out.
canary       the log-probs of fixed tokens, which the engine computes as for any request: within the rounding of the
             dtype (``tolerance``), whatever the engine fuses, packs, casts, shares or caches.

The canary is asked for twice at the same time. One request has the prompt's log-probs computed, past any prefix cache,
and they have to be the trainer's; the other samples a token only, and may read the cache: what it gives has to be what
the first one gives. Keys and values of older weights show there.

What an engine sampled is handed on once the version is proven. One that fails is replaced.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from msgspec.structs import replace

from asyncrl.errors import LiveWeightsError
from asyncrl.interfaces import (
    AdapterEngine,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    LiveAdapterEngine,
    LiveWeightsEngine,
    RolloutEngine,
    SamplingParams,
)
from asyncrl.weights import TensorEntry, WeightManifest

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsProof:
    """The evidence for a version: ``canary`` is the error over the tolerance (at most 1), ``seconds`` what it took."""

    seconds: float = 0.0
    canary: float = 0.0


async def commit_into(
    engine: RolloutEngine,
    version: int,
    *,
    kv_cache: KVCachePolicy,
    manifest: WeightManifest | None,
    canary: bool = True,
) -> WeightsProof:
    """Commit the prepared version, unless ``engine`` serves it already, and prove it by its ``manifest``.

    One that ``proves_commits`` is the client of another, beside which this function carries each commit out: it is sent
    one in any case.

    Raises:
        LiveWeightsError: the engine serves other tensors than those of the ``manifest``, or computes something else.
        WeightVersionError: ``version`` is not the prepared one.
    """
    if engine.weight_version != version or getattr(engine, "proves_commits", False):
        await engine.commit_weights(version, kv_cache=kv_cache)
    clock = asyncio.get_running_loop().time
    begun_s, error = clock(), 0.0
    if manifest is not None and manifest.version == version:
        if isinstance(engine, LiveWeightsEngine):
            await check_live_weights(engine, manifest)
        if isinstance(engine, AdapterEngine):
            await check_live_adapters(engine, manifest)
        if canary:
            error = await check_canary(engine, manifest)
    return WeightsProof(seconds=clock() - begun_s, canary=error)


# --------------------------------------------------------------------------------------------------------- fingerprint


async def check_live_weights(engine: LiveWeightsEngine, manifest: WeightManifest) -> None:
    """Check the live tensors of ``engine`` that :func:`sampled_entries` names; those that it cast are left out.

    Raises:
        LiveWeightsError: one of them is not the published one.
    """
    entries = sampled_entries(manifest)
    live = await engine.live_checksums([entry.name for entry in entries])
    _compare(entries, live, version=manifest.version)


async def check_live_adapters(engine: AdapterEngine, manifest: WeightManifest) -> None:
    """Check the adapters that serve under a manifest: their versions, and all tensors of each if they can be read.

    Raises:
        LiveWeightsError: one is not served, is of another version, or has a tensor that is not the published one.
    """
    for part in (*manifest.beside, manifest):
        if part.adapter is None or not manifest.checked_bytes:
            continue
        name = part.adapter.name
        if (held := engine.adapters.get(name)) != part.version:
            served = "none of that name" if held is None else f"its version {held}"
            raise _unproven(manifest.version, f"of adapter {name!r} it serves {served}, not version {part.version}")
        if not isinstance(engine, LiveAdapterEngine):
            continue
        live = await engine.adapter_checksums(name)
        if other := sorted(live.keys() ^ {entry.name for entry in part.tensors}):
            raise _unproven(manifest.version, f"adapter {name!r} has other tensors than were published: {other[0]}")
        _compare(part.tensors, live, version=part.version)


def _compare(entries: Sequence[TensorEntry], live: Mapping[str, tuple[str, int]], *, version: int) -> None:
    compared = [entry for entry in entries if live[entry.name][0] == entry.dtype]
    if entries and not compared:
        _warn_uncompared(entries[0].dtype, live[entries[0].name][0])
    for entry in compared:
        checksum = live[entry.name][1]
        if checksum != entry.checksum:
            raise LiveWeightsError(
                f"the engine says that it serves weight version {version}, but its tensor {entry.name} has "
                f"checksum {checksum:016x}, and the trainer published {entry.checksum:016x}: a defect of the engine, "
                "or memory that something else writes to"
            )


@cache  # once in a process, not for every version
def _warn_uncompared(published: str, served: str) -> None:
    _log.warning(
        "no tensor of a weight version is compared with the published one: they are published in %s, and the engine "
        "holds them in %s; trainer.options.publish_dtype sets the former",
        published,
        served,
    )


def sampled_entries(manifest: WeightManifest) -> list[TensorEntry]:
    """Return full tensors, of at most ``checked_bytes``: where that is less than all, others for each version."""
    entries = list(manifest.tensors if manifest.adapter is None else manifest.adapter.base)
    if not manifest.checked_bytes or sum(entry.size_bytes for entry in entries) <= manifest.checked_bytes:
        return entries if manifest.checked_bytes else []
    entries = [each for each in entries if each.size_bytes <= manifest.checked_bytes]
    random.Random(manifest.version).shuffle(entries)  # noqa: S311 (reproducible, not secret)
    chosen: list[TensorEntry] = []
    left = manifest.checked_bytes
    for entry in entries:
        if entry.size_bytes <= left:
            chosen.append(entry)
            left -= entry.size_bytes
    return chosen


# -------------------------------------------------------------------------------------------------------------- canary

_GREEDY = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)


async def check_canary(engine: RolloutEngine, manifest: WeightManifest) -> float:
    """Compare what ``engine`` computes for the manifest's canary; return the error over the tolerance.

    0 without a canary, and of an engine that is paused and computes nothing.

    Raises:
        LiveWeightsError: the error exceeds the tolerance, or a log-prob is not finite.
    """
    canary, version = manifest.canary, manifest.version
    if canary is None or engine.statistics().paused:
        return 0.0
    request = GenerationRequest(
        request_id=f"canary:{version}",
        prompt_token_ids=canary.token_ids,
        sampling=_GREEDY,
        probe=True,
        adapter=manifest.adapter.name if manifest.adapter is not None else "",
    )
    scored, cached = await asyncio.gather(
        _answer(engine, replace(request, sampling=replace(_GREEDY, prompt_log_probs=0))),
        _answer(engine, replace(request, request_id=f"canary:{version}:cached")),
    )
    if {*scored.weight_versions, *cached.weight_versions} != {version}:
        raise _unproven(version, f"the canary was sampled under {(*scored.weight_versions, *cached.weight_versions)}")
    error = _error(scored.prompt_log_probs[1:], canary.log_probs) / canary.tolerance
    if not error <= 1:
        raise _unproven(
            version,
            f"the log-probs of {len(canary.log_probs)} fixed tokens differ from the trainer's by {error:.3g} times "
            "what rounding explains: it computes with other weights, or computes something else with them; "
            "weights.canary_tolerance sets another limit",
        )
    apart = _error(cached.log_probs, scored.log_probs) / canary.tolerance
    if not apart <= 1:
        raise _unproven(
            version,
            f"the same prompt gives log-prob {cached.log_probs[0]:.6g} for the next token and, with its prefix "
            f"computed anew, {scored.log_probs[0]:.6g}: keys and values of older weights are used again",
        )
    return max(error, apart)


async def _answer(engine: RolloutEngine, request: GenerationRequest) -> GenerationChunk:
    answer = [chunk async for chunk in engine.generate(request) if chunk.token_ids]
    if not answer:
        raise _unproven(engine.weight_version, "it gave no token for the canary")
    return answer[0]


def _error(found: Sequence[float], expected: Sequence[float]) -> float:
    """Return the median difference of log-probs, each for a nat of the expected one; infinite if one is not finite.

    The median, because rounding may send a few tokens to other experts of a model, and no fault spares half of them.
    """
    if len(found) != len(expected) or not all(map(math.isfinite, found)):
        return math.inf
    return statistics.median(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, expected, strict=True))


def _unproven(version: int, found: str) -> LiveWeightsError:
    return LiveWeightsError(f"the engine says that it serves weight version {version}, but {found}")
