"""What ledger and checkpoints cost a step of the quickstart.

    python benchmarks/ledger_step.py [--rounds 5] [--steps 16] [--json]

The quickstart's model is warmed up once. Then runs of some steps alternate: without a ledger, with it, and with it and
a checkpoint every 10 steps; each in a new process with all workers in it, so that its processor time is that of the
whole system. The floor of a round is its run without a ledger; the figures are medians over the rounds.

That difference has the noise of two runs. So the processor time spent in the ledger itself is a figure, too: encoding
rows and turns, applying events, and the thread that writes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

QUICKSTART = Path(__file__).parents[1] / "examples" / "calculator.toml"
SKIPPED = 3
ARMS = {
    "without": ["--ledger.kind", "none", "--checkpoint.every", "0"],
    "ledger": ["--checkpoint.every", "0"],
    "checkpoints": ["--checkpoint.every", "10"],
}


@dataclass(frozen=True, slots=True)
class Spent:
    """Means over the steps of a run: processor time in the ledger is part of `cpu_s`, `checkpoint_s` is one of them.

    `parts_s` is the time in the ledger by function, of all steps, the first ones too.
    """

    wall_s: float
    cpu_s: float
    ledger_s: float
    checkpoint_s: float
    bytes_per_step: float
    parts_s: dict[str, float]


def settings(folder: Path, steps: int) -> list[str]:
    common = ["--cluster.backend", "local", "--runs", str(folder), "--telemetry.progress", "none"]
    return [*common, "--steps", str(steps), "--eval.tasks", "0", "--trainer.lr_scheduler_type", "constant"]


def warm_up(folder: Path, steps: int) -> str:
    from asyncrl.config import load_config
    from asyncrl.tasks.run import sft

    return str(sft(load_config(QUICKSTART, [*settings(folder, 1), "--sft.steps", str(steps)]))["model"])


def run(arm: str, folder: Path, model: str, steps: int) -> Spent:
    """One run in this process."""
    import torch

    from asyncrl.config import load_config
    from asyncrl.rollout import turns, worker
    from asyncrl.tasks import run
    from asyncrl.trainer import journal
    from asyncrl.trainer import report as recorder
    from asyncrl.trainer import run as training_run
    from buffers import ledger
    from buffers import ledger as ledger_writer

    torch.set_num_threads(1)
    inside: Counter[str] = Counter()

    reading_s = min(-time.thread_time() + time.thread_time() for _ in range(1000))  # a call of the clock is no ledger

    def timed(owner: Any, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def measured(*arguments: Any, **options: Any) -> Any:
            begun = time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                inside[name] += time.thread_time() - begun - reading_s

        setattr(owner, name, measured)

    timed(worker, "encode_rows")
    timed(turns.TurnRecorder, "sampled")
    timed(turns, "encode_turns")
    timed(journal.Journal, "turns")
    timed(journal.Journal, "completed")
    timed(journal.Journal, "trained")
    timed(journal.Journal, "issued")
    timed(ledger_writer.LedgerWriter, "_commit_all")
    saves: list[float] = []
    save = training_run.TrainingRun._save

    async def saved(self: Any, driver: Any, step: int) -> Any:
        begun = time.perf_counter()
        write = await save(self, driver, step)
        if 0 < step < steps:
            saves.append(time.perf_counter() - begun)
        return write

    training_run.TrainingRun._save = saved  # type: ignore[method-assign]
    marks: list[tuple[float, float, float]] = []
    stepped = recorder.Recorder.stepped

    def marking(self: Any, record: Any) -> None:
        stepped(self, record)
        marks.append((time.perf_counter(), time.process_time(), sum(inside.values())))

    recorder.Recorder.stepped = marking  # type: ignore[method-assign]
    assert ledger.SQLiteLedger
    config = load_config(
        QUICKSTART,
        [*settings(folder, steps), "--model.path", model, "--model.source", "none", "--sft.steps", "0", *ARMS[arm]],
    )
    run.train(config)
    (made,) = folder.glob("calculator-2*")
    size = sum(file.stat().st_size for file in made.glob("ledger.sqlite*"))
    shutil.rmtree(made)
    walls, cpus, insides = (
        [after - before for before, after in zip(column[SKIPPED:], column[SKIPPED + 1 :], strict=False)]
        for column in zip(*marks, strict=True)
    )
    return Spent(
        wall_s=statistics.fmean(walls),
        cpu_s=statistics.fmean(cpus),
        ledger_s=statistics.fmean(insides),
        checkpoint_s=statistics.fmean(saves) if saves else 0.0,
        bytes_per_step=size / steps,
        parts_s={name: spent / steps for name, spent in inside.items()},
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=16, help=f"of a run; the first {SKIPPED} are not measured")
    arguments.add_argument("--warm-up", type=int, default=800, help="supervised steps before; the quickstart has 800")
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="ledger-"))
    rounds: list[dict[str, Spent]] = []
    try:
        with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            model = pool.apply(warm_up, (folder / "warm", options.warm_up))
            for number in range(options.rounds):
                names = list(ARMS)
                order = names[number % 3 :] + names[: number % 3]
                rounds.append({arm: pool.apply(run, (arm, folder / arm, model, options.steps)) for arm in order})
                if not options.json:
                    last = rounds[-1]
                    print(
                        f"round {number}: "
                        + ", ".join(f"{arm} {last[arm].wall_s:.3f} s ({last[arm].cpu_s:.3f} s cpu)" for arm in names)
                        + f"; in the ledger {last['ledger'].ledger_s * 1e3:.1f} ms cpu a step, "
                        f"a checkpoint {last['checkpoints'].checkpoint_s:.3f} s",
                        flush=True,
                    )
    finally:
        shutil.rmtree(folder)

    def median(of: Callable[[dict[str, Spent]], float]) -> float:
        return statistics.median(of(each) for each in rounds)

    step_s = median(lambda each: each["without"].cpu_s)
    inside = median(lambda each: each["ledger"].ledger_s)
    paired = median(lambda each: each["ledger"].cpu_s / each["without"].cpu_s - 1)
    wall = median(lambda each: each["ledger"].wall_s / each["without"].wall_s - 1)
    with_s = median(lambda each: each["ledger"].wall_s)
    saving = median(lambda each: each["checkpoints"].checkpoint_s)
    figures = [
        ("processor time in the ledger, of a step's", inside / step_s, "share", 0.02),
        ("processor time of a step, with and without", paired, "share more", 0.02),
        ("time of a step, with and without", wall, "share more", 0.02),
        ("a checkpoint", saving, "s", None),
        ("checkpoints every 10 steps, of the time", saving / 10 / with_s, "share", 0.02),
        ("ledger on the disk", median(lambda each: each["ledger"].bytes_per_step) / 1e3, "kB a step", None),
    ]  # fmt: skip
    if options.json:
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        named = [
            {
                "name": name,
                "value": round(value, 5),
                "unit": unit,
                "floor": None,
                "ratio": None,
                "goal": None if goal is None else f"at most {goal}",
                "holds": None if goal is None else value <= goal,
            }
            for name, value, unit, goal in figures
        ]
        print(json.dumps({"machine": machine, "figures": named}))
        return
    print(f"a step without a ledger: {step_s:.3f} s of processor time; in the ledger, ms of it a step:")
    for name in rounds[0]["ledger"].parts_s:
        print(f"    {name:20s} {median(lambda each, name=name: each['ledger'].parts_s[name]) * 1e3:6.2f}")
    for name, value, unit, goal in figures:
        verdict = "" if goal is None else f"  goal at most {goal}: {'holds' if value <= goal else 'DOES NOT HOLD'}"
        print(f"{name:45s} {value:9.4f} {unit:11s}{verdict}")


if __name__ == "__main__":
    main()
