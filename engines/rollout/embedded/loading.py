"""From a Hugging Face folder to a decoder: the only place that loads transformers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from asyncrl.errors import AsyncRLError, EngineError
from engines.loading import one_at_a_time
from engines.rollout.embedded.decoder import Decoder

__all__ = ["LoadedModel", "end_ids", "import_model_code", "load", "load_tokenizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the engine needs of a model folder.

    Attributes:
        decoder: the model, checked.
        tokenizer: None if the folder has none; only stop strings need it.
        stop_token_ids: end-of-sequence ids of the generation config and the tokenizer.
    """

    decoder: Decoder
    tokenizer: Any  # Any: transformers' tokenizers share no typed interface
    stop_token_ids: frozenset[int]


def import_model_code(model_path: str) -> None:
    """Import all that :func:`load` will need for this model, without loading anything.

    Raises:
        EngineError: the folder has no configuration, or of an unknown kind.
    """
    try:
        config = AutoConfig.from_pretrained(model_path)
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        importlib.import_module("transformers.modeling_utils")
        importlib.import_module("transformers.tokenization_utils_tokenizers")
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise EngineError(f"cannot load {model_path}: {type(error).__name__}: {error}") from error


def load(model_path: str, *, dtype: torch.dtype, device: str, max_model_tokens: int | None) -> LoadedModel:
    """Load model and tokenizer and prove that the model can be served.

    Raises:
        EngineError: it cannot be loaded, or not be served.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with one_at_a_time:
            model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype)
        model = model.to(device).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError, ImportError, KeyError) as error:
        raise EngineError(f"cannot load {model_path} on {device}: {type(error).__name__}: {error}") from error
    tokenizer = load_tokenizer(model_path)
    decoder = Decoder(model, max_model_tokens=max_model_tokens)
    with torch.inference_mode():
        try:
            decoder.check()
        except AsyncRLError:
            raise
        except Exception as error:
            raise EngineError(
                f"{type(model).__name__} cannot be served by the transformers engine: {type(error).__name__}: {error}"
            ) from error
    stop = set(end_ids(getattr(model.generation_config, "eos_token_id", None)))
    stop.update(end_ids(getattr(tokenizer, "eos_token_id", None)))
    return LoadedModel(decoder=decoder, tokenizer=tokenizer, stop_token_ids=frozenset(stop))


def load_tokenizer(model_path: str) -> Any:
    """The folder's tokenizer; None if it has none, which only requests with stop strings will mind."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError, ImportError, KeyError):
        return None
    # For some families transformers makes an empty tokenizer up; its end-of-sequence id would cut texts short.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def end_ids(value: int | list[int] | None) -> list[int]:
    """An ``eos_token_id``, as configurations write it."""
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
