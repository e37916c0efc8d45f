"""Honest machines beside a liar: seats that they lose, steps that the run keeps, by circumstance and deed.

    nice python -m benchmarks.byzantine.honest_beside_liar [--seeds 0 1 2 3] [--circumstances NAME ...]

The real protocol in virtual time, workers with integers. Each circumstance of honest machines
(`honest_circumstances`) meets each deed of one liar (`liar_deeds`), which is in the stage of the machine
that the circumstance concerns, in the next one, or a data node, by turns. A seed has a quarter of the pairs.
The control is the same swarm and seed, in which that machine is honest. Machines that lose their seats, or
crash, come back after five seconds, the liar as well.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import NamedTuple

from anabranch.protocol.log.records import Members, Rollback, decode_entry
from anabranch.sim.fuzz.guest_deeds import GuestRole
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.violation import Violation
from anabranch.sim.workers.integer_world import wrong_states
from benchmarks import harness
from benchmarks.byzantine.honest_circumstances import (
    CIRCUMSTANCES,
    LIAR,
    RESTART_S,
    VICTIM,
    stage_of,
    starts_again,
    world_of,
)
from benchmarks.byzantine.liar_deeds import DEEDS, Liar

#: Committed steps before the liar begins, virtual seconds from then on that count, and virtual seconds after
#: which it must have begun.
AFTER, WINDOW_S, LATEST_S = 4, 120.0, 120.0
#: Most seconds for which a run goes on after its window, while a step is held up.
LONGER_S = 480.0
#: Seconds without a step after which a run counts as one that stands.
STANDS_S = 100.0
#: Parts of the grid; a seed has one of them.
PARTS = 4
#: Seconds between two looks of the machines' supervisors.
LOOK_S = 1.0
#: Names of controls: runs in which the liar is honest, of the same kind as those of a deed.
PLAIN, AUDITED, HIDDEN = "none", "none, with audits", "none, hidden relays"


class Job(NamedTuple):
    """Run of the grid. deed: of the liar, or the name of a control."""

    circumstance: str
    deed: str
    role: str
    seed: int

    @property
    def control(self) -> Job:
        deed = DEEDS[self.deed]
        return self._replace(deed=AUDITED if deed.audited else HIDDEN if deed.hides else PLAIN)


@dataclass
class Course:
    """Course of a run from the liar's begin on. steps: committed ones. longest_s: seconds without a step, at
    most. lost: "peer: reason" for each time that an honest machine lost its seat, moves apart. moves: relays
    that were moved. backward: times that the log went back. out_s: seconds until the liar lost its seat (-1:
    it did not). did: lies. crashes: number for each machine. skipped: steps that are skipped in the
    end. wrong: honest machines with a false state, or a failure of the program."""

    steps: int = 0
    longest_s: float = 0.0
    lost: list[str] = field(default_factory=list)
    moves: int = 0
    backward: int = 0
    skipped: int = 0
    out_s: float = -1.0
    did: int = 0
    crashes: dict[str, int] = field(default_factory=dict)
    wrong: str = ""


class _Run:
    """Run of one job. began_s: time at which the liar began (infinite: not yet)."""

    def __init__(self, job: Job) -> None:
        name, deed, role, seed = job
        circumstance, lie = CIRCUMSTANCES[name], DEEDS.get(deed)
        control = job.control.deed if lie is not None else deed
        audited, hides = control == AUDITED, control == HIDDEN
        self.world = world = world_of(circumstance, role, seed, audited, hides)
        self.circumstance, self.found, self.began_s = circumstance, Course(), float("inf")
        self.liar: Liar | None = None
        if lie is not None:
            as_role = GuestRole.SERVES if stage_of(circumstance, role) else GuestRole.DATA
            self.liar = Liar(world, LIAR, lie, as_role, VICTIM, seed)
            if lie.early:
                self.liar.begin()
        self._log_read, self._step_s, self._t = 0, 0.0, 0
        self._crashed: Counter[str] = Counter()
        self._ended: set[Node] = set()
        world.clock.after(LOOK_S, self._supervise)

    def course(self) -> Course:
        world, found = self.world, self.found
        try:
            while world.clock.step() and not self._over():
                if len(world.log) > self._log_read:
                    self._read()
        except (Violation, Exception) as error:
            found.wrong = f"{type(error).__name__}: {error}"
        found.longest_s = max(found.longest_s, world.clock.now - self._step_s)
        found.did = 0 if self.liar is None else self.liar.did + len(self.liar.told)
        found.crashes = dict(self._crashed)
        found.skipped = sum(commit.verdict == "skip" for commit in world.history().commits)
        if found.skipped:  # a single machine would not have skipped them
            return found
        wrong = {peer: why for peer, why in wrong_states(world).items() if peer != LIAR}
        found.wrong = found.wrong or "; ".join(f"{peer} {why}" for peer, why in wrong.items())
        return found

    def _over(self) -> bool:
        """True once the window has passed, and a step that is held up at its end is committed or given up."""
        now, end_s = self.world.clock.now, min(LATEST_S, self.began_s) + WINDOW_S
        return now >= end_s and (now >= end_s + LONGER_S or self._step_s >= end_s - STANDS_S / 4.0)

    def _read(self) -> None:
        """Read the log's new records."""
        world, found, now = self.world, self.found, self.world.clock.now
        begun = now >= self.began_s
        for line in world.log[self._log_read :]:
            record = decode_entry(line).record
            if isinstance(record, Rollback):
                found.backward += begun
            elif isinstance(record, Members):
                moved = {member.id for member in record.joined}
                for peer, why in record.removed.items():
                    if peer in moved:
                        found.moves += 1
                    elif peer != LIAR:
                        found.lost.append(f"{peer}: {why}")
                    elif begun and found.out_s < 0.0:
                        found.out_s = now - self.began_s
        self._log_read, t = len(world.log), world.history().t
        if t > self._t:
            found.longest_s = max(found.longest_s, now - self._step_s) if begun else 0.0
            found.steps += (t - self._t) * (self.began_s <= now < self.began_s + WINDOW_S)
            self._step_s = now
        self._t = t
        if t >= AFTER and not begun:
            self.began_s = now
            if self.liar is not None and not self.liar.begun:
                self.liar.begin()
            self.circumstance.happens(world)

    def _supervise(self) -> None:
        """Start processes again that crashed or lost their seats, and let those without a link dial."""
        world = self.world
        for name in sorted(world.nodes):
            node = world.nodes[name]
            if not node.running and node not in self._ended:
                self._ended.add(node)
                self._crashed[name] += not node.alive
                world.clock.after(RESTART_S, partial(starts_again, world, name))
            elif node.running and not node.links and not node.peer.shared.entry.done:
                world.dial(node, world.leading().id)
        world.clock.after(LOOK_S, self._supervise)


def course(job: Job) -> Course:
    return _Run(job).course()


def jobs(circumstances: Collection[str], deeds: Collection[str], seed: int) -> list[Job]:
    """Jobs of one of PARTS parts of the grid, with their controls."""
    found = dict[Job, None]()
    for row, name in enumerate(CIRCUMSTANCES):
        circumstance = CIRCUMSTANCES[name]
        plain = not {"rounds", "delay"} & circumstance.settings.keys()
        for column, deed in enumerate(DEEDS):
            unfit = (DEEDS[deed].audited and not plain) or (DEEDS[deed].early and circumstance.beside == 0)
            drawn = (row + column + seed) % PARTS == 0 and name in circumstances and deed in deeds
            if not drawn or unfit:
                continue
            # Nobody audits data nodes.
            roles = [role for role in circumstance.where if role != "data" or not DEEDS[deed].audited]
            role = roles[(row + column + seed) // PARTS % len(roles)]
            job = Job(name, deed, role, seed)
            found[job.control] = found[job] = None
    return list(found)


def lost_beside(found: Course, control: Course) -> list[str]:
    """Seats lost beyond those of the control, and beyond the machine's crashes."""
    seats, apart = dict[str, list[str]](), Counter(each.partition(":")[0] for each in control.lost)
    for each in found.lost:
        seats.setdefault(each.partition(":")[0], []).append(each)
    return [
        each
        for peer, every in seats.items()
        for each in every[max(apart[peer], found.crashes.get(peer, 0)) :]
    ]


def share(found: Course, control: Course) -> float:
    return found.steps / max(1, control.steps)


def rows_of(courses: dict[Job, Course], place: int) -> list[list[object]]:
    """Rows of a table by circumstance (place 0) or deed (1): name, runs, seats lost in their controls (by
    circumstance) and beyond them, share of the control's steps in the middle and at worst, most seconds
    without a step, runs in which the liar lost its seat."""
    rows = list[list[object]]()
    lies = [job for job in courses if job.deed in DEEDS]
    for name in dict.fromkeys(job[place] for job in lies):
        runs = [job for job in lies if job[place] == name]
        shares = {job: share(courses[job], courses[job.control]) for job in runs}
        controls = sum(len(courses[job].lost) for job in {job.control for job in runs})
        worst = min(runs, key=lambda job: shares[job])
        longest_s = max(courses[job].longest_s for job in runs)
        lost = sum(len(lost_beside(courses[job], courses[job.control])) for job in runs)
        out = sum(courses[job].out_s >= 0.0 for job in runs)
        row: list[object] = [name, len(runs)] if place else [name, len(runs), controls]
        at_worst = f"{shares[worst]:.0%} ({worst[1 - place]}, {worst.role})"
        rows.append([*row, lost, f"{median(shares.values()):.0%}", at_worst, f"{longest_s:.0f}", out])
    return rows


def findings(courses: dict[Job, Course]) -> tuple[list[str], list[str], list[str]]:
    """Seats lost, runs that stood, and false or skipped steps and failures, each in words."""
    lost, stood, wrong = list[str](), list[str](), list[str]()
    for job, found in courses.items():
        where = f"{job.circumstance}; {job.deed}, {job.role}"
        if job.deed in DEEDS:
            lost += [f"{where}: {each}" for each in lost_beside(found, courses[job.control])]
        if found.longest_s > STANDS_S:
            stood.append(f"{where}: {found.longest_s:.0f} s")
        if found.skipped:
            wrong.append(f"{where}: {found.skipped} steps were skipped")
        if found.wrong:
            wrong.append(f"{where}: {found.wrong}")
    return lost, stood, wrong


def report(courses: dict[Job, Course], dry: bool) -> None:
    lost, stood, wrong = findings(courses)
    goals = [
        harness.goal("seats that honest machines lost beyond the control", "0", str(len(lost)), not lost),
        harness.goal(f"runs without a step for more than {STANDS_S:.0f} s", "0", str(len(stood)), not stood),
        harness.goal("false states, skipped steps, failures", "0", str(len(wrong)), not wrong),
    ]
    head = ["seats lost beside a liar", "steps kept, middle", "at worst", "longest step, s", "liar out"]
    body = [
        "Simulated: one liar beside honest machines, the real protocol, workers with integers. Each",
        "circumstance meets each deed (a quarter of them with each seed); what counts are",
        f"{WINDOW_S:.0f} virtual seconds from the liar's begin on. *Seats lost*: removals beyond the",
        "control's, in which the liar is honest, and beyond the machine's crashes, moves apart. *Steps*",
        "*kept*: steps over those of the control. *Liar out*: runs in which it lost its seat.",
        "",
        harness.table(["circumstance", "runs", "in controls", *head], rows_of(courses, 0)),
        "",
        harness.table(["deed", "runs", *head], rows_of(courses, 1)),
    ]
    named = {"Seats lost": lost, "Runs that stood": stood, "False states, skipped steps, failures": wrong}
    for title, found in named.items():
        body += ["", f"**{title}** ({len(found)}):", "", *(f"- {each}" for each in found)] if found else []
    data = [{**job._asdict(), **asdict(found)} for job, found in courses.items()]
    title = "Honest machines beside a liar"
    harness.write("honest-beside-liar", title, "\n".join(body), goals=goals, data=data, dry=dry)


def told(job: Job, found: Course, control: Course) -> list[object]:
    """Cells that tell of a run, as it ends."""
    lost = lost_beside(found, control) if job.deed in DEEDS else found.lost
    flags = {"LOST": lost, "STANDS": found.longest_s > STANDS_S, "WRONG": found.wrong or found.skipped}
    words = (
        f"{found.steps}/{control.steps} steps, longest {found.longest_s:.0f}/{control.longest_s:.0f} s, "
        f"out after {found.out_s:.0f} s, {found.did} lies, {found.moves} moves, back {found.backward}"
    )
    return [*job, " ".join(flag for flag, holds in flags.items() if holds), words, lost, found.wrong]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(PARTS)))
    parser.add_argument("--circumstances", nargs="+", default=list(CIRCUMSTANCES))
    parser.add_argument("--deeds", nargs="+", default=list(DEEDS))
    args = parser.parse_args()
    courses = dict[Job, Course]()
    for job in [job for seed in args.seeds for job in jobs(args.circumstances, args.deeds, seed)]:
        begun = time.process_time()
        courses[job] = found = course(job)
        control = courses[job.control] if job.deed in DEEDS else found
        print(*told(job, found, control), f"{time.process_time() - begun:.1f} CPU s", sep=" | ", flush=True)
    report(courses, args.dry)


if __name__ == "__main__":
    main()
