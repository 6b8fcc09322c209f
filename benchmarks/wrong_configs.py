"""Wrong configurations, drawn from mistakes that users make: each is refused by ``--dry-run``, soon and in words.

    python benchmarks/wrong_configs.py [--cases 300] [--seed 0] [--json]

Each case changes a configuration that is right (a model from scratch on the calculator, or on rows of a file) by one
mistake of a table: keys, types, values, paths, packages, sizes, pairs of options that exclude each other, user code,
data and TOML. ``asyncrl train FILE --dry-run`` has to end with status 2 and one error, without a traceback, within 3 s
of its own processor time; nothing is loaded from a network. Exits 1 if there is a traceback, or if less than 95 % are
answered. Cases that are not answered are printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from asyncrl.config.toml import table_to_toml

LIMIT_S = 3.0
LEAST_SHARE = 0.95

CALCULATOR: dict[str, Any] = {
    "name": "first",
    "steps": 10,
    "model": {"source": "scratch", "options": {"hidden_size": 64, "layers": 2}},
    "env": {"name": "calculator", "options": {"max_operand": 99}},
    "rollout": {"max_new_tokens": 32, "max_seq_len": 256},
    "trainer": {"groups_per_step": 4, "group_size": 4, "lr": 1e-4},
    "algorithm": {"advantage": "grpo"},
    "eval": {"tasks": 4},
}
ROWS: dict[str, Any] = {
    **CALCULATOR,
    "env": {
        "name": "dataset",
        "options": {
            "files": "rows.jsonl",
            "held_out": "held.jsonl",
            "reward": "exact",
            "demonstrations": "chats.jsonl",
        },
    },
}

Settings: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A wrong file: what was done to it, and its text."""

    mistake: str
    content: bytes


def changed(base: Settings, settings: Settings) -> Settings:
    """Return the tables with values at dotted keys; None removes a key."""
    tables = deepcopy(base)
    for key, value in settings.items():
        *path, last = key.split(".")
        table = tables
        for name in path:
            table = table.setdefault(name, {})
        if value is None:
            table.pop(last, None)
        else:
            table[last] = value
    return tables


# ------------------------------------------------------------------------------------------------ the table of mistakes

KEYS = (
    *("steps", "seed", "max_staleness", "trainer.lr", "trainer.group_size", "trainer.groups_per_step", "rollout.top_p"),
    *("rollout.max_new_tokens", "rollout.temperature", "rollout.replicas", "algorithm.advantage", "algorithm.kl_coef"),
    *("algorithm.loss", "eval.tasks", "checkpoint.every", "model.source", "env.max_turns", "buffer.capacity_groups"),
    *("ledger.kind", "sft.batch_size", "telemetry.progress", "cluster.backend", "weights.transport"),
)
TYPES: Settings = {
    "steps": ["10", 2.5, True, [10]],
    "trainer.lr": ["1e-4", True, "fast", [1e-4]],
    "trainer.group_size": ["8", 8.0, {"size": 8}],
    "rollout.temperature": ["hot", True],
    "rollout.stop": [3, {"text": "x"}, [1, 2]],
    "model": ["scratch", ["scratch"], 3],
    "env.options": ["digits", 3],
    "eval.on_start": ["yes", 1],
    "trainer.gradient_checkpointing": ["true", 1],
    "algorithm.whiten_advantages": ["no", 0],
    "telemetry.trackers": [{"tensorboard": True}, 3],
    "name": [3, ["first"], "two words", "a/b", ""],
    "trainer.lora": [8, "8", {"rank": "8"}, {"alpha": 8}],
}
RANGES: Settings = {
    "steps": [-1, 10**9],
    "seed": [-1, 2**40],
    "trainer.lr": [0, -1e-4, 3.0],
    "rollout.temperature": [-1, 0.0, 1e-9, 1000],
    "rollout.top_p": [0, 1.5],
    "rollout.max_new_tokens": [0, -5],
    "trainer.group_size": [0, -8],
    "trainer.world_size": [0],
    "env.deadline_s": [0, -1],
    "algorithm.kl_coef": [-0.1, 1000],
    "trainer.weight_decay": [2],
    "eval.tasks": [-1],
    "critic.gae_lambda": [1.2],
}
CHOICES: Settings = {
    "algorithm.loss": ["gpo", "grpo", "PPO", "ppo_clip"],
    "algorithm.advantage": ["grop", "GRPO", "reinforce++", "gea"],
    "algorithm.correction": ["tiss", "is", "truncated"],
    "algorithm.anchor": ["behavior", "old"],
    "algorithm.kl_estimator": ["k4", "kl"],
    "algorithm.loss_agg_mode": ["token-mean", "seq-mean-token-sum"],
    "staleness.policy": ["masked", "none", "discard"],
    "model.dtype": ["fp16", "bf16", "float16", "auto"],
    "cluster.backend": ["slurm", "Ray", "multiprocessing"],
    "cluster.colocate": [["rollout"], ["actor"], "trainer"],
    "trainer.lr_scheduler_type": ["cosin", "constant_with_warmup"],
    "telemetry.progress": ["verbose", "tqdm"],
    "buffer.kind": ["fifo", "reply"],
    "buffer.selection": ["lifo", "windowed"],
    "weights.transport": ["nccl", "sharedmemory"],
    "ledger.kind": ["sqlite3", "json"],
    "rollout.engine": ["vlm", "hf", "trt", "VLLM"],
    "trainer.engine": ["deepspeed", "fsdp2", "megatron"],
    "env.name": ["calculater", "gym", "math"],
    "reward.source": ["functon", "reward_model", "none"],
    "model.source": ["huggingface", "scrach", "random"],
    "telemetry.trackers": [["wandbb"], ["mlflow"]],
}
MISPLACED: Settings = {
    "lr": 1e-4,
    "group_size": 8,
    "batch_size": 32,
    "temperature": 1.0,
    "learning_rate": 1e-4,
    "trainer.temperature": 1.0,
    "rollout.lr": 1e-3,
    "algorithm.gamma": 0.9,
    "trainer.num_generations": 8,
    "rollout.n": 8,
    "model.name": "gpt2",
    "trainer.epoch": 2,
    "eval.interval": 10,
    "rollout.max_tokens": 64,
}
MODELS = """
    /absent/model ./absent ../absent/model ~/absent empty no_weights no_tokenizer broken_json
    unknown_type torn rows.jsonl HuggingFaceTB/SmolLM2-135M-Instruct Qwen/Qwen3-0.6B gpt2 tiny.gguf
    gguf:absent.gguf gguf:no_such_package gguf:rows.jsonl gguf:tiny.gguf a/b/c https://hf.co/x/y
"""
ENVIRONMENTS = """
    my_env.py:Factory my_env.Factory my_env:factory my_env:Missing my_enf:Factory my_env: :Factory
    my_env:Factory() ./my_env.py:Factory my_broken:Factory my_syntax:Factory my_missing:Factory
    my_env:NUMBER my_env:NoMake my_env:NeedsOptions my_env:RaisesInInit my_env:RaisesInTask
    my_env:returns_none my_exits:Factory
"""
FUNCTIONS = """
    my_rewards:missing my_rewards.score my_rewardz:score my_rewards.py:scored absent.py:score
    my_rewards:NUMBER my_rewards:wrong_arguments my_rewards:positional my_broken:score
    my_syntax.py:score my_rewards
"""
PATHS: tuple[Settings, ...] = (
    *({"model.source": None, "model.options": None, "model.path": path} for path in MODELS.split()),
    {"model.source": "gguf:absent.gguf", "model.options": None},
    {"model.source": "gguf", "model.options": {"path": "x.gguf"}},
    {"model.source": "gguf", "model.options": None},
    {"model.path": "/absent"},
    {"model.source": None, "model.options": None},
    {"algorithm.advantage": "gae", "critic.path": "/absent/critic"},
    {"model.chat_template": "absent.jinja"},
    {"model.source": None, "model.options": None, "model.path": "bad_tokenizer"},
    {"sft.steps": 5, "sft.data": "absent.jsonl"},
    {"sft.steps": 5, "sft.data": "rows.txt"},
    {"sft.steps": 5, "sft.data": "rows.jsonl"},
    {"rollout.python": "absent/bin/python"},
    {"rollout.python": "rows.jsonl", "rollout.engine": "vllm"},
    {"runs": "rows.jsonl"},
    {"runs": "rows.jsonl/runs"},
    {"runs": "~nobody-here/runs"},
)
PACKAGES: tuple[tuple[str, Settings], ...] = (
    ("vllm", {"rollout.engine": "vllm"}),
    ("sglang", {"rollout.engine": "sglang"}),
    ("wandb", {"telemetry.trackers": ["wandb"]}),
    ("trackio", {"telemetry.trackers": ["trackio"]}),
    ("tensorboard", {"telemetry.trackers": ["tensorboard"]}),
    ("tensorboard", {"telemetry.trackers": "tensorboard"}),
    ("peft", {"trainer.lora": {"rank": 8}}),
    ("reasoning_gym", {"env.name": "reasoning_gym", "env.options": {"dataset": "chain_sum"}}),
    ("my_package", {"env.name": "my_package.envs:Factory"}),
    ("my_package", {"rollout.engine": "my_package:Engine"}),
    ("my_package", {"algorithm.loss": "my_package.losses:Mine"}),
)
SIZES: tuple[Settings, ...] = (
    {"trainer.world_size": 64},
    {"trainer.world_size": 2048},
    {"rollout.replicas": 500},
    {"rollout.num_cpus": 8.0, "rollout.replicas": 8},
    {"cluster.num_cpus": 1.0},
    {"cluster.backend": "local", "trainer.world_size": 2},
    {"cluster.backend": "local", "cluster.num_cpus": 4.0},
    {"cluster.address": "auto", "cluster.num_cpus": 4.0},
    {"rollout.num_gpus": 1.0},
    {"trainer.num_gpus": 1.0, "trainer.world_size": 8},
    {"rollout.options": {"device": "cuda"}},
    {"trainer.options": {"device": "cuda:0"}},
    {"rollout.max_seq_len": 4096},
    {"rollout.max_seq_len": 8192, "trainer.max_tokens_per_microbatch": 16_384},
    {"rollout.max_seq_len": 200_000, "trainer.max_tokens_per_microbatch": 200_000},
    {"rollout.max_new_tokens": 256},
    {"rollout.max_new_tokens": 4096},
    {"model.options": {"max_position": 64}},
    {"model.options": {"hidden_size": 100, "heads": 3}},
    {"model.options": {"hidden_size": 64, "heads": 7}},
    {"model.options": {"vocab_size": 100}},
    {"model.options": {"architecture": "gpt5"}},
    {"trainer.num_mini_batches": 3},
    {"buffer.capacity_groups": 2},
    {"trainer.max_tokens_per_microbatch": 128},
    {"trainer.warmup_steps": 1000},
    {"rollout.options": {"max_model_tokens": 64}},
    {"rollout.options": {"max_running_requests": 0}},
    {"cluster.colocate": ["trainer", "critic"], "trainer.world_size": 2, "algorithm.advantage": "gae"},
)
PAIRS: tuple[Settings, ...] = (
    {"trainer.group_size": 1},
    {"algorithm.advantage": "rloo", "trainer.group_size": 1},
    {"algorithm.advantage": "pass_at_k", "algorithm.advantage_options": {"k": 99}},
    {"algorithm.correction": "none"},
    {"algorithm.anchor": "behaviour"},
    {"algorithm.loss": "topr"},
    {"algorithm.loss": "kl_cov"},
    {"algorithm.kl_coef": 0.1, "algorithm.kl_estimator": "k1"},
    {"algorithm.kl_coef": 0.1, "algorithm.kl_placement": "reward", "algorithm.kl_estimator": "k3"},
    {"algorithm.target_kl": 0.1},
    {"algorithm.advantage": "online_dpo", "algorithm.loss_agg_mode": "sequence_mean"},
    {"rollout.temperature": 0.0},
    {"max_staleness": 8, "algorithm.anchor": "behaviour", "algorithm.correction": "none"},
    {"buffer.options": {"max_uses": 2}, "algorithm.kl_coef": 0.1, "algorithm.kl_placement": "reward"},
    {"buffer.options": {"max_uses": 2}, "algorithm.advantage": "remax"},
    {"model.path": "tiny", "model.source": "scratch"},
    {"reward.options": {"function": "my_rewards:score"}},
    {"algorithm.loss": "my_rewards:score"},
)
OPTIONS: Settings = {
    "env.options": [{"digits": 3}, {"max_operan": 9}, {"operators": 3}],
    "model.options": [{"width": 64}, {"num_layers": 2}, {"hidden": 64}],
    "rollout.options": [
        {"max_batch": 8},
        {"gpu_memory_utilization": 0.9},
        {"dtype": "float32"},
        {"tensor_parallel": 2},
    ],
    "trainer.options": [{"zero_stage": 3}, {"layuot": "packed"}],
    "weights.options": [{"folder": "x"}, {"namespace": "x"}],
    "buffer.options": [{"max_use": 2}, {"capacity": 8}, {"max_uses": "often"}, {"windw": 3}],
    "algorithm.loss_options": [{"clip": 0.2}, {"clip_ratio": -1}, {"clip_ratio_hihg": 0.3}],
    "algorithm.advantage_options": [{"beta": 1}, {"k": "two"}],
    "algorithm.correction_options": [{"kap": 5}, {"cap": -1}],
}
CODE: tuple[Settings, ...] = (
    *({"env.name": name, "env.options": None} for name in ENVIRONMENTS.split()),
    {"env.name": "my_env:Factory", "env.options": {"tasks": 3}},
    *(
        {"reward.source": "function", "reward.options": {"function": name, "tokenizer": "tiny"}}
        for name in FUNCTIONS.split()
    ),
    {"reward.source": "function", "reward.options": {"functions": "my_rewards:score"}},
    {"reward.source": "function", "reward.options": {"function": "my_rewards:score", "deadline_s": 0}},
    {"reward.source": "function", "reward.options": {"function": "my_rewards:score", "processes": 0}},
    {"reward.source": "function"},
    {"reward.source": "remote"},
    {"reward.source": "remote", "reward.options": {"url": "localhost:8000"}},
    {"reward.source": "model", "reward.options": {"path": "/absent"}},
    {"reward.source": "my_rewards:score"},
)
DATA: tuple[Settings, ...] = (
    *(
        {"env.options.files": files}
        for files in (
            "absent.jsonl",
            "rows.txt",
            "empty.jsonl",
            "torn.jsonl",
            "numbers.jsonl",
            "fake.parquet",
            "no_rows_here",
            "data/*.jsonl",
            [],
            3,
            "hub:",
            "hub:owner/name?splt=train",
            "hub:owner/name",
        )
    ),
    *(
        {"env.options.reward": reward}
        for reward in (
            "exakt",
            "my_rewards.py:missing",
            "my_rewards:missing",
            {"name": "regex"},
            {"rule": "regex"},
            {"rule": "regex", "pattern": "("},
            3,
            {"rule": "exact", "tagg": "x"},
            [{"rule": "exact", "weight": "much"}],
            [{"rule": "exact"}, {"rule": "exact"}],
            "my_rewards:wrong_arguments",
        )
    ),
    {"env.options.reward": None},
    {"env.options.rewards": {"sums": "exakt"}},
    {"env.options.columns": {"prompt": "question_text"}},
    {"env.options.columns": {"promt": "question"}},
    {"env.options.held_out": None},
    {"env.options.held_out": "absent.jsonl"},
    {"env.options.held_out": None, "env.options.held_out_share": 2.0},
    {"env.options.max_prompt_tokens": 0},
    {"env.options.sources": [{"files": "rows.jsonl"}]},
    {"env.options.files": None, "env.options.held_out": None},
    {"env.options.files": None, "env.options.sources": [{"file": "rows.jsonl"}]},
    {"env.options.files": None, "env.options.sources": [{"files": "rows.jsonl", "weight": "half"}]},
    {"env.options.demonstrations": None},
    {"env.options.demonstrations": "rows.jsonl"},
    {"env.options.order": "random"},
)


def misspelt(key: str, dice: random.Random) -> str:
    *path, last = key.split(".")
    at = dice.randrange(1, len(last))
    how = dice.choice(("drop", "double", "swap"))
    if how == "drop":
        wrong = last[:at] + last[at + 1 :]
    elif how == "double":
        wrong = last[:at] + last[at] + last[at:]
    else:
        wrong = last[: at - 1] + last[at] + last[at - 1] + last[at + 1 :]
    return ".".join((*path, wrong if wrong != last else f"{last}s"))


def wrong_toml(text: str, dice: random.Random) -> bytes:
    lines = text.splitlines()
    number = dice.choice([number for number, line in enumerate(lines) if "=" in line])
    key, _, value = lines[number].partition(" = ")
    lines[number] = dice.choice(
        (
            f"{key} {value}",
            f"{key} = ",
            f"{key}: {value}",
            f'{key} = "{value}',
            f"{key} = {value},",
            f"{key} = None",
            f"{key} = {value}\n{key} = {value}",
            f"[{key}",
            f"{key} = True",
            f"{key} = [1, 2",
            f"{key} = 'it's'",
            f"= {value}",
        )
    )
    if dice.random() < 0.1:
        return "\n".join(lines).encode() + b"\n# \xff\xfe\n"
    return "\n".join(lines).encode()


def draws(dice: random.Random) -> Iterator[Case]:
    """Yield cases without end, the kinds of mistakes in turn."""
    missing = [settings for package, settings in PACKAGES if importlib.util.find_spec(package) is None]

    def of(table: Settings) -> Settings:
        key = dice.choice(sorted(table))
        value = table[key]
        return {key: dice.choice(value) if isinstance(value, list) else value}

    def misspelling() -> Settings:
        key = dice.choice(KEYS)
        return {misspelt(key, dice): changed(CALCULATOR, {}).get(key, 4)}

    kinds: list[tuple[str, Callable[[], Settings]]] = [
        ("key", misspelling),
        ("place", lambda: of(MISPLACED)),
        ("type", lambda: of(TYPES)),
        ("range", lambda: of(RANGES)),
        ("choice", lambda: of(CHOICES)),
        ("path", lambda: dice.choice(PATHS)),
        ("package", lambda: dice.choice(missing)),
        ("size", lambda: dice.choice(SIZES)),
        ("pair", lambda: dice.choice(PAIRS)),
        ("option", lambda: of(OPTIONS)),
        ("code", lambda: dice.choice(CODE)),
        ("data", lambda: dice.choice(DATA)),
    ]
    while True:
        for kind, draw in kinds:
            settings = draw()
            tables = changed(ROWS if kind == "data" else CALCULATOR, settings)
            yield Case(f"{kind}: {settings}", table_to_toml(tables).encode())
        yield Case("toml", wrong_toml(table_to_toml(CALCULATOR), dice))


# ------------------------------------------------------------------------------------------------- what the files name

MY_ENV = """
from asyncrl.testing import EchoFactory
NUMBER = 3
class Factory(EchoFactory):
    def __init__(self): super().__init__(turns=1)
class NoMake:
    def task(self, index, *, split): return {}
class NeedsOptions(Factory):
    def __init__(self, *, path): super().__init__()
class RaisesInInit(Factory):
    def __init__(self): raise FileNotFoundError("tasks.db")
class RaisesInTask(Factory):
    def task(self, index, *, split): return {}["task"]
def returns_none(): return None
"""
MY_REWARDS = """
NUMBER = 3
def score(completion): return 1.0
def wrong_arguments(completions, answer): return 1.0
def positional(completion, /): return 1.0
"""


def write_world(folder: Path) -> None:
    """Write the user's modules, rows and model folders, right and wrong ones."""
    rows = [{"prompt": f"{n}+1", "data_source": "sums", "ground_truth": str(n + 1)} for n in range(8)]
    chat = {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]}
    texts = {
        "my_env.py": MY_ENV,
        "my_rewards.py": MY_REWARDS,
        "my_broken.py": "import math\nvalue = math.undefined\n",
        "my_syntax.py": "def Factory(:\n    pass\n",
        "my_missing.py": "import a_package_that_is_not_here\n",
        "my_exits.py": "import sys\nsys.exit(3)\n",
        "rows.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "held.jsonl": json.dumps({**rows[0], "prompt": "9+9", "ground_truth": "18"}) + "\n",
        "rows.txt": "1+1\t2\n",
        "chats.jsonl": json.dumps(chat) + "\n",
        "empty.jsonl": "",
        "torn.jsonl": json.dumps(rows[0])[:20],
        "numbers.jsonl": "1\n2\n",
        "fake.parquet": "not parquet",
        "tiny.gguf": "not gguf",
        "broken_json/config.json": "{",
        "unknown_type/config.json": '{"model_type": "llama9"}',
        "no_weights/config.json": '{"model_type": "llama"}',
        "no_tokenizer/config.json": '{"model_type": "llama"}',
        "torn/config.json": '{"model_type": "llama"}',
        "bad_tokenizer/config.json": '{"model_type": "llama"}',
    }
    for name in ("empty", "no_rows_here"):
        (folder / name).mkdir()
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    empty_safetensors = (2).to_bytes(8, "little") + b"{}"
    for name in ("broken_json", "unknown_type", "no_tokenizer", "bad_tokenizer"):
        (folder / name / "model.safetensors").write_bytes(empty_safetensors)
    (folder / "torn/model.safetensors").write_bytes(b"\xff" * 16)
    for name in ("broken_json", "unknown_type", "no_weights", "torn", "bad_tokenizer"):
        (folder / name / "tokenizer.json").write_text("{}")


# -------------------------------------------------------------------------------------------------------- the campaign


@dataclass(frozen=True, slots=True)
class Answer:
    """What the command made of a case."""

    status: int
    text: str
    user_s: float

    @property
    def has_traceback(self) -> bool:
        return "Traceback" in self.text

    @property
    def in_words(self) -> bool:
        return self.status == 2 and not self.has_traceback and "error: " in self.text


def ask(folder: Path, content: bytes) -> Answer:
    (folder / "config.toml").write_bytes(content)
    command = [sys.executable, "-m", "asyncrl", "train", "config.toml", "--dry-run"]
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(folder / "hub"),
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, timeout=300)
    user_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return Answer(done.returncode, done.stderr.decode(errors="replace"), user_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    slowest_s = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_world(folder)
        for base in (CALCULATOR, ROWS):
            right = ask(folder, table_to_toml(base).encode())
            if right.status:
                raise SystemExit(f"the configuration without a mistake is refused: {right.text}")
        cases = draws(random.Random(options.seed))
        for _ in range(options.cases):
            case = next(cases)
            answer = ask(folder, case.content)
            counts["tracebacks"] += answer.has_traceback
            counts["in_words"] += answer.in_words
            counts["in_time"] += answer.in_words and answer.user_s <= LIMIT_S
            slowest_s = max(slowest_s, answer.user_s)
            if not answer.in_words or answer.user_s > LIMIT_S:
                last = (answer.text.strip().splitlines() or ["no message"])[-1]
                print(f"status {answer.status}, {answer.user_s:.1f} s: {case.mistake}\n    {last[:200]}", flush=True)
    share = counts["in_time"] / options.cases
    result = {**counts, "cases": options.cases, "share": share, "slowest_user_s": slowest_s}
    plain = f"{options.cases} cases: {counts['tracebacks']} tracebacks, {counts['in_words']} refused in words"
    print(json.dumps(result, indent=2) if options.json else f"{plain}, {share:.1%} within {LIMIT_S:g} s")
    return int(counts["tracebacks"] > 0 or share < LEAST_SHARE)


if __name__ == "__main__":
    raise SystemExit(main())
