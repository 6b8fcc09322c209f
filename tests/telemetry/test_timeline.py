"""The record of a run, on a clock moved by hand."""

import asyncio
import json
import threading

import pytest

from asyncrl.telemetry import Timeline, TimelineEvent
from asyncrl.telemetry.timeline import lanes


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timeline(clock):
    return Timeline(clock=clock)


def test_spans_waits_and_their_sums(timeline, clock):
    with timeline.span("rollout", "group 0"):
        clock.now_s += 2
        with timeline.span("train", "step 1"):
            clock.now_s += 3
        with timeline.wait("train", "rollouts"):
            clock.now_s += 5
    assert timeline.busy_s("rollout") == 10
    assert timeline.busy_s("train") == 3
    assert timeline.wait_s() == {"train": {"rollouts": 5}}
    assert timeline.overlap_share() == pytest.approx(0.3)
    assert timeline.stages == ("rollout", "train")


def test_what_is_under_way_counts_until_now(timeline, clock):
    first, second = timeline.wait("train", "rollouts"), timeline.wait("train", "rollouts")
    first.__enter__()
    clock.now_s += 4
    second.__enter__()
    clock.now_s += 1
    assert timeline.current_waits() == {"train": {"rollouts": 5}}
    assert timeline.wait_s() == {"train": {"rollouts": 6}}
    first.__exit__(None, None, None)
    assert timeline.current_waits() == {"train": {"rollouts": 1}}


async def test_tasks_side_by_side(timeline, clock):
    gate = asyncio.Event()

    async def work(stage):
        with timeline.span(stage, "work"):
            await gate.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work("a"))
        tasks.create_task(work("b"))
        await asyncio.sleep(0)
        clock.now_s += 2
        gate.set()
    assert timeline.overlap_share() == 1.0


def test_a_failure_closes_its_span_and_is_named(timeline):
    with pytest.raises(KeyError), timeline.span("train", "step"):
        raise KeyError("x")
    assert timeline.events[0].args == {"error": "KeyError"}


def test_threads_lose_nothing():
    timeline = Timeline()

    def work(stage):
        for _ in range(500):
            with timeline.span(stage, "work"):
                timeline.counter("n", value=1)

    threads = [threading.Thread(target=work, args=(f"stage {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(timeline.events) == 4000
    assert timeline.current_waits() == {}


def test_memory_is_bounded_and_sums_stay_exact(clock):
    timeline = Timeline(clock=clock, max_events=10)
    for number in range(100):
        with timeline.span("a", str(number)):
            clock.now_s += 1
    assert [event.name for event in timeline.events] == [str(number) for number in range(90, 100)]
    assert timeline.busy_s("a") == 100


def test_the_saved_trace(timeline, clock, tmp_path):
    with timeline.span("rollout", "group 0", tokens=7):
        clock.now_s += 1.5
    with timeline.wait("train", "rollouts"):
        clock.now_s += 0.25
    timeline.counter("groups", ready=3, broken=float("nan"))
    timeline.save(tmp_path / "timeline.json")
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]

    trace = json.loads((tmp_path / "timeline.json").read_text())
    rows = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert list(rows.values()) == ["rollout", "train"]
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(rows[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in complete] == [
        ("rollout", "group 0", 0, 1_500_000, {"tokens": 7}),
        ("train", "wait: rollouts", 1_500_000, 250_000, {}),
    ]
    counter = next(event for event in trace["traceEvents"] if event["ph"] == "C")
    assert (counter["name"], counter["ts"], counter["args"]) == ("groups", 1_750_000, {"ready": 3, "broken": None})


def test_lanes_hold_what_follows_or_encloses():
    def event(start, end):
        return TimelineEvent("span", "a", f"{start}-{end}", start, end - start)

    events = [event(0, 10), event(2, 5), event(5, 9), event(4, 12), event(10, 11), event(11, 13)]
    assert {each.name: lane for each, lane in lanes(events)} == {
        "0-10": 0,
        "2-5": 0,  # inside
        "4-12": 1,  # half over 2-5
        "5-9": 0,
        "10-11": 0,
        "11-13": 0,
    }


def test_an_empty_timeline_saves(timeline, tmp_path):
    timeline.save(tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert timeline.overlap_share() == 0.0
