"""Find the best stages, microbatch size, replicas and placement for a fleet, and which machines to leave out;
print predicted time and cost, and the runners-up; --out writes the run file to start.

examples:
  anabranch plan forty --model llama-1b                  a shipped fleet: forty GPUs in ten regions
  anabranch plan fleet.toml --model llama-1b --out run.toml
  anabranch plan fleet.toml --stages 4 6 8 --simulate 6  only these numbers of stages; simulate six plans
  anabranch plan fleet.toml --churn 0.1 --json           each relay crashes in one iteration of ten
  anabranch plan volunteers --wire auto                  codecs, too, by the time that they save

A fleet is a scenario (docs/reference/formats.md): machines with regions, bandwidths and prices, the network,
the batch. All plans are ranked by a cost model, and the best few are simulated in virtual time
(docs/explanation/simulator.md). Where the model fits into no relay, pipeline islands are compared, too; what
they cost in tokens is not (docs/explanation/islands.md). A large search prints its first table within seconds
and goes on; Ctrl+C ends it with the best plan so far."""

from __future__ import annotations

import argparse
import math
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from anabranch.cli.support.arguments import add_json, check_range
from anabranch.cli.support.outputs import add_out, check_out, write_out
from anabranch.config import Range
from anabranch.errors import UserError
from anabranch.observe.console.progress import QUIET_S, progress_bars
from anabranch.observe.wording import counted

if TYPE_CHECKING:
    from anabranch.sim.cluster.scenario import Regions, Scenario
    from anabranch.sim.planning.search import Plan, Progress

#: Version of the JSON result.
VERSION = 1
#: Least number of plans in the report.
LISTED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("fleet", metavar="FLEET.toml", help="scenario file, or a shipped scenario")
    add("--model", metavar="NAME", help="model size (default: the scenario's)")
    stages = "numbers of stages to consider (default: all that fit)"
    add("--stages", type=int, nargs="+", default=[], metavar="N", help=stages)
    add("--churn", type=float, metavar="P", help="crashes per relay and iteration (default: the scenario's)")
    add("--simulate", type=int, default=3, metavar="N", help="plans to simulate; 0: none")
    iterations = "iterations of each simulation, of which the first does not count"
    add("--iterations", type=int, default=4, metavar="N", help=iterations)
    wire = "codecs of the first plan: the scenario's (default), or those that these lines are worth"
    add("--wire", choices=("scenario", "auto"), default="scenario", help=wire)
    add_out(parser, "write the recommended run file there")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.cli.support.plan_report import as_values, lines_advice, report
    from anabranch.cli.support.scenario_fleet import open_fleet
    from anabranch.sim.planning.runfile import run_file, run_warnings

    check_range("--simulate", args.simulate, Range(0))
    check_range("--iterations", args.iterations, Range(2))
    check_range("--stages", min(args.stages, default=1), Range(1))
    scenario = load_fleet(args.fleet, args.model, args.churn)
    check_out(args.out, args.force)
    refined = _Refined(open_fleet(scenario, args.fleet).regions, args)
    with progress_bars() as advance:
        try:
            refined.refine(scenario, advance)
        except KeyboardInterrupt:
            if not refined.found:
                raise
            refined.stopped = True
    ranked, considered, codecs = refined.ranked(), len(refined.found), refined.codecs
    if refined.stopped:
        print(f"stopped; {refined.reached}. These are the best plans so far:", file=sys.stderr)
    text = run_file(ranked[0], codecs)
    if args.out is not None:
        write_out(args.out, text)
    for sentence in run_warnings(ranked[0]):
        print(f"warning: {sentence}", file=sys.stderr)
    if args.json:
        result = {
            "version": VERSION,
            "fleet": scenario.name,
            "considered": considered,
            "complete": not refined.stopped,
            "plans": [as_values(plan) for plan in ranked],
            "run_file": text,
            "codecs": codecs,
        }
        print(msgspec.json.encode(result).decode())
    else:
        advice = [] if codecs else lines_advice(ranked[0])
        print("\n".join((report(ranked, considered), *codecs, *advice)))
        if args.out is None:
            print("--out run.toml writes the run file of the first plan")
        else:
            print(f"wrote {args.out}; next, on a data node: anabranch start {args.out}")
    return 0


class _Refined:
    """Plans of a fleet, which become better while `refine` searches, until the search ends or the user stops
    it.

    regions: network of the fleet. args: options of `anabranch plan`. found: plans so far, sorted by estimate.
    codecs: lines of text on the choice of --wire auto. stopped: True if the user ended the search.
    """

    def __init__(self, regions: Regions, args: argparse.Namespace) -> None:
        self._regions, self._args = regions, args
        self.found: list[Plan] = []
        self.codecs: list[str] = []
        self.stopped = False
        self._simulated: list[Plan] = []
        self._with_codecs: Plan | None = None
        self._told_s = math.inf
        self._began = time.monotonic()

    def refine(self, scenario: Scenario, advance: Progress) -> None:
        """Search plans of the fleet `scenario`, simulate the best, and weigh codecs for the first, as the
        options say. advance: shows progress. After Ctrl+C (KeyboardInterrupt) what was found until then
        stays. A search of more than QUIET_S prints its first table, and every better plan, on stderr."""
        from anabranch.sim.planning.search import search, shortlist, simulated
        from anabranch.sim.planning.wire_choice import chosen, reasons, weighed

        args, regions = self._args, self._regions
        for found in search(scenario, regions, args.stages, advance):
            self.found = found
            self._tell()
        for number, plan in enumerate(shortlist(self.found, args.simulate), start=1):
            stages = counted(plan.scenario.model.stages, "stage")
            activity = f"simulating plan {number} of {args.simulate}, {stages}"
            advance(activity, 0, args.iterations)

            def committed(t: int, activity: str = activity) -> None:
                advance(activity, t, args.iterations)

            self._simulated.append(simulated(plan, regions, args.iterations, committed))
        if args.wire == "auto":
            first = self.ranked()[0]
            weights = weighed(first, regions, args.iterations if args.simulate else 0, advance)
            self._with_codecs = chosen(weights)
            self.codecs = reasons(weights, self._with_codecs)

    def ranked(self) -> list[Plan]:
        """Plans for the report, the best first: the simulated ones by their time (failures last), or without
        any the best estimates. Call it only once a plan is found. The first has the codecs that --wire auto
        chose, if any."""
        if not self._simulated:
            plans = self.found[: max(self._args.simulate, LISTED)]
        else:
            plans = sorted(self._simulated, key=lambda plan: (_failed(plan), plan.step_s))
        return plans if self._with_codecs is None else [self._with_codecs, *plans[1:]]

    @property
    def reached(self) -> str:
        """Sentence on how far the search came before the user stopped it: numbers of plans compared and
        simulated."""
        if not self._simulated:
            return f"{len(self.found)} plans compared by estimate, none simulated"
        return f"{len(self._simulated)} of {self._args.simulate} plans simulated"

    def _tell(self) -> None:
        """Print on stderr, from QUIET_S after the beginning on: first a table of the best plans, then a line
        for each better plan."""
        from anabranch.cli.support.plan_report import report

        best = self.found[0]
        if time.monotonic() - self._began < QUIET_S or best.step_s >= self._told_s:
            return
        if math.isinf(self._told_s):
            print(
                f"{report(self.found[:LISTED], len(self.found))}\n"
                "these are first estimates; better plans are looked for (Ctrl+C takes the best so far)",
                file=sys.stderr,
            )
        else:
            left_out = len(best.left_out)
            out = f", {counted(left_out, 'machine')} left out" if left_out else ""
            print(
                f"better: {best.step_s:.2f} s an optimizer step by estimate, "
                f"{counted(best.scenario.model.stages, 'stage')}{out}",
                file=sys.stderr,
            )
        sys.stderr.flush()
        self._told_s = best.step_s


def _failed(plan: Plan) -> bool:
    return bool(plan.simulated and plan.simulated.failures)


def load_fleet(name: str, model: str | None, churn: float | None) -> Scenario:
    """The scenario `name` (shipped, or a file) as a fleet to plan for: split into as many stages as the
    model's blocks and the drawn relays allow (one, if the scenario names its machines), and with no stage
    given to any machine. model, churn: replace the scenario's values where given. Raises UserError if the
    scenario cannot be read or is none."""
    from anabranch.sim.cluster.scenario import parse_scenario, read_scenario
    from anabranch.train.model.sizes import named_size, size_names

    data, where = read_scenario(name)
    sections = {key: data.setdefault(key, {}) for key in ("model", "churn", "fleet")}
    for key, section in sections.items():
        if not isinstance(section, dict):
            raise UserError(f"{where}: {key} must be a section: write [{key}] and its keys below it")
    if model is not None:
        sections["model"]["size"] = model
    if churn is not None:
        sections["churn"]["crash"] = churn
    size = sections["model"].get("size")
    relays = sections["fleet"].get("relays", 1)
    blocks = named_size(size).blocks if size in size_names() else 1
    # The finest split: a model that does not fit then fits in no split.
    finest = min(blocks, relays) if isinstance(relays, int) and not data.get("machines") else 1
    sections["model"]["stages"] = max(1, finest)
    for part in data.get("machines", []) if isinstance(data.get("machines"), list) else []:
        if isinstance(part, dict):
            part.pop("stage", None)
    return parse_scenario(data, where)
