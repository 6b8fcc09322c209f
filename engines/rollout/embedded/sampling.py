"""One token per row, with its log-prob under the distribution it was really sampled from.

Rows are grouped by what they need, so a batch at temperature 1 costs no sort: plain rows (temperature only, and
greedy ones) take one pass over the vocabulary; rows with top-k or top-p look at their largest candidates and see the
whole vocabulary only if the nucleus is wider. A row's group depends on its own parameters alone, never on its
neighbours.

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

from asyncrl.interfaces import SamplingParams

__all__ = ["Sampled", "Sampler", "uniforms"]

UInt64Array: TypeAlias = npt.NDArray[np.uint64]

_BLOCK = 256  # vocabulary entries whose probabilities are added up before any is looked at alone
_SMALL_VOCABULARY = 2048  # up to here blocks cost more than they save
_AHEAD = 16  # steps whose random numbers are computed at a time
_CANDIDATES = 1024  # first try for a nucleus without top-k
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(values: UInt64Array) -> UInt64Array:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def uniforms(seeds: UInt64Array, counters: UInt64Array) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1), one per (seed, counter): SplitMix64 begun at the hashed seed."""
    bits = _mix(_mix(seeds + _GOLDEN) + (counters + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True)
class Sampled:
    """B rows: ``tokens`` [B] int64 on the model's device, and the same with ``log_probs`` as lists."""

    tokens: torch.Tensor
    token_list: list[int]
    log_probs: list[float]


class Sampler:
    """Samples for a fixed list of rows, step after step; made anew when the rows change.

    Args:
        params: parameters of the B rows.
        seeds: their seeds (64 bits each).
        counters: how many tokens each has sampled so far.
        vocabulary: V.
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
        top_k = [p.top_k if 0 < p.top_k < vocabulary else 0 for p in params]
        greedy = [p.temperature == 0.0 for p in params]
        truncated = [not g and (k > 0 or p.top_p < 1.0) for p, k, g in zip(params, top_k, greedy, strict=True)]
        self._plain = _rows(not t for t in truncated)
        self._truncated = _rows(truncated)
        temperatures = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=device)
        self._temperatures = temperatures[:, None] if any(p.temperature not in (0.0, 1.0) for p in params) else None
        self._greedy = torch.tensor(greedy, device=device)[self._plain] if any(greedy) else None
        self._all_greedy = all(greedy)
        picked = self._truncated
        self._k = torch.tensor([top_k[i] or vocabulary for i in picked], device=device)[:, None]
        self._p = torch.tensor([params[i].top_p for i in picked], dtype=torch.float64, device=device)[:, None]
        ks = [top_k[i] or _CANDIDATES for i in picked]
        self._candidates = min(max(ks, default=1), vocabulary)

    def sample(self, logits: torch.Tensor) -> Sampled:
        """Draw the next token of every row from ``logits`` [B, V]. Log-probs of non-finite logits are not finite."""
        scaled = logits.float()
        if self._temperatures is not None:
            scaled = scaled / self._temperatures
        drawn = self._draw()
        if not self._truncated:
            tokens, log_probs = self._sample_plain(scaled, drawn)
        elif not self._plain:
            tokens, log_probs = self._sample_truncated(scaled, drawn)
        else:
            tokens = torch.empty(len(scaled), dtype=torch.int64, device=self._device)
            log_probs = torch.empty(len(scaled), dtype=torch.float64, device=self._device)
            for picked, draw in ((self._plain, self._sample_plain), (self._truncated, self._sample_truncated)):
                index = torch.tensor(picked, device=self._device)
                tokens[index], log_probs[index] = draw(scaled[index], drawn[index])
        return Sampled(tokens, tokens.tolist(), log_probs.tolist())

    def _draw(self) -> torch.Tensor:
        """The numbers u [B] of this step."""
        if self._next == _AHEAD:
            steps = np.arange(_AHEAD, dtype=np.uint64)[:, None]
            self._drawn = torch.from_numpy(uniforms(self._seeds, self._counters + steps)).to(self._device)
            self._counters += np.uint64(_AHEAD)
            self._next = 0
        self._next += 1
        return self._drawn[self._next - 1]

    def _sample_plain(self, scaled: torch.Tensor, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """No truncation: blocks are summed first, only the block that holds u is looked into."""
        top = scaled.amax(-1, keepdim=True)
        weights = (scaled - top).exp_()
        best = scaled.argmax(-1, keepdim=True) if self._greedy is not None else None
        if best is not None and self._all_greedy:
            # The largest logit is `top` itself: log-prob = -log(sum of exp(logit - top)).
            return best[:, 0], -weights.sum(-1, dtype=torch.float64).log()
        vocabulary = weights.shape[1]
        if vocabulary <= _SMALL_VOCABULARY:
            total, tokens, _ = _invert(weights.double(), drawn[:, None])
        else:
            total, block, rest = _invert(_block_sums(weights), drawn[:, None])
            columns = block * _BLOCK + torch.arange(_BLOCK, device=self._device)
            inside = weights.gather(1, columns.clamp(max=vocabulary - 1)).double()
            inside.masked_fill_(columns >= vocabulary, 0.0)
            _, offset, _ = _invert(inside, None, target=rest)
            tokens = (block * _BLOCK + offset).clamp_(max=vocabulary - 1)  # non-finite logits point anywhere
        if best is not None and self._greedy is not None:
            tokens = torch.where(self._greedy[:, None], best, tokens)
        log_probs = (scaled.gather(1, tokens) - top).double() - total.log()
        return tokens[:, 0], log_probs[:, 0]

    def _sample_truncated(self, scaled: torch.Tensor, drawn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Top-k, then top-p among those: the smallest set of largest probabilities that reaches p."""
        vocabulary = scaled.shape[1]
        tokens, log_probs, enough = self._among(scaled, drawn, slice(None), self._candidates)
        if not enough.all():
            index = (~enough).nonzero()[:, 0]
            tokens[index], log_probs[index], _ = self._among(scaled[index], drawn[index], index, vocabulary)
        return tokens, log_probs

    def _among(
        self, scaled: torch.Tensor, drawn: torch.Tensor, rows: torch.Tensor | slice, candidates: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sample among the ``candidates`` largest; the third answer says where these held the whole nucleus."""
        k, p = self._k[rows], self._p[rows]
        values, order = scaled.topk(candidates, dim=-1)
        exponents = values - values[:, :1]
        weights = exponents.exp().double()
        rank = torch.arange(candidates, device=self._device)
        weights.masked_fill_(rank >= k, 0.0)
        without_k = k >= scaled.shape[1]
        total = weights.sum(-1, keepdim=True)
        if candidates < scaled.shape[1] and bool(without_k.any()):
            whole = (scaled - values[:, :1]).exp_().sum(-1, keepdim=True, dtype=torch.float64)
            total = torch.where(without_k, whole, total)
        cumulated = weights.cumsum(-1)
        enough = (~without_k | (cumulated[:, -1:] >= p * total) | (candidates == scaled.shape[1]))[:, 0]
        # A token stays while those before it fall short of p.
        weights.masked_fill_((cumulated - weights) >= p * total, 0.0)
        kept, place, _ = _invert(weights, drawn[:, None])
        log_probs = exponents.gather(1, place).double() - kept.log()
        return order.gather(1, place)[:, 0], log_probs[:, 0], enough


def _rows(chosen: Iterable[bool]) -> list[int]:
    return [index for index, flag in enumerate(chosen) if flag]


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """[B, V] float32 -> [B, ceil(V / block)] float64."""
    whole = weights.shape[1] // _BLOCK * _BLOCK
    sums = [weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1, dtype=torch.float64)] if whole else []
    if whole < weights.shape[1]:
        sums.append(weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64))
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=1)


def _invert(
    weights: torch.Tensor, drawn: torch.Tensor | None, *, target: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inverse CDF over ``weights`` [B, N] float64.

    The point is ``target`` [B, 1], or ``drawn`` [B, 1] in [0, 1) times the total. Returns the total, the first index
    whose cumulated weight exceeds the point (its own weight is positive) and what is left of the point there, each
    [B, 1].
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
