"""One turn of a chat, whichever dialect asks for it: from checked messages to choices, written down in the session."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from asyncrl.interfaces import GenerationRequest, Message, SamplingParams, Tool
from asyncrl.serve.call import Call
from asyncrl.serve.choice import Choice, ReadTurn
from asyncrl.serve.failure import Refusal
from asyncrl.serve.grammar import FREE, Form
from asyncrl.serve.model_text import ModelText
from asyncrl.serve.sampling import check_grammar
from asyncrl.serve.sessions import Session, TurnPrompt

__all__ = ["ChatTurn", "rendered"]

_INLINE_CHARACTERS = 16_384
"""Longer conversations are rendered in a thread: this much takes about ten milliseconds."""


async def rendered(
    call: Call, messages: Sequence[Message], tools: Sequence[Tool], session: Session | None
) -> TurnPrompt:
    """The prompt of a turn, in ``session`` if it belongs to one.

    Raises:
        Refusal: there is too much of it, or the template does not take such a conversation.
    """
    from jinja2 import TemplateError

    limits = call.face.limits
    if len(messages) > limits.messages or len(tools) > limits.tools:
        raise Refusal(400, f"at most {limits.messages} messages and {limits.tools} tools are taken")
    text = call.face.chat_text()

    def render() -> TurnPrompt:
        return (session or Session("", "")).chat_prompt(messages, tools, text)

    try:
        if sum(len(message.get("content") or "") for message in messages) > _INLINE_CHARACTERS:
            return await asyncio.to_thread(render)
        return render()
    except (TemplateError, TypeError, KeyError) as error:  # the latter two on shapes they do not expect
        raise Refusal(400, f"the model's chat template refuses these messages: {error}") from error


class ChatTurn:
    """Made by :meth:`begin`.

    Attributes:
        prompt: its ids, and where they belong.
        requests: one per choice.
        choices: grow as chunks are fed to them.
    """

    def __init__(
        self,
        call: Call,
        text: ModelText,
        session: Session | None,
        prompt: TurnPrompt,
        requests: list[GenerationRequest],
        form: Form,
    ) -> None:
        self._call = call
        self._text = text
        self._session = session
        self._form = form
        self.prompt = prompt
        self.requests = requests
        self.choices: list[Choice] = []

    @classmethod
    async def begin(
        cls,
        call: Call,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling: SamplingParams,
        *,
        form: Form = FREE,
        choices: int = 1,
    ) -> ChatTurn:
        """Render the prompt and make ready.

        Args:
            call: the request.
            messages: of the conversation so far.
            tools: declared to the model; calls are read where there are some.
            sampling: how.
            form: that the turn must have.
            choices: turns to sample, side by side.

        Raises:
            Refusal: the template does not take such a conversation.
        """
        limits, text, session = call.face.limits, call.face.chat_text(), call.session()
        prompt = await rendered(call, messages, tools, session)
        sampling = dataclasses.replace(
            sampling,
            stop_token_ids=tuple(sorted({*sampling.stop_token_ids, text.renderer.end_of_turn_id})),
            grammar=check_grammar(limits, form.grammar),
        )
        requests = call.requests(prompt.token_ids, sampling, choices=choices)
        turn = cls(call, text, session, prompt, requests, form)
        turn.choices = [
            Choice(text.renderer.decode, special_ids=text.special_ids, stop=sampling.stop, tools=bool(tools))
            for _ in turn.requests
        ]
        return turn

    async def collect(self) -> None:
        """Generate all choices to their ends."""
        for choice, generation in zip(self.choices, await self._call.collect_all(self.requests), strict=True):
            choice.feed_all(generation)

    def read(self, number: int) -> ReadTurn:
        """The message of a finished choice, which the session remembers from now on. Once a choice.

        Raises:
            EngineError: it has not the form that was asked for.
        """
        choice = self.choices[number]
        turn = choice.read(self._text.renderer, call_prefix=f"call_{self._call.id}_{number}")
        self._form.check(choice, turn)
        if self._session is not None and choice.finish_reason != "abort" and choice.token_ids:
            self._call.face.sessions.add(self._session, self.prompt, choice.generation, turn.message)
        return turn

    @property
    def completion_tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)
