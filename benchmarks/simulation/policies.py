"""Iteration times of anabranch and of models of other systems, and the share of each part of anabranch.

    nice python -m benchmarks.simulation.policies --seeds 5 --processes 1

Two models, equal and unequal machines, churn of 0, 10 and 20 %, in virtual time: everything follows from the
seeds. Each cell is kept in build/tables/ under a hash of its scenario and of the program that made it, so a
run that was stopped goes on where it was. With `--minutes` no seed starts after so long. Writes the results
`tables`, `ablation` and `phases`.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

import anabranch
from anabranch.executors import Executor, executor
from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.scenario import Scenario, fleet_of, load_scenario
from anabranch.sim.cluster.scenario_schema import ChurnPart, DriftPart
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import Estimate, Outcome, Summary, estimate, summary
from anabranch.sim.metrics.phase_breakdown import COMPUTED, PHASES
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.placement.assignment import named
from benchmarks.placement.baselines import arranged

CACHE = harness.CACHE / "tables"
TITLES = {
    "tables": "Policies, machines and churn",
    "ablation": "What each part brings",
    "phases": "Phases of an iteration",
}
MODELS = {"LLaMA-like": "llama-350m", "GPT-like": "gpt2-350m"}
FLEETS = {"equal": "wan10", "unequal": "wan10-mixed"}
CHURN = (0.0, 0.1, 0.2)
OURS = "auction"
#: Seconds between pings: half of what a simulated run costs is small talk.
HEARTBEAT_S = 5.0
#: Activations of so many times as many microbatches wait in host memory (docs/explanation), of all policies.
PARK = 1.0
#: A row of the table -> policy, who serves which stage.
IN_TURN, BY_LINKS, BY_DT_FM = "arrival", "links", "dt-fm"
ROWS: dict[str, tuple[str, str]] = {
    "auction": (OURS, BY_LINKS),
    "gwtf": ("gwtf", BY_LINKS),
    "swarm-published": ("swarm-published", IN_TURN),
    "swarm-tuned": ("swarm-tuned", IN_TURN),
    "swarm-tuned, our placement": ("swarm-tuned", BY_LINKS),
    "restart, DT-FM's placement": ("restart", BY_DT_FM),
    "restart, our placement": ("restart", BY_LINKS),
}
OTHERS = tuple(ROWS)[1:]
PUBLISHED, TUNED, STATIC = "swarm-published", "swarm-tuned, our placement", tuple(ROWS)[-2:]
#: How a column of the result is printed.
COLUMNS = {
    "iteration s": ("iteration_s", "{:.1f}", 1.0),
    "s/microbatch": ("seconds_per_microbatch", "{:.3f}", 1.0),
    "tokens/s": ("tokens_per_s", "{:.0f}", 1.0),
    "sending s": ("communicating_s", "{:.1f}", 1.0),
    "wasted %": ("wasted_share", "{:.1f}", 100.0),
    "died %": ("died_share", "{:.1f}", 100.0),
    "over bound": ("over_bound", "{:.2f}", 1.0),
}
#: Part left out or changed -> policy, changes of the scenario.
ABLATION: dict[str, tuple[str, dict[str, Any]]] = {
    "nothing: deal, auction, dispatch, slots, repair, spread reduce": (OURS, {}),
    "placement: dealt in turn": (OURS, {"fleet.deal": IN_TURN}),
    "reduce: even, nobody else helps": (OURS, {"fleet.spread": "never"}),
    "flow: no plan and no prices, nearest free peer (`greedy`)": ("greedy", {}),
    "dispatch: the published flow, followed as planned (`gwtf`)": ("gwtf", {}),
    "flow and dispatch: replica = index mod replicas (`static`)": ("static", {}),
    "routing: SWARM's queues by virtual time (`swarm`)": ("swarm", {}),
    "routing and recovery: SWARM's, tuned (`swarm-tuned`)": ("swarm-tuned", {}),
    "recovery: best static arrangement, restarted (`restart`)": ("restart", {}),
    "recompute: no places with inputs alone": (OURS, {"fleet.recompute": 0.0}),
    "parking: no activations in host memory": (OURS, {"fleet.park": 0.0}),
    "capacity: half of the places": (OURS, {"fleet.capacity": 0.5}),
    "capacity: twice the places": (OURS, {"fleet.capacity": 2.0}),
    "admission: a batch of 16, which fits at once": (OURS, {"model.microbatches": 16}),
    "admission: a batch of 96": (OURS, {"model.microbatches": 96}),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A scenario by name with changes, under a policy. searched: by DT-FM, who serves which stage."""

    scenario: str
    policy: str
    changes: tuple[tuple[str, Any], ...]
    searched: bool = False

    def load(self) -> Scenario:
        changes = dict(self.changes)
        factor = changes.pop("fleet.capacity", None)
        if factor is not None:
            changes["fleet.capacity"] = scaled_capacity(load_scenario(self.scenario, changes), factor)
        return load_scenario(self.scenario, changes)

    def of(self, seed: int) -> Scenario:
        """With the machines of a seed by name, where they are searched."""
        scenario = self.load()
        if not self.searched:
            return scenario
        fleet = fleet_of(scenario, find_profile("wan10"), seed)
        return named(fleet, _searched(replace(scenario, churn=ChurnPart(), drift=DriftPart()), seed))


@cache
def _searched(scenario: Scenario, seed: int) -> Mapping[str, int]:
    """DT-FM's assignment of a scenario without churn, which it does not know about."""
    return arranged(fleet_of(scenario, find_profile("wan10"), seed), seed)


def scaled_capacity(scenario: Scenario, factor: float) -> list[int]:
    """The scenario's capacities times a factor; of what memory holds where it gives none."""
    given = scenario.fleet.capacity
    if not given:
        hosts = fleet_of(scenario, find_profile("wan10"), 0).hosts.values()
        given = tuple(sorted({host.capacity for host in hosts if host.stage}))
    return [max(1, round(factor * each)) for each in given]


def cell(scenario: str, policy: str, changes: Mapping[str, Any]) -> Cell:
    return Cell(scenario, policy, tuple(sorted(changes.items())))


def common(crash: float, iterations: int) -> dict[str, Any]:
    run = {"run.iterations": iterations, "run.heartbeat_s": HEARTBEAT_S}
    return {"churn.crash": crash, "fleet.park": PARK, **run}


def main_cell(model: str, fleet: str, crash: float, row: str, iterations: int) -> Cell:
    policy, placement = ROWS[row]
    searched = placement == BY_DT_FM
    deal = {"fleet.deal": IN_TURN if searched else placement}
    each = cell(FLEETS[fleet], policy, {"model.size": MODELS[model], **deal, **common(crash, iterations)})
    return replace(each, searched=searched)


def ablation_cell(row: str, crash: float, iterations: int) -> Cell:
    policy, changes = ABLATION[row]
    return cell("wan10-mixed", policy, {"fleet.deal": BY_LINKS} | common(crash, iterations) | changes)


# --- running ------------------------------------------------------------------------------------------


@cache
def program() -> str:
    """Hash of all that a simulated run is made of."""
    root = Path(anabranch.__file__).parent
    digest = hashlib.sha256()
    for room in ("flow", "protocol", "sim", "train/model/sizes.py", "net/wan"):
        place = root / room
        for path in sorted(place.rglob("*.*")) if place.is_dir() else [place]:
            if path.suffix in (".py", ".json", ".toml"):
                digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def path_of(each: Cell, seed: int) -> Path:
    key = msgspec.json.encode([program(), asdict(each.load()), each.policy, each.searched, seed])
    return CACHE / f"{hashlib.sha256(key).hexdigest()[:24]}.json"


def outcome_of(each: Cell, seed: int) -> Outcome:
    """From the cache, or run now."""
    path = path_of(each, seed)
    if path.exists():
        return _decoded(path.read_bytes())
    content = computed((each, seed))
    harness.write_whole(path, content)
    return _decoded(content)


def computed(trial: tuple[Cell, int]) -> bytes:
    """Outcome of a cell with a seed, as JSON: it is computed where no cache is, too."""
    each, seed = trial
    return msgspec.json.encode(simulate(each.of(seed), find_profile("wan10"), each.policy, seed))


def _decoded(content: bytes) -> Outcome:
    """Outcome in JSON, which has null for an infinite bound: that of an iteration in which all replicas of a
    stage crashed."""
    outcome = msgspec.json.decode(content)
    for row in outcome["rows"]:
        row["bound_s"] = math.inf if row["bound_s"] is None else row["bound_s"]
    return msgspec.convert(outcome, Outcome)


def run_all(cells: Iterable[Cell], seeds: int, where: Executor, minutes: float) -> int:
    """Seed by seed, all cells each; returns how many seeds are complete."""
    cells, begun = list(dict.fromkeys(cells)), time.monotonic()
    for seed in range(seeds):
        missing = [(each, seed) for each in cells if not path_of(each, seed).exists()]
        if missing and minutes and time.monotonic() - begun > 60.0 * minutes:
            return seed
        for trial, content in harness.completed(computed, missing, where, f"seed {seed}"):
            harness.write_whole(path_of(*trial), content)
    return seeds


def summary_of(each: Cell, seeds: int) -> Summary:
    outcomes = [outcome_of(each, seed) for seed in range(seeds)]
    return summary(outcomes, fleet_of(each.load(), find_profile("wan10"), 0))


# --- telling ------------------------------------------------------------------------------------------


def text(figure: Estimate, form: str = "{:.2f}", factor: float = 1.0) -> str:
    mean = form.format(factor * figure.mean)
    return f"{mean} ± {form.format(factor * figure.half)}" if figure.half else mean


def quotient(ours: Cell, theirs: Cell, seeds: int, figure: str = "iteration_s") -> Estimate:
    """Ours over theirs, of each seed, then the mean: the crashes are the same draws."""

    def of(each: Cell, seed: int) -> float | None:
        outcome = outcome_of(each, seed)
        warm_up = each.load().run.warm_up
        rows = outcome.rows[warm_up:]
        if outcome.failure or not rows:
            return None
        return fmean(row.seconds if figure == "iteration_s" else row.bound_s for row in rows)

    pairs = [(of(ours, seed), of(theirs, seed)) for seed in range(seeds)]
    return estimate([one / other for one, other in pairs if one is not None and other is not None])


def goal(name: str, found: Estimate, most: float) -> Goal:
    """Met only if the whole interval is on the right side."""
    value = f"{text(found)} in the worst setting"
    return harness.goal(name, f"at most {most:.2f}", value, found.mean + found.half <= most)


def goals(seeds: int, iterations: int) -> list[Goal]:
    """Each goal over all settings it speaks of, with the figure of the worst one. Goals over other systems
    are those of `comparison`, at the same bytes."""

    def worst_over_bound(crash: float) -> Estimate:
        cells = [main_cell(model, fleet, crash, OURS, iterations) for model, fleet in product(MODELS, FLEETS)]
        found = [summary_of(each, seeds).figures["over_bound"] for each in cells]
        return max(found, key=lambda each: each.mean)

    def most_wasted(beyond: bool) -> Estimate:
        cells = [
            main_cell(model, fleet, crash, OURS, iterations)
            for model, fleet, crash in product(MODELS, FLEETS, CHURN)
        ]
        key = "beyond_share" if beyond else "wasted_share"
        found = [summary_of(each, seeds).figures[key] for each in cells]
        worst_share = max(found, key=lambda each: each.mean)
        return Estimate(100 * worst_share.mean, 100 * worst_share.half)

    return [
        goal("iteration time over the clairvoyant bound, without churn", worst_over_bound(0.0), 1.3),
        goal("iteration time over the clairvoyant bound, 20 % churn", worst_over_bound(0.2), 1.5),
        goal("wasted compute, % of all", most_wasted(beyond=False), 1.0),
        goal("wasted compute beyond what died with its process, % of all", most_wasted(beyond=True), 1.0),
    ]


def quotients(seeds: int, iterations: int) -> str:
    """Ours over theirs in every setting."""
    rows = []
    for name, machines, crash in product(MODELS, FLEETS, CHURN):
        ours = main_cell(name, machines, crash, OURS, iterations)
        theirs = [main_cell(name, machines, crash, row, iterations) for row in OTHERS]
        found = [f"{quotient(ours, each, seeds).mean:.2f}" for each in theirs]
        rows.append([f"{name}, {machines}", f"{100 * crash:.0f} %", *found])
    return table(["setting", "churn", *OTHERS], rows)


def tables(seeds: int, iterations: int) -> str:
    scenario = load_scenario("wan10")
    model, fleet = scenario.model, scenario.fleet
    lines = [
        f"{seeds} seeds, mean ± half of the 95 % interval; {iterations} iterations, the first "
        f"{scenario.run.warm_up} not counted. Ten regions, {fleet.data_nodes} data nodes, {fleet.relays} "
        f"relays over {model.stages} stages, {model.microbatches} microbatches of {model.rows}×"
        f"{model.sequence} tokens. `auction` (with dispatch) and `gwtf` route for the real protocol, with "
        "its recovery; the others are models of other systems on the same machines, links and crashes, with "
        "the same sums to reduce and the same memory per relay (docs/explanation, which says where they are "
        "favoured). *Our placement*: relays ask for any stage, and the leader deals them by what they "
        "measured before the first step (`fleet.deal = \"links\"`), as for `auction` and `gwtf`; else they "
        "are dealt in turn, or as DT-FM's search has it. Nobody moves later (`fleet.rebalance` is off). "
        "`restart`: pipelines found centrally, shares by speed, begun anew at each crash. The bound is that "
        "of each row's own placement. Activations of as many microbatches again as a device holds wait in "
        "host memory (`fleet.park`), and on unequal machines relays have places of which they keep only the "
        "input (`fleet.recompute`). *wasted*: computed and in no step; *died*: of that, by processes that "
        "crashed, before they crashed, which goes with them under any protocol that hands nothing over "
        "beforehand.",
        "",
    ]
    for name, machines in product(MODELS, FLEETS):
        rows = []
        for crash, row in product(CHURN, ROWS):
            each = summary_of(main_cell(name, machines, crash, row, iterations), seeds)
            figures = [text(each.figures[key], form, factor) for key, form, factor in COLUMNS.values()]
            rows.append([f"{100 * crash:.0f} %", row, *figures, f"{each.seeds} of {seeds}"])
        lines += [f"**{name} ({MODELS[name]}), {machines} machines (`{FLEETS[machines]}`)**", ""]
        lines += [table(["churn", "policy", *COLUMNS, "finished"], rows), ""]
    lines += ["Iteration time of `auction` over that of the others:", "", quotients(seeds, iterations), ""]
    return "\n".join(lines)


def ablation(seeds: int, iterations: int) -> str:
    head = ["left out or changed", "s/microbatch, 0 %", "over all", "s/microbatch, 10 %", "over all"]
    rows = []
    for row in ABLATION:
        cells = [row]
        for crash in (0.0, 0.1):
            figures = [
                summary_of(ablation_cell(each, crash, iterations), seeds).figures["seconds_per_microbatch"]
                for each in (row, next(iter(ABLATION)))
            ]
            cells += [text(figures[0], "{:.3f}"), f"{figures[0].mean / figures[1].mean:.2f}"]
        rows.append(cells)
    return "\n".join(
        [
            f"`wan10-mixed`, LLaMA-like, {seeds} seeds, {iterations} iterations; each row leaves out or "
            "changes one thing; *over all* is its time over the first row's. Systems that are models reduce "
            "evenly. A bigger batch spreads fill, drain and reduce over more.",
            "",
            table(head, rows),
        ]
    )


def phases(seeds: int, iterations: int) -> str:
    """Where the seconds of our iterations go."""
    columns = ("iteration_s", "bound_s", *PHASES, *COMPUTED)
    rows = []
    for fleet, crash in product(FLEETS, CHURN):
        figures = summary_of(main_cell("LLaMA-like", fleet, crash, OURS, iterations), seeds).figures
        cells = [text(figures["iteration_s"], "{:.1f}"), *(f"{figures[key].mean:.1f}" for key in columns[1:])]
        rows.append([fleet, f"{100 * crash:.0f} %", *cells])
    head = ["machines", "churn", *(key.replace("_", " ") for key in columns)]
    return "\n".join(
        [
            f"`{OURS}`, LLaMA-like, {seeds} seeds, {iterations} iterations. *fill*: until the last stage's "
            "first forward begins; *steady*: until the last forward ends; *drain*: until every stage's cover "
            "is settled; *reduce*: until the step; they make up the iteration. The last four columns: what a "
            "relay computes on average.",
            "",
            table(head, rows),
        ]
    )


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="at most so many (default: 5)")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no further seed after so long")
    parser.add_argument("--sections", nargs="+", default=list(TITLES), choices=TITLES)
    harness.add_executor(parser)
    args = parser.parse_args()
    where = executor(args.executor, args.processes)
    n = args.iterations
    parts: dict[str, tuple[list[Cell], Callable[[int, int], str]]] = {
        "tables": (
            [main_cell(m, f, c, r, n) for m, f, c, r in product(MODELS, FLEETS, CHURN, ROWS)],
            tables,
        ),
        "ablation": ([ablation_cell(row, c, n) for row, c in product(ABLATION, CHURN[:2])], ablation),
        "phases": ([main_cell("LLaMA-like", f, c, OURS, n) for f, c in product(FLEETS, CHURN)], phases),
    }
    for name in args.sections:
        cells, tell = parts[name]
        seeds = run_all(cells, args.seeds, where, args.minutes)
        if not seeds:
            print(f"{name}: no seed is complete: run it again, it goes on where it was", file=sys.stderr)
            return 1
        found = goals(seeds, n) if name == "tables" else []
        harness.write(name, TITLES[name], tell(seeds, n), goals=found, dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(harness.main_by_name())
