"""The contracts between the training loop and its parts, in the order in which a batch passes through them.

``asyncrl`` declares these Protocols and runs the loop. ``engines``, ``buffers`` or any other package implements them.
Parts are found by name through packaging entry points:

    asyncrl.rollout_engines     RolloutEngine       samples tokens
    asyncrl.environments        EnvironmentFactory  provides tasks, and the environments that pose them
    asyncrl.ledgers             Ledger              records every group on disk (:mod:`asyncrl.ledger`)
    asyncrl.replay_buffers      ReplayBuffer        holds finished groups until they are trained on
    asyncrl.reward_models       RewardModel         scores rows
    asyncrl.training_engines    TrainingEngine      updates the policy
    asyncrl.value_engines       ValueEngine         a critic, or a trained reward model
    asyncrl.weight_transports   WeightTransport     carries weights to rollout engines (:mod:`asyncrl.weights`)
    asyncrl.trackers            Tracker             receives metrics

Shapes: B rows, L tokens of a row, G rows per group, V vocabulary. Ragged columns are jagged nested tensors: row i has
its own length.

The columns of a trajectory batch, from rollout to loss:

    input_ids             ragged int64    all tokens of the row: prompt, sampled, environment
    loss_mask             ragged bool     True where the policy sampled the token and it may be trained on
    behaviour_log_probs   ragged float32  log-prob under the distribution it was sampled from; 0 where not sampled
    weight_versions       ragged int32    version that sampled the token; -1 where not sampled
    rewards               [B] float32     return of the whole trajectory
    advantages            [B] or ragged float32
    proximal_log_probs    ragged float32  optional: under the policy at the start of the step
    reference_log_probs   ragged float32  optional: under the frozen reference policy
    staleness             ragged float32  optional: versions between the sampled token and the weights that train on it
    turns                 ragged int32    index of the turn that sampled the token, from 0; -1 where not sampled
    turn_rewards          ragged float32  one per turn of the row: the environment's reward for it
    branches              ragged int32    of a tree of turns, three per turn (:mod:`asyncrl.rollout.branches`)
    values                ragged float32  optional: the critic's value before the token was sampled; 0 where not sampled
    returns               ragged float32  optional: the critic's target at that place
    group_id              [B] int64       the group's number in issue order
    row                   [B] int64       number of the row in its group, 0..G-1

``log_probs[t]`` belongs to ``input_ids[t]``, given the tokens before it; entry 0 is 0 and never trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    import torch

    from asyncrl.data import DataProto, DataProtoFuture
    from asyncrl.mesh import MemoryPlan
    from asyncrl.weights import WeightManifest


FinishReason: TypeAlias = Literal["stop", "length", "abort"]
PauseMode: TypeAlias = Literal["keep", "abort", "drain"]
KVCachePolicy: TypeAlias = Literal["keep", "recompute"]

LEAST_TEMPERATURE = 1e-4
"""The lowest temperature that is not greedy: logits divided by much less overflow float32."""

TopLogProbs: TypeAlias = tuple[tuple[int, float], ...]
"""Token ids and their log-probs at one position, likeliest first."""

Message: TypeAlias = dict[str, Any]
"""A chat message in OpenAI's form: ``role``, ``content``, and for the assistant ``tool_calls``."""

Task: TypeAlias = dict[str, Any]
"""One problem: JSON-serialisable, made by an :class:`EnvironmentFactory`, understood by its environments."""


# ---------------------------------------------------------------------------------------------- requests and chunks


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How to sample one request.

        >>> SamplingParams(max_new_tokens=64, top_p=90)
        Traceback (most recent call last):
        ValueError: top_p must lie in (0, 1], got 90

    Log-probs are those of the distribution that was sampled from: after grammar, allowed and bad tokens, bias,
    penalties, temperature, min_p, top-k and top-p, which are applied in this order. Greedy ones are those of the
    distribution at temperature 1, before min_p, top-k and top-p.

    Attributes:
        temperature: 0 for greedy, else at least ``LEAST_TEMPERATURE``.
        top_p, top_k: 1 and 0 for off.
        min_p: tokens less likely than this share of the likeliest one's probability are not sampled; 0 for off.
        presence_penalty, frequency_penalty: subtracted from the logit of a token that was sampled before, once and for
            each time; -2..2.
        repetition_penalty: divides the logit of a token of the prompt or sampled before where it is positive, and
            multiplies it where it is negative; 0.01..100, 1 for off.
        logit_bias: token ids, and what is added to their logits; -100..100.
        allowed_token_ids: only these are sampled; all if there are none.
        bad_words: texts that are not sampled, at the beginning of a word or within one, as the tokenizer spells them:
            the last token of a spelling is forbidden where the others have just been sampled.
        min_tokens: among the first so many tokens there is no end and no stop token, except where a grammar permits
            nothing else, and no stop string begins in them.
        ignore_eos: the model's end of sequence is a token like others; stop tokens of the request still end it.
        seed: makes the request reproducible, whatever else the engine runs: token n depends on (seed, n, distribution).
        top_log_probs: how many of the likeliest tokens at each position to report as well.
        prompt_log_probs: whether to report the prompt's tokens, and how many of the likeliest with each; None for not.
            Theirs are log-probs of the model: temperature 1, nothing cut off.
        grammar: in llguidance's dialect of Lark; empty for none. At each position only tokens that can continue the
            text may be sampled, and the end only where the text is complete. An engine without grammars refuses the
            request.

    Raises:
        ValueError: a number is out of its range, a stop string or a bad word is empty, or ``ignore_eos`` meets a
            grammar, whose text has an end.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    top_log_probs: int = 0
    prompt_log_probs: int | None = None
    grammar: str = ""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if (self.prompt_log_probs or 0) < 0:
            raise ValueError(f"prompt_log_probs must be None, 0 or positive, got {self.prompt_log_probs}")
        if self.top_log_probs < 0:
            raise ValueError(f"top_log_probs must be 0 (none) or positive, got {self.top_log_probs}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must lie in 0..100, got {self.temperature}")
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if "" in self.stop:
            raise ValueError("a stop string must not be empty")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must lie in 0..1, got {self.min_p}")
        if not -2.0 <= self.presence_penalty <= 2.0:
            raise ValueError(f"presence_penalty must lie in -2..2, got {self.presence_penalty}")
        if not -2.0 <= self.frequency_penalty <= 2.0:
            raise ValueError(f"frequency_penalty must lie in -2..2, got {self.frequency_penalty}")
        if not 0.01 <= self.repetition_penalty <= 100.0:  # beyond, logits overflow
            raise ValueError(f"repetition_penalty must lie in 0.01..100 (1 is off), got {self.repetition_penalty}")
        for token, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias must lie in -100..100, got {bias} for token {token}")
        if self.bad_words and not all(map(str.strip, self.bad_words)):
            raise ValueError("bad_words must not hold an empty or blank text")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_tokens must lie in 0..{self.max_new_tokens} (the most new tokens), got {self.min_tokens}"
            )
        if self.ignore_eos and self.grammar:
            raise ValueError("ignore_eos goes on after the end that a grammar gives the text: give one of them")

    def ending_at(self, token: int) -> SamplingParams:
        """Return these with one more stop token, the end of a chat's turn; with ``ignore_eos`` these as they are."""
        if self.ignore_eos:
            return self
        return replace(self, stop_token_ids=tuple(sorted({*self.stop_token_ids, token})))


class GenerationRequest(Struct, frozen=True, kw_only=True):
    """A prompt to be continued. ``request_id`` is unique among the requests that an engine holds.

    A request can move from one engine to another: the last ``continued_tokens`` ids of the prompt are those that it has
    sampled already. Only the tokens after them are delivered, but ``max_new_tokens``, stop strings and the token index
    of a seeded request count from the first of them. A request that is already complete ends at once, without a token.

    A ``probe`` checks the engine: it goes before all others, beside the most that may run, where the engine can do so.
    ``adapter`` is the name of the one that the request is for (:class:`AdapterEngine`). Requests of one ``session``
    follow one another, each with the tokens of the last at its beginning (:class:`SessionEngine`); empty for none.

    Raises:
        ValueError: ``continued_tokens`` is negative, or leaves no token of the prompt.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    continued_tokens: int = 0
    probe: bool = False
    adapter: str = ""
    session: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.continued_tokens <= max(len(self.prompt_token_ids) - 1, 0):
            raise ValueError(
                f"continued_tokens must leave a token of the prompt before them: got {self.continued_tokens} of "
                f"{len(self.prompt_token_ids)}"
            )


class GenerationChunk(Struct, frozen=True, kw_only=True):
    """The next tokens of one request; the last chunk carries the ``finish_reason``.

    ``token_ids``, ``log_probs`` and ``weight_versions`` have the same length. Stop tokens and the characters of stop
    strings are part of the tokens. ``top_log_probs``, where requested, has one entry per token, in falling order; an
    entry is shorter than requested where fewer tokens could be sampled. The chunk of the first token has, where
    requested, ``prompt_log_probs`` and ``prompt_top_log_probs``: an entry per token of the prompt, 0 and () for the
    first of them.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    top_log_probs: tuple[TopLogProbs, ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top_log_probs: tuple[TopLogProbs, ...] = ()


class VersionSpan(Struct, frozen=True, kw_only=True):
    """Tokens ``start <= t < end`` of a generation were sampled under ``version``."""

    version: int
    start: int
    end: int


class Generation(Struct, frozen=True, kw_only=True):
    """A finished request: its chunks joined.

    >>> answer = Generation(
    ...     token_ids=(8, 9, 2), log_probs=(-0.5, -0.1, -0.2), weight_versions=(3, 3, 4), finish_reason="stop"
    ... )
    >>> answer.spans
    (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3))
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason
    top_log_probs: tuple[TopLogProbs, ...] = ()
    prompt_log_probs: tuple[float, ...] = ()
    prompt_top_log_probs: tuple[TopLogProbs, ...] = ()

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        spans: list[VersionSpan] = []
        start = 0
        for version, run in groupby(self.weight_versions):
            end = start + len(list(run))
            spans.append(VersionSpan(version=version, start=start, end=end))
            start = end
        return tuple(spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Result of a health probe: one token was generated in ``latency_s``, or ``error`` is the reason why not."""

    healthy: bool
    latency_s: float
    weight_version: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineStatistics:
    """State and counters of an engine. Counters only grow.

    ``weight_version`` is that of the next token. ``requests_finished`` ended with ``stop`` or ``length``.
    ``kv_cache_tokens`` are in the KV cache now; an engine may count whole blocks, or for each request what several
    share. ``busy_s`` are the seconds spent in ``decode_steps``, the forward passes that sampled.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShare:
    """What an engine takes of the GPUs that its process sees; a class method ``device_share(**options)`` returns it.

    Attributes:
        count: how many; 0 if its options name a device (``cpu``, ``cuda:1``).
        room: options that leave room for another engine on the same GPUs; empty where those that it has do.
    """

    count: int = 1
    room: str = ""


# -------------------------------------------------------------------------------------------------- rollout engines


class TokenGenerator(Protocol):
    """The part of a rollout engine that an agent's turn loop needs."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """Stream one request. Leaving the iterator early (``aclose``, cancellation) aborts it in the engine.

        Raises:
            InvalidDataError: the prompt is empty, holds an id outside the vocabulary, or leaves no room to generate.
            EngineClosedError: the engine is closed, or is closed meanwhile.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """End a request with finish reason ``abort`` and deliver what it has sampled. False if it is unknown."""
        ...


@runtime_checkable
class RolloutEngine(TokenGenerator, Protocol):
    """Token ids in, token ids out, each with its log-prob and the weight version that sampled it.

    An engine is driven from one event loop and processes token ids only; text, chat templates and tools are above it.
    States: new -> running <-> paused -> closed. Calls after ``close`` raise :class:`EngineClosedError`.

    >>> from asyncrl.testing import VersionEchoEngine
    >>> async def swap():
    ...     engine = VersionEchoEngine()  # every token is the version that sampled it
    ...     await engine.start()
    ...     sampling = SamplingParams(max_new_tokens=4)
    ...     request = GenerationRequest(request_id="a", prompt_token_ids=(5, 6), sampling=sampling)
    ...     tokens = ()
    ...     async for chunk in engine.generate(request):
    ...         tokens += chunk.token_ids
    ...         if len(tokens) == 2:
    ...             await engine.prepare_weights({}, version=1)
    ...             await engine.commit_weights(1)
    ...     await engine.close()
    ...     return tokens
    >>> asyncio.run(swap())
    (0, 0, 1, 1)
    """

    pulls_weights: ClassVar[bool]
    """Whether the class is an :class:`OutOfProcessEngine`: it takes ``transport``, a TransportSpec or None."""

    @property
    def weight_version(self) -> int:
        """Return the version that the next token will be sampled under."""
        ...

    async def start(self) -> None:
        """Load the model and begin to serve. Return when the engine accepts requests.

        Raises:
            EngineError: the model cannot be loaded, or the engine does not serve its kind.
        """

    async def close(self) -> None:
        """Abort all requests and free everything. Idempotent."""

    async def pause(self) -> None:
        """Stop decoding: running requests are frozen, and new ones wait until :meth:`resume`.

        Returns when no step is running.
        """

    async def resume(self) -> None:
        """Continue decoding. Idempotent."""

    async def prepare_weights(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Copy verified tensors into a shadow (the first phase), while decoding continues under the old weights.

        Another prepare before the commit replaces the first. A cancelled one leaves nothing prepared, and returns only
        when ``tensors`` are not read any more.

        Raises:
            WeightMismatchError: a name, shape or dtype is not the model's. The old weights stay.
            WeightVersionError: ``version`` is not newer than the current one.
        """

    async def commit_weights(self, version: int, *, kv_cache: KVCachePolicy = "keep") -> None:
        """Swap the shadow in between two decode steps (the second phase). Requests in flight continue.

        ``kv_cache`` decides whether their keys and values, computed under older weights, are kept or recomputed.
        Requests that begin after the commit never use cache entries of older weights.

        Raises:
            WeightVersionError: ``version`` is not the prepared one.
        """

    async def health(self, deadline_s: float) -> EngineHealth:
        """Generate one real token within ``deadline_s``; never raises for an unhealthy engine.

        An engine that is paused or asleep is unhealthy: the probe does not make it decode.
        """
        ...

    def statistics(self) -> RolloutEngineStatistics: ...


@runtime_checkable
class SessionEngine(RolloutEngine, Protocol):
    """An engine that keeps the keys and values of a session's last request for its next one, while it has room.

    They are used as far as the next prompt begins with the same tokens, and never after a commit of weights.
    """

    def forget_session(self, session: str) -> None:
        """Free what is kept of a session: it has ended, or the room is worth more. Nothing may be kept of it."""


@runtime_checkable
class SleepingEngine(RolloutEngine, Protocol):
    """Optional capability: free the device memory for a while, for a trainer on the same device.

    ``sleep_options`` are the options of its constructor with which it can.
    """

    sleep_options: ClassVar[Mapping[str, Any]]

    async def sleep(self) -> None:
        """Free the memory of KV cache and weights. Idempotent.

        Nothing is decoded until :meth:`wake`, not even after :meth:`resume`. Requests in flight lose nothing: their
        keys and values are recomputed afterwards. Weights may be prepared meanwhile; an engine may refuse to commit
        them before :meth:`wake` (:class:`~asyncrl.errors.WeightError`).
        """

    async def wake(self) -> None:
        """Allocate the memory again and continue, unless paused. Idempotent."""


@runtime_checkable
class ZeroCopyEngine(RolloutEngine, Protocol):
    """Optional capability: serve from the pulled tensors themselves, so that the engines of a host share one copy."""

    async def prepare_shared_weights(
        self, leased: AbstractContextManager[Mapping[str, torch.Tensor]], *, version: int
    ) -> None:
        """As :meth:`prepare_weights`, with tensors that the engine may keep and serve from.

        The engine enters the context ``leased`` and exits it when it no longer needs the tensors: when prepared
        weights are replaced before their commit, when a newer version is committed, when the engine is closed, or on
        an error.

        Raises:
            WeightError: as :meth:`WeightTransport.pull` and :meth:`prepare_weights`.
        """


@runtime_checkable
class LiveWeightsEngine(RolloutEngine, Protocol):
    """Optional capability: read the tensors that it serves from, to compare them with the published ones."""

    async def live_checksums(self, names: Collection[str]) -> Mapping[str, tuple[str, int]]:
        """Return the dtype and the checksum of published tensors as they serve, as in a ``TensorEntry``.

        They are read while decoding goes on; no commit takes effect meanwhile.
        """
        ...


@runtime_checkable
class AdapterEngine(RolloutEngine, Protocol):
    """Optional capability: serve adapters beside the weights that it was started with, several in one batch.

    A class that does so takes ``max_adapter_rank``. What a request for an adapter samples has the version of that
    adapter; ``weight_version`` is the newest of them all. A commit concerns the requests of the adapters it changes.
    """

    @property
    def adapters(self) -> Mapping[str, int]:
        """Return the versions of the adapters that serve, by name."""
        ...

    async def prepare_adapters(
        self, parts: Sequence[tuple[WeightManifest, Mapping[str, torch.Tensor]]], *, version: int
    ) -> None:
        """As :meth:`prepare_weights`, of adapters with their manifests; those that are not named stay.

        Raises:
            WeightMismatchError: a tensor is missing, or its name, shape or dtype does not fit the model or the rank;
                or a module is adapted, or left out, that the adapter's last version did not adapt, or did.
        """


@runtime_checkable
class LiveAdapterEngine(AdapterEngine, Protocol):
    """Optional capability: read the adapters that it serves, to compare them with the published ones."""

    async def adapter_checksums(self, name: str) -> Mapping[str, tuple[str, int]]:
        """Return the dtype and the checksum of each tensor of an adapter as it serves."""
        ...


@runtime_checkable
class OutOfProcessEngine(RolloutEngine, Protocol):
    """Optional capability: the engine runs in a process of its own, which pulls weights itself and can die at any time.

    Once the process has died, every call raises :class:`EngineError` with the cause.
    """

    async def fetch_weights(self, manifest: WeightManifest) -> None:
        """As :meth:`prepare_weights`, with tensors that the engine's process pulls and verifies itself.

        Raises:
            WeightError: as :meth:`WeightTransport.pull` and :meth:`prepare_weights`.
        """

    async def wait_ended(self) -> str:
        """Wait until the process has ended; return the reason."""
        ...


# ------------------------------------------------------------------------------------------- environments and tools


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call: its name and JSON schema, as chat templates expect them."""

    name: str
    description: str
    parameters: dict[str, Any]

    def schema(self) -> dict[str, Any]:
        """Return OpenAI's ``{"type": "function", "function": {...}}``."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's answer: messages that extend the conversation, and whether the episode is over.

    ``reward`` is for this step alone; the trajectory's reward is the sum over its steps. The ``info`` of the last
    step is kept, and is plain data: None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and tensors.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Environment(Protocol):
    """Runs one episode at a time. The caller sets the deadlines.

    A resumed run replays recorded turns against a new environment and continues the episode if the answers are the
    same, unless the environment declares otherwise (:class:`EnvironmentReplay`).

    >>> class Sums:
    ...     tools = ()
    ...
    ...     async def reset(self, task):
    ...         self.sum = str(task["a"] + task["b"])
    ...         return [{"role": "user", "content": f"{task['a']} + {task['b']}?"}]
    ...
    ...     async def step(self, reply):
    ...         return Step(reward=float(reply["content"] == self.sum), done=True)
    ...
    ...     async def close(self):
    ...         pass
    >>> environment = Sums()
    >>> asyncio.run(environment.reset({"a": 2, "b": 2}))
    [{'role': 'user', 'content': '2 + 2?'}]
    >>> asyncio.run(environment.step({"role": "assistant", "content": "4"})).reward
    1.0
    """

    @property
    def tools(self) -> Sequence[Tool]: ...

    async def reset(self, task: Task) -> Sequence[Message]:
        """Begin an episode of a task, a copy of its own; return the messages of the prompt (system, user, ...)."""
        ...

    async def step(self, reply: Message) -> Step:
        """Answer the assistant's message (``content``, and ``tool_calls`` already parsed).

        A mistake of the model (unknown tool, malformed call) is answered in messages or reward.

        Raises:
            EnvironmentFailure: the environment itself failed.
        """
        ...

    async def close(self) -> None:
        """Free what the episode used, whether it is finished or not."""


@runtime_checkable
class EnvironmentReplay(Environment, Protocol):
    """Optional capability of an environment: with ``replayable = False``, its episodes start over in a resumed run."""

    replayable: bool


@runtime_checkable
class DeterministicEnvironment(Environment, Protocol):
    """Optional capability of an environment: the same turns of the same task earn the same rewards again.

    ``deterministic`` is read once it is reset, so that it may depend on the task. Where it is True, a share of the
    finished rows is played again in a new environment, to check that every row has the reward it earned. Environments
    of a class with ``deterministic = False`` are not made again for that.
    """

    @property
    def deterministic(self) -> bool: ...


@runtime_checkable
class EnvironmentWait(Protocol):
    """Optional capability of an environment: ``reset`` may wait ``wait_s`` for its turn, beside ``env.deadline_s``."""

    @property
    def wait_s(self) -> float: ...


class EnvironmentFactory(Protocol):
    """Provides tasks by number, and environments for them. Made from ``[env.options]`` of the configuration.

    >>> from asyncrl.testing import EchoFactory
    >>> words = EchoFactory(turns=2)  # [env] name = "asyncrl.testing:EchoFactory", options = { turns = 2 }
    >>> words.task(1, split="train"), words.task(1, split="held_out")
    ({'word': 'word2', 'turns': 2}, {'word': 'word3', 'turns': 2})
    >>> asyncio.run(words.make().reset(words.task(1, split="train")))
    [{'role': 'user', 'content': 'word2'}]
    """

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        """Return task number ``index`` (from 0, unbounded: finite data sets wrap around). Same number, same task.

        The splits share no task.
        """
        ...

    def make(self) -> Environment: ...

    def demonstration(self, index: int) -> list[Message]:
        """Return a whole conversation for supervised fine-tuning: prompt, assistant turns, environment's answers.

        Raises:
            ConfigError: this environment has no demonstrations.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredPrompts:
    """Result of a filter by length: prompts kept and left out, and tokens of the longest prompt of all."""

    kept: int
    left_out: int
    longest_tokens: int


class PromptLength(Protocol):
    """Returns the number of tokens of a prompt, with the declarations of the tools that its episode begins with."""

    def __call__(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int: ...


@runtime_checkable
class OverlongPromptFilter(Protocol):
    """Optional capability of an environment factory: leave out prompts that are too long."""

    def filter_overlong_prompts(self, count_tokens: PromptLength, *, below: int) -> FilteredPrompts:
        """Keep the tasks whose prompt has fewer than ``below`` tokens. Called once, before the first task. Blocks.

        Raises:
            ConfigError: no task is left.
        """
        ...


@runtime_checkable
class TaskDifficulty(Protocol):
    """Optional capability of an environment factory: it sorts its tasks by difficulty (:mod:`asyncrl.curriculum`)."""

    def difficulty(self, task: Task) -> str:
        """Return a name that tasks of about the same difficulty share. There are few of them."""
        ...


@runtime_checkable
class FiniteHeldOutTasks(Protocol):
    """Optional capability of an environment factory: its held-out tasks repeat after ``held_out_rows``."""

    @property
    def held_out_rows(self) -> int: ...


@runtime_checkable
class ClosableFactory(Protocol):
    """Optional capability of an environment factory: it shares a resource between its environments."""

    async def aclose(self) -> None:
        """Free the shared resource, after the last environment was closed."""


# ----------------------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """The driver's record of a finished group, whose rows it does not fetch.

    Attributes:
        group_id: the group's number in issue order.
        rows: G.
        oldest_version: lowest weight version among the tokens to be trained.
        tokens: tokens that the policy sampled in the whole group, the sum of ``version_tokens`` and of ``lengths``.
        version_tokens: how many of them were sampled under each version.
        rewards, lengths: one per row; a length counts sampled tokens.
        environment: the task's ``environment``, where several are mixed; quotas are by this name.
        reward_parts: components of the rewards, by name; one number per row that has the component.
        turn_rewards: for each row, the reward of each of its turns.
        turn_anchors: for each row and turn, a hash of the state that it began in: of the environment's messages before
            it, or without any of all that it saw.
        turn_parents: for each row, the turn that each turn continues (-1: none); empty for lines.
    """

    group_id: int
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
    turn_parents: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedGroup:
    """A group that the buffer has returned; ``uses`` counts the steps that have trained on it before."""

    summary: GroupSummary
    rows: DataProto | DataProtoFuture
    uses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that will not be trained on; ``tokens`` were sampled for it."""

    group_id: int
    reason: str
    tokens: int


# ---------------------------------------------------------------------------------------------------- replay buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBufferStatistics:
    """Counts in groups and tokens. Always ``admitted = pending + ready + selected + released + dropped``.

    Attributes:
        capacity: groups that can be pending, ready or selected at once.
        released: groups that were trained on and have left.
        dropped, dropped_tokens: groups that have left without being trained on, and their sampled tokens, by reason.
        ready_tokens: tokens of ready groups that no step has trained on yet.
        waiting: seconds of the longest wait in progress, by what it waits for.
    """

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

    A group is admitted (pending), then ready, selected and released. From any of the first three stages it can be
    dropped with a reason. ``max_staleness`` is an argument of the constructor and a hard bound: :meth:`select` never
    returns a group with ``weight_version - oldest_version > max_staleness``; it drops that group (reason ``stale``) and
    continues. Once the buffer is closed, ``admit``, ``put``, ``extend`` and ``select`` raise
    :class:`BufferClosedError`, waiting calls included.

    In the example, group 0 has tokens of version 1: it may be trained on at version 2, and not at version 3.
    ``summary`` is its :class:`GroupSummary`; ``data`` are its rows.

    >>> from dataclasses import replace
    >>> from asyncrl.plugins import load_part
    >>> async def steps():
    ...     buffer = load_part("asyncrl.replay_buffers", "replay")(capacity=4, max_staleness=1)
    ...     dropped = []
    ...     buffer.on_drop(dropped.append)
    ...     await buffer.admit(0)
    ...     buffer.put(summary, data)
    ...     (group,) = await buffer.select(1, weight_version=2)
    ...     buffer.restore([group.summary.group_id])  # the step failed
    ...     async with asyncio.TaskGroup() as tasks:
    ...         selecting = tasks.create_task(buffer.select(1, weight_version=3))
    ...         await buffer.admit(1)
    ...         buffer.put(dataclasses.replace(summary, group_id=1, oldest_version=2), data)
    ...     buffer.release([group.summary.group_id for group in selecting.result()])
    ...     return dropped, buffer.statistics().released
    >>> asyncio.run(steps())
    ([DroppedGroup(group_id=0, reason='stale', tokens=4)], 1)
    """

    async def admit(self, group_id: int, *, again: bool = False, timeout_s: float | None = None) -> None:
        """Reserve a place for a group; wait while the buffer is full.

        ``again`` is for a group that an earlier run had admitted: it waits for a place only, not for a rate limit,
        because a resumed run admits all of its old groups before it trains.

        Raises:
            InvalidDataError: the group was admitted before, or another call is admitting it.
            DeadlineError: the buffer is still full after ``timeout_s``.
        """

    def put(
        self, summary: GroupSummary, rows: DataProto | DataProtoFuture, *, uses: int = 0, reserved_uses: int = 0
    ) -> None:
        """Store the G rows of a pending group. It is ready, unless the buffer was made to wait for further columns.

        Args:
            summary: names the group.
            rows: the rows, or a future of them.
            uses: how many steps of an earlier run have trained on it.
            reserved_uses: how many steps will select it by its number (``group_ids`` of :meth:`select`), because an
                earlier run had trained on it. Until then no policy selects, refuses or evicts it.

        Raises:
            InvalidDataError: the group is not pending, or was put before.
        """

    def extend(
        self,
        group_id: int,
        columns: Collection[str],
        rows: DataProto | DataProtoFuture,
        *,
        rewards: tuple[float, ...] | None = None,
    ) -> None:
        """Add columns to a pending group, before or after :meth:`put`; ``rewards`` replace those of its summary.

        Raises:
            InvalidDataError: the group is not pending, the buffer does not wait for one of these columns, or there is
                not one reward per row.
        """

    async def select(
        self,
        groups: int,
        *,
        weight_version: int,
        group_ids: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[SelectedGroup, ...]:
        """Wait for ``groups`` groups that may be trained on at ``weight_version``; take them in the policy's order.

        With ``group_ids``, take exactly these in this order, regardless of policy and staleness: an earlier run
        trained on them at this version.

        Raises:
            InvalidDataError: ``groups`` is not in 1..capacity, so the wait could never end.
            DeadlineError: they were not ready within ``timeout_s``.
        """
        ...

    def release(self, group_ids: Iterable[int]) -> None:
        """Record that a step trained on these groups, and free their rows (or keep them, to be used again).

        Raises:
            InvalidDataError: a group is not selected; then none is released.
        """

    def restore(self, group_ids: Iterable[int]) -> None:
        """Return selected groups to the ready ones, because their step did not happen.

        Raises:
            InvalidDataError: a group is not selected; then none is restored.
        """

    def drop(self, group_id: int, reason: str, *, tokens: int = 0) -> None:
        """Drop a group in any stage. ``tokens`` counts what was sampled for a pending group; others have a summary.

        Raises:
            InvalidDataError: the group is not in the buffer, there is no reason, or ``tokens`` is negative.
        """

    def on_drop(self, listener: Callable[[DroppedGroup], None]) -> None:
        """Call ``listener`` for every group that is dropped from now on, by :meth:`drop` or by the buffer itself.

        A waiting :meth:`select` may drop stale groups, which the producer must replace.
        """

    def close(self, error: BaseException | None = None) -> None:
        """Close the buffer; ``error`` becomes the cause of each :class:`BufferClosedError`. Idempotent.

        Groups can still be released, restored and dropped.
        """

    async def settled(self) -> None:
        """Wait until :meth:`statistics` includes every earlier call, and the listeners were called for every drop."""

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """As :meth:`asyncrl.ledger.Ledger.query`, of the ``ledger`` that the buffer was made with.

        Raises:
            LedgerError: the buffer has no ledger, or the condition is not valid SQL.
        """
        ...

    def statistics(self) -> ReplayBufferStatistics:
        """Return the counts. Recent calls may be missing until :meth:`settled`."""
        ...

    def explain(self) -> Sequence[str]:
        """Return one sentence for every wait in progress: which call waits, for how long, and for what."""
        ...


@runtime_checkable
class OutOfProcessReplayBuffer(ReplayBuffer, Protocol):
    """Optional capability: the buffer runs in a worker of its own.

    Calls are executed there later, in order, but for one whose rows are still being made: later ones overtake it.
    """

    def worker(self) -> tuple[type[Any], Any]:
        """Return the worker's class and the one argument of its constructor."""
        ...

    async def attach(self, group: Any) -> None:
        """Use the one worker of this worker group from now on."""

    async def aclose(self) -> None:
        """Detach from the worker, which its worker group closes. Idempotent."""


# --------------------------------------------------------------------------------------------------------- training


class RewardModel(Protocol):
    """Scores rows.

    One with an attribute ``deterministic = True`` scores the same row alike again, whatever rows are beside it; some
    rows are scored twice, to check that every row has its own score.

    >>> class Brevity:
    ...     async def score(self, batch):
    ...         lengths = batch.batch["input_ids"].offsets().diff()
    ...         return DataProto.from_dict({"rewards": 1.0 / lengths})
    ...
    ...     async def close(self):
    ...         pass
    >>> ids = torch.nested.nested_tensor([torch.tensor([5, 6]), torch.tensor([5, 6, 7, 8])], layout=torch.jagged)
    >>> asyncio.run(Brevity().score(DataProto.from_dict({"input_ids": ids}))).batch["rewards"].tolist()
    [0.5, 0.25]
    """

    async def score(self, batch: DataProto) -> DataProto:
        """Return column ``rewards`` ([B] float32) for a trajectory batch.

        Raises:
            RewardError: no reward could be computed. A failure is never replaced by a number.
        """
        ...

    async def close(self) -> None:
        """Free everything. Idempotent."""


class TrainingEngine(Protocol):
    """Holds the policy and its optimizer on every rank of a training group.

    Methods are collective: every rank calls the same ones in the same order, each with its own rows. Losses and
    gradients are normalised over the rows of *all* ranks, so the result does not depend on how rows are split. An
    engine that is made with a ``mesh`` (:class:`~asyncrl.mesh.MeshShape`) gets the same rows on all ranks of one of its
    data ranks.
    """

    def supervise(self, batch: DataProto) -> dict[str, float]:
        """Make one optimizer step of cross-entropy on the tokens in ``loss_mask``. Metrics are equal on all ranks.

        Raises:
            SchemaError: a column is missing or misshapen.
            InvalidDataError: there is no token to train on, or the mask includes a row's first token.
            EngineError: loss or gradient norm is not finite (no step is made), or another rank failed.
        """
        ...

    def update(self, batch: DataProto) -> dict[str, float]:
        """Make one policy step on a trajectory batch with ``advantages``. Metrics are equal on all ranks.

        Raises:
            SchemaError, InvalidDataError, EngineError: as :meth:`supervise`; of an engine that makes several optimizer
                steps of a batch, those before the one that failed have been made.
        """
        ...

    def log_probs(self, batch: DataProto) -> DataProto:
        """Return columns ``log_probs`` and ``entropy`` (ragged float32, like ``input_ids``) of the current weights."""
        ...

    def named_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the full weights under their checkpoint names, tied ones once. Collective: rank 0 uses them."""
        ...

    def save(self, folder: Path) -> None:
        """Write all training state: weights, optimizer, schedule, random generators. No pickle."""

    def load(self, folder: Path) -> None:
        """Read what :meth:`save` wrote, at any world size.

        Raises:
            CheckpointError: the folder is missing, damaged or of another model.
        """

    def export(self, folder: Path) -> None:
        """Write a Hugging Face model folder (config and safetensors) from rank 0."""

    def close(self) -> None:
        """Leave the process group and free the model. Idempotent."""


@runtime_checkable
class ShardedTrainingEngine(TrainingEngine, Protocol):
    """Optional capability: publish the weights as they are divided over the ranks."""

    def sharded_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """As ``named_tensors``, with a DTensor where every rank has a part: it is not gathered."""
        ...


@runtime_checkable
class AdapterTrainingEngine(Protocol):
    """Optional capability: low-rank adapters are trained, where the option ``lora`` is given, and published apart."""

    def adapter_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """As ``named_tensors``, the adapters alone, under the names in peft's files."""
        ...

    def base_tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        """As ``named_tensors``, without the adapters: the weights beside them, which stay as they are."""
        ...


@runtime_checkable
class MemoryTrainingEngine(Protocol):
    """Optional capability: what an update needs of memory is known without weights and before anything starts."""

    @staticmethod
    def plan_memory(model_path: str, *, row_tokens: int, scored: float, **options: Any) -> MemoryPlan:
        """Return what each rank needs with ``options`` of the engine; the share ``scored`` of a row is trained on."""
        ...


@runtime_checkable
class SleepingTrainingEngine(Protocol):
    """Optional capability: free the memory of weights and optimizer for a while, for rollouts on the same device."""

    def sleep(self) -> None:
        """Free the memory; every other method but :meth:`close` raises EngineError until :meth:`wake`. Idempotent."""

    def wake(self) -> None:
        """Continue with the same weights and moments, bit for bit. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerUsage:
    """What updates have used of a rank. Operations are those that each row needs: not what is computed twice, or saved.

    Attributes:
        update_s: seconds of updates.
        tflop: 1e12 floating-point operations, of all ranks, over their number.
        peak_tflops: what its device could do in a second (dense, bfloat16); None: not known.
        memory_peak_gb: the most memory of tensors on its device in the last update, or on a CPU that its process has
            had resident, in 1e9 bytes.
    """

    update_s: float
    tflop: float
    peak_tflops: float | None
    memory_peak_gb: float

    def since(self, before: TrainerUsage | None) -> TrainerUsage:
        """Return what was used after ``before``."""
        if before is None:
            return self
        return dataclasses.replace(self, update_s=self.update_s - before.update_s, tflop=self.tflop - before.tflop)

    def metrics(self) -> dict[str, float]:
        """Return ``tflops`` (a second), ``mfu`` where it is known, and ``memory_peak_gb``."""
        tflops = self.tflop / max(self.update_s, 1e-9)
        found = {"tflops": tflops, "memory_peak_gb": self.memory_peak_gb}
        return found if self.peak_tflops is None else found | {"mfu": tflops / self.peak_tflops}


@runtime_checkable
class MeteredTrainingEngine(Protocol):
    """Optional capability: tell what updates have used."""

    def usage(self) -> TrainerUsage:
        """Return what this rank used since the engine was made. Not collective."""
        ...


class Snapshot(Protocol):
    """One rank's part of what an engine saves, in host memory; for any thread, while the engine goes on."""

    def write(self, folder: Path) -> Mapping[str, Mapping[str, Any]]:
        """Write this rank's files; those of all ranks are what ``load`` reads, once the folder is sealed.

        Return size and checksum of each file by name (:data:`asyncrl.io.FileEntry`).
        """
        ...

    def export(self, saved: Path, folder: Path) -> None:
        """Write what ``export`` would have written at that moment, from what all ranks have written to ``saved``."""


@runtime_checkable
class SnapshotEngine(Protocol):
    """Optional capability of training and value engines: checkpoints are written while training goes on.

    An engine with a method ``prepare_snapshots()`` gets the memory of snapshots there, so that none waits for it. It is
    collective, and called before training begins.
    """

    def snapshot(self) -> Snapshot:
        """Copy what ``save`` would write. Collective; waits while the snapshot before is being written.

        A snapshot that is not being written any more may be lost with the next one.
        """
        ...


class ValueEngine(Protocol):
    """Holds a model with a scalar head, and its optimizer, on every rank of a group; see :class:`TrainingEngine`.

    It is a critic (:meth:`values`, :meth:`update`) or a trained reward model (:meth:`scores`, :meth:`compare`).
    """

    def values(self, batch: DataProto) -> DataProto:
        """Return column ``values`` (ragged float32, like ``input_ids``): before each token in ``loss_mask``, else 0."""
        ...

    def update(self, batch: DataProto) -> dict[str, float]:
        """Make one step towards ``returns`` of the tokens in ``loss_mask``. Metrics are equal on all ranks.

        Raises:
            SchemaError, InvalidDataError, EngineError: as :meth:`TrainingEngine.update`.
        """
        ...

    def scores(self, batch: DataProto) -> DataProto:
        """Return column ``scores`` ([B] float32), read at the end of each row.

        Raises:
            InvalidDataError: a row is empty.
        """
        ...

    def compare(self, batch: DataProto) -> dict[str, float]:
        """Make one step on pairs of rows: chosen, rejected, chosen, ... Metrics are equal on all ranks.

        Raises:
            InvalidDataError: there is no pair, the number of rows is odd, or a row is empty.
            EngineError: as :meth:`update`.
        """
        ...

    def save(self, folder: Path) -> None:
        """As :meth:`TrainingEngine.save`."""

    def load(self, folder: Path) -> None:
        """As :meth:`TrainingEngine.load`."""

    def export(self, folder: Path) -> None:
        """As :meth:`TrainingEngine.export`: a model for sequence classification with one label."""

    def close(self) -> None:
        """As :meth:`TrainingEngine.close`."""


# --------------------------------------------------------------------------------------------------------- trackers


class Tracker(Protocol):
    """Receives metrics as they are logged (a file, a web service, a screen)."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record the metrics after ``step`` steps."""

    def close(self) -> None:
        """Send what is still buffered."""


@runtime_checkable
class TextTracker(Tracker, Protocol):
    """Optional capability: show texts too, such as trajectories."""

    def log_text(self, name: str, text: str, *, step: int) -> None: ...
