"""World map of one iteration: hosts by region and stage, the links that microbatches took, crashes.

Equal Earth projection (Šavrič, Patterson, Jenny, 2018). Links are arcs that bend to the north: great circles
would cross at the pole, where they could not be told apart.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as Outline
from numpy.polynomial import Polynomial

from anabranch.observe.geography import PLACES, Point, outlines
from anabranch.observe.plots.style import RED, STAGE_COLOURS, STYLE, save, stage_colour

#: Longitude of the map's middle.
MIDDLE = 11.0
#: Degrees between the dots that form the land.
DOTS = 1.7
#: Latitudes that are shown, and the one of regions whose position is unknown.
SHOWN, UNKNOWN_LATITUDE = (-56.0, 77.0), -48.0
#: Colours of background, sea, land and text: a night map.
SPACE, SEA, LAND, TEXT = "#0b1622", "#10202f", "#41658a", "#e6edf3"
#: Height of a link's arc as a share of its degrees of longitude, and the northernmost latitude of an arc.
RISE, NORTHMOST = 0.2, 74.0
#: Most hosts of a region that form a ring, and the largest radius of a ring or disc.
RING, LARGEST = 14, 0.14
#: Most links that are drawn at full width.
LINKS = 60
#: Alignment of a region's name unless it is below: (horizontal, vertical).
_BESIDE = {
    "Ireland": ("right", "center"), "London": ("center", "bottom"), "Frankfurt": ("left", "center"),
    "Ohio": ("center", "bottom"), "Virginia": ("left", "top"), "Seoul": ("right", "center"),
    "Tokyo": ("left", "center"), "Oregon": ("right", "center"),
}  # fmt: skip
_STYLE = {**STYLE, "axes.titlesize": 12} | dict.fromkeys(
    ("text.color", "axes.titlecolor", "legend.labelcolor"), TEXT
)
#: Coefficients of the Equal Earth projection.
_A = (1.340264, -0.081106, 0.000893, 0.003796)


def project(longitude: npt.ArrayLike, latitude: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Equal Earth projection of degrees (longitude, latitude), with MIDDLE in the middle: array of shape (2,
    shape of the arguments) with x and y in the plane. Source: Šavrič, Patterson, Jenny, 2018."""
    east = np.radians((np.asarray(longitude) - MIDDLE + 180.0) % 360.0 - 180.0)
    theta = np.arcsin(math.sqrt(3.0) / 2.0 * np.sin(np.radians(latitude)))
    y = Polynomial((0.0, _A[0], 0.0, _A[1], 0.0, 0.0, 0.0, _A[2], 0.0, _A[3]))
    x = 2.0 * math.sqrt(3.0) * east * np.cos(theta) / (3.0 * y.deriv()(theta))
    return np.stack(np.broadcast_arrays(x, y(theta)))


def draw_map(
    hosts: Mapping[str, tuple[str, int]],
    paths: Sequence[Sequence[str]],
    crashed: Collection[str],
    title: str,
    out: Path,
) -> None:
    """Write the map to the file `out`. hosts: name -> (region, stage); stage 0 is the data nodes. paths:
    hosts of each microbatch, from data node to data node. crashed: hosts to be crossed out. Raises OSError if
    `out` cannot be written."""
    places = _positions({region for region, _ in hosts.values()})
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(12.0, 5.6), layout="constrained")
        axes = figure.add_subplot()
        axes.set_aspect("equal")
        axes.axis("off")
        if any(region in PLACES for region in places):
            _draw_land(axes)
        _draw_links(axes, hosts, places, paths)
        _draw_hosts(axes, hosts, places, crashed)
        axes.set_ylim(*project(MIDDLE, SHOWN)[1])
        axes.set_xlim(*project((MIDDLE - 179.0, MIDDLE + 179.0), 0.0)[0])
        axes.set_title(title)
        many = len({stage for _, stage in hosts.values()}) > len(STAGE_COLOURS) // 2 + 2
        handles = _legend(hosts, bool(crashed))
        axes.legend(handles=handles, loc="lower left", fontsize=7 if many else 9, handlelength=1.0)
        save(figure, out, transparent=False, facecolor=SPACE)


def _positions(regions: Collection[str]) -> dict[str, Point]:
    """{region: (longitude, latitude)}; regions of unknown position form a row in the south, or in the middle
    if all are unknown."""
    found = {region: PLACES[region] for region in sorted(regions) if region in PLACES}
    others = sorted(regions - found.keys())
    latitude = UNKNOWN_LATITUDE if found else 20.0
    for at, region in enumerate(others):
        found[region] = (MIDDLE - 110.0 + 220.0 * (at + 0.5) / len(others), latitude)
    return found


def _draw_land(axes: Axes) -> None:
    latitudes = np.linspace(SHOWN[0], SHOWN[1], 40)
    west, east = project(MIDDLE - 179.99, latitudes), project(MIDDLE + 179.99, latitudes[::-1])
    axes.fill(*np.hstack((west, east)), color=SEA, linewidth=0, zorder=0)
    points: list[Point] = []
    for number, latitude in enumerate(np.arange(SHOWN[0], SHOWN[1], DOTS)):
        step = DOTS / max(0.2, math.cos(math.radians(latitude)))
        longitudes = np.arange(-180.0 + 0.5 * step * (number % 2), 180.0, step)
        points += [(float(longitude), float(latitude)) for longitude in longitudes]
    land = np.zeros(len(points), dtype=bool)
    for outline in outlines():
        land |= Outline(outline).contains_points(points)
    for lake in outlines("lakes"):
        land &= ~Outline(lake).contains_points(points)
    xs, ys = project(*np.array(points)[land].T)
    axes.plot(xs, ys, ".", color=LAND, markersize=2.6, markeredgewidth=0, zorder=1)


def _draw_links(
    axes: Axes,
    hosts: Mapping[str, tuple[str, int]],
    places: Mapping[str, Point],
    paths: Sequence[Sequence[str]],
) -> None:
    """Draw an arc per ordered pair of regions and stage of the receiver, as wide as the number of
    microbatches that went there; none within a region. places: region -> position."""
    count: Counter[tuple[str, str, int]] = Counter()
    for path in paths:
        for sender, receiver in pairwise(path):
            start, end = hosts[sender][0], hosts[receiver][0]
            if start != end:
                count[start, end, hosts[receiver][1]] += 1
    most = max(count.values(), default=1)
    thin = max(0.25, min(1.0, LINKS / max(1, len(count))))
    per_pair = Counter(frozenset((start, end)) for start, end, _ in count)
    bends: dict[frozenset[str], int] = defaultdict(int)
    for (start, end, stage), number in sorted(count.items(), key=lambda item: (-item[1], item[0])):
        pair = frozenset((start, end))
        bends[pair] += 1
        for xs, ys in _arc(places[start], places[end], bends[pair], min(0.12, 0.8 / per_pair[pair])):
            width = thin * (0.7 + 4.6 * number / most)
            for more, alpha in ((3.5 * thin, 0.10), (0.0, 0.75)):  # a glow, and the arc itself
                axes.plot(
                    xs, ys, color=stage_colour(stage), linewidth=width + more, alpha=alpha, zorder=2,
                    solid_capstyle="round",
                )  # fmt: skip


def _arc(start: Point, end: Point, number: int, apart: float) -> list[npt.NDArray[np.float64]]:
    """Projected points of an arc from `start` to `end` in the shorter direction, in pieces if it crosses the
    map's edge. number: place of the arc among those of its two regions, from 1 on; each is higher than the
    one before by the share `apart`."""
    far = (end[0] - start[0] + 180.0) % 360.0 - 180.0
    rise = abs(far) * RISE * (1.0 + apart * (number - 1)) + apart / 0.3 * number
    most = min(rise, NORTHMOST - max(start[1], end[1]))
    share = np.linspace(0.0, 1.0, 120)
    straight = start[1] + share * (end[1] - start[1])
    curve = project(start[0] + share * far, straight + most * np.sin(math.pi * share))
    return np.split(curve, np.flatnonzero(np.abs(np.diff(curve[0])) > 1.0) + 1, axis=1)


def _draw_hosts(
    axes: Axes,
    hosts: Mapping[str, tuple[str, int]],
    places: Mapping[str, Point],
    crashed: Collection[str],
) -> None:
    """Draw a dot per host around its region; data nodes are squares, crashed hosts are crossed out."""
    by_region: dict[str, list[str]] = defaultdict(list)
    for name, (region, _) in sorted(hosts.items(), key=lambda item: (item[1][1], item[0])):
        by_region[region].append(name)
    for region, names in by_region.items():
        x, y = project(*places[region])
        radius = 0.0 if len(names) == 1 else min(LARGEST, 0.030 + 0.0055 * len(names))
        small = 1.0 if len(names) <= RING else min(1.0, RING / len(names))
        for at, name in enumerate(names):
            across, up = around(at, len(names), radius)
            stage = hosts[name][1]
            axes.scatter(x + across, y + up, s=small * (62 if stage else 74), color=stage_colour(stage),
                         edgecolors=SPACE, linewidths=0.8 * small**0.5, marker="o" if stage else "s",
                         zorder=4)  # fmt: skip
            if name in crashed:
                axes.scatter(x + across, y + up, s=120 * small, color=RED, marker="x",
                             linewidths=2.6 * small**0.5, zorder=5)  # fmt: skip
        side, height = _BESIDE.get(region, ("center", "top"))
        offset = radius + 0.06
        shift = {"left": offset, "right": -offset, "bottom": offset, "top": -offset, "center": 0.0}
        axes.text(x + shift[side], y + shift[height], region, fontsize=9.5, ha=side, va=height, weight="bold",
                  zorder=6)  # fmt: skip


def around(at: int, count: int, radius: float) -> Point:
    """(x, y) offset of the dot of host `at` (from 0 on) of a region's `count` from the region's position: on
    a ring of this radius; with more than RING hosts in a sunflower disc of it."""
    if count <= RING:
        turn = 2.0 * math.pi * at / count + math.pi / 2.0
    else:
        turn, radius = at * math.pi * (3.0 - math.sqrt(5.0)), radius * math.sqrt((at + 0.5) / count)
    return radius * math.cos(turn), radius * math.sin(turn)


def _legend(hosts: Mapping[str, tuple[str, int]], crashed: bool) -> list[Line2D]:
    stages = sorted({stage for _, stage in hosts.values()})
    marks = [
        Line2D([], [], color=stage_colour(stage), marker="o" if stage else "s", linestyle="-", linewidth=2.5,
               label=f"stage {stage} and links to it" if stage else "data nodes and links to them")
        for stage in stages
    ]  # fmt: skip
    if crashed:
        mark = Line2D([], [], color=RED, marker="x", linestyle="", markeredgewidth=2.5, label="crashed")
        marks.append(mark)
    return marks
