"""Whole runs that train on groups more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.tasks.run import train


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("replay", {"max_uses": 2}),
        pytest.param("buffers.remote:RemoteReplayBuffer", {"max_uses": 2}, marks=pytest.mark.slow),
        pytest.param("replay", {"max_uses": 2, "samples_per_insert": 2.0}, marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_while_a_group_still_waits_for_room_in_the_buffer(
    small_config: Callable[..., Config], kind: str, options: dict[str, Any]
):
    config = small_config(
        steps=12, staleness={"policy": "mask"}, buffer={"kind": kind, "options": options}, eval={"tasks": 0}
    )
    summary = train(config)
    assert summary["weight_version"] == 12
    tokens = summary["tokens"]
    assert tokens["generated"] == tokens["trained"] + sum(tokens["dropped"].values()) + tokens["in_flight"]
