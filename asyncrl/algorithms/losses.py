"""Policy losses: from importance ratios and advantages to one loss per token.

A loss takes :class:`PolicyTokens` (columns of some tokens, 0 outside the mask) and returns :class:`TokenLosses`; the
contract is :class:`PolicyLoss`. r is the ratio current / anchor, A the advantage, x = log r.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import Rows, TokenLosses, check_options, check_range, option
from asyncrl.algorithms.kl import probability_ratio
from asyncrl.errors import SchemaError


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTokens:
    """Columns of tokens, all of one shape, usually [T] packed; 0 outside ``mask``.

    Whole rows: a micro-batch may hold any rows, but never a part of one. The examples of losses and corrections are
    about these tokens:

        >>> half = torch.tensor([0.5, 0.5, 0.5]).log()
        >>> tokens = PolicyTokens(  # two of one row, one of another
        ...     current=torch.tensor([0.5, 0.75, 0.25]).log(),
        ...     anchor=half,
        ...     proximal=half,
        ...     behaviour=torch.tensor([0.5, 0.25, 0.5]).log(),
        ...     advantages=torch.tensor([1.0, 1.0, -1.0]),
        ...     mask=torch.tensor([True, True, True]),
        ...     row_index=torch.tensor([0, 0, 1]),
        ... )
        >>> tokens.ratio, tokens.rows().sum(tokens.advantages)
        (tensor([1.0000, 1.5000, 0.5000]), tensor([ 2.,  2., -1.]))

    Attributes:
        current: log-probs under the weights being trained; the only column with a gradient.
        anchor: log-probs where the trust region has its centre.
        proximal: log-probs under the weights at the start of the step.
        behaviour: log-probs under the distribution the token was sampled from.
        mask: boolean, True where the token is trained on.
        row_index: integer, equal for tokens of one row; None if neither loss nor correction sums over rows.
        prepared: columns that the loss itself computed over the whole batch (:meth:`PolicyLoss.prepare`).
    """

    current: Tensor
    anchor: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    mask: Tensor
    row_index: Tensor | None = None
    prepared: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def log_ratio(self) -> Tensor:
        """log(current / anchor), differentiable in ``current``."""
        return self.current - self.anchor

    @property
    def ratio(self) -> Tensor:
        """Ratio current / anchor, always finite."""
        return probability_ratio(self.log_ratio)

    def rows(self) -> Rows:
        """Return sums over rows.

        Raises:
            SchemaError: ``row_index`` was not given.
        """
        if self.row_index is None:
            raise SchemaError("this loss or correction sums over rows: token_losses needs rows, the row of each token")
        return Rows(self.row_index, self.mask)


class PolicyLoss(ABC):
    """What is minimised for every token, before corrections, KL and entropy terms.

    A subclass is a frozen dataclass: its fields are its options (``[algorithm.loss_options]``). It is found by name in
    the entry-point group ``asyncrl.policy_losses``, or as ``package.module:Class``.

    The loss of a batch is a weighted sum of token losses whose weights are known before the batch is cut
    (:func:`~asyncrl.algorithms.token_weights`). A loss must therefore depend on nothing but the token, its row
    (``tokens.rows()``) and the columns it prepared over the whole batch: never on which rows share a micro-batch.

        >>> class Reinforce(PolicyLoss):
        ...     def __call__(self, tokens):
        ...         return TokenLosses(loss=-tokens.advantages * tokens.current)
        >>> Reinforce()(tokens).loss  # the tokens of PolicyTokens' example
        tensor([ 0.6931,  0.2877, -1.3863])

    Attributes:
        corrects: True if the loss itself weighs tokens by how likely the policy that *sampled* them found them. Such a
            loss takes no further correction; any other needs one on stale data.
        prepares: True if :meth:`prepare` is to be called. It costs a forward pass before the first optimizer step.
        needs_several_steps: True if what the loss adds is 0 until the weights have left the anchor.

    Raises:
        ConfigError: an option outside its range.
    """

    corrects: ClassVar[bool] = False
    prepares: ClassVar[bool] = False
    needs_several_steps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        """Return the loss of each token, differentiable in ``tokens.current``, and metrics to average over tokens.

        A loss that clips reports ``clip_fraction``: 1 where the trust region took the token's gradient away or cut its
        weight.
        """

    def prepare(self, tokens: PolicyTokens, *, seed: int) -> Mapping[str, Tensor]:
        """Return columns [T] by name that need the whole batch: quantiles, covariances.

        Called once per update with all trained tokens of all ranks, in the order of their rows, where ``current`` and
        ``anchor`` are those of the start of the step. ``seed``, for what is drawn at random, is equal on all ranks, so
        every rank computes the same. The entries of a micro-batch's tokens come back as ``tokens.prepared``.
        """
        raise NotImplementedError(f"{type(self).__name__} prepares nothing")


@dataclass(frozen=True)
class FunctionLoss(PolicyLoss):
    """A function of tokens that returns the loss of each, or :class:`TokenLosses`; it is taken not to correct.

    >>> FunctionLoss(lambda tokens, *, scale: -scale * tokens.advantages * tokens.ratio, {"scale": 2.0})(tokens).loss
    tensor([-2., -3.,  1.])
    """

    function: Callable[..., Tensor | TokenLosses]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        losses = self.function(tokens, **self.options)
        return losses if isinstance(losses, TokenLosses) else TokenLosses(loss=losses)


# ------------------------------------------------------------------------------------------------- clipped surrogates


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual_clip: float | None = None
) -> TokenLosses:
    """Return the loss -min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 at most -dual_clip * A."""
    free = -ratio * advantages
    clipped = -ratio.clamp(1.0 - low, 1.0 + high) * advantages
    loss = torch.maximum(free, clipped)
    stopped = clipped > free
    if dual_clip is not None:
        ceiling = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        stopped = stopped | (loss > ceiling)
        loss = torch.minimum(loss, ceiling)
    return TokenLosses(loss=loss, metrics={"clip_fraction": stopped.to(ratio.dtype)})


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyLoss):
    """PPO's clipped surrogate, token by token. Schulman et al., arXiv:1707.06347, eq. 7.

    A bad token's gradient stops where the ratio falls below 1 - ``clip_ratio_low``, a good token's where it rises above
    1 + ``clip_ratio_high``; a bad token's ratio stops counting beyond ``dual_clip`` (Ye et al., arXiv:1912.09729, eq.
    5), which None leaves unbounded.

        >>> PPO()(tokens).loss  # the tokens of PolicyTokens' example: ratios 1, 1.5, 0.5, the last one bad
        tensor([-1.0000, -1.2000,  0.8000])
    """

    clip_ratio_low: float = option(0.2, low=0.0, high=1.0)
    clip_ratio_high: float = option(0.2, low=0.0)
    dual_clip: float | None = option(None, low=1.0, open_low=True, optional=True)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        low, high = self.clip_ratio_low, self.clip_ratio_high
        return clipped_surrogate(tokens.ratio, tokens.advantages, low=low, high=high, dual_clip=self.dual_clip)


@dataclass(frozen=True, kw_only=True)
class DAPO(PPO):
    """PPO with more room above than below, so that unlikely tokens can gain: clip-higher. arXiv:2503.14476, eq. 10.

    >>> DAPO()(tokens).loss
    tensor([-1.0000, -1.2800,  0.8000])
    """

    clip_ratio_high: float = option(0.28, low=0.0)


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyLoss):
    """The clipped surrogate with the row's geometric-mean ratio. Zheng et al., arXiv:2507.18071, eq. 5 to 7.

        s = exp(mean over the row of log(current / anchor))

    In the token form (eq. 13 and 14): every token has value s and, through its own log-prob, gradient s, which for
    equal advantages in a row is the same. Published with ``sequence_mean``. Means of logs move far less than single
    ones, so the bounds are a thousand times narrower than PPO's.

        >>> GSPO(clip_ratio_low=0.2, clip_ratio_high=0.2)(tokens).loss  # the first row's ratio is the root of 1 * 1.5
        tensor([-1.2000, -1.2000,  0.8000])
    """

    clip_ratio_low: float = option(3e-4, low=0.0, high=1.0)
    clip_ratio_high: float = option(4e-4, low=0.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        log_ratio = tokens.rows().mean(tokens.log_ratio.detach()) + tokens.current - tokens.current.detach()
        low, high = self.clip_ratio_low, self.clip_ratio_high
        return clipped_surrogate(probability_ratio(log_ratio), tokens.advantages, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class GMPO(PolicyLoss):
    """Geometric-mean policy optimisation: outliers weigh as logs. Zhao et al., arXiv:2507.20673.

        loss of a row = -A exp(mean over its tokens of min(sgn(A) x, sgn(A) clip(x, -clip_low, clip_ratio_high)) sgn(A))

    A is the row's mean advantage; every token carries the row's loss, so with ``sequence_mean``, as published, a row
    counts once. The bounds are those of the *log*-ratio; the paper's are (e^-0.4, e^0.4).

        >>> GMPO()(tokens).loss  # a log-ratio of 0.41 counts as 0.4, one of -0.69 as -0.4
        tensor([-1.2214, -1.2214,  0.6703])
    """

    clip_ratio_low: float = option(0.4, low=0.0)
    clip_ratio_high: float = option(0.4, low=0.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        rows = tokens.rows()
        advantage = rows.mean(tokens.advantages)
        free = tokens.log_ratio
        clipped = free.clamp(-self.clip_ratio_low, self.clip_ratio_high)
        stopped = torch.where(advantage < 0, clipped > free, clipped < free)
        ratio = probability_ratio(rows.mean(torch.where(stopped, clipped, free)))
        return TokenLosses(loss=-advantage * ratio, metrics={"clip_fraction": stopped.to(ratio.dtype)})


# --------------------------------------------------------------------------------------------- weights instead of clips


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    """REINFORCE with a clipped importance weight. MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.

        loss = -sg(clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)) A log current

    Every token keeps a gradient, also rare ones that a clipped surrogate would silence after one step. With a
    ``clip_ratio_low`` of 1, as published, the weight is not bounded below.

        >>> CISPO()(tokens).loss  # the tokens of PolicyTokens' example; 1.5 counts as 1.28
        tensor([ 0.6931,  0.3682, -0.6931])
    """

    clip_ratio_low: float = option(1.0, low=0.0, high=1.0)
    clip_ratio_high: float = option(0.28, low=0.0)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        ratio = tokens.ratio.detach()
        weight = ratio.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        return TokenLosses(
            loss=-weight * tokens.advantages * tokens.current,
            metrics={"clip_fraction": (weight != ratio).to(ratio.dtype)},
        )


@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyLoss):
    """Soft adaptive policy optimisation. Gao et al., arXiv:2511.20347.

        loss = -A (4 / t) sigmoid(t (r - 1)),  t = positive_temperature where A > 0, else negative_temperature

    At r = 1 the gradient is that of r A; it fades smoothly on both sides, faster for bad tokens, whose gradient spreads
    over the whole vocabulary. Published with ``sequence_mean``. The metric ``gate`` is the gradient's share of that of
    r A.

        >>> SAPO()(tokens).loss
        tensor([-2.0000, -2.4898,  1.4159])
    """

    positive_temperature: float = option(1.0, low=0.0, open_low=True)
    negative_temperature: float = option(1.05, low=0.0, open_low=True)

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        advantages = tokens.advantages
        negative = torch.full_like(advantages, self.negative_temperature)
        temperature = torch.where(advantages > 0, self.positive_temperature, negative)
        sigmoid = torch.sigmoid(temperature * (tokens.ratio - 1.0))
        gate = 4.0 * sigmoid * (1.0 - sigmoid)
        return TokenLosses(loss=-advantages * sigmoid * 4.0 / temperature, metrics={"gate": gate.detach()})


@dataclass(frozen=True, kw_only=True)
class TOPR(PolicyLoss):
    """Tapered off-policy REINFORCE. Le Roux et al., arXiv:2503.14286; ``cap`` is 1 as published.

        loss = -w A log current,  w = 1 where A >= 0, else clip(current(row) / behaviour(row), 0, cap) without gradient

    Good answers are imitated however unlikely they have become; bad ones are pushed away only while the policy would
    still give them, which keeps the objective bounded. Uses the policy that sampled, so it takes no correction.

        >>> TOPR()(tokens).loss  # the bad row is half as likely as when it was sampled
        tensor([ 0.6931,  0.2877, -0.6931])
    """

    cap: float = option(1.0, low=0.0, open_low=True)
    corrects: ClassVar[bool] = True

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        ratio = probability_ratio(tokens.rows().sum((tokens.current - tokens.behaviour).detach()))
        bad = tokens.advantages < 0
        weight = torch.where(bad, ratio.clamp(max=self.cap), 1.0)
        return TokenLosses(
            loss=-weight * tokens.advantages * tokens.current,
            metrics={"clip_fraction": (bad & (ratio > self.cap)).to(ratio.dtype)},
        )


# ------------------------------------------------------------------------------------- prepared over the whole batch


@dataclass(frozen=True, kw_only=True)
class M2PO(PolicyLoss):
    """Second-moment trust policy optimisation. Zheng et al., "Prosperity before collapse", arXiv:2510.01161.

        loss = -M r A,  r = current / behaviour

    M (column ``kept``) is 0 for the tokens with the largest log(proximal / behaviour)^2, as few of them as bring the
    mean over the rest of the batch below ``threshold`` (the paper's 0.04); at least one token stays. Unlike a clip it
    takes away outliers only, however old the batch is. The loss holds the whole ratio to the policy that sampled, so it
    takes no correction.

        >>> M2PO().prepare(tokens, seed=0)  # squared log-ratios 0, 0.48, 0
        {'kept': tensor([1., 0., 1.])}
    """

    threshold: float = option(0.04, low=0.0, open_low=True)
    corrects: ClassVar[bool] = True
    prepares: ClassVar[bool] = True

    def prepare(self, tokens: PolicyTokens, *, seed: int) -> Mapping[str, Tensor]:
        moments = (tokens.proximal.double() - tokens.behaviour.double()).square()
        ascending = torch.sort(moments, stable=True)
        means = ascending.values.cumsum(0) / torch.arange(1, len(moments) + 1, device=moments.device)
        # Means of growing prefixes of a sorted list grow: those below the bound are the first ones.
        count = max(1, int((means < self.threshold).sum()))
        kept = torch.zeros(len(moments), device=moments.device)
        kept[ascending.indices[:count]] = 1.0
        return {"kept": kept}

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        kept = tokens.prepared["kept"]
        ratio = probability_ratio(tokens.current - tokens.behaviour)
        return TokenLosses(loss=-kept * ratio * tokens.advantages, metrics={"clip_fraction": 1.0 - kept})


def covariances(tokens: PolicyTokens) -> Tensor:
    """Return (log-prob - mean) * (advantage - mean) [T]; means over all tokens given, in float64.

    Cui et al., "The entropy mechanism of reinforcement learning for reasoning language models", arXiv:2505.22617:
    entropy falls by this covariance, and a tiny share of the tokens has nearly all of it. It is taken over the whole
    batch at the start of the step (the published code takes it within whatever is computed at once), so which tokens
    are held back does not depend on how the batch is cut.
    """
    log_probs, advantages = tokens.proximal.double(), tokens.advantages.double()
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


@dataclass(frozen=True, kw_only=True)
class ClipCov(PolicyLoss):
    """The clipped surrogate without the gradient of a few tokens of high covariance. arXiv:2505.22617.

    A ``share`` of all tokens, at least one, is taken out, drawn at random from those whose covariance lies between
    ``low`` and ``high``. Column and metric ``held_back`` are 1 for them. The bounds of the ratio are PPO's.

        >>> from dataclasses import replace
        >>> spread = replace(tokens, proximal=torch.tensor([0.9, 0.5, 0.1]).log())
        >>> ClipCov().prepare(spread, seed=0)  # covariances 0.62, 0.23 and 1.69
        {'held_back': tensor([0., 0., 1.])}
    """

    clip_ratio_low: float = option(0.2, low=0.0, high=1.0)
    clip_ratio_high: float = option(0.2, low=0.0)
    share: float = option(2e-4, low=0.0, high=1.0, open_low=True)
    low: float = 1.0
    high: float = 5.0
    prepares: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("high", self.high, low=self.low, open_low=True)

    def prepare(self, tokens: PolicyTokens, *, seed: int) -> Mapping[str, Tensor]:
        covariance = covariances(tokens)
        candidates = ((covariance > self.low) & (covariance < self.high)).nonzero().flatten()
        count = min(len(candidates), max(1, int(self.share * len(covariance))))
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed))
        held_back = torch.zeros(len(covariance), device=covariance.device)
        held_back[candidates[order[:count].to(candidates.device)]] = 1.0
        return {"held_back": held_back}

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        low, high = self.clip_ratio_low, self.clip_ratio_high
        surrogate = clipped_surrogate(tokens.ratio, tokens.advantages, low=low, high=high)
        held_back = tokens.prepared["held_back"]
        return TokenLosses(
            loss=torch.where(held_back > 0, surrogate.loss.detach(), surrogate.loss),
            metrics={**surrogate.metrics, "held_back": held_back},
        )


ROUNDING = 1e-4
"""Log-ratios this small are no movement: two float32 passes over one row differ by less. |log r| has full slope however
small it is, so without this the sign of a rounding error would decide where a token is pulled."""


@dataclass(frozen=True, kw_only=True)
class KLCov(PolicyLoss):
    """The surrogate -r A, with a penalty ``coefficient`` |log r| on the tokens of highest covariance. arXiv:2505.22617.

    The penalty's gradient is 0 at r = 1 (within :data:`ROUNDING`), so it does something only from the second optimizer
    step on a batch on. Column and metric ``held_back`` are 1 for the ``share`` of all tokens, at least one, with the
    penalty.

        >>> from dataclasses import replace
        >>> spread = replace(tokens, proximal=torch.tensor([0.9, 0.5, 0.1]).log())
        >>> KLCov()(replace(spread, prepared=KLCov().prepare(spread, seed=0))).loss  # 0.5, and 0.693 for being held
        tensor([-1.0000, -1.5000,  1.1930])
    """

    share: float = option(2e-4, low=0.0, high=1.0, open_low=True)
    coefficient: float = option(1.0, low=0.0)
    prepares: ClassVar[bool] = True
    needs_several_steps: ClassVar[bool] = True

    def prepare(self, tokens: PolicyTokens, *, seed: int) -> Mapping[str, Tensor]:
        covariance = covariances(tokens)
        count = min(len(covariance), max(1, int(self.share * len(covariance))))
        held_back = torch.zeros(len(covariance), device=covariance.device)
        # A stable sort, so that of equal ones the first is taken on every machine.
        held_back[torch.sort(covariance, descending=True, stable=True).indices[:count]] = 1.0
        return {"held_back": held_back}

    def __call__(self, tokens: PolicyTokens) -> TokenLosses:
        held_back = tokens.prepared["held_back"]
        distance = (tokens.log_ratio.abs() - ROUNDING).clamp(min=0.0)
        penalty = torch.where(held_back > 0, self.coefficient * distance, 0.0)
        return TokenLosses(loss=penalty - tokens.ratio * tokens.advantages, metrics={"held_back": held_back})
