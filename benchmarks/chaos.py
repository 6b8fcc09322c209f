"""Random SIGKILLs of every kind of process in real runs on Ray: each run is resumed, and its prompts are counted.

    python benchmarks/chaos.py --kills 300 [--seed 0] [--json] [--kinds driver,trainer,...] [--folder .] [--keep]

Runs of a tiny model (two rollout replicas, a trainer of one or two ranks, a reward worker with a scoring process, the
buffer in a process of its own in two of three) on a Ray of this program's own. The driver is a child process; if it is
killed, or ends with an error that names the killed process, it is resumed. Kills come at random moments, some during
the recovery from the one before.

Environments and trainer ranks note what they did in files of their own (``witnesses.py``); nothing that the run wrote
for itself is used to judge it. After a run the rows of the updates that its last weights come from are held against the
episodes:

    lost                 rows that a step should have had, two groups of four
    duplicated           rows of a group that another step has trained on, or more of a group than it has
    invented             rows that no episode of their prompt ended with, or with another reward than their text earns

Then its ledger must have the same batches, and account for the numbers that no step has.

Seconds to recover: from a kill to the next training step that reached the ledger. Each kill must be recorded by the
run: in the driver's log, its error, or the ledger's record of a resumed process. This program fails if a kill is not
recorded, or if anything is lost, duplicated or invented.

After every run a line on stderr reports the errors so far. At SIGTERM, SIGINT or SIGHUP nothing more is killed: the
current run continues to its end and is checked, and the figures of the kills until then are printed. At a second signal
that run is given up, and its kills are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import secrets
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

# Ray reads these when it is imported; the children of this program have them from here.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # as it is, whatever else a machine does starves Ray's workers
os.environ["OMP_NUM_THREADS"] = "1"

HERE = Path(__file__).parent
ROOT = HERE.parent
KINDS = ("driver", "rollout", "trainer", "reward", "scoring", "buffer")
"""Kinds of process that are killed; ``scoring`` is the process below the reward worker in which the function runs."""
STEPS, GROUPS, ROWS = 24, 2, 4
DEATHS = "(?:died|dead|lost|killed|gone|exited|ended|signal)"
"""A log line that reports a death has one of these words."""
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask for the end."""
HANG_S = 240.0
"""A run that makes no step for so long hangs."""
TOGETHER_S = 5.0
"""A process that was killed so shortly before the one whose death ends the life may be gone without news of its own."""
END_S = 15.0
"""And one that is killed within so long after it may find the life at its end."""


@dataclass
class Kill:
    kind: str
    pid: int
    what: str
    at: float
    said: dict[Path, int]
    """Where the run's logs ended then."""
    lives: int
    teller: int = 0
    """Worker whose log records it."""
    recovered_s: float | None = None
    witness: str = ""
    named_s: float | None = None
    """Seconds from then to its witness; where that was looked for."""


@dataclass
class Campaign:
    """All runs of this program."""

    folder: Path
    address: str
    raylet: int
    dice: random.Random
    wanted: int
    kinds: tuple[str, ...]
    until: float = 0.0
    ended_by: str = ""
    """The signal that asked for the end."""
    gives_up: bool = False
    """The end is asked for again: the run under way is not waited for."""
    kills: list[Kill] = field(default_factory=list)
    given_up: int = 0
    """Kills of a run that was given up, and whose ledger was not checked."""
    resumes: int = 0
    restarts: int = 0
    runs: int = 0
    lost: int = 0
    duplicated: int = 0
    invented: int = 0
    problems: list[str] = field(default_factory=list)
    endings: Counter[str] = field(default_factory=Counter)

    @property
    def goes_on(self) -> bool:
        return len(self.kills) < self.wanted and time.monotonic() < self.until and not self.ended_by

    def end(self, number: int, _frame: FrameType | None = None) -> None:
        """Handles a signal: kill nothing more, and at the second one do not wait for the run under way."""
        self.gives_up = bool(self.ended_by)
        self.ended_by = self.ended_by or signal.Signals(number).name
        then = "is given up" if self.gives_up else "goes on to its end"
        tell(f"{signal.Signals(number).name}: the run under way {then}")

    def give_up(self, kills: Sequence[Kill]) -> None:
        """The last of all kills, whose run was not seen through: they count for nothing."""
        self.given_up = len(kills)
        del self.kills[len(self.kills) - len(kills) :]

    def next_kind(self, kinds: Sequence[str]) -> str:
        """One of these kinds at random, each as often as the others."""
        done = Counter(kill.kind for kill in self.kills)
        fewest = min(done[kind] for kind in kinds)
        return self.dice.choice([kind for kind in kinds if done[kind] <= fewest + 1])


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------- processes


def in_a_fork(work: Any) -> int:
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
        sys.stderr.flush()
        os._exit(code)


def processes() -> dict[int, tuple[int, str]]:
    """Living processes: parent and command line by number."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                title = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if fields[0] != "Z":
                found[int(entry.name)] = (int(fields[1]), title)
    return found


@contextmanager
def a_cluster(folder: Path) -> Iterator[tuple[str, int]]:
    """A Ray of this program's own: its address, and its raylet's process."""
    program = (
        "import sys; from pathlib import Path; from asyncrl.single_controller.ray.cluster import RayCluster\n"
        "with RayCluster(num_cpus=16, log_folder=Path(sys.argv[1])):\n"
        "    import ray; print(ray.get_runtime_context().gcs_address, flush=True); sys.stdin.read()\n"
    )
    helper = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what a terminal or `timeout` sends to the whole group is for this program alone
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    try:
        address = helper.stdout.readline().strip()
        if not address:
            sys.exit("Ray did not start")
        raylets = [pid for pid, (parent, title) in processes().items() if parent == helper.pid and "raylet" in title]
        yield address, raylets[0]
    finally:
        helper.stdin.close()
        helper.wait(60)


def victims(campaign: Campaign, kind: str, driver: int) -> list[tuple[int, str, int]]:
    """Living processes of a kind, of the run under way; what they are called, and which worker they belong to."""
    if kind == "driver":
        return [(driver, "driver", 0)]
    living = processes()
    workers = {pid: title for pid, (parent, title) in living.items() if parent == campaign.raylet}
    if kind == "scoring":
        rewards = {pid for pid, title in workers.items() if title.startswith("ray::reward")}
        return [(pid, f"scoring process {pid}", parent) for pid, (parent, _) in living.items() if parent in rewards]
    return [
        (pid, title.removeprefix("ray::").partition("[")[0], 0)
        for pid, title in workers.items()
        if title.startswith(f"ray::{kind}")
    ]


# --------------------------------------------------------------------------------------------------------------- a run


def config_of(campaign: Campaign, folder: Path, number: int, **cluster: Any) -> str:
    from asyncrl.config import Config

    return Config.from_mapping(
        {
            "name": "chaos",
            "steps": STEPS,
            "max_staleness": 2,
            "seed": number,
            "runs": str(folder),
            "cluster": {"backend": "ray", "address": campaign.address, **cluster},
            "model": {
                "source": "scratch",
                "options": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "max_position": 128},
            },
            "env": {"name": "witnesses:NotedFactory", "options": {"folder": str(folder / "notes")}},
            "rollout": {"replicas": 2, "num_cpus": 0.1, "max_new_tokens": 6, "max_seq_len": 96},
            "reward": {"source": "function", "options": {"function": "digits_world:text_score"}},
            "trainer": {
                "engine": "witnesses:NotingEngine",
                "options": {"folder": str(folder / "notes")},
                "groups_per_step": GROUPS,
                "group_size": ROWS,
                "world_size": 1 + number % 2,
                "num_cpus": 0.1,
                "lr": 1e-2,
            },
            "buffer": {"kind": "remote" if has_buffer_worker(number) else "replay"},
            "eval": {"tasks": 0},
            "checkpoint": {"every": 2, "keep_last": 2},
            "telemetry": {"progress": "plain"},
        }
    ).to_toml()


def has_buffer_worker(number: int) -> bool:
    return number % 3 != 2


class HurtRun:
    """One run from its first life to its last."""

    signal = signal.SIGKILL
    news = DEATHS
    """What a line of the log says of a process that got the signal."""
    cluster: ClassVar[Mapping[str, Any]] = {}
    """Keys of the section ``cluster`` of its configuration."""

    def __init__(self, campaign: Campaign, number: int) -> None:
        self.campaign = campaign
        self.folder = campaign.folder / f"run-{number}"
        (self.folder / "notes").mkdir(parents=True)
        self.file = self.folder / "run.toml"
        self.file.write_text(config_of(campaign, self.folder, number, **self.cluster))
        self.output = self.folder / "output.txt"
        self.kinds = [kind for kind in campaign.kinds if kind != "buffer" or has_buffer_worker(number)]
        self.lives = 0
        self.resumes = 0
        self.driver = 0
        self.kills: list[Kill] = []
        self._sequence = 0
        self._ledger: Path | None = None
        self._step = 0
        self._stepped = time.monotonic()

    @property
    def path(self) -> Path | None:
        """The run's own folder, once there is a configuration in it."""
        runs = [path for path in self.folder.glob("chaos-2*") if (path / "config.toml").is_file()]
        return max(runs, default=None, key=lambda path: path.stat().st_ctime_ns)

    def begin(self) -> None:
        """A life: from the newest checkpoint, or anew where there is none."""
        run = self.path
        resumable = run is not None and any((run / "checkpoints").glob("step-*"))
        if self.lives and resumable:
            self.resumes += 1
        words = ["train", str(self.file), *(["--resume", str(run)] if resumable else [])]

        def life() -> int:
            os.setsid()
            for number in ENDINGS:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            output = os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            from asyncrl.cli.main import main as command

            return command(words)

        self.lives += 1
        self.driver = in_a_fork(life)

    def said(self, teller: int = 0) -> dict[Path, str]:
        """What the run has said of itself, by file; and what the worker ``teller`` has said."""
        logs = [self.output, *sorted(self.folder.glob("chaos-2*/logs/driver.log"))]
        if teller and (run := self.path) is not None:
            ray = run / "logs" / "ray"  # where many have ended, Ray puts their logs away
            logs += sorted({ray / log.name for log in ray.glob(f"**/worker-*-{teller}.err")})
        return {log: text for log in logs if (text := _text(log) or _text(log.parent / "old" / log.name))}

    def look(self) -> int:
        """Read on in the ledger; return the newest step that was trained. Marks kills as recovered from."""
        run = self.path
        ledger = None if run is None else run / "ledger.sqlite"
        if ledger is None or not ledger.is_file():
            return self._step
        if ledger != self._ledger:
            self._ledger, self._sequence = ledger, 0
        try:
            with closing(sqlite3.connect(f"{ledger.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as told:
                lines = told.execute(
                    "SELECT sequence, kind, step FROM events WHERE sequence > ? ORDER BY sequence", (self._sequence,)
                ).fetchall()
        except sqlite3.Error:
            return self._step  # it is being made, or mended
        now = time.monotonic()
        for sequence, kind, step in lines:
            self._sequence = sequence
            if kind in ("consumed", "reused"):
                self._step, self._stepped = step, now
                for kill in self.kills:
                    kill.recovered_s = now - kill.at if kill.recovered_s is None else kill.recovered_s
        return self._step

    def live(self) -> None:
        """Hurt it until enough was killed, and see it through."""
        campaign = self.campaign
        self.begin()
        next_at = self._next_moment()
        while not campaign.gives_up:
            process, status = os.waitpid(self.driver, os.WNOHANG)
            if process:
                self.driver = 0
                code = os.waitstatus_to_exitcode(status)
                campaign.endings["killed" if code == -signal.SIGKILL else f"exit code {code}"] += 1
                self.look()
                if code == 0:
                    return
                named = code == 1 and any(kill.lives == self.lives for kill in self.kills)
                if not (named or code == -signal.SIGKILL):
                    campaign.problems.append(f"{self.folder.name}: a life ended with {code}: {self._last_words()}")
                    return
                self.begin()
                continue
            step, now = self.look(), time.monotonic()
            if now - max([self._stepped, *(kill.at for kill in self.kills)]) > HANG_S:
                campaign.problems.append(f"{self.folder.name}: no step for {HANG_S:g} s: {self._last_words()}")
                self.stop()
                return
            if now >= next_at and campaign.goes_on and step <= STEPS - 6:
                waits = self.kills and self.kills[-1].recovered_s is None and self._waits_for_recovery
                if not waits and self._kill():
                    next_at = self._next_moment()
            time.sleep(0.05)

    def stop(self) -> None:
        """A driver that still lives, because it hangs, is given up, or this program ends by an error."""
        if self.driver:
            os.kill(self.driver, signal.SIGKILL)
            os.waitpid(self.driver, 0)
            self.driver = 0

    def _next_moment(self) -> float:
        """When to kill next: after a recovery as often as in the middle of one."""
        dice = self.campaign.dice
        self._waits_for_recovery = dice.random() < 0.5
        return time.monotonic() + dice.uniform(0.1, 1.5 if self._waits_for_recovery else 6.0)

    def _victims(self, kind: str) -> list[tuple[int, str, int]]:
        hurt = {kill.pid for kill in self.kills}
        return [each for each in victims(self.campaign, kind, self.driver) if each[0] not in hurt]

    def _kill(self) -> bool:
        campaign = self.campaign
        kind = campaign.next_kind(self.kinds)
        if kind == "driver" and any(not self._witnessed(kill) for kill in self.kills):
            return False  # a driver that dies with the news cannot tell it
        found = self._victims(kind)
        if not found:
            return False
        pid, what, teller = campaign.dice.choice(found)
        if kind == "reward" and any(kill.teller == pid and not self._witnessed(kill) for kill in self.kills):
            return False  # so is a worker whose scoring process was killed: it alone knows of that
        said = {log: len(text) for log, text in self.said(teller).items()}
        try:
            os.kill(pid, self.signal)
        except ProcessLookupError:
            return False
        kill = Kill(kind, pid, what, time.monotonic(), said, teller=teller, lives=self.lives)
        self.kills.append(kill)
        campaign.kills.append(kill)
        return True

    def _witnessed(self, kill: Kill) -> bool:
        """Whether the run has recorded a kill, in its log, its error, or the processes in its ledger."""
        if not kill.witness:
            if kill.kind == "driver":
                kill.witness = f"life {kill.lives + 1} began" if self.lives > kill.lives else ""
            else:
                name = re.escape(kill.what)
                news = "\n".join(text[kill.said.get(log, 0) :] for log, text in self.said(kill.teller).items())
                line = re.search(rf"^(?=.*\b{name}\b)(?=.*\b{self.news}\b).*$", news, re.MULTILINE)
                if line is None and any(other is not kill and other.lives == kill.lives for other in self.kills):
                    # Of two that die in one life the run names the one that ends it; the other is in Ray's own line.
                    line = re.search(rf"^(?=.*\bWorker PID: {kill.pid}\b)(?=.*\b{DEATHS}\b).*$", news, re.MULTILINE)
                kill.witness = line.group(0).strip()[:500] if line else self._ended_beside(kill)
        return bool(kill.witness)

    def _ended_beside(self, kill: Kill) -> str:
        """Return a witness if the life ended by name because of another kill, shortly before or after this one."""
        for other in self.kills:
            together = other.lives == kill.lives and -TOGETHER_S <= kill.at - other.at <= END_S and other is not kill
            if together and self.lives > kill.lives:
                error = re.search("^error: .*$", _text(self.output)[other.said.get(self.output, 0) :], re.MULTILINE)
                if error and re.search(rf"\b{re.escape(other.what)}\b", error.group(0)):
                    return f"the life had ended by then: {error.group(0)}"[:500]
        return ""

    def _last_words(self) -> str:
        return " | ".join("".join(self.said().values()).strip().splitlines()[-6:])

    def unwitnessed(self) -> list[str]:
        for kill in self.kills:  # the witness of a later one may be that of an earlier one
            self._witnessed(kill)
        return [
            f"{self.folder.name}: the death of {kill.what} ({kill.pid}) left no witness"
            for kill in self.kills
            if not self._witnessed(kill)
        ]

    def audit(self) -> None:
        """Hold what the finished run trained on against its episodes, and its ledger against both."""
        from witnesses import audit

        campaign, run = self.campaign, self.path
        campaign.runs += 1
        campaign.resumes += self.resumes
        campaign.restarts += self.lives - 1 - self.resumes
        campaign.problems += self.unwitnessed()
        if run is None or not (run / "summary.json").is_file():
            campaign.problems.append(f"{self.folder.name}: no summary")
            return
        found = audit(self.folder / "notes", steps=STEPS, groups=GROUPS, rows=ROWS)
        campaign.lost += found.lost
        campaign.duplicated += found.duplicated
        campaign.invented += found.invented
        with closing(sqlite3.connect(run / "ledger.sqlite")) as ledger:
            states = dict(ledger.execute("SELECT group_id, state FROM groups"))
            batches = ledger.execute("SELECT step, group_id FROM batches ORDER BY step, group_id").fetchall()
            (lives,) = ledger.execute("SELECT count(*) + 1 FROM events WHERE kind = 'resumed'").fetchone()
        trained = [(step, group_id) for step, group_ids in sorted(found.batches.items()) for group_id in group_ids]
        if batches != trained:
            campaign.problems.append(f"{self.folder.name}: the ledger has other batches than the trainer noted")
        used = {group_id for _step, group_id in trained}
        holes = set(range(max(used, default=-1) + 1)) - used
        if unknown := {group_id for group_id in holes if states.get(group_id) not in ("dropped", "failed")}:
            campaign.problems.append(
                f"{self.folder.name}: groups {sorted(unknown)} were neither trained on nor dropped"
            )
        summary = json.loads((run / "summary.json").read_text())
        tokens = summary["tokens"]
        missing = tokens["generated"] - tokens["trained"] - sum(tokens["dropped"].values()) - tokens["in_flight"]
        if missing:
            campaign.problems.append(f"{self.folder.name}: {missing} tokens are unaccounted for: {tokens}")
        if summary["staleness"]["max"] > 2:
            campaign.problems.append(f"{self.folder.name}: staleness {summary['staleness']['max']} > 2")
        if lives > self.lives:
            campaign.problems.append(f"{self.folder.name}: {lives} lives in the ledger, {self.lives} began")


def _text(log: Path) -> str:
    try:
        return log.read_text(errors="replace")
    except FileNotFoundError:
        return ""


# ---------------------------------------------------------------------------------------------------------- everything


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kills", type=int, default=20)
    add_options(arguments, KINDS)
    options = arguments.parse_args()
    kinds = tuple(kind for kind in KINDS if kind in options.kinds.split(","))
    sys.exit(1 if hurt_runs(HurtRun, options, kinds, wanted=options.kills, report=report) else 0)


def add_options(arguments: argparse.ArgumentParser, kinds: Sequence[str]) -> None:
    arguments.add_argument("--seconds", type=float, default=float("inf"), help="hurt nothing after this time")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--kinds", default=",".join(kinds), help="kinds of process, with commas between them")
    arguments.add_argument("--folder", type=Path, default=None, help="where the runs lie; temporary files if not given")
    arguments.add_argument("--keep", action="store_true", help="leave the runs there")
    arguments.add_argument("--json", action="store_true", help="print one JSON object")


def hurt_runs(
    run_type: type[HurtRun],
    options: argparse.Namespace,
    kinds: tuple[str, ...],
    *,
    wanted: int,
    report: Callable[..., None],
) -> bool:
    """Make runs and hurt them until it is enough, and report; return whether anything went wrong."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(ROOT))
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=options.folder))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with this program
    begun = time.perf_counter()
    with a_cluster(folder) as (address, raylet):
        preload()
        campaign = Campaign(folder, address, raylet, random.Random(options.seed), wanted, kinds)
        campaign.until = time.monotonic() + options.seconds
        for number in ENDINGS:
            signal.signal(number, campaign.end)
        while campaign.goes_on and not campaign.problems:
            run = run_type(campaign, campaign.runs)
            tell(f"run {campaign.runs + 1} begins")
            try:
                run.live()
            finally:
                run.stop()
            if campaign.gives_up:
                campaign.give_up(run.kills)
                break
            run.audit()
            tell(
                f"run {campaign.runs}: {len(run.kills)} hurt, {run.lives} lives; so far {len(campaign.kills)} of "
                f"{campaign.wanted}, {campaign.resumes} resumes, {campaign.lost} lost, {campaign.duplicated} "
                f"duplicated, {campaign.invented} invented, {time.perf_counter() - begun:.0f} s"
            )
        report(campaign, elapsed_s=time.perf_counter() - begun, options=options)
    if not options.keep and not campaign.problems:
        shutil.rmtree(folder)
    return bool(campaign.problems or campaign.lost or campaign.duplicated or campaign.invented)


def preload() -> None:
    """What every life needs, before the first fork."""
    import logging

    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    import asyncrl.cli.commands
    import asyncrl.single_controller.ray  # noqa: F401


def report(campaign: Campaign, *, elapsed_s: float, options: argparse.Namespace) -> None:
    kills = campaign.kills
    recovered = sorted(kill.recovered_s for kill in kills if kill.recovered_s is not None)
    cuts = statistics.quantiles(recovered, n=100, method="inclusive") if len(recovered) > 1 else recovered * 99
    figures = [
        figure("kills", len(kills), "", goal=f"at least {options.kills}", holds=len(kills) >= options.kills),
        *damage(campaign),
        figure("witnesses", sum(bool(kill.witness) for kill in kills), "kills"),
        figure("recovery p50", round(cuts[49], 2) if cuts else -1, "s"),
        figure("recovery p99", round(cuts[98], 2) if cuts else -1, "s"),
        figure("kills of a run given up", campaign.given_up, "not counted"),
        *(figure(f"kills, {kind}", count, "") for kind, count in sorted(Counter(k.kind for k in kills).items())),
        *(figure(f"lives, {ending}", count, "") for ending, count in sorted(campaign.endings.items())),
        figure("time", round(elapsed_s, 1), "s"),
    ]
    show(campaign, figures, options)
    if campaign.ended_by and not options.json:
        print(f"ENDED BY {campaign.ended_by}: {len(kills)} kills of the {options.kills} that were asked for")


def damage(campaign: Campaign) -> list[dict[str, object]]:
    return [
        figure("resumes", campaign.resumes, ""),
        figure("restarts", campaign.restarts, ""),
        figure("runs", campaign.runs, ""),
        figure("lost", campaign.lost, "prompts", goal="0", holds=campaign.lost == 0),
        figure("duplicated", campaign.duplicated, "prompts", goal="0", holds=campaign.duplicated == 0),
        figure("invented", campaign.invented, "rows", goal="0", holds=campaign.invented == 0),
    ]


def show(campaign: Campaign, figures: list[dict[str, object]], options: argparse.Namespace) -> None:
    kills = campaign.kills
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "seed": options.seed}
    witnesses = [
        {name: getattr(kill, name) for name in ("kind", "pid", "recovered_s", "witness", "named_s")} for kill in kills
    ]
    if options.json:
        told = {"machine": machine, "figures": figures, "problems": campaign.problems, "faults": witnesses}
        told["ended_by"] = campaign.ended_by or None
        print(json.dumps(told))
        return
    for each in figures:
        verdict = f"  goal {each['goal']}: {'holds' if each['holds'] else 'DOES NOT HOLD'}" if each["goal"] else ""
        print(f"{each['name']:28s} {each['value']:>8} {each['unit']}{verdict}")
    for each in witnesses:
        print(f"  {each['kind']:8s} {each['pid']:>8}  {each['witness']}")
    for problem in campaign.problems:
        print(f"PROBLEM: {problem}")


def figure(
    name: str, value: float, unit: str, *, goal: str | None = None, holds: bool | None = None
) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "floor": None, "ratio": None, "goal": goal, "holds": holds}


if __name__ == "__main__":
    main()
