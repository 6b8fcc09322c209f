"""One request on its way: the server's state, the request's session, its generations from the pool, its answer."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast

import msgspec
from aiohttp import web
from msgspec.structs import replace

from asyncrl.errors import ConfigError
from asyncrl.interfaces import Generation, GenerationChunk, GenerationRequest, Message, RolloutEngine, SamplingParams
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.rollout.trajectory import derive_seed
from asyncrl.runtime import run_all
from asyncrl.serve.conversations import Conversations
from asyncrl.serve.errors import APIError, context_length_error
from asyncrl.serve.limits import ConcurrencyLimiter, Limits
from asyncrl.serve.metrics import ServerMetrics
from asyncrl.serve.pool import Follower, RayReplicas, WeightUpdater
from asyncrl.serve.sessions import GroupedSink, Session, Sessions, TurnPrompt
from asyncrl.serve.text import Choice, GeneratedTokens, ModelText

Plane: TypeAlias = Literal["user", "control", "agent"]
"""``agent`` serves one session, under an address that is its key."""

_T = TypeVar("_T")
_json = msgspec.json.Encoder()
_INLINE_BYTES = 16_384  # as text they take about ten milliseconds
_ENTRY_BYTES = 4  # of text that takes as long as one log-prob of an answer
_TEXT_THREADS = min(16, os.cpu_count() or 1)
_NO_PUNCTUATION = str.maketrans("", "", "._:-")


@cache
def _text_threads(process: int) -> ThreadPoolExecutor:
    """Return the threads of this process for work on texts, which leaves the event loop's own to weights and files."""
    return ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix=f"text-{process}")


class TokenPool(Protocol):
    """What answers requests: a :class:`~asyncrl.rollout.replica_pool.ReplicaPool`, or the engine of an episode."""

    @property
    def weight_version(self) -> int: ...

    def generate(
        self, request: GenerationRequest, *, session: str | None = None, tenant: str = ""
    ) -> AsyncIterator[GenerationChunk]: ...


@dataclass(slots=True, kw_only=True)
class ServerState:
    """What the server serves and holds, shared by all requests.

    Attributes:
        names: of the model, for clients; the first one is the main one.
        any_name: whether clients may call the model as they like.
        enforces_forms: whether an answer gets the form that is asked for (a call, JSON, a grammar), or may have it.
        decide_sampling: makes the sampling parameters of a generation of those that its client asks for.
        admit: raises an API error unless so many generations, all choices of a request, may be sent now.
        text: of the model; None serves token ids only.
        text_tasks: pieces of long work on its requests' texts that have one of the process's threads for it, or wait
            for one, at a time.
        context_tokens: longest prompt and answer together; None if it is unknown.
        dtype: of the weights, by torch's name; empty if it is unknown.
        capture: where the trajectories of rewarded sessions go; None refuses rewards.
        weights: updates the weights; None refuses updates.
        follower: updates them to what a run announces; other updates are refused then.
        new_replica: returns what makes the engine of the replica with a name, which an operator adds, or a
            ResourceError; None refuses that.
        ray_replicas: makes replicas on other machines; None refuses that.
        choices_by_request: number of choices of the running requests, by request id: 0 until they are sent to the pool.
        ready: whether requests would be served.
        text_turn: held by each of those pieces.
        probing, probed: held by the running health check; when the last one began, and why it failed.
    """

    pool: TokenPool
    names: tuple[str, ...]
    any_name: bool = False
    enforces_forms: bool = True
    decide_sampling: Callable[[SamplingParams], SamplingParams] = lambda wanted: wanted
    admit: Callable[[int], None] = lambda generations: None
    text: ModelText | None = None
    text_tasks: int = _TEXT_THREADS
    context_tokens: int | None = None
    dtype: str = ""
    limits: Limits = field(default_factory=Limits)
    capture: GroupedSink | None = None
    weights: WeightUpdater | None = None
    follower: Follower | None = None
    new_replica: Callable[[str], Callable[[], RolloutEngine]] | None = None
    ray_replicas: RayReplicas | None = None
    clock: Callable[[], float] = time.monotonic
    concurrency: ConcurrencyLimiter = field(init=False)
    sessions: Sessions = field(init=False)
    conversations: Conversations = field(init=False)
    metrics: ServerMetrics = field(init=False)
    choices_by_request: dict[str, int] = field(init=False, default_factory=dict)
    ready: bool = field(init=False, default=False)
    text_turn: asyncio.Semaphore = field(init=False)
    probing: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    probed: tuple[float, str] = field(init=False, default=(-math.inf, ""))

    def __post_init__(self) -> None:
        self.text_turn = asyncio.Semaphore(self.text_tasks)
        self.concurrency = ConcurrencyLimiter(self.limits)
        self.sessions = Sessions(self.limits, self.clock)
        self.conversations = Conversations(self.limits)
        self.metrics = ServerMetrics(self.clock)

    @property
    def replica_pool(self) -> ReplicaPool:
        """The pool of a server that has probes and a control plane."""
        assert isinstance(self.pool, ReplicaPool)
        return self.pool

    def model_text(self) -> ModelText:
        """Return the model's text; an API error without a tokenizer."""
        if self.text is None:
            raise APIError(501, "this server has no tokenizer: use /generate with token ids")
        return self.text

    def chat_text(self) -> ModelText:
        """Return the model's text; an API error without a usable chat template."""
        text = self.model_text()
        try:
            text.renderer  # noqa: B018 - raises if there is none
        except ConfigError as error:
            raise APIError(501, f"this model serves no chats: {error}") from error
        return text

    @property
    def adapters(self) -> Collection[str]:
        """Names of the adapters that are served, each a model for clients."""
        return [name for name in self.weights.adapters if name] if self.weights is not None else ()

    def adapter_of(self, model: str) -> str:
        """Return the adapter that a client means by a model; an empty name for the model itself, an API error else."""
        if model in self.names or self.any_name:
            return ""
        if model in self.adapters:
            return model
        served = ", ".join(map(repr, (self.names[0], *self.adapters)))
        which = "these are" if self.adapters else "this one is"
        raise APIError(404, f"the model {model[:100]!r} is not served here; {which}: {served}")


class Version(msgspec.Struct, frozen=True):
    """Tokens ``start <= t < end`` of the answer were sampled under ``version``."""

    version: int
    start: int
    end: int


def version_spans(versions: Sequence[int], *, offset: int = 0) -> list[Version]:
    """Return the runs of equal versions, in order; token 0 is number ``offset`` of the answer."""
    if versions and versions.count(versions[0]) == len(versions):  # nearly always
        return [Version(versions[0], offset, offset + len(versions))]
    spans: list[Version] = []
    for version, run in groupby(versions):
        begin = spans[-1].end if spans else offset
        spans.append(Version(version, begin, begin + len(list(run))))
    return spans


class Call:
    """A request that the middleware has checked: its sender, its size and its body.

    Attributes:
        id: of the request; stands in the answer and in logs, and is part of its generations' ids.
        holder: of the key; empty where no key is needed.
        kept_bytes: of what the server has kept and the request refers to.
        likeliest: top log-probs that the answer may have, of the generations that were requested.
        body: of the route's request type; None if the route has none. Any: it differs by route.
        places: that it holds, for its generations that have not ended.
        adapter: that the request is for; an empty name for the model itself.
        open_events: the answer, if it is a stream.
    """

    __slots__ = (
        "_session",
        "adapter",
        "body",
        "holder",
        "id",
        "kept_bytes",
        "likeliest",
        "open_events",
        "places",
        "plane",
        "request",
        "state",
    )

    def __init__(
        self,
        state: ServerState,
        request: web.Request,
        *,
        id: str,  # noqa: A002
        holder: str,
        plane: Plane,
        body: Any,
        places: int = 0,
    ) -> None:
        self.state = state
        self.request = request
        self.id = id
        self.holder = holder
        self.plane: Plane = plane
        self.body = body
        self.places = places
        self.adapter = ""
        self.kept_bytes = 0
        self.likeliest = 0
        self.open_events: EventStream | None = None
        self._session: Session | None = None

    def choose_model(self, name: str | None) -> None:
        """Have the request's generations made by a model; None for the one that is served first."""
        if name:
            self.adapter = self.state.adapter_of(name)

    def body_as(self, kind: type[_T]) -> _T:
        assert isinstance(self.body, kind)
        return self.body

    async def off_loop(self, work: Callable[[], _T], *, entries: int = 0, of_request: bool = True) -> _T:
        """Return the result of work that grows with the request, in a thread if that could hold the event loop.

        ``entries`` are the log-probs of an answer that is made; without ``of_request`` it grows with them alone.
        """
        size: int | None = 0
        if of_request and (size := self.request.content_length) is not None:
            size += self.kept_bytes
        if size is not None and size + entries * _ENTRY_BYTES <= _INLINE_BYTES:
            return work()
        return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], _T]) -> _T:
        """Return the result of work on texts, in a thread. What has begun when this is cancelled keeps its turn."""
        await self.state.text_turn.acquire()
        begun = asyncio.get_running_loop().run_in_executor(_text_threads(os.getpid()), work)
        begun.add_done_callback(lambda _: self.state.text_turn.release())
        return await asyncio.shield(begun)

    # ------------------------------------------------------------------------------------------------- sessions

    def session_name(self) -> str:
        """Return the name from the path (``/sessions/NAME/...``) or the header ``X-Session-ID``; empty without one."""
        name: str = self.request.match_info.get("session", "") or self.request.headers.get("X-Session-ID", "")
        if name and not (len(name) <= 128 and name.isascii() and name.translate(_NO_PUNCTUATION).isalnum()):
            raise APIError(400, "a session's name has 1 to 128 letters, digits and ._:-")
        return name

    def session(self, *, create: bool = True) -> Session | None:
        """Return the session of this request; without ``create`` only if it exists."""
        name = self.session_name()
        if not create:
            return self.state.sessions.get(name, self.holder)
        if self._session is None and name:
            self._session = self.state.sessions.use(name, self.holder)
        return self._session

    def leave_session(self) -> None:
        """Let the session end, which it cannot while a turn may still be added by this request. Idempotent.

        A stream leaves before its last event: a client that has read it may reward the session at once.
        """
        if self._session is not None:
            self.state.sessions.leave(self._session)
            self._session = None

    def record(self, prompt: TurnPrompt, generation: Generation, message: Message) -> None:
        """Add a finished turn to the session of this request, if it has one and the turn was not aborted."""
        if self._session is not None and generation.finish_reason != "abort" and generation.token_ids:
            self.state.sessions.add(self._session, prompt, generation, message)

    # ------------------------------------------------------------------------------------------------- generation

    def requests(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        choices: int = 1,
        first: int = 0,
        scored_once: bool = False,
    ) -> list[GenerationRequest]:
        """Return one request to the pool per choice, numbered from ``first``, with seeds derived from the one given.

        With ``scored_once`` the first one alone asks for the prompt's log-probs. An API error if the prompt leaves no
        room to generate, or the answer would have too many top log-probs. What reads the answers has to know the
        parameters of the requests, not ``sampling``: the server may have decided on others.
        """
        sampling = self.state.decide_sampling(sampling)
        context, most = self.state.context_tokens, self.state.limits.likeliest_tokens
        if context is not None and len(prompt) >= context:
            raise context_length_error(len(prompt), context)
        room = sampling.max_new_tokens if context is None else min(sampling.max_new_tokens, context - len(prompt))
        scored = len(prompt) * (sampling.prompt_log_probs or 0)
        self.likeliest += choices * room * sampling.top_log_probs + (1 if scored_once else choices) * scored
        if self.likeliest > most:
            raise APIError(
                400,
                f"the answer may have {self.likeliest} top log-probs; at most {most} are returned: lower max_tokens, "
                "the number of choices or of prompts, or the top log-probs of each token",
            )
        self.state.choices_by_request[self.id] = first + choices
        made = []
        for index in range(choices):
            own = sampling
            if index and sampling.seed is not None:
                own = replace(own, seed=derive_seed(sampling.seed, index))
            if index and scored_once and sampling.prompt_log_probs is not None:
                own = replace(own, prompt_log_probs=None)
            made.append(
                GenerationRequest(
                    request_id=f"{self.id}-{first + index}",
                    prompt_token_ids=prompt,
                    sampling=own,
                    adapter=self.adapter,
                )
            )
        return made

    def _admit(self, count: int) -> None:
        """Take places for ``count`` generations, then what else they need, before any is sent; all or none."""
        if count > self.places:
            self.state.concurrency.acquire(self.holder, count - self.places)
            self.places = count
        self.state.admit(count)

    def _release(self) -> None:
        self.places -= 1
        self.state.concurrency.release(self.holder)

    def _send(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Send ``request`` to the pool. Its place has to be released."""
        state, session = self.state, self._session
        state.metrics.prompt_tokens += len(request.prompt_token_ids)
        name = session.name if session is not None else None
        chunks = state.pool.generate(request, session=name, tenant=self.holder)
        return cast(AsyncGenerator[GenerationChunk, None], chunks)

    def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Return the chunks of the only choice. Closing the generator early aborts it in the engine."""
        self._admit(1)
        return self._stream(request)

    async def _stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        metrics = self.state.metrics
        begin = metrics.clock()
        first = True
        chunks = self._send(request)
        try:
            async for chunk in chunks:
                if first:
                    metrics.first_tokens.add(metrics.clock() - begin)
                    first = False
                metrics.sampled_tokens += len(chunk.token_ids)
                yield chunk
        finally:
            self._release()
            await chunks.aclose()

    async def _collect(self, request: GenerationRequest) -> Generation:
        metrics = self.state.metrics
        begin = metrics.clock()
        tokens = GeneratedTokens()
        chunks = self._send(request)  # not through _stream(): most requests save a generator
        try:
            async for chunk in chunks:
                if not tokens.token_ids:
                    metrics.first_tokens.add(metrics.clock() - begin)
                tokens.add(chunk)
        finally:
            self._release()
            await chunks.aclose()
        metrics.sampled_tokens += len(tokens.token_ids)
        return tokens.generation()

    async def collect_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Return all choices, generated side by side; the first failure ends them all."""
        self._admit(len(requests))
        if len(requests) == 1:
            return [await self._collect(requests[0])]
        return await run_all(self._collect(request) for request in requests)

    async def feed(self, choices: Sequence[Choice], made: Sequence[Generation | GenerationChunk]) -> None:
        """Feed each choice what was made for it, as in :meth:`off_loop`: its tokens become text."""

        def feed_all() -> None:
            for choice, each in zip(choices, made, strict=True):
                choice.feed(each)

        await self.off_loop(feed_all, entries=sum(len(each.token_ids) for each in made), of_request=False)

    async def stream_all(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        """Yield the chunks of all choices as they arrive, each with its choice's number."""
        self._admit(len(requests))
        if len(requests) == 1:
            async with aclosing(self._stream(requests[0])) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
            return
        ready: asyncio.Queue[tuple[int, GenerationChunk] | BaseException | None] = asyncio.Queue(2 * len(requests))

        async def produce(index: int) -> None:
            try:
                async with aclosing(self._stream(requests[index])) as chunks:
                    async for chunk in chunks:
                        await ready.put((index, chunk))
                await ready.put(None)
            except Exception as error:  # noqa: BLE001 - raised by the consumer
                await ready.put(error)

        tasks = [asyncio.create_task(produce(index)) for index in range(len(requests))]  # owned by this generator
        try:
            left = len(tasks)
            while left:
                got = await ready.get()
                if got is None:
                    left -= 1
                elif isinstance(got, BaseException):
                    raise got
                else:
                    yield got
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------------- answers

    def answer(self, content: Any, *, status: int = 200) -> web.Response:
        """Return a JSON answer. Any: what msgspec encodes."""
        return self._json_answer(_json.encode(content), status)

    async def answer_made(self, make: Callable[[], Any], *, entries: int) -> web.Response:
        """Return what ``make`` returns as a JSON answer, made and encoded as in :meth:`off_loop`. Any: as above."""
        return self._json_answer(await self.off_loop(lambda: msgspec.json.encode(make()), entries=entries), 200)

    def _json_answer(self, body: bytes, status: int) -> web.Response:
        headers = {"Content-Type": "application/json", "X-Request-ID": self.id, "X-Content-Type-Options": "nosniff"}
        return web.Response(body=body, status=status, headers=headers)

    def events(self) -> EventStream:
        """Return the answer as a stream of server-sent events; nothing is sent before its first."""
        self.open_events = EventStream(self)
        return self.open_events


class EventStream:
    """Server-sent events to one client, which has ``write_timeout_s`` to take each; ``sent`` counts them."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._timeout_s = call.state.limits.write_timeout_s
        self.sent = 0
        self.stalled = False
        """Whether the client has not taken what was sent last."""
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Request-ID": call.id,
                "X-Content-Type-Options": "nosniff",
            }
        )

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, content: Any, *, event: str = "", entries: int = 0) -> None:
        """Send one event with so many ``entries``, encoded as in :meth:`Call.off_loop`. Any: what msgspec encodes."""
        head = f"event: {event}\n".encode() if event else b""
        self.sent += 1
        encode = partial(msgspec.json.encode, content)
        await self.send_bytes(
            b"%sdata: %s\n\n" % (head, await self._call.off_loop(encode, entries=entries, of_request=False))
        )

    async def send_bytes(self, data: bytes) -> None:
        self.stalled = True
        async with asyncio.timeout(self._timeout_s):
            if not self.response.prepared:
                await self.response.prepare(self._call.request)
            await self.response.write(data)
        self.stalled = False

    async def end(self) -> web.StreamResponse:
        self.stalled = True
        async with asyncio.timeout(self._timeout_s):
            await self.response.write_eof()
        self.stalled = False
        return self.response
