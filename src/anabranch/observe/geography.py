"""Rough outlines of the continents and the positions of regions, from `geography.json`; all in degrees.

The outlines are drawn by hand with a vertex every few hundred kilometres. The page gets the same file.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

Point = tuple[float, float]
"""(longitude, latitude)."""


@cache
def geography_json() -> str:
    """Text of `geography.json`: outlines and lakes as lists of coordinates, regions and cities as points."""
    return (resources.files(__package__) / "geography.json").read_text("utf-8")


def outlines(kind: str = "outlines") -> list[list[Point]]:
    """Closed polygons (longitude, latitude in degrees) of the land, or of large lakes (kind "lakes")."""
    shapes: dict[str, list[float]] = json.loads(geography_json())[kind]
    return [list(zip(values[::2], values[1::2], strict=True)) for values in shapes.values()]


#: Positions of the regions of the shipped network profiles.
PLACES: dict[str, Point] = {
    region: (longitude, latitude)
    for region, (longitude, latitude) in json.loads(geography_json())["regions"].items()
}
