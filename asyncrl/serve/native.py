"""The server's own API: token ids in and out, sessions and their rewards, probes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from asyncrl import __version__
from asyncrl.data.ragged import rows_of
from asyncrl.errors import AsyncRLError, BufferClosedError, DeadlineError
from asyncrl.interfaces import Generation, GenerationChunk, GenerationRequest, SamplingParams, TopLogProbs
from asyncrl.rollout.branches import unfold
from asyncrl.rollout.trajectory import REWARD_PARTS, Trajectory, trajectories_to_batch
from asyncrl.runtime import shield_until_done
from asyncrl.serve.call import Call, ServerState, Version, version_spans
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import (
    Count,
    SamplingFields,
    TokenId,
    TopLogProbCount,
    sampling_params,
)
from asyncrl.serve.metrics import exposition
from asyncrl.serve.sessions import GroupedSink, Session
from asyncrl.serve.text import GeneratedTokens, RenderingReport, log_prob_entries

_log = logging.getLogger(__name__)


# ----------------------------------------------------------------------------------------------------- generation


class GenerateRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """POST /generate. Texts (``stop``, ``bad_words``, ``grammar`` in llguidance's Lark) need a model's tokenizer.

    Without a ``model`` the one that is served first answers.
    """

    prompt_token_ids: Sequence[TokenId] = ()
    model: str | None = None
    max_new_tokens: Count | None = None
    top_log_probs: TopLogProbCount = 0
    prompt_log_probs: TopLogProbCount | None = None
    grammar: str = ""
    stream: bool = False


class GenerateAnswer(Struct, kw_only=True):
    """All of the answer, or as an event the next part of it; ``weight_versions`` count from its first token.

    ``log_probs`` are of the distribution sampled from, as :class:`asyncrl.interfaces.SamplingParams` has it;
    ``top_log_probs``, if they were requested, are for each token the likeliest ids, each with its log-prob.
    ``prompt_log_probs``, and the likeliest ids at the same places, are the model's for each token of the prompt but the
    first, which has 0.
    """

    request_id: str
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    weight_versions: list[Version]
    finish_reason: Literal["stop", "length", "abort"] | None
    top_log_probs: Sequence[TopLogProbs] | msgspec.UnsetType = msgspec.UNSET
    prompt_log_probs: Sequence[float] | msgspec.UnsetType = msgspec.UNSET
    prompt_top_log_probs: Sequence[TopLogProbs] | msgspec.UnsetType = msgspec.UNSET


def token_turn(
    call: Call, ids: tuple[int, ...], sampling: SamplingParams, *, choices: int = 1, scored_once: bool = False
) -> tuple[list[GenerationRequest], Callable[[Generation], Awaitable[None]]]:
    """Return the requests for turns after a prompt of ``ids``, and what adds a turn to the session."""
    session = call.session()
    place = session.token_prompt(ids) if session is not None else None
    requests = call.requests(ids, sampling, choices=choices, scored_once=scored_once)

    async def record(generation: Generation) -> None:
        if place is None:
            return
        said, text, ids = "", call.state.text, generation.token_ids
        if text is not None:
            said = await call.off_loop(partial(text.decode, ids), entries=len(ids), of_request=False)
        call.record(place, generation, {"role": "assistant", "content": said})

    return requests, record


async def generate(call: Call) -> web.StreamResponse:
    """Sample a continuation of the prompt, whole or as a stream."""
    body = call.body_as(GenerateRequest)
    if not body.prompt_token_ids:
        raise APIError(400, "prompt_token_ids are missing or empty")
    call.choose_model(body.model)
    sampling = sampling_params(
        call.state.limits,
        body,
        max_tokens=body.max_new_tokens,
        top_log_probs=body.top_log_probs,
        prompt_log_probs=body.prompt_log_probs,
        grammar=body.grammar,
    )
    requests, record = token_turn(call, tuple(body.prompt_token_ids), sampling)
    if not body.stream:
        (generation,) = await call.collect_all(requests)
        await record(generation)
        if not sampling.top_log_probs and sampling.prompt_log_probs is None:  # most requests save a closure
            return call.answer(_generate_answer(call, generation))
        entries = log_prob_entries([generation])
        return await call.answer_made(lambda: _generate_answer(call, generation), entries=entries)
    events = call.events()
    tokens = GeneratedTokens()
    event: GenerateAnswer | None = None
    entries = 0
    async with aclosing(call.stream(requests[0])) as chunks:
        async for chunk in chunks:
            event = _generate_answer(call, chunk, offset=len(tokens.token_ids))
            tokens.add(chunk)
            entries = log_prob_entries([chunk])
            if chunk.finish_reason is None:
                await events.send(event, entries=entries)
    await record(tokens.generation())
    call.leave_session()
    # last: a client that has read it finds the turn in the session, and the session idle
    await events.send(event, entries=entries)
    return await events.end()


def _generate_answer(call: Call, part: Generation | GenerationChunk, *, offset: int = 0) -> GenerateAnswer:
    return GenerateAnswer(
        request_id=call.id,
        token_ids=part.token_ids,
        log_probs=part.log_probs,
        weight_versions=version_spans(part.weight_versions, offset=offset),
        finish_reason=part.finish_reason,
        top_log_probs=part.top_log_probs or msgspec.UNSET,
        prompt_log_probs=part.prompt_log_probs or msgspec.UNSET,
        prompt_top_log_probs=part.prompt_top_log_probs or msgspec.UNSET,
    )


# ------------------------------------------------------------------------------------------------------- sessions

Reward: TypeAlias = Annotated[float, Meta(ge=-3e38, le=3e38)]
"""What float32 holds."""


class RewardRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /sessions/NAME/reward: the return of the session, which ends with it.

    ``turn_rewards``, if given, are the share of it that each turn earned, in the order in which the turns ended.
    Sessions with the same ``group`` (attempts at one task) are stored together, once ``group_size`` have a reward.
    ``info.reward_parts``, if given, are numbers by name: what the reward was made of.
    """

    reward: Reward
    turn_rewards: list[Reward] = []
    group: Annotated[str, Meta(max_length=128)] = ""
    group_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    info: dict[str, Any] = {}  # Any: JSON that is kept with the trajectory


class RewardAnswer(Struct, kw_only=True):
    session: str
    branches: int
    sampled_tokens: int
    kept: str


class SessionStatus(Struct, kw_only=True):
    session: str
    turns: int
    branches: int
    tokens: int
    requests: int


class DroppedSession(Struct, kw_only=True):
    session: str
    tokens: int


class TrajectoryColumns(Struct, kw_only=True):
    """One branch, token by token: the columns of a trajectory batch."""

    input_ids: Sequence[int]
    loss_mask: Sequence[bool]
    behaviour_log_probs: Sequence[float]
    weight_versions: Sequence[int]


class TrajectoryList(Struct, kw_only=True):
    session: str
    trajectories: list[TrajectoryColumns]


def _session(call: Call) -> Session:
    return call.state.sessions.find(call.session_name(), call.holder)


async def session_status(call: Call) -> web.StreamResponse:
    """Report how much a session holds."""
    session = _session(call)
    return call.answer(
        SessionStatus(
            session=session.name,
            turns=session.turns,
            branches=session.branches,
            tokens=session.tokens,
            requests=session.requests,
        )
    )


async def session_trajectories(call: Call) -> web.StreamResponse:
    """Return what was captured so far, without ending the session."""
    session = _session(call)
    tokens, most = session.branch_tokens, max(call.state.limits.session_tokens, session.tokens)
    if tokens > most:
        raise APIError(
            409,
            f"the branches of {session.name!r} have {tokens} tokens, at most {most} are returned: reward the session, "
            "which stores each token once",
        )
    return await call.answer_made(
        lambda: TrajectoryList(session=session.name, trajectories=_branches(session) if session.turns else []),
        entries=tokens,
    )


def _branches(session: Session) -> list[TrajectoryColumns]:
    captured = session.trajectory(task={}, reward=0.0, info={})
    rows = unfold(trajectories_to_batch([captured], group_id=0)).rows.batch
    assert rows is not None
    names = TrajectoryColumns.__struct_fields__
    columns = zip(*([row.tolist() for row in rows_of(rows[name])] for name in names), strict=True)
    return [TrajectoryColumns(**dict(zip(names, each, strict=True))) for each in columns]


async def reward_session(call: Call) -> web.StreamResponse:
    """Reward a session and store its trajectories. The session ends with that, or stays as it was."""
    body = call.body_as(RewardRequest)
    try:
        msgspec.convert(body.info.get(REWARD_PARTS, {}), dict[str, Reward])
    except msgspec.ValidationError as error:
        raise APIError(400, f"info.{REWARD_PARTS} holds numbers by name: {error}") from error
    state, session = call.state, _session(call)
    if len(msgspec.json.encode(body.info)) > state.limits.info_size_bytes:
        most = state.limits.info_size_bytes
        raise APIError(413, f"info has more than {most} bytes of JSON: keep the rest elsewhere, and its name in info")
    if state.capture is None:
        raise APIError(501, "this server keeps no trajectories: start it with --capture FOLDER")
    if not session.turns:
        raise APIError(409, f"nothing was sampled in session {session.name!r}")
    # Cancelled halfway it could be stored twice.
    trajectory, kept = await shield_until_done(_store(state, state.capture, session, body))
    sampled = trajectory.sampled_tokens
    state.metrics.captured_trajectories += 1
    state.metrics.captured_tokens += sampled
    return call.answer(RewardAnswer(session=session.name, branches=session.branches, sampled_tokens=sampled, kept=kept))


async def _store(
    state: ServerState, sink: GroupedSink, session: Session, body: RewardRequest
) -> tuple[Trajectory, str]:
    with state.sessions.ending(session), sink.storing():
        if body.turn_rewards and len(body.turn_rewards) != session.turns:
            raise APIError(400, f"there are {len(body.turn_rewards)} turn_rewards for {session.turns} turns")
        trajectory = await asyncio.to_thread(
            session.trajectory,
            task={"session": session.name},
            reward=body.reward,
            info=body.info,
            turn_rewards=body.turn_rewards,
            max_seq_len=state.context_tokens,
        )
        try:
            kept = await sink.put([trajectory], group=body.group, holder=session.holder, size=body.group_size)
            return trajectory, kept
        except DeadlineError as error:
            raise APIError(503, "the replay buffer is full; the session is kept", retry_after_s=30) from error
        except OSError as error:
            _log.exception("session %r could not be stored", session.name)
            raise APIError(503, "the session could not be written; it is kept", retry_after_s=30) from error
        except BufferClosedError as error:
            raise APIError(503, "the replay buffer is closed; the session is kept") from error


async def drop_session(call: Call) -> web.StreamResponse:
    """Drop a session without a reward."""
    session = _session(call)
    call.state.sessions.drop(session)
    return call.answer(DroppedSession(session=session.name, tokens=session.tokens))


# --------------------------------------------------------------------------------------------------------- probes


class Done(Struct, kw_only=True):
    status: Literal["ok"] = "ok"


class ServerVersion(Struct, kw_only=True):
    version: str


class HealthReport(Struct, kw_only=True):
    """``healthy`` if a token was really generated just now, else ``error`` says why; ``dtype`` is the weights'."""

    healthy: bool
    model: str
    dtype: str
    weight_version: int
    replicas: int
    serving: int
    probe_s: float
    error: str
    rendering: RenderingReport | None


async def livez(call: Call) -> web.StreamResponse:
    """Answer."""
    return call.answer(Done())


async def version(call: Call) -> web.StreamResponse:
    """Return the version of asyncrl."""
    return call.answer(ServerVersion(version=__version__))


async def readyz(call: Call) -> web.StreamResponse:
    """Check that a request would be served now."""
    state = call.state
    serving = any(each.serving for each in state.replica_pool.replicas())
    if state.concurrency.draining or not state.ready or not serving or state.replica_pool.statistics().paused:
        raise APIError(503, "not ready", retry_after_s=1)
    return call.answer(Done())


_PROBE_S = 30.0


async def health(call: Call) -> web.StreamResponse:
    """Generate one real token, before all that waits: 200 if that succeeds within 30 s, else 503."""
    state = call.state
    begin = state.clock()
    if state.concurrency.draining:
        error = "draining"
    elif state.replica_pool.statistics().paused:
        error = "paused"
    else:
        error = await _probe(state)
    replicas = state.replica_pool.replicas()
    report = HealthReport(
        healthy=not error,
        model=state.names[0],
        dtype=state.dtype,
        weight_version=state.replica_pool.weight_version,
        replicas=len(replicas),
        serving=sum(replica.serving for replica in replicas),
        probe_s=state.clock() - begin,
        error=error,
        rendering=state.text.report if state.text is not None else None,
    )
    return call.answer(report, status=503 if error else 200)


async def _probe(state: ServerState) -> str:
    """Return why no token can be generated, empty if one was. Calls at the same time share a probe."""
    asked_s = state.clock()
    try:
        async with asyncio.timeout(_PROBE_S), state.probing:
            begun_s, error = state.probed
            if begun_s < asked_s:
                begun_s = state.clock()
                error = await _generate_token(state, f"health:{begun_s}")
                state.probed = begun_s, error
            return error
    except TimeoutError:
        return f"no token within {_PROBE_S:g} s"


async def _generate_token(state: ServerState, request_id: str) -> str:
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
    request = GenerationRequest(request_id=request_id, prompt_token_ids=(0,), sampling=sampling, probe=True)
    tokens = 0
    try:
        async with aclosing(cast(Any, state.replica_pool.generate(request))) as chunks:  # Any: an iterator to be closed
            async for chunk in chunks:
                tokens += len(chunk.token_ids)
    except AsyncRLError as failure:
        return type(failure).__name__
    return "" if tokens else "no token was generated"


async def metrics(call: Call) -> web.StreamResponse:
    """Return metrics of the server and the pool, for Prometheus."""
    state = call.state
    text = exposition(
        state.metrics,
        state.replica_pool.statistics(),
        generations=state.concurrency.running,
        sessions=len(state.sessions),
        session_tokens=state.sessions.tokens,
        incomplete_groups=0 if state.capture is None else state.capture.incomplete,
    )
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
