"""The record of a run: each event of a group for the ledger, and what became of every sampled token.

    generated = trained + dropped + in flight

``generated`` is counted at the engines, ``trained`` by the trainer, ``dropped`` where a group or a token is given up,
and what is in flight is in running episodes and in the buffer. The four are counted in four places, so the equation can
fail; it is checked at the end of every run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.errors import SandboxError, TokenBalanceError
from asyncrl.foreign import Failures
from asyncrl.interfaces import DroppedGroup, GroupSummary, SelectedGroup
from asyncrl.ledger import (
    Completed,
    Consumed,
    Dispatched,
    Dropped,
    GroupFailed,
    Issued,
    Ledger,
    LedgerEvent,
    Recovered,
    Reused,
    TurnsAppended,
)
from asyncrl.rollout.live_weights import WeightsProof
from asyncrl.rollout.turns import sampled_turns
from asyncrl.staleness import Certificate

_log = logging.getLogger(__name__)

FAILURES = frozenset({"environment_failed", "rollouts_lost"})
"""Reasons under which a group is dropped because it failed, not by a decision."""

_NOTHING = Recovered(next_group_id=0, waiting={}, batches={}, groups={}, dropped_tokens={})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBalance:
    """The token equation of a run at one moment; the ``tokens`` of a :class:`~asyncrl.trainer.report.RunSummary`."""

    generated: int
    trained: int
    dropped: Mapping[str, int]
    in_flight: int

    @property
    def difference(self) -> int:
        """Tokens that are unaccounted for: 0 unless some were lost or counted twice."""
        return self.generated - self.trained - sum(self.dropped.values()) - self.in_flight

    def check(self) -> None:
        """Raise a TokenBalanceError unless all tokens are accounted for."""
        if self.difference or min(self.generated, self.trained, self.in_flight, *self.dropped.values(), 0) < 0:
            dropped = ", ".join(f"{tokens} {reason}" for reason, tokens in self.dropped.items()) or "none"
            wrong = f"{self.difference} tokens are unaccounted for" if self.difference else "a count is below 0"
            raise TokenBalanceError(
                f"{wrong}: {self.generated} were generated, "
                f"{self.trained} trained on, {self.in_flight} are in flight, dropped: {dropped}; the checkpoints stay"
            )


class Drops(NamedTuple):
    """What was dropped between two steps."""

    rows: int = 0
    tokens: int = 0


class Journal:
    """Writes the driver's events to a ledger and counts tokens. Without a ledger (None) it only counts.

    All counts are over all processes of the run so far; ``dropped`` are tokens by reason.

    Attributes:
        trained_tokens: tokens trained on, each counted once.
        staleness: tokens trained on, by staleness.
        continued: trajectories, and tokens in them, that went on from turns which an interrupted process recorded.
        restarted: trajectories that began again instead, by reason.
        failures: failed attempts of episodes, by cause.
        check_failures: rows whose reward could not be checked, by cause.
    """

    def __init__(
        self,
        ledger: Ledger | None = None,
        *,
        trained: int = 0,
        dropped: Mapping[str, int] | None = None,
        staleness: Mapping[int, int] | None = None,
        failures: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.ledger = ledger
        self.trained_tokens = trained
        self._dropped: Counter[str] = Counter(dropped or {})
        self.staleness: Counter[int] = Counter(staleness or {})
        self.continued: Counter[str] = Counter()
        self.restarted: Counter[str] = Counter()
        self.failures = Failures()
        self.failures.merge(failures or {})
        self.check_failures = Failures()
        self._checks: Counter[str] = Counter()
        self._proofs: list[WeightsProof] = []
        self._drops = Drops()
        self._unfinished = {group_id: turns.tokens for group_id, turns in self.recovered.turns.items()}

    @property
    def recovered(self) -> Recovered:
        """What a resumed run finds in the ledger; empty for a new one."""
        found = self.ledger.recovered if self.ledger is not None else None
        return found if found is not None else _NOTHING

    def recorded_turns(self, group_id: int) -> bytes:
        """Return turns that an interrupted process recorded, for its rollouts to continue from; may be empty."""
        turns = self.recovered.turns.get(group_id)
        return turns.content if turns is not None else b""

    def balance(self, *, generated: int, in_flight: int) -> TokenBalance:
        """Return the token equation; recorded turns that no rollout has continued yet are in flight, too."""
        return TokenBalance(
            generated=generated,
            trained=self.trained_tokens,
            dropped=self.dropped_tokens,
            in_flight=in_flight + sum(self._unfinished.values()),
        )

    @property
    def dropped_tokens(self) -> Mapping[str, int]:
        """Tokens dropped, by reason; reasons without tokens are left out."""
        return {reason: tokens for reason, tokens in sorted(self._dropped.items()) if tokens}

    def drop_tokens(self, reason: str, tokens: int) -> None:
        """Count tokens that will never be trained on."""
        self._dropped[reason] += tokens

    def record(self, *events: LedgerEvent, rows: bytes | None = None) -> None:
        """Append events to the ledger, if there is one (:meth:`asyncrl.ledger.Ledger.append`)."""
        if self.ledger is not None:
            self.ledger.append(*events, rows=rows)

    # ------------------------------------------------------------------------------------------------- a group's events

    def issued(self, group_id: int, *, task: int | None = None) -> None:
        """Record that the admission law gave out an id, for the first time or, in a resumed run, again."""
        if group_id not in self.recovered.waiting:
            self.record(Issued(group_id, task))

    async def dispatched(self, group_id: int, *, version: int) -> int | None:
        """Record that rollouts of a group are about to be sent; return the attempt's number, None without a ledger.

        Waits while the ledger has too much to write.
        """
        if self.ledger is None:
            return None
        await self.ledger.room()
        attempt = self.ledger.attempt(group_id) + 1
        self.ledger.append(Dispatched(group_id=group_id, attempt=attempt, version=version))
        return attempt

    def turns(self, content: bytes) -> None:
        """Record turns of unfinished rollouts that have ended (:mod:`asyncrl.rollout.turns`)."""
        self.record(TurnsAppended(turns=sampled_turns(content)), rows=content)

    def completed(self, summary: GroupSummary, meta: Mapping[str, Any], *, attempt: int) -> None:
        """Record the finished rollouts of a group; ``meta`` is the ``meta_info`` of their header."""
        group_id, wasted = summary.group_id, meta["wasted_tokens"]
        event = Completed(group_id=group_id, attempt=attempt, tokens=summary.tokens, wasted=wasted)
        self.record(event, rows=meta.get("record"))
        self._settle_unfinished(group_id, meta.get("continued", {}))
        self.count_failures(meta.get("failures", {}))
        self.count_checks(meta.get("checks", {}))
        self.drop_tokens("environment_failed", wasted)
        self._drops = Drops(self._drops.rows, self._drops.tokens + wasted)

    def count_failures(self, failures: Mapping[str, Mapping[str, Any]]) -> None:
        """Count failed attempts by cause; log a cause once."""
        for cause in self.failures.merge(failures):
            _log.warning("an environment failed: %s\n%s", cause, self.failures[cause]["example"])
        sandboxes = (each["count"] for cause, each in failures.items() if cause.startswith(SandboxError.__name__))
        self._checks.update(sandboxes=sum(sandboxes))

    def count_checks(self, checks: Mapping[str, Any]) -> None:
        """Count rows whose rewards were checked, and those that could not be; log each cause once."""
        failures: Mapping[str, Mapping[str, Any]] = checks.get("failures", {})
        for cause in self.check_failures.merge(failures):
            example = self.check_failures[cause]["example"]
            _log.warning("a row could not be scored again, to check its reward: %s\n%s", cause, example)
        self._checks.update(rows=checks.get("rows", 0), failed=sum(each["count"] for each in failures.values()))

    def count_proofs(self, proofs: Iterable[WeightsProof]) -> None:
        self._proofs += proofs

    def take_checks(self) -> Mapping[str, float]:
        """Return what was checked since the last call, and attempts whose sandbox failed: the metrics of checks."""
        checks, self._checks = self._checks, Counter()
        proofs, self._proofs = self._proofs, []
        return {
            "rewards_checked": checks["rows"],
            "reward_checks_failed": checks["failed"],
            "sandboxes_failed": checks["sandboxes"],
            "weights_proofs": len(proofs),
            "weights_proof_s": max((proof.seconds for proof in proofs), default=0.0),
            "weights_canary": max((proof.canary for proof in proofs), default=0.0),
        }

    def failed(self, group_id: int) -> None:
        """Record that the rollouts of a group failed: turns recorded for it are lost."""
        self._settle_unfinished(group_id, {})

    def dropped(self, group: DroppedGroup, *, rows: int) -> None:
        """Record that a group of ``rows`` rows will not be trained on."""
        self.drop_tokens(group.reason, group.tokens)
        self._drops = Drops(self._drops.rows + rows, self._drops.tokens + group.tokens)
        if group.reason in FAILURES:
            self.record(GroupFailed(group_id=group.group_id, failure=group.reason, tokens=group.tokens))
        else:
            self.record(Dropped(group_id=group.group_id, reason=group.reason, tokens=group.tokens))

    def trained(
        self, step: int, groups: Sequence[SelectedGroup], *, tokens: int, certificate: Certificate, reused: Certificate
    ) -> None:
        """Record that ``step`` was trained on these groups, in order.

        ``tokens`` are those trained on, as the trainer counted them; ``certificate`` is of the whole batch, ``reused``
        of its groups that an earlier step had trained on.
        """
        self.record(
            *[
                (Reused if group.uses else Consumed)(group_id=group.summary.group_id, step=step, position=position)
                for position, group in enumerate(groups)
            ]
        )
        self.trained_tokens += tokens - reused.tokens
        self.drop_tokens("masked", certificate.masked_tokens - reused.masked_tokens)
        self.staleness.update(certificate.histogram)

    def take_drops(self) -> Drops:
        """Return what was dropped since the last call, for the certificate of the next step."""
        drops, self._drops = self._drops, Drops()
        return drops

    def _settle_unfinished(self, group_id: int, continued: Mapping[str, Any]) -> None:
        """Count recorded turns of an interrupted process as part of the group's rows now, or as lost."""
        tokens = continued.get("tokens", 0)
        self.drop_tokens("interrupted", self._unfinished.pop(group_id, 0) - tokens)
        self.continued.update(trajectories=continued.get("rows", 0), tokens=tokens)
        self.restarted.update(continued.get("restarted", {}))
