"""Spans of computing and sending at each node of a simulated run, for its picture (`observe.plots`)."""

from __future__ import annotations

from anabranch.observe.plots.iteration_timeline import Repair, Span
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.interface.tasks import embed_unit, head_unit
from anabranch.protocol.log.records import Commit, decode_entry
from anabranch.sim.experiment.run import Simulation
from anabranch.sim.kernel.simulated_peer import Node

#: Names of tasks in the picture; all others are "step".
KINDS: dict[type[tasks.Task], str] = {
    tasks.Embed: "forward",
    tasks.Forward: "forward",
    tasks.Head: "forward",
    tasks.InputGradient: "input gradient",
    tasks.WeightGradient: "weight gradient",
    tasks.Recount: "weight gradient",
}
OF_A_MICROBATCH = frozenset(KINDS.values())
#: Names of payloads by their priority on a link; all others belong to a state download.
SENT = {0: "sending", 1: "sending", 2: "reduce"}
STATE = "state"


class TimelineRecorder:
    """Observer of a simulation that records spans of computing and sending. It must be created before the
    simulation runs, and asked when that is over."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._spans: list[Span] = []
        simulation.world.watchers.append(self._watch)
        simulation.world.traffic.watch = self._left

    def of(self, t: int) -> list[Span]:
        """Spans of computing, sending, being gone and joining in iteration t, cut at its begin and end
        (virtual s). Raises StopIteration if t was not committed."""
        begin, end = self.time_of(t)
        return [
            Span(span.node, span.kind, max(begin, span.begin_s), min(end, span.end_s), span.text)
            for span in (*self._spans, *self._away(end))
            if span.end_s > begin and span.begin_s < end
        ]

    def time_of(self, t: int) -> tuple[float, float]:
        """Begin and end of iteration t in virtual seconds. Raises StopIteration if it was not committed."""
        rows = self._simulation.recorder.rows
        begin = sum(row.seconds for row in rows if row.t < t)
        return begin, begin + next(row.seconds for row in rows if row.t == t)

    def repairs(self, t: int) -> list[Repair]:
        """Repairs in iteration t: microbatches lost with a peer that another one brought into the step. [] if
        the step was skipped. Raises StopIteration if t was not committed."""
        begin, end = self.time_of(t)
        paths, found = self.paths(t), []
        for at, _, kind, fields in self._simulation.world.notes:
            if kind != "repair" or fields["t"] != t or not begin <= at <= end:
                continue
            index, stage, lost = int(str(fields["index"])), int(str(fields["stage"])), str(fields["lost"])
            if not paths or not paths[index]:
                continue
            # From the last stage a microbatch goes to the data node with the head.
            taken_by = paths[index][stage or -1]
            if lost and taken_by != lost:
                found.append(Repair(at, lost, taken_by, f"microbatch {index}, stage {stage}"))
        return found

    def paths(self, t: int) -> list[list[str]]:
        """Path of each microbatch whose results entered step t, by index: data node that embeds it, relay of
        each stage, data node of the head; [] for a slot of a round that does not count. Empty if the step was
        skipped, or not committed."""
        found: list[list[str]] = []
        for line in self._simulation.world.log:
            record = decode_entry(line).record
            if isinstance(record, Commit) and record.t == t and record.stages:
                at = [[stage.members[k] if k >= 0 else "" for k in stage.owners] for stage in record.stages]
                every = (
                    [at[0][embed_unit(index)], *(owners[index] for owners in at[1:]), at[0][head_unit(index)]]
                    for index in range(len(at[0]) // 2)
                )
                found = [path if all(path) else [] for path in every]
        return found

    def crashed(self, t: int) -> set[str]:
        """Relays that crashed during iteration t. Raises StopIteration if t was not committed."""
        begin, end = self.time_of(t)
        return {name for name, at in self._simulation.crashed if begin <= at < end}

    def _away(self, end: float) -> list[Span]:
        """Spans from the start of the run until `end` (virtual s): relays "gone" until their machines are
        back, then "joining" until they compute, or crash again."""
        crashed, returned = self._simulation.crashed, self._simulation.returned
        absent = [(name, 0.0) for name in sorted(self._simulation.fleet.trace.absent)]
        found = []
        for name, at in (*absent, *crashed):
            back = min((when for who, when in returned if who == name and when >= at), default=end)
            mine = (span for span in self._spans if span.node == name)
            begun = [span.begin_s for span in mine if span.kind in OF_A_MICROBATCH]
            again = [when for who, when in crashed if who == name]
            serves = min((when for when in (*begun, *again) if when >= back), default=end)
            found += [Span(name, "gone", at, back, "gone"), Span(name, "joining", back, serves, "joining")]
        return found

    def _watch(self, node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Finished) and event.result.seconds:
            now, kind = self._simulation.world.clock.now, KINDS.get(type(event.task), "step")
            index = getattr(event.task, "index", getattr(event.task, "unit", ""))
            text = f"{type(event.task).__name__} {index}".strip()
            self._spans.append(Span(node.id, kind, now - event.result.seconds, now, text))

    def _left(self, sender: str, receiver: str, begin_s: float, end_s: float, priority: int) -> None:
        kind = SENT.get(priority, STATE)
        self._spans.append(Span(sender, kind, begin_s, end_s, f"{kind} to {receiver}"))
