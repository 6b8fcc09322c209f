"""The centre of the trust region: the policy that the ratio of a policy loss is taken to."""

from __future__ import annotations

from typing import Literal, TypeAlias, assert_never

from torch import Tensor

from asyncrl.errors import SchemaError

__all__ = ["Anchor", "anchor_log_probs"]

Anchor: TypeAlias = Literal["proximal", "behaviour", "interpolated"]


def anchor_log_probs(
    anchor: Anchor, *, current: Tensor, proximal: Tensor, behaviour: Tensor, ages: Tensor | None
) -> Tensor:
    """Log-probs of the trust region's centre, without gradient.

    ============ ======================================================================================================
    proximal     the weights at the start of the step: decoupled PPO (arXiv:2110.00641; AReaL, arXiv:2505.24298)
    behaviour    the policy that sampled: PPO as written down first (arXiv:1707.06347). The region moves away from the
                 weights with every version that a sample is old, and the clip then silences the tokens that changed.
    interpolated A-3PO (arXiv:2512.06547): (1 - s) log current + s log behaviour with s = 1 / (age + 1), as many
                 versions as lie between the sample and the weights being made. It needs no forward pass for the
                 proximal policy; this engine makes one where a batch gets several steps, for its metrics. A fresh
                 sample's centre is the behaviour itself.
    ============ ======================================================================================================

        >>> current, proximal, behaviour = torch.tensor([[-1.0, -1.0], [-2.0, -2.0], [-3.0, -3.0]])
        >>> ages = torch.tensor([0.0, 1.0])
        >>> anchor_log_probs("interpolated", current=current, proximal=proximal, behaviour=behaviour, ages=ages)
        tensor([-3., -2.])

    Args:
        anchor: see the table.
        current: under the weights being trained.
        proximal: under the weights at the start of the step.
        behaviour: as sampled.
        ages: versions between the weights that sampled the token and those at the start of the step.

    Raises:
        SchemaError: ``interpolated`` without ``ages``.
    """
    match anchor:
        case "proximal":
            return proximal.detach()
        case "behaviour":
            return behaviour.detach()
        case "interpolated":
            if ages is None:
                raise SchemaError("anchor 'interpolated' needs ages: how many versions old every token is")
            share = 1.0 / (ages + 1.0)
            return (share * behaviour + (1.0 - share) * current).detach()
        case _:
            assert_never(anchor)
