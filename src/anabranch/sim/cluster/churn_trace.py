"""Churn traces: times at which machines leave and return, recorded or from a model of preemptions.

A trace is JSON (docs/reference/scenario.md). A machine whose first event is a join is absent at first.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from anabranch.errors import UserError
from anabranch.observe.geography import PLACES

LEAVE: Final = "leave"
JOIN: Final = "join"
#: Greatest time in a trace: a year (s).
LONGEST_S = 3.2e7
#: Evening hours, local solar time.
EVENING_H = (18.0, 23.0)


class Change(Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Departure or return of a machine. at_s: seconds since the beginning of the run. machine: name of a
    relay. event: "leave" (crash) or "join" (begin of joining)."""

    at_s: Annotated[float, Meta(ge=0.0, le=LONGEST_S)]
    machine: Annotated[str, Meta(min_length=1)]
    event: Literal["leave", "join"]


class Trace(Struct, frozen=True):
    """Departures and returns of machines, sorted by time; each machine leaves and joins in turn. Nothing is
    checked here, only by `parse_trace`. A machine whose first change is a join is absent at first. source:
    origin of the trace, in words."""

    source: str
    changes: tuple[Change, ...] = ()

    @property
    def absent(self) -> frozenset[str]:
        """Machines that are absent at the beginning: those whose first change is a join."""
        first = {change.machine: change.event for change in reversed(self.changes)}
        return frozenset(machine for machine, event in first.items() if event == JOIN)


class _TraceFile(Struct, forbid_unknown_fields=True):
    version: Literal[1]
    source: Annotated[str, Meta(pattern=r"\S")]
    changes: tuple[Change, ...]


NO_TRACE = Trace("nobody leaves or comes")


def read_trace(path: Path) -> Trace:
    """Read a churn trace from a file. Raises UserError with the file, and what is wrong where, if it cannot
    be read or parsed (`parse_trace`)."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"churn.trace: {path}: cannot be read: {error.strerror or error}") from None
    return parse_trace(text, f"churn.trace: {path}")


def parse_trace(text: str | bytes, where: str) -> Trace:
    """Churn trace of a JSON text. Raises UserError, whose message begins with `where`, for another format or
    version, for times that fall, or if a machine leaves or joins twice in a row."""
    try:
        found = msgspec.json.decode(text, type=_TraceFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where}: not a churn trace of version 1: {error}") from None
    last: dict[str, str] = {}
    for at, (before, change) in enumerate(pairwise((None, *found.changes))):
        assert change is not None
        if before is not None and change.at_s < before.at_s:
            raise UserError(f"{where}: changes[{at}].at_s: earlier than the one before it")
        if last.get(change.machine) == change.event:
            raise UserError(f"{where}: changes[{at}]: {change.machine} has done that already")
        last[change.machine] = change.event
    return Trace(found.source, found.changes)


def render_trace(trace: Trace) -> str:
    """JSON text of a churn trace, the inverse of `parse_trace`."""
    changes = ",\n  ".join(json.dumps(msgspec.structs.asdict(change)) for change in trace.changes)
    head = f'{{"version": 1, "source": {json.dumps(trace.source)}, "changes": ['
    return head + (f"\n  {changes}\n" if changes else "") + "]}\n"


@dataclass(frozen=True)
class SpotModel:
    """Model of the preemptions of spot machines. bursts_per_hour: rate of bursts in a region (a Poisson
    process). share: probability that a burst takes a machine of the region: most preemptions concern several
    machines of a zone at once (Thorpe et al., Bamboo, NSDI 2023). lone_per_hour: rate at which a single
    machine leaves. evening_per_hour: additional rate at which a machine's owner withdraws it between 18 and
    23 h local time. return_s, least_s: mean (exponential) and least time until a replacement joins. begin_h:
    time of day (UTC) when the trace begins."""

    bursts_per_hour: float = 0.15
    share: float = 0.3
    lone_per_hour: float = 0.03
    return_s: float = 1200.0
    least_s: float = 60.0
    evening_per_hour: float = 0.0
    begin_h: float = 0.0


def spot_trace(regions: Mapping[str, str], hours: float, seed: int, spot: SpotModel = SpotModel()) -> Trace:
    """Draw a churn trace of `hours` from a model of spot machines. regions: machine -> region. A machine that
    is away cannot leave again; replacements may join after the end of the hours."""
    rng = random.Random(f"spot {seed}")
    end_s = 3600.0 * hours
    strikes: list[tuple[float, str]] = []
    for region in sorted(set(regions.values())):
        there = sorted(machine for machine, where in regions.items() if where == region)
        for at_s in _poisson(rng, spot.bursts_per_hour, end_s):
            strikes += [(at_s, machine) for machine in there if rng.random() < spot.share]
    for machine in sorted(regions):
        strikes += [(at_s, machine) for at_s in _poisson(rng, spot.lone_per_hour, end_s)]
    for machine in sorted(regions) if spot.evening_per_hour else ():
        at_home = _poisson(rng, spot.evening_per_hour, end_s)
        strikes += [(at_s, machine) for at_s in at_home if _is_evening(regions[machine], spot.begin_h, at_s)]
    changes, back_s = [], dict.fromkeys(regions, -math.inf)
    for at_s, machine in sorted(strikes):
        if at_s <= back_s[machine]:
            continue
        back_s[machine] = at_s + max(spot.least_s, rng.expovariate(1.0 / spot.return_s))
        changes += [Change(at_s, machine, LEAVE), Change(back_s[machine], machine, JOIN)]
    words = ", ".join(f"{key} {value:g}" for key, value in asdict(spot).items())
    source = f"generated: spot preemptions of {len(regions)} machines, {hours:g} h, seed {seed}; {words}"
    return Trace(source, tuple(sorted(changes)))


def _is_evening(region: str, begin_h: float, at_s: float) -> bool:
    """True if the local solar time of a region is between 18 and 23 h, `at_s` seconds after the hour
    `begin_h` (UTC). A region of unknown longitude has the time of Greenwich."""
    longitude = PLACES.get(region, (0.0, 0.0))[0]
    return EVENING_H[0] <= (begin_h + at_s / 3600.0 + longitude / 15.0) % 24.0 < EVENING_H[1]


def _poisson(rng: random.Random, per_hour: float, end_s: float) -> list[float]:
    found: list[float] = []
    if per_hour <= 0.0:
        return found
    at_s = rng.expovariate(per_hour / 3600.0)
    while at_s < end_s:
        found.append(at_s)
        at_s += rng.expovariate(per_hour / 3600.0)
    return found
