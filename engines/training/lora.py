"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: a model's weights stay, small matrices beside them learn.

    W' = W + (alpha / rank) * B @ A        A: [rank, inputs], B: [outputs, rank], B = 0 at first

Frozen, the model is its own reference policy: without the adapters it computes what it computed before any step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError

__all__ = ["LoRA", "adapter_tensors", "add_adapters", "lora_of", "merged_tensors", "without_adapters"]

_BASE, _A, _B = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """What is adapted, and how much.

    Attributes:
        rank: of the matrices, 1 or more.
        alpha: positive; their product counts alpha / rank times.
        targets: ends of the names of linear modules, or only ``all-linear``: every one but the output head.

    Raises:
        ConfigError: a value that cannot be used.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("all-linear",)

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora.rank is {self.rank}", path="lora.rank", remedy="at least 1")
        if not self.alpha > 0:
            raise ConfigError(f"lora.alpha is {self.alpha}", path="lora.alpha", remedy="positive; often twice the rank")
        if not self.targets or ("all-linear" in self.targets and len(self.targets) > 1):
            raise ConfigError(
                f"lora.targets is {list(self.targets)}",
                path="lora.targets",
                remedy="names of linear modules, such as q_proj and v_proj, or 'all-linear' alone",
            )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def as_record(self) -> dict[str, Any]:
        """For files."""
        return {"rank": self.rank, "alpha": self.alpha, "targets": list(self.targets)}

    def adapter_config(self, *, base: str) -> dict[str, Any]:
        """The ``adapter_config.json`` of peft for the adapters of the model ``base``."""
        whole = self.targets == ("all-linear",)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": "all-linear" if whole else list(self.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
        }


def lora_of(options: Mapping[str, Any] | LoRA | None) -> LoRA | None:
    """From a table of options.

    Raises:
        ConfigError: an unknown or missing one.
    """
    if options is None or isinstance(options, LoRA):
        return options
    if unknown := sorted(options.keys() - {"rank", "alpha", "targets"}):
        raise ConfigError(f"lora.{unknown[0]} does not exist", path=f"lora.{unknown[0]}", remedy="rank, alpha, targets")
    if missing := sorted({"rank", "alpha"} - options.keys()):
        raise ConfigError(f"lora.{missing[0]} is missing", path="lora", remedy="{rank = 16, alpha = 32}")
    targets = options.get("targets", ("all-linear",))
    return LoRA(
        rank=int(options["rank"]),
        alpha=float(options["alpha"]),
        targets=(targets,) if isinstance(targets, str) else tuple(targets),
    )


def add_adapters(causal_lm: Any, lora: LoRA, *, seed: int) -> None:
    """Freeze a model and put adapters beside its linear modules, the same ones for the same seed on every rank.

    Args:
        causal_lm: a transformers model on the CPU; changed in place.
        lora: what to adapt.
        seed: of the first matrices.

    Raises:
        ConfigError: peft is not installed, or a target is no linear module of the model's body.
    """
    try:
        import peft
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise ConfigError("LoRA needs peft", path="lora", remedy='pip install "asyncrl[lora]"') from error
    head, embeddings = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings()
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=cast(Any, lora.alpha),  # documented as an int, used as a number
        target_modules="all-linear" if lora.targets == ("all-linear",) else list(lora.targets),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    linear = sorted({name.rpartition(".")[2] for name, each in causal_lm.named_modules() if type(each) is nn.Linear})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, causal_lm)
        except ValueError as error:
            raise ConfigError(
                f"lora.targets is {list(lora.targets)}: {str(error).splitlines()[0]}",
                path="lora.targets",
                remedy=f"'all-linear', or some of {', '.join(linear)}",
            ) from error
    for name, module in causal_lm.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        base = module.get_base_layer()
        if base is head or base is embeddings or type(base) is not nn.Linear:
            raise ConfigError(
                f"lora.targets names {name}, a {type(base).__name__}"
                + (" and the output head" if base is head else ""),
                path="lora.targets",
                remedy="linear modules of attention and feed-forward layers; embeddings, heads and experts that lie in "
                "one tensor are not adapted here",
            )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The frozen model alone, for as long as the block lasts. For passes without gradients."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # peft's own switch also changes which parameters are trained, which a sharded model must not do.
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001


def merged_tensors(tensors: Iterator[tuple[str, Tensor]], lora: LoRA) -> Iterator[tuple[str, Tensor]]:
    """A model's full tensors with the adapters added to its weights, under the names they have without adapters.

    Adapters must follow their weight before the next one does, as a module's parameters do.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if name.endswith(f"{_BASE}.weight"):
            waiting["weight"] = tensor
        elif name.endswith(_A):
            waiting["a"] = tensor
        elif name.endswith(_B):
            merged = torch.addmm(waiting["weight"], tensor, waiting["a"], alpha=lora.scale)
            yield name.removesuffix(_B) + ".weight", merged
            waiting.clear()
        else:
            yield name.replace(f"{_BASE}.", "."), tensor


def adapter_tensors(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The adapters alone, under the names that peft gives them in files."""
    for name, tensor in tensors:
        if name.endswith((_A, _B)):
            yield f"base_model.model.{name.replace('.default.', '.')}", tensor
