"""A rollout replica as a worker: an engine, the environments its agents act in, and the weights that arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

from asyncrl.agents.chat import ChatRenderer, load_renderer
from asyncrl.agents.episode import Diverged, run_episode
from asyncrl.data import DataProto
from asyncrl.errors import EnvironmentFailure, RequestAbortedError
from asyncrl.interfaces import (
    Closable,
    EnvironmentFactory,
    KVCachePolicy,
    PauseMode,
    RolloutEngine,
    SamplingParams,
    Task,
)
from asyncrl.parts import load_part, make_part
from asyncrl.rollout.metering import MeteredEngine, TokenMeter
from asyncrl.rollout.prompts import derive_seed
from asyncrl.rollout.record import encode_rows
from asyncrl.rollout.trajectory import REWARD_PARTS, Trajectory, trajectories_to_batch
from asyncrl.rollout.turns import Continuation, RowTurns, TurnFeed
from asyncrl.rollout.weight_fetch import fetch_into
from asyncrl.single_controller import Dispatch, Execute, Worker, register
from asyncrl.weights.manifest import WeightManifest
from asyncrl.weights.transport import TransportSpec

__all__ = ["EpisodeLimits", "RolloutSpec", "RolloutWorker"]

GREEDY_PURPOSES = ("eval", "baseline")
"""What is rolled out greedily: held-out tasks, and the answer that a policy's samples are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """What bounds one episode.

        >>> EpisodeLimits(max_turns=4, max_tokens=2048, deadline_s=10.0).max_attempts
        3

    Attributes:
        max_turns: assistant turns.
        max_tokens: tokens of the whole trajectory, prompt and environment included.
        deadline_s: seconds for each call of the environment.
        latency_s: seconds added to each step of the environment (a simulated slow tool).
        max_attempts: how often an episode is tried when its environment fails.
    """

    max_turns: int
    max_tokens: int
    deadline_s: float = 60.0
    latency_s: float = 0.0
    max_attempts: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSpec:
    """Everything a replica is made from; picklable. Part names are entry points or dotted paths.

        >>> spec = RolloutSpec(
        ...     engine="asyncrl.testing:EchoEngine",  # repeats its prompt
        ...     environment="asyncrl.testing:EchoFactory",  # poses {"word": ...}, and {"turns": ...} of them
        ...     transport=TransportSpec(name="asyncrl.testing:EmptyTransport", namespace="run-1"),
        ...     limits=EpisodeLimits(max_turns=2, max_tokens=64),
        ...     sampling=SamplingParams(max_new_tokens=16),
        ...     gather_s=0.0,
        ... )
        >>> RolloutWorker(spec).rank
        0

    Attributes:
        engine: of ``asyncrl.rollout_engines``.
        environment: of ``asyncrl.environments``.
        transport: the pullers' end of the weights' way.
        limits: of each episode.
        sampling: of each turn, unless the rows that ask for rollouts say otherwise.
        engine_given: the engine's keyword arguments that the run decides.
        engine_options: those that the user does.
        environment_options: the environment's keyword arguments.
        chat: options of :func:`asyncrl.agents.chat.load_renderer`.
        meter_folder: where token counts are kept so that they outlive the process; None for nowhere.
        gather_s: seconds for which turns that are to be recorded are gathered.
    """

    engine: str
    environment: str
    transport: TransportSpec
    limits: EpisodeLimits
    sampling: SamplingParams
    engine_given: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    environment_options: Mapping[str, Any] = field(default_factory=dict)
    chat: Mapping[str, Any] = field(default_factory=dict)
    meter_folder: Path | None = None
    gather_s: float = 0.2


class RolloutWorker(Worker):
    """Runs episodes on its engine. Everything is ``async``: rollouts, weights and statistics share one event loop.

        >>> worker = RolloutWorker(spec)
        >>> _ = asyncio.run(worker.start(model, weight_version=3))
        >>> asked = prompt_rows([{"word": "word0"}] * 2, slot=7, seeds=[1, 2], purpose="train")
        >>> rows = asyncio.run(worker.rollout(asked))
        >>> rows.batch["weight_versions"][0].tolist()  # the prompt's five tokens, and the four that were sampled
        [-1, -1, -1, -1, -1, 3, 3, 3, 3]
        >>> asyncio.run(worker.aclose())

    The examples of the methods have the same ``spec``, that of :class:`RolloutSpec`, and the same ``model``, a folder.

    Args:
        spec: what the replica is made from.

    Raises:
        ConfigError: there is no such environment or transport, or it has no such option.
    """

    def __init__(self, spec: RolloutSpec) -> None:
        super().__init__()
        self._spec = spec
        self._meter = TokenMeter(spec.meter_folder)
        self._turns = TurnFeed(gather_s=spec.gather_s)
        self._engine: RolloutEngine | None = None
        self._renderer: ChatRenderer | None = None
        self._environments: EnvironmentFactory = make_part(
            "asyncrl.environments", spec.environment, options=spec.environment_options, path="env.name"
        )
        self._transport = spec.transport.make()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def start(self, model_path: str, weight_version: int) -> float:
        """Load the model and begin to serve ``weight_version``. Returns the seconds it took.

            >>> worker = RolloutWorker(spec)
            >>> asyncio.run(worker.start(model, weight_version=3)) >= 0
            True
            >>> asyncio.run(worker.engine_statistics())["engine"]["weight_version"]
            3

        Args:
            model_path: as the engine takes it; its tokenizer has a chat template.
            weight_version: version of these weights.

        Raises:
            ConfigError: there is no such engine, it has no such option, or the chat template cannot be used.
            EngineError: the engine could not be started.
        """
        started = time.monotonic()
        self._renderer = await asyncio.to_thread(load_renderer, model_path, **self._spec.chat)
        spec = self._spec
        given = {"weight_version": weight_version, **spec.engine_given}
        part = load_part("asyncrl.rollout_engines", spec.engine, path="rollout.engine")
        if "transport" in signature(part).parameters:  # it fetches weights itself
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
        return time.monotonic() - started

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def rollout(self, prompts: DataProto) -> DataProto:
        """Run one episode per row (:func:`asyncrl.rollout.prompts.prompt_rows`), all at once.

        Returns the trajectory columns [B] of :mod:`asyncrl.interfaces`, in the rows' order; ``meta_info`` carries the
        group's summary. With a ``purpose`` of ``eval`` or ``baseline`` they are greedy, or as ``sampling`` says.

            >>> worker = RolloutWorker(spec)
            >>> _ = asyncio.run(worker.start(model, weight_version=3))
            >>> asked = prompt_rows([{"word": "word0"}] * 2, slot=7, seeds=[1, 2], purpose="train")
            >>> summary = asyncio.run(worker.rollout(asked)).meta_info["summary"]
            >>> summary["slot"], summary["lengths"], summary["version_tokens"]
            (7, (4, 4), {3: 8})

        Raises:
            RuntimeError: the worker was not started.
            EnvironmentFailure: an episode failed ``max_attempts`` times. ``tokens_generated`` counts every token
                sampled for the group, finished episodes included.
        """
        assert prompts.batch is not None
        purpose: str = prompts.meta_info["purpose"]
        tasks: list[Task] = list(prompts.non_tensor_batch["task"])
        seeds = [int(seed) for seed in prompts.batch["seed"]]
        slot = int(prompts.batch["slot"][0])
        sampling = self._sampling(purpose, prompts.meta_info.get("sampling", {}))
        attempt: int | None = prompts.meta_info.get("attempt")
        continuation = Continuation(prompts.meta_info.get("turns", b""))
        feed = self._turns if attempt is not None else None
        with self._meter.account(purpose) as account:
            engine = MeteredEngine(self._running_engine(), self._meter, account)
            try:
                async with asyncio.TaskGroup() as episodes:
                    running = [
                        episodes.create_task(
                            self._episode(
                                engine,
                                task,
                                sampling,
                                f"{purpose}-{slot}-{row}",
                                seed,
                                row=row,
                                turns=RowTurns(feed, slot=slot, attempt=attempt or 0, row=row),
                                continuation=continuation,
                            ),
                            name=f"row {row}",
                        )
                        for row, (task, seed) in enumerate(zip(tasks, seeds, strict=True))
                    ]
            except BaseExceptionGroup as group:
                failure = _first_failure(group)
                if isinstance(failure, EnvironmentFailure | RequestAbortedError):
                    failure.tokens_generated = account.tokens
                raise failure from None
        trajectories = [task.result() for task in running]
        batch = trajectories_to_batch(trajectories, slot=slot)
        continued = continuation.outcome()
        wasted = account.tokens + continued.tokens - batch.meta_info["summary"]["tokens"]
        batch.meta_info |= {"wasted_tokens": wasted, "continued": asdict(continued)}
        if attempt is not None:
            self._turns.forget(slot, attempt)
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
        task: Task,
        sampling: SamplingParams,
        name: str,
        seed: int,
        *,
        row: int,
        turns: RowTurns,
        continuation: Continuation,
    ) -> Trajectory:
        assert self._renderer is not None
        limits = self._spec.limits
        recorded = continuation.of_row(row)
        trial = recorded[0].trial if recorded else 0
        while True:
            environment = self._environments.make()
            if recorded and not getattr(environment, "replayable", True):
                continuation.restarted("the environment cannot be shown its turns again")
                recorded, trial = (), 0
            turns.begin(trial=trial)
            try:
                trajectory = await run_episode(
                    engine,
                    environment,
                    self._renderer,
                    task,
                    sampling=sampling,
                    max_turns=limits.max_turns,
                    max_tokens=limits.max_tokens,
                    deadline_s=limits.deadline_s,
                    latency_s=limits.latency_s,
                    request_prefix=f"{name}-{trial}",
                    seed=derive_seed(seed, trial),
                    turns=turns,
                    recorded=recorded,
                )
                used = recorded[: len(trajectory.turns)]
                continuation.went_on(row, tokens=sum(turn.tokens for turn in used))
                return trajectory
            except Diverged as divergence:
                continuation.restarted(str(divergence))
                recorded, trial = (), 0
            except EnvironmentFailure:
                if recorded:
                    continuation.restarted("the environment failed")
                trial, recorded = trial + 1, ()
                if trial >= limits.max_attempts:
                    raise

    def _readable(self, trajectory: Trajectory, task: Task) -> dict[str, Any]:
        assert self._renderer is not None
        return {
            "task": task,
            "text": str(self._renderer.tokenizer.decode(list(trajectory.token_ids), skip_special_tokens=False)),
            "reward": trajectory.reward,
            **({REWARD_PARTS: trajectory.info[REWARD_PARTS]} if REWARD_PARTS in trajectory.info else {}),
            "finish": trajectory.finish_reason,
            "weight_versions": sorted({version for version in trajectory.weight_versions if version >= 0}),
        }

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def turns(self) -> bytes:
        """Wait for turns that ended in rollouts with an ``attempt``; those since the last call, encoded.

        >>> async def first_turns():
        ...     worker = RolloutWorker(spec)
        ...     await worker.start(model, weight_version=3)
        ...     asked = prompt_rows([{"word": "word0", "turns": 2}], slot=7, seeds=[1], purpose="train", attempt=0)
        ...     async with asyncio.TaskGroup() as tasks:
        ...         rollout = tasks.create_task(worker.rollout(asked))
        ...         return sampled_turns(await worker.turns())  # while the second one is being sampled
        >>> asyncio.run(first_turns())
        (SampledTurn(slot=7, attempt=0, row=0, turn=0, tokens=4),)
        """
        return await self._turns.drain()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def prepare_weights(self, manifest: WeightManifest) -> float:
        """First phase: fetch, verify and shadow the weights. Returns the seconds it took.

            >>> worker = RolloutWorker(spec)
            >>> _ = asyncio.run(worker.start(model, weight_version=3))
            >>> manifest = spec.transport.make().publish((), version=4)
            >>> _ = asyncio.run(worker.prepare_weights(manifest))
            >>> asyncio.run(worker.engine_statistics())["engine"]["weight_version"]  # not committed yet
            3

        Raises:
            WeightError: the bytes are not there, or not the manifest's, or not the model's. The old weights stay.
            EngineError: the engine is closed or gone.
            RuntimeError: the worker was not started.
        """
        started = time.monotonic()
        await fetch_into(self._running_engine(), manifest, transport=self._transport)
        return time.monotonic() - started

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def commit_weights(self, version: int, kv_cache: KVCachePolicy = "keep") -> float:
        """Second phase: sample under ``version`` from the next token on. Returns the seconds it took.

            >>> worker = RolloutWorker(spec)
            >>> _ = asyncio.run(worker.start(model, weight_version=3))
            >>> _ = asyncio.run(worker.prepare_weights(spec.transport.make().publish((), version=4)))
            >>> _ = asyncio.run(worker.commit_weights(4))
            >>> asyncio.run(worker.engine_statistics())["engine"]["weight_version"]
            4

        Raises:
            WeightVersionError: ``version`` is not the prepared one.
            EngineError: the engine is closed or gone.
            RuntimeError: the worker was not started.
        """
        started = time.monotonic()
        await self._running_engine().commit_weights(version, kv_cache=kv_cache)
        return time.monotonic() - started

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop decoding; ``mode`` is that of :meth:`asyncrl.interfaces.RolloutEngine.pause`.

            >>> worker = RolloutWorker(spec)
            >>> _ = asyncio.run(worker.start(model, weight_version=3))
            >>> asyncio.run(worker.pause())
            >>> asyncio.run(worker.engine_statistics())["engine"]["paused"]
            True

        Raises:
            EngineError: the engine is closed or gone.
            RuntimeError: the worker was not started.
        """
        await self._running_engine().pause(mode)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def resume(self) -> None:
        """Go on decoding.

            >>> worker = RolloutWorker(spec)
            >>> _ = asyncio.run(worker.start(model, weight_version=3))
            >>> asyncio.run(worker.pause())
            >>> asyncio.run(worker.resume())
            >>> asyncio.run(worker.engine_statistics())["engine"]["paused"]
            False

        Raises:
            EngineError: the engine is closed or gone.
            RuntimeError: the worker was not started.
        """
        await self._running_engine().resume()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    async def engine_statistics(self) -> dict[str, Any]:
        """The engine's statistics, tokens delivered and in flight by purpose, and the file that outlives this.

            >>> worker = RolloutWorker(spec)
            >>> _ = asyncio.run(worker.start(model, weight_version=3))
            >>> asked = prompt_rows([{"word": "word0"}], slot=0, seeds=[1], purpose="eval")
            >>> rows = asyncio.run(worker.rollout(asked))
            >>> asyncio.run(worker.engine_statistics())["delivered"]
            {'train': 0, 'eval': 4, 'baseline': 0}

        Raises:
            RuntimeError: the worker was not started.
        """
        return {
            "engine": asdict(self._running_engine().statistics()),
            "meter": str(self._meter.path or ""),
            "delivered": {purpose: self._meter.delivered(purpose) for purpose in ("train", *GREEDY_PURPOSES)},
            "in_flight": {purpose: self._meter.in_flight(purpose) for purpose in ("train", *GREEDY_PURPOSES)},
        }

    async def aclose(self) -> None:
        """Close the engine and forget the weights.

        >>> worker = RolloutWorker(spec)
        >>> _ = asyncio.run(worker.start(model, weight_version=3))
        >>> asyncio.run(worker.aclose())
        """
        if self._engine is not None:
            await self._engine.close()
        self._transport.close()
        if isinstance(self._environments, Closable):
            await self._environments.aclose()

    def _running_engine(self) -> RolloutEngine:
        if self._engine is None:
            raise RuntimeError("the rollout worker was not started: call start(model_path, weight_version) first")
        return self._engine


def _first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_failure(first) if isinstance(first, BaseExceptionGroup) else first
