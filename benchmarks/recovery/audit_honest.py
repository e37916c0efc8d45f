"""Audits of honest relays: units audited, by verdict, in simulated swarms without a liar.

    nice python -m benchmarks.recovery.audit_honest [--minutes 20] [--tensor-minutes 5]

All contributions are audited (share 1). Swarms compute with integers or, in the second part, train a tiny
model with torch. Half of the runs have churn: a relay dies every few steps, at any moment of a step, and
comes back with its disk a little later. Minutes are CPU minutes; no run begins after them. Ends with status 1
if an honest peer was accused or a state is not that of a single machine.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from anabranch.config.schema import AuditSection
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Commit, Member, Revoke, Rollback, decode_entry
from anabranch.sim.fuzz.tensor_world import VOCABULARY, MadeUpBatches, small_run
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from anabranch.sim.workers.torch_world import node_member, torch_world
from anabranch.train.model.sizes import model_config
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.stage.protocol_inputs import settings_of
from benchmarks import harness
from benchmarks.harness import Goal, table

#: Audited units of the acceptance of issue 22.
ASKED = 1_000_000
REPLICAS = 3
#: Stages, microbatches and steps of a run with integers, and with torch. Choices: the first gives most units
#: per second of CPU.
INTEGERS, TENSORS = (8, 24, 30), (2, 12, 20)
#: Virtual seconds between two deaths, and until a relay is back (choices: a step takes about two).
DEATHS_S, BACK_S = (2.0, 8.0), (0.5, 5.0)


@dataclass
class Tally:
    """Counts over the runs of one kind. audits, units: by verdict. doubts: audits by
    a second replica. wrong: peers with a wrong state."""

    runs: int = 0
    steps: int = 0
    audits: Counter[str] = field(default_factory=Counter)
    units: Counter[str] = field(default_factory=Counter)
    doubts: int = 0
    revoked: int = 0
    rollbacks: int = 0
    deaths: int = 0
    wrong: int = 0
    cpu_s: float = 0.0

    @property
    def accused(self) -> int:
        """Peers whose key was revoked, and audits that found something."""
        return self.revoked + self.audits["different"]


def integer_world(seed: int) -> World:
    stages, microbatches, steps = INTEGERS
    settings = Settings(
        f"honest-{seed}", 1, stages, microbatches, steps, min_replicas=2, audit_share=1.0, checkpoint_every=5
    )
    machines = [Machine("d0", 0, capacity=64)]
    machines += [
        Machine(f"r{stage}.{n}", stage, microbatches // 2)
        for stage in range(1, stages + 1)
        for n in range(REPLICAS)
    ]
    return counting_world(settings, machines, seed)


def tensor_world(seed: int) -> World:
    stages, microbatches, steps = TENSORS
    run = replace(small_run(stages, microbatches, steps), audit=AuditSection(share=1.0))
    model, batches = model_config(run.model, VOCABULARY), MadeUpBatches(run)
    settings = replace(settings_of(run, f"honest-{seed}", model), min_replicas=2)

    def machines(rng: random.Random) -> Iterator[tuple[Member, float]]:
        yield node_member("d0", 0, 64), 1.0
        for stage in range(1, stages + 1):
            for n in range(REPLICAS):
                yield node_member(f"r{stage}.{n}", stage, microbatches // 2), rng.uniform(0.5, 2.0)

    return torch_world(run, model, batches, settings, "d0", machines, seed)


def shake(world: World, seed: int, tally: Tally) -> None:
    """Let relays die and come back, one of each stage at a time."""
    rng = random.Random(seed)

    def come_back(name: str) -> None:
        node = world.nodes[name]
        world.add(node.next_life(False), "d0", world.clock.now, node.slowness)

    def die() -> None:
        relays = [node for name, node in sorted(world.nodes.items()) if name != "d0"]
        down = {node.member.stage for node in relays if not node.running}
        victims = [node.id for node in relays if node.running and node.member.stage not in down]
        if victims:
            name = rng.choice(victims)
            world.crash(name)
            tally.deaths += 1
            world.clock.after(rng.uniform(*BACK_S), lambda: come_back(name))
        world.clock.after(rng.uniform(*DEATHS_S), die)

    world.clock.after(rng.uniform(*DEATHS_S), die)


def follow(world: World, tally: Tally) -> None:
    """Run to the end and enter all audits, each with the units of its contribution."""
    begin, read, noted = time.process_time(), 0, 0
    commits: dict[int, Commit] = {}
    cases = set[tuple[object, object]]()
    founder = world.nodes["d0"]
    while founder.stopped is None and world.clock.step():
        for line in world.log[read:]:
            record = decode_entry(line).record
            if isinstance(record, Commit):
                commits[record.t] = record
            tally.steps += isinstance(record, Commit)
            tally.revoked += isinstance(record, Revoke)
            tally.rollbacks += isinstance(record, Rollback)
        read = len(world.log)
        for _, _, kind, note in world.notes[noted:]:
            if kind == "audit":
                fields = dict(note)
                stage = commits[cast(int, fields["t"])].stages[cast(int, fields["stage"])]
                position = stage.members.index(cast(str, fields["subject"]))
                verdict = cast(str, fields["verdict"])
                tally.audits[verdict] += 1
                case = fields["t"], fields["subject"]
                tally.doubts += case in cases
                cases.add(case)
                tally.units[verdict] += stage.owners.count(position)
        noted = len(world.notes)
    if world.history().t != world.settings.steps:
        raise RuntimeError(f"{world.settings.run} ended after step {world.history().t}")
    tally.runs += 1
    tally.cpu_s += time.process_time() - begin


@dataclass(frozen=True)
class Job:
    """Runs of one kind, from `seed` on, for so many CPU minutes, and at most so many of the wall."""

    workers: str
    seed: int
    minutes: float
    wall_minutes: float


def measure(job: Job) -> tuple[str, dict[str, Tally]]:
    """Runs without and with churn in turn. Each that accuses somebody is told."""
    configure(threads=1)
    tallies = {"no churn": Tally(), "churn": Tally()}
    seed, until = job.seed, time.process_time() + 60.0 * job.minutes
    wall = time.monotonic() + 60.0 * job.wall_minutes
    while time.process_time() < until and time.monotonic() < wall:
        for name, tally in tallies.items():
            before = tally.accused
            world = MAKERS[job.workers](seed)
            if name == "churn":
                shake(world, seed, tally)
            follow(world, tally)
            tally.wrong += len(wrong_states(world))
            if tally.accused > before:
                print(f"{job.workers}, {name}, seed {seed}: {tally.accused - before} accused", flush=True)
        seed += 1
        if seed % 5 == 0:
            units = {name: tally.units.total() for name, tally in tallies.items()}
            print(f"{job.workers}, seed {seed}: {units} units", file=sys.stderr, flush=True)
    return job.workers, tallies


MAKERS: dict[str, Callable[[int], World]] = {"integers": integer_world, "tensors": tensor_world}


def added(total: Tally, more: Tally) -> None:
    """Add the counts of `more` to `total`."""
    for name, value in vars(more).items():
        setattr(total, name, getattr(total, name) + value)


# --- the report -----------------------------------------------------------------------------------------


HEAD = [
    "workers", "runs", "committed steps", "deaths", "units found the same", "different", "withheld", "unable",
    "audits by a second replica", "keys revoked", "rollbacks",
    "audited units per CPU second",
]  # fmt: skip


def report(parts: dict[str, dict[str, Tally]]) -> tuple[str, list[Goal]]:
    """Markdown of the result, and its goals."""
    rows = []
    for workers, tallies in parts.items():
        for name, each in tallies.items():
            verdicts = [f"{each.units[verdict]:,}" for verdict in ("same", "different", "withheld", "unable")]
            counts = [
                each.runs,
                f"{each.steps:,}",
                each.deaths,
                *verdicts,
                each.doubts,
                each.revoked,
                each.rollbacks,
            ]
            rows.append([f"{workers}, {name}", *counts, f"{each.units.total() / max(each.cpu_s, 1e-9):.0f}"])
    every = [tally for tallies in parts.values() for tally in tallies.values()]
    units = sum(tally.units["same"] + tally.units["different"] for tally in every)
    accused, wrong = sum(tally.accused for tally in every), sum(tally.wrong for tally in every)
    (stages, microbatches, _), (few, fewer, _) = INTEGERS, TENSORS
    text = [
        f"Simulated swarms without a liar, every contribution audited, {REPLICAS} replicas a stage.",
        f"Integers: {stages} stages, {microbatches} microbatches. Tensors: {few} stages and {fewer}",
        "microbatches of a tiny model, computed with torch. With churn a relay dies every 2 to 8 virtual",
        "seconds and comes back. A verdict is that of one auditor on one contribution; its units are",
        "counted. ",
        table(HEAD, rows),
        "",
        "*Withheld*: no peer that is left has all inputs, as after a death. *Unable*: the auditor has the",
        "weights no more. Two auditors that both report *withheld* convict a relay that is a member again: a",
        "danger for an honest relay that lost its memory, if a sender of its inputs died too.",
        f"Peers that ended with a wrong state: {wrong}.",
    ]
    goals = [
        harness.goal("honest peers accused", "0", f"{accused} in {units:,} audited units", accused == 0),
        harness.at_least("units audited without an accusation", ASKED, 0 if accused else units, "{:,}"),
    ]
    return "\n".join(text), goals


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="CPU minutes with integers")
    parser.add_argument("--tensor-minutes", type=float, default=5.0, help="CPU minutes with torch")
    parser.add_argument("--wall-minutes", type=float, default=math.inf, help="of each process")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    share = arguments.minutes / arguments.processes
    jobs = [Job("integers", 10_000 * n, share, arguments.wall_minutes) for n in range(arguments.processes)]
    jobs.insert(0, Job("tensors", 0, arguments.tensor_minutes, arguments.wall_minutes))
    parts: dict[str, dict[str, Tally]] = {}
    for workers, tallies in harness.in_processes(measure, jobs, len(jobs)):
        for name, tally in tallies.items():
            added(parts.setdefault(workers, {}).setdefault(name, Tally()), tally)
    body, goals = report(parts)
    harness.write("audit-honest", "Audits of honest relays", body, goals=goals, data=parts, dry=arguments.dry)
    return int(any(tally.accused or tally.wrong for tallies in parts.values() for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
