"""What must hold at every moment of a run, checked after every event (DESIGN §3, I1, I2, I5, I6).

Install with `Invariants(world)`; a violation raises from inside the event that made it.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.protocol import events as ev
from anabranch.protocol import tasks
from anabranch.protocol.records import Commit, StageCommit, decode_entry
from anabranch.sim.node import Node
from anabranch.sim.world import World

#: Notes after which a microbatch may be computed twice at a stage without waste.
_TROUBLE = ("suspected", "repair", "peer_removed", "refused")


class Violation(AssertionError):
    """An invariant was broken."""


class Invariants:
    """Watches a world. computed[(t, stage, unit)] are the peers that added that unit's weight gradient."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.computed: dict[tuple[int, int, int], set[str]] = {}
        self.applied: dict[tuple[int, int], tuple[str, str]] = {}
        self.most_held: dict[str, int] = {}
        self._log_read = len(world.log)
        self._notes_read = 0
        self._trouble = False
        world.watchers.append(self)

    def __call__(self, node: Node, event: ev.Event) -> None:
        self._read_notes()
        self._capacity(node)
        if isinstance(event, ev.Finished):
            self._finished(node, event)
        for line in self.world.log[self._log_read :]:
            record = decode_entry(line).record
            if isinstance(record, Commit):
                self._exactly_once(record)
        self._log_read = len(self.world.log)

    def _read_notes(self) -> None:
        new = self.world.notes[self._notes_read :]
        self._trouble |= any(kind in _TROUBLE for _, _, kind, _ in new)
        self._notes_read = len(self.world.notes)

    def _finished(self, node: Node, event: ev.Finished) -> None:
        task, result, stage = event.task, event.result, node.peer.core.stage
        if isinstance(task, tasks.WeightGradient):
            peers = self.computed.setdefault((task.t, stage, task.unit), set())
            if node.id in peers:
                raise Violation(f"{node.id} added unit {task.unit} of {task.t} at stage {stage} twice")
            peers.add(node.id)
            if len(peers) > 1 and not self._trouble:
                raise Violation(f"I6: unit {task.unit} of {task.t} at stage {stage} computed by {peers}")
        elif isinstance(task, tasks.Apply | tasks.Skip) and not result.error:
            peer, known = self.applied.setdefault((stage, task.t), (node.id, result.fingerprint))
            if known != result.fingerprint:
                raise Violation(f"I2: after {task.t} {node.id} and {peer} of stage {stage} differ")

    def _capacity(self, node: Node) -> None:
        """I5: never more units between slot and weight gradient than capacity and the repair slot."""
        iteration = node.peer.iteration
        if iteration is None:
            return
        held = sum(1 for unit in iteration.units.values() if unit.granted is not None)
        ledger = iteration.ledger
        promised = sum(grant.held for grant in ledger.grants.values())
        capacity = ledger.capacity + 1
        if max(held, promised) > capacity:
            raise Violation(f"I5: {node.id} holds {held}, promised {promised}; its capacity is {capacity}")
        self.most_held[node.id] = max(held, self.most_held.get(node.id, 0))

    def _exactly_once(self, commit: Commit) -> None:
        """I1: owners cover the batch at every stage, and each owner really added what it owns."""
        if commit.verdict != "step":
            return
        if any(loss != loss for loss in commit.loss_sums):
            raise Violation(f"I1: iteration {commit.t} is committed without some of its losses")
        for stage, entry in enumerate(commit.stages):
            if len(entry.owners) != len(self.world.settings.cover(stage)):
                raise Violation(f"I1: {len(entry.owners)} units are covered at stage {stage} of {commit.t}")
            for unit, owner in _owners(entry):
                if owner not in self.computed.get((commit.t, stage, unit), ()):
                    raise Violation(f"I1: {owner} owns unit {unit} of {commit.t} and never added it")


def _owners(entry: StageCommit) -> Iterable[tuple[int, str]]:
    return ((unit, entry.members[owner]) for unit, owner in enumerate(entry.owners))
