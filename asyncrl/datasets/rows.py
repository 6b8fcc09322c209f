"""The rows of each kind of training, read from records with the columns that the field uses.

=============== ======================================================================================================
prompts (RL)    verl's: ``prompt`` (chat messages, or a text), ``data_source``, ``reward_model.ground_truth`` or
                ``ground_truth``, ``extra_info``, which gets all other columns, too
conversations   ``messages``; or ``prompt`` with ``response`` or ``completion``; or ShareGPT's ``conversations``;
                ``tools`` beside them
preferences     ``prompt``, ``chosen``, ``rejected``; or only the last two, as conversations with a common beginning
=============== ======================================================================================================

``columns`` maps these names to others, also to members of structs: ``columns = {prompt = "extra_info.question"}``.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import hashlib
import json
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import Message, Tool

PROMPT_COLUMNS = ("prompt", "data_source", "ground_truth", "extra_info")
PREFERENCE_COLUMNS = ("prompt", "chosen", "rejected", "margin")
CONVERSATION_COLUMNS = ("messages", "prompt", "response", "tools")

_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
_MEDIA = ("images", "videos", "audios")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One problem of reinforcement learning.

    Attributes:
        prompt: the conversation before the policy's turn.
        data_source: selects the reward rule.
        ground_truth: expected answer for the rule; JSON.
        extra_info: further data for the rule: the column of this name, and all columns without another use.
    """

    prompt: tuple[Message, ...]
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> bytes:
        """Hash of the prompt, to find equal prompts."""
        return hashlib.blake2b(json.dumps(self.prompt, sort_keys=True).encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation with at least one turn of the assistant, for supervised training."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two answers to one prompt, the better one first: for reward models and preference losses.

    Attributes:
        prompt: the conversation that both answer.
        chosen, rejected: the messages that follow it, each with at least one turn of the assistant.
        margin: the measured difference in quality, or None.
    """

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    margin: float | None = None


def read_prompt(record: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> PromptRow:
    """Read a prompt; ``columns`` maps :data:`PROMPT_COLUMNS` to other names.

    Columns that have no use here are members of ``extra_info``, as far as JSON can represent them.

    Raises:
        InvalidDataError: a column is missing or has a wrong value. Messages name neither file nor row.
    """
    given = columns or {}
    names = {"ground_truth": "reward_model.ground_truth", **given}
    for media in _MEDIA:
        found = record.get(media)
        if found is not None and not (isinstance(found, Sized) and len(found) == 0):
            raise InvalidDataError(f"has {media!r}, and only text is supported")

    def optional(column: str) -> Any:
        if column in given:  # one that the configuration names must be there
            return _lookup(record, given[column])
        value = _lookup(record, names.get(column, column), default=None)
        return record.get(column) if value is None else value

    extra, source = optional("extra_info"), optional("data_source")
    prompt = _as_messages(
        _lookup(record, names.get("prompt", "prompt")), role="user", column=names.get("prompt", "prompt")
    )
    if prompt[-1]["role"] == "assistant":
        raise InvalidDataError("its prompt ends with a turn of the assistant, and that turn is the policy's")
    return PromptRow(
        prompt=prompt,
        data_source=str(source or ""),
        ground_truth=_plain(optional("ground_truth"), column=names["ground_truth"]),
        extra_info={**_unused(record, names), **_table(extra, column="extra_info")},
    )


def _unused(record: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    used = {*PROMPT_COLUMNS, *_MEDIA, "reward_model", *names.values(), *(path.split(".")[0] for path in names.values())}
    unused: dict[str, Any] = {}
    for name, value in record.items():
        if name not in used:
            with contextlib.suppress(InvalidDataError):  # bytes, nan: a rule that names such a column is refused
                unused[str(name)] = _plain(value, column=str(name))
    return unused


def read_conversation(record: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> Conversation:
    """Read a conversation; ``columns`` maps :data:`CONVERSATION_COLUMNS` to other names.

    Raises:
        InvalidDataError: as :func:`read_prompt`; or the conversation has no turn of the assistant.
    """
    names = columns or {}
    if "messages" in names or (record.get("messages") is not None and "prompt" not in names):
        column = names.get("messages", "messages")
        messages = _messages(_lookup(record, column), column=column)
    elif record.get("conversations") is not None and "prompt" not in names:
        messages = _sharegpt(record["conversations"])
    elif "prompt" in names or record.get("prompt") is not None:
        column = names.get("prompt", "prompt")
        prompt = _as_messages(_lookup(record, column), role="user", column=column)
        answer = names.get("response") or next((name for name in ("response", "completion") if name in record), None)
        if answer is None:
            raise InvalidDataError(
                f'has "{column}" but neither "response" nor "completion" (columns: {_names(record)})'
            )
        messages = (*prompt, *_as_messages(_lookup(record, answer), role="assistant", column=answer))
    else:
        raise InvalidDataError(
            'needs "messages", a list of {"role": TEXT, "content": TEXT}, or "prompt" and "response" '
            f"(columns: {_names(record)})"
        )
    if not any(message["role"] == "assistant" for message in messages):
        raise InvalidDataError('needs "messages" with at least one turn of the assistant')
    return Conversation(messages=messages, tools=_tools(_lookup(record, names.get("tools", "tools"), default=None)))


def read_preference(record: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> Preference:
    """Read a preference; ``columns`` maps prompt, chosen, rejected and margin to other names.

    Raises:
        InvalidDataError: as :func:`read_prompt`; or the two answers are the same, or answer different prompts.
    """
    names = columns or {}
    sides = []
    for name in ("chosen", "rejected"):
        column = names.get(name, name)
        sides.append(_as_messages(_lookup(record, column), role="assistant", column=column))
    chosen, rejected = sides
    given = _lookup(record, names.get("prompt", "prompt"), default=None)
    if given is not None:
        prompt = _as_messages(given, role="user", column=names.get("prompt", "prompt"))
        if chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt:  # answers that repeat it
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        same = 0
        while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
            same += 1
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        if not prompt:
            raise InvalidDataError('has no "prompt", and "chosen" and "rejected" have no beginning in common')
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in answer):
            raise InvalidDataError(f'its "{name}" has no turn of the assistant after the prompt')
    if chosen == rejected:
        raise InvalidDataError('its "chosen" and "rejected" are the same: nothing is preferred')
    return Preference(prompt=prompt, chosen=chosen, rejected=rejected, margin=_margin(record, names))


def _margin(record: Mapping[str, Any], names: Mapping[str, str]) -> float | None:
    margin = _lookup(record, names.get("margin", "margin"), default=None)
    if margin is None:
        return None
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise InvalidDataError(f'its "margin" is {margin!r}, and must be a finite number')
    return float(margin)


def column_number(record: Mapping[str, Any], path: str, *, where: str) -> float:
    """Return the number in a column; the InvalidDataError for a row without one names the row as ``where``."""
    value = _lookup(record, path, default=None)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise InvalidDataError(f"{where}: {path!r} must be a number to sort rows by it; it is {_short(value)}")
    return float(value)


_MISSING = object()


def _lookup(record: Mapping[str, Any], path: str, *, default: Any = _MISSING) -> Any:
    """Return the value at a dotted path; structs on the way may be JSON text."""
    value: Any = record
    if path in record:  # a column with dots in its name
        return record[path]
    for key in path.split("."):
        if isinstance(value, str) and value[:1] == "{":
            value = _from_json(value, f"the text before .{key} in {path!r}")
        if not isinstance(value, Mapping) or key not in value:
            if default is not _MISSING:
                return default
            raise InvalidDataError(f"has no column {path!r} (columns: {_names(record)})")
        value = value[key]
    return value


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record)) or "none"


def _as_messages(value: Any, *, role: str, column: str) -> tuple[Message, ...]:
    """Read messages; a text is one message of ``role``."""
    return ({"role": role, "content": value},) if isinstance(value, str) else _messages(value, column=column)


def _messages(value: Any, *, column: str) -> tuple[Message, ...]:
    value = _as_list(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise InvalidDataError(
            f'"{column}" must be messages, a list of {{"role": TEXT, "content": TEXT}}; it is {_short(value)}'
        )
    return tuple(_message(each, column=column) for each in value)


def _message(value: Any, *, column: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise InvalidDataError(f'"{column}" has a message without a role: {_short(value)}')
    # In parquet every struct has the members of all others; those that are null were not written.
    message: Message = {
        str(name): _without_nulls(_plain(item, column=column)) for name, item in value.items() if item is not None
    }
    message.setdefault("content", None)
    message["content"] = _text(message["content"], column=column)
    if message["content"] is None and not message.get("tool_calls"):
        raise InvalidDataError(f'"{column}" has a message of {message["role"]!r} without content')
    return message


def _text(content: Any, *, column: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        kinds = {str(part.get("type")) for part in content}
        if kinds == {"text"}:
            return "".join(str(part.get("text") or "") for part in content)
        raise InvalidDataError(f'"{column}" has content of type {", ".join(sorted(kinds))}, and only text is supported')
    raise InvalidDataError(f'"{column}" has content that is not text: {_short(content)}')


def _sharegpt(value: Any) -> tuple[Message, ...]:
    turns = _as_list(value)
    messages = []
    for turn in turns if isinstance(turns, Sequence) and not isinstance(turns, str) else [turns]:
        role = _SHAREGPT_ROLES.get(str(turn.get("from", turn.get("role")))) if isinstance(turn, Mapping) else None
        text = turn.get("value", turn.get("content")) if isinstance(turn, Mapping) else None
        if role is None or not isinstance(text, str):
            raise InvalidDataError(
                f'"conversations" must be turns {{"from": "human" or "gpt", "value": TEXT}}; got {_short(turn)}'
            )
        messages.append({"role": role, "content": text})
    if not messages:
        raise InvalidDataError('"conversations" is empty')
    return tuple(messages)


def _tools(value: Any) -> tuple[Tool, ...]:
    """Read tools in OpenAI's format, as a list or as its JSON."""
    as_text = isinstance(value, str)
    if as_text:
        value = _from_json(value, '"tools"') if value else None
    tools = []
    for each in _as_list(value) or ():
        function = each.get("function", each) if isinstance(each, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidDataError(f'"tools" must be declarations in OpenAI\'s format; got {_short(each)}')
        declared = _table(function, column="tools")
        plain = declared if as_text else _without_nulls(declared)
        tools.append(
            Tool(
                name=plain["name"],
                description=str(plain.get("description") or ""),
                parameters=dict(plain.get("parameters") or {}),
            )
        )
    return tuple(tools)


def _table(value: Any, *, column: str) -> dict[str, Any]:
    if isinstance(value, str) and value[:1] == "{":
        value = _from_json(value, f"{column!r}, a text,")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidDataError(f"{column!r} must be a table of names and values; it is {_short(value)}")
    plain: dict[str, Any] = _plain(value, column=column)
    return plain


def _from_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidDataError(f"{what} is not JSON ({error})") from error


def _as_list(value: Any) -> Any:
    """Return an array of numpy, as pandas has it in a column, as a list; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _plain(value: Any, *, column: str) -> Any:
    """Convert a value to JSON's types: tasks travel as JSON to other processes and into the ledger."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidDataError(f"{column!r} holds {value}, which JSON cannot represent")
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item, column=column) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, column=column) for item in value]
    if isinstance(value, dt.date | dt.time | decimal.Decimal):
        return str(value)
    if hasattr(value, "tolist") and not isinstance(value, type):  # arrays and scalars of numpy
        return _plain(value.tolist(), column=column)
    raise InvalidDataError(f"{column!r} holds a {type(value).__name__}, which JSON cannot represent")


def _without_nulls(value: Any) -> Any:
    """Return plain data without members that are null, at any depth; those of lists stay."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
