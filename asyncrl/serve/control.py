"""The control plane: pause, resume, update weights, abort, add and drain replicas; and vLLM's calls for trainers."""

from __future__ import annotations

import base64
from contextlib import nullcontext
from typing import Annotated, Any, Literal

from aiohttp import web
from msgspec import Meta, Struct

from asyncrl.errors import ResourceError, WeightMismatchError
from asyncrl.interfaces import PauseMode
from asyncrl.rollout.replica import PoolStatistics, ReplicaStatus
from asyncrl.serve.call import Call
from asyncrl.serve.errors import APIError
from asyncrl.serve.native import Done
from asyncrl.serve.pool import WeightUpdater
from asyncrl.storage import path_or_url
from asyncrl.weights import WeightManifest


class PauseRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """``mode`` may be given in the query too."""

    mode: PauseMode = "keep"


class AbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """``request_id`` is the ``X-Request-ID`` of an answer, or of a request that set it."""

    request_id: Annotated[str, Meta(min_length=1, max_length=128)]


class AbortAnswer(Struct, kw_only=True):
    """Number of choices that were aborted."""

    aborted: int


class ReplicaRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """The replica's name; to add it on a node of the Ray cluster, a resource of that node, and its share of GPUs."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[A-Za-z0-9_.-]+$")]
    resource: Annotated[str, Meta(max_length=64, pattern="^[A-Za-z0-9_.:-]*$")] = ""
    gpus: Annotated[float, Meta(ge=0, le=1024)] | None = None
    """Reserved there; without it as many as the engine takes, and 0 on a node without any."""


class ReplicaList(Struct, kw_only=True):
    replicas: list[ReplicaStatus]


class PoolReport(Struct, kw_only=True):
    """What ``asyncrl pool top`` shows."""

    model: str
    pool: PoolStatistics
    running: int
    sessions: int
    sampled_tokens: int
    ray_address: str = ""
    """Of the cluster whose machines may add replicas; empty without one."""


class WeightsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """``prepare`` the safetensors of a folder or a manifest, ``commit`` what is prepared, or both (``swap``)."""

    action: Literal["prepare", "commit", "swap"]
    folder: str | None = None
    adapter: Annotated[str, Meta(max_length=128)] | None = None
    """Name under which the adapter in the folder is served, by default the folder's. With an empty one it answers
    requests for the model itself."""
    manifest: str | None = None
    """base64 of :meth:`WeightManifest.encode`."""
    version: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class Followed(Struct, kw_only=True):
    url: str
    newest: int | None
    """The version that was announced last there."""
    problem: str
    """Why that one is not served, or that none is announced; empty if it is."""


class WeightStatus(Struct, kw_only=True):
    version: int
    prepared: int | None
    replicas: dict[str, int | None]
    adapters: dict[str, int] = {}
    """Versions of the adapters that are served, by name."""
    follows: Followed | None = None


class UpdateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's ``update_info`` or ``init_info``: here ``{"backend": "manifest", "manifest": base64}``."""

    update_info: dict[str, Any] = {}  # Any: the backend's own
    init_info: dict[str, Any] = {}
    is_checkpoint_format: bool = True


class WorldSize(Struct, kw_only=True):
    world_size: int


class ServedConfig(Struct, kw_only=True):
    """``dtype`` as torch writes it."""

    model: str
    dtype: str
    max_model_len: int | None


class ParallelConfig(Struct, kw_only=True):
    """Replicas are what vLLM calls data parallel."""

    data_parallel_size: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


class VLLMConfig(Struct, kw_only=True):
    """The parts of vLLM's configuration that apply here."""

    model_config: ServedConfig
    parallel_config: ParallelConfig
    lora_config: None = None


class ServerInfo(Struct, kw_only=True):
    vllm_config: VLLMConfig


_MODES: dict[str, PauseMode] = {"keep": "keep", "abort": "abort", "drain": "drain", "wait": "drain"}
"""By their names in the query; ``wait`` is vLLM's."""


async def pool_report(call: Call) -> web.StreamResponse:
    """Report statistics of the pool and its replicas."""
    state = call.state
    return call.answer(
        PoolReport(
            model=state.names[0],
            pool=state.replica_pool.statistics(),
            running=state.concurrency.running,
            sessions=len(state.sessions),
            sampled_tokens=state.metrics.sampled_tokens,
            ray_address="" if state.ray_replicas is None else state.ray_replicas.address,
        )
    )


async def pause(call: Call) -> web.StreamResponse:
    """Stop decoding: ``keep`` freezes generations, ``abort`` ends them, ``drain`` lets them finish."""
    mode = call.body_as(PauseRequest).mode
    query = call.request.query.get("mode")
    if query is not None:
        if query not in _MODES:
            raise APIError(400, f"mode is {query[:40]!r}; one of keep, abort, drain")
        mode = _MODES[query]
    await call.state.replica_pool.pause(mode)
    return call.answer(Done())


async def resume(call: Call) -> web.StreamResponse:
    """Resume decoding."""
    await call.state.replica_pool.resume()
    return call.answer(Done())


async def abort(call: Call) -> web.StreamResponse:
    """Abort a request; its sender receives what was sampled."""
    request_id = call.body_as(AbortRequest).request_id
    aborted = 0
    for number in range(call.state.choices_by_request.get(request_id, 0)):
        aborted += await call.state.replica_pool.abort(f"{request_id}-{number}")
    return call.answer(AbortAnswer(aborted=aborted))


async def replicas(call: Call) -> web.StreamResponse:
    """List the replicas in the order in which they were added."""
    return _replicas(call)


async def add_replica(call: Call) -> web.StreamResponse:
    """Start another replica of the served model; it serves once it holds the current weights."""
    body, state = call.body_as(ReplicaRequest), call.state
    if body.gpus is not None and not body.resource:
        raise APIError(400, "gpus are reserved on a node of a Ray cluster: name a resource of it")
    adapters, updater = not body.resource, state.weights
    try:
        if body.resource:
            if state.ray_replicas is None:
                raise APIError(501, "this server is not connected to a Ray cluster: start it with --ray")
            factory = state.ray_replicas.factory(body.name, body.resource, gpus=body.gpus)
        elif state.new_replica is None:
            raise APIError(501, "this server cannot make replicas")
        else:
            factory = state.new_replica(body.name)
        with updater.admitting(body.name, adapters=adapters) if updater is not None else nullcontext():
            await state.replica_pool.add(body.name, factory)
    except ResourceError as error:
        raise APIError(409, str(error)) from error
    return _replicas(call, status=201)


async def drain_replica(call: Call) -> web.StreamResponse:
    """Send a replica no more requests, wait until it is idle, and remove it."""
    name = call.body_as(ReplicaRequest).name
    try:
        await call.state.replica_pool.drain(name)
        await call.state.replica_pool.remove(name)
    except ResourceError as error:
        raise APIError(404, str(error)) from error
    return _replicas(call)


def _replicas(call: Call, *, status: int = 200) -> web.Response:
    return call.answer(ReplicaList(replicas=list(call.state.replica_pool.replicas())), status=status)


# -------------------------------------------------------------------------------------------------------- weights


def _updater(call: Call) -> WeightUpdater:
    if call.state.weights is None:
        raise APIError(501, "this server takes no weights: it was made without a transport")
    if call.state.follower is not None:
        raise APIError(
            409, f"this server follows {call.state.follower.url}: it takes no other weights; serve without --follow"
        )
    return call.state.weights


async def weight_status(call: Call) -> web.StreamResponse:
    """Report the version that is served, the one that is prepared, and those of the replicas."""
    state = call.state
    follower = state.follower
    return call.answer(
        WeightStatus(
            version=state.replica_pool.weight_version,
            prepared=state.weights.prepared if state.weights is not None else None,
            replicas={replica.name: replica.weight_version for replica in state.replica_pool.replicas()},
            adapters=dict(state.weights.adapters) if state.weights is not None else {},
            follows=Followed(url=follower.url, newest=follower.newest, problem=follower.problem) if follower else None,
        )
    )


async def weights(call: Call) -> web.StreamResponse:
    """Prepare, commit, or swap (both). Running generations continue under the new version."""
    body = call.body_as(WeightsRequest)
    updater = _updater(call)
    if body.action == "commit":
        if unread := [name for name in ("folder", "adapter", "manifest") if getattr(body, name) is not None]:
            raise APIError(400, f"commit takes the version that is prepared, and no {unread[0]}: leave it out, or swap")
        if body.version is None:
            raise APIError(400, "commit needs the version")
        await updater.commit(body.version)
        return await weight_status(call)
    if (body.folder is None) == (body.manifest is None):
        raise APIError(400, "give either a folder or a manifest")
    if body.adapter is not None and body.folder is None:
        raise APIError(400, "adapter is the name for that of a folder: a manifest has a name of its own")
    if body.folder is not None:
        change = updater.swap if body.action == "swap" else updater.prepare_folder
        await change(path_or_url(body.folder), version=body.version, adapter=body.adapter)
        return await weight_status(call)
    manifest = _manifest(body.manifest)
    if body.version not in (None, manifest.version):
        raise APIError(400, f"version is {body.version}, and {manifest.version} in the manifest: leave it out")
    if body.action == "swap":
        await updater.swap_manifest(manifest)
    else:
        updater.prepare(manifest)
    return await weight_status(call)


def _manifest(text: Any) -> WeightManifest:
    """Any: JSON that a trainer sent."""
    if not isinstance(text, str):
        raise APIError(400, "the manifest is base64 in a string")
    try:
        return WeightManifest.decode(base64.b64decode(text, validate=True))
    except (ValueError, WeightMismatchError) as error:
        raise APIError(400, f"not a manifest: {error}") from error


# ------------------------------------------------------------------------------------------ vLLM's calls for trainers


async def world_size(call: Call) -> web.StreamResponse:
    """Count the replicas that would receive weights."""
    return call.answer(WorldSize(world_size=len(call.state.replica_pool.replicas())))


async def server_info(call: Call) -> web.StreamResponse:
    """Describe the served model in vLLM's schema."""
    state = call.state
    model = ServedConfig(model=state.names[0], dtype=f"torch.{state.dtype}", max_model_len=state.context_tokens)
    parallel = ParallelConfig(data_parallel_size=len(state.replica_pool.replicas()))
    return call.answer(ServerInfo(vllm_config=VLLMConfig(model_config=model, parallel_config=parallel)))


async def init_weight_transfer(call: Call) -> web.StreamResponse:
    """Agree on manifests as the form of weight updates. A collective (``master_address``) is refused."""
    _updater(call)
    backend = call.body_as(UpdateRequest).init_info.get("backend")
    if backend != "manifest":
        raise APIError(
            501,
            "weights are taken as manifests of a weight transport: init_info must be "
            '{"backend": "manifest"}; a collective over NCCL is not joined',
        )
    return call.answer(Done())


async def start_weight_update(call: Call) -> web.StreamResponse:
    """Announce an update. Nothing has to be done for it."""
    _updater(call)
    return call.answer(Done())


async def update_weights(call: Call) -> web.StreamResponse:
    """Prepare the manifest in ``update_info``."""
    info = call.body_as(UpdateRequest).update_info
    if "manifest" not in info:
        raise APIError(501, 'update_info must be {"manifest": base64}; tensors over NCCL are not received')
    _updater(call).prepare(_manifest(info["manifest"]))
    return call.answer(Done())


async def finish_weight_update(call: Call) -> web.StreamResponse:
    """Commit what was prepared."""
    updater = _updater(call)
    if updater.prepared is None:
        raise APIError(409, "no weights are prepared: call update_weights first")
    await updater.commit(updater.prepared)
    return call.answer(Done())
