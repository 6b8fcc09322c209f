"""What vLLM's processes do before anything of vLLM's: they end with their parent, and make their files where ours are.

vLLM hands its configuration to each process that it spawns. ``additional_config`` is the part of it that vLLM keeps for
others, and what lies there may act when it is unpickled. So this holds in whatever program an engine is made.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from typing import Self

from engines.rollout.tied_process import end_with

__all__ = ["FirstAct"]


class FirstAct(str):
    """Acts in a process that is spawned with it; a plain text anywhere else, the same in every run.

    vLLM names its cache of compiled code by its configuration, so the folder is not part of the text.

    Args:
        folder: for files of a moment; None leaves them where they are.
    """

    folder: str | None

    def __new__(cls, folder: str | None) -> Self:
        act = super().__new__(cls, "ends with its parent")
        act.folder = folder
        return act

    def __reduce__(self) -> tuple[object, ...]:
        return _begun, (os.getpid(), self.folder)


def _begun(maker: int, folder: str | None) -> FirstAct:
    # Copies are made in the same process, and Ray's workers, which may be on another machine, are nobody's children.
    if maker != os.getpid() and multiprocessing.current_process().name != "MainProcess":
        end_with(maker)
        if folder is not None:
            from torch._inductor.runtime.cache_dir_utils import default_cache_dir

            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())  # is to outlive this process
            tempfile.tempdir = folder
    return FirstAct(folder)
