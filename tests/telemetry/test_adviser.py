"""The bottleneck of a run, from shares worked by hand, of simulated runs, and of a real one."""

import asyncio
import json
import math
from dataclasses import replace

import pytest

from asyncrl.rollout.work import EpisodeTimes
from asyncrl.simulation import Distribution, Scenario, simulate
from asyncrl.tasks.run import train
from asyncrl.telemetry import report_text
from asyncrl.telemetry.adviser import LEAST_PERCENT, advise, slowdown
from asyncrl.testing.clock import run_virtually

EVEN = {"rows_generate_s": 80.0, "generate_s": 10.0, "rows": 100.0, "rows_load": 100 * math.log(8)}
"""Rows of one replica: eight at a time, all the time."""
SHARED = {"requests": 2.0, "load": 3.0, "pace": 3.0, "load_load": 5.0, "load_pace": 5.0}
"""Two requests, at loads of e and e^2; the second was slower by e."""
TAIL = SHARED | {"rows_generate_s": 17.0, "generate_s": 10.0, "rows": 8.0, "rows_load": 7 * math.log(8) + math.log(1.7)}
"""A tail: eight rows for a second and one of them for nine, 1.7 at a time; 6.6 over the rows."""


def summary(trainer, replica=None, *, episodes=EVEN | SHARED, work_s=None, tokens=None, **processes):
    idle = {"trainer": trainer, "rollout-0": replica or {"generate": 90.0, "staleness bound": 10.0}, **processes}
    return {"idle": idle, "episodes": episodes, "work_s": work_s or {"rollout": 10.0}, "tokens": tokens or {}}


WAITS = {"update": 30.0, "rollouts": 70.0}
CONFIG = {"max_staleness": 1, "rollout": {"replicas": 2}, "staleness": {"policy": "mask"}, "trainer": {"world_size": 1}}


@pytest.mark.parametrize(
    ("found", "changes", "cause", "key", "direction"),
    [
        (summary(WAITS), {}, "rollout", "rollout.replicas", "up"),
        (
            summary(WAITS, episodes=EVEN | SHARED | {"pace": 2.0, "load_pace": 3.0}),
            {},
            "staleness bound",
            "max_staleness",
            "up",
        ),
        (
            summary(WAITS, {"generate": 55.0, "staleness bound": 45.0}),
            {"max_staleness": 0},
            "staleness bound",
            "max_staleness",
            "up",
        ),
        (summary(WAITS, episodes=TAIL), {}, "long tail", "rollout.max_new_tokens", "down"),
        (
            summary(WAITS, episodes=TAIL),
            {"staleness": {"policy": "wait"}},
            "long tail",
            "staleness.policy",
            "mask",
        ),
        (summary(WAITS, episodes=EVEN | {"rows_environment_s": 90.0}), {}, "environment", "max_staleness", "up"),
        (
            summary(WAITS, episodes=EVEN | {"rows_environment_s": 90.0}),
            {"env": {"latency_s": 2.0}},
            "environment",
            "env.latency_s",
            "down",
        ),
        (summary(WAITS, {"generate": 60.0, "restart": 40.0}), {}, "replicas", "rollout.options", "check"),
        (summary(WAITS, {"generate": 60.0, "buffer": 40.0}), {}, "buffer", "buffer.capacity_groups", "up"),
        (summary(WAITS, {"generate": 40.0, "publication": 60.0}), {}, "publication", "trainer.groups_per_step", "up"),
        (summary(WAITS, work_s={"rollout": 10.0, "reward": 11.0}), {}, "reward", "reward.workers", "up"),
        (summary({"update": 40.0, "reward": 40.0, "rollouts": 20.0}), {}, "reward", "reward.workers", "up"),
        (
            summary({"update": 40.0, "publication": 60.0}),
            {"weights": {"transport": "disk"}},
            "publication",
            "weights.transport",
            "shared_memory",
        ),
        (summary({"update": 70.0, "checkpoint": 30.0}), {}, "checkpoint", "checkpoint.every", "up"),
        (summary({"update": 70.0, "evaluation": 30.0}), {}, "evaluation", "eval.every", "up"),
        (
            summary({"update": 99.0}, {"generate": 30.0, "staleness bound": 70.0}),
            {},
            "update",
            "trainer.world_size",
            "up",
        ),
        (summary({"update": 99.0}, {"generate": 50.0, "prompts": 50.0}), {}, "prompts", "env.options", "check"),
        (summary(WAITS, driver={"prompts": 60.0, "rollouts": 40.0}), {}, "prompts", "env.options", "check"),
        (
            summary({"update": 90.0}, tokens={"trained": 10, "dropped": {"zero_variance": 90}}),
            {},
            "filters",
            "trainer.group_size",
            "up",
        ),
    ],
)
def test_a_bottleneck_is_named_with_its_figure_and_the_key_to_change(found, changes, cause, key, direction):
    advice = advise(found, CONFIG | changes)
    assert advice is not None
    assert (advice.cause, advice.key, advice.direction) == (cause, key, direction)
    assert f"{advice.figure:.0f} %" in advice.sentence
    assert key in advice.sentence
    assert advice.sentence in report_text({"advice": {"sentence": advice.sentence}})


def test_the_sentence_has_the_value_of_now():
    found = summary(WAITS, episodes=EVEN | {"rows_environment_s": 90.0})
    advice = advise(found, CONFIG | {"env": {"latency_s": 0.6345069121912941}})
    assert advice is not None
    assert advice.sentence == (
        "the bottleneck is the environment: the trainer waits for groups 70 % of the time, and most of the time of a "
        "rollout is spent in the environment; lower env.latency_s (now 0.634507)"
    )


def test_tokens_past_the_bound_are_told_from_waiting_for_it():
    found = summary({"update": 90.0}, tokens={"trained": 40, "dropped": {"masked": 40, "stale": 20}})
    advice = advise(found, CONFIG)
    assert advice is not None
    assert advice.sentence == (
        "the bottleneck is the staleness bound, past which 60 % of the tokens are not trained on; raise max_staleness "
        "(now 1), or set staleness.policy to 'wait'"
    )


@pytest.mark.parametrize(
    "found",
    [
        summary({"update": 80.0, "rollouts": 20.0}),
        summary({"update": 95.0, "rollouts": 5.0}, {"generate": 55.0, "staleness bound": 45.0}),
        summary({"update": 60.0, "pause": 40.0}),
        summary({"update": 55.0, "rollouts": LEAST_PERCENT - 1, "publication": 20.0}),
        summary({"update": 90.0}, tokens={"trained": 80, "dropped": {"masked": 10, "zero_variance": 10}}),
        summary({}),
    ],
)
def test_a_healthy_run_gets_no_advice(found):
    assert advise(found, CONFIG) is None


def test_how_much_requests_slow_one_another_down():
    assert slowdown(SHARED) == 1.0
    assert slowdown({**SHARED, "pace": 2.0, "load_pace": 3.0}) == 0.0  # the same pace for both
    assert slowdown({}) == slowdown({"requests": 5.0, "load": 10.0, "load_load": 20.0, "pace": 1.0}) == 1.0


async def batches(*batches_of_turns):
    """Run batches one after another, each of episodes of so many turns of a second; return where their time went."""
    times = EpisodeTimes()

    async def episode(turns):
        with times.episode():
            for _ in range(turns):
                with times.request() as tokens:
                    await asyncio.sleep(1)
                    tokens.append(8)

    for batch in batches_of_turns:
        async with asyncio.TaskGroup() as tasks:
            for turns in batch:
                tasks.create_task(episode(turns))
    return times.totals


def rollout_cause(totals):
    busy = {"generate": 94.0, "publication": 5.0, "staleness bound": 1.0}
    advice = advise(summary(WAITS, busy, episodes=totals), CONFIG)
    assert advice is not None
    return advice.cause


def test_a_burst_at_the_start_of_a_run_is_no_long_tail():
    # 16 at once, then 4 at a time for 40 s: 4.3 over the time, 4.5 over the rows
    assert rollout_cause(run_virtually(batches([1] * 16, *[[1] * 4] * 40), seed=0)) == "staleness bound"
    # always 16 and then one of them alone, for 16 turns: 1.9 over the time, 14 over the rows
    assert rollout_cause(run_virtually(batches(*[[1] * 15 + [17]] * 3), seed=0)) == "long tail"


BALANCED = Scenario(
    steps=12,
    groups_per_step=4,
    group_size=4,
    tokens=Distribution.parse("uniform(8, 24)"),
    token_s=1 / 32,
    saturation=12,
    update_s=Distribution.parse("1"),
)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, None),
        ({"saturation": 3}, "rollout"),
        ({"max_staleness": 0, "token_s": 1 / 16, "saturation": 100}, "staleness bound"),
        ({"update_s": Distribution.parse("5")}, "update"),
        ({"publish_s": 2.0}, "publication"),
        ({"checkpoint_every": 1, "checkpoint_s": 1.0}, "checkpoint"),
        ({"reward_s": Distribution.parse("4")}, "reward"),
        ({"turns": 2, "turn_s": Distribution.parse("uniform(1, 3)")}, "environment"),
    ],
)
def test_planted_bottlenecks_of_simulated_runs(changes, cause):
    scenario = replace(BALANCED, **changes)
    result = simulate(scenario)
    found = {name: getattr(result, name) for name in ("idle", "episodes", "work_s", "tokens")}
    advice = advise(found, {"max_staleness": scenario.max_staleness})
    assert (advice and advice.cause) == cause


def test_a_run_with_a_slow_environment_names_it(small_config):
    config = small_config(steps=5, env={"latency_s": 0.1}, eval={"tasks": 0})
    advice = train(config)["advice"]
    assert (advice["cause"], advice["key"], advice["direction"]) == ("environment", "env.latency_s", "down")
    (run,) = config.runs.glob("small-2*")
    assert json.loads((run / "summary.json").read_text())["advice"] == advice
