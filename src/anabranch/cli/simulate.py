"""Predict the time of an iteration on a fleet: the real protocol in virtual time over modelled links and
devices, or another system's rules on the same ones. No tensors are computed: FLOPs and bytes give the
seconds.

examples:
  anabranch simulate wan10                                      ten regions, 16 relays, no churn
  anabranch simulate wan10 --set churn.crash=0.1 --seeds 5      each relay crashes in one iteration of ten
  anabranch simulate wan10 --policy auction swarm restart       several policies side by side
  anabranch simulate wan10-mixed --set model.size=gpt2-350m --json
  anabranch simulate wan10 --set churn.crash=0.2 --plot pictures
  anabranch simulate eight-homes --set model.subspace=160       thin cuts over home lines
  anabranch simulate my.toml                your own machines (docs/reference/scenario.md)
  anabranch simulate --from runs/tiny                           machines, links and churn of a recorded run
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from anabranch.cli.support.arguments import JOBS, add_jobs, add_json, check_range
from anabranch.config import Range
from anabranch.config.load import parse_toml
from anabranch.errors import UserError, os_errors_named
from anabranch.executors import Processes, in_order
from anabranch.observe.console.progress import Ticker

if TYPE_CHECKING:
    from anabranch.sim.cluster.scenario import Scenario
    from anabranch.sim.metrics.iteration_metrics import Outcome

_POLICIES = (
    "of the protocol: auction, gwtf, swarm, greedy, static; models of other systems: swarm-as-coded, "
    "swarm-published, swarm-tuned, restart (default: auction; with --from the run's)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    scenario = (
        "wan10, wan10-mixed, fleet64, fleet1000, volunteers, eight-homes, forty, or a file "
        "(docs/reference/formats.md)"
    )
    add("scenario", metavar="SCENARIO", nargs="?", default="", help=scenario)
    recorded = "turn a recorded run into a scenario, written to RUN_DIR/simulated"
    add("--from", type=Path, metavar="RUN_DIR", dest="run_dir", help=recorded)
    add("--policy", nargs="+", default=[], metavar="NAME", help=_POLICIES)
    add("--seeds", type=int, default=1, metavar="N", help="run seeds 0 to N-1")
    changes = "change keys of the scenario; may be given several times"
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="changes", help=changes)
    add_jobs(parser)
    add("--plot", type=Path, metavar="DIR", help="draw bars, throughput, timeline and world map there")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.cli.main import INTERRUPTED
    from anabranch.cli.support.recorded_scenario import record
    from anabranch.cli.support.scenario_fleet import file_of, open_fleet
    from anabranch.cli.support.simulation_plots import plot
    from anabranch.cli.support.simulation_report import carried, heading, report
    from anabranch.sim.cluster.scenario import load_scenario, misfit
    from anabranch.sim.metrics.iteration_metrics import VERSION, summary

    _check(args)
    name, recorded = args.scenario, None
    if args.run_dir is not None:
        path, recorded = record(args.run_dir)
        name = str(path)
    scenario = load_scenario(name, dict(map(_change, args.changes)))
    if recorded is not None:
        scenario = replace(scenario, name=recorded.scenario.name)
    fleet = open_fleet(scenario, name)
    if problem := misfit(scenario):
        raise UserError(f"{file_of(name)}: {problem}")
    default = "auction" if recorded is None else recorded.policy
    policies = list(dict.fromkeys(args.policy or [default]))
    if args.plot is not None:
        with os_errors_named(f"--plot {args.plot}"):
            args.plot.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(scenario, policies, range(args.seeds), args.jobs or os.cpu_count() or 1)
    stopped = len(outcomes) < len(policies) * args.seeds
    if stopped:
        print(
            f"stopped; these are the {len(outcomes)} of {len(policies) * args.seeds} trials that were done",
            file=sys.stderr,
        )
    of_policy = {policy: [o for o in outcomes if o.policy == policy] for policy in policies}
    summaries = [summary(found, fleet) for found in of_policy.values() if found]
    if args.plot is not None:
        plot(args.plot, fleet, summaries, [each for each in outcomes if each.seed == 0])
    if args.json:
        named = {"scenario": asdict(scenario), "policies": summaries, "runs": outcomes}
        print(msgspec.json.encode({"version": VERSION, **named}).decode())
    else:
        print(f"{heading(fleet)}\n{report(summaries)}")
        for policy, found in of_policy.items():
            if line := carried(policy, found):
                print(line)
        if recorded is not None:
            changes = len(recorded.trace.changes)
            print(
                f"the run itself: {recorded.iteration_s:.2f} s per iteration, {changes} joins and losses; "
                f"its scenario: {name}"
            )
    return INTERRUPTED if stopped else 1 if any(each.failures for each in summaries) else 0


def _check(args: argparse.Namespace) -> None:
    """Raise UserError for options of `anabranch simulate` that cannot work, alone or together."""
    from anabranch.sim.experiment.run import KNOWN_POLICIES

    for policy in args.policy:
        if policy not in KNOWN_POLICIES:
            raise UserError(f"--policy {policy}: choose one of {', '.join(KNOWN_POLICIES)}")
    check_range("--seeds", args.seeds, Range(1))
    check_range("--jobs", args.jobs, JOBS)
    if bool(args.scenario) == bool(args.run_dir):
        raise UserError("give either a scenario or --from RUN_DIR, not both")


def run_all(scenario: Scenario, policies: Sequence[str], seeds: Sequence[int], jobs: int) -> list[Outcome]:
    """Simulate a scenario under every policy with every seed; returns the outcomes, by policy and then by
    seed. jobs: processes; with 1, or a single trial, this process simulates. Progress is printed on stderr.
    Outcomes are taken in their order: at an interrupt, which ends the processes at once, those before the
    first trial that is not done are returned, and later ones are lost. If that is none, KeyboardInterrupt is
    raised. Raises UserError if a process dies; an exception of a trial passes."""
    trials = [(scenario, policy, seed) for policy, seed in product(policies, seeds)]
    died = "a simulating process died; fewer --jobs take less memory"
    where = Processes(min(jobs, len(trials)), method=None, died=died)
    found: list[Outcome] = []
    with Ticker() as ticker:
        ticker.begin("simulating" if len(trials) == 1 else f"simulating {len(trials)} trials")
        try:
            for outcome in in_order(where.completed(_one, trials)):
                found.append(outcome)
                ticker.update(f"simulating: {len(found)} of {len(trials)} trials are done")
        except KeyboardInterrupt:
            if not found:
                raise
    return found


def _one(trial: tuple[Scenario, str, int]) -> Outcome:
    from anabranch.net.wan.profile import find_profile
    from anabranch.sim.experiment.run import simulate

    scenario, policy, seed = trial
    return simulate(scenario, find_profile(scenario.network.profile), policy, seed)


def _change(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--set {text}: write it as section.key=value, e.g. churn.crash=0.1")
    try:
        return key, parse_toml(f"value = {value}")["value"]
    except ValueError:
        words = [word.strip() for word in value.strip("[]").split(",")]
        if value.startswith("[") and all(word[:1].isalpha() for word in words):
            quoted = ", ".join(f'"{word}"' for word in words)
            raise UserError(f"--set {text}: the shell drops quotes; write '{key}=[{quoted}]'") from None
        return key, value
