"""One token per row, with its log-prob under the distribution it was really sampled from.

Top-k and top-p become a threshold per row: what lies below is cut off, and what is tied with the last token kept is
kept too. Only rows with a truncation pay for finding theirs; a batch at temperature 1 costs no sort. After the
cut all rows are sampled alike.

Sampling is by inverse CDF: the first token whose cumulated probability exceeds u. The number u of the n-th token of a
request is a hash of (seed, n): SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
So it is the same on every run, whatever runs beside the request.

Exponentials are float32, their sums float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.interfaces import SamplingParams, TopLogProbs

UInt64Array: TypeAlias = npt.NDArray[np.uint64]

_BLOCK = 256  # vocabulary entries whose probabilities are added up before any is looked at alone
_SMALL_VOCABULARY = 2048  # up to here blocks cost more than they save
_AHEAD = 16  # steps whose random numbers are computed at a time
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(values: UInt64Array) -> UInt64Array:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def uniforms(seeds: UInt64Array, counters: UInt64Array) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1), one per (seed, counter): SplitMix64 begun at the hashed seed."""
    bits = _mix(_mix(seeds + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Sampled:
    """B rows: ``tokens`` [B] int64 on the model's device, and the same with ``log_probs`` as lists.

    ``top_log_probs`` are the likeliest tokens of the rows that request them, None for others; empty if no row does.
    """

    tokens: torch.Tensor
    token_list: list[int]
    log_probs: list[float]
    top_log_probs: list[TopLogProbs | None]


class Sampler:
    """Samples for a fixed list of B rows, step after step; made anew when the rows change.

    ``counters`` are how many tokens each row has sampled so far.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        *,
        seeds: Sequence[int],
        counters: Sequence[int],
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self._seeds = np.array(seeds, dtype=np.uint64)
        self._counters = np.array(counters, dtype=np.uint64)
        self._drawn = torch.empty(0)
        self._next = _AHEAD
        self._device = device
        greedy = [p.temperature == 0.0 for p in params]
        temperatures = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=device)
        self._temperatures = temperatures[:, None] if any(p.temperature not in (0.0, 1.0) for p in params) else None
        self._greedy = torch.tensor(greedy, device=device)[:, None] if any(greedy) else None
        self._all_greedy = all(greedy)
        self._top_counts = [p.top_log_probs for p in params] if any(p.top_log_probs for p in params) else []
        top_k = [0 if g or p.top_k >= vocabulary else p.top_k for p, g in zip(params, greedy, strict=True)]
        nuclei = [p.top_p < 1.0 and not g and not k for p, g, k in zip(params, greedy, top_k, strict=True)]
        self._cuts = [
            _Cut(rows, params, top_k, vocabulary=vocabulary, device=device)
            for rows in (_rows(k > 0 for k in top_k), _rows(nuclei))
            if rows
        ]

    def sample(self, logits: torch.Tensor) -> Sampled:
        """Draw the next token of every row from ``logits`` [B, V]. Log-probs of non-finite logits are not finite."""
        scaled = logits.float()
        if self._temperatures is not None:
            scaled = scaled / self._temperatures
        thresholds = self._thresholds(scaled)
        tokens, log_probs, total = self._invert(scaled, thresholds, self._draw()[:, None])
        top = self._likeliest(scaled, thresholds, total) if self._top_counts else []
        return Sampled(tokens, tokens.tolist(), log_probs.tolist(), top)

    def _likeliest(
        self, scaled: torch.Tensor, thresholds: torch.Tensor | None, total: torch.Tensor
    ) -> list[TopLogProbs | None]:
        """Return, for each row that requests them, the likeliest tokens that could be sampled, with log-probs."""
        most = min(max(self._top_counts), scaled.shape[1])
        values, tokens = scaled.topk(most, dim=-1)
        log_probs = (values - values[:, :1]).double() - total.log()
        kept = values > -torch.inf if thresholds is None else (values >= thresholds) & (values > -torch.inf)
        top: list[TopLogProbs | None] = []
        counts, ids, shares = kept.sum(-1).tolist(), tokens.tolist(), log_probs.tolist()
        for row, asked in enumerate(self._top_counts):
            count = min(asked, counts[row])
            top.append(tuple(zip(ids[row][:count], shares[row][:count], strict=True)) if asked else None)
        return top

    def _draw(self) -> torch.Tensor:
        if self._next == _AHEAD:
            steps = np.arange(_AHEAD, dtype=np.uint64)[:, None]
            self._drawn = torch.from_numpy(uniforms(self._seeds, self._counters + steps)).to(self._device)
            self._counters += np.uint64(_AHEAD)
            self._next = 0
        self._next += 1
        return self._drawn[self._next - 1]

    def _thresholds(self, scaled: torch.Tensor) -> torch.Tensor | None:
        """Return [B, 1]: the smallest logit that may be sampled; None if none is cut off."""
        if not self._cuts:
            return None
        if len(self._cuts[0].rows) == len(scaled):
            return self._cuts[0].thresholds(scaled)
        thresholds = torch.full((len(scaled), 1), -torch.inf, device=self._device)
        for cut in self._cuts:
            thresholds[cut.rows] = cut.thresholds(scaled[cut.rows])
        return thresholds

    def _invert(
        self, scaled: torch.Tensor, thresholds: torch.Tensor | None, drawn: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return tokens [B], their log-probs [B], and [B, 1] the sum of all exp(logit - largest logit) that count.

        Blocks of a large vocabulary are summed first; only the block that holds u is searched.
        """
        vocabulary = scaled.shape[1]
        top = scaled.amax(-1, keepdim=True)
        weights = (scaled - top).exp_()
        if thresholds is not None:
            weights.masked_fill_(scaled < thresholds, 0.0)
        best = scaled.argmax(-1, keepdim=True) if self._greedy is not None else None
        if best is not None and self._all_greedy:
            # The largest logit is `top` itself: log-prob = -log(sum of exp(logit - top)).
            total = weights.sum(-1, keepdim=True, dtype=torch.float64)
            return best[:, 0], -total[:, 0].log(), total
        if vocabulary <= _SMALL_VOCABULARY:
            total, tokens, _ = _invert(weights.double(), drawn)
        else:
            total, block, rest = _invert(_block_sums(weights), drawn)
            columns = block * _BLOCK + torch.arange(_BLOCK, device=self._device)
            inside = weights.gather(1, columns.clamp(max=vocabulary - 1)).double()
            inside.masked_fill_(columns >= vocabulary, 0.0)
            _, offset, _ = _invert(inside, None, target=rest)
            tokens = (block * _BLOCK + offset).clamp_(max=vocabulary - 1)  # non-finite logits point anywhere
        if best is not None and self._greedy is not None:
            tokens = torch.where(self._greedy, best, tokens)
        log_probs = (scaled.gather(1, tokens) - top).double() - total.log()
        return tokens[:, 0], log_probs[:, 0], total


class _Cut:
    """Thresholds of rows that truncate: all with a top-k (and perhaps a top-p), or all with a top-p alone."""

    def __init__(
        self,
        rows: list[int],
        params: Sequence[SamplingParams],
        top_k: Sequence[int],
        *,
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self.rows = torch.tensor(rows, device=device)
        self._widest = max(top_k[i] or vocabulary for i in rows)
        self._k = torch.tensor([top_k[i] or vocabulary for i in rows], device=device)[:, None]
        # 1 means off, also for tokens so unlikely that the sum before them rounds to the total.
        p = [params[i].top_p if params[i].top_p < 1.0 else torch.inf for i in rows]
        self._p = torch.tensor(p, dtype=torch.float64, device=device)[:, None]
        self._rank = torch.arange(self._widest, device=device)

    def thresholds(self, scaled: torch.Tensor) -> torch.Tensor:
        """Map [R, V] to [R, 1], the smallest logit kept. Top-p counts among the top-k."""
        values = _largest(scaled, self._widest)
        weights = (values - values[:, :1]).exp_().double()
        allowed = self._rank < self._k
        weights.masked_fill_(~allowed, 0.0)
        cumulated = weights.cumsum(-1)
        # A token stays while those before it fall short of p.
        kept = allowed & (cumulated - weights < self._p * cumulated[:, -1:])
        last = (kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
        return values.gather(1, last)


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    if count < values.shape[1]:
        return values.topk(count, dim=-1).values
    if values.is_cuda:
        return values.sort(dim=-1, descending=True).values
    # numpy sorts without carrying indices along, which on a CPU is thirty times faster.
    return torch.from_numpy(np.ascontiguousarray(np.sort(values.numpy(), axis=-1)[:, ::-1]))


def _rows(chosen: Iterable[bool]) -> list[int]:
    return [index for index, flag in enumerate(chosen) if flag]


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sum [B, V] float32 to [B, ceil(V / block)] float64."""
    whole = weights.shape[1] // _BLOCK * _BLOCK
    sums = [weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1, dtype=torch.float64)] if whole else []
    if whole < weights.shape[1]:
        sums.append(weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)


def _invert(
    weights: torch.Tensor, drawn: torch.Tensor | None, *, target: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Invert the CDF of ``weights`` [B, N] float64 at ``target`` [B, 1], or at ``drawn`` in [0, 1) times the total.

    Returns the total, the first index whose cumulated weight exceeds the point (its own weight is positive) and what
    is left of the point there, each [B, 1].
    """
    cumulated = weights.cumsum(-1)
    total = cumulated[:, -1:]
    if target is None:
        assert drawn is not None
        target = drawn * total
    # Rounding must not carry the point past the last positive weight.
    target = torch.minimum(target, total * (1.0 - 2.0**-52))
    index = torch.searchsorted(cumulated, target, right=True).clamp_(max=weights.shape[1] - 1)
    before = cumulated.gather(1, index) - weights.gather(1, index)
    return total, index, (target - before).clamp_(min=0.0)
