"""Interruption: what Ctrl-C, or the stop button of a notebook, ends besides the Python that runs.

A KeyboardInterrupt in a thread that blocks in ``result()`` cancels every unfinished call that this thread has made: in
the workers too, so that nothing of an interrupted computation goes on where nobody sees it. In a notebook it cancels
those of the interrupted cell, wherever in the cell it comes; what earlier cells began goes on. Calls of other threads
go on always.
"""

# ruff: noqa: SLF001  groups and their invocations are one machine in several files
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.single_controller.invocation import Invocation
    from asyncrl.single_controller.worker_group import WorkerGroup

__all__ = ["cancel_what_was_started_here", "joins"]

_groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()
_earlier: weakref.WeakSet[Invocation] = weakref.WeakSet()
"""Calls of cells before the running one."""
_cells_are_watched = False


def joins(group: WorkerGroup) -> None:
    """Calls of this group count, from now on."""
    global _cells_are_watched  # noqa: PLW0603  there is one notebook in a process
    _groups.add(group)
    if not _cells_are_watched and "IPython" in sys.modules:
        shell: Any = sys.modules["IPython"].get_ipython()
        if shell is not None:
            _cells_are_watched = True
            shell.events.register("pre_run_cell", _cell_begins)
            shell.events.register("post_run_cell", _cell_ended)


def cancel_what_was_started_here() -> int:
    """Cancel the unfinished calls of this thread (in a notebook, of the running cell); how many there were."""
    here = threading.get_ident()
    cancelled = 0
    for group in list(_groups):
        for invocation in list(group._under_way):
            if invocation.thread == here and invocation not in _earlier and invocation.outcome.cancel():
                invocation.cancel()
                cancelled += 1
    return cancelled


def _cell_begins(_info: object) -> None:
    for group in list(_groups):
        _earlier.update(list(group._under_way))


def _cell_ended(result: Any) -> None:
    if isinstance(result.error_in_exec, KeyboardInterrupt):
        cancel_what_was_started_here()
