"""Voters in virtual time: disks, wires and machines that fail by a seed, and what must always hold.

A machine is a peer with a disk. Its voter id names both, so a machine whose disk was lost comes back as
another voter (unless a test breaks just that).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from anabranch.counter_rng import CounterRng
from anabranch.protocol.log.hash_chain import LogError, Position
from anabranch.protocol.log.records import Control, Voters, decode_entry
from anabranch.protocol.messages import Appended, Vote, decode, encode
from anabranch.protocol.raft.raft import Raft
from anabranch.protocol.raft.raft_log import RaftLog
from anabranch.protocol.raft.types import Committed, RaftMessage, Role, RoleChanged, Send, Write


class Violation(AssertionError):
    """A property of Raft does not hold; the message begins with its name."""


@dataclass
class Disk:
    """Disk of a machine: the content that a power cut leaves."""

    nonce: int
    founders: tuple[str, ...] = ()
    term: int = 0
    vote: str = ""
    base: int = 0
    lines: list[bytes] = field(default_factory=list)

    def do(self, write: Write, lines: int | None = None) -> None:
        self.term, self.vote = write.term, write.vote
        if not self.lines and write.start > self.base:
            self.base = write.start
        del self.lines[write.start - self.base :]
        self.lines += write.lines[:lines]

    @property
    def length(self) -> int:
        return self.base + len(self.lines)

    def log(self) -> RaftLog:
        start = Position()
        if self.base:
            start = Position(self.base, decode_entry(self.lines[0]).previous)
        return RaftLog(self.lines, start, self.founders)


class Machine:
    def __init__(self, name: str, disk: Disk) -> None:
        self.name = name
        self.disk = disk
        self.raft: Raft | None = None
        self.boot = 0
        self.writes: list[Write] = []
        self.chosen = 0

    @property
    def voter(self) -> str:
        return f"{self.name}/{self.disk.nonce}"


@dataclass(frozen=True)
class Trouble:
    """Probabilities of faults (per message, or per second)."""

    loss: float = 0.0
    double: float = 0.0
    crash: float = 0.0
    lost_disk: float = 0.0
    partition: float = 0.0
    change: float = 0.0
    latency_s: tuple[float, float] = (0.001, 0.05)
    disk_s: tuple[float, float] = (0.001, 0.03)


class RaftWorld:
    """`voters` machines that vote at first, and `others` that may come to vote."""

    def __init__(
        self,
        seed: int,
        voters: int = 3,
        others: int = 0,
        trouble: Trouble | None = None,
        make: Callable[..., Raft] = Raft,
        amnesia: bool = False,
    ) -> None:
        self.draw = random.Random(seed)
        self.trouble = trouble or Trouble()
        self.make = make
        self.amnesia = amnesia
        self.now = 0.0
        self.quiet = False
        self.faults: dict[str, int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._side: dict[str, int] = {}
        self._deaf: set[tuple[str, str]] = set()
        self._pinned = False
        self._number = 0
        # Memory of the checks.
        self.leaders: dict[int, str] = {}
        self.chosen: list[bytes] = []
        self.written: dict[tuple[int, int], bytes] = {}
        names = [f"p{i}" for i in range(voters + others)]
        founders = tuple(f"{name}/0" for name in names[:voters])
        self.machines = {name: Machine(name, Disk(0, founders)) for name in names[:voters]}
        self.machines |= {name: Machine(name, Disk(0)) for name in names[voters:]}
        self.names = names
        for machine in self.machines.values():
            self.start(machine)
        self.after(1.0, self._second)

    # --- time ----------------------------------------------------------------------------------

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + seconds, self._count, action))

    def run(self, until: float) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = until

    # --- machines ------------------------------------------------------------------------------

    def start(self, machine: Machine) -> None:
        disk = machine.disk
        machine.boot += 1
        machine.writes = []
        rng = CounterRng(self.draw.getrandbits(63))
        machine.raft = self.make(machine.voter, disk.log(), rng, 1.0, disk.term, disk.vote)
        machine.chosen = machine.raft.commit_index
        machine.raft.begin(self.now)
        self.settle(machine)

    def crash(self, machine: Machine) -> None:
        """Power off: of the writes on their way some are done, the next perhaps in part."""
        self.count("crash")
        machine.raft = None
        while machine.writes:
            write = machine.writes.pop(0)
            fate = self.draw.random()
            if fate < 0.5:
                machine.disk.do(write)
                continue
            if fate < 0.75:
                machine.disk.do(write, self.draw.randint(0, len(write.lines)))
            break
        machine.writes = []

    def restart(self, machine: Machine, lost_disk: bool = False) -> None:
        if lost_disk:
            self.count("lost disk")
            founders = machine.disk.founders if self.amnesia else ()
            machine.disk = Disk(machine.disk.nonce + (0 if self.amnesia else 1), founders)
        self.start(machine)

    def count(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1

    def up(self) -> list[Machine]:
        return [machine for machine in self.machines.values() if machine.raft is not None]

    def leader(self) -> Machine | None:
        """The leader of the highest term."""
        leading = [m for m in self.up() if m.raft is not None and m.raft.role is Role.LEADER]
        return max(leading, key=lambda m: m.raft.term if m.raft else 0, default=None)

    # --- effects -------------------------------------------------------------------------------

    def settle(self, machine: Machine) -> None:
        """Carry out what a machine asks for; check what must hold."""
        raft = machine.raft
        assert raft is not None
        effects = raft.take()
        own = [e for e in effects if isinstance(e, Committed)]
        for effect in effects:
            match effect:
                case Send(message):
                    self._answer_is_on_disk(machine, message)
                    self._carry(machine, message)
                case Write():
                    self._write(machine, effect)
                case Committed(index, line):
                    self._chosen(machine, index, line)
                case RoleChanged(Role.LEADER, term, _):
                    self._elected(machine, term)
        if own and raft.role is Role.LEADER and decode_entry(own[-1].line).term != raft.term:
            raise Violation(f"commit rule: {machine.voter} chose up to an entry of an older term")
        self._plan(machine)

    def _plan(self, machine: Machine) -> None:
        raft, boot = machine.raft, machine.boot
        assert raft is not None
        deadline = raft.deadline()
        if deadline == float("inf"):
            return

        def wake() -> None:
            if machine.raft is raft and machine.boot == boot and raft.deadline() <= self.now:
                raft.tick(self.now)
                self.settle(machine)

        self.after(max(0.0, deadline - self.now), wake)

    def _write(self, machine: Machine, write: Write) -> None:
        raft, boot = machine.raft, machine.boot
        machine.writes.append(write)
        for index, line in enumerate(write.lines, write.start):
            term = decode_entry(line).term
            if self.written.setdefault((index, term), line) != line:
                raise Violation(f"log matching: two lines at {index} of term {term}")

        def done() -> None:
            if machine.raft is raft and machine.boot == boot and raft is not None:
                while machine.writes and machine.writes[0].number <= write.number:
                    machine.disk.do(machine.writes.pop(0))
                raft.persisted(write.number, self.now)
                self.settle(machine)

        self.after(self.draw.uniform(*self.trouble.disk_s), done)

    def _carry(self, machine: Machine, message: RaftMessage) -> None:
        receiver = self.machines[message.to.partition("/")[0]]
        draw, trouble = self.draw, self.trouble
        copies = 1
        if not self.quiet:
            if draw.random() < trouble.loss:
                return
            copies += draw.random() < trouble.double
        data = encode(message)

        def deliver() -> None:
            cut = self._side.get(machine.name, 0) != self._side.get(receiver.name, 0)
            if receiver.raft is None or cut or (machine.name, receiver.name) in self._deaf:
                return
            arrived = decode(data)
            receiver.raft.receive(arrived, self.now)  # type: ignore[arg-type]
            self.settle(receiver)

        for _ in range(copies):
            self.after(draw.uniform(*trouble.latency_s), deliver)

    # --- invariants ----------------------------------------------------------------------------

    def _answer_is_on_disk(self, machine: Machine, message: RaftMessage) -> None:
        disk = machine.disk
        if isinstance(message, Vote) and message.granted and not message.trial:
            kept = disk.term > message.term or (disk.term == message.term and disk.vote != "")
        elif isinstance(message, Appended):
            longer = disk.length >= message.length or not message.matches
            kept = disk.term > message.term or (disk.term == message.term and longer)
        else:
            return
        if not kept:
            raise Violation(f"persistence before answer: {machine.voter} said {message}")

    def _elected(self, machine: Machine, term: int) -> None:
        if self.leaders.setdefault(term, machine.voter) != machine.voter:
            raise Violation(f"election safety: {machine.voter} and {self.leaders[term]} lead term {term}")
        log = machine.raft.log if machine.raft else None
        assert log is not None
        for index in range(log.start.index, len(self.chosen)):
            if index >= log.length or log.line(index) != self.chosen[index]:
                raise Violation(f"leader completeness: {machine.voter} of term {term} lacks line {index}")

    def _chosen(self, machine: Machine, index: int, line: bytes) -> None:
        if machine.chosen == 0 and not machine.disk.founders:
            machine.chosen = index  # its log begins where the leader's did
        if index != machine.chosen:
            raise Violation(f"state machine safety: {machine.voter} skips from {machine.chosen} to {index}")
        machine.chosen = index + 1
        if index == len(self.chosen):
            self.chosen.append(line)
        elif index > len(self.chosen) or self.chosen[index] != line:
            raise Violation(f"state machine safety: {machine.voter} chose another line {index}")

    # --- events of each second -----------------------------------------------------------------

    def _second(self) -> None:
        draw, trouble = self.draw, self.trouble
        self.after(draw.uniform(0.5, 1.5), self._second)
        for machine in self.up():
            self._use(machine)
        if self.quiet:
            return
        for machine in list(self.machines.values()):
            if machine.raft is None and draw.random() < 0.25:
                self.restart(machine, draw.random() < trouble.lost_disk and self._may_lose(machine))
            elif machine.raft is not None and draw.random() < trouble.crash:
                self.crash(machine)
        if draw.random() < trouble.partition:
            self.split()
        elif draw.random() < 0.2 and not self._pinned:
            self._side, self._deaf = {}, set()

    def split(self) -> None:
        """Part the machines in two, or make some links one-way."""
        self.count("partition")
        if self.draw.random() < 0.6:
            self._side = {name: self.draw.randint(0, 1) for name in self.names}
        else:
            pairs = [(a, b) for a in self.names for b in self.names if a != b]
            self._deaf = {pair for pair in pairs if self.draw.random() < 0.3}

    def isolate(self, machine: Machine) -> None:
        """Until `calm`."""
        self._side, self._pinned = {machine.name: 1}, True

    def _may_lose(self, machine: Machine) -> bool:
        """True if a majority keeps its disks: otherwise nothing is promised but safety."""
        for raft in (m.raft for m in self.up()):
            if raft is None:
                continue
            kept = [v for v in raft.log.voters if self._holds(v) and v != machine.voter]
            if machine.voter in raft.log.voters and 2 * len(kept) <= len(raft.log.voters):
                return False
        return all(m.raft is not None or m is machine for m in self.machines.values())

    def _holds(self, voter: str) -> bool:
        machine = self.machines[voter.partition("/")[0]]
        return machine.voter == voter

    def _use(self, machine: Machine) -> None:
        """Whoever leads proposes, and changes the voters now and then."""
        raft = machine.raft
        if raft is None or raft.role is not Role.LEADER:
            return
        self._change(machine, raft)
        if raft.role is Role.LEADER and (not raft.busy or self.draw.random() < 0.3):
            self._number += 1
            raft.propose(Control("steps", self._number), self.now)
        self.settle(machine)

    def _change(self, machine: Machine, raft: Raft) -> None:
        voters = raft.log.voters
        lost = [v for v in voters if not self._holds(v)]
        fresh = [m.voter for m in self.up() if m.voter not in voters]
        wanted = self.draw.random() < self.trouble.change
        if fresh and (lost or wanted or raft.learners):
            raft.add_learner(self.draw.choice(fresh))
        ready = [v for v in sorted(raft.learners) if raft.caught_up(v) and self._holds(v)]
        change: tuple[str, ...] = ()
        if ready and len(voters) < 5:
            change = (*voters, ready[0])
        elif lost and len(voters) > 1:
            change = tuple(v for v in voters if v != lost[0])
        elif wanted and len(voters) > 3:
            gone = self.draw.choice(voters)
            change = tuple(v for v in voters if v != gone)
        if change and not raft.change_problem(change):
            raft.propose(Voters(change), self.now)
        elif change:
            try:
                raft.propose(Voters(change), self.now)
            except LogError:
                return
            raise Violation("a change of voters that may not be was accepted")

    # --- the end -------------------------------------------------------------------------------

    def calm(self) -> None:
        """No more faults; whatever is down comes back."""
        self.quiet = True
        self._side, self._deaf = {}, set()
        for machine in self.machines.values():
            if machine.raft is None:
                self.start(machine)

    def progress(self, within_s: float) -> None:
        """Once it is quiet more lines are chosen, by all who vote."""
        self.calm()
        target, end = len(self.chosen) + 2, self.now + within_s
        while self.now < end:
            self.run(min(end, self.now + 5.0))
            leading = self.leader()
            voters = leading.raft.log.voters if leading and leading.raft else ()
            holders = [self.machines[v.partition("/")[0]] for v in voters if self._holds(v)]
            if voters and all(m.chosen >= target for m in holders) and 2 * len(holders) > len(voters):
                return
        raise Violation(f"liveness: {len(self.chosen)} lines chosen after {within_s:.0f} quiet seconds")
