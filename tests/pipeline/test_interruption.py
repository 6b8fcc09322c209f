from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from asyncrl.errors import EngineError
from asyncrl.pipeline.interruption import Terminated, first_cause, run_to_end


class Work:
    """Waits for ever, and notes that it was cleaned up; hurts the process itself once it runs."""

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
        run_to_end(work.run())
    assert work.cleaned_up
    if isinstance(caught.value, Terminated):
        assert caught.value.code == 143


def test_afterwards_a_signal_does_what_it_did_before():
    taken: list[int] = []

    async def nothing() -> None:
        pass

    before = signal.signal(signal.SIGTERM, lambda number, _frame: taken.append(number))
    try:
        run_to_end(nothing())
        os.kill(os.getpid(), signal.SIGTERM)
        assert taken == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_inside_a_running_loop_it_runs_in_a_thread():
    async def where() -> str:
        return threading.current_thread().name

    assert run_to_end(where()).startswith("asyncrl-run")


def test_interrupting_a_notebook_cell_cancels_what_it_started():
    work = Work(signal.SIGINT)

    async def cell() -> None:
        run_to_end(work.run())

    loop = asyncio.new_event_loop()  # asyncio.run would take the signal itself; a notebook's loop does not
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        loop.close()
    assert work.cleaned_up


def test_of_several_errors_the_one_with_a_name_is_told():
    named = EngineError("the engine broke")
    group = BaseExceptionGroup("stages", [ValueError("a consequence"), ExceptionGroup("inner", [named])])
    assert first_cause(group) is named

    async def fail() -> None:
        raise group

    with pytest.raises(EngineError, match="the engine broke"):
        run_to_end(fail())


def test_what_an_error_was_caused_by_is_kept():
    async def fail() -> None:
        try:
            raise OSError("no disk")
        except OSError as cause:
            error = EngineError("the engine broke")
            error.__cause__ = cause
            raise BaseExceptionGroup("stages", [error]) from None

    with pytest.raises(EngineError) as caught:
        run_to_end(fail())
    assert isinstance(caught.value.__cause__, OSError)
