"""The next weights of a model on a CPU, packed beside the ones that serve and exchanged for them by pointer.

On a CPU vLLM packs each linear layer's weights for oneDNN when they are loaded, which is most of what a load takes. So
a version is loaded into a twin of the model while the model goes on: the same modules with tensors of their own. What a
forward pass reads of a plain module is its tensors and the packed function ``cpu_linear``; exchanging both makes the
model serve the twin's weights.
"""

# vLLM lives in an environment of its own, where the type checkers do not look.
# pyright: reportMissingImports=false
# torch has no public way to copy modules without their tensors.
# ruff: noqa: SLF001

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

__all__ = ["PackedTwin", "pack_tied_heads", "suits"]

_PACKED = "cpu_linear"
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def suits(model: torch.nn.Module) -> bool:
    """Whether nothing but tensors and packed functions changes with the weights of this model, here."""
    if not current_platform.is_cpu():
        return False
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        persistent = set(module._buffers) - module._non_persistent_buffers_set
        if persistent or not (method is None or type(method) in _PLAIN):
            return False
    return True


def pack_tied_heads(model: torch.nn.Module) -> None:
    """Pack heads that share the embedding's tensor: they get no weights, and would keep their old packed copy."""
    sharing: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.numel() and hasattr(module, "quant_method"):  # a packed layer's is empty
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        for module in modules[1:]:
            module.quant_method.process_weights_after_loading(module)


class PackedTwin:
    """A twin of ``model`` that has loaded ``tensors``. Made in a thread; reads the model and does not change it.

    Args:
        model: one that :func:`suits`.
        model_config: vLLM's configuration of it. Any: vLLM's class.
        tensors: checkpoint names and tensors.
    """

    def __init__(self, model: torch.nn.Module, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model = model
        self._twin = _twin(model, {})
        with torch.no_grad():
            for original, twin in zip(model.modules(), self._twin.modules(), strict=True):
                known, info = get_layerwise_info(original), get_layerwise_info(twin)
                info.restore_metadata, info.restore_device = known.restore_metadata, known.restore_device
            initialize_layerwise_reload(self._twin)
            loading: Any = self._twin  # Any: load_weights is not among torch's methods
            loading.load_weights(iter(tensors))
            finalize_layerwise_reload(self._twin, model_config)
            pack_tied_heads(self._twin)

    def exchange(self) -> None:
        """Make the model serve these weights. Between two steps only, and once."""
        done: set[int] = set()
        for original, twin in zip(self._model.modules(), self._twin.modules(), strict=True):
            theirs = dict(twin.named_parameters(recurse=False))
            for name, parameter in original.named_parameters(recurse=False):
                if id(parameter) not in done:
                    done.add(id(parameter))
                    parameter.data = theirs[name].data
            if _PACKED in vars(twin):
                setattr(original, _PACKED, vars(twin)[_PACKED])


def _twin(module: torch.nn.Module, made: dict[int, Any]) -> torch.nn.Module:
    """The same modules, with parameters of their own wherever the original has one; shared ones stay shared."""
    if id(module) in made:
        known: torch.nn.Module = made[id(module)]
        return known
    twin: Any = copy.copy(module)  # Any: its private dictionaries are what makes it another module
    made[id(module)] = twin
    twin._parameters = {name: _own(each, made) for name, each in module._parameters.items()}
    twin._buffers = dict(module._buffers)
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    twin._modules = {name: None if each is None else _twin(each, made) for name, each in module._modules.items()}
    return twin  # type: ignore[no-any-return]


def _own(parameter: torch.nn.Parameter | None, made: dict[int, Any]) -> torch.nn.Parameter | None:
    if parameter is None:
        return None
    if id(parameter) not in made:
        own = torch.nn.Parameter(torch.empty_like(parameter.data), requires_grad=False)
        own.__class__ = parameter.__class__
        vars(own).update(vars(parameter))
        made[id(parameter)] = own
    result: torch.nn.Parameter = made[id(parameter)]
    return result
