"""How quick the live page is on a large run, how much memory a browser needs for it, and what it costs the run.

    python benchmarks/page.py [--events 1000000] [--trajectories 100000] [--steps 5000] [--requests 40] [--json]

A finished run of that size is written with the program's own writers and served by ``asyncrl page`` in a process of its
own, as users start it. Of each view the first answer counts in ``cold_ms`` (the server reads the files), further ones
with other parameters in ``view_ms``: the time until the last byte has arrived. A text that no rollout has is searched
for, too. ``browser_mb`` is the memory of the browser's page (proportional set size of the renderer) after each view was
open, with Debian's Chromium; left out without it.

``run_cost`` is the share of this machine's CPU time that the page takes while one browser has the overview of a run
open that logs four steps a second: what the run cannot use. Goals: ``view_ms`` p99 <= 150, ``browser_mb`` <= 300,
``run_cost`` <= 0.01. Exit status 1 where one is missed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import psutil

from asyncrl.telemetry import RunDirectory, Timeline

WATCHED_S = 20.0
STEP_S = 0.25
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAMES = ("loss", "grad_norm", "lr", "entropy", "policy_kl", "behaviour_kl", "clip_fraction", "effective_sample_share")


def metrics(dice: random.Random) -> dict[str, float]:
    plain = {"reward_mean": dice.random(), "length_mean": dice.uniform(10, 500), "tokens_per_s": dice.uniform(500, 900)}
    queue = {"groups_ready": dice.randrange(8), "groups_pending": dice.randrange(8), "masked_tokens": dice.randrange(9)}
    ages = {f"staleness/{age}": dice.randrange(1000) for age in range(4)}
    return plain | queue | ages | {f"train/{name}": dice.random() for name in NAMES}


def trajectory(dice: random.Random, step: int) -> dict[str, Any]:
    words = [f"word{dice.randrange(1000)} " for _ in range(dice.randrange(20, 120))]
    tokens = [[word, round(-dice.random(), 5), step] for word in words]
    more = {"text": "".join(words), "tokens": tokens, "finish": "stop", "weight_versions": [step]}
    task = {"prompt": [{"role": "user", "content": "Say words."}], "ground_truth": "word7"}
    return {"reward": dice.random(), "reward_parts": {"words": dice.random()}, "task": task} | more


def record(folder: Path, *, events: int, trajectories: int, steps: int) -> Path:
    """Write a finished run; return its folder."""
    dice, now_s = random.Random(0), 0.0
    with RunDirectory.create(folder, "large") as run:
        run.write_config('name = "large"\nmax_staleness = 2\n')
        for step in range(1, steps + 1):
            run.log_metrics(metrics(dice), step=step, version=step)
        for number in range(trajectories):
            step = 1 + number * steps // trajectories
            run.log_trajectory({"step": step, "group_id": number, **trajectory(dice, step)})
        timeline = Timeline(clock=lambda: now_s, max_events=events)
        for number in range(events // 4):
            with timeline.wait("train", "rollouts"), timeline.span("rollout", f"group {number}"):
                now_s += dice.random()
            with timeline.span("train", f"step {number}"), timeline.span("publish", f"version {number}"):
                now_s += dice.random()
        timeline.save(run.timeline_path)
        idle = {"trainer": {"update": 60.0, "rollouts": 40.0}, "rollout-0": {"generate": 100.0}}
        run.write_summary({"steps": steps, "idle": idle, "max_staleness": 2, "failures": {}, "advice": None})
        return run.path


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "asyncrl", "page", str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as server:
        try:
            assert server.stdout is not None
            words = server.stdout.readline().split()
            yield next(word for word in words if word.startswith("http")), psutil.Process(server.pid)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


class Client:
    """Asks one server over one connection."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._headers = {"Authorization": f"Bearer {parse_qs(parts.query)['token'][0]}"}
        self._connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)

    def took_ms(self, path: str) -> float:
        """Return the time until the whole answer is here.

        Raises:
            RuntimeError: it is no answer to the question.
        """
        begin_s = time.perf_counter()
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        body = answer.read()
        took_ms = 1000 * (time.perf_counter() - begin_s)
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status}: {body[:200]!r}")
        return took_ms


def paths(run: str, dice: random.Random, *, trajectories: int, steps: int) -> dict[str, str]:
    """Return an address of each view, with parameters that were not asked for before."""
    start_s = dice.uniform(0, 1000)
    low = dice.random()
    return {
        "list": "/api/runs",
        "overview": f"{run}/overview",
        "timeline": f"{run}/timeline?bins={dice.randrange(300, 1500)}",
        "timeline, closer": f"{run}/timeline?start={start_s}&end={start_s + dice.uniform(10, 5000)}&bins=1200",
        "rollouts": f"{run}/rollouts?before={dice.randrange(1, trajectories)}",
        "rollouts of a step": f"{run}/rollouts?step={dice.randrange(1, steps)}",
        "rollouts by reward": f"{run}/rollouts?least={low}&most={low + 1e-6}",
        "rollouts with a word": f"{run}/rollouts?text=word{dice.randrange(1000)}",
        "rollouts without a match": f"{run}/rollouts?text=nowhere{dice.randrange(1000)}",
        "rollout": f"{run}/rollouts/{dice.randrange(trajectories)}",
        "failures": f"{run}/failures",
    }


def measure_views(client: Client, run: str, options: argparse.Namespace) -> dict[str, Any]:
    dice = random.Random(1)
    cold: dict[str, float] = {}
    warm: dict[str, list[float]] = {}
    for turn in range(options.requests + 1):
        for name, path in paths(run, dice, trajectories=options.trajectories, steps=options.steps).items():
            took_ms = client.took_ms(path)
            if turn:
                warm.setdefault(name, []).append(took_ms)
            else:
                cold[name] = round(took_ms, 1)
    everything = sorted(took_ms for each in warm.values() for took_ms in each)
    by_view = {
        name: {"p50": round(statistics.median(each), 1), "max": round(max(each), 1)} for name, each in warm.items()
    }
    total = {"p50": round(statistics.median(everything), 1), "p99": round(everything[int(0.99 * len(everything))], 1)}
    return {"view_ms": total, "by_view_ms": by_view, "cold_ms": cold}


@contextmanager
def browser_tab(url: str) -> Iterator[Any]:
    """Open the page. Any: a page of Playwright, which is of the dev extra."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("main h1")
        yield page
        browser.close()


def renderer_mb() -> float:
    """Return the memory of the largest renderer below this process, in MB of 10^6 bytes."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "--type=renderer" in process.cmdline():
                found.append(process.memory_full_info().pss / 1e6)
        except psutil.Error:
            continue
    return max(found)


def measure_browser(url: str, name: str) -> float:
    most_mb = 0.0
    with browser_tab(url) as page:
        for view in ("overview", "timeline", "staleness", "weights", "rollouts", "rollouts/7", "failures") * 2:
            page.evaluate("address => { location.hash = address }", f"#/run/{quote(name)}/{view}")
            page.wait_for_timeout(1500)
            most_mb = max(most_mb, renderer_mb())
    return most_mb


def measure_cost(folder: Path) -> float:
    """Return the share of the CPU time of this machine that the server takes beside a run that goes on."""
    dice = random.Random(2)
    with RunDirectory.create(folder, "live") as run, served(folder) as (url, server):
        run.write_config('name = "live"\n')
        for step in range(1, 201):
            run.log_metrics(metrics(dice), step=step, version=step)
        with browser_tab(url) as page:
            page.evaluate("address => { location.hash = address }", f"#/run/{quote(run.path.name)}/overview")
            page.wait_for_timeout(3000)
            before, begin_s, step = server.cpu_times(), time.perf_counter(), 201
            while (took_s := time.perf_counter() - begin_s) < WATCHED_S:
                run.log_metrics(metrics(dice), step=step, version=step)
                run.log_trajectory({"step": step, "group_id": step, **trajectory(dice, step)})
                step += 1
                page.wait_for_timeout(1000 * STEP_S)
            after = server.cpu_times()
    return (after.user + after.system - before.user - before.system) / took_s / (os.cpu_count() or 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--requests", type=int, default=40, help="answers of each view")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = record(folder, events=options.events, trajectories=options.trajectories, steps=options.steps)
        with served(run) as (url, server):
            result = measure_views(Client(url), f"/api/runs/{quote(run.name)}", options)
            result["server_mb"] = round(server.memory_full_info().pss / 1e6)
            if CHROMIUM is not None:
                result["browser_mb"] = round(measure_browser(url, run.name))
        if CHROMIUM is not None:
            live = folder / "live"
            live.mkdir()
            result["run_cost"] = round(measure_cost(live), 4)
    missed = [
        name
        for name, value, goal in (
            ("view_ms", result["view_ms"]["p99"], 150),
            ("browser_mb", result.get("browser_mb", 0), 300),
            ("run_cost", result.get("run_cost", 0), 0.01),
        )
        if value > goal
    ]
    print(json.dumps({**result, "missed": missed}, indent=None if options.json else 2))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
