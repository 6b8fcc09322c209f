"""``max_staleness = 0`` is the plain synchronous loop, number for number.

The engine serves one request at a time here: then its float arithmetic cannot depend on what happens to run side by
side, and whatever is left to differ is the loop itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from asyncrl.algorithms import grpo_advantages
from asyncrl.config import Config
from asyncrl.data import DataProto
from asyncrl.interfaces import SamplingParams
from asyncrl.plugins import load_part
from asyncrl.rollout.episode import run_episode
from asyncrl.rollout.trajectory import Trajectory, derive_seed, trajectories_to_batch
from asyncrl.tasks.run import train
from asyncrl.trainer.assembly import trainer_options
from asyncrl.trainer.run import load_renderer
from engines.rollout.transformers.engine import TransformersEngine
from engines.training.fsdp_engine import FSDPEngine


async def plain_loop(config: Config, model: str) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Generate a batch, wait for all of it, update, copy the weights, repeat. No future, buffer, pool or driver."""
    worlds = load_part("asyncrl.environments", config.env.name)()
    renderer = load_renderer(model)
    trainer = FSDPEngine(model, **trainer_options(config))
    engine = TransformersEngine(model, seed=config.seed, threads=1, **config.rollout.options)
    await engine.start()
    sampling = SamplingParams(max_new_tokens=config.rollout.max_new_tokens)

    async def episode(group_id: int, row: int) -> Trajectory:
        return await run_episode(
            engine,
            worlds.make(),
            renderer,
            worlds.task(group_id, split="train"),
            sampling=sampling,
            max_turns=config.env.max_turns,
            max_seq_len=config.rollout.max_seq_len,
            deadline_s=60,
            request_prefix=f"{group_id}-{row}",
            seed=derive_seed(derive_seed(config.seed, "train", group_id, row), 0),
        )

    rewards_by_step = []
    groups, rows = config.trainer.groups_per_step, config.trainer.group_size
    for step in range(config.steps):
        batches, rewards, owners = [], [], []
        for group_id in range(step * groups, (step + 1) * groups):
            trajectories = await asyncio.gather(*(episode(group_id, row) for row in range(rows)))
            batches.append(trajectories_to_batch(trajectories, group_id=group_id).select(meta_info_keys=[]))
            rewards += [trajectory.reward for trajectory in trajectories]
            owners += [group_id] * rows
        advantages = grpo_advantages(torch.tensor(rewards), torch.tensor(owners))
        batch = DataProto.concat(batches).union(DataProto.from_dict(tensors={"advantages": advantages}))
        trainer.update(batch)
        await engine.prepare_weights(dict(trainer.named_tensors()), version=step + 1)
        await engine.commit_weights(step + 1)
        rewards_by_step.append(rewards)
    weights = {name: tensor.clone() for name, tensor in trainer.named_tensors()}
    await engine.close()
    trainer.close()
    return rewards_by_step, weights


def test_staleness_zero_equals_the_plain_loop_bit_for_bit(small_config: Callable[..., Config], tmp_path: Path):
    config = small_config(max_staleness=0, steps=3, rollout={"options": {"max_running_requests": 1}}, seed=3)
    summary = train(config)
    (run,) = config.runs.glob("small-2*")
    exported = load_file(run / "checkpoints" / "step-000003" / "model" / "model.safetensors")

    rewards, weights = asyncio.run(plain_loop(config, str(run / "model")))
    assert summary["staleness"] == {"max": 0, "histogram": {"0": summary["tokens"]["trained"]}}
    assert summary["reward_first"] == sum(rewards[0]) / len(rewards[0])
    assert summary["reward_last"] == sum(rewards[-1]) / len(rewards[-1])
    assert len({reward for step in rewards for reward in step}) > 3, "rewards must differ, or nothing is trained"
    started = load_file(run / "model" / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, weights[name]), name
        assert not torch.equal(tensor, started[name]), f"{name} was never trained"
