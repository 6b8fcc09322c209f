"""The control plane, vLLM's calls for trainers, and probes."""

from __future__ import annotations

import asyncio
import base64
import json
import threading

import pytest
import torch
from safetensors.torch import save_file

from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.serve.limits import Limits
from asyncrl.serve.pool import WeightUpdater
from asyncrl.weights import WeightManifest
from engines.weights.shared_memory import SharedMemoryTransport

GENERATE = {"prompt_token_ids": [5, 6]}


@pytest.fixture
def transport(tmp_path):
    made = SharedMemoryTransport(namespace="serve-test", directory=str(tmp_path))
    yield made
    made.close()


def with_weights(served, transport):
    served.state.pool._transport = transport
    assert isinstance(served.state.pool, ReplicaPool)
    served.state.weights = WeightUpdater(served.state.pool, transport)


async def test_pause_and_resume(serve):
    async with serve() as served:
        await served.control("POST", "/pause")
        waiting = asyncio.create_task(served.post("/generate", GENERATE))
        while not served.state.pool.statistics().waiting:
            await asyncio.sleep(0)
        assert (await served.control("GET", "/pool"))["pool"]["paused"] is True
        await served.control("POST", "/resume")
        assert (await waiting)["token_ids"] == [7, 8, 9]
        await served.control("POST", "/pause?mode=wait")
        await served.control("POST", "/pause?mode=later", status=400)
        await served.control("POST", "/pause", {"mode": "later"}, status=400)
        assert (await served.get("/health", status=503))["error"] == "paused"


async def test_new_weights_from_a_folder_under_load(serve, transport, tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    async with serve(lambda prompt: [7] * 200, token_s=0.001) as served:
        with_weights(served, transport)
        running = asyncio.create_task(served.post("/generate", GENERATE))
        while not served.engines[0].requests:
            await asyncio.sleep(0)
        status = await served.control("POST", "/weights", {"action": "swap", "folder": str(tmp_path)})
        assert status == {"version": 1, "prepared": None, "replicas": {"r0": 1}, "adapters": {}, "follows": None}
        answer = await running
        versions = answer["weight_versions"]
        assert [(span["version"], span["end"]) for span in versions][-1] == (1, 200)
        assert versions[0]["start"] == 0
        refused = await served.control(
            "POST", "/weights", {"action": "swap", "folder": str(tmp_path), "version": 1}, status=409
        )
        assert "not newer" in refused["error"]["message"]
        await served.control("POST", "/weights", {"action": "commit", "version": 5}, status=409)
        await served.control("POST", "/weights", {"action": "swap", "folder": str(tmp_path / "no")}, status=409)
        await served.control("POST", "/weights", {"action": "prepare"}, status=400)


async def test_an_operator_that_disconnects_during_a_swap_does_not_block_the_next(serve, transport, tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    swap = {"action": "swap", "folder": str(tmp_path)}
    publishing, publish = threading.Event(), transport.publish
    transport.publish = lambda *arguments, **options: (publishing.set(), publish(*arguments, **options))[1]
    async with serve() as served:
        with_weights(served, transport)
        with transport._lock:  # which publishing waits for
            cancelled = asyncio.create_task(served.control("POST", "/weights", swap))
            assert await asyncio.to_thread(publishing.wait, 10)
            cancelled.cancel()
            while any(each.transport for each in served.server._runners[0].server.connections):
                await asyncio.sleep(0)
        assert (await served.control("POST", "/weights", swap))["version"] == 2
        assert transport.versions == (2,)
        assert (await served.control("POST", "/weights", {**swap, "action": "prepare"}))["prepared"] == 3
        assert (await served.control("POST", "/weights", {**swap, "action": "prepare"}))["prepared"] == 4
        assert (await served.control("POST", "/weights", {"action": "commit", "version": 4}))["version"] == 4
        assert transport.versions == (4,)


async def test_what_an_action_does_not_read_is_refused(serve, transport):
    async with serve() as served:
        with_weights(served, transport)
        packed = base64.b64encode(transport.publish([("w", torch.ones(2))], version=3).encode()).decode()
        for action in ("prepare", "swap"):
            wrong = {"action": action, "manifest": packed, "version": 7}
            refused = await served.control("POST", "/weights", wrong, status=400)
            assert "version is 7, and 3 in the manifest" in refused["error"]["message"]
        status = await served.control("POST", "/weights", {"action": "prepare", "manifest": packed, "version": 3})
        assert status["prepared"] == 3
        for name, value in (("folder", "/new"), ("adapter", "a"), ("manifest", packed)):
            wrong = {"action": "commit", "version": 3, name: value}
            refused = await served.control("POST", "/weights", wrong, status=400)
            assert f"and no {name}" in refused["error"]["message"]
        assert (await served.control("POST", "/weights", {"action": "commit", "version": 3}))["version"] == 3


async def test_vllms_calls_update_the_weights(serve, transport):
    async with serve() as served:
        with_weights(served, transport)
        assert await served.control("GET", "/get_world_size") == {"world_size": 1}
        nccl = {"init_info": {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2}}
        await served.control("POST", "/init_weight_transfer_engine", nccl, status=501)
        await served.control("POST", "/init_weight_transfer_engine", {"init_info": {"backend": "manifest"}})
        manifest = transport.publish([("w", torch.ones(2))], version=3)
        await served.control("POST", "/finish_weight_update", status=409)
        await served.control("POST", "/pause?mode=keep")
        await served.control("POST", "/start_weight_update", {"is_checkpoint_format": True})
        packed = base64.b64encode(manifest.encode()).decode()
        await served.control("POST", "/update_weights", {"update_info": {"manifest": packed}})
        assert (await served.control("GET", "/weights"))["prepared"] == 3
        await served.control("POST", "/finish_weight_update")
        await served.control("POST", "/resume")
        assert (await served.post("/generate", GENERATE))["weight_versions"] == [{"version": 3, "start": 0, "end": 3}]
        for wrong in ("!", "\u00e9"):
            await served.control("POST", "/update_weights", {"update_info": {"manifest": wrong}}, status=400)
        assert WeightManifest.decode(base64.b64decode(packed)).version == 3


async def test_server_info_in_vllms_schema(serve):
    async with serve(replicas=2) as served:
        served.state.context_tokens, served.state.dtype = 512, "bfloat16"
        config = (await served.control("GET", "/server_info?config_format=json"))["vllm_config"]
        assert config["model_config"] == {"model": "tiny", "dtype": "torch.bfloat16", "max_model_len": 512}
        assert config["parallel_config"]["data_parallel_size"] == 2
        assert (await served.control("GET", "/v1/models"))["data"][0]["max_model_len"] == 512


async def test_each_plane_has_its_openapi_document(serve):
    async with serve() as served:
        user, control = await served.get("/openapi.json"), await served.control("GET", "/openapi.json")
        assert "/replicas" not in user["paths"]
        assert set(control["paths"]) > set(user["paths"])
        [mode] = [each for each in control["paths"]["/pause"]["post"]["parameters"] if each["in"] == "query"]
        assert mode["schema"]["enum"] == ["keep", "abort", "drain", "wait"]
        assert "401" not in user["paths"]["/livez"]["get"]["responses"]
        streamed = user["paths"]["/v1/messages"]["post"]["responses"]["200"]["content"]["text/event-stream"]
        assert {"$ref": "#/components/schemas/MessageStart"} in streamed["x-asyncrl-event"]["anyOf"]


async def test_abort_by_the_id_of_a_request(serve):
    async with serve(lambda prompt: [7] * 10_000, token_s=0.001) as served:
        headers = {"X-Request-ID": "mine"}
        running = asyncio.create_task(served.post("/generate", GENERATE, headers=headers))
        while not served.engines[0].statistics().running:
            await asyncio.sleep(0)
        await served.post("/generate", GENERATE, headers=headers, status=409)
        assert await served.control("POST", "/abort", {"request_id": "mine"}) == {"aborted": 1}
        answer = await running
        assert answer["finish_reason"] == "abort"
        assert await served.control("POST", "/abort", {"request_id": "mine"}) == {"aborted": 0}


async def test_replicas_are_added_and_drained(serve):
    async with serve() as served:
        answer = await served.control("POST", "/replicas", {"name": "second"}, status=201)
        assert [replica["name"] for replica in answer["replicas"]] == ["r0", "second"]
        await served.control("POST", "/replicas", {"name": "second"}, status=409)
        answer = await served.control("POST", "/replicas/drain", {"name": "r0"})
        assert [replica["name"] for replica in answer["replicas"]] == ["second"]
        await served.control("POST", "/replicas/drain", {"name": "r0"}, status=404)
        assert (await served.post("/generate", GENERATE))["finish_reason"] == "stop"


async def test_probes_and_metrics(serve):
    async with serve() as served:
        assert await served.get("/livez") == {"status": "ok"}
        assert await served.get("/readyz") == {"status": "ok"}
        report = await served.get("/health")
        assert (report["healthy"], report["serving"], report["rendering"]["incremental"]) == (True, 1, True)
        known = [report["rendering"][name] for name in ("chat", "roles", "tools", "tool_calls", "thinking")]
        assert known == [True, ["system", "developer", "tool"], False, True, False]
        await served.post("/generate", GENERATE)
        async with served.client.get(f"{served.url}/metrics") as answer:
            text = await answer.text()
        assert 'asyncrl_requests_total{route="POST /generate",status="200"} 1.0' in text
        assert "asyncrl_sampled_tokens_total 3.0" in text
        assert 'asyncrl_replica_weight_version{replica="r0"} 0.0' in text


async def test_a_server_is_not_ready_while_it_is_paused(serve):
    async with serve() as served:
        await served.control("POST", "/pause")
        await served.get("/readyz", status=503)
        assert (await served.get("/health", status=503))["error"] == "paused"
        await served.control("POST", "/resume")
        await served.get("/readyz")


async def test_a_probe_that_is_aborted_has_shown_nothing(serve):
    async with serve(lambda prompt: [7] * 10, token_s=10.0) as served:
        probing = asyncio.create_task(served.get("/health", status=503))
        while not served.engines[0].requests:
            await asyncio.sleep(0)
        await served.control("POST", "/pause?mode=abort")
        assert (await probing)["error"] == "no token was generated"


async def test_a_full_server_is_healthy_and_calls_share_a_probe(serve):
    limits = Limits(concurrent_requests_per_key=1, concurrent_requests=1)
    async with serve(lambda prompt: [7] * 10_000, token_s=0.05, limits=limits) as served:
        running = asyncio.create_task(served.post("/generate", GENERATE))
        while not served.engines[0].requests:
            await asyncio.sleep(0)
        reports = await asyncio.gather(*(served.get("/health") for _ in range(20)))
        assert all(report["healthy"] for report in reports)
        assert len(served.engines[0].requests) < 10
        assert all(request.probe for request in served.engines[0].requests[1:])
        running.cancel()


async def test_drain_finishes_running_requests_and_takes_no_more(serve):
    async with serve(lambda prompt: [7] * 30, token_s=0.005) as served:
        running = asyncio.create_task(served.post("/generate", GENERATE))
        while not served.engines[0].requests:
            await asyncio.sleep(0)
        draining = asyncio.create_task(served.server.drain())
        await asyncio.sleep(0)
        await served.post("/generate", GENERATE, status=503)
        await served.get("/readyz", status=503)
        await served.get("/livez")
        assert len((await running)["token_ids"]) == 30
        await asyncio.wait_for(draining, 5)


async def test_the_openapi_document_has_every_schema(serve):
    async with serve() as served:
        document = await served.get("/openapi.json")
        paths = document["paths"]
        assert "/pause" not in paths
        assert set(paths["/v1/chat/completions"]["post"]["responses"]) >= {"200", "400", "401", "429", "503"}
        text = json.dumps(document)
        for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
            assert name in document["components"]["schemas"]


async def test_a_streamed_generation_numbers_its_versions(serve):
    async with serve(lambda prompt: [7, 8, 9, 10]) as served:
        lines = await served.events("/generate", {**GENERATE, "stream": True})
        events = [json.loads(line[6:]) for line in lines]
        assert [token for event in events for token in event["token_ids"]] == [7, 8, 9, 10]
        assert [event["weight_versions"][0]["start"] for event in events] == [0, 1, 2, 3]
        assert events[-1]["finish_reason"] == "stop"
