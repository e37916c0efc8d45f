"""Share of the optimal throughput that a swarm with moves keeps under 32 hours of spot preemptions.

    nice python -m benchmarks.placement.spot_preemptions --seeds 3

Who leaves and comes follows `anabranch trace`'s model of spot machines. Throughput is that of the slowest
stage, the sum of what its replicas pass. *Optimal*, at each moment: the best deal of all machines that are
there to the stages, without downloads. As in SWARM's experiment (Ryabinin et al., ICML 2023) only placement
is simulated: an iteration ends when the slowest stage has passed the batch, and whoever comes or moves serves
nobody until it has downloaded the state, and then in the open iteration if much of it is left. What is
decided is decided by the protocol's own leader: `admission` and `placement` (who comes), `stage_recovery`
(stages that are lost or down to one), `rebalancing` (moves), by passes measured with noise. `stage_moves.py`
compares this with whole iterations. Writes the result `trace`.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import msgspec

from anabranch import PROTOCOL_VERSION
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.coordinator.coordinator import LEAST_LEFT
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.rebalancing import Rebalancing
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import JoinRequest, Ready
from anabranch.protocol.recovery.snapshot_catalog import RestorePoint, SnapshotCatalog
from anabranch.protocol.recovery.stage_recovery import StageRecovery
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.sim.cluster.churn_trace import JOIN, LEAVE, SpotModel, Trace, spot_trace
from anabranch.sim.metrics.iteration_metrics import estimate
from benchmarks import harness
from benchmarks.harness import Goal, table

GOAL = 0.97
HOURS = 32.0
#: A pass of a microbatch at a machine of speed 1 takes so long (s); a batch is so many microbatches.
PASS_S, BATCH = 0.9, 400
#: Spot machines as `anabranch trace` has them by default, and such as go five times as often and come back
#: later: where nobody moves a swarm then keeps about what SWARM's kept of its 32 hours (82.7 %).
MODELS = {
    "calm": SpotModel(),
    "rough": SpotModel(bursts_per_hour=0.5, share=0.5, lone_per_hour=0.1, return_s=3600.0),
}
#: Noise of a measured pass: standard deviation of its logarithm.
NOISE = 0.03
REGIONS = 10
LEADER = "d"


@dataclass(frozen=True)
class Case:
    """machines in so many stages; speeds they have; download_s: of a stage's state."""

    machines: int
    stages: int
    speeds: tuple[float, ...] = (1.0,)
    download_s: float = 60.0
    model: str = "rough"

    @property
    def name(self) -> str:
        kinds = "equal" if len(self.speeds) == 1 else "speeds " + ", ".join(f"{s:g}" for s in self.speeds)
        return f"{self.model}, {kinds}, state in {self.download_s:g} s"


CASES = (
    Case(32, 4, model="calm"),
    Case(32, 4),
    Case(32, 4, download_s=300.0),
    Case(32, 4, (0.5, 1.0, 1.5)),
)


def optimum(speeds: Sequence[float], stages: int) -> float:
    """The greatest least sum of speeds of any deal to the stages: exact for equal ones; otherwise the best
    found, quickest first to the slowest stage, then by exchanges with it as long as these help."""
    dealt: list[list[float]] = [[] for _ in range(stages)]
    for speed in sorted(speeds, reverse=True):
        min(dealt, key=sum).append(speed)
    while len(set(speeds)) > 1:
        slow = min(dealt, key=sum)
        least = sum(slow)
        better = [
            (min(sum(stage) - a + b, least + a - b), number, a, b)
            for number, stage in enumerate(dealt)
            if stage is not slow
            for a in sorted(set(stage))
            for b in [0.0, *sorted(set(slow))]
        ]
        gain, number, a, b = max(better, default=(0.0, 0, 0.0, 0.0))
        if gain <= least + 1e-9:
            break
        dealt[number].remove(a)
        slow.append(a)
        if b:
            slow.remove(b)
            dealt[number].append(b)
    return min(map(sum, dealt))


@dataclass(frozen=True)
class Given:
    """The machines of a swarm. stages: that each begins at. pass_s: of a microbatch at a machine of speed 1;
    batch: microbatches. rest_s: what an iteration takes beside the slowest stage's computing."""

    stages: Mapping[str, int]
    speeds: Mapping[str, float]
    trace: Trace
    hours: float = HOURS
    pass_s: float = PASS_S
    batch: int = BATCH
    rest_s: float = 0.0


def drawn(case: Case, seed: int, rng: random.Random) -> Given:
    """By a seed."""
    names = [f"m{n:02d}" for n in range(case.machines)]
    speeds = {name: rng.choice(case.speeds) for name in names}
    regions = {name: str(n % REGIONS) for n, name in enumerate(names)}
    stages = {name: 1 + n % case.stages for n, name in enumerate(names)}
    return Given(stages, speeds, spot_trace(regions, HOURS, seed, MODELS[case.model]))


@dataclass(frozen=True)
class Rule:
    """rebalance: as `fleet.rebalance`. every_s: SWARM's rule, so often. returns: machines come back to the
    stage that they had."""

    rebalance: int = 0
    every_s: float = math.inf
    returns: bool = False


RULES = {
    "nobody moves, machines come back to their stage": Rule(returns=True),
    "nobody moves, joiners to the neediest stage": Rule(),
    "SWARM's rule, every 300 s": Rule(every_s=300.0),
    "ours, `fleet.rebalance = 3`": Rule(3),
    "ours, `fleet.rebalance = 1`": Rule(1),
}


class Swarm:
    """Swarm that follows a trace under one rule. given: used instead of the draw of a seed."""

    def __init__(self, case: Case, seed: int, rule: Rule, given: Given | None = None) -> None:
        self.case, self.rule = case, rule
        self.rng = random.Random(f"preemptions {case} {seed}")
        self.given = given = given or drawn(case, seed, self.rng)
        self.speed, self.trace = given.speeds, given.trace
        settings = Settings("trace", 1, case.stages, given.batch, 1 << 30, snapshot_every=1)
        settings = replace(settings, rebalance=rule.rebalance)
        self.ctx = ctx = make_context(LEADER, 1, 0, settings, LEADER)
        self.admission = Admission(ctx, Connections(ctx), "", "", "", lambda member: None, {})
        self.catalog = SnapshotCatalog(ctx)
        self.stage_recovery = StageRecovery(ctx, self.admission, self.catalog)
        self.rebalancing = Rebalancing(ctx)
        self.t, self.left, self.rest_s, self.moves = 0, float(given.batch), given.rest_s, 0
        self.step_s = 0.0
        self._opened_at = 0.0
        self.could = 0.0
        """Iterations of the optimum."""
        self.incarnation = dict.fromkeys(given.stages, 1)
        self.there = set(given.stages) - given.trace.absent
        self.former = dict(given.stages)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0
        relays = [self._member(name, stage) for name, stage in self.former.items() if name in self.there]
        members = (Member(LEADER, 0, 1, "", 1 << 20), *relays)
        self._apply(Members(1, members, {member.id: 1 for member in members}))
        self._best = self._optimum()

    # --- time ----------------------------------------------------------------------------------

    def run(self) -> float:
        """The share of the optimal throughput."""
        for change in self.trace.changes:
            follow = self._leave if change.event == LEAVE else self._join
            self._at(change.at_s, partial(follow, change.machine))
        if self.rule.every_s < math.inf:
            self._at(self.rule.every_s, self._swarm)
        end_s = 3600.0 * self.given.hours
        while self.ctx.clock.now < end_s:
            rate = self.rate()
            computing_s = self.left / rate if rate > 0.0 else math.inf
            step_at = self.ctx.clock.now + computing_s + self.rest_s
            due = self._events[0][0] if self._events else math.inf
            now = min(step_at, due, end_s)
            passed_s = now - self.ctx.clock.now
            self.could += passed_s / (self.given.rest_s + self.given.batch / self._best)
            self.rest_s -= passed_s - min(passed_s, computing_s)
            self.left -= rate * min(passed_s, computing_s)
            self.ctx.clock.now = now
            if now == due:
                heapq.heappop(self._events)[-1]()
            elif now == step_at:
                self._step()
            self._decide()
        return self.iterations / self.could

    @property
    def iterations(self) -> float:
        """So far, with a part of the open one."""
        return self.t + 1.0 - self.left / self.given.batch

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._events, (at_s, self._planned, action))

    def rate(self) -> float:
        """Microbatches a second that the slowest stage passes in the open iteration."""
        live, stages = self.ctx.run.membership.live, range(1, self.case.stages + 1)
        return min(sum(self.speed[p] for p in live(s, self.t + 1)) for s in stages) / self.given.pass_s

    def _optimum(self) -> float:
        speeds = [self.speed[machine] for machine in sorted(self.there)]
        return optimum(speeds, self.case.stages) / self.given.pass_s

    # --- events --------------------------------------------------------------------------------

    def _leave(self, machine: str) -> None:
        self.there.discard(machine)
        self._best = self._optimum()
        self.ctx.links.up.pop(machine, None)
        self.admission.remove(machine, "preempted")

    def _join(self, machine: str) -> None:
        self.there.add(machine)
        self._best = self._optimum()
        self.incarnation[machine] += 1
        self.ctx.links.up[machine] = AdaptiveTimeout(self.ctx.clock.now, 1.0)
        stage = self.former[machine] if self.rule.returns else -1
        request = JoinRequest(self._member(machine, 0), stage, PROTOCOL_VERSION, "", "")
        assert self.admission.on_join(machine, request) is None

    def _step(self) -> None:
        """The open iteration is committed, the next one open; heartbeats tell what passes take."""
        self.t, self.left, self.rest_s = self.t + 1, float(self.given.batch), self.given.rest_s
        self.step_s, self._opened_at = self.ctx.clock.now - self._opened_at, self.ctx.clock.now
        self.catalog.begin(RestorePoint(self.t, ("",) * (self.case.stages + 1), 0, on_disk=True))
        for machine in sorted(self.there):
            pass_s = self.given.pass_s / self.speed[machine] * math.exp(self.rng.gauss(0.0, NOISE))
            self.ctx.costs.of(machine).told_speed(pass_s / 3.0, 2.0 * pass_s / 3.0, 0.0, 0.0)

    def _decide(self) -> None:
        """As `Leader.consider`, where nothing is on its way."""
        for _ in range(self.case.machines):
            record = self.admission.change(self._begins)
            record = record or self._moved()
            if record is None:
                return
            self._apply(record)

    def _begins(self, stage: int, ready_t: int) -> int:
        """From which iteration somebody serves who has its state now: as `Leader._begins`, where who is ready
        has taken the last step, and what is left of the batch is left of every stage."""
        if not all(self.ctx.run.membership.count(s, self.t + 1) for s in range(self.case.stages + 1)):
            return self.t + 1
        left = self.left / self.given.batch
        soon = left >= LEAST_LEFT and left * self.step_s >= self.ctx.run.settings.newcomer_s
        return self.t + 1 if soon else self.t + 2

    def _moved(self) -> Members | None:
        settled = self.left == self.given.batch
        live, stages = self.ctx.run.membership.live, range(1, self.case.stages + 1)
        applied = {stage: live(stage, self.t) for stage in stages}
        record = self.stage_recovery.decide(self.t, settled, {}, 0.0)
        record = record or self.rebalancing.decide(self.t, settled, applied)
        assert record is None or isinstance(record, Members), "every state is on the leader's disk"
        return record

    def _swarm(self) -> None:
        """SWARM's rule: the slowest peer of the least loaded stage goes to the most loaded one."""
        live, stages = self.ctx.run.membership.live, range(1, self.case.stages + 1)
        rates = {s: sum(self.speed[p] for p in live(s, self.t + 1)) for s in stages}
        idle, busy = max(rates, key=rates.__getitem__), min(rates, key=rates.__getitem__)
        if rates[idle] > rates[busy] and len(live(idle, self.t + 1)) > 1:
            peer = min(live(idle, self.t + 1), key=lambda p: (self.speed[p], p))
            membership = self.ctx.run.membership
            moved = msgspec.structs.replace(membership.members[peer], stage=busy)
            self._apply(Members(membership.number + 1, (moved,), {}, {peer: "moves"}))
        self._at(self.ctx.clock.now + self.rule.every_s, self._swarm)

    # --- the log -------------------------------------------------------------------------------

    def _apply(self, record: Members) -> None:
        self.ctx.run.membership.apply(record)
        self.ctx.run.membership.open(self.t + 1, self.case.stages)
        for peer in record.removed:
            self.stage_recovery.forget(peer)
        for member in record.joined:
            self.moves += member.id in record.removed
            if member.id in record.active_from:
                self.ctx.links.up[member.id] = AdaptiveTimeout(0.0, 1.0)
            else:
                self._at(self.ctx.clock.now + self.case.download_s, partial(self._ready, member))

    def _ready(self, joiner: Member) -> None:
        """Whoever has its state and is still there says so."""
        if self.ctx.run.membership.members.get(joiner.id) == joiner and joiner.id in self.there:
            self.admission.on_ready(joiner.id, Ready(self.t, joiner.stage, ""), "")

    def _member(self, machine: str, stage: int) -> Member:
        forward_s = self.given.pass_s / self.speed[machine] / 3.0
        incarnation = self.incarnation[machine]
        passes = {"forward_s": forward_s, "backward_s": 2.0 * forward_s}
        return Member(machine, stage, incarnation, "", 1 << 10, **passes)


def attainable(case: Case, seed: int) -> float:
    """The same share where all who are there are dealt anew at each change, at no cost, and only who comes
    downloads the state."""
    swarm = Swarm(case, seed, Rule())
    changes = [(c.at_s, c.machine, c.event == JOIN, True) for c in swarm.trace.changes]
    changes += [(at_s + case.download_s, who, True, False) for at_s, who, joins, _ in changes if joins]
    there, able, last_s, passed, could = set(swarm.there), set(swarm.there), 0.0, 0.0, 0.0
    for at_s, who, joins, comes in sorted([*changes, (3600.0 * HOURS, "", False, True)]):
        now_s = min(at_s, 3600.0 * HOURS)
        passed += optimum([swarm.speed[m] for m in sorted(able)], case.stages) * (now_s - last_s)
        could += optimum([swarm.speed[m] for m in sorted(there)], case.stages) * (now_s - last_s)
        last_s = now_s
        if joins and comes:
            there.add(who)
        elif joins and who in there:
            able.add(who)
        elif not joins:
            there.discard(who)
            able.discard(who)
    return passed / could


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="traces of each case (default: 3)")
    args = parser.parse_args()
    rows: list[list[str]] = []
    goals: list[Goal] = []
    for case in CASES:
        for name, rule in RULES.items():
            swarms = [Swarm(case, seed, rule) for seed in range(args.seeds)]
            found, moves = estimate([swarm.run() for swarm in swarms]), fmean(s.moves for s in swarms)
            share = f"{100 * found.mean:.1f} ± {100 * found.half:.1f} %"
            if rule.rebalance:
                what = f"share of the optimum, {case.name}, {name}"
                goals.append(harness.goal(what, f"at least {100 * GOAL:.0f} %", share, found.mean >= GOAL))
            cells = [share, f"{moves / HOURS:.1f}"]
            rows.append([case.name, name, *cells])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
        best = estimate([attainable(case, seed) for seed in range(args.seeds)])
        share = f"{100 * best.mean:.1f} ± {100 * best.half:.1f} %"
        rows.append([case.name, "all dealt anew at once", share, ""])
    models = "; ".join(f"*{name}*: {_words(spot)}" for name, spot in MODELS.items())
    full_s = BATCH * PASS_S * CASES[0].stages / CASES[0].machines
    text = "\n".join(
        [
            f"Share of the optimal throughput over {HOURS:g} hours of spot preemptions ({args.seeds} traces "
            f"each, mean ± half of the 95 % interval), {CASES[0].machines} machines in {CASES[0].stages} "
            f"stages and {REGIONS} regions, iterations of {BATCH} microbatches ({full_s:.0f} s when all are "
            f"there). {models}. *Optimal*: at each moment the best deal of all who are there, downloads for "
            "nothing. SWARM's own figures, over 32 hours of real T4 preemptions, are 82.7 % without its "
            "rule and 95.8 % with it. *All dealt anew at once*: moves cost nothing, and only who comes "
            "downloads. Only placement is simulated; the decisions are the protocol's.",
            "",
            table(["preemptions, machines", "rule", "of the optimum", "moves an hour"], rows),
        ]
    )
    harness.write("trace", "Moves under spot preemptions", text, goals=goals, dry=args.dry)
    return 0


def _words(spot: SpotModel) -> str:
    return (
        f"{spot.bursts_per_hour:g} bursts an hour and region that take {spot.share:.0%} there, "
        f"{spot.lone_per_hour:g} an hour and machine alone, back after {spot.return_s / 60:g} minutes"
    )


if __name__ == "__main__":
    sys.exit(main())
