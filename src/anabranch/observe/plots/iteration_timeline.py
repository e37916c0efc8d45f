"""Timeline of one iteration: computing, sending and crashes of each node, as a plot or a Perfetto trace."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from anabranch.observe.plots import style
from anabranch.observe.plots.style import GRID, INK, PINK, RED, STYLE, save

#: Kind of span -> (colour, label), in the order of the legend: computing, sending, absence.
KINDS = {
    "forward": (style.BLUE, "forward"),
    "input gradient": (style.ORANGE, "input gradient"),
    "weight gradient": (style.GREEN, "weight gradient"),
    "step": (style.PURPLE, "computing of the step"),
    "sending": (INK, "sending activations, gradients"),
    "reduce": (style.TEAL, "sending for the reduce"),
    "state": (style.OCHRE, "sending a state"),
    "gone": (RED, "gone"),
    "joining": ("#f0a8aa", "back, not yet serving"),
}
COMPUTING = frozenset({"forward", "input gradient", "weight gradient", "step"})
#: Most nodes that all get a name.
NAMES = 64
#: Height in inches of a row, and of all rows at most.
ROW_IN, ROWS_IN = 0.32, 24.0
#: Width of a letter of a phase's name as a share of the plot's width.
LETTER = 0.0065
#: Points by which a phase's name is lifted if it would overlap the one before.
LIFT_PT = 10.0


@dataclass(frozen=True)
class Span:
    """Activity of a node, of a kind in KINDS, from `begin_s` to `end_s` (s, of any clock). text: name of it
    in a trace ("": the kind)."""

    node: str
    kind: str
    begin_s: float
    end_s: float
    text: str = ""


@dataclass(frozen=True)
class Repair:
    """Microbatch that was lost with node `lost` and that node `taken_by` continued at `at_s` (s). text: which
    microbatch."""

    at_s: float
    lost: str
    taken_by: str
    text: str = ""


def draw_timeline(
    spans: Sequence[Span],
    nodes: Sequence[str],
    title: str,
    out: Path,
    phases: Mapping[str, float] | None = None,
    repairs: Sequence[Repair] = (),
    begin_s: float | None = None,
) -> None:
    """Write a plot with one row per node, in this order, to the file `out`: computing above, sending and
    absence below; gaps are idle time. A repair is a line from the lost node to the one that took the
    microbatch over. phases: phase -> its seconds, in order of time. begin_s: time shown as 0 (default: the
    first span's). Raises OSError if `out` cannot be written."""
    begin = min((span.begin_s for span in spans), default=0.0) if begin_s is None else begin_s
    phases = phases or {}
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "x", "axes.spines.left": False}):
        figure = Figure(figsize=(11, 1.1 + min(ROWS_IN, ROW_IN * len(nodes))), layout="constrained")
        axes = figure.add_subplot()
        _draw_spans(axes, spans, repairs, {node: row for row, node in enumerate(nodes)}, begin)
        lifted, end = _name_phases(axes, phases), 0.0
        for seconds in phases.values():
            axes.axvline(end, color=INK, linewidth=0.6, linestyle=":")
            end += seconds
        every = -(-len(nodes) // NAMES)
        axes.set_yticks(range(0, len(nodes), every), nodes[::every], fontsize=8)
        axes.set_ylim(len(nodes) - 0.4, -0.6)
        axes.set_xlim(left=0.0)
        axes.set_xlabel("seconds")
        axes.set_title(title, pad=18 + LIFT_PT * lifted if phases else None)
        axes.tick_params(axis="y", length=0)
        handles = _legend(spans, bool(repairs))
        figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
        save(figure, out)


def in_seconds(seconds: float, whole_s: float) -> str:
    """Duration as text: to a tenth of a second, or to a hundredth if the whole of which it is a part
    (`whole_s`) is below two seconds."""
    return f"{seconds:.1f} s" if whole_s >= 2.0 else f"{seconds:.2f} s"


def _draw_spans(
    axes: Axes, spans: Sequence[Span], repairs: Sequence[Repair], rows: Mapping[str, int], begin: float
) -> None:
    bars: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        bars[span.node, span.kind].append((span.begin_s - begin, span.end_s - span.begin_s))
        if span.kind == "gone":
            at, row = span.begin_s - begin, rows[span.node]
            axes.plot(at, row, "X", color=RED, markersize=7, markeredgewidth=0, zorder=6)
    for (node, kind), extents in bars.items():
        low, thick = (rows[node] - 0.38, 0.56) if kind in COMPUTING else (rows[node] + 0.22, 0.16)
        axes.broken_barh(extents, (low, thick), facecolors=KINDS[kind][0], edgecolor="none")
    for repair in repairs:
        ends, at = (rows[repair.lost], rows[repair.taken_by]), repair.at_s - begin
        axes.plot((at, at), ends, color=PINK, linewidth=1.0, alpha=0.7, zorder=4)
        axes.plot(at, ends[1], "o", color=PINK, markersize=4, zorder=5)


def _name_phases(axes: Axes, phases: Mapping[str, float]) -> bool:
    """Write the phases' names above the rows, each with its seconds; phases of 0 s are left out. True if some
    names are in a second line, which needs room."""
    whole_s, end, edge, lifted, any_lifted = sum(phases.values()), 0.0, -math.inf, False, False
    for phase, seconds in phases.items():
        if seconds:
            middle, label = end + seconds / 2, f"{phase} {in_seconds(seconds, whole_s)}"
            half = 0.5 * LETTER * whole_s * len(label)
            lifted = middle - half < edge and not lifted
            any_lifted = any_lifted or lifted
            axes.annotate(
                label, (middle, -0.62), (0.0, LIFT_PT * lifted), textcoords="offset points", ha="center",
                va="bottom", fontsize=8, annotation_clip=False,
            )  # fmt: skip
            edge = middle + half
        end += seconds
    return any_lifted


def _legend(spans: Sequence[Span], repairs: bool) -> list[Artist]:
    used = {span.kind for span in spans}
    handles: list[Artist] = [
        Patch(color=colour, label=label) for kind, (colour, label) in KINDS.items() if kind in used
    ]
    handles.append(Patch(facecolor="none", edgecolor=GRID, label="idle"))
    if "gone" in used:
        handles.append(Line2D([], [], color=RED, label="crash", marker="X", linestyle="", markersize=7))
    if repairs:
        label = "repair: from the lost node to its replacement"
        handles.append(Line2D([], [], color=PINK, marker="o", markersize=4, linewidth=1.0, label=label))
    return handles


def trace(spans: Sequence[Span], nodes: Sequence[str], repairs: Sequence[Repair] = ()) -> str:
    """Timeline as JSON text in the Trace Event Format, for chrome://tracing and Perfetto. Each node of
    `nodes` is a process with a thread for computing and one for the rest; a repair is an instant event of the
    node that took the microbatch over."""
    number = {node: at for at, node in enumerate(nodes)}
    events: list[dict[str, Any]] = []
    for node, pid in number.items():
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": node}})
        for tid, name in enumerate(("computing", "sending, being away")):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
    for span in spans:
        times = {"ts": _microseconds(span.begin_s), "dur": _microseconds(span.end_s - span.begin_s)}
        place = {"pid": number[span.node], "tid": int(span.kind not in COMPUTING)}
        events.append({"name": span.text or span.kind, "cat": span.kind, "ph": "X", **times, **place})
    for repair in repairs:
        place = {"pid": number[repair.taken_by], "tid": 0}
        details = {"ts": _microseconds(repair.at_s), "args": {"lost with": repair.lost}}
        name = f"repair: {repair.text}"
        events.append({"name": name, "cat": "repair", "ph": "i", "s": "p", **place, **details})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
