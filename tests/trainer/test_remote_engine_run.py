"""A whole run whose engine lives in a process of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncrl.config import Config
from asyncrl.tasks.run import train


@pytest.mark.slow
def test_weights_reach_an_engine_in_another_process(small_config: Callable[..., Config]):
    engine = {"engine": "remote", "options": {"engine": "transformers", "options": {"device": "cpu"}}}
    summary = train(small_config(steps=3, rollout=engine))
    tokens = summary["tokens"]
    assert tokens["trained"] > 0
    assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values()) + tokens["in_flight"]
    assert summary["staleness"]["max"] <= 1
