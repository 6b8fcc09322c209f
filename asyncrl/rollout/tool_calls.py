"""Tool calls in the text of a turn, in the notations of several families of models.

Notations have the names of vLLM's tool parsers. Each is read in time linear in the text: a model may write anything.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from asyncrl.interfaces import Message, Tool

Function = Mapping[str, Any]
"""The ``name`` and the ``arguments`` of one call. Any: JSON."""

_CALL_DEPTH = 64
_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}

PROBE = Tool(
    name="probe",
    description="A probe.",
    parameters={"type": "object", "properties": {"said": {"type": "string", "description": "a text"}}},
)
_PROBE_CALL = {"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": {"said": "x"}}}
PROBE_TURN: Message = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
"""A turn in which a template shows how it writes calls: see :func:`notation_of`."""


@dataclass(slots=True)
class Reading:
    """What a turn says: its text outside calls, the calls, and why others cannot be read, in words for the model."""

    content: str = ""
    calls: list[Function] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, calls: Iterable[Function]) -> None:
        """Add calls, at least one, up to the first that raises a ValueError."""
        before = len(self.calls)
        try:
            self.calls.extend(calls)
        except ValueError as error:
            self.problems.append(str(error))
        else:
            if len(self.calls) == before:
                self.problems.append("no tool call where one begins")


class Notation(ABC):
    """How a family of models writes tool calls.

    Attributes:
        mark: opens a call wherever it stands.
        first: the character that may open one at the beginning of a turn; empty for none.
    """

    name: ClassVar[str]
    mark: ClassVar[str]
    first: ClassVar[str] = ""
    call_id: ClassVar[str] = "call_{}"

    @abstractmethod
    def read(self, text: str, tools: Sequence[Tool]) -> Reading:
        """Read a turn, where ``tools`` were declared."""

    @abstractmethod
    def write(self, calls: Sequence[Function]) -> str:
        """Return the text of calls."""

    def for_template(self, message: Message) -> Message:
        """Return a message in the form that chat templates of these models take."""
        return message

    def answered(self, message: Message) -> Message:
        """Return a turn before the last in the form that these templates take, perhaps without all of its calls."""
        return message

    def parse(self, text: str, tools: Sequence[Tool] = ()) -> Message:
        """Return the assistant's message in ``text``, as :meth:`asyncrl.rollout.chat.ChatRenderer.parse`."""
        reading = self.read(text, tools)
        message: Message = {"role": "assistant", "content": reading.content.strip()}
        if reading.calls:
            message["tool_calls"] = [
                {"id": self.call_id.format(number), "type": "function", "function": function}
                for number, function in enumerate(reading.calls)
            ]
        if reading.problems:
            message["malformed"] = "; ".join(reading.problems)
        return message


def notation_of(written: str) -> str | None:
    """Return the notation in which :data:`PROBE_TURN` is read from what a template has written of it, if one does."""
    probe = [_PROBE_CALL["function"]]
    return next((name for name, each in NOTATIONS.items() if each.read(written, [PROBE]).calls == probe), None)


def tool_call_json(written: str) -> Any:
    """Return the value of JSON that a model or a client wrote.

    Raises:
        ValueError: it is no JSON (NaN and Infinity are none), deeper than 64 levels, or has text that UTF-8 cannot
            write (half of a character).
    """
    try:
        value = json.loads(written)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("not JSON (text that UTF-8 cannot write)") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    level = [value]
    for _ in range(_CALL_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return value
    raise ValueError(f"JSON of more than {_CALL_DEPTH} levels")


def _values(text: str, head: re.Pattern[str]) -> Iterator[tuple[str, Any]]:
    """Yield each value of JSON with the name in the ``head`` before it, to the end of ``text``."""
    at = 0
    while at < len(text):
        found = head.match(text, at)
        if found is None:
            raise ValueError("a tool call is its name and an object of its arguments")
        try:
            _, at = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from error
        yield found[1], tool_call_json(text[found.end() : at])


def _function(call: Any, *, key: str = "arguments", default: Any = None) -> Function:
    """Return the call in a value of JSON; raise a ValueError if it is none."""
    arguments = call.get(key, default) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        raise ValueError(f'a tool call is an object {{"name": ..., "{key}": {{...}}}}')
    return {"name": call["name"], "arguments": arguments}


def _json(call: Function, *, key: str = "arguments") -> str:
    return json.dumps({"name": call["name"], key: call["arguments"]})


class Hermes(Notation):
    """``<tool_call>{"name": "f", "arguments": {}}</tool_call>``, with any text outside; also Qwen's."""

    name, mark, _end = "hermes", "<tool_call>", "</tool_call>"

    def read(self, text: str, tools: Sequence[Tool]) -> Reading:
        *closed, content = text.split(self._end)
        outside: list[str] = []
        reading = Reading()
        for part in closed:  # in linear time, unlike a regular expression with runs of blanks
            before, opened, written = part.partition(self.mark)
            outside.append(before if opened else part + self._end)
            if opened:
                reading.add(self._functions(written.strip(), tools))
        reading.content, opened, _ = "".join([*outside, content]).partition(self.mark)
        if opened:
            reading.problems.append("<tool_call> without </tool_call>")
        return reading

    def write(self, calls: Sequence[Function]) -> str:
        return "\n".join(f"{self.mark}\n{self._written(call)}\n{self._end}" for call in calls)

    def _functions(self, written: str, tools: Sequence[Tool]) -> Iterator[Function]:
        yield _function(tool_call_json(written), default={})

    def _written(self, call: Function) -> str:
        return _json(call)


class Qwen3Coder(Hermes):
    """As :class:`Hermes`, with ``<function=f>`` and its ``<parameter=a>``, each value in lines of its own."""

    name = "qwen3_coder"

    def _functions(self, written: str, tools: Sequence[Tool]) -> Iterator[Function]:
        name, named, body = written.removeprefix("<function=").removesuffix("</function>").partition(">")
        *parameters, rest = body.split("</parameter>")
        whole = written.startswith("<function=") and written.endswith("</function>")
        if not whole or not named or not name or rest.strip():
            raise ValueError("a tool call is <function=NAME>, its parameters and </function>")
        arguments: dict[str, Any] = {}
        schema = next((tool.parameters for tool in tools if tool.name == name), {})
        declared, definitions = schema.get("properties"), schema.get("$defs")
        for each in parameters:
            before, _, parameter = each.partition("<parameter=")
            key, named, value = parameter.partition(">")
            if before.strip() or not named:
                raise ValueError("a parameter of a tool call is <parameter=NAME>, its value and </parameter>")
            value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, declared.get(key) if isinstance(declared, dict) else None, definitions)
        yield {"name": name, "arguments": arguments}

    def _written(self, call: Function) -> str:
        values = {key: each if isinstance(each, str) else json.dumps(each) for key, each in call["arguments"].items()}
        parameters = (f"<parameter={key}>\n{each}\n</parameter>\n" for key, each in values.items())
        return f"<function={call['name']}>\n{''.join(parameters)}</function>"


def _typed(written: str, schema: Any, definitions: Any) -> Any:
    """Return the value of a parameter: text, where its schema is unknown or a string's. Any: JSON."""
    if not isinstance(schema, dict):
        return written
    python = {"True": True, "False": False, "None": None}  # as the model's own template writes them
    try:
        value = python[written] if written in python else tool_call_json(written)
    except ValueError:
        return written
    types, own = _types(schema, definitions), _JSON_TYPES.get(type(value), "string")
    accepted = own in types or (own == "integer" and "number" in types)
    return written if own == "string" or ("string" in types and not accepted) else value


def _types(schema: Any, definitions: Any) -> set[str]:
    """Return the types that a schema names, each definition read once. Any: JSON, of a server or a user."""
    found, followed, waiting = set[str](), set[str](), [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        named = each.get("type")
        found |= {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
        values = [*_listed(each.get("enum")), *([each["const"]] if "const" in each else [])]
        found |= {_JSON_TYPES.get(type(one), "string") for one in values}
        waiting += [one for key in ("anyOf", "oneOf", "allOf") for one in _listed(each.get(key))]
        reference = str(each.get("$ref", "")).rpartition("/")[2]
        if isinstance(definitions, dict) and reference in definitions and reference not in followed:
            followed.add(reference)
            waiting.append(definitions[reference])
    return found


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class Llama3Json(Notation):
    """``{"name": "f", "parameters": {}}; ...`` and nothing else, or any text and this after ``<|python_tag|>``."""

    name, mark, first = "llama3_json", "<|python_tag|>", "{"

    def read(self, text: str, tools: Sequence[Tool]) -> Reading:
        content, tagged, written = text.partition(self.mark)
        if not tagged and not (tools and content.lstrip().startswith(self.first)):
            return Reading(content)
        reading = Reading(content if tagged else "")
        reading.add(self._functions(written if tagged else content))
        return reading if tagged or not reading.problems else Reading(content)

    def _functions(self, written: str) -> Iterator[Function]:
        for _, value in _values(written.removesuffix("<|eom_id|>").strip("; \t\r\n"), re.compile(r"[\s;]*()")):
            keyed = isinstance(value, dict) and "arguments" in value
            yield _function(value, key="arguments" if keyed else "parameters")

    def write(self, calls: Sequence[Function]) -> str:
        return self.mark + "; ".join(_json(call, key="parameters") for call in calls)

    def answered(self, message: Message) -> Message:
        """Leave out all calls but the first: Llama's templates refuse several."""
        return {**message, "tool_calls": message["tool_calls"][:1]} if message.get("tool_calls") else message


class Mistral(Notation):
    """``[TOOL_CALLS][{"name": "f", "arguments": {}}, ...]`` or ``[TOOL_CALLS]f[ARGS]{}...``, with any text before."""

    name, mark, call_id = "mistral", "[TOOL_CALLS]", "call{:05}"
    _head = re.compile(r"\s*([^\s{\[]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*)?(?=\{)")

    def read(self, text: str, tools: Sequence[Tool]) -> Reading:
        content, *parts = text.split(self.mark)
        reading = Reading(content)
        for part in parts:
            reading.add(self._functions(part.strip()))
        return reading

    def _functions(self, part: str) -> Iterator[Function]:
        if part.startswith("["):
            yield from map(_function, tool_call_json(part))
        else:
            yield from ({"name": name, "arguments": each} for name, each in _values(part, self._head))

    def write(self, calls: Sequence[Function]) -> str:
        return f"{self.mark}[{', '.join(map(_json, calls))}]"

    def for_template(self, message: Message) -> Message:
        """Give it ids of nine letters and digits; and some call, since an answer follows it, if none could be read."""

        def short(named: Mapping[str, Any], key: str) -> dict[str, Any]:
            return {**named, key: re.sub(r"[^A-Za-z0-9]", "", str(named.get(key, "")))[-9:].rjust(9, "0")}

        if message["role"] == "tool":
            return short(message, "tool_call_id")
        calls = message.get("tool_calls") or ([_PROBE_CALL] if message.get("malformed") else [])
        return {**message, "tool_calls": [short(call, "id") for call in calls]} if calls else message


NOTATIONS: Mapping[str, Notation] = {each.name: each for each in (Hermes(), Llama3Json(), Mistral(), Qwen3Coder())}
