"""Steps that a swarm keeps making while a hostile guest does its deed, for each deed and role.

    nice python -m benchmarks.byzantine.steps_under_attack

The real protocol in virtual time, workers with integers: two data nodes, four stages of three relays, twelve
microbatches. A guest joins after the eighth step and does its deed (`sim.fuzz.guest_deeds`) for as long as it
has its seat, and comes again where it can. The steps of WINDOW_S virtual seconds from its first deed on are
compared with those of the same swarm and seed in the same seconds without the guest. Deeds against audits are
done in runs where all work is audited. Carriers' deeds are not among them: these relays reach each other
directly.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.fuzz.guest_deeds import DEEDS, GuestRole
from anabranch.sim.fuzz.hostile_guests import GuestPlan, HostileGuests
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.kernel.violation import Violation
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from benchmarks import harness
from benchmarks.harness import table

STAGES, REPLICAS, MICROBATCHES, AFTER = 4, 3, 12, 8
#: Virtual seconds of an attack that count, and more steps than these take.
WINDOW_S, STEPS = 60.0, 100_000
#: Virtual seconds after which an attack must have begun.
LATEST_S = 100.0
#: Least share of the undisturbed steps that is asked for.
ASKED = 0.8


class Over(Exception):
    """Raised when the window of a run has passed."""


@dataclass
class Course:
    """Course of a run. began_s: virtual time of the guest's first deed (NaN: none). commits: virtual time of
    each step. out_s: seconds from the first deed until the guest lost its seat (None: it did not). wrong:
    what must not be (a violated demand, a state that differs)."""

    began_s: float
    commits: list[float]
    out_s: float | None = None
    wrong: str = ""

    def steps(self, begin_s: float) -> int:
        return sum(begin_s < at <= begin_s + WINDOW_S for at in self.commits)


def course(job: tuple[str, str, int]) -> Course:
    """Course of the run of a job: name of a deed ("": none), of a role, seed."""
    deed, role, seed = job
    audited = bool(deed) and (DEEDS[deed].audited or GuestRole[role] is GuestRole.WALK_IN)
    share = 1.0 if audited or role == "AUDITED" else 0.0
    settings = Settings(
        "attack", 2, STAGES, MICROBATCHES, STEPS, min_replicas=2, voters=3, audit_share=share,
        snapshot_every=4,
    )  # fmt: skip
    data_nodes = [Machine(f"d{number}", 0) for number in range(2)]
    relays = [
        Machine(f"r{stage}.{number}", stage, capacity=3)
        for stage in range(1, STAGES + 1)
        for number in range(REPLICAS)
    ]
    world = counting_world(settings, [*data_nodes, *relays], seed)
    invariants = Invariants(world)
    invariants.forgives = audited
    found = Course(float("nan"), [])

    def begun(kind: str, node: Node, text: str) -> None:
        found.began_s = world.clock.now

    where = 0 if role == "DATA" else 2
    plans = (GuestPlan(deed, GuestRole[role], where, AFTER, False, True),) if deed else ()
    guests = HostileGuests(world, plans, random.Random(seed), begun, float("inf"))
    world.watchers.append(partial(_watch, world, guests, found))
    try:
        world.run(until_s=10.0 * LATEST_S)
    except Over:
        pass
    except Violation as violation:
        found.wrong = str(violation)
    if not audited:
        found.wrong = found.wrong or "; ".join(wrong_states(world).values())
    return found


def _watch(world: World, guests: HostileGuests, found: Course, node: Node, event: ev.Event) -> None:
    """Note steps and the guest's end; raise Over after the window."""
    now, steps = world.clock.now, world.history().t
    found.commits += [now] * (steps - len(found.commits))
    guests.look(node, steps)
    if found.out_s is None and guests.put_out:
        found.out_s = now - found.began_s
    begun = found.began_s == found.began_s
    if now > (found.began_s + WINDOW_S if begun else LATEST_S):
        raise Over


def jobs(seeds: Iterable[int]) -> list[tuple[str, str, int]]:
    """Jobs of all runs: those without a guest, with and without audits, first."""
    pairs = [
        (deed.name, role.name)
        for deed in DEEDS.values() if not deed.hides
        for role in GuestRole if role in deed.roles
    ]  # fmt: skip
    return list(
        (name, role, seed)
        for (name, role), seed in itertools.product([("", ""), ("", "AUDITED"), *pairs], seeds)
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    todo = jobs(args.seeds)
    courses = dict(zip(todo, harness.in_processes(course, todo, args.processes, "runs"), strict=True))
    rows, shares, wrong = list[list[object]](), dict[str, float](), list[str]()
    for deed, role in dict.fromkeys((deed, role) for deed, role, _ in todo if deed):
        audited = DEEDS[deed].audited or GuestRole[role] is GuestRole.WALK_IN
        kept, out = list[float](), list[str]()
        for seed in args.seeds:
            one, calm = courses[deed, role, seed], courses["", "AUDITED" if audited else "", seed]
            wrong += [f"{deed}, {role}, seed {seed}: {one.wrong}"] * bool(one.wrong)
            if one.began_s == one.began_s:
                kept.append(one.steps(one.began_s) / calm.steps(one.began_s))
            out.append("–" if one.out_s is None else f"{one.out_s:.1f}")
        label = f"{deed}, {GuestRole[role].value}"
        if kept:
            shares[label] = statistics.mean(kept)
        each = " · ".join(f"{share:.0%}" for share in kept) or "never in its role"
        rows.append([deed, GuestRole[role].value, each, " · ".join(out)])
    least = min(shares, key=lambda label: shares[label])
    goals = [
        harness.at_least(f"share of undisturbed steps, mean of seeds, at worst ({least})", ASKED,
                         shares[least], "{:.2f}"),
        harness.goal("demands violated, states that differ", "0", str(len(wrong)), not wrong),
    ]  # fmt: skip
    step_s = statistics.mean(WINDOW_S / courses["", "", seed].steps(AFTER) for seed in args.seeds)
    text = [
        f"Steps of {WINDOW_S:.0f} virtual seconds from the guest's first deed on, over those of the same",
        f"swarm without it (each seed). A step without guests takes {step_s:.2f} s. *Out after*: virtual",
        "seconds until its first loss of the seat (–: it kept it, or never had one).",
        "",
        table(["deed", "role", "steps kept", "out after, s"], rows),
        *(f"\n**{line}**" for line in wrong),
    ]
    data = {json.dumps(job): found for job, found in courses.items()}
    harness.write("steps-under-attack", "Steps under attack", "\n".join(text), goals=goals, data=data,
                  dry=args.dry)  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
