"""Text of the served model: its tokenizer and chat template, streams of text, and the choices of an answer."""

from __future__ import annotations

import copy
import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from msgspec.structs import replace

from asyncrl.errors import ConfigError, EngineError
from asyncrl.interfaces import FinishReason, Generation, GenerationChunk, Message, SamplingParams, Tool, TopLogProbs
from asyncrl.model_folder import rotary_change
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.tool_calls import Notation
from asyncrl.serve.errors import context_length_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_ERRORS = (TemplateError, ConfigError, TypeError, ValueError, LookupError, AttributeError)
"""What templates raise on conversations, and shapes of tools, that they do not support."""


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter that byte-level tokenizers (GPT-2's and its descendants) write bytes with.

    Printable bytes of Latin-1 are themselves; the others follow from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_UNFINISHED = "\ufffd"
_MOST_WAITS = 64
"""Chunks that may end within a character in a row. No text needs so many; bytes that are none would be decoded again
and again, in time that grows with their square."""
_BYTES = _byte_letters()
_BLANK = "\u0120"
"""The letter of the space, which every byte-level vocabulary has."""


_ODD_TEXT = "A  b\n\n\tc e\u0301 \u212b \ue000\u4e00  "
"""Text that a tokenizer changes if it leaves anything out: blanks, case, forms of a character, unknown characters."""
_COMPOSED = 4
"""Normalization form C makes less than so many bytes one (U+1FBE U+0308 U+0301, 7 bytes, are U+0390, 2 bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderingReport:
    """How token-exact chats are with this model's template.

    Attributes:
        chat: whether the model has a usable template.
        incremental: whether a later turn is rendered from the new messages alone; else from the whole conversation,
            which gives the same ids in time that grows with its length.
        roles: that the template writes, beside the user's and the assistant's.
        tools: whether the template declares tools itself.
        tool_calls: whether it writes calls of earlier turns itself.
        thinking: whether it knows reasoning apart from the answer.
        drift: when a captured conversation can differ from one rendered from its messages in one piece.
    """

    chat: bool
    incremental: bool
    roles: tuple[str, ...]
    tools: bool
    tool_calls: bool
    thinking: bool
    drift: str


class ModelText:
    """Converts between text and tokens of one model; its ``special_ids`` are tokens that are no text.

    Without a usable chat template (``chat_problem`` has the reason) only plain completions are served.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, renderer: ChatRenderer | None = None) -> None:
        self._tokenizer = tokenizer
        self.special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        self._special_tokens = frozenset(
            each.content for each in tokenizer.added_tokens_decoder.values() if each.special
        )
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)
        vocabulary = tokenizer.get_vocab()
        self._by_bytes = _BLANK in vocabulary
        self._spellings: dict[int, str] = {}
        self._bytes: dict[int, list[int]] = {}
        self.chat_problem = ""
        self._renderer = renderer
        try:
            self._renderer = renderer or ChatRenderer(tokenizer)
        except ConfigError as error:
            self.chat_problem = str(error)
        self._short_history = self._renderer is not None and _short_history_suffices(self._renderer)
        self._check: Callable[[str], object] | None = None
        self._token_bytes = self._longest_token(vocabulary)

    def _longest_token(self, vocabulary: Iterable[str]) -> int | None:
        """Return the most bytes of a text that become one token; None if the tokenizer may leave out any number."""
        added = self._tokenizer.added_tokens_decoder.values()
        shown = self.decode(self.encode(_ODD_TEXT, add_special_tokens=False), skip_special_tokens=False)
        forms = {unicodedata.normalize("NFC", _ODD_TEXT): _COMPOSED, _ODD_TEXT: 1}
        if shown not in forms or any(each.lstrip or each.rstrip for each in added):
            return None
        pieces: Iterable[str | bytes] = vocabulary if self._by_bytes else map(str.encode, vocabulary)
        return forms[shown] * max(map(len, chain(pieces, (each.content.encode() for each in added))))

    @classmethod
    def load(cls, model_path: str) -> ModelText:
        """Load the tokenizer of a model folder or hub id; a ConfigError without one. Blocks."""
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{model_path} has no tokenizer: {error}", path="model", remedy="check MODEL") from error
        return cls(tokenizer)

    @property
    def report(self) -> RenderingReport:
        return RenderingReport(
            chat=self._renderer is not None,
            incremental=self._short_history,
            roles=() if self._renderer is None else self._renderer.further_roles(),
            tools=self.template_mentions("tools"),
            tool_calls=self.template_mentions("tool_calls"),
            thinking=any(self.template_mentions(word) for word in ("enable_thinking", "reasoning_content", "<think>")),
            drift="sampled ids are kept as sampled: a turn that was spelt with other tokens than the tokenizer's, or "
            "earlier turns that the template would rewrite, differ from one rendering of all messages"
            if self._renderer is not None
            else "",
        )

    def template_mentions(self, word: str) -> bool:
        return word in str(self._tokenizer.chat_template or "")

    @property
    def renderer(self) -> ChatRenderer:
        """The renderer of chats; a ConfigError if the model's template is not usable."""
        if self._renderer is None:
            raise ConfigError(self.chat_problem, path="model")
        return self._renderer

    def with_options(self, options: Mapping[str, Any]) -> ModelText:
        """Return the text of the same model with further variables of its chat template; as ChatRenderer."""
        other = copy.copy(self)
        other._renderer = self.renderer.with_options(options)  # noqa: SLF001 - its own copy
        other._short_history = False  # noqa: SLF001
        return other

    def within(self, context_tokens: int | None) -> ModelText:
        """Return the text of the same model for prompts: what cannot fit into the context is not encoded.

        That is a text with too many bytes, whatever its tokens are: an API error.
        """
        longest = self._token_bytes
        if context_tokens is None or longest is None:
            return self

        def check(text: str) -> None:
            fewest = -(-len(text.encode("utf-8", "surrogatepass")) // longest)
            if fewest >= context_tokens:
                raise context_length_error(fewest, context_tokens, at_least=True)

        other = copy.copy(self)
        other._check = check  # noqa: SLF001 - its own copy
        other._renderer = self._renderer and self._renderer.checked(check)  # noqa: SLF001
        return other

    @property
    def vocabulary(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a plain prompt, with what the tokenizer puts before a text."""
        if self._check is not None:
            self._check(text)
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def spelling(self, token_id: int) -> str:
        """Return one token as text; part of a character gives U+FFFD."""
        text = self._spellings.get(token_id)
        if text is None:
            text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
            self._spellings[token_id] = text
        return text

    def piece(self, token_id: int) -> str:
        """Return one token as the vocabulary has it, which is not always readable; empty if it has none."""
        return str(self._tokenizer.convert_ids_to_tokens(token_id) or "")

    def spelled_bytes(self, token_id: int) -> list[int]:
        """Return the bytes of one token, also of part of a character where the tokenizer works on bytes.

        The list is the same each time, and not to be changed.
        """
        spelled = self._bytes.get(token_id)
        if spelled is None:
            spelled = self._bytes[token_id] = self._bytes_of(token_id)
        return spelled

    def _bytes_of(self, token_id: int) -> list[int]:
        piece = self.piece(token_id)
        if self._by_bytes and token_id not in self._added_ids and all(char in _BYTES for char in piece):
            return [_BYTES[char] for char in piece]
        if len(piece) == 6 and piece.startswith("<0x"):  # how SentencePiece writes a byte that is no character
            return [int(piece[3:5], 16)]
        return list(self.spelling(token_id).encode())

    def terminal(self, text: str) -> str:
        """Return ``text`` as a terminal of a grammar: a quoted string, or its bare name if it is a special token."""
        return text if text in self._special_tokens else json.dumps(text)

    def extend(
        self,
        history: Sequence[Message],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Like :meth:`ChatRenderer.extend`, in time that grows with ``new_messages`` alone where possible."""
        used = _shortened(history) if self._short_history else history
        return self.renderer.extend(used, sampled_ids, new_messages, tools, generation_prompt=generation_prompt)


def context_tokens(model_path: str, *, engine: str) -> int | None:
    """Return the context length of a model folder or hub id on an engine; None if its configuration has none. Blocks.

    That of the embedded engine ends where the model's rotary positions change.
    """
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(model_path)
    except (OSError, ValueError):
        return None
    own = getattr(whole.get_text_config(decoder=True), "max_position_embeddings", None)
    change = rotary_change(whole) if engine == "transformers" else None
    return own if change is None else min(own or change.tokens, change.tokens)


def _shortened(history: Sequence[Message]) -> list[Message]:
    """Return the messages that stand for a whole history: its system message and its last question."""
    system = [message for message in history[:1] if message["role"] == "system"]
    question = next((message for message in reversed(history) if message["role"] == "user"), None)
    return system + ([question] if question is not None else [])


def _short_history_suffices(renderer: ChatRenderer) -> bool:
    """Return whether the template renders new messages the same when only a part of the history is given."""
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
                except TEMPLATE_ERRORS:  # this template never takes such a conversation
                    continue
                try:
                    if renderer.extend(_shortened(history), [], new_messages, tools) != whole:
                        return False
                except TEMPLATE_ERRORS:
                    return False
    return True


def last_tokens(token_ids: tuple[int, ...], count: int | None) -> tuple[int, ...]:
    """Return the last ``count`` ids; all of them if it is None."""
    return token_ids if count is None else token_ids[-count:]


def log_prob_entries(parts: Iterable[Generation | GenerationChunk | Choice]) -> int:
    """Return the number of log-probs that an answer of these choices may have."""
    return sum(
        len(each.token_ids)
        + len(each.prompt_log_probs)
        + sum(map(len, each.top_log_probs))
        + sum(map(len, each.prompt_top_log_probs))
        for each in parts
    )


def prompt_only(part: Generation | GenerationChunk) -> Generation | GenerationChunk:
    """Return ``part`` without its tokens: engines sample one after a prompt that only its log-probs are wanted of."""
    reason: FinishReason | None = "length" if part.finish_reason == "stop" else part.finish_reason
    none = {"token_ids": (), "log_probs": (), "weight_versions": (), "top_log_probs": ()}
    return replace(part, finish_reason=reason, **none)


class GeneratedTokens:
    def __init__(self) -> None:
        # Many generations are one chunk: its tuples are kept as they are, and copied when a second one arrives.
        self.token_ids: tuple[int, ...] | list[int] = ()
        self.log_probs: tuple[float, ...] | list[float] = ()
        self.versions: tuple[int, ...] | list[int] = ()
        self.top_log_probs: list[TopLogProbs] = []
        self.prompt_log_probs: tuple[float, ...] = ()
        self.prompt_top_log_probs: tuple[TopLogProbs, ...] = ()
        self.finish_reason: FinishReason | None = None

    def add(self, chunk: GenerationChunk | Generation) -> None:
        self.finish_reason = chunk.finish_reason
        if chunk.top_log_probs:
            self.top_log_probs += chunk.top_log_probs
        if chunk.prompt_log_probs:
            self.prompt_log_probs, self.prompt_top_log_probs = chunk.prompt_log_probs, chunk.prompt_top_log_probs
        if not self.token_ids:
            self.token_ids, self.log_probs = chunk.token_ids, chunk.log_probs
            self.versions = chunk.weight_versions
            return
        if isinstance(self.token_ids, tuple):
            self.token_ids, self.log_probs = list(self.token_ids), list(self.log_probs)
            self.versions = list(self.versions)
        assert isinstance(self.log_probs, list)
        assert isinstance(self.versions, list)
        self.token_ids += chunk.token_ids
        self.log_probs += chunk.log_probs
        self.versions += chunk.weight_versions

    def generation(self) -> Generation:
        """Return the whole choice; an EngineError if its last chunk had no finish reason."""
        if self.finish_reason is None:
            raise EngineError("a generation ended without a finish reason")
        return Generation(
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            weight_versions=tuple(self.versions),
            finish_reason=self.finish_reason,
            top_log_probs=tuple(self.top_log_probs),
            prompt_log_probs=self.prompt_log_probs,
            prompt_top_log_probs=self.prompt_top_log_probs,
        )


class TextStream:
    """The text of a generation, piece by piece; the pieces joined are the text of all of its tokens.

    A piece is kept back while it may be part of a character, the beginning of a ``stop`` string, or the beginning of
    ``hold`` (empty for none): the text from there on is not returned but kept in :attr:`held`, to be parsed as a whole
    at the end; so is a text that begins with ``hold_first`` after white space. The stop string that is found after the
    first ``passed`` tokens, :attr:`stopped`, ends the text: before it, or after it with ``include_stop``.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stop: Sequence[str] = (),
        hold: str = "",
        hold_first: str = "",
        include_stop: bool = False,
        passed: int = 0,
    ) -> None:
        self._decode = decode
        self._stop: tuple[str, ...] = () if passed else tuple(stop)
        self._later = tuple(stop)
        self._passed = passed
        self._hold = hold
        self._hold_first = hold_first  # empty when the text has begun
        self._include_stop = include_stop
        self._ids: list[int] = []
        self._shown = 0  # ids whose text was taken into `_pending`
        self._begin = 0  # first id of the window that is decoded: some context for the tokenizer
        self._waits = 0  # chunks that ended within a character, one after another
        self._pending = ""
        self._holding = False
        self.held = ""
        self.stopped: str | None = None

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is certain now."""
        if self.stopped is not None:
            return ""
        if self._passed and (begin := self._passed - len(self._ids)) < len(token_ids):
            self._passed = 0
            first = self.feed(token_ids[:begin])
            self._stop = self._later
            return first + self.feed(token_ids[begin:])
        self._ids += token_ids
        piece = self._decoded()
        if (not piece or piece.endswith(_UNFINISHED)) and self._waits < _MOST_WAITS:
            self._waits += 1
            return ""
        self._begin, self._shown, self._waits = self._shown, len(self._ids), 0
        return self._take(piece, last=False)

    def finish(self) -> str:
        """Return the rest of the text: no token follows."""
        if self.stopped is not None:
            return ""
        piece = self._decoded() if self._shown < len(self._ids) else ""
        self._begin = self._shown = len(self._ids)
        return self._take(piece, last=True)

    def _decoded(self) -> str:
        before = self._decode(self._ids[self._begin : self._shown])
        return self._decode(self._ids[self._begin :])[len(before) :]

    def _take(self, text: str, *, last: bool) -> str:
        self._pending += text
        found = [(at, stop) for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found)
            self._pending, last = self._pending[: at + (len(self.stopped) if self._include_stop else 0)], True
        if self._hold_first and (begins := self._pending.lstrip()):
            self._hold, self._hold_first = self._hold_first if begins.startswith(self._hold_first) else self._hold, ""
        if self._holding:
            cut = 0
        elif self._hold and (cut := self._pending.find(self._hold)) >= 0:
            self._holding = True
        else:
            cut = len(self._pending) - (0 if last else self._uncertain())
        certain, self._pending = self._pending[:cut], self._pending[cut:]
        if self._holding and last:
            self.held, self._pending = self._pending, ""
        return certain

    def _uncertain(self) -> int:
        """Count the characters at the end that may be the beginning of a stop string or of ``hold``."""
        longest = 0
        for mark in (*self._stop, self._hold):
            for length in range(min(len(mark) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(mark[:length]):
                    longest = length
                    break
        return longest


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A finished turn as a message; ``tail`` is text that was kept back as a tool call and is none."""

    message: Message
    tail: str = ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Return the tool calls in OpenAI's schema, except that ``arguments`` is an object. Any: JSON."""
        return list(self.message.get("tool_calls") or ())


class Choice(GeneratedTokens):
    """One choice of an answer while it grows: its tokens and their text, with the tool calls that ``notation`` reads.

    Stop strings and stop tokens of ``sampling`` end the text; with ``include_stop`` they belong to it. ``special_ids``
    are no text at the end of a choice that stopped, unless that and ``show_special`` are set.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        sampling: SamplingParams,
        *,
        special_ids: frozenset[int],
        notation: Notation | None = None,
        include_stop: bool = False,
        show_special: bool = False,
    ) -> None:
        super().__init__()
        self._no_text = special_ids.union(() if include_stop else sampling.stop_token_ids)
        if include_stop and show_special:
            self._no_text = frozenset()
        self._last: tuple[int, ...] = ()  # the last token, while it may be one that is no text
        self._stream = TextStream(
            decode,
            stop=sampling.stop,
            hold=notation.mark if notation is not None else "",
            hold_first=notation.first if notation is not None else "",
            include_stop=include_stop,
            passed=sampling.min_tokens,
        )
        self._pieces: list[str] = []

    def feed(self, chunk: GenerationChunk | Generation) -> str:
        """Add a chunk, or a whole generation; return the text that is certain now, all of it with the last chunk."""
        self.add(chunk)
        shown, self._last = (*self._last, *chunk.token_ids), ()
        if chunk.finish_reason in (None, "stop") and shown and shown[-1] in self._no_text:
            shown, self._last = shown[:-1], shown[-1:]
        text = self._stream.feed(shown) if shown else ""
        if chunk.finish_reason is not None:
            text += self._stream.finish()
        if text:
            self._pieces.append(text)
        return text

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stop_string(self) -> str | None:
        return self._stream.stopped

    def parse(self, renderer: ChatRenderer, tools: Sequence[Tool] = (), *, call_prefix: str) -> ParsedTurn:
        """Return the finished choice as a message. Calls of ``tools`` get the ids ``{call_prefix}_{number}``."""
        message: Message = {"role": "assistant", "content": self.text}
        held = self._stream.held
        if not held:
            return ParsedTurn(message=message)
        calls = renderer.parse(self.token_ids, tools).get("tool_calls") or []
        if not calls:
            message["content"] += held
            return ParsedTurn(message=message, tail=held)
        for number, call in enumerate(calls):
            call["id"] = f"{call_prefix}_{number}"
        message["tool_calls"] = calls
        return ParsedTurn(message=message)
