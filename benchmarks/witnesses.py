"""Independent records of a run, for programs that kill its processes: they read nothing that the run wrote for itself.

Environments note every episode that ended, and each trainer rank every row that it took an optimizer step on, with the
number of the update. A note is one line, appended by one write to a file of its process, so a kill leaves whole lines.
:func:`audit` holds the two against each other. An update that a resumed run makes again replaces the one before.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from digits_world import Digits, DigitsFactory, worth

from asyncrl.data import DataProto
from asyncrl.data.ragged import rows_of
from asyncrl.interfaces import Message, Step, Task
from engines.training.fsdp_engine import FSDPEngine


def note(folder: str, kind: str, **found: Any) -> None:
    line = json.dumps({"at": time.time(), **found}) + "\n"
    file = os.open(Path(folder) / f"{kind}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


class NotedDigits(Digits):
    """Notes its replies when it ends."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._replies: list[str] = []
        self._index = 0

    async def reset(self, task: Task) -> Sequence[Message]:
        self._index = task["index"]
        return await super().reset(task)

    async def step(self, reply: Message) -> Step:
        self._replies.append(reply["content"] or "")
        step = await super().step(reply)
        if step.done:
            note(self._folder, "episodes", task=self._index, replies=self._replies)
        return step


class NotedFactory(DigitsFactory):
    def __init__(self, *, folder: str) -> None:
        self._folder = folder

    def make(self) -> Digits:
        return NotedDigits(self._folder)


@dataclass(kw_only=True, eq=False, repr=False)
class NotingEngine(FSDPEngine):
    """The training engine; it notes the rows of every update."""

    folder: str

    def __post_init__(self) -> None:
        super().__post_init__()
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(self.model_path)

    def update(self, batch: DataProto) -> dict[str, float]:
        metrics = super().update(batch)
        assert batch.batch is not None
        columns = (rows_of(batch.batch["input_ids"]), rows_of(batch.batch["weight_versions"]))
        texts = [self._replies(row.tolist(), stamps.tolist()) for row, stamps in zip(*columns, strict=True)]
        numbers = (batch.batch["group_id"].tolist(), batch.batch["scores"].tolist())
        rows = [[group_id, score, text] for group_id, score, text in zip(*numbers, texts, strict=True)]
        note(self.folder, "updates", step=self._updates, rank=self.rank, rows=rows)
        return metrics

    def _replies(self, tokens: list[int], versions: list[int]) -> list[str]:
        """Decode each run of sampled tokens, without the token that ends a turn."""
        runs = groupby(zip(tokens, versions, strict=True), key=lambda each: each[1] >= 0)
        texts = [self._tokenizer.decode([token for token, _version in run]) for sampled, run in runs if sampled]
        return [text.removesuffix(self._tokenizer.eos_token) for text in texts]


@dataclass(frozen=True)
class Audited:
    """What the notes of a run say: ``batches`` are the groups of each step; the errors are counted in rows."""

    batches: Mapping[int, Sequence[int]]
    lost: int
    duplicated: int
    invented: int


def audit(folder: Path, *, steps: int, groups: int, rows: int) -> Audited:
    """Hold what was trained on against the episodes: each step has ``groups`` of ``rows`` rows, each of them once."""
    episodes: dict[tuple[int, str], list[float]] = {}
    for each in _notes(folder, "episodes"):
        key = each["task"], _letters(each["replies"])
        episodes.setdefault(key, []).append(worth(each["replies"][-1]))
    last = {(each["step"], each["rank"]): each["rows"] for each in _notes(folder, "updates")}
    trained: dict[int, list[tuple[int, float, str]]] = {step: [] for step in range(1, steps + 1)}
    for (step, _rank), found in sorted(last.items()):
        trained.setdefault(step, []).extend((group_id, score, _letters(text)) for group_id, score, text in found)
    lost = duplicated = invented = 0
    batches: dict[int, list[int]] = {}
    seen: set[int] = set()
    for step, found in trained.items():
        sizes = Counter(group_id for group_id, _score, _text in found)
        batches[step] = sorted(sizes)
        if step > steps:
            duplicated += len(found)
            continue
        lost += max(0, groups - len(sizes)) * rows + sum(max(0, rows - size) for size in sizes.values())
        duplicated += sum(max(0, size - rows) for size in sizes.values())
        duplicated += sum(size for group_id, size in sizes.items() if group_id in seen)
        seen |= sizes.keys()
        for (group_id, text), times in Counter((group_id, text) for group_id, _score, text in found).items():
            earned = episodes.get((group_id, text), [])
            scores = [score for other, score, said in found if (other, said) == (group_id, text)]
            untrue = sum(all(abs(score - each) > 1e-6 for each in earned) for score in scores)
            invented += max(untrue, times - len(earned))
    return Audited(batches, lost, duplicated, invented)


def _notes(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The notes of all processes, in the order of time."""
    lines = [line for file in folder.glob(f"{kind}-*.jsonl") for line in file.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda each: float(each["at"]))


def _letters(replies: Sequence[str]) -> str:
    """Join replies, without white space: a reply is stripped of it."""
    return "|".join("".join(reply.split()) for reply in replies)
