from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from typing import Any

import pytest

from asyncrl import runtime
from asyncrl.errors import EngineError
from asyncrl.runtime import (
    BackgroundProgram,
    Terminated,
    failure_of_program,
    first_cause,
    in_abandonable_thread,
    in_own_thread,
    in_thread,
    run_with_signals,
    shield_until_done,
)

# ------------------------------------------------------------------------------------------------ shield_until_done


async def cancelled_twice(task: asyncio.Task[object]) -> None:
    """Cancel ``task`` in two successive rounds of the loop, and let it react to each."""
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)


async def test_a_shielded_operation_returns_its_result_and_raises_its_error():
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise EngineError("the engine broke")

    assert await shield_until_done(answer()) == 42
    with pytest.raises(EngineError, match="the engine broke"):
        await shield_until_done(fail())


async def test_a_cancelled_caller_waits_for_the_operation_however_often_it_is_cancelled():
    operation: asyncio.Future[None] = asyncio.Future()
    caller = asyncio.create_task(shield_until_done(operation))
    await cancelled_twice(caller)
    assert not caller.done()
    assert not operation.done()
    operation.set_result(None)
    await asyncio.wait([caller])
    assert caller.cancelled()


async def test_an_error_after_the_cancellation_is_logged_and_is_its_cause(caplog: pytest.LogCaptureFixture):
    operation: asyncio.Future[None] = asyncio.Future()
    caller = asyncio.create_task(shield_until_done(operation))
    await cancelled_twice(caller)
    operation.set_exception(EngineError("the engine broke"))
    with pytest.raises(asyncio.CancelledError) as caught:
        await caller
    assert isinstance(caught.value.__cause__, EngineError)
    assert "failed after its caller was cancelled: EngineError: the engine broke" in caplog.text


async def test_on_cancel_is_called_once_and_only_while_the_operation_is_unfinished():
    operation: asyncio.Future[None] = asyncio.Future()
    calls: list[str] = []
    caller = asyncio.create_task(shield_until_done(operation, on_cancel=lambda: calls.append("stop")))
    await cancelled_twice(caller)
    assert calls == ["stop"]
    operation.set_result(None)
    await asyncio.wait([caller])

    operation = asyncio.Future()
    caller = asyncio.create_task(shield_until_done(operation, on_cancel=lambda: calls.append("too late")))
    await asyncio.sleep(0)
    operation.set_result(None)
    caller.cancel()
    await asyncio.wait([caller])
    assert caller.cancelled()
    assert calls == ["stop"]


async def test_on_cancel_may_cancel_the_operation_and_so_end_the_wait():
    operation: asyncio.Future[None] = asyncio.Future()
    caller = asyncio.create_task(shield_until_done(operation, on_cancel=operation.cancel))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    assert operation.cancelled()
    assert caller.cancelled()


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.filterwarnings("error")
def test_an_operation_that_the_end_of_the_loop_keeps_from_beginning_leaves_no_warning(
    steps: int, monkeypatch: pytest.MonkeyPatch
):
    """The caller is left behind at its wait, or in the first round of the loop that its last wish would need."""
    complaints: list[object] = []
    begun: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: complaints.append(found.exc_value))

    async def close() -> None:
        begun.append("close")

    async def life() -> None:
        try:
            await asyncio.sleep(0 if steps else 3600)
        finally:
            await shield_until_done(close())

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)  # "Task was destroyed but it is pending"
    left_behind = loop.create_task(life())
    for _ in range(1 + steps):
        loop.call_soon(loop.stop)
        loop.run_forever()
    loop.close()
    del left_behind
    gc.collect()
    assert begun == []
    assert [each for each in complaints if "never awaited" in str(each)] == []


async def test_an_operation_whose_peer_has_ended_is_cancelled_and_raises_the_given_error():
    ended: asyncio.Future[None] = asyncio.Future()
    cleaned_up: list[str] = []

    async def wait_for_an_answer() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up.append("yes")

    caller = asyncio.create_task(
        shield_until_done(wait_for_an_answer(), ended=ended, ended_error=EngineError("the engine is gone"))
    )
    await asyncio.sleep(0)
    ended.set_result(None)
    with pytest.raises(EngineError, match="the engine is gone"):
        await caller
    assert cleaned_up == ["yes"]


async def test_a_cancelled_caller_is_released_when_the_peer_has_ended():
    ended: asyncio.Future[None] = asyncio.Future()
    operation: asyncio.Future[None] = asyncio.Future()
    caller = asyncio.create_task(shield_until_done(operation, ended=ended, ended_error=EngineError("unused")))
    await cancelled_twice(caller)
    assert not caller.done()
    ended.set_result(None)
    await asyncio.wait([caller])
    assert operation.cancelled()
    assert caller.cancelled()


async def test_an_operation_that_finishes_before_its_peer_ends_keeps_its_result():
    ended: asyncio.Future[None] = asyncio.Future()
    operation: asyncio.Future[int] = asyncio.Future()
    caller = asyncio.create_task(shield_until_done(operation, ended=ended, ended_error=EngineError("unused")))
    await asyncio.sleep(0)
    operation.set_result(1)
    ended.set_result(None)
    assert await caller == 1


# ------------------------------------------------------------------------------------------------- run_with_signals


class Work:
    """Send this process a signal, wait until cancelled, and record the cleanup."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        self.cleaned_up = False

    async def run(self) -> None:
        try:
            os.kill(os.getpid(), self.signal_number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.cleaned_up = True


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_signal_cancels_and_the_cleanup_runs(number: int, error: type[BaseException]):
    work = Work(number)
    with pytest.raises(error) as caught:
        run_with_signals(work.run())
    assert work.cleaned_up
    if isinstance(caught.value, Terminated):
        assert caught.value.code == 143


def test_afterwards_a_signal_does_what_it_did_before():
    taken: list[int] = []

    async def nothing() -> None:
        pass

    before = signal.signal(signal.SIGTERM, lambda number, _frame: taken.append(number))
    try:
        run_with_signals(nothing())
        os.kill(os.getpid(), signal.SIGTERM)
        assert taken == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_inside_a_running_loop_it_runs_in_a_thread():
    async def where() -> str:
        return threading.current_thread().name

    assert run_with_signals(where()).startswith("asyncrl-run")


def test_interrupting_a_notebook_cell_cancels_what_it_started():
    work = Work(signal.SIGINT)

    async def cell() -> None:
        run_with_signals(work.run())

    loop = asyncio.new_event_loop()  # asyncio.run would take the signal itself; a notebook's loop does not
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        loop.close()
    assert work.cleaned_up


@pytest.mark.parametrize("timeout_s", [None, 60.0])
async def test_a_program_is_cancelled_with_what_joins_it(timeout_s: float | None):
    begun, cleaned_up = threading.Event(), threading.Event()

    async def main() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up.set()

    program = BackgroundProgram(main()).start()
    try:
        await asyncio.to_thread(begun.wait)
        with pytest.raises(TimeoutError):
            await program.join(0.0)
        joining = asyncio.ensure_future(program.join(timeout_s))
        await cancelled_twice(joining)
        with pytest.raises(asyncio.CancelledError):
            await joining
        assert program.ended
        assert cleaned_up.is_set()
    finally:
        program.cancel()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
async def test_a_signal_reaches_every_program_that_is_joined_and_none_afterwards(
    number: signal.Signals, error: type[BaseException]
):
    taken: list[int] = []
    before = signal.signal(number, lambda sent, _frame: taken.append(sent))
    may_end = threading.Event()

    async def first() -> None:
        await asyncio.to_thread(may_end.wait)

    programs = [BackgroundProgram(asyncio.Event().wait()).start() for _ in range(2)]

    async def joined(program: BackgroundProgram[Any]) -> str:
        try:
            await program.join(10)
        except error:  # in its task, a KeyboardInterrupt would end the loop, too
            return "ended"
        return ""

    try:
        ends_first = asyncio.ensure_future(BackgroundProgram(first()).start().join())
        await asyncio.sleep(0)
        joins = [asyncio.ensure_future(joined(program)) for program in programs]
        await asyncio.sleep(0)
        may_end.set()
        await ends_first
        os.kill(os.getpid(), number)
        assert await asyncio.gather(*joins) == ["ended", "ended"]
        assert taken == []
        os.kill(os.getpid(), number)
        assert taken == [number]
    finally:
        for program in programs:
            program.cancel()
        signal.signal(number, before)


async def test_calls_that_were_given_up_have_a_bound(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(runtime, "_MOST_LEFT_BEHIND", 2)
    may_end = threading.Event()

    def hangs() -> None:
        may_end.wait(10)

    try:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await in_own_thread(hangs)
        assert "hangs was given up and still runs" in caplog.text
        with pytest.raises(RuntimeError, match=r"2 calls that were given up still run, some of .*hangs"):
            await in_own_thread(hangs)
    finally:
        may_end.set()
    while runtime._left_behind:
        await asyncio.sleep(0.01)
    assert await in_own_thread(str, 5) == "5"


async def test_a_second_wait_takes_signals_although_something_else_has_taken_them_since():
    before = signal.getsignal(signal.SIGINT)
    programs = [BackgroundProgram(asyncio.Event().wait()).start() for _ in range(2)]

    async def joined(program: BackgroundProgram[Any]) -> str:
        try:
            await program.join(10)
        except KeyboardInterrupt:
            return "ended"
        return ""

    try:
        joins = [asyncio.ensure_future(joined(programs[0]))]
        await asyncio.sleep(0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as a notebook does before each cell
        joins.append(asyncio.ensure_future(joined(programs[1])))
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        assert await asyncio.gather(*joins) == ["ended", "ended"]
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        for program in programs:
            program.cancel()
        signal.signal(signal.SIGINT, before)


def test_of_several_errors_asyncrls_own_is_raised():
    named = EngineError("the engine broke")
    group = BaseExceptionGroup("stages", [ValueError("a consequence"), ExceptionGroup("inner", [named])])
    assert first_cause(group) is named

    async def fail() -> None:
        raise group

    with pytest.raises(EngineError, match="the engine broke"):
        run_with_signals(fail())


def test_the_cause_of_an_error_is_kept():
    async def fail() -> None:
        try:
            raise OSError("no disk")
        except OSError as cause:
            error = EngineError("the engine broke")
            error.__cause__ = cause
            raise BaseExceptionGroup("stages", [error]) from None

    with pytest.raises(EngineError) as caught:
        run_with_signals(fail())
    assert isinstance(caught.value.__cause__, OSError)


def test_a_thread_ends_the_program_with_its_error_after_the_cleanup():
    closed: list[bool] = []

    async def wait_for_ever() -> None:
        fail = failure_of_program()
        assert fail is not None
        try:
            await asyncio.to_thread(fail, EngineError("gone"))
            await asyncio.get_running_loop().create_future()
        finally:
            closed.append(True)

    with pytest.raises(EngineError, match="gone"):
        run_with_signals(wait_for_ever())
    assert closed == [True]
    assert failure_of_program() is None


@pytest.mark.parametrize("run", [in_thread, in_own_thread])
async def test_a_users_function_in_a_thread_gets_its_arguments_and_returns_or_raises(run: Any):
    assert await run(divmod, 7, 2) == (3, 1)
    assert await run(dict, function=1, arguments=2) == {"function": 1, "arguments": 2}
    with pytest.raises(ZeroDivisionError):
        await run(divmod, 7, 0)
    with pytest.raises(RuntimeError, match="next raised StopIteration"):
        await run(next, iter(()))


async def test_a_call_that_may_be_abandoned_is_awaited_unless_it_is_hopeless():
    begun, released, hopeless = threading.Event(), threading.Event(), False

    def call() -> str:
        begun.set()
        released.wait(30)
        return "done"

    async def cancelled() -> bool:
        running = asyncio.ensure_future(in_abandonable_thread(call, hopeless=lambda: hopeless))
        await asyncio.to_thread(begun.wait, 30)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=0.2)
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        return bool(done)

    assert await in_abandonable_thread(lambda: 7, hopeless=lambda: False) == 7
    with pytest.raises(KeyError):
        await in_abandonable_thread(lambda: {}["missing"], hopeless=lambda: False)
    assert not await cancelled()
    begun.clear()
    released.clear()
    hopeless = True
    assert await cancelled()
