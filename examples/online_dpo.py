"""Online DPO by hand (arXiv:2402.04792): the policy makes its own pairs of a right and a wrong answer.

    python examples/online_dpo.py [--steps 26] [--backend local|ray]

One more method for the trainer's workers, one frozen policy more: right answers go from a half to nearly all.
"""

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from asyncrl.algorithms import NoCorrection, PolicyObjective, PreferenceObjective, answer_log_probs, preference_pairs
from asyncrl.data import DataProto, DataProtoFuture
from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.interfaces import SamplingParams
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.trajectory import derive_seed, prompt_rows
from asyncrl.rollout.worker import EpisodeLimits, RolloutSpec, RolloutWorker
from asyncrl.single_controller import ClassWithInitArgs, Dispatch, register
from asyncrl.single_controller.local import LocalWorkerGroup
from asyncrl.trainer.sft import supervise
from asyncrl.trainer.workers import TrainerSpec, TrainerWorker
from asyncrl.weights import TransportSpec
from engines.training.scratch import make_scratch_model

PROMPTS, ROWS = 8, 8  # per step; of each prompt, right answers are paired with wrong ones
DIGITS = {"min_operand": 1, "max_operand": 9}
WORLD: dict[str, Any] = {**DIGITS, "operation_shares": [1.0], "guess_share": 0.6, "misread_share": 0.0}
SIZE: dict[str, Any] = {"hidden_size": 64, "layers": 2, "intermediate_size": 192, "vocab_size": 320}
TRANSPORT = TransportSpec(name="shared_memory", namespace="online-dpo")
TRAINER, FROZEN = TrainerSpec(engine="fsdp", transport=TRANSPORT), TrainerSpec(engine="fsdp")
ROLLOUT = RolloutSpec(
    engine="transformers",
    environment="calculator",
    environment_options=WORLD,
    sampling=SamplingParams(max_new_tokens=24),
    limits=EpisodeLimits(max_turns=3, max_seq_len=64),
    transport=TRANSPORT,
)
OBJECTIVE = PolicyObjective(correction=NoCorrection(), loss_agg_mode="fixed_length", fixed_length=1)  # sums over tokens


class PreferenceTrainer(TrainerWorker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, pad=False)
    def prefer(self, pairs: DataProto) -> dict[str, float]:
        """One DPO step on rows chosen, rejected, chosen, rejected, ... with ``reference_log_probs``."""
        columns = pairs.union(self._held().log_probs(pairs)).to_tensordict()
        policy = answer_log_probs(columns["log_probs"], columns["loss_mask"])
        reference = answer_log_probs(columns["reference_log_probs"], columns["loss_mask"])
        losses = PreferenceObjective(beta=0.1).pair_losses(
            chosen_log_probs=policy[0::2],
            rejected_log_probs=policy[1::2],
            reference_chosen_log_probs=reference[0::2],
            reference_rejected_log_probs=reference[1::2],
        )
        # The gradient of the mean loss of pairs, written as advantages of two rows each.
        advantages = torch.stack([losses.advantage, -losses.advantage], dim=1).flatten() * 2
        metrics = self.update(pairs.union(DataProto.from_dict({"advantages": advantages})))
        return {**metrics, "loss": losses.loss.mean().item()}


async def main(*, steps: int = 26, warm_steps: int = 150, backend: str = "local") -> list[float]:
    """Train; returns the share of right answers of every step."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_group: Any = LocalWorkerGroup  # all in this process
        if backend == "ray":  # a process for each, on the bundles of one pool
            from asyncrl.single_controller.ray import RayResourcePool, RayWorkerGroup
            from asyncrl.single_controller.ray.cluster import RayCluster

            stack.enter_context(RayCluster(num_cpus=3, log_folder=folder))
            make_group = partial(RayWorkerGroup, RayResourcePool([1], max_colocate_count=3))
        trainer = await stack.enter_async_context(make_group(ClassWithInitArgs(PreferenceTrainer, TRAINER)))
        reference = await stack.enter_async_context(make_group(ClassWithInitArgs(TrainerWorker, FROZEN)))
        rollout = await stack.enter_async_context(make_group(ClassWithInitArgs(RolloutWorker, ROLLOUT)))
        tasks, model, warm = CalculatorFactory(**WORLD), folder / "model", folder / "warm"
        make_scratch_model(model, conversations=[tasks.demonstration(row) for row in range(256)], **SIZE)
        renderer, tools = ChatRenderer(AutoTokenizer.from_pretrained(model)), tasks.make().tools
        await trainer.build(str(model), {"objective": OBJECTIVE, "lr": 3e-3, "threads": 1})
        await supervise(trainer, tasks.demonstration, renderer=renderer, tools=tools, steps=warm_steps, batch_size=32)
        await trainer.export(warm)
        await trainer.build(str(warm), {"objective": OBJECTIVE, "lr": 6e-4, "threads": 1})
        await reference.build(str(warm), {"objective": OBJECTIVE, "lr": 0.0, "threads": 1})
        await rollout.start(str(warm), weight_version=0)
        version, shares = 0, list[float]()
        for step in range(1, steps + 1):
            groups: list[DataProtoFuture] = []
            for group_id in range(step * PROMPTS, (step + 1) * PROMPTS):
                seeds = [derive_seed(group_id, row) for row in range(ROWS)]
                prompts = prompt_rows(
                    [tasks.task(group_id, split="train")] * ROWS, group_id=group_id, seeds=seeds, purpose="train"
                )
                groups.append(rollout.rollout(prompts).select(meta_info_keys=[]))
            batch = DataProtoFuture.concat(groups)
            seen = (await batch.select(["rewards", "group_id"], [])).to_tensordict()  # the tokens stay where they are
            shares.append(float(seen["rewards"].mean()))
            compared = preference_pairs(seen["rewards"], seen["group_id"])
            print(f"step {step:2}  right {shares[-1]:.3f}  pairs {len(compared) // 2:2}")
            if len(compared) == 0:
                continue
            pairs = batch.select_idxs(compared)
            await trainer.prefer(pairs.union(reference.reference_log_probs(pairs)))
            version += 1
            (manifest,) = await trainer.publish(version)
            await rollout.prepare_weights(manifest)
            await rollout.commit_weights(version)
            await trainer.release(version - 1)  # the engine serves this one from where it lies
        return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    asyncio.run(main(**vars(parser.parse_args())))
