"""A model by name: a folder, a hub id, or ``SOURCE:NAME`` of an installed model source, which makes a folder of it."""

from __future__ import annotations

from pathlib import Path

from asyncrl.parts import load_part, part_names

__all__ = ["is_made", "made_model"]

_SOURCES = "asyncrl.model_sources"


def is_made(model: str) -> bool:
    """Whether ``model`` names a model source, whose folder has to be made before an engine can load it."""
    source, colon, _ = model.partition(":")
    return bool(colon) and source in part_names(_SOURCES)


def made_model(model: str, into: Path) -> str:
    """What engines load for ``model``: itself, or a folder made below ``into``. Blocks.

    Raises:
        ConfigError: the source cannot make it.
    """
    if not is_made(model):
        return model
    source, _, name = model.partition(":")
    folder = into / "model"
    load_part(_SOURCES, source, path="model")(folder, seed=0, demonstrations=None, source=name)
    return str(folder)
