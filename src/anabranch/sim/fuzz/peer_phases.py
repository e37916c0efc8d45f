"""Phases of a peer's work, at which faults are aimed and by which injected faults are counted."""

from __future__ import annotations

from anabranch.protocol.interface import tasks
from anabranch.protocol.peer.shared_state import Step
from anabranch.protocol.rounds.plan import active
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World

EMBED = "embed"
FORWARD = "forward"
LOSS = "loss"
BACKWARD = "backward"
ACKNOWLEDGED = "acknowledged"
"""The input gradient is sent; the weight gradient is not yet computed."""
REDUCE = "reduce"
PREPARED = "prepared"
CHOSEN = "chosen"
"""The step is committed in the log, and the peer has not applied it yet. (A leader begins to apply it in the
same event, see `phase_for`.)"""
APPLY = "apply"
DOWNLOAD = "download"
"""Fetching, loading or serving a state."""
ELECTION = "election"
"""The peer is a voter and knows no leader."""
IDLE = "idle"
CARRYING = "carrying"
"""Payloads of an iteration are under way over the peer, which is a carrier. Only faults of carriers are aimed
at it; they count at the phase of the peer's own work."""

PHASES = (
    EMBED, FORWARD, LOSS, BACKWARD, ACKNOWLEDGED, REDUCE, PREPARED, CHOSEN, APPLY, DOWNLOAD, ELECTION, IDLE
)  # fmt: skip

INNER_STEPS = "inner steps"
"""Computing the inner steps of a slot, at any machine of its crew."""
STEPS_AHEAD = "steps ahead"
"""Taking inner steps of the next round, while the contribution to this one is exchanged."""
SLOT_READY = "slot ready"
"""Contributions of slots are claimed, and the exchange has not begun here."""
LATE_SLOTS = "late slots"
"""The leader has contributions of some slots and waits for the others; the peer is one of those that are
ready or one of those that are late."""
EXCHANGE = "exchange"
"""The reduce of a round's contributions has begun here, and its result is not whole yet."""
ROUND_PREPARED = "round prepared"
ROUND_CHOSEN = "round chosen"
OUTER_STEP = "outer step"
"""Applying a round."""
ROUND_STATE = "round state"
"""Copying, fetching or loading a state while a round is open."""

#: Phases of a round. A peer in one of them is also in one of PHASES, and is hit by faults aimed at either.
ROUND_PHASES = (
    INNER_STEPS, STEPS_AHEAD, SLOT_READY, LATE_SLOTS, EXCHANGE, ROUND_PREPARED, ROUND_CHOSEN, OUTER_STEP,
    ROUND_STATE,
)  # fmt: skip
#: Phases of data nodes only, and of relays only.
OF_DATA_NODES, OF_RELAYS = frozenset({EMBED, LOSS}), frozenset({FORWARD, BACKWARD, STEPS_AHEAD})
#: Phases of a step that is committed and not applied, and phases for which a machine joins.
OF_CHOSEN, OF_JOINERS = frozenset({CHOSEN, ROUND_CHOSEN}), frozenset({DOWNLOAD, ROUND_STATE})

_RUNNING: dict[type[tasks.Task], str] = {
    tasks.Embed: EMBED,
    tasks.Forward: FORWARD,
    tasks.Head: LOSS,
    tasks.InputGradient: BACKWARD,
    tasks.InnerForward: FORWARD,
    tasks.InnerHead: LOSS,
    tasks.InnerBackward: BACKWARD,
    tasks.InnerStep: ACKNOWLEDGED,
    tasks.StepAhead: ACKNOWLEDGED,
    tasks.WeightGradient: ACKNOWLEDGED,
    tasks.Recount: REDUCE,
    tasks.Freeze: REDUCE,
    tasks.SumPart: REDUCE,
    tasks.Assemble: REDUCE,
    tasks.Apply: APPLY,
    tasks.Skip: APPLY,
    tasks.Snapshot: DOWNLOAD,
    tasks.LoadState: DOWNLOAD,
}
#: Tasks of an inner step in a pipeline island.
_OF_INNER_STEPS = (tasks.InnerForward, tasks.InnerHead, tasks.InnerBackward, tasks.InnerStep)
#: Phases of a data node's inner steps, where they differ from a relay's.
_INNER_OF_DATA_NODES: dict[type[tasks.Task], str] = {tasks.InnerForward: EMBED, tasks.InnerBackward: LOSS}


def phase_of(node: Node, committed_t: int) -> str:
    """Phase of a peer's work now, one of PHASES; IDLE if it does nothing that has a phase. committed_t: last
    iteration committed in the log."""
    peer = node.peer
    if _misses_a_leader(node):
        return ELECTION
    if peer.joining.step in (Step.FETCHING, Step.LOADING):
        return DOWNLOAD
    running = peer.ctx.tasks.running
    if running is not None and type(running.task) in _RUNNING:
        kind = type(running.task)
        return _RUNNING[kind] if peer.ctx.run.stage else _INNER_OF_DATA_NODES.get(kind, _RUNNING[kind])
    replica, iteration = peer.replica, peer.iteration
    if 0 <= replica.t < committed_t:
        return CHOSEN
    if replica.all_reduce.prepared is not None:
        return PREPARED
    if replica.all_reduce.reduce is not None:
        return REDUCE
    if iteration is not None and any(u.returned and u.granted is not None for u in iteration.units.values()):
        return ACKNOWLEDGED
    return IDLE


def phase_for(world: World, node: Node, committed_t: int, aimed: str) -> str:
    """Phase under which a fault counts that hits a peer now: the phase `aimed` at if the peer is in it, else
    `phase_of` (also for "", no aim). A leader in the event in which it commits a step is in CHOSEN as well.
    committed_t: last iteration committed in the log."""
    if aimed in ROUND_PHASES:
        return aimed if _is_in_round(world, node, committed_t, aimed) else phase_of(node, committed_t)
    return CHOSEN if aimed == CHOSEN and _has_just_chosen(node) else phase_of(node, committed_t)


def _has_just_chosen(node: Node) -> bool:
    """True if this peer leads, and has begun to apply a step in the event in which it committed it."""
    running = node.peer.ctx.tasks.running
    applies = running is not None and _RUNNING.get(type(running.task)) == APPLY
    return applies and node.peer.lead is not None and node.task_at == node.world.clock.now


def _is_in_round(world: World, node: Node, committed_t: int, phase: str) -> bool:
    """True if a peer is in this phase of ROUND_PHASES now. committed_t: last iteration committed in the
    log."""
    peer, rounds = node.peer, world.settings.rounds
    running = peer.ctx.tasks.running
    task = running.task if running is not None else None
    if phase == STEPS_AHEAD:
        return isinstance(task, tasks.StepAhead)
    if phase == INNER_STEPS:
        return isinstance(task, _OF_INNER_STEPS) or (isinstance(task, tasks.Forward) and task.steps > 0)
    if phase == OUTER_STEP:
        return isinstance(task, tasks.Apply | tasks.Skip) and rounds.has(task.t)
    if phase == ROUND_CHOSEN:
        waits = 0 <= peer.replica.t < committed_t and not isinstance(task, tasks.Apply | tasks.Skip)
        return rounds.has(committed_t) and (waits or _has_just_chosen(node))
    if phase == ROUND_STATE:
        moves = isinstance(task, tasks.Snapshot | tasks.LoadState)
        moves = moves or peer.joining.step in (Step.FETCHING, Step.LOADING)
        return moves and rounds.has(committed_t + 1)
    iteration, reduce = peer.iteration, peer.replica.all_reduce
    if iteration is None or not iteration.source.slots or iteration.t <= committed_t:
        return False
    if phase == LATE_SLOTS:
        return _waits_for_slots(world, iteration.t)
    if phase == ROUND_PREPARED:
        return reduce.prepared is not None
    if phase == EXCHANGE:
        return reduce.reduce is not None and reduce.prepared is None
    return bool(iteration.claims.held) and reduce.reduce is None and reduce.prepared is None


def _waits_for_slots(world: World, t: int) -> bool:
    """True if the log's leader has contributions of some slots of round t, and waits for the others."""
    lead = world.leading().peer.lead
    current = lead.round if lead is not None else None
    if current is None or current.t != t:
        return False
    ready = current.complete - current.dropped
    return bool(ready) and len(ready | current.dropped) < len(active(current.slots))


def _misses_a_leader(node: Node) -> bool:
    raft = node.peer.voter.raft
    return len(raft.log.voters) > 1 and raft.me in raft.log.voters and not raft.has_leader()
