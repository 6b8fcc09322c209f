"""Rendering messages as tokens and parsing tokens as messages, without drift between turns.

A conversation of several turns must reach the trainer as the tokens that were really sampled. Rendering the whole
conversation again for each turn breaks that: a text has many tokenizations and templates rewrite history. So a
:class:`ChatRenderer` renders a prompt once and afterwards only *appends*: the sampled ids stay as they are, and the
environment's answer is rendered as the difference between two renderings of the template.

    ids = prompt(messages)
    ids += sampled                                   # as the engine returned them
    ids += extend(messages, sampled, answers)        # close the turn if need be, the answers, the next turn's opening
    ids += sampled ...

Where it can differ from rendering the whole conversation from its messages:

* inside an assistant turn, if the model spells a text with other tokens than the tokenizer would, or a tool call with
  other spaces than the template: a later turn sees the sampled ids;
* templates that rewrite *earlier* turns (dropping old reasoning): here nothing is rewritten;
* templates without tool calls (SmolLM2's): calls in *given* messages are written as text, the way they are parsed;
  tools are not declared, so the environment's instructions have to name them;
* ids of tool calls with Mistral's templates, which take nine letters and digits: the last nine, after zeros;
* templates that render an answer differently depending on the *content* of the assistant's turn (one that checks tool
  call ids against it): the turn is rendered with a placeholder as its content.

Text of environments is encoded like the template's own: most tokenizers read special tokens of the template in it as
such. Remove them from untrusted text.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError, InvalidDataError
from asyncrl.interfaces import Message, Tool
from asyncrl.rollout.tool_calls import NOTATIONS, PROBE, PROBE_TURN, Hermes, Notation, notation_of
from asyncrl.storage import local_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_PLACEHOLDER = "\u2063sampled\u2063turn\u2063"
"""Stands for the assistant's turn in a rendering; never tokenized, and not found in ordinary text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedConversation:
    """A whole conversation as tokens; ``loss_mask`` is True on the assistant's own, its end-of-turn included."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


class ChatRenderer:
    """Renders and parses chats with a tokenizer's template.

    Args:
        tokenizer: with a chat template whose assistant turns end with one special token (ChatML and its kin, Llama 3,
            the scratch model's).
        chat_template_kwargs: further variables of the template (``{"enable_thinking": False}``).
        tool_call_parser: name of the notation in which the model writes tool calls
            (:mod:`asyncrl.rollout.tool_calls`); ``auto`` for that of the template, or Hermes's.

    Raises:
        ConfigError: no template, its assistant turns do not end with a special token, or there is no such notation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_call_parser: str = "auto",
    ) -> None:
        if tool_call_parser not in ("auto", *NOTATIONS):
            raise ConfigError(
                f"model.tool_call_parser = {tool_call_parser!r} is no notation of tool calls",
                path="model.tool_call_parser",
                remedy=f"use one of auto, {', '.join(NOTATIONS)}",
            )
        self._tokenizer = tokenizer
        self._options = dict(chat_template_kwargs or {})
        self._check: Callable[[str], object] | None = None
        self._notation = Hermes.name
        self._knows_calls = "tool_calls" in str(tokenizer.chat_template)
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template", path="model", remedy="use an instruct model")
        closing = self._after_turn([{"role": "user", "content": "?"}], [], generation_prompt=False)
        ids = self.encode(closing)
        if not ids or ids[0] not in tokenizer.all_special_ids:
            raise ConfigError(
                f"an assistant's turn ends with {closing!r} in this chat template, which begins with no special token",
                path="model",
                remedy="use a model whose template closes turns with a special token (ChatML, Llama 3)",
            )
        self._end_of_turn_id = ids[0]
        self._written_in = self._notation_of_template() if self._knows_calls else ""
        self._notation = (self._written_in or Hermes.name) if tool_call_parser == "auto" else tool_call_parser

    @property
    def notation(self) -> Notation:
        """How the model writes tool calls."""
        return NOTATIONS[self._notation]

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def end_of_turn_id(self) -> int:
        """The token that closes an assistant's turn: give it to the engine as a stop token."""
        return self._end_of_turn_id

    def with_options(self, options: Mapping[str, Any]) -> ChatRenderer:
        """Return a renderer with further variables of the template.

        Raises:
            InvalidDataError: one of them is an argument of the tokenizer's method, and no variable.
        """
        taken = options.keys() & inspect.signature(self._tokenizer.apply_chat_template).parameters.keys()
        if taken:
            raise InvalidDataError(f"{', '.join(sorted(taken))} is no variable of a chat template")
        other = copy.copy(self)
        other._options = {**self._options, **options}  # noqa: SLF001 - its own copy
        return other

    def checked(self, check: Callable[[str], object]) -> ChatRenderer:
        """Return a renderer that calls ``check``, which may raise, with each text before it is encoded."""
        other = copy.copy(self)
        other._check = check  # noqa: SLF001 - its own copy
        return other

    def further_roles(self) -> tuple[str, ...]:
        """Return which of ``system``, ``developer`` and ``tool`` the template writes."""

        def writes(role: str) -> bool:
            said: Message = {"role": role, "content": _PLACEHOLDER, "tool_call_id": "call_0", "name": "f"}
            asked: list[Message] = [{"role": "user", "content": "?"}]
            before = [*asked, {"role": "assistant", "content": "!"}] if role == "tool" else []
            return _PLACEHOLDER in self._tried([*before, said, *asked], [])

        return tuple(role for role in ("system", "developer", "tool") if writes(role))

    def declares_tools(self) -> bool:
        """Return whether the template shows the model which tools there are."""
        return PROBE.name in self._tried([{"role": "user", "content": "?"}], [PROBE])

    def reads_calls(self) -> bool:
        """Return whether calls are read in the notation that the template writes them in, if it writes any."""
        return self._written_in in ("", self._notation)

    def _notation_of_template(self) -> str | None:
        """Return the notation of what the template writes; empty if it refuses a call, None if it is no known one."""
        asked: Message = {"role": "user", "content": "?"}
        whole = self._tried([asked, PROBE_TURN], [PROBE])
        if not whole:
            return ""
        plain = self._tried([asked, {"role": "assistant", "content": _PLACEHOLDER}], [PROBE])
        opening = os.path.commonprefix([whole, plain.partition(_PLACEHOLDER)[0]])  # noqa: RUF071  of texts
        said = whole.removeprefix(opening)
        written, ended, _ = said.rpartition(self.decode([self._end_of_turn_id]))
        return notation_of(written if ended else said)

    def _tried(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Return what the template makes of messages; nothing, if it refuses them."""
        try:
            return self._render(messages, tools, generation_prompt=False)
        except Exception:  # noqa: BLE001 - a template is a program, which refuses messages as it likes
            return ""

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation_prompt: bool = True
    ) -> list[int]:
        """Return the tokens of ``messages`` and, with ``generation_prompt``, of the assistant's opening."""
        return self.encode(self._render(messages, tools, generation_prompt=generation_prompt))

    def extend(
        self,
        history: Sequence[Message],
        sampled_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Return the tokens to append after ``sampled_ids``: those of ``new_messages``, and the next assistant opening.

        ``history`` are the messages before the sampled turn. If ``sampled_ids`` lack the end-of-turn token (they were
        cut), it comes first. Without ``generation_prompt`` there is no opening.
        """
        appended = self.encode(self._after_turn(history, new_messages, tools, generation_prompt=generation_prompt))
        ended = bool(sampled_ids) and sampled_ids[-1] == self._end_of_turn_id
        return appended[1:] if ended else appended

    def parse(self, token_ids: Sequence[int], tools: Sequence[Tool] = ()) -> Message:
        """Return the assistant's message in sampled tokens, where ``tools`` were declared.

        ``content`` is the text outside the calls. Each of ``tool_calls`` has an id, a name and ``arguments``, an object
        of JSON. A call that cannot be read leaves its reason in ``malformed``, for the environment to answer.
        """
        ended = bool(token_ids) and token_ids[-1] == self._end_of_turn_id
        text = self.decode(token_ids[:-1] if ended else token_ids)
        return self.notation.parse(text, tools)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, special tokens included."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def encode_conversation(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> EncodedConversation:
        """Return a given conversation (a demonstration) as the very tokens that prompting and extending would make.

        Raises:
            InvalidDataError: it has no assistant turn, or the template does not render one after its prompt.
        """
        ids: list[int] = []
        mask: list[bool] = []
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise InvalidDataError("a demonstration needs a turn of the assistant; this one has none")
        for number, turn in enumerate(turns):
            if number == 0:
                appended = self.prompt(messages[:turn], tools)
            else:
                before = turns[number - 1]
                appended = self.extend(messages[:before], ids, messages[before + 1 : turn], tools)
            said = self._turn_ids(messages[:turn], messages[turn], tools)
            ids += appended + said
            mask += [False] * len(appended) + [True] * len(said)
        return EncodedConversation(token_ids=tuple(ids), loss_mask=tuple(mask))

    def _turn_ids(self, history: Sequence[Message], message: Message, tools: Sequence[Tool]) -> list[int]:
        """Return the tokens of one given assistant turn after its opening, end-of-turn token included."""
        opening = self._render(history, tools, generation_prompt=True)
        whole = self._render([*history, message], tools, generation_prompt=False)
        if not whole.startswith(opening):
            raise InvalidDataError(
                "the chat template renders an assistant's turn differently from its opening for generation; "
                "demonstrations cannot be tokenized as they would be generated. Try other chat_template_kwargs"
            )
        ids = self.encode(whole[len(opening) :])
        last = len(ids) - 1 - ids[::-1].index(self._end_of_turn_id)
        return ids[: last + 1]

    def _after_turn(
        self,
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation_prompt: bool,
    ) -> str:
        """Return what the template writes after the content of an assistant's turn that follows ``history``."""
        turn = {"role": "assistant", "content": _PLACEHOLDER}
        before = map(self.notation.answered, history) if self._knows_calls else history
        text = self._render([*before, turn, *new_messages], tools, generation_prompt=generation_prompt)
        _, found, after = text.partition(_PLACEHOLDER)
        if not found:
            raise ConfigError("the chat template does not write the assistant's content", remedy="use another template")
        return after

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [self._for_template(message) for message in messages],
                tools=[each.schema() for each in tools] or None,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._options,
            )
        )

    def _for_template(self, message: Message) -> Message:
        """Return a message as the template takes it: where it knows no calls, with these as part of the content."""
        if self._knows_calls:
            return self.notation.for_template(message)
        if not message.get("tool_calls"):
            return message
        written = self.notation.write([call["function"] for call in message["tool_calls"]])
        return {"role": message["role"], "content": "\n".join(filter(None, [message.get("content"), written]))}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a part of a rendered conversation, with nothing put before it."""
        if self._check is not None:
            self._check(text)
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]


def load_renderer(
    model: str,
    *,
    chat_template: Path | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tool_call_parser: str = "auto",
) -> ChatRenderer:
    """Load the chat renderer of a model's folder, URL or name; ``chat_template`` replaces the model's own. Blocks.

    Raises:
        ConfigError: as :class:`ChatRenderer`; or the template's file cannot be read.
    """
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(local_model(model, weights=False))
    except Exception as error:  # what the files say may break anything in transformers
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the tokenizer of {model!r} cannot be loaded: {reason}", path="model.path", remedy="check its files"
        ) from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"model.chat_template = {str(chat_template)!r} cannot be read: {error}",
                path="model.chat_template",
                remedy="a file with a Jinja template",
            ) from error
    try:
        return ChatRenderer(tokenizer, chat_template_kwargs=chat_template_kwargs, tool_call_parser=tool_call_parser)
    except TemplateError as error:
        raise ConfigError(
            f"the chat template cannot be used: {error}", path="model.chat_template", remedy="correct it"
        ) from error
