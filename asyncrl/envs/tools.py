"""Tools: typed Python functions that a model may call.

    @tool
    async def calculator(a: int, operator: Literal["+", "-", "*"], b: int) -> int:
        '''Compute one operation on two integers.'''

The annotations and the docstring (its first paragraph, and its ``Args:`` section) become the JSON schema of the chat
template, and arguments are validated against the annotations before a call. The cause of a failure decides its effect:

    unknown tool, malformed call, wrong arguments,       the model        a tool message with an error text
    ``ValueError`` raised by the tool, or ``mistakes=``
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
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, overload

from asyncrl.errors import AsyncRLError, ConfigError, EnvironmentDeadlineError, EnvironmentFailure
from asyncrl.interfaces import Message, Tool
from asyncrl.runtime import in_own_thread

if TYPE_CHECKING:
    import pydantic


_ARGUMENT_LINE = re.compile(r"^\s{4,}(\w+)(?:\s*\([^)]*\))?:\s*(.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """The tool message that answers one call, and whether it reports a mistake of the model."""

    message: Message
    mistake: bool


class PythonTool:
    """A Python function with its declaration; a call validates the arguments first.

        >>> def add(a: int, b: int = 1) -> int:
        ...     "Add two integers."
        ...     return a + b
        >>> PythonTool(add).tool.parameters["required"]
        ['a']

    Every parameter must be annotated. A sync function runs in a thread of its own, which a deadline abandons but cannot
    stop, so a function that may hang should be an ``async def``. The model sees the function's name and the first
    paragraph of its docstring, unless ``name`` and ``description`` are given. Of what the function raises, ``mistakes``
    are the model's fault, which it gets as the answer; all else is a failure of the environment.

    Raises:
        ConfigError: a parameter has no annotation, cannot be passed by name, or has no JSON schema.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        description: str = "",
        mistakes: tuple[type[Exception], ...] = (ValueError,),
    ) -> None:
        self.function = function
        self._mistakes = mistakes
        documentation = inspect.getdoc(function) or ""
        self._arguments = _arguments_model(function, _argument_descriptions(documentation))
        self.tool = Tool(
            name=name or function.__name__,
            description=description or " ".join(documentation.split("\n\n", 1)[0].split()),
            parameters=_plain_schema(self._arguments.model_json_schema()),
        )

    @property
    def name(self) -> str:
        return self.tool.name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function, unchecked: a decorated function stays one."""
        return self.function(*arguments, **named)

    def validate(self, arguments: object) -> dict[str, Any]:
        """Return the function's keyword arguments from the model's; the message of a ValueError is for the model."""
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
        """Validate the arguments, call the function, and return its result as text (JSON unless it is a string).

        Raises:
            ValueError: a mistake of the model; the message is for the model.
            EnvironmentDeadlineError: no answer after ``deadline_s``.
            EnvironmentFailure: the tool failed.
        """
        keywords = self.validate(arguments)
        deadline: asyncio.Timeout | None = None
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                if inspect.iscoroutinefunction(self.function):
                    result = await self.function(**keywords)
                else:
                    result = await in_own_thread(self.function, **keywords)
            return result if isinstance(result, str) else json.dumps(result)
        except Exception as error:  # a user's function may raise anything
            if isinstance(error, TimeoutError) and deadline is not None and deadline.expired():
                remedy = "raise env.options.tool_deadline_s, or the deadline_s of its Toolbox"
                text = f"tool {self.name!r} gave no answer in {deadline_s:g} s: {remedy}"
                raise EnvironmentDeadlineError(text) from error
            if isinstance(error, self._mistakes):
                text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                raise ValueError(text) from error
            if isinstance(error, AsyncRLError):
                raise
            raise EnvironmentFailure(f"tool {self.name!r} failed: {type(error).__name__}: {error}") from error


@overload
def tool(function: Callable[..., Any]) -> PythonTool: ...
@overload
def tool(*, mistakes: tuple[type[Exception], ...]) -> Callable[[Callable[..., Any]], PythonTool]: ...
def tool(function: Callable[..., Any] | None = None, *, mistakes: tuple[type[Exception], ...] = (ValueError,)) -> Any:
    """Declare a function as a tool, as ``@tool`` or ``@tool(mistakes=(KeyError,))``; see :class:`PythonTool`."""
    if function is None:
        return partial(PythonTool, mistakes=mistakes)
    return PythonTool(function)


class CallableTool(Protocol):
    """What a :class:`Toolbox` holds: a declaration, and the call of what it declares."""

    @property
    def name(self) -> str: ...

    @property
    def tool(self) -> Tool: ...

    async def call(self, arguments: object, *, deadline_s: float) -> str:
        """Return the answer as text.

        Raises:
            ValueError: a mistake of the model; the message is for the model.
            EnvironmentFailure: the tool failed, or gave no answer in time.
        """
        ...


class Toolbox:
    """Answers the tool calls in an assistant's messages.

        >>> toolbox = Toolbox([PythonTool(add)], deadline_s=5.0)
        >>> asyncio.run(toolbox.answer({"function": {"name": "subtract", "arguments": {}}})).message["content"]
        "error: there is no tool 'subtract'; there are: add"

    ``deadline_s`` holds for each call. Two tools with one name raise ConfigError.
    """

    def __init__(self, tools: Iterable[CallableTool], *, deadline_s: float = 30.0) -> None:
        self._tools: dict[str, CallableTool] = {}
        self._deadline_s = deadline_s
        for each in tools:
            if each.name in self._tools:
                raise ConfigError(f"two tools are named {each.name!r}", remedy="give one of them another name")
            self._tools[each.name] = each

    @property
    def declarations(self) -> tuple[Tool, ...]:
        """The tools for the chat template."""
        return tuple(each.tool for each in self._tools.values())

    async def answer(self, call: Mapping[str, Any]) -> ToolAnswer:
        """Run one parsed call (``{"id": ..., "function": {"name": ..., "arguments": {...}}}``)."""
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
        """Answer all calls of ``reply`` in their order, and its ``malformed`` mark; without either, return nothing."""
        answers = [await self.answer(call) for call in reply.get("tool_calls", ())]
        if reply.get("malformed"):
            text = f"error: a tool call could not be read: {reply['malformed']}"
            message = {"role": "tool", "tool_call_id": "", "name": "", "content": text}
            answers.append(ToolAnswer(message=message, mistake=True))
        return tuple(answers)


def _argument_descriptions(documentation: str) -> dict[str, str]:
    """Parse the ``Args:`` section of a Google style docstring, with its continuation lines."""
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
    except Exception as error:  # evaluating annotations may raise anything
        raise ConfigError(
            f"tool {name!r}: its annotations cannot be evaluated: {type(error).__name__}: {error}",
            remedy="import the names that they use in the module of the function",
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
                remedy="annotate it: the annotation becomes its JSON schema",
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
    """Raise ConfigError for a parameter that pydantic rejects or misinterprets."""
    import pydantic

    if name.startswith("_") or (name.startswith("model_") and hasattr(pydantic.BaseModel, name)):
        raise ConfigError(f"tool {tool!r}: parameter {name!r} has a name that pydantic reserves", remedy="rename it")
    try:
        pydantic.create_model(tool, **{name: field}).model_json_schema()
    except Exception as error:  # pydantic and the types of users raise many classes of errors
        raise ConfigError(
            f"tool {tool!r}: parameter {name!r} has no JSON schema: {type(error).__name__}: {error}",
            remedy="give it another name or annotation",
        ) from error


def _plain_schema(schema: Any) -> Any:
    """Remove the titles that pydantic adds, which would cost tokens in every prompt."""
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
