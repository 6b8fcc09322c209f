r"""Agents that others wrote, against sessions: is every token that they got captured, once, as it was sampled?

    python benchmarks/agents.py --sessions 10000                       # many small sessions
    python benchmarks/agents.py --harnesses FOLDER                     # and whole harnesses, no line changed

FOLDER has for each harness a folder of its name with what its package manager installed: a venv (openai-agents,
pydantic-ai, langgraph, smolagents, autogen, crewai, dspy, mini-swe-agent) or node_modules (claude-code, codex,
qwen-code, opencode). Each runs through the environment ``command`` with an engine that calls a tool twenty times before
it answers. Nothing leaves this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch

from asyncrl.algorithms import PolicyObjective
from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.envs.command import CommandFactory
from asyncrl.errors import EnvironmentFailure
from asyncrl.interfaces import GenerationChunk, GenerationRequest, SamplingParams
from asyncrl.rollout.branches import unfold
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import EpisodePolicy, run_agent_episode
from asyncrl.rollout.trajectory import Trajectory, Turn, trajectories_to_batch
from asyncrl.serve.agents import AgentSession
from asyncrl.testing import ScriptedEngine
from engines.training.scratch import make_scratch_tokenizer

TURNS = 20
PROGRAMS = Path(__file__).with_name("harness_programs.py")


class Scripted(ScriptedEngine):
    """Says what ``said`` makes of a prompt's text and of the number of its turn, and keeps what was sampled."""

    def __init__(self, renderer: ChatRenderer, said: Callable[[str, int], str]) -> None:
        self._renderer = renderer
        self._said = said
        self._turns: Counter[str] = Counter()
        self._turn = 0
        self.sampled: dict[str, dict[str, list[int]]] = {}
        super().__init__(self._ids, context_tokens=1 << 22)

    def _ids(self, prompt: tuple[int, ...]) -> list[int]:
        return self._renderer.encode(self._said(self._renderer.decode(prompt[-200:]), self._turn) + "<|end|>")

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        episode, _, _ = request.request_id.rpartition("-")
        self._turn = self._turns[episode]
        self._turns[episode] += 1
        kept: list[int] = []
        async for chunk in super().generate(request):
            kept += chunk.token_ids
            if chunk.finish_reason:
                self.sampled.setdefault(episode, {})[request.request_id] = kept
            yield chunk


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(slots=True)
class Counts:
    """Sampled turns that a trajectory lacks or has twice, and tokens that differ from those sampled."""

    sessions: int = 0
    turns: int = 0
    lost: int = 0
    doubled: int = 0
    drift: int = 0
    conversations: int = 0
    errors: list[str] = field(default_factory=list)

    def compare(self, trajectory: Trajectory, sampled: dict[str, list[int]]) -> None:
        self.sessions += 1
        self.turns += len(sampled)
        captured = Counter(trajectory.token_ids[turn.start : turn.end] for turn in trajectory.turns)
        wanted = Counter(tuple(ids) for ids in sampled.values())
        self.lost += (wanted - captured).total()
        self.doubled += (captured - wanted).total()
        trained = Counter(token for token, mine in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if mine)
        of_engine = Counter(token for ids in sampled.values() for token in ids)
        self.drift += ((trained - of_engine) + (of_engine - trained)).total()
        self.conversations += trajectory.info.get("conversations", 0)


def policy_of(engine: ScriptedEngine, renderer: ChatRenderer, name: str, *, max_turns: int) -> EpisodePolicy:
    return EpisodePolicy(
        engine=engine,
        renderer=renderer,
        sampling=SamplingParams(max_new_tokens=4096),
        max_turns=max_turns,
        max_seq_len=1 << 21,
        request_prefix=name,
        seed=0,
    )


# ------------------------------------------------------------------------------------------------ many small sessions


async def small_session(http: aiohttp.ClientSession, url: str, dice: random.Random) -> None:
    """Ask in one of four APIs, streamed or not; go on, go back, begin anew, ask for several samples."""
    api = dice.choice(["chat", "chat", "responses", "messages", "completions"])
    stream = dice.random() < 0.4
    said: list[dict[str, Any]] = [{"role": "user", "content": f"question {dice.random()}"}]
    for _ in range(dice.randrange(2, 7)):
        if api == "completions":
            await ask(http, f"{url}/v1/completions", {"prompt": said[0]["content"], "stream": stream})
            continue
        path = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}[api]
        body: dict[str, Any] = {"stream": stream, "input" if api == "responses" else "messages": said}
        if api == "chat" and dice.random() < 0.2:
            body["n"] = 2
        if api == "messages":
            body["max_tokens"] = 64
        answer = await ask(http, f"{url}/v1/{path}", body)
        move = dice.random()
        if move < 0.1 and len(said) > 2:
            said = said[:-2]
        elif move < 0.2:
            said = [{"role": "user", "content": f"in short: {dice.random()}"}]
        else:
            said = [*said, {"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]


async def ask(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    """Return the text of the answer's first choice, put together if it is a stream."""
    async with http.post(url, json={"model": "any", **body}) as answer:
        answer.raise_for_status()
        if not body["stream"]:
            return text_of(await answer.json())
        text = ""
        async for line in answer.content:
            if line.startswith(b"data:") and line.strip() != b"data: [DONE]":
                event = json.loads(line[5:])
                for choice in event.get("choices", []):
                    if choice["index"] == 0:
                        text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if event.get("type") in ("response.output_text.delta", "content_block_delta"):
                    text += event["delta"] if isinstance(event["delta"], str) else event["delta"].get("text", "")
        return text


def text_of(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    parts = answer["output"][-1]["content"] if "output" in answer else answer["content"]
    return "".join(part["text"] for part in parts)


async def many(renderer: ChatRenderer, *, sessions: int, at_once: int) -> tuple[Counts, float]:
    engine = Scripted(renderer, lambda text, turn: f"answer {turn} of {hash(text) % 1000}")
    await engine.start()
    counts, dice = Counts(), random.Random(0)
    places = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as http:

        async def one(number: int, own: random.Random) -> None:
            async with places:
                name = f"s{number}"
                async with AgentSession(policy_of(engine, renderer, name, max_turns=64)) as session:
                    await small_session(http, session.url, own)
                counts.compare(session.trajectory({}, reward=0.0, info={}), engine.sampled.pop(name))

        begin = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(sessions):
                tasks.create_task(one(number, random.Random(dice.random())))
        return counts, time.perf_counter() - begin


# --------------------------------------------------------------------------------------------------- whole harnesses


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """A harness: its command in its folder, and what the model says to use a tool, and at the end."""

    name: str
    command: Sequence[str]
    tool: Callable[[int], str] = lambda turn: call("calculator", a=turn, b=1)
    final: str = "It is 42."
    env: dict[str, str] = field(default_factory=dict)


def shell(name: str, **more: Any) -> Callable[[int], str]:
    return lambda turn: call(name, command=f"echo {turn}", **more)


def harnesses(folder: Path) -> list[Harness]:
    def sdk(name: str, function: str = "", **fields: Any) -> Harness:
        of = name.removesuffix("-chat")
        function = function or name.replace("-", "_")
        return Harness(
            name=name, command=[str(folder / of / "bin/python"), "-P", str(PROGRAMS), function, "{task}"], **fields
        )

    def node(name: str, program: str, *arguments: str, **fields: Any) -> Harness:
        return Harness(name=name, command=[str(folder / name / "node_modules/.bin" / program), *arguments], **fields)

    react = "[[ ## next_thought ## ]]\nadd\n\n[[ ## next_tool_name ## ]]\n{}\n\n[[ ## next_tool_args ## ]]\n{}\n\n"
    thoughts = react + "[[ ## reasoning ## ]]\nadded\n\n[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]"
    provider = 'model_providers.own={name="own",base_url="{base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}'
    opencode = {
        "provider": {
            "own": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
                "models": {"policy": {"name": "policy", "tool_call": True}},
            }
        },
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "allow"},
    }
    quiet = {"DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    litellm = {
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    found = [
        sdk("openai-agents"),
        sdk("openai-agents-chat"),
        sdk("pydantic-ai"),
        sdk("langgraph"),
        sdk("smolagents", final=call("final_answer", answer="42")),
        sdk("autogen"),
        sdk("crewai", env={"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true"}, final="Final Answer: 42"),
        sdk(
            "dspy",
            tool=lambda turn: thoughts.format("calculator", json.dumps({"a": turn, "b": 1})),
            final=thoughts.format("finish", "{}"),
            env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        ),
        Harness(
            name="mini-swe-agent",
            command=[
                str(folder / "mini-swe-agent/bin/mini"),
                *("-m", "openai/gpt-4o", "-t", "{task}", "-y", "--exit-immediately"),
            ],
            tool=shell("bash"),
            final=call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            env=litellm,
        ),
        node(
            "claude-code",
            "claude",
            *("-p", "{task}", "--model", "policy", "--allowedTools", "Bash"),
            tool=shell("Bash", description="Print a number"),
            env=quiet,
        ),
        node(
            "codex",
            "codex",
            *("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "gpt-5"),
            *("-c", "model_provider=own", "-c", provider, "{task}"),
            tool=lambda turn: call("exec_command", cmd=f"echo {turn}"),
        ),
        node(
            "qwen-code",
            "qwen",
            *("-p", "{task}", "--yolo", "--auth-type", "openai", "-m", "policy"),
            tool=shell("run_shell_command", is_background=False),
        ),
        node(
            "opencode",
            "opencode",
            *("run", "-m", "own/policy", "{task}"),
            tool=shell("bash", description="Print a number"),
            env={"OPENCODE_CONFIG_CONTENT": json.dumps(opencode)},
        ),
    ]
    return [each for each in found if Path(each.command[0]).exists()]


async def run_harness(harness: Harness, renderer: ChatRenderer, counts: Counts, *, deadline_s: float) -> dict[str, Any]:
    """Run one session of a harness; return what became of it."""
    engine = Scripted(renderer, lambda text, turn: harness.tool(turn) if turn < TURNS else harness.final)
    await engine.start()
    factory = CommandFactory(
        command=harness.command, tasks="calculator", env=harness.env, deadline_s=deadline_s, reward="exit_status"
    )
    policy = policy_of(engine, renderer, harness.name, max_turns=3 * TURNS)
    begin = time.perf_counter()
    try:
        trajectory = await run_agent_episode(factory.make(), factory.task(0, split="train"), policy, deadline_s=30.0)
    except EnvironmentFailure as failure:
        return {"works": False, "turns": len(engine.sampled.get(harness.name, {})), "why": str(failure)[-600:]}
    before = (counts.lost, counts.doubled, counts.drift)
    counts.compare(trajectory, engine.sampled[harness.name])
    exact = before == (counts.lost, counts.doubled, counts.drift)
    return {
        "works": exact and trajectory.reward == 1.0 and len(trajectory.turns) >= TURNS,
        "turns": len(trajectory.turns),
        "seconds": round(time.perf_counter() - begin, 1),
        **{name: trajectory.info[name] for name in ("branches", "conversations", "exit_status")},
    }


# ------------------------------------------------------------------------------------------------------------- a tree


def trees(vocabulary: int, *, rows: int = 2) -> list[Trajectory]:
    """An agent that has two sub-agents and compacts its context, all with one system message of 512 tokens."""
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    system, found = tokens(512), []
    for _ in range(rows):
        ids: list[int] = []
        mask: list[bool] = []
        turns: list[Turn] = []
        for parent in (-1, -1, -1, 2, 0, -1, 5):  # asks; two sub-agents, the second twice; answers; goes on, compacted
            appended = tokens(24) if parent >= 0 else system + tokens(24)
            sampled = tokens(32)
            ids += appended + sampled
            mask += [False] * len(appended) + [True] * len(sampled)
            place = {"start": len(ids) - len(sampled), "end": len(ids)}
            turns.append(Turn(**place, finish_reason="stop", message={"role": "assistant"}, parent=parent))
        found.append(
            Trajectory(
                task={},
                token_ids=tuple(ids),
                loss_mask=tuple(mask),
                behaviour_log_probs=tuple(-10.0 * mine for mine in mask),
                weight_versions=tuple(0 if mine else -1 for mine in mask),
                reward=draw.random(),
                turns=tuple(turns),
                finish_reason="done",
            )
        )
    return found


def tree_time(*, rounds: int) -> dict[str, Any]:
    """Seconds of an update on trees whose branches share prefixes, over one on the same branches apart."""
    from trainer import MODELS, interleaved
    from transformers import AutoModelForCausalLM

    from engines.training.fsdp_engine import FSDPEngine

    torch.set_num_threads(1)
    config = MODELS["0.5m"]
    batch = unfold(trajectories_to_batch(trees(config.vocab_size), group_id=0)).rows
    batch = batch.select(["input_ids", "loss_mask", "behaviour_log_probs"]).with_columns(
        advantages=torch.linspace(-1, 1, len(batch))
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        engines = [FSDPEngine(folder, objective=PolicyObjective(), lr=1e-6, device="cpu", threads=1) for _ in range(2)]
        engines[1]._passes._cost = None  # by which the engine decides what to share
        calls = [lambda each=each: bool(each.update(batch)) for each in engines]
        shared_s, apart_s = interleaved(*calls, rounds=rounds, device="cpu", threads=1)
        for each in engines:
            each.close()
    made = figure("tree_time", shared_s / apart_s, "of the branches apart", most=0.5)
    return made | {"floor": apart_s, "ratio": shared_s / apart_s}


async def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    factory = CalculatorFactory()
    renderer = ChatRenderer(make_scratch_tokenizer([factory.demonstration(index) for index in range(100)]))
    before = psutil.Process().num_fds()
    counts, took_s = await many(renderer, sessions=arguments.sessions, at_once=64)
    print(f"{counts.sessions} sessions, {counts.turns} turns in {took_s:.1f} s", file=sys.stderr)
    works = 0
    if arguments.harnesses is not None:
        for harness in harnesses(arguments.harnesses):
            if arguments.only and harness.name not in arguments.only:
                continue
            outcome = await run_harness(harness, renderer, counts, deadline_s=arguments.deadline_s)
            works += outcome["works"]
            print(f"{harness.name}: {outcome}", file=sys.stderr, flush=True)
    gc.collect()
    left = len(psutil.Process().children(recursive=True)) + max(psutil.Process().num_fds() - before, 0)
    figures = [
        figure("drift_tokens", counts.drift, "tokens", most=0),
        figure("captured_lost", counts.lost, "turns", most=0),
        figure("captured_doubled", counts.doubled, "turns", most=0),
        figure("leaked_processes", left, "processes and files", most=0),
        figure("session_time", took_s / max(arguments.sessions, 1) * 1e3, "ms"),
    ]
    if arguments.harnesses is not None:
        figures.append(figure("harnesses", works, "work", least=8))
    return figures


def figure(
    name: str, value: float, unit: str, *, most: float | None = None, least: float | None = None
) -> dict[str, Any]:
    goal = None if most is None and least is None else f"at most {most}" if least is None else f"at least {least}"
    holds = None if goal is None else (most is None or value <= most) and (least is None or value >= least)
    return {"name": name, "value": value, "unit": unit, "floor": None, "ratio": None, "goal": goal, "holds": holds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5, help="of updates on trees")
    parser.add_argument("--harnesses", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    parser.add_argument("--deadline-s", type=float, default=240.0)
    given = parser.parse_args()
    figures = [*asyncio.run(measure(given)), tree_time(rounds=given.rounds)]
    if given.json:
        print(json.dumps({"machine": {"cores": os.cpu_count(), "machine": platform.machine()}, "figures": figures}))
        return
    for each in figures:
        goal = (
            "" if each["goal"] is None else f"  goal: {each['goal']}: {'holds' if each['holds'] else 'does not hold'}"
        )
        print(f"{each['name']:<24} {each['value']:10.2f} {each['unit']}{goal}")


if __name__ == "__main__":
    main()
