"""The recipe of SGLang, and the two modules that it generates."""

from __future__ import annotations

import re
import types

import torch

from engines.install.sglang import recipe
from engines.install.venv import LocalDistribution, PipInstall


def test_the_cpu_recipe_pins_every_package() -> None:
    cpu = recipe("cpu")
    fetched = [step for step in cpu.steps if isinstance(step, PipInstall)]
    assert not any(step.dependencies for step in fetched)
    names = [re.fullmatch(r"[\w.\-]+==[\w.+]+", one) for step in fetched for one in step.requirements]
    assert None not in names
    assert len(names) > 100
    assert cpu.digest != recipe("gpu").digest


def test_the_replacement_kernel_writes_places_into_the_table() -> None:
    (written,) = [step for step in recipe("cpu").steps if isinstance(step, LocalDistribution)]
    kernels = types.ModuleType("sgl_kernel")
    exec(written.modules["sgl_kernel/__init__.py"], vars(kernels))
    table = torch.zeros((3, 6), dtype=torch.int32)
    rows, begins, ends = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([4, 2])
    kernels.assign_req_to_token_pool_cpu(rows, table, begins, ends, torch.arange(7, 12), 6)
    assert table.tolist() == [[10, 11, 0, 0, 0, 0], [0] * 6, [0, 7, 8, 9, 0, 0]]
    assert callable(kernels.__getattr__("rmsnorm_cpu"))
    assert "asyncrl_torchvision_operators" in written.modules["asyncrl_torchvision_operators.pth"]
    compile(written.modules["asyncrl_torchvision_operators.py"], "hook", "exec")
