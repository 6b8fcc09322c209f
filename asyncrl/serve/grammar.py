"""What a text must look like, as a grammar: JSON of a schema, calls of tools, or either.

The grammars are llguidance's dialect of Lark, which engines follow token by token
(:attr:`asyncrl.interfaces.SamplingParams.grammar`). JSON is written in one line, as ``json.dumps`` does: a model that
may write white space anywhere can go on doing so for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.errors import EngineError
from asyncrl.interfaces import Tool
from asyncrl.serve.choice import Choice, ReadTurn
from asyncrl.serve.model_text import ModelText

__all__ = ["FREE", "JSON_OBJECT", "Form", "calls_grammar", "chat_form", "json_grammar"]

JSON_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of every JSON object. Any: a JSON schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a turn must be.

    Attributes:
        grammar: that its text keeps to; empty for none.
        json: whether it may be JSON.
        calls: whether it may be calls of tools.
    """

    grammar: str = ""
    json: bool = False
    calls: bool = False

    def check(self, choice: Choice, read: ReadTurn) -> None:
        """Whether a finished turn has this form. One that was cut short is not asked for it.

        Raises:
            EngineError: it has not: the engine does not do what it was asked for.
        """
        if not self.grammar or choice.finish_reason != "stop" or choice.stop_string is not None:
            return
        if not (self.calls and read.calls) and not (self.json and _is_json(read.message["content"])):
            raise EngineError("the engine took a grammar and did not keep to it")


FREE = Form()
"""Any text."""

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def chat_form(
    text: ModelText,
    *,
    tools: Sequence[Tool],
    demanded: Sequence[Tool],
    several: bool,
    schema: Mapping[str, Any] | None,
) -> Form:
    """The form of a turn in a chat.

    Args:
        text: of the model: how it spells calls.
        tools: that may be called.
        demanded: of which one must be called; empty if none must.
        several: whether more than one call may be made.
        schema: of which the turn must be JSON where it is no call; None for any text. Any: a JSON schema.
    """
    opening, closing = text.terminal("<tool_call>"), text.terminal("</tool_call>")
    if demanded:
        return Form(grammar=calls_grammar(demanded, several=several, opening=opening, closing=closing), calls=True)
    if schema is None:
        return FREE
    if tools:
        either = calls_grammar(tools, several=several, opening=opening, closing=closing, otherwise=schema)
        return Form(grammar=either, json=True, calls=True)
    return Form(grammar=json_grammar(schema), json=True)


def json_grammar(schema: Mapping[str, Any]) -> str:
    """A text that is JSON of ``schema``. Any: a JSON schema."""
    return f"start: {_json(schema)}\n"


def calls_grammar(
    tools: Sequence[Tool],
    *,
    several: bool,
    opening: str = '"<tool_call>"',
    closing: str = '"</tool_call>"',
    otherwise: Mapping[str, Any] | None = None,
) -> str:
    """A text that is calls of ``tools``, as :class:`asyncrl.agents.chat.ChatRenderer` reads them.

    Args:
        tools: that may be called; at least one.
        several: any number of calls but none, one after the other; else exactly one.
        opening: terminal that begins a call: a quoted string, or the bare name of a special token.
        closing: likewise, that ends it.
        otherwise: a schema of which the text may be JSON instead of calls.
    """
    rules = [
        f"start: calls | {_json(otherwise)}" if otherwise is not None else "start: calls",
        'calls: call ("\\n" call)*' if several else "calls: call",
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
    ]
    for number, tool in enumerate(tools):
        head = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
        rules.append(f'call_{number}: {opening} {json.dumps(head)} arguments_{number} "}}\\n" {closing}')
        rules.append(f"arguments_{number}: {_json({**tool.parameters, 'type': 'object'})}")
    return "\n".join([*rules, ""])


def _json(schema: Mapping[str, Any]) -> str:
    """Any: a JSON schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _ONE_LINE})}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
