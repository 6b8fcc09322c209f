"""From a request to a row: what an engine can serve, checked before anything else is done."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import GenerationRequest
from engines.rollout.embedded.row import Row
from engines.rollout.embedded.stop_text import StopText

__all__ = ["RowIntake"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowIntake:
    """What a served model can take.

    Attributes:
        model_path: for messages.
        vocabulary: token ids are 0 to one less.
        context_tokens: most tokens of a row, prompt included.
        tokenizer: None if the model has none; only stop strings and grammars need it. Any: transformers' share no
            typed interface.
        stop_token_ids: that end every row.
    """

    model_path: str
    vocabulary: int
    context_tokens: int
    tokenizer: Any
    stop_token_ids: frozenset[int]

    @classmethod
    def of_model(cls, model_path: str, *, vocabulary: int, context_tokens: int) -> RowIntake:
        """For a folder or hub id, whose tokenizer and stop tokens are read here."""
        from transformers import AutoConfig, GenerationConfig

        from engines.rollout.embedded.loading import end_ids, load_tokenizer

        tokenizer = load_tokenizer(model_path)
        try:
            generation = GenerationConfig.from_pretrained(model_path)
        except OSError:  # it has none of its own
            generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model_path))
        stop = {*end_ids(generation.eos_token_id), *end_ids(getattr(tokenizer, "eos_token_id", None))}
        return cls(
            model_path=model_path,
            vocabulary=vocabulary,
            context_tokens=context_tokens,
            tokenizer=tokenizer,
            stop_token_ids=frozenset(stop),
        )

    def row_of(self, request: GenerationRequest, *, held: Container[str], seed: int) -> Row:
        """The row of a request.

        Args:
            request: as it came.
            held: ids of the requests that the engine holds.
            seed: of the row; 64 bits of it count.

        Raises:
            InvalidDataError: its id is held already, the prompt is empty, holds an id outside the vocabulary or leaves
                no room to generate, there is no tokenizer for stop strings or a grammar, or the likeliest tokens are
                asked for.
        """
        sampling, prompt = request.sampling, request.prompt_token_ids
        name = f"request {request.request_id!r}"
        if request.request_id in held:
            raise InvalidDataError(f"{name} is already being generated: ids are unique among the requests held")
        if not prompt:
            raise InvalidDataError(f"{name} has an empty prompt")
        if min(prompt) < 0 or max(prompt) >= self.vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < self.vocabulary)
            raise InvalidDataError(f"{name} holds token id {wrong}; the vocabulary is 0..{self.vocabulary - 1}")
        begun = len(prompt) - request.continued_tokens
        if begun >= self.context_tokens:
            raise InvalidDataError(
                f"{name} has a prompt of {len(prompt)} tokens, which leaves no room to generate in a context of "
                f"{self.context_tokens}"
            )
        for wish, value in {"stop strings": sampling.stop, "a grammar": sampling.grammar}.items():
            if value and self.tokenizer is None:
                raise InvalidDataError(f"{name} asks for {wish}, but {self.model_path} has no tokenizer")
        if sampling.top_log_probs:
            raise InvalidDataError(f"{name} asks for the likeliest tokens, which the sglang engine does not tell")
        return Row(
            request_id=request.request_id,
            tokens=list(prompt),
            prompt_length=begun,
            continued=request.continued_tokens,
            length_limit=min(begun + sampling.max_new_tokens, self.context_tokens),
            sampling=sampling,
            seed=seed & (2**64 - 1),
            stop_token_ids=self.stop_token_ids.union(sampling.stop_token_ids),
            stop_text=StopText(sampling.stop, decode=self._decode, prompt=prompt[:begun]) if sampling.stop else None,
        )

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
