"""Frozen weights of 8 bits: each group of inputs of a row has a scale, and products multiply with what both stand for.

    weight[o, i] ~ codes[o, i] * scales[o, i // group]        codes: int8, at most 127; scales: the largest value / 127

Codes and scales are parameters whose rows are the weight's, so they are sharded, gathered, saved and read as those are.
The float weight exists during a product alone: for the backward pass it is computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

GROUP = 64
"""Inputs that share a scale, or their largest divisor in common with those of the layer."""

SCALES = ".scales"
"""End of the name of the scales; that of the codes is the weight's."""


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes [O, I] and the scales [O, I / group] of a weight [O, I]."""
    size = math.gcd(weight.shape[1], GROUP)
    groups = weight.float().view(len(weight), weight.shape[1] // size, size)  # no -1: a shard may have no rows
    scales = groups.abs().amax(dim=-1) / 127
    codes = (groups / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round_()
    return codes.flatten(1).to(torch.int8), scales


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the weight that codes [..., I] and scales [..., groups] stand for, in the scales' type."""
    groups = codes.view(*scales.shape, codes.shape[-1] // scales.shape[-1]).to(scales.dtype)
    return (groups * scales[..., None]).flatten(-2)


class QuantisedLinear(nn.Module):
    """As ``nn.Linear``, frozen."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.scales = _frozen(linear.weight)
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = _Product.apply(hidden, self.weight, self.scales)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias

    def full_weight(self) -> Tensor:
        return dequantised(self.weight, self.scales)


class QuantisedEmbedding(nn.Module):
    """As ``nn.Embedding``, frozen."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.scales = _frozen(embedding.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return dequantised(self.weight[ids], self.scales[ids])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, codes: Tensor, scales: Tensor) -> Tensor:  # Any: torch's context
        ctx.save_for_backward(codes, scales)
        return hidden @ dequantised(codes, scales).to(hidden.dtype).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ dequantised(*ctx.saved_tensors).to(gradients[0].dtype), None, None


def _frozen(weight: Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    codes, scales = quantised(weight.detach())
    return nn.Parameter(codes, requires_grad=False), nn.Parameter(scales, requires_grad=False)


def quantise(causal_lm: Any) -> None:
    """Quantise the frozen weights of linear layers and embeddings, on the meta device too; tied ones stay tied."""
    made: dict[Tensor, QuantisedLinear | QuantisedEmbedding] = {}
    for parent in list(causal_lm.modules()):
        for name, module in list(parent.named_children()):
            if type(module) not in (nn.Linear, nn.Embedding) or module.weight.requires_grad:
                continue
            new: QuantisedLinear | QuantisedEmbedding
            new = QuantisedLinear(module) if isinstance(module, nn.Linear) else QuantisedEmbedding(module)
            if (twin := made.setdefault(module.weight, new)) is not new:
                new.weight, new.scales = twin.weight, twin.scales
            new.train(module.training)
            setattr(parent, name, new)


def full_tensors(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights for codes and scales, which follow one another as a module's parameters do."""
    codes: tuple[str, Tensor] | None = None
    for name, tensor in tensors:
        if codes is not None:
            yield codes[0], dequantised(codes[1], tensor)
            codes = None
        elif tensor.dtype == torch.int8:
            codes = name, tensor
        else:
            yield name, tensor
