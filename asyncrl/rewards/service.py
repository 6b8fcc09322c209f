"""Rules that call a service: a reward over HTTP, and a language model as a judge."""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import TYPE_CHECKING, Any

from asyncrl.errors import ConfigError, EnvironmentDeadlineError, EnvironmentFailure, RewardError
from asyncrl.rewards.rules import Answer, Verdict
from asyncrl.rewards.scoring import check_count, check_seconds, checked_value
from asyncrl.rewards.scoring_program import as_value
from asyncrl.runtime import run_all

if TYPE_CHECKING:
    import aiohttp


_LARGEST_REPLY_BYTES = 1 << 24
_FIRST_DELAY_S = 0.1
_RETRIED = {408, 425, 429, 500, 502, 503, 504}
_OF_ONE_REQUEST = {400, 413, 422}
"""Refuse what it holds, such as an answer that is too long: the next one may be taken."""


class JSONService:
    """Posts JSON to one URL, with at most ``concurrency`` requests at a time.

    Failed connections and status 408, 425, 429 and 5xx are retried until the deadline, after a pause that doubles.

    Redirects are not followed, because they might send the key elsewhere.

    Args:
        url: of all requests.
        deadline_s: for one answer, all attempts together; waiting for one of the ``concurrency`` places does not count.
        concurrency: requests at once.
        key_variable: environment variable that holds a bearer token; empty for none.
    """

    def __init__(self, url: str, *, deadline_s: float, concurrency: int, key_variable: str = "") -> None:
        if not re.match(r"https?://[^/\s]+", url):
            raise ConfigError(f"url is {url!r}", path="url", remedy="http://host:port/path")
        check_seconds("deadline_s", deadline_s)
        check_count("concurrency", concurrency)
        if key_variable and not os.environ.get(key_variable):
            raise ConfigError(
                f"api_key_env names {key_variable}, which is not set here", path="api_key_env", remedy="set it"
            )
        self.url = url
        self._deadline_s = deadline_s
        self._running = asyncio.Semaphore(concurrency)
        self._key = os.environ.get(key_variable, "") if key_variable else ""
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: dict[str, Any]) -> Any:
        """Post ``body`` and return the decoded JSON of the reply.

        Raises:
            EnvironmentDeadlineError: no attempt succeeded before the deadline.
            EnvironmentFailure: the service refused what the request holds (status 400, 413, 422).
            RewardError: it refused the request otherwise, or its reply is not JSON.
        """
        last = "no reply"
        try:
            async with self._running, asyncio.timeout(self._deadline_s):
                delay_s = _FIRST_DELAY_S
                while True:
                    answered, last = await self._try(body)
                    if answered is not None:
                        return answered[0]
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, self._deadline_s)
        except TimeoutError:
            raise EnvironmentDeadlineError(
                f"{self.url} gave no answer within {self._deadline_s:g} s; last attempt: {last}"
            ) from None

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _try(self, body: dict[str, Any]) -> tuple[tuple[Any] | None, str]:
        """Make one attempt: return the decoded reply in a tuple, or None and the reason to retry."""
        import aiohttp

        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            self._session = aiohttp.ClientSession(
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),  # whose queue would count among the deadline
            )
        try:
            async with self._session.post(self.url, json=body, allow_redirects=False) as reply:
                content = await _read(reply.content)
                status = reply.status
        except (aiohttp.ClientError, OSError) as error:
            return None, f"{type(error).__name__}: {error}"
        shown = content[:200].decode("utf-8", "replace").strip()
        if status in _RETRIED:
            return None, f"status {status}: {shown}"
        if not 200 <= status < 300:
            refused = f"{self.url} refused a request with status {status}: {shown}"
            if status in _OF_ONE_REQUEST:
                raise EnvironmentFailure(refused)
            raise RewardError(refused, how="raised")
        if len(content) > _LARGEST_REPLY_BYTES:
            raise RewardError(f"{self.url} answered more than the limit of {_LARGEST_REPLY_BYTES} bytes", how="value")
        try:
            return (json.loads(content),), ""
        except (ValueError, RecursionError) as error:  # also of an integer of too many digits
            raise RewardError(f"{self.url} must answer JSON, got: {shown}", how="value") from error


async def _read(content: aiohttp.StreamReader) -> bytes:
    """Read to the end, or to one byte past the limit; a single ``read(n)`` returns only what has arrived so far."""
    parts: list[bytes] = []
    left = _LARGEST_REPLY_BYTES + 1
    while left and (part := await content.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


JUDGE_PROMPT = """You grade the answer to a question. Compare it with the reference answer.

Question:
{question}

Reference answer:
{ground_truth}

Answer to grade:
{answer}

Explain briefly. Then write a last line "Score: N", with a whole number N from {low} (wrong) to {high} (all right)."""


class HTTPRule:
    """Scores over HTTP: ``POST url`` with verl's four arguments and ``prompt`` as JSON returns a number.

    The reply may also be a table with ``score``, whose other numbers become parts. Limits and retries are those of
    :class:`JSONService`; a request that is refused for more than what it holds ends the run, as each would be.

    Args:
        url, deadline_s, concurrency: as for :class:`JSONService`.
        api_key_env: environment variable that holds a bearer token.
    """

    def __init__(self, *, url: str, deadline_s: float = 60.0, concurrency: int = 64, api_key_env: str = "") -> None:
        self._service = JSONService(url, deadline_s=deadline_s, concurrency=concurrency, key_variable=api_key_env)

    async def judge(self, answer: Answer) -> Verdict:
        reply = await self._service.post({**answer.as_arguments(), "prompt": list(answer.prompt)})
        try:
            return Verdict.of(checked_value(as_value(reply)))
        except RewardError as error:
            raise RewardError(f"{self._service.url} {error}", how="value") from None

    async def close(self) -> None:
        await self._service.close()


class JudgeRule:
    """Scores with a language model as a judge, behind any OpenAI chat completions API (``asyncrl serve`` has one).

    Args:
        base_url: up to and including ``/v1``.
        model: its name there.
        prompt: template with ``{question}``, ``{answer}``, ``{ground_truth}``, ``{low}`` and ``{high}``.
        pattern: its first group is the score in the judge's text; the last match counts.
        low, high: the scale, which is mapped to 0..1.
        votes: judgements of one answer; the score is their mean, the part ``agreement`` the share of the commonest.
        max_tokens, temperature: of the judge.
        attempts: requests for one vote until the judge writes a score; then the rollout fails.
        deadline_s, concurrency, api_key_env: as for :class:`HTTPRule`.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        prompt: str = JUDGE_PROMPT,
        pattern: str = r"[Ss]core\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)",
        low: float = 0.0,
        high: float = 10.0,
        votes: int = 1,
        max_tokens: int = 512,
        temperature: float = 0.0,
        attempts: int = 3,
        deadline_s: float = 120.0,
        concurrency: int = 32,
        api_key_env: str = "",
    ) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"pattern is {pattern!r}: {error}", path="pattern", remedy="a regular expression"
            ) from error
        if self._pattern.groups < 1:
            raise ConfigError(f"pattern is {pattern!r}", path="pattern", remedy="its first group is the score")
        if not low < high:
            raise ConfigError(f"the scale goes from {low} to {high}", path="high", remedy="more than low")
        check_count("votes", votes)
        check_count("attempts", attempts)
        if "{answer}" not in prompt:
            raise ConfigError(
                "the judge's prompt has no {answer}", path="prompt", remedy="add {answer} where the answer belongs"
            )
        self._service = JSONService(
            f"{base_url.rstrip('/')}/chat/completions",
            deadline_s=deadline_s,
            concurrency=concurrency,
            key_variable=api_key_env,
        )
        self._body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
        self._prompt, self._low, self._high = prompt, low, high
        self._votes, self._attempts = votes, attempts

    async def judge(self, answer: Answer) -> Verdict:
        question = next((str(each["content"]) for each in reversed(answer.prompt) if each["role"] == "user"), "")
        filled = {
            "question": question,
            "answer": answer.solution_str,
            "ground_truth": str(answer.ground_truth),
            "low": f"{self._low:g}",
            "high": f"{self._high:g}",
        }
        # In one pass: a placeholder inside the answer is not replaced.
        text = re.sub(r"\{(question|answer|ground_truth|low|high)\}", lambda found: filled[found[1]], self._prompt)
        scores = await run_all(self._vote(text, number) for number in range(self._votes))
        agreement = max(map(scores.count, scores)) / len(scores)
        return Verdict(score=sum(scores) / len(scores), parts={"agreement": agreement} if self._votes > 1 else {})

    async def close(self) -> None:
        await self._service.close()

    async def _vote(self, text: str, number: int) -> float:
        content = ""
        for attempt in range(self._attempts):
            body = {**self._body, "messages": [{"role": "user", "content": text}]}
            if self._votes > 1 or attempt:
                body["seed"] = number * self._attempts + attempt
            reply = await self._service.post(body)
            try:
                content = str(reply["choices"][0]["message"]["content"] or "")
            except (KeyError, IndexError, TypeError) as error:
                shown = json.dumps(reply)[:200]
                raise RewardError(f"{self._service.url} must answer a chat completion: {shown}", how="value") from error
            if found := list(self._pattern.finditer(content)):
                score = float(found[-1][1])
                if self._low <= score <= self._high:
                    return (score - self._low) / (self._high - self._low)
        raise EnvironmentFailure(
            f"the judge at {self._service.url} wrote no score from {self._low:g} to {self._high:g} in {self._attempts} "
            f"attempts; last reply: {content[-200:]!r}"
        )
