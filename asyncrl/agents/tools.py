"""Tools: typed Python functions a model may call.

    @tool
    async def calculator(a: int, operator: Literal["+", "-", "*"], b: int) -> int:
        '''Compute one operation on two integers.'''

The JSON schema that chat templates show comes from the annotations and the docstring (its first paragraph, and its
``Args:`` section); arguments are validated against the same annotations before the function is called. Who is to blame
decides what happens:

    unknown tool, malformed call, wrong arguments,       the model        a tool message with an error text
    ``ValueError`` raised by the tool
    any other exception of the tool                      infrastructure   EnvironmentFailure
    no answer within the deadline                        infrastructure   EnvironmentDeadlineError
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from asyncrl.errors import AsyncRLError, ConfigError, EnvironmentDeadlineError, EnvironmentFailure
from asyncrl.interfaces import Message, Tool

if TYPE_CHECKING:
    import pydantic

__all__ = ["PythonTool", "ToolAnswer", "Toolbox", "in_thread", "tool", "tool_from_function"]

_T = TypeVar("_T")
_P = ParamSpec("_P")

_ARGUMENT_LINE = re.compile(r"^\s{4,}(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """The tool message that answers one call, and whether it tells of a mistake of the model.

    >>> ToolAnswer(message={"role": "tool", "content": "5"}, mistake=False).message["content"]
    '5'
    """

    message: Message
    mistake: bool


class PythonTool:
    """A Python function with its declaration. Calling it validates the arguments first.

        >>> def add(a: int, b: int = 1) -> int:
        ...     "Add two integers."
        ...     return a + b
        >>> PythonTool(add).tool.parameters["required"]
        ['a']

    The examples of the methods are about this function.

    Args:
        function: sync or async; every parameter annotated. A sync one runs in a thread, which a deadline abandons but
            cannot stop: give functions that may hang an ``async def``.
        name: name shown to the model; the function's own by default.
        description: the docstring's first paragraph by default.

    Raises:
        ConfigError: a parameter has no annotation, cannot be passed by name, or has a name or a type that no JSON
            schema can be made of.
    """

    def __init__(self, function: Callable[..., Any], *, name: str = "", description: str = "") -> None:
        self.function = function
        documentation = inspect.getdoc(function) or ""
        self._arguments = _arguments_model(function, _argument_descriptions(documentation))
        self.tool = Tool(
            name=name or function.__name__,
            description=description or " ".join(documentation.split("\n\n", 1)[0].split()),
            parameters=_plain_schema(self._arguments.model_json_schema()),
        )

    @property
    def name(self) -> str:
        """The name that the model calls it by.

        >>> PythonTool(add).name
        'add'
        """
        return self.tool.name

    def validate(self, arguments: object) -> dict[str, Any]:
        """The function's keyword arguments from what the model wrote.

            >>> PythonTool(add).validate({"a": 2})
            {'a': 2, 'b': 1}

        Raises:
            ValueError: an argument is missing, unknown or of the wrong type; the text is meant for the model.
        """
        import pydantic

        if not isinstance(arguments, Mapping):
            raise ValueError(f"arguments must be a JSON object, got {type(arguments).__name__}")
        try:
            checked = self._arguments.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" for problem in error.errors()
            )
            raise ValueError(problems) from error
        return {name: getattr(checked, name) for name in type(checked).model_fields}

    async def call(self, arguments: object, *, deadline_s: float) -> str:
        """Validate, run, and turn the result into text (strings as they are, everything else as JSON).

            >>> asyncio.run(PythonTool(add).call({"a": 2, "b": 3}, deadline_s=5.0))
            '5'

        Raises:
            ValueError: a mistake of the model, in words for the model.
            EnvironmentDeadlineError: no answer after ``deadline_s``.
            EnvironmentFailure: the tool broke.
        """
        keywords = self.validate(arguments)
        deadline: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                if inspect.iscoroutinefunction(self.function):
                    result = await self.function(**keywords)
                else:
                    result = await in_thread(self.function, **keywords)
            return result if isinstance(result, str) else json.dumps(result)
        except (ValueError, AsyncRLError):
            raise
        except TimeoutError as error:
            if deadline is not None and deadline.expired():
                raise EnvironmentDeadlineError(f"tool {self.name!r} gave no answer in {deadline_s:g} s") from error
            raise EnvironmentFailure(f"tool {self.name!r} failed: TimeoutError: {error}") from error
        except Exception as error:  # a foreign function may raise anything; its type travels as the cause
            raise EnvironmentFailure(f"tool {self.name!r} failed: {type(error).__name__}: {error}") from error


def tool(function: Callable[..., Any]) -> PythonTool:
    """Decorator form of :func:`tool_from_function`.

        >>> @tool
        ... def half(x: float) -> float:
        ...     return x / 2
        >>> half.name
        'half'

    Raises:
        ConfigError: as :func:`tool_from_function`.
    """
    return PythonTool(function)


def tool_from_function(function: Callable[..., Any], *, name: str = "", description: str = "") -> PythonTool:
    """Declare ``function`` as a tool.

        >>> tool_from_function(add, name="plus").name
        'plus'

    Raises:
        ConfigError: as :class:`PythonTool`.
    """
    return PythonTool(function, name=name, description=description)


class Toolbox:
    """The tools of one environment, and the answers to an assistant's message.

        >>> toolbox = Toolbox([PythonTool(add)], deadline_s=5.0)
        >>> asyncio.run(toolbox.answer({"function": {"name": "subtract", "arguments": {}}})).message["content"]
        "error: there is no tool 'subtract'; there are: add"

    Args:
        tools: with different names.
        deadline_s: for each call.

    Raises:
        ConfigError: two tools have one name.
    """

    def __init__(self, tools: Iterable[PythonTool], *, deadline_s: float = 30.0) -> None:
        self._tools: dict[str, PythonTool] = {}
        self._deadline_s = deadline_s
        for each in tools:
            if each.name in self._tools:
                raise ConfigError(f"two tools are named {each.name!r}", remedy="give one of them another name")
            self._tools[each.name] = each

    @property
    def declarations(self) -> tuple[Tool, ...]:
        """What the model is shown.

        >>> [each.name for each in Toolbox([PythonTool(add)]).declarations]
        ['add']
        """
        return tuple(each.tool for each in self._tools.values())

    async def answer(self, call: Mapping[str, Any]) -> ToolAnswer:
        """Run one parsed call (``{"id": ..., "function": {"name": ..., "arguments": {...}}}``).

            >>> asyncio.run(
            ...     Toolbox([PythonTool(add)]).answer({"function": {"name": "add", "arguments": {"a": 4}}})
            ... ).mistake
            False

        Raises:
            EnvironmentFailure: the tool broke, or passed its deadline.
        """
        function = call["function"]
        name = str(function["name"])
        mistake = name not in self._tools
        if mistake:
            text = f"error: there is no tool {name!r}; there are: {', '.join(self._tools)}"
        else:
            try:
                text = await self._tools[name].call(function["arguments"], deadline_s=self._deadline_s)
            except ValueError as error:
                text, mistake = f"error: {error}", True
        message = {"role": "tool", "tool_call_id": call.get("id", ""), "name": name, "content": text}
        return ToolAnswer(message=message, mistake=mistake)

    async def answer_all(self, reply: Message) -> tuple[ToolAnswer, ...]:
        """Answer every call of ``reply`` in order, or its ``malformed`` mark. Empty if it calls nothing.

            >>> asyncio.run(Toolbox([PythonTool(add)]).answer_all({"role": "assistant", "content": "5, surely"}))
            ()

        Raises:
            EnvironmentFailure: as :meth:`answer`.
        """
        answers = [await self.answer(call) for call in reply.get("tool_calls", ())]
        if reply.get("malformed"):
            text = f"error: a tool call could not be read: {reply['malformed']}"
            message = {"role": "tool", "tool_call_id": "", "name": "", "content": text}
            answers.append(ToolAnswer(message=message, mistake=True))
        return tuple(answers)


async def in_thread(function: Callable[_P, _T], /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
    """:func:`asyncio.to_thread`, for functions of others: no future takes a StopIteration, and its wait would not end.

        >>> asyncio.run(in_thread(divmod, 7, 2))
        (3, 1)

    Raises:
        RuntimeError: the function raised StopIteration (the cause).
    """

    def call() -> _T:
        try:
            return function(*arguments, **keywords)
        except StopIteration as error:
            name = getattr(function, "__qualname__", repr(function))
            raise RuntimeError(f"{name} raised StopIteration") from error

    return await asyncio.to_thread(call)


def _argument_descriptions(documentation: str) -> dict[str, str]:
    """The ``Args:`` section of a Google style docstring; a continuation line belongs to the argument above it."""
    _, _, section = documentation.partition("\nArgs:\n")
    descriptions: dict[str, str] = {}
    current = ""
    for line in section.splitlines():
        if line and not line.startswith("    "):
            break
        if match := _ARGUMENT_LINE.match(line):
            current = match[1]
            descriptions[current] = match[2].strip()
        elif current and line.strip():
            descriptions[current] += " " + line.strip()
    return descriptions


def _arguments_model(function: Callable[..., Any], descriptions: Mapping[str, str]) -> type[pydantic.BaseModel]:
    import pydantic

    name = function.__name__
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # annotations are evaluated: they may raise anything
        raise ConfigError(
            f"tool {name!r}: its annotations cannot be read: {type(error).__name__}: {error}",
            remedy="import what they name where the function can see it",
        ) from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"tool {name!r}: parameter {parameter.name!r} cannot be passed by name",
                remedy="a tool takes named parameters only",
            )
        if parameter.name not in hints:
            raise ConfigError(
                f"tool {name!r}: parameter {parameter.name!r} has no annotation",
                remedy="annotate it: the JSON schema comes from the annotation",
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        described = pydantic.Field(default, description=descriptions.get(parameter.name))
        fields[parameter.name] = (hints[parameter.name], described)
        _check_field(parameter.name, fields[parameter.name], tool=name)
    model: type[pydantic.BaseModel] = pydantic.create_model(
        name, __config__=pydantic.ConfigDict(extra="forbid"), **fields
    )
    return model


def _check_field(name: str, field: Any, *, tool: str) -> None:
    """Refuse a parameter that pydantic refuses, or takes for something else."""
    import pydantic

    if name.startswith("_") or (name.startswith("model_") and hasattr(pydantic.BaseModel, name)):
        raise ConfigError(
            f"tool {tool!r}: parameter {name!r} has a name that pydantic keeps for itself", remedy="call it otherwise"
        )
    try:
        pydantic.create_model(tool, **{name: field}).model_json_schema()
    except Exception as error:  # pydantic has an error for each reason, and types bring their own
        raise ConfigError(
            f"tool {tool!r}: parameter {name!r} has no JSON schema: {type(error).__name__}: {error}",
            remedy="give it another name or annotation",
        ) from error


def _plain_schema(schema: Any) -> Any:
    """Without the titles that pydantic adds: they are tokens in every prompt and say nothing."""
    if isinstance(schema, dict):
        properties = schema.get("properties")
        return {
            key: {name: _plain_schema(value) for name, value in properties.items()}
            if key == "properties" and isinstance(properties, dict)
            else _plain_schema(value)
            for key, value in schema.items()
            if key not in ("title", "additionalProperties")
        }
    if isinstance(schema, list):
        return [_plain_schema(value) for value in schema]
    return schema
