"""Audits of honest relays: units audited, by verdict, in swarms without a liar.

    make compiled
    PYTHONPATH=build/compiled nice python -m benchmarks.recovery.audit_honest [--wall-minutes 60]
    nice python -m benchmarks.recovery.audit_honest --workers processes [--wall-minutes 60]

All contributions are audited (share 1). Simulated swarms compute with integers or train a tiny model with
torch, whose codecs (stochastic rounding among them) and sums are drawn. Every second run has *trouble*: every
few seconds, at any moment of a step, a relay dies and comes back with its disk a little later, all replicas
of a stage die at once (so the log goes back), a process freezes for some seconds (so its microbatches are
computed twice), a link breaks, or a new relay joins. Swarms of real processes train over TLS on this machine
(`audit_honest_processes`); in those with trouble, relays are killed and come back.

The tally of each run is kept in build/audit-honest/ under the commit of the program, so a command goes on
where an earlier one was stopped, and reports all runs of that folder whose sizes are those of today. No run
begins after the wall minutes. Ends with status 1 if an honest peer was accused or a state is not that of a
single machine.
"""

from __future__ import annotations

import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import cast

import msgspec
from msgspec import structs

from anabranch.config import RunConfig
from anabranch.config.schema import AuditSection
from anabranch.observe.events import Audit
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import (
    Commit,
    Member,
    Members,
    Revoke,
    Rollback,
    decode_entry,
    entry_hash,
)
from anabranch.sim.fuzz.tensor_world import VOCABULARY, WIRES, MadeUpBatches, Tensors, small_run
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from anabranch.sim.workers.torch_world import node_member, torch_world
from anabranch.train.model.sizes import ModelConfig, model_config
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.stage.protocol_inputs import settings_of
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.recovery.audit_honest_processes import audited_run

#: Audited units of the acceptance of issue 22.
ASKED = 1_000_000
REPLICAS = 3
#: Stages, microbatches and steps of a run with integers, and with torch. Choices: many units share what a
#: step and the data node cost, and a third of a seed's units are computed with torch.
INTEGERS, TENSORS = (8, 48, 8), (4, 48, 9)
#: The same of a run of real processes (a choice: some thousand units, in a minute or two on two quiet cores).
PROCESSES = (2, 24, 60)
#: Virtual seconds between two troubles, until a relay is back, and that a process is frozen (choices: a step
#: takes about two).
TROUBLE_S, BACK_S, FROZEN_S = (1.0, 5.0), (0.5, 5.0), (1.0, 8.0)
#: Kinds of trouble, each as likely as it occurs here.
TROUBLES = ("death",) * 4 + ("freeze",) * 3 + ("cut",) * 2 + ("stage", "joiner")
#: Joiners and troubles of a run at most, and virtual seconds after which a run counts as stuck. Choices: with
#: trouble without end a stage that died may never be whole again.
JOINERS, TROUBLED, STUCK_S = 4, 20, 2_000.0
#: Reasons of removals that accuse the removed peer: parts of the words of the leader.
ACCUSING = (
    "hand over", "did not", "convicted", "computed", "seal", "receipt", "sent another", "false", "wrong",
)  # fmt: skip
KEPT = harness.CACHE / "audit-honest"


@dataclass
class Tally:
    """Counts over the runs of one kind. wrong: peers, steps or runs with a wrong state. audits, units: by
    verdict. doubts: audits by a second replica. removed: members that were removed, by reason. troubles: by
    kind. stuck: runs that did not end."""

    runs: int = 0
    steps: int = 0
    audits: Counter[str] = field(default_factory=Counter)
    units: Counter[str] = field(default_factory=Counter)
    doubts: int = 0
    revoked: int = 0
    rollbacks: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    stuck: int = 0
    cpu_s: float = 0.0

    @property
    def accused(self) -> int:
        """Peers whose key was revoked or that were removed for a deed, and audits that found something."""
        deeds = sum(n for why, n in self.removed.items() if any(words in why for words in ACCUSING))
        return self.revoked + self.audits["different"] + deeds


def integer_world(seed: int) -> World:
    stages, microbatches, steps = INTEGERS
    settings = Settings(
        f"honest-{seed}",
        1,
        stages,
        microbatches,
        steps,
        min_replicas=2,
        audit_share=1.0,
        checkpoint_every=5,
        snapshot_every=2,  # else a stage that died has no state to go back to
    )
    machines = [Machine("d0", 0, capacity=64)]
    machines += [
        Machine(f"r{stage}.{n}", stage, microbatches // 2)
        for stage in range(1, stages + 1)
        for n in range(REPLICAS)
    ]
    return counting_world(settings, machines, seed)


def tensor_run(seed: int) -> tuple[RunConfig, ModelConfig]:
    """Run file without evaluations, with a wire drawn from `seed`, and its model."""
    stages, microbatches, steps = TENSORS
    wire = random.Random(f"wire {seed}").choice(WIRES)
    run = replace(small_run(stages, microbatches, steps, wire), audit=AuditSection(share=1.0))
    run = replace(run, evaluation=replace(run.evaluation, every=0))
    return run, model_config(run.model, VOCABULARY)


def tensor_world(seed: int) -> World:
    stages, microbatches, _ = TENSORS
    run, model = tensor_run(seed)
    batches = MadeUpBatches(run)
    settings = replace(settings_of(run, f"honest-{seed}", model), min_replicas=2)

    def machines(rng: random.Random) -> Iterator[tuple[Member, float]]:
        yield node_member("d0", 0, 64), 1.0
        for stage in range(1, stages + 1):
            for n in range(REPLICAS):
                yield node_member(f"r{stage}.{n}", stage, microbatches // 2), rng.uniform(0.5, 2.0)

    return torch_world(run, model, batches, settings, "d0", machines, seed)


_single_machine = cache(Tensors)


def wrong_commits(world: World, seed: int) -> int:
    """Steps of the run with torch whose states or gradients are not those of a single machine. Of a step that
    was taken again, the last commit counts."""
    single, wrong = _single_machine(*tensor_run(seed)), 0
    records = [decode_entry(line).record for line in world.log]
    for t, commit in {record.t: record for record in records if isinstance(record, Commit)}.items():
        states = tuple(stage.fingerprint_before for stage in commit.stages)
        digests, _ = single.step(None, t, {})
        wrong += states != single.fingerprints(None, t - 1)
        wrong += tuple(stage.digest for stage in commit.stages) != digests
    return wrong


def shake(world: World, seed: int, tally: Tally) -> None:
    """Trouble a run until it ends: deaths (one relay of each stage at a time, or a whole stage), frozen
    processes, broken links, joiners."""
    rng = random.Random(seed)

    def come_back(name: str) -> None:
        node = world.nodes[name]
        world.add(node.next_life(False), "d0", world.clock.now, node.slowness)

    def die(names: Sequence[str]) -> None:
        for name in names:
            world.crash(name)
            world.clock.after(rng.uniform(*BACK_S), partial(come_back, name))

    def join() -> None:
        count = tally.troubles["joiner"]
        like = world.nodes[f"r{rng.randrange(world.settings.stages) + 1}.0"].member
        name = f"j{count}.{seed}"
        member = structs.replace(like, id=name, name=name, address=f"{name}:1", incarnation=1)
        world.add(member, "d0", world.clock.now)

    def trouble() -> None:
        relays = [node for name, node in sorted(world.nodes.items()) if name != "d0"]
        down = {node.member.stage for node in relays if not node.running}
        able = [node for node in relays if node.running and not node.frozen and node.member.stage not in down]
        kind = rng.choice(TROUBLES)
        joined = sum(name.startswith("j") for name in world.nodes)
        if able and not (kind == "joiner" and joined == JOINERS):
            tally.troubles[kind] += 1
            one = rng.choice(able)
            match kind:
                case "death":
                    die([one.id])
                case "stage":
                    die([node.id for node in able if node.member.stage == one.member.stage])
                case "freeze":
                    world.freeze(one.id, rng.uniform(*FROZEN_S))
                case "cut":
                    world.cut(one.id, rng.choice([name for name in world.nodes if name != one.id]))
                case "joiner":
                    join()
        if tally.troubles.total() < TROUBLED:
            world.clock.after(rng.uniform(*TROUBLE_S), trouble)

    world.clock.after(rng.uniform(*TROUBLE_S), trouble)


def nameless(reason: str) -> str:
    """Reason of a removal without names, numbers and the answers of those that were asked."""
    return re.sub(r"; asked: .*", "", re.sub(r"\b[rjd]?\d[\w.]*", "#", reason))


def follow(world: World, tally: Tally) -> None:
    """Run to the end and enter all audits, each with the units of its contribution."""
    begin, read, noted = time.process_time(), 0, 0
    commits: dict[int, Commit] = {}
    cases = set[tuple[object, object]]()
    founder = world.nodes["d0"]
    while founder.stopped is None and world.clock.now < STUCK_S and world.clock.step():
        for line in world.log[read:]:
            record = decode_entry(line).record
            if isinstance(record, Commit):
                commits[record.t] = record
            tally.steps += isinstance(record, Commit)
            tally.revoked += isinstance(record, Revoke)
            tally.rollbacks += isinstance(record, Rollback)
            if isinstance(record, Members):
                tally.removed.update(nameless(reason) for reason in record.removed.values())
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
    tally.stuck += world.history().t != world.settings.steps
    tally.runs += 1
    tally.cpu_s += time.process_time() - begin


def of_processes(kind: str, seed: int) -> Tally:
    """Tally of one run of real processes. An audit counts with the units that its subject has in the commit
    of that name, which a later one may have replaced."""
    events, lines, killed, holds = audited_run(PROCESSES, REPLICAS, seed, kind == "trouble")
    tally = Tally(runs=1, wrong=int(not holds))
    tally.troubles["kill"] = killed
    commits: dict[str, Commit] = {}
    cases = set[tuple[object, object]]()
    for line in lines:
        record = decode_entry(line).record
        if isinstance(record, Commit):
            commits[entry_hash(line)] = record
            tally.steps += 1
        tally.revoked += isinstance(record, Revoke)
        tally.rollbacks += isinstance(record, Rollback)
        if isinstance(record, Members):
            tally.removed.update(nameless(reason) for reason in record.removed.values())
    for event in events:
        if isinstance(event, Audit):
            stage = commits[event.base].stages[event.stage]
            tally.audits[event.verdict] += 1
            tally.units[event.verdict] += stage.owners.count(stage.members.index(event.subject))
            tally.doubts += (event.base, event.subject) in cases
            cases.add((event.base, event.subject))
    tally.stuck = int(max(record.t for record in commits.values()) != PROCESSES[2])
    return tally


@dataclass(frozen=True)
class Job:
    """Runs of these kinds of workers, from `seed` on, in steps of `stride`, for at most so many minutes of
    the wall."""

    workers: tuple[str, ...]
    seed: int
    stride: int
    wall_minutes: float


def simulated(workers: str, kind: str, seed: int) -> Tally:
    """Tally of one simulated run."""
    tally = Tally()
    world = integer_world(seed) if workers == "integers" else tensor_world(seed)
    if kind == "trouble":
        shake(world, seed, tally)
    follow(world, tally)
    tally.wrong = len(wrong_states(world)) if workers == "integers" else wrong_commits(world, seed)
    return tally


def measure(job: Job) -> None:
    """Runs of each kind of workers, without and with trouble, in turn, each with its tally in a file. Each
    that accuses somebody, ends in a wrong state, or does not end is told."""
    configure(threads=1)
    seed, wall, commit = job.seed, time.monotonic() + 60.0 * job.wall_minutes, harness.program()
    while True:
        for workers, kind in product(job.workers, KINDS):
            path = kept_at(commit, workers, kind, seed)
            if path.exists():
                continue
            if time.monotonic() >= wall:
                return
            real = workers == "processes"
            tally = of_processes(kind, seed) if real else simulated(workers, kind, seed)
            harness.write_whole(path, msgspec.json.encode(tally))
            if tally.accused or tally.wrong or tally.stuck:
                print(f"{workers}, {kind}, seed {seed}: {tally}", flush=True)
        seed += job.stride


#: Stages, microbatches and steps of a run, by its workers.
SIZES = {"tensors": TENSORS, "integers": INTEGERS, "processes": PROCESSES}
#: Workers of the runs that a command takes by itself.
SIMULATED = ("tensors", "integers")
KINDS = ("calm", "trouble")


def kept_at(commit: str, workers: str, kind: str, seed: int | str) -> Path:
    """File with the tally of one run. commit, seed: "*" for a pattern of all."""
    size = ".".join(map(str, SIZES[workers]))
    return KEPT / f"{commit}-{workers}-{size}-{kind}-{seed}.json"


def added(total: Tally, more: Tally) -> None:
    """Add the counts of `more` to `total`."""
    for name, value in vars(more).items():
        setattr(total, name, getattr(total, name) + value)


# --- the report -----------------------------------------------------------------------------------------


VERDICTS = ("same", "different", "withheld", "unable", "expired")
HEAD = [
    "workers", "runs", "committed steps", "troubles", "units found the same", "different", "withheld",
    "unable", "expired", "audits by a second replica", "keys revoked", "rollbacks",
    "audited units per CPU second",
]  # fmt: skip


def merged(counters: Iterable[Counter[str]]) -> Counter[str]:
    return sum(counters, Counter[str]())


def report(parts: dict[str, dict[str, Tally]], commits: list[str]) -> tuple[str, list[Goal]]:
    """Markdown of the result, and its goals."""
    rows = []
    for workers, tallies in parts.items():
        for name, each in tallies.items():
            verdicts = [f"{each.units[verdict]:,}" for verdict in VERDICTS]
            counts = [
                each.runs,
                f"{each.steps:,}",
                each.troubles.total(),
                *verdicts,
                each.doubts,
                each.revoked,
                each.rollbacks,
            ]
            speed = f"{each.units.total() / each.cpu_s:.0f}" if each.cpu_s else ""
            rows.append([f"{workers}, {name}", *counts, speed])
    every = [tally for tallies in parts.values() for tally in tallies.values()]
    units = sum(tally.units["same"] + tally.units["different"] for tally in every)
    troubles = ", ".join(f"{kind} {n:,}" for kind, n in merged(t.troubles for t in every).most_common())
    removed, stuck = merged(tally.removed for tally in every), sum(tally.stuck for tally in every)
    accused, wrong = sum(tally.accused for tally in every), sum(tally.wrong for tally in every)
    (stages, microbatches, _), (few, fewer, _) = INTEGERS, TENSORS
    tensors = sum(tally.units["same"] + tally.units["different"] for tally in parts["tensors"].values())
    real = sum(tally.units["same"] + tally.units["different"] for tally in parts["processes"].values())
    text = [
        f"Simulated swarms without a liar, every contribution audited, {REPLICAS} replicas a stage.",
        f"Integers: {stages} stages, {microbatches} microbatches. Tensors: {few} stages and {fewer}",
        "microbatches of a tiny model, computed with torch, with five kinds of wire (stochastic rounding",
        "among them). With trouble, every one to five virtual seconds, a relay or a whole stage dies and",
        f"comes back, a process freezes, a link breaks, or a relay joins ({troubles}).",
        f"Processes: real ones over TLS, {PROCESSES[0]} stages, {PROCESSES[1]} microbatches, a tiny model;",
        "with trouble, relays are killed and come back.",
        "A verdict is that of one auditor on one contribution; its units are counted.",
        "",
        table(HEAD, rows),
        "",
        "*Withheld*: no peer that is left has all inputs, as after a death. *Unable*: the auditor has the",
        "weights no more. *Expired*: nobody was left to audit in time.",
        f"Of the units {tensors:,} ({tensors / max(units, 1):.0%}) were computed with torch in simulated",
        f"swarms, and {real:,} by real processes. Peers (integers), steps (torch) and runs (processes) with",
        f"another state than a single machine's: {wrong}; runs that did not end: {stuck}. Programs:",
        f"{', '.join(commits)}.",
        "",
        table(["members removed because", "times"], removed.most_common()),
    ]
    goals = [
        harness.goal("honest peers accused", "0", f"{accused} in {units:,} audited units", accused == 0),
        harness.at_least("units audited without an accusation", ASKED, 0 if accused else units, "{:,}"),
    ]
    return "\n".join(text), goals


def kept() -> tuple[dict[str, dict[str, Tally]], list[str]]:
    """Tallies of all runs in the folder with the sizes of today, by workers and kind, and the commits of
    their programs."""
    parts = {workers: {kind: Tally() for kind in KINDS} for workers in SIZES}
    commits = set[str]()
    for workers, kind in product(SIZES, KINDS):
        for path in KEPT.glob(kept_at("*", workers, kind, "*").name):
            tally = Tally()
            for key, value in msgspec.json.decode(path.read_bytes()).items():
                setattr(tally, key, Counter(value) if isinstance(value, dict) else value)
            # Older tallies name in a reason whoever was asked.
            tally.removed = merged(Counter({nameless(why): n}) for why, n in tally.removed.items())
            added(parts[workers][kind], tally)
            commits.add(path.name.partition("-")[0])
    return parts, sorted(commits)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--wall-minutes", type=float, default=60.0)
    parser.add_argument("--workers", choices=SIZES, nargs="*", default=list(SIMULATED))
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    count, workers = arguments.processes, tuple(arguments.workers)
    if arguments.wall_minutes:
        jobs = [Job(workers, number, count, arguments.wall_minutes) for number in range(count)]
        if "processes" in workers:  # a process of a pool starts no further ones
            measure(*jobs)
        else:
            list(harness.in_processes(measure, jobs, count))
    parts, commits = kept()
    body, goals = report(parts, commits)
    data = {"commits": commits, "runs": parts}
    harness.write("audit-honest", "Audits of honest relays", body, goals=goals, data=data, dry=arguments.dry)
    return int(any(tally.accused or tally.wrong for tallies in parts.values() for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
