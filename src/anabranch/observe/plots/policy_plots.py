"""Plots that compare policies: seconds of an iteration as bars, and throughput over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from anabranch.observe.plots.style import BLUE, INK, RED, STAGE_COLOURS, STYLE, save

#: Colours of policies, from the first on; repeated for more.
POLICY_COLOURS = (BLUE, STAGE_COLOURS[0], *STAGE_COLOURS[2:7])
_STYLE = {**STYLE, "axes.grid.axis": "y"}


def draw_bars(figures: Mapping[str, tuple[float, float, float]], title: str, out: Path) -> None:
    """Write a plot with a bar for each policy, the seconds of an iteration, to the file `out`. figures:
    policy -> (mean seconds of an iteration, half the width of its confidence interval, clairvoyant bound in
    seconds). NaN seconds: no seed finished. An interval beyond the plot is given as text only. Raises OSError
    if `out` cannot be written."""
    heights = [figure for values in figures.values() for figure in (values[0], values[2])]
    top = 1.35 * max((height for height in heights if math.isfinite(height)), default=1.0)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(1.6 + 1.3 * len(figures), 3.8), layout="constrained")
        axes = figure.add_subplot()
        for at, (mean, half, bound) in enumerate(figures.values()):
            if not math.isfinite(mean):
                axes.text(at, 0.02 * top, "did not\nfinish", ha="center", va="bottom", fontsize=9)
                continue
            axes.bar(at, mean, 0.62, yerr=half or None, color=BLUE, ecolor=INK, capsize=4)
            axes.plot((at - 0.31, at + 0.31), (bound, bound), color=RED, linewidth=2)
            label = f"{mean:.1f}" + (f"\n± {half:.1f}" if half else "")
            axes.text(
                at, 0.03 * top, label, ha="center", va="bottom", fontsize=9, color="white", weight="bold",
                bbox={"facecolor": BLUE, "edgecolor": "none", "pad": 1.5},
            )  # fmt: skip
        axes.plot((), (), color=RED, linewidth=2, label="clairvoyant bound")
        if any(half for _, half, _ in figures.values()):
            axes.plot((), (), color=INK, label="95 % over seeds")
        axes.set_ylim(0.0, top)
        axes.set_xticks(range(len(figures)), list(figures), fontsize=9)
        axes.set_ylabel("seconds per iteration")
        axes.set_title(title)
        figure.legend(fontsize=9, loc="outside lower center")
        save(figure, out)


def draw_throughput(
    lines: Mapping[str, Sequence[tuple[float, float, float, int]]], tokens: int, title: str, out: Path
) -> None:
    """Write a plot of tokens per second and relays present over time, per policy, to the file `out`. lines:
    policy -> for each iteration in order (its seconds, mean relays present, bound in seconds, crashes); the
    bound of the first policy is drawn. tokens: tokens of an iteration. Raises OSError if `out` cannot be
    written."""
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
            for at, row in enumerate(rows):
                if row[3]:
                    middle, size = edges[at] + row[0] / 2, 30 + 25 * row[3]
                    upper.scatter(middle, rates[at], s=size, color=RED, marker="X", zorder=3, linewidths=0)
            if number == 0:
                bounds = [tokens / row[2] for row in rows]
                upper.stairs(bounds, edges, baseline=None, color=INK, ls=":", label="clairvoyant bound")
                top = max([top, *bounds])
        upper.scatter([], [], s=55, color=RED, marker="X", label="crashes in an iteration", linewidths=0)
        upper.set_ylim(0, 1.08 * top)
        upper.set_ylabel("tokens per second")
        upper.set_title(title)
        figure.legend(fontsize=9, ncols=3, loc="outside lower center")
        lower.set_ylabel("relays present")
        lower.set_ylim(0.0, 1.15 * max((row[1] for rows in lines.values() for row in rows), default=1.0))
        lower.set_xlabel("seconds")
        for axes in (upper, lower):
            axes.margins(x=0)
        save(figure, out)
