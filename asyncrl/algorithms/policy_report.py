"""How far apart the policies are: what a step tells of its tokens, altogether and by age.

Token metrics are averaged over tokens, micro-batches and ranks before anything is divided, so what is reported does
not depend on how the batch was cut: :func:`moments` gives the averages to be taken, :func:`report` what follows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from asyncrl.algorithms.kl import kl_estimate, probability_ratio

__all__ = ["AGES", "moments", "report"]

AGES: tuple[tuple[str, float, float], ...] = (
    ("0", 0, 0),
    ("1", 1, 1),
    ("2", 2, 2),
    ("3", 3, 3),
    ("4", 4, 4),
    ("5_to_8", 5, 8),
    ("9_up", 9, float("inf")),
)
"""Buckets of age in versions: name, first and last. Fixed, so that all ranks average the same names."""

_IN_BUCKET = ("clip_fraction", "behaviour_kl", "behaviour_ratio", "behaviour_ratio_squared")


def moments(
    *, proximal: Tensor, behaviour: Tensor, clip_fraction: Tensor, weight: Tensor, ages: Tensor | None
) -> dict[str, Tensor]:
    """Quantities per token whose averages :func:`report` reads. Shapes are all the same; no gradient."""
    ratio = probability_ratio(proximal - behaviour)
    found = {
        "clip_fraction": clip_fraction,
        "behaviour_kl": kl_estimate(behaviour, proximal),
        "behaviour_ratio": ratio,
        "behaviour_ratio_squared": ratio.square(),
        "behaviour_weight": weight,
        "behaviour_rejected": (weight == 0).to(ratio.dtype),
    }
    if ages is not None:
        for name, first, last in AGES:
            inside = ((ages >= first) & (ages <= last)).to(ratio.dtype)
            found[f"share_age_{name}"] = inside
            for quantity in _IN_BUCKET:
                found[f"{quantity}_age_{name}"] = torch.where(inside > 0, found[quantity], 0.0)
    return found


def report(means: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step from averages over all its trained tokens; names that are none of :func:`moments` stay.

    ========================= ============================================================================
    behaviour_kl              k3 estimate of KL(behaviour || proximal): staleness and mismatch of trainer and engine
    behaviour_ratio           mean of proximal / behaviour; 1 in expectation where the supports agree
    effective_sample_share    (sum w)^2 / (T sum w^2) of w = proximal / behaviour: 1 on-policy, 1/T for one token
    behaviour_weight          mean weight the correction gave
    behaviour_rejected        share of tokens it threw away
    clip_fraction             share of tokens whose gradient the loss's trust region took away
    ..._age_A                 the same among tokens A versions old; share_age_A says how many these are
    ========================= ============================================================================

    A bucket without tokens is left out.
    """
    known = dict(means)
    if "behaviour_ratio_squared" in known:
        known["effective_sample_share"] = _effective_share(
            known["behaviour_ratio"], known.pop("behaviour_ratio_squared")
        )
    for name, _, _ in AGES:
        share = known.get(f"share_age_{name}")
        if share is None:
            continue
        inside = {quantity: known.pop(f"{quantity}_age_{name}") for quantity in _IN_BUCKET}
        if share == 0:
            del known[f"share_age_{name}"]
            continue
        inside = {quantity: mean / share for quantity, mean in inside.items()}
        squared = inside.pop("behaviour_ratio_squared")
        known |= {f"{quantity}_age_{name}": value for quantity, value in inside.items()}
        known[f"effective_sample_share_age_{name}"] = _effective_share(inside["behaviour_ratio"], squared)
    return known


def _effective_share(mean: float, mean_square: float) -> float:
    return mean * mean / mean_square if mean_square else 0.0
