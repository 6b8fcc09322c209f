"""The contracts: what the loop asks of its parts, and nothing about how they do it.

``asyncrl`` declares these Protocols and runs the loop; ``engines`` and ``buffers`` (or anybody's package) implement
them and are found by name through packaging entry points:

    asyncrl.rollout_engines     RolloutEngine       generates tokens
    asyncrl.training_engines    TrainingEngine      updates the policy
    asyncrl.value_engines       ValueEngine         values of tokens: the critic; scores of rows: the reward model
    asyncrl.weight_transports   WeightTransport     carries weights from one to the other
    asyncrl.replay_buffers      ReplayBuffer        holds finished groups until they are trained on
    asyncrl.ledgers             Ledger              keeps every prompt, and what was sampled for it, on the disk
    asyncrl.reward_models       RewardModel         turns rows into rewards
    asyncrl.environments        EnvironmentFactory  tasks, and the worlds they are solved in
    asyncrl.trackers            Tracker             receives metrics

Shapes: B rows, L tokens of a row, G rows per group, V vocabulary. Ragged columns are jagged nested tensors whose
row i has that row's own length.

The columns of a trajectory batch, from rollout to loss:

    input_ids             ragged int64    all tokens of the row: prompt, sampled, environment
    loss_mask             ragged bool     True where the token was sampled by the policy and may be trained on
    behaviour_log_probs   ragged float32  log-prob under the distribution it was sampled from; 0 where not sampled
    weight_versions       ragged int32    version that sampled the token; -1 where not sampled
    rewards               [B] float32     return of the whole trajectory
    advantages            [B] or ragged float32
    proximal_log_probs    ragged float32  optional: under the policy at the start of the step
    reference_log_probs   ragged float32  optional: under the frozen reference policy
    ages                  ragged float32  optional: versions the token is older than the weights that train on it
    turns                 ragged int32    number of the turn the token was sampled in, from 0; -1 where not sampled
    turn_rewards          ragged float32  one for each turn of the row: what the environment gave it
    values                ragged float32  optional: a critic's, before the token was sampled; 0 where not sampled
    returns               ragged float32  optional: what a critic is to say there
    slot                  [B] int64       number of the prompt in issue order: the group's identity
    row                   [B] int64       number of the row in its group, 0..G-1

``log_probs[t]`` always belongs to ``input_ids[t]``, given the tokens before it; entry 0 is 0 and never trained.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import torch

    from asyncrl.data import DataProto, DataProtoFuture
    from asyncrl.ledger import Began, LedgerEvent, LedgerPosition, LedgerStatistics, RecordedGroup, Recovered
    from asyncrl.weights.manifest import WeightManifest

__all__ = [
    "Closable",
    "CountedTasks",
    "DroppedGroup",
    "EngineHealth",
    "EngineSpawner",
    "Environment",
    "EnvironmentFactory",
    "FinishReason",
    "FittedPrompts",
    "Generation",
    "GenerationChunk",
    "GenerationRequest",
    "GroupSummary",
    "KVCachePolicy",
    "Ledger",
    "LedgerArchive",
    "Message",
    "PauseMode",
    "PromptFitting",
    "ReplayBuffer",
    "ReplayBufferStatistics",
    "RewardModel",
    "RolloutEngine",
    "RolloutEngineStatistics",
    "SamplingParams",
    "SelectedGroup",
    "SeparateEngine",
    "SpawningHost",
    "Step",
    "Task",
    "TextTracker",
    "TokenGenerator",
    "Tool",
    "TopLogProbs",
    "Tracker",
    "TrainingEngine",
    "ValueEngine",
    "VersionSpan",
    "WeightTransport",
]

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
PauseMode: TypeAlias = Literal["keep", "abort", "drain"]
KVCachePolicy: TypeAlias = Literal["keep", "recompute"]

TopLogProbs: TypeAlias = tuple[tuple[int, float], ...]
"""Token ids and their log-probs at one position, likeliest first."""

Message: TypeAlias = dict[str, Any]
"""A chat message in OpenAI's form: ``role``, ``content``, and for the assistant ``tool_calls``."""

Task: TypeAlias = dict[str, Any]
"""One problem: JSON-serialisable, made by an :class:`EnvironmentFactory`, understood by its environments."""


# --------------------------------------------------------------------------------------------------------- generation


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one request.

    ``temperature == 0`` is greedy. ``top_k == 0`` and ``top_p == 1`` switch the truncations off. Log-probs are
    reported of the distribution really sampled from: after temperature, top-k and top-p. Greedy ones are those of the
    untempered distribution.

    A ``seed`` makes the request reproducible, whatever runs beside it: token n depends on (seed, n, distribution).

    ``top_log_probs`` asks for the log-probs of so many of the likeliest tokens at each position besides.

    ``grammar`` (llguidance's dialect of Lark; empty for none) restricts the text: at each position only tokens that it
    can go on with may be sampled, and an end of the text only where it is complete. What is left is the distribution
    sampled from, so log-probs are of that. An engine that serves no grammars refuses the request.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_log_probs: int = 0
    grammar: str = ""

    def __post_init__(self) -> None:
        if self.top_log_probs < 0:
            raise ValueError(f"top_log_probs must be 0 (none) or positive, got {self.top_log_probs}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must lie in 0..100, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if any(not text for text in self.stop):
            raise ValueError("a stop string must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Token ids in. ``request_id`` is unique among the requests an engine holds.

    A request that was begun elsewhere goes on: the last ``continued_tokens`` ids of the prompt are what it has sampled
    so far. Only what follows is delivered, while ``max_new_tokens``, stop strings and the index of the token in a
    seeded request count from the first of them, as if it had never moved. One that is complete already ends at once,
    without a token.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    continued_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.continued_tokens <= max(len(self.prompt_token_ids) - 1, 0):
            raise ValueError(
                f"continued_tokens must leave a token of the prompt before them: got {self.continued_tokens} of "
                f"{len(self.prompt_token_ids)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """Some more tokens of one request, in order; the last chunk carries the ``finish_reason``.

    ``token_ids``, ``log_probs`` and ``weight_versions`` have the same length. A stop token is part of the tokens; the
    characters of a stop string are too (whoever shows text cuts them off).

    ``top_log_probs`` has, where they were asked for, for each token the likeliest ones at its position with their
    log-probs, in falling order; fewer than asked for where fewer could be sampled.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    top_log_probs: tuple[TopLogProbs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens ``start <= t < end`` of a generation were sampled under ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished request: the chunks put together."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason
    top_log_probs: tuple[TopLogProbs, ...] = ()

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Runs of equal versions, in order."""
        spans: list[VersionSpan] = []
        start = 0
        for end in range(1, len(self.weight_versions) + 1):
            if end == len(self.weight_versions) or self.weight_versions[end] != self.weight_versions[start]:
                spans.append(VersionSpan(version=self.weight_versions[start], start=start, end=end))
                start = end
        return tuple(spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Answer of a health probe: one token was really generated, in ``latency_s``, or ``error`` says why not."""

    healthy: bool
    latency_s: float
    weight_version: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineStatistics:
    """What an engine holds and has done. Counters only grow."""

    running: int
    waiting: int
    paused: bool
    weight_version: int
    tokens_generated: int
    prompt_tokens: int
    requests_finished: int
    requests_aborted: int
    kv_cache_tokens: int
    kv_cache_capacity_tokens: int
    decode_steps: int
    busy_s: float


class TokenGenerator(Protocol):
    """The face of an engine that an agent's turn loop needs."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """Stream one request. Leaving the iterator early (``aclose``, cancellation) aborts it in the engine.

        Raises:
            InvalidDataError: the prompt is empty, holds an id outside the vocabulary, or leaves no room to generate.
            EngineClosedError: the engine is closed, or closes meanwhile.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason ``abort``; what it has generated is delivered. False if it is unknown."""
        ...


@runtime_checkable
class RolloutEngine(TokenGenerator, Protocol):
    """Token ids in, token ids out, each stamped with its log-prob and the weight version that sampled it.

    An engine is driven from one event loop. It sees token ids only; text, chat templates and tools live above it.
    States: new -> running <-> paused -> closed. Calls after ``close`` raise :class:`EngineClosedError`.
    """

    @property
    def weight_version(self) -> int:
        """Version the next token will be sampled under."""
        ...

    async def start(self) -> None:
        """Load the model and begin to serve. Returns when a request would be served."""
        ...

    async def close(self) -> None:
        """Abort what runs, free everything. Idempotent."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding. ``keep`` freezes requests where they are, ``abort`` ends them, ``drain`` lets them finish.

        New requests wait until :meth:`resume`.
        """
        ...

    async def resume(self) -> None:
        """Go on. Idempotent."""
        ...

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """First phase: copy verified tensors into a shadow, while decoding goes on under the old weights.

        Raises:
            WeightMismatchError: a name, shape or dtype is not the model's. The old weights stay.
            WeightVersionError: ``version`` is not newer than the one held.
        """
        ...

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        """Second phase: swap the shadow in between two decode steps. Requests in flight go on.

        ``kv_cache`` says whether keys and values computed under older weights are kept or computed again. No entry of
        older weights serves a request that begins after the commit.

        Raises:
            WeightVersionError: ``version`` is not the prepared one.
        """
        ...

    async def health(self, deadline_s: float) -> EngineHealth:
        """Generate one real token within ``deadline_s``; never raises for an unhealthy engine."""
        ...

    def statistics(self) -> RolloutEngineStatistics: ...


@runtime_checkable
class SeparateEngine(RolloutEngine, Protocol):
    """A rollout engine in a process of its own: it fetches weights itself, and may be gone from one moment to the next.

    Once it is gone, every call raises :class:`EngineError` with the cause.
    """

    async def fetch_weights(self, manifest: WeightManifest) -> None:
        """As :meth:`prepare_weights`, with tensors that the engine's process pulls and verifies itself.

        Raises:
            WeightError: as :meth:`WeightTransport.pull` and :meth:`prepare_weights`.
        """
        ...

    async def wait_ended(self) -> str:
        """Wait until the process is gone; returns why."""
        ...


class EngineSpawner(Protocol):
    """Makes processes for engines faster than from nothing. Whoever made it closes it, after the engines."""

    async def close(self) -> None:
        """Free everything; processes that it made go on."""
        ...


@runtime_checkable
class SpawningHost(Protocol):
    """What the class of an engine that keeps others in processes may have: it takes ``spawner=`` then."""

    @staticmethod
    def spawner(engine: str, model_path: str) -> EngineSpawner:
        """For any number of processes that host ``engine`` with the model at ``model_path``."""
        ...


# ----------------------------------------------------------------------------------------------------------- training


class TrainingEngine(Protocol):
    """Holds the policy and its optimizer on every rank of a training group.

    Methods are collective: every rank calls the same ones in the same order, each with its own rows. Losses and
    gradients are normalised over the rows of *all* ranks, so the result does not depend on how rows are split.
    """

    def supervise(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step of cross-entropy on the tokens where ``loss_mask``. Metrics are equal on all ranks."""
        ...

    def update(self, batch: DataProto) -> dict[str, float]:
        """One policy step on a trajectory batch with ``advantages``. Metrics are equal on all ranks."""
        ...

    def log_probs(self, batch: DataProto) -> DataProto:
        """Columns ``log_probs`` and ``entropy`` (ragged float32, like ``input_ids``) under the current weights."""
        ...

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Full weights under their checkpoint names, one at a time, tied ones once. Collective: rank 0 uses them."""
        ...

    def save(self, folder: Path) -> None:
        """Everything that training goes on from: weights, optimizer, schedule, RNG. No pickle."""
        ...

    def load(self, folder: Path) -> None:
        """Counterpart of :meth:`save`, at any world size.

        Raises:
            CheckpointError: the folder is missing, damaged or of another model.
        """
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder (config and safetensors) from rank 0."""
        ...

    def close(self) -> None:
        """Leave the process group and free the model. Idempotent."""
        ...


class ValueEngine(Protocol):
    """Holds a model that says one number, and its optimizer, on every rank of a group; see :class:`TrainingEngine`."""

    def values(self, batch: DataProto) -> DataProto:
        """Column ``values`` (ragged float32, like ``input_ids``): before each token where ``loss_mask``, else 0."""
        ...

    def update(self, batch: DataProto) -> dict[str, float]:
        """One step towards ``returns`` of the tokens where ``loss_mask``. Metrics are equal on all ranks."""
        ...

    def scores(self, batch: DataProto) -> DataProto:
        """Column ``scores`` ([B] float32), read off the end of each row."""
        ...

    def compare(self, batch: DataProto) -> dict[str, float]:
        """One step on pairs: rows chosen, rejected, chosen, ... Metrics are equal on all ranks."""
        ...

    def save(self, folder: Path) -> None:
        """As :meth:`TrainingEngine.save`."""
        ...

    def load(self, folder: Path) -> None:
        """As :meth:`TrainingEngine.load`."""
        ...

    def export(self, folder: Path) -> None:
        """As :meth:`TrainingEngine.export`: a model for sequence classification with one label."""
        ...

    def close(self) -> None:
        """As :meth:`TrainingEngine.close`."""
        ...


class WeightTransport(Protocol):
    """Carries one version of the weights from the trainer to the engines.

    The publisher calls :meth:`publish`, sends the manifest (small, serialisable) to the pullers by other means, and
    calls :meth:`release` when they are done.
    """

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], *, version: int) -> WeightManifest:
        """Make the tensors available under ``version``. Versions grow; at most a bounded number are held.

        Raises:
            WeightVersionError: ``version`` is not newer than the last one published.
        """
        ...

    def pull(self, manifest: WeightManifest) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Verified tensors by name, valid inside the ``with`` block, without a copy where the transport allows it.

        Raises:
            WeightMismatchError: bytes differ from the manifest's checksum, or tensors are missing.
            WeightError: the version is not available any more.
        """
        ...

    def release(self, version: int) -> None:
        """Free what ``version`` occupies. Idempotent."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...


class RewardModel(Protocol):
    """Turns rows into rewards."""

    async def score(self, batch: DataProto) -> DataProto:
        """Column ``rewards`` ([B] float32) for a trajectory batch.

        Raises:
            RewardError: no reward could be computed; never replaced by a number.
        """
        ...

    async def close(self) -> None: ...


# ------------------------------------------------------------------------------------------------------- environments


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call: its name and JSON schema, as chat templates expect them."""

    name: str
    description: str
    parameters: dict[str, Any]

    def schema(self) -> dict[str, Any]:
        """OpenAI's ``{"type": "function", "function": {...}}``."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the environment answers: messages that extend the conversation, and whether the episode is over.

    ``reward`` is what this step earned; the trajectory's reward is the sum over its steps.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Environment(Protocol):
    """One world for one episode at a time. Asynchronous; whoever runs it sets the deadlines.

    A run that was killed shows the turns it has recorded to a new environment, and goes on from there if that answers
    as before. One that must not be shown them has an attribute ``replayable = False``: its episodes begin anew.
    """

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools to be declared in the prompt."""
        ...

    async def reset(self, task: Task) -> Sequence[Message]:
        """Begin an episode; returns the messages of the prompt (system, user, ...)."""
        ...

    async def step(self, reply: Message) -> Step:
        """Answer the assistant's message (``content``, and ``tool_calls`` already parsed).

        A mistake of the *model* (unknown tool, malformed call) is answered in messages or reward. A failure of the
        *environment* raises :class:`EnvironmentFailure`.
        """
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompts:
    """What became of the prompts of a data set: how many stay, how many were too long, and for what."""

    kept: int
    left_out: int
    longest_tokens: int


class EnvironmentFactory(Protocol):
    """Tasks by number, and the environments that pose them. Made from ``[env.options]`` of the configuration."""

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        """Task number ``index`` (from 0, unbounded: finite data sets wrap around). Same number, same task.

        The splits share no task.
        """
        ...

    def make(self) -> Environment: ...

    def demonstration(self, index: int) -> list[Message]:
        """A whole conversation for the supervised warm start: prompt, assistant turns, environment's answers.

        Raises:
            ConfigError: this environment has no demonstrations.
        """
        ...


@runtime_checkable
class PromptFitting(Protocol):
    """An environment factory that leaves out prompts that are too long. Asked once, before the first task. Blocks."""

    def fit_prompts(self, count_tokens: Callable[[Sequence[Message]], int], *, below: int) -> FittedPrompts: ...


@runtime_checkable
class CountedTasks(Protocol):
    """An environment factory with an end of held-out tasks: after so many they come again."""

    @property
    def held_out_rows(self) -> int: ...


@runtime_checkable
class Closable(Protocol):
    """An environment factory that holds something its environments share: it is closed after the last of them."""

    async def aclose(self) -> None: ...


# ------------------------------------------------------------------------------------------------------------- buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What the driver knows of a finished group without fetching its rows.

    Attributes:
        slot: number of the prompt in issue order.
        rows: G.
        oldest_version: lowest weight version among the tokens to be trained.
        tokens: tokens sampled by the policy in the whole group.
        version_tokens: how many of them were sampled under each version.
        rewards: one per row.
        lengths: sampled tokens per row.
        environment: what the task calls its ``environment``, where several are mixed; quotas go by it.
        reward_parts: what the rewards were made of, by name; one number per row that has the part.
        turn_rewards: for each row, what each of its turns earned.
        turn_anchors: for each row, a hash of what the environment said before each turn: the state it began in.
    """

    slot: int
    rows: int
    oldest_version: int
    tokens: int
    version_tokens: Mapping[int, int]
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    environment: str = ""
    reward_parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    turn_anchors: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedGroup:
    """A group handed out by the buffer: its summary, its rows where they lie, how many steps trained on it before."""

    summary: GroupSummary
    rows: DataProto | DataProtoFuture
    uses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that was given up: its slot, why, and how many tokens had been sampled for it."""

    slot: int
    reason: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBufferStatistics:
    """Counts in groups, and what became of tokens. ``admitted = pending + ready + selected + released + dropped``."""

    capacity: int
    admitted: int
    pending: int
    ready: int
    selected: int
    released: int
    dropped: Mapping[str, int]
    dropped_tokens: Mapping[str, int]
    ready_tokens: int
    waiting: Mapping[str, float]


class ReplayBuffer(Protocol):
    """Holds groups from admission until they are trained on. Never polls: every wait is a condition with a reason.

    A group's life: admitted (pending) -> ready -> selected -> released, or dropped with a reason from any of the first
    three. ``max_staleness`` is given to the buffer when it is made and is hard: :meth:`select` never returns a group
    with ``weight_version - oldest_version > max_staleness``; it drops it (reason ``stale``) and goes on.
    """

    async def admit(self, slot: int, *, again: bool = False, timeout_s: float | None = None) -> None:
        """Reserve a place for the group ``slot``; waits while the buffer is full.

        ``again`` of a group that an earlier run had admitted: it is never held back for more than its place. A resumed
        run takes up all of them before it trains.

        Raises:
            InvalidDataError: the slot was admitted before.
            DeadlineError: still full after ``timeout_s``.
            BufferClosedError: closed.
        """
        ...

    def put(
        self, summary: GroupSummary, rows: DataProto | DataProtoFuture, *, uses: int = 0, promised: int = 0
    ) -> None:
        """The first rows of a pending group; it is ready unless the buffer was made to wait for further columns.

        A slot that is unknown or not pending raises :class:`InvalidDataError`. ``uses`` is how many steps of an earlier
        run trained on it; ``promised`` how many are to be done again and will take it by its number
        (:meth:`select` with ``slots``): until then it is neither handed out nor given up.
        """
        ...

    def extend(
        self,
        slot: int,
        columns: Collection[str],
        rows: DataProto | DataProtoFuture,
        *,
        rewards: tuple[float, ...] | None = None,
    ) -> None:
        """Further columns of a pending group, before or after :meth:`put`; ``rewards`` replace those of its summary."""
        ...

    async def select(
        self,
        groups: int,
        *,
        weight_version: int,
        slots: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[SelectedGroup, ...]:
        """Wait for ``groups`` groups that may be trained at ``weight_version`` and take them, in the policy's order.

        With ``slots`` take exactly these, as an earlier run did.
        """
        ...

    def release(self, slots: Iterable[int]) -> None:
        """The groups were trained on; forget their rows."""
        ...

    def drop(self, slot: int, reason: str, *, tokens: int = 0) -> None:
        """Give a group up. ``tokens`` counts what was sampled for a pending group; others know theirs."""
        ...

    def on_drop(self, listener: Callable[[DroppedGroup], None]) -> None:
        """Tell ``listener`` of every group that is dropped from now on, by :meth:`drop` or by the buffer itself.

        A call of :meth:`select` that waits may drop stale groups and then needs others in their place: whoever admits
        groups learns of it here.
        """
        ...

    def restore(self, slots: Iterable[int]) -> None:
        """Give selected groups back as ready: their step did not happen."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """Wake every waiter with :class:`BufferClosedError` (caused by ``error``). Idempotent."""
        ...

    async def settled(self) -> None:
        """Wait until everything it was told so far is in :meth:`statistics`, and every drop was told."""
        ...

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """As :meth:`Ledger.query`, of the ledger that the buffer was made with: ``ledger``, None where none is kept.

        Raises:
            LedgerError: the buffer was made without a ledger, or the condition is none.
        """
        ...

    def statistics(self) -> ReplayBufferStatistics: ...

    def explain(self) -> Sequence[str]:
        """One sentence for every wait in progress: what waits, for how long, and what for."""
        ...


@runtime_checkable
class PlacedReplayBuffer(ReplayBuffer, Protocol):
    """A replay buffer that lives in a worker of its own. What is told to it is done there, in order, a little later."""

    def worker(self) -> tuple[type[Any], Any]:
        """The class of that worker, and the one argument it is made from."""
        ...

    async def attach(self, group: Any) -> None:
        """Live in the one worker of this group from now on."""
        ...

    async def aclose(self) -> None:
        """Let go of the worker, which its group closes. Idempotent."""
        ...


class Ledger(Protocol):
    """Keeps every prompt from issue to use on the disk, with the rows sampled for it. Its words: :mod:`asyncrl.ledger`.

    ``append`` decides at once whether an event may happen, and never waits; events become durable in the order in which
    they were appended. At every instant, and after every recovery: issued = consumed + dropped + failed + live.
    """

    @classmethod
    def archive(cls, path: Path) -> LedgerArchive:
        """Open a ledger's file to read only; its run may still be writing it. Blocks.

        Raises:
            LedgerError: there is no ledger of this kind.
        """
        ...

    @property
    def recovered(self) -> Recovered | None:
        """What a resumed ledger found; None of one that began here."""
        ...

    def append(self, event: LedgerEvent, *more: LedgerEvent, rows: bytes | None = None) -> bool:
        """Let ``event`` happen, and ``more`` with it.

        ``rows`` come with a completed group (``rollout/record.py``), or are turns (``rollout/turns.py``).

        Returns:
            False if it came late or twice: then its result must not be used. Of turns, False if all of them did.

        Raises:
            InvalidDataError: the life of a prompt does not have it.
            LedgerError: the ledger cannot be written.
        """
        ...

    async def room(self) -> None:
        """Wait while more waits to be written than should."""
        ...

    async def durable(self) -> LedgerPosition:
        """Wait until everything appended so far is on the disk; where that is."""
        ...

    def attempt(self, slot: int) -> int:
        """Number of the newest attempt at a live prompt; -1 before the first."""
        ...

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """Recorded trajectories for which the SQL condition ``where`` holds. Blocks."""
        ...

    def statistics(self) -> LedgerStatistics: ...

    async def aclose(self) -> None:
        """Write what is left and close the file. Idempotent."""
        ...


class LedgerArchive(Protocol):
    """A ledger for those who only read it: what its run was trained on, and by which processes."""

    @property
    def problems(self) -> Sequence[str]:
        """Damage, in words; what comes before it can be trusted."""
        ...

    @property
    def first_step(self) -> int:
        """Step after which it begins; 0 unless an earlier ledger was lost."""
        ...

    @property
    def batches(self) -> Mapping[int, Sequence[int]]:
        """Prompts by the step that trained on them, in order; what a resumption undid is not among them."""
        ...

    @property
    def lives(self) -> Sequence[Began]:
        """Processes that trained; each counts from its step to that of the next."""
        ...

    @property
    def weights(self) -> Mapping[int, str]:
        """Fingerprints of the weights that were published, by version."""
        ...

    def group(self, slot: int) -> RecordedGroup | None:
        """The rows of a completed prompt; None if they were not kept, or are not what was written. Blocks."""
        ...

    def missing_rows(self) -> Sequence[int]:
        """Prompts that a step trained on, and whose rows are not there. Blocks."""
        ...

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """As :meth:`Ledger.query`."""
        ...

    def close(self) -> None: ...


class Tracker(Protocol):
    """Receives metrics as they are logged (a file, a web service, a screen)."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class TextTracker(Tracker, Protocol):
    """One that shows texts too: trajectories, to be read."""

    def log_text(self, name: str, text: str, *, step: int) -> None: ...
