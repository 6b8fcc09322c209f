"""Random SIGSTOPs of every kind of process of real runs on Ray: each is named in the log, and nothing is lost by it.

    python benchmarks/freezes.py --stops 200 [--seed 0] [--json] [--kinds trainer,rollout,...] [--folder .] [--keep]

The runs, the moments and what a finished run is held against are those of ``chaos.py``, the signal is another: nobody
continues what was stopped. Up to four processes are stopped at one moment. Each has to be named in a log of the run,
by its number, and to be mended like a death within ``cluster.health_check_timeout_s``, here 15 s, so that the run ends
with all of its steps.

    named_late           stops that no log named within 30 s
    ended_first          processes that ended before they were named, with their life or because of another stop that
                         was named: they count as no stop
"""

from __future__ import annotations

import argparse
import math
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import chaos

KINDS = tuple(kind for kind in chaos.KINDS if kind != "driver")
"""Kinds of process that are stopped. The driver is watched by nobody: it is the program that a user has started."""
NAMED_WITHIN_S = 30.0
LOOK_EVERY_S = 0.25
AT_ONCE = 4
"""Most processes that are stopped at one moment."""


class FrozenRun(chaos.HurtRun):
    signal = signal.SIGSTOP
    cluster: ClassVar[Mapping[str, Any]] = {"health_check_timeout_s": 15.0}

    def __init__(self, campaign: chaos.Campaign, number: int) -> None:
        super().__init__(campaign, number)
        self._looked = 0.0
        self._gone: dict[int, float] = {}
        """When stopped processes were first seen to have ended unnamed."""
        self._ends: dict[int, float] = {}
        """When lives ended."""

    def look(self) -> int:
        """Also note when stops are named, and drop those of processes that ended first."""
        now = time.monotonic()
        if not self.driver:
            self._ends.setdefault(self.lives, now)
        if now - self._looked >= LOOK_EVERY_S or not self.driver:
            self._looked = now
            open_stops = [stop for stop in self.kills if not stop.witness]
            living = chaos.processes() if open_stops else {}
            for stop in open_stops:
                if self._witnessed(stop):
                    stop.named_s = now - stop.at
                elif stop.pid not in living and self._ended_first(stop, self._gone.setdefault(stop.pid, now)):
                    self._drop(stop)
        return super().look()

    def _ended_first(self, stop: chaos.Kill, gone: float) -> bool:
        """Whether its process ended with its life, or with one whose stop was named: above it, or of the same group."""
        if gone - stop.at > NAMED_WITHIN_S:  # it was to be named before
            return False
        if gone >= self._ends.get(stop.lives, math.inf) - chaos.END_S:
            return True
        named = [other for other in self.kills if other.witness and other.lives == stop.lives]
        return any(other.pid == stop.teller or other.kind == stop.kind == "trainer" for other in named)

    def _victims(self, kind: str) -> list[tuple[int, str, int]]:
        """Leave out what only a stopped process would name: the driver ends both together."""
        stopped = {stop.pid for stop in self.kills}
        return [each for each in super()._victims(kind) if each[2] not in stopped]

    def _kill(self) -> bool:
        wanted = self.campaign.dice.randint(1, AT_ONCE)
        return sum(super(FrozenRun, self)._kill() for _ in range(wanted)) > 0

    def _drop(self, stop: chaos.Kill) -> None:
        self.kills.remove(stop)
        self.campaign.kills.remove(stop)
        self.campaign.endings["ended_first"] += 1

    def _witnessed(self, kill: chaos.Kill) -> bool:
        if not kill.witness:
            news = "\n".join(text[kill.said.get(log, 0) :] for log, text in self.said(kill.teller).items())
            running = rf"\bprocess {kill.pid}\b.* (?:has not answered|has been stopped|is stopped)"
            starting = rf"\bthe process of {re.escape(kill.what)}\[\d+\] has not started"
            found = re.search(rf"^.*(?:{running}|{starting}).*$", news, re.MULTILINE)
            kill.witness = found.group(0).strip()[:500] if found else ""
        return bool(kill.witness)

    def unwitnessed(self) -> list[str]:
        self.look()
        return []


def late(stop: chaos.Kill) -> bool:
    return not stop.witness or (stop.named_s is not None and stop.named_s > NAMED_WITHIN_S)


def report(campaign: chaos.Campaign, *, elapsed_s: float, options: argparse.Namespace) -> None:
    stops = campaign.kills
    named = sorted(stop.named_s for stop in stops if stop.named_s is not None)
    named_late = sum(map(late, stops))
    campaign.problems += [f"the stop of {each.what} ({each.pid}) was not named in time" for each in filter(late, stops)]
    figures: list[Any] = [
        chaos.figure("stops", len(stops), "", goal=f"at least {options.stops}", holds=len(stops) >= options.stops),
        chaos.figure("named_late", named_late, "stops", goal="0", holds=named_late == 0),
        *chaos.damage(campaign),
        chaos.figure("named after, median", round(statistics.median(named), 2) if named else -1, "s"),
        chaos.figure("named after, most", round(named[-1], 2) if named else -1, "s"),
        chaos.figure("ended_first", campaign.endings.pop("ended_first", 0), "not counted"),
        *(chaos.figure(f"stops, {kind}", count, "") for kind, count in sorted(Counter(k.kind for k in stops).items())),
        *(chaos.figure(f"lives, {ending}", count, "") for ending, count in sorted(campaign.endings.items())),
        chaos.figure("time", round(elapsed_s, 1), "s"),
    ]
    chaos.show(campaign, figures, options)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--stops", type=int, default=20)
    chaos.add_options(arguments, KINDS)
    options = arguments.parse_args()
    kinds = tuple(kind for kind in KINDS if kind in options.kinds.split(","))
    sys.exit(1 if chaos.hurt_runs(FrozenRun, options, kinds, wanted=options.stops, report=report) else 0)


if __name__ == "__main__":
    main()
