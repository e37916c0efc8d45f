"""Simulated peer, its disk and its links: carries out the protocol's effects in virtual time.

Not here: the network and the machines (`swarm_world`), which a peer uses as its `Environment`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from msgspec import structs

from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.events import Finished, Send
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import (
    Assemble,
    AuditUnit,
    CheckState,
    Embed,
    Forward,
    InitState,
    Payload,
    ProveState,
    Result,
    Snapshot,
    Task,
)
from anabranch.protocol.log.hash_chain import Position
from anabranch.protocol.log.records import Genesis, Member, decode_entry
from anabranch.protocol.log.step_parameters import Schedule
from anabranch.protocol.messages import AnyMessage
from anabranch.protocol.peer.peer import Peer
from anabranch.sim.kernel.clock import Clock
from anabranch.sim.kernel.violation import Violation

#: Tasks that may fail in a correct run: a step is taken before the snapshot's turn comes, the state that is
#: checked is wrong, what a peer sent is no gradient, or the weights of an audited step are gone. (And inner
#: steps from a state of the slot that the machine does not have.)
_MAY_FAIL = (Assemble, AuditUnit, CheckState, ProveState, Snapshot)

#: Checkpoint on disk: stage -> (pieces of the state, fingerprint).
Checkpoint = dict[int, tuple[tuple[Payload, ...], str]]


def _may_fail(task: Task) -> bool:
    """True if a task may fail in a correct run: one of `_MAY_FAIL`, or the begin of a slot whose carried
    state the machine lacks. Errors of other tasks are the simulation's."""
    return isinstance(task, _MAY_FAIL) or (isinstance(task, Embed | Forward) and task.carried > 0)


class TaskExecutor(Protocol):
    """Executor of a peer's tasks: a `train.stage.worker.Worker`, or a stand-in with the same tasks."""

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result: ...


class Environment(ABC):
    """Interface of the world to a simulated peer: clock, network, machines and observers.

    schedule: step parameters of the founder; None until it is added. checkpoints: iteration -> checkpoint.
    make_computer: (stage) -> executor of the tasks of a peer at that stage. make_own: (peer, stage) ->
    executor of the tasks of a peer that has data of its own; None: no peer has. watchers: called after every
    event that a node has handled (`Node.handle`). bookkeepers: called, after the watchers, for finished
    tasks, events of the founder, and events at which a voter learned of committed entries. notes: (time,
    peer, kind, fields) of what peers report for the event log. log: all committed entries, encoded. strict:
    True if a failed task is an error of the simulation, those that may fail in a correct run apart.
    keeps_states: True if a process that exits by itself leaves its stage's state on its disk.
    """

    def __init__(
        self, settings: Settings, genesis: Genesis, make_computer: Callable[[int], TaskExecutor]
    ) -> None:
        self.clock = Clock()
        self.settings = settings
        self.genesis = genesis
        self.schedule: Schedule | None = None
        self.checkpoints: dict[int, Checkpoint] = {}
        self.make_computer = make_computer
        self.make_own: Callable[[str, int], TaskExecutor] | None = None
        self.watchers: list[Callable[[Node, ev.Event], None]] = []
        self.bookkeepers: list[Callable[[Node, ev.Event], None]] = []
        self.notes: list[tuple[float, str, str, dict[str, object]]] = []
        self.log: list[bytes] = []
        self.strict = True
        self.keeps_states = False

    @abstractmethod
    def send(self, sender: Node, peer: str, message: AnyMessage, payload: Payload | None) -> None:
        """Send a message of the node `sender` to `peer` through the simulated network. Nothing happens
        without an open link."""

    @abstractmethod
    def dial(self, node: Node, peer: str, address: str = "") -> None:
        """Begin to connect a node to a peer; the node gets a LinkUp or LinkDown event later, or neither if it
        has ended or has another link by then. address: where the node believes the peer to be ("": the
        truth)."""

    @abstractmethod
    def end_circuits(self, carrier: str) -> None:
        """Break the links that the process `carrier` forwarded for others, as it has ended."""

    @abstractmethod
    def hang_up(self, node: Node, peer: str, reason: str) -> None:
        """Close the link of a node to `peer`. The node forgets it at once, without an event. The peer gets a
        LinkDown event once the messages sent before have arrived; a world with access lines loses payloads
        that have not left. Nothing happens without a link."""

    @abstractmethod
    def replace(self, node: Node, peer: str, link: Link) -> None:
        """Close `link`, which a node has to `peer`, at once: a newer one to the same peer is open. The node
        gets a LinkDown event at once; the other end gets it later, unless it has another link then."""

    @abstractmethod
    def task_s(self, node: Node, task: Task) -> float:
        """Virtual seconds that a task takes at a node."""


class Link:
    """Connection between two simulated processes. open: True until it is closed or broken. ends: its two
    peers. nodes: peer -> its process. cut_by: peer whose process died, if its messages in flight may still
    arrive; else None. quiet_at: virtual time at which the last message arrives. dialled_by: peer that made
    it. via: carrier that forwards its messages ("": none)."""

    __slots__ = ("_bulky", "_small", "cut_by", "dialled_by", "ends", "nodes", "open", "quiet_at", "via")

    def __init__(self, one: Node, other: Node, via: str = "") -> None:
        """Open link that `one` has dialled to `other`, through the carrier `via` ("": none). The caller tells
        both ends of it (`Node.link_up`)."""
        self.dialled_by, self.via = one.id, via
        self.ends = frozenset((one.id, other.id))
        self.nodes = {one.id: one, other.id: other}
        self.open = True
        self.cut_by: str | None = None
        self.quiet_at = 0.0
        self._small: dict[str, float] = {}
        self._bulky: dict[str, float] = {}
        """Sender -> arrival of its last message, for messages without (`_small`) and with a payload."""

    def arrival(self, sender: str, bulk: bool, planned: float) -> float:
        """Arrival time of a message from `sender` that is due at `planned`: not before an earlier message of
        its sender. Messages without payload keep their order, and so do those with a payload (`bulk`), but
        not one kind with the other. The link remembers the time, so each message is asked about once."""
        lane = self._bulky if bulk else self._small
        at = lane.get(sender, 0.0)
        if planned > at:
            at = planned
        lane[sender] = at
        if at > self.quiet_at:
            self.quiet_at = at
        return at


@dataclass
class Disk:
    """Disk of a simulated machine: log entries and voter state, which survive the death of its process.
    nonce: name of the disk. start: index of the first log entry on it. lines: encoded log entries. states:
    stage -> its state, where the world keeps states."""

    nonce: str = ""
    term: int = 0
    vote: str = ""
    start: int = 0
    lines: list[bytes] = field(default_factory=list)
    states: dict[int, ev.KeptState] = field(default_factory=dict)

    def kept(self, seed: int) -> SavedVoterState:
        """Contents of the disk as a new process reads them. seed: seed of that process's random numbers."""
        start = Position(self.start, decode_entry(self.lines[0]).previous) if self.lines else Position()
        return SavedVoterState(self.nonce, self.term, self.vote, tuple(self.lines), start, seed=seed)

    def do(self, write: ev.Persist) -> None:
        self.term, self.vote = write.term, write.vote
        if not self.lines:
            self.start = write.start
        del self.lines[write.start - self.start :]
        self.lines += write.lines


class Node:
    """Process of a simulated peer: the protocol's peer with its links, disk and task executor. slowness:
    factor on the seconds of its tasks. alive: False after the process was killed. stopped: (reason, True if
    without an error) after the process has exited by itself; None before."""

    def __init__(self, world: Environment, peer: Peer, member: Member, slowness: float) -> None:
        self.world = world
        self.peer = peer
        self.id = member.id
        self.member = member
        self.slowness = slowness
        self.alive = True
        self.computer: TaskExecutor | None = None
        self.task_at = 0.0
        """Virtual time at which its last task started."""
        self.stopped: tuple[str, bool] | None = None
        self.links: dict[str, Link] = {}
        self.seen: dict[str, int] = {}
        """Peer -> highest incarnation that was linked; a process with a lower one is refused."""
        self.disk = Disk()
        self.log_read = 0
        """Number of committed log entries that the world has read from this node."""
        self._unwritten: list[ev.Persist] = []
        self._backlog: list[ev.Event] | None = None
        self.catching_up = False
        """True while the process handles events that came while it was frozen: newest links are unknown."""
        self._wake_at = float("inf")
        self._clock_ahead_s = 0.0
        self._unseen: Counter[str] = Counter()
        """Peer -> link changes that a frozen process has not handled yet. Until then its messages to that
        peer go to a connection that no longer exists."""
        self._hung_up: set[str] = set()
        """Peers whose connections it closed while catching up; messages of those connections are dropped."""

    def next_life(self, without_disk: bool = False) -> Member:
        """Member record for the next process of the same machine: with the next incarnation, and with another
        disk if `without_disk`. The node itself does not change."""
        disk = f"{self.member.disk}+" if without_disk else self.member.disk
        return structs.replace(self.member, incarnation=self.member.incarnation + 1, disk=disk)

    @property
    def running(self) -> bool:
        """True if the process was neither killed nor has exited."""
        return self.alive and self.stopped is None

    @property
    def stage(self) -> int:
        """Stage that the peer serves or joins (-1: none yet)."""
        return self.peer.ctx.run.stage

    def handle(self, event: ev.Event) -> None:
        """Pass an event to the protocol, carry out its effects, and call the observers. Events of a frozen
        process are queued, those of an ended one are dropped. Raises what the protocol or an observer raises;
        Violation if the peer's voter has another committed log entry than the world; RuntimeError if a task
        fails that may not (only in a strict world)."""
        if not self.alive or self.stopped is not None:  # not `running`: a call for each event
            return
        if self._backlog is not None:
            self._backlog.append(event)
            if isinstance(event, ev.LinkUp | ev.LinkDown):
                self._unseen[event.peer] += 1
            return
        world, peer = self.world, self.peer
        for effect in peer.handle(event, world.clock.now + self._clock_ahead_s):
            self._carry_out(effect)
        more = peer.voter.raft.commit_index != self.log_read
        if more:
            self._report_committed()
        for watcher in world.watchers:
            watcher(self, event)
        if more or type(event) is Finished or self.id == world.genesis.leader:
            for bookkeeper in world.bookkeepers:
                bookkeeper(self, event)
        if self.running:  # the event may have ended it
            self._plan_wake()

    def freeze(self) -> None:
        """Stop the process (SIGSTOP): its events wait in a queue until `thaw`. A second call changes
        nothing."""
        self._backlog = self._backlog or []

    def thaw(self) -> None:
        """Continue the stopped process: it handles expired timers first, then the queued events. Messages of
        connections that it closes meanwhile are dropped."""
        backlog, self._backlog = self._backlog or [], None
        self.catching_up = True
        self.handle(ev.Wake())
        for event in backlog:
            if isinstance(event, ev.LinkUp | ev.LinkDown):
                self._unseen[event.peer] -= 1
                self._hung_up.discard(event.peer)
            if not (isinstance(event, ev.Received) and event.peer in self._hung_up):
                self.handle(event)
        self._hung_up.clear()
        self.catching_up = False

    @property
    def frozen(self) -> bool:
        return self._backlog is not None

    def jump_clock(self, seconds: float) -> None:
        """Set the clock of the process forward or (negative) back by `seconds`; it handles timers that are
        due then at once. Virtual time does not change."""
        self._clock_ahead_s += seconds
        if self._wake_at < self.world.clock.now + seconds:
            self.handle(ev.Wake())

    def _written(self, number: int) -> None:
        """Do the disk writes up to `number` and report them to the protocol (Persisted). Writes that wait
        when the process is killed are lost. Those of a frozen process, or of one that exited by itself, are
        done; their report waits or is dropped."""
        while self._unwritten and self._unwritten[0].number <= number and self.alive:
            self.disk.do(self._unwritten.pop(0))
        self.handle(ev.Persisted(number))

    def link_up(
        self, link: Link, peer: str, incarnation: int, credential: ev.VerifiedCredential | None = None
    ) -> None:
        former = self.links.get(peer)
        if former is not None:
            self.world.replace(self, peer, former)
        self.links[peer] = link
        self.seen[peer] = max(incarnation, self.seen.get(peer, 0))
        self.handle(ev.LinkUp(peer, incarnation, credential, link.via))

    def link_down(self, link: Link, peer: str, reason: str) -> None:
        if self.links.get(peer) is link:
            del self.links[peer]
            self.handle(ev.LinkDown(peer, reason))

    def end(self, reason: str, ok: bool) -> None:
        """Let the process exit by itself: leave its stage's state on its disk if the world keeps states, and
        close its links and circuits. It handles no events from then on. reason: of the exit, for the story.
        ok: True without an error."""
        self.stopped = (reason, ok)
        if self.world.keeps_states and self.computer is not None and self.peer.replica.t >= 0:
            t, stage = self.peer.replica.t, self.peer.ctx.run.stage
            own, state = self.peer.states.find(stage, t), self.computer.run(Snapshot(t))
            if own is not None:  # in a round the worker's state is ahead of it
                self.disk.states[stage] = ev.KeptState(t, own.fingerprint, own.pieces, own.hashes)
            elif state.outputs:
                self.disk.states[stage] = ev.KeptState(t, state.fingerprint, state.outputs, state.hashes)
        for peer in sorted(self.links):
            self.world.hang_up(self, peer, "the process ended")
        self.world.end_circuits(self.id)

    def _plan_wake(self) -> None:
        deadline = self.peer.deadline() - self._clock_ahead_s
        if deadline < self._wake_at:
            self._wake_at = deadline
            self.world.clock.at(deadline, partial(self._wake, deadline))

    def _wake(self, planned: float) -> None:
        if planned == self._wake_at:
            self._wake_at = float("inf")
            self.handle(ev.Wake())

    def _carry_out(self, effect: ev.Effect) -> None:
        world = self.world
        if isinstance(effect, Send):  # most effects
            if not self._unseen or not self._unseen[effect.peer]:
                world.send(self, effect.peer, effect.message, effect.payload)
            return
        match effect:
            case ev.Run(task, inputs):
                self._run(task, inputs)
            case ev.Dial(peer, address):
                world.dial(self, peer, address)
            case ev.HangUp(peer, reason):
                if not self._unseen[peer]:  # otherwise the connection that it knows no longer exists
                    world.hang_up(self, peer, reason)
                if self.catching_up:
                    self._hung_up.add(peer)
            case ev.BuildStage(stage):
                own = world.make_own
                self.computer = world.make_computer(stage) if own is None else own(self.id, stage)
                result = self.computer.run(InitState(0))
                built = ev.StageBuilt(stage, result.fingerprint, self.disk.states.get(stage))
                world.clock.after(0.01, lambda: self.handle(built))
            case ev.Describe():
                schedule = world.schedule
                if schedule is not None and self.member.stage != 0:
                    schedule = replace(schedule, manifest=None)  # it has no corpus
                corpus = world.genesis.corpus_fingerprint
                described = ev.Described(self.member, world.settings, corpus, schedule=schedule)
                world.clock.after(0.01, lambda: self.handle(described))
            case ev.Persist(number):
                self._unwritten.append(effect)
                world.clock.after(0.001, lambda: self._written(number))
            case ev.WriteCheckpoint(t, base, stages):
                world.checkpoints[t] = {s: (tuple(p), f) for s, (p, f) in stages.items()}
                world.clock.after(0.01, lambda: self.handle(ev.CheckpointWritten(t, base)))
            case ev.ReadCheckpoint(t, stage):
                world.clock.after(0.01, lambda: self._read_checkpoint(t, stage))
            case ev.Note(kind, fields):
                world.notes.append((world.clock.now, self.id, kind, dict(fields)))
            case ev.Stop(reason, ok):
                self.end(reason, ok)

    def _read_checkpoint(self, asked_t: int, stage: int) -> None:
        """Hand a stage's state from the checkpoint of iteration `asked_t` (negative: the newest one) to the
        protocol; if there is none, an empty one."""
        t = asked_t if asked_t >= 0 else max(self.world.checkpoints, default=-1)
        pieces, fingerprint = self.world.checkpoints.get(t, {}).get(stage, ((), ""))
        self.handle(ev.CheckpointRead(asked_t, t, stage, fingerprint, pieces))

    def _report_committed(self) -> None:
        """Append log entries that this voter knows as committed to the world's log. Raises Violation if
        another voter has reported another entry in the same place."""
        raft, log = self.peer.voter.raft, self.world.log
        for index in range(max(raft.log.start.index, self.log_read), raft.commit_index):
            line = raft.log.line(index)
            if index == len(log):
                log.append(line)
            elif log[index] != line:
                raise Violation("I4", f"{self.id} has another line {index} of the log: a second history")
        self.log_read = raft.commit_index

    def _run(self, task: Task, inputs: tuple[Payload, ...]) -> None:
        assert self.computer is not None
        result = self.computer.run(task, inputs)
        self.task_at = self.world.clock.now
        if result.error and self.world.strict and not _may_fail(task):
            raise RuntimeError(f"{self.id} could not do {task}: {result.error}")
        seconds = self.world.task_s(self, task)
        finished = ev.Finished(task, structs.replace(result, seconds=seconds))
        self.world.clock.after(seconds, lambda: self.handle(finished))
