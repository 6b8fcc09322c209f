"""The driver's log."""

import logging

from asyncrl.telemetry import open_log


def test_our_records_from_info_up_and_others_from_warning_up(tmp_path):
    ours, theirs = logging.getLogger("asyncrl.trainer.x"), logging.getLogger("somebody.else")
    path = tmp_path / "driver.log"
    with open_log(path):
        ours.debug("too fine")
        ours.info("step %d", 3)
        theirs.info("chatter")
        theirs.warning("careful")
        try:
            raise KeyError("x")
        except KeyError:
            ours.exception("it broke")
    ours.info("afterwards")
    text = path.read_text()
    assert "INFO    asyncrl.trainer.x: step 3\n" in text
    assert "WARNING somebody.else: careful\n" in text
    assert "KeyError: 'x'" in text
    for absent in ("too fine", "chatter", "afterwards"):
        assert absent not in text


def test_everything_is_put_back(tmp_path):
    root, own = logging.getLogger(), logging.getLogger("asyncrl")
    before = (list(root.handlers), own.level)
    with open_log(tmp_path / "a.log"), open_log(tmp_path / "b.log"):
        own.info("in both")
    assert (list(root.handlers), own.level) == before
    assert "in both" in (tmp_path / "a.log").read_text()
    assert "in both" in (tmp_path / "b.log").read_text()


def test_logs_that_overlap_have_their_records_to_the_end_whichever_ends_first(tmp_path):
    own = logging.getLogger("asyncrl")
    before = own.level
    first, second = open_log(tmp_path / "a.log"), open_log(tmp_path / "b.log")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    own.info("late")
    second.__exit__(None, None, None)
    assert "late" in (tmp_path / "b.log").read_text()
    assert own.level == before


async def test_logging_does_not_block_the_event_loop(tmp_path):
    from blockbuster import blockbuster_ctx

    with open_log(tmp_path / "driver.log"), blockbuster_ctx():
        logging.getLogger("asyncrl").info("hello")
    assert "hello" in (tmp_path / "driver.log").read_text()


def test_the_first_lines_of_own_warnings_are_shown_too(tmp_path):
    shown = []
    with open_log(tmp_path / "a.log", show=shown.append):
        logging.getLogger("asyncrl.x").warning("an environment failed: KeyError in %s\nTraceback", "my.py:3 step")
        logging.getLogger("asyncrl.x").info("a step")
        logging.getLogger("ray").warning("a stranger's")
    assert shown == ["an environment failed: KeyError in my.py:3 step"]


def test_what_cannot_be_shown_is_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)  # which only print what is wrong with a handler

    def show(text):
        raise BrokenPipeError(text)

    with open_log(tmp_path / "a.log", show=show):
        logging.getLogger("asyncrl.x").warning("first")
        logging.getLogger("asyncrl.x").warning("second")
    assert "first" in (text := (tmp_path / "a.log").read_text())
    assert "second" in text
