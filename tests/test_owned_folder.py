"""A folder lives as long as its owner, whatever ends the owner."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from asyncrl.owned_folder import OwnedFolder

OWNER = """
import os, sys
from asyncrl.owned_folder import OwnedFolder
folder = OwnedFolder("test")
(folder.path / "inner").mkdir()
(folder.path / "inner" / "file").write_text("x")
if os.fork() == 0:
    sys.exit(0)
os.wait()
assert (folder.path / "inner" / "file").exists(), "a forked child took it along"
print(folder.path, flush=True)
sys.stdin.read()
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


def test_what_a_killed_process_left_is_removed_by_the_next_and_what_is_used_is_not(temporary: Path) -> None:
    (temporary / "asyncrl.test.notafold").touch()  # a file
    (temporary / "asyncrl.test.alink___").symlink_to(temporary)
    (temporary / "asyncrl-model-12345678").mkdir()  # nobody's that keeps to the rule
    others = set(temporary.iterdir())
    living, used = owner(temporary)
    dying, left = owner(temporary)
    with living, dying:
        dying.kill()
        dying.wait()
        assert (left / "inner" / "file").exists()
        with OwnedFolder("test") as own:
            assert set(temporary.iterdir()) == {own, used, *others}
        assert set(temporary.iterdir()) == {used, *others}
        living.communicate()  # ends as it should
    assert set(temporary.iterdir()) == others


def test_a_folder_that_is_taken_for_abandoned_before_it_is_locked_is_made_again(
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
    with OwnedFolder("test") as own:
        assert list(temporary.iterdir()) == [own] == [Path(made[1])]


def test_it_goes_with_the_object_and_can_be_closed_twice(temporary: Path) -> None:
    held = OwnedFolder("test")
    (held.path / "file").touch()
    assert held.path.stat().st_mode & 0o777 == 0o700
    del held
    assert not list(temporary.iterdir())
    held = OwnedFolder("test")
    held.close()
    held.close()
    assert not list(temporary.iterdir())
