"""Explanation: where a future comes from and how far it is, as a tree for people."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.data.display import size_text
from asyncrl.data.plan import Header, Plan

if TYPE_CHECKING:
    from asyncrl.data.pending import Future
    from asyncrl.data.progress import Shard

__all__ = ["Explanation", "explanation_of"]

MAX_DEPTH = 8
"""Futures that made futures that ... shown at most: what is further back rarely explains a wait."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A line, and those it follows from."""

    text: str
    children: tuple[Explanation, ...] = ()

    def as_text(self) -> str:
        """The tree, drawn with lines."""
        return "\n".join([self.text, *self._below("")])

    def _below(self, margin: str) -> list[str]:
        lines: list[str] = []
        for number, child in enumerate(self.children, start=1):
            last = number == len(self.children)
            lines.append(f"{margin}{'└─ ' if last else '├─ '}{child.text}")
            lines += child._below(margin + ("   " if last else "│  "))  # noqa: SLF001  of this class
        return lines

    def as_html(self) -> str:
        """The tree as nested lists; everything is escaped."""
        inner = "".join(f"<li>{child.as_html()}</li>" for child in self.children)
        return html.escape(self.text) + (f"<ul>{inner}</ul>" if inner else "")


def explanation_of(future: Future[Any], *, depth: int = MAX_DEPTH) -> Explanation:
    """Who makes it, from which call and inputs, how far each rank is and since when. Waits for nothing."""
    now = future.controller.now()
    children: list[Explanation] = []
    if not future.is_part and future.progress is not None:
        children += [Explanation(_shard_text(shard, now)) for shard in future.progress.shards]
    for label, reference in future.inputs:
        source = reference()
        if source is None:
            children.append(Explanation(f"from {label}: held by nobody any more"))
        elif depth == 0:
            children.append(Explanation(f"from {label}: ..."))
        else:
            below = explanation_of(source, depth=depth - 1)
            children.append(Explanation(f"from {below.text}", below.children))
    return Explanation(f"{future.outcome.label}: {_state_text(future, now)}", tuple(children))


def _state_text(future: Future[Any], now: float) -> str:
    outcome = future.outcome
    if outcome.state == "pending":
        return f"pending for {now - future.begun_s:.1f} s"
    if outcome.state == "done" and isinstance(value := outcome.get(), Plan):
        return _header_text(value.header)
    return outcome.status


def _shard_text(shard: Shard, now: float) -> str:
    if shard.state == "running":
        text = f"running for {now - shard.since_s:.1f} s"
    else:
        text = f"{shard.state} after {shard.took_s:.1f} s"
    if shard.rows is not None:
        text += f", given rows {shard.rows.start}:{shard.rows.stop}"
    if shard.header is not None:
        text += f", gave {_header_text(shard.header)}"
    return f"rank {shard.rank}: {text}"


def _header_text(header: Header) -> str:
    rows = f"{header.rows} row{'' if header.rows == 1 else 's'}, {size_text(header.size_bytes)}"
    version = header.meta_info.get("weight_version")
    return rows if version is None else f"{rows}, weight version {version}"
