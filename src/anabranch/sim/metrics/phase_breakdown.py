"""Durations of an iteration's phases, and of the relays' tasks in it.

*fill*: from the previous step until the first forward of the last stage begins; *steady*: until the last
forward ends; *drain*: until the reduce of every stage has begun; *reduce*: until the step is taken.
"""

from __future__ import annotations

from itertools import pairwise

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.sim.kernel.simulated_peer import Node

#: Task -> figure that its seconds are added to; those of all other tasks are added to step_s. The backward
#: pass of an inner step is one task, by input and weights.
KINDS: dict[type[tasks.Task], str] = {
    tasks.Forward: "forward_s",
    tasks.InputGradient: "input_gradient_s",
    tasks.WeightGradient: "weight_gradient_s",
    tasks.Recount: "weight_gradient_s",
    tasks.InnerForward: "forward_s",
    tasks.InnerBackward: "input_gradient_s",
}
PHASES = ("fill_s", "steady_s", "drain_s", "reduce_s")
COMPUTED = (*dict.fromkeys(KINDS.values()), "step_s")


class PhaseRecorder:
    """Observer of a simulated run that measures the phases of each iteration, as its leader sees them.
    stages: relay stages."""

    def __init__(self, leader: Node, stages: int) -> None:
        self._leader, self._stages = leader, stages
        self._begun_at = 0.0
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        self._begun_at = now
        self._filled_at = self._forwarded_at = self._settled_at = now
        self._full = self._settled = False
        self._computed = dict.fromkeys(COMPUTED, 0.0)

    def look(self, node: Node, event: ev.Event, now: float) -> None:
        """Record an event that `node` has handled at `now` (s). A relay's finished task adds its seconds to
        its kind of task, and may mark the end of the phase fill or steady (see the module); the leader's
        reduces mark the end of drain."""
        if node is not self._leader and not isinstance(event, ev.Finished):
            return
        lead = self._leader.peer.lead
        current = lead.round if lead is not None else None
        if isinstance(event, ev.Finished) and node.peer.ctx.run.stage:
            seconds = event.result.seconds
            self._computed[KINDS.get(type(event.task), "step_s")] += seconds
            forward = isinstance(event.task, tasks.Forward | tasks.InnerForward)
            if forward and current is not None and event.task.t == current.t:
                if node.peer.ctx.run.stage == self._stages and not self._full:
                    self._full, self._filled_at = True, max(self._begun_at, now - seconds)
                self._forwarded_at = now
        if current is not None:
            settled = len(current.attempts) > self._stages
            if settled and not self._settled:
                self._settled_at = now
            self._settled = settled

    def end(self, now: float, relays: int) -> dict[str, float]:
        """{phase: seconds} of the iteration that ends at `now`, and {kind of task: mean seconds of a relay},
        in one mapping; the next iteration begins. relays: their number."""
        ends = [self._begun_at]
        for at in (self._filled_at, self._forwarded_at, self._settled_at, now):
            ends.append(min(now, max(ends[-1], at)))
        found = {phase: end - begin for phase, (begin, end) in zip(PHASES, pairwise(ends), strict=True)}
        found |= {kind: seconds / max(1, relays) for kind, seconds in self._computed.items()}
        self._reset(now)
        return found
