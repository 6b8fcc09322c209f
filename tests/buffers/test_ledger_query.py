"""Reading a ledger: what a replay needs, and the turns from which a resumed run continues."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from asyncrl.errors import LedgerError
from asyncrl.ledger import (
    AttemptLost,
    Completed,
    Consumed,
    Dispatched,
    Issued,
    LedgerBase,
    Published,
    Resumed,
    Rewarded,
    RunStarted,
    TurnsAppended,
)
from asyncrl.rollout.trajectory import Trajectory, Turn, encode_rows
from asyncrl.rollout.turns import TurnRecord, decode_turns, encode_turns, sampled_turns
from buffers.ledger import SQLiteLedger


def rows_of(reward: float) -> bytes:
    trajectory = Trajectory(
        task={"question": "?"},
        token_ids=(1, 2, 3),
        loss_mask=(False, True, True),
        behaviour_log_probs=(0.0, -0.5, -0.25),
        weight_versions=(-1, 0, 0),
        reward=reward,
        turns=(Turn(start=1, end=3, finish_reason="stop", message={"role": "assistant", "content": "x"}),),
        finish_reason="done",
    )
    return encode_rows([trajectory, trajectory])


def roll_out(ledger: SQLiteLedger, group_id: int) -> None:
    ledger.append(Issued(group_id))
    ledger.append(Dispatched(group_id=group_id, attempt=0, version=0))
    ledger.append(Completed(group_id=group_id, attempt=0, tokens=4), rows=rows_of(group_id / 10))


def sampled(group_id: int, *, row: int, turn: int, version: int, attempt: int = 0) -> TurnRecord:
    return TurnRecord(
        group_id=group_id,
        attempt=attempt,
        row=row,
        turn=turn,
        tokens=3,
        chain=0,
        place=turn,
        trial=0,
        context=b"",
        token_ids=bytes(12),
        log_probs=bytes(12),
        spans=((version, 3),),
        finish_reason="stop",
    )


def append_turns(ledger: SQLiteLedger, *records: TurnRecord) -> bool:
    content = encode_turns(records)
    return ledger.append(TurnsAppended(turns=sampled_turns(content)), rows=content)


def test_weights_whose_publication_was_not_committed_are_those_that_the_next_process_starts_from(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with SQLiteLedger(path) as ledger:
        ledger.append(RunStarted(step=0, config="", model="model", weights="a"))
        ledger.append(Published(version=1, weights="b"))
        ledger.append(Resumed(2))  # from the checkpoint of step 2, sealed by a driver that was killed right after
        ledger.append(RunStarted(step=2, config="", model="model", weights="c"))
        ledger.append(Published(version=3, weights="d"))
    with contextlib.closing(SQLiteLedger.archive(path)) as archive:
        assert dict(archive.weights) == {0: "a", 1: "b", 2: "c", 3: "d"}


def test_an_archive_has_every_batch_and_the_processes_that_trained(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with SQLiteLedger(path) as ledger:
        ledger.append(RunStarted(step=0, config="lr = 1", model="model", weights="a"))
        for group_id in range(4):
            roll_out(ledger, group_id)
        ledger.append(Rewarded(group_id=1, rewards=(0.5, 0.75)))
        ledger.append(Consumed(group_id=1, step=1, position=0), Consumed(group_id=0, step=1, position=1))
        ledger.append(Published(version=1, weights="b"))
        ledger.append(Consumed(group_id=2, step=2, position=0), Consumed(group_id=3, step=2, position=1))
        ledger.append(Published(version=2, weights="c"))
        ledger.append(Resumed(1))
        ledger.append(RunStarted(step=1, config="lr = 2", model="model", weights="b"))
        ledger.append(Consumed(group_id=3, step=2, position=0), Consumed(group_id=2, step=2, position=1))
        ledger.append(Published(version=2, weights="d"))
    archive = SQLiteLedger.archive(path)
    assert dict(archive.batches) == {1: (1, 0), 2: (3, 2)}
    assert dict(archive.weights) == {0: "a", 1: "b", 2: "d"}
    assert [(process.step, process.config) for process in archive.processes] == [(0, "lr = 1"), (1, "lr = 2")]
    group = archive.group(1)
    assert group is not None
    assert (group.summary.rewards, group.rewarded) == ((0.5, 0.75), True)
    assert (archive.problems, archive.missing_rows(), archive.first_step) == ((), (), 0)
    assert len(archive.query("step = 2")) == 4
    with sqlite3.connect(path) as other:
        other.execute("DELETE FROM trajectories WHERE group_id = 2")
        other.execute("UPDATE trajectories SET reward = 9 WHERE group_id = 3 AND row = 0")
    assert archive.missing_rows() == (2,)
    assert archive.group(2) is archive.group(3) is archive.group(7) is None
    archive.close()
    with pytest.raises(LedgerError, match="no such ledger"):
        SQLiteLedger.archive(tmp_path / "other.sqlite")


def test_the_work_of_a_query_grows_as_the_ledger_does(tmp_path: Path):
    def work(steps: int) -> int:
        path = tmp_path / f"{steps}.sqlite"
        with SQLiteLedger(path) as ledger:
            for step in range(1, steps + 1):
                roll_out(ledger, step)
                ledger.append(Consumed(group_id=step, step=step, position=0))
        ticks: list[None] = []
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.set_progress_handler(lambda: ticks.append(None), 100)  # instructions of SQLite's machine
            assert len(connection.execute("SELECT step FROM rows").fetchall()) == 2 * steps
        return len(ticks)

    assert work(200) < 3 * work(100)


def test_the_ledger_of_an_earlier_version_is_as_fast_once_it_is_resumed(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    made = "SELECT sql FROM sqlite_master WHERE name = 'batches'"
    with SQLiteLedger(path) as ledger:
        roll_out(ledger, 0)
    with sqlite3.connect(path) as other:
        ((view,),) = other.execute(made).fetchall()
        other.execute("DROP VIEW batches")
        other.execute(view.replace("AS MATERIALIZED", "AS NOT MATERIALIZED"))
    with SQLiteLedger(path, resume=LedgerBase(step=0, next_group_id=0, consumed=0, outstanding=())):
        pass
    with sqlite3.connect(path) as other:
        assert other.execute(made).fetchall() == [(view,)]
        assert len(other.execute("SELECT step FROM rows").fetchall()) == 2


def test_an_archive_has_no_rows_of_an_attempt_that_was_lost(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with SQLiteLedger(path, threaded=False) as ledger:
        roll_out(ledger, 0)
        ledger.append(Rewarded(group_id=0, rewards=(0.5, 0.75)), AttemptLost(group_id=0, attempt=0))
        with contextlib.closing(SQLiteLedger.archive(path)) as archive:
            assert archive.group(0) is None
        ledger.append(Dispatched(group_id=0, attempt=1, version=0))
        ledger.append(Completed(group_id=0, attempt=1, tokens=4), rows=rows_of(1.0))
    with contextlib.closing(SQLiteLedger.archive(path)) as archive:
        group = archive.group(0)
        assert group is not None
        assert group.summary.rewards == (1.0, 1.0)


def test_a_resumed_run_recovers_the_turns_of_running_groups(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with SQLiteLedger(path) as ledger:
        for group_id in range(3):
            ledger.append(Issued(group_id))
            ledger.append(Dispatched(group_id=group_id, attempt=0, version=0))
        append_turns(ledger, sampled(0, row=0, turn=0, version=0), sampled(1, row=0, turn=0, version=0))
        append_turns(ledger, sampled(0, row=1, turn=0, version=0))
        append_turns(ledger, sampled(1, row=0, turn=1, version=0))
        # Of weights that the resumed run does not reproduce:
        append_turns(ledger, sampled(0, row=0, turn=1, version=1), sampled(2, row=0, turn=0, version=0))
        ledger.append(Completed(group_id=1, attempt=0, tokens=4), rows=rows_of(1.0))
        ledger.append(Dispatched(group_id=2, attempt=1, version=0))  # the replica was lost: another attempt
        late = sampled(2, row=0, turn=1, version=0, attempt=0)
        assert append_turns(ledger, late, sampled(2, row=0, turn=0, version=0, attempt=1))
        assert not append_turns(ledger, late)
        end = ledger.position
    with sqlite3.connect(path) as other:
        recorded = other.execute(
            "SELECT group_id, attempt, row, turn FROM sampled_turns ORDER BY sequence, 1, 2"
        ).fetchall()
        kept = other.execute("SELECT count(*) FROM unfinished").fetchall()
    assert recorded == [
        *[(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (1, 0, 0, 1), (0, 0, 0, 1), (2, 0, 0, 0)],
        (2, 1, 0, 0),  # without the late one
    ]
    assert kept == [(4,)]  # not those that only group 1 needed, which is completed
    base = LedgerBase(step=0, next_group_id=0, consumed=0, outstanding=(), position=type(end)())
    with SQLiteLedger(path, resume=base) as ledger:
        found = ledger.recovered
        assert found is not None
        assert dict(found.waiting) == {0: 1, 2: 2}
        assert {group_id: turns.tokens for group_id, turns in found.turns.items()} == {0: 6, 2: 3}
        found_turns = [(turn.row, turn.attempt, turn.turn) for turn in decode_turns(found.turns[0].content)]
        assert found_turns == [(0, 0, 0), (1, 0, 0)]
        assert [turn.attempt for turn in decode_turns(found.turns[2].content)] == [1]
        for group_id in (0, 2):
            ledger.append(Dispatched(group_id=group_id, attempt=2, version=0))
            with sqlite3.connect(path) as other:
                assert other.execute("SELECT count(*) FROM unfinished").fetchone() != (0,)
            ledger.append(Completed(group_id=group_id, attempt=2, tokens=4), rows=rows_of(1.0))
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT count(*) FROM unfinished").fetchone() == (0,)


def test_damaged_turns_are_left_out(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with SQLiteLedger(path) as ledger:
        for group_id in range(2):
            ledger.append(Issued(group_id))
            ledger.append(Dispatched(group_id=group_id, attempt=0, version=0))
        append_turns(ledger, sampled(0, row=0, turn=0, version=0), sampled(1, row=0, turn=0, version=0))
        append_turns(ledger, sampled(0, row=0, turn=1, version=0), sampled(1, row=1, turn=0, version=0))
    with sqlite3.connect(path) as other:
        damaged = encode_turns([sampled(0, row=0, turn=1, version=0)])
        other.execute("UPDATE unfinished SET body = ? WHERE sequence = 6", (damaged,))
    with SQLiteLedger(path, resume=LedgerBase(step=0, next_group_id=0, consumed=0, outstanding=())) as ledger:
        found = ledger.recovered
        assert found is not None
        assert {group_id: turns.tokens for group_id, turns in found.turns.items()} == {0: 3, 1: 3}
        assert found.notes == ("turns of running groups (0, 1) cannot be read; they are sampled again",)
