"""What only the embedded engine serves; others refuse it rather than generate something else."""

from __future__ import annotations

from asyncrl.errors import InvalidDataError
from asyncrl.interfaces import GenerationRequest

__all__ = ["refuse_unserved"]


def refuse_unserved(request: GenerationRequest, *, engine: str) -> None:
    """Let a request pass that asks for neither a grammar nor the likeliest tokens.

    >>> from asyncrl.interfaces import SamplingParams
    >>> asked = SamplingParams(max_new_tokens=1, grammar='start: "a"')
    >>> refuse_unserved(GenerationRequest(request_id="x", prompt_token_ids=(1,), sampling=asked), engine="vllm")
    Traceback (most recent call last):
    asyncrl.errors.InvalidDataError: request 'x' asks for a grammar, which the vllm engine does not serve

    Raises:
        InvalidDataError: it asks for one of them.
    """
    name, sampling = f"request {request.request_id!r}", request.sampling
    for wish, value in {"a grammar": sampling.grammar, "the likeliest tokens": sampling.top_log_probs}.items():
        if value:
            raise InvalidDataError(f"{name} asks for {wish}, which the {engine} engine does not serve")
