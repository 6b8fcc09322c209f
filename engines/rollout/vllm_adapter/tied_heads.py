"""Heads that share the embedding's tensor, of which vLLM keeps a packed copy on a CPU."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["pack_tied_heads"]


def pack_tied_heads(model: torch.nn.Module) -> None:
    """Pack them again after a load: they get no weights of their own, and would keep their old packed copy."""
    sharing: dict[int, list[Any]] = {}
    for module in model.modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.numel() and hasattr(module, "quant_method"):  # a packed layer's is empty
            sharing.setdefault(weight.data_ptr(), []).append(module)
    for modules in sharing.values():
        for module in modules[1:]:
            module.quant_method.process_weights_after_loading(module)
