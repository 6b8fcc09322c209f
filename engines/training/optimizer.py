"""Optimizers over local shards, global gradient clipping, and the learning rate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, assert_never, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.errors import ConfigError
from engines.training.model import local_shard
from engines.training.offload import resizable

Schedule: TypeAlias = Literal["constant", "cosine", "linear"]

OptimizerName: TypeAlias = Literal["adamw", "adamw_8bit", "muon", "adafactor", "sgd"]
"""AdamW (arXiv:1711.05101), the same with moments of 8 bits (torchao, arXiv:2110.02861), Muon (for matrices; all else,
embeddings and head get AdamW), Adafactor (arXiv:1804.04235; a step changes a tensor by ``min(lr, 1 / sqrt(step))`` of
its root mean square), and plain gradient descent."""

_WHOLE: frozenset[OptimizerName] = frozenset({"adamw_8bit", "muon", "adafactor"})
"""Optimizers that compute with whole matrices, or with blocks of them: a shard of one has not what they need."""

_OURS = frozenset(
    {"self", "params", "lr", "weight_decay", "amsgrad", "fused", "foreach", "maximize", "capturable", "differentiable"}
)
"""Parameters of optimizers that are no options: other fields of the engine, a third moment, or ways to compute."""


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
                path="warmup_steps",
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


def check_optimizer(name: OptimizerName, options: Mapping[str, Any] | None, *, divided: int, **given: Any) -> None:
    """Check an optimizer before there are parameters, matrices of which ``divided`` ranks share.

    Raises:
        ConfigError: as :class:`ShardedOptimizer`, which takes the other arguments.
    """
    _check_whole(name, divided)
    ShardedOptimizer([("matrix", nn.Parameter(torch.zeros(2, 2)))], name=name, options=options, **given)


def _check_whole(name: OptimizerName, divided: int) -> None:
    if name in _WHOLE and divided > 1:
        raise ConfigError(
            f"optimizer {name!r} computes with whole matrices, which {divided} ranks have a part of each here",
            path="optimizer",
            remedy="'adamw' or 'sgd', or a mesh with dp_replicate and pp alone",
        )


class ShardedOptimizer:
    """An optimizer of torch or torchao on the shard that each of ``world_size`` ranks holds.

    AdamW and gradient descent are elementwise, so they run on plain local tensors, without DTensor's cost per
    operation; only the gradient norm needs all ranks. The others are refused where a parameter is divided. Weight decay
    multiplies weights by ``1 - lr * weight_decay``, apart from gradients and moments; tensors of one dimension (norms,
    biases) are exempt. ``betas`` and ``eps`` are AdamW's; ``options`` are the
    optimizer's others, and ``apart`` the parameters that Muon leaves to AdamW.

    Raises:
        ConfigError: there is no such optimizer or option, a value cannot be used, torchao is not installed, or a
            parameter is divided that has to be whole.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        world_size: int = 1,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        name: OptimizerName = "adamw",
        options: Mapping[str, Any] | None = None,
        apart: Collection[nn.Parameter] = (),
    ) -> None:
        self.name = name
        self._sharded = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        # Detached views: the optimizer writes into the memory that FSDP gathers from.
        self._local = {name: local_shard(parameter).detach() for name, parameter in self._sharded.items()}
        self._copies = {name: world_size // _shards(parameter) for name, parameter in self._sharded.items()}
        self._steps: dict[str, int] = {}
        # torch's gradient descent would add it to the gradients, and so to their momentum.
        self._decay = weight_decay if name == "sgd" else 0.0
        _check_whole(name, max((_shards(parameter) for parameter in self._sharded.values()), default=1))
        adam = {"betas": betas, "eps": eps}
        make, given, held = _class_of(name), dict(options or {}), list(self._sharded)
        known = sorted(inspect.signature(make).parameters.keys() - _OURS - (adam.keys() if "adam" in name else set()))
        if unknown := sorted(given.keys() - set(known)):
            raise ConfigError(
                f"optimizer {name!r} has no option {unknown[0]!r}",
                path="optimizer_options",
                remedy=f"one of {', '.join(known)}" if known else "betas and eps are fields of the engine",
            )
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}

        def groups(names: Iterable[str]) -> list[dict[str, Any]]:
            decayed = [self._local[each] for each in names if self._sharded[each].ndim >= 2]
            exempt = [self._local[each] for each in names if self._sharded[each].ndim < 2]
            both = [
                {"params": decayed, "weight_decay": weight_decay - self._decay},
                {"params": exempt, "weight_decay": 0.0},
            ]
            return [group for group in both if group["params"]]

        others = held if name == "adamw" else []
        if name == "muon":
            embeddings = {id(each) for each in apart}
            others = [each for each, it in self._sharded.items() if it.ndim != 2 or id(it) in embeddings]
            given = {"adjust_lr_fn": "match_rms_adamw", **given}  # steps as large as AdamW's: one lr does for both
        elif name.startswith("adamw"):
            given |= adam
        self._optimizers: list[torch.optim.Optimizer] = []
        self._optimizer_of: dict[str, torch.optim.Optimizer] = {}
        rest = [each for each in held if each not in set(others)]
        try:
            if others:
                self._optimizers.append(torch.optim.AdamW(groups(others), lr=0.0, betas=betas, eps=eps, fused=True))
                self._optimizer_of |= dict.fromkeys(others, self._optimizers[-1])
            if rest:
                self._optimizers.append(make(groups(rest), lr=0.0, **given))
                self._optimizer_of |= dict.fromkeys(rest, self._optimizers[-1])
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"optimizer {name!r}: {error}", path="optimizer_options", remedy="correct them"
            ) from error

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
            if self._decay and gradient.ndim >= 2:
                self._local[name].mul_(1.0 - lr * self._decay)
            self._local[name].grad = gradient
            self._steps[name] = self._steps.get(name, 0) + 1
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr
            # torchao compiles its step, which needs a C++ compiler on a CPU.
            eager = self.name == "adamw_8bit" and next(iter(self._local.values())).is_cpu
            with torch.compiler.set_stance("force_eager") if eager else nullcontext():
                optimizer.step()
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
            for _, part, replace in _parts(state):
                found.append(resizable(part))
                replace(found[-1])
        return found

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the state of every parameter that has made a step: of a tensor of its shape, the local shard."""
        states = dict(self._states())
        return {name: {key: part for key, part, _ in _parts(states.get(name, {}))} for name in self._steps}

    def steps(self) -> dict[str, int]:
        return dict(self._steps)

    def empty_moments(self, names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
        """Return what :meth:`moments` has of these parameters behind a step, with any values."""
        return {name: {key: part for key, part, _ in _parts(self._empty_state(name))} for name in names}

    def restore(self, moments: Mapping[str, Mapping[str, Tensor]], steps: Mapping[str, int]) -> None:
        """Set what :meth:`moments` and :meth:`steps` returned; the tensors now belong to the optimizer."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        self._steps = dict(steps)
        for name, tensors in moments.items():
            state = self._empty_state(name)
            for key, _, replace in _parts(state):
                replace(tensors[key])
            if self.name != "sgd" and "momentum_buffer" not in state:
                device = self._local[name].device if "fused" in self._optimizer_of[name].defaults else "cpu"
                state["step"] = torch.tensor(float(steps[name]), dtype=torch.float32, device=device)
            self._optimizer_of[name].state[self._local[name]] = state

    def _empty_state(self, name: str) -> dict[str, Any]:
        """Return the state that torch and torchao make in a parameter's first step, but for the number of steps."""
        local, optimizer = self._local[name], self._optimizer_of[name]
        match optimizer:
            case torch.optim.AdamW():
                return {key: torch.empty_like(local) for key in ("exp_avg", "exp_avg_sq")}
            case torch.optim.Adafactor():
                if local.ndim < 2:
                    return {"variance": torch.empty_like(local)}
                return {"row_var": torch.empty_like(local[..., :1]), "col_var": torch.empty_like(local[..., :1, :])}
            case torch.optim.SGD() if not optimizer.defaults["momentum"]:
                return {}
            case torch.optim.SGD() | torch.optim.Muon():
                return {"momentum_buffer": torch.empty_like(local)}
            case _:
                eight_bit: Any = optimizer  # torchao's
                return {key: eight_bit._new_buffer(local, key == "exp_avg") for key in ("exp_avg", "exp_avg_sq")}  # noqa: SLF001

    def _states(self) -> list[tuple[str, dict[str, Any]]]:
        states = {key: state for optimizer in self._optimizers for key, state in optimizer.state.items()}
        return [(name, states[local]) for name, local in self._local.items() if states.get(local)]

    def _gradients(self) -> dict[str, Tensor]:
        return {
            name: local_shard(parameter.grad) for name, parameter in self._sharded.items() if parameter.grad is not None
        }


def make_tables(name: OptimizerName) -> None:
    """Let torchao make the tables of its 8 bits, for which it reads values: there are none in a trace."""
    if name == "adamw_8bit":
        weight = nn.Parameter(torch.zeros(4096))  # smaller ones have float32 moments
        weight.grad = torch.zeros(4096)
        with torch.compiler.set_stance("force_eager"):
            _class_of(name)([weight]).step()


def _class_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    match name:
        case "adamw":
            return torch.optim.AdamW
        case "sgd":
            return torch.optim.SGD
        case "adafactor":
            return torch.optim.Adafactor
        case "muon" if hasattr(torch.optim, "Muon"):
            return torch.optim.Muon
        case "muon":
            raise ConfigError(f"torch {torch.__version__} has no Muon", path="optimizer", remedy="torch 2.9 or newer")
        case "adamw_8bit":
            try:
                from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
            except ImportError as error:
                remedy = 'pip install "asyncrl[torchao]"'
                raise ConfigError("optimizer 'adamw_8bit' needs torchao", path="optimizer", remedy=remedy) from error
            made: Callable[..., torch.optim.Optimizer] = AdamW8bit
            return made
        case _:
            raise ConfigError(
                f"optimizer {name!r} does not exist",
                path="optimizer",
                remedy=f"one of {', '.join(get_args(OptimizerName))}",
            )


def _parts(state: dict[str, Any]) -> list[tuple[str, Tensor, Callable[[Tensor], None]]]:
    """Return the tensors of a parameter's state, and what replaces each; torchao's of 8 bits are codes and scales."""
    parts: list[tuple[str, Tensor, Callable[[Tensor], None]]] = []
    for key, value in state.items():
        if hasattr(value, "codes"):
            parts += [
                (f"{key}.{each}", getattr(value, each), partial(setattr, value, each)) for each in ("codes", "scale")
            ]
        elif isinstance(value, Tensor) and key != "step":
            parts.append((key, value, partial(state.__setitem__, key)))
    return parts


def _shards(parameter: Tensor) -> int:
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def clipping_scale(norm: float, max_norm: float | None) -> float:
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm
