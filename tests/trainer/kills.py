"""Kills a small run at random moments, with SIGKILL, resumes it each time, and says what became of its prompts.

    python tests/trainer/kills.py FOLDER [--kills 10] [--seed 0] [--max-staleness 0] [--lose-folder]

Each life is a fork of this process, which has imported everything and computed nothing: it begins within milliseconds.
With ``--lose-folder`` the run's folder ends with each life, and the next begins with what is at ``checkpoint.url``.
Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401  before the first fork
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401  as above

import engines.rollout.transformers.engine
import engines.training.fsdp_engine
import engines.training.scratch
import engines.weights.shared_memory  # noqa: F401  as above
from asyncrl.config import Config
from asyncrl.errors import CheckpointError
from asyncrl.tasks.rerun import Recording
from asyncrl.tasks.run import train
from asyncrl.trainer.stored_run import restore


def config_of(runs: Path, *, max_staleness: int, steps: int = 8, url: str | None = None) -> Config:
    return Config.from_mapping(
        {
            "name": "killed",
            "steps": steps,
            "max_staleness": max_staleness,
            "seed": 3,
            "runs": str(runs),
            "cluster": {"backend": "local"},
            "model": {
                "source": "scratch",
                "options": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128},
            },
            "env": {"name": "worlds:DigitsFactory", "options": {"fails_on": [5]}},
            "rollout": {"max_new_tokens": 6, "max_seq_len": 64, "options": {"max_running_requests": 1}},
            "trainer": {"groups_per_step": 2, "group_size": 4, "lr": 1e-2},
            "eval": {"tasks": 4, "every": 3},
            "checkpoint": {"every": 2, "keep_last": 2, **({"url": url} if url is not None else {})},
            "telemetry": {"progress": "none"},
        }
    )


def live(config: Config, run: Path | str | None) -> int:
    """One life, in a fork; returns its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        torch.set_num_threads(1)
        train(config, resume=restore(run, config.runs) if isinstance(run, str) else run)
        code = 0
    except CheckpointError:
        code = 3  # killed before there was anything to go on from
    except BaseException:  # noqa: BLE001  a fork must not go on with its parent's program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def the_run(config: Config) -> Path | None:
    return max(config.runs.glob("killed-2*"), default=None, key=lambda path: path.stat().st_ctime_ns)


def weights(run: Path, steps: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{steps:06d}" / "model" / "model.safetensors")


def story(run: Path, steps: int) -> dict[str, Any]:
    """What a finished run says of itself, held against what must be."""
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        states = dict(ledger.execute("SELECT state, count(*) FROM groups GROUP BY state"))
        trained = ledger.execute("SELECT step, position, group_id FROM batches ORDER BY step, position").fetchall()
        (lives,) = ledger.execute("SELECT count(*) + 1 FROM events WHERE kind = 'resumed'").fetchone()
        issued = sorted(group_id for (group_id,) in ledger.execute("SELECT group_id FROM groups"))
        fingerprints = ledger.execute(
            "SELECT json_extract(body, '$.version'), count(*), count(DISTINCT json_extract(body, '$.weights')) "
            "FROM events WHERE kind = 'published' GROUP BY 1"
        ).fetchall()
    with Recording(run) as recording:
        replayed = recording.replay(runs=run.parent)
    group_ids = [group_id for _step, _position, group_id in trained]
    summary = json.loads((run / "summary.json").read_text())
    tokens = summary["tokens"]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shown = [json.loads(line)["group_id"] for line in (run / "trajectories.jsonl").read_text().splitlines()]
    return {
        "states": states,
        "lives": lives,
        "lost": len(set(range(max(issued) + 1)) - set(issued)) + 2 * steps - len(set(group_ids)),
        "duplicated": len(group_ids) - len(set(group_ids)),
        "unaccounted_tokens": tokens["generated"]
        - tokens["trained"]
        - sum(tokens["dropped"].values())
        - tokens["in_flight"],
        "tokens": tokens,
        "staleness": summary["staleness"]["max"],
        "steps": [line["step"] for line in metrics if "train/loss" in line],
        "scores": sorted(line["step"] for line in metrics if "eval/success" in line),
        "shown_twice": len(shown) - len(set(shown)),
        "batches": trained,
        "made_again": sum(times > 1 for _version, times, _different in fingerprints),
        "made_differently": sum(different > 1 for _version, _times, different in fingerprints),
        "replayed": replayed.equal,
        "continued": summary["continued"],
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--kills", type=int, default=10)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--max-staleness", type=int, default=0)
    arguments.add_argument("--lose-folder", action="store_true")
    options = arguments.parse_args()
    dice = random.Random(options.seed)

    calm = config_of(options.folder / "calm", max_staleness=options.max_staleness)
    started = time.monotonic()
    _, status = os.waitpid(live(calm, None), 0)
    length_s = time.monotonic() - started
    calm_run = the_run(calm)
    assert status == 0, "the run that nobody hurts failed"
    assert calm_run is not None

    store = options.folder / "store"
    url = f"file://{store}" if options.lose_folder else None
    config = config_of(options.folder / "hurt", max_staleness=options.max_staleness, url=url)
    kills, restarts = 0, 0
    kept: Path | str | None = None
    while True:
        process = live(config, kept)
        if kills < options.kills:
            # The moments of a life, from its first file to its last; later lives have less to do.
            time.sleep(dice.uniform(0.05, 0.6) * length_s)
            os.kill(process, signal.SIGKILL)
            kills += 1
        _, status = os.waitpid(process, 0)
        code = os.waitstatus_to_exitcode(status)
        run = the_run(config)
        over = run is not None and (run / "summary.json").is_file()  # killed between its end and the process's
        assert code != 3 or kept is None or over, f"{kept} cannot be gone on with"
        if options.lose_folder and code != 0 and not over:
            shutil.rmtree(config.runs, ignore_errors=True)
            whole = sorted(store.glob("*/*/manifest.json"))
            kept = f"{url}/{whole[-1].parts[-3]}" if whole else None
            restarts += not whole
            continue
        kept = run if run is not None and (run / "config.toml").is_file() else None
        if kept is not None and not list((kept / "checkpoints").glob("step-*")):
            kept, restarts = None, restarts + 1
        if code == 0 or over:
            break
        assert code in (-signal.SIGKILL, 3), f"a life ended with {code}"
    assert run is not None
    before, after = weights(calm_run, calm.steps), weights(run, config.steps)
    print(
        json.dumps(
            {
                "kills": kills,
                "restarts": restarts,
                "length_s": length_s,
                "equal_weights": before.keys() == after.keys()
                and all(torch.equal(tensor, after[name]) for name, tensor in before.items()),
                "calm": story(calm_run, calm.steps),
                "hurt": story(run, config.steps),
            }
        )
    )


if __name__ == "__main__":
    main()
