"""Throughput kept under churn, and compute wasted: the protocol beside systems that restart, and SWARM's
recovery.

    nice python benchmarks/churn.py --seeds 3 --processes 1

Scenarios `wan10` and `wan10-mixed` (docs/simulate.md) with 0, 10 and 20 % of the relays crashing per
iteration; the same draws of crashes for all. `auction`, `gwtf` and `swarm` route for the real protocol, in
virtual time; `restart`, `swarm-published` and `swarm-tuned` are modelled on the same links and devices.
Everything follows from the seeds. Rewrites the sections `churn-wan10` and `churn-wan10-mixed` of
docs/results.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from anabranch.net.wan.profile import wan10
from anabranch.sim.scenario import Scenario, fleet_of, load_scenario
from anabranch.sim.simulate import simulate
from anabranch.sim.tape import Estimate, Outcome, Summary, estimate, summary
from report import table, write_section

POLICIES = ("auction", "gwtf", "swarm", "restart", "swarm-published", "swarm-tuned")
SCENARIOS = ("wan10", "wan10-mixed")
CHURN = (0.0, 0.1, 0.2)
#: Throughput kept, in the simulator.
GOAL = 0.9

Trial = tuple[str, str, float, int]
Found = dict[Trial, Outcome]


def scenario_of(name: str, crash: float, iterations: int) -> Scenario:
    return load_scenario(name, {"churn.crash": crash, "run.iterations": iterations})


def run(trial: Trial, iterations: int) -> Outcome:
    name, policy, crash, seed = trial
    return simulate(scenario_of(name, crash, iterations), wan10(), policy, seed)


def summary_of(found: Found, name: str, policy: str, crash: float, iterations: int) -> Summary:
    outcomes = [each for trial, each in found.items() if trial[:3] == (name, policy, crash)]
    return summary(outcomes, fleet_of(scenario_of(name, crash, iterations), wan10(), 0))


def kept(found: Found, name: str, policy: str, crash: float, warm_up: int) -> Estimate:
    """Throughput over that without churn: of each seed, then the mean."""

    def seconds(rate: float, seed: int) -> float:
        rows = found[name, policy, rate, seed].rows[warm_up:]
        return sum(row.seconds for row in rows) / len(rows)

    seeds = [
        trial[3]
        for trial, each in found.items()
        if trial[:3] == (name, policy, crash)
        and not each.failure
        and not found[name, policy, 0.0, trial[3]].failure
    ]
    return estimate([seconds(0.0, seed) / seconds(crash, seed) for seed in seeds])


def text(figure: Estimate, form: str = "{:.2f}", factor: float = 1.0) -> str:
    mean = form.format(factor * figure.mean)
    return f"{mean} ± {form.format(factor * figure.half)}" if figure.half else mean


def report(found: Found, name: str, seeds: int, iterations: int) -> str:
    scenario = scenario_of(name, 0.0, iterations)
    model, fleet = scenario.model, scenario.fleet
    lines = [
        f"### Throughput kept under churn, and compute wasted: {name}",
        "",
        f"{seeds} seeds, mean ± 95 %. `kept`: throughput over that of the same policy without churn. "
        "`over bound`: over the clairvoyant bound of the relays that survived. `wasted`: of all compute "
        "seconds those whose result entered no step. `twice`: contributions that are in a gradient more than "
        "once, per iteration. `auction`, `gwtf` and `swarm` are routing policies of the real protocol, with "
        "its recovery; the last three are models of other systems, to which decisions cost nothing "
        "(docs/simulate.md).",
        "",
        f"`{name}`: {model.size}, {fleet.relays} relays over {model.stages} stages, "
        f"{model.microbatches} microbatches of {model.rows}×{model.sequence} tokens, "
        f"{', '.join(fleet.device)}; {iterations} iterations, the first {scenario.run.warm_up} not counted.",
        "",
    ]
    rows = []
    for policy, crash in product(POLICIES, CHURN):
        each = summary_of(found, name, policy, crash, iterations)
        figures = each.figures
        rows.append(
            [
                policy,
                f"{100 * crash:.0f} %",
                text(figures["iteration_s"], "{:.1f}"),
                text(kept(found, name, policy, crash, scenario.run.warm_up), "{:.0f} %", 100.0),
                text(figures["over_bound"]),
                f"{figures['tokens_per_s'].mean:.0f}",
                f"{100 * figures['utilisation'].mean:.1f} %",
                text(figures["wasted_share"], "{:.1f} %", 100.0),
                f"{figures['crashes'].mean:.2f}",
                f"{figures['recoveries'].mean:.1f}",
                f"{figures['twice'].mean:.1f}",
                f"{each.seeds} of {each.seeds + len(each.failures)}",
            ]
        )
    head = ["policy", "churn", "iteration s", "kept", "over bound", "tokens/s", "GPU busy", "wasted"]
    lines.append(table([*head, "crashes", "recoveries", "twice", "finished"], rows))
    lines.append("")
    for crash in CHURN[1:]:
        mine = kept(found, name, "auction", crash, scenario.run.warm_up).mean
        lines.append(
            f"- `auction` keeps {100 * mine:.0f} % of its throughput at {100 * crash:.0f} % churn; "
            f"goal {100 * GOAL:.0f} %: **{'met' if mine >= GOAL else 'not met'}**."
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dry", action="store_true", help="leave docs/results.md as it is")
    args = parser.parse_args()
    for name in args.scenarios:
        trials = list(product([name], POLICIES, CHURN, range(args.seeds)))
        with ProcessPoolExecutor(args.processes) as pool:
            outcomes = list(pool.map(run, trials, [args.iterations] * len(trials)))
        text = report(dict(zip(trials, outcomes, strict=True)), name, args.seeds, args.iterations)
        if args.dry:
            print(text)
        else:
            write_section(f"churn-{name}", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
