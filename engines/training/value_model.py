"""A transformers causal LM that says one number instead of the next token: a critic's value, a reward model's score."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from asyncrl.errors import ConfigError
from engines.training.balance import RowCost
from engines.training.microbatch import Layout
from engines.training.model import PolicyModel, choose_layout, load_causal_lm
from engines.training.token_log_probs import Extras, TokenScores
from engines.training.trainer_folder import model_file

__all__ = ["ValueModel", "load_value_model"]

SCORE = "score.weight"
"""Name of the head in files: that of transformers' models for sequence classification."""


class ValueModel(PolicyModel):
    """The body of a causal LM with a head of one output, in the place of the one that knows the vocabulary.

    The value of token t is read off the hidden state *before* it, as its log-prob would be: what the model expects at
    that moment, not knowing the token. In files it is a model for sequence classification with one label, as reward
    models are passed around.

    Args:
        causal_lm: a model of transformers; its output head is replaced.
        head: [1, H] weight of the new one; None begins with 0 everywhere: a value model that knows nothing says 0.

    Raises:
        ConfigError: the model has no output head, or another hidden size than ``head``.
    """

    def __init__(self, causal_lm: PreTrainedModel, *, head: Tensor | None = None) -> None:
        super().__init__(causal_lm)
        config: Any = causal_lm.config
        old: Any = causal_lm.get_output_embeddings()
        if old is None:
            raise ConfigError(f"{self.architecture} has no output head to replace", path="model_path")
        size = int(config.get_text_config().hidden_size)
        score = nn.Linear(size, 1, bias=False, dtype=torch.float32)
        if head is not None and head.shape != score.weight.shape:
            raise ConfigError(
                f"the head of the value model is {tuple(head.shape)}, here it must be (1, {size})",
                path="model_path",
                remedy="a model for sequence classification with one label",
            )
        with torch.no_grad():
            score.weight.copy_(head) if head is not None else score.weight.zero_()
        for part in {id(each): each for each in (config, config.get_text_config())}.values():
            part.tie_word_embeddings = False
        causal_lm.set_output_embeddings(score)
        self._head_name = next(name for name, each in causal_lm.named_parameters() if each is score.weight)
        self.architecture = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, self.architecture)
        config.num_labels = 1
        if config.get_text_config().pad_token_id is None:  # transformers' own classes want one to find a row's end
            config.get_text_config().pad_token_id = _end_token(config)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        predictors: Tensor,
        targets: Tensor,
        *,
        rectangles: tuple[tuple[int, int], ...],
        extras: Extras = "none",
        temperature: float = 1.0,
    ) -> TokenScores:
        """Values of N tokens of a stream, in the place of their log-probs; arguments as of the base class.

        ``targets`` are not looked at: a value does not depend on what comes.
        """
        states = self.hidden_states(input_ids, positions, rectangles=rectangles).index_select(0, predictors)
        head: Any = self.causal_lm.get_output_embeddings()
        # In half precision a value would have two digits.
        values = nn.functional.linear(states.float(), head.weight.float()).squeeze(-1)
        nothing = values.new_zeros(0)
        return TokenScores(values, nothing, nothing)

    def row_cost(self) -> RowCost:
        """As of the base class; the head costs next to nothing."""
        config: Any = self.causal_lm.config.get_text_config()
        whole = super().row_cost()
        weights = sum(parameter.numel() for parameter in self.causal_lm.parameters() if parameter.ndim >= 2)
        body = weights - self.vocabulary * int(config.hidden_size)
        return RowCost(
            per_token=float(max(0, body)), per_scored_token=float(config.hidden_size), per_pair=whole.per_pair
        )

    def parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the base class, with the head under its name in files."""
        for name, parameter in super().parameters_by_name():
            yield SCORE if name == self._head_name else name, parameter


def load_value_model(
    path: str, *, gradient_checkpointing: bool = False, layout: Layout | Literal["auto"] = "auto"
) -> ValueModel:
    """From a causal LM (its head is replaced by 0) or a model for sequence classification with one label.

    Raises:
        ConfigError: the head has more than one label or is not in the files, or rows cannot be packed and must be.
        OSError: there is no such model.
    """
    with _without_report():
        causal_lm = load_causal_lm(path, gradient_checkpointing=gradient_checkpointing)
    head = _head_of(path)
    headed = set(causal_lm.config.architectures or ()) & set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values())
    if head is None and headed:
        raise ConfigError(
            f"{path} is a {headed.pop()} without {SCORE} in its safetensors files",
            path="model_path",
            remedy=f"save it as safetensors, with its head under {SCORE}; a causal LM begins with a head of 0",
        )
    model = ValueModel(causal_lm, head=head)
    model.train()
    choose_layout(model, layout)
    return model


@contextmanager
def _without_report() -> Iterator[None]:
    """Transformers warns of the head that is not in the files, or not wanted: it is replaced anyway."""
    logger = logging.getLogger("transformers.modeling_utils")
    thread = threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno >= logging.ERROR

    logger.addFilter(of_others)
    try:
        yield
    finally:
        logger.removeFilter(of_others)


def _head_of(path: str) -> Tensor | None:
    """The head in the model's own files; None for a causal LM."""
    index = model_file(path, "model.safetensors.index.json")
    name = "model.safetensors"
    if index is not None:
        name = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].get(SCORE, "")
    file = model_file(path, name) if name else None
    if file is None:
        return None
    with safe_open(str(file), framework="pt") as tensors:
        return tensors.get_tensor(SCORE).float() if SCORE in tensors.keys() else None  # noqa: SIM118  no mapping


def _end_token(config: Any) -> int:
    end = config.get_text_config().eos_token_id
    return int(end[0] if isinstance(end, list) else end or 0)
