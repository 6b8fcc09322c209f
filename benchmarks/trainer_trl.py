"""TRL's GRPOTrainer on given rows: one update for each line on stdin; ``benchmarks/trainer.py`` starts it.

    python benchmarks/trainer_trl.py FOLDER PROMPT_TOKENS THREADS

FOLDER holds a model and ``rows.safetensors``: packed ``input_ids``, their ``offsets``, ``advantages``, and where each
micro-batch ends (``cuts``). It runs in an environment of its own, so it imports nothing of this repository.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast


def main() -> None:
    folder, prompt, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    rows = load_file(folder / "rows.safetensors")
    ids = list(rows["input_ids"].split(rows["offsets"].diff().tolist()))
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    with tempfile.TemporaryDirectory() as output:
        settings = trl.GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            learning_rate=1e-3,
            beta=0.0,
            loss_type="dapo",
            report_to=[],
            num_generations=2,
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
        )
        trainer = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["x"] * 8}),
            processing_class=tokenizer,
        )
    optimizer = trainer.create_optimizer()
    total = torch.tensor(sum(len(row) - prompt for row in ids))
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation
    model = trainer.model.train()
    clock = time.process_time if threads == 1 else time.perf_counter

    def update() -> float:
        started = clock()
        begin = 0
        for end in rows["cuts"].tolist():
            part = ids[begin:end]
            completions = pad_sequence([row[prompt:] for row in part], batch_first=True)
            lengths = torch.tensor([len(row) - prompt for row in part])
            prompts = torch.stack([row[:prompt] for row in part])
            loss = trainer._compute_loss(
                model,
                {
                    "prompt_ids": prompts,
                    "prompt_mask": torch.ones_like(prompts),
                    "completion_ids": completions,
                    "completion_mask": (torch.arange(completions.shape[1]) < lengths[:, None]).long(),
                    "advantages": rows["advantages"][begin:end],
                    "num_items_in_batch": total,
                },
            )
            loss.backward()
            begin = end
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return clock() - started

    print("ready", trl.__version__, flush=True)
    for _ in sys.stdin:
        print("took", update(), flush=True)


if __name__ == "__main__":
    main()
