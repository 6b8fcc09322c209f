"""One episode: a policy and an environment take turns until the environment or a limit ends it.

Tokens are never rendered twice: each turn's prompt begins with exactly the ids of the turns before it (see
:mod:`asyncrl.rollout.chat`). Environments are foreign code: whatever they raise or return becomes an
:class:`~asyncrl.errors.EnvironmentFailure`.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import Any, Protocol, SupportsFloat, TypeVar, runtime_checkable

from msgspec.structs import replace

from asyncrl.data.codec import packed
from asyncrl.errors import (
    AsyncRLError,
    CodecError,
    EngineError,
    EnvironmentDeadlineError,
    EnvironmentFailure,
    RequestAbortedError,
)
from asyncrl.foreign import place_of
from asyncrl.interfaces import (
    DeterministicEnvironment,
    Environment,
    EnvironmentFactory,
    EnvironmentReplay,
    EnvironmentWait,
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
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.trajectory import REWARD_PARTS, EpisodeEnd, Trajectory, Turn, derive_seed
from asyncrl.rollout.turns import TurnRecord, TurnRecorder
from asyncrl.rollout.work import EpisodeTimes

_T = TypeVar("_T")

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePolicy:
    """The policy for an agent that asks it for turns, and the bounds of its episode.

    Attributes:
        engine: samples turns; request n is ``{request_prefix}-{n}``, and its seed is derived from ``seed`` and n.
        sampling: of every turn; an agent may ask for fewer tokens.
        max_turns: turns of all branches together.
        max_seq_len: tokens of a branch.
    """

    engine: TokenGenerator
    renderer: ChatRenderer
    sampling: SamplingParams
    max_turns: int
    max_seq_len: int
    request_prefix: str
    seed: int


@runtime_checkable
class AgentEnvironment(Protocol):
    """An environment with an agent of its own, which asks the policy when it likes, instead of ``reset`` and ``step``.

    The episode is what it has asked, a tree of turns (:mod:`asyncrl.rollout.branches`). It is not replayed. Where its
    branches are of several players, an attribute ``credit`` names the ``algorithm.credit`` that the run has to have.
    """

    async def run_agent(self, task: Task, policy: EpisodePolicy) -> Trajectory:
        """Run the agent to its end; every turn that it got is in the trajectory.

        Raises:
            EnvironmentFailure: the agent, or what gives the reward, failed.
        """
        ...

    async def close(self) -> None:
        """Free what the episode used, whether it is finished or not."""


class Diverged(Exception):
    """The episode must begin again without the recorded turns: the answers differ, or they may not be repeated."""


def make_environment(factory: EnvironmentFactory) -> Environment:
    """Make the environment of an episode; what the user's code raises becomes its failure."""
    try:
        return factory.make()
    except AsyncRLError:
        raise
    except Exception as error:  # foreign code: its type travels as the cause
        text = f"the environment could not be made: {type(error).__name__}: {error}{place_of(error)}"
        raise EnvironmentFailure(text) from error


async def run_episode(
    engine: TokenGenerator,
    environment: Environment,
    renderer: ChatRenderer,
    task: Task,
    *,
    sampling: SamplingParams,
    max_turns: int,
    max_seq_len: int,
    deadline_s: float,
    request_prefix: str,
    seed: int,
    ends_s: float = math.inf,
    closes_s: float = math.inf,
    latency_s: float = 0.0,
    times: EpisodeTimes | None = None,
    turns: TurnRecorder | None = None,
    recorded: Sequence[TurnRecord] = (),
    session: str = "",
    on_reply: Callable[[Message], None] | None = None,
) -> Trajectory:
    """Play ``task`` to its end; the environment, used for this episode only, is closed whatever happens.

    Reaching a limit (:class:`~asyncrl.rollout.worker.EpisodeLimits`) is an end like any other: the trajectory has the
    reason, and the rewards so far. A turn that was cut by ``max_seq_len`` is not passed to the environment.

    The renderer's end-of-turn token is added to the stop tokens. The seed of each turn is derived from ``seed`` and the
    turn's number, ``max_new_tokens`` is cut to what ``max_seq_len`` leaves, and turn n is the engine's request
    ``{request_prefix}-{n}`` of ``session``. ``on_reply`` is called with each reply before the
    environment gets it. ``turns`` records every sampled turn. The episode begins with the ``recorded`` turns
    instead of sampling them; they are passed to the environment anew. ``times`` counts the time in the environment.
    By the event loop's time, no call of the environment goes on after ``ends_s``, and its close not after ``closes_s``.

    Raises:
        Diverged: with ``recorded`` turns: the environment answers differently than it did then, or is not replayable.
        EnvironmentFailure: the environment raised (the cause) or returned unusable values (no messages, messages that
            the chat template cannot render, a prompt that alone fills ``max_seq_len``, rewards that are not or do not
            sum up to a finite float32, an ``info`` that is no data), with ``tokens_generated``.
        EnvironmentDeadlineError: a call of it took longer than ``deadline_s``, with ``tokens_generated``.
        RequestAbortedError: the engine aborted a turn, with ``tokens_generated``.
    """
    episode = _Episode(task)

    async def play() -> EpisodeEnd:
        if recorded and not await _replayable(environment):
            raise Diverged("the environment cannot be shown its turns again")
        with _outside(times):
            first = await _reset(environment, episode.task, deadline_s=deadline_s, ends_s=ends_s)
        messages = _messages(first, what="reset", least=1)
        tools = await _call(_tools, environment, what="tools", deadline_s=_left_s(deadline_s, ends_s))
        with _using(messages, what="reset"):
            prompt = renderer.prompt(messages, tools)
        episode.add_context(prompt)
        _check_prompt(prompt, max_seq_len)
        for number in range(max_turns):
            limited = _of_turn(sampling, renderer, number=number, room=max_seq_len - episode.length, seed=seed)
            request = GenerationRequest(
                request_id=f"{request_prefix}-{number}",
                prompt_token_ids=tuple(episode.token_ids),
                sampling=limited,
                session=session,
            )
            if number < len(recorded):
                generation = _recorded(recorded[number], context=episode.last_context, limit=limited.max_new_tokens)
            else:
                generation = await _generate(engine, request, tokens_before=episode.sampled_tokens)
            if turns is not None:
                turns.sampled(episode.last_context, generation)
            reply = renderer.parse(generation.token_ids, tools)
            if on_reply is not None:
                on_reply(reply)
            episode.add_turn(generation, reply)
            if generation.finish_reason == "length" and episode.length >= max_seq_len:
                return "max_seq_len"
            with _outside(times):
                if latency_s > 0:
                    await asyncio.sleep(latency_s)
                left_s = _left_s(deadline_s, ends_s)
                returned = await _call(environment.step, reply, what="step", deadline_s=left_s)
            step = _step(returned)
            episode.add_step(step)
            if step.done:
                return "done"
            if number + 1 == max_turns:
                break
            with _using(step.messages, what="step"):
                answer = renderer.extend(messages, generation.token_ids, step.messages, tools)
            if episode.length + len(answer) >= max_seq_len:
                return "max_seq_len"
            episode.add_context(answer)
            messages += [reply, *step.messages]
        return "max_turns"

    try:
        async with _closing(environment, deadline_s=deadline_s, closes_s=closes_s, times=times):
            reason = await play()
            made = episode.trajectory(reason)
            _check_stored(made.info, what="step")
    except EnvironmentFailure as failure:
        failure.tokens_generated = episode.sampled_tokens
        raise
    return made


async def run_agent_episode(
    environment: AgentEnvironment,
    task: Task,
    policy: EpisodePolicy,
    *,
    deadline_s: float,
    ends_s: float = math.inf,
    closes_s: float = math.inf,
    times: EpisodeTimes | None = None,
) -> Trajectory:
    """Run an agent's episode; the environment, used for this episode only, is closed whatever happens.

    ``deadline_s`` is that of closing it: an agent has a deadline of its own, and ends at ``ends_s`` of the event loop's
    time at the latest, closing it at ``closes_s``.

    Raises:
        EnvironmentFailure: the environment raised (the cause) or returned unusable values (no trajectory, a reward that
            is no finite float32, an ``info`` that is no data), or nothing that can be trained on was sampled.
        EnvironmentDeadlineError: it was ended at ``ends_s``.
    """
    async with _closing(environment, deadline_s=deadline_s, closes_s=closes_s, times=times):
        with _outside(times):
            left_s = _left_s(math.inf, ends_s)
            returned = await _call(_with_its_own, environment.run_agent, task, policy, what="agent", deadline_s=left_s)
    return _agents_trajectory(returned, task)


class Players:
    """Conversations of several players with one policy, in one episode: each is a branch of its trajectory.

    A player's first messages begin its branch, and later ones continue it; they see nothing of the others'. Limits and
    seeds are those of :func:`run_episode`, but turns of all players count for ``max_turns``.
    """

    def __init__(self, task: Task, policy: EpisodePolicy) -> None:
        self._policy = policy
        self._episode = _Episode(task)
        self._conversations: dict[int, _Conversation] = {}
        self._reason: EpisodeEnd = "done"
        self._asking = asyncio.Lock()

    async def ask(self, player: int, messages: Sequence[Message]) -> Message | None:
        """Return the policy's reply to a player's new messages; None where a limit ends the episode.

        Players that are asked at once reply one after the other, in the order of the calls.

        Raises:
            EnvironmentFailure: the chat template cannot render the messages, or the first ones fill ``max_seq_len``.
            RequestAbortedError: the engine aborted the turn.
        """
        async with self._asking:
            return await self._ask(player, messages)

    async def _ask(self, player: int, messages: Sequence[Message]) -> Message | None:
        policy, number = self._policy, self._episode.turns
        conversation = self._conversations.setdefault(player, _Conversation())
        with _using(messages, what="agent"):
            if conversation.messages:
                context = policy.renderer.extend(conversation.messages[:-1], conversation.sampled, messages)
            else:
                context = policy.renderer.prompt(messages)
        room = policy.max_seq_len - len(conversation.token_ids) - len(context)
        if number == 0:  # later ones may have what the policy has said
            _check_prompt(context, policy.max_seq_len)
        if number == policy.max_turns or room <= 0:
            self._reason = "max_turns" if number == policy.max_turns else "max_seq_len"
            return None
        request = GenerationRequest(
            request_id=f"{policy.request_prefix}-{number}",
            prompt_token_ids=(*conversation.token_ids, *context),
            sampling=_of_turn(policy.sampling, policy.renderer, number=number, room=room, seed=policy.seed),
        )
        generation = await _generate(policy.engine, request, tokens_before=self._episode.sampled_tokens)
        reply = policy.renderer.parse(generation.token_ids)
        self._episode.add_context(context)
        self._episode.add_turn(generation, reply, parent=conversation.turn)
        conversation.turn = number
        conversation.sampled = generation.token_ids
        conversation.token_ids += [*context, *generation.token_ids]
        conversation.messages += [*messages, reply]
        if generation.finish_reason == "length" and len(conversation.token_ids) >= policy.max_seq_len:
            self._reason = "max_seq_len"
            return None
        return reply

    def trajectory(self, rewards: Mapping[int, float], info: Mapping[str, Any]) -> Trajectory:
        """Return the episode as a tree. The last turn of each player earns the player's reward; without turns, none."""
        for player, conversation in self._conversations.items():
            if conversation.turn >= 0:
                self._episode.reward_turn(conversation.turn, float(rewards.get(player, 0.0)))
        return dataclasses.replace(self._episode.trajectory(self._reason), info=info)


@dataclasses.dataclass(slots=True)
class _Conversation:
    turn: int = -1
    """The last of it, by its number in the episode."""
    sampled: tuple[int, ...] = ()
    """Tokens of that turn."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    messages: list[Message] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedEpisode:
    """The steps of an episode that was played again; none if it is not ``deterministic``."""

    deterministic: bool
    steps: Sequence[Step] = ()


async def replay_episode(
    environment: Environment,
    task: Task,
    replies: Sequence[Message] | Callable[[Sequence[Tool]], Sequence[Message]],
    *,
    deadline_s: float,
    ends_s: float = math.inf,
    closes_s: float = math.inf,
    times: EpisodeTimes | None = None,
) -> ReplayedEpisode | None:
    """Pass the replies of a finished episode to another environment, which is closed whatever happens.

    ``replies`` may be a function of the environment's tools that returns them.
    No reply is passed after the step that is done. Return None from an environment that does not declare whether it is
    deterministic, or is not replayable, or whose class says that it never is deterministic. ``ends_s`` and ``closes_s``
    bound its calls as those of :func:`run_episode`.

    Raises:
        EnvironmentFailure: as :func:`run_episode`.
        EnvironmentDeadlineError: as :func:`run_episode`.
    """

    def deterministic() -> bool:
        return isinstance(environment, DeterministicEnvironment) and bool(environment.deterministic)

    async with _closing(environment, deadline_s=deadline_s, closes_s=closes_s, times=times):
        if not await _read(lambda: isinstance(environment, DeterministicEnvironment), what="deterministic"):
            return None
        if getattr(type(environment), "deterministic", None) is False:
            return None
        if not await _replayable(environment):
            return None
        with _outside(times):
            first = await _reset(environment, task, deadline_s=deadline_s, ends_s=ends_s)
        _messages(first, what="reset", least=1)
        if not await _read(deterministic, what="deterministic"):
            return ReplayedEpisode(deterministic=False)
        if callable(replies):
            replies = replies(await _call(_tools, environment, what="tools", deadline_s=_left_s(deadline_s, ends_s)))
        steps: list[Step] = []
        for reply in replies:
            with _outside(times):
                left_s = _left_s(deadline_s, ends_s)
                steps.append(_step(await _call(environment.step, reply, what="step", deadline_s=left_s)))
            if steps[-1].done:
                break
        return ReplayedEpisode(deterministic=True, steps=steps)


@asynccontextmanager
async def _closing(
    environment: Environment | AgentEnvironment, *, deadline_s: float, closes_s: float, times: EpisodeTimes | None
) -> AsyncGenerator[None, None]:
    """Close the environment at the end; what went wrong before counts, a cancellation above all."""
    try:
        yield
    except BaseException as error:
        try:
            await _call(environment.close, what="close", deadline_s=_left_s(deadline_s, closes_s))
        except AsyncRLError as failure:
            error.add_note(f"closing the environment failed too: {failure}")
        raise
    with _outside(times):
        await _call(environment.close, what="close", deadline_s=_left_s(deadline_s, closes_s))


def _outside(times: EpisodeTimes | None) -> AbstractContextManager[None]:
    """Count the time as that of the environment."""
    return times.at("environment") if times is not None else nullcontext()


class _Episode:
    def __init__(self, task: Task) -> None:
        self.task = task
        self.token_ids: list[int] = []
        self.last_context: tuple[int, ...] = ()
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

    def add_context(self, token_ids: Sequence[int]) -> None:
        self.last_context = tuple(token_ids)
        self.token_ids += token_ids
        self._mask += [False] * len(token_ids)
        self._log_probs += [0.0] * len(token_ids)
        self._versions += [-1] * len(token_ids)

    @property
    def turns(self) -> int:
        return len(self._turns)

    def add_turn(self, generation: Generation, message: Message, *, parent: int | None = None) -> None:
        start = self.length
        self.token_ids += generation.token_ids
        self._mask += [True] * len(generation.token_ids)
        self._log_probs += generation.log_probs
        self._versions += generation.weight_versions
        self.sampled_tokens += len(generation.token_ids)
        reason = generation.finish_reason
        self._turns.append(Turn(start=start, end=self.length, finish_reason=reason, message=message, parent=parent))

    def add_step(self, step: Step) -> None:
        self.reward_turn(-1, step.reward)
        self._info = step.info

    def reward_turn(self, number: int, reward: float) -> None:
        self._reward += reward
        if not abs(self._reward) <= _LARGEST_FLOAT32:
            raise EnvironmentFailure(
                "the environment's step must keep the sum of the rewards a finite float32; "
                f"it returned {reward:g}, and the sum is {self._reward:g}"
            )
        self._turns[number] = dataclasses.replace(self._turns[number], reward=reward)

    def trajectory(self, reason: EpisodeEnd) -> Trajectory:
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


def _check_prompt(token_ids: Sequence[int], max_seq_len: int) -> None:
    if len(token_ids) >= max_seq_len:
        raise EnvironmentFailure(
            f"the prompt with its tools has {len(token_ids)} tokens and a trajectory may have {max_seq_len}: raise "
            "rollout.max_seq_len, or shorten what the environment shows first"
        )


def _of_turn(sampling: SamplingParams, renderer: ChatRenderer, *, number: int, room: int, seed: int) -> SamplingParams:
    """Return the parameters of turn ``number`` of an episode, for at most ``room`` tokens."""
    most = min(sampling.max_new_tokens, room)
    return replace(
        sampling.ending_at(renderer.end_of_turn_id),
        max_new_tokens=most,
        min_tokens=min(sampling.min_tokens, most),
        seed=derive_seed(seed, "turn", number),
    )


def _recorded(turn: TurnRecord, *, context: tuple[int, ...], limit: int) -> Generation:
    """Return a turn that was sampled before the run was killed, if its context is still the same."""
    if turn.context_ids() != context:
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


def _left_s(deadline_s: float, ends_s: float) -> float | None:
    """Return the seconds that a call may take: ``deadline_s``, and none after ``ends_s``; None without either bound."""
    left_s = min(deadline_s, ends_s - asyncio.get_running_loop().time())
    return None if left_s == math.inf else max(left_s, 0.0)


async def _reset(environment: Environment, task: Task, *, deadline_s: float, ends_s: float) -> object:
    wait_s = await _read(
        lambda: float(environment.wait_s) if isinstance(environment, EnvironmentWait) else 0.0, what="wait_s"
    )
    left_s = _left_s(deadline_s + wait_s, ends_s)
    return await _call(_with_its_own, environment.reset, task, what="reset", deadline_s=left_s)


async def _with_its_own(begin: Callable[..., Awaitable[_T]], task: Task, *others: Any) -> _T:
    """Begin with a copy of the task: an environment may change it, and other episodes begin with the same one."""
    return await begin(copy.deepcopy(task), *others)


async def _replayable(environment: Environment) -> bool:
    return await _read(
        lambda: not isinstance(environment, EnvironmentReplay) or bool(environment.replayable), what="replayable"
    )


async def _read(read: Callable[[], _T], *, what: str) -> _T:
    """Read what an environment declares: a property may raise anything."""

    async def call() -> _T:
        return read()

    return await _call(call, what=what, deadline_s=None)


async def _call(call: Callable[..., Awaitable[_T]], *arguments: Any, what: str, deadline_s: float | None) -> _T:
    """Await one call of an environment under its deadline, if any; what it raises becomes an environment's failure."""
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
            said = str(error.__cause__) if isinstance(error.__cause__, asyncio.CancelledError) else ""
            where = f": {said}" if said else place_of(error)
            late = f"the environment's {what} took longer than {deadline_s:g} s{where}"
            raise EnvironmentDeadlineError(late) from error
        text = f"the environment's {what} failed: {type(error).__name__}: {error}{place_of(error)}"
        raise EnvironmentFailure(text) from error


def _cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


@contextmanager
def _using(given: object, *, what: str) -> Iterator[None]:
    """Use what an environment returned: foreign values may raise anything, and templates refuse conversations."""
    try:
        yield
    except AsyncRLError:
        raise
    except Exception as error:
        raise EnvironmentFailure(
            f"what the environment's {what} returned cannot be used: {type(error).__name__}: {error}; "
            f"got {_short(given)}"
        ) from error


async def _tools(environment: Environment) -> tuple[Tool, ...]:
    tools = tuple(environment.tools)
    for each in tools:
        if not isinstance(each, Tool):
            raise EnvironmentFailure(f"the environment's tools must be Tools; got {_short(each)}")
        json.dumps(each.schema(), ensure_ascii=False).encode()
    return tools


def _messages(returned: object, *, what: str, least: int = 0) -> list[Message]:
    with _using(returned, what=what):
        if isinstance(returned, Sequence) and not isinstance(returned, str):
            said = [message for message in returned if _is_message(message)]
            if len(said) == len(returned) >= least:
                return said
    raise EnvironmentFailure(
        f'the environment\'s {what} must return messages, dicts with a "role" and a text as "content"; '
        f"got {_short(returned)}"
    )


def _is_message(value: object) -> bool:
    """Return whether it is one, its text absent or in parts; raise UnicodeEncodeError if UTF-8 cannot write it."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    if isinstance(content, str):
        content.encode()
    return content is None or isinstance(content, str | list)


def _step(returned: object) -> Step:
    if not isinstance(returned, Step):
        raise EnvironmentFailure(f"the environment's step must return a Step; got {_short(returned)}")
    messages = _messages(returned.messages, what="step")
    reward = _reward(returned.reward, what="step")
    info = _info(returned.info, what="step")
    with _using(returned.done, what="step"):
        return Step(messages=tuple(messages), reward=reward, done=bool(returned.done), info=info)


def _agents_trajectory(returned: object, task: Task) -> Trajectory:
    if not isinstance(returned, Trajectory):
        raise EnvironmentFailure(f"the environment's agent must return a Trajectory; got {_short(returned)}")
    if not returned.sampled_tokens:
        raise EnvironmentFailure("the agent ended without a turn of the policy")
    reward, info = _reward(returned.reward, what="agent"), _info(returned.info, what="agent")
    for turn in returned.turns:
        _reward(turn.reward, what="agent")
    _check_stored(info, what="agent")
    return dataclasses.replace(returned, task=task, reward=reward, info=info)


def _reward(given: object, *, what: str) -> float:
    with _using(given, what=what):
        reward = float(given) if isinstance(given, SupportsFloat) else None
    if reward is None or not abs(reward) <= _LARGEST_FLOAT32:
        raise EnvironmentFailure(
            f"the reward of an environment's {what} must be, as float32, a finite number; got {_short(given)}"
        )
    return reward


def _info(given: object, *, what: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise EnvironmentFailure(f"the info of an environment's {what} must be a mapping; got {_short(given)}")
    with _using(given, what=what):
        info = dict(given)
        parts = info.get(REWARD_PARTS)
        for part in parts.values() if isinstance(parts, Mapping) else ():
            float(part)
    return info


def _check_stored(info: Mapping[str, Any], *, what: str) -> None:
    with _using(info, what=what):
        try:
            packed(dict(info))
        except CodecError as error:
            raise EnvironmentFailure(f"the info of an environment's {what} cannot be stored: {error}") from error


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001  foreign code; the caller has an error to raise already
        text = f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= 80 else f"{text[:77]}..."
