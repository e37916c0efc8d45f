"""One iteration as a picture: what each node computed and sent when, who crashed; bars of policies side by
side, and their throughput over time.

The timeline is also written as a trace that chrome://tracing and Perfetto read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from anabranch.observe.plots import BLUE, GREEN, GRID, INK, ORANGE, RED

#: Kinds of spans, in the order of the legend.
COLOURS = {
    "forward": BLUE,
    "input gradient": ORANGE,
    "weight gradient": GREEN,
    "step": "#a371f7",
    "sending": "#7d8590",
    "gone": RED,
}
POLICY_COLOURS = (BLUE, ORANGE, GREEN, "#a371f7", "#d4557f", "#1fa3a3", "#b08c1e")
_STYLE: Any = {
    "svg.hashsalt": "anabranch",
    "svg.fonttype": "path",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "legend.labelcolor": INK,
}


@dataclass(frozen=True)
class Span:
    """What went on at a node from begin_s to end_s. text: what, more exactly."""

    node: str
    kind: str
    begin_s: float
    end_s: float
    text: str = ""


def draw_timeline(
    spans: Sequence[Span],
    nodes: Sequence[str],
    title: str,
    out: Path,
    phases: Mapping[str, float] | None = None,
) -> None:
    """One row per node in this order: computing above, sending and being gone below. phases: seconds of each
    part of the whole, in order. OSError if `out` cannot be written."""
    begin = min((span.begin_s for span in spans), default=0.0)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 0.6 + 0.32 * len(nodes)), layout="constrained")
        axes = figure.add_subplot()
        for row, node in enumerate(nodes):
            for kind, colour in COLOURS.items():
                bars = [
                    (span.begin_s - begin, span.end_s - span.begin_s)
                    for span in spans
                    if span.node == node and span.kind == kind
                ]
                low, height = (row + 0.22, 0.16) if kind in ("sending", "gone") else (row - 0.38, 0.56)
                axes.broken_barh(bars, (low, height), facecolors=colour, edgecolor="none")
        end = 0.0
        for phase, seconds in (phases or {}).items():
            axes.axvline(end, color=INK, linewidth=0.6, linestyle=":")
            if seconds:
                middle, label = end + seconds / 2, f"{phase} {seconds:.1f} s"
                axes.text(middle, -0.62, label, ha="center", va="bottom", fontsize=8)
            end += seconds
        axes.set_yticks(range(len(nodes)), nodes, fontsize=8)
        axes.set_ylim(len(nodes) - 0.4, -0.6)
        axes.set_xlabel("seconds")
        axes.set_title(title, loc="left", fontsize=11, pad=18 if phases else None)
        axes.grid(True, axis="x", color=GRID)
        axes.spines[["top", "right", "left"]].set_visible(False)
        used = {span.kind for span in spans}
        handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in used]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=6, frameon=False)
        _save(figure, out)


def draw_bars(figures: Mapping[str, tuple[float, float, float]], title: str, out: Path) -> None:
    """figures: policy -> seconds of an iteration, half of their interval, the clairvoyant bound."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(1.6 + 1.1 * len(figures), 3.6), layout="constrained")
        axes = figure.add_subplot()
        for at, (mean, half, bound) in enumerate(figures.values()):
            axes.bar(at, mean, 0.6, yerr=half or None, color=BLUE, ecolor=INK, capsize=4)
            axes.plot((at - 0.3, at + 0.3), (bound, bound), color=RED, linewidth=2)
        axes.plot((), (), color=RED, linewidth=2, label="clairvoyant bound")
        axes.set_xticks(range(len(figures)), list(figures), fontsize=8)
        axes.set_ylabel("seconds per iteration")
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(True, axis="y", color=GRID)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
        _save(figure, out)


def draw_throughput(
    lines: Mapping[str, Sequence[tuple[float, float, float, int]]], tokens: int, title: str, out: Path
) -> None:
    """lines: policy -> of each iteration its seconds, relays there (mean), the clairvoyant bound (s) and
    crashes in it. tokens: of an iteration. Above tokens per second over time, below who is there. OSError if
    `out` cannot be written."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(11, 5.2), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        top = max((tokens / row[0] for rows in lines.values() for row in rows), default=1.0)
        for number, (policy, rows) in enumerate(lines.items()):
            colour = POLICY_COLOURS[number % len(POLICY_COLOURS)]
            edges = [0.0]
            for seconds, *_ in rows:
                edges.append(edges[-1] + seconds)
            rates = [tokens / row[0] for row in rows]
            mean = tokens * len(rows) / edges[-1] if rows else 0.0
            label = f"{policy}: {mean:,.0f} tokens/s"
            upper.stairs(rates, edges, baseline=None, color=colour, linewidth=2, label=label)
            upper.stairs(rates, edges, color=colour, fill=True, alpha=0.08)
            lower.stairs([row[1] for row in rows], edges, baseline=None, color=colour, linewidth=1.8)
            struck = [(edges[at] + row[0] / 2, rates[at], row[3]) for at, row in enumerate(rows) if row[3]]
            for middle, rate, crashes in struck:
                size = 30 + 25 * crashes
                upper.scatter(middle, rate, s=size, color=RED, marker="X", zorder=3, linewidths=0)
            if number == 0:
                bounds = [tokens / row[2] for row in rows]
                upper.stairs(bounds, edges, baseline=None, color=INK, ls=":", label="clairvoyant bound")
                top = max([top, *bounds])
        upper.scatter([], [], s=55, color=RED, marker="X", label="crashes in an iteration", linewidths=0)
        upper.set_ylim(0, 1.08 * top)
        upper.set_ylabel("tokens per second")
        upper.set_title(title, loc="left", fontsize=11)
        upper.legend(frameon=False, fontsize=9, ncols=4, loc="lower right", bbox_to_anchor=(1.0, 1.0))
        lower.set_ylabel("relays there")
        lower.set_ylim(bottom=0)
        lower.set_xlabel("seconds")
        for axes in (upper, lower):
            axes.grid(True, axis="y", color=GRID)
            axes.set_axisbelow(True)
            axes.margins(x=0)
            axes.spines[["top", "right"]].set_visible(False)
        _save(figure, out)


def trace(spans: Sequence[Span], nodes: Sequence[str]) -> str:
    """Trace Event Format (JSON): one process per node, one thread for computing and one for the rest."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": at, "args": {"name": node}}
        for at, node in enumerate(nodes)
    ]
    number = {node: at for at, node in enumerate(nodes)}
    for span in spans:
        events.append(
            {
                "name": span.text or span.kind,
                "cat": span.kind,
                "ph": "X",
                "ts": round(1e6 * span.begin_s, 3),
                "dur": round(1e6 * (span.end_s - span.begin_s), 3),
                "pid": number[span.node],
                "tid": int(span.kind in ("sending", "gone")),
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _save(figure: Figure, out: Path) -> None:
    metadata: dict[str, Any] = {"Date": None} if out.suffix == ".svg" else {"Software": None}
    figure.savefig(out, dpi=160, transparent=True, metadata=metadata)
