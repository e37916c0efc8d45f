"""A storm over real processes, written down: faults, throughput kept, recovery, waste, and the proof.

    python benchmarks/chaos.py [--section chaos] [options of `anabranch chaos`]
    python benchmarks/chaos.py --result storm.json      # what `anabranch chaos --json` printed before

The goals: at least 60 iterations and 60 faults in ten minutes, among them a whole stage, a data node and a
voter; throughput at least 60 % of the run without faults; the next hop of a killed peer's microbatch within
0.5 s; at most 1 % of the compute wasted beyond what died with its peer; not one bit differs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import table, write_section

#: Of the goals: least counts, least share of throughput, longest next hop (s, 95th percentile), most waste.
STEPS, FAULTS, KEPT, HOP_S, WASTE = 60, 60, 0.6, 0.5, 0.01
KINDS = ("stage", "data node", "voter")
#: Of compute that was wasted.
CAUSES = ("killed", "frozen", "rolled_back", "other")


def stormed(options: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "anabranch.cli.main", "chaos", "--json", *options]
    result: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE).stdout)
    return result


def body(result: dict[str, Any]) -> str:
    """The section's text."""
    setting, faults, compute = result["setting"], result["faults"], result["compute"]
    told = ", ".join(f"{count} {kind}" for kind, count in faults["delivered"].items())
    calm = " and ".join(f"{run['steps'] / run['seconds']:.2f}" for run in result["calm"]) or "not measured"
    rate = result["steps"] / result["seconds"]
    links = f", links as in {setting['wan']}" if setting["wan"] else ""
    shares = {key: f"{100 * compute[f'{key}_s'] / compute['computed_s']:.2f} %" for key in CAUSES}
    lines = [
        f"{setting['population']} relays over {setting['stages']} stages, {setting['data_nodes']} data "
        f"nodes, {setting['faults_per_minute']:g} faults a minute for {result['seconds'] / 60:.1f} minutes, "
        f"seed {setting['seed']}{links}: {sum(faults['delivered'].values())} faults delivered ({told}).",
        "",
    ]
    for kind, reasons in faults["undelivered"].items():
        lines += [f"- Not delivered: {count} {kind}: {why}." for why, count in reasons.items()]
    lines += [
        f"- {result['steps']} iterations committed, {rate:.2f} a second; {result['rolled_back']} were rolled "
        f"back ({result['rollbacks']} rollbacks). The same run without faults, before and after: {calm} a "
        "second.",
        f"- {result['repaired']} microbatches repaired, {result['removed']} peers removed. Not struck and "
        f"yet suspected: {result['falsely_suspected']}, removed: {result['falsely_removed']}, in "
        f"{result['peer_hours']:.1f} peer-hours.",
        f"- Compute: {compute['computed_s']:.0f} s in tasks on microbatches; died with its peer "
        f"{shares['killed']}, done by a frozen peer or in its place {shares['frozen']}, "
        f"rolled back {shares['rolled_back']}, other {shares['other']}.",
        f"- {result['verify']['text']}.",
        "",
        table(
            ("seconds from a fault to", "how", "count", "median", "p95", "most"), _rows(result["recovery"])
        ),
        "",
        table(("goal", "wanted", "found", ""), _goals(result)),
    ]
    return "\n".join(lines)


def _rows(recovery: dict[str, Any]) -> list[tuple[str, ...]]:
    names = {
        "next_hop": "the next hop of its microbatch",
        "commit": "the next commit",
        "replaced": "a replacement that serves",
    }
    return [
        (name, how, str(spread["count"]), *(f"{spread[part]:.2f}" for part in ("median", "p95", "most")))
        for key, name in names.items()
        for how, found in recovery.items()
        for spread in [found[key]]
    ]


def _goals(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """What was wanted, what was found, and whether that is enough."""
    delivered, compute = result["faults"]["delivered"], result["compute"]
    count, steps, exact = sum(delivered.values()), result["steps"], result["verify"]["exact"]
    kept, hop_s = result["throughput_kept"] or 0.0, result["recovery"]["killed"]["next_hop"]["p95"]
    beyond = (compute["frozen_s"] + compute["rolled_back_s"] + compute["other_s"]) / compute["computed_s"]
    there = [kind for kind in KINDS if any(key.startswith(kind) for key in delivered)]
    goals = [
        ("iterations", f"{STEPS}", f"{steps}", steps >= STEPS),
        ("faults", f"{FAULTS}", f"{count}", count >= FAULTS),
        ("among them", ", ".join(KINDS), ", ".join(there), len(there) == len(KINDS)),
        ("throughput kept", f"{KEPT:.0%}", f"{kept:.0%}", kept >= KEPT),
        ("next hop after a kill, p95", f"{HOP_S} s", f"{hop_s:.2f} s", hop_s <= HOP_S),
        ("waste beyond what died", f"{WASTE:.0%}", f"{beyond:.2%}", beyond <= WASTE),
        ("bits that differ", "0", "0" if exact else "some", exact),
    ]
    return [(goal, wanted, found, "met" if met else "**missed**") for goal, wanted, found, met in goals]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--section", default="chaos", help="of docs/results.md (default: chaos)")
    parser.add_argument("--result", type=Path, help="a result that is there already")
    args, options = parser.parse_known_args()
    result = json.loads(args.result.read_text("utf-8")) if args.result else stormed(options)
    setting = result["setting"]
    command = [".venv/bin/anabranch", "chaos", "--minutes", f"{setting['minutes']:g}"]
    command += ["--calm-minutes", f"{setting['calm_minutes']:g}"]
    command += ["--seed", str(setting["seed"]), *(["--wan", setting["wan"]] if setting["wan"] else [])]
    write_section(args.section, body(result), shlex.join([*command, "--json"]))


if __name__ == "__main__":
    main()
