"""The session of an agent that is trained: its address is its key, and the run decides how it is answered."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from asyncrl.errors import EngineError, EnvironmentFailure
from asyncrl.interfaces import GenerationChunk, GenerationRequest, SamplingParams
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import EpisodePolicy
from asyncrl.serve import chat
from asyncrl.serve.agents import AgentSession
from asyncrl.serve.text import ModelText
from asyncrl.testing import ScriptedEngine

ASK = {"model": "gpt-5", "messages": [{"role": "user", "content": "say it again please"}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|end|>'


@pytest.fixture
def policy(text: ModelText) -> Callable[..., EpisodePolicy]:
    def make(**changes: Any) -> EpisodePolicy:
        engine = ScriptedEngine(lambda prompt: text.renderer.encode(CALL), weight_version=3)
        given: dict[str, Any] = {
            "engine": engine,
            "renderer": text.renderer,
            "sampling": SamplingParams(max_new_tokens=64, temperature=0.7, top_p=0.9, min_tokens=2),
            "max_turns": 8,
            "max_seq_len": 512,
            "request_prefix": "row",
            "seed": 5,
        }
        return EpisodePolicy(**given | changes)

    return make


async def post(session: AgentSession, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(session.url + path, json=body) as answer:
        return answer.status, await answer.json()


async def test_the_run_decides_how_an_agent_is_answered(policy: Callable[..., EpisodePolicy]) -> None:
    episode = policy()
    engine: Any = episode.engine
    await engine.start()
    async with AgentSession(episode) as session:
        asked = {"temperature": 0.0, "top_p": 0.1, "max_tokens": 99_999, "seed": 1, "stop": "again"}
        await post(session, ASK | asked)
        await post(session, ASK | {"max_tokens": 3})
        for name, value in (("logit_bias", {"71": 5}), ("min_tokens", 9)):
            status, refused = await post(session, ASK | {name: value})
            assert (status, name in refused["error"]["message"]) == (400, True)
        await post(session, ASK)
    first, second, _ = (request.sampling for request in engine.requests)
    assert (first.temperature, first.top_p, first.min_tokens) == (0.7, 0.9, 2)
    assert (first.max_new_tokens, second.max_new_tokens) == (64, 3)
    assert first.stop == ("again",)
    assert first.seed not in (1, second.seed)
    assert [request.request_id for request in engine.requests] == ["row-0", "row-1", "row-2"]


async def test_the_long_texts_of_an_agent_are_tokenized_one_at_a_time(
    policy: Callable[..., EpisodePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    release, running, most = threading.Event(), 0, 0

    def prompt(*arguments: Any, **options: Any) -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert release.wait(60)
        running -= 1
        return [5]

    monkeypatch.setattr(ChatRenderer, "prompt", prompt)
    episode = policy()
    engine: Any = episode.engine
    await engine.start()
    async with AgentSession(episode) as session, asyncio.timeout(60), asyncio.TaskGroup() as group:
        long = ASK | {"messages": [{"role": "user", "content": "again " * 5000}]}
        for _ in range(3):
            group.create_task(post(session, long))
        while not most or session._state.concurrency.running < 3:
            await asyncio.sleep(0.01)
        release.set()
    assert (most, session.turns) == (1, 3)


async def test_a_request_that_the_engine_refuses_is_the_agents_mistake(policy: Callable[..., EpisodePolicy]) -> None:
    episode = policy(max_turns=2)
    engine: Any = episode.engine
    await engine.start()
    ended: list[int] = []
    async with AgentSession(episode, on_end=lambda: ended.append(1)) as session:
        refused, _ = await post(session, {"model": "m", "prompt": ""}, "/v1/completions")
        answered, _ = await post(session, ASK)
        assert (refused, answered, session.failure, ended) == (400, 200, None, [])
        assert (await post(session, ASK))[0] == 403  # what was refused had been sent


class BreakingEngine:
    """Raises an error after the first token, or ends there without one."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        yield GenerationChunk(token_ids=(7,), log_probs=(-0.5,), weight_versions=(3,))
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "known"),
    [
        (RuntimeError("no memory"), "RuntimeError: no memory"),
        (EngineError("it is dead"), "it is dead"),
        (None, "request 'row-0' ended without a finish reason"),
    ],
)
async def test_whatever_ends_an_engine_is_the_failure_of_the_episode(
    policy: Callable[..., EpisodePolicy], error: Exception | None, known: str, stream: bool
) -> None:
    ended: list[int] = []
    episode = policy(engine=BreakingEngine(error))
    async with AgentSession(episode, on_end=lambda: ended.append(1)) as session, aiohttp.ClientSession() as http:
        async with http.post(f"{session.url}/v1/chat/completions", json=ASK | {"stream": stream}) as answer:
            await answer.read()
        assert (type(session.failure), str(session.failure)) == (EngineError, known)
    assert (session.turns, ended) == (0, [1])


async def test_a_session_lasts_as_long_as_its_agent_and_leaves_no_timer(
    policy: Callable[..., EpisodePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    episode = policy()
    engine: Any = episode.engine
    await engine.start()
    loop, set_s = asyncio.get_running_loop(), list[float]()
    call_at = loop.call_at

    def noted(when: float, *given: Any, **more: Any) -> Any:
        set_s.append(when - loop.time())
        return call_at(when, *given, **more)

    monkeypatch.setattr(loop, "call_at", noted)
    async with AgentSession(episode) as session:
        await post(session, ASK)
        session._state.sessions._clock = lambda: 1e9
        assert (await post(session, ASK))[0] == 200
    assert max(set_s, default=0.0) < 600.0


@pytest.mark.parametrize("enforced", [False, True])
async def test_a_form_is_left_to_the_policy_or_its_turn_is_not_trained_on(
    policy: Callable[..., EpisodePolicy], enforced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = chat.calls_grammar

    def counted(*given: Any, **more: Any) -> str:
        made.append(1)
        return make(*given, **more)

    monkeypatch.setattr(chat, "calls_grammar", counted)
    episode = policy()
    engine: Any = episode.engine
    await engine.start()
    async with AgentSession(episode, enforces_forms=enforced) as session:
        status, answer = await post(session, ASK | {"tools": TOOLS, "tool_choice": "required"})
        both, _ = await post(session, ASK | {"tools": TOOLS, "guided_regex": "a"})
    assert (status, both, len(made)) == (200, 400, enforced)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
    (request,) = engine.requests
    assert bool(request.sampling.grammar) == enforced
    trajectory = session.trajectory({}, reward=1.0, info={})
    (turn,) = trajectory.turns
    assert trajectory.loss_mask[turn.start : turn.end] == (not enforced,) * (turn.end - turn.start)
    assert set(trajectory.weight_versions[turn.start : turn.end]) == {-1 if enforced else 3}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_a_text_ends_before_the_stop_string_of_the_run(
    policy: Callable[..., EpisodePolicy], text: ModelText, path: str
) -> None:
    engine = ScriptedEngine(lambda prompt: text.renderer.encode("it again"))
    await engine.start()
    async with AgentSession(
        policy(engine=engine, sampling=SamplingParams(max_new_tokens=64, stop=("again",)))
    ) as session:
        asked = {
            "/v1/completions": {"model": "m", "prompt": "say"},
            "/generate": {"text": "say", "sampling_params": {}},
        }
        _, answer = await post(session, asked.get(path, ASK), path)
    if path != "/generate":
        (choice,) = answer["choices"]
        answer = choice if "text" in choice else {"text": choice["message"]["content"]}
    assert answer["text"] == "it "
    assert engine.requests[0].sampling.stop == ("again",)


async def test_the_length_that_ended_an_answer_is_that_of_the_run(
    policy: Callable[..., EpisodePolicy], text: ModelText
) -> None:
    engine = ScriptedEngine(lambda prompt: text.renderer.encode("it again"))
    await engine.start()
    async with AgentSession(policy(engine=engine, sampling=SamplingParams(max_new_tokens=2))) as session:
        _, answer = await post(session, {"text": "say", "sampling_params": {"max_new_tokens": 1000}}, "/generate")
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


async def test_a_form_that_the_stop_string_of_the_run_cuts_off_is_answered(
    policy: Callable[..., EpisodePolicy], text: ModelText
) -> None:
    engine = ScriptedEngine(lambda prompt: text.renderer.encode("<tool_call>\n"))
    await engine.start()
    episode = policy(engine=engine, sampling=SamplingParams(max_new_tokens=64, stop=("\n",)))
    async with AgentSession(episode, enforces_forms=True) as session:
        status, answer = await post(session, ASK | {"tools": TOOLS, "tool_choice": "required"})
    assert (status, answer["choices"][0]["message"].get("tool_calls")) == (200, None)


async def test_a_session_has_its_own_routes_and_no_others(policy: Callable[..., EpisodePolicy]) -> None:
    episode = policy(max_turns=1)
    engine: Any = episode.engine
    await engine.start()
    ended: list[int] = []
    async with AgentSession(episode, on_end=lambda: ended.append(1)) as session, aiohttp.ClientSession() as http:
        async with http.get(f"{session.url}/v1/models") as models:
            assert models.status == 200
        other = session.url.replace(session.key, "0" * 32)
        for url in (
            f"{other}/v1/models",
            f"{session.url}/trajectories",
            session.url,
            session.url.split("/sessions")[0],
        ):
            async with http.get(url) as answer:
                assert answer.status == 404, url
        assert (await post(session, {"reward": 1.0}, "/reward"))[0] == 404
        assert [(await post(session, ASK))[0] for _ in range(2)] == [200, 403]
    assert ended == [1]
    trajectory = session.trajectory({}, reward=0.0, info={})
    assert (len(trajectory.turns), trajectory.finish_reason) == (1, "max_turns")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", ASK | {"n": 4}),
        ("/v1/chat/completions", ASK | {"n": 4, "stream": True}),
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"], "n": 2}),
        ("/v1/completions", {"model": "m", "prompt": ["a", "b"], "n": 2, "stream": True}),
    ],
)
async def test_a_request_takes_the_turns_of_all_its_choices_or_none(
    policy: Callable[..., EpisodePolicy], path: str, body: dict[str, Any]
) -> None:
    episode = policy(max_turns=6)
    engine: Any = episode.engine
    await engine.start()
    async with AgentSession(episode) as session:
        assert (await post(session, ASK | {"n": 3}))[0] == 200
        status, refused = await post(session, body, path)
        said = "3 of the episode's 6 turns are taken (env.max_turns), and it has asked for more than were left"
        assert (status, refused["error"]["message"]) == (403, said)
        assert (await post(session, ASK))[0] == 403  # it ends
    assert [request.request_id for request in engine.requests] == ["row-0", "row-1", "row-2"]
    assert (session.turns, session.refused) == (3, 2)


async def test_a_request_without_places_for_all_its_choices_takes_no_turn(policy: Callable[..., EpisodePolicy]) -> None:
    episode = policy(max_turns=65)
    engine: Any = episode.engine
    await engine.start()
    async with AgentSession(episode) as session:
        assert (await post(session, {"model": "m", "prompt": ["a"] * 65}, "/v1/completions"))[0] == 400
        await engine.pause()
        running = asyncio.create_task(post(session, ASK))
        while not engine.requests:
            await asyncio.sleep(0)
        assert (await post(session, ASK | {"n": 64}))[0] == 429
        assert len(engine.requests) == 1
        await engine.resume()
        assert (await running)[0] == 200
        assert [(await post(session, ASK | {"n": n}))[0] for n in (64, 1)] == [200, 403]


async def test_an_agent_without_turns_left_keeps_those_that_are_being_sampled(
    policy: Callable[..., EpisodePolicy],
) -> None:
    episode = policy(max_turns=3)
    engine: Any = episode.engine
    await engine.start()
    await engine.pause()
    ended: list[int] = []
    async with AgentSession(episode, on_end=lambda: ended.append(1)) as session:
        running = [asyncio.create_task(post(session, ASK | {"n": n})) for n in (2, 1)]
        while len(engine.requests) < 3:
            await asyncio.sleep(0)
        assert (await post(session, ASK))[0] == 403
        assert ended == []
        await engine.resume()
        assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]
        assert (session.turns, ended) == (3, [1])


async def test_a_session_that_cannot_be_served_costs_its_episode_alone(
    policy: Callable[..., EpisodePolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        async with AgentSession(policy()):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert soft > 65_536 or soft == hard
        monkeypatch.setattr(socket, "getaddrinfo", full)
        with pytest.raises(EnvironmentFailure, match=r"session of an agent cannot be served: .*Too many open files"):
            async with AgentSession(policy()):
                pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_an_episode_ends_for_its_length_if_its_last_turn_fills_the_context(
    policy: Callable[..., EpisodePolicy],
) -> None:
    ends: list[str] = []
    most = 512
    for asked in (2, 64):
        episode = policy(max_seq_len=most)
        engine: Any = episode.engine
        await engine.start()
        async with AgentSession(episode) as session:
            await post(session, ASK | {"max_tokens": asked})
        (request,) = engine.requests
        most = len(request.prompt_token_ids) + 2  # of the next one
        trajectory = session.trajectory({}, reward=0.0, info={})
        assert trajectory.turns[0].finish_reason == "length"
        ends.append(trajectory.finish_reason)
    assert ends == ["done", "max_seq_len"]
