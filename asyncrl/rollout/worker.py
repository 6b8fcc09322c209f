"""The rollout worker: an engine, the environments that its episodes run in, and the weights that arrive.

Its :class:`TokenMeter` counts tokens where they come out of the engine, whatever becomes of them afterwards. It may
keep the counts in a file that is mapped into memory: they outlive the process that counts, however it ends, but not
always its machine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import secrets
import struct
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from asyncrl.data import DataProto
from asyncrl.errors import EngineError, EnvironmentFailure, LiveWeightsError, RequestAbortedError
from asyncrl.foreign import Failures
from asyncrl.interfaces import (
    ClosableFactory,
    EnvironmentFactory,
    GenerationChunk,
    GenerationRequest,
    KVCachePolicy,
    RolloutEngine,
    SamplingParams,
    SleepingEngine,
    Task,
    TokenGenerator,
)
from asyncrl.plugins import Part, load_part, make_part
from asyncrl.rollout.chat import ChatRenderer, load_renderer
from asyncrl.rollout.episode import (
    AgentEnvironment,
    Diverged,
    EpisodePolicy,
    make_environment,
    run_agent_episode,
    run_episode,
)
from asyncrl.rollout.live_weights import WeightsProof, commit_into
from asyncrl.rollout.recheck import ReplayedRewards
from asyncrl.rollout.replica import fetch_into
from asyncrl.rollout.sessions import SessionCache
from asyncrl.rollout.trajectory import (
    REWARD_PARTS,
    Trajectory,
    check_seeds,
    derive_seed,
    encode_rows,
    trajectories_to_batch,
)
from asyncrl.rollout.turns import Continuation, TurnFeed, TurnRecorder
from asyncrl.rollout.work import EpisodeTimes
from asyncrl.single_controller import Dispatch, Execute, Worker, register
from asyncrl.storage import local_model
from asyncrl.weights import TransportSpec, WeightManifest

_log = logging.getLogger(__name__)

_PURPOSES = ("train", "eval", "baseline")
_COUNTS = struct.Struct("<qqq")
_CLOSING_S = 30.0
_SHARE_OF_ENVIRONMENTS = 0.9
"""Environments are ended this long, or at this share, before the time of their rollouts: closing them takes some."""
_ANSWERING_S = 5.0
_SHARE_OF_CLOSING = 0.95
"""Closing them is ended this long, or at this share, before that time: the answer takes some, too."""


@dataclass(slots=True, eq=False)
class TokenAccount:
    """``tokens`` that the engine delivered; of them ``wasted`` in episodes that failed, by the episodes' own count."""

    purpose: str
    tokens: int = 0
    wasted: int = 0


class TokenMeter:
    """Tokens delivered by an engine, by purpose, and how many of them belong to unfinished work.

    Tokens trained on, dropped and in flight must add up to ``delivered``: the meter is the independent side of that
    equation. Counts are also kept in a file of its own in ``folder``, if given.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.path: Path | None = None
        self._file: mmap.mmap | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / f"{os.getpid()}-{secrets.token_hex(4)}.tokens"
            with self.path.open("x+b") as file:
                file.write(bytes(_COUNTS.size))
                file.flush()
                self._file = mmap.mmap(file.fileno(), _COUNTS.size)
        self._delivered: Counter[str] = Counter()
        self._accounts: set[TokenAccount] = set()

    @contextmanager
    def account(self, purpose: str) -> Iterator[TokenAccount]:
        """Open an account for one piece of work; its tokens are in flight until the block ends."""
        account = TokenAccount(purpose)
        self._accounts.add(account)
        try:
            yield account
        finally:
            self._accounts.remove(account)

    def count(self, account: TokenAccount, tokens: int) -> None:
        account.tokens += tokens
        self._delivered[account.purpose] += tokens
        if self._file is not None:
            _COUNTS.pack_into(self._file, 0, *(self._delivered[purpose] for purpose in _PURPOSES))

    def delivered(self, purpose: str) -> int:
        return self._delivered[purpose]

    def in_flight(self, purpose: str) -> int:
        """Return the tokens delivered to accounts of this purpose that are still open."""
        return sum(account.tokens for account in self._accounts if account.purpose == purpose)


def meter_tokens(file: Path, purpose: str) -> int:
    """Return the tokens that the meter with this file has counted; its process may have ended.

    A file may lag behind what was counted: where its machine died, or where it is on another machine. A damaged one
    counts as none.
    """
    try:
        return int(_COUNTS.unpack(file.read_bytes())[_PURPOSES.index(purpose)])
    except (OSError, struct.error):
        _log.warning("%s is damaged: the tokens that it counted are not known", file)
        return 0


def metered_tokens(folder: Path, purpose: str) -> int:
    """Return the tokens that all meters with a file in ``folder`` have counted."""
    return sum(meter_tokens(file, purpose) for file in folder.glob("*.tokens"))


class MeteredEngine:
    """A :class:`~asyncrl.interfaces.TokenGenerator` over an engine, counted into one account and into ``times``."""

    def __init__(
        self, engine: TokenGenerator, meter: TokenMeter, account: TokenAccount, times: EpisodeTimes | None = None
    ) -> None:
        self._engine = engine
        self._meter = meter
        self._account = account
        self._times = times or EpisodeTimes()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        stream = self._engine.generate(request)
        with self._times.request() as tokens:
            try:
                async for chunk in stream:
                    self._meter.count(self._account, len(chunk.token_ids))
                    tokens.append(len(chunk.token_ids))
                    yield chunk
            finally:
                if (aclose := getattr(stream, "aclose", None)) is not None:
                    await aclose()

    async def abort(self, request_id: str) -> bool:
        return await self._engine.abort(request_id)


class AgentEngine:
    """The engine of one agent's episode: ``tokens`` counts what it delivered. Requests may run side by side.

    In ``times`` each is an episode of its own, beside that of the agent, which is in its environment all the time.
    """

    def __init__(self, engine: MeteredEngine, times: EpisodeTimes) -> None:
        self._engine = engine
        self._times = times
        self.tokens = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        with self._times.episode():
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    self.tokens += len(chunk.token_ids)
                    yield chunk

    async def abort(self, request_id: str) -> bool:
        return await self._engine.abort(request_id)


GREEDY_PURPOSES = ("eval", "baseline")
"""Purposes whose rollouts are greedy: held-out tasks, and the answer that a policy's samples are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """What bounds one episode.

    Attributes:
        max_turns: assistant turns.
        max_seq_len: tokens of the whole trajectory, prompt and environment included.
        deadline_s: seconds for each call of the environment.
        latency_s: seconds added to each step of the environment (a simulated slow tool).
        max_attempts: how often an episode is tried when its environment fails.
    """

    max_turns: int
    max_seq_len: int
    deadline_s: float = 60.0
    latency_s: float = 0.0
    max_attempts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Everything a rollout worker is made from; picklable. Part names are entry points or dotted paths.

        >>> spec = RolloutSpec(
        ...     engine="asyncrl.testing:EchoEngine",  # repeats its prompt
        ...     environment="asyncrl.testing:EchoFactory",  # poses {"word": ...}, and {"turns": ...} of them
        ...     transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="run-1"),
        ...     limits=EpisodeLimits(max_turns=2, max_seq_len=64),
        ...     sampling=SamplingParams(max_new_tokens=16),
        ...     gather_s=0.0,
        ... )
        >>> RolloutWorker(spec).rank
        0

    Attributes:
        engine: of ``asyncrl.rollout_engines``.
        environment: of ``asyncrl.environments``.
        sampling: of each turn, unless the prompt rows replace fields of it.
        engine_given: the engine's keyword arguments that the run sets.
        engine_options: those that the user sets.
        chat: options of :func:`asyncrl.rollout.chat.load_renderer`.
        meter_folder: where token counts are kept so that they outlive the process; None for nowhere.
        gather_s: seconds for which turns that are to be recorded are gathered.
        seed: of the run, which the seeds of rows to train on must follow from; None does not check them.
        reward_check_share: of the time of rollouts, in which finished rows are played again to check their rewards.
    """

    engine: Part
    environment: Part
    transport: TransportSpec
    limits: EpisodeLimits
    sampling: SamplingParams
    engine_given: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    chat: Mapping[str, Any] = field(default_factory=dict)
    meter_folder: Path | None = None
    gather_s: float = 0.2
    seed: int | None = None
    reward_check_share: float = 0.0


class RolloutWorker(Worker):
    """Runs episodes on its engine. Everything is ``async``: rollouts, weights and statistics share one event loop.

    With the ``spec`` of :class:`RolloutSpec` and the folder of a ``model``:

        >>> worker = RolloutWorker(spec)
        >>> _ = asyncio.run(worker.start(model, weight_version=3))
        >>> asked = prompt_rows([{"word": "word0"}] * 2, group_id=7, seeds=[1, 2], purpose="train")
        >>> rows = asyncio.run(worker.rollout(asked))
        >>> rows.batch["weight_versions"][0].tolist()  # the prompt's five tokens, and the four that were sampled
        [-1, -1, -1, -1, -1, 3, 3, 3, 3]
        >>> asyncio.run(worker.aclose())

    Raises:
        ConfigError: there is no such environment or transport, or it has no such option.
        EngineError: from every method that uses the engine: it is closed or gone.
        RuntimeError: from every method that uses the engine: :meth:`start` was not called.
    """

    def __init__(self, spec: RolloutSpec) -> None:
        super().__init__()
        self._spec = spec
        self._meter = TokenMeter(spec.meter_folder)
        self._times = EpisodeTimes()
        self._unproven: dict[int, LiveWeightsError] = {}  # by version: why what it sampled is not handed on
        self._turns = TurnFeed(gather_s=spec.gather_s, unproven=self._unproven.keys())
        self._engine: RolloutEngine | None = None
        self._sessions: SessionCache | None = None
        self._episodes = count()
        self._manifest: WeightManifest | None = None
        self._proving = asyncio.Lock()
        self._renderer: ChatRenderer | None = None
        self._environments: EnvironmentFactory = make_part(
            "asyncrl.environments", spec.environment, options=spec.environment_options, path="env.name"
        )
        self._transport = spec.transport.make()
        self._rewards = ReplayedRewards(
            self._environments,
            share=spec.reward_check_share,
            max_seq_len=spec.limits.max_seq_len,
            deadline_s=spec.limits.deadline_s,
            times=self._times,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def start(self, model_path: str, weight_version: int) -> float:
        """Load a model with a chat template, and serve it as ``weight_version``. Return the seconds it took.

        Raises:
            ConfigError: there is no such engine, it has no such option, or the chat template cannot be used.
            EngineError: the engine could not be started.
        """
        started = time.monotonic()
        model_path = await asyncio.to_thread(local_model, model_path)
        self._renderer = await asyncio.to_thread(load_renderer, model_path, **self._spec.chat)
        spec = self._spec
        given = {"weight_version": weight_version, **spec.engine_given}
        part = load_part("asyncrl.rollout_engines", spec.engine, path="rollout.engine")
        if part.pulls_weights:
            given["transport"] = spec.transport
        engine: RolloutEngine = make_part(
            "asyncrl.rollout_engines",
            spec.engine,
            model_path,
            options=spec.engine_options,
            path="rollout.engine",
            **given,
        )
        self._engine = engine
        await engine.start()
        self._sessions = SessionCache(engine, capacity_tokens=engine.statistics().kv_cache_capacity_tokens)
        return time.monotonic() - started

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def rollout(self, prompts: DataProto) -> DataProto:
        """Run one episode per row (:func:`asyncrl.rollout.trajectory.prompt_rows`), all at once.

        Return the trajectory columns [B] of :mod:`asyncrl.interfaces`, in the rows' order; ``meta_info`` carries the
        group's summary; by cause, the ``failures`` of attempts; and ``checks``, what became of rewards that were
        checked. With a ``purpose`` of ``eval`` or ``baseline`` they are greedy, or as ``sampling`` says. The caller
        gives them up after ``meta_info["deadline_s"]``, if it is there; environments are ended and closed before that.

        Raises:
            EnvironmentFailure: an episode failed ``max_attempts`` times, or there was no time left.
                ``tokens_generated`` counts every token sampled for the group, finished episodes included.
            InvariantError: a row has another reward than it earns when it is played again, or a seed is not the run's.
            LiveWeightsError: a version that sampled some of it was committed and is not proven.
        """
        assert prompts.batch is not None
        group_id = int(prompts.batch["group_id"][0])
        attempt: int | None = prompts.meta_info.get("attempt")
        try:
            return await self._roll_out(prompts, group_id=group_id, attempt=attempt)
        finally:
            if attempt is not None:
                self._turns.forget(group_id, attempt)

    async def _roll_out(self, prompts: DataProto, *, group_id: int, attempt: int | None) -> DataProto:
        assert prompts.batch is not None
        purpose: str = prompts.meta_info["purpose"]
        tasks: list[Task] = list(prompts.non_tensor_batch["task"])
        seeds = [int(seed) for seed in prompts.batch["seed"]]
        group_id = int(prompts.batch["group_id"][0])
        if purpose == "train" and self._spec.seed is not None:
            check_seeds(seeds, run_seed=self._spec.seed, purpose=purpose, group_id=group_id)
        sampling = self._sampling(purpose, prompts.meta_info.get("sampling", {}))
        continuation = Continuation(prompts.meta_info.get("turns", b""))
        left_s: float = prompts.meta_info.get("deadline_s", math.inf)
        now_s = asyncio.get_running_loop().time()
        ends_s = now_s + max(left_s - _CLOSING_S, left_s * _SHARE_OF_ENVIRONMENTS)
        closes_s = now_s + max(left_s - _ANSWERING_S, left_s * _SHARE_OF_CLOSING)
        failures = Failures()
        feed = self._turns if attempt is not None else None
        with self._meter.account(purpose) as account:
            engine = MeteredEngine(self._running_sessions(), self._meter, account, self._times)
            try:
                async with asyncio.TaskGroup() as episodes:
                    running = [
                        episodes.create_task(
                            self._episode(
                                engine,
                                account,
                                task,
                                sampling,
                                f"{purpose}-{group_id}-{row}",
                                seed,
                                turns=TurnRecorder(feed, group_id=group_id, attempt=attempt or 0, row=row),
                                continuation=continuation,
                                failures=failures,
                                ends_s=ends_s,
                                closes_s=closes_s,
                            ),
                            name=f"row {row}",
                        )
                        for row, (task, seed) in enumerate(zip(tasks, seeds, strict=True))
                    ]
            except BaseExceptionGroup as group:
                failure = _first_failure(group)
                if isinstance(failure, EnvironmentFailure | RequestAbortedError):
                    failure.tokens_generated = account.tokens
                if isinstance(failure, EnvironmentFailure):
                    failure.causes = failures
                raise failure from failure.__cause__
        trajectories = [task.result() for task in running]
        await self._proven(trajectories)
        batch = trajectories_to_batch(trajectories, group_id=group_id)
        assert self._renderer is not None
        checks = await self._rewards.check(
            batch, trajectories, self._renderer, group_id=group_id, ends_s=ends_s, closes_s=closes_s
        )
        batch.meta_info["checks"] = checks.as_meta()
        continued = continuation.outcome()
        batch.meta_info |= {"wasted_tokens": account.wasted, "continued": asdict(continued), "failures": dict(failures)}
        batch.meta_info["times"] = dict(self._times.totals)
        if prompts.meta_info.get("record"):
            batch.meta_info["record"] = encode_rows(trajectories)
        if prompts.meta_info.get("sample"):
            batch.meta_info["sample"] = self._readable(trajectories[0], tasks[0])
        return batch

    def _sampling(self, purpose: str, changes: Mapping[str, Any]) -> SamplingParams:
        sampling = self._spec.sampling
        if purpose in GREEDY_PURPOSES and not changes:
            return replace(sampling, temperature=0.0, top_p=1.0, top_k=0)
        return replace(sampling, **changes)

    async def _episode(
        self,
        engine: MeteredEngine,
        account: TokenAccount,
        task: Task,
        sampling: SamplingParams,
        name: str,
        seed: int,
        *,
        turns: TurnRecorder,
        continuation: Continuation,
        failures: Failures,
        ends_s: float,
        closes_s: float,
    ) -> Trajectory:
        assert self._renderer is not None
        limits, sessions = self._spec.limits, self._running_sessions()
        recorded = continuation.of_row(turns.row)
        trial = recorded[0].trial if recorded else 0
        while True:
            session = f"{next(self._episodes)}"  # its own: an earlier attempt may not have left yet
            try:
                environment = make_environment(self._environments)
                turns.begin(trial=trial)
                if isinstance(environment, AgentEnvironment):
                    prefix, own_seed = f"{name}-{trial}", derive_seed(seed, trial)
                    return await self._agent_episode(
                        environment,
                        engine,
                        account,
                        task,
                        sampling,
                        prefix,
                        own_seed,
                        ends_s=ends_s,
                        closes_s=closes_s,
                    )
                with self._times.episode():
                    trajectory = await run_episode(
                        engine,
                        environment,
                        self._renderer,
                        task,
                        sampling=sampling,
                        max_turns=limits.max_turns,
                        max_seq_len=limits.max_seq_len,
                        deadline_s=limits.deadline_s,
                        ends_s=ends_s,
                        closes_s=closes_s,
                        latency_s=limits.latency_s,
                        request_prefix=f"{name}-{trial}",
                        session=session,
                        seed=derive_seed(seed, trial),
                        times=self._times,
                        turns=turns,
                        recorded=recorded,
                        on_reply=partial(sessions.name_tools, session),
                    )
                used = recorded[: len(trajectory.turns)]
                continuation.continued(turns.row, tokens=sum(turn.tokens for turn in used))
                return trajectory
            except Diverged as divergence:
                continuation.restarted(str(divergence))
                recorded, trial = (), 0
            except EnvironmentFailure as failure:
                # Recorded turns come first; only what follows them was sampled now.
                failures.add(failure)
                account.wasted += max(failure.tokens_generated - sum(turn.tokens for turn in recorded), 0)
                if recorded:
                    continuation.restarted("the environment failed")
                trial, recorded = trial + 1, ()
                if trial >= limits.max_attempts or asyncio.get_running_loop().time() >= ends_s:
                    raise
            finally:
                sessions.leave(session)

    async def _agent_episode(
        self,
        environment: AgentEnvironment,
        engine: MeteredEngine,
        account: TokenAccount,
        task: Task,
        sampling: SamplingParams,
        request_prefix: str,
        seed: int,
        *,
        ends_s: float,
        closes_s: float,
    ) -> Trajectory:
        """Run an agent; tokens of turns that it gave up are wasted."""
        assert self._renderer is not None
        limits, counted = self._spec.limits, AgentEngine(engine, self._times)
        policy = EpisodePolicy(
            engine=counted,
            renderer=self._renderer,
            sampling=sampling,
            max_turns=limits.max_turns,
            max_seq_len=limits.max_seq_len,
            request_prefix=request_prefix,
            seed=seed,
        )
        try:
            with self._times.episode():
                trajectory = await run_agent_episode(
                    environment,
                    task,
                    policy,
                    deadline_s=limits.deadline_s,
                    ends_s=ends_s,
                    closes_s=closes_s,
                    times=self._times,
                )
        except EnvironmentFailure as failure:
            failure.tokens_generated = counted.tokens
            raise
        account.wasted += counted.tokens - trajectory.sampled_tokens
        return trajectory

    def _readable(self, trajectory: Trajectory, task: Task) -> dict[str, Any]:
        assert self._renderer is not None
        return {
            "task": task,
            "text": str(self._renderer.tokenizer.decode(list(trajectory.token_ids), skip_special_tokens=False)),
            "reward": trajectory.reward,
            **({REWARD_PARTS: trajectory.info[REWARD_PARTS]} if REWARD_PARTS in trajectory.info else {}),
            "finish": trajectory.finish_reason,
            "weight_versions": sorted({version for version in trajectory.weight_versions if version >= 0}),
            "tokens": self._readable_tokens(trajectory),
        }

    def _readable_tokens(self, trajectory: Trajectory) -> list[list[Any]]:
        """Return the text of each token, and of a sampled one its log-prob and weight version."""
        assert self._renderer is not None
        texts = self._renderer.tokenizer.batch_decode([[token] for token in trajectory.token_ids])
        columns = (texts, trajectory.loss_mask, trajectory.behaviour_log_probs, trajectory.weight_versions)
        return [
            [text, round(log_prob, 5), version] if sampled else [text]
            for text, sampled, log_prob, version in zip(*columns, strict=True)
        ]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def turns(self) -> bytes:
        """Wait for turns that ended in rollouts with an ``attempt``; return those since the last call, encoded.

        A turn with a token of a version that is not proven yet is returned once that is.
        """
        return await self._turns.drain()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def prepare_weights(self, manifest: WeightManifest) -> float:
        """Fetch, verify and shadow the weights. Return the seconds it took.

        Raises:
            WeightError: the bytes are missing, or not the manifest's, or not the model's. The old weights stay.
        """
        started = time.monotonic()
        self._manifest = manifest
        await fetch_into(self._running_engine(), manifest, transport=self._transport)
        return time.monotonic() - started

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def commit_weights(self, version: int, kv_cache: KVCachePolicy = "keep") -> WeightsProof:
        """Sample under ``version`` from the next token on, and prove it; what it sampled meanwhile waits for that.

        Raises:
            LiveWeightsError: the engine serves, or computes with, anything else than what was published.
            WeightVersionError: ``version`` is not the prepared one.
        """
        async with self._proving:
            self._unproven[version] = LiveWeightsError(f"weight version {version} was committed and not proven")
            try:
                proof = await commit_into(self._running_engine(), version, kv_cache=kv_cache, manifest=self._manifest)
            except LiveWeightsError as error:
                self._unproven[version] = error
                raise
            del self._unproven[version]
            self._turns.proven()
            return proof

    async def _proven(self, trajectories: Sequence[Trajectory]) -> None:
        """Return once every version with a token in ``trajectories`` is proven; raise its error if it is not."""
        versions = {version for each in trajectories for version in each.weight_versions}
        if versions.isdisjoint(self._unproven):
            return
        async with self._proving:  # the proof may be under way
            for version in versions & self._unproven.keys():
                raise self._unproven[version]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def sleep(self) -> None:
        """Free the memory of the engine until :meth:`wake`; rollouts go on then.

        Raises:
            EngineError: the engine cannot.
        """
        await self._sleeping_engine().sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wake(self) -> None:
        await self._sleeping_engine().wake()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def engine_statistics(self) -> dict[str, Any]:
        """Return the engine's statistics, where episodes are, token counts by purpose, the file of the token meter."""
        return {
            "episodes": self._times.explain(),
            "engine": asdict(self._running_engine().statistics()),
            "meter": str(self._meter.path or ""),
            "delivered": {purpose: self._meter.delivered(purpose) for purpose in _PURPOSES},
            "in_flight": {purpose: self._meter.in_flight(purpose) for purpose in _PURPOSES},
        }

    async def aclose(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        self._transport.close()
        if isinstance(self._environments, ClosableFactory):
            await self._environments.aclose()

    def _sleeping_engine(self) -> SleepingEngine:
        engine = self._running_engine()
        if not isinstance(engine, SleepingEngine):
            raise EngineError(
                f"{type(engine).__name__} cannot free its memory for a while (it has no sleep and wake), so it cannot "
                "share devices with the trainer: leave rollout out of cluster.colocate"
            )
        return engine

    def _running_sessions(self) -> SessionCache:
        self._running_engine()
        assert self._sessions is not None, "it is made when the engine has started"
        return self._sessions

    def _running_engine(self) -> RolloutEngine:
        if self._engine is None:
            raise RuntimeError("the rollout worker was not started: call start(model_path, weight_version) first")
        return self._engine


def _first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_failure(first) if isinstance(first, BaseExceptionGroup) else first
