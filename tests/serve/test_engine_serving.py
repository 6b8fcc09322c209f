"""``asyncrl serve`` on vLLM and on SGLang, from the command line to Ctrl-C in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
from safetensors.torch import load_file, save_file

from asyncrl.errors import InfrastructureError
from asyncrl.serve.control_client import ControlClient
from engines.training.scratch import make_scratch_model

ROOT = Path(__file__).parents[2]
CONVERSATION = [{"role": "user", "content": "count to three"}, {"role": "assistant", "content": "one two three"}]
PROMPT = [5, 6, 7]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "of": {"enum": ["red", "green"]}},
    "required": ["age", "of"],
    "additionalProperties": False,
}


def engine(name: str) -> Any:
    python = os.environ.get(f"ASYNCRL_{name.upper()}_PYTHON") or str(ROOT / f".venv-{name}/bin/python")
    missing = pytest.mark.skipif(shutil.which(python) is None, reason=f"no {name} at {python}: asyncrl engine install")
    return pytest.param(name, python, marks=[getattr(pytest.mark, name), missing, pytest.mark.timeout(400)], id=name)


def log_probs(folder: Path, tokens: list[int]) -> Any:
    """Return the log-probs of each next token by the model in ``folder``, for each of ``tokens``."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()


@dataclass
class Command:
    """A running ``asyncrl serve``."""

    process: asyncio.subprocess.Process
    url: str
    control: str
    folder: Path
    client: aiohttp.ClientSession

    async def ask(self, path: str, body: dict[str, Any], *, status: int = 200) -> Any:
        async with self.client.post(self.url + path, json=body) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def get(self, path: str) -> Any:
        async with self.client.get(self.url + path) as answer:
            return await answer.json()

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async with self.client.post(self.url + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))


@contextlib.asynccontextmanager
async def serving(engine: str, python: str, folder: Path) -> AsyncIterator[Command]:
    model, control, log = folder / "tiny", str(folder / "c.sock"), folder / "stderr"
    make_scratch_model(model, conversations=[CONVERSATION] * 8, heads=2, hidden_size=64, layers=2, intermediate_size=96)
    size = "kv_cache_bytes=67108864" if engine == "vllm" else "kv_cache_tokens=8192"
    command = ["serve", str(model), "--engine", engine, "--engine-python", python, "--port", "0"]
    command += ["--control-socket", control, "--engine-option", size, "--engine-option", "dtype=float32"]
    command += ["--model-name", "tiny", "--model-name", "policy"]
    with log.open("wb") as error:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "asyncrl", *command),
            stdout=asyncio.subprocess.PIPE,
            stderr=error,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            start_new_session=True,  # a terminal of its own
        )
    assert process.stdout is not None
    try:
        url = ""
        while not url:
            line = (await process.stdout.readline()).decode()
            assert line, log.read_text()
            url = line.split()[-1].removesuffix("/generate") if "tokens" in line else ""
        async with aiohttp.ClientSession() as client:
            yield Command(process, url, control, folder, client)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.mark.parametrize(("name", "python"), [engine("vllm"), engine("sglang")])
async def test_chats_streams_weight_updates_and_draining(name: str, python: str, tmp_path: Path) -> None:
    async with serving(name, python, tmp_path) as command:
        chat = {"model": "tiny", "messages": CONVERSATION[:1], "max_tokens": 6, "temperature": 0}
        answer = await command.ask("/v1/chat/completions", {**chat, "return_token_ids": True, "logprobs": True})
        (choice,) = answer["choices"]
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == len(choice["logprobs"]["content"])
        parts = [part["choices"][0]["delta"] async for part in command.stream("/v1/chat/completions", chat)]
        assert "".join(part.get("content") or "" for part in parts) == choice["message"]["content"]

        tokens = {"prompt_token_ids": PROMPT, "max_new_tokens": 12, "temperature": 0}
        whole = await command.ask("/generate", tokens)
        pieces = [piece async for piece in command.stream("/generate", tokens)]
        assert [token for piece in pieces for token in piece["token_ids"]] == whole["token_ids"]
        assert whole["weight_versions"] == [{"version": 0, "start": 0, "end": len(whole["token_ids"])}]

        few = {**tokens, "allowed_token_ids": [8, 9], "bad_words": ["x"], "min_tokens": 12, "repetition_penalty": 1.5}
        assert set((await command.ask("/generate", few))["token_ids"]) <= {8, 9}
        forbidden = await command.ask("/generate", {**few, "allowed_token_ids": [1]}, status=400)
        assert "together forbid every token" in forbidden["error"]["message"]

        # Under every name of the model, the log-probs of a prompt alone are those of its forward pass.
        assert [card["id"] for card in (await command.get("/v1/models"))["data"]] == ["tiny", "policy"]
        expected = await asyncio.to_thread(log_probs, command.folder / "tiny", PROMPT)
        scored = {"model": "policy", "prompt": PROMPT, "max_tokens": 0, "echo": True, "prompt_logprobs": 2}
        (choice,) = (await command.ask("/v1/completions", {**scored, "logprobs": 1}))["choices"]
        first, *given = choice["logprobs"]["token_logprobs"]
        assert (first, choice["finish_reason"]) == (None, "length")
        assert given == pytest.approx([expected[at, token] for at, token in enumerate(PROMPT[1:])], abs=1e-3)
        nothing, *places = choice["prompt_logprobs"]
        assert nothing is None
        for at, place in enumerate(places):
            by_rank = {each["rank"]: each["logprob"] for each in place.values() if each["rank"]}
            assert by_rank[1] == pytest.approx(expected[at].max(), abs=1e-3)
        theirs = {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": 0}
        answer = await command.ask("/generate", {**theirs, "sampling_params": {"max_new_tokens": 0}})
        assert [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]] == [None, *given]

        # Samples satisfy a schema, and an invalid grammar is the client's error.
        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
        for temperature in (0, 1):
            form = {**chat, "response_format": schema, "max_tokens": 200, "temperature": temperature, "logprobs": True}
            (choice,) = (await command.ask("/v1/chat/completions", form))["choices"]
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        either = {**tokens, "grammar": 'start: "one" | "two"'}
        assert sum((await command.ask("/generate", either))["log_probs"][-1:]) > -1e-3  # only the end can follow
        await command.ask("/generate", {**tokens, "grammar": "no grammar"}, status=400)

        # Weights that lack a tensor are refused by name, and the replica goes on.
        weights = load_file(command.folder / "tiny" / "model.safetensors")
        lacking = command.folder / "lacking"
        lacking.mkdir()
        save_file({key: weights[key] for key in weights if key != "model.norm.weight"}, lacking / "model.safetensors")
        async with ControlClient(command.control) as control:
            with pytest.raises(InfrastructureError, match=r"missing names model\.norm\.weight"):
                await control.ask("POST", "/weights", {"action": "swap", "folder": str(lacking)})
            (replica,) = (await control.ask("GET", "/pool"))["pool"]["replicas"]
            assert (replica["state"], replica["restarts"], replica["weight_version"]) == ("healthy", 0, 0)

        # New weights during a generation; afterwards everything is sampled under them.
        new = command.folder / "new"
        new.mkdir()
        save_file({key: tensor * 1.5 for key, tensor in weights.items()}, new / "model.safetensors")
        long, swapping = {"prompt_token_ids": PROMPT, "max_new_tokens": 400}, None
        versions: list[int] = []
        async with ControlClient(command.control) as control:
            async for piece in command.stream("/generate", {**long, "seed": 3}):
                versions += [span["version"] for span in piece["weight_versions"]]
                if swapping is None:
                    swapping = asyncio.ensure_future(
                        control.ask("POST", "/weights", {"action": "swap", "folder": str(new)})
                    )
            assert swapping is not None
            assert (await swapping)["version"] == 2
        assert versions == sorted(versions)
        after = await command.ask("/generate", tokens)
        assert {span["version"] for span in after["weight_versions"]} == {2}
        assert after["log_probs"] != whole["log_probs"]

        # Ctrl-C in a terminal reaches every process in it; running generations are finished all the same.
        draining = command.stream("/generate", {**long, "max_new_tokens": 120, "seed": 4})
        got = [await anext(draining)]
        os.killpg(command.process.pid, signal.SIGINT)
        got += [piece async for piece in draining]
        assert got[-1]["finish_reason"] in ("length", "stop")
        assert await asyncio.wait_for(command.process.wait(), 60) == 0
        log = (tmp_path / "stderr").read_text()
        assert "Traceback" not in log, log
        assert log.count("\n") < 60, log
