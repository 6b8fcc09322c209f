"""Which tensors a model has, and whether a version of the weights fits them."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from torch import nn

from asyncrl.errors import WeightError, WeightMismatchError, WeightVersionError
from asyncrl.weights import TensorEntry, WeightManifest, dtype_and_checksum, lacking

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelTensors:
    """The parameters and persistent buffers of a model (tensors may be on the ``meta`` device), each once.

    Tensors shared under several names (tied embeddings) are one: any of the names will do, and if several come they
    must agree. Persistent buffers may be left out. ``owners`` maps each name to the first name of its tensor; ``live``
    has the tensors by first name; ``required`` are the first names of parameters.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.owners: dict[str, str] = {}
        self.live: dict[str, torch.Tensor] = {}
        first: dict[int, str] = {}
        persistent = set(model.state_dict())
        parameters = list(model.named_parameters(remove_duplicate=False))
        buffers = [(n, b) for n, b in model.named_buffers(remove_duplicate=False) if n in persistent]
        for name, tensor in [*parameters, *buffers]:
            owner = first.setdefault(id(tensor), name)
            self.owners[name] = owner
            self.live[owner] = tensor
        self.required = {self.owners[name] for name, _ in parameters}
        self.linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        """Names of the weights that adapters may lie beside."""

    @property
    def adaptable(self) -> list[str]:
        """Return the ends of the names of linear modules, without the output head."""
        names = {name.removesuffix(".weight") for name in self.linear}
        return sorted({name.rpartition(".")[2] for name in names if "." in name})

    @classmethod
    def of_config(cls, model_path: str, *, dtype: torch.dtype = torch.float32) -> ModelTensors:
        """Return the tensors of a folder's or hub id's model, from its configuration alone. Blocks.

        Raises:
            WeightError: transformers does not support the model.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config: Any = AutoConfig.from_pretrained(model_path)  # Any: a class per family
            with torch.device("meta"):
                model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
            model.tie_weights()
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise WeightError(
                f"{model_path} is no causal language model that transformers knows, so its updates cannot be checked: "
                f"{type(error).__name__}: {error}"
            ) from error
        return cls(model)

    def check(self, tensors: Mapping[str, torch.Tensor], *, version: int, held: int) -> None:
        """Raise :class:`WeightMismatchError` unless tensors fit the model; a floating dtype may differ.

        Raise :class:`WeightVersionError` unless ``version`` is newer than ``held``.
        """
        entries = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self._check(entries, lambda a, b: torch.equal(tensors[a], tensors[b]), version=version, held=held)

    def check_manifest(self, manifest: WeightManifest, *, held: int) -> dict[str, str]:
        """Check a manifest likewise, before any byte is pulled. Return name -> first name, without second names."""
        entries = {each.name: (tuple(each.shape), getattr(torch, each.dtype, each.dtype)) for each in manifest.tensors}
        checksums = {each.name: each.checksum for each in manifest.tensors}
        return self._check(entries, lambda a, b: checksums[a] == checksums[b], version=manifest.version, held=held)

    def check_adapter(
        self,
        manifest: WeightManifest,
        *,
        held: int,
        modules: Collection[str] = (),
        base: tuple[TensorEntry, ...] = (),
        max_rank: int | None = None,
    ) -> list[str]:
        """Check the manifest of an adapter, before any byte is pulled. Return the modules that it adapts.

        ``modules`` are those that its last version adapted, if there was one; ``base`` was checked before.

        Raises:
            WeightMismatchError: it does not fit the model, its base, its own rank or its last version.
            WeightVersionError: it is not newer than the version ``held``.
        """
        adapter, version = manifest.adapter, manifest.version
        assert adapter is not None
        what = f"adapter {adapter.name!r} of version {version}"
        if version <= held:
            raise WeightVersionError(f"weight version {version} does not follow version {held}: versions grow")
        if adapter.base and adapter.base != base:
            try:
                self.check_manifest(msgspec.structs.replace(manifest, tensors=adapter.base, adapter=None), held=held)
            except WeightMismatchError as error:
                raise WeightMismatchError(f"{what} is for another base: {error}") from error
        if max_rank is not None and adapter.rank > max_rank:
            raise WeightMismatchError(f"{what} has rank {adapter.rank}; the engine takes {max_rank} (max_adapter_rank)")
        if not adapter.rank > 0 or not 0 < adapter.alpha < math.inf:
            raise WeightMismatchError(f"{what} has rank {adapter.rank} and alpha {adapter.alpha}: both are positive")
        found = {entry.name: entry for entry in manifest.tensors}
        adapted = sorted({name for entry in found if (name := adapted_module(entry))})
        adaptable = self.adaptable
        for module in adapted:
            weight = self.live.get(self.owners.get(f"{module}.weight", ""))
            if weight is None or f"{module}.weight" not in self.linear:
                raise WeightMismatchError(f"{what} is for another base: the model has no linear module {module}")
            if module.rpartition(".")[2] not in adaptable:
                raise WeightMismatchError(
                    f"{what} adapts the output head {module}, beside which no engine computes an adapter: train it on "
                    f"modules among {', '.join(adaptable)}"
                )
            outputs, inputs = weight.shape
            for matrix, shape in (("A", (adapter.rank, inputs)), ("B", (outputs, adapter.rank))):
                entry = found.pop(adapter_name(module, matrix), None)
                if entry is None:
                    raise WeightMismatchError(f"{what} lacks the tensor {adapter_name(module, matrix)}")
                if tuple(entry.shape) != shape:
                    raise WeightMismatchError(
                        f"{what}: {entry.name} has shape {tuple(entry.shape)}; beside a weight of shape "
                        f"{(outputs, inputs)} an adapter of rank {adapter.rank} has {shape}"
                    )
                if entry.dtype not in DTYPES:
                    raise WeightMismatchError(
                        f"{what}: {entry.name} has dtype {entry.dtype}; one of {', '.join(DTYPES)}"
                    )
        if found or not adapted:
            raise WeightMismatchError(f"{what} has tensors that belong to no adapter: {_few(sorted(found))}")
        if modules and (other := sorted(set(adapted) ^ set(modules))):
            raise WeightMismatchError(f"{what} has other target modules than its last version: {_few(other)}")
        return adapted

    def checksums(self, names: Collection[str]) -> dict[str, tuple[str, int]]:
        """Return the dtype and the checksum of live tensors, by published name; in threads."""
        return checksums({name: self.live[self.owners[name]] for name in names})

    def _check(
        self,
        entries: Mapping[str, tuple[tuple[int, ...], torch.dtype | str]],
        equal: Callable[[str, str], bool],
        *,
        version: int,
        held: int,
    ) -> dict[str, str]:
        if version <= held:
            raise WeightVersionError(f"weight version {version} does not follow version {held}: versions grow")
        unknown = sorted(name for name in entries if name not in self.owners)
        missing = sorted(self.required - {self.owners[name] for name in entries if name in self.owners})
        if unknown or missing:
            raise WeightMismatchError(
                f"weights of version {version} do not fit the model: "
                f"unknown names {_few(unknown)}, missing names {_few(missing)}"
            )
        by_owner: dict[str, str] = {}
        for name, (shape, dtype) in entries.items():
            owner = self.owners[name]
            live = self.live[owner]
            if shape != tuple(live.shape):
                raise WeightMismatchError(
                    f"{name} of version {version} has shape {shape}, the model's is {tuple(live.shape)}"
                )
            floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point and live.is_floating_point()
            if dtype != live.dtype and not floating:
                raise WeightMismatchError(f"{name} of version {version} has dtype {dtype}, the model's is {live.dtype}")
            other = by_owner.setdefault(owner, name)
            if other != name and not equal(other, name):
                raise WeightMismatchError(
                    f"{other} and {name} are one tensor in the model, but differ in version {version}"
                )
        return {name: owner for owner, name in by_owner.items()}


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """Return the dtype and the checksum of tensors, as in their entries; in threads."""
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1), thread_name_prefix="check-weights") as threads:
        return dict(zip(tensors, threads.map(dtype_and_checksum, tensors.values()), strict=True))


def check_base(manifest: WeightManifest, served: Mapping[str, tuple[str, int]]) -> None:
    """Check that an adapter was trained beside the weights that are ``served``: dtype and checksum by published name.

    Tensors of another dtype, and those that are served alone, are left out; a warning says where that is all of them.

    Raises:
        WeightMismatchError: it was trained beside others.
    """
    assert manifest.adapter is not None
    base = manifest.adapter.base
    compared = [entry for entry in base if served.get(entry.name, ("",))[0] == entry.dtype]
    if base and not compared:
        _log.warning("adapter %r: no tensor of its base is compared with what is served", manifest.adapter.name)
    for entry in compared:
        if served[entry.name][1] != entry.checksum:
            raise WeightMismatchError(
                f"adapter {manifest.adapter.name!r} of version {manifest.version} is for another base: its "
                f"{entry.name} is not what the engine serves"
            )


def model_folder(model_path: str) -> Path:
    """Return the folder of a loaded model; of a hub's name, where its files are kept. Blocks, and asks no network."""
    if not Path(model_path).is_dir():
        with contextlib.suppress(ImportError, OSError, ValueError):  # not kept, or no name of a hub
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(model_path, local_files_only=True))
    return Path(model_path)


def folder_checksums(model_path: str, dtypes: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Return the dtype and the checksum of tensors in a model's folder, floating ones in ``dtypes`` (by name). Blocks.

    There are none where it has no safetensors.
    """
    found: dict[str, tuple[str, int]] = {}
    for path in sorted(model_folder(model_path).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(dtypes.keys() & set(file.keys())):
                tensor = file.get_tensor(name)
                dtype = DTYPES.get(dtypes[name], tensor.dtype) if tensor.is_floating_point() else tensor.dtype
                found[name] = dtype_and_checksum(tensor.to(dtype))
    return found


class AdapterVersions:
    """The adapters of an engine that serves them from elsewhere: their numbers, versions and modules, by name.

    ``tensors`` are the model's, and ``model_path`` the folder that it was loaded from, as version ``weights``.
    """

    def __init__(self, tensors: ModelTensors, model_path: str, *, weights: int, max_rank: int, most: int) -> None:
        self.numbers: dict[str, int] = {}
        """From 1; those that are fetched and do not serve yet have one, too."""
        self.tensors = tensors
        self._model_path = model_path
        self._weights = weights
        self._max_rank = max_rank
        self._most = most
        self._versions: dict[str, list[int]] = {}
        self._modules: dict[str, list[str]] = {}
        self._base: tuple[TensorEntry, ...] = ()

    @property
    def serving(self) -> dict[str, int]:
        return {name: versions[-1] for name, versions in self._versions.items()}

    def version_of(self, name: str, *, at: int) -> int:
        """Return the version that was sampled under for an adapter while the engine's version was ``at``."""
        return max((each for each in self._versions.get(name, ()) if each <= at), default=self._weights)

    def check(self, manifest: WeightManifest) -> list[WeightManifest]:
        """Check what the engine lacks of the adapters of a version, and return it. Blocks.

        Raises:
            WeightMismatchError, WeightVersionError: as :meth:`ModelTensors.check_adapter`; or there are too many.
        """
        parts = lacking(manifest, self.serving)
        self.numbers = {name: number for name, number in self.numbers.items() if name in self._versions}
        for part in parts:
            assert part.adapter is not None
            name = part.adapter.name
            self._modules[name] = self.tensors.check_adapter(
                part,
                held=self.serving.get(name, self._weights),
                modules=self._modules.get(name, ()) if name in self._versions else (),
                base=self._base,
                max_rank=self._max_rank,
            )
            if part.adapter.base != self._base:
                dtypes = {entry.name: entry.dtype for entry in part.adapter.base}
                check_base(part, folder_checksums(self._model_path, dtypes))
                self._base = part.adapter.base
            if name not in self.numbers:
                free = set(range(1, self._most + 1)) - set(self.numbers.values())
                if not free:
                    raise WeightMismatchError(
                        f"adapter {name!r} is one more than the engine takes: {self._most} (max_adapters)"
                    )
                self.numbers[name] = min(free)
        return parts

    def committed(self, parts: Sequence[WeightManifest]) -> frozenset[str]:
        """Note that the adapters of ``parts`` serve; return their names."""
        for part in parts:
            assert part.adapter is not None
            self._versions.setdefault(part.adapter.name, []).append(part.version)
            del self._versions[part.adapter.name][:-_KEPT_VERSIONS]
        return frozenset(part.adapter.name for part in parts if part.adapter is not None)


_KEPT_VERSIONS = 64  # of an adapter: what was sampled so long ago was delivered
_ADAPTER = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")


def adapter_name(module: str, matrix: str) -> str:
    """Return the name that peft's files give to matrix ``A`` or ``B`` beside a module."""
    return f"base_model.model.{module}.lora_{matrix}.weight"


def adapted_module(name: str) -> str:
    """Return the module that a tensor of an adapter lies beside; nothing for the name of another tensor."""
    found = _ADAPTER.fullmatch(name)
    return found[1] if found else ""


def check_prepared(version: int, prepared: int | None) -> None:
    """Raise :class:`WeightVersionError` unless ``version`` is the prepared one."""
    if version != prepared:
        state = "none is" if prepared is None else f"version {prepared} is"
        raise WeightVersionError(f"cannot commit weight version {version}: {state} prepared")


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "none"
