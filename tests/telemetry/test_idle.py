"""What every process did or waited for: hand-worked times, and simulated runs whose shares sum to 100 %."""

import asyncio
import math
import random

import pytest

from asyncrl.rollout.work import EpisodeTimes, sum_totals
from asyncrl.simulation import Distribution, Fault, Scenario, simulate
from asyncrl.telemetry import Timeline, report_text
from asyncrl.telemetry.idle import ProcessTimes, idle_cause, idle_shares, trainer_cause
from asyncrl.testing.clock import run_virtually
from tests.telemetry.test_timeline import Clock


@pytest.mark.parametrize(
    ("now", "trainer", "replica"),
    [
        ((), "not recorded", "no group"),
        (("train", ("issue", "staleness bound")), "update", "staleness bound"),
        (("train", "publish", ("issue", "staleness bound")), "update", "publication"),
        ((("train", "rollouts"), "rollout", "reward"), "rollouts", "no group"),
        ((("train", "rollouts"), "reward"), "reward", "no group"),
        ((("train", "rollouts"), "publish", ("issue", "staleness bound")), "publication", "publication"),
        ((("train", "rollouts"), "prompts"), "prompts", "prompts"),
        (("checkpoint", ("issue", "staleness bound")), "checkpoint", "checkpoint"),
        ((("train", "evaluation"), "evaluate", ("issue", "room in the buffer")), "evaluation", "buffer"),
        ((("train", "pause"), ("issue", "pause"), "rollout"), "pause", "pause"),
        ((("train", "publication"), "publish", ("issue", "end of the run")), "publication", "end of the run"),
    ],
)
def test_one_cause_at_a_time(now, trainer, replica):
    assert (trainer_cause(now), idle_cause(now)) == (trainer, replica)


def test_the_times_of_every_process_sum_to_the_whole():
    clock = Clock()
    timeline = Timeline(clock=clock)
    timeline.replica_state("replica", "idle")
    with timeline.span("rollout", "before the loop"):
        clock.now_s += 7
    with timeline.processes():
        clock.now_s += 1  # nothing is known of it
        with timeline.wait("train", "rollouts"), timeline.span("rollout", "group 0"):
            timeline.replica_state("replica", "busy")
            clock.now_s += 4
        with timeline.wait("train", "rollouts"), timeline.span("reward", "group 0"):
            timeline.replica_state("replica", "restart")
            clock.now_s += 2
        timeline.replica_state("replica", "idle")
        with timeline.span("train", "step 1"), timeline.wait("issue", "staleness bound"):
            clock.now_s += 3
        assert timeline.process_s()["trainer"]["update"] == 3
    clock.now_s += 100  # after the loop
    assert timeline.process_s() == {
        "trainer": {"not recorded": 1, "rollouts": 4, "reward": 2, "update": 3},
        "reward": {"no group": 1, "rollouts": 4, "reward": 2, "staleness bound": 3},
        "replica": {"no group": 1, "busy": 4, "restart": 2, "staleness bound": 3},
    }
    shares = idle_shares(timeline.process_s(), {"replica": {"generate_s": 3.0, "environment_s": 0.5}})
    assert shares["replica"] == pytest.approx(
        {"generate": 30, "staleness bound": 30, "restart": 20, "no group": 10, "environment": 5, "transfer": 5}
    )
    assert "replica" in report_text({"idle": shares})
    assert "trainer  rollouts 40.0 %, update 30.0 %, reward 20.0 %, not recorded 10.0 %" in report_text(
        {"idle": shares}
    )


def test_a_process_that_is_new_has_the_time_before_it_unrecorded():
    times = ProcessTimes()
    assert times.seconds(1.0) == {}
    times.begin(0.0)
    times.replica("late", "idle", 6.0)
    assert times.seconds(8.0)["late"] == {"no group": 2.0, "not recorded": 6.0}


def test_replicas_come_after_the_others_in_the_order_of_their_numbers():
    times = ProcessTimes()
    for number in (10, 2, 1):
        times.replica(f"rollout-{number}", "idle", 0.0)
    times.begin(0.0)
    times.changed({"prompts"}, 1.0)
    assert [*times.seconds(2.0)] == ["trainer", "driver", "rollout-1", "rollout-2", "rollout-10"]


def test_where_the_time_of_episodes_goes():
    said = []

    async def run():
        times = EpisodeTimes()

        async def episode(engine_s, tool_s):
            with times.episode():
                with times.request() as tokens:
                    await asyncio.sleep(engine_s)
                    tokens.append(10)
                with times.at("environment"):
                    await asyncio.sleep(tool_s)
                    said.append(times.explain() if tool_s == 1 else "")
                await asyncio.sleep(1)

        await asyncio.sleep(5)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(episode(2, 4))
            tasks.create_task(episode(4, 1))
        return times.totals

    totals = run_virtually(run(), seed=0)
    assert {name: value for name, value in totals.items() if name.endswith("_s")} == {
        "generate_s": 4,  # 0..4
        "environment_s": 2,  # 4..6
        "episodes_s": 1,
        "rows_generate_s": 6,
        "rows_environment_s": 5,
        "rows_episodes_s": 2,
    }
    assert (totals["requests"], totals["rows"]) == (2, 2)
    assert totals["rows_load"] == pytest.approx(math.log(13 / 7) + math.log(2))  # two of 0..6, one of 6..7
    assert sum_totals([totals, totals])["generate_s"] == 8
    assert said[0] == "2 in the environment or its reward, the longest for 3 s"


@pytest.mark.parametrize("seed", range(10))
def test_shares_of_simulated_runs_sum_to_100(seed):
    dice = random.Random(seed)
    result = simulate(
        Scenario(
            steps=6,
            groups_per_step=dice.randint(1, 3),
            group_size=2,
            max_staleness=dice.randint(0, 2),
            policy=dice.choice(("mask", "wait", "drop")),
            tokens=Distribution.parse("lognormal(2, 1)"),
            turns=2,
            turn_s=Distribution.parse("exponential(0.5)"),
            replicas=dice.randint(1, 3),
            saturation=2,
            reward_s=Distribution.parse("exponential(1)") if seed % 2 else None,
            publish_s=dice.random(),
            checkpoint_every=2,
            faults=(Fault(kind="crash", at=4),),
            seed=seed,
        )
    )
    assert result.violations == []
    assert len(result.idle) >= 2
    for causes in result.idle.values():
        assert sum(causes.values()) == pytest.approx(100)
        assert causes.get("not recorded", 0) < 1
