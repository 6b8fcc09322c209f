"""Finished rows are played again: rewards in the wrong rows are found, and a check never does harm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from asyncrl.errors import EnvironmentFailure, InvariantError
from asyncrl.interfaces import Environment, Message, SamplingParams, Step, Task
from asyncrl.rollout.chat import ChatRenderer
from asyncrl.rollout.episode import replay_episode, run_episode
from asyncrl.rollout.recheck import CheckBudget, ReplayedRewards
from asyncrl.rollout.trajectory import Trajectory, trajectories_to_batch
from asyncrl.rollout.work import EpisodeTimes
from asyncrl.testing import ScriptedEngine
from asyncrl.testing.clock import run_virtually

SAID = ("go", "go on", "stop")


class Letters:
    """Two turns; each earns the number of letters said, the second one more."""

    tools = ()
    deterministic = True

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = log if log is not None else []
        self.turn = 0

    async def reset(self, task: Task) -> list[Message]:
        self.log.append("reset")
        return [{"role": "user", "content": task["question"]}]

    async def step(self, reply: Message) -> Step:
        self.turn += 1
        self.log.append(reply["content"])
        return Step(
            messages=({"role": "user", "content": "again"},),
            reward=len(reply["content"]) + (self.turn == 2),
            done=self.turn == 2,
        )

    async def close(self) -> None:
        self.log.append("close")


class Worlds:
    def __init__(self, make: Callable[[], Environment]) -> None:
        self.make = make

    def task(self, index: int, *, split: str) -> Task:
        return {"question": f"q{index}"}

    def demonstration(self, index: int) -> list[Message]:
        return []


async def episodes(renderer: ChatRenderer, *, max_seq_len: int = 200) -> list[Trajectory]:
    """Three rows that say different things, so that their rewards differ."""
    found = []
    for said in SAID:
        engine = ScriptedEngine(lambda _, said=said: renderer.tokenizer.encode(said + "<|end|>"))  # type: ignore[misc]
        await engine.start()
        found.append(
            await run_episode(
                engine,
                Letters(),
                renderer,
                {"question": "q"},
                sampling=SamplingParams(max_new_tokens=50),
                max_turns=4,
                max_seq_len=max_seq_len,
                deadline_s=5.0,
                request_prefix="row",
                seed=0,
            )
        )
    return found


def checker(make: Callable[[], Environment], *, rows: int = 8, max_seq_len: int = 200) -> ReplayedRewards:
    """Checks as many rows of the next group."""
    times = EpisodeTimes()
    times.totals["generate_s"] = 1.0
    checks = ReplayedRewards(Worlds(make), share=0.5, max_seq_len=max_seq_len, deadline_s=5.0, times=times)
    checks._budget.spend(0.0, rows=rows)  # free rows so far: all of them can be afforded
    return checks


async def test_rows_that_earn_the_same_pass_side_by_side(scratch: ChatRenderer) -> None:
    log: list[str] = []
    all_begun = asyncio.Barrier(3)

    class Together(Letters):
        async def reset(self, task: Task) -> list[Message]:
            messages = await super().reset(task)
            await all_begun.wait()
            return messages

    batch = trajectories_to_batch(played := await episodes(scratch), group_id=7)
    checks = await checker(lambda: Together(log)).check(batch, played, scratch, group_id=7)
    assert (checks.rows, dict(checks.failures)) == (3, {})
    assert log[:3] == ["reset"] * 3
    assert sorted(log[3:]) == sorted(["go", "go", "go on", "go on", "stop", "stop"] + ["close"] * 3)


@pytest.mark.parametrize("wrong", ["rewards", "summary", "turn_rewards", "tokens"])
async def test_a_row_with_the_reward_of_another_is_found(scratch: ChatRenderer, wrong: str) -> None:
    played = await episodes(scratch)
    batch = trajectories_to_batch(played, group_id=7)
    others = trajectories_to_batch([*played[1:], played[0]], group_id=7)
    assert batch.batch is not None
    assert others.batch is not None
    if wrong == "summary":
        batch.meta_info["summary"]["rewards"] = others.meta_info["summary"]["rewards"]
    else:
        for name in {"tokens": ("input_ids", "turns")}.get(wrong, (wrong,)):
            batch.batch[name] = others.batch[name]
    with pytest.raises(InvariantError, match=r"row \d of group 7 has the reward .* and, scored again, "):
        await checker(Letters).check(batch, played, scratch, group_id=7)


async def test_an_episode_that_ends_at_another_turn_is_found(scratch: ChatRenderer) -> None:
    class Shorter(Letters):
        async def step(self, reply: Message) -> Step:
            return replace(await super().step(reply), done=True)

    log: list[str] = []
    played = (await episodes(scratch))[:1]
    batch = trajectories_to_batch(played, group_id=7)
    with pytest.raises(InvariantError, match="'done' after 2 answered turns and, played again, ends after 1"):
        await checker(lambda: Shorter(log)).check(batch, played, scratch, group_id=7)
    assert log == ["reset", "go", "close"]  # no step past the end


async def test_a_turn_that_was_cut_is_not_passed_on(scratch: ChatRenderer) -> None:
    whole = await episodes(scratch)
    cut = min(len(each.token_ids) for each in whole) - 1
    played = await episodes(scratch, max_seq_len=cut)
    assert {each.finish_reason for each in played} == {"max_seq_len"}
    batch = trajectories_to_batch(played, group_id=7)
    assert (await checker(Letters, max_seq_len=cut).check(batch, played, scratch, group_id=7)).rows == 3


class Undeclared(Letters):
    deterministic = False


class NotReplayable(Letters):
    replayable = False


@pytest.mark.parametrize("kind", [Undeclared, NotReplayable])
async def test_only_declared_environments_are_checked(scratch: ChatRenderer, kind: type[Letters]) -> None:
    log: list[str] = []
    batch = trajectories_to_batch(played := await episodes(scratch), group_id=7)
    batch.meta_info["summary"]["rewards"] = (99.0,) * 3
    assert (await checker(lambda: kind(log)).check(batch, played, scratch, group_id=7)).rows == 0
    assert log.count("close") == 3
    assert set(log) == {"close"}


class Broken(Letters):
    async def step(self, reply: Message) -> Step:
        raise ConnectionError("the world is gone")


def refused() -> Environment:
    raise ConnectionError("the world is gone")


@pytest.mark.parametrize("make", [Broken, refused])
async def test_a_replay_that_fails_is_counted_and_told(scratch: ChatRenderer, make: Callable[[], Environment]) -> None:
    batch = trajectories_to_batch(played := await episodes(scratch), group_id=7)
    checks = await checker(make).check(batch, played, scratch, group_id=7)
    ((cause, found),) = checks.failures.items()
    assert (checks.rows, found["count"]) == (0, 3)
    assert cause.startswith("ConnectionError in ")
    assert "the world is gone" in found["example"]


async def test_nothing_is_checked_when_there_is_no_time_left(scratch: ChatRenderer) -> None:
    log: list[str] = []
    batch = trajectories_to_batch(played := await episodes(scratch), group_id=7)
    now_s = asyncio.get_running_loop().time()
    checks = await checker(lambda: Letters(log)).check(batch, played, scratch, group_id=7, ends_s=now_s)
    assert (checks.rows, dict(checks.failures), log) == (0, {}, [])


def test_checks_that_hang_end_in_time_and_leave_the_others(scratch: ChatRenderer) -> None:
    class Hanging(Letters):
        async def step(self, reply: Message) -> Step:
            self.hangs = reply["content"] == "stop"
            await self.wait()
            return await super().step(reply)

        async def close(self) -> None:
            await self.wait()

        async def wait(self) -> None:
            if self.hangs:
                await asyncio.Event().wait()

    async def story() -> None:
        batch = trajectories_to_batch(played := await episodes(scratch), group_id=7)
        began_s = asyncio.get_running_loop().time()
        bounds = {"ends_s": began_s + 2.0, "closes_s": began_s + 3.0}
        checks = await checker(Hanging).check(batch, played, scratch, group_id=7, **bounds)
        assert (checks.rows, len(checks.failures)) == (2, 1)
        assert asyncio.get_running_loop().time() == began_s + 3.0

    run_virtually(story())


async def test_an_error_of_close_hides_no_cancellation() -> None:
    begun = asyncio.Event()

    class Stuck(Letters):
        async def step(self, reply: Message) -> Step:
            begun.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            raise OSError("cannot close")

    replay = asyncio.ensure_future(replay_episode(Stuck(), {"question": "q"}, [{"content": "go"}], deadline_s=60.0))
    await begun.wait()
    replay.cancel()
    with pytest.raises(asyncio.CancelledError) as ended:
        await replay
    assert "cannot close" in ended.value.__notes__[0]


async def test_a_failure_counts_before_that_of_close() -> None:
    class Twice(Letters):
        async def reset(self, task: Task) -> list[Message]:
            raise ValueError("no task")

        async def close(self) -> None:
            raise OSError("cannot close")

    with pytest.raises(EnvironmentFailure, match="no task") as failure:
        await replay_episode(Twice(), {"question": "q"}, [], deadline_s=60.0)
    assert "cannot close" in failure.value.__notes__[0]


def test_checks_stay_within_their_share() -> None:
    budget = CheckBudget(share=0.01)
    spent = 0.0
    for second in range(1, 1001):
        rows = budget.rows(16, elapsed_s=float(second))
        budget.spend(rows * 0.003, rows=rows)
        spent += rows * 0.003
    assert 0.9 * 10.0 <= spent <= 10.0 + 8 * 0.003
    assert CheckBudget(share=0.0).rows(16, elapsed_s=1e9) == 0


async def test_the_time_of_replays_is_that_of_the_environment(scratch: ChatRenderer) -> None:
    class Slow(Letters):
        async def step(self, reply: Message) -> Step:
            await asyncio.sleep(0.02)
            return await super().step(reply)

    batch = trajectories_to_batch(played := await episodes(scratch), group_id=7)
    checks: Any = checker(Slow)
    await checks.check(batch, played, scratch, group_id=7)
    assert checks._times.totals["environment_s"] >= 0.04
    assert checks._times.totals["rows_environment_s"] >= 3 * 0.04
