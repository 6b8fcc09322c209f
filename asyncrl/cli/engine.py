"""``asyncrl engine``: makes and checks the environments of engines that need one of their own."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.engine_venv.recipe import Device, EngineRecipe
from asyncrl.engine_venv.venv import EngineVenv, PackageIndexes
from asyncrl.errors import ConfigError
from asyncrl.parts import load_part

from .output import quiet_pipe, show

__all__ = ["GROUP", "add_engine_options", "default_folder", "engine_command", "recipe_of"]

GROUP = "asyncrl.engine_recipes"


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What ``asyncrl engine --help`` knows."""
    parser.add_argument(
        "action",
        choices=("install", "check"),
        metavar="ACTION",
        help="install: make the environment of ENGINE, or go on with a half-made one; check: see that it is whole",
    )
    parser.add_argument("engine", metavar="ENGINE", help="vllm or sglang")
    parser.add_argument("--path", type=Path, metavar="DIR", help="of the environment (.venv-ENGINE)")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--cpu", action="store_const", const="cpu", dest="device", help="for a machine without a GPU")
    device.add_argument("--gpu", action="store_const", const="gpu", dest="device", help="for GPUs, seen here or not")
    parser.add_argument("--python", type=Path, metavar="FILE", help="interpreter to make it from (this one)")
    parser.add_argument("--index-url", metavar="URL", help="package index in place of pip's own")
    parser.add_argument("--extra-index-url", action="append", default=[], metavar="URL", help="a further one")
    parser.add_argument("--recreate", action="store_true", help="throw away what is there first")


def default_folder(engine: str) -> Path:
    """Where the environment of an engine lies unless another place is named."""
    return Path(f".venv-{engine}")


def recipe_of(engine: str, device: Device) -> EngineRecipe:
    """The recipe of an engine.

    Raises:
        ConfigError: there is none.
    """
    recipe: EngineRecipe = load_part(GROUP, engine, path="engine")(device)
    return recipe


def engine_command(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """``asyncrl engine``."""
    venv = EngineVenv((namespace.path or default_folder(namespace.engine)).absolute())
    if namespace.action == "check":
        state = venv.state()
        made_for = _device_here() if state is None else state.device
        recipe = recipe_of(namespace.engine, namespace.device or made_for)
        status = venv.examine(recipe)
        if not status.problems:
            venv.probe(recipe)
        for problem in status.problems:
            show(f"FAIL  {problem}")
        show(f"{'ok  ' if not status.problems else '->  '}  {_told(venv, recipe, status.found, status.problems)}")
        return 1 if status.problems else 0
    recipe = recipe_of(namespace.engine, _device(namespace.device))
    status = venv.install(
        recipe,
        python=namespace.python or Path(sys.executable),
        indexes=PackageIndexes(index=namespace.index_url, more=tuple(namespace.extra_index_url)),
        recreate=namespace.recreate,
        tell=_tell,
    )
    show(_told(venv, recipe, status.found, ()))
    show(f"  asyncrl serve MODEL --engine {recipe.engine} --engine-python {venv.python}")
    return 0


def _device(asked: Device | None = None) -> Device:
    if asked is not None:
        return asked
    if _device_here() == "cpu":
        raise ConfigError(
            "no NVIDIA GPU is seen here (no nvidia-smi)",
            path="--cpu",
            remedy="add --cpu for an engine that computes on the CPU, or --gpu to make a GPU environment all the same",
        )
    return "gpu"


def _device_here() -> Device:
    return "gpu" if shutil.which("nvidia-smi") else "cpu"


def _told(venv: EngineVenv, recipe: EngineRecipe, found: dict[str, str], problems: Sequence[str]) -> str:
    if problems:
        return f"asyncrl engine install {recipe.engine} --{recipe.device} --path {venv.folder}"
    return f"{venv.folder}: {', '.join(f'{name} {version}' for name, version in found.items())}"


def _tell(line: str) -> None:
    with quiet_pipe():
        print(line, file=sys.stderr, flush=True)
