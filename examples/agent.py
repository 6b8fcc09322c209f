r"""An agent that knows nothing of training, trained over the sessions of a server.

    python examples/agent.py
    python examples/agent.py --model Qwen/Qwen2.5-0.5B-Instruct --engine vllm --python .venv-vllm/bin/python \
        --replicas 4 --games 64 --group 16 --lr 1e-6 --tokens 16

The first needs two cores, and makes its model on the spot: one run had a mean reward of 0.19 in the first round and of
0.58 in the twelfth. The second has four engines and a trainer, each on a GPU of its own, if there are five.

The agent asks a model to guess a digit, over the OpenAI address of its session, and says whether that was too low or
too high. The server captures tokens, log-probs and weight versions. A trainer learns from what was captured, and the
new weights go into replicas that never stop. The three share this process here; with `asyncrl serve --capture` and
`asyncrl pool swap` each can be a program of its own, on other machines. Any agent fits that can be given a base URL.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import torch

import asyncrl
from asyncrl.algorithms import PolicyObjective, grpo_advantages
from asyncrl.rollout.branches import unfold
from engines.training.fsdp_engine import FSDPEngine

QUESTION = "Guess a digit from 0 to 9. Answer with the digit alone."
SECRETS = (7, 8, 9)  # which the policy has to find out
MOST_TURNS = 4
TRAINED = ["input_ids", "loss_mask", "behaviour_log_probs", "branches"]


def make_model(folder: Path, *, steps: int) -> str:
    """Make a model that has seen how a game is written down, with guesses at random; return its folder."""
    dice = random.Random(0)
    talks = []
    for _ in range(256):
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": str(dice.randrange(10))}]
        for _ in range(MOST_TURNS - 1):
            messages.append({"role": "user", "content": dice.choice(["higher", "lower"])})
            messages.append({"role": "assistant", "content": str(dice.randrange(10))})
        talks.append({"messages": messages})
    taught = asyncrl.sft(
        model="scratch",
        data=talks,
        sft={"steps": steps, "batch_size": 32, "lr": 3e-3},
        runs=folder,
        cluster={"backend": "local"},
        telemetry={"progress": "none"},
    )
    return str(taught["model"])


class Agent:
    """Plays games over a server; all that it knows of it is the address and the name of the model."""

    def __init__(self, http: aiohttp.ClientSession, model: str, *, tokens: int) -> None:
        self._http = http
        self._model = model
        self._tokens = tokens

    async def play(self, secret: int, *, session: str, group: str, group_size: int) -> float:
        """Play a game in a session of its own, which the reward ends: 1, less a quarter for each wrong guess."""
        messages = [{"role": "user", "content": QUESTION}]
        reward = 0.0
        for turn in range(MOST_TURNS):
            body = {"model": self._model, "messages": messages, "max_tokens": self._tokens, "temperature": 1.0}
            answer = (await self._post(f"/sessions/{session}/v1/chat/completions", body))["choices"][0]["message"]
            guess = str(answer["content"]).strip()
            if guess == str(secret):
                reward = 1 - turn / MOST_TURNS
                break
            hint = ("higher" if int(guess) < secret else "lower") if guess in set("0123456789") else "a digit, please"
            messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": hint}]
        ended = {"reward": reward, "group": group, "group_size": group_size}
        await self._post(f"/sessions/{session}/reward", ended)
        return reward

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._http.post(path, json=body) as answer:
            answer.raise_for_status()
            return await answer.json()


def batch_of(captured: list[Path]) -> asyncrl.DataProto:
    """Return the rows of captured groups with their advantages: rewards of a group are each other's baseline."""
    groups = [asyncrl.DataProto.load_from_disk(each) for each in captured]
    rows = asyncrl.DataProto.concat([each.select([*TRAINED, "rewards"], [], []) for each in groups])
    assert rows.batch is not None
    of_group = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(each) for each in groups]))
    advantages = grpo_advantages(rows.batch["rewards"], of_group)
    return unfold(rows.select(TRAINED, [], []).with_columns(advantages=advantages)).rows  # a row for each branch


async def main(
    *,
    model: str | None = None,
    rounds: int = 12,
    games: int = 16,
    group: int = 8,
    lr: float = 1e-3,
    tokens: int = 4,
    warm_steps: int = 120,
    **serving: Any,
) -> list[float]:
    """Train over so many rounds of ``games`` secrets with ``group`` attempts each; return the mean reward of each."""
    history: list[float] = []
    dice = random.Random(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = model if model is not None else await asyncio.to_thread(make_model, folder, steps=warm_steps)
        last = torch.cuda.device_count() - 1  # replicas get the first ones
        device = "cpu" if last < 0 else f"cuda:{last}"
        trainer = await asyncio.to_thread(FSDPEngine, path, objective=PolicyObjective(), lr=lr, device=device)
        seen: set[Path] = set()
        async with (
            asyncrl.serve(path, capture=folder / "kept", **serving) as pool,
            aiohttp.ClientSession(pool.url) as http,
        ):
            agent = Agent(http, pool.state.names[0], tokens=tokens)
            for number in range(rounds):
                rewards = await asyncio.gather(
                    *(
                        agent.play(secret, session=f"{number}-{game}-{n}", group=f"{number}-{game}", group_size=group)
                        for game, secret in enumerate(dice.choices(SECRETS, k=games))
                        for n in range(group)
                    )
                )
                history.append(sum(rewards) / len(rewards))
                captured = {*(folder / "kept").glob("*.asyncrl")} - seen
                seen |= captured
                await asyncio.to_thread(trainer.update, batch_of(sorted(captured)))
                weights = folder / f"weights-{number}"
                await asyncio.to_thread(trainer.export, weights)
                version = await pool.swap(weights)
                print(f"round {number:2d}  reward {history[-1]:.3f}  weight version {version}", flush=True)
        trainer.close()
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; made on the spot without it")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--games", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tokens", type=int, default=4, help="most tokens of an answer")
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--python", help="interpreter of the engine's environment")
    parser.add_argument("--replicas", type=int, default=1)
    asyncio.run(main(**vars(parser.parse_args())))
