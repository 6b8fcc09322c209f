"""Interrupts a run in a real Jupyter kernel at random moments.

    python benchmarks/notebook.py --interrupts 50

For each interrupt a cell begins a run and waits for it (``run.wait()``, ``await run`` and ``for step in run``, in
turns; every second one on Ray). The kernel is interrupted at a random moment, from the start of the cell on. Afterwards
the kernel must answer, no process may be left, and a run with a checkpoint is resumed by the same kernel, for one step.
Exit status 1 if any of it fails. ``handle_ms`` is the time in which ``train`` returns, after the first call.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.manager import KernelManager

FIRST = """
import sys, time, json
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.tasks.test_handle import settings
from asyncrl import attach, train
import transformers, torch
FOLDER = Path({folder!r})

def begin(backend, **more):
    given = settings(FOLDER, reward=lambda completion: float(len(completion)), steps=100000)
    return train(**given | {{"cluster.backend": backend, **more}})
"""
CELLS = (
    "begun = time.perf_counter(); run = begin({backend!r}); took = time.perf_counter() - begun; run.wait()",
    "begun = time.perf_counter(); run = begin({backend!r}); took = time.perf_counter() - begun; await run",
    "begun = time.perf_counter(); run = begin({backend!r}); took = time.perf_counter() - begun\nfor step in run: pass",
)
AFTER = """
path = sorted(FOLDER.glob("runs/*"), key=lambda each: each.stat().st_mtime)[-1] if any(FOLDER.glob("runs/*")) else None
known = attach(path) if path is not None and (path / "config.toml").is_file() else None
saved = sorted(path.glob("checkpoints/step-*")) if path is not None else []
print(json.dumps({"ended": known is None or known.ended, "path": str(path), "resumable": bool(saved),
                  "step": known.step if known else 0, "took": globals().get("took", 0)}))
"""
RESUME = """
again = begin({backend!r}, resume=path, steps=known.step + 1)
print(json.dumps(again.wait().steps))
"""


class Kernel:
    """A Jupyter kernel that runs cells one after another."""

    def __init__(self) -> None:
        self.manager = KernelManager()
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.process = psutil.Process(self.manager.provisioner.pid)  # type: ignore[union-attr]

    def run(self, code: str, *, interrupt_after_s: float | None = None, timeout_s: float = 120.0) -> tuple[str, str]:
        """Run a cell; return what it printed and the name of the error that ended it."""
        request = self.client.execute(code)
        printed, error = "", ""
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.client.get_iopub_msg(timeout=max(deadline - time.monotonic(), 0.01))
            if message["parent_header"].get("msg_id") != request:
                continue
            content: dict[str, Any] = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed += content["text"]
            elif message["msg_type"] == "execute_input" and interrupt_after_s is not None:  # it begins
                time.sleep(interrupt_after_s)
                self.manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                error = content["ename"]
                if error not in ("KeyboardInterrupt", "CancelledError"):
                    print("\n".join(content["traceback"]), file=sys.stderr)
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return printed, error

    def children(self) -> list[str]:
        found = []
        for each in self.process.children(recursive=True):
            try:
                found.append(" ".join(each.cmdline())[:80])
            except psutil.NoSuchProcess:
                continue
        return [name for name in found if name and "resource_tracker" not in name]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interrupts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backends", default="local,ray")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    backends = arguments.backends.split(",")
    problems: list[str] = []
    handles: list[float] = []
    resumed = 0
    kernel = Kernel()
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(__file__).parents[1])
        kernel.run(FIRST.format(root=root, folder=folder))
        for number in range(arguments.interrupts):
            backend, cell = backends[number % len(backends)], CELLS[number % len(CELLS)]
            after_s = (
                draw.uniform(0.0, 2.0)
                if draw.random() < 0.3
                else draw.uniform(0.0, 4.0 if backend == "local" else 30.0)
            )
            where = f"{number} ({backend}, {after_s:.2f} s, cell {number % len(CELLS)})"
            _, error = kernel.run(cell.format(backend=backend), interrupt_after_s=after_s)
            if error not in ("KeyboardInterrupt", "CancelledError"):
                problems.append(f"{where}: the cell ended with {error or 'nothing'}")
            printed, failed = kernel.run(AFTER)
            state = json.loads(printed or "{}")
            if failed or not state.get("ended"):
                problems.append(f"{where}: the kernel says {failed or state}")
            time.sleep(0.5)
            if left := kernel.children():
                problems.append(f"{where}: left {left}")
            handles += [1e3 * state["took"]] if state.get("took") else []
            if state.get("resumable"):
                printed, failed = kernel.run(RESUME.format(backend=backend))
                if failed or json.loads(printed) != state["step"] + 1:
                    problems.append(f"{where}: the resume ended with {failed or printed}")
                resumed += 1
            print(f"{where}: {error}, step {state.get('step')}, resumed {resumed}", file=sys.stderr, flush=True)
    kernel.close()
    figures = {
        "interrupts": arguments.interrupts,
        "resumed": resumed,
        "problems": len(problems),
        "handle_ms": round(statistics.median(handles), 2) if handles else None,
    }
    print("\n".join(problems), file=sys.stderr)
    print(json.dumps(figures, indent=None if arguments.json else 2))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
