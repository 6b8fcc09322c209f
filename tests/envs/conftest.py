"""The calculator's tasks, and many episodes that leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.envs.calculator import CalculatorFactory
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.trajectory import Trajectory
from tests.envs.playing import play, scratch_renderer


@pytest.fixture(scope="session")
def factory() -> CalculatorFactory:
    return CalculatorFactory()


@pytest.fixture(scope="session")
def scratch() -> ChatRenderer:
    return scratch_renderer()


@pytest.fixture
def play_many(scratch: ChatRenderer) -> Callable[..., Any]:
    """Plays episodes, eight at a time, with a policy that says what ``said`` makes of the text so far.

    What was sampled is what is trained on, token by token, and no process, descriptor or task is left.
    """

    async def play_them(environments: Any, said: Callable[[str], str], **options: Any) -> list[Trajectory | Exception]:
        played = await play(environments, said, renderer=scratch, **options)
        assert (played.drift_tokens, played.left) == (0, [])
        return played.ended

    return play_them
