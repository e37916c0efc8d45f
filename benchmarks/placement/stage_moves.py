"""Gain of moves between stages under spot preemptions, by whole iterations of the protocol.

    nice python -m benchmarks.placement.stage_moves --hours 8

The whole protocol in the simulator (`anabranch simulate`): machines that leave and come as
`spot_preemptions.py` draws it (*rough*), dispatch, repairs, reduces and states over the links of ten regions,
nobody spared. Beside it, on the same trace, that model, in which the slowest stage alone counts. How long an
iteration takes besides is measured without preemptions, with all machines and with half of them. In the model
a machine that comes or moves serves after the mean time that this took in the simulator.
Writes the result `moves`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import msgspec

from anabranch.net.wan.profile import find_profile
from anabranch.protocol.interface import events as ev
from anabranch.protocol.log.records import Commit, Members, Rollback, decode_entry
from anabranch.sim.cluster.churn_trace import Trace, spot_trace
from anabranch.sim.cluster.scenario import Fleet, fleet_of, load_scenario
from anabranch.sim.experiment.modelled_world import member_of
from anabranch.sim.experiment.run import EVENTS_MAX, Simulation, simulate
from anabranch.sim.kernel.simulated_peer import Node
from benchmarks import harness
from benchmarks.harness import table
from benchmarks.placement.spot_preemptions import MODELS, Case, Given, Rule, Swarm

#: Twelve microbatches for each replica, and passes so long that computing is most of an iteration.
SCENARIO: dict[str, Any] = {
    "model.stages": 4,
    "model.microbatches": 72,
    "fleet.relays": 24,
    "fleet.park": 1.0,
    "churn.spare_last": False,
    "run.iterations": 100_000,
    "run.warm_up": 0,
    "run.heartbeat_s": 5.0,
}
#: Share of a T4 at two fifths of its peak that a machine of speed 1 has.
SPEED = 0.2
KINDS = {"equal": (1.0,), "speeds 0.5, 1, 1.5": (0.5, 1.0, 1.5)}
RULES = {
    "nobody moves, joiners get the stage they are given": Rule(),
    "`fleet.rebalance = 1`": Rule(1),
    "`fleet.rebalance = 3`": Rule(3),
}
#: The trace is followed from its so manieth hour on: in the first all machines are there.
BEGIN_H = 4.0
#: Iterations without preemptions, and how many of them are not counted.
CALM, WARM_UP = 8, 3


class Whole(Simulation):
    """Simulation in which a relay that comes back asks for any stage."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.logged: list[float] = []
        """When each entry of the log was."""
        super().__init__(fleet, "auction", seed)

    def _start(self, relay: str) -> None:
        former = self.world.nodes.get(relay)
        incarnation = former.member.incarnation + 1 if former is not None else 1
        member = msgspec.structs.replace(member_of(self.fleet, relay, incarnation), stage=-1)
        self.world.add(member, self.leader.id, self.world.clock.now)

    def _watch(self, node: Node, event: ev.Event) -> None:
        super()._watch(node, event)
        self.logged += [self.world.clock.now] * (len(self.world.log) - len(self.logged))

    def until(self, end_s: float) -> None:
        """Raises RuntimeError where the run ends before."""
        try:
            self.world.run(end_s, EVENTS_MAX)
        except TimeoutError:
            if self.world.clock.now > end_s:
                return
        raise RuntimeError(f"it ended after {self.world.clock.now:.0f} s")


@dataclass(frozen=True)
class Found:
    """Outcome of a run. iterations: with a part of the open one. away_s: from coming back, or from the
    record of a move, until the state is there, on average."""

    iterations: float
    moves: int
    rollbacks: int
    away_s: float


def simulated(fleet: Fleet, seed: int, rule: Rule, hours: float) -> Found:
    scenario = replace(fleet.scenario, fleet=replace(fleet.scenario.fleet, rebalance=rule.rebalance))
    whole = Whole(replace(fleet, scenario=scenario), seed)
    whole.until(3600.0 * hours)
    t, committed, moves, rollbacks, away_s = 0, [0.0], 0, 0, list[float]()
    since = dict[str, float]()
    for at, line in zip(whole.logged, whole.world.log, strict=True):
        record = decode_entry(line).record
        if isinstance(record, Commit):
            t = record.t
            committed.append(at)
        elif isinstance(record, Rollback):
            t, rollbacks = record.t, rollbacks + 1
        elif isinstance(record, Members):
            for member in record.joined:
                back = [came for relay, came in whole.returned if relay == member.id and came <= at]
                moved = member.id in record.removed
                since[member.id] = at if moved or not back else back[-1]
                moves += moved
            away_s += [at - since.pop(peer) for peer in record.active_from if peer in since and t]
    usual_s = (committed[-1] - committed[0]) / (len(committed) - 1)
    part = min(1.0, (3600.0 * hours - committed[-1]) / usual_s)
    return Found(t + part, moves, rollbacks, fmean(away_s or [0.0]))


@dataclass(frozen=True)
class Calm:
    """Duration of an iteration where nobody leaves: rest_s, and a pass at a machine of speed 1."""

    rest_s: float
    pass_s: float


def calm(relays: int) -> Calm:
    """From iterations with all machines of speed 1, and with half of them."""
    full_s, half_s = (_calm_s(count) for count in (relays, relays // 2))
    share = SCENARIO["model.microbatches"] * SCENARIO["model.stages"] / relays
    return Calm(2.0 * full_s - half_s, (half_s - full_s) / share)


def _calm_s(relays: int) -> float:
    changes = {"fleet.relays": relays, "fleet.speed": [SPEED], "run.iterations": CALM}
    outcome = simulate(load_scenario("wan10", SCENARIO | changes), find_profile("wan10"), "auction", 0)
    assert not outcome.failure
    return fmean(row.seconds for row in outcome.rows[WARM_UP:])


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of traces (default: 0)")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=[*KINDS])
    parser.add_argument("--hours", type=float, default=8.0, help="virtual ones of each (default: 8)")
    args = parser.parse_args()
    usual = calm(SCENARIO["fleet.relays"])
    print(usual, file=sys.stderr, flush=True)
    rows = [
        row
        for kind in args.kinds
        for seed in args.seeds
        for row in compared(kind, seed, args.hours, usual)
    ]
    relays, stages, batch = (SCENARIO[key] for key in ("fleet.relays", "model.stages", "model.microbatches"))
    full_s = usual.rest_s + batch * usual.pass_s * stages / relays
    text = "\n".join(
        [
            f"The whole protocol in virtual time over {args.hours:g} hours of the *rough* preemptions of "
            f"result `trace` (from hour {BEGIN_H:g} on): {relays} relays in {stages} stages and ten "
            f"regions, {batch} microbatches, {full_s:.0f} s an iteration when all are there, of which "
            f"{usual.rest_s:.0f} s are not the slowest stage's computing; nobody is spared. *By the model*: "
            "`spot_preemptions.py` on the same trace. *Optimum*: of both, at each moment the best deal of "
            "all who are there, downloads for nothing. *Gain*: over joiners alone. *Away*: from coming back, "
            "or moving, until one has its state, on average, which the model is told. What an iteration "
            "takes besides is taken to be the same whoever is there: more than the optimum can come of that.",
            "",
            table(HEAD, rows),
        ]
    )
    harness.write("moves", "Moves, by whole iterations", text, dry=args.dry)
    return 0


HEAD = (
    "machines, trace", "rule", "iterations an hour", "gain", "by the model", "of the optimum", "by the model",
    "moves an hour", "by the model", "away s", "rollbacks",
)  # fmt: skip


def preempted(kind: str, seed: int, hours: float) -> Fleet:
    """Those who are there when it begins are dealt to the stages in turn."""
    speeds = [SPEED * speed for speed in KINDS[kind]]
    fleet = fleet_of(load_scenario("wan10", SCENARIO | {"fleet.speed": speeds}), find_profile("wan10"), seed)
    relays = [host for host in fleet.hosts.values() if host.stage]
    regions = {host.id: host.region for host in relays}
    whole = spot_trace(regions, BEGIN_H + hours, seed, MODELS["rough"])
    begin_s = 3600.0 * BEGIN_H
    changes = (replace(one, at_s=one.at_s - begin_s) for one in whole.changes if one.at_s >= begin_s)
    trace = Trace(whole.source, tuple(changes))
    relays.sort(key=lambda host: host.id in trace.absent)
    stages = fleet.scenario.model.stages
    dealt = {host.id: replace(host, stage=1 + n % stages) for n, host in enumerate(relays)}
    return replace(fleet, hosts={**fleet.hosts, **dealt}, trace=trace)


def compared(kind: str, seed: int, hours: float, usual: Calm) -> list[list[str]]:
    """A row for each rule."""
    fleet = preempted(kind, seed, hours)
    relays = {host.id: host for host in fleet.hosts.values() if host.stage}
    given = Given(
        {name: host.stage for name, host in relays.items()},
        {name: host.machine.speed / SPEED for name, host in relays.items()},
        fleet.trace,
        hours,
        usual.pass_s,
        fleet.scenario.model.microbatches,
        usual.rest_s,
    )
    found: dict[str, Found] = {}
    for name, rule in RULES.items():
        found[name] = simulated(fleet, seed, rule, hours)
        print(kind, seed, name, found[name], f"{time.process_time():.0f} s", file=sys.stderr, flush=True)
    away_s = fmean(one.away_s for one in found.values())
    case = Case(len(relays), fleet.scenario.model.stages, KINDS[kind], away_s)
    swarms = {name: Swarm(case, seed, rule, given) for name, rule in RULES.items()}
    shares = {name: swarm.run() for name, swarm in swarms.items()}
    rows, at_rest = [], next(iter(RULES))
    for name, one in found.items():
        swarm = swarms[name]
        cells = [
            f"{one.iterations / hours:.1f}",
            f"{100.0 * (one.iterations / found[at_rest].iterations - 1.0):+.1f} %",
            f"{100.0 * (shares[name] / shares[at_rest] - 1.0):+.1f} %",
            f"{100.0 * one.iterations / swarm.could:.1f} %",
            f"{100.0 * shares[name]:.1f} %",
            f"{one.moves / hours:.1f}",
            f"{swarm.moves / hours:.1f}",
            f"{one.away_s:.0f}",
            str(one.rollbacks),
        ]
        rows.append([f"{kind}, {seed}", name, *cells])
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
