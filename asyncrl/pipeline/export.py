"""A run's weights as a plain model folder, for whatever reads those."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

from asyncrl.durable import DurableFiles
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.pipeline.checkpoint import Checkpoints, check, is_checkpoint, read_driver_state

__all__ = ["export"]

_ADAPTER = "adapter"


def export(
    run: Path, out: Path, *, step: int | None = None, part: Literal["model", "adapter"] = "model"
) -> dict[str, Any]:
    """Copy the weights of a checkpoint to ``out``, after every file of it was checked against its digest.

    Args:
        run: a run's folder, or one of its checkpoints.
        out: made here; it must not hold anything.
        step: which checkpoint, by the version of its weights; the newest whole one by default.
        part: ``model``: config, weights and tokenizer as transformers reads them, with LoRA's adapters merged in;
            ``adapter``: the adapters alone, as peft reads them.

    Returns:
        Where it is, the version of the weights, and how many bytes.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, or it has no adapters.
        ConfigError: ``out`` cannot be used.
    """
    checkpoint = _checkpoint(run, step=step)
    check(checkpoint)
    source = checkpoint / "model"
    if part == "adapter":
        source = source / _ADAPTER
        if not source.is_dir():
            raise CheckpointError(f"{checkpoint} has no adapters: the run did not train with LoRA (trainer.lora)")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out = {str(out)!r} is there already", path="--out", remedy="give a folder that is not")
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
    return {
        "folder": str(out),
        "weight_version": read_driver_state(checkpoint).step,
        "checkpoint": str(checkpoint),
        "size_bytes": sum(path.stat().st_size for path in out.iterdir()),
        "base_model": _base(out) if part == "adapter" else None,
    }


def _checkpoint(run: Path, *, step: int | None) -> Path:
    if is_checkpoint(run) and step is None:
        return run
    folder = run / "checkpoints"
    if not folder.is_dir():
        raise CheckpointError(f"{run} is no run: it has no checkpoints")
    if step is None:
        return Checkpoints(folder, keep=1).latest()
    wanted = folder / f"step-{step:06d}"
    if not is_checkpoint(wanted):
        there = sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
        raise CheckpointError(
            f"{run} has no checkpoint of step {step}; there is {', '.join(map(str, there)) or 'none'} "
            "(checkpoint.every and checkpoint.keep say which are kept)"
        )
    return wanted


def _base(adapter: Path) -> str:
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    return str(config.get("base_model_name_or_path", ""))
