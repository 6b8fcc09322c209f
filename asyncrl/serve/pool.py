"""The replicas behind the server: updates of their weights, replicas on other machines."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.errors import AsyncRLError, ConfigError, StorageError, WeightError, WeightVersionError
from asyncrl.interfaces import RolloutEngine
from asyncrl.rollout.engine_worker import EngineSpec, EngineWorker, WorkerGroupEngine
from asyncrl.rollout.publication import Ended
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.runtime import in_abandonable_thread, shield_until_done
from asyncrl.single_controller.liveness import Liveness
from asyncrl.storage import is_url, local_copy
from asyncrl.weights import Adapter, AnnouncingTransport, WeightManifest, WeightTransport, entries_of

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


class WeightUpdater:
    """Updates the weights of a pool in two phases, one version at a time, from the other end of ``transport``.

    ``reserved`` are names that no adapter may have: the model's own.
    """

    def __init__(self, pool: ReplicaPool, transport: WeightTransport, *, reserved: Collection[str] = ()) -> None:
        self._pool = pool
        self._transport = transport
        self._reserved = reserved
        self._prepared: WeightManifest | None = None
        self._committing: WeightManifest | None = None
        self._published: set[int] = set()  # and not released yet
        self._adapters: dict[str, WeightManifest] = {}
        self._replaced: int | None = None
        """The last version that replaced the weights themselves."""
        self._full_only: set[str] = set()
        """Replicas that take no adapters, some of which may have left."""
        self._last = 0
        self._taken = b""
        """The digest of what was read last from another transport."""
        self._busy = asyncio.Lock()

    @property
    def version(self) -> int:
        return self._pool.weight_version

    @property
    def prepared(self) -> int | None:
        return self._prepared.version if self._prepared is not None else None

    @property
    def adapters(self) -> Mapping[str, int]:
        """The versions of the adapters that are served, by name."""
        return {name: manifest.version for name, manifest in self._adapters.items()}

    def prepare(self, manifest: WeightManifest) -> None:
        """Prepare weights that are published already, for :meth:`commit`. Replaces what was prepared before.

        Raises:
            WeightVersionError: the version is not newer than the one that is served.
            WeightError: it would replace the weights that adapters are served beside, or is an adapter where weights
                have been replaced: a replica that starts later would lack these.
        """
        if manifest.version <= self._pool.weight_version:
            raise WeightVersionError(
                f"version {manifest.version} is not newer than {self._pool.weight_version}, which is served"
            )
        self._beside(manifest.adapter, manifest.version)
        self._prepared = manifest

    def _beside(self, adapter: Adapter | None, version: int) -> tuple[WeightManifest, ...]:
        """Return the adapters that a version would be served beside; raise WeightError if it cannot be served."""
        if adapter is None and self._adapters:
            raise WeightError(
                f"adapters ({', '.join(map(repr, self._adapters))}) are served beside the present weights, which are "
                "therefore not replaced: an adapter is for the weights that it was trained beside"
            )
        if adapter is None:
            return ()
        if self._replaced is not None:
            raise WeightError(
                f"version {version} is an adapter, and version {self._replaced} has replaced the weights that "
                "the server was started with: adapters are served beside those"
            )
        if adapter.name in self._reserved:
            raise WeightError(f"{adapter.name!r} is the model itself: give the adapter another name")
        if there := self._full_only & {replica.name for replica in self._pool.replicas()}:
            raise WeightError(
                f"version {version} is an adapter, and {', '.join(sorted(there))} on other machines take full versions "
                "alone: drain them"
            )
        return tuple(each for name, each in self._adapters.items() if name != adapter.name)

    @contextmanager
    def admitting(self, replica: str, *, adapters: bool) -> Iterator[None]:
        """Add a replica in the block, without a pause; note whether it takes ``adapters`` if the block succeeds.

        Raises:
            WeightError: it takes none, and they are served or about to be.
        """
        coming = [each.adapter for each in (self._prepared, self._committing) if each is not None]
        if not adapters and (self._adapters or any(coming)):
            raise WeightError("adapters are served, and replicas on other machines take full versions alone")
        yield
        if adapters:
            self._full_only.discard(replica)
        else:
            self._full_only.add(replica)

    async def prepare_folder(
        self, folder: Path | str, *, version: int | None = None, adapter: str | None = None
    ) -> WeightManifest:
        """Publish the safetensors of a model folder, or of its URL, as the next version by default, and prepare it.

        A folder of peft's is an adapter, which is served under the name ``adapter``, by default the folder's.
        What was prepared before is freed first: a transport need not have room for three versions. A cancelled call
        ends when the transport has finished, or at once while a URL is read; nothing is prepared then.

        Raises:
            WeightError: there is no readable safetensors file, the URL cannot be read, or a tensor is not finite.
            WeightVersionError: the version is not newer than all that were served or published.
        """
        async with self._busy:  # before any await, so that versions follow the order of the calls
            return await self._prepare_folder(folder, version, adapter)

    async def swap(self, folder: Path | str, *, version: int | None = None, adapter: str | None = None) -> Ended:
        """Prepare a folder and commit it, with no other call in between; raise as both."""
        async with self._busy:
            manifest = await self._prepare_folder(folder, version, adapter)
            return await self._commit(manifest.version)

    async def swap_manifest(self, manifest: WeightManifest) -> Ended:
        """Prepare weights that are published already and commit them, as :meth:`swap`."""
        async with self._busy:
            self.prepare(manifest)
            return await self._commit(manifest.version)

    async def take(self, manifest: WeightManifest, source: WeightTransport) -> Ended:
        """Serve a version that ``source`` holds, under its own number; raise as :meth:`swap`.

        What no replica could take stays prepared, so that the next call need not read it again. The canary of a run is
        left out: its tolerance is that of the run's engine and devices.
        """
        async with self._busy:
            if (self.prepared, self._taken) != (manifest.version, manifest.digest):
                await self._prepare_held(manifest, source)
                self._taken = manifest.digest
            return await self._commit(manifest.version, stays=True)

    async def _prepare_held(self, manifest: WeightManifest, source: WeightTransport) -> None:
        self._check_newer(manifest.version)
        self._beside(manifest.adapter, manifest.version)
        with ExitStack() as stack:
            pulled = await in_abandonable_thread(lambda: stack.enter_context(source.pull(manifest)))

            def publish(version: int) -> WeightManifest:
                for name, tensor in pulled.items():
                    _check_finite(tensor, name)
                held = self._transport.publish(pulled.items(), version=version)
                more = {"adapter": manifest.adapter, "checked_bytes": manifest.checked_bytes}
                return msgspec.structs.replace(held, **more)

            await self._prepare_published(manifest.version, publish)

    async def _prepare_folder(self, given: Path | str, version: int | None, name: str | None) -> WeightManifest:
        try:
            folder = Path(await in_abandonable_thread(lambda: local_copy(str(given))) if is_url(given) else given)
        except (ConfigError, StorageError) as error:
            raise WeightError(str(error)) from error
        adapter = await asyncio.to_thread(_adapter, folder, Path(given).name if name is None else name)
        if adapter is None and name is not None:
            raise WeightError(f"{given} is no adapter (it has no {_ADAPTER_CONFIG}): only an adapter has a name")
        files = await asyncio.to_thread(lambda: sorted(folder.glob("*.safetensors")))
        if not files:
            raise WeightError(f"{given} holds no safetensors file")

        def publish(version: int) -> WeightManifest:
            return msgspec.structs.replace(self._transport.publish(_tensors(files), version=version), adapter=adapter)

        version = self._latest + 1 if version is None else version
        self._beside(adapter, version)  # before the bytes are copied
        return await self._prepare_published(version, publish)

    @property
    def _latest(self) -> int:
        return max(self._pool.weight_version, self._last)

    def _check_newer(self, version: int) -> None:
        if version <= self._latest:
            raise WeightVersionError(
                f"version {version} is not newer than {self._latest}, which was served or published"
            )

    async def _prepare_published(self, version: int, publish: Callable[[int], WeightManifest]) -> WeightManifest:
        self._check_newer(version)
        self._prepared = None
        await self._release()
        try:
            manifest = await shield_until_done(self._publish(version, publish))
            self.prepare(manifest)
        except (asyncio.CancelledError, WeightError):
            await self._release()
            raise
        return manifest

    async def _publish(self, version: int, publish: Callable[[int], WeightManifest]) -> WeightManifest:
        manifest = await asyncio.to_thread(publish, version)
        self._published.add(version)
        self._last = version
        return manifest

    async def commit(self, version: int) -> Ended:
        """Publish the prepared version: every replica verifies it, then samples under it.

        A cancelled call ends when the replicas are done.

        Raises:
            WeightVersionError: another version is prepared, or none.
            WeightError: every replica that served failed to take it; another publication is running; or :meth:`prepare`
                would refuse it by now.
        """
        self._check_prepared(version)
        if self._busy.locked():
            raise WeightError("another publication is running")
        async with self._busy:
            return await self._commit(version)

    async def _commit(self, version: int, *, stays: bool = False) -> Ended:
        manifest = self._check_prepared(version)  # an earlier call may have replaced it
        beside = self._beside(manifest.adapter, version)  # of what has been committed since it was prepared, too
        manifest = msgspec.structs.replace(manifest, beside=beside)
        self._prepared, self._committing = None, manifest
        try:
            return await shield_until_done(self._pool.publish(manifest))
        finally:
            self._committing = None
            if self._pool.weight_version == manifest.version:  # also if every replica failed: it comes back with it
                self._served(manifest)
            elif stays:
                self._prepared = manifest
            await self._release()

    def _served(self, manifest: WeightManifest) -> None:
        if manifest.adapter is None:
            self._replaced = manifest.version
        else:
            self._adapters[manifest.adapter.name] = msgspec.structs.replace(manifest, beside=())

    def _check_prepared(self, version: int) -> WeightManifest:
        if self._prepared is None or self._prepared.version != version:
            raise WeightVersionError(f"version {version} cannot be committed: {self.prepared} is prepared")
        return self._prepared

    async def _release(self) -> None:
        """Free the versions that were published here and that no replica needs any more."""
        needed = self._pool.needed_versions | {each.version for each in self._adapters.values()}
        needed |= {self._prepared.version} if self._prepared is not None else set()
        for version in self._published - needed:
            await asyncio.to_thread(self._transport.release, version)
        self._published &= needed


_ADAPTER_CONFIG = "adapter_config.json"
_PLAIN: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "lora_bias": False,
}
"""Settings of peft that change what is computed, and their values in an adapter that is a pair of matrices a module."""


def _adapter(folder: Path, name: str) -> Adapter | None:
    """Return the adapter of peft's folder; None of another folder. Blocks.

    Its base is known where the configuration names a folder of this machine.

    Raises:
        WeightError: the configuration cannot be read, or is of another kind of adapter.
    """
    path = folder / _ADAPTER_CONFIG
    if not path.is_file():
        return None
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise WeightError(f"{path} is no configuration of an adapter: {type(error).__name__}: {error}") from error
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, plain or None):
            raise WeightError(f"{path}: {key} = {config[key]!r} is not served, only {plain!r}")
    base = Path(str(config.get("base_model_name_or_path")))
    files = sorted(base.glob("*.safetensors")) if base.is_dir() else []
    scaled = alpha * math.sqrt(rank) if config.get("use_rslora") else alpha  # rank-stabilised: alpha / sqrt(rank)
    return Adapter(rank=rank, alpha=scaled, name=name, base=entries_of(_tensors(files)))


def _tensors(files: Sequence[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    tensor = tensors.get_tensor(name)
                    _check_finite(tensor, f"{file}: {name}")
                    yield name, tensor
        except (OSError, SafetensorError) as error:
            raise WeightError(f"{file}: {error}") from error


def _check_finite(tensor: torch.Tensor, name: str) -> None:
    """Raise WeightError unless every value is finite: one pass without a copy. Types of 8 bits are not examined."""
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return
    low, high = tensor.aminmax()  # nan if any value is
    if not (-math.inf < low.item() and high.item() < math.inf):
        raise WeightError(f"{name} has values that are nan or infinite, so it is not served")


class Follower:
    """Serves the newest version that a run announces at ``url``. What is served stays until a newer one can be.

    It looks every ``every_s`` seconds. A version that could not be served is tried again after twice as long each time,
    up to five minutes.

    Attributes:
        newest: the version that was announced last, as far as is known.
        problem: why that one is not served, or that none is announced; empty if it is.
    """

    def __init__(self, updater: WeightUpdater, source: AnnouncingTransport, *, url: str, every_s: float) -> None:
        self.url = url
        self.newest: int | None = None
        self.problem = ""
        self._updater = updater
        self._source = source
        self._every_s = every_s
        self._served = self._tried = b""  # digests
        self._failure = ""  # of the one that was tried
        self._wait_s = self._again_at = 0.0

    async def begin(self) -> None:
        """Serve what is announced already, if anything is.

        Raises:
            WeightError: it cannot be served, not at the third attempt.
        """
        for _ in range(_FIRST_LOOKS - 1):
            try:
                self.problem = await self.look()
                return
            except WeightError as error:
                _log.warning("%s; it is tried again", error)
            await asyncio.sleep(min(self._every_s, _FIRST_WAIT_S))
            self._again_at = 0.0
        self.problem = await self.look()

    async def run(self) -> None:
        """Look until it is cancelled; whatever fails, a later look may succeed."""
        logged = self.problem
        while True:
            await asyncio.sleep(self._every_s)
            try:
                problem = await self.look()
            except Exception as error:  # noqa: BLE001  it is logged, and does not end what follows
                problem = _text(error)
            if problem and problem != logged:
                _log.warning("weight version %d stays: %s", self._updater.version, problem)
            logged = self.problem = problem

    async def look(self) -> str:
        """Serve the version that is announced, if that is another one; return why it is not served, or "".

        Raises:
            WeightError: it cannot be read, is not newer than the present one, or is not the model's.
        """
        manifest = await in_abandonable_thread(self._source.announced)
        if manifest is None:
            return f"nothing is announced at {self.url}: the run needs weights.options.kept_versions >= 1, and a step"
        self.newest, before, now = manifest.version, self._updater.version, asyncio.get_running_loop().time()
        if manifest.digest == self._served:
            return ""
        if manifest.digest != self._tried:
            self._tried, self._failure, self._wait_s = manifest.digest, "", 0.0
        elif now < self._again_at:
            return self._failure
        self.problem = self._failure or f"version {manifest.version} is being fetched"
        self._wait_s = min(max(2 * self._wait_s, self._every_s), max(_LONGEST_WAIT_S, self._every_s))
        self._again_at = now + self._wait_s
        try:
            await self._updater.take(manifest, self._source)
        except Exception as error:
            if before < manifest.version == self._updater.version:  # every replica failed: it comes back with it
                self._served = manifest.digest
            self._failure = _text(error)
            raise
        self._served = manifest.digest
        return ""


def _text(error: Exception) -> str:
    text = str(error) if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {error}"
    if isinstance(error, WeightVersionError):
        text += "; wait until a resumed run is past it, and start the server again to follow another run"
    return text


_FIRST_LOOKS, _FIRST_WAIT_S, _LONGEST_WAIT_S = 3, 5.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayReplicas:
    """Makes replicas on other machines: engines in actors of a Ray cluster that this process is connected to.

    Attributes:
        address: of the cluster, for machines that join it.
        liveness: when a replica's process that does not answer is named and ended.
        spec: of the engine; its model is read on the node.
        transport: holds new weights on this machine; Ray carries them to the node.
        cpus, gpus: reserved for a replica on its node, within ``start_s``; no ``gpus`` on a node that has none.
    """

    address: str
    liveness: Liveness
    spec: EngineSpec
    transport: WeightTransport | None
    cpus: float = 1.0
    gpus: float = 1.0
    start_s: float = 60.0

    def factory(self, name: str, resource: str, *, gpus: float | None = None) -> Callable[[], RolloutEngine]:
        """Return what makes the engine of replica ``name`` on a node with a free unit of ``resource``.

        ``gpus`` are reserved there in any case, instead of those of the attribute.
        """

        def make_group() -> Any:  # Any: a worker group's methods are bound at run time
            from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
            from asyncrl.single_controller.ray.resource_pool import cluster_nodes

            nodes = [node.total for node in cluster_nodes() if node.total.get(resource)]
            own = self.gpus if any(total.get("GPU") for total in nodes) else 0.0
            place = RayResourcePool(
                [1],
                cpus_per_worker=self.cpus,
                gpus_per_worker=own if gpus is None else gpus,
                resources_per_worker={resource: 1.0},
                placement_timeout_s=self.start_s,
            )
            worker = RayClassWithInitArgs(EngineWorker, self.spec)
            return RayWorkerGroup(place, worker, name=name, liveness=self.liveness)

        return lambda: WorkerGroupEngine(make_group, transport=self.transport)
