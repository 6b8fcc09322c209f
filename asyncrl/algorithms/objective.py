"""The policy objective: correction times loss, plus a KL term, minus an entropy bonus, for every sampled token.

Token metrics are averaged over tokens, micro-batches and ranks before anything is divided, so what is reported does not
depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, assert_never, get_args

import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import (
    Aggregation,
    TokenLosses,
    check_aggregation,
    check_options,
    check_tokens,
    keep,
    option,
    token_weights,
)
from asyncrl.algorithms.corrections import Correction, TruncatedImportance
from asyncrl.algorithms.kl import KLEstimator, kl_estimate, probability_ratio
from asyncrl.algorithms.losses import PPO, PolicyLoss, PolicyTokens
from asyncrl.errors import ConfigError, SchemaError, UserCodeError
from asyncrl.plugins import part_text

Anchor: TypeAlias = Literal["proximal", "behaviour", "interpolated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """What is minimised for every token that the policy sampled.

        w * loss(r, A) + kl_coef * KL(current || reference) - entropy_coef * H

        r = current / anchor        how far this step has moved: bounded by the loss, carries the gradient
        w = correction(anchor / behaviour)      how old and how foreign the sample is: bounded by the correction

    Four policies, never interchangeable:

    behaviour: the distribution the token was really sampled from, as the rollout engine reported it.
    proximal: the trainer's weights at the start of the step.
    anchor: the trust region's centre: one of these two, or between them (:func:`~asyncrl.algorithms.anchor_log_probs`).
    current: the weights being changed.

    The default is decoupled PPO with a truncated weight:

        >>> half, most = torch.tensor([[0.5], [0.75]]).log()
        >>> PolicyObjective().token_losses(
        ...     current_log_probs=most,
        ...     proximal_log_probs=half,
        ...     behaviour_log_probs=half,
        ...     advantages=torch.tensor([1.0]),
        ...     mask=torch.tensor([True]),
        ... ).loss  # the ratio of 1.5 counts as 1.2
        tensor([-1.2000])

    ``kl_estimator`` is one of :mod:`asyncrl.algorithms.kl`, ``loss_agg_mode`` one of
    :func:`~asyncrl.algorithms.token_weights`, ``fixed_length`` the tokens of the aggregation of that name.
    ``whiten_advantages`` shifts and scales the advantages of a batch to mean 0 and variance 1 over its trained tokens,
    whatever ranks and micro-batches they are spread over; the training engine does it.

    Raises:
        ConfigError: a value outside its range.
    """

    loss: PolicyLoss = field(default_factory=PPO)
    correction: Correction = field(default_factory=TruncatedImportance)
    anchor: Anchor = "proximal"
    kl_coef: float = option(0.0, low=0.0)
    kl_estimator: KLEstimator = "k3"
    entropy_coef: float = option(0.0, low=0.0)
    loss_agg_mode: Aggregation = "token_mean"
    fixed_length: int | None = None
    whiten_advantages: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        for name, value, kind in (("kl_estimator", self.kl_estimator, KLEstimator), ("anchor", self.anchor, Anchor)):
            if value not in get_args(kind):
                raise ConfigError(
                    f"{name} {value!r} does not exist", path=name, remedy=f"one of {', '.join(get_args(kind))}"
                )
        check_aggregation(self.loss_agg_mode, self.fixed_length)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns a batch must have for this objective."""
        return (
            "behaviour_log_probs",
            "advantages",
            *(["reference_log_probs"] if self.kl_coef else []),
            *(["staleness"] if self.anchor == "interpolated" else []),
        )

    @property
    def prepares(self) -> bool:
        """True if :meth:`prepare` must be called, with the proximal log-probs, before the batch is cut."""
        return self.loss.prepares

    def prepare(
        self,
        *,
        proximal_log_probs: Tensor,
        behaviour_log_probs: Tensor,
        advantages: Tensor,
        rows: Tensor,
        seed: int,
    ) -> dict[str, Tensor]:
        """Return the columns that the loss needs of the whole batch, for :meth:`token_losses` as ``prepared``.

        All tensors are [T], of all trained tokens of all ranks in the order of their rows; ``rows`` is the row of each,
        integer. ``seed`` is equal on all ranks, another for every update.

        Raises:
            SchemaError: shapes or dtypes differ.
        """
        mask = torch.ones_like(proximal_log_probs, dtype=torch.bool)
        check_tokens(
            mask,
            proximal_log_probs=proximal_log_probs,
            behaviour_log_probs=behaviour_log_probs,
            advantages=advantages,
        )
        tokens = PolicyTokens(
            current=proximal_log_probs,
            anchor=proximal_log_probs,
            proximal=proximal_log_probs,
            behaviour=behaviour_log_probs,
            advantages=advantages,
            mask=mask,
            row_index=rows,
        )
        return {name: column.float() for name, column in self.loss.prepare(tokens, seed=seed).items()}

    def token_losses(
        self,
        *,
        current_log_probs: Tensor,
        proximal_log_probs: Tensor,
        behaviour_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        entropy: Tensor | None = None,
        reference_log_probs: Tensor | None = None,
        staleness: Tensor | None = None,
        rows: Tensor | None = None,
        prepared: Mapping[str, Tensor] | None = None,
    ) -> TokenLosses:
        """Return the loss of every token, and metrics to be averaged over tokens and then finished by :meth:`report`.

        All tensors have one shape, usually [T] packed tokens: whole rows, in any order. Entries outside ``mask`` may be
        anything, inf and nan included.

        - Log-probs are those of the class docstring's policies. Only the current ones have a gradient; where there is
        one update per step, the proximal ones are ``current_log_probs.detach()``.
        - ``advantages``: one per token; a row's advantage repeated over its tokens.
        - ``mask``: boolean, True where the token is trained on.
        - ``entropy``: of the current policy at that position; differentiable if ``entropy_coef`` is not 0.
        - ``staleness``: versions between the weights that sampled the token and those at the start of the step.
        - ``rows``: integer, equal for tokens of one row; needed by what sums over rows.
        - ``prepared``: these tokens' entries of what :meth:`prepare` returned.

        Raises:
            SchemaError: shapes or dtypes differ, or a column that something needs is missing.
            UserCodeError: a loss or correction did not return a number for each token.
        """
        prepared = prepared or {}
        check_tokens(
            mask,
            current_log_probs=current_log_probs,
            proximal_log_probs=proximal_log_probs,
            behaviour_log_probs=behaviour_log_probs,
            advantages=advantages,
            entropy=entropy,
            reference_log_probs=reference_log_probs,
            staleness=staleness,
            **prepared,
        )
        if self.kl_coef and reference_log_probs is None:
            raise SchemaError(f"kl_coef is {self.kl_coef}, which needs reference_log_probs")
        if self.entropy_coef and entropy is None:
            raise SchemaError(f"entropy_coef is {self.entropy_coef}, which needs entropy")
        if self.prepares and not prepared:
            raise SchemaError(f"{type(self.loss).__name__} needs what prepare() found in the whole batch")

        current = keep(current_log_probs, mask)
        proximal = keep(proximal_log_probs.detach(), mask)
        behaviour = keep(behaviour_log_probs.detach(), mask)
        staleness = None if staleness is None else keep(staleness.detach(), mask)
        anchor = anchor_log_probs(
            self.anchor, current=current, proximal=proximal, behaviour=behaviour, staleness=staleness
        )
        tokens = PolicyTokens(
            current=current,
            anchor=anchor,
            proximal=proximal,
            behaviour=behaviour,
            advantages=keep(advantages.detach(), mask),
            mask=mask,
            row_index=rows,
            prepared={name: keep(column.detach(), mask) for name, column in prepared.items()},
        )
        losses = self.loss(tokens)
        weight = self.correction(tokens)
        for part, found in ((self.loss, losses.loss), (self.correction, weight)):
            if not isinstance(found, Tensor) or found.shape != mask.shape:
                name, shape = part_text(getattr(part, "function", part)), getattr(found, "shape", type(found).__name__)
                raise UserCodeError(f"{name} must return a number for each token, {[*mask.shape]}, not {shape}")
        weight = weight.detach()
        loss = weight * losses.loss
        metrics = {
            "clip_fraction": torch.zeros_like(proximal),  # of a loss that does not clip
            **losses.metrics,
            "ratio": tokens.ratio,
            "policy_kl": kl_estimate(proximal, current),
            "behaviour_weight": weight,
            "behaviour_rejected": (weight == 0).to(weight.dtype),
        }
        if reference_log_probs is not None:
            reference = keep(reference_log_probs.detach(), mask)
            metrics["reference_kl"] = kl_estimate(current, reference, estimator=self.kl_estimator)
            if self.kl_coef:
                loss = loss + self.kl_coef * metrics["reference_kl"]
        if entropy is not None:
            metrics["entropy"] = entropy
            if self.entropy_coef:
                loss = loss - self.entropy_coef * keep(entropy, mask)
        metrics |= _divergence_moments(tokens, metrics["clip_fraction"], staleness)
        return TokenLosses(
            loss=keep(loss, mask), metrics={name: keep(value.detach(), mask) for name, value in metrics.items()}
        )

    def token_weights(self, lengths: Tensor, *, total_tokens: int, total_rows: int) -> Tensor:
        """Return :func:`~asyncrl.algorithms.token_weights` with this objective's aggregation."""
        return token_weights(
            lengths,
            loss_agg_mode=self.loss_agg_mode,
            total_tokens=total_tokens,
            total_rows=total_rows,
            fixed_length=self.fixed_length,
        )

    def report(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step, from the averages of :meth:`token_losses`' metrics over all its trained tokens.

        ========================= ============================================================================
        ratio                     current / anchor, before clipping
        policy_kl                 k3 estimate of KL(proximal || current): how far this step has moved
        reference_kl              KL(current || reference) by ``kl_estimator``, if there is a reference
        entropy                   if given
        behaviour_kl              k3 estimate of KL(behaviour || proximal): staleness and mismatch of trainer and engine
        behaviour_ratio           mean of proximal / behaviour; 1 in expectation where the supports agree
        effective_sample_share    (sum w)^2 / (T sum w^2) of w = proximal / behaviour: 1 on-policy, 1/T for one token
        behaviour_weight          mean weight the correction gave
        behaviour_rejected        share of tokens it gave weight 0
        clip_fraction             share of tokens whose gradient the loss's trust region took away
        ..._staleness_N           the same among tokens N versions old; share_staleness_N is their share of all tokens
        ========================= ============================================================================

        A bucket without tokens is left out; metrics of the loss's own stay as they are.
        """
        metrics = dict(means)
        if "behaviour_ratio_squared" in metrics:
            squared = metrics.pop("behaviour_ratio_squared")
            metrics["effective_sample_share"] = _effective_share(metrics["behaviour_ratio"], squared)
        for name, _, _ in STALENESS_BUCKETS:
            share = metrics.get(f"share_staleness_{name}")
            if share is None:
                continue
            inside = {quantity: metrics.pop(f"{quantity}_staleness_{name}") for quantity in _BY_STALENESS}
            if share == 0:
                del metrics[f"share_staleness_{name}"]
                continue
            inside = {quantity: mean / share for quantity, mean in inside.items()}
            squared = inside.pop("behaviour_ratio_squared")
            inside["effective_sample_share"] = _effective_share(inside["behaviour_ratio"], squared)
            metrics |= {f"{quantity}_staleness_{name}": value for quantity, value in inside.items()}
        return metrics


def anchor_log_probs(
    anchor: Anchor, *, current: Tensor, proximal: Tensor, behaviour: Tensor, staleness: Tensor | None
) -> Tensor:
    """Return the log-probs of the trust region's centre, without gradient.

    ============ ======================================================================================================
    proximal     the weights at the start of the step: decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298)
    behaviour    the policy that sampled: PPO as written down first (arXiv:1707.06347). The region moves away from the
                 weights with every version that a sample is old, and the clip then silences the tokens that changed.
    interpolated A-3PO (arXiv:2512.06547): (1 - s) log current + s log behaviour with s = 1 / (staleness + 1), as many
                 versions as lie between the sample and the weights being made. It needs no forward pass for the
                 proximal policy; this engine makes one where a batch gets several steps, for its metrics. A fresh
                 sample's centre is the behaviour itself.
    ============ ======================================================================================================

        >>> current, proximal, behaviour = torch.tensor([[-1.0, -1.0], [-2.0, -2.0], [-3.0, -3.0]])
        >>> behind = torch.tensor([0.0, 1.0])
        >>> anchor_log_probs("interpolated", current=current, proximal=proximal, behaviour=behaviour, staleness=behind)
        tensor([-3., -2.])

    Raises:
        SchemaError: ``interpolated`` without ``staleness``.
    """
    match anchor:
        case "proximal":
            return proximal.detach()
        case "behaviour":
            return behaviour.detach()
        case "interpolated":
            if staleness is None:
                raise SchemaError("anchor 'interpolated' needs staleness: how many versions old every token is")
            share = 1.0 / (staleness + 1.0)
            return (share * behaviour + (1.0 - share) * current).detach()
        case _:
            assert_never(anchor)


# ------------------------------------------------------------------------------------- how far apart the policies are


STALENESS_BUCKETS: tuple[tuple[str, float, float], ...] = (
    ("0", 0, 0),
    ("1", 1, 1),
    ("2", 2, 2),
    ("3", 3, 3),
    ("4", 4, 4),
    ("5_to_8", 5, 8),
    ("9_up", 9, float("inf")),
)
"""Buckets of staleness in versions: name, first and last. Fixed, so that all ranks average the same names."""

_BY_STALENESS = ("clip_fraction", "behaviour_kl", "behaviour_ratio", "behaviour_ratio_squared")


def _divergence_moments(tokens: PolicyTokens, clip_fraction: Tensor, staleness: Tensor | None) -> dict[str, Tensor]:
    ratio = probability_ratio(tokens.proximal - tokens.behaviour)
    found = {
        "clip_fraction": clip_fraction,
        "behaviour_kl": kl_estimate(tokens.behaviour, tokens.proximal),
        "behaviour_ratio": ratio,
        "behaviour_ratio_squared": ratio.square(),
    }
    if staleness is not None:
        for name, first, last in STALENESS_BUCKETS:
            inside = ((staleness >= first) & (staleness <= last)).to(ratio.dtype)
            for quantity in _BY_STALENESS:
                found[f"{quantity}_staleness_{name}"] = torch.where(inside > 0, found[quantity], 0.0)
            found[f"share_staleness_{name}"] = inside
    return found


def _effective_share(mean: float, mean_square: float) -> float:
    return mean * mean / mean_square if mean_square else 0.0
