"""Processes that end when the one they work for does, however it ends and whatever they are doing then."""

from __future__ import annotations

import os
import select
import signal
import threading

__all__ = ["end_with"]


def end_with(process: int) -> None:
    """Kill this process when ``process`` ends; at once if it has."""
    try:
        watched = os.pidfd_open(process)
    except ProcessLookupError:  # it died while this one was being made
        os._exit(1)
    ended = select.poll()
    ended.register(watched, select.POLLIN)

    def watch() -> None:
        ended.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="watching the engine's process", daemon=True).start()
