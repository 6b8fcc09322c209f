"""OpenAI's dialect: /v1/chat/completions, /v1/completions, /v1/models."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from typing import Any

from aiohttp import web

from asyncrl.interfaces import GenerationChunk, Message, SamplingParams, Tool
from asyncrl.serve.call import Call, version_spans
from asyncrl.serve.chat_turn import ChatTurn
from asyncrl.serve.choice import Choice, ReadTurn
from asyncrl.serve.conversation import parsed_arguments
from asyncrl.serve.failure import Refusal
from asyncrl.serve.model_text import ModelText
from asyncrl.serve.openai_schema import (
    AnswerCall,
    AnswerMessage,
    CallDelta,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogProbs,
    ChatMessage,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionLogProbs,
    CompletionRequest,
    ContentPart,
    Delta,
    FunctionCall,
    ModelCard,
    ModelList,
    TokenLogProb,
    Usage,
)
from asyncrl.serve.sampling import check_choices, neutral, sampling_params

__all__ = ["chat_completions", "completions", "models"]

_BEGAN = int(time.time())


async def models(call: Call) -> web.StreamResponse:
    """The model that is served, under each of its names."""
    return call.answer(ModelList(data=[ModelCard(id=name, created=_BEGAN) for name in call.face.names]))


# ----------------------------------------------------------------------------------------------------------- chat


async def chat_completions(call: Call) -> web.StreamResponse:
    """A turn of a chat, whole or as a stream."""
    body = call.body_as(ChatCompletionRequest)
    call.face.check_model(body.model)
    neutral(
        frequency_penalty=(body.frequency_penalty, (0,)),
        presence_penalty=(body.presence_penalty, (0,)),
        repetition_penalty=(body.repetition_penalty, (1,)),
        min_p=(body.min_p, (0,)),
        logit_bias=(body.logit_bias, ({},)),
        top_logprobs=(body.top_logprobs, (0,)),
        tool_choice=(body.tool_choice, ("auto", "none")),
        response_format=(body.response_format.type if body.response_format else None, ("text",)),
    )
    if call.face.limits.messages < len(body.messages):
        raise Refusal(400, f"at most {call.face.limits.messages} messages are taken")
    tools = [
        Tool(
            name=each.function.name,
            description=each.function.description or "",
            parameters=each.function.parameters or {"type": "object", "properties": {}},
        )
        for each in (body.tools or ())
        if body.tool_choice != "none"
    ]
    turn = await ChatTurn.begin(
        call,
        [_message(message, number) for number, message in enumerate(body.messages)],
        tools,
        _sampling(call, body, max_tokens=body.max_completion_tokens or body.max_tokens),
        choices=check_choices(call.face.limits, body.n or 1),
    )
    if body.stream:
        return await _stream_chat(call, body, turn)
    await turn.collect()
    return call.answer(
        ChatCompletion(
            id=f"chatcmpl-{call.id}",
            created=int(time.time()),
            model=body.model,
            choices=[_chat_choice(call, body, turn, number) for number in range(len(turn.choices))],
            usage=_usage(len(turn.prompt.token_ids), turn.completion_tokens),
            prompt_token_ids=list(turn.prompt.token_ids) if body.return_token_ids else None,
        )
    )


def _chat_choice(call: Call, body: ChatCompletionRequest, turn: ChatTurn, number: int) -> ChatChoice:
    choice = turn.choices[number]
    read = turn.read(number)
    return ChatChoice(
        index=number,
        message=AnswerMessage(
            content=read.message["content"] or (None if read.calls else ""),
            tool_calls=[AnswerCall(id=each["id"], function=_function_call(each)) for each in read.calls] or None,
        ),
        finish_reason=_finish(choice, read),
        logprobs=_chat_log_probs(call.face.chat_text(), choice, 0) if body.logprobs else None,
        token_ids=choice.token_ids if body.return_token_ids else None,
        weight_versions=version_spans(choice.versions) if body.return_token_ids else None,
    )


async def _stream_chat(call: Call, body: ChatCompletionRequest, turn: ChatTurn) -> web.StreamResponse:
    events = call.events()
    created = int(time.time())
    text = call.face.chat_text()

    def chunk(choices: list[ChunkChoice], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=f"chatcmpl-{call.id}", created=created, model=body.model, choices=choices, **more)

    opened: set[int] = set()
    async with aclosing(call.stream_all(turn.requests)) as stream:
        async for number, piece in stream:
            choice = turn.choices[number]
            before = len(choice.token_ids)
            delta = Delta(content=choice.feed(piece) or None)
            if number not in opened:
                delta.role = "assistant"
                delta.content = delta.content or ""
                more = {"prompt_token_ids": list(turn.prompt.token_ids)} if body.return_token_ids else {}
                opened.add(number)
            else:
                more = {}
            reason = None
            if choice.finish_reason is not None:
                read = turn.read(number)
                reason = _finish(choice, read)
                if read.tail:
                    delta.content = (delta.content or "") + read.tail
                if read.calls:
                    delta.tool_calls = [
                        CallDelta(index=at, id=each["id"], function=_function_call(each))
                        for at, each in enumerate(read.calls)
                    ]
            with_tokens = body.return_token_ids or (body.logprobs and piece.token_ids)
            if delta.content is None and not delta.tool_calls and reason is None and not with_tokens:
                continue
            answer = ChunkChoice(
                index=number,
                delta=delta,
                finish_reason=reason,
                logprobs=_chat_log_probs(text, choice, before) if body.logprobs else None,
            )
            if body.return_token_ids:
                answer.token_ids = list(piece.token_ids)
                answer.weight_versions = version_spans(piece.weight_versions, offset=before)
            await events.send(chunk([answer], **more))
    if body.stream_options is not None and body.stream_options.include_usage:
        await events.send(chunk([], usage=_usage(len(turn.prompt.token_ids), turn.completion_tokens)))
    await events.send_bytes(b"data: [DONE]\n\n")
    return await events.end()


def _message(message: ChatMessage, number: int) -> Message:
    """One of a client's messages in the form that templates take."""
    where = f"messages[{number}]"
    role = "system" if message.role == "developer" else message.role
    made: Message = {"role": role, "content": _text(message.content)}
    if message.name:
        made["name"] = message.name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if role != "assistant":
            raise Refusal(400, f"{where}: only the assistant calls tools")
        made["tool_calls"] = [
            {
                "id": each.id,
                "type": "function",
                "function": {
                    "name": each.function.name,
                    "arguments": parsed_arguments(each.function.arguments, where=where),
                },
            }
            for each in message.tool_calls
        ]
    return made


def _text(content: str | list[ContentPart] | None) -> str:
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def _finish(choice: Choice, read: ReadTurn) -> str:
    return "tool_calls" if read.calls and choice.finish_reason == "stop" else str(choice.finish_reason)


def _function_call(call: dict[str, Any]) -> FunctionCall:
    return FunctionCall(name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"]))


def _chat_log_probs(text: ModelText, choice: Choice, begin: int) -> ChatLogProbs:
    entries = []
    for token, log_prob in zip(choice.token_ids[begin:], choice.log_probs[begin:], strict=True):
        spelling = text.spelling(token)
        entries.append(TokenLogProb(token=spelling, logprob=log_prob, bytes=list(spelling.encode())))
    return ChatLogProbs(content=entries)


# ---------------------------------------------------------------------------------------------------- completions


async def completions(call: Call) -> web.StreamResponse:
    """Continuations of plain prompts, whole or as a stream."""
    body = call.body_as(CompletionRequest)
    face = call.face
    face.check_model(body.model)
    neutral(
        frequency_penalty=(body.frequency_penalty, (0,)),
        presence_penalty=(body.presence_penalty, (0,)),
        repetition_penalty=(body.repetition_penalty, (1,)),
        min_p=(body.min_p, (0,)),
        logit_bias=(body.logit_bias, ({},)),
        logprobs=(body.logprobs, (0, 1)),
        echo=(body.echo, (False,)),
        best_of=(body.best_of, (body.n or 1,)),
        suffix=(body.suffix, ("",)),
    )
    text = face.model_text()
    prompts = _prompts(text, body.prompt)
    choices = check_choices(face.limits, body.n or 1)
    if len(prompts) > face.limits.prompts or len(prompts) * choices > face.limits.concurrent_requests_per_key:
        raise Refusal(400, f"at most {face.limits.prompts} prompts are taken at a time")
    sampling = _sampling(call, body, max_tokens=16 if body.max_tokens is None else body.max_tokens)
    requests = [
        request
        for at, prompt in enumerate(prompts)
        for request in call.requests(prompt, sampling, choices=choices, first=at * choices)
    ]
    session = call.session()
    places = [session.token_prompt(prompt) for prompt in prompts] if session is not None else []
    readers = [Choice(text.decode, special_ids=text.special_ids, stop=sampling.stop) for _ in requests]
    created = int(time.time())
    prompt_tokens = sum(map(len, prompts))

    def told(number: int, begin: int, shown: str, offset: int) -> CompletionChoice:
        reader = readers[number]
        choice = CompletionChoice(index=number, text=shown, finish_reason=reader.finish_reason)
        if body.logprobs is not None:
            choice.logprobs = _log_probs(text, reader, begin, offset)
        if body.return_token_ids:
            choice.prompt_token_ids = list(prompts[number // choices]) if begin == 0 else None
            choice.token_ids = reader.token_ids[begin:]
            choice.weight_versions = version_spans(reader.versions[begin:], offset=begin)
        return choice

    def answer(told: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(id=f"cmpl-{call.id}", created=created, model=body.model, choices=told, usage=usage)

    def keep() -> None:
        """Write what was sampled down in the session."""
        for number, reader in enumerate(readers if session is not None else ()):
            if session is not None and reader.finish_reason != "abort" and reader.token_ids:
                message: Message = {"role": "assistant", "content": reader.text}
                face.sessions.add(session, places[number // choices], reader.generation, message)

    if not body.stream:
        generations = await call.collect_all(requests)
        answers = [
            told(number, 0, reader.feed_all(generation), 0)
            for number, (reader, generation) in enumerate(zip(readers, generations, strict=True))
        ]
        keep()
        usage = _usage(prompt_tokens, sum(len(reader.token_ids) for reader in readers))
        return call.answer(answer(answers, usage))
    events = call.events()
    async with aclosing(call.stream_all(requests)) as stream:
        async for number, piece in stream:
            begin, offset = len(readers[number].token_ids), len(readers[number].text)
            shown = readers[number].feed(piece)
            if _worth_telling(body, piece, shown):
                await events.send(answer([told(number, begin, shown, offset)]))
    keep()
    if body.stream_options is not None and body.stream_options.include_usage:
        usage = _usage(prompt_tokens, sum(len(reader.token_ids) for reader in readers))
        await events.send(answer([], usage))
    await events.send_bytes(b"data: [DONE]\n\n")
    return await events.end()


def _worth_telling(body: CompletionRequest, piece: GenerationChunk, shown: str) -> bool:
    return bool(shown or piece.finish_reason or body.return_token_ids or body.logprobs is not None)


def _prompts(text: ModelText, prompt: str | list[str | int | list[int]]) -> list[tuple[int, ...]]:
    """Each prompt as ids: a list of ids is one prompt, a list of texts or of lists several."""
    if isinstance(prompt, str):
        return [tuple(text.encode(prompt))]
    ids = tuple(each for each in prompt if isinstance(each, int))
    if ids:
        if len(ids) != len(prompt):
            raise Refusal(400, "a prompt holds token ids, or texts, or lists of ids; not a mixture")
        return [ids]
    if not prompt:
        raise Refusal(400, "the prompt is empty")
    return [
        tuple(text.encode(each)) if isinstance(each, str) else tuple(each)
        for each in prompt
        if not isinstance(each, int)
    ]


def _log_probs(text: ModelText, reader: Choice, begin: int, offset: int) -> CompletionLogProbs:
    tokens = [text.spelling(token) for token in reader.token_ids[begin:]]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return CompletionLogProbs(tokens=tokens, token_logprobs=reader.log_probs[begin:], text_offset=offsets)


def _sampling(call: Call, body: ChatCompletionRequest | CompletionRequest, *, max_tokens: int | None) -> SamplingParams:
    return sampling_params(
        call.face.limits,
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        seed=body.seed,
    )


def _usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
