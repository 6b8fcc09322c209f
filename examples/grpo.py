"""GRPO by hand: while the trainer learns from one batch, the next one is being sampled.

    python examples/grpo.py [--steps 40] [--backend local|ray]

A model of 0.1 million random weights first imitates demonstrations that use their calculator only now and then, then
learns from rewards alone to use it: the mean reward doubles, to about 0.9. Half a minute on two cores.

Every call on a worker group returns a future at once; futures are concatenated, sliced and passed on before
they are done.
"""

import argparse
import asyncio
import os
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from asyncrl.algorithms import PolicyObjective, grpo_advantages
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.interfaces import SamplingParams
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.trajectory import derive_seed, prompt_rows
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.single_controller import ClassWithInitArgs
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.trainer.sft import supervise
from asyncrl.trainer.workers import TrainerSpec, TrainerWorker
from asyncrl.weights import TransportSpec
from engines.training.scratch import make_scratch_model

PROMPTS, ROWS = 8, 8  # per step; the rows of a prompt are each other's baseline
WORLD: dict[str, Any] = {"min_operand": 1, "max_operand": 9, "operation_shares": [1.0]}
WORLD |= {"guess_share": 0.6, "misread_share": 0.0}
SIZE: dict[str, Any] = {"hidden_size": 64, "layers": 2, "intermediate_size": 192, "vocab_size": 320}
TRANSPORT = TransportSpec(name="shared_memory", namespace=f"grpo-{os.getpid()}")
TRAINER = TrainerSpec(engine="fsdp", transport=TRANSPORT)
ROLLOUT = RolloutSpec(
    engine="transformers",
    environment="calculator",
    environment_options=WORLD,
    sampling=SamplingParams(max_new_tokens=24),
    limits=EpisodeLimits(max_turns=3, max_seq_len=64),
    transport=TRANSPORT,
)


async def main(*, steps: int = 40, warm_steps: int = 150, backend: str = "local") -> list[float]:
    """Train; returns the mean reward of every step."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_group: Any = LocalWorkerGroup  # all in this process
        if backend == "ray":  # a process for each, on the bundles of one pool
            from asyncrl.single_controller.ray import RayResourcePool, RayWorkerGroup
            from asyncrl.single_controller.ray.cluster import RayCluster

            stack.enter_context(RayCluster(num_cpus=2, log_folder=folder))
            make_group = partial(RayWorkerGroup, RayResourcePool([1], max_colocate_count=2))
        trainer = await stack.enter_async_context(make_group(ClassWithInitArgs(TrainerWorker, TRAINER)))
        rollout = await stack.enter_async_context(make_group(ClassWithInitArgs(RolloutWorker, ROLLOUT)))

        # A model from scratch, which imitates demonstrations first.
        tasks, model, warm = CalculatorFactory(**WORLD), folder / "model", folder / "warm"
        make_scratch_model(model, conversations=[tasks.demonstration(row) for row in range(256)], **SIZE)
        renderer, tools = ChatRenderer(AutoTokenizer.from_pretrained(model)), tasks.make().tools
        await trainer.build(str(model), {"objective": PolicyObjective(), "lr": 3e-3, "threads": 1})
        await supervise(trainer, tasks.demonstration, renderer=renderer, tools=tools, steps=warm_steps, batch_size=32)
        await trainer.export(warm)
        await trainer.build(str(warm), {"objective": PolicyObjective(), "lr": 5e-4, "threads": 1})
        await rollout.start(str(warm), weight_version=0)

        def sample(step: int) -> DataProtoFuture:
            """Ask for the rollouts of a step; nothing is waited for."""
            groups: list[DataProtoFuture] = []
            for group_id in range(step * PROMPTS, (step + 1) * PROMPTS):
                seeds = [derive_seed(group_id, row) for row in range(ROWS)]
                prompts = prompt_rows(
                    [tasks.task(group_id, split="train")] * ROWS, group_id=group_id, seeds=seeds, purpose="train"
                )
                groups.append(rollout.rollout(prompts).select(meta_info_keys=[]))
            return DataProtoFuture.concat(groups)

        rewards: list[float] = []
        batch = sample(1)
        for step in range(1, steps + 1):
            began = time.monotonic()
            upcoming = sample(step + 1) if step < steps else batch  # sampled while the trainer works
            seen = (await batch.select(["rewards", "group_id"], [])).to_tensordict()  # the tokens stay where they are
            waited = time.monotonic() - began
            advantages = DataProto.from_dict({"advantages": grpo_advantages(seen["rewards"], seen["group_id"])})
            (metrics,) = await trainer.update(batch.union(advantages))
            (manifest,) = await trainer.publish(step)
            await rollout.prepare_weights(manifest)  # the engine goes on decoding under the old weights
            await rollout.commit_weights(step)  # from the next token on, rollouts in flight included
            await trainer.release(step - 1)  # the engine serves this one from where it lies
            rewards.append(float(seen["rewards"].mean()))
            print(
                f"step {step:2}  reward {rewards[-1]:.3f}  tokens {metrics['tokens_trained']:4.0f}  "
                f"behaviour_kl {metrics['behaviour_kl']:.4f}  waited {waited:.2f} of {time.monotonic() - began:.2f} s"
            )
            batch = upcoming
        return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    asyncio.run(main(**vars(parser.parse_args())))
