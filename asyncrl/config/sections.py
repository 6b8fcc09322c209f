"""The tables of the configuration, in the order of the way of a batch.

Every default is for a first run on one small machine; what is measured in something has its unit in its name, steps
are optimizer steps unless the name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .section import (
    Cores,
    FilePath,
    Files,
    LearningRate,
    PartName,
    Schedule,
    Section,
    Table,
    Texts,
    Threads,
    list_to_tuple,
)

__all__ = [
    "BufferConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CriticConfig",
    "EnvConfig",
    "EvalConfig",
    "LedgerConfig",
    "LoraConfig",
    "ModelConfig",
    "RewardConfig",
    "RolloutConfig",
    "SftConfig",
    "SimulationConfig",
    "StalenessConfig",
    "TelemetryConfig",
    "TrainerConfig",
    "ValueTrainerConfig",
    "WeightsConfig",
]


class ClusterConfig(Section):
    """Where the workers run."""

    backend: Literal["ray", "local"] = "ray"
    """`ray`: processes, on one machine or many; `local`: everything inside this process, for debuggers and tests."""
    address: Annotated[str, Field(min_length=1)] | None = None
    """Ray cluster to join (`auto`, `ray://host:port`, `host:port`); none starts one on this machine."""
    num_cpus: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """CPUs a Ray started here may hand out; none: the cores of the machine."""
    colocate: Annotated[tuple[Literal["trainer", "critic", "reference"], ...], BeforeValidator(list_to_tuple)] = ()
    """Roles whose ranks share processes, and so a share of the machine: they compute one after another, not at once."""


class ModelConfig(Section):
    """The policy: either a checkpoint (`path`) or a part that makes one (`source`)."""

    path: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")] | None = None
    """Hugging Face model folder, or its name on the hub."""
    source: PartName | None = None
    """Part that makes the model: `scratch` (random weights), `gguf` (a GGUF file), or one of your own."""
    options: Table = Field(default_factory=dict)
    """Arguments of the source."""
    chat_template: FilePath | None = None
    """File with a Jinja chat template; none: the model's own."""
    template_options: Table = Field(default_factory=dict)
    """Further variables of the chat template, such as `enable_thinking`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations; optimizer state is always float32."""


class EnvConfig(Section):
    """The world the tasks are solved in."""

    name: PartName
    """Environment: an installed name, or `package.module:Factory`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the environment's factory."""
    latency_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Extra time each step of the environment takes: makes a fast world behave like a slow one in measurements."""
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Longest one reset or step may take; past it the rollout is dropped and counted, never rewarded."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 8
    """Assistant turns of one episode; it ends there even if the environment would go on."""


class SftConfig(Section):
    """Supervised warm start: cross-entropy on whole conversations, before any reward is asked for."""

    steps: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Optimizer steps; 0 skips the warm start."""
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Conversations per step."""
    lr: LearningRate = 1e-5
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Steps over which the rate grows linearly to its peak."""
    schedule: Schedule = "constant"
    """What the rate does after the warm-up: stays, or falls to 0 at the last step."""
    threads: Threads = 1
    """Compute threads of each rank meanwhile: nothing else computes then, so it may be more than `trainer.threads`."""
    data: Files | None = None
    """Files of conversations (docs/data.md), or several; none: the environment's own demonstrations."""


class RolloutConfig(Section):
    """The servers that generate."""

    engine: PartName = "transformers"
    """Rollout engine: an installed name, or `package.module:Engine`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the engine."""
    python: FilePath | None = None
    """Interpreter that the engine runs under, in a process of its own (`asyncrl engine install vllm` makes one)."""
    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Servers, each with a whole copy of the weights."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """1 samples from the policy itself, which is what the loss assumes; 0 is greedy and cannot be trained on."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus truncation; 1 is off. Below 1 the log-probs are those of the truncated distribution."""
    top_k: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Truncation to the k likeliest tokens; 0 is off."""
    stop: Texts = ()
    """Texts that end a turn, besides the model's own end of turn."""
    max_new_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 128
    """Most tokens sampled in one turn."""
    max_tokens: Annotated[int, Field(ge=2, le=10_000_000)] = 1024
    """Most tokens of one trajectory, prompt and answers of the environment included."""
    deadline_s: Annotated[float, Field(gt=0, le=604_800)] = 1800.0
    """Longest time for a group of rollouts, all attempts included; past it the run ends and names the replica."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Times a rollout is begun when servers fail under it, before it is dropped and counted."""
    num_cpus: Cores = 1.0
    """CPUs reserved for one replica."""
    num_gpus: Cores = 0.0
    """GPUs reserved for one replica."""
    threads: Threads = 1
    """Compute threads of one replica; more than its CPUs slows its neighbours down."""


class LoraConfig(Section):
    """Low-rank adapters: the weights stay, small matrices beside them learn (arXiv:2106.09685). Needs `asyncrl[lora]`.

    The warm start still trains all weights; what it ends with is frozen, and is the reference policy where one is asked
    for. Servers and exports get the weights with the adapters merged in.
    """

    rank: Annotated[int, Field(ge=1, le=65_536)]
    """Rank of the matrices: 8 to 64 is usual; their memory grows with it."""
    alpha: Annotated[float, Field(gt=0, le=1e6)]
    """Adapters count alpha / rank times; often twice the rank."""
    targets: Texts = ("all-linear",)
    """Ends of the names of linear modules (`q_proj`, `v_proj`); `all-linear`: every one but the output head."""


class TrainerConfig(Section):
    """The ranks that update the policy, and how."""

    engine: PartName = "fsdp"
    """Training engine: an installed name, or `package.module:Engine`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the engine."""
    world_size: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Ranks the model and the rows are sharded over."""
    groups_per_step: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    """Groups (prompts) one training step consumes."""
    group_size: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Rollouts of one prompt; their mean reward is the baseline of each."""
    lr: LearningRate = 1e-6
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """AdamW's decoupled decay of matrices; 0 because the reward, not the norm, should move the policy."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay of the gradient's running mean."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW: decay of the squared gradient's running mean; shorter than usual, since rewards shift quickly."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Gradients longer than this are scaled down to it."""
    schedule: Schedule = "constant"
    """What the rate does after the warm-up: stays, or falls to 0 at the last step."""
    warmup_steps: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Steps over which the rate grows linearly to its peak."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=2, le=100_000_000)] = 4096
    """Tokens one forward and backward pass holds on a rank; bounds activation memory, does not change the result."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights; they want steps about ten times larger (`lr`)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    minibatches: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Optimizer steps one batch is split into; 1 keeps every step on-policy up to staleness."""
    epochs: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Passes over one batch."""
    num_cpus: Cores = 1.0
    """CPUs reserved for one rank."""
    num_gpus: Cores = 0.0
    """GPUs reserved for one rank."""
    threads: Threads = 1
    """Compute threads of one rank."""


class ValueTrainerConfig(Section):
    """The ranks that train a model which says one number."""

    engine: PartName = "fsdp"
    """Value engine: an installed name, or `package.module:Engine`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the engine."""
    world_size: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Ranks the model and the rows are sharded over."""
    lr: LearningRate = 1e-5
    """Peak learning rate."""
    schedule: Schedule = "constant"
    """What the rate does after the warm-up: stays, or falls to 0 at the last step."""
    warmup_steps: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Steps over which the rate grows linearly to its peak."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """AdamW's decoupled decay of matrices."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Gradients longer than this are scaled down to it."""
    num_cpus: Cores = 1.0
    """CPUs reserved for one rank."""
    num_gpus: Cores = 0.0
    """GPUs reserved for one rank."""
    threads: Threads = 1
    """Compute threads of one rank."""


class CriticConfig(ValueTrainerConfig):
    """The critic of advantages that need `values` (`gae`): what to expect before each token. Not made for others.

    Its learning rate is usually larger than the policy's, since it has to follow it.
    """

    path: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")] | None = None
    """Model it begins as, a folder or a name on the hub; none: the policy's own, with a head that says 0."""
    minibatches: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Optimizer steps one batch is split into."""
    epochs: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Passes over one batch."""
    clip: Annotated[float, Field(gt=0, le=1e9)] | None = 0.2
    """How far the optimizer steps on one batch may move a value before it gets no further gradient; none: no bound."""
    trace: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of what it learns: 1 is the return that really came (arXiv:2503.01491), less leans on its own values."""


class RewardConfig(Section):
    """Who says how good a trajectory was."""

    source: PartName = "environment"
    """`environment`: the sum of its steps' rewards; else a reward model's installed name or `package.module:Model`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the reward model."""
    workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Workers that score, each with a reward model of its own; the rows of a group are split over them."""
    max_restarts: Annotated[int, Field(ge=0, le=10_000)] = 3
    """How often workers whose process died are made again, if no other role shares it; then a death ends the run."""
    num_cpus: Cores = 0.0
    """CPUs reserved for one of them."""
    num_gpus: Cores = 0.0
    """GPUs reserved for one of them."""


class StalenessConfig(Section):
    """What becomes of rollouts that take longer than `max_staleness` allows."""

    policy: Literal["mask", "wait", "drop", "correct"] = "mask"
    """`mask` leaves tokens that are too old out of the loss; `wait` makes batches wait for the slow (max_staleness = 0
    always does); `drop` throws the slow away; `correct` trains past the bound, weighted by measured log-probs."""


class SimulationConfig(Section):
    """Durations for `asyncrl simulate` and `asyncrl plan`; training does not look at them.

    What varies is a number, `uniform(low, high)`, `exponential(mean)` or `lognormal(mu, sigma)` (of the logarithm).
    """

    tokens: Annotated[str, Field(min_length=1)] | None = None
    """Sampled tokens of a rollout, over all its turns; none: uniform(1, rollout.max_new_tokens)."""
    token_s: Annotated[float, Field(gt=0, le=3600)] = 0.02
    """Seconds a token takes a request that decodes alone."""
    saturation: Annotated[int, Field(ge=1, le=10_000_000)] | None = 64
    """Requests of one replica from which on they share its speed; none: it serves any number at full speed."""
    turns: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Turns of a rollout."""
    turn_s: Annotated[str, Field(min_length=1)] = "0"
    """Seconds the environment takes after each turn."""
    reward_s: Annotated[str, Field(min_length=1)] | None = None
    """Seconds a reward takes after the rollout; none: it comes with the rollout."""
    update_s: Annotated[str, Field(min_length=1)] = "10"
    """Seconds of an update on `trainer.world_size` ranks."""
    publish_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Seconds until the trainer has made new weights ready to be fetched."""
    prepare_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Seconds a replica takes to fetch them, while it goes on decoding."""


class BufferConfig(Section):
    """Where finished groups wait to be trained on."""

    kind: PartName = "replay"
    """Replay buffer: `replay` (in the driver), `remote` (the same in a process of its own, rows in the object store),
    or `package.module:Buffer`."""
    capacity_groups: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Groups between admission and use; none: (max_staleness + 1) * groups_per_step, twice that with overdue ones."""
    selection: PartName | None = None
    """Order in which ready groups are handed out; none: what the staleness policy needs, `fifo` or `fifo_ready`. There
    are also `windowed_fifo`, `freshest`, `uniform` and `prioritized`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the buffer: `window`, `priority`, `exponent`, `seed`, `max_uses`, `zero_variance`, `quotas`,
    `samples_per_insert`, `insert_tolerance`, `eviction`, `keep_groups` (see buffers/replay.py)."""


class LedgerConfig(Section):
    """The record of every prompt and of what was sampled for it, in the run's folder: a killed run goes on with it."""

    kind: PartName | None = "sqlite"
    """Ledger: an installed name, or `package.module:Ledger`; `none` keeps none, and a killed run samples again."""
    fsync: Literal["commit", "checkpoint"] = "commit"
    """When records are brought to the disk: `commit` outlives the machine, `checkpoint` only the process."""
    commit_latency_s: Annotated[float, Field(ge=0, le=60)] = 0.2
    """Longest time a record waits for others to be written with."""


class WeightsConfig(Section):
    """How new weights reach the servers."""

    transport: PartName = "shared_memory"
    """Weight transport: an installed name, or `package.module:Transport`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the transport."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What requests in flight do with keys and values of older weights: go on with them, or compute them again."""


class EvalConfig(Section):
    """The held-out score: greedy answers to tasks that are never trained on."""

    tasks: Annotated[int, Field(ge=0, le=10_000_000)] = 128
    """Held-out tasks of one evaluation; 0 never evaluates."""
    every: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Training steps between evaluations; 0: only before and after."""
    first: bool = True
    """Evaluate before the first training step as well."""
    reward: Literal["configured", "environment"] = "configured"
    """Whose rewards are the score: those of `reward.source`, as in training, or the environment's own, whoever rewards
    training. With a reward model the latter is what nobody trains on."""
    success_reward: Annotated[float, Field(ge=-1e9, le=1e9)] = 1.0
    """Reward from which an answer counts as a success, on the scale of whoever gives the rewards of the score."""


class CheckpointConfig(Section):
    """What a run can be resumed from."""

    every: Annotated[int, Field(ge=0, le=10_000_000)] | None = None
    """Training steps between checkpoints; none: as often as takes 2 % of the time, a minute apart or more; 0: only at
    the end. Between two of them the ledger keeps what a killed run needs."""
    keep: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Newest checkpoints that are kept."""


class TelemetryConfig(Section):
    """What is told about a run while it goes on."""

    trackers: Texts = ()
    """Trackers besides the run's own files: `tensorboard`, `trackio`, `wandb`, or `package.module:Tracker`."""
    trajectories_per_step: Annotated[int, Field(ge=0, le=100_000)] = 1
    """Trajectories of each training step written out as text, for reading."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Live display; `auto`: rich on a terminal, plain lines elsewhere."""
    stall_s: Annotated[float, Field(gt=0, le=604_800)] = 7200.0
    """Longest time the trainer may wait for anything; after a tenth of it the log tells why, past it the run ends."""
