"""A sealed folder is there as a whole or not at all, and any change to it is noticed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.errors import CheckpointError
from asyncrl.io import MANIFEST, DurableFiles, is_sealed, read_sealed, verify_folder


def sealed(folder: Path) -> Path:
    with DurableFiles().replacing(folder) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "weights").write_bytes(bytes(range(100)))
        (partial / "empty").touch()
        (partial / "state.json").write_text("{}")
        assert not folder.exists()
    verify_folder(folder)
    return folder


@pytest.mark.parametrize("name", ["inner/weights", "state.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    folder = sealed(tmp_path / "checkpoint")
    content = (folder / name).read_bytes()
    assert read_sealed(folder, name) == content
    for damaged in (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], content + b"x", b""):
        (folder / name).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=f"{name} is damaged: it is .*, its manifest says .*{len(content)}"):
            verify_folder(folder)
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            read_sealed(folder, name)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        verify_folder(folder)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        read_sealed(folder, name)


def test_a_file_that_was_not_sealed_is_refused(tmp_path: Path) -> None:
    folder = sealed(tmp_path / "checkpoint")
    (folder / "other").touch()
    with pytest.raises(CheckpointError, match="other does not belong to it"):
        verify_folder(folder)
    with pytest.raises(CheckpointError, match="other is damaged"):
        read_sealed(folder, "other")


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"1"), lambda file: file.unlink()])
def test_a_file_that_is_not_as_it_was_written_elsewhere_is_not_sealed(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    files = DurableFiles()
    known = {name: files.write(tmp_path / name, b"12345") for name in ("first", "second")}
    damage(tmp_path / "second")
    with pytest.raises(CheckpointError, match="has no second as it was written"):
        files.seal(tmp_path, known=known)


def test_every_change_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a complete checkpoint"):
        verify_folder(tmp_path / "nowhere")
    folder = sealed(tmp_path / "checkpoint")
    manifest = folder / MANIFEST
    content = manifest.read_bytes()
    changes = [b"{", b"[]", b"{}", b'{"files": 3}', json.dumps(json.loads(content)).encode(), content + b" "]
    dice = random.Random(0)
    for _ in range(300):
        changed = bytearray(content)
        changed[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
        changes += [bytes(changed), content[: dice.randrange(len(content))]]
    for change in changes:
        manifest.write_bytes(change)
        with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
            verify_folder(folder)
    manifest.unlink()
    assert not is_sealed(folder)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        verify_folder(folder)


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "step"
    files = DurableFiles()
    with files.replacing(folder, sealed=False) as partial:
        files.write(partial / "old", b"1")

    def fail() -> None:
        with files.replacing(folder) as partial:
            files.write(partial / "new", b"2")
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fail()
    assert [path.name for path in folder.iterdir()] == ["old"]
    with files.replacing(folder, sealed=False) as partial:
        files.write(partial / "new", b"2")
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in folder.parent.iterdir()] == ["step"]


class Died(BaseException):
    """Ends a writer at a moment, and what it would clean up."""


def test_a_writer_that_dies_at_any_moment_leaves_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    def write(folder: Path, content: bytes, at: int) -> int:
        """Replace ``folder``; die at the moment with number ``at``. Return the number of moments."""
        moments = 0

        def reached(moment: str, path: Path) -> None:
            nonlocal moments
            moments += 1
            if moments == at:
                raise Died

        files = DurableFiles(reached)
        partial = folder.with_name(".step.partial")
        files.make_folder(partial)
        files.write(partial / "state", content)
        files.seal(partial)
        files.replace(partial, folder)
        return moments

    folder = tmp_path / "first" / "step"
    write(folder, b"old", 0)
    total = write(folder, b"new", 0)
    for at in range(1, total + 1):
        folder = tmp_path / str(at) / "step"
        write(folder, b"old", 0)
        with pytest.raises(Died):
            write(folder, b"new", at)
        found = folder if folder.exists() else folder.with_name(".step.replaced")
        verify_folder(found)
        assert read_sealed(found, "state") in (b"old", b"new")
        write(folder, b"next", 0)
        verify_folder(folder)
        assert read_sealed(folder, "state") == b"next"
