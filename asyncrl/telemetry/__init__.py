"""What happened: the timeline of a run, its folder, its live display and its last words."""

from __future__ import annotations

from asyncrl.telemetry.report import report_text
from asyncrl.telemetry.run_directory import RunDirectory, open_log
from asyncrl.telemetry.timeline import Occupancy, Timeline, TimelineEvent
from asyncrl.telemetry.trackers import Trackers, open_trackers

__all__ = [
    "Occupancy",
    "RunDirectory",
    "Timeline",
    "TimelineEvent",
    "Trackers",
    "open_log",
    "open_trackers",
    "report_text",
]
