"""What an operator may do: pause, resume, swap weights, abort, change the replicas; and vLLM's calls for trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from aiohttp import web
from msgspec import Meta, Struct

from asyncrl.errors import ResourceError, WeightMismatchError
from asyncrl.interfaces import PauseMode
from asyncrl.rollout.pool_status import PoolStatistics, ReplicaStatus
from asyncrl.serve.call import Call
from asyncrl.serve.failure import Refusal
from asyncrl.serve.weight_door import WeightDoor
from asyncrl.weights.manifest import WeightManifest

__all__ = [
    "AbortAnswer",
    "AbortRequest",
    "Done",
    "PauseRequest",
    "PoolReport",
    "ReplicaList",
    "ReplicaRequest",
    "ServerInfo",
    "UpdateRequest",
    "WeightStatus",
    "WeightsRequest",
    "WorldSize",
    "abort",
    "add_replica",
    "drain_replica",
    "finish_weight_update",
    "init_weight_transfer",
    "pause",
    "pool_report",
    "replicas",
    "resume",
    "server_info",
    "start_weight_update",
    "update_weights",
    "weight_status",
    "weights",
    "world_size",
]


class Done(Struct, kw_only=True):
    """It was done."""

    status: Literal["ok"] = "ok"


class PauseRequest(Struct, kw_only=True):
    """``mode`` may be given in the query too."""

    mode: PauseMode = "keep"


class AbortRequest(Struct, kw_only=True):
    """``request_id`` is the ``X-Request-ID`` of an answer, or of a request that set it."""

    request_id: Annotated[str, Meta(min_length=1, max_length=128)]


class AbortAnswer(Struct, kw_only=True):
    """Choices that were ended."""

    aborted: int


class ReplicaRequest(Struct, kw_only=True):
    """Which replica; to add one on a node of the Ray cluster, a resource that the node offers."""

    name: Annotated[str, Meta(min_length=1, max_length=64, pattern="^[A-Za-z0-9_.-]+$")]
    resource: Annotated[str, Meta(max_length=64, pattern="^[A-Za-z0-9_.:-]*$")] = ""


class ReplicaList(Struct, kw_only=True):
    """All replicas."""

    replicas: list[ReplicaStatus]


class PoolReport(Struct, kw_only=True):
    """Everything ``asyncrl pool top`` shows."""

    model: str
    pool: PoolStatistics
    under_way: int
    sessions: int
    sampled_tokens: int
    ray_address: str = ""
    """Of the cluster whose machines may add replicas; empty if there is none."""


class WeightsRequest(Struct, kw_only=True):
    """One of: prepare the safetensors of a folder or a manifest, commit what is prepared, or both (``swap``)."""

    action: Literal["prepare", "commit", "swap"]
    folder: str | None = None
    manifest: str | None = None
    """base64 of :meth:`WeightManifest.encode`."""
    version: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class WeightStatus(Struct, kw_only=True):
    """Versions."""

    version: int
    prepared: int | None
    replicas: dict[str, int | None]


class UpdateRequest(Struct, kw_only=True):
    """vLLM's ``update_info`` or ``init_info``: here ``{"backend": "manifest", "manifest": base64}``."""

    update_info: dict[str, Any] = {}  # Any: the backend's own
    init_info: dict[str, Any] = {}
    is_checkpoint_format: bool = True


class WorldSize(Struct, kw_only=True):
    """Receivers of weights."""

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
    """The parts of vLLM's configuration that have a meaning here; adapters are not served."""

    model_config: ServedConfig
    parallel_config: ParallelConfig
    lora_config: None = None


class ServerInfo(Struct, kw_only=True):
    """Answer of /server_info."""

    vllm_config: VLLMConfig


async def pool_report(call: Call) -> web.StreamResponse:
    """What the pool holds and does."""
    face = call.face
    return call.answer(
        PoolReport(
            model=face.names[0],
            pool=face.pool.statistics(),
            under_way=face.admission.under_way,
            sessions=len(face.sessions),
            sampled_tokens=face.meters.sampled_tokens,
            ray_address="" if face.joining is None else face.joining.address,
        )
    )


async def pause(call: Call) -> web.StreamResponse:
    """Stop decoding: ``keep`` freezes generations, ``abort`` ends them, ``drain`` lets them finish."""
    mode = call.body_as(PauseRequest).mode
    asked = call.request.query.get("mode")
    if asked is not None:
        if asked not in ("keep", "abort", "drain", "wait"):
            raise Refusal(400, f"mode is {asked[:40]!r}; one of keep, abort, drain")
        mode = "drain" if asked in ("drain", "wait") else "abort" if asked == "abort" else "keep"
    await call.face.pool.pause(mode)
    return call.answer(Done())


async def resume(call: Call) -> web.StreamResponse:
    """Go on decoding."""
    await call.face.pool.resume()
    return call.answer(Done())


async def abort(call: Call) -> web.StreamResponse:
    """End a request; what it has sampled is delivered to its sender."""
    asked = call.body_as(AbortRequest).request_id
    aborted = 0
    for number in range(call.face.running.get(asked, 0)):
        aborted += await call.face.pool.abort(f"{asked}-{number}")
    return call.answer(AbortAnswer(aborted=aborted))


async def replicas(call: Call) -> web.StreamResponse:
    """The replicas, in the order in which they joined."""
    return call.answer(ReplicaList(replicas=list(call.face.pool.replicas())))


async def add_replica(call: Call) -> web.StreamResponse:
    """Start another replica of the served model; it serves once it holds the current weights."""
    asked = call.body_as(ReplicaRequest)
    name, factory = asked.name, call.face.new_replica
    if asked.resource:
        if call.face.joining is None:
            raise Refusal(501, "this server is not connected to a Ray cluster: start it with --ray")
        factory = call.face.joining.at(name, asked.resource)
    if factory is None:
        raise Refusal(501, "this server cannot make replicas")
    if any(replica.name == name for replica in call.face.pool.replicas()):
        raise Refusal(409, f"there is a replica {name!r} already")
    await call.face.pool.add(name, factory)
    return call.answer(ReplicaList(replicas=list(call.face.pool.replicas())), status=201)


async def drain_replica(call: Call) -> web.StreamResponse:
    """Send a replica nothing more, wait until it is idle, and take it out."""
    name = call.body_as(ReplicaRequest).name
    try:
        await call.face.pool.drain(name)
        await call.face.pool.remove(name)
    except ResourceError as error:
        raise Refusal(404, str(error)) from error
    return call.answer(ReplicaList(replicas=list(call.face.pool.replicas())))


# -------------------------------------------------------------------------------------------------------- weights


def _door(call: Call) -> WeightDoor:
    if call.face.weights is None:
        raise Refusal(501, "this server takes no weights: it was made without a transport")
    return call.face.weights


async def weight_status(call: Call) -> web.StreamResponse:
    """The version served, what is prepared, and what each replica holds."""
    face = call.face
    return call.answer(
        WeightStatus(
            version=face.pool.weight_version,
            prepared=face.weights.prepared if face.weights is not None else None,
            replicas={replica.name: replica.weight_version for replica in face.pool.replicas()},
        )
    )


async def weights(call: Call) -> web.StreamResponse:
    """Prepare, commit, or swap (both). Generations under way go on; their tokens say where the cut was."""
    body = call.body_as(WeightsRequest)
    door = _door(call)
    version = body.version
    if body.action != "commit":
        if (body.folder is None) == (body.manifest is None):
            raise Refusal(400, "give a folder or a manifest, one of them")
        if body.manifest is not None:
            manifest = _manifest(body.manifest)
            door.prepare(manifest)
        else:
            manifest = await door.prepare_folder(Path(body.folder or ""), version=version)
        version = manifest.version
    if body.action != "prepare":
        if version is None:
            raise Refusal(400, "commit needs the version")
        await door.commit(version)
    return await weight_status(call)


def _manifest(text: Any) -> WeightManifest:
    """Any: what a trainer sent."""
    import base64
    import binascii

    if not isinstance(text, str):
        raise Refusal(400, "the manifest is base64 in a string")
    try:
        return WeightManifest.decode(base64.b64decode(text, validate=True))
    except (binascii.Error, WeightMismatchError) as error:
        raise Refusal(400, f"no manifest: {error}") from error


# ------------------------------------------------------------------------------------------ vLLM's calls for trainers


async def world_size(call: Call) -> web.StreamResponse:
    """How many replicas would receive weights."""
    return call.answer(WorldSize(world_size=len(call.face.pool.replicas())))


async def server_info(call: Call) -> web.StreamResponse:
    """What is served, in the places where vLLM's clients look for it."""
    face = call.face
    model = ServedConfig(model=face.names[0], dtype=f"torch.{face.dtype}", max_model_len=face.context_tokens)
    parallel = ParallelConfig(data_parallel_size=len(face.pool.replicas()))
    return call.answer(ServerInfo(vllm_config=VLLMConfig(model_config=model, parallel_config=parallel)))


async def init_weight_transfer(call: Call) -> web.StreamResponse:
    """Agree on how weights come: only as manifests. A collective (``master_address``) is refused."""
    _door(call)
    backend = call.body_as(UpdateRequest).init_info.get("backend")
    if backend != "manifest":
        raise Refusal(
            501,
            "weights come as manifests of a weight transport here: init_info must be "
            '{"backend": "manifest"}; a collective over NCCL is not joined',
        )
    return call.answer(Done())


async def start_weight_update(call: Call) -> web.StreamResponse:
    """Weights are about to come."""
    _door(call)
    return call.answer(Done())


async def update_weights(call: Call) -> web.StreamResponse:
    """Prepare the manifest in ``update_info``."""
    info = call.body_as(UpdateRequest).update_info
    if "manifest" not in info:
        raise Refusal(501, 'update_info must be {"manifest": base64}; tensors over NCCL are not received')
    _door(call).prepare(_manifest(info["manifest"]))
    return call.answer(Done())


async def finish_weight_update(call: Call) -> web.StreamResponse:
    """Commit what was prepared."""
    door = _door(call)
    if door.prepared is None:
        raise Refusal(409, "no weights were prepared: update_weights comes first")
    await door.commit(door.prepared)
    return call.answer(Done())
