"""A temporary directory lives as long as the process that made it, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrl.io import LockedTemporaryDirectory

OWNER = """
import os, sys
from asyncrl.io import LockedTemporaryDirectory
folder = LockedTemporaryDirectory("test")
(folder.path / "inner").mkdir()
(folder.path / "inner" / "file").write_text("x")
if os.fork() == 0:
    sys.exit(0)
os.wait()
assert (folder.path / "inner" / "file").exists(), "a forked child removed it"
print(folder.path, flush=True)
sys.stdin.read()
"""


UNTIDY = """
import os, pathlib, sys, tempfile
from asyncrl.io import LockedTemporaryDirectory
parent = pathlib.Path(sys.argv[1])
if os.getuid() == 0:  # whom no permissions hold
    os.chown(parent, 65534, 65534)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
tempfile.tempdir = str(parent)
outside = parent / "outside"
outside.mkdir(0o500)
with LockedTemporaryDirectory("test") as folder:
    (folder / "link").symlink_to(outside)
    for name, mode in (("cache", 0o555), ("closed", 0)):
        (folder / name / "inner").mkdir(parents=True)
        (folder / name / "file").touch()
        (folder / name / "inner").chmod(mode)
        (folder / name).chmod(mode)
    os.chdir(folder)
    for _ in range(DEPTH):
        os.mkdir("deeper" * 40)
        os.chdir("deeper" * 40)
    os.chdir("/")
    sys.setrecursionlimit(150)
    folder.chmod(0o500)
print(os.listdir(parent), oct(outside.stat().st_mode))
outside.rmdir()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def owner(temporary: Path) -> tuple[subprocess.Popen[bytes], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().decode().strip())


def test_directories_of_killed_processes_are_removed_and_those_in_use_are_not(temporary: Path) -> None:
    (temporary / "asyncrl.test.notafold").touch()  # a file
    (temporary / "asyncrl.test.alink___").symlink_to(temporary)
    (temporary / "asyncrl-model-12345678").mkdir()  # another naming scheme
    others = set(temporary.iterdir())
    living, used = owner(temporary)
    dying, left = owner(temporary)
    with living, dying:
        dying.kill()
        dying.wait()
        assert (left / "inner" / "file").exists()
        with LockedTemporaryDirectory("test") as own:
            assert set(temporary.iterdir()) == {own, used, *others}
        assert set(temporary.iterdir()) == {used, *others}
        living.communicate()  # ends as it should
    assert set(temporary.iterdir()) == others


def test_a_directory_that_is_removed_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = [], tempfile.mkdtemp

    def taken(*arguments: object, **named: object) -> str:
        path = make(*arguments, **named)
        made.append(path)
        if len(made) == 1:
            Path(path).rmdir()
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", taken)
    with LockedTemporaryDirectory("test") as own:
        assert list(temporary.iterdir()) == [own] == [Path(made[1])]


def test_a_directory_is_removed_with_its_object_and_can_be_closed_twice(temporary: Path) -> None:
    held = LockedTemporaryDirectory("test")
    (held.path / "file").touch()
    assert held.path.stat().st_mode & 0o777 == 0o700
    del held
    assert not list(temporary.iterdir())
    held = LockedTemporaryDirectory("test")
    held.close()
    held.close()
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("depth", [0, 200])
def test_a_directory_is_removed_whatever_a_program_has_made_in_it(depth: int) -> None:
    program = UNTIDY.replace("DEPTH", str(depth))
    with tempfile.TemporaryDirectory() as parent:  # not below pytest's, which only its own user may enter
        ended = subprocess.run([sys.executable, "-c", program, parent], capture_output=True, check=True)
    assert ended.stdout == b"['outside'] 0o40500\n"
