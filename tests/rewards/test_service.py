"""Rewards from services: over HTTP, and from a language model as a judge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure, RewardError
from asyncrl.rewards.rules import Answer, RewardRule, Verdict
from asyncrl.rewards.service import HTTPRule, JudgeRule

ANSWER = Answer(
    data_source="essays",
    solution_str="Paris {ground_truth}",
    ground_truth="Paris",
    extra_info={"index": 1},
    prompt=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital of France?"}),
)

Reply = Callable[[dict[str, Any]], web.Response]


class Service:
    """A server on this machine that keeps what it was asked, and answers with its replies in turn."""

    def __init__(self, *replies: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.paths: list[str] = []
        self._replies = list(replies)

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("Authorization", ""))
        self.paths.append(request.path)
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        return reply() if callable(reply) else web.json_response(reply)


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/{path:.*}", service.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def verdict(rule: RewardRule) -> Verdict:
    try:
        return await rule.judge(ANSWER)
    finally:
        await rule.close()


def status(code: int, text: str = "") -> Callable[[], web.Response]:
    return lambda: web.Response(status=code, text=text)


async def test_verls_arguments_go_out_and_a_number_comes_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("REWARD_KEY", "k")
    service = Service({"score": 0.5, "style": 1})
    async with serving(service) as url:
        assert await verdict(HTTPRule(url=f"{url}/score", api_key_env="REWARD_KEY")) == Verdict(
            score=0.5, parts={"style": 1.0}
        )
    (body,) = service.asked
    assert body == {**ANSWER.as_arguments(), "prompt": list(ANSWER.prompt)}
    assert (service.keys, service.paths) == (["Bearer k"], ["/score"])


async def test_a_reply_in_pieces_is_read_to_its_end():
    async def slowly(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in (b'{"sco', b're": 0.', b"25}"):
            await response.write(piece)
            await asyncio.sleep(0.01)
        return response

    app = web.Application()
    app.router.add_post("/", slowly)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        assert await verdict(HTTPRule(url=f"http://127.0.0.1:{runner.addresses[0][1]}/")) == Verdict(score=0.25)
    finally:
        await runner.cleanup()


async def test_transient_failures_are_retried():
    service = Service(status(503), status(429), 1)
    async with serving(service) as url:
        assert await verdict(HTTPRule(url=url)) == Verdict(score=1.0)
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (status(404, "no such rule"), RewardError, "refused a request with status 404: no such rule"),
        (status(302), RewardError, "status 302"),
        (status(413, "too long"), EnvironmentFailure, "refused a request with status 413: too long"),
        (status(200, "high"), RewardError, "must answer JSON, got: high"),
        ({"value": 1}, RewardError, "a table without 'score'"),
        ("high", RewardError, "'high' of type str"),
        (status(500, "ill"), EnvironmentDeadlineError, "no answer within 0.25 s; last attempt: status 500: ill"),
    ],
)
async def test_no_failure_is_a_score(reply: Any, error: type[Exception], message: str):
    async with serving(Service(reply)) as url:
        with pytest.raises(error, match=message):
            await verdict(HTTPRule(url=url, deadline_s=0.25))


async def test_the_deadline_does_not_include_waiting_for_a_place():
    async def slowly(request: web.Request) -> web.Response:
        await asyncio.sleep(0.2)
        return web.json_response(1)

    app = web.Application()
    app.router.add_post("/", slowly)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    rule = HTTPRule(url=f"http://127.0.0.1:{runner.addresses[0][1]}/", deadline_s=1.0, concurrency=1)
    try:
        verdicts = await asyncio.gather(*(rule.judge(ANSWER) for _ in range(8)))
    finally:
        await rule.close()
        await runner.cleanup()
    assert [each.score for each in verdicts] == [1.0] * 8


async def test_as_many_requests_run_at_once_as_the_concurrency_says():
    all_here = asyncio.Barrier(101)

    async def together(request: web.Request) -> web.Response:
        await all_here.wait()
        return web.json_response(1)

    app = web.Application()
    app.router.add_post("/", together)
    async with TestServer(app) as server:
        rule = HTTPRule(url=str(server.make_url("/")), deadline_s=10.0, concurrency=101)
        verdicts = await asyncio.gather(*(rule.judge(ANSWER) for _ in range(101)))
        await rule.close()
    assert [each.score for each in verdicts] == [1.0] * 101


async def test_an_unreachable_service_raises_at_the_deadline():
    async with serving(Service(1)) as url:
        pass
    with pytest.raises(EnvironmentDeadlineError, match="ClientConnectorError"):
        await verdict(HTTPRule(url=url, deadline_s=0.1))


def completion(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


async def test_the_last_score_in_the_judges_reply_counts():
    service = Service(completion("Not Score: 2 but good.\nScore: 8"))
    async with serving(service) as url:
        assert await verdict(JudgeRule(base_url=f"{url}/v1/", model="judge")) == Verdict(score=0.8)
    (body,) = service.asked
    assert service.paths == ["/v1/chat/completions"]
    assert (body["model"], body["temperature"]) == ("judge", 0.0)
    text = body["messages"][0]["content"]
    assert "Question:\nCapital of France?" in text
    assert "Answer to grade:\nParis {ground_truth}" in text  # an answer fills in nothing
    assert "from 0 (wrong) to 10" in text


async def test_votes_are_averaged_and_their_agreement_is_a_part():
    service = Service(completion("Score: 2"), completion("Score: 2"), completion("Score: 5"))
    async with serving(service) as url:
        rule = JudgeRule(base_url=url, model="judge", votes=3, low=1, high=5, concurrency=1)
        found = await verdict(rule)
    assert found.score == pytest.approx((0.25 + 0.25 + 1) / 3)
    assert found.parts == {"agreement": pytest.approx(2 / 3)}
    assert len({body["seed"] for body in service.asked}) == 3


async def test_a_reply_without_a_score_is_retried_and_then_raises():
    service = Service(completion("Good!"), completion("Score: 99"), completion("Score: 10"))
    async with serving(service) as url:
        assert (await verdict(JudgeRule(base_url=url, model="judge"))).score == 1.0
    async with serving(Service(completion("Good!"))) as url:
        with pytest.raises(EnvironmentFailure, match="wrote no score from 0 to 10 in 3 attempts; last reply: 'Good!'"):
            await verdict(JudgeRule(base_url=url, model="judge"))
    async with serving(Service({"error": "no such model"})) as url:
        with pytest.raises(RewardError, match="must answer a chat completion"):
            await verdict(JudgeRule(base_url=url, model="judge"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HTTPRule(url="ftp://x"), "url is"),
        (lambda: HTTPRule(url="http://x", deadline_s=0), "deadline_s is 0"),
        (lambda: HTTPRule(url="http://x", concurrency=0), "concurrency is 0"),
        (lambda: HTTPRule(url="http://x", api_key_env="ABSENT_KEY"), "ABSENT_KEY, which is not set"),
        (lambda: JudgeRule(base_url="http://x", model="m", pattern="("), "pattern"),
        (lambda: JudgeRule(base_url="http://x", model="m", pattern="x"), "its first group|pattern is 'x'"),
        (lambda: JudgeRule(base_url="http://x", model="m", low=1, high=1), "the scale"),
        (lambda: JudgeRule(base_url="http://x", model="m", votes=0), "votes is 0"),
        (lambda: JudgeRule(base_url="http://x", model="m", prompt="grade it"), "no {answer}"),
    ],
)
def test_values_out_of_range_are_refused(make: Callable[[], Any], message: str):
    with pytest.raises(ConfigError, match=message):
        make()
