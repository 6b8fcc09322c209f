"""One choice of an answer while it grows: its tokens, its text, and the message it is read as at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.agents.chat import ChatRenderer
from asyncrl.interfaces import FinishReason, Generation, GenerationChunk, Message, TopLogProbs
from asyncrl.serve.text_stream import TextStream

__all__ = ["Choice", "ReadTurn"]

_TOOL_CALL = "<tool_call>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTurn:
    """A finished turn as its reader sees it.

    Attributes:
        message: with ``content`` and, if there are any, ``tool_calls`` whose arguments are parsed.
        tail: text that was held back for a tool call and turned out to be none.
    """

    message: Message
    tail: str

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls, in OpenAI's form but for ``arguments``, which is an object."""
        return list(self.message.get("tool_calls") or ())


class Choice:
    """Takes the chunks of one generation.

    Args:
        decode: text of tokens.
        special_ids: tokens that are no text at the end of a choice that stopped.
        stop: strings that end the text.
        tools: whether tool calls are read.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        special_ids: frozenset[int],
        stop: Sequence[str] = (),
        tools: bool = False,
    ) -> None:
        self._special_ids = special_ids
        self._tools = tools
        self._stream = TextStream(decode, stop=stop, hold=_TOOL_CALL if tools else "")
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.top_log_probs: list[TopLogProbs] = []
        self.finish_reason: FinishReason | None = None

    def feed(self, chunk: GenerationChunk) -> str:
        """Take a chunk; returns the text that is certain now, all of it with the last chunk."""
        self.token_ids += chunk.token_ids
        self.log_probs += chunk.log_probs
        self.versions += chunk.weight_versions
        self.top_log_probs += chunk.top_log_probs
        self.finish_reason = chunk.finish_reason
        shown = chunk.token_ids
        if chunk.finish_reason == "stop" and shown and shown[-1] in self._special_ids:
            shown = shown[:-1]
        text = self._stream.feed(shown) if shown else ""
        if chunk.finish_reason is not None:
            text += self._stream.finish()
        if text:
            self._text.append(text)
        return text

    def feed_all(self, generation: Generation) -> str:
        """Take a whole generation; returns its text."""
        return self.feed(
            GenerationChunk(
                token_ids=generation.token_ids,
                log_probs=generation.log_probs,
                weight_versions=generation.weight_versions,
                finish_reason=generation.finish_reason,
                top_log_probs=generation.top_log_probs,
            )
        )

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stream.stopped

    @property
    def text(self) -> str:
        """What :meth:`feed` has given out."""
        return "".join(self._text)

    @property
    def generation(self) -> Generation:
        """The finished choice."""
        assert self.finish_reason is not None
        return Generation(
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            weight_versions=tuple(self.versions),
            finish_reason=self.finish_reason,
            top_log_probs=tuple(self.top_log_probs),
        )

    def read(self, renderer: ChatRenderer, *, call_prefix: str) -> ReadTurn:
        """The finished choice as a message. Calls get ids ``{call_prefix}_{number}``."""
        message: Message = {"role": "assistant", "content": self.text}
        held = self._stream.held
        if not held:
            return ReadTurn(message=message, tail="")
        calls = renderer.parse(self.token_ids).get("tool_calls") or []
        if not calls:
            message["content"] += held
            return ReadTurn(message=message, tail=held)
        for number, call in enumerate(calls):
            call["id"] = f"{call_prefix}_{number}"
            if not isinstance(call["function"]["arguments"], dict):
                call["function"]["arguments"] = {"value": call["function"]["arguments"]}
        message["tool_calls"] = calls
        return ReadTurn(message=message, tail="")
