"""Failures of weight updates that other systems have shown: each check finds a planted copy, and none here."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from asyncrl.errors import WeightError
from asyncrl.rollout.publication import Commit, Decision, Ended, Fence, Prepare, Publication, Serve

LAYERS = ("embedding", "attention", "head")


@dataclass
class Engine:
    """A replica's weights, layer by layer, and the version that it says its tokens are of."""

    layers: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LAYERS, 0))
    label: int = 0
    serves: bool = False
    breaks_at: str = ""

    def swap(self, version: int) -> bool:
        """Layer by layer; False if it broke in the middle."""
        for layer in LAYERS:
            if layer == self.breaks_at:
                return False
            self.layers[layer] = version
        self.label = version
        return True


class Fleet:
    """Two engines under a publication, whose commands are answered in any order; notes what must not be."""

    def __init__(self, publication: Publication, *, seed: int = 0) -> None:
        self.engines = {"a": Engine(), "b": Engine()}
        self.wrong: list[str] = []
        self.begun: list[int] = []
        self.ended: list[int] = []
        self._publication = publication
        self._dice = random.Random(seed)
        self._commands: list[Prepare | Commit] = []
        for name in self.engines:
            self._follow(publication.joined(name, holds=0))

    def publish(self, version: int) -> str:
        """As a trainer does; why it was refused, if it was."""
        try:
            decisions = self._publication.begin(version)
        except WeightError as error:
            return str(error)
        self.begun.append(version)
        self._follow(decisions)
        return ""

    def answer(self, times: int = 1000) -> None:
        """Let so many commands be done, in any order."""
        while self._commands and times:
            times -= 1
            command = self._commands.pop(self._dice.randrange(len(self._commands)))
            engine = self.engines[command.replica]
            done = engine.swap(command.version) if isinstance(command, Commit) else True
            publication = self._publication
            self._follow(publication.succeeded(command) if done else publication.failed(command, "broke half-way"))

    def _follow(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Prepare | Commit):
                self._commands.append(decision)
            elif isinstance(decision, Serve | Fence):
                self.engines[decision.replica].serves = isinstance(decision, Serve)
            elif isinstance(decision, Ended):
                self.ended.append(decision.version)
        # What a publication says of a replica is what its tokens are labelled with.
        for one in self._publication.replicas:
            engine = self.engines[one.name]
            if one.holds is not None and one.command is None and engine.serves:
                if set(engine.layers.values()) != {one.holds}:
                    self.wrong.append(f"{one.name} serves {engine.layers} as version {one.holds}")
                if one.holds < max(self.ended, default=0):
                    self.wrong.append(f"{one.name} went back to version {one.holds}")


class Hopeful(Publication):
    """The planted bug: a replica that answered at all has the new weights."""

    def failed(self, command: Prepare | Commit, reason: str) -> tuple[Decision, ...]:
        return self.succeeded(command)


@pytest.mark.parametrize(("publication", "planted"), [(Publication, False), (Hopeful, True)])
def test_half_an_update_is_not_called_the_new_version(publication: type[Publication], planted: bool):
    fleet = Fleet(publication(version=0))
    fleet.engines["b"].breaks_at = "head"
    fleet.publish(1)
    fleet.answer()
    refusal = "b serves {'embedding': 1, 'attention': 1, 'head': 0} as version 1"
    assert set(fleet.wrong) == ({refusal} if planted else set())
    assert fleet.engines["b"].serves is planted
    assert fleet.engines["a"].serves
    assert fleet.ended == [1]


class Forgetful(Publication):
    """The planted bug: whatever comes last is the newest."""

    def begin(self, version: int) -> tuple[Decision, ...]:
        self.version = -1
        return super().begin(version)


@pytest.mark.parametrize(("publication", "planted"), [(Publication, False), (Forgetful, True)])
def test_older_weights_do_not_take_the_place_of_newer_ones(publication: type[Publication], planted: bool):
    fleet = Fleet(publication(version=0))
    fleet.publish(2)
    fleet.answer()
    refusal = fleet.publish(1)  # a trainer that was restarted, or a call that came late
    fleet.answer()
    assert ("1 cannot follow 2" in refusal) is not planted
    assert ("a went back to version 1" in fleet.wrong) is planted
    assert {engine.label for engine in fleet.engines.values()} == ({1} if planted else {2})


class Hurried(Publication):
    """The planted bug: a second update begins while the first is under way."""

    def begin(self, version: int) -> tuple[Decision, ...]:
        self.phase = type(self.phase).IDLE
        return super().begin(version)


@pytest.mark.parametrize(("publication", "planted"), [(Publication, False), (Hurried, True)])
def test_two_updates_do_not_run_at_once(publication: type[Publication], planted: bool):
    fleet = Fleet(publication(version=0))
    fleet.publish(1)
    fleet.answer(times=1)
    refusal = fleet.publish(2)
    fleet.answer()
    assert ("while version 1 is preparing" in refusal) is not planted
    # Whoever began one waits for its end: with two at once, one of them never hears.
    assert (fleet.begun == fleet.ended) is not planted
