"""The engine of critics and reward models: a causal LM with a scalar head, and its optimizer, sharded over ranks."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn

from asyncrl.algorithms import TokenLosses, ValueObjective, bradley_terry_losses
from asyncrl.data import DataProto
from asyncrl.data.ragged import offsets_from_lengths, ragged_from_values
from asyncrl.errors import ConfigError, InvalidDataError
from engines.training.loading import model_file
from engines.training.log_probs import Extras, TokenScores
from engines.training.model import PolicyModel, choose_layout, draw_nothing, load_causal_lm
from engines.training.packing import Layout, PackedRows
from engines.training.partition import RowCost
from engines.training.sharded_engine import ShardedEngine, check_any_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORE = "score.weight"
"""Name of the head in files, as in transformers' models for sequence classification."""


class ValueModel(PolicyModel):
    """The body of a causal LM with a scalar head in place of its output head.

    The value of token t is computed from the hidden state *before* it, as its log-prob would be: the value expected
    before the token is known. In files it is a model for sequence classification with one label, as reward models are
    published. ``head`` is its [1, H] weight; None: zeros, so that every value is 0 at first.
    """

    divides_head = False

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
        self.architecture = _headed_architectures().get(config.model_type, self.architecture)
        config.num_labels = 1
        if config.get_text_config().pad_token_id is None:  # transformers' own classes find a row's end by it
            config.get_text_config().pad_token_id = _end_token(config)

    def scores(self, states: Tensor, targets: Tensor, *, extras: Extras, temperature: float) -> TokenScores:
        """Compute the values of N tokens, in place of their log-probs; ``targets``, which follow them, are ignored."""
        head: Any = self.causal_lm.get_output_embeddings()
        # In half precision a value would have two significant digits.
        values = nn.functional.linear(states.float(), head.weight.float()).squeeze(-1)
        nothing = values.new_zeros(0)
        return TokenScores(values, nothing, nothing)

    @cached_property
    def row_cost(self) -> RowCost:
        config: Any = self.causal_lm.config.get_text_config()
        whole = super().row_cost
        weights = sum(parameter.numel() for parameter in self.causal_lm.parameters() if parameter.ndim >= 2)
        body = weights - self.vocabulary * int(config.hidden_size)
        return RowCost(
            per_token=float(max(0, body)), per_scored_token=float(config.hidden_size), per_pair=whole.per_pair
        )

    def parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in super().parameters_by_name():
            yield SCORE if name == self._head_name else name, parameter


def load_value_model(
    path: str,
    *,
    gradient_checkpointing: bool = False,
    layout: Layout | Literal["auto"] = "auto",
    sharded: bool = False,
) -> ValueModel:
    """Load a causal LM (its head is replaced by zeros) or a model for sequence classification with one label.

    ``sharded`` is as in :func:`~engines.training.model.load_policy_model`.

    Raises:
        ConfigError: the head has more than one label or is not in the files, or rows cannot be packed and must be; of a
            sharded model, also what :func:`~engines.training.model.load_policy_model` raises.
        OSError: there is no such model.
    """
    with _without_missing_head_warning():
        loaded = load_causal_lm(path, gradient_checkpointing=gradient_checkpointing, sharded=sharded)
    causal_lm = loaded.causal_lm
    head = _head_of(path)
    headed = set(causal_lm.config.architectures or ()) & set(_headed_architectures().values())
    if head is None and headed:
        raise ConfigError(
            f"{path} is a {headed.pop()} without {SCORE} in its safetensors files",
            path="model_path",
            remedy=f"save it as safetensors, with its head as {SCORE}, or use a causal LM",
        )
    model = ValueModel(causal_lm, head=head)
    draw_nothing(model)
    choose_layout(model, layout, loaded)
    return model


def _headed_architectures() -> Mapping[str, str]:
    """Return transformers' classes for sequence classification, by model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


@contextmanager
def _without_missing_head_warning() -> Iterator[None]:
    """Suppress the warnings of transformers in this thread: the head that it misses or does not use is replaced."""
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


@dataclass(kw_only=True, eq=False, repr=False)
class FSDPValueEngine(ShardedEngine[ValueModel]):
    """A :class:`~asyncrl.interfaces.ValueEngine`; ranks, micro-batches and precision are as in ``FSDPEngine``.

    ``model_path`` is that of a causal LM or a model for sequence classification (:func:`load_value_model`);
    :meth:`update` minimises ``objective``. ``center_rewards_coefficient`` (0 or more) is how strongly :meth:`compare`
    pulls the sum of a pair's scores to 0. Other arguments are those of :class:`ShardedEngine`.
    """

    lr: float = 0.0
    objective: ValueObjective = field(default_factory=ValueObjective)
    center_rewards_coefficient: float = 0.0

    def __post_init__(self) -> None:
        self._open(
            lambda sharded: load_value_model(
                self.model_path,
                gradient_checkpointing=self.gradient_checkpointing,
                layout=self.layout,
                sharded=sharded,
            )
        )

    def values(self, batch: DataProto) -> DataProto:
        self._check_open()
        rows = self._read(batch)
        values, _ = self._score(self._partition(rows), extras="none")
        offsets = offsets_from_lengths(rows.lengths)
        return DataProto.from_dict(tensors={"values": ragged_from_values(values, offsets)})

    def update(self, batch: DataProto) -> dict[str, float]:
        """Make ``num_mini_batches * epochs`` optimizer steps towards ``returns`` of the tokens in ``loss_mask``.

        With more than one optimizer step, values at the start of the update are computed first. The clip range is
        around those, not around the values that advantages were computed from. Metrics are as in ``FSDPEngine.update``.
        """
        self._check_open()
        rows = self._read(batch, required=("returns",))
        partition = self._partition(rows)
        check_any_tokens(partition.scored)
        if self.num_mini_batches * self.epochs > 1:
            rows.columns["old_values"], _ = self._score(partition, extras="none")
        metrics = self._run_mini_batches(
            partition,
            token_weights=self.objective.token_weights,
            loss_fn=self._value_losses,
            epochs=self.epochs,
            num_mini_batches=self.num_mini_batches,
        )
        return self.objective.report(metrics)

    def _value_losses(self, scores: TokenScores, columns: Mapping[str, Tensor], mask: Tensor) -> TokenLosses:
        return self.objective.token_losses(
            scores.log_probs,
            old_values=columns.get("old_values", scores.log_probs.detach()),
            returns=columns["returns"],
            mask=mask,
        )

    def scores(self, batch: DataProto) -> DataProto:
        """Return column ``scores``: the value after each row's last token."""
        self._check_open()
        rows = self._scored_at_ends(self._read(batch, loss_mask=False))
        return DataProto.from_dict(tensors={"scores": self._row_scores(rows)})

    def compare(self, batch: DataProto) -> dict[str, float]:
        """Make one optimizer step on pairs: rows chosen, rejected, chosen, rejected, ... of all ranks together.

        Columns: ``input_ids``; optionally ``margins`` [B], of which those of the chosen rows count. The loss of a pair
        (:func:`~asyncrl.algorithms.bradley_terry_losses`) follows from two scores, so a first pass computes the scores
        of all rows, and a second one their gradient: the two rows of a pair may lie in different micro-batches and on
        different ranks. A rank may hold no rows, or half a pair.

        Metrics: ``loss`` (mean over pairs), ``accuracy`` (share of pairs whose chosen row has the higher score, ties
        half), ``distance`` (mean of chosen minus rejected), ``grad_norm``, ``lr``, ``pairs``.
        """
        self._check_open()
        rows = self._scored_at_ends(self._read(batch, loss_mask=False, optional=("margins",)))
        everywhere = self._ranks.gather([len(rows), "margins" in rows.columns])
        if len({given for _, given in everywhere}) > 1:
            raise InvalidDataError("some ranks have the column margins, others do not")
        counts = [count for count, _ in everywhere]
        total = sum(counts)
        if total == 0 or total % 2:
            raise InvalidDataError(f"{total} rows are not pairs: rows must be chosen, rejected, chosen, rejected, ...")
        row_scores = self._ranks.gather_column(self._row_scores(rows), counts).requires_grad_()
        margins = None
        if "margins" in rows.columns:
            margins = self._ranks.gather_column(rows.columns["margins"][rows.mask], counts)[0::2]
        with torch.enable_grad():
            losses = bradley_terry_losses(
                row_scores[0::2],
                row_scores[1::2],
                margins=margins,
                center_rewards_coefficient=self.center_rewards_coefficient,
            )
            (slopes,) = torch.autograd.grad(losses.loss.mean(), row_scores)
        first = sum(counts[: self._ranks.data_rank])
        slope = torch.zeros(len(rows.mask))
        slope[rows.mask] = slopes[first : first + len(rows)].float()
        rows.columns = {"slope": slope}

        def loss_fn(scores: TokenScores, columns: Mapping[str, Tensor], mask: Tensor) -> TokenLosses:
            return TokenLosses(loss=torch.where(mask, columns["slope"] * scores.log_probs, 0.0))

        metrics = self._run_mini_batches(
            self._partition(rows),
            token_weights=lambda lengths, _tokens, _rows: torch.ones(len(lengths)),
            loss_fn=loss_fn,
        )
        return {
            "loss": float(losses.loss.detach().mean()),
            "accuracy": float(losses.correct.mean()),
            "distance": float(losses.distance.mean()),
            "grad_norm": metrics["grad_norm"],
            "lr": metrics["lr"],
            "pairs": float(total // 2),
        }

    def _row_scores(self, rows: PackedRows) -> Tensor:
        scores, _ = self._score(self._partition(rows), extras="none")
        return scores[rows.mask]

    def _scored_at_ends(self, rows: PackedRows) -> PackedRows:
        """Return rows with their last token alone to score, by the state behind it, which depends on the whole row."""
        lengths = torch.tensor(rows.lengths, dtype=torch.int64)

        def check() -> None:
            if empty := (lengths == 0).nonzero().flatten().tolist():
                raise InvalidDataError(f"row {empty[0]} has no token to score")

        self._ranks.call_together(check, doing="reading the batch", catch=InvalidDataError)
        mask = torch.zeros_like(rows.mask)
        mask[torch.cumsum(lengths, 0) - 1] = True
        return PackedRows(input_ids=rows.input_ids, mask=mask, columns=rows.columns, lengths=lengths, back=0)
