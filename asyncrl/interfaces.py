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

The examples of buffers have one group, number 0: ``summary`` is that of :class:`GroupSummary`, ``data`` are its rows.
Those of ledgers write into a ``folder``.
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
    "LEAST_TEMPERATURE",
    "AdoptingEngine",
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
    "SleepingEngine",
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

LEAST_TEMPERATURE = 1e-4
"""That is not greedy: logits over much less overflow float32."""

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

        >>> greedy = SamplingParams(max_new_tokens=64, temperature=0.0, stop=("###",))
        >>> SamplingParams(max_new_tokens=64, temperature=0.7, top_p=0.9, seed=7).top_k  # off
        0
        >>> SamplingParams(max_new_tokens=64, top_p=90)
        Traceback (most recent call last):
        ValueError: top_p must lie in (0, 1], got 90

    ``temperature == 0`` is greedy; others are at least ``LEAST_TEMPERATURE``. ``top_k == 0`` and ``top_p == 1`` switch
    the truncations off. Log-probs are reported of the distribution really sampled from: after temperature, top-k and
    top-p. Greedy ones are those of the untempered distribution.

    A ``seed`` makes the request reproducible, whatever runs beside it: token n depends on (seed, n, distribution).

    ``top_log_probs`` asks for the log-probs of so many of the likeliest tokens at each position besides.

    ``grammar`` (llguidance's dialect of Lark; empty for none) restricts the text: at each position only tokens that it
    can go on with may be sampled, and an end of the text only where it is complete. What is left is the distribution
    sampled from, so log-probs are of that. An engine that serves no grammars refuses the request.

    Raises:
        ValueError: a number is out of its range, or a stop string is empty.
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
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE}, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if any(not text for text in self.stop):
            raise ValueError("a stop string must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Token ids in. ``request_id`` is unique among the requests an engine holds.

        >>> sampling = SamplingParams(max_new_tokens=4)
        >>> begun = GenerationRequest(request_id="a", prompt_token_ids=(5, 6, 7), sampling=sampling)
        >>> sampled = (8, 9)  # then its engine was lost
        >>> moved = GenerationRequest(
        ...     request_id="a", prompt_token_ids=(5, 6, 7, *sampled), sampling=sampling, continued_tokens=2
        ... )
        >>> sampling.max_new_tokens - moved.continued_tokens  # may follow still
        2

    A request that was begun elsewhere goes on: the last ``continued_tokens`` ids of the prompt are what it has sampled
    so far. Only what follows is delivered, while ``max_new_tokens``, stop strings and the index of the token in a
    seeded request count from the first of them, as if it had never moved. One that is complete already ends at once,
    without a token.

    Raises:
        ValueError: ``continued_tokens`` is negative, or leaves no token of the prompt.
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

    >>> first = GenerationChunk(token_ids=(8, 9), log_probs=(-0.5, -0.1), weight_versions=(3, 3))
    >>> last = GenerationChunk(token_ids=(2,), log_probs=(-0.2,), weight_versions=(4,), finish_reason="stop")
    >>> first.finish_reason is None, first.token_ids + last.token_ids
    (True, (8, 9, 2))

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
    """Tokens ``start <= t < end`` of a generation were sampled under ``version``.

    >>> span = VersionSpan(version=3, start=0, end=2)
    >>> (8, 9, 2)[span.start : span.end]
    (8, 9)
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished request: the chunks put together.

    >>> answer = Generation(
    ...     token_ids=(8, 9, 2), log_probs=(-0.5, -0.1, -0.2), weight_versions=(3, 3, 4), finish_reason="stop"
    ... )
    >>> [span.version for span in answer.spans]
    [3, 4]
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason
    top_log_probs: tuple[TopLogProbs, ...] = ()

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Runs of equal versions, in order.

        >>> answer = Generation(
        ...     token_ids=(8, 9, 2), log_probs=(-0.5, -0.1, -0.2), weight_versions=(3, 3, 4), finish_reason="stop"
        ... )
        >>> answer.spans
        (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3))
        """
        spans: list[VersionSpan] = []
        start = 0
        for end in range(1, len(self.weight_versions) + 1):
            if end == len(self.weight_versions) or self.weight_versions[end] != self.weight_versions[start]:
                spans.append(VersionSpan(version=self.weight_versions[start], start=start, end=end))
                start = end
        return tuple(spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Answer of a health probe: one token was really generated, in ``latency_s``, or ``error`` says why not.

    >>> from asyncrl.testing import EchoEngine
    >>> asyncio.run(EchoEngine().health(deadline_s=1.0)).error
    'not started'
    """

    healthy: bool
    latency_s: float
    weight_version: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEngineStatistics:
    """What an engine holds and has done. Counters only grow.

        >>> from asyncrl.testing import EchoEngine
        >>> async def answered():
        ...     engine = EchoEngine()
        ...     await engine.start()
        ...     sampling = SamplingParams(max_new_tokens=3)
        ...     async for _ in engine.generate(
        ...         GenerationRequest(request_id="a", prompt_token_ids=(5, 6), sampling=sampling)
        ...     ):
        ...         pass
        ...     return engine.statistics()
        >>> counts = asyncio.run(answered())
        >>> counts.prompt_tokens, counts.tokens_generated, counts.requests_finished, counts.running
        (2, 3, 1, 0)

    Attributes:
        running: requests that are being decoded.
        waiting: requests that are not yet.
        paused: whether decoding stands still.
        weight_version: of the next token.
        tokens_generated: sampled tokens of all requests.
        prompt_tokens: tokens of their prompts.
        requests_finished: requests that ended by themselves.
        requests_aborted: requests that did not.
        kv_cache_tokens: tokens whose keys and values are held now.
        kv_cache_capacity_tokens: most that can be.
        decode_steps: forward passes that sampled.
        busy_s: seconds spent in them.
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


class TokenGenerator(Protocol):
    """The face of an engine that an agent's turn loop needs.

    >>> from asyncrl.testing import EchoEngine
    >>> async def answer():
    ...     engine = EchoEngine()  # repeats its prompt
    ...     await engine.start()
    ...     sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(6,))
    ...     request = GenerationRequest(request_id="a", prompt_token_ids=(5, 6), sampling=sampling)
    ...     return [(chunk.token_ids, chunk.finish_reason) async for chunk in engine.generate(request)]
    >>> asyncio.run(answer())
    [((5,), None), ((6,), 'stop')]
    """

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

    >>> from asyncrl.testing import TelltaleEngine
    >>> async def swap():
    ...     engine = TelltaleEngine()  # its every token is the version that made it
    ...     await engine.start()
    ...     sampling = SamplingParams(max_new_tokens=4)
    ...     tokens = ()
    ...     async for chunk in engine.generate(
    ...         GenerationRequest(request_id="a", prompt_token_ids=(5, 6), sampling=sampling)
    ...     ):
    ...         tokens += chunk.token_ids
    ...         if len(tokens) == 2:
    ...             await engine.prepare_weights({}, version=1)
    ...             await engine.commit_weights(1)
    ...     await engine.close()
    ...     return tokens
    >>> asyncio.run(swap())
    (0, 0, 1, 1)
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

    def statistics(self) -> RolloutEngineStatistics:
        """What it holds and has done until now."""
        ...


@runtime_checkable
class SleepingEngine(RolloutEngine, Protocol):
    """A rollout engine that can give its memory back for a while, for a trainer on the same device.

    >>> from asyncrl.testing import EchoEngine
    >>> class Drowsy(EchoEngine):
    ...     async def sleep(self):
    ...         await self.pause("keep")
    ...
    ...     async def wake(self):
    ...         await self.resume()
    >>> isinstance(Drowsy(), SleepingEngine), isinstance(EchoEngine(), SleepingEngine)
    (True, False)
    """

    async def sleep(self) -> None:
        """Give the memory of KV cache and weights back. Idempotent.

        Nothing is decoded until :meth:`wake`, whatever :meth:`resume` says. Requests in flight lose nothing: their
        keys and values are computed again afterwards. Weights may be prepared and committed meanwhile.
        """
        ...

    async def wake(self) -> None:
        """Take the memory again and go on, unless paused. Idempotent."""
        ...


@runtime_checkable
class AdoptingEngine(RolloutEngine, Protocol):
    """A rollout engine that serves from the pulled bytes themselves: engines of one host share one copy of them.

    >>> from asyncrl.rollout.weight_fetch import fetch_into
    >>> from asyncrl.testing import EchoEngine, EmptyTransport
    >>> class Thrifty(EchoEngine):
    ...     async def adopt_weights(self, lent, *, version):
    ...         with lent as tensors:  # a real one leaves the block when it needs the tensors no more
    ...             await self.prepare_weights(tensors, version=version)
    >>> async def update():
    ...     engine = Thrifty()
    ...     await engine.start()
    ...     transport = EmptyTransport()
    ...     await fetch_into(engine, transport.publish((), version=1), transport=transport)
    ...     await engine.commit_weights(1)
    ...     return engine.weight_version
    >>> asyncio.run(update())
    1
    """

    async def adopt_weights(self, lent: AbstractContextManager[Mapping[str, torch.Tensor]], *, version: int) -> None:
        """As :meth:`prepare_weights`, with tensors that the engine may keep and serve from.

        It enters the block ``lent`` and leaves it when it needs none of them any more: when weights that were prepared
        are replaced before their commit, when a newer version is committed, when it is closed, or at an error.

        Raises:
            WeightError: as :meth:`WeightTransport.pull` and :meth:`prepare_weights`.
        """
        ...


@runtime_checkable
class SeparateEngine(RolloutEngine, Protocol):
    """A rollout engine in a process of its own: it fetches weights itself, and may be gone from one moment to the next.

    Once it is gone, every call raises :class:`EngineError` with the cause.

    >>> from asyncrl.rollout.weight_fetch import fetch_into
    >>> from asyncrl.testing import EchoEngine, EmptyTransport
    >>> class Elsewhere(EchoEngine):
    ...     async def fetch_weights(self, manifest):
    ...         with EmptyTransport().pull(manifest) as tensors:  # in the engine's process
    ...             await self.prepare_weights(tensors, version=manifest.version)
    ...
    ...     async def wait_ended(self):
    ...         await asyncio.Event().wait()  # until the process is gone
    >>> async def update():
    ...     engine = Elsewhere()
    ...     await engine.start()
    ...     await fetch_into(engine, EmptyTransport().publish((), version=1), transport=None)
    ...     await engine.commit_weights(1)
    ...     return engine.weight_version
    >>> asyncio.run(update())
    1
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
    """Makes processes for engines faster than from nothing. Whoever made it closes it, after the engines.

    >>> class Template:
    ...     process = "has imported torch; engines are forked from it"
    ...
    ...     async def close(self):
    ...         self.process = None
    >>> template = Template()
    >>> asyncio.run(template.close())
    >>> template.process is None
    True
    """

    async def close(self) -> None:
        """Free everything; processes that it made go on."""
        ...


@runtime_checkable
class SpawningHost(Protocol):
    """What the class of an engine that keeps others in processes may have: it takes ``spawner=`` then.

    >>> class Host:
    ...     @staticmethod
    ...     def spawner(engine, model_path):
    ...         return f"spawner of {engine} with {model_path}"
    ...
    ...     def __init__(self, model_path, *, engine, spawner=None):
    ...         self.spawner_given = spawner
    >>> shared = Host.spawner("vllm", "models/small")
    >>> [Host("models/small", engine="vllm", spawner=shared).spawner_given for _ in range(2)]
    ['spawner of vllm with models/small', 'spawner of vllm with models/small']
    """

    @staticmethod
    def spawner(engine: str, model_path: str) -> EngineSpawner:
        """For any number of processes that host ``engine`` with the model at ``model_path``."""
        ...


# ----------------------------------------------------------------------------------------------------------- training


class TrainingEngine(Protocol):
    """Holds the policy and its optimizer on every rank of a training group.

    Methods are collective: every rank calls the same ones in the same order, each with its own rows. Losses and
    gradients are normalised over the rows of *all* ranks, so the result does not depend on how rows are split.

    Columns are those of the module's docstring. A policy that knows how frequent tokens are, and nothing else:

    >>> class Unigram:
    ...     def __init__(self, vocabulary):
    ...         self.logits = torch.zeros(vocabulary, requires_grad=True)
    ...
    ...     def log_probs(self, batch):
    ...         ids = batch.batch["input_ids"]
    ...         log_p = self.logits.detach().log_softmax(0)
    ...         entropies = -(log_p.exp() @ log_p).expand(len(ids.values()))
    ...         columns = {"log_probs": log_p[ids.values()], "entropy": entropies.clone()}
    ...         for name, column in columns.items():
    ...             column[ids.offsets()[:-1]] = 0  # nothing comes before the first token
    ...             columns[name] = torch.nested.nested_tensor_from_jagged(column, ids.offsets())
    ...         return DataProto.from_dict(columns)
    ...
    ...     def supervise(self, batch):
    ...         ids = batch.batch["input_ids"].values()[batch.batch["loss_mask"].values()]
    ...         loss = -self.logits.log_softmax(0)[ids].mean()
    ...         (gradient,) = torch.autograd.grad(loss, self.logits)
    ...         self.logits.data -= gradient
    ...         return {"loss": loss.item()}
    ...
    ...     def named_tensors(self):
    ...         yield "logits", self.logits.detach()
    >>> rows = [torch.tensor([0, 1]), torch.tensor([0, 1, 1])]
    >>> batch = DataProto.from_dict(
    ...     {
    ...         "input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged),
    ...         "loss_mask": torch.nested.nested_tensor([ids == 1 for ids in rows], layout=torch.jagged),
    ...     }
    ... )
    >>> policy = Unigram(2)
    >>> [round(policy.supervise(batch)["loss"], 3) for _ in range(2)]  # log 2, then less
    [0.693, 0.313]
    >>> {name: [round(x, 3) for x in tensor.tolist()] for name, tensor in policy.named_tensors()}
    {'logits': [-0.769, 0.769]}
    >>> [[round(x, 2) for x in row.tolist()] for row in policy.log_probs(batch).batch["log_probs"]]
    [[0.0, -0.19], [0.0, -0.19, -0.19]]
    """

    def supervise(self, batch: DataProto) -> dict[str, float]:
        """One optimizer step of cross-entropy on the tokens where ``loss_mask``. Metrics are equal on all ranks.

        Raises:
            SchemaError: a column is missing or misshapen.
            InvalidDataError: no token to train on, or a mask that includes a row's first token.
            EngineError: loss or gradient norm is not finite (no step is made of it), or another rank failed.
        """
        ...

    def update(self, batch: DataProto) -> dict[str, float]:
        """One policy step on a trajectory batch with ``advantages``. Metrics are equal on all ranks.

        Raises:
            SchemaError, InvalidDataError, EngineError: as :meth:`supervise`.
        """
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
    """Holds a model that says one number, and its optimizer, on every rank of a group; see :class:`TrainingEngine`.

    A critic that says the same of every token:

    >>> class Constant:
    ...     value = 0.0
    ...
    ...     def values(self, batch):
    ...         mask = batch.batch["loss_mask"]
    ...         said = torch.nested.nested_tensor_from_jagged(self.value * mask.values(), mask.offsets())
    ...         return DataProto.from_dict({"values": said})
    ...
    ...     def update(self, batch):
    ...         error = batch.batch["returns"].values()[batch.batch["loss_mask"].values()] - self.value
    ...         self.value += error.mean().item()
    ...         return {"loss": error.square().mean().item()}
    >>> batch = DataProto.from_dict(
    ...     {
    ...         "loss_mask": torch.nested.nested_tensor(
    ...             [torch.tensor([False, True]), torch.tensor([False, True, True])], layout=torch.jagged
    ...         ),
    ...         "returns": torch.nested.nested_tensor(
    ...             [torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0, 0.5])], layout=torch.jagged
    ...         ),
    ...     }
    ... )
    >>> critic = Constant()
    >>> [round(critic.update(batch)["loss"], 3) for _ in range(2)]
    [0.417, 0.167]
    >>> [row.tolist() for row in critic.values(batch).batch["values"]]
    [[0.0, 0.5], [0.0, 0.5, 0.5]]
    """

    def values(self, batch: DataProto) -> DataProto:
        """Column ``values`` (ragged float32, like ``input_ids``): before each token where ``loss_mask``, else 0.

        Raises:
            SchemaError, InvalidDataError: as :meth:`update`.
        """
        ...

    def update(self, batch: DataProto) -> dict[str, float]:
        """One step towards ``returns`` of the tokens where ``loss_mask``. Metrics are equal on all ranks.

        Raises:
            SchemaError: a column is missing or misshapen.
            InvalidDataError: no token to train on, or a mask that includes a row's first token.
            EngineError: loss or gradient norm is not finite (no step is made of it), or another rank failed.
        """
        ...

    def scores(self, batch: DataProto) -> DataProto:
        """Column ``scores`` ([B] float32), read off the end of each row.

        Raises:
            InvalidDataError: a row is empty.
        """
        ...

    def compare(self, batch: DataProto) -> dict[str, float]:
        """One step on pairs: rows chosen, rejected, chosen, ... Metrics are equal on all ranks.

        Raises:
            InvalidDataError: no pair, half a pair too many, or a row is empty.
            EngineError: as :meth:`update`.
        """
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
    calls :meth:`release` when they are done: when they have left their blocks, which may be at the commit of the next
    version (:class:`AdoptingEngine`). Whoever still reads a released version goes on undisturbed.

    >>> from asyncrl.parts import load_part
    >>> transport = load_part("asyncrl.weight_transports", "shared_memory")(namespace="example")
    >>> manifest = transport.publish([("bias", torch.tensor([1.0, 2.0]))], version=1)
    >>> manifest.version, manifest.tensors[0].name, manifest.tensors[0].size_bytes
    (1, 'bias', 8)
    >>> with transport.pull(manifest) as tensors:
    ...     tensors["bias"].tolist()
    [1.0, 2.0]
    >>> transport.release(1)
    >>> transport.close()
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
    """Turns rows into rewards.

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
        """Column ``rewards`` ([B] float32) for a trajectory batch.

        Raises:
            RewardError: no reward could be computed; never replaced by a number.
        """
        ...

    async def close(self) -> None:
        """Free everything. Idempotent."""
        ...


# ------------------------------------------------------------------------------------------------------- environments


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function the model may call: its name and JSON schema, as chat templates expect them.

    >>> number = {"type": "number"}
    >>> add = Tool(
    ...     name="add",
    ...     description="The sum of two numbers.",
    ...     parameters={"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]},
    ... )
    >>> add.schema()["function"]["name"]
    'add'
    """

    name: str
    description: str
    parameters: dict[str, Any]

    def schema(self) -> dict[str, Any]:
        """OpenAI's ``{"type": "function", "function": {...}}``.

        >>> Tool(name="now", description="The time.", parameters={"type": "object"}).schema()
        {'type': 'function', 'function': {'name': 'now', 'description': 'The time.', 'parameters': {'type': 'object'}}}
        """
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the environment answers: messages that extend the conversation, and whether the episode is over.

    ``reward`` is what this step earned; the trajectory's reward is the sum over its steps.

    >>> steps = [Step(messages=({"role": "user", "content": "And 2 + 3?"},), reward=0.5), Step(reward=0.5, done=True)]
    >>> sum(step.reward for step in steps)
    1.0
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Environment(Protocol):
    """One world for one episode at a time. Asynchronous; whoever runs it sets the deadlines.

    A run that was killed shows the turns it has recorded to a new environment, and goes on from there if that answers
    as before. One that must not be shown them has an attribute ``replayable = False``: its episodes begin anew.

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
    >>> async def episode():
    ...     world = Sums()
    ...     prompt = await world.reset({"a": 2, "b": 2})
    ...     return prompt[0]["content"], (await world.step({"role": "assistant", "content": "4"})).reward
    >>> asyncio.run(episode())
    ('2 + 2?', 1.0)
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

    async def close(self) -> None:
        """The episode is over, or given up."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedPrompts:
    """What became of the prompts of a data set: how many stay, how many were too long, and for what.

        >>> fitted = FittedPrompts(kept=98, left_out=2, longest_tokens=700)
        >>> fitted.kept + fitted.left_out
        100

    Attributes:
        kept: prompts that stay.
        left_out: prompts that do not.
        longest_tokens: of the longest prompt there was.
    """

    kept: int
    left_out: int
    longest_tokens: int


class EnvironmentFactory(Protocol):
    """Tasks by number, and the environments that pose them. Made from ``[env.options]`` of the configuration.

    >>> from asyncrl.testing import EchoFactory
    >>> words = EchoFactory(turns=2)  # [env] name = "asyncrl.testing:EchoFactory", options = { turns = 2 }
    >>> words.task(1, split="train"), words.task(1, split="held_out")
    ({'word': 'word2', 'turns': 2}, {'word': 'word3', 'turns': 2})
    >>> asyncio.run(words.make().reset(words.task(1, split="train")))
    [{'role': 'user', 'content': 'word2'}]
    >>> words.demonstration(1)
    [{'role': 'user', 'content': 'word2'}, {'role': 'assistant', 'content': 'word2'}]
    """

    def task(self, index: int, *, split: Literal["train", "held_out"]) -> Task:
        """Task number ``index`` (from 0, unbounded: finite data sets wrap around). Same number, same task.

        The splits share no task.
        """
        ...

    def make(self) -> Environment:
        """A new environment, for one episode at a time."""
        ...

    def demonstration(self, index: int) -> list[Message]:
        """A whole conversation for the supervised warm start: prompt, assistant turns, environment's answers.

        Raises:
            ConfigError: this environment has no demonstrations.
        """
        ...


@runtime_checkable
class PromptFitting(Protocol):
    """An environment factory that leaves out prompts that are too long. Asked once, before the first task. Blocks.

    >>> class Questions:
    ...     prompts = ["2 + 2?", "2 + 2 + 2 + 2?"]
    ...
    ...     def fit_prompts(self, count_tokens, *, below):
    ...         lengths = {prompt: count_tokens([{"role": "user", "content": prompt}]) for prompt in self.prompts}
    ...         self.prompts = [prompt for prompt, tokens in lengths.items() if tokens < below]
    ...         left_out = len(lengths) - len(self.prompts)
    ...         return FittedPrompts(kept=len(self.prompts), left_out=left_out, longest_tokens=max(lengths.values()))
    >>> Questions().fit_prompts(lambda messages: len(messages[0]["content"]), below=10)
    FittedPrompts(kept=1, left_out=1, longest_tokens=14)
    """

    def fit_prompts(self, count_tokens: Callable[[Sequence[Message]], int], *, below: int) -> FittedPrompts:
        """Keep the tasks whose prompt has fewer than ``below`` tokens; ``count_tokens`` says how many messages have.

        Raises:
            ConfigError: none is left.
        """
        ...


@runtime_checkable
class CountedTasks(Protocol):
    """An environment factory with an end of held-out tasks: after so many they come again.

    >>> class Questions:
    ...     held_out = ("2 + 2?", "3 + 3?")
    ...
    ...     @property
    ...     def held_out_rows(self):
    ...         return len(self.held_out)
    ...
    ...     def task(self, index, *, split):
    ...         return {"question": self.held_out[index % self.held_out_rows]}
    >>> [Questions().task(index, split="held_out")["question"] for index in range(3)]
    ['2 + 2?', '3 + 3?', '2 + 2?']
    """

    @property
    def held_out_rows(self) -> int:
        """How many there are."""
        ...


@runtime_checkable
class Closable(Protocol):
    """An environment factory that holds something its environments share: it is closed after the last of them.

    >>> class Browsing:
    ...     def __init__(self):
    ...         self.pages = {}  # read once, for all environments
    ...
    ...     async def aclose(self):
    ...         self.pages.clear()
    >>> asyncio.run(Browsing().aclose())
    """

    async def aclose(self) -> None:
        """Let go of what is shared."""
        ...


# ------------------------------------------------------------------------------------------------------------- buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What the driver knows of a finished group without fetching its rows.

        >>> group = GroupSummary(
        ...     slot=0,
        ...     rows=2,
        ...     oldest_version=1,
        ...     tokens=4,
        ...     version_tokens={1: 1, 2: 3},
        ...     rewards=(0.0, 1.0),
        ...     lengths=(1, 3),
        ... )
        >>> group.tokens == sum(group.version_tokens.values()) == sum(group.lengths)
        True

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
    """A group handed out by the buffer: its summary, its rows where they lie, how many steps trained on it before.

    >>> group = SelectedGroup(summary=summary, rows=data)
    >>> group.summary.slot, group.uses
    (0, 0)
    """

    summary: GroupSummary
    rows: DataProto | DataProtoFuture
    uses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedGroup:
    """A group that was given up: its slot, why, and how many tokens had been sampled for it.

    >>> dropped = [DroppedGroup(slot=4, reason="stale", tokens=90), DroppedGroup(slot=7, reason="stale", tokens=30)]
    >>> sum(group.tokens for group in dropped)
    120
    """

    slot: int
    reason: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBufferStatistics:
    """Counts in groups, and what became of tokens. ``admitted = pending + ready + selected + released + dropped``.

        >>> from asyncrl.parts import load_part
        >>> buffer = load_part("asyncrl.replay_buffers", "replay")(capacity=4, max_staleness=1)
        >>> for slot in (0, 1, 2):
        ...     asyncio.run(buffer.admit(slot))
        >>> buffer.put(summary, data)
        >>> buffer.drop(1, "too slow", tokens=3)
        >>> counts = buffer.statistics()
        >>> counts.admitted, counts.pending, counts.ready, counts.dropped, counts.dropped_tokens
        (3, 1, 1, {'too slow': 1}, {'too slow': 3})

    Attributes:
        capacity: places.
        admitted: groups that ever took one.
        pending, ready, selected: those that occupy one now, by stage.
        released: those that were trained on and are gone.
        dropped: those that were given up, by reason.
        dropped_tokens: tokens sampled for these, by reason.
        ready_tokens: tokens of ready groups that no step trained on yet.
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

    A group's life: admitted (pending) -> ready -> selected -> released, or dropped with a reason from any of the first
    three. ``max_staleness`` is given to the buffer when it is made and is hard: :meth:`select` never returns a group
    with ``weight_version - oldest_version > max_staleness``; it drops it (reason ``stale``) and goes on.

    Group 0 has tokens of version 1. It may be trained on at version 2, and not at version 3:

    >>> from dataclasses import replace
    >>> from asyncrl.parts import load_part
    >>> async def steps():
    ...     buffer = load_part("asyncrl.replay_buffers", "replay")(capacity=4, max_staleness=1)
    ...     dropped = []
    ...     buffer.on_drop(dropped.append)
    ...     await buffer.admit(0)
    ...     buffer.put(summary, data)
    ...     (group,) = await buffer.select(1, weight_version=2)
    ...     buffer.restore([group.summary.slot])  # the step failed
    ...     async with asyncio.TaskGroup() as tasks:
    ...         selecting = tasks.create_task(buffer.select(1, weight_version=3))
    ...         await buffer.admit(1)
    ...         buffer.put(replace(summary, slot=1, oldest_version=2), data)
    ...     buffer.release([group.summary.slot for group in selecting.result()])
    ...     return dropped, buffer.statistics().released
    >>> asyncio.run(steps())
    ([DroppedGroup(slot=0, reason='stale', tokens=4)], 1)
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

        ``uses`` is how many steps of an earlier run trained on it; ``promised`` how many are to be done again and will
        take it by its number (:meth:`select` with ``slots``): until then it is neither handed out nor given up.

        Raises:
            InvalidDataError: the slot is unknown or not pending.
            BufferClosedError: closed.
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
        """Further columns of a pending group, before or after :meth:`put`; ``rewards`` replace those of its summary.

        Raises:
            InvalidDataError: the group is not pending, nobody waits for these columns, or there is not one reward per
                row.
            BufferClosedError: closed.
        """
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

        Raises:
            InvalidDataError: ``groups`` is not in 1..capacity, so the wait could never end.
            DeadlineError: they were not there within ``timeout_s``.
            BufferClosedError: closed, before or meanwhile.
        """
        ...

    def release(self, slots: Iterable[int]) -> None:
        """The groups were trained on; forget their rows.

        Raises:
            InvalidDataError: a group is not selected.
        """
        ...

    def drop(self, slot: int, reason: str, *, tokens: int = 0) -> None:
        """Give a group up. ``tokens`` counts what was sampled for a pending group; others know theirs.

        Raises:
            InvalidDataError: the slot is unknown, or there is no reason.
        """
        ...

    def on_drop(self, listener: Callable[[DroppedGroup], None]) -> None:
        """Tell ``listener`` of every group that is dropped from now on, by :meth:`drop` or by the buffer itself.

        A call of :meth:`select` that waits may drop stale groups and then needs others in their place: whoever admits
        groups learns of it here.
        """
        ...

    def restore(self, slots: Iterable[int]) -> None:
        """Give selected groups back as ready: their step did not happen.

        Raises:
            InvalidDataError: a group is not selected.
        """
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

    def statistics(self) -> ReplayBufferStatistics:
        """Counts in groups; what was told a moment ago may be missing until :meth:`settled`."""
        ...

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

    >>> from asyncrl.ledger import Completed, Dispatched, Issued
    >>> from asyncrl.parts import load_part
    >>> ledger = load_part("asyncrl.ledgers", "sqlite")(folder / "ledger.sqlite", threaded=False)
    >>> ledger.append(Issued(0), Dispatched(slot=0, attempt=0, version=1))
    True
    >>> ledger.append(Completed(slot=0, attempt=0, tokens=2))
    True
    >>> ledger.append(Completed(slot=0, attempt=0, tokens=2))  # told twice: the second must not be used
    False
    >>> ledger.attempt(0), ledger.statistics().completed, ledger.statistics().superseded
    (0, 1, 1)
    >>> asyncio.run(ledger.aclose())
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
        """Wait while more waits to be written than should.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        ...

    async def durable(self) -> LedgerPosition:
        """Wait until everything appended so far is on the disk; where that is.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        ...

    def attempt(self, slot: int) -> int:
        """Number of the newest attempt at a live prompt; -1 before the first."""
        ...

    def query(
        self, where: str = "", parameters: Mapping[str, Any] | None = None, *, limit: int | None = None
    ) -> DataProto:
        """Recorded trajectories for which the SQL condition ``where`` holds. Blocks.

        Args:
            where: of the rows, with ``:name`` for parameters; empty for all.
            parameters: by name.
            limit: rows at most.

        Raises:
            LedgerError: the condition is none.
        """
        ...

    def statistics(self) -> LedgerStatistics:
        """Counts in prompts."""
        ...

    async def aclose(self) -> None:
        """Write what is left and close the file. Idempotent."""
        ...


class LedgerArchive(Protocol):
    """A ledger for those who only read it: what its run was trained on, and by which processes.

    >>> from asyncrl.ledger import Completed, Consumed, Dispatched, Issued
    >>> from asyncrl.parts import load_part
    >>> kind = load_part("asyncrl.ledgers", "sqlite")
    >>> ledger = kind(folder / "run.sqlite", threaded=False)
    >>> ledger.append(Issued(0), Dispatched(slot=0, attempt=0, version=0), Completed(slot=0, attempt=0, tokens=2))
    True
    >>> ledger.append(Consumed(slot=0, step=1, position=0))
    True
    >>> asyncio.run(ledger.aclose())
    >>> archive = kind.archive(folder / "run.sqlite")
    >>> dict(archive.batches), archive.problems, archive.missing_rows()
    ({1: (0,)}, (), (0,))
    >>> archive.close()
    """

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

    def close(self) -> None:
        """Close the file. Idempotent."""
        ...


class Tracker(Protocol):
    """Receives metrics as they are logged (a file, a web service, a screen).

    >>> class Table:
    ...     def log(self, metrics, *, step):
    ...         for name, value in metrics.items():
    ...             print(f"{step:4} {name:12} {value:g}")
    ...
    ...     def close(self):
    ...         pass
    >>> Table().log({"train/loss": 0.25}, step=3)
       3 train/loss   0.25
    """

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Numbers by name, as they were after ``step`` steps."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


@runtime_checkable
class TextTracker(Tracker, Protocol):
    """One that shows texts too: trajectories, to be read.

    >>> class Screen:
    ...     def log(self, metrics, *, step):
    ...         pass
    ...
    ...     def log_text(self, name, text, *, step):
    ...         print(f"{name} after {step} steps: {text}")
    ...
    ...     def close(self):
    ...         pass
    >>> Screen().log_text("trajectory", "2 + 2? 4", step=3)
    trajectory after 3 steps: 2 + 2? 4
    """

    def log_text(self, name: str, text: str, *, step: int) -> None:
        """A text, as it was after ``step`` steps."""
        ...
