"""The examples run, at their smallest and as they stand."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from asyncrl.algorithms import PreferenceObjective
from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["grpo", "online_dpo"])
async def test_it_runs_at_its_smallest(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = await load(name).main(steps=2, warm_steps=12)
    assert len(rewards) == 2
    assert all(0.0 <= reward <= 1.0 for reward in rewards)
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(steps) == 2
    assert not list(Path("/dev/shm").glob(f"asyncrl.*-{os.getpid()}.*"))


@pytest.mark.slow
def test_a_recording_answers_questions_about_corrections(capsys: pytest.CaptureFixture[str]) -> None:
    norms = load("replay").main(steps=6, warm_steps=20)
    assert list(norms) == ["none", "tis", "mis", "icepop"]
    assert all(norm > 0 for norm in norms.values())
    told = capsys.readouterr().out
    assert "the same weights, bit for bit" in told
    assert "tis     mean" in told
    assert "left the recorded weights never" in told  # tis is what the run itself had used


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "online_dpo"])
async def test_it_learns(name: str) -> None:
    rewards = await load(name).main()
    assert sum(rewards[:3]) / 3 < 0.6
    assert sum(rewards[-5:]) / 5 > 0.8


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", ["grpo", "online_dpo"])
def test_it_runs_on_ray_as_the_command_says(name: str) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--steps", "1", "--backend", "ray"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "step  1" in done.stdout


def test_one_preference_step_is_the_gradient_of_dpo(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    example = load("online_dpo")
    folder = str(tmp_path / "model")
    tasks = example.CalculatorFactory(**example.WORLD)
    example.make_scratch_model(
        tmp_path / "model", conversations=[tasks.demonstration(row) for row in range(32)], **example.SIZE
    )
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(300, (length,), generator=generator) for length in (7, 9, 5, 12)]
    masks = [torch.arange(len(row)) >= 3 for row in rows]
    reference = [-6.0 - torch.rand(len(row), generator=generator) for row in rows]

    # The plain way: one graph through both answers of every pair.
    model = AutoModelForCausalLM.from_pretrained(folder)
    sums = []
    for row, mask in zip(rows, masks, strict=True):
        log_probs = model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None]).squeeze(1)
        sums.append(log_probs[mask[1:]].sum())
    policy = torch.stack(sums)
    frozen = torch.stack([row[mask].sum() for row, mask in zip(reference, masks, strict=True)])
    loss = PreferenceObjective(beta=0.1).pair_losses(
        chosen_log_probs=policy[0::2],
        rejected_log_probs=policy[1::2],
        reference_chosen_log_probs=frozen[0::2],
        reference_rejected_log_probs=frozen[1::2],
    )
    loss.loss.mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()

    trainer = example.PreferenceTrainer(example.TRAINER)
    try:
        trainer.build(folder, {"objective": example.OBJECTIVE, "lr": 1e-3, "threads": 1, "device": "cpu"})
        pairs = DataProto.from_dict(
            tensors={
                "input_ids": rows,
                "loss_mask": masks,
                "behaviour_log_probs": [torch.zeros(len(row)) for row in rows],
                "reference_log_probs": reference,
            }
        )
        metrics = trainer.prefer(pairs)
    finally:
        trainer.close()
    assert metrics["loss"] == pytest.approx(loss.loss.mean().item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.slow
def test_the_way_through_a_reward_model_runs_at_its_smallest() -> None:
    found = load("ppo_with_reward_model").main(steps=2, warm_steps=20, comparisons=64)
    assert found.keys() == {"judge", "before", "after"}
    assert all(0.0 <= share <= 1.0 for share in found.values())


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_agent_over_sessions_runs_at_its_smallest(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = await load("agent").main(rounds=2, games=2, group=2, warm_steps=40)
    assert len(rewards) == 2
    assert all(0.0 <= reward <= 1.0 for reward in rewards)
    assert "weight version 2" in capsys.readouterr().out


def test_an_agent_is_trained_on_each_branch_of_a_captured_tree(tmp_path: Path) -> None:
    group = DataProto.from_dict(
        tensors={
            "input_ids": [torch.tensor([7, 1, 8, 2, 9, 3]), torch.tensor([7, 4])],
            "loss_mask": [torch.tensor([False, True] * 3), torch.tensor([False, True])],
            "behaviour_log_probs": [torch.zeros(6), torch.zeros(2)],
            # The second and the third turn both go on from the first; the other row is a line.
            "branches": [torch.tensor([0, 2, -1, 2, 4, 0, 4, 6, 0]), torch.tensor([], dtype=torch.int64)],
            "rewards": torch.tensor([1.0, 0.0]),
        }
    )
    group.save_to_disk(tmp_path / "group")
    rows = load("agent").batch_of([tmp_path / "group"]).batch
    assert [row.tolist() for row in rows_of(rows["input_ids"])] == [[7, 1, 8, 2], [7, 1, 9, 3], [7, 4]]
    masked = zip(rows_of(rows["input_ids"]), rows_of(rows["loss_mask"]), strict=True)
    trained = [ids[mask].tolist() for ids, mask in masked]
    assert trained == [[1, 2], [3], [4]]
    first, second, other = rows["advantages"].tolist()
    assert first == second > 0 > other


@pytest.mark.slow
def test_supervision_then_reinforcement_runs_at_its_smallest() -> None:
    before, after = load("sft_then_rl").main(steps=2, warm_steps=20)
    assert 0.0 <= before <= 1.0
    assert 0.0 <= after <= 1.0
