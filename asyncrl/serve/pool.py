"""The replicas behind the server: updates of their weights, replicas on other machines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.errors import AsyncRLError, ConfigError, StorageError, WeightError, WeightVersionError
from asyncrl.interfaces import RolloutEngine
from asyncrl.rollout.engine_worker import EngineSpec, EngineWorker, WorkerGroupEngine
from asyncrl.rollout.publication import Ended
from asyncrl.rollout.replica_pool import ReplicaPool
from asyncrl.runtime import shield_until_done
from asyncrl.single_controller.liveness import Liveness
from asyncrl.storage import is_url, local_copy
from asyncrl.weights import Adapter, AnnouncingTransport, WeightManifest, WeightTransport, entries_of

if TYPE_CHECKING:
    import torch


class WeightUpdater:
    """Updates the weights of a pool in two phases, one version at a time, from the other end of ``transport``.

    ``reserved`` are names that no adapter may have: the model's own.
    """

    def __init__(self, pool: ReplicaPool, transport: WeightTransport, *, reserved: Collection[str] = ()) -> None:
        self._pool = pool
        self._transport = transport
        self._reserved = reserved
        self._prepared: WeightManifest | None = None
        self._published: set[int] = set()  # and not released yet
        self._adapters: dict[str, WeightManifest] = {}
        self._replaced: int | None = None
        """The last version that replaced the weights themselves."""
        self._last = 0
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
        if manifest.adapter is None and self._adapters:
            raise WeightError(
                f"adapters ({', '.join(map(repr, self._adapters))}) are served beside the present weights, which are "
                "therefore not replaced: an adapter is for the weights that it was trained beside"
            )
        if manifest.adapter is not None and self._replaced is not None:
            raise WeightError(
                f"version {manifest.version} is an adapter, and version {self._replaced} has replaced the weights that "
                "the server was started with: adapters are served beside those"
            )
        if manifest.adapter is not None:
            if manifest.adapter.name in self._reserved:
                raise WeightError(f"{manifest.adapter.name!r} is the model itself: give the adapter another name")
            others = (each for name, each in self._adapters.items() if name != manifest.adapter.name)
            manifest = msgspec.structs.replace(manifest, beside=tuple(others))
        self._prepared = manifest

    async def prepare_folder(
        self, folder: Path | str, *, version: int | None = None, adapter: str | None = None
    ) -> WeightManifest:
        """Publish the safetensors of a model folder, or of its URL, as the next version by default, and prepare it.

        A folder of peft's is an adapter, which is served under the name ``adapter``, by default the folder's.
        What was prepared before is freed first: a transport need not have room for three versions. A cancelled call
        ends when the transport has finished; nothing is prepared then.

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

    async def take(self, manifest: WeightManifest, source: WeightTransport) -> Ended:
        """Serve a version that ``source`` holds, under its own number and with its proof; raise as :meth:`swap`.

        What no replica could take stays prepared, so that another call needs not read it again.
        """

        def publish(version: int) -> WeightManifest:
            with source.pull(manifest) as tensors:
                held = self._transport.publish(tensors.items(), version=version)
            same = {"adapter": manifest.adapter, "canary": manifest.canary, "checked_bytes": manifest.checked_bytes}
            return msgspec.structs.replace(held, **same)

        async with self._busy:
            if self.prepared != manifest.version:
                await self._prepare_published(manifest.version, publish)
            return await self._commit(manifest.version, stays=True)

    async def _prepare_folder(self, given: Path | str, version: int | None, name: str | None) -> WeightManifest:
        try:
            folder = Path(await asyncio.to_thread(local_copy, str(given)) if is_url(given) else given)
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

        return await self._prepare_published(self._latest + 1 if version is None else version, publish)

    @property
    def _latest(self) -> int:
        return max(self._pool.weight_version, self._last)

    async def _prepare_published(self, version: int, publish: Callable[[int], WeightManifest]) -> WeightManifest:
        if version <= self._latest:
            raise WeightVersionError(
                f"version {version} is not newer than {self._latest}, which was served or published"
            )
        self._prepared = None
        await self._release()
        try:
            manifest = await shield_until_done(self._publish(version, publish))
        except asyncio.CancelledError:
            await self._release()
            raise
        self.prepare(manifest)
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
            WeightError: no replica could take it, or another publication is running.
        """
        self._check_prepared(version)
        if self._busy.locked():
            raise WeightError("another publication is running")
        async with self._busy:
            return await self._commit(version)

    async def _commit(self, version: int, *, stays: bool = False) -> Ended:
        manifest = self._check_prepared(version)  # an earlier call may have replaced it
        self._prepared = None
        try:
            ended = await shield_until_done(self._pool.publish(manifest))
            if manifest.adapter is None:
                self._replaced = manifest.version
            else:
                self._adapters[manifest.adapter.name] = msgspec.structs.replace(manifest, beside=())
            return ended
        except WeightError:
            self._prepared = manifest if stays else None
            raise
        finally:
            await self._release()

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
                    if not _is_finite(tensor):
                        raise WeightError(f"{file}: {name} has values that are nan or infinite, so it is not served")
                    yield name, tensor
        except (OSError, SafetensorError) as error:
            raise WeightError(f"{file}: {error}") from error


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether every value is, in one pass without a copy. Types of 8 bits are not examined."""
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return True
    low, high = tensor.aminmax()  # nan if any value is
    return -math.inf < low.item() and high.item() < math.inf


class Follower:
    """Serves the newest version that the trainer of a run announces at ``url``.

    It looks every ``every_s`` seconds; after a failure up to ``_LONGEST_WAIT`` times as seldom, until another version
    is announced. What is served meanwhile stays. ``tell`` gets a line for each version and each new failure.

    Attributes:
        newest: the version that was announced last, as far as is known.
        error: why that one is not served; empty if it is.
    """

    def __init__(
        self,
        updater: WeightUpdater,
        source: AnnouncingTransport,
        *,
        url: str,
        every_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self.url = url
        self.newest: int | None = None
        self.error = ""
        self._updater = updater
        self._source = source
        self._every_s = every_s
        self._tell = tell
        self._known = b""  # the digest of the newest version
        self._taken = b""

    async def look(self) -> None:
        """Serve the version that is announced, if there is another one.

        Raises:
            WeightError: it cannot be read, is not newer than the present one, or is not the model's; the latter stays.
        """
        manifest = await asyncio.to_thread(self._source.announced)
        if manifest is None:
            return
        self._known, self.newest = manifest.digest, manifest.version
        if manifest.digest != self._taken:
            await self._updater.take(manifest, self._source)
            self._taken = manifest.digest
            self._tell(f"weight version {manifest.version} of {self.url}")

    async def run(self) -> None:
        """Look until it is cancelled; whatever fails, the next look may succeed."""
        wait_s = self._every_s
        while True:
            await asyncio.sleep(wait_s)
            known, before, self.error = self._known, self.error, ""
            try:
                await self.look()
                wait_s = self._every_s
            except Exception as error:  # noqa: BLE001  it is told, and does not end what follows
                wait_s = self._every_s if self._known != known else min(2 * wait_s, _LONGEST_WAIT * self._every_s)
                self.error = str(error) if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {error}"
                if self.error != before:
                    self._tell(f"weight version {self._updater.version} stays: {self.error}")


_LONGEST_WAIT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RayReplicas:
    """Makes replicas on other machines: engines in actors of a Ray cluster that this process is connected to.

    Attributes:
        address: of the cluster, for machines that join it.
        liveness: when a replica's process that does not answer is named and ended.
        spec: of the engine; its model is read on the node.
        transport: holds new weights on this machine; Ray carries them to the node.
        cpus, gpus: reserved for a replica on its node, within ``start_s``.
    """

    address: str
    liveness: Liveness
    spec: EngineSpec
    transport: WeightTransport | None
    cpus: float = 1.0
    gpus: float = 0.0
    start_s: float = 60.0

    def factory(self, name: str, resource: str) -> Callable[[], RolloutEngine]:
        """Return what makes the engine of replica ``name`` on a node with a free unit of ``resource``."""

        def make_group() -> Any:  # Any: a worker group's methods are bound at run time
            from asyncrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

            place = RayResourcePool(
                [1],
                cpus_per_worker=self.cpus,
                gpus_per_worker=self.gpus,
                resources_per_worker={resource: 1.0},
                placement_timeout_s=self.start_s,
            )
            worker = RayClassWithInitArgs(EngineWorker, self.spec)
            return RayWorkerGroup(place, worker, name=name, liveness=self.liveness)

        return lambda: WorkerGroupEngine(make_group, transport=self.transport)
