"""A real model behind the server, from Python and from the command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web
from safetensors.torch import load_file, save_file

import asyncrl
from asyncrl.cli.main import main
from asyncrl.cli.pool import _table
from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, EngineError, InfrastructureError
from asyncrl.serve import serving
from asyncrl.serve.control_client import ControlClient
from asyncrl.serve.server import Binding, Server
from engines.training.scratch import make
from engines.weights.store import StoreTransport


def demonstration(number):
    return [{"role": "user", "content": f"count {number}"}, {"role": "assistant", "content": "one two three"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "tiny-model"
    make(folder, seed=0, demonstrations=demonstration, tokenizer_conversations=16)
    return folder


async def test_weights_that_lack_a_tensor_leave_a_real_engine_serving(model, tmp_path):
    weights = load_file(model / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    binding = Binding(port=0, control_socket=tmp_path / "control.sock")
    async with asyncrl.serve(str(model), binding=binding, engine_options={"threads": 1, "dtype": "float32"}) as pool:
        async with ControlClient(str(pool.control_socket)) as control:
            with pytest.raises(InfrastructureError, match=r"missing names model\.norm\.weight"):
                await control.ask("POST", "/weights", {"action": "swap", "folder": str(tmp_path)})
        (replica,) = pool.pool.replicas()
        assert (replica.state, replica.restarts, replica.weight_version) == ("healthy", 0, 0)
        assert (await pool.chat([{"role": "user", "content": "count 3"}], greedy(2)))["role"] == "assistant"


async def test_a_server_follows_what_a_run_announces_and_takes_nothing_else(model, tmp_path, monkeypatch):
    weights = load_file(model / "model.safetensors")
    run = StoreTransport(namespace="run", url=f"file://{tmp_path}/store", kept_versions=1)

    def announce(version):
        changed = {name: tensor + version / 100 for name, tensor in weights.items()}
        run.announce(run.publish(changed.items(), version=version))

    announce(5)
    options = {"engine_options": {"threads": 1, "dtype": "float32"}, "follow": run._store.url, "follow_every_s": 0.1}
    told, binding = [], Binding(port=0, control_socket=tmp_path / "control.sock")
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(asyncrl.serve(str(model), binding=binding, tell=told.append, **options))
        control = await stack.enter_async_context(ControlClient(str(pool.control_socket)))
        assert f"fetching what is announced at {run._store.url}" in told
        for version in (5, 6):
            if version == 6:
                announce(6)
            async with asyncio.timeout(30):
                while (status := await control.ask("GET", "/weights"))["follows"]["newest"] != version:
                    await asyncio.sleep(0.05)
                while (status := await control.ask("GET", "/weights"))["follows"]["problem"]:
                    await asyncio.sleep(0.05)
            assert status["follows"] == {"url": run._store.url, "newest": version, "problem": ""}
            assert (status["version"], pool.pool.weight_version) == (version, version)
        with pytest.raises(InfrastructureError, match=r"follows .*: it takes no other weights; serve without --follow"):
            await control.ask("POST", "/weights", {"action": "swap", "folder": str(model)})
        with pytest.raises(EngineError, match="it takes no other weights"):
            await pool.swap(model)
    run.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"follow": "/models"}, "follow = '/models' is no URL"),
        ({"follow": "s3://bucket/weights", "transport": None}, "transport = None takes no weights"),
        ({"follow": "nonsense://bucket"}, "follow = 'nonsense://bucket'"),
        ({"follow": "s3://bucket/weights", "follow_every_s": 0.0}, "follow_every_s is 0.0"),
    ],
)
async def test_a_server_that_cannot_follow_does_not_start(options, words):
    with pytest.raises(ConfigError, match=words):
        async with asyncrl.serve("no-such-model", binding=Binding(port=0), **options):
            raise AssertionError


async def test_a_model_served_from_python_keeps_tokens_and_versions(model, tmp_path, monkeypatch):
    binding = Binding(port=0, control_socket=tmp_path / "control.sock")
    async with asyncrl.serve(
        str(model), binding=binding, capture=str(tmp_path / "kept"), engine_options={"threads": 1, "dtype": "float32"}
    ) as pool:
        requests = []
        generate = pool.pool.generate
        monkeypatch.setattr(pool.pool, "generate", lambda request: (requests.append(request), generate(request))[1])
        message = await pool.chat([{"role": "user", "content": "count 3"}], greedy(8))
        assert message["role"] == "assistant"
        assert pool.state.text.renderer.end_of_turn_id in requests[0].sampling.stop_token_ids
        monkeypatch.undo()
        async with aiohttp.ClientSession() as client:
            messages = [{"role": "user", "content": "count 5"}]
            for _ in range(2):
                body = {"model": "tiny-model", "messages": messages, "max_tokens": 6, "seed": 1}
                async with client.post(f"{pool.url}/sessions/s/v1/chat/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    messages += [(await answer.json())["choices"][0]["message"], {"role": "user", "content": "on"}]
                if len(messages) == 3:
                    async with ControlClient(str(pool.control_socket)) as control:
                        swapped = await control.ask("POST", "/weights", {"action": "swap", "folder": str(model)})
                        assert swapped["version"] == 1
            async with client.post(f"{pool.url}/sessions/s/reward", json={"reward": 1}) as answer:
                assert answer.status == 200, await answer.text()
        rows = DataProto.load_from_disk(tmp_path / "kept" / "00000000.asyncrl")
        assert await pool.swap(model) == 2
        versions = {int(version) for version in rows.batch["weight_versions"][0].tolist()}
        assert versions == {-1, 0, 1}
        assert len(rows) == 1
    assert not (tmp_path / "control.sock").exists()
    with pytest.raises(ConfigError, match="no server"):
        ControlClient(str(tmp_path / "control.sock"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what is stopped is read from /proc")
async def test_streams_of_a_replica_that_is_stopped_go_on_at_another(model, tmp_path, caplog):
    body = {"model": "tiny-model", "prompt": [1, 2], "max_tokens": 100, "stream": True, "return_token_ids": True}
    served = asyncrl.serve(
        str(model),
        replicas=2,
        engine="asyncrl.testing:VersionEchoEngine",
        engine_options={"token_s": 0.02},
        binding=Binding(port=0, control_socket=tmp_path / "control.sock"),
        health_check_timeout_s=1.0,
    )
    async with served as pool, aiohttp.ClientSession() as client:
        victim = pool.pool._replicas["replica-0"].engine.pid
        started = asyncio.Semaphore(0)

        async def tokens():
            found = 0
            async with client.post(f"{pool.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                            if not found and choice.get("token_ids"):
                                started.release()
                            found += len(choice.get("token_ids") or ())
            return found

        async with asyncio.timeout(60):
            streams = [asyncio.ensure_future(tokens()) for _ in range(4)]
            for _ in streams:
                await started.acquire()
            assert pool.pool.statistics().replicas[0].requests > 0
            os.kill(victim, signal.SIGSTOP)
            assert await asyncio.gather(*streams) == [100] * 4
            assert pool.pool.statistics().migrations > 0
            while not pool.pool._replicas["replica-0"].serves:
                await asyncio.sleep(0.05)
            assert pool.pool._replicas["replica-0"].engine.pid != victim
    assert f"the process {victim} of engine asyncrl.testing:VersionEchoEngine has been stopped" in caplog.text


def greedy(tokens):
    from asyncrl.interfaces import SamplingParams

    return SamplingParams(max_new_tokens=tokens, temperature=0.0)


def test_invalid_options_end_the_command_with_2(capsys):
    assert main(["serve", "somewhere", "--host", "0.0.0.0"]) == 2
    assert "--api-key-file" in capsys.readouterr().err
    assert main(["serve", "somewhere", "--engine", "transformer"]) == 2
    assert "did you mean 'transformers'" in capsys.readouterr().err
    assert main(["serve", "somewhere", "--engine-option", "x"]) == 2
    assert main(["serve", "somewhere", "--control-port", "9"]) == 2
    assert main(["serve", "somewhere", "--port", "99999"]) == 2
    assert main(["serve", "somewhere", "--port", "-1"]) == 2
    assert "-1 is not a port" in capsys.readouterr().err
    for every in ("-1", "nan", "often"):
        with pytest.raises(SystemExit):
            main(["pool", "top", "--every", every])
    assert main(["pool", "drain"]) == 2
    assert main(["pool", "ps", "--control", "/nowhere.sock"]) == 2
    assert "no server has its control plane" in capsys.readouterr().err


def test_a_model_has_every_name_that_is_given(monkeypatch):
    given = []

    async def serve(model, options):
        given.append((model, options.names))
        return 0

    monkeypatch.setattr("asyncrl.cli.serving._serve", serve)
    assert main(["serve", "folder", "--model-name", "policy", "--model-name", "gpt-4o"]) == 0
    assert given == [("folder", ("policy", "gpt-4o"))]


@pytest.mark.parametrize("option", ["--port", "--control-port", "--control-socket"])
def test_an_address_in_use_is_found_before_the_model_is_loaded(option, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ASYNCRL_CONTROL_KEY", "operator-key-0123456789")
    kind, address = socket.AF_INET, ("127.0.0.1", 0)
    if option == "--control-socket":
        kind, address = socket.AF_UNIX, str(tmp_path / "control.sock")
    with socket.socket(kind) as other:
        other.bind(address)
        other.listen()
        taken = other.getsockname()
        used = taken if isinstance(taken, str) else str(taken[1])
        rest = [] if option == "--port" else ["--port", "0"]
        assert main(["serve", str(tmp_path / "no-model"), option, used, *rest]) == 2
    error, where, remedy = capsys.readouterr().err.strip().splitlines()
    assert used in error
    assert where == f"  at {option[2:]}"
    assert option in remedy


async def test_the_second_of_two_servers_that_start_at_once_on_a_port_says_so(serve, tmp_path):
    async with serve() as served:
        binding = Binding(port=0, control_socket=tmp_path / "second.sock")
        ports = binding.bind()
        port = ports.user.getsockname()[1]
        with socket.socket() as first:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind(("127.0.0.1", port))
            first.listen()
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
                await Server(served.state, binding, ports).start()


@pytest.mark.parametrize("engine", ["transformers", "vllm", "sglang"])
def test_engines_compute_in_one_dtype_unless_they_are_told_otherwise(engine):
    assert asyncrl.serve("model", engine=engine)._dtype() == "float32"
    assert asyncrl.serve("model", engine=engine, engine_options={"dtype": "bfloat16"})._dtype() == "bfloat16"


async def test_logits_are_changed_from_the_request_to_the_sampler(model, tmp_path):
    binding = Binding(port=0, control_socket=tmp_path / "control.sock")
    options = {"threads": 1, "dtype": "float32"}
    async with (
        asyncrl.serve(str(model), binding=binding, engine_options=options) as pool,
        aiohttp.ClientSession() as client,
    ):

        async def ask(status=200, **fields):
            body = {"model": "tiny-model", "prompt": [5, 6], "max_tokens": 8, "return_token_ids": True, **fields}
            async with client.post(f"{pool.url}/v1/completions", json=body) as answer:
                assert answer.status == status, await answer.text()
                return await answer.json()

        [choice] = (await ask(allowed_token_ids=[7, 9], min_tokens=8, logprobs=2))["choices"]
        assert set(choice["token_ids"]) <= {7, 9}
        assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
        [choice] = (await ask(logit_bias={"11": 100}, temperature=0, logprobs=0))["choices"]
        assert choice["token_ids"] == [11] * 8
        assert choice["logprobs"]["token_logprobs"] == pytest.approx([0.0] * 8)
        [choice] = (await ask(logit_bias={"11": 100}, frequency_penalty=2, presence_penalty=2, min_tokens=8))["choices"]
        assert choice["token_ids"] == [11] * 8
        error = (await ask(status=400, allowed_token_ids=[10**6]))["error"]
        assert "allowed_token_ids" in error["message"]


async def test_the_pool_command_calls_the_control_plane(serve, capsys):
    async with serve(replicas=2) as served:
        address = str(served.server.control_socket)

        async def pool(*arguments):
            return await asyncio.to_thread(main, ["pool", *arguments, "--control", address])

        assert await pool("ps") == 0
        out = capsys.readouterr().out
        assert "r0" in out
        assert "healthy" in out
        assert await pool("pause") == 0
        assert "paused" in capsys.readouterr().out
        assert await pool("resume") == 0
        capsys.readouterr()
        assert await pool("drain", "r1") == 0
        out = capsys.readouterr().out
        assert "r0" in out
        assert "r1" not in out
        assert await pool("swap", "/nowhere") == 1
        assert "takes no weights" in capsys.readouterr().err
        async with ControlClient(address) as control:
            assert "tiny" in _table(await control.ask("GET", "/pool"))
            with pytest.raises(InfrastructureError, match="405"):
                await control.ask("DELETE", "/pause")


async def test_the_pool_command_reports_other_servers(aiohttp_server_of, capsys, monkeypatch):
    for answer, status, message in (
        ({"hello": 1}, 200, "not the control plane"),
        ({"error": "not found"}, 404, "not found (status 404)"),
        (["x"], 500, "the server refused the request (status 500)"),
    ):
        url = await aiohttp_server_of(answer, status)
        assert await asyncio.to_thread(main, ["pool", "ps", "--control", url]) == 1
        assert message in capsys.readouterr().err
    monkeypatch.setenv("ASYNCRL_CONTROL_KEY", "abc\ndef-secret")
    assert await asyncio.to_thread(main, ["pool", "ps", "--control", url]) == 2
    assert "secret" not in capsys.readouterr().err


@pytest.fixture
async def aiohttp_server_of():
    """``await aiohttp_server_of(answer, status)``: the address of a server with this answer to every request."""
    async with AsyncExitStack() as stack:

        async def start(answer, status):
            runner = web.ServerRunner(web.Server(lambda _: reply(answer, status)))
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return f"http://127.0.0.1:{runner.addresses[0][1]}"

        async def reply(answer, status):
            return web.json_response(answer, status=status)

        yield start


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("words", [["folder"], ["--join", "http://127.0.0.1:1"]], ids=["serve", "join"])
def test_a_signal_before_the_start_ends_with_its_code(words, number, code, monkeypatch):
    ended = []

    async def wait():
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("in order")

    @contextlib.asynccontextmanager
    async def serve(*_arguments, **_options):
        yield await wait()

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(ControlClient, "ask", lambda *_arguments: wait())
    try:
        found = main(["serve", *words])
    except SystemExit as error:
        found = error.code
    assert (found, ended) == (code, ["in order"])


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
async def test_ctrl_c_drains_and_a_second_one_stops(model, tmp_path, signals):
    command = [sys.executable, "-m", "asyncrl", "serve", str(model), "--port", "0"]
    command += ["--control-socket", str(tmp_path / "c.sock")]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.stdout is not None
    try:
        url = ""
        while not url:
            line = (await process.stdout.readline()).decode()
            assert line, "the server ended"
            url = line.split()[-1] if "tokens" in line else ""
        async with aiohttp.ClientSession() as client:
            body = {"prompt_token_ids": [5, 6], "max_new_tokens": 100, "stream": True}
            async with client.post(url, json=body) as answer:
                await answer.content.readline()
                if signals == 2:  # keep the generation from ending
                    async with ControlClient(str(tmp_path / "c.sock")) as control:
                        await control.ask("POST", "/pause")
                for _ in range(signals):
                    process.send_signal(signal.SIGINT)
                    await asyncio.sleep(0.2)
                with contextlib.suppress(aiohttp.ClientError):
                    rest = (await answer.content.read()).decode()
                    if signals == 1:
                        assert '"finish_reason":"length"' in rest or '"finish_reason":"stop"' in rest
        code = await asyncio.wait_for(process.wait(), 60)
        assert code == {1: 0, 2: 130}[signals]
        assert not (tmp_path / "c.sock").exists()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
