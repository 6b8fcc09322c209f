"""One turn of a chat, for OpenAI's and Anthropic's APIs: the form that its text must have, its prompt, its choices.

Forms are grammars in llguidance's dialect of Lark, which engines follow token by token
(:attr:`asyncrl.interfaces.SamplingParams.grammar`). JSON is written in one line, as ``json.dumps`` does: a model that
may write white space anywhere can go on doing so for ever.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from asyncrl.errors import EngineError
from asyncrl.interfaces import GenerationRequest, Message, SamplingParams, Tool
from asyncrl.rollout.tool_calls import tool_call_json
from asyncrl.serve.call import Call
from asyncrl.serve.errors import APIError
from asyncrl.serve.limits import Limits, check_grammar, json_problem
from asyncrl.serve.sessions import Session, TurnPrompt
from asyncrl.serve.text import TEMPLATE_ERRORS, Choice, ModelText, ParsedTurn, last_tokens

JSON_OBJECT: Mapping[str, Any] = {"type": "object"}
"""The schema of every JSON object. Any: a JSON schema."""

_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)
"""What only a grammar in Lark has. llguidance's own pattern takes a time that is quadratic in blank lines."""
_MOST_PASSES = 1 << 24
"""Characters times rules of a grammar in GBNF, over all of which its translation may pass once for each rule."""


# ---------------------------------------------------------------------------------------------- the form of a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the text of a turn must be: of a grammar (empty: any text), which allows JSON, tool calls, or both."""

    grammar: str = ""
    json: bool = False
    calls: bool = False

    def check(self, choice: Choice, parsed: ParsedTurn) -> None:
        """Raise an EngineError if a finished turn that was not cut short has another form."""
        if not (self.json or self.calls) or choice.finish_reason != "stop" or choice.stop_string is not None:
            return
        if not (self.calls and parsed.calls) and not (self.json and _is_json(parsed.message["content"])):
            raise EngineError("the engine took a grammar and did not follow it")


async def chat_form(
    call: Call,
    *,
    tools: Sequence[Tool],
    required: Sequence[Tool],
    several: bool,
    schema: Mapping[str, Any] | None,
    grammar: str = "",
) -> Form:
    """Return the form of a turn: text, calls of ``tools``, or JSON of ``schema`` (None for any text) if it is no call.

    A turn without tools may have a ``grammar`` instead. One of the tools in ``required`` must be called, if any are;
    ``several`` calls may be made. Any text, where the server does not enforce forms.
    """
    text = call.state.chat_text()
    notation = text.renderer.notation.name
    calls = partial(
        calls_grammar,
        several=several and notation != "llama3_json",  # whose templates refuse several in a history
        opening=text.terminal("<tool_call>"),
        closing=text.terminal("</tool_call>"),
        bare=notation == "llama3_json",
    )
    if grammar and tools:
        raise APIError(400, "a grammar, regex or choice restricts the whole text: leave out the tools")
    if not call.state.enforces_forms:
        return Form()
    if (required or (tools and schema is not None)) and notation not in ("hermes", "llama3_json"):
        raise APIError(400, f"calls in this model's notation ({notation}) cannot be enforced: let the model choose")
    if required:
        return Form(grammar=await call.off_loop(partial(calls, required)), calls=True)
    if grammar:
        return Form(grammar=grammar)
    if schema is None:
        return Form()
    if tools:
        return Form(grammar=await call.off_loop(partial(calls, tools, otherwise=schema)), json=True, calls=True)
    return Form(grammar=await call.off_loop(partial(json_grammar, schema)), json=True)


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the grammar of JSON that satisfies ``schema``. Any: a JSON schema."""
    return f"start: {_json(schema)}\n"


def json_schema(limits: Limits, name: str, schema: Any) -> Mapping[str, Any]:
    """Return the schema in a field called ``name``, which may be JSON in a string. Any: a JSON schema."""
    if isinstance(schema, str):
        if problem := json_problem(check_grammar(limits, schema).encode("utf-8", "surrogatepass"), limits):
            raise APIError(400, f"{name}: {problem}")
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise APIError(400, f"{name} is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise APIError(400, f"{name} must be a JSON schema: an object")
    return schema


async def text_grammar(call: Call, make: Callable[[Any], str], given: str | Sequence[str]) -> str:
    """Return the grammar that ``make`` makes of texts within the limits, in a thread. Any: the type of ``given``."""
    check_grammar(call.state.limits, given if isinstance(given, str) else "".join(given))
    return await call.in_thread(partial(make, given))


def regex_grammar(pattern: str) -> str:
    """Return the grammar of what ``pattern`` matches as a whole: a regular expression in the syntax of Rust's crate."""
    written = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL).replace("\n", r"\n")
    return f"start: /{written}/\n"


def lark_grammar(grammar: str) -> str:
    """Return a grammar in llguidance's dialect: as it is, or translated from GBNF (llama.cpp's, xgrammar's EBNF)."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if _LARK.search(grammar):
        return grammar
    if (rules := grammar.count("::=")) * len(grammar) > _MOST_PASSES:
        raise APIError(400, f"{rules} rules of {len(grammar)} characters are too many to be translated from GBNF")
    try:
        return gbnf_to_lark(grammar)
    except Exception as error:
        raise APIError(400, f"the grammar cannot be read: {error}") from error


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of one of several texts."""
    return f"start: {' | '.join(map(json.dumps, choices))}\n"


def calls_grammar(
    tools: Sequence[Tool],
    *,
    several: bool,
    opening: str = '"<tool_call>"',
    closing: str = '"</tool_call>"',
    bare: bool = False,
    otherwise: Mapping[str, Any] | None = None,
) -> str:
    """Return the grammar of calls of ``tools``, as :class:`asyncrl.rollout.chat.ChatRenderer` parses them.

    There is one call, or with ``several`` one or more. ``opening`` and ``closing`` are terminals around a call: a
    quoted string, or the bare name of a special token; Llama's, which are ``bare``, have none. The text may be JSON of
    the schema ``otherwise`` instead of calls.
    """
    rules = [
        f"start: calls | {_json(otherwise)}" if otherwise is not None else "start: calls",
        'calls: call ("\\n" call)*' if several else "calls: call",
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
    ]
    for number, tool in enumerate(tools):
        if bare:  # in the lexemes of JSON, since the text may be other JSON
            pieces = ("{", '"name"', ": ", json.dumps(tool.name), ", ", '"parameters"', ": ")
            rules.append(f'call_{number}: {" ".join(map(json.dumps, pieces))} arguments_{number} "}}"')
        else:
            head = f'\n{{"name": {json.dumps(tool.name)}, "arguments": '
            rules.append(f'call_{number}: {opening} {json.dumps(head)} arguments_{number} "}}\\n" {closing}')
        rules.append(f"arguments_{number}: {_json({**tool.parameters, 'type': 'object'})}")
    return "\n".join([*rules, ""])


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _ONE_LINE})}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except RecursionError:  # it is deeper than Python follows, and has no fault until there
        return True
    except ValueError:
        return False
    return True


# -------------------------------------------------------------------------------------------------- tools and calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools that are ``declared``, and those of which one must be called; none of them where the model chooses."""

    declared: Sequence[Tool]
    required: Sequence[Tool]


def tool_use(
    tools: Sequence[Tool],
    *,
    mode: Literal["none", "auto", "required"] = "auto",
    only: Sequence[str] | None = None,
    named: str | None = None,
) -> ToolUse:
    """Return how a turn uses ``tools``: ``only`` some of them, or one that is ``named`` and must be called."""
    if mode == "none":
        return ToolUse(declared=(), required=())
    if unknown := {*(only or ()), *(() if named is None else (named,))} - {tool.name for tool in tools}:
        raise APIError(400, f"tool_choice names {min(unknown)[:80]!r}, which is none of the tools")
    if mode == "required" and not tools:
        raise APIError(400, "tool_choice is required, and there are no tools")
    declared = [tool for tool in tools if only is None or tool.name in only]
    return ToolUse(declared=declared, required=[tool for tool in declared if mode == "required" or tool.name == named])


def check_arguments(limits: Limits, written: Iterable[str | dict[str, Any]]) -> None:
    """Raise an API error if arguments in strings hold more than a body may, altogether. Any: JSON, of the body."""
    text = "".join(each for each in written if isinstance(each, str))
    own_depth = dataclasses.replace(limits, json_depth=limits.json_containers)  # tool_call has another
    if problem := json_problem(text.encode("utf-8", "surrogatepass"), own_depth):
        raise APIError(400, f"the arguments of tool calls: {problem}")


def tool_call(call_id: str, name: str, arguments: str | dict[str, Any], where: str) -> dict[str, Any]:
    """Return a client's call of a tool in the form that chat templates take. Any: JSON."""
    parsed: Any = arguments
    if isinstance(arguments, str):
        try:
            parsed = tool_call_json(arguments or "{}")
        except ValueError as error:
            raise APIError(400, f"{where}: the arguments of a tool call: {error}") from error
    if not isinstance(parsed, dict):
        raise APIError(400, f"{where}: the arguments of a tool call must be an object")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


# --------------------------------------------------------------------------------------------------------- the turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How a conversation becomes a prompt.

    Attributes:
        template: further variables of the chat template. Any: JSON.
        continues: the last message, of the assistant, is continued; else a new one is begun.
        generation_prompt: whether the assistant's opening ends the prompt.
        last_tokens: the prompt is cut on the left to so many tokens.
    """

    template: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    generation_prompt: bool = True
    last_tokens: int | None = None

    def prefill(self, messages: Sequence[Message]) -> str:
        """Return the text that is continued; an API error if it cannot be."""
        if not self.continues:
            return ""
        if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
            raise APIError(400, "only a last message that is text of the assistant can be continued")
        return messages[-1]["content"] or ""


def reasoning_effort(call: Call, effort: str | None, *, field: str) -> dict[str, Any]:
    """Return the variable of the chat template that ``effort`` is; an agent's makes no difference if there is none.

    Any: variables of the template.
    """
    if effort is not None and call.state.chat_text().template_mentions("reasoning_effort"):
        return {"reasoning_effort": effort}
    if effort not in (None, "none") and call.plane != "agent":
        raise APIError(400, f"{field} = {effort} is not served: the model's chat template has no such variable")
    return {}


def check_verbosity(call: Call, verbosity: str | None, *, field: str) -> None:
    """Raise an API error for a verbosity but the middle one; an agent's makes no difference."""
    if verbosity not in (None, "medium") and call.plane != "agent":
        raise APIError(400, f"{field} = {verbosity} is not served; leave it out")


async def render_prompt(
    call: Call,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    session: Session | None,
    rendering: Rendering,
    *,
    context_tokens: int | None = None,
) -> TurnPrompt:
    """Return the prompt of a turn, as a continuation within ``session`` if there is one.

    A text that cannot fit into ``context_tokens`` is not tokenized.

    Raises:
        APIError: there are too many messages or tools, the template does not support such a conversation, or it is too
            long.
    """
    limits = call.state.limits
    if len(messages) > limits.messages or len(tools) > limits.tools:
        raise APIError(400, f"at most {limits.messages} messages and {limits.tools} tools are accepted")
    text = call.state.chat_text().within(context_tokens)
    if rendering.template:
        text = text.with_options(rendering.template)
    prefill = rendering.prefill(messages)
    if rendering.last_tokens is not None and session is not None:
        raise APIError(400, "truncate_prompt_tokens would cut a session's turns: leave out one of them")

    conversation = messages[:-1] if rendering.continues else messages
    if not conversation:
        raise APIError(400, "the last message is continued, and there is none before it: send that, too")

    def render() -> TurnPrompt:
        begun = (session or Session("", "")).chat_prompt(
            conversation, tools, text, generation_prompt=rendering.generation_prompt
        )
        more = tuple(text.renderer.encode(prefill)) if prefill else ()
        return dataclasses.replace(
            begun,
            token_ids=last_tokens((*begun.token_ids, *more), rendering.last_tokens),
            appended=begun.appended + more,
        )

    try:
        return await call.off_loop(render)
    except TEMPLATE_ERRORS as error:
        raise APIError(400, f"the model's chat template refuses these messages: {error}") from error


class ChatTurn:
    """A turn to be sampled. Made by :meth:`begin`.

    There is one of ``requests`` to the pool for each of ``choices``, which grow as chunks are fed to them.
    """

    def __init__(
        self,
        call: Call,
        text: ModelText,
        prompt: TurnPrompt,
        requests: list[GenerationRequest],
        form: Form,
        prefill: str,
        stops: frozenset[int],
        tools: Sequence[Tool],
    ) -> None:
        self._call = call
        self._prefill = prefill
        self._stops = stops
        self._text = text
        self._form = form
        self._tools = tools
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
        form: Form,
        choices: int = 1,
        rendering: Rendering = Rendering(),
        include_stop: bool = False,
        skip_special_tokens: bool | None = None,
        tokens: tuple[int, ...] = (),
    ) -> ChatTurn:
        """Render the prompt and prepare the requests; an API error if the prompt or the grammar is invalid.

        ``tokens``, if there are any, are the prompt instead of what the template makes of ``messages``. With
        ``tools`` no special tokens are skipped, since calls are written with them.
        """
        state, session = call.state, call.session()
        text = state.chat_text()
        if tokens:
            prompt = (session or Session("", "")).token_prompt(tokens)
        else:
            context = state.context_tokens if rendering.last_tokens is None else None
            prompt = await render_prompt(call, messages, tools, session, rendering, context_tokens=context)
        if sampling.ignore_eos and form.grammar:
            raise APIError(400, "ignore_eos goes on after the end that a form gives the answer: give one of them")
        end = text.renderer.end_of_turn_id
        sampling = replace(sampling.ending_at(end), grammar=check_grammar(state.limits, form.grammar))
        requests = call.requests(prompt.token_ids, sampling, choices=choices, scored_once=True)
        stops = frozenset(requests[0].sampling.stop_token_ids) - {end}
        turn = cls(call, text, prompt, requests, form, rendering.prefill(messages), stops, tools)
        turn.choices = [
            Choice(
                text.decode if skip_special_tokens and not tools else text.renderer.decode,
                request.sampling,
                special_ids=text.special_ids | {end},
                notation=text.renderer.notation if tools else None,
                include_stop=include_stop,
                show_special=skip_special_tokens is False,
            )
            for request in requests
        ]
        return turn

    async def collect(self) -> None:
        await self._call.feed(self.choices, await self._call.collect_all(self.requests))

    def parse(self, number: int) -> ParsedTurn:
        """Check the form of a finished choice, add it to the session and return its message. Once per choice."""
        choice = self.choices[number]
        parsed = choice.parse(self._text.renderer, self._tools, call_prefix=f"call_{self._call.id}_{number}")
        if not self._stops & {*choice.token_ids[-1:]}:  # else a token of the client's, or the run's, cut it off
            self._form.check(choice, parsed)
        whole: Message = {**parsed.message, "content": self._prefill + (parsed.message["content"] or "")}
        self._call.record(self.prompt, choice.generation(), whole)
        return parsed

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)
