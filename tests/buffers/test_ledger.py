"""The ledger on disk: appended events survive every end of the process, and damage is detected."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from blockbuster import blockbuster_ctx

from asyncrl.errors import InvalidDataError, LedgerError
from asyncrl.io import DurableFiles
from asyncrl.ledger import (
    Committed,
    Completed,
    Consumed,
    Dispatched,
    Dropped,
    Issued,
    Ledger,
    LedgerBase,
    LedgerEvent,
    LedgerPosition,
    Resumed,
    Reused,
    Rewarded,
)
from asyncrl.rollout.trajectory import Trajectory, Turn, decode_rows, encode_rows
from buffers.ledger import LedgerWriter, SQLiteLedger, query
from buffers.ledger_store import Witness, read


def rows_of(group_id: int, *, rows: int = 2, version: int = 0) -> bytes:
    """A group: row r of group g sampled the tokens g and r."""
    return encode_rows(
        [
            Trajectory(
                task={"number": group_id},
                token_ids=(1, group_id, row),
                loss_mask=(False, True, True),
                behaviour_log_probs=(0.0, -0.5, -0.25),
                weight_versions=(-1, version, version),
                reward=float(row),
                turns=(Turn(start=1, end=3, finish_reason="stop", message={"role": "assistant", "content": "x"}),),
                finish_reason="done",
            )
            for row in range(rows)
        ]
    )


def roll_out(ledger: SQLiteLedger, group_id: int, *, version: int = 0, attempt: int = 0) -> None:
    ledger.append(Dispatched(group_id=group_id, attempt=attempt, version=version))
    ledger.append(Completed(group_id=group_id, attempt=attempt, tokens=4), rows=rows_of(group_id, version=version))


def record_run(path: Path) -> tuple[LedgerBase, LedgerBase]:
    """Record two steps of two groups, a checkpoint after each, a dropped group, and one completed, running and waiting.

    Return what the two checkpoints store.
    """
    with SQLiteLedger(path, threaded=False) as ledger:
        for group_id in range(8):
            ledger.append(Issued(group_id))
        for group_id in (0, 1, 2):
            roll_out(ledger, group_id)
        ledger.append(Consumed(group_id=0, step=1, position=0))
        ledger.append(Consumed(group_id=1, step=1, position=1))
        first = LedgerBase(
            step=1, next_group_id=8, consumed=2, outstanding=(2, 3, 4, 5, 6, 7), position=ledger.position
        )
        ledger.append(Committed(1))
        for group_id in (3, 4):
            roll_out(ledger, group_id, version=1)
        ledger.append(Rewarded(group_id=3, rewards=(0.5, 0.75)))
        ledger.append(Dropped(group_id=4, reason="stale", tokens=4))
        ledger.append(Consumed(group_id=2, step=2, position=1))
        ledger.append(Consumed(group_id=3, step=2, position=0))
        second = LedgerBase(step=2, next_group_id=8, consumed=4, outstanding=(5, 6, 7), position=ledger.position)
        ledger.append(Committed(2))
        roll_out(ledger, 5, version=2)
        ledger.append(Dispatched(group_id=6, attempt=0, version=2))
    return first, second


def test_it_satisfies_the_contract(tmp_path: Path):
    with SQLiteLedger(tmp_path / "ledger.sqlite") as made:
        ledger: Ledger = made
        assert ledger.recovered is None
        assert ledger.statistics().unaccounted == 0


def test_a_resumed_run_recovers_the_checkpoint_and_later_events(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    _, second = record_run(path)
    with SQLiteLedger(path, resume=second) as ledger:
        found = ledger.recovered
        assert found is not None
        assert (found.next_group_id, dict(found.waiting), dict(found.batches)) == (8, {6: 1, 7: 0}, {})
        assert list(found.groups) == [5]
        assert found.groups[5].rows == decode_rows(rows_of(5, version=2), group_id=5)
        assert found.groups[5].summary.rewards == (0.0, 1.0)
        assert found.notes == ()
        assert ledger.statistics().unaccounted == 0


@pytest.mark.parametrize("groups", [0, 3])
def test_a_copy_of_a_ledger_that_is_being_written_is_resumed_like_the_ledger(tmp_path: Path, groups: int):
    path, copy = tmp_path / "ledger.sqlite", tmp_path / "copies" / "ledger.sqlite"
    copy.parent.mkdir()
    with SQLiteLedger(path, threaded=False) as ledger:
        for group_id in range(groups):
            ledger.append(Issued(group_id))
            roll_out(ledger, group_id)
        ledger.copy(copy)
        ledger.append(Issued(groups))
    assert sorted(each.name for each in copy.parent.iterdir()) == ["ledger.sqlite", "ledger.sqlite-witness"]
    base = LedgerBase(step=0, next_group_id=0, consumed=0, outstanding=())
    with SQLiteLedger(copy, resume=base) as resumed:
        assert resumed.recovered is not None
        assert resumed.recovered.notes == ()
        assert list(resumed.recovered.groups) == list(range(groups))
        assert resumed.recovered.next_group_id == groups


def test_a_copy_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path):
    (tmp_path / "copy").write_bytes(b"not a database" * 1000)
    with SQLiteLedger(tmp_path / "ledger.sqlite", threaded=False) as ledger:
        with pytest.raises(OSError, match="copy cannot be written: file is not a database"):
            ledger.copy(tmp_path / "copy")
        assert ledger.append(Issued(0))


def test_batches_of_steps_after_the_checkpoint_are_recovered(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    first, _ = record_run(path)
    with SQLiteLedger(path, resume=first) as ledger:
        found = ledger.recovered
        assert found is not None
        assert dict(found.batches) == {2: (3, 2)}
        assert list(found.groups) == [2, 3, 5]
        assert found.groups[3].rewarded
        assert found.groups[3].summary.rewards == (0.5, 0.75)
        assert dict(found.dropped_tokens) == {"stale": 4}
        ledger.append(Consumed(group_id=3, step=2, position=0), Consumed(group_id=2, step=2, position=1))
        with pytest.raises(InvalidDataError, match="it was consumed"):
            ledger.append(Consumed(group_id=3, step=3, position=0))
    with SQLiteLedger(path, resume=first) as ledger:  # killed again
        assert ledger.statistics().processes == 3
        assert ledger.recovered is not None
        assert list(ledger.recovered.groups) == [2, 3, 5]
        assert ledger.recovered.batches == {2: (3, 2)}


def record_two_steps_after_a_checkpoint(path: Path) -> LedgerBase:
    """Record a checkpoint of step 0, then two steps, the second on rows of version 1, and a group of version 2."""
    with SQLiteLedger(path, threaded=False) as ledger:
        for group_id in range(5):
            ledger.append(Issued(group_id))
        base = LedgerBase(step=0, next_group_id=5, consumed=0, outstanding=(0, 1, 2, 3, 4), position=ledger.position)
        roll_out(ledger, 0)
        roll_out(ledger, 1)
        ledger.append(Consumed(group_id=1, step=1, position=0), Consumed(group_id=0, step=1, position=1))
        roll_out(ledger, 2, version=1)
        roll_out(ledger, 3, version=1)
        ledger.append(Consumed(group_id=3, step=2, position=0), Consumed(group_id=2, step=2, position=1))
        roll_out(ledger, 4, version=2)
    return base


@pytest.mark.parametrize(("checkpoint", "uses"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_uses_up_to_the_checkpoint_are_counted(tmp_path: Path, checkpoint: int, uses: int):
    """Steps 1, 2 and 4 train on group 0; a first resume undoes step 4, and it is trained again."""
    path = tmp_path / "ledger.sqlite"
    with SQLiteLedger(path, threaded=False) as ledger:
        for group_id in range(3):
            ledger.append(Issued(group_id))
        bases = [LedgerBase(step=0, next_group_id=3, consumed=0, outstanding=(0, 1, 2), position=ledger.position)]
        for group_id in range(3):
            roll_out(ledger, group_id)
        steps = (
            Consumed(group_id=0, step=1, position=0),
            Reused(group_id=0, step=2, position=0),
            Consumed(group_id=1, step=3, position=0),
            Reused(group_id=0, step=4, position=0),
        )
        for event in steps:
            ledger.append(event)
            consumed = 1 if event.step < 3 else 2
            outstanding = (1, 2) if event.step < 3 else (2,)
            position = ledger.position
            bases.append(
                LedgerBase(
                    step=event.step, next_group_id=3, consumed=consumed, outstanding=outstanding, position=position
                )
            )
    for _ in range(2):
        with SQLiteLedger(path, resume=bases[checkpoint]) as ledger:
            assert ledger.recovered is not None
            assert [*ledger.recovered.batches] == [*range(checkpoint + 1, 5)]
            assert ledger.recovered.groups[0].uses == uses
            for event in steps[checkpoint:]:
                ledger.append(event)


@pytest.mark.parametrize("repeated", [0, 1, 2, 3, 4])
def test_a_crash_while_batches_are_repeated_leaves_them_to_the_next_process(tmp_path: Path, repeated: int):
    path = tmp_path / "ledger.sqlite"
    base = record_two_steps_after_a_checkpoint(path)
    again = [
        Consumed(group_id=1, step=1, position=0),
        Consumed(group_id=0, step=1, position=1),
        Consumed(group_id=3, step=2, position=0),
        Consumed(group_id=2, step=2, position=1),
    ]
    for _ in range(3):
        with SQLiteLedger(path, resume=base) as ledger:
            found = ledger.recovered
            assert found is not None
            assert dict(found.batches) == {1: (1, 0), 2: (3, 2)}
            assert list(found.groups) == [0, 1, 2, 3, 4]  # also those whose weights are to be reproduced
            assert (found.notes, dict(found.waiting)) == ((), {})
            for event in again[:repeated]:
                ledger.append(event)


def test_later_batches_are_not_repeated_after_a_different_batch(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    base = record_two_steps_after_a_checkpoint(path)
    with SQLiteLedger(path, resume=base) as ledger:
        ledger.append(Consumed(group_id=0, step=1, position=0), Consumed(group_id=1, step=1, position=1))
    with SQLiteLedger(path, resume=base) as ledger:
        found = ledger.recovered
        assert found is not None
        assert dict(found.batches) == {1: (0, 1)}
        assert 4 not in found.groups  # of weights that are not reproduced
        assert dict(found.waiting) == {4: 1}
        ledger.append(Dropped(group_id=1, reason="stale", tokens=4))
    with SQLiteLedger(path, resume=base) as ledger:
        assert ledger.recovered is not None
        assert dict(ledger.recovered.batches) == {}


@pytest.mark.parametrize("repeated", [0, 2])
def test_other_updates_repeat_only_batches_that_the_checkpoints_weights_have_sampled(tmp_path: Path, repeated: int):
    path = tmp_path / "ledger.sqlite"
    base = record_two_steps_after_a_checkpoint(path)
    with SQLiteLedger(path, resume=msgspec.structs.replace(base, same_updates=False)) as ledger:
        found = ledger.recovered
        assert found is not None
        assert dict(found.batches) == {1: (1, 0)}
        assert list(found.groups) == [0, 1]
        assert dict(found.waiting) == {2: 1, 3: 1, 4: 1}
        assert "the rows of group 2 are of weights after version 0, which cannot be reproduced" in found.notes[0]
        for position, group_id in enumerate((1, 0)[:repeated]):
            ledger.append(Consumed(group_id=group_id, step=1, position=position))
        roll_out(ledger, 2, version=1, attempt=1)  # of the new version 1
    with SQLiteLedger(path, resume=base) as ledger:  # killed, and resumed with what it was resumed with before
        found = ledger.recovered
        assert found is not None
        assert dict(found.batches) == {1: (1, 0)}
        assert list(found.groups) == [0, 1, 2]
        assert dict(found.waiting) == {3: 1, 4: 1}


async def test_events_are_durable_in_groups_and_nothing_blocks_the_loop(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    ledger = await asyncio.to_thread(SQLiteLedger, path, commit_latency_s=60.0)
    with blockbuster_ctx():
        for group_id in range(200):
            ledger.append(Issued(group_id))
            roll_out(ledger, group_id)
        end = await ledger.durable()
        await ledger.room()
    assert end.sequence == 600
    assert ledger.commits < 10
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT count(*) FROM events").fetchone() == (600,)
    await ledger.aclose()


async def test_room_waits_while_the_queue_is_full(tmp_path: Path):
    ledger = await asyncio.to_thread(SQLiteLedger, tmp_path / "ledger.sqlite", queue_bytes=1000, commit_latency_s=60.0)
    with ledger._writer._changed:  # nothing is taken out of the queue meanwhile
        for group_id in range(100):
            ledger.append(Issued(group_id))
        waiting = asyncio.ensure_future(ledger.room())
        await asyncio.sleep(0)
        assert not waiting.done()
    async with asyncio.timeout(10):
        await waiting
    await ledger.aclose()


async def test_a_ledger_that_cannot_be_written_raises(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    ledger = await asyncio.to_thread(SQLiteLedger, path, commit_latency_s=0.0)
    with sqlite3.connect(path) as other:
        other.execute("DROP VIEW turns")
        other.execute("DROP VIEW rows")
        other.execute("DROP TABLE trajectories")
    ledger.append(Issued(0))
    roll_out(ledger, 0)
    with pytest.raises(LedgerError, match="no such table"):
        await ledger.durable()
    with pytest.raises(LedgerError, match="cannot be written"):
        ledger.append(Issued(1))
    with pytest.raises(LedgerError):
        ledger.close()


@pytest.mark.parametrize("freed", [True, False])
async def test_a_ledger_waits_for_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed: bool):
    loop, full = asyncio.get_running_loop(), asyncio.Event()
    ends = LedgerWriter._ends

    def waits(self: LedgerWriter, timeout_s: float) -> bool:
        loop.call_soon_threadsafe(full.set)
        return ends(self, timeout_s / 100)

    monkeypatch.setattr(LedgerWriter, "_ends", waits)
    path = tmp_path / "ledger.sqlite"
    ledger = await asyncio.to_thread(SQLiteLedger, path, commit_latency_s=0.0)
    (pages,) = ledger._connection.execute("PRAGMA page_count").fetchone()
    ledger._connection.execute(f"PRAGMA max_page_count = {pages}")
    for group_id in range(200):
        ledger.append(Issued(group_id))
        roll_out(ledger, group_id)
    durable = asyncio.ensure_future(ledger.durable())
    await full.wait()
    assert not durable.done()
    if not freed:
        with pytest.raises(LedgerError, match="cannot be written: database or disk is full"):
            await ledger.aclose()
        with pytest.raises(LedgerError, match="full"):
            await durable
        return
    ledger._connection.execute("PRAGMA max_page_count = 100000")
    assert (await durable).sequence == 600
    await ledger.aclose()
    assert read(path, witness=Witness(path, files=DurableFiles()), connect=sqlite3.connect).problems == ()


def test_rows_can_be_queried_with_sql_and_as_a_batch(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    record_run(path)
    with sqlite3.connect(path) as plain:
        assert plain.execute("SELECT state, count(*) FROM groups GROUP BY state ORDER BY state").fetchall() == [
            ("committed", 4),
            ("completed", 1),
            ("dispatched", 1),
            ("dropped", 1),
            ("issued", 1),
        ]
        assert plain.execute("SELECT group_id FROM batches WHERE step = 2 ORDER BY position").fetchall() == [(3,), (2,)]
        assert plain.execute(
            "SELECT json_extract(message, '$.content'), first_token FROM turns WHERE group_id = 5 AND row = 1"
        ).fetchall() == [("x", 1)]
    batch = query(path, "reward > :least AND step = 1", {"least": 0.5})
    assert batch.batch["group_id"].tolist() == [0, 1]
    assert batch.batch["row"].tolist() == [1, 1]
    assert batch.batch["position"].tolist() == [0, 1]
    assert torch.equal(batch.batch["input_ids"][1], torch.tensor([1, 1, 1]))
    assert batch.non_tensor_batch["state"].tolist() == ["committed", "committed"]
    assert len(query(path, "group_id = 99")) == 0
    assert len(query(path, limit=3)) == 3
    with pytest.raises(LedgerError, match="no such column"):
        query(path, "nonsense = 1")
    with pytest.raises(LedgerError):
        query(path, "1; DROP TABLE events")
    with pytest.raises(LedgerError):
        query(tmp_path / "absent.sqlite")


def test_a_ledger_that_is_written_while_it_is_read_is_not_damaged(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with SQLiteLedger(path, threaded=False) as ledger:
        ledger.append(Issued(0))

        class Meanwhile(sqlite3.Connection):
            def close(self) -> None:
                ledger.append(Issued(1))
                super().close()

        connect = partial(sqlite3.connect, factory=Meanwhile)
        found = read(path, witness=Witness(path, files=DurableFiles()), connect=connect)
    assert (found.events, found.problems) == ((Issued(0),), ())


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([Committed(1)], "consumed"),
        ([Committed(2)], "committed"),
        ([Resumed(2)], "committed"),  # the process was killed between the seal of the checkpoint and its event
        ([Committed(2), Resumed(1)], "completed"),
        ([Committed(2), Resumed(1), Consumed(group_id=1, step=2, position=0)], "consumed"),
    ],
)
def test_committed_is_what_the_newest_checkpoint_of_this_process_has(
    tmp_path: Path, events: list[LedgerEvent], state: str
):
    path = tmp_path / "ledger.sqlite"
    with SQLiteLedger(path, threaded=False) as ledger:
        for group_id in range(2):
            ledger.append(Issued(group_id))
            roll_out(ledger, group_id)
            ledger.append(Consumed(group_id=group_id, step=group_id + 1, position=0))
        for event in events:
            ledger.append(event)
    with sqlite3.connect(path) as plain:
        states = plain.execute("SELECT state FROM groups ORDER BY group_id").fetchall()
    assert states == [("committed",), (state,)]


def test_a_new_run_refuses_an_existing_ledger(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    record_run(path)
    with pytest.raises(LedgerError, match="exists already"):
        SQLiteLedger(path)


def test_a_run_resumes_from_its_checkpoint_without_a_ledger(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    _, second = record_run(path)
    path.unlink()
    with SQLiteLedger(path, resume=second) as ledger:
        found = ledger.recovered
        assert found is not None
        assert (found.next_group_id, dict(found.waiting), found.groups) == (8, {5: 0, 6: 0, 7: 0}, {})
        assert "does not exist" in found.notes[0]
        counts = ledger.statistics()
        assert (counts.issued, counts.consumed, counts.dropped, counts.live) == (8, 4, {"before": 1}, 3)


def test_the_ledger_of_another_run_is_set_aside(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    record_run(path)
    foreign = LedgerBase(
        step=2, next_group_id=8, consumed=4, outstanding=(5, 6, 7), position=LedgerPosition(sequence=9, checksum=1)
    )
    with SQLiteLedger(path, resume=foreign) as ledger:
        assert ledger.recovered is not None
        assert "is not of this ledger" in ledger.recovered.notes[0]
        assert ledger.recovered.groups == {}
    assert query(tmp_path / "ledger.sqlite.damaged-1", "group_id = 5").batch is not None


def test_rows_that_were_changed_are_sampled_again(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    _, second = record_run(path)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE trajectories SET reward = 9 WHERE group_id = 5 AND row = 0")
    with SQLiteLedger(path, resume=second) as ledger:
        found = ledger.recovered
        assert found is not None
        assert found.groups == {}
        assert dict(found.waiting) == {5: 1, 6: 1, 7: 0}
        assert found.notes == ("the rows of group 5 cannot be read; it is rolled out again",)
        roll_out(ledger, 5, attempt=1, version=2)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE events SET body = replace(body, '\"group_id\":2', '\"group_id\":4') WHERE sequence = 13",
        "DELETE FROM events WHERE sequence = 13",
        "UPDATE events SET checksum = checksum + 1 WHERE sequence = 13",
    ],
)
def test_a_changed_event_is_detected_and_the_events_before_it_count(tmp_path: Path, damage: str):
    path = tmp_path / "ledger.sqlite"
    first, second = record_run(path)
    with sqlite3.connect(path) as other:
        other.execute("DROP VIEW IF EXISTS rows")
        other.execute(damage)
    shutil.copytree(tmp_path, tmp_path / "copy")
    with SQLiteLedger(path, resume=second) as ledger:  # the checkpoint needs more events than are left
        assert ledger.recovered is not None
        assert "13" in ledger.recovered.notes[0]
        assert ledger.statistics().unaccounted == 0
        assert dict(ledger.recovered.waiting) == {5: 0, 6: 0, 7: 0}
    early = LedgerBase(step=0, next_group_id=0, consumed=0, outstanding=())
    with SQLiteLedger(tmp_path / "copy" / "ledger.sqlite", resume=early) as ledger:
        assert ledger.recovered is not None
        assert list(ledger.recovered.groups) == [0, 1]
        assert "its first 12 events count" in ledger.recovered.notes[0]
    assert first.position.sequence > 12


async def test_a_durable_position_is_on_disk(tmp_path: Path):
    """A group that is issued while the files are synced is not included in the returned position."""
    ledger: SQLiteLedger

    def issue_another(moment: str, path: Path) -> None:
        if moment == "synced" and path.name.endswith("-wal"):
            ledger.append(Issued(1))

    files = DurableFiles(issue_another)
    with SQLiteLedger(tmp_path / "ledger.sqlite", threaded=False, fsync="checkpoint", files=files) as ledger:
        ledger.append(Issued(0))
        assert (await ledger.durable()).sequence == 1
        assert ledger.position.sequence == 2


class Died(Exception):
    pass


@pytest.mark.slow
def test_a_crash_while_a_ledger_is_salvaged_loses_no_good_event(tmp_path: Path):
    made = tmp_path / "made"
    made.mkdir()
    first, _ = record_run(made / "ledger.sqlite")
    with sqlite3.connect(made / "ledger.sqlite") as other:
        other.execute("DELETE FROM events WHERE sequence = 20")
    points = -4
    while True:
        points += 5
        path = tmp_path / f"{points}" / "ledger.sqlite"
        shutil.copytree(made, path.parent)
        left = points

        def reached(*_: object) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise Died

        try:
            SQLiteLedger(path, resume=first, threaded=False, files=DurableFiles(reached)).close()
        except (Died, LedgerError):  # the latter where its writer died
            pass
        else:
            break
        with SQLiteLedger(path, resume=first, threaded=False) as ledger:
            found = ledger.recovered
        assert found is not None
        assert list(found.groups) == [2, 3], f"died at point {points}"
    assert points > 20


class UnsyncedFiles(DurableFiles):
    """Skips syncs, because nothing here must survive this process."""

    def write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)

    def sync(self, path: Path) -> None:
        pass


def damaged(path: Path, original: bytes, dice: random.Random) -> str:
    """Cut the file or flip one of its bits; return a description."""
    if dice.random() < 0.3:
        size = dice.randrange(len(original))
        path.write_bytes(original[:size])
        return f"cut to {size}"
    place, bit = dice.randrange(len(original)), 1 << dice.randrange(8)
    path.write_bytes(original[:place] + bytes([original[place] ^ bit]) + original[place + 1 :])
    return f"bit {bit} of byte {place}"


def test_no_damage_passes_unnoticed(tmp_path: Path):
    """Any cut or flipped bit in any file of a ledger that was not closed is detected, or changes nothing.

    Some; ``benchmarks/damage.py`` does 5,000.
    """
    times = 25
    made, hurt = tmp_path / "made", tmp_path / "hurt"
    made.mkdir()
    ledger = SQLiteLedger(made / "ledger.sqlite", threaded=False)
    for group_id in range(6):
        ledger.append(Issued(group_id))
        roll_out(ledger, group_id)
    whole = tmp_path / "whole"
    shutil.copytree(made, whole)  # as a process that is killed leaves it: the log is not yet in the tables
    closed = ledger.position
    ledger.close()
    base = LedgerBase(step=0, next_group_id=0, consumed=0, outstanding=())
    original = {file.name: file.read_bytes() for file in whole.iterdir() if not file.name.endswith("-shm")}
    assert set(original) == {"ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-witness"}
    dice, noticed, harmless = random.Random(0), 0, 0
    for _ in range(times):
        shutil.rmtree(hurt, ignore_errors=True)
        hurt.mkdir()
        for name, content in original.items():
            (hurt / name).write_bytes(content)
        name = dice.choice(sorted(original))
        what = f"{name}: {damaged(hurt / name, original[name], dice)}"
        try:
            with SQLiteLedger(
                hurt / "ledger.sqlite", resume=base, threaded=False, files=UnsyncedFiles(), fsync="checkpoint"
            ) as again:
                found = again.recovered
                assert found is not None
                counts = again.statistics()
        except LedgerError:
            noticed += 1
            continue
        assert counts.unaccounted == 0, what
        for group_id, group in found.groups.items():
            assert group.rows == decode_rows(rows_of(group_id), group_id=group_id), what
        if found.notes:
            noticed += 1
        else:
            harmless += 1
            assert sorted(found.groups) == list(range(6)), what
    assert noticed + harmless == times
    assert noticed > 0.5 * times
    assert closed.sequence == 18
