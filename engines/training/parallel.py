"""Layers on several ranks: products divided over features, a stream over cells, a mixture over its experts.

Tensor parallelism is torch's, by the plan that transformers has for the family: each rank has some heads and features
of every layer, and some of the vocabulary in embeddings and head.

Context parallelism (Ulysses, arXiv:2309.14509) gives each rank a piece of the stream of a micro-batch. Attention alone
needs whole rows: before it the pieces of all ranks are exchanged for some heads of the whole stream, behind it back::

                    rank 0             rank 1
    layer           cells 0..T/2       cells T/2..T      all heads
    attention       cells 0..T         cells 0..T        half of the heads each

Expert parallelism (GShard, arXiv:2006.16668) is between ranks with streams of their own: each token is sent to the
ranks that hold its experts, and the results are sent back. However many go to one expert, none is dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from asyncrl.mesh import EXPERTS_STYLE

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    # A norm of single heads [1, T, heads, D]: every rank has its heads, and all have the weight.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}


def divide_products(causal_lm: Any, mesh: DeviceMesh, *, divide_head: bool) -> None:
    """Divide a causal LM of transformers, with memory or without, by its tensor-parallel plan; tied weights stay tied.

    ``divide_head`` divides the output head over the vocabulary, too. Of an adapter, the matrix on the divided side of
    its weight is divided alike. ``MeshShape.check_model`` has accepted the model.
    """
    head, embeddings = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings()
    tied = head is not None and head.weight is embeddings.weight
    styles: dict[str, str] = causal_lm.config.get_text_config().base_model_tp_plan
    plan: dict[str, ParallelStyle] = {}
    for name, module in causal_lm.base_model.named_modules():
        style = styles.get(re.sub(r"\.\d+\.", ".*.", name))
        if style is not None and hasattr(module, "base_layer"):
            plan[f"{name}.base_layer"] = _STYLES[style]()
            plan[f"{name}.lora_{'B' if style == 'colwise' else 'A'}.default"] = _STYLES[style]()
        elif style is not None:
            plan[name] = _STYLES[style]()
    frozen = [name for name, parameter in causal_lm.named_parameters() if not parameter.requires_grad]
    parallelize_module(causal_lm.base_model, mesh, plan, src_data_rank=None)
    parallelize_module(embeddings, mesh, RowwiseParallel(input_layouts=Replicate()), src_data_rank=None)
    if head is not None and tied:
        head.weight = embeddings.weight
    elif head is not None and divide_head:
        parallelize_module(head, mesh, ColwiseParallel(), src_data_rank=None)
    for name in frozen:  # a replicated parameter is made anew, and would be trained
        causal_lm.get_parameter(name).requires_grad_(False)


def experts_of(causal_lm: Any) -> list[Any]:
    """Return the modules whose tensors have an expert a row, by the family's expert-parallel plan in transformers."""
    plan: dict[str, str] = getattr(causal_lm.config.get_text_config(), "base_model_ep_plan", None) or {}
    modules = causal_lm.base_model.named_modules()
    return [module for name, module in modules if plan.get(re.sub(r"\.\d+\.", ".*.", name)) == EXPERTS_STYLE]


def divide_experts(experts: Iterable[Any], mesh: DeviceMesh) -> None:
    """Give each rank the experts that follow one another, of modules with memory or without, and tokens a way there."""
    for module in experts:
        for name, whole in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(part, requires_grad=whole.requires_grad))
        # How many tokens go where is no shape that can be traced.
        module.forward = partial(torch.compiler.disable(_at_their_experts), module, mesh.get_group())


def _at_their_experts(module: Any, group: ProcessGroup, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return what a module of experts does to T tokens [T, H]: ``chosen`` [T, K] experts, with ``weights`` [T, K]."""
    ranks, slots = group.size(), chosen.flatten()
    order = slots.argsort(stable=True)  # by expert, so by rank
    sent = slots.bincount(minlength=module.num_experts).view(ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    sends, receives = sent.sum(1).tolist(), received.sum(1).tolist()
    tokens: Tensor = _Sent.apply(states[order // chosen.shape[1]], sends, receives, group)  # type: ignore[no-untyped-call]
    expert_of = torch.arange(received.shape[1], device=slots.device).repeat(ranks).repeat_interleave(received.flatten())
    if not len(tokens):  # no rank may be without a gradient, which FSDP sums with those of others
        tokens, expert_of = nn.functional.pad(tokens, (0, 0, 0, 1)), expert_of.new_zeros(1)
    done = type(module).forward(
        _Held(module, received.shape[1]), tokens, expert_of[:, None], tokens.new_ones(len(tokens), 1)
    )
    back: Tensor = _Sent.apply(done[: sum(receives)], receives, sends, group)  # type: ignore[no-untyped-call]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return (back[place].view(*chosen.shape, states.shape[-1]) * weights[..., None]).sum(1).to(states.dtype)


class _Held:
    """A module of experts as its own code sees it, with the experts alone that this rank has."""

    def __init__(self, module: nn.Module, num_experts: int) -> None:
        self._module, self.num_experts = module, num_experts

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return value.to_local() if isinstance(value, DTensor) else value


def whole_of_some_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange a piece of all heads [1, heads, T / ranks, D] for the whole of this rank's [1, heads / ranks, T, D].

    Heads of keys and values that the ranks do not divide are repeated first.
    """
    ranks = group.size()
    if repeats := ranks // math.gcd(tensor.shape[1], ranks) - 1:
        tensor = tensor.repeat_interleave(repeats + 1, dim=1)
    exchanged: Tensor = _Exchange.apply(tensor, 1, 2, group)  # type: ignore[no-untyped-call]  # torch's apply
    return exchanged


def piece_of_all_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange the whole of some heads [1, T, heads / ranks, D] for a piece of all heads [1, T / ranks, heads, D]."""
    exchanged: Tensor = _Exchange.apply(tensor, 1, 2, group)  # type: ignore[no-untyped-call]
    return exchanged


def sum_of_ranks(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, which then compute the same from it: the gradient of each is that of its own addend."""
    summed: Tensor = _Sum.apply(tensor, group)  # type: ignore[no-untyped-call]
    return summed


class _Exchange(torch.autograd.Function):
    """Cut one dimension into a part for each rank; join what the ranks sent in another dimension."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: int, joined: int, group: ProcessGroup) -> Tensor:
        ctx.cut, ctx.joined, ctx.group = cut, joined, group
        return _exchanged(tensor, cut, joined, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.joined, ctx.cut, ctx.group), None, None, None


def _exchanged(tensor: Tensor, cut: int, joined: int, group: ProcessGroup) -> Tensor:
    sent = torch.stack(tensor.chunk(group.size(), dim=cut))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), dim=joined)


class _Sent(torch.autograd.Function):
    """Send rows to each rank, those of the first first, and return what the ranks sent."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sends: list[int], receives: list[int], group: ProcessGroup) -> Tensor:
        ctx.sends, ctx.receives, ctx.group = sends, receives, group
        return _sent(rows, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _sent(gradients[0], ctx.receives, ctx.sends, ctx.group), None, None, None


def _sent(rows: Tensor, sends: list[int], receives: list[int], group: ProcessGroup) -> Tensor:
    received = rows.new_empty(sum(receives), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), receives, sends, group=group)
    return received


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
