"""The driver's log file: what asyncrl, engines and buffers log from INFO up, everybody else from WARNING up."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
from collections.abc import Iterator
from pathlib import Path

__all__ = ["open_log"]

OWN = ("asyncrl", "engines", "buffers")


@contextlib.contextmanager
def open_log(path: Path, *, level: int = logging.INFO) -> Iterator[None]:
    """Append log records to ``path`` inside the ``with`` block.

    Records are queued and written by a thread, so logging never blocks an event loop. Handlers that the program has
    installed itself keep working; levels are put back at the end.
    """
    file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    file.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%F %T"))
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(records)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name.partition(".")[0] in OWN)
    listener = logging.handlers.QueueListener(records, file)
    before = {name: logging.getLogger(name).level for name in OWN}
    for name in OWN:
        logging.getLogger(name).setLevel(level)
    listener.start()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        listener.stop()
        file.close()
        for name, old in before.items():
            logging.getLogger(name).setLevel(old)
