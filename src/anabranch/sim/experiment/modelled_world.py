"""World of real peers over modelled links and devices (`sim.network`, `sim.cluster`), with integer workers.

Payloads have the size of the tensors that they stand for. Control messages take a link's latency and the time
of their own bytes. They do not share bandwidth with payloads, as on a live link. Payloads that a carrier
forwards take its line, too, down and up.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET
from msgspec.structs import replace

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.delay import LEAST_START, NO_DELAY, Delay
from anabranch.protocol.interface.rounds import NO_ROUNDS, Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import PIECE_BYTES, Payload, Result, Task
from anabranch.protocol.log.records import Member
from anabranch.protocol.peer.bootstrap import lead
from anabranch.protocol.routing.bandwidth_probes import trial_bytes
from anabranch.sim.cluster.activation_offload import OffloadedActivations
from anabranch.sim.cluster.device_model import (
    LATER_RESULT_BYTES,
    SHARED,
    Machine,
    Workload,
)
from anabranch.sim.cluster.scenario import Fleet, Host, Scenario
from anabranch.sim.kernel.simulated_peer import Link, Node, TaskExecutor
from anabranch.sim.network.lined_world import LinedWorld
from anabranch.sim.network.shared_link import SETUP_TRIPS, SharedLink
from anabranch.sim.workers import integer_world
from anabranch.sim.workers.integer_arithmetic import PIECES, own_data
from anabranch.sim.workers.integer_worker import IntegerWorker

#: Most pieces of a state, which are larger than PIECE_BYTES then (a choice: bounds the number of events).
PIECES_MAX = 32
#: Least and greatest number of iterations between snapshots, chosen so that copies add at most a quarter to
#: the bytes sent (as `snapshots.every = 0` in a run file).
SNAPSHOTS_EVERY = (5, 100)
#: Kinds of notes that every peer makes for the same log entry: most of all notes in a large swarm.
SAME_EVERYWHERE = frozenset({"peer_joined", "peer_active", "peer_removed"})
#: Tasks on one microbatch of a pipeline island's inner step.
OF_AN_INNER_STEP = (tasks.InnerForward, tasks.InnerHead, tasks.InnerBackward)
#: Bytes of the payload that begins a slot on private data, or begins or ends one of a pipeline island.
SLOT_BYTES = 1.0


class SizedIntegerWorker(IntegerWorker):
    """Integer worker whose snapshots have as many pieces as those of the modelled tensors: padding follows
    the real ones, and is ignored when a state is loaded."""

    def __init__(self, stage: int, pieces: int, delay: Delay, rounds: Rounds, own: int = 0) -> None:
        super().__init__(stage, delay, rounds, own)
        self._padding = tuple(range(pieces - PIECES - 1))

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        if isinstance(task, tasks.CheckState | tasks.LoadState):
            own = 1 + PIECES * (1 + self.delay.has(task.t + 1))
            result = super().run(task, inputs[:own])
            return replace(result, hashes=tuple(map(str, inputs)))
        result = super().run(task, inputs)
        if isinstance(task, tasks.Snapshot) and not result.error:
            outputs = (*result.outputs, *self._padding)
            return replace(result, outputs=outputs, hashes=tuple(map(str, outputs)))
        return result


def pieces_of(work: Workload, stage: int) -> int:
    """Number of pieces in which a stage's state is copied: of PIECE_BYTES each, but at least PIECES + 1 (also
    for an empty stage) and at most PIECES_MAX."""
    whole = -(-work.state_bytes * work.parameters(stage) // PIECE_BYTES)
    return max(PIECES + 1, min(PIECES_MAX, whole))


@dataclass
class SentCounts:
    """Counts of what was sent so far. kinds: number of control messages by class name; message_bytes: their
    bytes. payload_bytes: bytes of payloads."""

    kinds: Counter[str] = field(default_factory=Counter)
    message_bytes: int = 0
    payload_bytes: float = 0.0


class ModelledWorld(LinedWorld):
    """World of a fleet: real peers over modelled links and devices. The fleet's first host leads, and those
    that the trace does not name as absent join within half a second. sent: control messages (by kind, bytes)
    and payload bytes sent so far."""

    def __init__(self, fleet: Fleet, settings: Settings, seed: int) -> None:
        self.fleet = fleet
        work = fleet.scenario.work
        leader = next(iter(fleet.hosts.values()))

        def make(stage: int, own: int = 0) -> TaskExecutor:
            return SizedIntegerWorker(stage, pieces_of(work, stage), settings.delay, settings.rounds, own)

        genesis = integer_world.genesis_of(settings, leader.id)
        super().__init__(seed, settings, genesis, make, fleet.line, machine=fleet.machine)
        if settings.rounds.private:
            self.make_own = lambda peer, stage: make(stage, own_data(peer))
        self.unheard = SAME_EVERYWHERE
        self.work = work
        self._inner = settings.microbatches // max(1, settings.rounds.slots)
        """Microbatches of an inner step in a round."""
        self._round_bytes = fleet.scenario.round_bytes
        self._parameters = [work.parameters(stage) for stage in range(work.stages + 1)]
        self._region = {host.id: host.region for host in fleet.hosts.values()}
        self._links: dict[tuple[str, str], SharedLink] = {}
        self._beside = fleet.beside()
        self.sent = SentCounts()
        self._sized: tuple[msg.AnyMessage | None, int] = (None, 0)
        self._computing: dict[str, tuple[float, float]] = {}
        self._task_s: dict[tuple[str, int, type[Task], int], float] = {}
        self._ahead: dict[tuple[str, int], int] = {}
        """(Peer, slot) -> steps ahead of its next round that it took."""
        self._parked = OffloadedActivations(work)
        schedule = integer_world.schedule_of(settings, work.tokens)
        member = member_of(fleet, leader.id)
        self.add_leader(lead(member, settings, schedule, self.genesis, unheard=self.unheard), member)
        regions = {host.region for host in fleet.hosts.values()}
        fleet.drift.begin(self.clock, fleet.hosts, regions, self._links.clear)
        for host in fleet.hosts:
            if host != leader.id and host not in fleet.trace.absent:
                self.add(member_of(fleet, host), leader.id, at=self.random.uniform(0.0, 0.5))

    # --- devices -------------------------------------------------------------------------------

    def task_s(self, node: Node, task: Task) -> float:
        reduce = node.peer.replica.all_reduce.reduce
        parts = reduce.count if reduce is not None else 1
        host, stage, kind = self.fleet.hosts[node.id], node.peer.ctx.run.stage, type(task)
        if isinstance(task, tasks.WeightGradient) and stage == 0 and task.unit % 2:
            kind = tasks.Embed  # gradients of the embedding's rows: as many bytes as the rows
        if self._of_slot(task):
            seconds = self._slot_s(host.machine, stage, task)
        elif isinstance(task, tasks.Forward) and task.steps:
            taken = self._ahead.pop((node.id, task.index), 0) if task.carried else 0
            seconds = host.machine.inner_s(task.steps - taken, self._inner)
        elif isinstance(task, tasks.StepAhead):
            self._ahead[node.id, task.index] = task.step
            seconds = host.machine.inner_s(1, self._inner)
        elif isinstance(task, tasks.InputGradient) and self.settings.rounds.has(task.t):
            seconds = 0.0
        else:
            seconds = self._machine_s(host, stage, kind, parts)
        if isinstance(task, tasks.SumPart) and reduce is not None and reduce.message.sums:
            seconds *= len(reduce.members) / parts  # modelled with one part per member
        if isinstance(task, tasks.InputGradient | tasks.InnerBackward) and task.again and stage:
            inner = isinstance(task, tasks.InnerBackward)
            seconds += self._machine_s(host, stage, tasks.InnerForward if inner else tasks.Forward, 1)
        if host.parked:
            link = host.machine.device.host_link_bytes_per_s
            seconds += self._parked.copy_s(host.id, stage, host.resident, link, task)
        seconds *= node.slowness * self.fleet.drift.slowness(node.id)
        if any(self.unfinished_s(other) for other in self._beside.get(node.id, ())):
            seconds *= SHARED
        self._computing[node.id] = (self.clock.now, seconds)
        return seconds

    def _of_slot(self, task: Task) -> bool:
        """True for tasks that begin or end a slot which a pipeline island fills, or add its contribution.
        False for tasks of its inner steps, and outside of such rounds."""
        if not self.settings.rounds.pipeline or not self.settings.rounds.has(task.t):
            return False
        begun = isinstance(task, tasks.Embed | tasks.Forward) and task.steps > 0
        ended = isinstance(task, tasks.Head) and task.train
        return begun or ended or isinstance(task, tasks.InputGradient | tasks.WeightGradient | tasks.Recount)

    def _slot_s(self, machine: Machine, stage: int, task: Task) -> float:
        """Seconds of a task on a slot of a pipeline island, for which `_of_slot` is true; drift left out."""
        if isinstance(task, tasks.WeightGradient | tasks.Recount) and stage == 0 and not task.unit % 2:
            return 0.0  # the embedding's unit has the contribution of the whole stage
        return machine.slot_s(stage, type(task))

    def _machine_s(self, host: Host, stage: int, kind: type[Task], parts: int) -> float:
        """Seconds of a task of class `kind` at a stage on a host's machine, also of an inner step; drift left
        out. parts: number of parts into which the stage's reduce is divided."""
        key = (host.id, stage, kind, parts)
        seconds = self._task_s.get(key)
        if seconds is None:
            inner = issubclass(kind, OF_AN_INNER_STEP)
            machine = host.machine
            seconds = machine.inner_task_s(stage, kind) if inner else machine.seconds(stage, kind, parts)
            self._task_s[key] = seconds
        return seconds

    def unfinished_s(self, host: str) -> float:
        """Virtual seconds for which a host's current task has run so far; 0 without a task, and at the moment
        when it ends."""
        begun_at, seconds = self._computing.get(host, (0.0, 0.0))
        passed = self.clock.now - begun_at
        return passed if passed < seconds else 0.0

    # --- wires ---------------------------------------------------------------------------------

    def _link(self, sender: str, receiver: str) -> SharedLink:
        """Link from one host to another, by their regions; cached until the next change of drift."""
        ends = self._region[sender], self._region[receiver]
        found = self._links.get(ends)
        if found is None:
            found = self._links[ends] = self.fleet.link(sender, receiver)
        return found

    def _delay(self, sender: str, receiver: str) -> float:
        link = self._link(sender, receiver)
        seconds = link.latency_s
        while link.loss and self.random.random() < link.loss:
            seconds += link.retransmit_s()
        return seconds * self.trouble.factor(sender, receiver) if self.slow else seconds

    def _setup_s(self, one: str, other: str) -> float:
        return sum(self._delay(*ends) for ends in ((one, other), (other, one)) * SETUP_TRIPS)

    def _bulk_s(
        self, sender: str, receiver: str, message: msg.AnyMessage, size: int, bulky: bool, via: str
    ) -> float:
        self._count(message, size)
        return super()._bulk_s(sender, receiver, message, size, bulky, via)

    def _count(self, message: msg.AnyMessage, size: int) -> None:
        """Add a control message of `size` bytes to `sent`."""
        self.sent.kinds[type(message).__name__] += 1
        self.sent.message_bytes += size

    def send(self, sender: Node, peer: str, message: msg.AnyMessage, payload: Payload | None) -> None:
        """Count a message and send it over the link to `peer`. Nothing happens, and nothing is counted,
        without an open link. A payload shares bandwidth (`traffic`); no black hole holds it back, and it
        arrives although its sender has vanished meanwhile (simulations have none of these faults, only
        crashes). The sender's `mouth` is not asked. Messages are not decoded from bytes: only `simtest`
        checks that every message can be."""
        link = sender.links.get(peer)
        if link is None or not link.open:
            return
        if payload is None:
            if link.via or self.trouble.disorders:
                self._deliver(sender, link, peer, message, self._size(message), None)
            else:
                self._deliver_small(sender.id, link, peer, message)
            return
        receiver = link.nodes[peer]
        size = self.payload_bytes(sender, message)
        self.sent.payload_bytes += size

        def arrived() -> None:
            if link.open and receiver.links.get(sender.id) is link:
                receiver.handle(ev.Received(sender.id, message, payload))

        self._put_on_line(sender, link, peer, message, size, arrived)

    def _deliver_small(self, sender: str, link: Link, peer: str, message: msg.AnyMessage) -> None:
        """Count and deliver a control message, as `_deliver` does but quicker. Only for a direct link without
        disorder; nearly all messages are such."""
        size, between = self._size(message), self._link(sender, peer)
        self._count(message, size)
        planned = self._arrival(sender, peer, self._delay(sender, peer) + 8.0 * size / between.rate_bps)
        deliver = partial(self._delivered, sender, link, link.nodes[peer], message, None)
        self.clock.at(link.arrival(sender, False, planned), deliver)

    def _size(self, message: msg.AnyMessage) -> int:
        """Bytes of an encoded message, cached while the same message is sent to several peers."""
        if self._sized[0] is not message:
            self._sized = (message, len(msg.encode(message)))
        return self._sized[1]

    def payload_bytes(self, sender: Node, message: msg.AnyMessage) -> float:
        """Bytes of the tensor that a message's payload stands for, as `sender` sends it now: the stage and
        the reduce that the sender is in count."""
        work, stage = self.work, sender.peer.ctx.run.stage
        part, rounds = self.fleet.scenario.round, self.settings.rounds
        if isinstance(message, msg.ReducePart | msg.ReducedPart) and rounds.has(message.fence.t):
            of_part = self._round_bytes[isinstance(message, msg.ReducedPart)]
            return of_part * self._parameters[message.stage] / self._parts(sender, message.stage)
        if work.whole and isinstance(message, msg.Forward | msg.Backward):
            return self._tokens_bytes(sender, message)
        match message:
            case msg.Forward(train=True) | msg.Backward() if rounds.pipeline and rounds.has(message.fence.t):
                return SLOT_BYTES
            case msg.ReducePart():
                return work.sum_bytes * self._parameters[stage] / self._parts(sender, message.stage)
            case msg.ReducedPart(stage=of_stage):
                return work.reduced_bytes * self._parameters[of_stage] / self._parts(sender, of_stage)
            case msg.Gradient(t) if rounds.has(t):
                return LATER_RESULT_BYTES[part.results] * self._parameters[stage]
            case msg.Gradient():
                return float(work.reduced_bytes * self._parameters[stage])
            case msg.Backward() | msg.InnerGradient():
                return float(work.gradient_bytes)
            case msg.Burst():
                return float(trial_bytes(self.settings))
            case msg.Piece(of_stage):
                return work.state_bytes * work.parameters(of_stage) / pieces_of(work, of_stage)
        return float(work.activation_bytes)

    def _tokens_bytes(self, sender: Node, message: msg.Forward | msg.Backward) -> float:
        """Bytes of a payload in runs whose relays hold the whole model: token ids of a microbatch or slot,
        from a data node; 8 for losses and answers, which are small."""
        if sender.peer.ctx.run.stage or isinstance(message, msg.Backward):
            return 8.0
        plan = sender.peer.ctx.run.plan(message.fence.t)
        if not plan or not message.train:
            return float(self.work.activation_bytes)
        if self.settings.rounds.private:
            return SLOT_BYTES
        return float(plan[message.index].steps * self._inner * self.work.activation_bytes)

    def _parts(self, node: Node, stage: int) -> int:
        """Number of parts of a stage's current reduce, as the peer `node` knows it, as member or helper; 1 if
        it knows of none."""
        if stage != node.peer.ctx.run.stage:
            return node.peer.helping.parts(stage)
        reduce = node.peer.replica.all_reduce.reduce
        return reduce.count if reduce is not None else 1


def member_of(fleet: Fleet, name: str, incarnation: int = 1) -> Member:
    """Member record with which a machine of the fleet joins; forward_s and backward_s are seconds of one
    block, as a live machine gives them."""
    host = fleet.hosts[name]
    work = fleet.scenario.work
    forward_s = host.machine.seconds(1, tasks.Forward) / work.blocks(1)
    backward_s = host.machine.microbatch_s(1) / work.blocks(1) - forward_s
    return Member(
        id=name,
        stage=host.stage,
        incarnation=incarnation,
        numerics_class=integer_world.ONE_CLASS,
        capacity=host.capacity,
        name=name,
        region=host.region,
        address="" if host.hidden else f"{name}:1",
        forward_s=forward_s,
        backward_s=backward_s,
        shared=_shared(fleet, host) or UNSET,
    )


def _shared(fleet: Fleet, host: Host) -> int:
    """Microbatches whose activations a relay can hold for each of two pipeline islands; 0 if it cannot hold
    two, and without such islands."""
    if not (host.stage and host.machine.work.ends):
        return 0
    return min(host.capacity, host.machine.capacity(host.stage, 2, fleet.slots(host)))


def settings_of(fleet: Fleet, policy: str) -> Settings:
    """Settings of the protocol for a fleet's scenario under a routing policy. The first iteration waits until
    every stage has as many replicas as the smallest stage has at the beginning."""
    scenario, work = fleet.scenario, fleet.scenario.work
    model = scenario.model
    sizes = scenario.round_bytes
    there = [host for host in fleet.hosts.values() if host.id not in fleet.trace.absent]
    replicas = min(sum(host.stage == stage for host in there) for stage in range(1, model.relay_stages + 1))
    state_bytes = [work.state_bytes * work.parameters(stage) for stage in range(model.relay_stages + 1)]
    parameters = sum(map(work.parameters, range(model.relay_stages + 1)))
    return Settings(
        scenario.name,
        1,
        model.relay_stages,
        model.microbatches,
        scenario.run.iterations,
        min_replicas=max(1, replicas),
        policy=policy,
        activation_bytes=work.activation_bytes,
        heartbeat_s=scenario.run.heartbeat_s,
        snapshot_every=_snapshots_every(scenario),
        snapshot_copies=scenario.run.snapshot_copies,
        snapshot_budget_bytes=1 << 62,
        blocks=tuple(work.blocks(stage) for stage in range(1, model.relay_stages + 1)),
        recompute=scenario.fleet.recompute,
        rebalance=scenario.fleet.rebalance,
        neighbours=scenario.fleet.neighbours,
        block_bytes=work.block_bytes,
        ends_bytes=work.ends_bytes,
        spread=scenario.fleet.spread,
        spare=scenario.fleet.spare,
        sums_bytes=math.ceil(work.sum_bytes * work.parameters(1) / work.blocks(1)),
        state_bytes=work.state_bytes * work.parameters(1) // work.blocks(1),
        piece_bytes=max(math.ceil(size / pieces_of(work, stage)) for stage, size in enumerate(state_bytes)),
        rounds=_rounds(scenario),
        round_bytes=(sizes[0] * parameters, sizes[1] * parameters),
        delay=Delay(LEAST_START) if scenario.run.delay else NO_DELAY,
    )


def _rounds(scenario: Scenario) -> Rounds:
    part = scenario.round
    if not part.slots:
        return NO_ROUNDS
    return Rounds(
        *(part.start, part.steps, part.slots, part.late == "drop", part.grace),
        carries=part.overlap > 0,
        overlap=part.overlap,
        proportional=True,
        first=part.first_steps,
        pipeline=scenario.model.stages > 0,
        private=part.private,
    )


def _snapshots_every(scenario: Scenario) -> int:
    """Iterations between snapshots; 0 if none are kept (no copies). If the scenario leaves the number open,
    the least one within SNAPSHOTS_EVERY with which copies add at most a quarter to the traffic."""
    run, work = scenario.run, scenario.work
    if run.snapshot_every or not run.snapshot_copies:
        return run.snapshot_every if run.snapshot_copies else 0
    sent = 2 * (work.stages + 1) * scenario.model.microbatches * work.activation_bytes
    if work.whole:  # the reduce is all that is sent
        sent = math.ceil(work.reduce_bytes * work.parameters(1))
    copied = run.snapshot_copies * work.state_bytes * sum(map(work.parameters, range(work.stages + 1)))
    low, high = SNAPSHOTS_EVERY
    return max(low, min(high, math.ceil(4 * copied / sent)))
