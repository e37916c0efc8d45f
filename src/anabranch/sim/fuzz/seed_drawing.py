"""Drawing of a simulated swarm and its planned faults from a seed.

Not here: crashes by the profile's churn, which are drawn while the seed runs (`trial`).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate

from anabranch.flow.graph.problem import Return
from anabranch.protocol.interface.delay import LEAST_START, NO_DELAY, Delay
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import NEIGHBOURS, NEWCOMER_S, Settings
from anabranch.sim.fuzz.fault_kinds import (
    CARRIER_KINDS,
    KINDS,
    OTHERS,
    ROUNDS,
    FaultProfile,
    Role,
    kind_named,
    of_leading_relays,
    profile_named,
    weights,
)
from anabranch.sim.fuzz.guest_deeds import DEEDS
from anabranch.sim.fuzz.hostile_guests import GuestPlan, draw_guests
from anabranch.sim.fuzz.peer_phases import (
    CARRYING,
    ELECTION,
    INNER_STEPS,
    LATE_SLOTS,
    OF_DATA_NODES,
    ROUND_PHASES,
    STEPS_AHEAD,
)
from anabranch.sim.kernel.swarm_world import Model
from anabranch.sim.workers.integer_arithmetic import PIECES
from anabranch.sim.workers.integer_world import Machine

#: Most nodes of a swarm (a choice).
NODES_MAX = 40
#: Every so many seeds one computes with tensors, which take most time.
TORCH_EVERY = 20
#: Every so many seeds one has late faults and slow tasks, so that routing has a plan when the faults come;
#: steps before the first fault of such a seed; seconds of its tasks.
PLANNED_EVERY, PLANNED_STEPS, PLANNED_TASK_S = 20, 6, 0.2
#: Every so many seeds one has a crowded swarm: peers know only some neighbours; the reduce is hierarchical.
CROWDED_EVERY = 50
#: Share of seeds in which joined relays serve in the open iteration, however little of it is left.
NEWCOMERS = 0.5
#: Share of seeds with reduces spread over random helpers.
SPREAD = 0.3
#: Share of seeds in which nobody can dial some relays, and share of their relays: they need carriers.
UNREACHABLE, HIDDEN = 0.25, 0.6
#: Share of the seeds with such relays in which hosts have access lines, and the beginning of the text that
#: seeds their lots: one with which they miss all seeds that tests kept before.
LINED, LINES_SALT = 0.3, "lines 144"
#: Bandwidths (bits per second) of the slowest lines of a seed, and bytes of an activation on them: alone on a
#: line it takes from 21 to 336 ms. Choices.
LINES_BPS, ON_LINES_BYTES = (4e8, 1e8, 2.5e7), 1 << 20
#: Share of seeds with random standbys.
SPARED = 0.2
#: Every so many seeds one has a large swarm: small swarms find most bugs, at a tenth of the cost.
LARGE_EVERY = 50
#: Ranges of one-way delays of a swarm (s).
_LATENCIES = ((0.001, 0.005), (0.001, 0.01), (0.001, 0.02), (0.001, 0.02), (0.005, 0.05), (0.02, 0.2))
#: Numbers of stages, and shapes (replicas per stage), of a large swarm and of the usual one.
_LARGE, _USUAL = (2, 4, 6, 8), (1, 1, 1, 1, 2, 2, 2, 3, 3, 4)
_LARGE_SHAPES, _USUAL_SHAPES = (
    ("pairs", "mixed", "many"),
    ("pairs", "pairs", "pairs", "mixed", "mixed", "single"),
)
#: Irrational factors of the Kronecker sequences, one for each fault of a seed.
_IRRATIONAL = tuple(map(math.sqrt, (2, 3, 5, 7, 11, 13, 17)))
_COMPUTING = (
    *("Forward", "Head", "InputGradient", "WeightGradient"),
    *("InnerForward", "InnerHead", "InnerBackward", "StepAhead"),
)
#: Share of the seeds with audits, and shares of the contributions that these audit.
AUDITED, AUDIT_SHARES = 0.1, (0.3, 1.0)
#: Shares of audited contributions that seeds with guests draw: no audits in four of ten.
GUEST_AUDITS = (0.0, 0.0, 0.0, 0.0, 0.3, 0.3, 1.0, 1.0, 1.0, 1.0)
#: Beginning of the text that seeds the lots of deeds that came later: one with which these miss all seeds
#: that tests kept before, so that those draw what they drew.
LATER_SALT = "later 2937"
#: Share of the audited seeds with guests in which auditors of the owner's join, and the beginning of the text
#: that seeds their lots: one with which they miss the seeds that tests kept before.
WITH_AUDITORS, AUDITORS_SALT = 0.3, "auditors 27360"
#: Share of the seeds without audits, guests and rounds in which two iterations are in flight, and the last
#: synchronous steps that these draw.
DELAYED, DELAY_STARTS = 0.1, (LEAST_START, LEAST_START, LEAST_START, 4)
#: Share of the seeds with rounds whose rounds end without late slots (a choice).
ROUNDS_DROP = 0.75


@dataclass(frozen=True)
class FaultTarget:
    """Planned fault of a kind. Once `after_t` steps are committed it passes over `skip` events at which a
    peer in the planned phase could be hit (fewer if it has waited long), and hits the peer of the next one
    `delay_s` later."""

    kind: str
    phase: str
    after_t: int
    skip: int
    delay_s: float

    @property
    def of_leading_relays(self) -> bool:
        return of_leading_relays(self.kind, self.phase)

    @property
    def of_voting_relays(self) -> bool:
        """True if only a relay that is a voter can be the victim."""
        roles = kind_named(self.kind).roles
        return self.of_leading_relays or (self.phase == ELECTION and roles == {Role.RELAY})

    @property
    def elects(self) -> bool:
        """True if the fault hits during an election, or a relay that leads; the trial then causes an
        election."""
        return self.phase == ELECTION or self.of_leading_relays

    @property
    def needs_voters(self) -> bool:
        """True if the run needs several voters for this fault: it needs an election or hits the leader."""
        return self.elects or kind_named(self.kind).roles == {Role.LEADER}


@dataclass(frozen=True)
class DrawnSeed:
    """Swarm and faults that a seed draws. torch: True if the workers compute with tensors. settings: of the
    run. machines: its machines at the start, the founder first. model: delays of messages and times of tasks.
    slow: (machine, machine, factor on the delays between them). aims: planned faults. first_t: committed
    steps before the first fault. guests: hostile guests; seeds with guests have no other faults. auditors:
    machines that only audit, which join after the start. line_bps: bandwidth (bits per second) of the slowest
    access lines, which a host's own payloads share with those that it carries for others; 0: no lines."""

    seed: int
    profile: FaultProfile
    torch: bool
    settings: Settings
    machines: tuple[Machine, ...]
    model: Model
    slow: tuple[tuple[str, str, float], ...]
    aims: tuple[FaultTarget, ...]
    first_t: int = 0
    guests: tuple[GuestPlan, ...] = ()
    auditors: tuple[Machine, ...] = ()
    line_bps: float = 0.0

    @property
    def payload_s(self) -> float:
        """Seconds that one activation takes alone on the slowest line; 0 without lines."""
        return 8.0 * self.settings.activation_bytes / self.line_bps if self.line_bps else 0.0

    def describe(self) -> str:
        settings, relays = self.settings, [m for m in self.machines if m.stage]
        by_stage = [sum(m.stage == s for m in relays) for s in range(1, settings.stages + 1)]
        low, high = self.model.latency_s
        numbers = "tensors" if self.torch else "whole numbers"
        start = settings.delay.start
        delay = f"; two iterations in flight from {start + 1} on" if start else ""
        hidden = sum(not machine.reachable for machine in self.machines)
        lines = f"; nobody can dial {hidden} nodes" if hidden else ""
        lines += f"; lines from {1e-6 * self.line_bps:.0f} Mbit/s on" if self.line_bps else ""
        return (
            f"seed {self.seed}, profile {self.profile.name}: {len(self.machines)} nodes, "
            f"{len(self.machines) - len(relays)} of them data nodes, replicas by stage {by_stage}; "
            f"{settings.microbatches} microbatches of {numbers}, policy {settings.policy}, messages take "
            f"{1e3 * low:.0f} to {1e3 * high:.0f} ms{delay}{lines}"
        )


def profile_of(seed: int) -> str:
    """Name of the fault profile that a seed has if the user gives none: `phases` for every third seed, the
    other ones of PROFILES in turn for the rest."""
    turn = seed % len(OTHERS)
    return ROUNDS.name if (seed + seed // len(OTHERS)) % 3 == 0 else OTHERS[turn].name


def draw(seed: int, profile_name: str) -> DrawnSeed:
    """Swarm and faults of a seed under the profile of this name; a pure function, the same on every machine.
    Raises KeyError for an unknown profile."""
    profile = profile_named(profile_name)
    # Seeds whose number would give them `hostile` by turn (were it not for `phases`) draw its faults alone.
    if profile.guests and OTHERS[seed % len(OTHERS)] != profile:
        return _with_guests(seed, profile)
    return _with_faults(seed, profile)


def _with_guests(seed: int, profile: FaultProfile) -> DrawnSeed:
    """Swarm of a seed with hostile guests and no faults. Every stage has at least one honest relay more than
    there are guests, so that the honest ones outvote them."""
    drawn = _with_faults(seed, replace(profile, kinds=(), faults=(0, 0)))
    rng = random.Random(f"{profile.name} {seed} guests")
    share = random.Random(f"{profile.name} {seed} audits drawn").choice(GUEST_AUDITS)
    if profile.undefended:
        share = 0.0
    later = None if profile.undefended else random.Random(f"{LATER_SALT} {seed}")
    guests = draw_guests(rng, drawn.settings.stages, profile.undefended, share > 0.0, later)
    machines = list(drawn.machines)
    for stage in range(1, drawn.settings.stages + 1):
        honest = sum(machine.stage == stage for machine in machines)
        machines += [Machine(f"r{stage}.{n}", stage) for n in range(honest, len(guests) + 1)]
    if any(DEEDS[plan.deed].hides for plan in guests):
        machines = [replace(machine, reachable=machine.stage == 0) for machine in machines]
        drawn = replace(drawn, torch=False)  # worlds with tensors hide nobody
    settings = replace(drawn.settings, audit_share=share, delay=NO_DELAY)
    auditors = _auditors(seed, settings.stages) if share and not profile.undefended else ()
    return replace(drawn, settings=settings, machines=tuple(machines), guests=guests, auditors=auditors)


def _auditors(seed: int, stages: int) -> tuple[Machine, ...]:
    """Machines that only audit, for a seed with audits: none in most seeds, one, or one for each stage."""
    rng = random.Random(f"{AUDITORS_SALT} {seed}")
    if rng.random() >= WITH_AUDITORS:
        return ()
    names = [f"auditor{number}" for number in range(rng.choice([1, stages]))]
    return tuple(Machine(name, -1, slowness=rng.choice([0.5, 1.0, 4.0])) for name in names)


def _with_faults(seed: int, profile: FaultProfile) -> DrawnSeed:
    """Swarm and planned faults of a seed, without guests."""
    profile_name = profile.name
    rng = random.Random(f"{profile_name} {seed}")
    lots = random.Random(f"{profile_name} {seed} lots")  # seed % n would correlate with the profile
    torch, planned = lots.random() * TORCH_EVERY < 1.0, lots.random() * PLANNED_EVERY < 1.0
    torch = torch and not profile.islands and not profile.carriers
    crowded = lots.random() * CROWDED_EVERY < 1.0 and not torch and not profile.carriers
    large = lots.random() * LARGE_EVERY < 1.0 and not torch and not planned
    first_t = PLANNED_STEPS if planned and profile.kinds else LEAST_START if profile.delayed else 0
    aims = _aims(seed, profile, rng, first_t)
    machines = _machines(rng, aims, torch, crowded, large)
    machines = _doubled(machines) if profile.carriers else machines
    if not torch and not any(aim.of_voting_relays for aim in aims):
        machines = _hidden(seed, machines, profile.carriers)
    stages = max(machine.stage for machine in machines)
    phases = {aim.phase for aim in aims}
    windows = rng.choice([0, 0, 2])
    returns: list[Return] = ["any", "any", "own"]
    snapshot_every = lots.randint(2, 5)
    voters = 3 if any(aim.needs_voters for aim in aims) else lots.choice([1, 3, 3])
    lots.randrange(3)  # drew an option that is gone; what follows in a seed stays as it was
    settings = Settings(
        f"seed {seed}",
        1,
        stages,
        4 if torch else rng.choice([2, 2, 3, 3, 4, 6]),
        10_000,
        windows=3 if torch else windows,
        evaluate_every=rng.choice([1, 2, 3]),
        checkpoint_every=rng.choice([0, 0, 2, 3]),
        min_replicas=1,
        policy="auction" if planned else rng.choice(["auction", "greedy", "static"]),
        returns=rng.choice(returns),
        activation_bytes=1024,
        heartbeat_s=rng.choice([1.0, 2.0, 2.0, 2.0]),
        snapshot_every=snapshot_every,
        voters=voters,
        recompute=lots.choice([0.0, 0.0, 0.0, 1.0]),
        rebalance=lots.choice([0, 0, 1]),
        neighbours=1 if crowded else NEIGHBOURS,
        spread="always" if random.Random(f"spread {seed}").random() < SPREAD else "never",
        newcomer_s=0.0 if random.Random(f"newcomer {seed}").random() < NEWCOMERS else NEWCOMER_S,
        audit_share=_audit_share(seed, profile),
        spare="always" if random.Random(f"spare {seed}").random() < SPARED else "never",
    )
    if settings.policy == "auction":  # it plans for "any" alone; the draw above is for the other seeds
        settings = replace(settings, returns="any")
    if profile.islands:
        rounds = _rounds(seed, settings.microbatches, settings.stages, profile.crews, phases)
        settings = replace(settings, rounds=replace(rounds, private=profile.private))
        aims = tuple(_in_a_round(aim, rounds) for aim in aims)
    settings = replace(settings, delay=_delay(seed, profile, torch, settings.audit_share))
    latency = _LATENCIES[0] if planned else rng.choice(_LATENCIES)
    computing_s = PLANNED_TASK_S if planned else rng.choice([0.02, 0.05, 0.1])
    task_s = dict.fromkeys(_COMPUTING, computing_s)
    model = Model(latency, rng.choice([0.0, 0.002, 0.01]), {**task_s, "Embed": 0.002})
    regions = _regions(rng, machines)
    return _lined(DrawnSeed(seed, profile, torch, settings, machines, model, regions, aims, first_t))


def _lined(drawn: DrawnSeed) -> DrawnSeed:
    """The same seed, in some seeds with access lines and faults of carriers added. Only seeds with relays
    that nobody can dial may get them; those of the profile `carriers` always do. Seeds without faults get
    lines alone."""
    profile, rng = drawn.profile, random.Random(f"{LINES_SALT} {drawn.seed}")
    hides = any(not machine.reachable for machine in drawn.machines)
    if not hides or (rng.random() >= LINED and not profile.carriers):
        return drawn
    line_bps, size = rng.choice(LINES_BPS), ON_LINES_BYTES
    faults = []
    for _ in range(rng.randint(2, 4) if profile.carriers else min(1, len(profile.kinds))):
        kind, after_t = rng.choice(sorted(CARRIER_KINDS)), drawn.first_t + rng.choice([0, 1, 1, 2, 3])
        faults.append(FaultTarget(kind, CARRYING, after_t, rng.choice([0, 1, 3, 8]), 0.0))
    settings = replace(
        drawn.settings, activation_bytes=size, piece_bytes=size, state_bytes=(PIECES + 1) * size
    )
    model = replace(drawn.model, bulk_s=0.0)
    aims = (*drawn.aims, *faults)
    return replace(drawn, settings=settings, model=model, aims=aims, line_bps=line_bps)


def _audit_share(seed: int, profile: FaultProfile) -> float:
    """Share of the contributions that a seed audits; 0 in most seeds, and in profiles of rounds or of two
    iterations in flight."""
    rng = random.Random(f"audits {seed}")
    audited = rng.random() < AUDITED and not profile.islands and not profile.delayed
    return rng.choice(AUDIT_SHARES) if audited else 0.0


def _delay(seed: int, profile: FaultProfile, torch: bool, audit_share: float) -> Delay:
    """Delay of a seed, whose `start` (its last synchronous iteration) is drawn; `NO_DELAY` in most seeds, and
    in all with islands or audits. torch: True for a seed with tensors, which begins as early as possible."""
    rng = random.Random(f"delay {seed}")
    delayed = rng.random() < DELAYED or profile.delayed
    if not delayed or profile.islands or audit_share:
        return NO_DELAY
    return Delay(LEAST_START if torch else rng.choice(DELAY_STARTS))


def _in_a_round(aim: FaultTarget, rounds: Rounds) -> FaultTarget:
    """The same planned fault. If it is aimed at a phase of a round, its first step is moved to the time of
    the rounds: after the steps before the first round, and before the last round."""
    if aim.phase not in ROUND_PHASES:
        return aim
    after_t = max(aim.after_t, rounds.start)
    return replace(aim, after_t=min(after_t, rounds.last - 1) if rounds.last else after_t)


def _rounds(seed: int, microbatches: int, stages: int, crews: bool, phases: Collection[str]) -> Rounds:
    """Draw the rounds of a seed. microbatches: number in an iteration, of which the number of slots is a
    divisor. stages: relay stages. crews: True for pipeline islands, if there are two stages or more; islands
    may carry state if they are these or hold the whole model (one stage). phases: phases at which the seed's
    faults are aimed: with LATE_SLOTS there are two slots or more, with STEPS_AHEAD islands that hold the
    whole model take steps of the next round ahead."""
    pipeline = crews and stages > 1
    whole = pipeline or stages == 1
    rng = random.Random(f"rounds {seed}")
    least = 2 if LATE_SLOTS in phases else 1
    slots = rng.choice([k for k in range(least, microbatches + 1) if microbatches % k == 0])
    drops = rng.random() < ROUNDS_DROP or pipeline  # late crews are never waited for
    start, inner, grace = rng.randint(1, 3), rng.choice([2, 5]), rng.choice([0.05, 0.5, 2.0])
    carries, merges = whole and rng.random() < 0.5, whole and drops and rng.random() < 0.5
    again = random.Random(f"schedule {seed}")
    first, last = again.choice([0, 0, 1]), again.choice([0, 0, start + again.randint(1, 4)])
    ahead = random.Random(f"ahead {seed}")
    overlap = ahead.randint(0, inner - 1) if carries and not (pipeline or first) else 0
    if STEPS_AHEAD in phases and not pipeline:
        carries, first, overlap = True, 0, max(1, overlap)
    return Rounds(
        *(start, inner, slots, drops, grace, carries, merges, overlap, first, last),
        pipeline=pipeline,
        proportional=ahead.random() < 0.5,
    )


def _aims(seed: int, profile: FaultProfile, rng: random.Random, first_t: int) -> tuple[FaultTarget, ...]:
    """Planned faults of a seed, each after at least `first_t` committed steps. Over all profiles every (kind,
    phase) pair is hit about equally often (`weights`). The pairs come from a low-discrepancy sequence over
    seeds (Kronecker's: multiples of irrational numbers), the rest from rng."""
    sums = list(accumulate(weights(profile)))
    aims = []
    for number in _IRRATIONAL[: rng.randint(*profile.faults)]:
        kind, phase = profile.cells[bisect_right(sums, math.fmod(seed * number, 1.0) * sums[-1])]
        delay_s = rng.choice([0.0, 0.0, rng.uniform(0.0, 0.01)])
        after_t = first_t + rng.choice([0, 0, 1, 1, 2, 3])
        skip = rng.choice([0, 1, 3, 8])
        aim = FaultTarget(kind, phase, after_t, skip, delay_s)
        aims.append(replace(aim, skip=min(skip, 1)) if aim.elects else aim)  # an election is short
    return tuple(aims)


def _machines(
    rng: random.Random, aims: tuple[FaultTarget, ...], torch: bool, crowded: bool, large: bool
) -> tuple[Machine, ...]:
    """Draw the machines of a swarm, 2 to 40: 1 to 8 relay stages, 1 to 3 data nodes; the first is the
    founder. aims: planned faults; there are enough data nodes and replicas for them. torch: True for at most
    3 stages, as tensors take most time. crowded: True for 3 to 6 replicas of each stage. large: True for 2,
    4, 6 or 8 stages."""
    stages = rng.choice([1, 2, 3] if torch else _LARGE if large else _USUAL)
    if any(aim.phase == STEPS_AHEAD for aim in aims):
        stages = 1  # crews take none
    elif any(aim.phase == INNER_STEPS and KINDS[aim.kind].roles == {Role.DATA} for aim in aims):
        stages = max(stages, 2)  # data nodes take part in those of crews alone
    data_nodes = rng.choice([1, 1, 2, 2, 3])
    for aim in aims:
        roles = KINDS[aim.kind].roles
        if Role.LEADER not in roles and (aim.phase in OF_DATA_NODES or Role.RELAY not in roles):
            data_nodes = max(data_nodes, 2)
    if any(aim.needs_voters for aim in aims):
        data_nodes = max(data_nodes, 2)  # so that the leader may be away
    if any(aim.phase == ELECTION and KINDS[aim.kind].loses for aim in aims):
        data_nodes = 3  # so that another one may be lost meanwhile
    shape = rng.choice(_LARGE_SHAPES if large else _USUAL_SHAPES)
    shape = "many" if crowded else shape
    if any(aim.of_voting_relays for aim in aims):
        data_nodes = 2  # so that a relay is the third voter
    if any(aim.of_voting_relays or KINDS[aim.kind].loses for aim in aims):
        shape = "pairs" if shape == "single" else shape  # so that another replica has the lost state
    machines = [
        Machine(f"d{n}", 0, rng.choice([4, 8]), rng.choice([1.0, 1.0, 2.0])) for n in range(data_nodes)
    ]
    spare = NODES_MAX - data_nodes
    for stage in range(1, stages + 1):
        wanted = {"pairs": 2, "mixed": rng.randint(1, 3), "many": rng.randint(3, 6), "single": 1}[shape]
        count = max(1, min(wanted, spare - (stages - stage)))
        spare -= count
        for n in range(count):
            slowness = rng.choice([0.5, 1.0, 1.0, 2.0, 4.0])
            machines.append(Machine(f"r{stage}.{n}", stage, rng.choice([1, 2, 4, 8]), slowness))
    return tuple(machines)


def _doubled(machines: tuple[Machine, ...]) -> tuple[Machine, ...]:
    """The same machines, and a second one for each stage that has only one, so that any carrier may be
    lost."""
    alone = [m for m in machines if sum(other.stage == m.stage for other in machines) == 1]
    more = [replace(m, id=f"r{m.stage}.1" if m.stage else "d1") for m in alone]
    return (*machines, *more)


def _hidden(seed: int, machines: tuple[Machine, ...], always: bool) -> tuple[Machine, ...]:
    """The same machines; in a share of the seeds some relays are set unreachable: nobody can dial them.
    always: True to do so in this seed, for two relays at least (if there are two), so that some pairs need
    carriers."""
    rng = random.Random(f"unreachable {seed}")
    if rng.random() >= UNREACHABLE and not always:
        return machines
    share = rng.choice([HIDDEN, 0.8, 1.0]) if always else HIDDEN
    hidden = [machine.stage > 0 and rng.random() < share for machine in machines]
    if always and sum(hidden) < 2:
        hidden = [machine.stage > 0 for machine in machines]
    return tuple(replace(m, reachable=not hides) for m, hides in zip(machines, hidden, strict=True))


def _regions(rng: random.Random, machines: tuple[Machine, ...]) -> tuple[tuple[str, str, float], ...]:
    """Draw one to three regions for the machines: (machine, machine, factor on the delays between them) of
    pairs in different regions. Empty with one region."""
    regions = rng.choice([1, 1, 2, 3])
    if regions == 1:
        return ()
    where = {machine.id: rng.randrange(regions) for machine in machines}
    factors = {frozenset((a, b)): rng.uniform(1.5, 6.0) for a in range(regions) for b in range(a)}
    names = sorted(where)
    return tuple(
        (one, other, factors[frozenset((where[one], where[other]))])
        for position, one in enumerate(names)
        for other in names[:position]
        if where[one] != where[other]
    )
