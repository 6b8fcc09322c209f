"""From configuration to what a rollout worker is made from."""

from __future__ import annotations

import os
import threading
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config import ClusterConfig, load_config
from asyncrl.data import DataProto
from asyncrl.errors import ConfigError, ResourceError
from asyncrl.interfaces import GroupSummary
from asyncrl.single_controller import Worker
from asyncrl.single_controller.resource_pool import NodeResources
from asyncrl.trainer.assembly import (
    Assembly,
    WorkerGroupRequest,
    divergence_estimator,
    group_maker,
    make_advantages,
    proof_spec,
    rollout_spec,
    trainer_options,
    warm_start_options,
)
from asyncrl.weights import TransportSpec
from buffers.replay import AsyncReplayBuffer

FILE = 'name = "run"\nsteps = 1\n[model]\nsource = "scratch"\n[env]\nname = "calculator"\n'
TRANSPORT = TransportSpec(name="shared_memory", namespace="here")


def test_an_engine_with_a_python_of_its_own_is_hosted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    settings = ["--rollout.engine", "vllm", "--rollout.options.max_running_requests", "8"]
    spec = rollout_spec(load_config(tmp_path / "run.toml", settings), TRANSPORT, None)
    assert (spec.engine, spec.engine_options) == ("vllm", {"max_running_requests": 8})
    (tmp_path / "python").symlink_to("/usr/bin/env")
    settings += ["--rollout.python", "python"]
    spec = rollout_spec(load_config(tmp_path / "run.toml", settings), TRANSPORT, None)
    assert spec.engine == "remote"
    assert spec.engine_options == {
        "engine": "vllm",
        "python": os.fspath(tmp_path / "python"),  # the link itself: it is what makes a virtual environment
        "options": {"max_running_requests": 8},
    }
    assert spec.engine_given["dtype"] == "float32"


@pytest.mark.parametrize(
    ("settings", "dtype", "tokens"),
    [
        ([], "float32", 20),
        (["--model.dtype", "bfloat16"], "bfloat16", 20),
        (["--rollout.options.dtype", "float16"], "float16", 20),
        (["--rollout.options.dtype", "auto"], "bfloat16", 20),
        (["--rollout.num_gpus", "1"], "tf32", 20),
        (["--rollout.temperature", "0.7"], "float32", 0),  # the trainer's log-probs are of another distribution
    ],
)
def test_a_canary_is_held_to_the_coarsest_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], dtype: str, tokens: int
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "run.toml").write_text(FILE)
    spec = proof_spec(load_config(tmp_path / "run.toml", settings))
    assert (spec.dtype, spec.canary_tokens) == (dtype, tokens)


def without_options(model_path: str) -> None:
    """Stands for a training engine that takes no options."""


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ([], "float32"),
        (["--model.dtype", "bfloat16"], "bfloat16"),
        (["--rollout.python", "python", "--rollout.options.dtype", "bfloat16"], "bfloat16"),
        (["--rollout.engine", "remote", "--rollout.options.options.dtype", "bfloat16"], "bfloat16"),
        (["--model.dtype", "bfloat16", "--rollout.options.dtype", "float32"], "float32"),
        (["--model.dtype", "bfloat16", "--rollout.options.dtype", "auto"], "float32"),
        (["--model.dtype", "bfloat16", "--trainer.options.publish_dtype", "float32"], None),  # the user's own
        (["--model.dtype", "bfloat16", "--trainer.engine", f"{__name__}:without_options"], None),
    ],
)
def test_weights_are_published_in_the_dtype_that_engines_compute_in(
    tmp_path: Path, settings: list[str], dtype: str | None
) -> None:
    (tmp_path / "run.toml").write_text(FILE)
    config = load_config(tmp_path / "run.toml", settings)
    assert trainer_options(config).get("publish_dtype") == dtype
    assert "publish_dtype" not in warm_start_options(config)  # which the run begins with, with all digits


@pytest.mark.parametrize(
    ("settings", "coefficient"),
    [
        ([], 0.1),
        (["--algorithm.kl_coef", "0.01"], 0.01),
        (["--algorithm.target_kl", "1"], 0.2),  # a fifth more in each of five horizons, and the like
        (["--algorithm.target_kl", "2"], 0.2),
        (["--algorithm.target_kl", "1", "--algorithm.kl_coef", "0.01"], 0.01),
    ],
)
def test_a_controlled_penalty_goes_on_unless_its_coefficient_was_changed(
    tmp_path: Path, settings: list[str], coefficient: float
) -> None:
    (tmp_path / "run.toml").write_text(FILE + '[algorithm]\nkl_placement = "reward"\nkl_coef = 0.1\n')
    before = make_advantages(load_config(tmp_path / "run.toml", ["--algorithm.target_kl", "1"]))
    assert before.kl_controller is not None
    before.kl_controller = before.kl_controller.updated(9.0, rows=50_000)
    assert before.kl_coef == pytest.approx(0.2)
    after = make_advantages(load_config(tmp_path / "run.toml", settings), after=before)
    assert after.kl_coef == pytest.approx(coefficient)
    assert make_advantages(load_config(tmp_path / "run.toml", settings), after=after).kl_coef == after.kl_coef


@pytest.mark.parametrize(
    ("settings", "estimator", "of_rows"),
    [
        ([], "k3", None),
        (["--algorithm.kl_placement", "reward"], "k1", "k1"),
        (["--algorithm.kl_placement", "reward", "--algorithm.kl_estimator", "k2"], "k2", "k2"),
        (["--algorithm.kl_placement", "reward", "--algorithm.kl_coef", "0"], "k3", None),
    ],
)
def test_the_estimator_of_the_divergence_is_that_for_where_it_counts(
    tmp_path: Path, settings: list[str], estimator: str, of_rows: str | None
) -> None:
    (tmp_path / "run.toml").write_text(FILE + "[algorithm]\nkl_coef = 0.1\n")
    config = load_config(tmp_path / "run.toml", settings)
    (tmp_path / "recorded.toml").write_text(config.to_toml())
    for each in (config, load_config(tmp_path / "recorded.toml")):
        assert each.algorithm.objective(longest=8).kl_estimator == estimator
        assert make_advantages(each).kl_estimator == estimator
        assert divergence_estimator(each) == of_rows


class Hearing(AsyncReplayBuffer):
    def __init__(self, *, heard: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.heard = heard


class WithCreditOfItsOwn(AsyncReplayBuffer):
    def __init__(self, *, credit: float, **options: Any) -> None:
        super().__init__(**options)
        self.own = credit


@pytest.mark.parametrize("kind", ["replay", f"{__name__}:Hearing"])
async def test_a_buffer_drops_groups_by_what_advantages_compare(tmp_path: Path, kind: str) -> None:
    drop = f'[buffer]\nkind = "{kind}"\n[buffer.options]\nzero_variance = "drop"\n'
    (tmp_path / "run.toml").write_text(FILE + f'[algorithm]\ncredit = "turn"\n{drop}')
    buffer = Assembly(load_config(tmp_path / "run.toml"), log_folder=tmp_path).make_buffer()
    for group_id, turn_rewards in enumerate((((0.0, 1.0), (1.0, 0.0)), ((0.0, 1.0), (0.0, 1.0)))):
        summary = GroupSummary(
            group_id=group_id,
            rows=2,
            oldest_version=0,
            tokens=4,
            version_tokens={0: 4},
            rewards=(1.0, 1.0),
            lengths=(2, 2),
            turn_rewards=turn_rewards,
        )
        await buffer.admit(group_id)
        buffer.put(summary, DataProto())
    counts = buffer.statistics()
    assert (counts.ready, counts.dropped) == (1, {"zero_variance": 1})


def test_a_buffers_own_option_may_have_the_name_of_one_that_the_run_offers(tmp_path: Path) -> None:
    text = f'[buffer]\nkind = "{__name__}:WithCreditOfItsOwn"\n[buffer.options]\ncredit = 0.5\n'
    (tmp_path / "run.toml").write_text(FILE + text)
    buffer = Assembly(load_config(tmp_path / "run.toml"), log_folder=tmp_path).make_buffer()
    assert isinstance(buffer, WithCreditOfItsOwn)
    assert buffer.own == 0.5


@dataclass
class MadeGroup:
    """A worker group that was made; ``thread`` made it."""

    thread: int = field(default_factory=threading.get_ident)
    world_size: int = 1
    node_addresses: tuple[str, ...] = ()

    async def ready(self) -> None: ...

    async def aclose(self) -> None: ...


def assembly_with_pool(tmp_path: Path, settings: list[str], publisher: Any = None) -> Assembly:
    (tmp_path / "run.toml").write_text(FILE)
    assembly = Assembly(load_config(tmp_path / "run.toml", settings), log_folder=tmp_path)
    requests: Any = {"rollout-0": SimpleNamespace(name="rollout-0")}
    groups: Any = {"rollout-0": MadeGroup()}
    assembly._make_pool(groups, requests, AsyncExitStack(), publisher)
    return assembly


def test_a_replica_has_the_configured_time_for_a_version(tmp_path: Path) -> None:
    assembly = assembly_with_pool(tmp_path, ["--weights.deadline_s", "900"])
    assert assembly.pool._set._deadline_s == 900.0


@pytest.mark.parametrize("backend", ["ray", "local"])
async def test_a_replica_is_made_again_where_the_head_of_ray_may_hang(tmp_path: Path, backend: str) -> None:
    assembly = assembly_with_pool(tmp_path, ["--cluster.backend", backend])
    assembly._make_group = lambda _: MadeGroup()  # type: ignore[assignment, return-value]
    revive: Any = assembly.pool._revive
    group = await revive("rollout-0")
    assert (group.thread == threading.get_ident()) is (backend == "local")
    assert assembly._groups == {"rollout-0": group}


@pytest.mark.parametrize(
    ("trainer", "replicas", "settings", "refused"),
    [
        (("10.0.0.1", "10.0.0.2"), ("10.0.0.1", "10.0.0.2", "10.0.0.3"), [], True),
        (("10.0.0.1", "10.0.0.2"), ("10.0.0.1", "10.0.0.1", "10.0.0.1"), [], False),
        (("10.0.0.1",), ("10.0.0.2",), ["--weights.transport", "object_store"], False),
        ((), (), [], False),  # the local backend
    ],
)
async def test_weights_of_one_machine_are_refused_where_replicas_are_on_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trainer: tuple[str, ...],
    replicas: tuple[str, ...],
    settings: list[str],
    refused: bool,
) -> None:
    def made(request: WorkerGroupRequest) -> MadeGroup:
        if request.role == "trainer":
            return MadeGroup(node_addresses=trainer)
        return MadeGroup(node_addresses=replicas[int(request.name.rpartition("-")[2]) :][:1])

    monkeypatch.setattr("asyncrl.trainer.assembly.group_maker", lambda *_, **__: made)
    (tmp_path / "run.toml").write_text(FILE)
    settings = [*settings, "--rollout.replicas", str(len(replicas) or 1)]
    assembly = Assembly(load_config(tmp_path / "run.toml", settings), log_folder=tmp_path)
    with pytest.raises(ConfigError, match=r"rollout-1 and 1 more .*") if refused else nullcontext() as found:
        await assembly.start()
    await assembly.aclose()
    if found is not None:
        assert found.value.path == "weights.transport"
        assert found.value.remedy.startswith("object_store")


NODES = [NodeResources(name=f"node-{number}", total={"CPU": 32.0, "GPU": 4.0}, available={}) for number in range(2)]


@pytest.mark.parametrize(("replicas", "address", "fits"), [(4, None, True), (5, None, False), (5, "auto", True)])
def test_groups_of_workers_have_to_fit_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    replicas: int,
    address: str | None,
    fits: bool,
) -> None:
    """A cluster that was joined may grow: there it is a warning."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("asyncrl.single_controller.ray.cluster.RayCluster", lambda **_: nullcontext())
    monkeypatch.setattr("asyncrl.single_controller.ray.resource_pool.cluster_nodes", lambda: NODES)
    made: list[dict[str, Any]] = []

    def group(*, ray_cls_with_init: Any, name: str, **_: Any) -> None:
        made.append({"name": name, **ray_cls_with_init.actor_options["env_vars"]})

    monkeypatch.setattr("asyncrl.single_controller.ray.RayWorkerGroup", group, raising=False)
    requests = [
        WorkerGroupRequest(role="trainer", name="trainer", worker=Worker, spec=None, world_size=4, num_gpus=1),
        *(
            WorkerGroupRequest(role="rollout", name=f"rollout-{each}", worker=Worker, spec=None, num_gpus=1)
            for each in range(replicas)
        ),
        WorkerGroupRequest(role="reward", name="reward", worker=Worker, spec=None, num_cpus=1),
    ]
    with ExitStack() as stack:
        cluster = ClusterConfig(backend="ray", address=address)
        with nullcontext() if fits else pytest.raises(ResourceError, match="together") as found:
            make = group_maker(cluster, requests, log_folder=tmp_path, stack=stack)
            for each in requests:
                make(each)
    if fits:  # a worker that reserves no device sees none
        passive = {"OMP_WAIT_POLICY": "PASSIVE"}
        assert made == [
            *({"name": each.name, **passive} for each in requests[:-1]),
            {"name": "reward", **passive, "CUDA_VISIBLE_DEVICES": ""},
        ]
    else:
        assert "pool rollout-4: [1] bundles of 1 GPU" in str(found.value)
    assert ("nodes that join may have" in caplog.text) == (replicas == 5 and fits)


async def test_a_buffer_process_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(MadeGroup):
        def explain_silence(self) -> list[str]:
            return ["buffer: no answer for 60 s"]

    async def nothing(*_: object) -> None: ...

    assembly = assembly_with_pool(tmp_path, [])
    assembly._make_group = lambda _: Silent()  # type: ignore[assignment, return-value]
    buffer: Any = SimpleNamespace(worker=lambda: (object, {}), attach=nothing, aclose=nothing)
    monkeypatch.setattr("asyncrl.trainer.assembly.OutOfProcessReplayBuffer", SimpleNamespace)
    await assembly.place(buffer)
    assert assembly.explain() == ["buffer: no answer for 60 s"]
    await assembly.aclose()
