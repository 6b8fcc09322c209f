"""Data sets of reasoning-gym as an environment."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

from asyncrl.envs.reasoning_gym import ReasoningGymFactory
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import DeterministicEnvironment


@pytest.fixture(scope="module")
def sums() -> ReasoningGymFactory:
    return ReasoningGymFactory(dataset="chain_sum", seed=5, min_terms=2, max_terms=3)


def test_splits_share_no_question(sums: ReasoningGymFactory) -> None:
    train = [sums.task(index, split="train") for index in range(60)]
    held_out = [sums.task(index, split="held_out") for index in range(60)]
    assert not {task["question"] for task in train} & {task["question"] for task in held_out}
    assert len({task["item"] for task in train}) == 60
    assert json.loads(json.dumps(train)) == train
    assert ReasoningGymFactory(dataset="chain_sum", seed=5, min_terms=2, max_terms=3).task(7, split="train") == train[7]


async def test_the_data_sets_scorer_returns_the_reward(sums: ReasoningGymFactory) -> None:
    task = sums.task(0, split="train")
    environment = sums.make()
    system, user = await environment.reset(task)
    assert "<answer>" in system["content"]
    assert user["content"] == task["question"]

    async def reward(text: str) -> float:
        step = await environment.step({"role": "assistant", "content": text})
        assert step.done
        return step.reward

    assert await reward(f"Well: <answer>0</answer>, no, <answer> {task['answer']} </answer>") == 1.0
    assert await reward("<answer>not a number</answer>") < 0.1
    assert await reward(task["answer"]) == 0.0, "the tags were asked for"
    assert not isinstance(environment, DeterministicEnvironment), "the scorer's time is limited"


async def play(answer: str) -> float:
    factory = ReasoningGymFactory(dataset="n_queens", seed=5, n=5, min_remove=1, max_remove=2)
    environment = factory.make()
    await environment.reset(factory.task(0, split="train"))
    try:
        return (await environment.step({"role": "assistant", "content": f"<answer>{answer}</answer>"})).reward
    finally:
        await factory.aclose()


async def test_an_answer_is_not_executed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert await play(f"open({str(file)!r}, 'w')") == 0.0
    assert not file.exists()


@pytest.mark.slow
async def test_answers_are_scored_at_the_same_time() -> None:
    factory = ReasoningGymFactory(dataset="n_queens", seed=5, n=5, min_remove=1, max_remove=2, processes=2)
    task = factory.task(0, split="train")

    async def reward(answer: str) -> float:
        environment = factory.make()
        await environment.reset(task)
        return (await environment.step({"role": "assistant", "content": f"<answer>{answer}</answer>"})).reward

    await asyncio.gather(reward("0"), reward("0"))
    hanging = asyncio.create_task(reward("9**9**9**9"))
    assert await reward(task["answer"]) == 1.0
    assert not hanging.done()
    assert await hanging == 0.0
    await factory.aclose()


@pytest.mark.slow
async def test_an_answer_that_hangs_its_scorer_scores_nothing() -> None:
    assert await play("9**9**9**9") == 0.0


async def test_without_tags_the_whole_reply_is_the_answer() -> None:
    factory = ReasoningGymFactory(dataset="chain_sum", answer_tag="", instructions="")
    task = factory.task(3, split="held_out")
    environment = factory.make()
    assert len(await environment.reset(task)) == 1
    step = await environment.step({"role": "assistant", "content": f" {task['answer']}\n"})
    assert step.reward == 1.0


async def test_a_stop_iteration_of_the_data_set_is_raised(
    sums: ReasoningGymFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = sums.task(0, split="train")
    environment = sums.make()
    monkeypatch.setattr(environment, "_dataset", EmptyHanded())
    async with asyncio.timeout(1.0):
        with pytest.raises(RuntimeError, match="__getitem__ raised StopIteration"):
            await environment.reset(task)


class EmptyHanded:
    """A data set whose items run out of an iterator."""

    def __getitem__(self, item: int) -> dict[str, object]:
        return next(iter(()))


async def test_a_task_of_another_configuration_is_refused(sums: ReasoningGymFactory) -> None:
    task = ReasoningGymFactory(dataset="chain_sum", seed=6).task(0, split="train")
    with pytest.raises(EnvironmentFailure, match="is not the question of the task"):
        await sums.make().reset(task)


def test_a_small_data_set_wraps_around() -> None:
    for size in (7, 50):  # of which the multiples of 16 alone reach every second item
        factory = ReasoningGymFactory(dataset="chain_sum", size=size)
        train = [factory.task(index, split="train")["item"] for index in range(size * 13)]
        held_out = [factory.task(index, split="held_out")["item"] for index in range(size)]
        apart = len(set(held_out))
        assert {*train, *held_out} == {*range(size)}
        assert held_out[apart:] == held_out[: size - apart], "no item twice before each was there"
    single = ReasoningGymFactory(dataset="chain_sum", size=1)
    with pytest.raises(ConfigError, match="belongs to the split"):
        [single.task(0, split=split) for split in ("train", "held_out")]


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ConfigError) as unknown:
        ReasoningGymFactory(dataset="chain_sums")
    assert "chain_sum" in unknown.value.remedy
    with pytest.raises(ConfigError, match="'terms'"):
        ReasoningGymFactory(dataset="chain_sum", terms=3)
    with pytest.raises(ConfigError, match="min_digits must be positive"):
        ReasoningGymFactory(dataset="chain_sum", min_digits=0)
    with pytest.raises(ConfigError, match="processes is 0"):
        ReasoningGymFactory(dataset="chain_sum", processes=0)
    with pytest.raises(ConfigError, match="no demonstrations"):
        ReasoningGymFactory(dataset="chain_sum").demonstration(0)


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError) as caught:
        ReasoningGymFactory(dataset="chain_sum")
    assert caught.value.remedy == "pip install asyncrl[envs]"
