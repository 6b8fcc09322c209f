"""Which GPUs the replicas of a server get. No GPU is needed: torch is made to count some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import asyncrl
from asyncrl.errors import ConfigError, InfrastructureError, ResourceError
from asyncrl.interfaces import DeviceShare
from asyncrl.rollout.engine_worker import EngineSpec
from asyncrl.serve import serving
from asyncrl.serve.control_client import ControlClient
from asyncrl.serve.devices import ReplicaDevices, visible_devices
from asyncrl.serve.server import Binding
from asyncrl.testing import ScriptedEngine
from engines.rollout.sglang.engine import SGLangEngine
from engines.rollout.transformers.engine import TransformersEngine
from engines.rollout.vllm.engine import VLLMEngine
from engines.training.scratch import make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-model"

    def demonstration(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"count {number}"}, {"role": "assistant", "content": "one two"}]

    make(folder, seed=0, demonstrations=demonstration, tokenizer_conversations=16)
    return str(folder)


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes these GPUs visible, by their names."""

    def see(names: str) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        monkeypatch.setattr("torch.cuda.device_count", lambda: len(names.split(",")))

    return see


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The CUDA_VISIBLE_DEVICES of each engine's process, or its device in this one, in the order they are made in."""
    made: list[Any] = []

    def hosted(spec: EngineSpec, _folder: Path) -> ScriptedEngine:
        made.append(spec.given.get("environment", {}).get("CUDA_VISIBLE_DEVICES"))
        return ScriptedEngine(lambda _prompt: [1])

    def embedded(*_: object, options: dict[str, Any], **__: object) -> ScriptedEngine:
        made.append(options.get("device"))
        return ScriptedEngine(lambda _prompt: [1])

    monkeypatch.setattr(EngineSpec, "make", hosted)
    monkeypatch.setattr(serving, "make_part", embedded)
    return made


async def test_each_process_sees_gpus_of_its_own_and_keeps_them(
    model: str, see: Callable[[str], None], made: list[Any], tmp_path: Path
) -> None:
    see("4,5,GPU-6,7")
    binding = Binding(port=0, control_socket=tmp_path / "control.sock")
    async with asyncrl.serve(model, replicas=3, binding=binding) as pool:
        assert sorted(made) == ["4", "5", "GPU-6"]
        async with ControlClient(str(pool.control_socket)) as control:
            await control.ask("POST", "/replicas", {"name": "more"})
            await control.ask("POST", "/replicas/drain", {"name": "replica-1"})
            await control.ask("POST", "/replicas", {"name": "after-it"})
            assert made[3:] == ["7", "5"]
            await control.ask("POST", "/replicas", {"name": "fifth"})  # shares: the engine's KV cache leaves room
            with pytest.raises(InfrastructureError, match="name a resource of it"):
                await control.ask("POST", "/replicas", {"name": "far", "gpus": 1})
        assert made[5:] == ["4"]
        (first,) = [each for each in pool.pool._replicas.values() if each.name == "replica-0"]
        first.mark_dead(first.health.incarnation, "test")
        while len(made) < 7:
            await first._changes.wait()
        assert made[6:] == ["4"]


@pytest.mark.parametrize(
    ("visible", "options", "expected"),
    [
        ("0,1", {"replicas": 2, "separate": False}, ["cuda:0", "cuda:1"]),
        ("0,1", {"replicas": 2, "separate": False, "engine_options": {"device": "cuda:1"}}, ["cuda:1", "cuda:1"]),
        ("0,1", {"replicas": 2, "engine_options": {"device": "cpu"}}, [None, None]),
        (
            "0,1",
            {"replicas": 2, "engine": "asyncrl.testing:VersionEchoEngine", "engine_options": {"device": "cuda:1"}},
            [None, None],
        ),
        ("2", {"replicas": 2}, ["2", "2"]),
        ("2,3,4,5,6", {"replicas": 2, "engine": "asyncrl.testing:VersionEchoEngine"}, ["2,3", "4,5"]),
        (
            "0,1,2,3,4",
            {"replicas": 2, "engine": "vllm", "engine_options": {"arguments": {"tensor_parallel_size": 2}}},
            ["0,1", "2,3"],
        ),
    ],
)
async def test_engines_get_as_many_gpus_as_they_take(
    model: str,
    see: Callable[[str], None],
    made: list[Any],
    tmp_path: Path,
    visible: str,
    options: dict[str, Any],
    expected: list[Any],
) -> None:
    see(visible)
    told: list[str] = []
    binding = Binding(port=0, control_socket=tmp_path / "control.sock")
    async with asyncrl.serve(model, binding=binding, tell=told.append, **options):
        assert made == expected
    assert any("several share a GPU" in line for line in told) == (visible == "2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"replicas": 3}, "none are left for replica-2: use at most 2 replicas here, or set kv_cache_bytes"),
        ({"engine_options": {"arguments": {"tensor_parallel_size": 4}}}, "a replica takes 4 GPUs, and 2 can be seen"),
    ],
)
async def test_too_few_gpus_are_refused(
    model: str, see: Callable[[str], None], made: list[Any], options: dict[str, Any], words: str
) -> None:
    see("0,1")
    with pytest.raises(ResourceError, match=words):
        async with asyncrl.serve(model, engine="vllm", separate=True, binding=Binding(port=0), **options):
            raise AssertionError
    assert made == []


@pytest.mark.parametrize(
    "arguments", ["tensor_parallel_size=2", {"tensor_parallel_size": "2"}, {"tensor_parallel_size": -1}]
)
async def test_options_that_say_no_number_of_gpus_are_named(
    model: str, see: Callable[[str], None], made: list[Any], arguments: Any
) -> None:
    see("0,1")
    options = {"engine": "vllm", "engine_options": {"arguments": arguments}}
    with pytest.raises(ConfigError, match="the engine's options do not fit"):
        async with asyncrl.serve(model, separate=True, binding=Binding(port=0), **options):
            raise AssertionError
    assert made == []


def test_what_engines_take_of_gpus() -> None:
    assert TransformersEngine.device_share(threads=1) == DeviceShare(count=1)
    assert TransformersEngine.device_share(device="cuda:3") == DeviceShare(count=0)
    assert VLLMEngine.device_share().room.startswith("kv_cache_bytes")
    assert VLLMEngine.device_share(arguments={"gpu_memory_utilization": 0.4}) == DeviceShare(count=1)
    assert VLLMEngine.device_share(kv_cache_bytes=1, arguments={"pipeline_parallel_size": 2}) == DeviceShare(count=2)
    assert SGLangEngine.device_share(device="cpu", kv_cache_tokens=8) == DeviceShare(count=0)
    assert SGLangEngine.device_share(tensor_parallel=2, sglang={"mem_fraction_static": 0.4}) == DeviceShare(count=2)
    assert SGLangEngine.device_share().room.startswith("kv_cache_tokens")


def test_without_a_name_gpus_are_numbered_and_without_a_gpu_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert visible_devices() == ["0", "1"]
    none = ReplicaDevices([], DeviceShare(count=8, room="less"))
    assert [none.assign(name, ["a", "b"]) for name in "ab"] == [(), ()]
    assert none.environment(()) == {}
