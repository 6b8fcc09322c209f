"""An engine in another process does what one in this process does, and its errors name its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.errors import (
    CodecError,
    ConfigError,
    EngineClosedError,
    EngineError,
    InvalidDataError,
    WeightError,
    WeightMismatchError,
    WeightVersionError,
)
from asyncrl.interfaces import Generation, GenerationRequest, OutOfProcessEngine, SleepingEngine
from asyncrl.single_controller.children import children
from asyncrl.single_controller.liveness import Liveness
from asyncrl.testing import VersionEchoEngine
from asyncrl.weights import TransportSpec, WeightManifest
from engines.rollout.remote import protocol as engine_protocol
from engines.rollout.remote.engine import RemoteEngine
from engines.rollout.transformers.engine import TransformersEngine
from engines.weights.shared_memory import SharedMemoryTransport

Collect = Callable[..., Any]
RequestOf = Callable[..., GenerationRequest]
FolderOf = Callable[..., Path]

TELLTALE = "asyncrl.testing:VersionEchoEngine"


@contextlib.asynccontextmanager
async def hosting(model: str = "", **options: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(model, **options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def spec(tmp_path: Path) -> TransportSpec:
    return TransportSpec(name="shared_memory", namespace="remote", options={"directory": str(tmp_path)})


async def test_a_model_in_another_process_generates_the_same(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf, spec: TransportSpec
) -> None:
    requests = [request_of(i, [i + 1, 2, 3], 20, seed=i, temperature=0.8) for i in range(6)]
    begun = request_of("moved", [5, 6], 20, seed=9)
    here = TransformersEngine(str(folder_of()), device="cpu", threads=1)
    other = {name: tensor + 0.01 for name, tensor in _weights(folder_of()).items()}
    await here.start()
    async with hosting(str(folder_of()), options={"device": "cpu"}, threads=1, transport=spec) as there:
        assert isinstance(there, OutOfProcessEngine)
        assert not isinstance(here, OutOfProcessEngine)
        for version in (0, 1):
            if version:
                await asyncio.gather(*(engine.prepare_weights(other, version=1) for engine in (here, there)))
                assert there.weight_version == 0
                await asyncio.gather(*(engine.commit_weights(1) for engine in (here, there)))
            assert there.weight_version == version
            for one in [*requests, begun]:
                expected, got = await asyncio.gather(collect(here, one), collect(there, one))
                assert got.token_ids == expected.token_ids
                assert got.weight_versions == expected.weight_versions == (version,) * 20
                assert got.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        await _goes_on_as_if_it_had_never_moved(there, begun, expected, collect)
        assert (await there.health(10.0)).healthy
        assert there.statistics().tokens_generated == 14 * 20 + 15
    await here.close()


@pytest.fixture
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["disk", pytest.param("object_store", marks=pytest.mark.ray)])
async def test_another_process_fetches_through_every_transport(
    folder_of: FolderOf,
    collect: Collect,
    request_of: RequestOf,
    tmp_path: Path,
    name: str,
    request: pytest.FixtureRequest,
) -> None:
    said = request_of("a", [1, 2, 3], 10, seed=3)
    options = {"directory": str(tmp_path)}
    if name == "object_store":
        options = {}
        request.getfixturevalue("ray_cluster")
    spec = TransportSpec(name=name, namespace="remote", options=options)
    publisher = spec.make()
    tensors = _weights(folder_of(seed=1))
    async with hosting(str(folder_of()), options={"device": "cpu"}, threads=1, transport=spec) as engine:
        for version in (1, 2, 3):
            manifest = await asyncio.to_thread(publisher.publish, tensors.items(), version=version)
            await engine.fetch_weights(manifest)
            publisher.release(version)  # its bytes were copied
            await engine.commit_weights(version)
            got = await collect(engine, said)
        manifest = await asyncio.to_thread(publisher.publish, tensors.items(), version=4)
        publisher.release(4)
        with pytest.raises(WeightError, match=r"version 4 (was released|is not available)"):
            await _fetch_until_it_is_gone(engine, manifest)
    publisher.close()
    async with hosting(str(folder_of(seed=1)), options={"device": "cpu"}, threads=1) as fresh:
        expected = await collect(fresh, said)
    assert got.token_ids == expected.token_ids
    assert set(got.weight_versions) == {3}


async def _fetch_until_it_is_gone(engine: RemoteEngine, manifest: WeightManifest) -> None:
    async with asyncio.timeout(30):
        while True:  # the index of the object store hears of a release a moment later
            await engine.fetch_weights(manifest)


async def _goes_on_as_if_it_had_never_moved(
    engine: RemoteEngine, request: GenerationRequest, whole: Generation, collect: Collect
) -> None:
    moved = GenerationRequest(
        request_id="moved again",
        prompt_token_ids=request.prompt_token_ids + whole.token_ids[:5],
        sampling=request.sampling,
        continued_tokens=5,
    )
    rest: Generation = await collect(engine, moved)
    assert rest.token_ids == whole.token_ids[5:]
    assert rest.log_probs == pytest.approx(whole.log_probs[5:], abs=1e-5)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


async def test_weights_arrive_by_manifest_and_damaged_ones_do_not(spec: TransportSpec, request_of: RequestOf) -> None:
    published = SharedMemoryTransport(namespace="remote", directory=str(spec.options["directory"]))
    manifest = published.publish([("a", torch.ones(100))], version=4)
    async with hosting(engine=TELLTALE, options={"token_s": 0.001}, transport=spec) as engine:
        stream = engine.generate(request_of("one", [7], 400))
        assert (await anext(stream)).token_ids == (0,)
        await engine.pause()
        await engine.fetch_weights(manifest)
        with pytest.raises(WeightVersionError, match="version 5 cannot be committed"):
            await engine.commit_weights(5)
        await engine.commit_weights(4)
        await engine.resume()
        chunks = [chunk async for chunk in stream]
        assert all(chunk.token_ids == chunk.weight_versions for chunk in chunks)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 399
        assert chunks[-1].token_ids == (4,)
        later = published.publish([("a", torch.ones(100))], version=5)
        (path,) = Path(str(spec.options["directory"])).glob("*.5")
        data = path.read_bytes()
        path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        with pytest.raises(WeightMismatchError, match="version 5"):
            await engine.fetch_weights(later)
        published.release(5)
        with pytest.raises(WeightError, match="version 5 is not available"):
            await engine.fetch_weights(later)
        assert engine.weight_version == 4
    published.close()


async def test_pause_abort_and_a_closed_stream(request_of: RequestOf, collect: Collect) -> None:
    async with hosting(engine=TELLTALE, options={"token_s": 0.001}) as engine:
        running = asyncio.ensure_future(collect(engine, request_of("a", [1], 4000)))
        stream = engine.generate(request_of("b", [1], 4000))
        await anext(stream)
        with pytest.raises(InvalidDataError, match="'b' is in use"):
            await collect(engine, request_of("b", [1], 4))
        await engine.pause()
        before = engine.statistics().tokens_generated
        assert engine.statistics().running == 2
        await engine.resume()
        await stream.aclose()
        assert await engine.abort("a")
        got: Generation = await running
        assert got.finish_reason == "abort"
        assert not await engine.abort("a")
        statistics = engine.statistics()
        assert (statistics.running, statistics.paused) == (0, False)
        assert statistics.tokens_generated >= max(before, len(got.token_ids))


class WithChild(VersionEchoEngine):
    """Starts a process that keeps every descriptor it can, and outlives the engine."""

    async def start(self) -> None:
        await super().start()
        command = [sys.executable, "-c", "import time; time.sleep(20)"]
        self.child = subprocess.Popen(command, close_fds=False)


async def test_a_killed_process_is_noticed_at_once_while_its_child_runs_on() -> None:
    async with hosting(engine=f"{__name__}:WithChild") as engine:
        assert engine.pid is not None
        (child,) = map(int, Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split())
        os.kill(engine.pid, signal.SIGKILL)
        try:
            async with asyncio.timeout(5):
                assert "SIGKILL" in await engine.wait_ended()
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="what is stopped is read from /proc")
@pytest.mark.parametrize("which", ["its process", "a process that it has started"])
async def test_an_engine_that_is_stopped_is_named_and_ended(
    request_of: RequestOf, collect: Collect, caplog: pytest.LogCaptureFixture, which: str
) -> None:
    children.configure(Liveness(every_s=0.02, named_after_s=0.1, ended_after_s=0.3))
    try:
        async with hosting(engine=f"{__name__}:WithChild", options={"token_s": 0.001}) as engine:
            assert engine.pid is not None
            (child,) = map(int, Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split())
            running = asyncio.ensure_future(collect(engine, request_of("a", [1], 20_000)))
            await anext(engine.generate(request_of("b", [1], 4000)))
            os.kill(engine.pid if which == "its process" else child, signal.SIGSTOP)
            with pytest.raises(EngineError, match=rf"process {engine.pid}\) is gone: killed by SIGKILL"):
                await asyncio.wait_for(running, 20)
            assert f"the process {engine.pid} of engine {__name__}:WithChild has been stopped" in caplog.text
            if which == "its process":
                os.kill(child, signal.SIGKILL)
            else:
                assert f"process {child} of the process {engine.pid}" in caplog.text
    finally:
        children.configure(Liveness())


class SlowToClose(VersionEchoEngine):
    """Takes longer than a second to close, as vLLM may, and writes a file when it is done."""

    async def close(self) -> None:
        await super().close()
        await asyncio.sleep(1.5)
        Path(os.environ["CLOSED_FILE"]).touch()


@pytest.mark.slow
async def test_an_engine_has_its_time_to_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    monkeypatch.setenv("CLOSED_FILE", str(closed))
    async with hosting(engine=f"{__name__}:SlowToClose"):
        assert not closed.exists()
    assert closed.exists()


async def test_an_engine_that_reads_no_more_is_killed_in_time(request_of: RequestOf, collect: Collect) -> None:
    async with hosting(engine=TELLTALE, close_s=0.1) as engine:
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        queued = asyncio.ensure_future(collect(engine, request_of("a", [70_000] * 1_000_000, 4)))  # 5 MB
        await asyncio.sleep(0.01)
        async with asyncio.timeout(5):
            await engine.close()
            with pytest.raises(EngineClosedError):
                await queued


async def test_a_killed_process_fails_its_calls_with_the_cause(request_of: RequestOf, collect: Collect) -> None:
    async with hosting(engine=TELLTALE, options={"token_s": 0.001}) as engine:
        running = asyncio.ensure_future(collect(engine, request_of("a", [1], 4000)))
        await anext(engine.generate(request_of("b", [1], 4000)))
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match=rf"process {engine.pid}\) is gone: killed by SIGKILL"):
            await running
        assert "SIGKILL" in await engine.wait_ended()
        with pytest.raises(EngineError, match="SIGKILL"):
            await engine.pause()
        health = await engine.health(1.0)
        assert not health.healthy
        assert "SIGKILL" in health.error
    with pytest.raises(EngineClosedError):
        await engine.abort("a")


@pytest.mark.slow
async def test_it_sleeps_where_the_hosted_engine_does(
    folder_of: FolderOf, collect: Collect, request_of: RequestOf
) -> None:
    request = request_of("a", [1, 2, 3], 10, seed=3)
    async with hosting(str(folder_of()), options={"device": "cpu"}, threads=1) as engine:
        assert isinstance(engine, SleepingEngine)
        expected = await collect(engine, request)
        await engine.sleep()
        assert "asleep" in (await engine.health(5.0)).error
        await engine.wake()
        assert (await collect(engine, request)).token_ids == expected.token_ids
    async with hosting(engine=TELLTALE) as engine:
        with pytest.raises(EngineError, match="VersionEchoEngine cannot give its memory back"):
            await engine.sleep()


@pytest.mark.slow
async def test_another_python_need_not_have_asyncrl_installed(
    tmp_path: Path, request_of: RequestOf, collect: Collect
) -> None:
    """It gets this one's source, and dotted paths instead of names of entry points."""
    python = tmp_path / "python"
    packages = Path(torch.__file__).parents[1]
    hide = (
        "import sys, importlib.metadata as m; m.entry_points = lambda **_: (); "
        "del sys.argv[:2]; sys.argv[0] = 'engine_process'; "
        "import runpy; runpy.run_module('engines.rollout.remote.process', run_name='__main__', alter_sys=False)"
    )
    python.write_text(f'#!/bin/sh\nPYTHONPATH=$PYTHONPATH:{packages} exec {sys.executable} -c "{hide}" "$@"\n')
    python.chmod(0o755)
    transport = TransportSpec(name="shared_memory", namespace="other", options={"directory": str(tmp_path)})
    async with hosting(engine=TELLTALE, python=str(python), transport=transport) as engine:
        assert (await collect(engine, request_of("a", [1], 3))).token_ids == (0, 0, 0)
    with pytest.raises(ConfigError, match="no rollout engine named 'transfomers'; did you mean 'transformers'"):
        RemoteEngine("", engine="transfomers", python=str(python))


async def test_the_error_of_a_failed_start_names_the_cause(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no option 'tokens'; did you mean 'token_s'"):
        await RemoteEngine("", engine=TELLTALE, options={"tokens": 1}).start()
    with pytest.raises(EngineError, match="cannot be started: No such file"):
        await RemoteEngine("", python=str(tmp_path / "python")).start()
    with pytest.raises(EngineError, match="exited with status 0"):
        await RemoteEngine("", python="/bin/true").start()


async def test_a_message_that_is_too_large_is_not_sent(request_of: RequestOf, monkeypatch: Any) -> None:
    async with hosting(engine=TELLTALE) as engine:
        monkeypatch.setattr(engine_protocol, "MAX_FRAME_BYTES", 100)
        with pytest.raises(CodecError, match="100 are allowed"):
            await anext(engine.generate(request_of("a", [1] * 200, 5)))


async def test_the_process_dies_with_its_parent() -> None:
    program = (
        "import asyncio\n"
        "from engines.rollout.remote.engine import RemoteEngine\n"
        "async def main():\n"
        f"    engine = RemoteEngine('', engine={TELLTALE!r})\n"
        "    await engine.start()\n"
        "    print(engine.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        engine = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([engine], [], [], 10.0)[0], "the engine outlives its parent"
        os.close(engine)
