"""Phases of a peer's work, at which faults are aimed and by which injected faults are counted."""

from __future__ import annotations

from anabranch.protocol.interface import tasks
from anabranch.protocol.peer.shared_state import Step
from anabranch.sim.kernel.simulated_peer import Node

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
#: Phases of data nodes only, and of relays only.
OF_DATA_NODES, OF_RELAYS = frozenset({EMBED, LOSS}), frozenset({FORWARD, BACKWARD})

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
#: Phases of a data node's inner steps, where they differ from a relay's.
_INNER_OF_DATA_NODES: dict[type[tasks.Task], str] = {tasks.InnerForward: EMBED, tasks.InnerBackward: LOSS}


def phase_of(node: Node, committed_t: int) -> str:
    """Phase of a peer's work, for the aim of faults. committed_t: last iteration committed in the log."""
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


def phase_for(node: Node, committed_t: int, aimed: str) -> str:
    """Phase of a peer when a fault that is `aimed` at a phase hits it: as `phase_of`, except for a leader
    that has just committed a step. That is in CHOSEN, too, and counts so if aimed at."""
    running = node.peer.ctx.tasks.running
    applies = running is not None and _RUNNING.get(type(running.task)) == APPLY
    just_chosen = applies and node.peer.lead is not None and node.task_at == node.world.clock.now
    return CHOSEN if aimed == CHOSEN and just_chosen else phase_of(node, committed_t)


def _misses_a_leader(node: Node) -> bool:
    raft = node.peer.voter.raft
    return len(raft.log.voters) > 1 and raft.me in raft.log.voters and not raft.has_leader()
