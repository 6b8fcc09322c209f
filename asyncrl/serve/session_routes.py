"""What may be asked about a session, and how it ends: with a reward, or dropped."""

from __future__ import annotations

import logging
from typing import Annotated, Any, TypeAlias

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from asyncrl.cancellation import to_its_end
from asyncrl.errors import BufferClosedError, DeadlineError
from asyncrl.rollout.trajectory import REWARD_PARTS, Trajectory
from asyncrl.serve.call import Call
from asyncrl.serve.capture import GroupedSink
from asyncrl.serve.failure import Refusal
from asyncrl.serve.sessions import Session, Sessions

__all__ = [
    "DroppedSession",
    "RewardAnswer",
    "RewardRequest",
    "SessionStatus",
    "TrajectoryColumns",
    "TrajectoryList",
    "drop_session",
    "reward_session",
    "session_status",
    "session_trajectories",
]

_log = logging.getLogger(__name__)


Reward: TypeAlias = Annotated[float, Meta(ge=-3e38, le=3e38)]
"""What float32 holds."""


class RewardRequest(Struct, kw_only=True):
    """POST /sessions/NAME/reward: the return of every trajectory of the session, which ends with it.

    Sessions with the same ``group`` (attempts at one task) are handed on together, once ``group_size`` have a reward.
    ``info.reward_parts``, where it is given, are numbers by name: what the reward was made of.
    """

    reward: Reward
    group: Annotated[str, Meta(max_length=128)] = ""
    group_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    info: dict[str, Any] = {}  # Any: JSON that is kept with the trajectory


class RewardAnswer(Struct, kw_only=True):
    """What was handed on, and where it is kept."""

    session: str
    trajectories: int
    sampled_tokens: int
    kept: str


class SessionStatus(Struct, kw_only=True):
    """How much a session holds."""

    session: str
    turns: int
    branches: int
    tokens: int
    requests: int


class DroppedSession(Struct, kw_only=True):
    """What was forgotten."""

    session: str
    tokens: int


class TrajectoryColumns(Struct, kw_only=True):
    """One branch, token by token: the columns of a trajectory batch."""

    input_ids: list[int]
    loss_mask: list[bool]
    behaviour_log_probs: list[float]
    weight_versions: list[int]


class TrajectoryList(Struct, kw_only=True):
    """A session, branch by branch."""

    session: str
    trajectories: list[TrajectoryColumns]


async def session_status(call: Call) -> web.StreamResponse:
    """How much a session holds."""
    session = call.face.sessions.find(call.session_name(), call.holder)
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
    """What was captured so far, without ending the session."""
    session = call.face.sessions.find(call.session_name(), call.holder)
    return call.answer(
        TrajectoryList(
            session=session.name,
            trajectories=[
                TrajectoryColumns(
                    input_ids=list(each.token_ids),
                    loss_mask=list(each.loss_mask),
                    behaviour_log_probs=list(each.behaviour_log_probs),
                    weight_versions=list(each.weight_versions),
                )
                for each in session.trajectories(reward=0.0, info={})
            ],
        )
    )


async def reward_session(call: Call) -> web.StreamResponse:
    """Give a session its reward and hand its trajectories on. It ends with that, or stays as it was."""
    body = call.body_as(RewardRequest)
    try:
        msgspec.convert(body.info.get(REWARD_PARTS, {}), dict[str, Reward])
    except msgspec.ValidationError as error:
        raise Refusal(400, f"info.{REWARD_PARTS} holds numbers by name: {error}") from error
    face = call.face
    session = face.sessions.find(call.session_name(), call.holder)
    if face.capture is None:
        raise Refusal(501, "this server keeps no trajectories: start it with --capture FOLDER")
    if not session.turns:
        raise Refusal(409, f"nothing was sampled in session {session.name!r}")
    # Half of it would be a session that is handed on twice.
    trajectories, kept = await to_its_end(_hand_on(face.sessions, face.capture, session, body))
    sampled = sum(each.sampled_tokens for each in trajectories)
    face.meters.captured_trajectories += len(trajectories)
    face.meters.captured_tokens += sampled
    return call.answer(
        RewardAnswer(session=session.name, trajectories=len(trajectories), sampled_tokens=sampled, kept=kept)
    )


async def _hand_on(
    sessions: Sessions, sink: GroupedSink, session: Session, asked: RewardRequest
) -> tuple[list[Trajectory], str]:
    """The trajectories, and where they are kept."""
    group = f"{session.holder}/{asked.group}" if asked.group else ""
    with sessions.closing(session):
        trajectories = session.trajectories(reward=asked.reward, info=asked.info)
        try:
            return trajectories, await sink.put(trajectories, group=group, size=asked.group_size)
        except DeadlineError as error:
            raise Refusal(503, "the replay buffer is full; the session is still here", retry_after_s=30) from error
        except OSError as error:
            _log.exception("session %r could not be kept", session.name)
            raise Refusal(503, "the session could not be written; it is still here", retry_after_s=30) from error
        except BufferClosedError as error:
            raise Refusal(503, "the replay buffer takes nothing any more; the session is still here") from error


async def drop_session(call: Call) -> web.StreamResponse:
    """Forget a session without a reward."""
    session = call.face.sessions.find(call.session_name(), call.holder)
    call.face.sessions.end(session)
    return call.answer(DroppedSession(session=session.name, tokens=session.tokens))
