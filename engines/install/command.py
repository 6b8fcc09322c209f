"""``asyncrl engine``: installs and checks the virtual environments of vLLM and SGLang."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from asyncrl.cli.output import show, show_status
from asyncrl.errors import ConfigError
from asyncrl.plugins import load_part, part_names
from engines.install.venv import Device, EngineRecipe, EngineVenv, PipInstall, VenvStatus

SUMMARY = "install or check the environment of vLLM or SGLang"
GROUP = "asyncrl.engine_recipes"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``asyncrl engine``."""
    parser.add_argument(
        "action",
        choices=("install", "check"),
        metavar="ACTION",
        help="install: create the environment of ENGINE, or continue an incomplete one; check: report its problems",
    )
    parser.add_argument("engine", metavar="ENGINE", help="vllm or sglang")
    parser.add_argument("--path", type=Path, metavar="DIR", help="folder of the environment (.venv-ENGINE)")
    device = parser.add_mutually_exclusive_group()
    device.add_argument("--cpu", action="store_const", const="cpu", dest="device", help="for a machine without a GPU")
    device.add_argument("--gpu", action="store_const", const="gpu", dest="device", help="for GPUs, found here or not")
    parser.add_argument("--python", type=Path, metavar="FILE", help="interpreter to create it with (this one)")
    parser.add_argument("--index-url", metavar="URL", help="package index in place of pip's own")
    parser.add_argument("--extra-index-url", action="append", default=[], metavar="URL", help="a further package index")
    parser.add_argument("--recreate", action="store_true", help="delete an existing environment first")


def default_folder(engine: str) -> Path:
    """Return the folder of an engine's environment if no other is given."""
    return Path(f".venv-{engine}")


def recipe_of(engine: str, device: Device) -> EngineRecipe:
    """Return the recipe of an engine, with this environment's Ray, by which `object_store` brings weights.

    Raises:
        ConfigError: the engine has no recipe.
    """
    recipe: EngineRecipe = load_part(GROUP, engine, path="engine")(device)
    ray = version("ray")
    steps = (*recipe.steps, PipInstall(requirements=(f"ray=={ray}",)))
    return dataclasses.replace(recipe, steps=steps, distributions={**recipe.distributions, "ray": ray})


def run(namespace: argparse.Namespace, settings: Sequence[str]) -> int:
    """Run ``asyncrl engine`` and return the exit code."""
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
        if status.problems:
            show(f"->    {_install_command(venv, recipe.engine, recipe.device)}")
            return 1
        show(f"ok    {venv.folder}: {_versions(status)}")
        return 0
    recipe = recipe_of(namespace.engine, _device(namespace.device))
    pip_options = [f"--extra-index-url={url}" for url in namespace.extra_index_url]
    if namespace.index_url is not None:
        pip_options.append(f"--index-url={namespace.index_url}")
    status = venv.install(
        recipe,
        python=namespace.python,
        pip_options=pip_options,
        recreate=namespace.recreate,
        log_step=show_status,
    )
    show(f"{venv.folder}: {_versions(status)}")
    show(f"  asyncrl serve MODEL --engine {recipe.engine} --engine-python {venv.python}")
    return 0


def _device(given: Device | None) -> Device:
    if given is not None:
        return given
    if _device_here() == "cpu":
        raise ConfigError(
            "no NVIDIA GPU was found (no nvidia-smi)",
            path="--cpu",
            remedy="add --cpu for an engine on the CPU, or --gpu to install a GPU environment anyway",
        )
    return "gpu"


def _device_here() -> Device:
    return "gpu" if shutil.which("nvidia-smi") else "cpu"


def _install_command(venv: EngineVenv, engine: str, device: Device) -> str:
    return f"asyncrl engine install {engine} --{device} --path {venv.folder}"


def _versions(status: VenvStatus) -> str:
    return ", ".join(f"{name} {version}" for name, version in status.found.items())


def check_environments(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Examine the environments in ``folder``; yield name, status, findings and remedy for ``asyncrl doctor``."""
    for engine in part_names(GROUP):
        venv = EngineVenv(folder / default_folder(engine))
        if not venv.folder.exists():
            continue
        name, state = f"environment {venv.folder.name}", venv.state()
        device: Device = "gpu" if state is None else state.device
        try:
            status = venv.examine(recipe_of(engine, device))
        except ConfigError as error:
            yield name, "warning", str(error), error.remedy or ""
            continue
        if status.problems:
            yield name, "warning", "; ".join(status.problems), _install_command(venv, engine, device)
        else:
            yield name, "ok", f"{_versions(status)} (for {device})", ""
