"""The scorers of reasoning-gym for rows made of its data sets."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["compute_score"]


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any], *, tag: str = "answer"
) -> float:
    """The data set's own score (0..1) of the answer between the last ``<answer>`` tags; 0 without them.

    Args:
        data_source: ``reasoning_gym/NAME``, unless the row says ``extra_info.dataset``.
        solution_str: the answer.
        ground_truth: the entry's answer.
        extra_info: ``entry`` is what the data set gave (``question``, ``answer``, ``metadata``), or its JSON.
        tag: the whole text is the answer if empty.

    Raises:
        ValueError: there is no such data set, or the row has no entry.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    name = str(extra_info.get("dataset") or data_source.rpartition("/")[2])
    if name not in DATASETS:
        raise ValueError(f"reasoning-gym has no data set {name!r}: the row's data_source is {data_source!r}")
    entry = extra_info.get("entry")
    if isinstance(entry, str):
        entry = json.loads(entry)
    if not isinstance(entry, dict):
        raise ValueError("reasoning-gym scores need the row's extra_info.entry, as the data set gave it (or its JSON)")
    answer = solution_str.strip()
    if tag:
        _, opened, rest = solution_str.rpartition(f"<{tag}>")
        answer, closed, _ = rest.partition(f"</{tag}>")
        if not (opened and closed):
            return 0.0
    entry = {"answer": ground_truth, "metadata": {}, **entry}
    score: Any = reasoning_gym.get_score_answer_fn(name)  # annotated there as if it took nothing
    return float(score(answer=answer.strip(), entry=entry))
