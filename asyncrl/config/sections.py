"""The tables of the configuration, in the order in which a batch meets them.

Every default is for a first run on one small machine. A quantity has its unit in its name. A field's docstring is its
description in error messages and in the reference.
"""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WrapValidator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from asyncrl.config.toml import table_to_toml
from asyncrl.plugins import Part as _Part
from asyncrl.plugins import part_text

if TYPE_CHECKING:
    from asyncrl.algorithms import AdvantageEstimator, KLController, KLEstimator, PolicyObjective
    from asyncrl.mesh import MeshShape

DEEPEST_TABLE = 16
"""Most levels of nested tables and arrays: more than a configuration needs, far less than Python's stack holds."""


class Section(BaseModel):
    """One table of the configuration: strict types, no unknown keys, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # "3" is no number and 1 is no boolean: a slip is reported, not repaired
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {
            key: None if value == "none" and key in fields and is_set_by_default(fields[key]) else value
            for key, value in data.items()
        }


def is_set_by_default(field: FieldInfo) -> bool:
    """Return whether an optional field has a default, which the text ``none`` removes, as TOML has no null."""
    return field.default_factory is None and not field.is_required() and field.default is not None and _optional(field)


def _optional(field: FieldInfo) -> bool:
    return get_origin(field.annotation) in {Union, types.UnionType} and type(None) in get_args(field.annotation)


def _path(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if not value or "\0" in value:
        raise PydanticCustomError("path", "must be a path: text that is not empty and has no NUL")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # "~unknown-user/..."
        raise PydanticCustomError("path", "names a home folder that does not exist") from error


def list_to_tuple(value: Any) -> Any:
    """Return TOML's arrays as tuples: a section is immutable."""
    return tuple(value) if isinstance(value, list) else value


def _files(value: Any) -> Any:
    return (str(value),) if isinstance(value, str | Path) else list_to_tuple(value)


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    """Refuse a value that the file of a run cannot have."""
    for key, value in table.items():
        try:
            table_to_toml({key: value})
        except TypeError as error:
            message = "cannot hold this value of {key}: {why}; leave it out, or give plain data"
            raise PydanticCustomError("table", message, {"key": key, "why": str(error)}) from error
    return table


def _named(value: Any) -> Any:
    """Return a table with the dotted paths of the objects in it."""
    if isinstance(value, dict):
        return {key: _named(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_named(item) for item in value]
    return part_text(value) if callable(value) else value


FilePath: TypeAlias = Annotated[Path, BeforeValidator(_path)]
Files: TypeAlias = Annotated[
    tuple[Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")], ...], Field(min_length=1), BeforeValidator(_files)
]
Texts: TypeAlias = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(list_to_tuple)]
Table: TypeAlias = Annotated[dict[str, Any], AfterValidator(_plain), PlainSerializer(_named)]
PART_PATTERN = r"^[A-Za-z_][\w.\-]*(:[A-Za-z_<][\w.<>]*)?$"
if TYPE_CHECKING:
    Part: TypeAlias = _Part
else:
    Part = Annotated[
        str,
        Field(min_length=1, max_length=200, pattern=PART_PATTERN),
        WrapValidator(lambda value, check: value if callable(value) else check(value)),
        PlainSerializer(part_text),
    ]
Cores: TypeAlias = Annotated[float, Field(ge=0, le=4096)]
Threads: TypeAlias = Annotated[int, Field(ge=1, le=1024)]
Ranks: TypeAlias = Annotated[int, Field(ge=1, le=65_536)]
Count: TypeAlias = Annotated[int, Field(ge=0, le=10_000_000)]
LearningRate: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
Optimizer: TypeAlias = Literal["adamw", "adamw_8bit", "muon", "adafactor", "sgd"]


def _colocated_roles(value: Any) -> Any:
    all_of_them = value in ("all", ["all"])  # the command line makes a list of a word
    return ("trainer", "critic", "reference", "rollout") if all_of_them else list_to_tuple(value)


class ClusterConfig(Section):
    """Where the workers run."""

    backend: Literal["ray", "local"] = "ray"
    """`ray`: processes, on one machine or many; `local`: everything in this process, for debuggers and tests."""
    address: Annotated[str, Field(min_length=1)] | None = None
    """Ray cluster to join (`auto`, `ray://host:port`, `host:port`); none: that of `RAY_ADDRESS`, and without it, as
    `local`, one is started on this machine."""
    num_cpus: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """CPUs of a Ray cluster that is started here; none: the cores of the machine."""
    health_check_timeout_s: Annotated[float, Field(ge=3, le=86_400)] = 120.0
    """Longest time for which a worker's process on Ray may answer nothing at all, whatever it works on, and one of an
    engine or a reward function be stopped; past it, it is killed, and mended like a death. The log names it after 20 s,
    or a third of this."""
    colocate: Annotated[
        tuple[Literal["trainer", "critic", "reference", "rollout"], ...], BeforeValidator(_colocated_roles)
    ] = ()
    """Roles that share CPUs and GPUs: they compute one after another, not at once; `"all"` are all that a run has. The
    ranks of trainer, critic and reference share processes. With `rollout`, engines and trainer take turns: one frees
    its memory while the other computes, and the run can have no critic and no reference policy (`docs/gpu.md`)."""


class ModelConfig(Section):
    """The policy: either a checkpoint (`path`) or a part that creates one (`source`)."""

    path: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")] | None = None
    """Hugging Face model: a folder or its URL, a name on the hub, or `gguf:` and a GGUF file."""
    source: Part | None = None
    """Part that creates the model: `scratch` (random weights), `gguf` (a GGUF file), or `package.module:function`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the source."""
    chat_template: FilePath | None = None
    """File with a Jinja chat template; none: the model's own."""
    chat_template_kwargs: Table = Field(default_factory=dict)
    """Further variables of the chat template, as in `{enable_thinking = false}`."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder"] = "auto"
    """How the model writes tool calls, as vLLM names it; `auto`: as the chat template does, or as Hermes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that is computed in, and of engines, frozen and published weights; what is trained is held in float32."""

    @model_validator(mode="before")
    @classmethod
    def _read_source(cls, data: Any) -> Any:
        """Read ``gguf:NAME`` as the source ``gguf`` and its option ``source``, under either key."""
        from asyncrl.plugins import is_model_source

        if not isinstance(data, dict) or not isinstance(data.get("options", {}), dict):
            return data
        given = {key: data[key] for key in ("path", "source") if data.get(key) is not None}
        if len(given) != 1 or not is_model_source(str(*given.values())):
            return data
        (key,) = given
        source, _, name = str(given[key]).partition(":")
        rest = {other: value for other, value in data.items() if other != key}
        return {**rest, "source": source, "options": {**data.get("options", {}), "source": name}}


class EnvConfig(Section):
    """The environment in which tasks are solved."""

    name: Part
    """Environment: an installed name, or `package.module:Factory`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the environment's factory."""
    latency_s: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Time added to each step of the environment, to measure runs as if it were slow."""
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Longest time of one reset or step; past it the rollout is dropped and counted, never rewarded."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 8
    """Most assistant turns of one episode."""
    candidates: Annotated[int, Field(ge=0, le=1024)] = 0
    """Tasks among which a curriculum chooses that of each group, by difficulty (docs/environments.md#curriculum); 0: no
    curriculum, the tasks come as they are numbered."""

    @model_validator(mode="before")
    @classmethod
    def _program(cls, data: Any) -> Any:
        """Take ``command`` as the program of the environment ``command``, for the tasks of the one that is named."""
        if not isinstance(data, dict) or "command" not in data:
            return data
        rest = {key: value for key, value in data.items() if key != "command"}
        options = rest.get("options", {})
        if rest.get("name") != "command" and isinstance(options, dict):
            options = {"tasks": rest.get("name", "dataset"), **options}
        return {**rest, "name": "command", "options": {**options, "command": data["command"]}}


class SftConfig(Section):
    """Supervised warm start: cross-entropy on whole conversations, before reinforcement learning."""

    steps: Count = 0
    """Optimizer steps; 0 skips the warm start."""
    batch_size: Annotated[int, Field(ge=1, le=1_000_000)] = 64
    """Conversations per optimizer step."""
    lr: LearningRate = 1e-5
    """Peak learning rate."""
    warmup_steps: Count = 0
    """Optimizer steps over which the rate grows linearly to its peak."""
    lr_scheduler_type: Schedule = "constant"
    """Schedule after the warm-up: constant, or falling to 0 at the last step."""
    threads: Threads = 1
    """Compute threads of each rank; nothing else computes during the warm start, so more than `trainer.threads` is
    fine."""
    data: Files | None = None
    """File of conversations, or several (docs/data.md); none: the environment's own demonstrations."""


class RolloutConfig(Section):
    """The engines that generate."""

    engine: Part = "transformers"
    """Rollout engine: an installed name, or `package.module:Engine`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the engine, as `{max_running_requests = 256}` (see docs/engines.md)."""
    python: FilePath | None = None
    """Python interpreter of the engine's own process, as made by `asyncrl engine install vllm`; none: this one."""
    replicas: Annotated[int, Field(ge=1, le=4096)] = 1
    """Engines, each with a whole copy of the weights."""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """1 samples from the policy itself, which is what the loss assumes; 0 is greedy and cannot be trained on."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus truncation; 1 is off. Below 1 the log-probs are those of the truncated distribution."""
    top_k: Count = 0
    """Truncation to the k likeliest tokens; 0 is off."""
    stop: Texts = ()
    """Texts that end a turn, beside the model's own end of turn."""
    max_new_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 128
    """Most tokens sampled in one turn."""
    max_seq_len: Annotated[int, Field(ge=2, le=10_000_000)] = 1024
    """Most tokens of one trajectory, prompt and observations included."""
    deadline_s: Annotated[float, Field(gt=0, le=604_800)] = 1800.0
    """Longest time of a group of rollouts, all attempts included. Environments end shortly before, which costs the
    group; past it the run ends and names the replica."""
    max_attempts: Annotated[int, Field(ge=1, le=100)] = 3
    """Most attempts of a rollout whose environment fails, before its group is dropped and counted."""
    reward_check_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of the time of rollouts in which rows are scored again, to check their rewards; 0 checks none. Only rewards
    that are declared deterministic are checked."""
    num_cpus: Cores = 1.0
    """CPUs reserved for one replica."""
    num_gpus: Cores = 0.0
    """GPUs reserved for one replica."""
    threads: Threads = 1
    """Compute threads of one replica; more than its CPUs slow down other workers of the machine."""


class LoraConfig(Section):
    """Low-rank adapters: the weights are frozen, small matrices beside them are trained (arXiv:2106.09685).

    Needs `asyncrl[lora]`. The warm start still trains all weights; its result is frozen, and is the reference policy if
    the algorithm needs one. Exports have the weights with the adapters merged in, and the adapters apart; engines get
    one or the other (`weights.adapters`).
    """

    rank: Annotated[int, Field(ge=1, le=65_536)]
    """Rank of the matrices, usually 8 to 64; their memory grows with it."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """The adapters' output is scaled by alpha / rank; none: twice the rank."""
    target_modules: Texts = ("all-linear",)
    """Ends of the names of linear modules (`q_proj`, `v_proj`); `all-linear`: every one except the output head."""
    base: Literal["float", "int8"] = "float"
    """How frozen weights are held: in `model.dtype`, or with 8 bits and a scale for each 64 inputs. Not with `tp`, nor
    with `weights.adapters = "apart"`."""


class MeshConfig(Section):
    """The arrangement of ranks; the product of all sizes but `ep` is the `world_size`."""

    pp: Ranks = 1
    """Pipeline parallelism: ranks that the layers are divided over."""
    dp_replicate: Ranks = 1
    """Copies of the model, each sharded over ranks of its own (HSDP); gradients are summed over them."""
    dp_shard: Ranks | None = None
    """Ranks that rows and weights are sharded over (FSDP2); none: what the other sizes leave of the `world_size`."""
    cp: Ranks = 1
    """Context parallelism: ranks that the tokens of each row are divided over; divides the attention heads."""
    tp: Ranks = 1
    """Tensor parallelism: ranks that heads, features and vocabulary are divided over; within one machine."""
    ep: Ranks = 1
    """Expert parallelism: ranks that the experts of a layer are divided over, out of those of `dp_shard` and `cp`."""


class TrainingRanksConfig(Section):
    """The ranks that train a model, and their optimizer."""

    engine: Part = "fsdp"
    """Engine that trains it: an installed name, or `package.module:Engine`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the engine."""
    world_size: Ranks = 1
    """Ranks the model and the rows are sharded over."""
    mesh: MeshConfig | None = None
    """How the ranks are arranged, as in `{dp_replicate = 2, tp = 4}`; none: weights and rows are sharded over all."""
    lr: LearningRate = 1e-5
    """Peak learning rate."""
    lr_scheduler_type: Schedule = "constant"
    """Schedule after the warm-up: constant, or falling to 0 at the last step."""
    warmup_steps: Count = 0
    """Optimizer steps over which the rate grows linearly to its peak."""
    optimizer: Optimizer = "adamw"
    """Optimizer: `adamw`; `adamw_8bit`, with moments of 8 bits (`asyncrl[torchao]`); `muon`, for matrices but those of
    embeddings and head, which get AdamW; `adafactor`, whose step changes a tensor by `lr` of its root mean square
    (1 / sqrt(step) at most); `sgd`. Ranks that divide matrices can have `adamw` and `sgd`."""
    optimizer_options: Table = Field(default_factory=dict)
    """Options of torch's or torchao's optimizer, as in `{momentum = 0.9}`."""
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Decoupled weight decay of matrices; 0 because the reward, not the norm, should move the weights."""
    max_grad_norm: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Norm to which longer gradients are scaled down."""
    num_cpus: Cores = 1.0
    """CPUs reserved for one rank."""
    num_gpus: Cores = 0.0
    """GPUs reserved for one rank."""
    threads: Threads = 1
    """Compute threads of one rank."""

    def mesh_shape(self) -> MeshShape | None:
        """Return the mesh, if one is configured; raise :class:`ConfigError` where it is not of ``world_size`` ranks."""
        if self.mesh is None:
            return None
        from asyncrl.mesh import MeshShape

        return MeshShape.of(self.mesh.model_dump(exclude_none=True), world_size=self.world_size)


class TrainerConfig(TrainingRanksConfig):
    """The ranks that update the policy."""

    groups_per_step: Annotated[int, Field(ge=1, le=1_000_000)] = 16
    """Groups (prompts) in the batch of one training step."""
    group_size: Annotated[int, Field(ge=1, le=65_536)] = 8
    """Rollouts of one prompt; group-relative advantages compare them with one another."""
    lr: LearningRate = 1e-6
    """Peak learning rate."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay of the gradient's running mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW: decay of the squared gradient's running mean; shorter than usual, since rewards shift quickly."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=2, le=100_000_000)] = 4096
    """Most tokens of one forward and backward pass on a rank; bounds activation memory, does not change the result."""
    lora: LoraConfig | None = None
    """Train adapters instead of the weights; adapters need an `lr` about ten times larger."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    num_mini_batches: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Optimizer steps one batch is split into; 1 keeps every step on-policy up to staleness."""
    epochs: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Passes over one batch."""


class CriticConfig(TrainingRanksConfig):
    """The value model of advantages that need `values` (`gae`); other advantages run without one.

    Its learning rate is usually larger than the policy's, since it has to follow the policy.
    """

    path: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")] | None = None
    """Model to start from, as in `model.path`; none: the policy's own, with a head that returns 0."""
    num_mini_batches: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Optimizer steps one batch is split into."""
    epochs: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Passes over one batch."""
    cliprange_value: Annotated[float, Field(gt=0, le=1e9)] | None = 0.2
    """Most that the optimizer steps on one batch move a value (PPO's value clipping); none: no bound."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Lambda of the returns it is trained on: 1 is the return itself (arXiv:2503.01491), below 1 adds its values."""


class RewardConfig(Section):
    """Where rewards come from."""

    source: Part = "environment"
    """`environment`: the sum of its steps' rewards; else a reward model's installed name or `package.module:Model`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the reward model."""
    workers: Annotated[int, Field(ge=1, le=4096)] = 1
    """Reward workers, each with a reward model of its own; the rows of a group are split over them."""
    max_restarts: Annotated[int, Field(ge=0, le=10_000)] = 3
    """Times that crashed reward workers are restarted, if no other role shares their process; then the run ends."""
    num_cpus: Cores = 0.0
    """CPUs reserved for one worker."""
    num_gpus: Cores = 0.0
    """GPUs reserved for one worker."""


class StalenessConfig(Section):
    """How rollouts are treated that take longer than `max_staleness` allows."""

    policy: Literal["mask", "wait", "drop", "correct"] = "mask"
    """`mask` leaves tokens that are too old out of the loss; `wait` makes batches wait for slow rollouts (as
    max_staleness = 0 always does); `drop` discards them; `correct` trains past the bound, weighted by log-probs."""


class SimulationConfig(Section):
    """Durations for `asyncrl simulate` and `asyncrl plan`; training ignores them.

    Text fields are a number, `uniform(low, high)`, `exponential(mean)` or `lognormal(mu, sigma)` (of the logarithm).
    """

    tokens: Annotated[str, Field(min_length=1)] | None = None
    """Sampled tokens of a rollout, over all its turns; none: uniform(1, rollout.max_new_tokens)."""
    token_s: Annotated[float, Field(gt=0, le=3600)] = 0.02
    """Seconds per token of a request that decodes alone."""
    saturation: Annotated[int, Field(ge=1, le=10_000_000)] | None = 64
    """Requests that one replica decodes at full speed; more share its speed; none: no limit."""
    turns: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Turns of a rollout."""
    turn_s: Annotated[str, Field(min_length=1)] = "0"
    """Seconds of the environment after each turn."""
    reward_s: Annotated[str, Field(min_length=1)] | None = None
    """Seconds from the end of a rollout to its reward; none: the reward comes with the rollout."""
    update_s: Annotated[str, Field(min_length=1)] = "10"
    """Seconds of an update on `trainer.world_size` ranks."""
    publish_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Seconds until the trainer has published new weights."""
    prepare_s: Annotated[float, Field(ge=0, le=86_400)] = 0.0
    """Seconds in which a replica fetches new weights, while it goes on decoding."""


class BufferConfig(Section):
    """Where finished groups wait to be trained on."""

    kind: Part = "replay"
    """Replay buffer: `replay` (in the driver), `remote` (in a process of its own, rows in the object store), or
    `package.module:Buffer`."""
    capacity_groups: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """Most groups between issue and training; none: (max_staleness + 1) * groups_per_step, or twice that if the
    staleness policy keeps overdue groups."""
    selection: Part | None = None
    """Order in which ready groups are selected: `fifo`, `fifo_ready`, `windowed_fifo`, `freshest`, `uniform` or
    `prioritized`; none: `fifo` or `fifo_ready`, by the staleness policy."""
    options: Table = Field(default_factory=dict)
    """Arguments of the buffer: `window`, `priority`, `exponent`, `seed`, `max_uses`, `zero_variance`, `quotas`,
    `samples_per_insert`, `insert_tolerance`, `eviction`, `keep_groups` (see buffers/replay.py)."""


class LedgerConfig(Section):
    """The record of every prompt and its samples in the run's folder, from which a killed run is recovered."""

    kind: Part | None = "sqlite"
    """Ledger: an installed name, or `package.module:Ledger`; `none`: no ledger, a killed run samples again."""
    fsync: Literal["commit", "checkpoint"] = "commit"
    """When records are flushed to the disk: `commit` survives a crash of the machine, `checkpoint` of the process."""
    commit_latency_s: Annotated[float, Field(ge=0, le=60)] = 0.2
    """Longest time a record waits to be written together with others."""


class WeightsConfig(Section):
    """How new weights reach the engines."""

    transport: Part = "shared_memory"
    """Weight transport: an installed name, or `package.module:Transport`."""
    options: Table = Field(default_factory=dict)
    """Arguments of the transport."""
    delta: Literal["auto", "off"] = "auto"
    """`auto`: transports whose bytes travel (`disk`, `object_store`, `store`) publish what a version changes, bit for
    bit, where that is little, as it is in bfloat16; `off`: every version is a full one, which other programs can load.
    """
    adapters: Literal["auto", "apart", "merged"] = "auto"
    """What reaches the engines of a policy that is trained through `trainer.lora`: `apart`: the adapters alone, which
    engines apply beside the weights that they were started with; `merged`: all weights, with the adapters added to
    them; `auto`: apart where the engine serves adapters."""
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """Longest time in which a replica fetches a version, and again in which it takes and proves it; past it, it gets no
    rollouts until the next version. Where devices are shared, also of sleeping and of waking, past which it is lost."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """Keys and values of requests in flight at a weight update: keep those of the older weights, or recompute them."""
    checked_bytes: Annotated[int, Field(ge=0, le=1 << 50)] = 1 << 30
    """Bytes of an engine's tensors that are compared, for each version, with those published: all, where the model has
    no more, else others each time. Reading them takes memory bandwidth of the engine; 0 compares none."""
    canary_tokens: Annotated[int, Field(ge=0, le=1024)] = 20
    """Tokens of a fixed prompt whose log-probs under each version have to be the trainer's; 17 and more reach into the
    prefix cache of vLLM, whose blocks have 16. 0: none. The trainer computes them once per version."""
    canary_tolerance: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Most that the canary's log-probs may differ, in nats for each nat of a log-prob (the median over its tokens);
    none: what rounding explains in the engine's dtype. An engine that quantises needs another limit."""


class EvalConfig(Section):
    """The held-out score: rewards of greedy answers to tasks that are never trained on."""

    tasks: Count = 128
    """Held-out tasks of one evaluation; 0: no evaluation."""
    every: Count = 0
    """Training steps between evaluations; 0: only before and after training."""
    on_start: bool = True
    """Evaluate before the first training step."""
    replicas: Count = 0
    """Rollout replicas that an evaluation beside training has for itself: they are pinned to the version to be scored,
    take no training rollouts and no newer weights until it has ended. 0: all replicas, and newer weights as they come:
    the score may then be of several versions."""
    reward: Literal["configured", "environment"] = "configured"
    """Rewards that are the score: `configured`: those of `reward.source`, as in training; `environment`: the
    environment's own, which with a reward model are not trained on."""
    success_reward: Annotated[float, Field(ge=-1e9, le=1e9)] = 1.0
    """Reward from which an answer counts as a success, on the scale of `eval.reward`."""


class CheckpointConfig(Section):
    """Checkpoints from which a run resumes."""

    every: Count | None = None
    """Training steps between checkpoints, which are written while training goes on, one at a time; none: so often that
    steps wait for 2 % of the time, at most one a minute; 0: only at the end. The ledger covers the time in between."""
    keep_last: Annotated[int, Field(ge=1, le=10_000)] = 2
    """Number of newest checkpoints that are kept."""
    url: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9+.\-]*://[^\x00]+$")] | None = None
    """Where they are written as well, with the run's ledger and records, below the name of the run's folder: `s3://`,
    `gs://` or another protocol of fsspec. `asyncrl train --resume URL/RUN` needs nothing else of the run."""


class TelemetryConfig(Section):
    """What a run reports while it goes on."""

    trackers: Texts = ()
    """Trackers beside the run's own files: `tensorboard`, `trackio`, `wandb`, or `package.module:Tracker`."""
    trajectories_per_step: Annotated[int, Field(ge=0, le=100_000)] = 1
    """Trajectories of each training step that are written as readable text."""
    progress: Literal["auto", "rich", "plain", "none"] = "auto"
    """Live display; `auto`: rich on a terminal, plain lines elsewhere."""
    stall_timeout_s: Annotated[float, Field(gt=0, le=604_800)] = 7200.0
    """Longest time the trainer may wait; after a tenth of it the log reports the reason, past it the run ends."""


class AlgorithmConfig(Section):
    """Advantage, loss, correction, and the terms beside them: `docs/algorithms.md` has the formulas."""

    advantage: Part = "grpo"
    """Advantage estimator: an installed name, or `package.module:function`."""
    advantage_options: Table = Field(default_factory=dict)
    """Options of the advantage estimator."""
    credit: Literal["outcome", "branch", "turn"] = "outcome"
    """Which turns the advantages of rows are given to: those of the row; of each branch of a tree of turns, by what the
    branch earned; each turn by what it and those after it earned (docs/algorithms.md)."""
    loss: Part = "dapo"
    """Policy loss: an installed name, or `package.module:Class`."""
    loss_options: Table = Field(default_factory=dict)
    """Options of the loss, as in `{clip_ratio_high = 0.3}`."""
    anchor: Literal["proximal", "behaviour", "interpolated"] = "proximal"
    """Centre of the trust region: the weights at the start of the step, those that sampled, or between the two by
    staleness."""
    correction: Part = "tis"
    """Weight of tokens that older weights or another engine sampled: an installed name, or `package.module:Class`."""
    correction_options: Table = Field(default_factory=dict)
    """Options of the correction, as in `{cap = 5.0}`."""
    kl_coef: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the divergence from the reference policy; 0 loads no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "low_variance"] | None = None
    """Estimator of the divergence per token; none: k3 as a term of the loss, k1 in the reward."""
    kl_placement: Literal["loss", "reward"] = "loss"
    """Where the divergence counts: as a term of the loss, or subtracted from each row's reward (by k1 alone)."""
    target_kl: Annotated[float, Field(gt=0, le=100)] | None = None
    """Nats per token to which a penalty in the reward is controlled; none: kl_coef is constant."""
    kl_horizon: Annotated[float, Field(gt=0, le=1e12)] = 10_000.0
    """Rows over which the controlled coefficient can change by a fifth."""
    entropy_coef: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Weight of the entropy bonus."""
    loss_agg_mode: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    """How token losses are averaged: over all tokens, over each row and then over rows, or by a constant length."""
    whiten_advantages: bool = False
    """Shift and scale the advantages of a batch to mean 0 and variance 1 over its tokens; usual with `gae`."""
    max_mismatch_kl: Annotated[float, Field(gt=0, le=100)] | None = None
    """Most nats per token (k3 KL) between engine and trainer on the first step; none: a limit for `model.dtype`."""
    allow_unsound: bool = False
    """Log combinations that are known to go wrong instead of refusing them."""

    @model_validator(mode="before")
    @classmethod
    def _read_instances(cls, data: Any) -> Any:
        """Read a dataclass's instance as its class and the options that differ from the defaults, as a file has them.

        One with a field that no file can hold stays as it is.
        """
        data = dict(data) if isinstance(data, dict) else data
        for key in ("loss", "correction") if isinstance(data, dict) else ():
            part = data.get(key)
            if is_dataclass(part) and not isinstance(part, type):
                changed = {each.name: getattr(part, each.name) for each in fields(part) if each.init}
                defaults = {each.name: each.default for each in fields(part)}
                changed = {name: value for name, value in changed.items() if value is not defaults[name]}
                if all(isinstance(value, bool | int | float | str) for value in changed.values()):
                    data |= {key: type(part), f"{key}_options": {**changed, **data.get(f"{key}_options", {})}}
        return data

    @property
    def kl_in_reward(self) -> bool:
        """Whether the divergence from the reference is subtracted from the rewards."""
        return self.kl_placement == "reward" and self.kl_coef > 0

    @property
    def divergence_estimator(self) -> KLEstimator:
        """``kl_estimator``, or the one whose gradient is that of a divergence where it counts."""
        return self.kl_estimator or ("k1" if self.kl_in_reward else "k3")

    def objective(self, *, longest: int) -> PolicyObjective:
        """Return the objective; ``longest`` is the length that ``fixed_length`` divides by.

        Raises:
            ConfigError: a name that is not installed, or an option that a part does not take.
        """
        from asyncrl.algorithms import Correction, FunctionCorrection, FunctionLoss, PolicyLoss, PolicyObjective
        from asyncrl.errors import ConfigError
        from asyncrl.plugins import check_part, load_part, make_part, needs_argument

        parts: dict[str, object] = {}
        loss = ("loss", "asyncrl.policy_losses", self.loss, self.loss_options, PolicyLoss, FunctionLoss)
        correction = (
            *("correction", "asyncrl.corrections", self.correction, self.correction_options),
            *(Correction, FunctionCorrection),
        )
        for key, group, name, options, kind, of_function in (loss, correction):
            path = f"algorithm.{key}"
            if needs_argument(load_part(group, name, path=path), options):  # the tokens: it is a loss, and makes none
                part = check_part(group, name, None, options=options, path=path, table=f"{path}_options")
                part = part if isinstance(part, kind) else of_function(part, options)
            else:
                part = make_part(group, name, options=options, path=path, table=f"{path}_options")
            if not isinstance(part, kind):
                remedy = f"name a subclass of asyncrl.algorithms.{kind.__name__}"
                raise ConfigError(f"{path} = {name!r} is not a {kind.__name__}; {remedy}", path=path, remedy=remedy)
            parts[key] = part
        return PolicyObjective(
            **parts,  # type: ignore[arg-type]  # checked just above
            anchor=self.anchor,
            kl_coef=self.kl_coef if self.kl_placement == "loss" else 0.0,
            kl_estimator=self.divergence_estimator,
            entropy_coef=self.entropy_coef,
            loss_agg_mode=self.loss_agg_mode,
            fixed_length=longest if self.loss_agg_mode == "fixed_length" else None,
            whiten_advantages=self.whiten_advantages,
        )

    def controller(self, coefficient: float | None = None) -> KLController | None:
        """Return the controller of a KL penalty in the reward; None without a penalty.

        With ``target_kl`` it goes on at ``coefficient``, if one is given.
        """
        if not self.kl_in_reward:
            return None
        from asyncrl.algorithms import AdaptiveKL, FixedKL

        if self.target_kl is None:
            return FixedKL(coefficient=self.kl_coef)
        now = self.kl_coef if coefficient is None else coefficient
        return AdaptiveKL(coefficient=now, target=self.target_kl, horizon=self.kl_horizon, start=self.kl_coef)

    def estimator(self) -> AdvantageEstimator:
        """Return the advantage estimator; raise :class:`ConfigError` as :meth:`objective`."""
        from asyncrl.algorithms import load_estimator

        return load_estimator(self.advantage, options=self.advantage_options)
