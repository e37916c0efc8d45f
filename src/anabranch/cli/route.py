"""Find a maximum flow of least cost on a routing instance, with nodes that only exchange messages.

examples:
  anabranch route swarm.json                            the auction, over links of 10 to 300 ms
  anabranch route swarm.json --policy gwtf --oracle     the published algorithm, with the optimum beside it
  anabranch route swarm.json --loss 0.05 --churn 3      lossy links; then three relays crash
  anabranch route swarm.json --plot flow.svg --json     a picture; the result for a program
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from anabranch.cli.support.arguments import add_json, check_range
from anabranch.config import Range
from anabranch.errors import UserError, os_errors_named

if TYPE_CHECKING:
    from anabranch.flow.graph.fair_shares import FairShares
    from anabranch.flow.graph.problem import Instance
    from anabranch.sim.routing_lab.experiment import RouteResult

#: option -> fate of a datagram, with the probability that the option gives
_FATES = {"loss": "lost", "duplicate": "delivered twice", "reorder": "overtaken by later ones"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("instance", metavar="INSTANCE.json", help="routing instance (docs/reference/formats.md); - for stdin")
    policies = "auction, gwtf, swarm, greedy, static or optimal"
    add("--policy", default="auction", metavar="NAME", help=policies)
    seed = "seed of delays, losses and the nodes' random choices"
    add("--seed", type=int, default=0, metavar="N", help=seed)
    for option, fate in _FATES.items():
        add(f"--{option}", type=float, default=0.0, metavar="P", help=f"share of datagrams that are {fate}")
    delay = "delay of each link in seconds, drawn at random"
    add("--delay", default="uniform:0.01,0.3", metavar="uniform:LOW,HIGH", help=delay)
    add("--churn", type=int, default=0, metavar="K", help="relays that crash once the flow has converged")
    add("--oracle", action="store_true", help="also compute the optimum and the fair shares")
    add_json(parser)
    add("--plot", type=Path, metavar="OUT.svg", help="draw the flow (SVG, PNG or PDF)")


def run(args: argparse.Namespace) -> int:
    from anabranch.flow.graph.fair_shares import fairest
    from anabranch.flow.graph.instance_file import InstanceError, parse_instance
    from anabranch.observe.console.progress import ticking
    from anabranch.sim.routing_lab.agent_world import Weather
    from anabranch.sim.routing_lab.experiment import POLICIES, route

    if args.policy not in POLICIES:
        raise UserError(f"--policy {args.policy}: choose one of {', '.join(POLICIES)}")
    for option in _FATES:
        check_range(f"--{option}", getattr(args, option), Range(0, 1, open_high=True))
    weather = Weather(
        delay_s=_delay(args.delay), loss=args.loss, duplicate=args.duplicate, reorder=args.reorder
    )
    if args.plot is not None:
        _check_plot(args.plot)
    try:
        instance = parse_instance(_read(args.instance))
    except InstanceError as error:
        raise UserError(f"{args.instance}: {error}") from None
    if not 0 <= args.churn <= len(instance.relays):
        raise UserError(f"--churn {args.churn}: {args.instance} has {len(instance.relays)} relays")
    with ticking("routing"):
        result = route(
            instance, args.policy, seed=args.seed, weather=weather, churn=args.churn, oracle=args.oracle
        )
        fair = fairest(instance) if args.oracle else None
    if args.plot is not None:
        from anabranch.observe.plots.flow_diagram import draw_flow  # matplotlib takes half a second to import

        stage = instance.stage
        capacity = {relay.id: relay.capacity for relay in instance.relays}
        with os_errors_named(f"--plot {args.plot}"):
            title = _report(result).splitlines()[0]
            draw_flow(instance.stages, stage, capacity, result.paths, args.plot, title)
    departed = Counter(path[0] for path in result.paths)
    admitted = {node.id: departed[node.id] for node in instance.data_nodes}
    if args.json:
        extra = {"admitted": admitted} | ({"fair": msgspec.to_builtins(fair)} if fair is not None else {})
        print(msgspec.json.encode(msgspec.to_builtins(result) | extra).decode())
    else:
        print("\n".join([_report(result), *_shares(instance, admitted, fair)]))
    return 0


def _shares(instance: Instance, admitted: dict[str, int], fair: FairShares | None) -> list[str]:
    """Line that says how many microbatches of each data node have a path (`admitted`), and its fair share if
    known (`fair`), as a list of one; [] if fewer than two data nodes have microbatches."""
    demands = {node.id: node.microbatches for node in instance.data_nodes if node.microbatches}
    if len(demands) < 2:
        return []
    text = [
        f"{name} {admitted[name]} of {demand}" + (f" (fair: {fair.shares[name]:.0%})" if fair else "")
        for name, demand in demands.items()
    ]
    return [f"admitted: {', '.join(text)}"]


def _read(name: str) -> bytes:
    if name == "-":
        return sys.stdin.buffer.read()
    with os_errors_named(name):
        return Path(name).read_bytes()


def _delay(text: str) -> tuple[float, float]:
    kind, _, bounds = text.partition(":")
    try:
        low, high = (float(part) for part in bounds.split(","))
    except ValueError:
        kind, low, high = "", 0.0, 0.0
    if kind != "uniform" or not 0 <= low <= high < 3600:
        raise UserError(
            f"--delay {text}: write it as uniform:0.01,0.3 (seconds, the lower first, less than an hour)"
        )
    return low, high


def _check_plot(path: Path) -> None:
    """Raise UserError, before the work is done, if the name of the plot's file does not end in .svg, .png or
    .pdf, or its folder does not exist."""
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise UserError(f"--plot {path}: the name must end in .svg, .png or .pdf")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}")


def _report(result: RouteResult) -> str:
    lines = [
        f"{result.policy}: {result.flow} of {result.demand} microbatches, cost {result.cost:g}, "
        f"most expensive path {result.max_path_cost:g}"
    ]
    if result.oracle is not None:
        kind = "optimum" if result.oracle.exact else "bound"
        lines.append(f"{kind}: {result.oracle.flow:g} microbatches, cost {result.oracle.cost:g}")
    messages = result.messages
    if messages.total:
        lines.append(
            f"messages: {messages.total}, {messages.per_link_mean:.1f} per neighbour link, "
            f"{messages.per_node_mean:.0f} per node (at most {messages.per_node_max}); "
            + (f"converged after {result.simulated_seconds:.1f} s" if result.quiet else "not converged")
        )
    if result.churn is not None:
        churn = result.churn
        lines.append(
            f"after the crash of {', '.join(churn.crashed)}: {churn.flow} microbatches, cost {churn.cost:g}"
            + (f" (optimum {churn.oracle.flow:g}, {churn.oracle.cost:g})" if churn.oracle else "")
        )
        lines.append(
            f"repair: {churn.messages} messages, {churn.seconds:.1f} s, {churn.nodes_touched} nodes, "
            f"median distance {churn.graph_distance_median:g}" + ("" if churn.quiet else "; not converged")
        )
    return "\n".join(lines)
