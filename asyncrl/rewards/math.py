"""Mathematics: whether an answer means what the ground truth means, by the package math-verify."""

from __future__ import annotations

from typing import Any

__all__ = ["compute_score"]


def compute_score(solution_str: str, ground_truth: Any, *, boxed: bool = False, float_rounding: int = 6) -> float:
    r"""1 if the answer's result is equal to the ground truth, else 0: ``\frac12`` is ``0.5``, ``{1,2}`` is ``{2,1}``.

    Runs in the main thread of a process of its own: math-verify bounds its work by alarms, and what it hands to sympy
    may take for ever all the same.

        >>> compute_score(r"that is \boxed{\frac{1}{2}}", "0.5")
        1.0

    Args:
        solution_str: the answer; the last ``\boxed{}`` is preferred, then LaTeX, then plain expressions.
        ground_truth: LaTeX or a plain expression; or a list of which any will do.
        boxed: whether only a result in ``\boxed{}`` counts.
        float_rounding: decimals to which numbers are compared.

    Raises:
        ValueError: the ground truth cannot be read: the row is wrong, not the answer.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    readers = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    golds = []
    for right in ground_truth if isinstance(ground_truth, list) else [ground_truth]:
        text = str(right)
        gold = parse(f"\\boxed{{{text}}}", readers) or parse(text, readers)
        if not gold:
            raise ValueError(f"the ground truth {text!r} is no mathematics that math-verify reads")
        golds.append(gold)
    at = solution_str.rfind("\\boxed")
    if boxed and at < 0:
        return 0.0
    answer = parse(solution_str[max(at, 0) :], readers)  # from the last box on: what was thought before does not count
    return float(any(verify(gold, answer, float_rounding=float_rounding) for gold in golds))
