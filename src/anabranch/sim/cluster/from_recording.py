"""Scenario from a run's event log: measured machines and links, and the churn of the run."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from anabranch.config import RunConfig
from anabranch.errors import UserError
from anabranch.observe.events import (
    Event,
    PeerJoined,
    PeerRemoved,
    Step,
    Suspected,
    Timing,
    Unknown,
    Vitals,
)
from anabranch.protocol.interface.settings import HEARTBEAT_S
from anabranch.sim.cluster.churn_trace import JOIN, LEAVE, Change, Trace
from anabranch.sim.cluster.device_model import WirePart
from anabranch.sim.cluster.machine_spec import MachinePart
from anabranch.sim.cluster.scenario import Scenario
from anabranch.sim.cluster.scenario_schema import ChurnPart, FleetPart, ModelPart, NetworkPart, RunPart

#: Precision of computing: name in a run file -> name in a scenario.
DTYPES = {"fp32": "fp32", "bf16": "fp16"}
#: Greatest factor between a link and the median that a network profile allows; others are clipped.
FAR = 30.0
#: Latency (s, one way) and bandwidth (bits per second) if no link was measured (a choice).
UNKNOWN_S, UNKNOWN_BPS = 0.05, 1e8
#: A removal within so many seconds after a suspicion is dated to the last message of the peer.
SUSPECTED_S = 60.0
#: Share of the steps that count as warm-up.
WARM_UP = 0.25


@dataclass(frozen=True)
class RecordedRun:
    """Scenario made from a recorded run. profile: network profile (JSON). trace: churn of the run. The caller
    writes both to files and enters their paths, which `scenario` lacks. iteration_s: mean seconds of a
    recorded iteration after the warm-up. policy: routing policy of the run."""

    scenario: Scenario
    profile: dict[str, Any]
    trace: Trace
    iteration_s: float
    policy: str


class _EventsByPeer:
    """Events of a log that a scenario is made from, by peer; steps by iteration. removed: times (s) at which
    the peer was removed; if it was suspected shortly before, the time of the last message that was heard from
    it instead."""

    def __init__(self, events: Iterable[Event | Unknown]) -> None:
        self.joined: dict[str, list[PeerJoined]] = defaultdict(list)
        self.removed: dict[str, list[float]] = defaultdict(list)
        self.timings: dict[str, list[Timing]] = defaultdict(list)
        self.vitals: dict[str, list[Vitals]] = defaultdict(list)
        self.steps: dict[int, Step] = {}
        heard: dict[str, tuple[float, float]] = {}
        for event in events:
            match event:
                case PeerJoined():
                    self.joined[event.subject].append(event)
                case Suspected(verdict="suspected"):
                    heard[event.subject] = (event.time, event.time - event.silence_s)
                case PeerRemoved():
                    suspected_at, heard_at = heard.get(event.subject, (0.0, 0.0))
                    recent = event.time - suspected_at < SUSPECTED_S
                    self.removed[event.subject].append(heard_at if recent else event.time)
                case Timing():
                    self.timings[event.peer].append(event)
                case Vitals():
                    self.vitals[event.peer].append(event)
                case Step():
                    self.steps[event.t] = event
                case _:
                    pass


#: Keys of the model section that a scenario has too, or that do not change how long tasks take.
NOT_SHAPES = ("size", "initial_weights", "vocab_size", "initial_std", "subspace")


def recorded(events: Iterable[Event | Unknown], config: RunConfig, name: str) -> RecordedRun:
    """Make a scenario from a run's events. It has synchronous steps only: rounds, and machines that nobody
    could dial, are not taken over. config: the run's run file. name: name of the scenario, with which errors
    begin. Raises UserError if the log has fewer than two steps or no timings, or the run has a model, dtype
    or pipeline that is not simulated."""
    log = _EventsByPeer(events)
    steps = [log.steps[t] for t in sorted(log.steps)]
    if len(steps) < 2 or not log.timings:
        raise UserError(f"{name}: the event log holds fewer than two steps with their timings: run it on")
    own = [f.name for f in fields(config.model) if f.name not in NOT_SHAPES]
    changed = [key for key in own if getattr(config.model, key) is not None]
    if changed:
        raise UserError(f"{name}: model.{changed[0]} is the run's own: only named sizes are simulated")
    if config.pipeline.whole:
        raise UserError(f"{name}: pipeline.stages = 0: only recorded pipelines are simulated")
    if config.compute.dtype not in DTYPES:
        raise UserError(f"{name}: compute.dtype = {config.compute.dtype!r} is none of {', '.join(DTYPES)}")
    names = _names(log)
    machines = tuple(_machine(log, peer, names[peer], steps) for peer in _in_order(log))
    warm_up = int(len(steps) * WARM_UP)
    batch, fleet, wire = config.batch, config.fleet, config.wire
    scenario = Scenario(
        name,
        ModelPart(
            config.model.size,
            config.pipeline.stages,
            batch.rows,
            batch.sequence,
            batch.microbatches,
            DTYPES[config.compute.dtype],
            config.model.subspace or 0,
        ),
        FleetPart(
            recompute=fleet.recompute,
            rebalance=min(fleet.rebalance, 100_000),
            spread=fleet.spread,
            spare=fleet.spare,
        ),
        machines,
        NetworkPart(),
        ChurnPart(spare_last=False),
        wire=WirePart(wire.activations, wire.gradients, wire.reduce, wire.block),
        run=RunPart(
            len(steps), warm_up, HEARTBEAT_S, config.iteration.delay,
            min(config.snapshots.every, 100_000), min(config.snapshots.copies, 64),
        ),
    )
    iteration_s = statistics.mean(step.seconds for step in steps[warm_up:])
    profile, trace = _profile(log, names, name), _trace(log, names, steps[0])
    return RecordedRun(scenario, profile, trace, iteration_s, config.routing.policy)


def _in_order(log: _EventsByPeer) -> list[str]:
    """Peers that joined and whose tasks were measured, sorted by stage and name."""
    peers = [peer for peer in log.joined if peer in log.timings]
    return sorted(peers, key=lambda peer: (log.joined[peer][-1].stage, log.joined[peer][-1].name, peer))


def _names(log: _EventsByPeer) -> dict[str, str]:
    """Peer -> name in the scenario, for each peer that joined: its own name, made unique, or the begin of its
    id."""
    found: dict[str, str] = {}
    for peer in log.joined:
        name = log.joined[peer][-1].name or peer[:8]
        found[peer] = f"{name}.{peer[:6]}" if name in found.values() else name
    return found


def _machine(log: _EventsByPeer, peer: str, name: str, steps: Sequence[Step]) -> MachinePart:
    """Machine that a peer ran on, under this name. Its seconds are medians over the peer's measured steps:
    per microbatch, or per step (reduce, apply); 0 where nothing was measured."""
    joined = log.joined[peer][-1]
    timings = [each for each in log.timings[peer] if each.t in log.steps]
    counts = {step.t: list(step.owners.get(joined.stage, {}).values()).count(peer) for step in steps}

    def of_one(key: str) -> float:
        share = 2 if joined.stage == 0 else 1  # a data node has two units of each microbatch
        each: list[float] = [share * getattr(one, key) / counts[one.t] for one in timings if counts[one.t]]
        return round(statistics.median(each), 7) if each else 0.0

    def of_step(key: str) -> float:
        each: list[float] = [getattr(one, key) for one in timings]
        return round(statistics.median(each or [0.0]), 7)

    return MachinePart(
        name=name,
        region=joined.region or name,
        role="relay" if joined.stage else "data",
        stage=joined.stage,
        capacity=min(joined.capacity, 1024),
        up_bps=1e13,
        down_bps=1e13,
        forward_s=of_one("forward_s"),
        input_gradient_s=of_one("input_gradient_s"),
        weight_gradient_s=of_one("weight_gradient_s"),
        reduce_s=of_step("reduce_s"),
        apply_s=of_step("apply_s"),
    )


# --- links --------------------------------------------------------------------------------------------


def _profile(log: _EventsByPeer, names: Mapping[str, str], run: str) -> dict[str, Any]:
    """Network profile (JSON) measured in a run. names: peer -> name. A peer that named no region is a region
    of its own. run: name of the run, for the profile's source."""
    region = {peer: log.joined[peer][-1].region or name for peer, name in names.items()}
    trips: dict[frozenset[str], list[float]] = defaultdict(list)
    rates: dict[frozenset[str], list[float]] = defaultdict(list)
    for peer, vitals in log.vitals.items():
        for each in vitals:
            for found, measured in ((trips, each.trips), (rates, each.rates)):
                for other, value in measured.items():
                    if peer in region and other in region and value > 0.0:
                        found[frozenset((region[peer], region[other]))].append(value)
    regions = sorted(set(region.values()))
    pairs = {f"{a}-{b}": frozenset((a, b)) for at, a in enumerate(regions) for b in regions[at + 1 :]}
    latency_s, bandwidth_bps = _medians(trips, pairs, UNKNOWN_S * 2), _medians(rates, pairs, UNKNOWN_BPS)

    def link(key: frozenset[str] | None) -> dict[str, float]:
        trip_s, rate_bps = latency_s[key], bandwidth_bps[key]
        return {"latency_ms": round(500.0 * trip_s, 6), "bandwidth_mbps": round(rate_bps / 1e6, 6)}

    return {
        "source": f"measured by the peers of the run {run}: medians of round trips and of what payloads got",
        "units": {
            "latency_ms": "milliseconds, one way: half of a round trip",
            "bandwidth_mbps": "megabits per second, of both directions together",
        },
        "regions": regions,
        "same_region": link(None),
        "pairs": {name: link(key) for name, key in pairs.items()},
    }


def _medians(
    found: Mapping[frozenset[str], Sequence[float]], pairs: Mapping[str, frozenset[str]], unknown: float
) -> dict[frozenset[str] | None, float]:
    """Median measurement of each pair of regions, and under the key None that of all pairs inside one region.
    found: measurements by pair of regions (one element: inside a region). pairs: the pairs that are wanted,
    by name. A pair that nobody measured gets the median of the medians, or `unknown` if nothing at all was
    measured. All are limited to a factor FAR around the median of the medians."""
    inside = [value for key, values in found.items() if len(key) == 1 for value in values]
    known = {key: statistics.median(values) for key, values in found.items() if len(key) == 2}
    middle = statistics.median(known.values()) if known else statistics.median(inside or [unknown])
    result: dict[frozenset[str] | None, float] = {
        key: min(max(known.get(key, middle), middle / FAR), middle * FAR) for key in pairs.values()
    }
    result[None] = min(max(statistics.median(inside), middle / FAR), middle * FAR) if inside else middle
    return result


# --- churn --------------------------------------------------------------------------------------------


def _trace(log: _EventsByPeer, names: Mapping[str, str], first: Step) -> Trace:
    """Churn trace of a run: departures and returns of its measured relays, in seconds since its first
    iteration began. Relays that joined before that iteration ended are there from the beginning."""
    begun_at = first.time - first.seconds
    changes: list[Change] = []
    for peer in _in_order(log):
        if not log.joined[peer][-1].stage:
            continue
        changed = [(each.time - begun_at, JOIN) for each in log.joined[peer]]
        changed += [(at - begun_at, LEAVE) for at in log.removed[peer]]
        present = False
        for at_s, event in sorted(changed):
            if event == JOIN and not present and at_s > first.seconds:
                changes.append(Change(at_s, names[peer], JOIN))
            elif event == LEAVE and present:
                changes.append(Change(max(0.0, at_s), names[peer], LEAVE))
            present = event == JOIN
    return Trace("recorded: the run's own event log", tuple(sorted(changes)))


# --- the file -----------------------------------------------------------------------------------------


def render_scenario(scenario: Scenario) -> str:
    """TOML text of a recorded scenario, which `parse_scenario` reads. Keys at their defaults are not written;
    the sections [round] and [precision], which such a scenario leaves at their defaults, are not, either."""
    lines = ["[anabranch]", "version = 1"]
    for part in ("model", "fleet", "network", "churn", "drift", "wire", "run"):
        lines += ["", f"[{part}]", *_keys(getattr(scenario, part))]
    for machine in scenario.machines:
        lines += ["", "[[machines]]", *_keys(machine)]
    return "\n".join(lines) + "\n"


def _keys(part: Any) -> list[str]:
    """TOML lines of those keys of a part of the scenario that differ from their defaults."""
    default = type(part)()
    values = {each.name: getattr(part, each.name) for each in fields(part)}
    return [f"{key} = {json.dumps(value)}" for key, value in values.items() if value != getattr(default, key)]
