"""The served model's text: its tokenizer, its chat template, and which of its tokens are no text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from asyncrl.agents.chat import ChatRenderer
from asyncrl.errors import ConfigError
from asyncrl.interfaces import Message, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ModelText", "RenderingReport", "context_tokens"]

_REFUSED = (TemplateError, ConfigError, TypeError, ValueError, KeyError)
"""What templates raise on conversations that they were not written for."""


def _byte_letters() -> dict[str, int]:
    """Bytes by the letters that byte-level tokenizers (GPT-2's and their kin) write them with.

    Printable bytes of Latin-1 are themselves; the others follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_letters()
_BLANK = "\u0120"
"""The letter of the space, which every byte-level vocabulary has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderingReport:
    """How token-exact chats are with this model's template.

    Attributes:
        chat: whether it has a usable template at all.
        incremental: a later turn is rendered from the new messages alone. Else from the whole conversation, which
            gives the same ids in time that grows with its length.
        tools: whether the template declares tools itself.
        drift: when a captured conversation can differ from one rendered from its messages in one piece.
    """

    chat: bool
    incremental: bool
    tools: bool
    drift: str


class ModelText:
    """Between text and tokens for one model.

    Args:
        tokenizer: of the served model. Without a usable chat template only plain completions are served.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self._special_tokens = frozenset(
            each.content for each in tokenizer.added_tokens_decoder.values() if each.special
        )
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        self._by_bytes = _BLANK in tokenizer.get_vocab()
        self._spellings: dict[int, str] = {}
        self.chat_problem = ""
        self._renderer: ChatRenderer | None = None
        try:
            self._renderer = ChatRenderer(tokenizer)
        except ConfigError as error:
            self.chat_problem = str(error)
        self._short_history = self._renderer is not None and _short_history_suffices(self._renderer)

    @classmethod
    def load(cls, model_path: str) -> ModelText:
        """Of a model folder or hub id. Blocks.

        Raises:
            ConfigError: there is no tokenizer.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{model_path} has no tokenizer: {error}", path="model", remedy="check MODEL") from error
        return cls(tokenizer)

    @property
    def report(self) -> RenderingReport:
        """What the deep health check tells."""
        return RenderingReport(
            chat=self._renderer is not None,
            incremental=self._short_history,
            tools="tools" in str(self._tokenizer.chat_template or ""),
            drift="sampled ids are kept as sampled: a turn that was spelt with other tokens than the tokenizer's, or "
            "earlier turns that the template would rewrite, differ from one rendering of all messages"
            if self._renderer is not None
            else "",
        )

    @property
    def renderer(self) -> ChatRenderer:
        """Of chats.

        Raises:
            ConfigError: the model's template is not usable; says why.
        """
        if self._renderer is None:
            raise ConfigError(self.chat_problem, path="model")
        return self._renderer

    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt, as the tokenizer begins a text."""
        return [int(token) for token in self._tokenizer.encode(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, special tokens left out."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def spelling(self, token_id: int) -> str:
        """One token as text; half a character gives U+FFFD."""
        text = self._spellings.get(token_id)
        if text is None:
            text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
            self._spellings[token_id] = text
        return text

    def spelled_bytes(self, token_id: int) -> list[int]:
        """The bytes of one token: of a part of a character, too, where the tokenizer works on bytes."""
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if self._by_bytes and token_id not in self._added_ids and all(char in _BYTES for char in piece):
            return [_BYTES[char] for char in piece]
        if len(piece) == 6 and piece.startswith("<0x"):  # how SentencePiece writes a byte that is no character
            return [int(piece[3:5], 16)]
        return list(self.spelling(token_id).encode())

    def terminal(self, text: str) -> str:
        """``text`` in a grammar: a quoted string, or the bare name of a special token that it is."""
        return text if text in self._special_tokens else json.dumps(text)

    def extend(
        self,
        history: Sequence[Message],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> list[int]:
        """As :meth:`ChatRenderer.extend`, in time that depends on ``new_messages`` where the template allows it."""
        used = _shortened(history) if self._short_history else history
        return self.renderer.extend(used, sampled_ids, new_messages, tools)


def context_tokens(model_path: str) -> int | None:
    """How many tokens a model folder or hub id says it reads at a time; None if it does not say. Blocks."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path).get_text_config(decoder=True)
    except (OSError, ValueError):
        return None
    return getattr(config, "max_position_embeddings", None)


def _shortened(history: Sequence[Message]) -> list[Message]:
    """What stands for a whole history: its system message, and its last question."""
    system = [message for message in history[:1] if message["role"] == "system"]
    question = next((message for message in reversed(history) if message["role"] == "user"), None)
    return system + ([question] if question is not None else [])


def _short_history_suffices(renderer: ChatRenderer) -> bool:
    """Whether the template writes the same after a turn when only part of what came before is given."""
    opening: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    middle: list[Message] = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    tool = Tool(name="t", description="d", parameters={"type": "object", "properties": {}})
    answers: list[list[Message]] = [
        [{"role": "user", "content": "x"}],
        [{"role": "tool", "name": "t", "tool_call_id": "1", "content": "y"}],
        [{"role": "tool", "name": "t", "content": "y"}, {"role": "tool", "name": "t", "content": "z"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "y"}],
    ]
    for history in (opening + middle * 3, opening[1:] + middle * 2, opening + middle):
        for new_messages in answers:
            for tools in ((), (tool,)):
                try:
                    whole = renderer.extend(history, [], new_messages, tools)
                except _REFUSED:  # a shape that this template never takes
                    continue
                try:
                    if renderer.extend(_shortened(history), [], new_messages, tools) != whole:
                        return False
                except _REFUSED:
                    return False
    return True
