"""A served pool as the judge of a reward rule."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.errors import RewardError
from asyncrl.rewards.rules import Answer
from asyncrl.rewards.service import JudgeRule

ANSWER = Answer(
    data_source="essays",
    solution_str="fifty-six",
    ground_truth="56",
    prompt=({"role": "user", "content": "what is seven times eight"},),
)


async def test_a_judge_is_a_pool_behind_its_address(serve: Any):
    async with serve(lambda prompt: "say it: Score: 7") as served:
        rule = JudgeRule(base_url=f"{served.url}/v1", model="tiny", prompt="{answer}?", max_tokens=32)
        try:
            assert (await rule.judge(ANSWER)).score == pytest.approx(0.7)
        finally:
            await rule.close()


async def test_a_judge_with_an_unknown_model_is_an_error(serve: Any):
    async with serve() as served:
        rule = JudgeRule(base_url=f"{served.url}/v1", model="other", prompt="{answer}?")
        try:
            with pytest.raises(RewardError, match="status 404"):
                await rule.judge(ANSWER)
        finally:
            await rule.close()
