"""Wasted compute of a run: seconds whose result entered no committed step.

A part of them, `died_s`, was lost with crashed processes; the protocol itself wasted the rest.
"""

from __future__ import annotations

from collections import defaultdict

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import embed_unit, head_unit
from anabranch.protocol.log.records import Commit, decode_entry
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.metrics.trial_result import DeliveredFaults


class WastedCompute:
    """Observer of a world that adds up seconds of microbatches since the start: computed_s, wasted_s, and of
    the latter those lost with crashed processes (died_s). Seconds count as wasted with the commit of their
    iteration; a rollback changes nothing. Waste and repairs are attributed to the last fault reported with
    `struck`. faults: False if none are reported, which is faster."""

    def __init__(self, world: World, faults: bool = True) -> None:
        self.world = world
        self.computed_s = 0.0
        self.wasted_s = 0.0
        self.died_s = 0.0
        self._spent: dict[int, dict[tuple[int, int, str], float]] = defaultdict(lambda: defaultdict(float))
        self._dead: dict[int, dict[tuple[int, int, str], float]] = defaultdict(dict)
        self._last: DeliveredFaults | None = None
        self._log_read = self._notes_read = 0
        (world.watchers if faults else world.bookkeepers).append(self)

    def struck(self, fault: DeliveredFaults) -> None:
        """Attribute waste and repairs from now on to this fault."""
        self._last = fault

    def crashed(self, peer: str) -> None:
        """Record the crash of a peer: its seconds in uncommitted iterations count as lost with it (`died_s`)
        if they turn out to be wasted."""
        for t, spent in self._spent.items():
            self._dead[t] |= {key: seconds for key, seconds in spent.items() if key[2] == peer}

    def __call__(self, node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Finished):
            self._finished(node, event)
        notes, log = self.world.notes, self.world.log
        if len(notes) > self._notes_read:
            if self._last is not None:
                self._last.repaired += sum(kind == "repair" for _, _, kind, _ in notes[self._notes_read :])
            self._notes_read = len(notes)
        if len(log) > self._log_read:
            for line in log[self._log_read :]:
                record = decode_entry(line).record
                if isinstance(record, Commit):
                    self._committed(record)
            self._log_read = len(log)

    def _finished(self, node: Node, event: ev.Finished) -> None:
        task, stage = event.task, node.peer.ctx.run.stage
        match task:
            case tasks.Embed(_, index):
                unit = embed_unit(index)
            case tasks.Head(_, index, True):
                unit = head_unit(index)
            case tasks.Forward(_, index, True) | tasks.InputGradient(_, index) | tasks.StepAhead(_, index):
                unit = index
            case tasks.WeightGradient(_, unit) | tasks.Recount(_, unit, _):
                pass
            case tasks.InnerForward() | tasks.InnerHead() | tasks.InnerBackward() | tasks.InnerStep():
                unit = task.index if stage else embed_unit(task.index)
            case _:
                return
        if unit not in self.world.settings.cover(stage):
            return  # an evaluation window enters no step
        self.computed_s += event.result.seconds
        t = task.t + isinstance(task, tasks.StepAhead)  # these enter the next round
        self._spent[t][stage, unit, node.id] += event.result.seconds

    def _committed(self, record: Commit) -> None:
        useful = {
            (stage, unit, entry.members[owner])
            for stage, entry in enumerate(record.stages)
            for unit, owner in enumerate(entry.owners)
            if owner >= 0
        }
        for t in [t for t in self._spent if t <= record.t]:
            dead = self._dead.pop(t, {})
            for key, seconds in self._spent.pop(t).items():
                if t < record.t or key not in useful:
                    self.wasted_s += seconds
                    self.died_s += dead.get(key, 0.0)
                    if self._last is not None:
                        self._last.wasted_s += seconds
