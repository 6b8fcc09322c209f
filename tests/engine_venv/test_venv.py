"""An environment is whole, half-made or somebody else's, and is never taken for another of these."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import sys
from pathlib import Path

import pytest

import asyncrl
from asyncrl.engine_venv import venv as module
from asyncrl.engine_venv.recipe import EngineRecipe, LocalDistribution, PipInstall
from asyncrl.engine_venv.venv import EngineVenv, PackageIndexes, VenvStatus
from asyncrl.errors import ConfigError, InfrastructureError, ResourceError

ROOT = Path(asyncrl.__file__).parents[1]
PYTHON = Path(sys.executable)
SHIM = LocalDistribution(
    name="some-shim", version="1.2+cpu", summary="for a test", modules={"some_shim/__init__.py": "ANSWER = 42\n"}
)
RECIPE = EngineRecipe(
    engine="shimmed",
    device="cpu",
    source="this test",
    oldest_python=(3, 11),
    newest_python=(3, 14),
    size_bytes=1 << 20,
    steps=(SHIM,),
    distributions={"some-shim": "1.2"},
    probe="import some_shim, asyncrl.errors; assert some_shim.ANSWER == 42",
)
NO_INDEX = PackageIndexes(index="file:///nowhere/simple")


def install(venv: EngineVenv, recipe: EngineRecipe = RECIPE, *, recreate: bool = False) -> tuple[VenvStatus, list[str]]:
    told: list[str] = []
    status = venv.install(recipe, python=PYTHON, indexes=NO_INDEX, recreate=recreate, tell=told.append)
    return status, told


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    for recreate in (False, True):
        with pytest.raises(ConfigError, match="not made by this command"):
            install(EngineVenv(tmp_path), recreate=recreate)
    assert (tmp_path / "thesis.txt").read_text() == "dear"
    with pytest.raises(ConfigError, match="is no folder"):
        install(EngineVenv(tmp_path / "thesis.txt"))


def test_an_environment_of_another_engine_is_not_turned_into_this_one(tmp_path: Path) -> None:
    state = {"engine": "other", "device": "gpu", "digest": "0", "whole": True}
    (tmp_path / "asyncrl-engine.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="environment of other for gpu"):
        install(EngineVenv(tmp_path))


@pytest.mark.parametrize(("oldest", "newest"), [((3, 99), (3, 99)), ((3, 1), (3, 2))])
def test_a_python_without_wheels_is_refused_before_anything_is_made(
    tmp_path: Path, oldest: tuple[int, int], newest: tuple[int, int]
) -> None:
    recipe = dataclasses.replace(RECIPE, oldest_python=oldest, newest_python=newest)
    with pytest.raises(ConfigError, match=r"has wheels for Python 3\.\d+ to 3\.\d+, and .* is 3\.1"):
        install(EngineVenv(tmp_path / "made"), recipe)
    assert not (tmp_path / "made").exists()


def test_no_python_at_all(tmp_path: Path) -> None:
    for python in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="is no Python that runs"):
            EngineVenv(tmp_path / "v").install(
                RECIPE, python=python, indexes=NO_INDEX, recreate=False, tell=lambda line: None
            )


def test_a_disk_without_room(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, size_bytes=1 << 60)
    with pytest.raises(ResourceError, match="needs 1073741824 GiB, and"):
        install(EngineVenv(tmp_path / "made"), recipe)


def test_two_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    with (tmp_path / "made" / "asyncrl-engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="by another process"):
            install(EngineVenv(tmp_path / "made"))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    status = EngineVenv(tmp_path).examine(RECIPE)
    assert status.state is None
    assert status.problems[0].startswith("it was not made by")
    assert "some-shim is not installed" in status.problems


@pytest.mark.slow
def test_made_examined_damaged_and_repaired(tmp_path: Path) -> None:
    venv = EngineVenv(tmp_path / "made")
    status, told = install(venv)
    assert status.problems == ()
    assert status.found == {"some-shim": "1.2+cpu"}
    assert told[1].startswith("1/1 some-shim 1.2+cpu")
    assert (venv.folder / "lib").exists()
    _, told = install(venv)
    assert told == [f"{venv.folder} is whole already"]

    later = dataclasses.replace(RECIPE, distributions={"some-shim": "2.0"})
    assert [problem.partition(" ")[0] for problem in venv.examine(later).problems] == ["it", "some-shim"]

    link = next(venv.folder.glob("lib/python3.*/site-packages/asyncrl"))
    assert link.resolve() == ROOT / "asyncrl"
    link.unlink()
    assert venv.examine(RECIPE).problems == (f"asyncrl is not {ROOT / 'asyncrl'}",)
    assert install(venv)[0].problems == ()

    broken = dataclasses.replace(RECIPE, probe="import some_shim; raise SystemExit('the engine is deaf')")
    with pytest.raises(InfrastructureError, match="the engine is deaf"):
        install(venv, broken)
    assert venv.examine(broken).problems == ("it is half-made: an installation was interrupted or failed",)
    status, told = install(venv)
    assert status.problems == ()
    assert told[0].startswith("going on with")

    missing = dataclasses.replace(RECIPE, steps=(SHIM, PipInstall(requirements=("no-such-thing==1",))))
    with pytest.raises(InfrastructureError, match="no package index that pip knows has no-such-thing==1"):
        install(venv, missing)
    assert "no-such-thing" in venv.log.read_text()
    assert install(venv, recreate=True)[0].problems == ()


def test_a_python_that_cannot_make_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.EngineVenv, "_run", lambda self, command: ("ensurepip is not available", 1))
    with pytest.raises(InfrastructureError, match="python3-venv"):
        install(EngineVenv(tmp_path / "made"))
    status = EngineVenv(tmp_path / "made").examine(RECIPE)
    assert status.problems[0].startswith("it is half-made")
