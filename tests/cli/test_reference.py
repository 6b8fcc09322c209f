"""What can be configured: listed, written into a file to begin with, completed in a shell."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncrl.cli.main import main
from asyncrl.cli.reference import TASKS, commented_file
from asyncrl.config import Config
from asyncrl.config.reference import OTHER_NAMES, keys_of
from asyncrl.errors import ConfigError
from asyncrl.tasks.checks import check_start
from engines.install.command import default_folder
from engines.install.venv import EngineVenv


def test_a_key_is_listed_with_type_default_range_and_text(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "max-staleness"]) == 0
    out = capsys.readouterr().out
    assert "max_staleness = 1   (integer, at least 0, at most 10000)" in out
    assert "0 is synchronous" in out


def test_all_keys_are_listed_and_a_word_of_the_text_finds_them(capsys: pytest.CaptureFixture[str]):
    assert main(["config"]) == 0
    everything = capsys.readouterr().out
    assert "[trainer.lora]" in everything
    assert "none" in everything
    assert main(["config", "kullback"]) == 2
    assert main(["config", "gamma"]) == 2
    assert main(["config", "divergence"]) == 0
    assert "algorithm.kl_coef" in capsys.readouterr().out


def test_a_misspelt_word_gets_the_nearest_key(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "group_sise"]) == 2
    assert "did you mean trainer.group_size or" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("num_generations", "trainer.group_size"),
        ("actor_rollout_ref.rollout.n", "trainer.group_size"),
        ("data.train_batch_size", "trainer.groups_per_step"),
        ("rollouts_per_example", "trainer.group_size"),
        ("beta", "algorithm.kl_coef"),
        ("reward_funcs", "env.options.reward"),
        ("kl_penalty", "algorithm.kl_estimator"),
        ("vllm_importance_sampling_clip_max", "algorithm.correction_options"),
    ],
)
def test_a_name_of_another_system_finds_the_key(word: str, key: str, capsys: pytest.CaptureFixture[str]):
    assert main(["config", word]) == 0
    assert f"{word} of another system is {key}\n" in capsys.readouterr().out


def test_names_of_other_systems_belong_to_keys_that_exist():
    known = {key.name for key in keys_of(Config)}
    assert {key if not key.startswith("env.options.") else "env.options" for key in OTHER_NAMES} <= known
    with pytest.raises(ConfigError, match=r"num_generations: no such key; did you mean trainer\.group_size"):
        Config.from_mapping({"trainer": {"num_generations": 8}})


@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_file_of_a_task_is_valid_and_shows_every_key_of_its_tables(task: str, tmp_path: Path):
    text = commented_file(task, path=tmp_path / "run.toml")
    config = Config.from_mapping(tomllib.loads(text))
    assert config.name == task
    for key in Config.model_fields["trainer"].annotation.model_fields:  # type: ignore[union-attr]
        assert f"\n{key} = " in text or f"\n# {key} = " in text


@pytest.mark.parametrize("task", sorted(TASKS))
def test_the_file_of_a_task_passes_the_checks_of_a_start(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With what its sentence asks for: files, two GPUs, the environment of the engine, the hub."""
    if task == "reasoning-gym":
        pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sums = [{"prompt": f"{number} + 1 = ?", "reward_model": {"ground_truth": str(number + 1)}} for number in range(64)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    Path("rewards.py").write_text("def score(completion):\n    return 0.0\n")
    Path("tools.py").write_text("def search(query: str) -> str:\n    return query\n")
    Path("my_environment.py").write_text("from asyncrl.testing import EchoFactory as Factory\n")
    python = EngineVenv(default_folder("vllm")).python
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    rows = {split: [{"question": f"{split}: 2 + 2 = ?", "answer": "So 4.\n#### 4"}] for split in ("train", "test")}
    hub = SimpleNamespace(DatasetDict=dict, load_dataset=lambda path, *, name, split: rows[split])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = Config.from_mapping(tomllib.loads(commented_file(task, path=tmp_path / "run.toml")))
    check_start(config, loads_model=config.model.path is None)


def test_what_is_commented_is_the_default(tmp_path: Path):
    text = commented_file("calculator", path=tmp_path)
    lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line or line.startswith("[")]
    given = [
        line for line in lines if not line.endswith(("= none", "= ...")) and not line.startswith(("path", "asyncrl"))
    ]
    values = tomllib.loads(
        "\n".join(line for line in given if line.startswith("[") or line.split(" = ")[0].isidentifier())
    )
    assert Config.from_mapping(values) == Config.from_mapping(tomllib.loads(text))


def test_init_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "data"]) == 0
    assert (tmp_path / "data.toml").is_file()
    assert main(["init", "data"]) == 2
    assert "data.toml exists" in capsys.readouterr().err


def test_absent_values_are_shown_too(capsys: pytest.CaptureFixture[str]):
    text = Config.from_mapping(
        {"name": "a", "steps": 1, "model": {"path": "m"}, "env": {"name": "calculator"}}
    ).to_toml()
    assert "# lora = none\n" in text
    assert "# source = none\n" in text
    assert Config.from_mapping(tomllib.loads(text)).trainer.lora is None


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["asyncrl", "tra"], {"train", "train-reward-model", "trajectories"}),
        (["asyncrl", "train", "--trainer.lr_"], {"--trainer.lr_scheduler_type"}),
        (["asyncrl", "train", "--cluster.backend", ""], {"ray", "local"}),
        (["asyncrl", "plot", "--o"], {"--out"}),
    ],
)
def test_bash_completes_commands_options_keys_and_values(
    words: list[str], offered: set[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    line = " ".join(f'"{word}"' for word in words)
    script += f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _asyncrl; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "trainer.lr_scheduler_type" in script
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    if shell == "fish":
        script += "complete -C 'asyncrl train --trainer.lr_'"
    (tmp_path / "script").write_text(script)
    checks = [shell, "-n", str(tmp_path / "script")] if shell == "zsh" else [shell, str(tmp_path / "script")]
    done = subprocess.run(checks, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert shell == "zsh" or done.stdout.split() == ["--trainer.lr_scheduler_type"]
