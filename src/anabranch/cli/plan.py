"""Find the best stages, microbatch size, replicas and placement for a fleet, and which machines to leave out;
print the run file to start, with predicted time and cost, and the runners-up.

examples:
  anabranch plan forty --model llama-1b                  a shipped fleet: forty GPUs in ten regions
  anabranch plan fleet.toml --model llama-1b --out run.toml
  anabranch plan fleet.toml --stages 4 6 8 --simulate 6  only these numbers of stages; simulate six plans
  anabranch plan fleet.toml --churn 0.1 --json           each relay crashes in one iteration of ten
  anabranch plan volunteers --wire auto                  codecs, too, by the time that they save

A fleet is a scenario (docs/reference/formats.md): machines with regions, bandwidths and prices, the network,
the batch. All plans are ranked by a cost model, and the best few are simulated in virtual time
(docs/explanation/simulator.md)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from anabranch.cli.support.arguments import add_json, check_range
from anabranch.cli.support.outputs import write_out
from anabranch.config import Range
from anabranch.errors import UserError

if TYPE_CHECKING:
    from anabranch.sim.cluster.scenario import Regions, Scenario
    from anabranch.sim.planning.search import Plan

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
    add("--out", type=Path, metavar="FILE", help="write the recommended run file there")
    add("--force", action="store_true", help="overwrite an existing file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.cli.support.plan_report import as_values, report
    from anabranch.cli.support.scenario_fleet import open_fleet
    from anabranch.sim.planning.runfile import run_file, run_warnings
    from anabranch.sim.planning.search import plans

    check_range("--simulate", args.simulate, Range(0))
    check_range("--iterations", args.iterations, Range(2))
    check_range("--stages", min(args.stages, default=1), Range(1))
    scenario = load_fleet(args.fleet, args.model, args.churn)
    if args.out is not None:  # checked now, as the search takes minutes
        _check_out(args.out, args.force)
    regions = open_fleet(scenario, args.fleet).regions
    found = plans(scenario, regions, args.stages, _print_progress)
    ranked = found[: max(args.simulate, LISTED)]
    if args.simulate:
        ranked = _simulated(found, regions, args.simulate, args.iterations)
    codecs: list[str] = []
    if args.wire == "auto":
        ranked[0], codecs = _with_codecs(ranked[0], regions, args.iterations if args.simulate else 0)
    text = run_file(ranked[0], codecs)
    if args.out is not None:
        write_out(args.out, text)
    for sentence in run_warnings(ranked[0]):
        print(f"warning: {sentence}", file=sys.stderr)
    if args.json:
        result = {
            "version": VERSION,
            "fleet": scenario.name,
            "considered": len(found),
            "plans": [as_values(plan) for plan in ranked],
            "run_file": text,
            "codecs": codecs,
        }
        print(msgspec.json.encode(result).decode())
    elif args.out is None:
        shown = "\n".join((report(ranked, len(found)), *codecs))
        print(f"{shown}\n\nthe run file of the first plan (--out writes it):\n\n{text}")
    else:
        print("\n".join((report(ranked, len(found)), *codecs)))
        print(f"wrote {args.out}; next, on a data node: anabranch start {args.out}")
    return 0


def _simulated(found: Sequence[Plan], regions: Regions, count: int, iterations: int) -> list[Plan]:
    """The `count` most promising plans, simulated for `iterations` each, ranked by their simulated time;
    those with failed simulations come last."""
    from anabranch.sim.planning.search import shortlist, simulated

    ranked: list[Plan] = []
    for plan in shortlist(found, count):
        model = plan.scenario.model
        batch = f"{model.microbatches} microbatches of {model.rows}×{model.sequence}"
        _print_progress(f"simulating {len(ranked) + 1} of {count}: {model.stages} stages, {batch}")
        ranked.append(simulated(plan, regions, iterations))
    return sorted(
        ranked, key=lambda plan: (bool(plan.simulated and plan.simulated.failures), plan.iteration_s)
    )


def _with_codecs(plan: Plan, regions: Regions, iterations: int) -> tuple[Plan, list[str]]:
    """The plan with the codecs that shorten an iteration on the links between its machines, and lines of text
    that say why. iterations: of each simulation that compares codecs; 0 compares by estimate."""
    from anabranch.sim.planning.wire_choice import chosen, reasons, weighed

    found = weighed(plan, regions, iterations, _print_progress)
    taken = chosen(found)
    return taken, reasons(found, taken)


def _check_out(out: Path, force: bool) -> None:
    """Raise UserError if the output file cannot be written, or exists without `force`."""
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise UserError(f"--out {out}: Is a directory")
    if out.exists() and not force:
        raise UserError(f"--out {out} exists; give another name, or --force to overwrite it")


def _print_progress(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def load_fleet(name: str, model: str | None, churn: float | None) -> Scenario:
    """The scenario `name` (shipped, or a file) as a fleet to plan for: split into as many stages as the
    model's blocks and the drawn relays allow (one, if it names its machines), and with no stage given to any
    machine. model, churn: replace the scenario's values where given. Raises UserError."""
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
