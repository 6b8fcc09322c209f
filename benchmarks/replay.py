"""Recorded asynchronous runs, trained again: do they reach the same weights, bit for bit?

    python benchmarks/replay.py --runs 100 [--jobs 2] [--seed 0] [--json]

Each run is a tiny model in an environment whose steps take about as long as an update, however busy the machine is, so
that rollouts, updates and publications overlap; its seed draws staleness bound and policy, loss, num_mini_batches, a
reference, a reward function, LoRA, and whether it is stopped on the way and resumed. Each step of the replay is
compared with the fingerprint of the weights that the run recorded. A run whose weights never changed counts as failed.
A run that overlaps by less than 60 % does not count, and another is recorded in its place; it must be replayed all the
same.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

LEAST_OVERLAP = 0.6
STEPS = 24
STOPPED_AT = 4

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "trainer"))  # worlds:length_score


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    what: str
    overlap: float
    stale_share: float
    equal: bool
    changed: bool
    first_difference: int | None
    recorded_s: float
    replayed_s: float


def config_of(seed: int, runs: Path) -> tuple[dict[str, Any], bool, float]:
    """The configuration drawn for a seed, whether its run is stopped and resumed, and the world's pace."""
    dice = random.Random(seed)
    bound = dice.choice([2, 3, 4])
    algorithm = dice.choice(
        [
            {"loss": "dapo"},
            {"loss": "gspo"},
            {"loss": "cispo"},
            {"loss": "dapo", "kl_coef": 0.1},
            {"loss": "dapo", "kl_coef": 0.1, "kl_placement": "reward"},
        ]
    )
    trainer: dict[str, Any] = {"groups_per_step": 4, "group_size": 4, "lr": 3e-3, "epochs": 4}
    trainer |= dice.choice([{}, {"num_mini_batches": 2, "epochs": 2}, {"lora": {"rank": 4, "alpha": 8}, "lr": 1e-2}])
    reward = dice.choice([{}, {}, {"source": "function", "options": {"function": "worlds:length_score"}}])
    tables: dict[str, Any] = {
        "name": "recorded",
        "steps": STEPS,
        "max_staleness": bound,
        "seed": seed,
        "runs": str(runs),
        "cluster": {"backend": "local"},
        "model": {
            "source": "scratch",
            "options": {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2, "max_position": 128},
        },
        "env": {"name": "digits_world:PacedFactory"},
        "rollout": {"max_new_tokens": 12, "max_seq_len": 96},
        "trainer": trainer,
        "algorithm": algorithm,
        "staleness": {"policy": dice.choice(["mask", "mask", "wait", "drop", "correct"])},
        "reward": reward,
        "eval": {"tasks": 0},
        "telemetry": {"progress": "none"},
    }
    hurt = dice.random() < 0.3
    tables["checkpoint"] = {"every": 3 if hurt else 12}
    return tables, hurt, dice.choice([0.7, 1.0])


def measure(seed: int) -> Outcome:
    """Record one run and train it again."""
    import torch
    from digits_world import PACE

    from asyncrl.config import Config
    from asyncrl.tasks.rerun import Recording
    from asyncrl.tasks.run import train
    from asyncrl.trainer.driver import Driver

    torch.set_num_threads(1)

    class Stopped(Exception):
        pass

    update = Driver._update

    async def timed(self: Driver, step: int, groups: Any) -> Any:
        if step == stops_at:
            raise Stopped
        begun = time.perf_counter()
        record = await update(self, step, groups)
        PACE.updated(time.perf_counter() - begun)
        return record

    folder = Path(tempfile.mkdtemp(prefix="replay-"))
    try:
        tables, hurt, PACE.share = config_of(seed, folder)
        config = Config.from_mapping(tables)
        stops_at = STOPPED_AT if hurt else 0
        Driver._update = timed  # type: ignore[method-assign]
        started = time.perf_counter()
        if hurt:
            with suppress(Stopped):
                train(config)
            stops_at = 0
            (run,) = folder.glob("recorded-2*")
            summary = train(config, resume=run)
        else:
            summary = train(config)
            (run,) = folder.glob("recorded-2*")
        recorded_s = time.perf_counter() - started
        started = time.perf_counter()
        with Recording(run) as recording:
            first = recording.life(1).weights
            changed = len({first, *recording.weights.values()}) == STEPS + 1
            replayed = recording.replay(runs=folder)
        ages = summary["staleness"]["histogram"]
        law = f"{config.staleness_policy.name} {config.max_staleness}"
        parts = [law, config.algorithm.loss, config.algorithm.kl_placement if config.algorithm.kl_coef else ""]
        parts += ["lora" if config.trainer.lora else "", "rewarded" if tables["reward"] else "", "resumed" * hurt]
        return Outcome(
            seed=seed,
            what=", ".join(part for part in parts if part),
            overlap=summary["overlap_share"],
            stale_share=1 - ages.get("0", 0) / max(sum(ages.values()), 1),
            equal=replayed.equal,
            changed=changed,
            first_difference=replayed.first_difference,
            recorded_s=recorded_s,
            replayed_s=time.perf_counter() - started,
        )
    finally:
        Driver._update = update  # type: ignore[method-assign]
        shutil.rmtree(folder)


def _work_in(folder: str) -> None:
    tempfile.tempdir = folder


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--json", action="store_true", help="print one JSON object")
    arguments.add_argument("--runs", type=int, default=10, help="recorded runs")
    arguments.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    arguments.add_argument("--seed", type=int, default=0, help="of the first run")
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    outcomes: list[Outcome] = []
    tried: list[Outcome] = []
    seeds = range(options.seed, options.seed + 2 * options.runs)
    with (
        tempfile.TemporaryDirectory(prefix="replays-") as folder,  # of those, too, that are under way at the end
        get_context("spawn").Pool(min(options.jobs, options.runs), _work_in, (folder,)) as pool,
    ):
        for outcome in pool.imap_unordered(measure, seeds):
            outcomes.append(outcome)
            if outcome.overlap >= LEAST_OVERLAP:
                tried.append(outcome)
            if not options.json:
                verdict = "equal" if outcome.equal else f"DIFFERS from step {outcome.first_difference}"
                print(
                    f"seed {outcome.seed:3d}  overlap {outcome.overlap:.2f}  stale tokens {outcome.stale_share:.2f}  "
                    f"recorded {outcome.recorded_s:5.1f} s  replayed {outcome.replayed_s:5.1f} s  {verdict}"
                    f"{'' if outcome.changed else ', BUT NOTHING WAS LEARNED'}  ({outcome.what})",
                    flush=True,
                )
            if len(tried) == options.runs:
                break
    equal = sum(outcome.equal and outcome.changed for outcome in tried)
    others = [outcome for outcome in outcomes if outcome not in tried]
    figures = [
        {
            "name": "runs replayed bit for bit",
            "value": equal,
            "unit": f"of {len(tried)} with overlap >= {LEAST_OVERLAP:.0%}",
            "floor": len(tried),
            "ratio": equal / len(tried) if tried else None,
            "goal": f"all of {options.runs}",
            "holds": equal == len(tried) == options.runs,
        },
        {
            "name": "runs that overlapped less, replayed bit for bit",
            "value": sum(outcome.equal and outcome.changed for outcome in others),
            "unit": f"of {len(others)}",
            "floor": len(others),
            "ratio": None,
            "goal": "all",
            "holds": all(outcome.equal and outcome.changed for outcome in others),
        },
        {
            "name": "overlap, median",
            "value": round(statistics.median(outcome.overlap for outcome in tried), 3) if tried else 0.0,
            "unit": "share",
            "floor": None,
            "ratio": None,
            "goal": None,
            "holds": None,
        },
    ]
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if options.json:
        print(json.dumps({"machine": machine, "figures": figures}))
        return
    for figure in figures:
        held = "holds" if figure["holds"] else "DOES NOT HOLD"
        goal = f"; goal {figure['goal']}: {held}" if figure["goal"] else ""
        print(f"{figure['name']}: {figure['value']} {figure['unit']}{goal}")


if __name__ == "__main__":
    main()
