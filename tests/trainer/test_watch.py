"""A run says what it waits for, and a wait that lasts too long is named before it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import stat
from pathlib import Path

import pytest

from asyncrl.cli.main import main
from asyncrl.cli.output import print_failure
from asyncrl.errors import ConfigError, DeadlineError, EnvironmentFailure, WorkerDiedError
from asyncrl.simulation import run_virtually
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.timeline import Timeline
from asyncrl.trainer.report import Watch, read_status

CAUSE = "select of 16 groups at version 3 has waited: group_id 41 is not finished"


def make_watch(path: Path, *, stall_timeout_s: float = 100.0) -> tuple[Watch, Timeline]:
    timeline = Timeline(clock=asyncio.get_running_loop().time)
    watch = Watch(
        path, timeline=timeline, steps=70, done=lambda: 3, causes=lambda: [CAUSE], stall_timeout_s=stall_timeout_s
    )
    return watch, timeline


def test_a_stall_is_named_in_the_log_and_then_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async def story() -> float:
        watch, timeline = make_watch(tmp_path / "status.json")

        async def stalled() -> None:
            async with watch.watching():
                with timeline.wait("train", "rollouts"), timeline.span("rollout", "group 41"):
                    await asyncio.Event().wait()

        with pytest.raises(ExceptionGroup) as raised:
            await stalled()
        (error,) = raised.value.exceptions
        assert isinstance(error, DeadlineError)
        assert "train waited 100 s for rollouts" in str(error)
        assert CAUSE in str(error)
        return asyncio.get_running_loop().time()

    with caplog.at_level(logging.WARNING):
        assert run_virtually(story()) == pytest.approx(100.0, abs=2.0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert all("rollout: group 41, for" in record.message for record in caplog.records)


def test_the_causes_of_a_stall_are_printed_before_the_work_under_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    async def story() -> BaseException:
        watch, timeline = make_watch(tmp_path / "status.json")

        async def stalled() -> None:
            with contextlib.ExitStack() as work:
                for number in range(30):
                    work.enter_context(timeline.span("rollout", f"group {number} of a long name {'.' * 60}"))
                work.enter_context(timeline.wait("train", "rollouts"))
                async with watch.watching():
                    await asyncio.Event().wait()

        with pytest.raises(ExceptionGroup) as raised:
            await stalled()
        return raised.value

    print_failure(run_virtually(story()), with_traceback=False)
    assert f"  {CAUSE}\n" in capsys.readouterr().err


def test_workers_are_asked_before_each_status_and_one_that_is_silent_or_dead_ends_nothing(tmp_path: Path):
    path = tmp_path / "status.json"
    causes: list[str] = []

    async def ask() -> None:
        causes.append(f"asked {len(causes) + 1} times")
        if len(causes) == 2:
            await asyncio.Event().wait()
        if len(causes) == 3:
            raise WorkerDiedError("rollout[0] died", group="rollout")

    async def story() -> None:
        timeline = Timeline(clock=asyncio.get_running_loop().time)
        watch = Watch(
            path, timeline=timeline, steps=1, done=lambda: 0, causes=lambda: causes[-1:], stall_timeout_s=100, ask=ask
        )
        async with watch.watching():
            await asyncio.sleep(7)  # looks at 0, 4 (it waited for the silent one) and 6

    run_virtually(story())
    assert read_status(path).causes == ("asked 3 times",)


def test_waits_that_end_in_time_are_let_be(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async def story() -> None:
        watch, timeline = make_watch(tmp_path / "status.json")
        async with watch.watching():
            for _ in range(100):
                with timeline.wait("train", "rollouts"):
                    await asyncio.sleep(9)
            with timeline.wait("issue", "staleness bound"):  # admission waits as long as it has to
                await asyncio.sleep(1000)

    run_virtually(story())
    assert not caplog.records


def test_the_time_of_a_pause_is_no_stall_whatever_is_waited_for(tmp_path: Path):
    async def story() -> float:
        loop = asyncio.get_running_loop()
        timeline = Timeline(clock=loop.time)
        watch = Watch(
            tmp_path / "status.json",
            timeline=timeline,
            steps=70,
            done=lambda: 3,
            causes=list,
            stall_timeout_s=100.0,
            paused=lambda: 20 <= loop.time() < 520,
        )

        async def stalled() -> None:
            async with watch.watching():
                with timeline.wait("train", "rollouts"):
                    await asyncio.Event().wait()

        with pytest.raises(ExceptionGroup) as raised:
            await stalled()
        assert raised.group_contains(DeadlineError, match=r"rollouts \(telemetry.stall_timeout_s = 100\)")
        return loop.time()

    assert run_virtually(story()) == pytest.approx(620.0, abs=4.0)


def test_the_status_tells_waits_work_and_causes(tmp_path: Path):
    path = tmp_path / "status.json"

    async def story() -> None:
        watch, timeline = make_watch(path)
        async with watch.watching():
            with timeline.wait("train", "rollouts"), timeline.span("rollout", "group 41"):
                await asyncio.sleep(7)

    run_virtually(story())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    status = read_status(path)
    assert (status.pid, status.step, status.steps) == (os.getpid(), 3, 70)
    assert status.sentences() == [
        "step 3 of 70 is done",
        "train has waited 6.0 s for rollouts; it is ended after 100 s",
        CAUSE,
        "rollout: group 41, for 6.0 s",
    ]


def test_a_full_disk_ends_no_run_and_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    path, timeline_path = tmp_path / "status.json", tmp_path / "timeline.json"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    async def story() -> None:
        timeline = Timeline(clock=asyncio.get_running_loop().time)
        watch = Watch(
            path,
            timeline=timeline,
            steps=1,
            done=lambda: 0,
            causes=list,
            stall_timeout_s=100,
            timeline_path=timeline_path,
        )
        async with watch.watching():
            with monkeypatch.context() as patch:
                patch.setattr("asyncrl.trainer.report.write_status", full)
                patch.setattr(Timeline, "save", full)
                await asyncio.sleep(7)
            assert not path.exists()
            await asyncio.sleep(7)

    run_virtually(story())
    assert read_status(path).steps == 1
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert f"{path} is not up to date until it can be written: [Errno 28] no space left" in caplog.text


@pytest.mark.parametrize("damaged", ["", "{}", "[]", '{"waits": 5}', None])
def test_a_damaged_status_is_refused(tmp_path: Path, damaged: str | None):
    path = tmp_path / "status.json"
    if damaged is None:
        path.mkdir()
    else:
        path.write_text(damaged)
    with pytest.raises(ConfigError, match="not the status of a run"):
        read_status(path)


def test_why_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    test_the_status_tells_waits_work_and_causes(tmp_path)
    assert main(["why", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("train has waited 6.0 s for rollouts")
    assert main(["why", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["waits"][0]["reason"] == "rollouts"


def test_half_a_character_in_an_error_does_not_take_its_place(tmp_path: Path):
    async def story() -> None:
        watch, _ = make_watch(tmp_path / "status.json")
        async with watch.watching():
            raise EnvironmentFailure("cannot use \ud83d")

    with pytest.raises(ExceptionGroup) as raised:
        run_virtually(story())
    assert raised.group_contains(EnvironmentFailure)
    assert read_status(tmp_path / "status.json").failed == "EnvironmentFailure: cannot use \\ud83d"


def test_the_error_that_ended_a_run_is_in_its_last_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    async def story() -> None:
        watch, _ = make_watch(tmp_path / "status.json")
        async with watch.watching():
            raise EnvironmentFailure("the environment's step failed\nand more")

    with pytest.raises(ExceptionGroup):
        run_virtually(story())
    assert main(["why", str(tmp_path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "the run failed: EnvironmentFailure: the environment's step failed"


def test_why_believes_the_lock_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with RunDirectory.create(tmp_path, "run") as run:
        test_the_status_tells_waits_work_and_causes(run.path)
        record = json.loads(run.status_path.read_text())
        run.status_path.write_text(json.dumps({**record, "pid": 2**22 + 1}))  # of another machine
        run.write_summary({"advice": None})  # of its earlier end
        assert main(["why", str(run.path)]) == 0
        assert capsys.readouterr().out.splitlines()[0].endswith("is done")
    assert main(["why", str(run.path)]) == 0
    assert capsys.readouterr().out == f"the run has ended; {run.summary_path} has its results\n"


def test_why_tells_a_run_that_is_over_or_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    test_the_status_tells_waits_work_and_causes(tmp_path)
    path = tmp_path / "status.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "pid": 2**22 + 1}))  # beyond the highest process id
    assert main(["why", str(tmp_path)]) == 0
    assert "has ended and left no summary.json" in capsys.readouterr().out
    path.write_text(json.dumps({**record, "at": record["at"] - 100}))
    assert main(["why", str(tmp_path)]) == 0
    assert "its event loop has not run for 100 s" in capsys.readouterr().out
    for damaged in ("", "{}", '{"advice": {"sentance": ""}}', "\x80"):
        (tmp_path / "summary.json").write_bytes(damaged.encode("latin-1"))
        assert main(["why", str(tmp_path)]) == 2
        assert f"the run has ended, but {tmp_path / 'summary.json'} is damaged" in capsys.readouterr().err
    (tmp_path / "summary.json").write_text('{"advice": null}')
    assert main(["why", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"the run has ended; {tmp_path / 'summary.json'} has its results\n"
    advice = {"sentence": "the bottleneck is the reward"}
    (tmp_path / "summary.json").write_text(json.dumps({"advice": advice}))
    assert main(["why", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["the bottleneck is the reward"]
    (tmp_path / "summary.json").unlink()
    path.write_text(json.dumps({**record, "advice": advice}))
    assert main(["why", str(tmp_path)]) == 0
    assert "is done\nthe bottleneck is the reward\n" in capsys.readouterr().out
    assert main(["why", str(tmp_path / "nothing")]) == 2
