"""From a request's fields to sampling parameters, within the limits."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.interfaces import LEAST_TEMPERATURE, SamplingParams
from asyncrl.serve.failure import Refusal
from asyncrl.serve.limits import Limits

__all__ = ["check_choices", "check_grammar", "neutral", "sampling_params"]


def sampling_params(
    limits: Limits,
    *,
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    stop: str | Sequence[str] | None,
    stop_token_ids: Sequence[int] | None = None,
    seed: int | None = None,
    top_log_probs: int = 0,
    grammar: str = "",
) -> SamplingParams:
    """What is asked for, defaults filled in (temperature 1, no truncation).

    Raises:
        Refusal: past a limit.
    """
    if max_tokens is not None and max_tokens > limits.new_tokens:
        raise Refusal(400, f"max_tokens is {max_tokens}; at most {limits.new_tokens} are generated")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > limits.stop_strings or len(stop_token_ids or ()) > limits.stop_strings:
        raise Refusal(400, f"at most {limits.stop_strings} stop strings and as many stop tokens are taken")
    if any(not text or len(text) > limits.stop_length for text in strings):
        raise Refusal(400, f"a stop string has 1 to {limits.stop_length} characters")
    if top_log_probs > limits.top_log_probs:
        raise Refusal(
            400, f"{top_log_probs} log-probs per token are asked for; at most {limits.top_log_probs} are told"
        )
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        raise Refusal(400, f"temperature is {temperature}; it is 0 (greedy) or at least {LEAST_TEMPERATURE}")
    return SamplingParams(
        max_new_tokens=max_tokens if max_tokens is not None else limits.default_new_tokens,
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(top_k or 0, 0),
        stop=strings,
        stop_token_ids=tuple(stop_token_ids or ()),
        seed=None if seed is None else seed & (2**63 - 1),
        top_log_probs=top_log_probs,
        grammar=check_grammar(limits, grammar),
    )


def check_grammar(limits: Limits, grammar: str) -> str:
    """``grammar``, within the limit."""
    if len(grammar.encode("utf-8", "surrogatepass")) > limits.grammar_size_bytes:
        raise Refusal(400, f"the grammar, or the schemas, have more than {limits.grammar_size_bytes} bytes")
    return grammar


def check_choices(limits: Limits, choices: int) -> int:
    """``n``, within the limit."""
    if choices > limits.choices:
        raise Refusal(400, f"n is {choices}; at most {limits.choices} choices are generated")
    return choices


def neutral(**fields: tuple[object, tuple[object, ...]]) -> None:
    """Refuse what would change the distribution and is not served, rather than ignore it.

    Args:
        fields: of each its value, and the values that change nothing.
    """
    for name, (value, harmless) in fields.items():
        if value is not None and value not in harmless:
            raise Refusal(400, f"{name} = {str(value)[:80]} is not served; leave it out")
