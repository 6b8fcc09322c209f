"""Rows of files as tasks, and the reward rules that judge them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.envs.dataset import DatasetFactory
from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure, RewardError
from asyncrl.rollout.chat import ChatRenderer, load_renderer
from asyncrl.trainer.assembly import filter_overlong_prompts


def problem(number: int, source: str = "sums") -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{number}+1"}],
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def rows(records: list[dict[str, Any]], name: str = "train.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path / name)

    return rows


MINE = "rewards_of_mine:compute_score"


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_of_mine.py").write_text(
        "async def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == 'crash': raise KeyError('mine')\n"
        "    return {'score': float(solution_str == ground_truth), 'index': extra_info['index']}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


async def test_a_row_is_judged_by_a_function_with_verls_signature(write: Callable[..., str]):
    factory = DatasetFactory(files=write([problem(number) for number in range(5)]), reward=MINE, seed=1)
    task = factory.task(0, split="train")
    assert json.loads(json.dumps(task)) == task
    environment = factory.make()
    assert await environment.reset(task) == task["prompt"]
    step = await environment.step({"role": "assistant", "content": task["ground_truth"]})
    assert (step.reward, step.done) == (1.0, True)
    assert step.info == {"reward_parts": {"index": task["extra_info"]["index"]}}
    assert (await environment.step({"role": "assistant", "content": "nope"})).reward == 0.0
    with pytest.raises(RewardError, match="KeyError: 'mine'"):
        await environment.step({"role": "assistant", "content": "crash"})
    await environment.close()
    with pytest.raises(EnvironmentFailure, match="before reset"):
        await environment.step({"role": "assistant", "content": "2"})
    await factory.aclose()


def test_tasks_depend_only_on_number_and_seed(write: Callable[..., str]):
    file = write([problem(number) for number in range(7)])

    def answers(seed: int) -> list[str]:
        factory = DatasetFactory(files=file, reward=MINE, seed=seed)
        return [factory.task(index, split="train")["ground_truth"] for index in range(14)]

    assert answers(3) == answers(3) != answers(4)
    assert sorted(answers(3)[:7]) == sorted(answers(3)[7:])


def test_held_out_rows_are_not_trained_on(write: Callable[..., str]):
    train = write([problem(number) for number in range(6)])
    held_out = write([problem(number) for number in (4, 5, 6)], "test.jsonl")
    factory = DatasetFactory(files=train, held_out=held_out, reward=MINE)
    assert {factory.task(index, split="train")["prompt"][0]["content"] for index in range(8)} == {
        "0+1", "1+1", "2+1", "3+1",
    }  # fmt: skip
    assert [factory.task(index, split="held_out")["ground_truth"] for index in range(4)] == ["5", "6", "7", "5"]
    assert factory.held_out_rows == 3


def test_a_share_may_be_held_out(write: Callable[..., str]):
    file = write([problem(number) for number in range(200)])
    factory = DatasetFactory(files=file, held_out_share=0.2, reward=MINE)
    held_out = {factory.task(index, split="held_out")["ground_truth"] for index in range(factory.held_out_rows)}
    train = {factory.task(index, split="train")["ground_truth"] for index in range(400)}
    assert not held_out & train
    assert len(held_out | train) == 200
    assert 20 <= len(held_out) <= 60


def asked(factory: DatasetFactory) -> tuple[list[str], set[str]]:
    """The prompts of the held-out split in their order, and those of a thousand training tasks."""
    held_out = [factory.task(index, split="held_out") for index in range(factory.held_out_rows)]
    train = [factory.task(index, split="train") for index in range(1000)]
    return [task["prompt"][0]["content"] for task in held_out], {task["prompt"][0]["content"] for task in train}


def test_a_held_out_share_of_sources_keeps_their_columns_and_limits(write: Callable[..., str]):
    questions = write([{"question": f"{number}?"} for number in range(50)], "questions.jsonl")
    sums = write([problem(number) for number in range(50)])
    sources = [
        {"files": questions, "columns": {"prompt": "question"}, "limit": 10},
        {"files": sums, "limit": 40},
        {"files": sums, "order": "file"},
    ]
    held_out, train = asked(DatasetFactory(sources=sources, held_out_share=0.3, reward=MINE))
    assert len(set(held_out)) == len(held_out), "rows that two sources share are held out once"
    assert not train & set(held_out)
    assert train | set(held_out) == {f"{number}?" for number in range(10)} | {f"{number}+1" for number in range(50)}
    assert any(prompt.endswith("?") for prompt in held_out)
    assert held_out == sorted(
        held_out, key=lambda prompt: (prompt.endswith("+1"), int(prompt.rstrip("?").split("+")[0]))
    )


def test_a_row_that_a_file_has_twice_is_held_out_twice(write: Callable[..., str]):
    file = write([problem(number) for number in (*range(50), *range(50))])
    held_out, _ = asked(DatasetFactory(files=file, held_out_share=0.3, reward=MINE))
    assert len(held_out) == 2 * len(set(held_out)) > 0


def test_held_out_rows_of_a_share_must_fit_too(write: Callable[..., str]):
    factory = DatasetFactory(files=write([problem(number) for number in range(200)]), held_out_share=0.3, reward=MINE)
    before = factory.held_out_rows
    fitted = factory.filter_overlong_prompts(lambda messages, tools=(): len(messages[0]["content"]), below=5)
    assert (fitted.kept, fitted.left_out) == (100, 100)
    assert 0 < factory.held_out_rows < before
    assert all(len(prompt) < 5 for prompt in asked(factory)[0])


def test_prompts_that_are_too_long_are_left_out_and_counted(write: Callable[..., str]):
    file = write([problem(10**number) for number in range(6)])  # 3, 4, ... 8 characters
    factory = DatasetFactory(
        files=file, held_out=write([problem(7), problem(70)], "test.jsonl"), reward=MINE, system="s"
    )
    fitted = factory.filter_overlong_prompts(
        lambda messages, tools=(): sum(len(each["content"]) for each in messages), below=6
    )
    assert (fitted.kept, fitted.left_out, fitted.longest_tokens) == (4, 4, 5)  # with the system message: 4, 5, 6 ...
    assert {factory.task(index, split="train")["ground_truth"] for index in range(4)} == {"2", "11"}
    with pytest.raises(ConfigError, match="has more than 1 tokens"):
        factory.filter_overlong_prompts(lambda messages, tools=(): 2, below=2)


async def search(query: str) -> str:
    """Search for ever."""
    await asyncio.Event().wait()
    return query


def test_the_tools_of_a_prompt_count(
    write: Callable[..., str], scratch: ChatRenderer, small_config: Callable[..., Config], tmp_path: Path
):
    scratch.tokenizer.save_pretrained(tmp_path)
    declaring = "{% for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(declaring + str(scratch.tokenizer.chat_template))
    made = DatasetFactory(files=write([problem(1)]), reward=MINE, tools=[search])
    renderer, messages = load_renderer(str(tmp_path)), problem(1)["prompt"]
    tokens = len(renderer.prompt(messages, made.make().tools))
    assert tokens > len(renderer.prompt(messages))
    config = small_config(rollout={"max_seq_len": tokens}, eval={"tasks": 0})
    with pytest.raises(ConfigError, match=f"has more than {tokens - 1} tokens"):
        filter_overlong_prompts(config, made, str(tmp_path))


async def test_a_user_chooses_how_long_a_tool_may_take(write: Callable[..., str]):
    factory = DatasetFactory(files=write([problem(1)]), reward=MINE, tools=[search], tool_deadline_s=0.01)
    environment = factory.make()
    await environment.reset(factory.task(0, split="train"))
    calls = [{"function": {"name": "search", "arguments": {"query": "x"}}}]
    with pytest.raises(EnvironmentDeadlineError, match=r"in 0\.01 s: raise env\.options\.tool_deadline_s"):
        await environment.step({"role": "assistant", "content": "", "tool_calls": calls})


def test_a_filter_that_leaves_no_part_with_weight_is_refused(write: Callable[..., str]):
    easy = write([problem(number) for number in range(3)], "easy.jsonl")
    hard = write([problem(number) for number in range(10, 13)], "hard.jsonl")
    sources = [{"files": easy, "weight": [[0, 1], [9, 0]]}, {"files": hard, "weight": [[0, 0], [9, 1]]}]
    with pytest.raises(ConfigError, match=r"all weights are 0 at index 0, of the parts .*\(\S*hard.jsonl\)"):
        DatasetFactory(sources=sources, held_out=easy, reward=MINE).task(0, split="train")
    with pytest.raises(ConfigError, match=r"all weights are 0 at index 9, of the parts .*\(\S*easy.jsonl\)"):
        DatasetFactory(sources=sources, reward=MINE).filter_overlong_prompts(
            lambda messages, tools=(): len(messages[0]["content"]), below=4
        )


def test_the_data_source_selects_the_rule(write: Callable[..., str]):
    file = write([problem(1, "openai/gsm8k"), problem(2, "mine/a"), problem(3, "strange")])
    with pytest.raises(ConfigError, match="no rule judges rows of the data source 'strange'") as caught:
        DatasetFactory(files=file, rewards={"mine/*": MINE}).task(0, split="train")
    assert caught.value.path == "env.options.rewards.strange"
    DatasetFactory(files=file, rewards={"mine/*": MINE, "strange": "exact"}).task(0, split="train")


def test_system_messages_and_demonstrations(write: Callable[..., str]):
    said = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    file = write([problem(1)])
    factory = DatasetFactory(
        files=file, reward=MINE, system="Be brief.", demonstrations=write([{"messages": said}], "said.jsonl")
    )
    assert factory.task(0, split="train")["prompt"][0] == {"role": "system", "content": "Be brief."}
    assert factory.demonstration(5) == said
    with pytest.raises(ConfigError, match="no demonstrations"):
        DatasetFactory(files=file, reward=MINE).demonstration(0)


async def test_tools_are_typed_functions_of_a_file_decorated_or_not(write: Callable[..., str], tmp_path: Path):
    file = tmp_path / "my_tools.py"
    file.write_text(
        "from asyncrl.envs.tools import tool\n"
        "def double(number: int) -> int:\n    return 2 * number\n"
        "@tool(mistakes=(KeyError,))\ndef price(name: str) -> float:\n    return {'tea': 2.5}[name]\n"
    )
    factory = DatasetFactory(files=write([problem(1)]), reward=MINE, tools=[f"{file}:double", f"{file}:price"])
    environment = factory.make()
    await environment.reset(factory.task(0, split="train"))
    given = (("double", {"number": 4}), ("price", {"name": "tea"}), ("price", {"name": "tin"}))
    calls = [{"id": "a", "function": {"name": name, "arguments": arguments}} for name, arguments in given]
    step = await environment.step({"role": "assistant", "content": "", "tool_calls": calls})
    doubled, tea, tin = (str(message["content"]) for message in step.messages)
    assert (doubled, tea, step.done) == ("8", "2.5", False)
    assert "KeyError: 'tin'" in tin
    assert (await environment.step({"role": "assistant", "content": "2"})).reward == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either files or sources"),
        ({"files": "FILE", "sources": [{"files": "FILE"}]}, "either files or sources"),
        ({"files": "absent.parquet"}, "no such file"),
        ({"files": "FILE", "held_out_share": 1.0}, "held_out_share is 1.0"),
        ({"files": "FILE", "max_prompt_tokens": 0}, "max_prompt_tokens is 0"),
        ({"files": "FILE", "tool_deadline_s": 0}, "tool_deadline_s is 0"),
        ({"files": "FILE", "reward": "mathh"}, "no reward rule named 'mathh'"),
        ({"files": "FILE", "reward": 5}, "names no rule"),
    ],
)
def test_invalid_options_are_refused_at_once(write: Callable[..., str], options: dict[str, Any], message: str):
    file = write([problem(1)])
    given = {name: file if value == "FILE" else value for name, value in options.items()}
    with pytest.raises(ConfigError, match=message):
        DatasetFactory(**given)


def test_invalid_rows_are_refused_with_the_first_task(write: Callable[..., str]):
    file = write([problem(1)])
    with pytest.raises(ConfigError, match="no held-out row"):
        DatasetFactory(files=file, reward=MINE).task(0, split="held_out")
    with pytest.raises(ConfigError, match="no row to train on"):
        DatasetFactory(held_out=file, reward=MINE).task(0, split="train")
    with pytest.raises(ConfigError, match="all 1 rows are held out"):
        DatasetFactory(files=file, held_out=file, reward=MINE).task(0, split="train")
