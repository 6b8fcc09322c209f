"""Sandboxes: what escapes, what they leave behind, what their failures do to rewards, and what they cost.

    python benchmarks/sandbox.py [--json] [--sandboxes 5000] [--groups 100] [--at-once 4] [--only escapes,orphans,...]

* escapes: programs that try to leave (tests/sandboxes/escapes.py), through the contract: in sandboxes of this machine,
  reset after each, and in those of a server;
* orphans: processes and folders that are left after many short sandboxes, of which a backend kills 15 %;
* reward_bias: groups of episodes in the environment ``sandbox`` whose sandboxes are killed as often, tried again as a
  rollout worker does: the largest difference of a reward or an advantage from those without failures;
* costs: making and destroying a sandbox, a command in it, a reset; the floor is a bare process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sandboxes"))
from escapes import ESCAPES
from serve import Figure, shown

from asyncrl.algorithms import grpo_advantages
from asyncrl.envs.sandbox import SandboxFactory
from asyncrl.errors import EnvironmentFailure, SandboxError
from asyncrl.sandboxes.contract import Sandbox, SandboxBackend, SandboxLimits
from asyncrl.sandboxes.namespaces import NamespacesBackend, NamespacesSandbox
from asyncrl.sandboxes.remote import RemoteBackend
from asyncrl.serve.middleware import KeyRing
from asyncrl.serve.sandboxes import SandboxServer

KILLED_SHARE = 0.15
GROUP_SIZE = 4
MOST_ATTEMPTS = 12
KEY = "k" * 32


class KillingBackend(NamespacesBackend):
    """Kills the process of some of its sandboxes, at a moment of their lives that chance decides."""

    def __init__(self, *, seed: int = 0, share: float = KILLED_SHARE) -> None:
        super().__init__()
        self._draw = random.Random(seed)
        self._share = share
        self.killed = 0

    async def create(self, limits: SandboxLimits) -> NamespacesSandbox:
        sandbox = await super().create(limits)
        if self._draw.random() < self._share:
            asyncio.get_running_loop().call_later(self._draw.uniform(0.0, 0.1), self._kill, sandbox)
        return sandbox

    def _kill(self, sandbox: NamespacesSandbox) -> None:
        if sandbox._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which is not noticed yet
                os.kill(sandbox._process.pid, signal.SIGKILL)
                self.killed += 1


# ------------------------------------------------------------------------------------------------------------- escapes


async def escaped(sandbox: Sandbox, values: dict[str, Any]) -> list[str]:
    found = []
    for name, program in ESCAPES.items():
        end = await sandbox.exec(["python3", "-I", "-c", program.format(**values)])
        left = await sandbox.exec(["python3", "-c", "import os; print(sum(p.isdigit() for p in os.listdir('/proc')))"])
        daemons = int(left.stdout or 0) > 2  # the first process, and the one that counts
        if "ESCAPED" in end.stdout or daemons or not await sandbox.reset():
            found.append(name)
    return found


async def escapes(folder: Path) -> list[Figure]:
    values = {"file": folder / "ours", "socket": str(folder / "s"), "abstract": f"asyncrl-{os.getpid()}"}
    (folder / "ours").write_text("whole")
    (folder / ".profile").touch()
    figures = []
    async with AsyncExitStack() as stack:
        for address in (values["socket"], f"\0{values['abstract']}"):
            await stack.enter_async_context(await asyncio.start_unix_server(lambda *_: None, address))
        tcp = await stack.enter_async_context(await asyncio.start_server(lambda *_: None, "127.0.0.1", 0))
        values |= {"port": tcp.sockets[0].getsockname()[1], "pid": os.getpid(), "home": folder}
        for kind in ("namespaces", "remote"):
            async with backend_of(kind) as backend:
                sandbox = await backend.create(SandboxLimits(deadline_s=3.0))
                missing = sandbox.isolation.missing
                found = await escaped(sandbox, values)
                await sandbox.destroy()
            if (folder / "ours").read_text() != "whole":
                found.append("the file was changed")
            for name in found:
                print(f"escaped from {kind}: {name}", file=sys.stderr)
            title = f"escapes ({kind}, {len(ESCAPES)} tried, isolation missing: {', '.join(missing) or 'none'})"
            figures.append(Figure(title, len(found), "", 0, 0, "0", not found))
    figures.append(Figure("escapes", sum(each.value for each in figures), "", 0, 0, "0", all(f.holds for f in figures)))
    return figures


@asynccontextmanager
async def backend_of(kind: str) -> AsyncIterator[SandboxBackend]:
    if kind == "namespaces":
        yield NamespacesBackend()
        return
    os.environ["ASYNCRL_SANDBOX_KEY"] = KEY
    limits = SandboxLimits(deadline_s=10.0)
    server = SandboxServer(NamespacesBackend(), limits, keys=KeyRing({"client": KEY}), most=8, lease_s=600.0)
    async with server.serving() as url:
        backend = RemoteBackend(url=url)
        yield backend
        await backend.close()


# ------------------------------------------------------------------------------------------------------------- orphans


def sandbox_processes() -> set[int]:
    """Processes of sandboxes of this process: their folders' names are in their command lines, or their root is one."""
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                ours = tempfile.gettempdir().encode() in (path / "cmdline").read_bytes()
                if ours or str((path / "cwd").readlink()) in ("/sandbox", "/sandbox (deleted)"):
                    found.add(int(path.name))
            except OSError:
                continue
    return found - {os.getpid()}


async def orphans(sandboxes: int, *, at_once: int) -> list[Figure]:
    before, backend, failed = sandbox_processes(), KillingBackend(), 0
    places = asyncio.Semaphore(at_once)

    async def short() -> None:
        nonlocal failed
        async with places:
            sandbox = None
            try:
                sandbox = await backend.create(SandboxLimits())
                await sandbox.exec(["/bin/sh", "-c", "(sleep 60 &) ; sleep 0.01; echo x > file"])
            except SandboxError:
                failed += 1
            finally:
                if sandbox is not None:
                    await sandbox.destroy()

    begun = time.perf_counter()
    await asyncio.gather(*(short() for _ in range(sandboxes)))
    took = time.perf_counter() - begun
    left = sandbox_processes() - before
    folders = list(Path(tempfile.gettempdir()).glob("asyncrl.sandbox.*"))
    title = f"orphans ({sandboxes} sandboxes, {backend.killed} killed, {failed} of them in a command, {took:.0f} s)"
    number = len(left) + len(folders)
    print(title, file=sys.stderr)
    return [Figure("orphans", number, "", 0, 0, "0", number == 0 < failed <= backend.killed)]


# ------------------------------------------------------------------------------------------------------------- rewards


ANSWERS = (
    "import sys; print(2 * int(sys.argv[1]))",
    "import sys; print(int(sys.argv[1]) ** 2)",
    "print(6)",
    "raise SystemExit(1)",
)


def rows_file(folder: Path, tasks: int) -> str:
    lines = []
    for number in range(tasks):
        check = f'test "$(python3 answer.py {number})" = {2 * number}'
        row = {"data_source": "x", "prompt": [{"role": "user", "content": f"double {number}"}]}
        lines.append(json.dumps({**row, "reward_model": {"ground_truth": ""}, "extra_info": {"check": check}}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return str(folder / "rows.jsonl")


async def played(files: str, backend: str, groups: int, *, at_once: int) -> tuple[torch.Tensor, int]:
    """Play all groups; return their rewards [B], and how many attempts failed."""
    factory = SandboxFactory(
        files=files,
        order="file",
        reward="none",
        tools=["bash", "write_file"],
        backend=backend,
        most=at_once,
        warm=0,  # a sandbox for each episode
    )
    failed = 0

    def call(name: str, **arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}

    async def episode(group: int, row: int) -> float:
        nonlocal failed
        answer = random.Random(f"{group}/{row}").choice(ANSWERS)
        for attempt in range(MOST_ATTEMPTS):
            environment = factory.make()
            try:
                await environment.reset(factory.task(group, split="train"))
                await environment.step(call("write_file", path="answer.py", content=answer))
                await environment.step(call("bash", command="cat answer.py"))
                return (await environment.step({"role": "assistant", "content": "done"})).reward
            except EnvironmentFailure:
                failed += 1
                if attempt + 1 == MOST_ATTEMPTS:
                    raise
            finally:
                await environment.close()
        raise AssertionError

    rewards = await asyncio.gather(*(episode(group, row) for group in range(groups) for row in range(GROUP_SIZE)))
    await factory.aclose()
    return torch.tensor(rewards), failed


async def reward_bias(folder: Path, groups: int, *, at_once: int) -> list[Figure]:
    files = rows_file(folder, groups)
    ids = torch.arange(groups).repeat_interleave(GROUP_SIZE)
    without, none_failed = await played(files, "namespaces", groups, at_once=at_once)
    killed, failed = await played(files, f"{__name__}:KillingBackend", groups, at_once=at_once)
    pairs = ((without, killed), (grpo_advantages(without, ids), grpo_advantages(killed, ids)))
    bias = max(float((one - other).abs().max()) for one, other in pairs)
    text = f"{failed} of {len(ids) + failed} attempts failed, {none_failed} without kills"
    print(f"{text}; mean reward {float(without.mean()):.3f}", file=sys.stderr)
    return [Figure("reward_bias", bias, "", 0, 0, "0", bias == 0 and failed > none_failed)]


# --------------------------------------------------------------------------------------------------------------- costs


async def median_ms(call: Callable[[], Awaitable[object]], *, rounds: int = 15) -> float:
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await call()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


async def costs() -> list[Figure]:
    backend, limits = NamespacesBackend(), SandboxLimits()

    async def one() -> None:
        await (await backend.create(limits)).destroy()

    async def bare() -> None:
        await asyncio.to_thread(subprocess.run, [sys.executable, "-I", "-S", "-c", ""], check=True)

    async def shell() -> None:
        await (await asyncio.create_subprocess_exec("/bin/sh", "-c", ":")).wait()

    sandbox = await backend.create(limits)
    python, sh = await median_ms(bare), await median_ms(shell)
    made, ran = await median_ms(one), await median_ms(lambda: sandbox.exec(["/bin/sh", "-c", ":"]))
    reset = await median_ms(sandbox.reset)
    await sandbox.destroy()
    return [
        Figure("a sandbox, made and destroyed", made, "ms", python, made / python, "", True),
        Figure("a command", ran, "ms", sh, ran / sh, "", True),
        Figure("a reset", reset, "ms", sh, reset / sh, "", True),
    ]


async def measure(options: argparse.Namespace, folder: Path) -> list[Figure]:
    figures = []
    for name in options.only.split(","):
        if name == "escapes":
            figures += await escapes(folder)
        elif name == "orphans":
            figures += await orphans(options.sandboxes, at_once=options.at_once)
        elif name == "reward_bias":
            figures += await reward_bias(folder, options.groups, at_once=options.at_once)
        elif name == "costs":
            figures += await costs()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sandboxes", type=int, default=5000)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--only", default="escapes,orphans,reward_bias,costs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sandboxes-") as folder:
        tempfile.tempdir = folder
        figures = asyncio.run(measure(options, Path(folder)))
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
    if options.json:
        print(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures]}))
    else:
        print(shown(figures))


if __name__ == "__main__":
    main()
