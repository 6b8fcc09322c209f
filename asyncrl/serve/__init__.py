"""An HTTP server over a pool of replicas: OpenAI's, Anthropic's and its own API, sessions, a control plane.

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
    """Makes the package callable."""

    def __call__(self, model: str, *arguments: Any, **options: Any) -> ServedModel:
        """Like :func:`asyncrl.serve.serving.serve`."""
        from asyncrl.serve.serving import serve

        return serve(model, *arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
