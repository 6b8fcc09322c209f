"""AdamW over local shards, global gradient clipping, learning rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, assert_never, get_args

import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from engines.training.model import local_shard

__all__ = ["MOMENTS", "LearningRate", "Schedule", "ShardedAdamW", "clipping_scale"]

Schedule: TypeAlias = Literal["constant", "cosine", "linear"]

MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW remembers of a parameter, beside the number of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The learning rate as a function of the number of optimizer steps done.

    Rises linearly over ``warmup_steps`` (the first step has ``peak / warmup_steps``), then stays, or falls to 0 at
    ``total_steps`` along a line or half a cosine; 0 from there on.

    Attributes:
        peak: highest rate, positive (0 is allowed and trains nothing).
        schedule: what happens after the warm-up.
        warmup_steps: optimizer steps.
        total_steps: optimizer steps; needed unless the schedule is constant.

    >>> [LearningRate(peak=1.0, schedule="linear", warmup_steps=2, total_steps=6).at(step) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    peak: float
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak >= 0):
            raise ConfigError(f"lr is {self.peak}", path="lr", remedy="a finite number of at least 0")
        if self.schedule not in get_args(Schedule):
            raise ConfigError(
                f"schedule {self.schedule!r} does not exist", path="schedule", remedy=", ".join(get_args(Schedule))
            )
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {self.warmup_steps}", path="warmup_steps", remedy="0 or more")
        if self.schedule != "constant" and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ConfigError(
                f"schedule {self.schedule!r} falls to 0 at total_steps, which is {self.total_steps}",
                path="total_steps",
                remedy=f"more optimizer steps than the {self.warmup_steps} of the warm-up",
            )

    def at(self, step: int) -> float:
        """Rate of the step after ``step`` others."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        assert self.total_steps is not None
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        match self.schedule:
            case "linear":
                return self.peak * (1.0 - progress)
            case "cosine":
                return self.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
            case _:
                assert_never(self.schedule)


class ShardedAdamW:
    """Decoupled weight decay (arXiv:1711.05101) on the shard each rank holds.

    AdamW is elementwise, so a rank can update its shard without knowing the others: torch's fused kernel runs on plain
    local tensors, at none of DTensor's cost per operation. Only the gradient norm needs all ranks.

    Weight decay applies to matrices; tensors of one dimension (norms, biases) are exempt.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self._sharded = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        # Detached views: the optimizer writes into the memory that FSDP gathers from.
        self._local = {name: local_shard(parameter).detach() for name, parameter in self._sharded.items()}
        decayed = [self._local[name] for name, parameter in self._sharded.items() if parameter.ndim >= 2]
        exempt = [self._local[name] for name, parameter in self._sharded.items() if parameter.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": exempt, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=0.0, betas=betas, eps=eps, fused=True
        )

    def squared_gradient_norm(self) -> float:
        """Sum of squares of this rank's gradients, in float64."""
        squares = [torch.linalg.vector_norm(gradient).double().square() for gradient in self._gradients().values()]
        return float(torch.stack(squares).sum()) if squares else 0.0

    def step(self, *, lr: float, gradient_scale: float = 1.0) -> None:
        """One step with gradients times ``gradient_scale``; the gradients are used up."""
        for name, gradient in self._gradients().items():
            if gradient_scale != 1.0:
                gradient.mul_(gradient_scale)
            self._local[name].grad = gradient
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.discard_gradients()

    def discard_gradients(self) -> None:
        """Forget the gradients."""
        for parameter in self._sharded.values():
            parameter.grad = None
        for local in self._local.values():
            local.grad = None

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Local shards of ``exp_avg`` and ``exp_avg_sq`` by parameter; parameters never stepped are absent."""
        states = {name: self._adamw.state.get(local) for name, local in self._local.items()}
        return {name: {each: state[each] for each in MOMENTS} for name, state in states.items() if state}

    def steps(self) -> dict[str, int]:
        """Steps done by parameter; those never stepped are absent."""
        states = {name: self._adamw.state.get(local) for name, local in self._local.items()}
        return {name: int(state["step"]) for name, state in states.items() if state}

    def restore(self, moments: Mapping[str, Mapping[str, Tensor]], steps: Mapping[str, int]) -> None:
        """Counterpart of :meth:`moments` and :meth:`steps`; takes the tensors over."""
        self._adamw.state.clear()
        for name, tensors in moments.items():
            local = self._local[name]
            self._adamw.state[local] = {
                "step": torch.tensor(float(steps[name]), dtype=torch.float32, device=local.device),
                **{each: tensors[each] for each in MOMENTS},
            }

    def _gradients(self) -> dict[str, Tensor]:
        return {
            name: local_shard(parameter.grad) for name, parameter in self._sharded.items() if parameter.grad is not None
        }


def clipping_scale(norm: float, max_norm: float | None) -> float:
    """What to multiply gradients of this global norm by, so that it is at most ``max_norm``."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
