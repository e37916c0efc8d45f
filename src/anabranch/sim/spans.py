"""What went on at each node of a simulated run, for its picture (`observe.timeline`)."""

from __future__ import annotations

from anabranch.observe.timeline import Span
from anabranch.protocol import events as ev
from anabranch.protocol import tasks
from anabranch.protocol.records import Commit, decode_entry
from anabranch.protocol.tasks import embed_unit, head_unit
from anabranch.sim.node import Node
from anabranch.sim.simulate import Simulation

#: What a task is called in the picture; the others are of the step.
KINDS: dict[type[tasks.Task], str] = {
    tasks.Embed: "forward",
    tasks.Forward: "forward",
    tasks.Head: "forward",
    tasks.InputGradient: "input gradient",
    tasks.WeightGradient: "weight gradient",
    tasks.Recount: "weight gradient",
}


class Spans:
    """Watches a simulation, which is then to be run."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._spans: list[Span] = []
        simulation.world.watchers.append(self._watch)
        simulation.world.traffic.watch = self._left

    def of(self, t: int) -> list[Span]:
        """Of iteration t."""
        rows = self._simulation.tape.rows
        begin = sum(row.seconds for row in rows if row.t < t)
        end = begin + next(row.seconds for row in rows if row.t == t)
        gone = [Span(n, "gone", at, at + self._away_s(at, end), n) for n, at in self._simulation.crashed]
        spans = [span for span in (*self._spans, *gone) if span.end_s > begin and span.begin_s < end]
        return [
            Span(span.node, span.kind, max(begin, span.begin_s), min(end, span.end_s), span.text)
            for span in spans
        ]

    def paths(self, t: int) -> list[list[str]]:
        """The way of each microbatch of iteration t that is in the step: data node, a relay of each stage,
        data node."""
        found: list[list[str]] = []
        for line in self._simulation.world.log:
            record = decode_entry(line).record
            if isinstance(record, Commit) and record.t == t and record.stages:
                at = [[stage.members[place] for place in stage.owners] for stage in record.stages]
                found = [
                    [at[0][embed_unit(index)], *(owners[index] for owners in at[1:]), at[0][head_unit(index)]]
                    for index in range(len(at[0]) // 2)
                ]
        return found

    def crashed(self, t: int) -> set[str]:
        """Relays that crashed in iteration t."""
        rows = self._simulation.tape.rows
        begin = sum(row.seconds for row in rows if row.t < t)
        end = begin + next(row.seconds for row in rows if row.t == t)
        return {name for name, at in self._simulation.crashed if begin <= at < end}

    def _away_s(self, at: float, end: float) -> float:
        return min(end - at, self._simulation.fleet.scenario.churn.return_s)

    def _watch(self, node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Finished) and event.result.seconds:
            now, kind = self._simulation.world.clock.now, KINDS.get(type(event.task), "step")
            index = getattr(event.task, "index", getattr(event.task, "unit", ""))
            text = f"{type(event.task).__name__} {index}".strip()
            self._spans.append(Span(node.id, kind, now - event.result.seconds, now, text))

    def _left(self, sender: str, receiver: str, begin_s: float, end_s: float) -> None:
        self._spans.append(Span(sender, "sending", begin_s, end_s, f"to {receiver}"))
