"""Unmodified clients that cannot be installed beside asyncrl, each in an environment that the test creates.

* verifiers pins datasets below 4.7 and regex below 2026.4, and brings forty packages of its own; 0.1.14 is the last one
  with ``Environment.evaluate``.
* TRL needs datasets, pandas and pyarrow, and reads transformers and torch from the environment that runs this test.

Creating one takes a minute or two: ``ASYNCRL_TEST_ENVIRONMENTS=FOLDER`` keeps them.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import site
import sys
import venv
from pathlib import Path

import pytest
import torch

from asyncrl.serve.middleware import KeyRing
from asyncrl.serve.pool import WeightUpdater
from engines.weights.shared_memory import SharedMemoryTransport

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

OPERATOR_KEY = "operator-key-0123456789"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"

VERIFIERS = """
import json, sys
import verifiers as vf
from datasets import Dataset

def gladly(completion, answer, **_):
    return float(answer in str(completion[-1]["content"]))

rows = Dataset.from_list([{"question": f"say it again please {n}", "answer": "gladly"} for n in range(3)])
environment = vf.SingleTurnEnv(dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[gladly]))
client = vf.ClientConfig(api_base_url=sys.argv[1], api_key_var="NO_KEY_NEEDED")
result = environment.evaluate_sync(
    client, "tiny", num_examples=3, rollouts_per_example=2, sampling_args={"max_tokens": 50, "temperature": 1.0}
)
print(json.dumps([output["reward"] for output in result["outputs"]]))
"""

TRL = """
import asyncio, collections, json, sys
import aiohttp
from accelerate import PartialState

PartialState()  # what the trainer does first, and TRL's log needs
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
from trl.experimental.async_grpo.vllm_client import VLLMClient

url, manifest = sys.argv[1:]
client = VLLMClient(url, server_timeout=30)
client.wait_for_server_ready()
seen = {
    "context": client.get_max_model_len(),
    "dtype": client.get_dtype(),
    "parallel": client.get_server_info()["parallel_config"]["data_parallel_size"],
    "world": client.get_world_size(),
}
try:
    client.init_weight_transfer_engine({"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1})
except Exception as refused:
    seen["nccl"] = str(refused)
client.init_weight_transfer_engine({"backend": "manifest"})
client.pause()
client.start_weight_update()
client.update_weights({"manifest": manifest})
client.finish_weight_update()
client.resume()

async def turn():
    loop = object.__new__(_AsyncRolloutLoop)
    loop.vllm_server_url, loop.model_name, loop.lora_name, loop.request_timeout = url, "tiny", None, 30
    loop.max_tokens, loop.temperature, loop.top_p, loop.top_k = 20, 1.0, 1.0, -1
    loop.min_p, loop.repetition_penalty, loop._counters = None, 1.0, collections.Counter()
    async with aiohttp.ClientSession() as loop.session:
        return await loop._generate_one_turn([5, 6, 7])

seen["ids"], seen["log_probs"] = asyncio.run(turn())
print(json.dumps(seen))
"""


async def interpreter(name: str, *packages: str, beside: bool, folder: Path) -> Path:
    """A Python that has ``packages``; ``beside`` ones see those of this environment too, and keep to its versions."""
    kept = os.environ.get("ASYNCRL_TEST_ENVIRONMENTS")
    place = (Path(kept) if kept else folder) / name
    done = place / "done"
    if not done.exists():
        venv.create(place, with_pip=True, clear=True)
        if beside:
            [library] = place.glob("lib/python*/site-packages")
            (library / "beside.pth").write_text("\n".join(site.getsitepackages()))
        constraints = ["-c", str(CONSTRAINTS)] if beside else []
        await run(place / "bin" / "python", "-m", "pip", "install", "-q", *constraints, *packages, timeout_s=900)
        done.touch()
    return place / "bin" / "python"


async def run(python: Path, *arguments: str, timeout_s: float) -> str:
    """What it prints.

    Raises:
        AssertionError: it failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    process = await asyncio.create_subprocess_exec(
        str(python), *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        out, error = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, error.decode()[-4000:]
    return out.decode()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="verifiers does not say that it runs there")
async def test_an_environment_of_verifiers_evaluates_the_pool(serve, tmp_path):
    python = await interpreter("verifiers", "verifiers==0.1.14", beside=False, folder=tmp_path)
    async with serve(lambda prompt: "it again, gladly<|end|>") as served:
        rewards = json.loads((await run(python, "-c", VERIFIERS, f"{served.url}/v1", timeout_s=300)).splitlines()[-1])
        assert rewards == [1.0] * 6
        await run(python, "-c", VERIFIERS, f"{served.url}/sessions/job/v1", timeout_s=300)
        status = await served.get("/sessions/job")
        assert (status["turns"], status["branches"]) == (6, 6)


async def test_trl_drives_the_pool(serve, tmp_path):
    python = await interpreter("trl", "trl==1.16.0", beside=True, folder=tmp_path)
    transport = SharedMemoryTransport(namespace="trl-test", directory=str(tmp_path))
    keys = KeyRing({"trainer": OPERATOR_KEY})
    async with serve(lambda prompt: [7, 8, 9], operators=keys, control_port=0) as served:
        served.state.context_tokens, served.state.dtype = 512, "float32"
        served.state.pool._transport = transport
        served.state.weights = WeightUpdater(served.state.pool, transport)
        manifest = base64.b64encode(transport.publish([("w", torch.ones(2))], version=3).encode()).decode()
        url = served.server.control_url.replace("http://", f"http://trl:{OPERATOR_KEY}@")
        seen = json.loads((await run(python, "-c", TRL, url, manifest, timeout_s=300)).splitlines()[-1])
        assert "manifest" in seen.pop("nccl")
        assert seen == {
            "context": 512,
            "dtype": "torch.float32",
            "parallel": 1,
            "world": 1,
            "ids": [7, 8, 9],
            "log_probs": [-0.5] * 3,
        }
        assert served.state.pool.weight_version == 3
        assert not served.state.pool.statistics().paused
    transport.close()
