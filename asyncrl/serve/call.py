"""One request on its way: who asks, for what, and how tokens come back to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

import msgspec
from aiohttp import web

from asyncrl.errors import ConfigError, EngineError
from asyncrl.interfaces import FinishReason, Generation, GenerationChunk, GenerationRequest, SamplingParams, TopLogProbs
from asyncrl.rollout.prompts import derive_seed
from asyncrl.serve.admission import Admission
from asyncrl.serve.capture import GroupedSink
from asyncrl.serve.failure import Refusal
from asyncrl.serve.joining import Joining
from asyncrl.serve.limits import Limits
from asyncrl.serve.meters import Meters
from asyncrl.serve.model_text import ModelText
from asyncrl.serve.served_pool import ServedPool
from asyncrl.serve.sessions import Session, Sessions
from asyncrl.serve.weight_door import WeightDoor

__all__ = ["Call", "EventStream", "Face", "GatheredChunks", "Plane", "Version", "version_spans"]

Plane: TypeAlias = Literal["user", "control"]

_T = TypeVar("_T")
_json = msgspec.json.Encoder()


@dataclass(slots=True, kw_only=True)
class Face:
    """What the server serves, shared by all requests.

    Attributes:
        pool: makes the tokens.
        names: of the model; the first is told to clients, all are taken from them.
        text: of the model; None serves token ids only.
        context_tokens: longest prompt and answer together; None where nobody knows.
        dtype: of the weights, by torch's name; empty where nobody knows.
        limits: what a request may ask for.
        admission: what is under way.
        sessions: what is being captured.
        capture: where rewarded sessions go; None keeps them until they are read and dropped.
        meters: what happened.
        weights: how new weights come in; None refuses them.
        new_replica: makes the engine of a replica that an operator adds; None refuses that.
        joining: makes replicas on other machines; None refuses that.
        running: choices of the requests under way, by request id.
        ready: whether requests would be served.
    """

    pool: ServedPool
    names: tuple[str, ...]
    text: ModelText | None = None
    context_tokens: int | None = None
    dtype: str = ""
    limits: Limits = field(default_factory=Limits)
    admission: Admission
    sessions: Sessions
    capture: GroupedSink | None = None
    meters: Meters
    weights: WeightDoor | None = None
    new_replica: Callable[[], Any] | None = None  # Any: a RolloutEngine, whatever its class
    joining: Joining | None = None
    running: dict[str, int] = field(default_factory=dict)
    ready: bool = False

    def model_text(self) -> ModelText:
        """The model's text.

        Raises:
            Refusal: this server knows token ids only.
        """
        if self.text is None:
            raise Refusal(501, "this server has no tokenizer: use /generate with token ids")
        return self.text

    def chat_text(self) -> ModelText:
        """Likewise, with a usable chat template."""
        text = self.model_text()
        try:
            text.renderer  # noqa: B018 - asks whether there is one
        except ConfigError as error:
            raise Refusal(501, f"this model serves no chats: {error}") from error
        return text

    def check_model(self, name: str) -> None:
        """Whether this model is served.

        Raises:
            Refusal: it is another one.
        """
        if name not in self.names:
            raise Refusal(404, f"the model {name[:100]!r} is not served here; this one is: {self.names[0]!r}")


class Version(msgspec.Struct, frozen=True):
    """Tokens ``start <= t < end`` of the answer were sampled under ``version``."""

    version: int
    start: int
    end: int


def version_spans(versions: Sequence[int], *, offset: int = 0) -> list[Version]:
    """Runs of equal versions, in order; token 0 is number ``offset`` of the answer."""
    if versions and versions.count(versions[0]) == len(versions):  # nearly always
        return [Version(versions[0], offset, offset + len(versions))]
    spans: list[Version] = []
    start = 0
    for end in range(1, len(versions) + 1):
        if end == len(versions) or versions[end] != versions[start]:
            spans.append(Version(versions[start], offset + start, offset + end))
            start = end
    return spans


class GatheredChunks:
    """The chunks of one choice, put together."""

    __slots__ = ("_finish_reason", "log_probs", "token_ids", "top_log_probs", "versions")

    def __init__(self) -> None:
        self.token_ids: tuple[int, ...] | list[int] = ()
        self.log_probs: tuple[float, ...] | list[float] = ()
        self.versions: tuple[int, ...] | list[int] = ()
        self.top_log_probs: list[TopLogProbs] = []
        self._finish_reason: FinishReason | None = None

    def add(self, chunk: GenerationChunk) -> None:
        """Take the next one."""
        self._finish_reason = chunk.finish_reason
        if chunk.top_log_probs:
            self.top_log_probs += chunk.top_log_probs
        if not self.token_ids:
            self.token_ids, self.log_probs = chunk.token_ids, chunk.log_probs
            self.versions = chunk.weight_versions
            return
        if isinstance(self.token_ids, tuple):
            self.token_ids, self.log_probs = list(self.token_ids), list(self.log_probs)
            self.versions = list(self.versions)
        assert isinstance(self.log_probs, list)
        assert isinstance(self.versions, list)
        self.token_ids += chunk.token_ids
        self.log_probs += chunk.log_probs
        self.versions += chunk.weight_versions

    def generation(self, request: GenerationRequest) -> Generation:
        """The whole choice.

        Raises:
            EngineError: the last chunk had no finish reason.
        """
        if self._finish_reason is None:
            raise EngineError(f"request {request.request_id!r} ended without a finish reason")
        return Generation(
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            weight_versions=tuple(self.versions),
            finish_reason=self._finish_reason,
            top_log_probs=tuple(self.top_log_probs),
        )


class Call:
    """A request whose sender, size and form are checked already.

    Attributes:
        face: what is served.
        request: aiohttp's view of it.
        id: of the request; goes to the client and into logs, and names the generations of it.
        holder: whose key it came with; empty where none is needed.
        plane: that the request came in by.
        body: decoded into the route's request type; None if that has none.
    """

    __slots__ = ("_session", "body", "face", "holder", "id", "open_events", "plane", "request")

    def __init__(
        self,
        face: Face,
        request: web.Request,
        *,
        id: str,  # noqa: A002
        holder: str,
        plane: Plane,
        body: Any,
    ) -> None:
        self.face = face
        self.request = request
        self.id = id
        self.holder = holder
        self.plane: Plane = plane
        self.body = body  # Any: the route's request type
        self.open_events: EventStream | None = None
        self._session: Session | None = None

    def body_as(self, kind: type[_T]) -> _T:
        """The body, which the route table says is a ``kind``."""
        assert isinstance(self.body, kind)
        return self.body

    # ------------------------------------------------------------------------------------------------- sessions

    def session_name(self) -> str:
        """From the path (``/sessions/NAME/...``) or the header ``X-Session-ID``; empty without one.

        Raises:
            Refusal: it is longer than 128 characters or has other ones than letters, digits and ``._:-``.
        """
        name: str = self.request.match_info.get("session", "") or self.request.headers.get("X-Session-ID", "")
        if name and not (len(name) <= 128 and name.isascii() and name.translate(_NO_PUNCTUATION).isalnum()):
            raise Refusal(400, "a session's name has 1 to 128 letters, digits and ._:-")
        return name

    def session(self, *, make: bool = True) -> Session | None:
        """The session that this request belongs to, made if need be and wished."""
        name = self.session_name()
        if not make:
            return self.face.sessions.known(name, self.holder)
        if self._session is None and name:
            self._session = self.face.sessions.use(name, self.holder)
        return self._session

    # ------------------------------------------------------------------------------------------------- generation

    def requests(
        self, prompt: tuple[int, ...], sampling: SamplingParams, *, choices: int, first: int = 0
    ) -> list[GenerationRequest]:
        """One request of the pool per choice. A seed gives each choice one of its own, the first the seed itself."""
        self.face.running[self.id] = first + choices
        made = []
        for index in range(choices):
            mine = sampling
            if index and sampling.seed is not None:
                mine = replace(sampling, seed=derive_seed(sampling.seed, index))
            made.append(
                GenerationRequest(request_id=f"{self.id}-{first + index}", prompt_token_ids=prompt, sampling=mine)
            )
        return made

    def _begin(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """Ask the pool. Whatever comes of it, :meth:`_end` follows.

        Raises:
            Refusal: too much is under way, or the session has ended meanwhile; nothing was begun then.
        """
        face, session = self.face, self._session
        if session is not None and session.ending:
            raise Refusal(409, f"session {session.name!r} is being handed on with its reward")
        face.admission.enter(self.holder)
        face.meters.prompt_tokens += len(request.prompt_token_ids)
        if session is None:
            chunks = face.pool.generate(request, tenant=self.holder)
        else:
            session.requests += 1
            chunks = face.pool.generate(request, session=session.name, tenant=self.holder)
        return cast(AsyncGenerator[GenerationChunk, None], chunks)

    def _end(self) -> None:
        self.face.admission.leave(self.holder)
        if self._session is not None:
            self._session.requests -= 1

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """The chunks of one choice. Leaving early aborts it in the engine."""
        meters = self.face.meters
        begin = meters.clock()
        first = True
        chunks = self._begin(request)
        try:
            async for chunk in chunks:
                if first:
                    meters.first_token(meters.clock() - begin)
                    first = False
                meters.sampled_tokens += len(chunk.token_ids)
                yield chunk
        finally:
            self._end()
            await chunks.aclose()

    async def collect(self, request: GenerationRequest) -> Generation:
        """One whole choice."""
        meters = self.face.meters
        begin = meters.clock()
        whole = GatheredChunks()
        chunks = self._begin(request)  # not through stream(): one generator less on the way of most requests
        try:
            async for chunk in chunks:
                if not whole.token_ids:
                    meters.first_token(meters.clock() - begin)
                whole.add(chunk)
        finally:
            self._end()
            await chunks.aclose()
        meters.sampled_tokens += len(whole.token_ids)
        return whole.generation(request)

    async def collect_all(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """All choices, side by side; the first failure ends them all."""
        if len(requests) == 1:
            return [await self.collect(requests[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.collect(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return [task.result() for task in tasks]

    async def stream_all(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        """Chunks of all choices as they come, each with its choice's number."""
        if len(requests) == 1:
            async with aclosing(self.stream(requests[0])) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
            return
        ready: asyncio.Queue[tuple[int, GenerationChunk] | BaseException | None] = asyncio.Queue(2 * len(requests))

        async def produce(index: int) -> None:
            try:
                async with aclosing(self.stream(requests[index])) as chunks:
                    async for chunk in chunks:
                        await ready.put((index, chunk))
                await ready.put(None)
            except Exception as error:  # noqa: BLE001 - handed to the consumer
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
        """A JSON answer. Any: whatever msgspec encodes."""
        headers = {"Content-Type": "application/json", "X-Request-ID": self.id, "X-Content-Type-Options": "nosniff"}
        return web.Response(body=_json.encode(content), status=status, headers=headers)

    def events(self) -> EventStream:
        """A stream of server-sent events; nothing is sent before its first."""
        self.open_events = EventStream(self)
        return self.open_events


class EventStream:
    """Server-sent events to one client, who has ``write_timeout_s`` to take each."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._timeout_s = call.face.limits.write_timeout_s
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

    async def send(self, content: Any, *, event: str = "") -> None:
        """One event. Any: whatever msgspec encodes."""
        head = f"event: {event}\n".encode() if event else b""
        await self.send_bytes(b"%sdata: %s\n\n" % (head, _json.encode(content)))

    async def send_bytes(self, data: bytes) -> None:
        """Bytes that are an event already."""
        async with asyncio.timeout(self._timeout_s):
            if not self.response.prepared:
                await self.response.prepare(self._call.request)
            await self.response.write(data)

    async def end(self) -> web.StreamResponse:
        """No more events."""
        async with asyncio.timeout(self._timeout_s):
            await self.response.write_eof()
        return self.response


_NO_PUNCTUATION = str.maketrans("", "", "._:-")


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
