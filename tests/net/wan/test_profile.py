"""Profiles of wide-area networks: what is refused, and how it is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anabranch.net.wan.profile import Link, find_profile, load_profile, parse_profile
from anabranch.net.wan.shape import WanError

LINK = {"latency_ms": 20, "bandwidth_mbps": 500}
SMALL: dict[str, Any] = {
    "source": "made up for tests",
    "units": {"latency_ms": "milliseconds, one way", "bandwidth_mbps": "megabits per second"},
    "regions": ["north", "south", "far-east"],
    "same_region": {"latency_ms": 1, "bandwidth_mbps": 1000},
    "pairs": {"north-south": LINK, "far-east-north": LINK, "south-far-east": LINK},
}


def test_ten_regions() -> None:
    profile = find_profile("wan10")
    assert len(profile.regions) == 10 and len(profile.links) == 45
    assert "DT-FM" in profile.source
    there = profile.link("Oregon", "Sydney")
    assert there == profile.link("Sydney", "Oregon") == Link(delay_s=0.139, rate_bps=0.36e9)
    assert profile.link("Ohio", "Ohio") == Link(delay_s=0.01, rate_bps=2e9)
    with pytest.raises(WanError, match="no region 'Atlantis'"):
        profile.link("Ohio", "Atlantis")


def test_units_are_those_of_the_fields() -> None:
    raw = json.loads(json.dumps(SMALL))
    raw["units"] = dict.fromkeys(("latency_s", "latency_ms", "bandwidth_mbps", "bandwidth_bps"), "so")
    raw["pairs"]["north-south"] = {"latency_s": 0.02, "bandwidth_bps": 5e8}
    profile = parse_profile(json.dumps(raw), "x")
    assert profile.link("north", "south") == profile.link("far-east", "south")


def _set(*path: str) -> Callable[[dict[str, Any], Any], None]:
    def change(raw: dict[str, Any], value: Any) -> None:
        for name in path[:-1]:
            raw = raw[name]
        if value is None:
            del raw[path[-1]]
        else:
            raw[path[-1]] = value

    return change


PAIR = ("pairs", "north-south")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("source",), " ", "source: must say where"),
        (("source",), None, "exactly the fields"),
        (("author",), "me", "exactly the fields .* see 'author'"),
        (("regions",), ["north", "north", "south"], "regions: a name is there twice"),
        (("regions",), [], "regions: must be a list"),
        (PAIR, None, "'north-south' is missing"),
        (("pairs", "south-north"), LINK, "'south-north' is there twice"),
        (("pairs", "north-north"), LINK, "'north-north' is not a pair"),
        ((*PAIR, "latency_ms"), None, "north-south: needs one of latency_s"),
        ((*PAIR, "latency_s"), 0.02, "north-south: needs one of latency_s"),
        ((*PAIR, "latency_ms"), "20", "latency_ms must be a number above zero and below 1e15, not '20'"),
        ((*PAIR, "latency_ms"), -1, "north-south: latency_ms must be"),
        ((*PAIR, "latency_ms"), True, "north-south: latency_ms must be"),
        ((*PAIR, "latency_ms"), float("nan"), "north-south: latency_ms must be"),
        ((*PAIR, "latency_ms"), 10**400, "north-south: latency_ms must be"),
        ((*PAIR, "loss"), 0.1, "north-south: unknown field 'loss'"),
        ((*PAIR, "latency_ms"), 20_000, "north-south: its latency is 1e[+]03 times"),
        ((*PAIR, "latency_ms"), 0.02, "north-south: its latency is 0.001 times"),
        ((*PAIR, "bandwidth_mbps"), 0.5, "north-south: its bandwidth is 0.001 times"),
        (("same_region", "latency_ms"), 1000, "same_region: its latency is 50 times"),
        (("same_region", "latency_ms"), 0.001, "same_region: its latency is 5e-05 times"),
        (("units", "latency_ms"), None, "units: must say what 'latency_ms' means"),
    ],
)
def test_refused_by_name(path: tuple[str, ...], value: Any, words: str) -> None:
    raw = json.loads(json.dumps(SMALL))
    _set(*path)(raw, value)
    with pytest.raises(WanError, match=f"^x: .*{words}"):
        parse_profile(json.dumps(raw), "x")


@pytest.mark.parametrize("factor", [1e-3, 1e3])
@pytest.mark.parametrize("field", ["latency_ms", "bandwidth_gbps"])
def test_every_slip_of_a_thousand_in_the_ten_regions_is_found(field: str, factor: float) -> None:
    from importlib import resources

    text = resources.files("anabranch.net.wan").joinpath("wan10.json").read_text("utf-8")
    for name in json.loads(text)["pairs"]:
        raw = json.loads(text)
        raw["pairs"][name][field] *= factor
        with pytest.raises(WanError, match=f"pairs: {name}: its {field.split('_')[0]} is"):
            parse_profile(json.dumps(raw), "x")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "wan.json"
    with pytest.raises(WanError, match="cannot be read"):
        load_profile(path)
    path.write_text("{", "utf-8")
    with pytest.raises(WanError, match=r"wan\.json: not JSON"):
        load_profile(path)
    path.write_text(json.dumps(SMALL), "utf-8")
    assert load_profile(path).regions == ("north", "south", "far-east")
