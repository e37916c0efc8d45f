"""The world map: where the land is, and that what is to be seen is in the picture."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from matplotlib.path import Path as Outline

from anabranch.net.wan.profile import find_profile
from anabranch.observe.geography import PLACES, outlines
from anabranch.observe.plots.world_map import LARGEST, MIDDLE, RING, around, draw_map, project


def test_every_region_of_wan10_has_a_place_on_land_or_at_a_coast() -> None:
    assert set(find_profile("wan10").regions) <= PLACES.keys()
    for region in ("Ohio", "Frankfurt", "Oregon"):
        assert any(Outline(outline).contains_point(PLACES[region]) for outline in outlines()), region
    for sea in ((-40.0, 30.0), (-150.0, 0.0), (80.0, -30.0)):
        assert not any(Outline(outline).contains_point(sea) for outline in outlines()), sea


def test_the_projection_is_equal_earth() -> None:
    """Šavrič et al., 2018: the pole line and the equator's end."""
    assert project(MIDDLE, 0.0) == pytest.approx((0.0, 0.0))
    assert project(MIDDLE, 90.0)[1] == pytest.approx(1.3173628, rel=1e-6)
    assert project(MIDDLE + 179.999999, 0.0)[0] == pytest.approx(2.7066299, rel=1e-5)
    assert project(MIDDLE, -45.0)[1] == -project(MIDDLE, 45.0)[1]


def test_hosts_ways_and_crashes_are_in_the_picture(tmp_path: Path) -> None:
    hosts = {"d0": ("London", 0), "r1": ("Tokyo", 1), "r2": ("Oregon", 2), "r3": ("attic", 2)}
    sizes = []
    for paths, crashed in (([], []), ([["d0", "r1", "r2", "d0"]], []), ([["d0", "r1", "r2", "d0"]], ["r3"])):
        out = tmp_path / "map.svg"
        draw_map(hosts, paths, crashed, "a title", out)
        sizes.append(len(re.findall("<path", out.read_text("utf-8"))))
    assert sizes[0] < sizes[1] < sizes[2]
    draw_map({"d0": ("a", 0), "r1": ("b", 1)}, [["d0", "r1", "d0"]], [], "nowhere", tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000


@pytest.mark.parametrize("count", [1, 2, RING, RING + 1, 100])
def test_hosts_of_a_region_stand_apart_and_within_their_disc(count: int) -> None:
    places = [around(at, count, LARGEST) for at in range(count)]
    assert all(math.hypot(*place) <= LARGEST + 1e-9 for place in places)
    apart = min((math.dist(a, b) for a, b in itertools.combinations(places, 2)), default=1.0)
    assert apart > 1.3 * LARGEST / math.sqrt(count) * (0.5 if count <= RING else 1.0)
