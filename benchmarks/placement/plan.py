"""Gain of the plans that `anabranch plan` recommends, and error of its estimates against the simulator.

    python -m benchmarks.placement.plan [--fleets wan10 forty] [--simulate 2] [--iterations 5]

For each fleet: the cut that its scenario has (relays dealt in turn), and the best plans by estimate, each run
in virtual time; where they leave machines out the best that does not, too. All with the protocol's `auction`,
seed 0, without churn (but where a scenario has some, plans leave two replicas to a stage), the first two
iterations not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from anabranch.net.wan.profile import find_profile
from anabranch.sim.cluster.machine_spec import staged
from anabranch.sim.cluster.scenario import Regions, Scenario, fleet_of, load_scenario
from anabranch.sim.planning.estimate import estimate
from anabranch.sim.planning.search import Plan, named_fleet, search, shortlist, simulated
from benchmarks import harness
from benchmarks.harness import table

FLEETS = ["wan10", "wan10-mixed", "forty", "volunteers"]


def plans(scenario: Scenario, regions: Regions, stages: Sequence[int] = ()) -> list[Plan]:
    """All plans, sorted by estimate."""
    *_, found = search(scenario, regions, stages)
    return found


def compared(name: str, most: int, iterations: int) -> list[Plan]:
    """The scenario's own cut, then the plans, simulated."""
    scenario = load_scenario(name)
    regions = find_profile(scenario.network.profile)
    fleet = named_fleet(scenario, regions)
    dealt = staged(fleet.machines, scenario.model.stages)
    own = replace(fleet, machines=tuple(replace(part, stage=stage) for stage, part in dealt))
    first = Plan(own, estimate(fleet_of(own, regions, 0)))
    found = plans(scenario, regions)
    chosen = [first, *shortlist(found, most)]
    if any(plan.left_out for plan in chosen):
        chosen.append(next(plan for plan in found if not plan.left_out))
    calm = replace(scenario.churn, crash=0.0)
    chosen = [replace(plan, scenario=replace(plan.scenario, churn=calm)) for plan in chosen]
    return [simulated(plan, regions, iterations) for plan in chosen]


def row(fleet: str, what: str, plan: Plan) -> list[str]:
    model, part = plan.scenario.model, plan.scenario.fleet
    more = (1.0 + part.park) * (1.0 + part.recompute)
    failed = plan.simulated is None or bool(plan.simulated.failures)
    return [
        fleet,
        what,
        str(model.stages),
        f"{sum(plan.replicas)} of {sum(plan.replicas) + len(plan.left_out)}",
        f"{model.microbatches} of {model.rows}×{model.sequence}",
        f"{more:g}×" if more > 1.0 else "kept",
        f"{plan.estimated.iteration_s:.2f}",
        "failed" if failed else f"{plan.iteration_s:.2f}",
        "–" if failed else f"{plan.estimated.iteration_s / plan.iteration_s:.2f}",
        f"{plan.tokens_per_s:.0f}",
    ]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--fleets", nargs="+", default=FLEETS)
    parser.add_argument("--simulate", type=int, default=2, help="plans of each fleet")
    parser.add_argument("--iterations", type=int, default=5, help="of each")
    options = parser.parse_args()
    rows, lines, errors = [], [], []
    for name in options.fleets:
        own, *found = compared(name, options.simulate, options.iterations)
        found.sort(key=lambda plan: plan.iteration_s)
        rows.append(row(name, "as the scenario", own))
        rows += [row(name, f"plan {at}", plan) for at, plan in enumerate(found, start=1)]
        print(table(["", *["-"] * 9], rows), flush=True)
        errors += [abs(plan.estimated.iteration_s / plan.iteration_s - 1.0) for plan in (own, *found)]
        gain = own.iteration_s / found[0].iteration_s
        lines.append(f"- `{name}`: the recommended plan is **{gain:.2f} times** as quick as the scenario.")
        whole = [plan.iteration_s for plan in found if not plan.left_out]
        if whole and found[0].left_out:
            lines[-1] += f" The best that leaves nobody out: {own.iteration_s / min(whole):.2f} times."
    lines.append(
        f"- The estimate is off the simulated time by {100 * sum(errors) / len(errors):.0f} % on average, by "
        f"{100 * max(errors):.0f} % at most ({len(errors)} plans)."
    )
    head = [
        "fleet", "", "stages", "relays", "microbatches", "places", "estimated s", "simulated s",
        "estimated/simulated", "tokens/s",
    ]  # fmt: skip
    text = (
        "`anabranch plan`: seconds of an iteration by its arithmetic and in virtual time (`auction`, seed 0, "
        f"{options.iterations} iterations, the first two not counted), without churn. *places*: times those "
        "in device memory, activations parked or forwards computed again. Where a plan leaves machines out "
        f"the best by estimate that does not is there, too.\n\n{table(head, rows)}\n\n"
        + "\n".join(lines)
    )
    harness.write("plan", "`anabranch plan`: estimate and simulation", text, dry=options.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
