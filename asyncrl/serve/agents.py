"""The session of an agent that is trained: a server for one episode, whose turns the episode's own engine samples.

Each episode has a port of its own on this machine, and so its own bounds: whatever an agent does to its server (a
thousand connections, requests without an end) no other episode has it. The address holds a name that cannot be
guessed, which is the key. How the agent is answered, the run decides: the sampling parameters are the run's, and an
agent may only ask for fewer tokens and for stop strings. A form (a required call, a JSON schema) is left to the policy,
which learns it; where it is enforced, the turn is not sampled from the policy as it is, and is kept as context.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache
from types import TracebackType
from typing import Any, Self, cast

from msgspec.structs import replace

from asyncrl.errors import (
    AsyncRLError,
    ConfigError,
    EngineError,
    EnvironmentFailure,
    InvalidDataError,
    RequestAbortedError,
)
from asyncrl.interfaces import FinishReason, GenerationChunk, GenerationRequest, SamplingParams, Task
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import EpisodePolicy
from asyncrl.rollout.trajectory import Trajectory, derive_seed
from asyncrl.serve.call import ServerState
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import Limits
from asyncrl.serve.server import Binding, Server
from asyncrl.serve.text import ModelText

MODEL_NAME = "policy"
"""What the model is called; agents may call it as they like."""

_FORBIDDEN = ("logit_bias", "allowed_token_ids", "bad_words", "ignore_eos", "min_tokens")
"""Fields of a request that would change what the policy says."""

_CONNECTIONS = 256
_CONCURRENT_REQUESTS = 64
_OF_THE_RUN = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class AgentSession:
    """Serves one session while the ``async with`` block runs.

    Args:
        policy: the episode's.
        enforces_forms: whether answers get the forms that are asked for; such turns are not trained on.
        on_end: called when the episode cannot go on: the engine has failed; or the agent has asked for more turns than
            were left, and none is being sampled.

    Attributes:
        url: of the session: Anthropic's base URL; OpenAI's is this with ``/v1``.
        key: for clients that need one; any will do.
        refused: requests for more turns than were left, and those after them.
        failure: of the engine; what the agent did after it does not count.
    """

    def __init__(
        self, policy: EpisodePolicy, *, enforces_forms: bool = False, on_end: Callable[[], object] = lambda: None
    ) -> None:
        self._policy = policy
        self._on_end = on_end
        self._taken = self._sent = self._ended = 0  # turns
        self.key = secrets.token_hex(16)
        self.refused = 0
        self.failure: AsyncRLError | None = None
        self.weight_version = -1
        """The newest that sampled a token here."""
        self._state = ServerState(
            pool=self,
            names=(MODEL_NAME,),
            any_name=True,
            enforces_forms=enforces_forms,
            decide_sampling=self._sampling,
            admit=self._admit,
            text=_text_of(policy.renderer),
            text_tasks=1,
            context_tokens=policy.max_seq_len,
            limits=Limits(
                connections=_CONNECTIONS,
                concurrent_requests=_CONCURRENT_REQUESTS,
                concurrent_requests_per_key=_CONCURRENT_REQUESTS,
                session_tokens=policy.max_turns * policy.max_seq_len + 1,
                default_new_tokens=policy.sampling.max_new_tokens,
                session_idle_s=math.inf,
                conversation_bytes_per_key=64 << 20,
            ),
        )
        self._session = self._state.sessions.use(self.key, self.key)
        self._server = Server(self._state, Binding(port=0))

    async def __aenter__(self) -> Self:
        try:
            await self._server.start_agent_plane()
        except ConfigError as error:  # of this process: it has no descriptor left, for example
            raise EnvironmentFailure(f"the session of an agent cannot be served: {error}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def listen_on(self, listening: socket.socket) -> None:
        """Serve it on a further socket: one that was opened in the network of a sandbox, under the same port."""
        await self._server.serve_agents_on(listening)

    @property
    def port(self) -> int:
        return int(self._server.url.rpartition(":")[2])

    async def close(self) -> None:
        """Close the port and cancel what still runs. Idempotent."""
        await self._server.close()

    @property
    def url(self) -> str:
        return f"{self._server.url}/sessions/{self.key}"

    @property
    def turns(self) -> int:
        """Turns that have ended."""
        return self._session.turns

    @property
    def conversations(self) -> int:
        """Conversations that could not be joined to one before, token by token."""
        return self._session.roots

    @property
    def branches(self) -> int:
        return self._session.branches

    def said(self) -> list[dict[str, Any]]:
        """Return each turn's ``message``, and the number of the turn that it continues as ``parent`` (-1: none)."""
        return [{"message": message, "parent": parent} for message, parent in self._session.said()]

    def trajectory(
        self, task: Task, *, reward: float, info: Mapping[str, Any], turn_rewards: Sequence[float] = ()
    ) -> Trajectory:
        """Return what was captured; see :meth:`asyncrl.serve.sessions.Session.trajectory`. Any: as in a Step."""
        most = self._policy.max_seq_len
        made = self._session.trajectory(
            task=task, reward=reward, info=info, turn_rewards=turn_rewards, max_seq_len=most
        )
        return dataclasses.replace(made, finish_reason="max_turns") if self.refused else made

    # ------------------------------------------------------------------------------------------------ as a TokenPool

    async def generate(
        self, request: GenerationRequest, *, session: str | None = None, tenant: str = ""
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Sample a turn from the episode's engine."""
        del session, tenant
        number, self._sent = self._sent, self._sent + 1
        most = min(request.sampling.max_new_tokens, self._policy.max_seq_len - len(request.prompt_token_ids))
        sampling = replace(
            request.sampling,
            max_new_tokens=most,
            min_tokens=min(request.sampling.min_tokens, most),
            seed=derive_seed(self._policy.seed, "turn", number),
        )
        own = replace(request, request_id=f"{self._policy.request_prefix}-{number}", sampling=sampling)
        reason: FinishReason | None = None
        try:
            stream = self._policy.engine.generate(own)
            async with aclosing(cast(AsyncGenerator[GenerationChunk, None], stream)) as chunks:
                async for chunk in chunks:
                    reason = chunk.finish_reason
                    if reason == "abort":
                        raise RequestAbortedError(f"the engine aborted request {own.request_id!r}")
                    self.weight_version = max(self.weight_version, *chunk.weight_versions, -1)
                    formed = replace(chunk, weight_versions=(-1,) * len(chunk.token_ids))
                    yield formed if own.sampling.grammar else chunk
            if reason is None:
                raise EngineError(f"request {own.request_id!r} ended without a finish reason")
        except InvalidDataError:  # of the request, which the agent gets as its answer
            raise
        except Exception as error:  # whatever an engine raises is its failure
            known = error if isinstance(error, AsyncRLError) else EngineError(f"{type(error).__name__}: {error}")
            self.failure = self.failure or known
            self._on_end()
            raise
        finally:
            self._ended += 1
            self._end_if_over()

    def _admit(self, turns: int) -> None:
        """Take the turns of a request, one for each choice, all or none. They are not given back.

        After a request for more than are left none is served: the episode ends with those that are being sampled.
        """
        if self.refused or self._taken + turns > self._policy.max_turns:
            self.refused += 1
            self._end_if_over()
            taken = f"{self._taken} of the episode's {self._policy.max_turns} turns are taken (env.max_turns)"
            raise APIError(403, f"{taken}, and it has asked for more than were left")
        self._taken += turns

    def _end_if_over(self) -> None:
        if self.refused and self._ended == self._taken:
            self._on_end()

    def _sampling(self, wanted: SamplingParams) -> SamplingParams:
        """Return the run's sampling parameters, with what an agent may ask for; an API error if it asks for more."""
        run = self._policy.sampling
        neutral = SamplingParams(max_new_tokens=1)
        for name in _FORBIDDEN:
            if getattr(wanted, name) != getattr(neutral, name):
                raise APIError(400, f"{name} is not served to an agent that is trained; leave it out")
        most = min(wanted.max_new_tokens, run.max_new_tokens)
        return replace(
            wanted,
            **{name: getattr(run, name) for name in _OF_THE_RUN},
            logit_bias=run.logit_bias,
            allowed_token_ids=run.allowed_token_ids,
            bad_words=run.bad_words,
            grammar=wanted.grammar if self._state.enforces_forms else "",
            stop=(*wanted.stop, *run.stop),
            stop_token_ids=tuple(sorted({*wanted.stop_token_ids, *run.stop_token_ids})),
            max_new_tokens=most,
            min_tokens=min(run.min_tokens, most),
        )


@lru_cache(maxsize=2)
def _text_of(renderer: ChatRenderer) -> ModelText:
    """Return the text of the model that a worker serves; it reads the vocabulary, and is made once."""
    return ModelText(renderer.tokenizer, renderer=renderer)
