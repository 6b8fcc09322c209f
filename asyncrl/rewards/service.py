"""Rules that are somebody else's: a reward over HTTP, and a language model as a judge."""

from __future__ import annotations

import asyncio
import json
import re

from asyncrl.errors import ConfigError, EnvironmentFailure, RewardError
from asyncrl.rewards.json_service import JSONService
from asyncrl.rewards.rule import Answer, Verdict
from asyncrl.rewards.scoring_process import checked_value
from asyncrl.rewards.scoring_program import as_value

__all__ = ["HTTPRule", "JudgeRule"]

JUDGE_PROMPT = """You grade the answer to a question. Compare it with the reference answer.

Question:
{question}

Reference answer:
{ground_truth}

Answer to grade:
{answer}

Explain briefly. Then write a last line "Score: N", with a whole number N from {low} (wrong) to {high} (all right)."""


class HTTPRule:
    """A reward by HTTP: ``POST url`` with verl's four arguments and ``prompt`` as JSON; a number comes back.

    The answer may also be a table with ``score``, whose other numbers become parts.

    Args:
        url: where to.
        deadline_s: for one answer, all tries together, from when it is sent: waiting for one of the ``concurrency``
            places does not count. Connections that fail and status 408, 425, 429 and 5xx are tried again; any other
            refusal ends the run, since it would be refused for ever.
        concurrency: requests at once.
        api_key_env: environment variable that holds a bearer token.
    """

    def __init__(self, *, url: str, deadline_s: float = 60.0, concurrency: int = 64, api_key_env: str = "") -> None:
        self._service = JSONService(url, deadline_s=deadline_s, concurrency=concurrency, key_variable=api_key_env)

    async def judge(self, answer: Answer) -> Verdict:
        """As :meth:`asyncrl.rewards.rule.RewardRule.judge`."""
        reply = await self._service.post({**answer.as_arguments(), "prompt": list(answer.prompt)})
        try:
            value = checked_value(as_value(reply))
        except RewardError as error:
            raise RewardError(f"{self._service.url} {error}", how="value") from None
        if isinstance(value, dict):
            return Verdict(score=value["score"], parts={name: part for name, part in value.items() if name != "score"})
        return Verdict(score=value)

    async def close(self) -> None:
        """Close its connections."""
        await self._service.close()


class JudgeRule:
    """A language model as a judge, behind any address that speaks OpenAI's chat completions (``asyncrl serve`` does).

    Args:
        base_url: up to and with ``/v1``.
        model: its name there.
        prompt: with ``{question}``, ``{answer}``, ``{ground_truth}``, ``{low}`` and ``{high}``, each filled in once.
        pattern: its first group is the score in the judge's text; the last match counts.
        low, high: the scale; scores become 0..1 on it.
        votes: opinions asked for; the score is their mean, ``agreement`` (a part) the share that equals the commonest.
        max_tokens, temperature: of the judge.
        attempts: times a judge is asked again that wrote no score; then it costs the rollout.
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
        if votes < 1 or attempts < 1:
            raise ConfigError(f"votes is {votes} and attempts {attempts}", path="votes", remedy="1 or more")
        if "{answer}" not in prompt:
            raise ConfigError("the judge's prompt has no {answer}", path="prompt", remedy="it is what is judged")
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
        """As :meth:`asyncrl.rewards.rule.RewardRule.judge`."""
        question = next((str(said["content"]) for said in reversed(answer.prompt) if said["role"] == "user"), "")
        filled = {
            "question": question,
            "answer": answer.solution_str,
            "ground_truth": str(answer.ground_truth),
            "low": f"{self._low:g}",
            "high": f"{self._high:g}",
        }
        # In one pass: an answer that writes {ground_truth} gets nothing for it.
        text = re.sub(r"\{(question|answer|ground_truth|low|high)\}", lambda found: filled[found[1]], self._prompt)
        try:
            async with asyncio.TaskGroup() as asked:
                votes = [asked.create_task(self._vote(text, number)) for number in range(self._votes)]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group.exceptions[0].__cause__
        scores = [vote.result() for vote in votes]
        agreement = max(map(scores.count, scores)) / len(scores)
        return Verdict(score=sum(scores) / len(scores), parts={"agreement": agreement} if self._votes > 1 else {})

    async def close(self) -> None:
        """Close its connections."""
        await self._service.close()

    async def _vote(self, text: str, number: int) -> float:
        said = ""
        for attempt in range(self._attempts):
            body = {**self._body, "messages": [{"role": "user", "content": text}]}
            if self._votes > 1 or attempt:
                body["seed"] = number * self._attempts + attempt
            reply = await self._service.post(body)
            try:
                said = str(reply["choices"][0]["message"]["content"] or "")
            except (KeyError, IndexError, TypeError) as error:
                shown = json.dumps(reply)[:200]
                raise RewardError(f"{self._service.url} answered no chat completion: {shown}", how="value") from error
            if found := list(self._pattern.finditer(said)):
                score = float(found[-1][1])
                if self._low <= score <= self._high:
                    return (score - self._low) / (self._high - self._low)
        raise EnvironmentFailure(
            f"the judge at {self._service.url} wrote no score from {self._low:g} to {self._high:g} in {self._attempts} "
            f"attempts; last: {said[-200:]!r}"
        )
