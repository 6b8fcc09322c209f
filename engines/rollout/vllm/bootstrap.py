"""A hook that runs in every process that vLLM spawns, before any of vLLM's code.

vLLM passes its configuration to each process that it spawns, and keeps a part of it, ``additional_config``, for others'
use. A value there may run code when it is unpickled, whatever program the engine was made in.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from typing import Self

from engines.rollout.remote.process import end_with


class BootstrapHook(str):
    """A configuration value that, unpickled in a spawned process, ties this process to the one that made the value.

    The process ends with its maker, and makes its temporary files in ``folder`` (None: where they are by default).

    vLLM names its cache of compiled code after its configuration: as a string, the hook is the same in every run.
    """

    folder: str | None

    def __new__(cls, folder: str | None) -> Self:
        hook = super().__new__(cls, "ends with its parent")
        hook.folder = folder
        return hook

    def __reduce__(self) -> tuple[object, ...]:
        return _unpickled, (os.getpid(), self.folder)


def _unpickled(maker: int, folder: str | None) -> BootstrapHook:
    # Copies are unpickled in the same process; Ray's workers, which may be on another machine, are "MainProcess".
    if maker != os.getpid() and multiprocessing.current_process().name != "MainProcess":
        end_with(maker)
        if folder is not None:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir

            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # is to outlive this process
            tempfile.tempdir = folder
    return BootstrapHook(folder)
