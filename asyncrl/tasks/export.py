"""Export: the weights of a run as a plain model folder, on this machine, at a URL, or on the hub."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.io import DurableFiles, LockedTemporaryDirectory, is_sealed, verify_folder
from asyncrl.storage import path_or_url, publish_folder
from asyncrl.trainer.checkpoint import Checkpoints, read_driver_state
from asyncrl.trainer.stored_run import fetch

_ADAPTER = "adapter"


def export(
    run: Path | str, out: Path | str, *, step: int | None = None, part: Literal["model", "adapter"] = "model"
) -> dict[str, Any]:
    """Copy the weights of a checkpoint to ``out``, after every file of it was checked against its digest.

    ``run`` is a run's folder or one of its checkpoints, ``out`` a new or empty folder; each may be the URL of a run
    (``checkpoint.url``), or of a folder (``hf://owner/name`` for a repository of the hub). ``step`` names a checkpoint
    by the version of its weights; None is the newest whole one. The part ``model`` is config, weights and tokenizer as
    transformers reads them, with LoRA's adapters merged in; ``adapter`` the adapters alone, as peft reads them. Return
    the folder, the version of the weights, and the size in bytes.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, or has no adapters.
        StorageError: a store refuses, or cannot be reached.
        ConfigError: ``out`` cannot be used.
    """
    run, out = path_or_url(run), path_or_url(out)
    with ExitStack() as stack:
        if isinstance(run, str):
            checkpoint = _fetched(run, stack.enter_context(LockedTemporaryDirectory("run")) / "run", step=step)
        else:
            checkpoint = _checkpoint(run, step=step)
            verify_folder(checkpoint)
        source = checkpoint / "model"
        if part == "adapter":
            source = source / _ADAPTER
            if not source.is_dir():
                raise CheckpointError(f"{checkpoint} has no adapters: the run did not train with LoRA (trainer.lora)")
        if isinstance(out, str):
            publish_folder(source, out, last="config.json" if part == "model" else "adapter_config.json")
        else:
            _copy(source, out)
        return {
            "folder": str(out),
            "weight_version": read_driver_state(checkpoint).step,
            "checkpoint": str(run if isinstance(run, str) else checkpoint),
            "size_bytes": sum(path.stat().st_size for path in source.iterdir() if path.is_file()),
            "base_model": _base(source) if part == "adapter" else None,
        }


def _copy(source: Path, out: Path) -> None:
    """Copy the files of a folder, without folders in it, to a new or empty folder, whole or not at all."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out = {str(out)!r} exists", path="--out", remedy="give a folder that does not exist")
    files = DurableFiles()
    partial = out.absolute().with_name(f".{out.name}.partial")
    try:
        files.make_folder(partial)
        for path in sorted(source.iterdir()):
            if path.is_file():
                shutil.copyfile(path, partial / path.name)
                files.sync(partial / path.name)
        if out.is_dir():
            out.rmdir()
        files.rename(partial, out.absolute())
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(
            f"--out = {str(out)!r} cannot be written: {error.strerror or error}", path="--out", remedy="check the path"
        ) from error


def _fetched(url: str, into: Path, *, step: int | None) -> Path:
    """Return what an export needs of the newest checkpoint at a run's URL, or of that of ``step``, in a folder."""
    wanted = re.compile("checkpoints/step-[0-9]+/(model/.*|driver.json|manifest.json)")
    fetch(url, into, step=step, wanted=lambda name: wanted.fullmatch(name) is not None)
    (checkpoint,) = (into / "checkpoints").iterdir()
    return checkpoint


def _checkpoint(run: Path, *, step: int | None) -> Path:
    if is_sealed(run) and step is None:
        return run
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise ConfigError(f"{run} is not the folder of a run: it has no checkpoints", remedy="give a run's folder")
    if step is None:
        return Checkpoints(folder, keep=1).latest()
    wanted = folder / f"step-{step:06d}"
    if not is_sealed(wanted):
        there = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
        raise CheckpointError(
            f"{run} has no checkpoint of step {step}; it has {', '.join(map(str, there)) or 'none'} "
            "(checkpoint.every and checkpoint.keep_last decide which are kept)"
        )
    return wanted


def _base(adapter: Path) -> str:
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    return str(config.get("base_model_name_or_path", ""))
