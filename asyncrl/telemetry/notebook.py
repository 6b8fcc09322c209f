"""A run in a notebook: its state, its newest figures and its curves, drawn again while it trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

_SHOWN = (("reward_mean", "reward"), ("staleness_max", "staleness"), ("tokens_per_s", "tokens/s"), ("train/lr", "lr"))
SHOWN = ("step", "eval/success", *(name for name, _label in _SHOWN))
"""Metrics that are shown."""
_WIDTH, _HEIGHT = 320, 60
_EVERY_S = 1.0


def run_html(title: str, state: str, step: int, steps: int, lines: Sequence[Mapping[str, Any]]) -> str:
    """Return HTML of a run from its lines of metrics; all texts are escaped."""
    trained = [line for line in lines if line.get("reward_mean") is not None]
    scored = [line for line in lines if line.get("eval/success") is not None]
    facts = [f"{escape(state)}, step {step} of {steps}"]
    if trained:
        facts += [f"{label} {trained[-1][name]:.4g}" for name, label in _SHOWN if trained[-1].get(name) is not None]
    curves = [("reward", [(line["step"], line["reward_mean"]) for line in trained])]
    curves.append(("held-out success", [(line["step"], line["eval/success"]) for line in scored]))
    pictures = "".join(_curve(label, points) for label, points in curves if len(points) > 1)
    return (
        f'<div style="font-family: sans-serif; line-height: 1.5"><b>{escape(title)}</b><br>{" · ".join(facts)}'
        f'<div style="display: flex; flex-wrap: wrap; gap: 1.5em">{pictures}</div></div>'
    )


def _curve(label: str, points: Sequence[tuple[float, float]]) -> str:
    xs, ys = [x for x, _ in points], [y for _, y in points]
    low, high, first, last = min(ys), max(ys), min(xs), max(xs)
    path = " ".join(
        f"{_WIDTH * (x - first) / max(last - first, 1e-12):.1f},"
        f"{_HEIGHT - (_HEIGHT - 4) * (y - low) / max(high - low, 1e-12) - 2:.1f}"
        for x, y in points
    )
    return (
        f'<figure style="margin: 0.5em 0"><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{label}">'
        f'<polyline points="{path}" fill="none" stroke="#0072b2" stroke-width="2"/></svg>'
        f"<figcaption>{label}: {ys[0]:.3g} to {ys[-1]:.3g} (between {low:.3g} and {high:.3g})</figcaption></figure>"
    )


def show_while(draw: Callable[[], str], ended: Callable[[], bool]) -> None:
    """Display HTML in a Jupyter notebook, and again every second until ``ended``, from a thread."""
    from IPython import display

    html: Any = display.HTML  # without annotations
    show: Any = display.display
    handle = show(html(draw()), display_id=True)
    if handle is not None and not ended():
        again = _repeat(lambda: handle.update(html(draw())), ended)
        threading.Thread(target=again, name="asyncrl-display", daemon=True).start()


def marimo_output(draw: Callable[[], str], ended: Callable[[], bool]) -> Any:
    """Return HTML as the output of a marimo cell, replaced every second until ``ended`` or the cell runs again."""
    import marimo  # type: ignore[import-not-found]

    def left() -> bool:
        thread: Any = threading.current_thread()
        return ended() or thread.should_exit

    if not ended():
        again = _repeat(lambda: marimo.output.replace(marimo.Html(draw())), left)
        marimo.Thread(target=again, name="asyncrl-display", daemon=True).start()
    return marimo.Html(draw())


def _repeat(update: Callable[[], None], ended: Callable[[], bool]) -> Callable[[], None]:
    def repeat() -> None:
        pause = threading.Event()
        while not ended():
            pause.wait(_EVERY_S)
            update()

    return repeat
