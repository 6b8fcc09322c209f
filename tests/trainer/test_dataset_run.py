"""A whole run over rows of a file, judged by rules: what comes in arrives in metrics, files and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.errors import CheckpointError, ConfigError, RewardError
from asyncrl.tasks.export import export
from asyncrl.tasks.generate import read_answers
from asyncrl.tasks.run import evaluate, generate, train, with_data
from asyncrl.telemetry import RunDirectory

REWARD = """
async def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == FAILS_ON:
        raise KeyError("mine")
    digits = sum(character.isdigit() for character in solution_str)
    return {"score": digits / 10 + (ground_truth in solution_str), "digits": digits}
"""


@pytest.fixture
def dataset_config(tmp_path: Path, small_config: Callable[..., Config]) -> Callable[..., Config]:
    """The small run over twelve rows in verl's columns, one of them longer than a trajectory."""

    def make(fails_on: int = -1, **changes: Any) -> Config:
        rows, said = [], []
        for number in range(12):
            question = f"{number}+1" if number != 11 else "1+" * 200 + "1"
            rows.append(
                {
                    "data_source": "sums",
                    "prompt": [{"role": "user", "content": question}],
                    "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
                    "extra_info": {"index": number},
                }
            )
            said.append({"prompt": question[:8], "response": str(number + 1)})
        for name, records in (("train", rows[2:]), ("test", rows[:2]), ("said", said)):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (tmp_path / "reward.py").write_text(REWARD.replace("FAILS_ON", str(fails_on)))
        options = {
            "files": str(tmp_path / "train.jsonl"),
            "held_out": str(tmp_path / "test.jsonl"),
            "demonstrations": str(tmp_path / "said.jsonl"),
            "reward": f"{tmp_path / 'reward.py'}:compute_score",
        }
        env = {"name": "asyncrl.envs.dataset:DatasetFactory", "max_turns": 1, "options": options}
        return small_config(env=env, eval={"tasks": 2}, **changes)

    return make


@pytest.mark.slow
def test_rows_of_a_file_are_trained_on_and_their_rewards_told_in_parts(dataset_config: Callable[..., Config]):
    config = dataset_config()
    summary = train(config)
    assert summary["tokens"]["generated"] > 0
    assert summary["steps"] == 3
    (path,) = config.runs.iterdir()
    run = RunDirectory.open(path)
    steps = [line for line in run.metrics() if "reward_mean" in line]
    assert len(steps) == 3
    assert all(line["reward/digits"] >= 0 for line in steps)
    assert any("eval/reward/digits" in line for line in run.metrics())
    samples = [json.loads(line) for line in run.trajectories_path.read_text().splitlines()]
    assert all(sample["task"]["data_source"] == "sums" for sample in samples)
    assert all(len(sample["text"]) < 100 for sample in samples)  # the row that is too long was never posed
    assert {"digits"} == set(samples[0]["reward_parts"])
    run.close()


@pytest.mark.slow
def test_a_rule_that_is_wrong_ends_the_run_by_name(dataset_config: Callable[..., Config]):
    with pytest.raises(RewardError, match="KeyError: 'mine'"):
        train(dataset_config(fails_on=5, steps=20))


@pytest.mark.slow
def test_rows_are_answered_token_by_token_and_an_interrupted_file_is_gone_on_with(
    dataset_config: Callable[..., Config], tmp_path: Path
):
    config = dataset_config()
    data, out = [str(tmp_path / "train.jsonl")], tmp_path / "answers.jsonl"
    summary = evaluate(config, data=data, samples=2, temperature=1.0, out=out)
    assert (summary["tasks"], summary["samples"]) == (9, 2.0)  # ten rows, of which one is too long
    assert set(summary["scores"]) == {"reward", "avg@2", "pass@1", "pass@2"}
    answers = read_answers(out)
    assert [(each["task_number"], each["sample"]) for each in answers] == [(n // 2, n % 2) for n in range(18)]
    for each in answers:
        sampled = [version >= 0 for version in each["weight_versions"]]
        assert sampled == [number >= each["prompt_tokens"] for number in range(len(sampled))]
        assert all(log_prob < 0 for log_prob, mine in zip(each["log_probs"], sampled, strict=True) if mine)
        assert each["task"]["prompt"][0]["content"] in each["text"]
    with pytest.raises(ConfigError, match="exists"):
        evaluate(config, data=data, samples=2, temperature=1.0, out=out)

    # The same command after half of it was lost makes the same answers.
    whole = out.read_bytes()
    kept = [line for line in whole.splitlines(keepends=True) if json.loads(line)["task_number"] % 2]
    again = tmp_path / "again.jsonl"
    with pytest.raises(KeyboardInterrupt):
        evaluate(_interrupted(config, tmp_path), data=data, samples=2, temperature=1.0, out=again)
    settings = json.loads((tmp_path / "again.jsonl.settings.json").read_text())
    assert settings["samples"] == 2
    again.write_bytes(b"".join(kept))
    (tmp_path / "again.jsonl.settings.json").write_text(json.dumps({**settings, "env": _env(config, data)}))
    evaluate(config, data=data, samples=2, temperature=1.0, out=again)
    found, wanted = read_answers(again), [json.loads(line) for line in whole.splitlines()]
    for one, other in zip(found, wanted, strict=True):  # what an engine computes beside it moves log-probs by roundings
        assert one.pop("log_probs") == pytest.approx(other.pop("log_probs"), abs=1e-4)
    assert found == wanted


def _env(config: Config, data: list[str]) -> Any:
    return with_data(config, data).env.model_dump(mode="json")


def _interrupted(config: Config, tmp_path: Path) -> Config:
    """The same, but a rule that presses Ctrl-C."""
    (tmp_path / "presses.py").write_text(
        "import os, signal\nasync def compute_score(**row):\n    os.kill(os.getpid(), signal.SIGINT)\n    return 0.0\n"
    )
    env = config.env.model_copy(
        update={"options": {**config.env.options, "reward": f"{tmp_path / 'presses.py'}:compute_score"}}
    )
    return config.model_copy(update={"env": env})


def test_rows_of_other_files_may_take_as_many_turns_with_tools(dataset_config: Callable[..., Config]):
    config = dataset_config()
    tools = ["my_tools.py:price"]
    env = config.env.model_copy(update={"max_turns": 6, "options": {**config.env.options, "tools": tools}})
    asked = with_data(config.model_copy(update={"env": env}), ["test.jsonl"]).env
    assert (asked.max_turns, asked.options["tools"], asked.options["held_out"]) == (6, tools, ["test.jsonl"])


@pytest.mark.slow
def test_rows_without_rules_are_answered_and_not_judged(dataset_config: Callable[..., Config], tmp_path: Path):
    config = dataset_config()
    plain = config.model_copy(
        update={"env": config.env.model_copy(update={"name": "worlds:DigitsFactory", "options": {}})}
    )
    answers = generate(plain, data=[str(tmp_path / "test.jsonl")])
    assert [answer["reward_parts"] for answer in answers] == [{"judged": 0.0}] * 2
    with pytest.raises(ConfigError, match="no rule judges rows of the data source 'sums'"):
        evaluate(plain, data=[str(tmp_path / "test.jsonl")])
    with pytest.raises(ConfigError, match="greedy answers to one task are all the same"):
        generate(plain, samples=2, temperature=0.0)


@pytest.mark.slow
def test_a_runs_weights_are_a_plain_model_folder(dataset_config: Callable[..., Config], tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = dataset_config(checkpoint={"every": 1, "keep_last": 5})
    train(config)
    (run,) = config.runs.iterdir()
    summary = export(run, tmp_path / "newest")
    assert summary["weight_version"] == 3
    assert export(run, tmp_path / "first", step=1)["weight_version"] == 1
    first, newest = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("first", "newest"))
    assert not first.lm_head.weight.equal(newest.lm_head.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "newest").chat_template
    with pytest.raises(ConfigError, match="exists"):
        export(run, tmp_path / "newest")
    with pytest.raises(CheckpointError, match="no checkpoint of step 9; it has 0, 1, 2, 3"):
        export(run, tmp_path / "absent", step=9)
    with pytest.raises(CheckpointError, match="did not train with LoRA"):
        export(run, tmp_path / "absent", part="adapter")
    damaged = run / "checkpoints" / "step-000002" / "model" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    with pytest.raises(CheckpointError, match="is damaged"):
        export(run, tmp_path / "absent", step=2)
    assert not (tmp_path / "absent").exists()


@pytest.mark.slow
def test_adapters_come_merged_or_apart(dataset_config: Callable[..., Config], tmp_path: Path):
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    config = dataset_config(trainer={"lora": {"rank": 4, "alpha": 8.0}, "lr": 0.1})
    train(config)
    (run,) = config.runs.iterdir()
    base = export(run, tmp_path / "adapter", part="adapter")["base_model"]
    export(run, tmp_path / "merged")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    ids = torch.arange(8)[None]
    apart = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert torch.allclose(apart(ids).logits, merged(ids).logits, atol=1e-5)
        assert not torch.allclose(AutoModelForCausalLM.from_pretrained(base)(ids).logits, merged(ids).logits, atol=1e-3)
