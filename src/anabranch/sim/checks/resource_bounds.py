"""Checks of invariant I5: bounded queues at every peer, consistent counts of slots, and no deadlock."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from anabranch.protocol.context.early_buffer import EARLY_MAX
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface.tasks import SumPart
from anabranch.protocol.pipeline.microbatches import Iteration
from anabranch.protocol.pipeline.outgoing import OutgoingState
from anabranch.protocol.reduce.partial_sums import PARTS
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.kernel.violation import Violation

#: Most iterations whose boundary payloads are kept: step t + 1 is not proposed before t is released (R11).
RETAINED_MAX = 1
#: Most waiting tasks: per microbatch of the iteration, and in addition (tasks of the optimizer
#: step); sums of parts are counted apart.
TASKS_PER_MICROBATCH, TASKS_BESIDES = 4, 32
#: Committed steps that a replica may lag behind without further checks.
PENDING_MAX = 64


def check_bounds(node: Node) -> None:
    """Check the queues of one peer, and the slots (permissions for one microbatch) of its iterations. Raises
    Violation (I5) if a queue is too long, or if more slots are held or promised than the peer has."""
    peer, ctx = node.peer, node.peer.ctx
    settings = ctx.run.settings
    exist = settings.microbatches + settings.windows
    if (early := len(peer.reception.early)) > EARLY_MAX:
        _at_most(node, "messages of iterations to come", early, EARLY_MAX * _senders(ctx))
    _at_most(node, "iterations whose boundaries are kept", len(peer.iterations.retained), RETAINED_MAX)
    if (waiting := ctx.tasks.waiting) > TASKS_BESIDES:
        # The coordinator may sum all parts of several stages; each part has come from some member.
        sums = len(ctx.tasks.waits((SumPart,)))
        _at_most(node, "sums of parts to compute", sums, PARTS * _senders(ctx))
        _at_most(node, "waiting tasks", waiting - sums, TASKS_PER_MICROBATCH * exist + TASKS_BESIDES)
    if early_parts := len(peer.replica.all_reduce._early):
        _at_most(node, "early parts of a reduce", early_parts, 2 * PARTS * _senders(ctx))
    if early_parts := peer.helping.early:
        _at_most(node, "early parts of others' reduces", early_parts, PARTS * _senders(ctx))
    _at_most(node, "steps to take", len(peer.replica.pending), PENDING_MAX)
    _at_most(node, "messages to itself", len(ctx.outbox.to_self), 0)
    for iteration in peer.iterations.in_flight:
        _check_iteration(node, iteration, exist)


def _check_iteration(node: Node, iteration: Iteration, exist: int) -> None:
    """Check the microbatches and slots of a peer's iteration in flight; raises Violation (I5). exist: number
    of microbatches and windows in an iteration."""
    _at_most(node, "microbatches received", len(iteration.units), exist)
    _at_most(node, "microbatches to send on", len(iteration.sender.items), exist)
    ledger = iteration.credits.ledger
    if asks := len(ledger.asks):
        _at_most(node, "asks for a slot", asks, 2 * exist * len(ledger.grants))
    held = sum(unit.granted is not None for unit in iteration.units.values())
    promised, capacity = sum(grant.held for grant in ledger.grants.values()), ledger.capacity + 1
    if held > capacity or promised > capacity:
        raise Violation("I5", f"{node.id} holds {held}, promised {promised}; its capacity is {capacity}")


def _senders(ctx: PeerContext) -> int:
    """Most peers that may have sent messages to this one: all that were ever members, and the linked others.
    It is a factor of bounds that hold per sender."""
    seen = ctx.run.membership.ever()
    return len(seen) + sum(peer not in seen for peer in ctx.links.up) + 1


def _at_most(node: Node, what: str, size: int, most: int) -> None:
    if size > most:
        raise Violation("I5", f"{node.id} has {size} {what}; at most {most} are allowed")


def check_account(world: World, sender: Node, receiver: str) -> None:
    """Raise Violation (I5) if a sender counts more credits (permissions to send a microbatch) of the peer
    `receiver` than that one has granted to it. Nothing is checked while the two do not share an open link,
    the sender catches up after a freeze, or they have different bases."""
    there = world.nodes.get(receiver)
    if there is None or sender.catching_up:
        return
    if there.links.get(sender.id) is not sender.links.get(receiver):
        return
    for here in sender.peer.iterations.in_flight:
        granting = there.peer.iterations.at(here.t)
        if granting is None or granting.base != here.base:
            continue
        credit, grant = here.sender.credits.get(receiver), granting.credits.ledger.grants.get(sender.id)
        if credit is not None and grant is not None and not credit.stale and credit.total > grant.granted:
            text = f"{sender.id} counts {credit.total} slots of {receiver}, which granted {grant.granted}"
            raise Violation("I5", text)


def check_plan(node: Node, peer: str) -> None:
    """Raise Violation (I5) if the flow plan of a node uses the peer `peer`, to which a link was just opened
    or closed: plans over the old link must be gone."""
    agent = node.peer.router.agent
    if agent is not None and any(peer in (held.previous, held.next) for held in agent.held()):
        raise Violation("I5", f"{node.id} plans with {peer}, whose connection is gone: a ghost flow")


def cycle(world: World) -> list[str] | None:
    """Descriptions of microbatches that wait for each other in a cycle (a deadlock); None if there is none. A
    microbatch at peer P waits for a slot at Q, whose slots are held by microbatches that may wait in turn."""
    edges: dict[tuple[str, int, int], list[tuple[str, int, int]]] = {}
    for node in world.nodes.values():
        for iteration in node.peer.iterations.in_flight if node.running else ():
            for item in iteration.sender.items.values():
                if item.leg is OutgoingState.WAITING and item.asked:
                    asked = sorted({peer for peer, _ in item.asked})
                    holding = [
                        (peer, iteration.t, index)
                        for peer in asked
                        for index in _holding(world, peer, iteration.t)
                    ]
                    edges[node.id, iteration.t, item.index] = holding
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return [f"microbatch {index} of {t} at {peer}" for peer, t, index in error.args[1]]
    return None


def _holding(world: World, peer: str, t: int) -> list[int]:
    """Indices of the microbatches that occupy slots of the relay `peer` in iteration t; [] for a data node or
    an unknown peer. The slots of two iterations in flight are not shared, so one iteration does not wait for
    the other."""
    node = world.nodes.get(peer)
    iteration = node.peer.iterations.at(t) if node is not None else None
    if iteration is None or (node is not None and node.peer.ctx.run.stage == 0):
        return []
    return [unit.index for unit in iteration.units.values() if unit.granted is not None]
