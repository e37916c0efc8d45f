"""Iteration times of what `anabranch plan --wire auto` chooses, over the bound of iterations that overlap.

    nice python -m benchmarks.simulation.planned_steps [--seeds 4] [--iterations 16]

Virtual time, no churn. The plan is searched, simulated and given codecs as the command does it; then it is
simulated with each seed. Writes the result `planned-steps`.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean
from typing import Any

from anabranch.cli.plan import load_fleet
from anabranch.cli.support.scenario_fleet import open_fleet
from anabranch.sim.cluster.scenario import Regions
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import estimate
from anabranch.sim.planning.search import Plan, search, shortlist, simulated
from anabranch.sim.planning.wire_choice import chosen, named, weighed
from benchmarks import harness
from benchmarks.simulation.delayed_steps import FLEETS, LIMIT, WARM_UP
from benchmarks.simulation.policies import OURS, text

#: Plans that are simulated before codecs are weighed, and iterations of each; the defaults of the command are
#: three and four, but with two iterations in flight four are too few.
SIMULATED, ITERATIONS = 3, 6


def planned(fleet: str) -> tuple[Plan, Regions]:
    """Plan of a shipped fleet, as the command chooses it, and the fleet's network."""
    scenario = load_fleet(fleet, None, None)
    regions = open_fleet(scenario, fleet).regions
    *_, found = search(scenario, regions)
    tried = [simulated(plan, regions, ITERATIONS) for plan in shortlist(found, SIMULATED)]
    first = min(tried, key=lambda plan: plan.step_s)
    return chosen(weighed(first, regions, ITERATIONS)), regions


def measured(plan: Plan, regions: Regions, seed: int, iterations: int) -> dict[str, Any]:
    """Mean seconds of the counted iterations of a plan with a seed, and of their bound."""
    scenario = replace(plan.scenario, run=replace(plan.scenario.run, iterations=iterations))
    rows = simulate(scenario, regions, OURS, seed).rows[WARM_UP:-1]
    bound_s = fmean(row.bound_s for row in rows)
    return {"seed": seed, "iteration_s": fmean(row.seconds for row in rows), "bound_s": bound_s}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=16)
    args = parser.parse_args()
    rows, goals, data = [], [], {}
    for fleet in FLEETS:
        plan, regions = planned(fleet)
        found = [measured(plan, regions, seed, args.iterations) for seed in range(args.seeds)]
        over = estimate([each["iteration_s"] / each["bound_s"] for each in found])
        seconds, bound = (estimate([each[key] for each in found]) for key in ("iteration_s", "bound_s"))
        stages, wire = plan.scenario.model.stages, named(plan.scenario)
        rows.append([fleet, wire, stages, text(seconds), text(bound), text(over), args.seeds])
        name = f"iteration over the bound of overlapping iterations, {fleet}, by plan"
        goals.append(harness.at_most(name, LIMIT, over.mean, "{:.2f}", over.half))
        data[fleet] = {"wire": wire, "stages": stages, "seeds": found}
        print(rows[-1], flush=True)
    head = ["fleet", "what plan chose", "stages", "iteration, s", "bound, s", "over it", "seeds"]
    body = (
        "llama-350m, ten regions, virtual time, no churn, with what `anabranch plan FLEET --wire auto "
        f"--iterations {ITERATIONS}` chooses; mean ± half of the 95 % interval over the seeds. The first "
        f"{WARM_UP} iterations are not counted, nor is the last one. The bound is that of iterations that "
        f"overlap (see [two iterations in flight](delayed-steps.md)).\n\n{harness.table(head, rows)}"
    )
    title = "Iteration times of what plan chooses"
    harness.write("planned-steps", title, body, goals=goals, data=data, dry=args.dry)


if __name__ == "__main__":
    main()
