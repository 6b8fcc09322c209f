"""AdamW over local shards, global gradient clipping, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.errors import ConfigError
from engines.training.model import local_shard
from engines.training.offload import resizable

Schedule: TypeAlias = Literal["constant", "cosine", "linear"]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, beside the number of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The learning rate as a function of the number of optimizer steps done.

    Rises linearly over ``warmup_steps`` (the first step has ``peak / warmup_steps``), then stays, or falls to 0 at
    ``total_steps`` along a line or half a cosine; 0 from there on.

    >>> rate = LearningRate(peak=1.0, lr_scheduler_type="linear", warmup_steps=2, total_steps=6)
    >>> [rate.at(step) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    peak: float
    lr_scheduler_type: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak >= 0):
            raise ConfigError(f"lr is {self.peak}", path="lr", remedy="a finite number of at least 0")
        if self.lr_scheduler_type not in get_args(Schedule):
            raise ConfigError(
                f"lr_scheduler_type {self.lr_scheduler_type!r} does not exist",
                path="lr_scheduler_type",
                remedy=", ".join(get_args(Schedule)),
            )
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}", path="warmup_steps", remedy="0 or more")
        if self.lr_scheduler_type != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ConfigError(
                f"lr_scheduler_type {self.lr_scheduler_type!r} falls to 0 at total_steps, which is {self.total_steps}",
                path="total_steps",
                remedy=f"more optimizer steps than the {self.warmup_steps} of the warm-up",
            )

    def at(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.lr_scheduler_type == "constant":
            return self.peak
        assert self.total_steps is not None
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        match self.lr_scheduler_type:
            case "linear":
                return self.peak * (1.0 - progress)
            case "cosine":
                return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
            case _:
                assert_never(self.lr_scheduler_type)


class ShardedAdamW:
    """AdamW (arXiv:1711.05101) on the shard that each of ``world_size`` ranks holds.

    AdamW is elementwise, so torch's fused kernel runs on plain local tensors, without DTensor's cost per operation;
    only the gradient norm needs all ranks. Tensors of one dimension (norms, biases) are exempt from weight decay.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        world_size: int = 1,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self._sharded = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        # Detached views: the optimizer writes into the memory that FSDP gathers from.
        self._local = {name: local_shard(parameter).detach() for name, parameter in self._sharded.items()}
        self._copies = {name: world_size // _shards(parameter) for name, parameter in self._sharded.items()}
        decayed = [self._local[name] for name, parameter in self._sharded.items() if parameter.ndim >= 2]
        exempt = [self._local[name] for name, parameter in self._sharded.items() if parameter.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, fused=True
        )

    def squared_gradient_norm(self) -> float:
        """Return this rank's share of the sum of squares of all gradients, in float64; ranks with copies divide it."""
        squares = [
            torch.linalg.vector_norm(gradient).double().square() / self._copies[name]
            for name, gradient in self._gradients().items()
        ]
        return float(torch.stack(squares).sum()) if squares else 0.0

    def step(self, *, lr: float, gradient_scale: float = 1.0) -> None:
        """Make one step with gradients times ``gradient_scale``, and discard the gradients."""
        for name, gradient in self._gradients().items():
            if gradient_scale != 1.0:
                gradient.mul_(gradient_scale)
            self._local[name].grad = gradient
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        for parameter in self._sharded.values():
            parameter.grad = None
        for local in self._local.values():
            local.grad = None

    def resizable_moments(self) -> list[Tensor]:
        """Return the moments, for :class:`~engines.training.offload.Offload`; follow parameters that were replaced."""
        for name, parameter in self._sharded.items():
            self._local[name].data = local_shard(parameter).detach()
        found: list[Tensor] = []
        for _, state in self._states():
            for each in MOMENTS:
                state[each] = resizable(state[each])
                found.append(state[each])
        return found

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the local shards of ``exp_avg`` and ``exp_avg_sq`` of every parameter that has made a step."""
        return {name: {each: state[each] for each in MOMENTS} for name, state in self._states()}

    def steps(self) -> dict[str, int]:
        return {name: int(state["step"]) for name, state in self._states()}

    def restore(self, moments: Mapping[str, Mapping[str, Tensor]], steps: Mapping[str, int]) -> None:
        """Set what :meth:`moments` and :meth:`steps` returned; the tensors now belong to the optimizer."""
        self._adamw.state.clear()
        for name, tensors in moments.items():
            local = self._local[name]
            self._adamw.state[local] = {
                "step": torch.tensor(float(steps[name]), dtype=torch.float32, device=local.device),
                **{each: tensors[each] for each in MOMENTS},
            }

    def _states(self) -> list[tuple[str, dict[str, Tensor]]]:
        states = self._adamw.state
        return [(name, states[local]) for name, local in self._local.items() if states.get(local)]

    def _gradients(self) -> dict[str, Tensor]:
        return {
            name: local_shard(parameter.grad) for name, parameter in self._sharded.items() if parameter.grad is not None
        }


def _shards(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def clipping_scale(norm: float, max_norm: float | None) -> float:
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
