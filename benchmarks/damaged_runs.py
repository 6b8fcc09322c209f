"""Damages every kind of file in a run's folder, one at a time: each command ends as without the damage, or names it.

    python benchmarks/damaged_runs.py --damages 500 [--seed 0] [--only ledger] [--json]

A file gets a flipped bit, is cut, emptied, removed, grown, or replaced by a folder. Then one command is called on it in
a process forked from one that has imported everything: `train --resume` of a run that was stopped between two
checkpoints, or `replay`, `trajectories`, `why`, `plot` or `export` of a finished one. The run is synchronous, so a
resumed one must reach the very weights that it would have reached. What counts as good: exit status 0 and what the
command gives without the damage; exit status 0 and the file's name in what it prints; or exit status 1 or 2 with an
error of asyncrl's own. A traceback, another status, other weights, or more than a minute is bad.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
STEPS, STOPPED_AT = 6, 5
DEADLINE_S = 60.0
HOWS = ("bit", "cut", "emptied", "removed", "grown", "folder")
READING = (("replay", "--json"), ("trajectories",), ("why",), ("plot",), ("export", "--out", "exported"))


@dataclass(frozen=True)
class Ended:
    status: int | str
    out: str
    errors: str
    weights: str = ""  # of the last step, after a resume


def config(folder: Path) -> dict[str, Any]:
    return {
        "name": "whole",
        "steps": STEPS,
        "max_staleness": 0,
        "seed": 3,
        "runs": str(folder),
        "cluster": {"backend": "local"},
        "model": {
            "source": "scratch",
            "options": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128},
        },
        "env": {"name": "digits_world:DigitsFactory"},
        "rollout": {  # rows of one at a time: how they meet in a decode step would change the last bits
            "max_new_tokens": 6,
            "max_seq_len": 64,
            "options": {"max_running_requests": 1},
        },
        "trainer": {"groups_per_step": 2, "group_size": 4, "lr": 1e-2},
        "eval": {"tasks": 2, "every": 2},
        "checkpoint": {"every": 2, "keep_last": 2},
        "telemetry": {"progress": "plain"},
    }


def make(folder: Path, *, stopped: bool) -> None:
    """Train a run, or stop it between two checkpoints as a defect would."""
    from asyncrl.config import Config
    from asyncrl.tasks.run import train
    from asyncrl.trainer.driver import Driver

    update = Driver._update

    async def until(self: Driver, step: int, groups: Any) -> Any:
        if step == STOPPED_AT:
            raise ArithmeticError("stopped")
        return await update(self, step, groups)

    if stopped:
        Driver._update = until  # type: ignore[method-assign]
    with contextlib.suppress(ArithmeticError):
        train(Config.from_mapping(config(folder)))


def forked(call: Any, folder: Path) -> Ended:
    """Call something in a forked process."""
    out, errors = folder / "out", folder / "errors"
    child = os.fork()
    if child == 0:
        status = 70
        try:
            os.setpgid(0, 0)
            for stream, path in ((1, out), (2, errors)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            status = call() or 0
        except SystemExit as end:  # of argparse
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:  # noqa: BLE001  the parent reads the status and the streams
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    ends = time.monotonic() + DEADLINE_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > ends:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Ended("hangs", out.read_text(errors="replace"), errors.read_text(errors="replace"))
        time.sleep(0.01)
    answer = re.sub(r"\b2\d{7}-\d{6}\S*", "RUN", out.read_text(errors="replace"))
    return Ended(os.waitstatus_to_exitcode(ended[1]), answer, errors.read_text(errors="replace"))


def called(command: tuple[str, ...], run: Path, folder: Path) -> Ended:
    """Call a command on a run; a resume also gives the weights that it ends with."""
    from asyncrl.cli.main import main

    name, *options = command
    options = [str(folder / each) if each == "exported" else each for each in options]
    shutil.rmtree(folder / "exported", ignore_errors=True)
    arguments = ["train", "--resume", str(run)] if name == "resume" else [name, str(run), *options]
    ended = forked(lambda: main(arguments), folder)
    if name == "resume" and ended.status == 0:
        written = run / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors"
        return Ended(ended.status, "", ended.errors + ended.out, str(hash(written.read_bytes())))
    return ended


def kind_of(path: Path) -> str:
    """What a file is, without the numbers in its name."""
    return "".join(character for character in path.as_posix() if not character.isdigit())


def damage(path: Path, how: str, dice: random.Random) -> str:
    content = path.read_bytes()
    if how == "bit" and content:
        place, bit = dice.randrange(len(content)), 1 << dice.randrange(8)
        path.write_bytes(content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :])
        return f"byte {place} ^ {bit}"
    if how == "cut" and content:
        size = dice.randrange(len(content))
        path.write_bytes(content[:size])
        return f"cut to {size} of {len(content)}"
    if how == "grown":
        path.write_bytes(content + dice.randbytes(dice.randrange(1, 200)))
        return "grown"
    if how == "emptied":
        path.write_bytes(b"")
        return "emptied"
    path.unlink()
    if how == "folder":
        path.mkdir()
        return "a folder in its place"
    return "removed"


def verdict(ended: Ended, whole: Ended, name: str) -> str:
    """``equal``, ``named``, or what is wrong."""
    said = ended.out + ended.errors
    if "Traceback (most recent" in said or "not one of asyncrl's own errors" in said:
        return "TRACEBACK"
    if ended.status in (1, 2):
        return "named" if "error" in ended.errors else "NOT NAMED"
    if ended.status != 0:
        return f"STATUS {ended.status}"
    if ended.weights != whole.weights:
        return "OTHER WEIGHTS"
    if ended.out == whole.out:
        return "equal"
    return "named, and gone on" if name in said else "OTHER ANSWER"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--damages", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    torch.set_num_threads(1)
    import asyncrl.cli.commands
    import asyncrl.tasks.rerun
    import asyncrl.tasks.run  # noqa: F401

    memory = Path("/dev/shm")  # nothing here is to outlive this program
    root = Path(tempfile.mkdtemp(prefix="damaged-", dir=memory if memory.is_dir() else None))
    outcomes: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    dice = random.Random(options.seed)
    began = time.monotonic()
    try:
        originals = {}
        for state in ("stopped", "finished"):
            (root / state).mkdir()
            ended = forked(lambda state=state: make(root / state, stopped=state == "stopped"), root)  # type: ignore[misc]
            found = list((root / state).glob("whole-2*"))
            if ended.status != 0 or len(found) != 1:
                raise SystemExit(f"no {state} run could be made: {ended.errors[-2000:]}")
            originals[state] = found[0]

        def tried(command: tuple[str, ...], path: Path | None, how: str) -> tuple[Ended, str]:
            state = "stopped" if command[0] == "resume" else "finished"
            copy = root / "copies" / "whole-20260101-000000"
            shutil.rmtree(root / "copies", ignore_errors=True)
            shutil.copytree(originals[state], copy)
            what = damage(copy / path, how, dice) if path is not None else ""
            return called(command, copy, root), what

        whole = {}
        for command in (("resume",), *READING):
            whole[command], _ = tried(command, None, "")
            if whole[command].status != 0:
                raise SystemExit(f"{command} fails without any damage: {whole[command]}")
        for number in range(options.damages):
            command = ("resume",) if number % 2 else dice.choice(READING)
            run = originals["stopped" if command[0] == "resume" else "finished"]
            paths = [path.relative_to(run) for path in run.rglob("*") if path.is_file() and path.name != "run.lock"]
            kinds = sorted({kind_of(path) for path in paths if options.only in path.as_posix()})
            kind = dice.choice(kinds)
            path = dice.choice(sorted(path for path in paths if kind_of(path) == kind))
            ended, what = tried(command, path, how := dice.choice(HOWS))
            outcome = verdict(ended, whole[command], path.name)
            outcomes[outcome] += 1
            if outcome not in ("equal", "named", "named, and gone on"):
                last = (ended.errors + ended.out)[-700:]
                wrong.append(
                    {"command": command[0], "file": str(path), "how": what or how, "outcome": outcome, "said": last}
                )
                if not options.json:
                    print(json.dumps(wrong[-1]), flush=True)
    finally:
        shutil.rmtree(root)
    figures = {
        "damages": outcomes.total(),
        **dict(sorted(outcomes.items())),
        "wrong": len(wrong),
        "holds": not wrong,
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps({"figures": figures, "wrong": wrong}) if options.json else figures)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
