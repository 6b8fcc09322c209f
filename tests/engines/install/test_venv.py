"""An environment is complete, incomplete or foreign, and is never mistaken for another of these."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import shutil
import sys
from pathlib import Path

import pytest

import asyncrl
from asyncrl.errors import ConfigError, InfrastructureError, ResourceError
from engines.install import venv as module
from engines.install.venv import EngineRecipe, EngineVenv, LocalDistribution, PipInstall, VenvStatus

ROOT = Path(asyncrl.__file__).parents[1]
PYTHON = Path(sys.executable)
SHIM = LocalDistribution(
    name="some-shim", version="1.2+cpu", summary="for a test", modules={"some_shim/__init__.py": "ANSWER = 42\n"}
)
RECIPE = EngineRecipe(
    engine="shimmed",
    device="cpu",
    source="this test",
    min_python=(3, 11),
    max_python=(3, 14),
    size_bytes=1 << 20,
    steps=(SHIM,),
    distributions={"some-shim": "1.2"},
    probe="import some_shim, asyncrl.errors; assert some_shim.ANSWER == 42",
)
NO_INDEX = ["--index-url=file:///nowhere/simple"]


def install(venv: EngineVenv, recipe: EngineRecipe = RECIPE, *, recreate: bool = False) -> tuple[VenvStatus, list[str]]:
    lines: list[str] = []
    status = venv.install(recipe, python=PYTHON, pip_options=NO_INDEX, recreate=recreate, log_step=lines.append)
    return status, lines


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("dear")
    for recreate in (False, True):
        with pytest.raises(ConfigError, match="not made by this command"):
            install(EngineVenv(tmp_path), recreate=recreate)
    assert (tmp_path / "thesis.txt").read_text() == "dear"
    with pytest.raises(ConfigError, match="is not a directory"):
        install(EngineVenv(tmp_path / "thesis.txt"))


def test_an_environment_of_another_engine_is_refused(tmp_path: Path) -> None:
    state = {"engine": "other", "device": "gpu", "digest": "0", "complete": True}
    (tmp_path / "asyncrl-engine.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="environment of other for gpu"):
        install(EngineVenv(tmp_path))


@pytest.mark.parametrize(("oldest", "newest"), [((3, 99), (3, 99)), ((3, 1), (3, 2))])
def test_an_unsupported_python_is_refused_first(
    tmp_path: Path, oldest: tuple[int, int], newest: tuple[int, int]
) -> None:
    recipe = dataclasses.replace(RECIPE, min_python=oldest, max_python=newest)
    with pytest.raises(ConfigError, match=r"has wheels for Python 3\.\d+ to 3\.\d+, and .* is 3\.1"):
        install(EngineVenv(tmp_path / "made"), recipe)
    assert not (tmp_path / "made").exists()


def test_a_missing_interpreter_is_refused(tmp_path: Path) -> None:
    for python in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="is not a working Python"):
            EngineVenv(tmp_path / "v").install(
                RECIPE, python=python, pip_options=NO_INDEX, recreate=False, log_step=lambda line: None
            )


def test_a_full_disk_is_refused_first(tmp_path: Path) -> None:
    recipe = dataclasses.replace(RECIPE, size_bytes=1 << 60)
    with pytest.raises(ResourceError, match="needs 1073741824 GiB, and"):
        install(EngineVenv(tmp_path / "made"), recipe)


def test_an_environment_of_another_python_is_not_continued(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.99" / "site-packages"
    packages.mkdir(parents=True)
    state = {"engine": "shimmed", "device": "cpu", "digest": "0", "complete": False}
    (tmp_path / "asyncrl-engine.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"has python3\.99, and .* is 3\.\d+"):
        install(EngineVenv(tmp_path))
    assert packages.exists()


def test_a_recreation_that_was_interrupted_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib" / "python3.99").mkdir(parents=True)
    state = {"engine": "shimmed", "device": "cpu", "digest": "0", "complete": True}
    (tmp_path / "asyncrl-engine.json").write_text(json.dumps(state))
    delete = shutil.rmtree

    def interrupted(path: Path, *, ignore_errors: bool = False) -> None:
        if path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        install(EngineVenv(tmp_path), recreate=True)
    monkeypatch.setattr(shutil, "rmtree", delete)
    monkeypatch.setattr(module.EngineVenv, "_run", lambda self, command: ("ensurepip is not available", 1))
    with pytest.raises(InfrastructureError, match="python3-venv"):
        install(EngineVenv(tmp_path))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["asyncrl-engine.json", "asyncrl-engine.lock"]


def test_the_log_has_no_credentials(tmp_path: Path) -> None:
    venv = EngineVenv(tmp_path)
    venv._run(["true", "--index-url=https://me:secret@host/simple", "--extra-index-url=https://host/simple"])
    assert venv.log.read_text() == "$ true --index-url=https://****@host/simple --extra-index-url=https://host/simple\n"


def test_two_installations_exclude_each_other(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    with (tmp_path / "made" / "asyncrl-engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="by another process"):
            install(EngineVenv(tmp_path / "made"))


def test_examine_lists_what_is_missing(tmp_path: Path) -> None:
    status = EngineVenv(tmp_path).examine(RECIPE)
    assert status.state is None
    assert status.problems[0].startswith("it was not made by")
    assert "some-shim is not installed" in status.problems


@pytest.mark.parametrize("metadata", [None, "", "Metadata-Version: 2.1\nName: some-shim\n"])
def test_a_distribution_that_was_written_in_part_is_not_installed(tmp_path: Path, metadata: str | None) -> None:
    written = tmp_path / "lib" / "python3.12" / "site-packages" / "some_shim-1.2.dist-info"
    written.mkdir(parents=True)
    if metadata is not None:
        (written / "METADATA").write_text(metadata)
    assert "some-shim is not installed" in EngineVenv(tmp_path).examine(RECIPE).problems


@pytest.mark.slow
def test_an_environment_is_installed_examined_and_repaired(tmp_path: Path) -> None:
    venv = EngineVenv(tmp_path / "made")
    status, lines = install(venv)
    assert status.problems == ()
    assert status.found == {"some-shim": "1.2+cpu"}
    assert lines[1].startswith("1/1 some-shim 1.2+cpu")
    assert (venv.folder / "lib").exists()
    _, lines = install(venv)
    assert lines == [f"{venv.folder} is already complete"]

    later = dataclasses.replace(RECIPE, distributions={"some-shim": "2.0"})
    assert [problem.partition(" ")[0] for problem in venv.examine(later).problems] == ["it", "some-shim"]

    link = next(venv.folder.glob("lib/python3.*/site-packages/asyncrl"))
    assert link.resolve() == ROOT / "asyncrl"
    link.unlink()
    assert venv.examine(RECIPE).problems == (f"asyncrl is not linked to {ROOT / 'asyncrl'}",)
    assert install(venv)[0].problems == ()

    broken = dataclasses.replace(RECIPE, probe="import some_shim; raise SystemExit('the engine is deaf')")
    with pytest.raises(InfrastructureError, match="the engine is deaf"):
        install(venv, broken)
    assert venv.examine(broken).problems == ("it is incomplete: an installation was interrupted or failed",)
    status, lines = install(venv)
    assert status.problems == ()
    assert lines[0].startswith("continuing with")

    missing = dataclasses.replace(RECIPE, steps=(SHIM, PipInstall(requirements=("no-such-thing==1",))))
    with pytest.raises(InfrastructureError, match="no configured package index has no-such-thing==1"):
        install(venv, missing)
    assert "no-such-thing" in venv.log.read_text()
    assert install(venv, recreate=True)[0].problems == ()

    (venv.folder / module._STATE_FILE).unlink()  # interrupted at its very end, or never there
    for path in venv.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert install(venv, recreate=True)[0].problems == ()


def test_a_python_without_venv_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.EngineVenv, "_run", lambda self, command: ("ensurepip is not available", 1))
    with pytest.raises(InfrastructureError, match="python3-venv"):
        install(EngineVenv(tmp_path / "made"))
    status = EngineVenv(tmp_path / "made").examine(RECIPE)
    assert status.problems[0].startswith("it is incomplete")
