"""Diagram of a routed flow: stages as columns, nodes sized by capacity, ribbons coloured by data node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path as Curve

from anabranch.observe.plots.style import INK, STAGE_COLOURS, STYLE, save

#: Width of a node in columns.
NODE_WIDTH = 0.12
#: Gap between nodes, which holds their names: units of flow, and at least this share of the tallest column.
GAP, GAP_SHARE = 0.6, 0.025
#: Most letters of a name.
NAME_LENGTH = 18


def draw_flow(
    stages: int,
    stage: Mapping[str, int],
    capacity: Mapping[str, int],
    paths: Sequence[Sequence[str]],
    out: Path,
    title: str = "",
) -> None:
    """Write the diagram to the file `out`, in the format of its suffix. stages: number of relay stages.
    stage: node -> its stage, 0 for data nodes, which are drawn at both ends. capacity: relay -> microbatches;
    the unused part is pale. paths: nodes of each microbatch, stages + 2 of them. title: "" for none. Raises
    OSError if `out` cannot be written."""
    columns = _columns(stages, stage, capacity, paths)
    gap = max(GAP, GAP_SHARE * max(sum(size for _, size in column) for column in columns))
    tallest = max(sum(size + gap for _, size in column) for column in columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1.3 * (stages + 2), min(12.0, 2.5 + 0.12 * tallest)), layout="constrained")
        axes = figure.add_subplot()
        axes.axis("off")
        load = Counter(node for path in paths for node in path)
        tops = _draw_nodes(axes, columns, tallest, gap, stage, load)
        if title:
            axes.set_title(title, fontsize=10)
        _draw_ribbons(axes, tops, paths)
        for at in range(stages + 2):
            label = "data" if at in (0, stages + 1) else f"stage {at}"
            axes.text(at, -0.04 * tallest - gap, label, ha="center", va="top", fontsize=9)
        axes.set_xlim(-0.5, stages + 1.5)
        axes.set_ylim(-0.1 * tallest - 1.5, tallest + gap)
        save(figure, out, dpi="figure")


def _columns(
    stages: int, stage: Mapping[str, int], capacity: Mapping[str, int], paths: Sequence[Sequence[str]]
) -> list[list[tuple[str, float]]]:
    """Columns of the diagram from left to right, each a list of (node, height in microbatches). A data node's
    height is its flow (1 at least), a relay's its capacity."""
    through = [Counter(path[at] for path in paths) for at in range(stages + 2)]
    columns: list[list[tuple[str, float]]] = [[] for _ in range(stages + 2)]
    for name, level in stage.items():
        for at in (0, stages + 1) if level == 0 else (level,):
            size = max(1, through[at][name]) if level == 0 else max(0.3, capacity[name])
            columns[at].append((name, float(size)))
    return columns


def _draw_nodes(
    axes: Axes,
    columns: list[list[tuple[str, float]]],
    tallest: float,
    gap: float,
    stage: Mapping[str, int],
    load: Counter[str],
) -> dict[tuple[int, str], float]:
    """Draw the nodes with their names, centred in their columns; returns (column, node) -> upper edge.
    tallest: height of the tallest column. gap: between two nodes. stage: of each node. load: microbatches of
    each node, which are drawn strong."""
    colours = _colours([name for name, level in stage.items() if level == 0])
    tops: dict[tuple[int, str], float] = {}
    for at, column in enumerate(columns):
        top = (tallest + sum(size + gap for _, size in column)) / 2
        for name, size in column:
            tops[at, name] = top
            colour = colours.get(name, INK)
            used = size if stage[name] == 0 else min(size, load[name])
            for low, high, alpha in ((top - used, top, 0.8), (top - size, top - used, 0.3)):
                if high > low:
                    box = Rectangle((at - NODE_WIDTH / 2, low), NODE_WIDTH, high - low)
                    box.set(facecolor=colour, edgecolor="none", alpha=alpha)
                    axes.add_patch(box)
            label = name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"
            axes.text(at, top + 0.1, label, ha="center", va="bottom", fontsize=6.5)
            top -= size + gap
    return tops


def _draw_ribbons(axes: Axes, tops: dict[tuple[int, str], float], paths: Sequence[Sequence[str]]) -> None:
    """Draw a ribbon for each hop that microbatches of one data node take, as wide as their number and in the
    data node's colour. tops: as `_draw_nodes` returns it."""
    colours = _colours(sorted({name for column, name in tops if column == 0}))
    left, right = dict(tops), dict(tops)
    for at in range(max((len(path) for path in paths), default=1) - 1):
        amounts: dict[tuple[str, str, str], int] = defaultdict(int)
        for path in paths:
            amounts[path[at], path[at + 1], path[0]] += 1
        # Ribbons leave a node in the order of their targets and enter it in the order of their origins.
        for start, end, source in sorted(
            amounts, key=lambda hop: (-tops[at, hop[0]], -tops[at + 1, hop[1]], hop[2])
        ):
            width = amounts[start, end, source]
            y0, y1 = right[at, start], left[at + 1, end]
            right[at, start] -= width
            left[at + 1, end] -= width
            axes.add_patch(
                _ribbon(at + NODE_WIDTH / 2, y0, at + 1 - NODE_WIDTH / 2, y1, width, colours[source])
            )


def _ribbon(x0: float, y0: float, x1: float, y1: float, width: float, colour: str) -> PathPatch:
    middle = (x0 + x1) / 2
    points = [
        *((x0, y0), (middle, y0), (middle, y1), (x1, y1)),
        *((x1, y1 - width), (middle, y1 - width), (middle, y0 - width), (x0, y0 - width), (x0, y0)),
    ]
    codes = [Curve.MOVETO, *[Curve.CURVE4] * 3, Curve.LINETO, *[Curve.CURVE4] * 3, Curve.CLOSEPOLY]
    return PathPatch(Curve(points, codes), facecolor=colour, edgecolor="none", alpha=0.45)


def _colours(data_nodes: Sequence[str]) -> dict[str, str]:
    ordered = sorted(data_nodes)
    return {name: STAGE_COLOURS[1 + at % (len(STAGE_COLOURS) - 1)] for at, name in enumerate(ordered)}
