"""Low-rank adapters (LoRA, arXiv:2106.09685) through peft: small matrices are trained beside frozen weights.

    W' = W + (alpha / rank) * B @ A        A: [rank, inputs], B: [outputs, rank], B = 0 at first

Without its adapters the model is its own reference policy: its weights are those before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from asyncrl.errors import ConfigError
from engines.training.quantised import full_tensors

_T = TypeVar("_T")  # tensors, or what describes them

_BASE, _A, _B = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRA:
    """The options of the adapters. Raises :class:`ConfigError` for a value that cannot be used."""

    rank: int  # of the matrices
    alpha: float  # the matrices' product is scaled by alpha / rank
    target_modules: tuple[str, ...] = ("all-linear",)  # ends of names; all-linear: linear ones but the output head
    base: Literal["float", "int8"] = "float"  # type of frozen weights: the computation's, or codes of 8 bits

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora.rank is {self.rank}", path="lora.rank", remedy="at least 1")
        if not self.alpha > 0:
            raise ConfigError(f"lora.alpha is {self.alpha}", path="lora.alpha", remedy="positive; often twice the rank")
        if not self.target_modules or ("all-linear" in self.target_modules and len(self.target_modules) > 1):
            raise ConfigError(
                f"lora.target_modules is {list(self.target_modules)}",
                path="lora.target_modules",
                remedy="names of linear modules, such as q_proj and v_proj, or 'all-linear' alone",
            )

        if self.base not in ("float", "int8"):
            raise ConfigError(f"lora.base is {self.base!r}", path="lora.base", remedy="'float' or 'int8'")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def as_record(self) -> dict[str, Any]:
        record = {"rank": self.rank, "alpha": self.alpha, "target_modules": list(self.target_modules)}
        return record if self.base == "float" else {**record, "base": self.base}

    def adapter_config(self, *, base: str) -> dict[str, Any]:
        """Return peft's ``adapter_config.json`` for adapters of the model ``base``."""
        whole = self.target_modules == ("all-linear",)
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": "all-linear" if whole else list(self.target_modules),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
        }


def lora_of(options: Mapping[str, Any] | LoRA | None) -> LoRA | None:
    """Make the options from a configuration table; raise :class:`ConfigError` for an unknown or missing key."""
    if options is None or isinstance(options, LoRA):
        return options
    if unknown := sorted(options.keys() - {"rank", "alpha", "target_modules", "base"}):
        raise ConfigError(
            f"lora.{unknown[0]} does not exist", path=f"lora.{unknown[0]}", remedy="rank, alpha, target_modules, base"
        )
    if missing := sorted({"rank", "alpha"} - options.keys()):
        raise ConfigError(f"lora.{missing[0]} is missing", path="lora", remedy="{rank = 16, alpha = 32}")
    target_modules = options.get("target_modules", ("all-linear",))
    return LoRA(
        rank=int(options["rank"]),
        alpha=float(options["alpha"]),
        target_modules=(target_modules,) if isinstance(target_modules, str) else tuple(target_modules),
        base=options.get("base", "float"),
    )


def add_adapters(causal_lm: Any, lora: LoRA, *, seed: int) -> None:
    """Freeze a model on the CPU and add adapters to its linear modules; equal on every rank for the same seed.

    Raises:
        ConfigError: peft is not installed, or a target is not a linear module of the model's body.
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
        target_modules="all-linear" if lora.target_modules == ("all-linear",) else list(lora.target_modules),
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
                f"lora.target_modules is {list(lora.target_modules)}: {str(error).splitlines()[0]}",
                path="lora.target_modules",
                remedy=f"'all-linear', or some of {', '.join(linear)}",
            ) from error
    for name, module in causal_lm.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        base = module.get_base_layer()
        if base is head or base is embeddings or type(base) is not nn.Linear:
            raise ConfigError(
                f"lora.target_modules names {name}, a {type(base).__name__}"
                + (" and the output head" if base is head else ""),
                path="lora.target_modules",
                remedy="linear modules of attention and feed-forward layers; embeddings, heads and experts that share "
                "one tensor cannot be adapted",
            )


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the block. For passes without gradients."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # peft's own method also changes which parameters are trained, which a sharded model must not do.
    for layer in layers:
        layer._disable_adapters = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False  # noqa: SLF001


def merged_tensors(tensors: Iterator[tuple[str, Tensor]], lora: LoRA) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's full tensors with the adapters added to its weights, named as without adapters.

    Adapters must follow their weight before the next weight, as a module's parameters do.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in full_tensors(tensors):
        if name.endswith(f"{_BASE}.weight"):
            waiting["weight"] = tensor
        elif name.endswith(_A):
            waiting["a"] = tensor
        elif name.endswith(_B):
            merged = torch.addmm(waiting["weight"].to(tensor.dtype), tensor, waiting["a"], alpha=lora.scale)
            yield name.removesuffix(_B) + ".weight", merged
            waiting.clear()
        else:
            yield name.replace(f"{_BASE}.", "."), tensor


def base_tensors(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights without the adapters, named as without them."""
    for name, tensor in full_tensors(tensors):
        if not is_adapter(name):
            yield name.replace(f"{_BASE}.", "."), tensor


def is_adapter(name: str) -> bool:
    """True for the module's name of an adapter's matrix."""
    return name.endswith((_A, _B))


def adapter_tensors(tensors: Iterator[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
    """Yield the adapters alone, under peft's names in files."""
    for name, tensor in tensors:
        if is_adapter(name):
            yield f"base_model.model.{name.replace('.default.', '.')}", tensor


def adapter_modules(causal_lm: nn.Module) -> dict[str, nn.Linear]:
    """Return the modules that have an adapter's matrix for their weight, by its name in peft's files."""
    return {
        f"base_model.model.{name.removesuffix('.default')}.weight": module
        for name, module in causal_lm.named_modules()
        if f"{name}.weight".endswith((_A, _B)) and isinstance(module, nn.Linear)
    }
