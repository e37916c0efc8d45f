"""Profiles of wide-area networks: regions, and the latency and bandwidth between them.

A profile is a JSON object: "source" (origin of the figures), "units" (meaning of each field), "regions"
(names), "same_region" (a link) and "pairs" (a link for each unordered pair of regions, by "A-B"). A link has
one latency field and one bandwidth field, both of which name their unit: latency_s, latency_ms or latency_us,
one way, and bandwidth_bps, bandwidth_kbps, bandwidth_mbps or bandwidth_gbps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from anabranch.net.wan.shape import WanError

_LATENCY = {"latency_s": 1.0, "latency_ms": 1e-3, "latency_us": 1e-6}
_BANDWIDTH = {"bandwidth_bps": 1.0, "bandwidth_kbps": 1e3, "bandwidth_mbps": 1e6, "bandwidth_gbps": 1e9}
#: Upper limit of latencies and bandwidths, which no real network reaches in any of the units.
_HUGE = 1e15
_FIELDS = {"source", "units", "regions", "same_region", "pairs"}
#: Largest ratio of a figure to the median of all links. A larger one is nearer to a unit mistaken by a factor
#: of a thousand (milliseconds for seconds, mega for giga). Between real regions the ratio is below 15.
_FAR = math.sqrt(1000)
#: Largest ratio by which links within a region may be better, since they can be that much better.
_VERY_FAR = 1000.0


@dataclass(frozen=True)
class Link:
    """Link between two regions: one-way delay (s), rate (bit/s)."""

    delay_s: float
    rate_bps: float


@dataclass(frozen=True)
class Profile:
    """A validated profile of a network. source: origin of its figures, in words. links: by unordered pair of
    regions. same_region: link within one."""

    source: str
    regions: tuple[str, ...]
    same_region: Link
    links: Mapping[frozenset[str], Link]

    def link(self, one: str, other: str) -> Link:
        """The link between two regions, or within one. Raises WanError for an unknown region."""
        for region in (one, other):
            if region not in self.regions:
                raise WanError(f"no region {region!r} in this profile: it has {', '.join(self.regions)}")
        return self.same_region if one == other else self.links[frozenset((one, other))]


def shipped_profiles() -> tuple[str, ...]:
    folder = resources.files("anabranch.net.wan")
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json")))


def find_profile(name: str) -> Profile:
    """The shipped profile of this name; if there is none, the profile in the file with this path. Raises
    WanError as `load_profile` does."""
    if name not in shipped_profiles():
        return load_profile(Path(name))
    where = f"{name}.json"
    return parse_profile(resources.files("anabranch.net.wan").joinpath(where).read_text("utf-8"), where)


def load_profile(path: Path) -> Profile:
    """Read and check a profile. Raises WanError if it cannot be read or is no profile."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or error
        raise WanError(f"{path}: cannot be read: {why}") from None
    return parse_profile(text, str(path))


def parse_profile(text: str, where: str) -> Profile:
    """Parse and check a profile's text. Raises WanError, whose message begins with `where`."""
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WanError(f"{where}: not JSON: {error}") from None
    raw = _object(raw, where)
    if set(raw) != _FIELDS:
        odd = sorted(set(raw) ^ _FIELDS)
        raise WanError(f"{where}: must have exactly the fields {', '.join(sorted(_FIELDS))}; see {odd[0]!r}")
    source = raw["source"]
    if not isinstance(source, str) or not source.strip():
        raise WanError(f"{where}: source: must say where the figures come from")
    regions = _regions(raw["regions"], f"{where}: regions")
    same_region = _link(raw["same_region"], f"{where}: same_region")
    links: dict[frozenset[str], Link] = {}
    wanted = {f"{a}-{b}": frozenset((a, b)) for one in combinations(regions, 2) for a, b in (one, one[::-1])}
    for name, value in _object(raw["pairs"], f"{where}: pairs").items():
        if name not in wanted:
            raise WanError(f"{where}: pairs: {name!r} is not a pair of two regions, as in 'A-B'")
        if wanted[name] in links:
            raise WanError(f"{where}: pairs: {name!r} is there twice, once in the other order")
        links[wanted[name]] = _link(value, f"{where}: pairs: {name}")
    missing = [name for name, regions_of in wanted.items() if regions_of not in links]
    if missing:
        raise WanError(f"{where}: pairs: {missing[0]!r} is missing")
    _check_units(raw, f"{where}: units")
    named = {name: links[key] for name, key in wanted.items() if name in raw["pairs"]}
    _check_plausible(named, same_region, where)
    return Profile(source, regions, same_region, links)


def _object(raw: Any, where: str) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise WanError(f"{where}: must be an object")
    return raw


def _regions(raw: Any, where: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or not raw or not all(isinstance(name, str) and name for name in raw):
        raise WanError(f"{where}: must be a list of names")
    if len(set(raw)) != len(raw):
        raise WanError(f"{where}: a name is there twice")
    return tuple(raw)


def _link(raw: Any, where: str) -> Link:
    raw = _object(raw, where)
    values = []
    for kind, units in (("latency", _LATENCY), ("bandwidth", _BANDWIDTH)):
        given = [name for name in raw if name in units]
        if len(given) != 1:
            raise WanError(f"{where}: needs one of {', '.join(units)} for its {kind}")
        value = raw[given[0]]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _HUGE:
            raise WanError(f"{where}: {given[0]} must be a number above zero and below 1e15, not {value!r}")
        values.append(value * units[given[0]])
    odd = [name for name in raw if name not in _LATENCY and name not in _BANDWIDTH]
    if odd:
        raise WanError(f"{where}: unknown field {odd[0]!r}")
    return Link(*values)


def _check_units(raw: dict[str, Any], where: str) -> None:
    """Raise WanError if "units" in the profile's JSON object `raw` does not explain a field of a link. where:
    name of the profile, for the message."""
    units = _object(raw["units"], where)
    for link in (raw["same_region"], *raw["pairs"].values()):
        for name in link:
            if not isinstance(units.get(name), str):
                raise WanError(f"{where}: must say what {name!r} means")


def _check_plausible(links: Mapping[str, Link], same_region: Link, where: str) -> None:
    """Raise WanError for a latency or bandwidth so far from the median that its unit must be wrong; within a
    region links may be much better. Nothing is checked without links between regions."""
    if not links:
        return
    figures: tuple[tuple[str, Callable[[Link], float]], ...] = (
        ("latency", lambda link: link.delay_s),
        ("bandwidth", lambda link: link.rate_bps),
    )
    for kind, figure in figures:
        middle = median(figure(link) for link in links.values())
        for name, link in links.items():
            if not 1 / _FAR < figure(link) / middle < _FAR:
                raise WanError(_off(f"{where}: pairs: {name}", kind, figure(link) / middle))
        ratio = figure(same_region) / middle
        better = 1 / ratio if kind == "latency" else ratio
        if not 1 / _FAR < better < _VERY_FAR:
            raise WanError(_off(f"{where}: same_region", kind, ratio))


def _off(where: str, kind: str, ratio: float) -> str:
    return f"{where}: its {kind} is {ratio:.3g} times the median of the links: check its unit"
