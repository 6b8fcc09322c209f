"""Crash points: a run dies at any point where something reaches the disk, is resumed, and must reach the same weights.

    python benchmarks/crash_points.py --points 500 [--json] [--jobs 2] [--seed 0] [--world model|run] [--only 17]
    python benchmarks/crash_points.py --points 100 --world run --writes     # while a checkpoint is written

The points are before and after each write, fsync, rename, removal, insert and commit of ledger and checkpoints: the
file operations of the production code (asyncrl/io.py) and the ledger's connection to SQLite report them. An undisturbed
run counts them; `--points` of them are chosen, evenly spread. At each one a process of its own runs from the beginning
and dies there by os._exit; every other time a crash of the machine is simulated: data that were not synced are cut off
or zeroed at random. One in three dies again, at a random point of its recovery. Then the run is resumed to its end, and
must have trained on the same prompts in the same order, to the same weights. Each death leaves a record (the operation
before it); a death without one is reported, and fails the program.

`model` is the production driver, law, buffer, ledger, checkpoints and resumption between a policy whose tokens depend
on its weights and a trainer whose weights depend on every token: one prompt lost, repeated or out of order changes all
weights that follow. `run` is a whole `asyncrl train` of a tiny transformer on the local backend (seconds a point).
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import json
import logging
import os
import platform
import random
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from asyncrl.algorithms import AdvantageEstimator
from asyncrl.config import Config
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.errors import CheckpointError
from asyncrl.io import DurableFiles
from asyncrl.ledger import Committed
from asyncrl.rollout.publication import Ended
from asyncrl.rollout.trajectory import Trajectory, Turn, encode_rows, trajectories_to_batch
from asyncrl.staleness import POLICIES
from asyncrl.tasks.run import train
from asyncrl.telemetry.timeline import Timeline
from asyncrl.testing import EchoFactory
from asyncrl.trainer import run as training_run
from asyncrl.trainer.checkpoint import Checkpoints, DriverState, read_driver_state
from asyncrl.trainer.driver import Driver, TrainingPlan
from asyncrl.trainer.group import GroupStages
from asyncrl.trainer.learner import Advantages, Learner
from asyncrl.trainer.recovery import driver_state, ledger_base, starting_point
from asyncrl.weights import WeightManifest
from buffers.ledger import SQLiteLedger
from buffers.replay import AsyncReplayBuffer
from engines.training.fsdp_engine import FSDPEngine

STEPS, GROUPS, ROWS, CHECKPOINT_EVERY = 12, 2, 2, 2
DIED = 99
"""Exit code of a life that ended where it was to."""


class Points:
    """Counts the points of a life, and ends its process at one of them.

    Args:
        folder: what the run writes; files in it now are on the disk.
        at: number of the point to die at, from 1; 0 lives on.
        dice: the machine dies too: what was not brought to the disk is torn. None leaves what the process had written.
        fsync: as of the ledger.
        within: points count where the path has this text.
    """

    within = ""

    def __init__(self, folder: Path, *, at: int = 0, dice: random.Random | None = None, fsync: str = "commit") -> None:
        self.count = 0
        self.kinds: Counter[str] = Counter()
        self._folder, self._at, self._dice, self._fsync = folder, at, dice, fsync
        self._lock = threading.RLock()
        self._renaming = folder
        self._durable = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}

    def __call__(self, moment: str, path: Path) -> None:
        with self._lock:
            counts = self.within in str(path)
            self.count += counts
            self.kinds[moment] += counts
            if moment == "synced" and path.is_file():
                self._durable[path] = path.stat().st_size
            elif moment == "committed" and self._fsync == "commit":
                wal = path.with_name(path.name + "-wal")
                self._durable[wal] = wal.stat().st_size
            elif moment == "before rename":
                self._renaming = path
            elif moment == "renamed":
                self._durable = {_moved(known, self._renaming, path): size for known, size in self._durable.items()}
            if counts and self.count == self._at:
                if self._dice is not None:
                    self._tear(self._dice)
                witness = {"point": self.count, "moment": moment, "path": path.name, "torn": self._dice is not None}
                (self._folder.parent / f"{self._folder.name}.died").open("a").write(json.dumps(witness) + "\n")
                os._exit(DIED)

    def _tear(self, dice: random.Random) -> None:
        """Anything may be left of what no fsync has answered for: cut, or of the right size and full of zeros."""
        for path in sorted(self._folder.rglob("*")):
            unfinished = any(part.startswith(".step-") for part in path.relative_to(self._folder).parts[:-1])
            if path.is_file() and (path.name.endswith("-wal") or unfinished):
                size, durable = path.stat().st_size, self._durable.get(path, 0)
                durable = 0 if durable > size else durable  # a log that was begun anew
                if size > durable:
                    kept = dice.randint(durable, size)
                    os.truncate(path, kept)
                    if dice.random() < 0.5:
                        os.truncate(path, size)

    def connect(self, path: Path, **options: Any) -> sqlite3.Connection:
        """``sqlite3.connect``, with its points counted."""
        reached = self

        class Connection(sqlite3.Connection):
            def executemany(self, sql: str, lines: Any, /) -> sqlite3.Cursor:
                reached("before insert", path)
                cursor = super().executemany(sql, lines)
                reached("inserted", path)
                return cursor

            def executescript(self, sql: str, /) -> sqlite3.Cursor:
                reached("before commit", path)
                cursor = super().executescript(sql)  # the tables of a new file, with a COMMIT of its own
                reached("committed", path)
                return cursor

            def commit(self) -> None:
                reached("before commit", path)
                super().commit()
                reached("committed", path)

        return sqlite3.connect(path, factory=Connection, **options)


def _moved(path: Path, old: Path, new: Path) -> Path:
    return new / path.relative_to(old) if path.is_relative_to(old) else path


# --------------------------------------------------------------------------------------------------- a modelled policy


class Policy:
    """Pool and trainer: tokens follow from the weights, weights from the tokens."""

    needed_versions: frozenset[int] = frozenset()

    def __init__(self, weights: bytes = b"", version: int = 0) -> None:
        self.weights = self._kept = weights
        self.weight_version = version
        self.delivered = 0

    async def rollout(self, prompts: DataProto, **_: Any) -> DataProtoFuture:
        group_id = int(prompts.batch["group_id"][0])
        group = []
        for row in range(len(prompts)):
            digest = hashlib.sha256(b"%s/%d/%d" % (self.weights, group_id, row)).digest()
            group.append(
                Trajectory(
                    task=prompts.non_tensor_batch["task"][row],
                    token_ids=(1, *digest[:5]),
                    loss_mask=(False, True, True, True, True, True),
                    behaviour_log_probs=(0.0, -0.5, -0.5, -0.5, -0.5, -0.5),
                    weight_versions=(-1, *[self.weight_version] * 5),
                    reward=digest[5] / 256,
                    turns=(Turn(start=1, end=6, finish_reason="stop", message={"role": "assistant", "content": "x"}),),
                    finish_reason="done",
                )
            )
        self.delivered += 5 * len(group)
        batch = trajectories_to_batch(group, group_id=group_id)
        batch.meta_info |= {"wasted_tokens": 0, "record": encode_rows(group)}
        return DataProtoFuture.of(batch)

    async def update(self, batch: DataProtoFuture, *_: Any) -> list[dict[str, float]]:
        rows = await batch
        text = repr((rows.batch["input_ids"].values().tolist(), rows.batch["advantages"].tolist()))
        self.weights = hashlib.sha256(self.weights + text.encode()).hexdigest().encode()
        return [{"tokens_trained": float(rows.batch["loss_mask"].values().sum())}]

    async def publish(self, version: Any) -> Any:
        """A version by the trainer, which is its own manifest; a manifest into the pool."""
        if isinstance(version, int):
            return [WeightManifest(version=version, transport="none", location="", tensors=())]
        self.weight_version = version.version
        return Ended(version=version.version, committed=(), fenced={})

    def take_proofs(self) -> list[Any]:
        return []

    async def release(self, version: int) -> None: ...

    async def snapshot(self, folder: Path, model: Path | None = None) -> None:
        self._kept = self.weights

    async def write_snapshot(self, folder: Path) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        (folder / "weights").write_bytes(self._kept)
        return [{}]

    async def export_snapshot(self, saved: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")


class Silent:
    def stepped(self, record: Any) -> None: ...
    def unsaved(self, step: int, reason: str) -> None: ...
    def evaluated(self, result: Any, *, step: int) -> None: ...
    def sampled(self, trajectory: Any, *, step: int, group_id: int) -> None: ...


async def model_life(folder: Path, points: Points, *, fsync: Any, torn: bool) -> dict[str, Any]:
    """From the newest checkpoint in ``folder`` to the last step; what the run has come to."""
    files = DurableFiles(points)
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder / "checkpoints", keep=2, files=files)
    resumed: DriverState | None = None
    policy = Policy()
    try:
        newest = checkpoints.latest()
        resumed = read_driver_state(newest)
        policy = Policy((newest / "trainer" / "weights").read_bytes(), resumed.step)
        checkpoints.rewind(resumed.step)
    except CheckpointError:  # stopped before the first one: it begins anew
        for file in folder.glob("ledger.sqlite*"):
            file.unlink()
    ledger = SQLiteLedger(
        folder / "ledger.sqlite",
        resume=ledger_base(resumed) if resumed is not None else None,
        threaded=False,
        fsync=fsync,
        connect=points.connect,
        files=files,
    )
    # What the death of a process leaves is whole; that of the machine takes what was to outlive only a process. (After
    # two deaths there may be rows of weights of a step that is not repeated: they are sampled again.)
    found = ledger.recovered
    notes = found.notes if found is not None else ()
    damage = [note for note in notes if "cannot be made again" not in note]
    if damage and not (torn and fsync == "checkpoint"):
        raise AssertionError(f"damage that cannot be: {damage}")
    start = starting_point(  # no count of tokens outlives a life but those of checkpoint and ledger
        resumed,
        ledger,
        steps=STEPS,
        groups_per_step=GROUPS,
        max_staleness=0,
        policy=POLICIES["wait"],
    )

    async def save(driver: Driver, step: int) -> Callable[[], Awaitable[object]]:
        position = await ledger.durable()
        balance = driver.balance(generated=start.generated + policy.delivered, in_flight=0)
        state = driver_state(driver, balance, step=step, history={}, position=position)
        return await checkpoints.take(policy, state, step=step)

    driver = Driver(
        plan=TrainingPlan(steps=STEPS, groups_per_step=GROUPS, group_size=ROWS, checkpoint_every=CHECKPOINT_EVERY),
        law=start.law,
        groups=start.groups,
        reused=start.reused,
        stages=GroupStages(
            group_size=ROWS,
            seed=0,
            pool=policy,
            environments=EchoFactory(),
            buffer=AsyncReplayBuffer(capacity=max(GROUPS, start.places), max_staleness=0),
            journal=start.journal,
            timeline=Timeline(),
            version=lambda: start.law.version,
        ),
        learner=Learner(
            trainer=policy,
            advantages=Advantages(
                estimator=AdvantageEstimator("centred", lambda rewards: rewards - rewards.mean(), {})
            ),
            policy=POLICIES["wait"],
            max_staleness=0,
        ),
        observer=Silent(),
        save_checkpoint=save,
    )
    if resumed is None:
        await (await save(driver, 0))()
    await driver.run()
    driver.balance(generated=start.generated + policy.delivered, in_flight=0).check()
    await (await save(driver, STEPS))()
    driver.journal.record(Committed(STEPS))
    counts = ledger.statistics()
    if (counts.unaccounted, counts.consumed, counts.live) != (0, STEPS * GROUPS, 0):
        raise AssertionError(f"prompts do not add up: {counts}")
    ledger.close()
    return {"weights": policy.weights.decode(), "trained": trained_in(folder / "ledger.sqlite")}


# --------------------------------------------------------------------------------------------------- a run as it is


class CountedEngine(FSDPEngine):
    """The training engine that a run makes by name; the points of its folders are counted. One process has one run."""


class CountedLedger(SQLiteLedger):
    """The ledger that a run makes by name, with its points counted. One process has one run."""

    points: Points

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, connect=self.points.connect, files=DurableFiles(self.points), **options)


def run_config(runs: Path) -> Config:
    return Config.from_mapping(
        {
            "name": "killed",
            "steps": 6,
            "max_staleness": 0,
            "seed": 3,
            "runs": str(runs),
            "cluster": {"backend": "local"},
            "model": {
                "source": "scratch",
                "options": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128},
            },
            "env": {"name": "digits_world:DigitsFactory"},
            "rollout": {"max_new_tokens": 6, "max_seq_len": 96, "options": {"max_running_requests": 1}},
            "trainer": {"engine": "crash_points:CountedEngine", "groups_per_step": 2, "group_size": 4, "lr": 1e-2},
            "eval": {"tasks": 0},
            "ledger": {"kind": "crash_points:CountedLedger"},
            "checkpoint": {"every": 2, "keep_last": 2},
            "telemetry": {"progress": "none"},
        }
    )


def run_life(folder: Path, points: Points) -> dict[str, Any]:
    """From the newest checkpoint of the run in ``folder``, or a run of its own, to the last step."""
    import crash_points  # this file, as the configuration names it

    crash_points.CountedEngine.files = DurableFiles(points)
    crash_points.CountedLedger.points = points
    training_run.Checkpoints = functools.partial(Checkpoints, files=DurableFiles(points))  # type: ignore[misc, assignment]
    config = run_config(folder)
    newest = max(folder.glob("killed-2*"), default=None, key=lambda path: path.stat().st_ctime_ns)
    begun = newest is not None and (newest / "config.toml").is_file() and [*newest.glob("checkpoints/step-*")]
    kept = newest if begun else None
    if kept is None or read_driver_state(Checkpoints(kept / "checkpoints", keep=2).latest()).step < config.steps:
        train(config, resume=kept)
    run = max(folder.glob("killed-2*"), key=lambda path: path.stat().st_ctime_ns)
    weights = run / "checkpoints" / f"step-{config.steps:06d}" / "model" / "model.safetensors"
    return {
        "weights": hashlib.sha256(weights.read_bytes()).hexdigest(),
        "trained": trained_in(run / "ledger.sqlite"),
    }


def trained_in(ledger: Path) -> list[list[int]]:
    """Step, position and group_id of everything that was trained on."""
    with closing(sqlite3.connect(ledger)) as told:
        return [
            list(line) for line in told.execute("SELECT step, position, group_id FROM batches ORDER BY step, position")
        ]


# ------------------------------------------------------------------------------------------------------------- lives


def in_a_fork(work: Callable[[], int]) -> int:
    """Run ``work`` in a process of its own; its id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        code = work()
    except BaseException:  # noqa: BLE001  a fork must not go on with its parent's program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def live(world: str, folder: Path, *, at: int, dice: random.Random | None, fsync: str, torn: bool) -> int:
    """One life in a process of its own: how it ended. What it came to stands beside the folder."""

    def life() -> int:
        logging.getLogger("asyncrl").setLevel(logging.ERROR)
        folder.mkdir(parents=True, exist_ok=True)
        points = Points(folder, at=at, dice=dice, fsync=fsync)
        if world == "model":
            end = asyncio.run(model_life(folder, points, fsync=fsync, torn=torn))
        else:
            end = run_life(folder, points)
        end |= {"points": points.count, "kinds": points.kinds}
        folder.with_suffix(".end").write_text(json.dumps(end))
        return 0

    return os.waitstatus_to_exitcode(os.waitpid(in_a_fork(life), 0)[1])


def crash(world: str, root: Path, point: int, *, seed: int, points: int, expected: dict[str, Any]) -> dict[str, Any]:
    """Die at ``point``, perhaps again while recovering, go on to the end: what was found."""
    dice = random.Random(f"{seed}/{point}")
    folder = root / f"{point:06d}"
    fsync = dice.choice(["commit", "checkpoint"]) if world == "model" else "commit"
    torn = dice.random() < 0.5
    again = dice.randrange(1, max(points // 4, 2)) if dice.random() < 1 / 3 else 0
    codes: list[int] = []
    for at in [point, *([again] if again else []), 0]:
        codes.append(live(world, folder, at=at, dice=dice if torn and at else None, fsync=fsync, torn=torn))
        while codes == [0] and (reached := json.loads(folder.with_suffix(".end").read_text())["points"]) < point:
            # Threads write together what they find together: this run had fewer points. As far from its end, then.
            shutil.rmtree(folder)
            at = max(1, reached - (points - point))  # noqa: PLW2901
            codes = [live(world, folder, at=at, dice=dice if torn else None, fsync=fsync, torn=torn)]
        if codes[-1] == 0:
            break
    witness = folder.with_suffix(".died")
    told = [json.loads(line) for line in witness.read_text().splitlines()] if witness.is_file() else []
    wrong = []
    if codes[0] != DIED:
        wrong.append(f"was to die and ended with {codes[0]}")
    if len(told) != codes.count(DIED):
        wrong.append(f"{codes.count(DIED)} deaths left {len(told)} witnesses")
    if codes[-1] != 0:
        wrong.append(f"the run that went on ended with {codes[-1]}")
    else:
        end = json.loads(folder.with_suffix(".end").read_text())
        wrong += [f"{name} differ" for name in ("trained", "weights") if end[name] != expected[name]]
    shutil.rmtree(folder, ignore_errors=True)
    return {"point": point, "deaths": told, "wrong": wrong}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--points", type=int, default=500)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    arguments.add_argument("--world", choices=["model", "run"], default="model")
    arguments.add_argument("--only", type=int, default=0, help="this point alone")
    arguments.add_argument("--writes", action="store_true", help="points inside the writes of checkpoints alone")
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    options = arguments.parse_args()
    if options.writes:
        Points.within = ".step-"
    memory = Path("/dev/shm")  # no disk is needed, and none is waited for: what dies are processes
    root = Path(tempfile.mkdtemp(prefix="crash-points-", dir=memory if memory.is_dir() else None))
    torch.set_num_threads(1)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)  # for torch's own developers
    DataProto.from_dict({"once": torch.zeros(1)}).select(["once"])  # what loads late, before the first fork
    if options.world == "run":
        import crash_points  # noqa: F401  before the first fork
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401  likewise
    try:
        started = time.perf_counter()
        calm = root / "calm"
        if live(options.world, calm, at=0, dice=None, fsync="commit", torn=False) != 0:
            sys.exit("the run that nobody hurts failed")
        expected = json.loads(calm.with_suffix(".end").read_text())
        total = expected["points"]
        chosen = sorted({1 + number * total // options.points for number in range(min(options.points, total))})
        chosen = [options.only] if options.only else chosen
        if not 1 <= chosen[0] <= total:
            sys.exit(f"--only {options.only}: the run has {total} points")
        found = in_parallel(
            options.jobs,
            root,
            [
                functools.partial(crash, options.world, root, point, seed=options.seed, points=total, expected=expected)
                for point in chosen
            ],
        )
        elapsed_s = time.perf_counter() - started
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report(found, total=total, kinds=expected["kinds"], elapsed_s=elapsed_s, options=options)
    sys.exit(1 if not found or any(each["wrong"] for each in found) else 0)


def in_parallel(jobs: int, root: Path, works: list[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Do every one in a process of its own, ``jobs`` at a time."""
    running: dict[int, Path] = {}
    found: list[dict[str, Any]] = []

    def collect() -> None:
        process, status = os.wait()
        file = running.pop(process)
        if status:
            sys.exit(f"{file.name} ended with {os.waitstatus_to_exitcode(status)}")
        found.append(json.loads(file.read_text()))

    for number, work in enumerate(works):
        while len(running) >= jobs:
            collect()
        file = root / f"found-{number}.json"

        def done(work: Callable[[], dict[str, Any]] = work, file: Path = file) -> int:
            file.write_text(json.dumps(work()))
            return 0

        running[in_a_fork(done)] = file
    while running:
        collect()
    return sorted(found, key=lambda each: each["point"])


def report(
    found: list[dict[str, Any]], *, total: int, kinds: dict[str, int], elapsed_s: float, options: argparse.Namespace
) -> None:
    wrong = [each for each in found if each["wrong"]]
    deaths = [death for each in found for death in each["deaths"]]
    equal = len(found) - len(wrong)
    figures = [
        figure("points of the run", total, "points"),
        figure("points died at", len(found), "points"),
        figure("equal weights after resuming", equal, "points", goal=f"{len(found)}", holds=equal == len(found) > 0),
        figure("deaths with a witness", len(deaths), "deaths"),
        figure("... of the machine too", sum(death["torn"] for death in deaths), "deaths"),
        figure("... while recovering", len(deaths) - len(found), "deaths"),
        *(figure(f"points, {kind}", count, "points") for kind, count in sorted(kinds.items())),
        figure("time", round(elapsed_s, 1), "s"),
    ]
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "world": options.world}
    if options.json:
        print(json.dumps({"machine": machine, "figures": figures, "wrong": wrong}))
    else:
        for each in figures:
            verdict = f"  goal {each['goal']}: {'holds' if each['holds'] else 'DOES NOT HOLD'}" if each["goal"] else ""
            print(f"{each['name']:36s} {each['value']:>8} {each['unit']}{verdict}")
        for each in wrong[:20]:
            print(f"point {each['point']}: {'; '.join(each['wrong'])}; died {each['deaths']}")


def figure(
    name: str, value: float, unit: str, *, goal: str | None = None, holds: bool | None = None
) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "floor": None, "ratio": None, "goal": goal, "holds": holds}


if __name__ == "__main__":
    main()
