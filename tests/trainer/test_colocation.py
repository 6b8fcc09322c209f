"""Rollouts and trainer take turns on shared devices: laws over random turns, failures and cancellations."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.tasks.run import train
from asyncrl.testing.clock import run_virtually
from asyncrl.trainer.assembly import Assembly, rollout_spec
from asyncrl.trainer.colocation import SharedDevices, Side
from asyncrl.weights import TransportSpec


class Recorded:
    """A side that takes time to sleep and to wake, and checks that the other one sleeps while it is awake."""

    def __init__(self, name: str, *, awake: bool, draw: random.Random) -> None:
        self.name, self.awake, self.draw = name, awake, draw
        self.other: Recorded = self
        self.fails = 0
        self.calls: list[str] = []

    def side(self) -> Side:
        return Side(sleep=self.sleep, wake=self.wake)

    async def sleep(self) -> None:
        self.calls.append("sleep")
        await asyncio.sleep(self.draw.random())
        self.awake = False

    async def wake(self) -> None:
        self.calls.append("wake")
        assert not self.other.awake, f"{self.name} wakes while {self.other.name} is awake"
        if self.fails:
            self.fails -= 1
            raise RuntimeError(f"{self.name} does not wake")
        self.awake = True
        await asyncio.sleep(self.draw.random())


def sides(seed: int) -> tuple[Recorded, Recorded, SharedDevices]:
    draw = random.Random(seed)
    rollouts, trainer = Recorded("rollouts", awake=True, draw=draw), Recorded("trainer", awake=False, draw=draw)
    rollouts.other, trainer.other = trainer, rollouts
    return rollouts, trainer, SharedDevices(rollouts=rollouts.side(), trainer=trainer.side())


def test_a_turn_hands_the_devices_over_and_back() -> None:
    async def main() -> None:
        rollouts, trainer, devices = sides(0)
        async with devices.trainer_turn():
            assert (devices.holder, rollouts.awake, trainer.awake) == ("trainer", False, True)
            async with devices.trainer_turn():  # nested: nothing moves
                assert trainer.calls == ["wake"]
            assert trainer.awake
        assert (devices.holder, rollouts.awake, trainer.awake) == ("rollouts", True, False)
        assert (rollouts.calls, trainer.calls) == (["sleep", "wake"], ["wake", "sleep"])

    run_virtually(main())


def test_a_turn_that_fails_leaves_the_devices_with_the_trainer() -> None:
    async def main() -> None:
        rollouts, trainer, devices = sides(1)
        with pytest.raises(ValueError, match="a step"):
            async with devices.trainer_turn():
                raise ValueError("a step")
        assert (devices.holder, rollouts.awake, trainer.awake) == ("trainer", False, True)
        async with devices.trainer_turn():  # the checkpoint that follows
            pass
        assert (devices.holder, rollouts.awake, trainer.awake) == ("rollouts", True, False)

    run_virtually(main())


def test_a_side_that_does_not_wake_is_woken_by_the_next_turn() -> None:
    async def main() -> None:
        rollouts, trainer, devices = sides(2)
        trainer.fails = 1
        with pytest.raises(RuntimeError, match="trainer does not wake"):
            async with devices.trainer_turn():
                raise AssertionError("the turn has not begun")
        assert (devices.holder, rollouts.awake, trainer.awake) == ("neither", False, False)
        async with devices.trainer_turn():
            assert trainer.awake

    run_virtually(main())


def test_a_turn_can_be_given_up_until_the_rollouts_are_ready() -> None:
    async def main() -> None:
        rollouts, trainer, devices = sides(3)
        ready = asyncio.Event()
        devices = dataclasses.replace(devices, rollouts=dataclasses.replace(rollouts.side(), ready=ready.wait))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(20.0), devices.trainer_turn():
                raise AssertionError("the turn has not begun")
        assert asyncio.get_running_loop().time() == pytest.approx(20.0)
        assert (devices.holder, rollouts.calls, trainer.calls) == ("rollouts", [], [])
        ready.set()
        async with devices.trainer_turn():
            assert trainer.awake

    run_virtually(main())


def test_never_both_whatever_is_cancelled() -> None:
    """Turns of several tasks, some of them cancelled at any moment; a side that wakes checks the other."""

    async def main(seed: int) -> None:
        rollouts, trainer, devices = sides(seed)
        draw = random.Random(seed)

        async def turn() -> None:
            await asyncio.sleep(draw.random() * 3)
            async with devices.trainer_turn():
                assert devices.holder == "trainer"
                assert trainer.awake
                await asyncio.sleep(draw.random())
                assert trainer.awake

        tasks = [asyncio.create_task(turn()) for _ in range(5)]
        for task in tasks:
            if draw.random() < 0.5:
                asyncio.get_running_loop().call_later(draw.random() * 5, task.cancel)
        ended: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in ended), ended
        async with devices.trainer_turn():
            pass
        assert (devices.holder, rollouts.awake, trainer.awake) == ("rollouts", True, False)

    for seed in range(300):
        run_virtually(main(seed))


# ------------------------------------------------------------------------------------------------------------- in runs

TRANSPORT = TransportSpec(name="shared_memory", namespace="here")
SHARED = {"backend": "local", "colocate": ["trainer", "rollout"]}
MakeConfig = Callable[..., Config]


def rewards_of(config: Config) -> list[float]:
    (run,) = config.runs.glob(f"{config.name}-2*")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["reward_mean"] for line in lines if "reward_mean" in line]


def test_a_synchronous_run_is_the_same_on_shared_devices(small_config: MakeConfig):
    one_at_a_time = {"options": {"max_running_requests": 1}}  # what runs side by side changes the last bits
    found: list[list[float]] = []
    for name, cluster in (("apart", {"backend": "local"}), ("shared", SHARED)):
        config = small_config(name=name, max_staleness=0, cluster=cluster, rollout=one_at_a_time)
        summary = train(config)
        found.append([*rewards_of(config), summary["success_after"]])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "engine", [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
)
def test_a_run_with_an_engine_of_its_own_environment(small_config: MakeConfig, engine: str):
    python = os.environ.get(f"ASYNCRL_{engine.upper()}_PYTHON", f".venv-{engine}/bin/python")
    if not Path(python).exists():
        pytest.skip(f"no {engine} at {python}: asyncrl engine install {engine} --cpu")
    config = small_config(
        steps=4,
        max_staleness=1,
        cluster=SHARED,
        model={"options": {"hidden_size": 64, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128}},
        rollout={"engine": engine, "python": python},
    )
    summary = train(config)
    tokens = summary["tokens"]
    assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values()) + tokens["in_flight"]
    assert summary["idle"]["trainer"]["hand-over"] > 0
    assert len(rewards_of(config)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_rollouts_in_flight_go_on_after_the_trainers_turn(small_config: MakeConfig, backend: str):
    config = small_config(
        steps=4,
        max_staleness=2,
        cluster={**SHARED, "backend": backend},
        rollout={"replicas": 2, "max_new_tokens": 12},
        eval={"tasks": 4, "every": 2},
        checkpoint={"every": 2},
    )
    summary = train(config)
    assert summary["tokens"]["generated"] == summary["tokens"]["trained"] + sum(summary["tokens"]["dropped"].values())
    assert summary["staleness"]["max"] > 0
    assert summary["idle"]["trainer"]["hand-over"] > 0
    (run,) = config.runs.glob("small-2*")
    train(config.model_copy(update={"steps": 5}), resume=run)
    assert len(rewards_of(config)) == 5


def test_what_cannot_take_turns_is_refused(small_config: MakeConfig):
    def assembled(**changes: Any) -> Assembly:
        config = small_config(cluster=SHARED, **changes)
        return Assembly(config, log_folder=config.runs)

    with pytest.raises(ConfigError, match=r"^reference log-probs are computed while rollouts"):
        assembled(algorithm={"kl_coef": 0.1})
    with pytest.raises(ConfigError, match=r"the engine asyncrl\.testing:VersionEchoEngine has no sleep and wake"):
        assembled(rollout={"engine": "asyncrl.testing:VersionEchoEngine"})
    assert rollout_spec(small_config(rollout={"engine": "vllm"}), TRANSPORT, None).engine_options == {}
    engine = rollout_spec(small_config(cluster=SHARED, rollout={"engine": "vllm"}), TRANSPORT, None)
    assert engine.engine_options == {"sleep_mode": True}
    with pytest.raises(ConfigError, match="takes turns with the trainer, which is not named"):
        small_config(cluster={"colocate": ["rollout"]})
    with pytest.raises(ConfigError, match=r"rollout\.num_gpus = 1, trainer\.num_gpus = 0"):
        small_config(cluster={"colocate": "all"}, rollout={"num_gpus": 1})
    requests = {each.name: each.bundles for each in assembled(rollout={"replicas": 3})._requests()}
    assert requests == {
        "trainer": range(1),
        "rollout-0": range(1),
        "rollout-1": range(1, 2),
        "rollout-2": range(2, 3),
    }
