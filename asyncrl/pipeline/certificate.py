"""The certificate of a batch: how old its tokens were, what was masked, and what was thrown away on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import GroupSummary

__all__ = ["Certificate", "certify", "check_summary", "merge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What a batch (or many, merged) was trained on, and what was thrown away on the way.

        >>> summary = GroupSummary(
        ...     slot=0,
        ...     rows=2,
        ...     oldest_version=1,
        ...     tokens=4,
        ...     version_tokens={1: 1, 2: 3},
        ...     rewards=(0.0, 1.0),
        ...     lengths=(1, 3),
        ... )
        >>> certificate = certify([summary], trainer_version=2, dropped_rows=2, dropped_tokens=4)
        >>> dict(certificate.histogram)
        {0: 3, 1: 1}

    The examples here are about this certificate and this summary.

    Attributes:
        first_version: lowest trainer version among the batches.
        last_version: highest one.
        groups: groups trained on.
        rows: rows trained on.
        tokens: tokens trained on.
        histogram: those by staleness (trainer version minus sampling version), in growing order.
        masked_tokens: further tokens of the same rows, too old to be trained on.
        dropped_rows: rows issued but not trained on.
        dropped_tokens: tokens sampled for those; an unfinished row counts as far as it came.
    """

    first_version: int
    last_version: int
    groups: int
    rows: int
    tokens: int
    histogram: Mapping[int, int]
    masked_tokens: int = 0
    dropped_rows: int = 0
    dropped_tokens: int = 0

    @property
    def maximum(self) -> int:
        """Staleness of the oldest token; 0 without tokens.

        >>> certificate.maximum
        1
        """
        return max(self.histogram, default=0)

    @property
    def mean(self) -> float:
        """Mean staleness of a token; 0 without tokens.

        >>> certificate.mean
        0.25
        """
        total = sum(staleness * tokens for staleness, tokens in self.histogram.items())
        return total / self.tokens if self.tokens else 0.0

    @property
    def mean_length_trained(self) -> float:
        """Sampled tokens per row trained on, masked ones included; 0 without rows.

        >>> certificate.mean_length_trained  # 4 tokens in 2 rows
        2.0
        """
        return (self.tokens + self.masked_tokens) / self.rows if self.rows else 0.0

    @property
    def mean_length_issued(self) -> float:
        """Sampled tokens per row issued, dropped ones included. A lower bound if some were dropped unfinished.

        >>> certificate.mean_length_issued  # 8 tokens in 4 rows
        2.0
        """
        rows = self.rows + self.dropped_rows
        return (self.tokens + self.masked_tokens + self.dropped_tokens) / rows if rows else 0.0

    @property
    def length_ratio(self) -> float:
        """Mean length trained over mean length issued: below 1, slow rows were thrown away. 1 without tokens.

        >>> certificate.length_ratio
        1.0
        """
        return self.mean_length_trained / self.mean_length_issued if self.mean_length_issued else 1.0

    @property
    def waste(self) -> float:
        """Share of the sampled tokens that were not trained on, 0..1: masked, or dropped with their row.

        >>> certificate.waste
        0.5
        """
        lost = self.masked_tokens + self.dropped_tokens
        return lost / (self.tokens + lost) if lost else 0.0

    def as_metrics(self) -> dict[str, float]:
        """What a step logs of its batch: tokens by staleness, and what was masked and thrown away.

        >>> certificate.as_metrics()["staleness/1"]
        1.0
        """
        return {
            "staleness_max": float(self.maximum),
            "staleness_mean": self.mean,
            "masked_tokens": float(self.masked_tokens),
            "dropped_tokens": float(self.dropped_tokens),
            "length_ratio": self.length_ratio,
            **{f"staleness/{age}": float(tokens) for age, tokens in self.histogram.items()},
        }

    @property
    def masked_share(self) -> float:
        """Share of the tokens of trained rows that were masked, 0..1.

        >>> certify([summary], trainer_version=2, oldest_version=2).masked_share
        0.25
        """
        return self.masked_tokens / (self.tokens + self.masked_tokens) if self.masked_tokens else 0.0


def check_summary(summary: GroupSummary, *, slot: int, rows: int | None = None) -> None:
    """Refuse what a rollout says of itself if it is not of this slot, has not so many rows, or contradicts itself.

        >>> check_summary(summary, slot=1)
        Traceback (most recent call last):
        asyncrl.errors.InvalidDataError: the rollout of slot 1 was answered with rows of slot 0

    Raises:
        InvalidDataError: saying what disagrees.
    """
    if summary.slot != slot:
        raise InvalidDataError(f"the rollout of slot {slot} was answered with rows of slot {summary.slot}")
    if rows is not None and summary.rows != rows:
        raise InvalidDataError(f"{rows} rollouts of slot {slot} were asked for, and {summary.rows} came back")
    by_version, by_row = sum(summary.version_tokens.values()), sum(summary.lengths)
    if not by_version == by_row == summary.tokens:
        raise InvalidDataError(
            f"group {slot} has {summary.tokens} tokens, but its versions {dict(summary.version_tokens)} count "
            f"{by_version} and its rows {by_row}"
        )
    if not summary.rows == len(summary.rewards) == len(summary.lengths):
        raise InvalidDataError(
            f"group {slot} has {summary.rows} rows, {len(summary.rewards)} rewards and {len(summary.lengths)} lengths"
        )


def certify(
    summaries: Iterable[GroupSummary],
    *,
    trainer_version: int,
    oldest_version: int | None = None,
    dropped_rows: int = 0,
    dropped_tokens: int = 0,
) -> Certificate:
    """Certificate of one batch: ``summaries`` are trained on by the step at ``trainer_version``.

    Tokens of versions below ``oldest_version`` are masked. ``dropped_rows`` and ``dropped_tokens`` count what was
    thrown away since the batch before.

        >>> certify([summary], trainer_version=3, oldest_version=2).masked_tokens
        1

    Raises:
        InvalidDataError: a summary's counts disagree, or it has tokens of a version the trainer has not made yet.
    """
    histogram: dict[int, int] = {}
    groups = rows = tokens = masked = 0
    for summary in summaries:
        if sum(summary.version_tokens.values()) != summary.tokens:
            raise InvalidDataError(
                f"group {summary.slot} has {summary.tokens} tokens, but its versions "
                f"{dict(summary.version_tokens)} count {sum(summary.version_tokens.values())}"
            )
        for version, count in summary.version_tokens.items():
            if not 0 <= version <= trainer_version:
                raise InvalidDataError(
                    f"group {summary.slot} has tokens of version {version}; the trainer is at {trainer_version}"
                )
            if oldest_version is not None and version < oldest_version:
                masked += count
            elif count:
                histogram[trainer_version - version] = histogram.get(trainer_version - version, 0) + count
        groups += 1
        rows += summary.rows
        tokens += summary.tokens
    return Certificate(
        first_version=trainer_version,
        last_version=trainer_version,
        groups=groups,
        rows=rows,
        tokens=tokens - masked,
        histogram=dict(sorted(histogram.items())),
        masked_tokens=masked,
        dropped_rows=dropped_rows,
        dropped_tokens=dropped_tokens,
    )


def merge(certificates: Iterable[Certificate]) -> Certificate:
    """One certificate for all of them.

        >>> merge([certificate, certificate]).tokens
        8

    Raises:
        ValueError: there is none.
    """
    parts = list(certificates)
    if not parts:
        raise ValueError("merge needs at least one certificate")
    histogram: dict[int, int] = {}
    for part in parts:
        for staleness, tokens in part.histogram.items():
            histogram[staleness] = histogram.get(staleness, 0) + tokens
    return Certificate(
        first_version=min(part.first_version for part in parts),
        last_version=max(part.last_version for part in parts),
        groups=sum(part.groups for part in parts),
        rows=sum(part.rows for part in parts),
        tokens=sum(part.tokens for part in parts),
        histogram=dict(sorted(histogram.items())),
        masked_tokens=sum(part.masked_tokens for part in parts),
        dropped_rows=sum(part.dropped_rows for part in parts),
        dropped_tokens=sum(part.dropped_tokens for part in parts),
    )
