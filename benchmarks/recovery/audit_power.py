"""Power of audits: share of lying relays that are out within 200 of their units, beside the formula.

    nice python -m benchmarks.recovery.audit_power [--liars 20000] [--convictions 480] [--runs 100]

One of three replicas of a simulated stage computes one unit of ten falsely: its weight gradient in half of
the runs, its activation in the other half. The seed decides which units. It signs what it sends, so only an
audit can find it. The simulated workers compute with integers; the messages, draws, audits and verdicts are
those of real peers. An audit draws *contributions*: all units of one relay in one step, with a probability
that grows with their number (`draw.chance`). So runs differ in the number of units that a relay has in a
step. A run ends when the liar's key is revoked, or with its 200th unit in a committed step.

Whether a liar is out depends on two things that are independent of each other: when a false contribution of
it is drawn, and whether, and how many of its units later, it is out then. The probability of the first is
computed exactly, and tried with many liars and made-up commits by the function that draws in a run; the
second is measured in runs in which each contribution is drawn. Both together give the probability, and the
interval is that of the measured part. Some whole runs with the share itself stand beside it. Four units a
step are what the swarm of `audit_cost` has.

Each outcome is kept in build/audit-power/, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import cast

import msgspec

from anabranch.protocol.audit.draw import chance, drawn
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.protocol.log.records import Commit, Revoke, StageCommit, decode_entry, entry_hash
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_worker import IntegerWorker
from anabranch.sim.workers.integer_world import Machine, counting_world
from benchmarks import harness
from benchmarks.harness import Goal, table

#: Contributions that are audited, units that are false, units of the liar in a run, and the share of liars
#: that are to be out by then: the acceptance of issue 22.
SHARE, FALSE, UNITS, ASKED = 0.05, 0.1, 200, 0.63
#: Units that each relay has in a step (the capacity of a relay, and a third of the batch) -> multiple of
#: `--runs` that have so many, and of `--convictions`. The nearer the exact probability of the draws is to
#: ASKED, the more convictions it takes to tell them apart.
PER_STEP = {1: 0.25, 2: 0.25, 4: 1.0, 8: 0.25}
CONVICTIONS = {1: 5.0, 2: 2.0, 4: 1.0, 8: 0.75}
REPLICAS = 3
KEPT = harness.CACHE / "audit-power"
LIAR = "r1.1"
KINDS = ("contribution", "activation")
#: Standard normal quantile of a 95 % interval.
Z = 1.96


class LyingWorker(IntegerWorker):
    """Worker that computes one unit of ten falsely, drawn from seed, step and index. kind: what is false."""

    def __init__(self, stage: int, kind: str, seed: int) -> None:
        super().__init__(stage)
        self._kind, self._seed = kind, seed

    def _run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        result = super()._run(task, inputs)
        if isinstance(task, tasks.Forward) and task.train and self._lies("activation", task.t, task.index):
            return msgspec.structs.replace(result, outputs=(cast(int, result.outputs[0]) ^ 1,))
        if isinstance(task, tasks.InputGradient) and not task.again:
            waiting = self._work(task.t).store
            if task.index in waiting and self._lies("contribution", task.t, task.index):
                waiting[task.index] = tuple(word + 1 for word in waiting[task.index])
        return result

    def _lies(self, kind: str, t: int, index: int) -> bool:
        return kind == self._kind and is_false(self._seed, t, index)


def is_false(seed: int, t: int, index: int) -> bool:
    """True if the liar of this seed computes microbatch `index` of step t falsely."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {t} {index}".encode()).digest()[:8], "big")
    return number < FALSE * 2.0**64


@dataclass(frozen=True)
class Job:
    """Run to simulate. units: of each relay in a step. share: of the audits."""

    seed: int
    units: int
    kind: str
    share: float = SHARE


@dataclass
class Outcome:
    """Result of a run. units: of the liar in committed steps. per_step: units in a step -> steps. out: True
    if the liar's key was revoked. first_s, first_units: time of the commit of the first false unit, and units
    up to it. end_s: end of the run. others: keys of honest peers that were revoked. drawn: units of the
    liar in contributions that were drawn. hit: units up to the first of those that has a false one (0: none
    has)."""

    job: Job
    units: int = 0
    steps: int = 0
    per_step: dict[int, int] = field(default_factory=dict)
    false: int = 0
    out: bool = False
    first_s: float = 0.0
    first_units: int = 0
    end_s: float = 0.0
    others: int = 0
    drawn: int = 0
    hit: int = 0

    @property
    def later(self) -> int:
        """Units in steps committed after the first drawn contribution with a false unit."""
        return self.units - self.hit


@dataclass
class Kept:
    """Outcome in a file, with the commit of the program that ran it."""

    commit: str
    outcome: Outcome


def simulate(job: Job) -> Outcome:
    """Run until the liar is out or had UNITS units in committed steps."""
    steps = 2 * UNITS
    batch = REPLICAS * job.units
    settings = Settings("power", 1, 1, batch, steps, min_replicas=REPLICAS, audit_share=job.share)
    machines = [Machine("d0", 0, capacity=64)]
    machines += [Machine(f"r1.{n}", 1, job.units) for n in range(REPLICAS)]
    world = counting_world(settings, machines, job.seed)
    worker = LyingWorker(1, job.kind, job.seed)

    def begin() -> None:
        """Replace the liar's worker as soon as it has one."""
        node = world.nodes[LIAR]
        if isinstance(node.computer, IntegerWorker):
            worker.__dict__.update(node.computer.__dict__)
            node.computer = worker
        else:
            world.clock.after(0.01, begin)

    world.clock.after(0.01, begin)
    return follow(world, Outcome(job))


def follow(world: World, outcome: Outcome) -> Outcome:
    """Run the world and count the liar's units as the log grows."""
    read = 0
    while not outcome.out and outcome.units < UNITS:
        if not world.clock.step():
            raise RuntimeError(f"{outcome.job}: nothing happens after {outcome.units} units")
        for line in world.log[read:]:
            record = decode_entry(line).record
            if isinstance(record, Revoke):
                outcome.out |= record.id == LIAR
                outcome.others += record.id != LIAR
            elif isinstance(record, Commit):
                count(record, entry_hash(line), outcome, world.clock.now)
        read = len(world.log)
    outcome.end_s = world.clock.now
    return outcome


def count(record: Commit, base: str, outcome: Outcome, now: float) -> None:
    """Add the liar's units of a commit. base: hash of its log entry, which draws the audits."""
    stage = record.stages[1]
    position = stage.members.index(LIAR) if LIAR in stage.members else -1
    owned = [index for index, owner in enumerate(stage.owners) if owner == position]
    false = sum(is_false(outcome.job.seed, record.t, index) for index in owned)
    outcome.steps += 1
    outcome.per_step[len(owned)] = outcome.per_step.get(len(owned), 0) + 1
    outcome.units += len(owned)
    if false and not outcome.false:
        outcome.first_s, outcome.first_units = now, outcome.units
    outcome.false += false
    if any(each.subject == LIAR for each in drawn(record, base, outcome.job.share)):
        outcome.drawn += len(owned)
        outcome.hit = outcome.hit or (outcome.units if false else 0)


def first_hit(seed: int, units: int) -> int:
    """Units of a liar up to the first drawn contribution that has a false one, in made-up commits of three
    relays; more than UNITS if it is not among so many."""
    owners = tuple(index % REPLICAS for index in range(REPLICAS * units))
    stage = StageCommit("", "", {}, (LIAR, "r1.2", "r1.3"), ("",) * REPLICAS, owners, ("hash",) * REPLICAS)
    for t in range(UNITS // units):
        record = Commit("run", 1, 1, t, "", "", "step", 1, (), (stage, stage), 0.0, 1.0, 1e-3, 1.0, 1.0, 0)
        if any(is_false(seed, t, REPLICAS * k) for k in range(units)):
            base = hashlib.sha256(f"{seed} {units} {t}".encode()).hexdigest()
            if any(each.subject == LIAR for each in drawn(record, base, SHARE)):
                return units * (t + 1)
    return UNITS + 1


# --- the report -----------------------------------------------------------------------------------------


def per_unit(units: float) -> float:
    """Probability that a liar is caught within so many units if each unit is drawn by itself."""
    return float(1.0 - (1.0 - SHARE * FALSE) ** units)


def per_contribution(units: float, per_step: Counter[int]) -> float:
    """The same if all units of a step are drawn together; per_step: units in a step -> steps."""
    steps = sum(per_step.values())
    mean = sum(units * count for units, count in per_step.items()) / steps
    hits = (chance(SHARE, units) * (1.0 - (1.0 - FALSE) ** units) * n for units, n in per_step.items())
    return float(1.0 - (1.0 - sum(hits) / steps) ** (units / mean))


def wilson(good: int, of: int) -> tuple[float, float]:
    """95 % interval of a probability (Wilson's score interval)."""
    share, z2 = good / of, Z * Z
    centre = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = Z / (1 + z2 / of) * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return centre - half, centre + half


def middle(values: Sequence[float]) -> float:
    """Median; NaN of nothing."""
    return median(values) if values else math.nan


def row(outcomes: Sequence[Outcome], label: str) -> tuple[list[object], dict[str, object]]:
    """Row of the table, and its figures."""
    out = [each for each in outcomes if each.out]
    low, high = wilson(len(out), len(outcomes))
    per_step = sum((Counter(each.per_step) for each in outcomes), Counter[int]())
    mean = sum(u * n for u, n in per_step.items()) / sum(per_step.values())
    share, formula = len(out) / len(outcomes), per_contribution(UNITS, per_step)
    figures = {
        "runs": len(outcomes),
        "out": len(out),
        "share": share,
        "interval": [low, high],
        "per_unit": per_unit(UNITS),
        "per_contribution": formula,
        "units_per_step": mean,
        "steps": sum(each.steps for each in outcomes),
        "units": sum(each.units for each in outcomes),
        "false_units": sum(each.false for each in outcomes),
        "drawn_units": sum(each.drawn for each in outcomes),
        "hit": sum(each.hit > 0 for each in outcomes),
        "others_revoked": sum(each.others for each in outcomes),
        "median_units_from_first_lie": middle([each.units - each.first_units for each in out]),
        "median_s_from_first_lie": middle([each.end_s - each.first_s for each in out]),
        "greatest_units_from_draw": max((each.later for each in out), default=0),
    }
    audited = sum(each.drawn for each in outcomes) / sum(each.units for each in outcomes)
    cells = [label, len(outcomes), f"{mean:.2f}", f"{audited:.2%}", f"{formula:.1%}", f"{share:.1%}"]
    cells += [f"{low:.1%} to {high:.1%}", figures["hit"]]
    cells += [f"{figures['median_units_from_first_lie']:.0f}", f"{figures['median_s_from_first_lie']:.1f}"]
    cells += [figures["greatest_units_from_draw"]]
    return [*cells], figures


def in_time(units: int, of: int) -> float:
    """Probability that a false contribution of a liar with so many units a step is among the drawn ones of
    its first `of` units."""
    hit = chance(SHARE, units) * (1.0 - (1.0 - FALSE) ** units)
    return float(1.0 - (1.0 - hit) ** (of // units))


@dataclass(frozen=True)
class Power:
    """Probability that a liar is out within UNITS units, from draws and convictions. exact: that a false
    contribution of it is drawn in time. hits: liars of `liars` of which that was so. convicted: runs of
    `runs` in which the liar was out after such a draw. later: units of it in steps committed in between ->
    runs. low, high: 95 % interval of the share, from that of the convictions."""

    liars: int
    exact: float
    hits: int
    runs: int
    convicted: int
    later: dict[int, int]
    share: float
    low: float
    high: float


def power_of(units: int, liars: int, convictions: Sequence[Outcome]) -> Power:
    """Join the draws of so many liars with the outcomes of runs in which each contribution was drawn."""
    hits = sum(first_hit(seed, units) <= UNITS for seed in range(liars))
    later = Counter(each.later for each in convictions if each.out)
    runs, convicted = len(convictions), later.total()
    after = sum(count * in_time(units, UNITS - more) for more, count in later.items()) / convicted
    low, high = wilson(convicted, runs)
    share, exact, lags = after * convicted / runs, in_time(units, UNITS), dict(sorted(later.items()))
    return Power(liars, exact, hits, runs, convicted, lags, share, after * low, after * min(high, 1.0))


HEAD = [
    "lie, units a step", "runs", "mean units a step", "units audited", "formula",
    f"out within {UNITS} units", "95 % interval", "runs with a false unit drawn",
    "units from first lie to revocation, median", "virtual seconds of that, median",
    "units from the drawn step to revocation, greatest",
]  # fmt: skip


PARTS = [
    "units a step", "contributions drawn", "a false one is drawn (exact)", "of sampled liars (interval)",
    "convicted then",
    "units later, greatest", f"out within {UNITS} units", "95 % interval", "formula",
]  # fmt: skip


def report(
    outcomes: Sequence[Outcome], powers: dict[int, Power]
) -> tuple[str, list[Goal], dict[str, object]]:
    """Markdown of the result, its goals and its figures."""
    rows, parts, data, goals = [], [], dict[str, object](), []
    for units, power in powers.items():
        data[f"{units} power"] = power
        low, high = power.low, power.high
        goals.append(
            harness.goal(
                f"liars in one unit of ten out within {UNITS} units, {units} units a step, share {SHARE:g}",
                f"at least {ASKED:.0%}",
                f"{power.share:.2%} ({low:.2%} to {high:.2%}), formula {per_unit(UNITS):.1%}",
                True if low >= ASKED else False if high < ASKED else None,
            )
        )
        sampled = wilson(power.hits, power.liars)
        cells = [units, f"{chance(SHARE, units):.2%}", f"{power.exact:.2%}"]
        cells += [f"{power.hits / power.liars:.1%} of {power.liars:,} ({sampled[0]:.1%} to {sampled[1]:.1%})"]
        cells += [f"{power.convicted} of {power.runs}", max(power.later, default=0), f"{power.share:.2%}"]
        parts.append([*cells, f"{low:.2%} to {high:.2%}", f"{per_unit(UNITS):.1%}"])
    for units in PER_STEP:
        of_units = [each for each in outcomes if each.job.units == units]
        if not of_units:
            continue
        cells, figures = row(of_units, f"both, {units}")
        rows.append(cells)
        data[f"{units}"] = figures
        for kind in KINDS:
            some = [each for each in of_units if each.job.kind == kind]
            if not some:
                continue
            cells, data[f"{units} {kind}"] = row(some, f"{kind}, {units}")
            rows.append(cells)
    others = sum(each.others for each in outcomes)
    text = [
        *(part.replace("\n", " ") + "\n" for part in __doc__.split("\n\n")[2:4]),
        table(PARTS, parts),
        "",
        f"Formula: 1 - (1 - pq)^n with p = {SHARE:g}, q = {FALSE:g}, n = {UNITS}. The probability is",
        "the exact one of the draws, less the units until the liar is out; its interval is that of the",
        "convictions.",
        "",
        "Whole runs with the share itself. *Units audited*: share of the liar's units that were in drawn",
        "contributions. The formula is computed from the numbers of units that occurred.",
        "",
        table(HEAD, rows),
        "",
        f"Keys of honest peers that were revoked in these runs: {others}. Medians are those of the liars",
        "that were out within their 200 units.",
    ]
    return "\n".join(text), goals, data


def kept_or_simulated(job: Job, commit: str) -> Outcome:
    """Outcome of a run, from the file of an earlier one if there is one."""
    path = KEPT / f"{job.seed:05}-{job.units}-{job.share:g}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=Kept).outcome
    outcome = simulate(job)
    harness.write_whole(path, msgspec.json.encode(Kept(commit, outcome)))
    return outcome


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--liars", type=int, default=20_000, help="liars for whom draws are made")
    parser.add_argument("--convictions", type=int, default=480, help="runs of four units, all drawn")
    parser.add_argument("--runs", type=int, default=100, help="whole runs of four units")
    arguments = parser.parse_args()
    commit = harness.program()

    def outcomes(share: float, runs: int, per_step: Mapping[int, float]) -> Iterator[Outcome]:
        for units, part in per_step.items():
            for seed in range(round(part * runs)):
                yield kept_or_simulated(Job(seed, units, KINDS[seed % 2], share), commit)
            print(f"share {share}, {units} units a step: done", file=sys.stderr, flush=True)

    all_drawn = list(outcomes(1.0, arguments.convictions, CONVICTIONS))
    powers = {
        units: power_of(units, arguments.liars, [each for each in all_drawn if each.job.units == units])
        for units in PER_STEP
    }
    body, goals, data = report(list(outcomes(SHARE, arguments.runs, PER_STEP)), powers)
    harness.write("audit-power", "Power of audits", body, goals=goals, data=data, dry=arguments.dry)


if __name__ == "__main__":
    main()
