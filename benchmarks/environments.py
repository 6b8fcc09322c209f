"""Environments from elsewhere: episodes of each with a scripted policy, what drifts, and what they leave behind.

    python benchmarks/environments.py [--json] [--episodes 1000] [--only gymnasium,openenv,...] [--scratch]

Every adapter plays many episodes, eight at a time, offline, with a policy that makes legal moves, or (--scratch) with a
tiny model of random weights, all games of textarena sharing the episodes. An adapter whose package is not there is left
out: openenv's server runs from the folder of ASYNCRL_OPENENV_PACKAGES, as in .ci/run; mcp's servers are the programs
mcp-server-time and mcp-server-calculator on PATH; the taskset of verifiers is one of its tests (tests/v1/fixtures of
its source, on PYTHONPATH).

* drift_tokens: sampled tokens that are not, at their places, the tokens that would be trained on;
* leaked_processes: processes, descriptors and tasks that are left after the episodes of an adapter.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import platform
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
from serve import Figure, shown

from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.envs.gymnasium import GymnasiumFactory
from asyncrl.envs.mcp import MCPFactory
from asyncrl.envs.openenv import OpenEnvFactory
from asyncrl.envs.sandbox import SandboxFactory
from asyncrl.envs.textarena import TextArenaFactory, choose_bracketed
from asyncrl.envs.verifiers import VerifiersFactory
from asyncrl.errors import ConfigError
from engines.training import scratch
from tests.envs.playing import RecordingModel, play, scratch_renderer

MCP_SERVER = Path(__file__).parents[1] / "tests" / "envs" / "mcp_server.py"
OPENENV = os.environ.get("ASYNCRL_OPENENV_PACKAGES", "")
OPENENV_SERVER = Path(__file__).parents[1] / "tests" / "envs" / "openenv_server.py"
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
GYMNASIUM: dict[str, dict[str, Any]] = {
    "FrozenLake-v1": {"actions": ["left", "down", "right", "up"], "is_slippery": False},
    "Taxi-v4": {"render": True},
    "Blackjack-v1": {"actions": ["stick", "hit"]},
    "CliffWalking-v1": {},
    "CartPole-v1": {},
}
MCP_SERVERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mcp-server-time": ("get_current_time", {"timezone": "UTC"}, '"UTC"'),
    "mcp-server-calculator": ("calculate", {"expression": "6*7"}, "42"),
}
"""Programs from the index: a tool of each, its arguments, and what its answer contains."""


SILENT = (
    *("Briscola-v0", "Chopsticks-v0", "ColonelBlotto-v0", "GermanWhist-v0", "Golf-v0", "IteratedTwoThirdsAverage-v0"),
    *("NewRecruit-v0", "Tak-v0", "TwoDollar-v0"),
)
"""Games that show no legal move in brackets at first: the policy moves first."""


def rows(folder: Path) -> str:
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "go"}], "reward_model": {"ground_truth": "1"}}
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({**row, "extra_info": {}}) for _ in range(10)))
    return str(folder / "rows.jsonl")


@contextmanager
def openenv_server() -> Iterator[str]:
    if not OPENENV:
        yield ""
        return
    listener = socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, str(OPENENV_SERVER), str(listener.fileno())]
    server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": OPENENV}, pass_fds=[listener.fileno()])
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()
    try:
        yield url
    finally:
        server.terminate()
        server.wait()


def adapters(folder: Path) -> Iterator[tuple[str, Callable[[], Any], Callable[[str], str]]]:
    """Yield name, factory and policy of each adapter whose package is there."""
    draw = random.Random(0)
    yield "calculator", CalculatorFactory, lambda text: str(len(text))
    if find_spec("gymnasium"):
        for game, options in GYMNASIUM.items():
            factory = GymnasiumFactory(id=game, **options)
            yield f"gymnasium {game}", lambda it=factory: it, lambda text, it=factory: it._actions.write(draw)
    servers = {"here": {"command": [sys.executable, str(MCP_SERVER)]}}
    yield "mcp", lambda: MCPFactory(servers=servers, files=rows(folder), reward="none"), lambda text: "1"
    if all(map(shutil.which, MCP_SERVERS)):
        installed = {name: {"command": [name]} for name in MCP_SERVERS}
        yield "mcp of the index", lambda: MCPFactory(servers=installed, files=rows(folder), reward="none"), use_tools
    if find_spec("verifiers") and find_spec("echo_v1"):
        yield "verifiers", lambda: VerifiersFactory(taskset="echo_v1"), lambda text: text[-100:]
    options = {"files": rows(folder), "check": "true", "most": 4, "warm": 4}
    once = CALL % ("bash", json.dumps({"command": "echo x >> file; cat file"}))
    yield "sandbox", lambda: SandboxFactory(**options), lambda text: "1" if "tool" in text[-200:] else once
    if find_spec("textarena"):
        for game in games():
            options = {"game": game, "player": 0} if game in SILENT else {"game": game}
            yield f"textarena {game}", lambda options=options: TextArenaFactory(**options), bracketed
    if OPENENV:
        yield "openenv", lambda: OpenEnvFactory(url=SERVED[0], observation="text"), lambda text: "abc"


def use_tools(text: str) -> str:
    """Call a tool of each server, then say 1 if they answered."""
    if "<|tool|>" not in text:
        return "\n".join(CALL % (name, json.dumps(arguments)) for name, arguments, _ in MCP_SERVERS.values())
    if missing := [name for name, _, answer in MCP_SERVERS.values() if answer not in text.partition("<|tool|>")[2]]:
        raise ValueError(f"{missing} gave no answer: {text[-500:]}")
    return "1"


def games() -> list[str]:
    """Return the ids of textarena's games, one variant of each."""
    registry: dict[str, Any] = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    return sorted(name for name in registry if name.endswith("-v0"))


SERVED: list[str] = []


def bracketed(text: str) -> str:
    return choose_bracketed(text[-2000:], draw=random.Random(len(text)))


async def scratch_model(folder: Path) -> RecordingModel:
    factory = CalculatorFactory()
    scratch.make(
        folder, seed=0, demonstrations=factory.demonstration, hidden_size=32, layers=2, heads=2, max_position=8192
    )
    model = RecordingModel(str(folder), device="cpu", threads=1)
    await model.start()
    return model


async def measure(folder: Path, *, episodes: int, only: str, random_weights: bool) -> list[Figure]:
    renderer, figures = scratch_renderer(), []
    model = await scratch_model(folder / "model") if random_weights else None
    drift = leaked = 0
    for name, make, said in adapters(folder):
        if only and not re.search(only.replace(",", "|"), name):
            continue
        try:
            factory = await asyncio.to_thread(make)
        except ConfigError as refused:  # it needs what is not on this machine: words, a key, a newer Python
            print(f"{name} is left out: {refused}", file=sys.stderr)
            continue
        begun = time.perf_counter()
        count = -(-episodes // len(games())) if model and name.startswith("textarena") else episodes
        tokens = {} if model is None else {"max_new_tokens": 8}
        policy = model or said
        played = await play(
            factory, policy, renderer=renderer, episodes=count, max_turns=30, deadline_s=120.0, **tokens
        )
        rate = count / (time.perf_counter() - begun)
        failures = [each for each in played.ended if isinstance(each, Exception)]
        for each in {*(f"{type(each).__name__}: {each}" for each in failures), *played.left}:
            print(f"{name}: {each}", file=sys.stderr)
        drift, leaked = drift + played.drift_tokens, leaked + len(played.left)
        title = f"{name}: episodes that failed, of {count} at {rate:.0f} a second"
        figures.append(Figure(title, len(failures), "", 0, 0, "0", not failures))
    if model is not None:
        await model.close()
    figures.append(Figure("drift_tokens", drift, "", 0, 0, "0", drift == 0))
    figures.append(Figure("leaked_processes", leaked, "", 0, 0, "0", leaked == 0))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument("--scratch", action="store_true", help="a model of random weights is the policy")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, openenv_server() as url:
        SERVED.append(url)
        figures = asyncio.run(
            measure(Path(folder), episodes=options.episodes, only=options.only, random_weights=options.scratch)
        )
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    if options.json:
        print(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures]}))
    else:
        print(shown(figures))


if __name__ == "__main__":
    main()
