"""Memory that is given back for a while: weights and moments of a trainer that shares its device with rollouts."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage

from asyncrl.errors import EngineError
from asyncrl.io import LockedTemporaryDirectory


class Offload:
    """Frees the memory of tensors, and brings their contents back into the same tensors.

    The contents of a device's memory are kept in pinned host memory, those of host memory in a file of a crash-safe
    temporary directory, whose pages the kernel can take back. All tensors are on ``device``; every view of their memory
    is empty until :meth:`restore`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._freed: list[tuple[UntypedStorage, int]] = []
        self._host: list[Tensor] = []  # reused: pinning memory takes longer than the copy
        self._folder: LockedTemporaryDirectory | None = None

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Free the memory of ``tensors``. What cannot be freed, and :func:`resizable` would have copied, stays.

        Raises:
            OSError: the file cannot be written; nothing has been freed then.
        """
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors if each.numel()}
        freed = [(storage, storage.nbytes()) for storage in storages.values() if storage.resizable()]
        if self._device.type == "cpu":
            if self._folder is None:
                self._folder = LockedTemporaryDirectory("offload")
            with (self._folder.path / "memory").open("wb", buffering=0) as file:
                for storage, _ in freed:
                    data = _memory_of(storage)
                    while data:
                        data = data[file.write(data) :]
        else:
            if [each.numel() for each in self._host] != [size for _, size in freed]:
                self._host = []  # first, so that torch gives the same memory out again
                self._host = host_memory([size for _, size in freed], pinned=True)
            for host, (storage, _) in zip(self._host, freed, strict=True):
                host.copy_(_bytes_of(storage), non_blocking=True)
            torch.cuda.synchronize(self._device)
        for storage, _ in freed:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc keeps free blocks of up to 32 MB
            trim(0)
        self._freed = freed

    def restore(self) -> None:
        """Allocate the memory again and fill it.

        Raises:
            EngineError: the file is not there any more, or is shorter than it was.
        """
        for storage, size in self._freed:
            storage.resize_(size)
        if self._device.type != "cpu":
            for host, (storage, _) in zip(self._host, self._freed, strict=bool(self._freed)):
                _bytes_of(storage).copy_(host, non_blocking=True)
            torch.cuda.synchronize(self._device)
        elif self._freed:
            assert self._folder is not None
            try:
                self._read(self._folder)
            except OSError as error:
                raise EngineError(f"the memory that was given back cannot be read again: {error}") from error
        self._freed = []

    def close(self) -> None:
        """Remove the file. Idempotent."""
        if self._folder is not None:
            self._folder.close()

    def _read(self, folder: LockedTemporaryDirectory) -> None:
        with (folder.path / "memory").open("rb", buffering=0) as file:
            for storage, _ in self._freed:
                data = _memory_of(storage)
                while data:
                    found = file.readinto(data)
                    if not found:
                        raise OSError(f"it ends {len(data)} bytes early")
                    data = data[found:]


def host_memory(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
    """Return uint8 tensors of these sizes in the host's memory, side by side in few allocations of it.

    torch rounds pinned memory up to a power of two, and the driver takes a while for every piece of it: a model's
    tensors one by one would take a quarter more.
    """
    needed = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    left = sum(needed)
    free: list[Tensor] = []  # what is left of each allocation
    found: list[Tensor] = []
    for size, taken in zip(sizes, needed, strict=True):
        at = next((at for at, rest in enumerate(free) if taken <= len(rest)), len(free))
        if at == len(free):
            whole = max(_SLAB_BYTES, 1 << (taken - 1).bit_length())
            free.append(torch.empty(min(whole, left), dtype=torch.uint8, pin_memory=pinned))
        found.append(free[at][:size])
        free[at] = free[at][taken:]
        left -= taken
    return found


_SLAB_BYTES = 1 << 30
_ALIGNMENT = 64


def resizable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its memory cannot be freed: that of a mapped file, or what numpy has seen."""
    return tensor if tensor.untyped_storage().resizable() else tensor.clone()


def _memory_of(storage: UntypedStorage) -> memoryview:
    # Not through numpy: a storage that numpy has seen cannot be resized any more.
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
