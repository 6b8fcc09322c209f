"""A run at a URL: whatever write or delete is the last one, a whole checkpoint is read, and the newest there is."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import asyncrl
from asyncrl.config import Config
from asyncrl.errors import CheckpointError, ConfigError, StorageError
from asyncrl.io import DurableFiles, encode_manifest
from asyncrl.ledger import Issued, LedgerBase
from asyncrl.storage import Store
from asyncrl.tasks.checks import check_start
from asyncrl.tasks.run import train
from asyncrl.trainer.checkpoint import Checkpoints, DriverState
from asyncrl.trainer.stored_run import StoredRun, _fetch, _writes, fetch, restore
from buffers.ledger import SQLiteLedger

URL = "watched://bucket/runs/mine"


class Watched(MemoryFileSystem):
    """A store in memory that calls ``reached`` before and after everything that changes it, and amid each write."""

    protocol = "watched"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    reached: ClassVar[Callable[[str, str], None]] = staticmethod(lambda moment, path: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("watched://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        assert self._strip_protocol(path) not in self.store, f"{path} is written again"
        Watched.reached("before write", path)
        super().pipe_file(path, value[: len(value) // 2])  # no store of objects shows this; folders do
        Watched.reached("amid write", path)
        super().pipe_file(path, value)
        Watched.reached("written", path)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        Watched.reached("before read", rpath)
        super().get_file(rpath, lpath)

    def _rm(self, path: str) -> None:
        Watched.reached("before removing", path)
        super()._rm(path)
        Watched.reached("removed", path)


RANK = "trainer/rank-00000.safetensors"
CARRIED = ("config.toml", "metrics.jsonl", "meters/1.tokens", "model/config.json")


class Died(BaseException):
    """The process ends here: nothing of the program catches it."""


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("os.fsync", lambda handle: None)  # what a disk loses is not the matter here
    fsspec.register_implementation("watched", Watched, clobber=True)
    yield
    quiet()
    Watched.store.clear()


def quiet() -> None:
    Watched.reached = staticmethod(lambda moment, path: None)


def at_change(number: int, act: Callable[[], None]) -> None:
    """Call ``act`` at this moment, from 0, of those that change the store."""
    moments = itertools.count()

    def reached(moment: str, path: str) -> None:
        if moment != "before read" and next(moments) == number:
            act()

    Watched.reached = staticmethod(reached)


def die() -> None:
    raise Died


def run_folder(folder: Path, step: int, mark: str) -> Path:
    """The folder of a run with a checkpoint of this step; ``mark`` is in every file. Return the checkpoint."""
    for name in ("meters", "model", "tracker/inner", "logs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in (*CARRIED, "run.lock", "logs/driver.log", "tracker/inner/events", "config.toml.part"):
        (folder / name).write_text(mark)
    checkpoint = folder / "checkpoints" / f"step-{step:06d}"
    with DurableFiles().replacing(checkpoint) as partial:
        (partial / "trainer").mkdir()
        (partial / "trainer" / "rank-00000.safetensors").write_text(mark * 1000)
        (partial / "driver.json").write_text(mark)
    return checkpoint


def save(stored: StoredRun, folder: Path, step: int, mark: str) -> None:
    checkpoint = run_folder(folder, step, mark)

    async def ranks(to: str) -> set[str]:
        await asyncio.to_thread(Store(to).put, {RANK: checkpoint / RANK})
        return {RANK}

    asyncio.run(stored.write(checkpoint, ranks))


async def no_ranks(to: str) -> set[str]:
    return set()


def read(folder: Path) -> tuple[int, str]:
    """Return step and mark of the checkpoint that is read; every file must have that mark."""
    fetch(URL, folder)
    (checkpoint,) = (folder / "checkpoints").iterdir()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    rank = f"checkpoints/{checkpoint.name}/trainer/rank-00000.safetensors"
    assert files.keys() - {rank, f"checkpoints/{checkpoint.name}/manifest.json"} == {
        *CARRIED,
        f"checkpoints/{checkpoint.name}/driver.json",
    }
    marks = {path.read_text() for name, path in files.items() if name != rank and path.name != "manifest.json"}
    (mark,) = marks
    assert files[rank].read_text() == mark * 1000
    return int(checkpoint.name.removeprefix("step-")), mark


def whatever_has_a_manifest_is_whole() -> bool:
    there = {*Store(URL).names()}
    for name in there:
        folder, _, rest = name.partition("/")
        if rest == "manifest.json":
            try:
                entries = json.loads(Watched().cat_file(f"/bucket/runs/mine/{name}"))["files"]
            except ValueError:
                continue  # cut off while it was written
            if not {f"{folder}/{each}" for each in entries} <= there:
                return False
    return True


def damage(path: str, content: bytes) -> None:
    MemoryFileSystem.pipe_file(Watched(), path, content)


def new(folder: Path, *, keep: int = 1, resumed: bool = True) -> StoredRun:
    folder.mkdir(parents=True, exist_ok=True)
    return StoredRun("watched://bucket/runs", folder, keep=keep, resumed=resumed)


@pytest.mark.parametrize("refused", ["before write", "before removing"])
def test_a_store_that_may_be_listed_alone_ends_the_run_before_it_begins(
    small_config: Callable[..., Config], refused: str
):
    def refuse(moment: str, path: str) -> None:
        if moment == refused:
            raise PermissionError("Access Denied")

    Watched.reached = staticmethod(refuse)
    config = small_config(checkpoint={"url": "watched://bucket/runs"})
    with pytest.raises(StorageError, match=r"watched://bucket/runs/.*: access is refused"):
        train(config)
    assert not config.runs.exists()
    check_start(config)  # of what stores nothing


@pytest.mark.slow
def test_a_store_that_refuses_once_stops_no_run_and_the_run_is_resumed_from_there(
    small_config: Callable[..., Config], tmp_path: Path
):
    def refuse(moment: str, path: str) -> None:
        if "-00000001-step-000000/" in path:
            raise PermissionError("Access Denied")

    Watched.reached = staticmethod(refuse)
    config = small_config(steps=2, checkpoint={"every": 1, "url": "watched://bucket/runs"}, eval={"tasks": 0})
    rows = [{"messages": [{"role": "user", "content": "2+3"}, {"role": "assistant", "content": "5"}]}] * 20
    asked = [{"prompt": "2+3", "ground_truth": "5"}] * 4
    first = asyncrl.train(config, env="dataset", data=asked, demonstrations=rows, reward="exact")
    summary = first.wait()
    quiet()
    assert summary.steps == 2
    assert list(summary.unsaved) == ["0"]
    assert summary.unsaved["0"].startswith("it is on this machine, not at watched://bucket/runs/")
    shutil.rmtree(first.path)
    again = asyncrl.train(resume=f"watched://bucket/runs/{first.path.name}", steps=3, runs=str(tmp_path / "elsewhere"))
    assert again.wait().steps == 3
    assert again.path == tmp_path / "elsewhere" / first.path.name
    assert again.config.checkpoint.url == "watched://bucket/runs"
    assert [step["step"] for step in again._steps()] == [1, 2, 3]
    with again.recording() as recording:
        assert (recording.first_step, recording.last_step) == (0, 3)
        assert recording.replay().equal  # over both machines, to the same weights


@pytest.mark.parametrize(("stride", "step"), [(17, 2), (17, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_a_death_at_any_write_or_delete_leaves_the_checkpoint_before_or_the_new_one(
    tmp_path: Path, stride: int, step: int
):
    """The new one is of a later step, or of the same again."""
    run, copy = tmp_path / "mine", tmp_path / "copy"
    outcomes = set()
    for moment in itertools.count(0, stride):
        Watched.store.clear()
        stored = new(run, resumed=False)
        save(stored, run, 1, "a")
        at_change(moment, die)
        try:
            save(stored, run, step, "b")
        except Died:
            quiet()
        else:
            break
        outcomes.add(found := read(copy))
        assert found in ((1, "a"), (step, "b"))
        assert whatever_has_a_manifest_is_whole()
        # The process that follows writes the step again, and leaves nothing else.
        save(new(run), run, 2, "c")
        assert read(copy) == (2, "c")
        assert len({name.partition("/")[0] for name in Store(URL).names()}) == 1
    assert outcomes == {(1, "a"), (step, "b")}
    assert moment > 3 * 8  # each of the eight files has three moments, and then the old ones are removed


@pytest.mark.parametrize("stride", [13, pytest.param(3, marks=pytest.mark.long)])
def test_a_process_that_another_has_followed_changes_nothing_any_more(tmp_path: Path, stride: int):
    """Amid any write of the one the other begins and writes whole; then the first goes on."""
    old_run, new_run, copy = (tmp_path / name / "mine" for name in ("old", "new", "copy"))
    for moment in itertools.count(0, stride):
        Watched.store.clear()
        shutil.rmtree(new_run.parent, ignore_errors=True)
        keep, came = 1 + moment % 3, []
        first = new(old_run, keep=keep, resumed=False)
        save(first, old_run, 1, "a")

        def between() -> None:
            quiet()
            later = StoredRun("watched://bucket/runs", restore(URL, new_run.parent), keep=keep, resumed=True)  # noqa: B023
            save(later, new_run, 2, "n")
            came.append(read(copy))  # noqa: B023

        at_change(moment, between)
        with suppress(CheckpointError):  # unless it has sealed before
            save(first, old_run, 2, "b")
        quiet()
        if not came:
            break
        assert read(copy) == (2, "n")
        with pytest.raises(CheckpointError, match="another process goes on with this run"):
            save(first, old_run, 3, "b")
        with pytest.raises(CheckpointError, match=r"went on to step 2 in another process, and .*mine lacks that"):
            new(old_run, keep=keep)
        assert read(copy) == (2, "n")
        save(new(new_run, keep=keep), new_run, 4, "m")
        assert read(copy) == (4, "m")
        writes = {name.partition("/")[0] for name in Store(URL).names()}
        assert len(writes) <= keep
        assert max(writes).startswith("000003-")
    assert moment > 3 * 8


@pytest.mark.parametrize("resumed", [False, True])
def test_of_two_processes_that_begin_at_once_one_writes_at_most(tmp_path: Path, resumed: bool):
    runs = [tmp_path / name / "mine" for name in ("one", "other")]
    if resumed:
        save(new(runs[0], resumed=False), runs[0], 1, "a")
        shutil.copytree(runs[0], runs[1])

    def other_begins(moment: str, path: str) -> None:
        if moment == "before write":
            quiet()
            begun.append(new(runs[1], resumed=resumed))

    begun: list[StoredRun] = []
    Watched.reached = staticmethod(other_begins)
    with pytest.raises(CheckpointError, match="another process goes on with this run, or begins at the same time"):
        new(runs[0], resumed=resumed)
    (other,) = begun
    save(other, runs[1], 7, "b")
    assert read(tmp_path / "copy" / "mine") == (7, "b")


def test_a_folder_goes_on_with_its_own_progress_and_not_beside_that_of_another_machine(tmp_path: Path):
    run, elsewhere = tmp_path / "a" / "mine", tmp_path / "b" / "mine"
    save(new(run, keep=2, resumed=False), run, 50, "a")
    new(run)  # no other process has written since
    restore(URL, elsewhere.parent)
    save(new(elsewhere, keep=2), elsewhere, 900, "b")
    with pytest.raises(CheckpointError, match=r"watched://bucket/runs/mine went on to step 900 in another process"):
        new(run)
    assert read(tmp_path / "copy") == (900, "b")
    (newest,) = (name for name in Store(URL).names() if name.count("/") == 1 and "step-000900/manifest" in name)
    damage(f"/bucket/runs/mine/{newest}", b"")
    shutil.rmtree(run)
    assert (restore(URL, run.parent) / "config.toml").read_text() == "a"
    save(new(run), run, 51, "c")  # what is damaged is not waited for
    assert read(tmp_path / "copy") == (51, "c")


def test_a_checkpoint_that_is_removed_while_it_is_read_gives_way_to_the_newer_one(tmp_path: Path):
    run, copy = tmp_path / "mine", tmp_path / "copy"
    stored = new(run, resumed=False)
    save(stored, run, 1, "a")
    reads = itertools.count()

    def reached(moment: str, path: str) -> None:
        if moment == "before read" and next(reads) == 3:
            quiet()
            save(stored, run, 2, "b")

    Watched.reached = staticmethod(reached)
    assert read(copy) == (2, "b")


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_read(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
):
    run, copy = tmp_path / "mine", tmp_path / "copy"
    stored = new(run, keep=2, resumed=False)
    save(stored, run, 1, "a")
    before = {*Watched.store}
    save(stored, run, 2, "b")
    for path in sorted({*Watched.store} - before):
        content = Watched.store[path].getvalue()
        if how == "gone":
            del Watched.store[path]
        else:
            damage(path, content[:-1] if how == "cut" else bytes([content[0] ^ 1]) + content[1:])
        caplog.clear()
        assert read(copy) == (1, "a")
        assert path.endswith("/manifest.json") or path.rpartition("/")[2] in caplog.text
        damage(path, content)
    assert read(copy) == (2, "b")


def test_without_any_whole_checkpoint_the_error_says_what_is_wrong(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no checkpoint at watched://bucket/runs/mine; give the URL of a run"):
        fetch(URL, tmp_path / "copy")
    save(new(tmp_path / "mine", resumed=False), tmp_path / "mine", 1, "a")
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        fetch(URL, tmp_path / "copy", step=3)
    (manifest,) = (path for path in Watched.store if path.count("/") == 5 and path.endswith("manifest.json"))
    damage(manifest, encode_manifest({"../outside": {"size_bytes": 1, "xxh3_128": ""}}))
    with pytest.raises(CheckpointError, match=r"names '\.\./outside'"):
        fetch(URL, tmp_path / "copy")


def test_a_new_run_does_not_go_on_with_checkpoints_of_another(tmp_path: Path):
    save(new(tmp_path / "mine", resumed=False), tmp_path / "mine", 1, "a")
    with pytest.raises(CheckpointError, match="another run"):
        new(tmp_path / "mine", resumed=False)


def test_the_folder_of_a_run_is_restored_unless_it_is_there(tmp_path: Path):
    run = tmp_path / "runs" / "mine"
    save(new(run, resumed=False), run, 1, "a")
    with pytest.raises(ConfigError, match="exists on this machine already; resume"):
        restore(URL, tmp_path / "runs")
    shutil.rmtree(run)
    assert restore(URL + "/", tmp_path / "runs") == run
    assert (run / "config.toml").read_text() == "a"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]


def test_files_that_grow_while_they_are_written_are_those_of_one_moment(tmp_path: Path):
    run, copy = tmp_path / "mine", tmp_path / "copy"
    stored = new(run, resumed=False)
    checkpoint = run_folder(run, 1, "a")

    def grow(moment: str, path: str) -> None:
        for name in ("metrics.jsonl", "meters/1.tokens", "tracker/inner/events"):
            (run / name).write_text("b")

    Watched.reached = staticmethod(grow)
    asyncio.run(stored.write(checkpoint, no_ranks))
    quiet()
    assert read(copy) == (1, "a")


async def test_a_run_is_resumed_from_the_copy_of_its_ledger(tmp_path: Path):
    run, copy = tmp_path / "mine", tmp_path / "copy"
    checkpoint = run_folder(run, 1, "a")
    with SQLiteLedger(run / "ledger.sqlite") as ledger:
        ledger.append(Issued(0))
        await ledger.durable()
        stored = await asyncio.to_thread(new, run, resumed=False)
        stored.ledger = ledger
        await stored.write(checkpoint, no_ranks)
        fetch(URL, copy)
    base = LedgerBase(step=0, next_group_id=0, consumed=0, outstanding=())
    with SQLiteLedger(copy / "ledger.sqlite", resume=base) as resumed:
        assert resumed.recovered is not None
        assert resumed.recovered.next_group_id == 1


def test_a_store_that_refuses_leaves_what_was_valid(tmp_path: Path):
    run = tmp_path / "mine"
    stored = new(run, resumed=False)
    save(stored, run, 1, "a")

    def refuse() -> None:
        raise PermissionError("Access Denied")

    at_change(5, refuse)
    with pytest.raises(StorageError, match=r"watched://bucket/runs/mine/.*: access is refused .*Access Denied"):
        save(stored, run, 2, "b")
    quiet()
    assert read(tmp_path / "copy") == (1, "a")
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []


class Ranks:
    """A group of one rank, as :class:`Checkpoints` uses it."""

    async def snapshot(self, folder: Path, model: Path | None = None) -> None: ...

    async def write_snapshot(self, folder: Path) -> list[dict[str, Any]]:
        return [{"rank-00000.safetensors": DurableFiles().write(folder / "rank-00000.safetensors", b"weights")}]

    async def send_snapshot(self, folder: Path, to: str) -> None:
        await asyncio.to_thread(Store(to).put, {"rank-00000.safetensors": folder / "rank-00000.safetensors"})

    async def export_snapshot(self, saved: Path, folder: Path) -> None:
        DurableFiles().make_folder(folder)


STATE = DriverState(
    step=1, next_group_id=0, outstanding=(), generated=0, trained=0, dropped={}, staleness={}, history={}
)


def checkpoints(run: Path, failures: dict[int, str], *, keep: int = 1) -> Checkpoints:
    def failed(step: int, reason: str) -> None:
        failures[step] = reason

    (run / "checkpoints").mkdir(parents=True)
    made = Checkpoints(run / "checkpoints", keep=keep)
    made.stored = StoredRun("watched://bucket/runs", run, keep=keep, resumed=False, failed=failed)
    return made


async def test_a_store_that_is_down_costs_no_checkpoint_on_this_machine(tmp_path: Path):
    def refuse(moment: str, path: str) -> None:
        raise PermissionError("Access Denied")

    failures: dict[int, str] = {}
    made = await asyncio.to_thread(checkpoints, tmp_path / "mine", failures)
    Watched.reached = staticmethod(refuse)
    for step in (1, 2):
        await made.save(Ranks(), STATE, step=step)
        assert [path.name for path in made.all()][-1] == f"step-{step:06d}"
        await made.sent()
    assert failures.keys() == {1, 2}
    assert "access is refused" in failures[1]
    quiet()
    await made.save(Ranks(), STATE, step=3)
    await made.sent()
    fetch(URL, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy" / "checkpoints").iterdir()] == ["step-000003"]
    assert [path.name for path in made.all()] == ["step-000003"]


async def test_a_put_that_hangs_stops_neither_the_next_checkpoints_nor_the_end(tmp_path: Path):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(moment: str, path: str) -> None:
        if "step-000001/" in path:
            hangs.set()
            goes_on.wait()

    failures: dict[int, str] = {}
    made = await asyncio.to_thread(checkpoints, tmp_path / "mine", failures)
    Watched.reached = staticmethod(hang)
    try:
        for step in (1, 2, 3):
            await made.save(Ranks(), STATE, step=step)
            await asyncio.to_thread(hangs.wait)
        # What is on its way stays; of those that wait the newest.
        assert [path.name for path in made.all()] == ["step-000001", "step-000002", "step-000003"]
        await made.sent(patience_s=0)
    finally:
        quiet()
        goes_on.set()
    assert failures == {}


async def test_what_waited_for_a_slow_put_is_written_after_it_and_the_newest_alone(tmp_path: Path):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(moment: str, path: str) -> None:
        if "step-000001/" in path:
            hangs.set()
            goes_on.wait()

    failures: dict[int, str] = {}
    made = await asyncio.to_thread(checkpoints, tmp_path / "mine", failures, keep=5)
    Watched.reached = staticmethod(hang)
    for step in (1, 2, 3):
        await made.save(Ranks(), STATE, step=step)
        await asyncio.to_thread(hangs.wait)
    goes_on.set()
    await made.sent()
    steps = {name.partition("/")[0][-11:] for name in Store(URL).names() if name.endswith("/manifest.json")}
    assert steps == {"step-000001", "step-000003"}


@pytest.mark.slow
def test_the_last_step_is_not_saved_again_while_its_checkpoint_is_sent(
    small_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    finish = StoredRun._finish

    def slowly(self: StoredRun, *given: Any) -> None:
        time.sleep(0.5)  # a second save would have replaced the files by now
        finish(self, *given)

    monkeypatch.setattr(StoredRun, "_finish", slowly)
    url = f"file://{tmp_path}/store"
    train(small_config(steps=2, max_staleness=0, checkpoint={"every": 2, "keep_last": 3, "url": url}))
    (name,) = {each.partition("/")[0] for each in Store(url).names()}
    sealed, unsealed = _writes(store := Store(f"{url}/{name}"))
    assert ([each[-6:] for each in sealed], unsealed) == (["000000", "000002", "000002"], [])
    for write in sealed:
        _fetch(store, write, tmp_path / write, lambda name: True)
