"""Critical path of an iteration of `wan10`, and the iteration time without one of its parts.

    nice python -m benchmarks.simulation.critical_path --seeds 3

Virtual time. Crashes are the same draws in every row of a fleet. Writes the results `chain` and `without`.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Any

from anabranch.net.wan.profile import find_profile
from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.sim.cluster.scenario import Scenario
from anabranch.sim.experiment import modelled_world as modelled
from anabranch.sim.experiment.initial_placement import placed
from anabranch.sim.experiment.modelled_world import ModelledWorld
from anabranch.sim.experiment.run import Simulation
from anabranch.sim.kernel.simulated_peer import Node
from benchmarks import harness
from benchmarks.harness import table
from benchmarks.simulation.policies import CHURN, FLEETS, OURS, cell, main_cell

#: Parts of the chain, in the order of time.
PARTS = {
    "opening": "until the iteration is open here (later at a joiner that still fetches the step before)",
    "ways": "between two tasks: lines, latency, slots",
    "computing": "for the first time",
    "lost": "until a crash, in the stage of a task that waits or of what it waits for",
    "sent anew": "from the crash until it is computed again",
    "again": "computing that had been done before",
    "telling": "claims, and the step itself",
    "reduce": "of the stage whose reduce ends last",
}
MICROBATCH = (
    tasks.Embed, tasks.Forward, tasks.Head, tasks.InputGradient, tasks.WeightGradient, tasks.Recount,
)  # fmt: skip
SUMS = (msg.ReducePart, msg.ReducedPart)
JOINERS = (msg.Piece, msg.Gradient)
#: Change -> share of the bytes that count, message types it applies to, changes of the scenario.
WITHOUT: dict[str, tuple[float, tuple[type, ...], dict[str, Any]]] = {
    "nothing": (1.0, (), {}),
    "activations and their gradients arrive at once": (0.0, (msg.Forward, msg.Backward), {}),
    "a reduce sends half as much": (0.5, SUMS, {}),
    "a reduce sends nothing": (0.0, SUMS, {}),
    "joiners have states and steps at once": (0.0, JOINERS, {}),
    "... and machines are back at once": (0.0, JOINERS, {"churn.return_s": 0.1}),
}
SAME_S = 1e-6


@dataclass(frozen=True)
class Done:
    """A task that ended."""

    begin: float
    end: float
    node: str
    stage: int
    kind: type[tasks.Task]
    number: int
    """Number of the microbatch or unit; -1: the task is one of the step."""

    @property
    def what(self) -> tuple[int, type[tasks.Task], int]:
        return self.stage, self.kind, self.number


class Watch:
    """Looks on at a simulation, which is then run."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.stages = scenario.model.stages
        self.simulation = Simulation(placed(scenario, find_profile("wan10"), seed), OURS, seed)
        self.begun = [0.0]
        self.done: dict[int, list[Done]] = defaultdict(list)
        self.opened: dict[int, dict[str, float]] = defaultdict(dict)
        self.ordered: dict[int, dict[int, tuple[float, msg.Attempt]]] = defaultdict(dict)
        self.prepared: dict[int, dict[int, float]] = defaultdict(dict)
        self.simulation.world.watchers.append(self._look)

    def _look(self, node: Node, event: ev.Event) -> None:
        now, iteration = self.simulation.world.clock.now, node.peer.iteration
        while len(self.begun) <= len(self.simulation.recorder.rows):
            self.begun.append(now)
        if node.running and iteration is not None:
            self.opened[iteration.t].setdefault(node.id, now)
        if isinstance(event, ev.Finished) and event.result.seconds:
            task, begin = event.task, now - event.result.seconds
            number = getattr(task, "index", getattr(task, "unit", -1)) if isinstance(task, MICROBATCH) else -1
            done = Done(begin, now, node.id, node.peer.ctx.run.stage, type(task), number)
            self.done[len(self.begun)].append(done)
        lead = node.peer.lead
        current = lead.round if lead is not None else None
        if lead is None or current is None:
            return
        ordered, prepared = self.ordered[current.t], self.prepared[current.t]
        for stage in range(self.stages + 1):
            attempt = current.attempts.get(stage)
            if attempt is None or stage not in ordered or ordered[stage][1] is not attempt:
                prepared.pop(stage, None)
            if attempt is None:
                continue
            if stage not in ordered or ordered[stage][1] is not attempt:
                ordered[stage] = (now, attempt)
            if stage not in prepared and lead.reducing.prepared(current, stage) is not None:
                prepared[stage] = now

    def chain(self, t: int) -> Counter[str]:
        """Seconds of each of PARTS in iteration t."""
        begin, end = self.begun[t - 1], self.begun[t]
        prepared, done = self.prepared[t], sorted(self.done[t], key=lambda each: each.end)
        last = max(prepared, key=lambda stage: prepared[stage])
        at, attempt = self.ordered[t][last]
        parts: Counter[str] = Counter(reduce=prepared[last] - at)
        alike: dict[Any, list[Done]] = defaultdict(list)
        """By what was computed, and by node."""
        for each in done:
            alike[each.what].append(each)
            alike[each.node].append(each)
        task = [
            each for each in done
            if each.stage == last and each.number >= 0 and each.end <= at and each.node in attempt.members
        ][-1]  # fmt: skip
        parts["telling"] = end - prepared[last] + at - task.end
        while True:
            again = alike[task.what][0] is not task
            parts["again" if again else "computing"] += task.end - max(begin, task.begin)
            before = _last(alike[task.node], task)
            busy = before is not None and before.end >= task.begin - SAME_S
            source = before if busy else self._source(task, alike)
            since = source.end if source is not None else begin
            stages = {task.stage} if source is None else {task.stage, source.stage}
            crashes = [] if busy else self._crashes(stages, since, task.begin)
            opened = self.opened[t].get(task.node, begin)
            if crashes:
                parts["sent anew"] += task.begin - crashes[-1]
                parts["lost"] += crashes[-1] - begin
                return parts
            late = 0.0 if busy else max(0.0, min(opened, task.begin) - since)
            parts["opening"] += late
            parts["ways"] += max(0.0, task.begin - since) - late
            if source is None or source.begin < begin:
                return parts
            task = source

    def _source(self, task: Done, alike: Mapping[Any, Sequence[Done]]) -> Done | None:
        """Task whose result a task waited for last."""
        stage, number, kind = task.stage, task.number, task.kind
        wanted: tuple[int, type[tasks.Task], int] | None = None
        if kind is tasks.Forward:
            wanted = (stage - 1, tasks.Forward if stage > 1 else tasks.Embed, number)
        elif kind is tasks.Head:
            wanted = (self.stages, tasks.Forward, number)
        elif kind is tasks.InputGradient:
            upper = stage < self.stages
            wanted = (stage + 1, tasks.InputGradient, number) if upper else (0, tasks.Head, number)
        elif kind is tasks.WeightGradient and stage:
            wanted = (stage, tasks.InputGradient, number)
        elif kind is tasks.WeightGradient:
            embeds = number % 2
            wanted = (1, tasks.InputGradient, number // 2) if embeds else (0, tasks.Head, number // 2)
        own = wanted is not None and wanted[0] == stage and stage > 0
        return _last([each for each in alike[wanted] if not own or each.node == task.node], task)

    def _crashes(self, stages: set[int], since: float, until: float) -> list[float]:
        hosts, crashed = self.simulation.fleet.hosts, self.simulation.crashed
        return sorted(at for name, at in crashed if since <= at <= until and hosts[name].stage in stages)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _last(found: Sequence[Done], task: Done) -> Done | None:
    """The last of them that had ended when a task began."""
    ended = [each for each in found if each.end <= task.begin + SAME_S and each is not task]
    return ended[-1] if ended else None


@contextlib.contextmanager
def bytes_of(share: float, kinds: tuple[type, ...]) -> Iterator[None]:
    """Payloads of some messages have this share of their bytes only."""
    if not str(modelled.__file__).endswith(".py"):
        raise SystemExit("`without` changes the simulator, and a compiled one cannot be: without PYTHONPATH")
    whole = ModelledWorld.payload_bytes

    def part(self: ModelledWorld, sender: Node, message: msg.AnyMessage) -> float:
        size = whole(self, sender, message)
        return max(1.0, share * size) if isinstance(message, kinds) else size

    ModelledWorld.payload_bytes = part  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModelledWorld.payload_bytes = whole  # type: ignore[method-assign]


def scenario(fleet: str, crash: float, iterations: int, changes: Mapping[str, Any]) -> Scenario:
    base = main_cell("LLaMA-like", fleet, crash, OURS, iterations)
    return cell(base.scenario, OURS, dict(base.changes) | dict(changes)).load()


def chains(fleet: str, crash: float, seeds: int, iterations: int) -> list[str]:
    """A row of the first table."""
    found: list[Counter[str]] = []
    seconds: list[float] = []
    for seed in range(seeds):
        of = scenario(fleet, crash, iterations, {})
        watch = Watch(of, seed)
        outcome = watch.simulation.run()
        if outcome.failure:
            raise SystemExit(f"{fleet}, seed {seed}: {outcome.failure}")
        for row in outcome.rows[of.run.warm_up :]:
            chain = watch.chain(row.t)
            if abs(chain.total() - row.seconds) > 1e-3:
                raise SystemExit(f"{fleet}, seed {seed}, iteration {row.t}: the chain has a gap")
            found.append(chain)
            seconds.append(row.seconds)
    lost = sum(chain["lost"] > 0.0 for chain in found)
    parts = [f"{fmean(chain[part] for chain in found):.1f}" for part in PARTS]
    return [fleet, percent(crash), f"{fmean(seconds):.1f}", *parts, f"{lost} of {len(found)}"]


def without(what: str, fleet: str, crash: float, seeds: int, iterations: int) -> float:
    """Mean seconds of an iteration."""
    share, kinds, changes = WITHOUT[what]
    means = []
    for seed in range(seeds):
        of = scenario(fleet, crash, iterations, changes)
        dealt = placed(of, find_profile("wan10"), seed)  # the same in every row
        with bytes_of(share, kinds):
            outcome = Simulation(dealt, OURS, seed).run()
        if outcome.failure:
            raise SystemExit(f"{what}, {fleet}, seed {seed}: {outcome.failure}")
        means.append(fmean(row.seconds for row in outcome.rows[of.run.warm_up :]))
    return fmean(means)


def chain_result(seeds: int, iterations: int) -> tuple[str, list[str]]:
    rows = []
    for fleet, crash in product(FLEETS, CHURN):
        rows.append(chains(fleet, crash, seeds, iterations))
        print(*rows[-1], file=sys.stderr, flush=True)
    return "What an iteration waits for", [
        f"`{OURS}`, LLaMA-like, {seeds} seeds, {iterations} iterations, the first two not counted; "
        "seconds. The chain goes back from the step to the reduce that ended last, to the last unit of that "
        "stage's cover, and from each task to what it waited for: the task before it on the same machine, or "
        f"the one whose result came last. {'; '.join(f'*{part}*: {text}' for part, text in PARTS.items())}. "
        "The last column: iterations whose chain begins with a crash.",
        "",
        table(["machines", "churn", "iteration s", *PARTS, "begun by a crash"], rows),
    ]


def without_result(seeds: int, iterations: int) -> tuple[str, list[str]]:
    settings, rows = [(fleet, crash) for crash in (CHURN[0], CHURN[-1]) for fleet in FLEETS], []
    for what, (_, kinds, _) in WITHOUT.items():
        cells = []
        for fleet, crash in settings:
            joins = kinds is JOINERS and not crash  # nobody does
            cells.append("" if joins else f"{without(what, fleet, crash, seeds, iterations):.1f}")
        rows.append([what, *cells])
        print(*rows[-1], file=sys.stderr, flush=True)
    return "Iteration time with one cost removed", [
        f"Seconds of an iteration, had one thing been otherwise (`{OURS}`, LLaMA-like, {seeds} seeds, "
        f"{iterations} iterations, the same draws of crashes):",
        "",
        table(["changed", *(f"{fleet}, {percent(crash)}" for fleet, crash in settings)], rows),
    ]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=8)
    sections = {"chain": chain_result, "without": without_result}
    parser.add_argument("--sections", nargs="+", default=list(sections), choices=sections)
    args = parser.parse_args()
    for name in args.sections:
        title, lines = sections[name](args.seeds, args.iterations)
        harness.write(name, title, "\n".join(lines), dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
