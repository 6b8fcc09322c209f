"""The HTTP face: OpenAI, Anthropic and token-native routes over a pool of replicas; sessions, capture, control.

The package is also the function :func:`asyncrl.serve.serving.serve`, so that a notebook can say

    async with asyncrl.serve("path/to/model") as pool:
        ...
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl.serve.serving import ServedModel


class _CallableModule(ModuleType):
    """``asyncrl.serve`` names a package and what it is for."""

    def __call__(self, model: str, *arguments: Any, **options: Any) -> ServedModel:
        """As :func:`asyncrl.serve.serving.serve`."""
        from asyncrl.serve.serving import serve

        return serve(model, *arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
