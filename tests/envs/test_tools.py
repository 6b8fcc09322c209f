"""Tools: declarations from functions, and the causes of failed calls."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from typing import Annotated, Any, Literal, TypedDict

import pytest
from pydantic import Field

from asyncrl.envs.tools import PythonTool, Toolbox, tool
from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure
from asyncrl.foreign import Failures
from asyncrl.runtime import in_own_thread


def call(name: str, arguments: object, call_id: str = "call_0") -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@tool
async def divide(a: float, b: float, rounding: Literal["up", "down"] = "down") -> float:
    """Divide two numbers,
    exactly.

    More words that the model never sees.

    Args:
        a: the dividend, which
            goes on in a second line
        b (float): the divisor

    Returns:
        rounding: this line is not about an argument
    """
    if b == 0:
        raise ValueError("the divisor is 0")
    return a / b


def test_the_schema_comes_from_annotations_and_docstring() -> None:
    assert divide.tool.schema() == {
        "type": "function",
        "function": {
            "name": "divide",
            "description": "Divide two numbers, exactly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number", "description": "the dividend, which goes on in a second line"},
                    "b": {"type": "number", "description": "the divisor"},
                    "rounding": {"type": "string", "enum": ["up", "down"], "default": "down"},
                },
                "required": ["a", "b"],
            },
        },
    }


def test_an_argument_named_title_keeps_its_place_in_the_schema() -> None:
    def search(title: str) -> str:
        """Search."""
        return title

    assert PythonTool(search).tool.parameters["properties"] == {"title": {"type": "string"}}


def test_functions_that_cannot_be_declared_are_refused() -> None:
    def bare(a) -> int:  # type: ignore[no-untyped-def]
        return 1

    def many(*numbers: int) -> int:
        return 1

    with pytest.raises(ConfigError, match="'a' has no annotation"):
        PythonTool(bare)
    with pytest.raises(ConfigError, match="'numbers' cannot be passed by name"):
        PythonTool(many)
    with pytest.raises(ConfigError, match="two tools are named 'divide'"):
        Toolbox([divide, divide])


class Point(TypedDict):
    x: int


class Connection:
    pass


def reserved(model_config: str) -> str:
    return model_config


def an_attribute(model_extra: str) -> str:
    return model_extra


def hidden(a: int, _x: int = 0) -> int:
    return a + _x


def of_a_typed_dict(at: Point) -> int:
    return at["x"]


def of_a_class(connection: Connection) -> str:
    return str(connection)


def of_the_unknown(what: Nowhere) -> str:  # type: ignore[name-defined]  # noqa: F821  that is the mistake
    return str(what)


@pytest.mark.parametrize(
    ("function", "parameter"),
    [
        (reserved, "parameter 'model_config' has a name that"),
        (an_attribute, "parameter 'model_extra' has a name that"),
        (hidden, "parameter '_x'"),
        (of_a_class, "parameter 'connection'"),
        (of_the_unknown, "name 'Nowhere' is not defined"),
        pytest.param(
            of_a_typed_dict,
            "parameter 'at'",
            marks=pytest.mark.skipif(sys.version_info >= (3, 12), reason="pydantic reads these from Python 3.12 on"),
        ),
    ],
)
def test_a_parameter_without_a_schema_is_refused_by_name(function: Any, parameter: str) -> None:
    with pytest.raises(ConfigError, match=f"tool '{function.__name__}': .*{parameter}"):
        PythonTool(function)


def test_an_alias_in_the_schema_is_allowed() -> None:
    def search(text: Annotated[str, Field(alias="query")]) -> str:
        return text

    assert list(PythonTool(search).tool.parameters["properties"]) == ["query"]


async def test_a_call_is_answered_with_its_id() -> None:
    answer = await Toolbox([divide]).answer(call("divide", {"a": 9, "b": 2}, "call_7"))
    assert answer.message == {"role": "tool", "tool_call_id": "call_7", "name": "divide", "content": "4.5"}
    assert not answer.mistake


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("multiply", {"a": 1}, "there is no tool 'multiply'; there are: divide"),
        ("divide", {"a": 1}, "b: Field required"),
        ("divide", {"a": 1, "b": "two"}, "b: Input should be a valid number"),
        ("divide", {"a": 1, "b": 2, "c": 3}, "c: Extra inputs are not permitted"),
        ("divide", {"a": 1, "b": 2, "rounding": "left"}, "rounding: Input should be 'up' or 'down'"),
        ("divide", [1, 2], "arguments must be a JSON object, got list"),
        ("divide", {"a": 1, "b": 0}, "the divisor is 0"),
    ],
)
async def test_a_mistake_of_the_model_is_answered_with_a_message(name: str, arguments: object, text: str) -> None:
    answer = await Toolbox([divide]).answer(call(name, arguments))
    assert answer.mistake
    assert answer.message["role"] == "tool"
    assert answer.message["content"].startswith("error: ")
    assert text in answer.message["content"]


async def test_a_failing_tool_is_an_environment_failure() -> None:
    @tool
    async def broken(a: int) -> int:
        raise ConnectionError("the database is down")

    with pytest.raises(EnvironmentFailure, match="'broken' failed: ConnectionError: the database is down") as caught:
        await Toolbox([broken]).answer(call("broken", {"a": 1}))
    assert isinstance(caught.value.__cause__, ConnectionError)


async def test_the_exceptions_that_are_mistakes_of_the_model_can_be_chosen() -> None:
    @tool(mistakes=(KeyError,))
    async def look_up(key: str) -> str:
        if key == "number":
            raise ValueError("now a failure")
        return {"a": "b"}[key]

    toolbox = Toolbox([look_up])
    answer = await toolbox.answer(call("look_up", {"key": "x"}))
    assert (answer.mistake, answer.message["content"]) == (True, "error: KeyError: 'x'")
    assert (await toolbox.answer(call("look_up", {"key": 3}))).mistake
    with pytest.raises(EnvironmentFailure, match="ValueError: now a failure"):
        await toolbox.answer(call("look_up", {"key": "number"}))


async def test_a_failure_is_named_by_the_line_of_the_tool() -> None:
    @tool
    async def broken() -> str:
        raise ConnectionError("the database is down")

    with pytest.raises(EnvironmentFailure) as caught:
        await Toolbox([broken]).answer(call("broken", {}))
    failures = Failures()
    failures.add(caught.value)
    failures.add(caught.value)
    ((cause, found),) = failures.items()
    assert re.fullmatch(r"ConnectionError in .*/test_tools\.py:\d+ broken", cause)
    assert found["count"] == 2
    assert found["example"].splitlines()[-1] == "ConnectionError: the database is down"


def test_causes_past_a_bound_are_counted_as_one() -> None:
    failures = Failures()
    new = failures.merge({f"cause {number}": {"count": 1, "example": ""} for number in range(150)})
    assert len(new) == len(failures) == 101
    assert failures["other causes"]["count"] == 50


async def test_a_tool_that_hangs_passes_its_deadline() -> None:
    @tool
    async def hanging() -> str:
        await asyncio.Event().wait()
        return "never"

    with pytest.raises(EnvironmentDeadlineError, match=r"'hanging' gave no answer in 0\.01 s"):
        await Toolbox([hanging], deadline_s=0.01).answer(call("hanging", {}))


async def test_a_timeout_inside_the_tool_is_a_failure_not_a_deadline() -> None:
    @tool
    async def impatient() -> str:
        raise TimeoutError("the socket gave up")

    with pytest.raises(EnvironmentFailure) as caught:
        await Toolbox([impatient]).answer(call("impatient", {}))
    assert not isinstance(caught.value, EnvironmentDeadlineError)


async def test_a_sync_function_runs_in_a_thread() -> None:
    def where() -> bool:
        """Tell whether this is the main thread."""
        return threading.current_thread() is threading.main_thread()

    assert await PythonTool(where).call({}, deadline_s=10) == "false"


async def test_a_stop_iteration_of_a_sync_function_is_a_failure() -> None:
    @tool
    def first() -> str:
        return next(iter(()))

    with pytest.raises(EnvironmentFailure, match=r"'first' failed: RuntimeError: .*first raised Stop") as caught:
        await Toolbox([first], deadline_s=1.0).answer(call("first", {}))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert isinstance(caught.value.__cause__.__cause__, StopIteration)


async def test_sync_functions_that_are_left_behind_keep_no_other_from_a_thread() -> None:
    begun, may_end = threading.Barrier(41), threading.Event()

    @tool
    def hang() -> None:
        begun.wait(10)
        may_end.wait()

    calls = [asyncio.ensure_future(Toolbox([hang], deadline_s=60).answer(call("hang", {}))) for _ in range(40)]
    await in_own_thread(begun.wait, 10)  # more than the event loop's threads
    for each in calls:
        each.cancel()
    await asyncio.wait(calls)
    try:
        assert await PythonTool(len_of).call({"text": "four"}, deadline_s=60) == "4"
    finally:
        may_end.set()


def len_of(text: str) -> int:
    return len(text)


async def test_constraints_of_annotations_are_checked() -> None:
    @tool
    async def pick(number: Annotated[int, Field(ge=1, le=6)]) -> str:
        return f"picked {number}"

    assert (await Toolbox([pick]).answer(call("pick", {"number": 6}))).message["content"] == "picked 6"
    assert (await Toolbox([pick]).answer(call("pick", {"number": 7}))).mistake


async def test_calls_are_answered_in_order_and_a_malformed_one_last() -> None:
    reply = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("divide", {"a": 6, "b": 3}, "call_0"), call("divide", {"a": 1, "b": 0}, "call_1")],
        "malformed": "not JSON",
    }
    answers = await Toolbox([divide]).answer_all(reply)
    assert [answer.message["content"] for answer in answers] == [
        "2.0",
        "error: the divisor is 0",
        "error: a tool call could not be read: not JSON",
    ]
    assert [answer.mistake for answer in answers] == [False, True, True]
    assert await Toolbox([divide]).answer_all({"role": "assistant", "content": "4"}) == ()
