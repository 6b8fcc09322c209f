"""One picture of a run: did it learn, did its stages overlap, how old were the tokens, how full was the buffer."""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, cast

from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes


INK = "#22272e"
FAINT = "#8a939e"
GRID = "#e6e9ed"
# Okabe and Ito's colours, distinct for the colour-blind, too; the first three belong to the three stages.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6000", "#5d5d5d")
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
}
SUFFIXES = (".png", ".svg", ".pdf")
SHOWN_STEPS = 4
TURNS = "train"  # the stage whose spans are the steps
MOST_LANES = 8


@dataclass(frozen=True, slots=True)
class Slice:
    stage: str
    lane: int
    name: str
    start_s: float
    end_s: float
    waiting: bool


class Picture(PosixPath):
    """The path of a picture, which a notebook shows as the picture."""

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        shown = {"text/plain": str(self)}
        if self.suffix.lower() == ".png":
            shown["image/png"] = b64encode(self.read_bytes()).decode()
        elif self.suffix.lower() == ".svg":
            shown["image/svg+xml"] = self.read_text(encoding="utf-8")
        return shown


def plot_run(run: Path, out: Path) -> Picture:
    """Draw the files of a run's folder; a panel without data has a note instead. Return ``out``.

    The suffix of ``out`` chooses the format.

    Raises:
        ConfigError: not the folder of a run, an unknown suffix, or a file that cannot be read or written.
    """
    if not (run / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run}: not the folder of a run: it has no metrics.jsonl", path=str(run), remedy="give a run's folder"
        )
    if out.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"{out}: no picture has the suffix {out.suffix!r}", path=str(out), remedy=f"use {', '.join(SUFFIXES)}"
        )
    try:
        metrics = read_json_lines(run / "metrics.jsonl")
        trace = _read_json(run / "timeline.json").get("traceEvents", [])
        summary = _read_json(run / "summary.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run}: cannot be read: {error}", path=str(run), remedy="is the disk all right?") from error

    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(cast(Any, STYLE)):  # a union of 300 literal keys
        figure = Figure(figsize=(12, 8.2), layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.add_gridspec(3, 2, height_ratios=(1.25, 1.0, 1.0), width_ratios=(1.0, 1.0))
        _scores(figure.add_subplot(grid[0, :]), metrics, summary)
        _stages(figure.add_subplot(grid[1, :]), trace, summary)
        _staleness(figure.add_subplot(grid[2, 0]), metrics, summary)
        _queue(figure.add_subplot(grid[2, 1]), metrics)
        figure.suptitle(_title(run, summary), x=0.012, ha="left", fontsize=13, fontweight="bold")
        figure.get_layout_engine().set(h_pad=0.12, w_pad=0.1)  # type: ignore[union-attr, call-arg]
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(out, dpi=140)
        except OSError as error:
            raise ConfigError(
                f"{out}: cannot be written: {error.strerror}", path=str(out), remedy="choose another --out"
            ) from error
    return Picture(out)


def _title(run: Path, summary: Mapping[str, Any]) -> str:
    parts = [run.resolve().name]
    if summary.get("steps") is not None:
        parts.append(f"{summary['steps']} steps")
    if summary.get("wall_s") is not None:
        parts.append(f"{summary['wall_s']:.0f} s")
    if summary.get("max_staleness") is not None:
        parts.append(f"max_staleness = {summary['max_staleness']}")
    return "   ·   ".join(parts)


def _scores(axes: Axes, metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    axes.set_title("Reward and held-out success")
    steps, rewards = _series(metrics, "reward_mean")
    held_steps, held = _series(metrics, "eval/success")
    if not steps and not held:
        _nothing(axes, "no rewards in metrics.jsonl")
        return
    if steps:
        window = max(1, len(steps) // 25)
        if window > 1:
            axes.plot(steps, rewards, color=COLOURS[0], alpha=0.25, linewidth=1)
        label = "reward of the trained batch" + (f", mean of {window} steps" if window > 1 else "")
        axes.plot(steps, _smooth(rewards, window), color=COLOURS[0], linewidth=2, label=label)
    if held:
        axes.plot(
            held_steps, held, color=COLOURS[1], linewidth=1.4, linestyle=(0, (4, 2)), marker="o", markersize=6,
            markeredgecolor="white", label="held-out success",
        )  # fmt: skip
        for step, score in {held_steps[0]: held[0], held_steps[-1]: held[-1]}.items():
            axes.annotate(
                f"{score:.2f}", (step, score), xytext=(0, 9), textcoords="offset points", ha="center",
                color=COLOURS[1], fontweight="bold",
            )  # fmt: skip
    low, high = min([0.0, *rewards, *held]), max([0.1, *rewards, *held])
    axes.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))  # room for the numbers at the ends
    axes.set_xlabel("training step")
    axes.set_ylabel("score")
    axes.margins(x=0.02)
    axes.grid(axis="y")
    axes.locator_params(axis="x", integer=True)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, ncols=2)


def _stages(axes: Axes, trace: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    share = summary.get("overlap_share")
    note = "" if share is None else f": two or more at work {share:.0%} of the time"
    slices = _slices(trace)
    axes.set_title("Stages side by side" + note)
    if not slices:
        _nothing(axes, "no timeline.json yet: it is written when the run ends")
        return
    begin_s, end_s = _window(slices)
    shown = [each for each in slices if each.end_s > begin_s and each.start_s < end_s and each.lane < MOST_LANES]
    seen = {each.stage for each in shown}
    stages = [stage for stage in dict.fromkeys(each.stage for each in slices) if stage in seen]
    heights = {stage: 1 + max((each.lane for each in shown if each.stage == stage), default=0) for stage in stages}
    bars: defaultdict[tuple[str, int, bool], list[tuple[float, float]]] = defaultdict(list)
    for each in shown:
        start_s = max(each.start_s, begin_s)
        bars[each.stage, each.lane, each.waiting].append((start_s - begin_s, min(each.end_s, end_s) - start_s))
    for (stage, lane, waiting), ranges in bars.items():
        row, height = stages.index(stage), 0.78 / heights[stage]
        axes.broken_barh(
            ranges,
            (row - 0.39 + lane * height, height * (0.94 if heights[stage] > 1 else 1.0)),
            facecolors="white" if waiting else COLOURS[row % len(COLOURS)],
            edgecolors=FAINT if waiting else "white",
            hatch="////" if waiting else None,
            linewidth=0.6,
            zorder=4 if waiting else 3,
        )
    axes.set_yticks(range(len(stages)), stages)
    axes.set_ylim(len(stages) - 0.5, -0.5)
    axes.set_xlim(0, end_s - begin_s)
    note = "  (hatched: waiting)" if any(each.waiting for each in shown) else ""
    axes.set_xlabel(f"seconds, from {begin_s:.1f} s after the start{note}")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")


def _staleness(axes: Axes, metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    axes.set_title("Staleness of trained tokens")
    histogram: Counter[int] = Counter()
    for record in metrics:
        histogram.update({int(name[10:]): tokens for name, tokens in record.items() if name.startswith("staleness/")})
    total = sum(histogram.values())
    if not total:
        _nothing(axes, "no tokens have been trained on")
        return
    bound = summary.get("max_staleness")
    places = range(max(*histogram, bound or 0) + 1)
    shares = [100 * histogram.get(place, 0) / total for place in places]
    bars = axes.bar(places, shares, width=0.68, color=COLOURS[2])
    if len(shares) <= 12:
        axes.bar_label(bars, labels=[f"{share:.1f}%" if share else "" for share in shares], padding=2, color=INK)
    if bound is not None:
        axes.axvline(bound + 0.5, color=COLOURS[1], linewidth=1.4, linestyle=(0, (4, 2)))
        axes.text(bound + 0.54, max(shares) * 1.14, f"bound {bound}", color=COLOURS[1], va="top", fontweight="bold")
    axes.set_ylim(0, max(shares) * 1.18)
    axes.set_xlim(-0.6, len(places) + 0.1)  # room for the word beside the bound
    axes.set_xlabel("versions behind the trainer")
    axes.set_ylabel("share of tokens, %")
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y")


def _queue(axes: Axes, metrics: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title("Queue depth")
    curves = {
        label: points
        for label, name in (("ready", "groups_ready"), ("pending", "groups_pending"))
        if (points := [(record["time_s"], record[name]) for record in metrics if record.get(name) is not None])
    }
    if not curves:
        _nothing(axes, "no queue depths were recorded")
        return
    for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
        times_s, values = zip(*points, strict=True)
        axes.step(times_s, values, where="post", color=colour, linewidth=1.4, label=name)
        if colour == COLOURS[0]:
            axes.fill_between(times_s, values, step="post", color=colour, alpha=0.12, linewidth=0)
    axes.set_xlabel("seconds after the start")
    axes.set_ylabel("groups")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.locator_params(axis="y", integer=True)
    axes.grid(axis="y")
    if len(curves) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, ncols=len(curves))


def _nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=FAINT)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _series(metrics: Iterable[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of a metric; of a step done twice, the later value."""
    found = {record["step"]: record[name] for record in metrics if record.get(name) is not None}
    return sorted(found), [float(found[step]) for step in sorted(found)]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def _slices(trace: Iterable[Mapping[str, Any]]) -> list[Slice]:
    rows: dict[int, tuple[str, int]] = {}
    first: dict[str, int] = {}
    for event in trace:
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            stage = event["args"]["name"].rpartition(" (")[0] or event["args"]["name"]
            first.setdefault(stage, event["tid"])
            rows[event["tid"]] = (stage, event["tid"] - first[stage])
    slices: list[Slice] = []
    for event in trace:
        if event.get("ph") == "X" and event.get("tid") in rows:
            stage, lane = rows[event["tid"]]
            start_s, end_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            waiting = event.get("cat", "").startswith("wait")
            slices.append(Slice(stage, lane, event["name"], start_s, end_s, waiting))
    return slices


def _window(slices: Sequence[Slice]) -> tuple[float, float]:
    """Return a few training steps from the middle of the run, where it neither starts nor ends; else everything."""
    turns = sorted(each.start_s for each in slices if each.stage == TURNS and not each.waiting)
    if len(turns) > SHOWN_STEPS:
        middle = (len(turns) - SHOWN_STEPS) // 2
        return turns[middle], max(turns[middle + SHOWN_STEPS], turns[middle] + 1e-6)
    begin_s, end_s = min(each.start_s for each in slices), max(each.end_s for each in slices)
    return begin_s, max(end_s, begin_s + 1e-6)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no object")
    return content
