"""Cuts and flipped bits in every file of ledgers and checkpoints: each is detected, and the last good state is used.

    python benchmarks/damage.py --damages 5000 [--json] [--seed 0] [--jobs 2]

Half of the damage is to a ledger as a killed process leaves it (tables, write-ahead log, witness), half to the newest
of two checkpoints (trainer's files, model, driver's state, manifest). A third are cuts, the rest single bits. A run
with a damaged ledger is resumed: the recovered groups must be those that were written, their counts must add up, and
either the damage is reported or nothing is missing (a bit without meaning, such as one of a page that is not in use). A
damaged checkpoint must be refused, and the run must resume from the one before it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import random
import shutil
import tempfile
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from asyncrl.errors import CheckpointError, LedgerError
from asyncrl.io import DurableFiles, verify_folder
from asyncrl.ledger import Completed, Consumed, Dispatched, Issued, LedgerBase, TurnsAppended
from asyncrl.rollout.trajectory import Trajectory, Turn, decode_rows, encode_rows
from asyncrl.rollout.turns import TurnRecord, decode_turns, encode_turns, sampled_turns
from asyncrl.trainer.checkpoint import Checkpoints, DriverState
from buffers.ledger import SQLiteLedger

PROMPTS = 6
CHUNK = 50


class UnsyncedFiles(DurableFiles):
    """Skips syncs, because nothing here must survive this process."""

    def sync(self, path: Path) -> None:
        pass

    def write(self, path: Path, content: bytes) -> None:
        path.write_bytes(content)


def rows_of(group_id: int) -> bytes:
    return encode_rows(
        [
            Trajectory(
                task={"number": group_id},
                token_ids=tuple(range(group_id, group_id + 40)),
                loss_mask=(False, *[True] * 39),
                behaviour_log_probs=(0.0, *[-1.5] * 39),
                weight_versions=(-1, *[0] * 39),
                reward=group_id + row / 8,
                turns=(Turn(start=1, end=40, finish_reason="stop", message={"role": "assistant", "content": "x"}),),
                finish_reason="done",
            )
            for row in range(4)
        ]
    )


def turns_of(turn: int) -> list[TurnRecord]:
    """One turn of each row of a prompt under way, the same in every process."""
    return [
        TurnRecord(
            group_id=PROMPTS,
            attempt=0,
            row=row,
            turn=turn,
            tokens=30,
            chain=0,
            place=turn,
            trial=0,
            context=bytes(80),
            token_ids=bytes([row, turn, 0, 0] * 30),
            log_probs=bytes([0, 0, row, 191] * 30),
            spans=((0, 30),),
            finish_reason="stop",
        )
        for row in range(4)
    ]


def make_ledger(folder: Path) -> dict[str, bytes]:
    """The files of a ledger whose process was killed: six prompts, two of them trained on, and one under way."""
    folder.mkdir()
    ledger = SQLiteLedger(folder / "ledger.sqlite", threaded=False, files=UnsyncedFiles())
    for group_id in range(PROMPTS):
        ledger.append(Issued(group_id))
        ledger.append(Dispatched(group_id=group_id, attempt=0, version=0))
        ledger.append(Completed(group_id=group_id, attempt=0, tokens=156), rows=rows_of(group_id))
    ledger.append(Consumed(group_id=0, step=1, position=0), Consumed(group_id=1, step=1, position=1))
    ledger.append(Issued(PROMPTS))
    ledger.append(Dispatched(group_id=PROMPTS, attempt=0, version=0))
    for turn in (0, 1):
        content = encode_turns(turns_of(turn))
        ledger.append(TurnsAppended(turns=sampled_turns(content)), rows=content)
    files = {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-shm")}
    ledger.close()
    return files


class SmallTrainer:
    """Writes what a trainer writes: weights, optimizer, a model folder."""

    async def snapshot(self, folder: Path, model: Path | None = None) -> None: ...

    async def write_snapshot(self, folder: Path) -> list[dict[str, Any]]:
        save_file({"moments": torch.arange(500.0)}, folder / "optimizer.safetensors")
        (folder / "trainer.json").write_text(json.dumps({"updates": 3, "seed": 0}))
        return [{}]

    async def export_snapshot(self, saved: Path, folder: Path) -> None:
        folder.mkdir()
        save_file({"weights": torch.arange(500.0)}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"hidden_size": 8}))


def make_checkpoints(folder: Path) -> dict[str, bytes]:
    """Two checkpoints; the files of the newer one, by their path below it."""
    checkpoints = Checkpoints(folder, keep=2, files=UnsyncedFiles())
    folder.mkdir()
    for step in (1, 2):
        state = DriverState(
            step=step,
            next_group_id=4 * step,
            outstanding=(4 * step - 1,),
            generated=100,
            trained=80,
            dropped={"stale": 5},
            staleness={0: 60, 1: 20},
            history={"evaluations": [], "rewards": [0.5]},
        )
        newest = asyncio.run(checkpoints.save(SmallTrainer(), state, step=step))
    return {path.relative_to(newest).as_posix(): path.read_bytes() for path in newest.rglob("*") if path.is_file()}


def damaged(original: bytes, dice: random.Random) -> tuple[bytes, str]:
    """Cut, or with one bit flipped; and what was done."""
    if dice.random() < 1 / 3:
        size = dice.randrange(len(original))
        return original[:size], f"cut to {size} of {len(original)} bytes"
    place, bit = dice.randrange(len(original)), 1 << dice.randrange(8)
    return original[:place] + bytes([original[place] ^ bit]) + original[place + 1 :], f"byte {place} ^ {bit}"


def strike_ledger(folder: Path, files: dict[str, bytes], dice: random.Random) -> tuple[str, str]:
    """Damage a ledger once; return ``reported`` or ``meaningless``, or what is wrong; and what was done."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    name = dice.choice(sorted(files))
    content, what = damaged(files[name], dice)
    (folder / name).write_bytes(content)
    what = f"{name}: {what}"
    base = LedgerBase(step=0, next_group_id=0, consumed=0, outstanding=())
    try:
        with SQLiteLedger(
            folder / "ledger.sqlite", resume=base, threaded=False, files=UnsyncedFiles(), fsync="checkpoint"
        ) as ledger:
            found, counts = ledger.recovered, ledger.statistics()
    except LedgerError:
        return "reported", what
    assert found is not None
    if counts.unaccounted:
        return "groups do not add up", what
    for group_id, group in found.groups.items():
        if group.rows != decode_rows(rows_of(group_id), group_id=group_id):
            return f"other rows for group {group_id}", what
    turns = decode_turns(found.turns[PROMPTS].content) if PROMPTS in found.turns else []
    sampled = sorted(turns_of(0) + turns_of(1), key=lambda turn: (turn.row, turn.turn))
    if any(turn not in sampled for turn in turns):
        return "other turns of the running group", what
    if found.notes:
        return "reported", what
    whole = sorted(found.groups) == list(range(PROMPTS)) and dict(found.batches) == {1: (0, 1)} and turns == sampled
    return "meaningless" if whole else "not reported, and something is missing", what


def strike_checkpoint(folder: Path, files: dict[str, bytes], dice: random.Random) -> tuple[str, str]:
    """One damage to the newest checkpoint, taken back afterwards."""
    checkpoints = Checkpoints(folder, keep=2, files=UnsyncedFiles())
    name = dice.choice(sorted(files))
    content, what = damaged(files[name], dice)
    victim = folder / "step-000002" / name
    victim.write_bytes(content)
    try:
        verify_folder(victim.parents[name.count("/")])
    except CheckpointError:
        used = checkpoints.latest().name
        outcome = "reported" if used == "step-000001" else f"{used} was used"
    else:
        outcome = "not reported"
    victim.write_bytes(files[name])
    return outcome, f"{name}: {what}"


def begin() -> None:
    torch.set_num_threads(1)
    logging.getLogger("asyncrl").setLevel(logging.CRITICAL)  # damage is what this is about
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # for torch's own developers


def strike(job: tuple[int, int, str]) -> tuple[Counter[str], list[str]]:
    """Some damages to a ledger and checkpoints of their own: outcomes, and what went wrong."""
    seed, times, parent = job
    dice = random.Random(seed)
    root = Path(tempfile.mkdtemp(dir=parent))
    ledger_files, checkpoint_files = make_ledger(root / "made"), make_checkpoints(root / "checkpoints")
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    for number in range(times):
        if number % 2:
            kind, (outcome, what) = "ledger", strike_ledger(root / "struck", ledger_files, dice)
        else:
            kind, (outcome, what) = (
                "checkpoint",
                strike_checkpoint(root / "checkpoints", checkpoint_files, dice),
            )
        outcomes[f"{kind}, {'cut' if 'cut to' in what else 'bit'}: {outcome}"] += 1
        if outcome not in ("reported", "meaningless"):
            wrong.append(f"{kind}: {what}: {outcome} (seed {seed}, number {number})")
    verify_folder(root / "checkpoints" / "step-000002")  # undamaged, it is good
    shutil.rmtree(root)
    return outcomes, wrong


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--damages", type=int, default=5000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    memory = Path("/dev/shm")  # nothing here is to outlive this program
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="damage-", dir=memory if memory.is_dir() else None) as folder:
        jobs = [
            (options.seed * 1_000_003 + first, min(CHUNK, options.damages - first), folder)
            for first in range(0, options.damages, CHUNK)
        ]
        with get_context("spawn").Pool(min(options.jobs, len(jobs)), initializer=begin) as pool:
            for counts, lines in pool.imap_unordered(strike, jobs):
                outcomes += counts
                wrong += lines
    figures: list[dict[str, Any]] = [
        figure("damages", outcomes.total(), "damages"),
        figure(
            "reported, or without any meaning",
            outcomes.total() - len(wrong),
            "damages",
            goal=f"{outcomes.total()}",
            holds=not wrong,
        ),
        *(figure(kind, times, "damages") for kind, times in sorted(outcomes.items())),
        figure("time", round(time.perf_counter() - started, 1), "s"),
    ]
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if options.json:
        print(json.dumps({"machine": machine, "figures": figures, "wrong": wrong}))
        return
    for each in figures:
        verdict = f"  goal {each['goal']}: {'holds' if each['holds'] else 'DOES NOT HOLD'}" if each["goal"] else ""
        print(f"{each['name']:36s} {each['value']:>8} {each['unit']}{verdict}")
    for line in wrong[:20]:
        print(line)


def figure(
    name: str, value: float, unit: str, *, goal: str | None = None, holds: bool | None = None
) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "floor": None, "ratio": None, "goal": goal, "holds": holds}


if __name__ == "__main__":
    main()
