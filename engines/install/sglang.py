"""The environment of SGLang: on GPUs as its documentation says, on a CPU from packages that need no GPU.

A CPU needs two replacements. The wheel of SGLang's CPU kernels is not published, so a module of the same name has the
one function that a dense model needs, written in torch. And the C extension of the published torchvision needs CUDA;
two operators that torchvision registers at import would be unknown without it, so they are declared before.
"""

from __future__ import annotations

from importlib.resources import files

from engines.install.venv import Device, EngineRecipe, LocalDistribution, PipInstall

_VERSION = "0.5.23"
_PROBE = """
import sys
import msgspec, torch, xxhash
import sglang
from sglang.srt.managers.scheduler import run_scheduler_process
import engines.rollout.remote.process, engines.rollout.sglang.engine
if torch.cuda.is_available() != {cuda}:
    sys.exit(f"torch {{torch.__version__}} sees a GPU: {{torch.cuda.is_available()}}; expected: {cuda}")
"""
_TORCH = "2.13.0+cpu"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_TORCHVISION = "0.28.0"
_OURS = ("msgspec>=0.21", "xxhash>=3.5")  # imported by asyncrl's modules in the engine process

_KERNELS = '''\
"""Replaces SGLang's CPU kernels: the function that a dense model needs, in torch."""


def assign_req_to_token_pool_cpu(rows, table, begins, ends, places, _width):
    """Write each request's new places in the cache into its row of the table."""
    read = 0
    for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist()):
        table[row, begin:end] = places[read : read + end - begin].to(table.dtype)
        read += end - begin


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def missing(*_arguments, **_named):
        raise NotImplementedError(f"sgl_kernel.{name} is a kernel of SGLang's CPU build, which is not installed here")

    return missing
'''
_OPERATORS = '''\
"""Declares torchvision's operators before its import: the published build has them in an extension for CUDA."""

import sys


class _BeforeTorchvision:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(cls)
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None  # the other finders import it


sys.meta_path.insert(0, _BeforeTorchvision)
'''


def recipe(device: Device) -> EngineRecipe:
    """Return SGLang's recipe for ``device``."""
    return _cpu() if device == "cpu" else _gpu()


def _cpu() -> EngineRecipe:
    pinned = files("engines.install").joinpath("sglang_cpu_requirements.txt").read_text().split()
    return EngineRecipe(
        engine="sglang",
        device="cpu",
        source="measured on x86-64 with AVX512",
        min_python=(3, 11),
        max_python=(3, 11),
        size_bytes=4 << 30,
        steps=(
            LocalDistribution(
                name="sglang-kernel-cpu-in-torch",
                version=_VERSION,
                summary="replaces SGLang's CPU kernels, and declares torchvision's operators",
                modules={
                    "sgl_kernel/__init__.py": _KERNELS,
                    "asyncrl_torchvision_operators.py": _OPERATORS,
                    "asyncrl_torchvision_operators.pth": "import asyncrl_torchvision_operators\n",
                },
            ),
            PipInstall(requirements=(f"torch=={_TORCH}",), dependencies=False, indexes=(_TORCH_INDEX,)),
            # SGLang depends on gigabytes of GPU packages: only those that its rollouts on a CPU import are installed.
            PipInstall(
                requirements=(f"sglang=={_VERSION}", f"torchvision=={_TORCHVISION}", *pinned), dependencies=False
            ),
        ),
        distributions={"sglang": _VERSION, "torch": _TORCH, "torchvision": _TORCHVISION, "transformers": "5.19.0"},
        environment={"OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"},
        probe=_PROBE.format(cuda=False),
    )


def _gpu() -> EngineRecipe:
    return EngineRecipe(
        engine="sglang",
        device="gpu",
        source="https://docs.sglang.io/get_started/install.html",
        min_python=(3, 11),
        max_python=(3, 13),
        size_bytes=25 << 30,
        steps=(PipInstall(requirements=(f"sglang=={_VERSION}", *_OURS)),),
        distributions={"sglang": _VERSION},
        probe=_PROBE.format(cuda=True),
    )
