"""One episode: an assistant and an environment take turns until one of them, or a limit, ends it.

Tokens are never rendered twice: each turn's prompt begins with exactly the ids of the turns before it (see
:mod:`asyncrl.agents.chat`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsFloat, TypeVar

from asyncrl.agents.chat import ChatRenderer
from asyncrl.errors import (
    AsyncRLError,
    EngineError,
    EnvironmentDeadlineError,
    EnvironmentFailure,
    InvalidDataError,
    RequestAbortedError,
)
from asyncrl.interfaces import (
    Environment,
    FinishReason,
    Generation,
    GenerationRequest,
    Message,
    SamplingParams,
    Step,
    Task,
    TokenGenerator,
    Tool,
)
from asyncrl.rollout.prompts import derive_seed
from asyncrl.rollout.trajectory import REWARD_PARTS, EpisodeEnd, Trajectory, Turn
from asyncrl.rollout.turns import RowTurns, TurnRecord

__all__ = ["Diverged", "run_episode"]

_T = TypeVar("_T")

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


class Diverged(Exception):
    """Recorded turns do not belong to what the environment says now: the episode must be begun again without them."""


async def run_episode(
    engine: TokenGenerator,
    environment: Environment,
    renderer: ChatRenderer,
    task: Task,
    *,
    sampling: SamplingParams,
    max_turns: int,
    max_tokens: int,
    deadline_s: float,
    request_prefix: str,
    seed: int,
    latency_s: float = 0.0,
    turns: RowTurns | None = None,
    recorded: Sequence[TurnRecord] = (),
) -> Trajectory:
    """Play ``task`` to its end; the environment is closed whatever happens.

    Reaching a limit is an end like any other: the trajectory says so and keeps the reward earned by then. A turn that
    filled the last of ``max_tokens`` is not shown to the environment, since it was cut.

    Args:
        engine: generates the assistant's turns. The renderer's end-of-turn token is added to the stop tokens.
        environment: used for this episode only.
        renderer: of the engine's model.
        task: handed to ``environment.reset``.
        sampling: for each turn; its seed is replaced by one derived from ``seed`` and the turn's number, and
            ``max_new_tokens`` is cut to what ``max_tokens`` leaves.
        max_turns: assistant turns at most.
        max_tokens: tokens of the whole trajectory at most, prompt and environment included.
        deadline_s: for each call of the environment.
        request_prefix: turn n is the engine's request ``{request_prefix}-{n}``.
        seed: of the episode.
        latency_s: added to each step of the environment: a simulated slow tool.
        turns: told of every sampled turn.
        recorded: turns that the episode begins with instead of sampling them. The environment is shown them anew.

    Raises:
        Diverged: with ``recorded`` turns: what led to one of them is not what leads to it now.
        EnvironmentFailure: the environment raised (the cause), or gave what cannot be used (no messages, or none that
            the chat template can write; rewards that are no finite float32, or sum up to none), with
            ``tokens_generated``.
        EnvironmentDeadlineError: a call of it took longer than ``deadline_s``, with ``tokens_generated``.
        RequestAbortedError: the engine aborted a turn, with ``tokens_generated``.
        InvalidDataError: the prompt alone fills ``max_tokens``.
    """
    episode = _Episode(task)
    limits = _Limits(
        sampling=sampling, max_turns=max_turns, max_tokens=max_tokens, deadline_s=deadline_s, latency_s=latency_s
    )
    try:
        try:
            reason = await _play(
                engine,
                environment,
                renderer,
                episode,
                limits,
                request_prefix=request_prefix,
                seed=seed,
                turns=turns,
                recorded=recorded,
            )
        except BaseException as error:
            try:
                await _ask(environment.close, what="close", deadline_s=deadline_s)
            except AsyncRLError as failure:  # what went wrong first counts, a cancellation above all
                error.add_note(f"closing the environment failed too: {failure}")
            raise
        await _ask(environment.close, what="close", deadline_s=deadline_s)
    except EnvironmentFailure as failure:
        failure.tokens_generated = episode.sampled_tokens
        raise
    return episode.ended(reason)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Limits:
    """The arguments of :func:`run_episode` that bound an episode."""

    sampling: SamplingParams
    max_turns: int
    max_tokens: int
    deadline_s: float
    latency_s: float


async def _play(
    engine: TokenGenerator,
    environment: Environment,
    renderer: ChatRenderer,
    episode: _Episode,
    limits: _Limits,
    *,
    request_prefix: str,
    seed: int,
    turns: RowTurns | None,
    recorded: Sequence[TurnRecord],
) -> EpisodeEnd:
    """The turns, written down in ``episode``; returns why they ended."""
    messages = _messages(
        await _ask(environment.reset, episode.task, what="reset", deadline_s=limits.deadline_s), what="reset", least=1
    )
    tools = await _ask(_tools, environment, what="tools", deadline_s=limits.deadline_s)
    with _reading(messages, what="reset"):
        prompt = renderer.prompt(messages, tools)
    episode.heard(prompt)
    if episode.length >= limits.max_tokens:
        raise InvalidDataError(
            f"the prompt has {episode.length} tokens and a trajectory may have {limits.max_tokens}: raise max_tokens"
        )
    for number in range(limits.max_turns):
        sampling = dataclasses.replace(
            limits.sampling,
            max_new_tokens=min(limits.sampling.max_new_tokens, limits.max_tokens - episode.length),
            stop_token_ids=tuple(sorted({*limits.sampling.stop_token_ids, renderer.end_of_turn_id})),
            seed=derive_seed(seed, "turn", number),
        )
        request = GenerationRequest(
            request_id=f"{request_prefix}-{number}", prompt_token_ids=tuple(episode.token_ids), sampling=sampling
        )
        if number < len(recorded):
            generation = _recorded(recorded[number], heard=episode.last_heard, limit=sampling.max_new_tokens)
        else:
            generation = await _generate(engine, request, tokens_before=episode.sampled_tokens)
        if turns is not None:
            turns.sampled(episode.last_heard, generation)
        reply = renderer.parse(generation.token_ids)
        episode.said(generation, reply)
        if generation.finish_reason == "length" and episode.length >= limits.max_tokens:
            return "max_tokens"
        if limits.latency_s > 0:
            await asyncio.sleep(limits.latency_s)
        step = _step(await _ask(environment.step, reply, what="step", deadline_s=limits.deadline_s))
        episode.earned(step)
        if step.done:
            return "done"
        if number + 1 == limits.max_turns:
            break
        with _reading(step.messages, what="step"):
            answer = renderer.extend(messages, generation.token_ids, step.messages, tools)
        if episode.length + len(answer) >= limits.max_tokens:
            return "max_tokens"
        episode.heard(answer)
        messages += [reply, *step.messages]
    return "max_turns"


class _Episode:
    """The trajectory while it grows."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.token_ids: list[int] = []
        self.last_heard: tuple[int, ...] = ()
        self.sampled_tokens = 0
        self._mask: list[bool] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []
        self._turns: list[Turn] = []
        self._reward = 0.0
        self._info: Mapping[str, Any] = {}

    @property
    def length(self) -> int:
        return len(self.token_ids)

    def heard(self, token_ids: Sequence[int]) -> None:
        self.last_heard = tuple(token_ids)
        self.token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._log_probs += [0.0] * len(token_ids)
        self._versions += [-1] * len(token_ids)

    def said(self, generation: Generation, message: Message) -> None:
        start = self.length
        self.token_ids += generation.token_ids
        self._mask += [True] * len(generation.token_ids)
        self._log_probs += generation.log_probs
        self._versions += generation.weight_versions
        self.sampled_tokens += len(generation.token_ids)
        turn = Turn(start=start, end=self.length, finish_reason=generation.finish_reason, message=message)
        self._turns.append(turn)

    def earned(self, step: Step) -> None:
        self._reward += step.reward
        if abs(self._reward) > _LARGEST_FLOAT32:
            raise EnvironmentFailure(
                f"the environment's step must keep the sum of the rewards a finite float32; it gave {step.reward:g}, "
                f"and the sum is {self._reward:g}"
            )
        self._turns[-1] = dataclasses.replace(self._turns[-1], reward=step.reward)
        self._info = step.info

    def ended(self, reason: EpisodeEnd) -> Trajectory:
        return Trajectory(
            task=self.task,
            token_ids=tuple(self.token_ids),
            loss_mask=tuple(self._mask),
            behaviour_log_probs=tuple(self._log_probs),
            weight_versions=tuple(self._versions),
            reward=self._reward,
            turns=tuple(self._turns),
            finish_reason=reason,
            info=self._info,
        )


def _recorded(turn: TurnRecord, *, heard: tuple[int, ...], limit: int) -> Generation:
    """A turn that was sampled in an earlier life, if it is still the answer to what was ``heard``."""
    if turn.heard_ids() != heard:
        raise Diverged("the environment answered differently")
    if turn.tokens > limit:
        raise Diverged("a turn is longer than it may be now")
    return turn.generation()


async def _generate(engine: TokenGenerator, request: GenerationRequest, *, tokens_before: int) -> Generation:
    """Put the chunks of one request together. Leaving before its end aborts it in the engine."""
    token_ids: list[int] = []
    log_probs: list[float] = []
    versions: list[int] = []
    finish_reason: FinishReason | None = None
    stream = engine.generate(request)
    try:
        async for chunk in stream:
            token_ids += chunk.token_ids
            log_probs += chunk.log_probs
            versions += chunk.weight_versions
            finish_reason = chunk.finish_reason or finish_reason
    finally:
        if finish_reason is None:
            leave = getattr(stream, "aclose", None)  # an AsyncIterator may be a generator or not
            await (leave() if leave is not None else engine.abort(request.request_id))
    if finish_reason is None:
        raise EngineError(f"request {request.request_id!r} ended without a finish reason")
    if finish_reason == "abort":
        raise RequestAbortedError(
            f"request {request.request_id!r} was aborted after {len(token_ids)} tokens",
            tokens_generated=tokens_before + len(token_ids),
        )
    return Generation(
        token_ids=tuple(token_ids),
        log_probs=tuple(log_probs),
        weight_versions=tuple(versions),
        finish_reason=finish_reason,
    )


async def _ask(call: Callable[..., Awaitable[_T]], *arguments: Any, what: str, deadline_s: float) -> _T:
    """Await one call of an environment under its deadline; what it raises becomes an environment's failure."""
    deadline: asyncio.Timeout | None = None
    cancellations = _cancellations()
    try:
        async with asyncio.timeout(deadline_s) as deadline:
            return await call(*arguments)
    except AsyncRLError:
        raise
    except (Exception, asyncio.CancelledError) as error:  # foreign code: its type travels as the cause
        if isinstance(error, asyncio.CancelledError) and _cancellations() > cancellations:
            raise
        if isinstance(error, TimeoutError) and deadline is not None and deadline.expired():
            raise EnvironmentDeadlineError(f"the environment's {what} took longer than {deadline_s:g} s") from error
        raise EnvironmentFailure(f"the environment's {what} failed: {type(error).__name__}: {error}") from error


def _cancellations() -> int:
    """How often this task was asked to end."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


@contextmanager
def _reading(given: object, *, what: str) -> Iterator[None]:
    """What an environment gave is used: foreign values may raise anything, and a template refuse any conversation."""
    try:
        yield
    except AsyncRLError:
        raise
    except Exception as error:
        raise EnvironmentFailure(
            f"what the environment's {what} gave cannot be used: {type(error).__name__}: {error}; got {_short(given)}"
        ) from error


async def _tools(environment: Environment) -> tuple[Tool, ...]:
    """The tools of an environment, checked."""
    tools = tuple(environment.tools)
    for each in tools:
        if not isinstance(each, Tool):
            raise EnvironmentFailure(f"the environment's tools must be Tools; got {_short(each)}")
        json.dumps(each.schema(), ensure_ascii=False).encode()
    return tools


def _messages(returned: object, *, what: str, least: int = 0) -> list[Message]:
    """What an environment said, checked: foreign code may return anything."""
    with _reading(returned, what=what):
        if isinstance(returned, Sequence) and not isinstance(returned, str):
            said = [message for message in returned if _is_message(message)]
            if len(said) == len(returned) >= least:
                return said
    raise EnvironmentFailure(
        f'the environment\'s {what} must give messages, dicts with a "role" and a text as "content"; '
        f"got {_short(returned)}"
    )


def _is_message(value: object) -> bool:
    """A text may be left out, or come in parts; one that UTF-8 cannot write raises UnicodeEncodeError."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    if isinstance(content, str):
        content.encode()
    return content is None or isinstance(content, str | list)


def _step(returned: object) -> Step:
    """A step of an environment, checked, with its reward as a float."""
    if not isinstance(returned, Step):
        raise EnvironmentFailure(f"the environment's step must return a Step; got {_short(returned)}")
    messages = _messages(returned.messages, what="step")
    given: object = returned.reward
    with _reading(given, what="step"):
        reward = float(given) if isinstance(given, SupportsFloat) else None
    if reward is None or not abs(reward) <= _LARGEST_FLOAT32:
        raise EnvironmentFailure(
            f"the reward of an environment's step must be, as float32, a finite number; got {_short(given)}"
        )
    if not isinstance(returned.info, Mapping):
        raise EnvironmentFailure(f"the info of an environment's step must be a mapping; got {_short(returned.info)}")
    with _reading(returned.info, what="step"):
        info = dict(returned.info)
        parts = info.get(REWARD_PARTS)
        for part in parts.values() if isinstance(parts, Mapping) else ():
            float(part)
    with _reading(returned.done, what="step"):
        return Step(messages=tuple(messages), reward=reward, done=bool(returned.done), info=info)


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  foreign code; who asks has an error to raise already
        text = f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= 80 else f"{text[:77]}..."
