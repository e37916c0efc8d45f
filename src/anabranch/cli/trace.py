"""Write a churn trace (JSON) for the relays of a scenario, from a model of spot preemptions and evenings.

examples:
  anabranch trace wan10 --hours 32 --out spot.json
  anabranch simulate wan10 --set churn.trace=spot.json
  anabranch trace volunteers --bursts 0 --evening 2 --begin 18 --out evening.json    an evening in Europe

In each region, bursts of preemptions come as a Poisson process, and each takes every machine there with a
probability. Besides, each machine leaves alone now and then, and (--evening) during its region's evening. A
replacement comes after an exponentially distributed time (docs/explanation/simulator.md).
"""

from __future__ import annotations

import argparse

from anabranch.cli.support.arguments import check_range
from anabranch.cli.support.outputs import add_out, check_out, write_out
from anabranch.config import Range

#: option -> (field of `SpotModel`, metavar, allowed values, help)
_RATES = {
    "--bursts": ("bursts_per_hour", "PER_HOUR", Range(0, 3600), "bursts per region and hour"),
    "--share": ("share", "P", Range(0, 1), "share of a region's machines that a burst takes"),
    "--lone": ("lone_per_hour", "PER_HOUR", Range(0, 3600), "departures of a single machine per hour"),
    "--evening": ("evening_per_hour", "PER_HOUR", Range(0, 3600), "the same from 18 to 23 h local time"),
    "--begin": ("begin_h", "HOUR", Range(0, 24), "hour of the day (UTC) at which the trace begins"),
    "--return-s": ("return_s", "S", Range(0.001, 1e6), "mean seconds until a replacement comes"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from anabranch.sim.cluster.churn_trace import SpotModel

    add = parser.add_argument
    add("scenario", metavar="SCENARIO", help="shipped scenario, or the path of a scenario file")
    add("--hours", type=float, default=1.0, metavar="H", help="length of the trace")
    add("--seed", type=int, default=0, metavar="N", help="seed of the trace")
    for option, (field, metavar, _, text) in _RATES.items():
        add(option, type=float, dest=field, default=getattr(SpotModel(), field), metavar=metavar, help=text)
    add_out(parser, "file to write (default: standard output)")


def run(args: argparse.Namespace) -> int:
    from anabranch.cli.support.scenario_fleet import open_fleet
    from anabranch.observe.console.progress import ticking
    from anabranch.sim.cluster.churn_trace import SpotModel, render_trace, spot_trace
    from anabranch.sim.cluster.scenario import load_scenario

    check_out(args.out, args.force)
    check_range("--hours", args.hours, Range(0.001, 8000))
    rates = {field: getattr(args, field) for field, *_ in _RATES.values()}
    for option, (field, _, allowed, _) in _RATES.items():
        check_range(option, rates[field], allowed)
    scenario = load_scenario(args.scenario)
    hosts = open_fleet(scenario, args.scenario).hosts.values()
    relays = {host.id: host.region for host in hosts if host.stage}
    with ticking("drawing departures"):
        trace = spot_trace(relays, args.hours, args.seed, SpotModel(**rates))
    text = render_trace(trace)
    if args.out is None:
        print(text, end="")
        return 0
    write_out(args.out, text)
    departures = sum(change.event == "leave" for change in trace.changes)
    print(f"{args.out}: {departures} departures among {len(relays)} relays in {args.hours:g} h")
    return 0
