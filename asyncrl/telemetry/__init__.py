"""What happened: the timeline of a run, its folder, its live display and its last words."""

from __future__ import annotations

from .log import open_log
from .occupancy import Occupancy, overlap_share
from .progress import Progress, make_progress
from .report import print_report, report_text
from .run_directory import RunDirectory
from .timeline import Span, Timeline, TimelineEvent
from .trackers import Trackers, open_trackers

__all__ = [
    "Occupancy",
    "Progress",
    "RunDirectory",
    "Span",
    "Timeline",
    "TimelineEvent",
    "Trackers",
    "make_progress",
    "open_log",
    "open_trackers",
    "overlap_share",
    "print_report",
    "report_text",
]
