"""The calculator environment: tasks, rewards, and demonstrations with the configured mistakes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.errors import ConfigError, EnvironmentFailure
from asyncrl.interfaces import Message

TASK = {"question": "(3+4)-2", "answer": 5, "steps": [[3, "+", 4, 7], [7, "-", 2, 5]]}


def calling(a: int, operator: str, b: int) -> Message:
    function = {"name": "calculator", "arguments": {"a": a, "operator": operator, "b": b}}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "function": function}]}


def saying(text: str) -> Message:
    return {"role": "assistant", "content": text}


def test_the_same_number_is_the_same_task_and_seeds_differ(factory: CalculatorFactory) -> None:
    again, other = CalculatorFactory(), CalculatorFactory(seed=1)
    tasks = [factory.task(index, split="train") for index in range(50)]
    assert tasks == [again.task(index, split="train") for index in range(50)]
    assert tasks != [other.task(index, split="train") for index in range(50)]
    assert json.loads(json.dumps(tasks)) == tasks


def test_splits_and_demonstrations_share_no_question_even_across_seeds() -> None:
    held_out = {
        CalculatorFactory(seed=seed, min_operand=1, max_operand=9, operation_shares=(1.0,)).task(
            index, split="held_out"
        )["question"]
        for seed in range(2)
        for index in range(300)
    }
    small = CalculatorFactory(seed=3, min_operand=1, max_operand=9, operation_shares=(1.0,))
    train = {small.task(index, split="train")["question"] for index in range(300)}
    shown = {small.demonstration(index)[0]["content"] for index in range(300)}
    assert len(held_out) > 10
    assert not held_out & (train | shown)


def test_answers_are_the_values_of_the_questions() -> None:
    hard = CalculatorFactory(operators=("+", "-", "*"), negative=True, operation_shares=(0.2, 0.3, 0.5))
    lengths = set()
    for index in range(100):
        task = hard.task(index, split="held_out")
        assert eval(task["question"]) == task["answer"] == task["steps"][-1][3]
        lengths.add(len(task["steps"]))
    assert lengths == {1, 2, 3}
    easy = CalculatorFactory()
    assert all(easy.task(index, split="train")["answer"] >= 0 for index in range(200))


async def test_calls_are_answered_and_the_right_number_is_rewarded(factory: CalculatorFactory) -> None:
    environment = factory.make()
    assert await environment.reset(TASK) == [{"role": "user", "content": "(3+4)-2"}]
    step = await environment.step(calling(3, "+", 4))
    assert (step.messages[0]["content"], step.reward, step.done) == ("7", 0.0, False)
    step = await environment.step(saying("it is 5"))
    assert (step.reward, step.done, step.info) == (1.0, True, {"calls": 1, "mistakes": 0})


@pytest.mark.parametrize("text", ["7", "-5", "5 or 6", "", "five", "55", "05", "9" * 5000])
async def test_any_other_reply_has_no_reward(factory: CalculatorFactory, text: str) -> None:
    environment = factory.make()
    await environment.reset(TASK)
    step = await environment.step(saying(text))
    assert (step.reward, step.done) == (0.0, True)


async def test_mistakes_are_answered_and_counted(factory: CalculatorFactory) -> None:
    environment = factory.make()
    await environment.reset(TASK)
    wrong = await environment.step(calling(3, "/", 4))
    assert wrong.messages[0]["content"].startswith("error: operator: Input should be '+', '-' or '*'")
    unread = await environment.step(saying("") | {"malformed": "not JSON"})
    assert (unread.done, unread.info) == (False, {"calls": 2, "mistakes": 2})


async def test_an_environment_without_a_task_has_failed(factory: CalculatorFactory) -> None:
    with pytest.raises(EnvironmentFailure, match="before reset"):
        await factory.make().step(saying("5"))


async def test_instructions_come_first() -> None:
    factory = CalculatorFactory(instructions="Use the calculator.")
    messages = await factory.make().reset(TASK)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert factory.demonstration(0)[0]["content"] == "Use the calculator."


def outcome(messages: list[Message]) -> str:
    """What kind of demonstration this is."""
    question, answer = messages[0]["content"], messages[-1]["content"]
    operations = sum(question.count(operator) for operator in "+-")
    calls = (len(messages) - 2) // 2
    if calls == 0:
        return "guess"
    if calls < operations:
        return "early"
    return "right" if int(answer) == eval(question) else "misread"


@pytest.mark.parametrize(
    ("shares", "outcomes"),
    [
        ({"guess_share": 1.0}, {"guess"}),
        ({"guess_share": 0.0, "early_stop_share": 0.0, "misread_share": 0.0}, {"right"}),
        ({"guess_share": 0.0, "early_stop_share": 1.0, "operation_shares": (0.0, 0.5, 0.5)}, {"early"}),
        ({"guess_share": 0.0, "early_stop_share": 0.0, "misread_share": 1.0}, {"misread"}),
    ],
)
def test_demonstrations_have_the_configured_mistakes(shares: dict[str, Any], outcomes: set[str]) -> None:
    factory = CalculatorFactory(**shares)
    assert {outcome(factory.demonstration(index)) for index in range(100)} == outcomes


def test_demonstrations_are_a_mixture_by_default(factory: CalculatorFactory) -> None:
    seen = [outcome(factory.demonstration(index)) for index in range(1000)]
    assert 0.11 < seen.count("guess") / 1000 < 0.19
    assert 0.36 < seen.count("early") / 1000 < 0.47  # 0.85 call at all, 0.7 of them need two calls, 0.7 make one
    assert 0.34 < seen.count("right") / 1000 < 0.44  # 0.85 * 0.9 * (0.3 + 0.7 * 0.3)


def test_calls_in_demonstrations_are_correct(factory: CalculatorFactory) -> None:
    for index in range(100):
        for message in factory.demonstration(index):
            for call in message.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                assert arguments["operator"] in "+-"
                assert 0 <= arguments["a"] <= 400


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"operators": ("/",)}, "env.options.operators"),
        ({"operators": ()}, "env.options.operators"),
        ({"max_operand": 17}, "env.options.max_operand"),
        ({"operation_shares": (0.5, 0.6)}, "env.options.operation_shares"),
        ({"operation_shares": ()}, "env.options.operation_shares"),
        ({"guess_share": 1.5}, "env.options.guess_share"),
        ({"misread_share": -0.1}, "env.options.misread_share"),
    ],
)
def test_options_out_of_range_name_their_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CalculatorFactory(**options)
    assert caught.value.path == key
    assert caught.value.remedy
