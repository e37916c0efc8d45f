"""The three public flow instances of GWTF's authors, solved exactly and by our policies.

    git clone https://github.com/NikolayBlagoev/DecCom-Python
    nice python -m benchmarks.flow.authors_instances --authors DecCom-Python

Their repository has three instances with an optimum each (`flow_tests` at commit f804a45). A cost is the sum
over all units of the costs of the links that a unit passes. *Their optimum*: as their read-me files state it.
*Exact*: minimum-cost maximum flow. Writes the result `flow-authors-instances`.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from anabranch.flow.graph.oracle import solve
from anabranch.flow.graph.problem import DataNode, Instance, Relay
from anabranch.sim.routing_lab.experiment import route
from benchmarks import harness
from benchmarks.harness import table

COMMIT = "f804a45"
#: Instance -> its file, and flow and cost of the optimum that its read-me states ("": none).
INSTANCES = {
    "1": ("flow_tests/test1/config.json", 13, ""),
    "2": ("flow_tests/test2/config2.json", 18, "17292"),
    "3": ("flow_tests/test3/config.json", 11, "386"),
}
#: Policy -> rule of return that it can plan for.
POLICIES = {"auction": "any", "gwtf": "own", "greedy": "own", "swarm": "own", "static": "own"}


def read(checkout: Path, path: str) -> dict[str, Any]:
    """Contents of a file of the authors' repository at COMMIT."""
    words = ["git", "-C", str(checkout), "show", f"{COMMIT}:{path}"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def instance_of(content: dict[str, Any]) -> Instance:
    """Our form of an instance. Their last layer, if it has ids beyond the nodes', stands for the data nodes
    again; where there is none, a unit returns over the link to its data node."""
    layers, capacity, cost = content["assignment"], content["workload"], content["costmap"]
    ends = layers[0]
    relays = layers[1:-1] if max(layers[-1]) >= content["N"] else layers[1:]
    around = [ends, *relays, ends]
    links = {
        (f"n{one}", f"n{other}"): float(cost[one][other])
        for before, after in pairwise(around)
        for one in before
        for other in after
    }
    return Instance(
        content["S"],
        "any",
        tuple(DataNode(f"n{end}", capacity[end]) for end in ends),
        tuple(Relay(f"n{n}", stage, capacity[n]) for stage, layer in enumerate(relays, 1) for n in layer),
        links,
    )


def rows_of(name: str, checkout: Path, seeds: int) -> list[list[str]]:
    path, flow, cost = INSTANCES[name]
    merged = instance_of(read(checkout, path))
    about = f"{len(merged.data_nodes)} data nodes, {len(merged.relays)} relays, {merged.stages} stages"
    rows = [[name, about, "their optimum", str(flow), cost or "not stated", ""]]
    exact: dict[str, float] = {}
    for returns in ("any", "own") if len(merged.data_nodes) > 1 else ("any",):
        best = solve(replace(merged, returns=returns))
        exact[returns] = best.cost
        rows.append(["", "", f"exact, returns to {returns}", f"{best.flow:g}", f"{best.cost:g}", "1.000"])
    for policy, returns in POLICIES.items():
        rule = returns if returns in exact else "any"
        found = [route(replace(merged, returns=rule), policy, seed=seed) for seed in range(seeds)]
        flows = sum(each.flow for each in found) / seeds
        mean = sum(each.cost for each in found) / seeds
        words = f"`{policy}`" + (f", returns to {rule}" if len(exact) > 1 else "")
        same = abs(flows - flow) < 1e-9
        rows.append(
            ["", "", words, f"{flows:g}", f"{mean:.0f}", f"{mean / exact[rule]:.3f}" if same else "–"]
        )
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--authors", type=Path, required=True, help="a clone of DecCom-Python")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    rows = [row for name in INSTANCES for row in rows_of(name, args.authors, args.seeds)]
    text = (
        "The three flow instances in the repository of GWTF's authors "
        f"(github.com/NikolayBlagoev/DecCom-Python at {COMMIT}), mean over {args.seeds} seeds. The cost "
        "counts every link that a unit passes, once; a unit that returns over a link to its data node pays "
        "that link, too, where the instance gives it a cost (1 and 3). *over exact* is the cost over the "
        "exact optimum under the same rule of return; it is left out where the flow is below the maximum. "
        "The optima that the repository states are above the exact ones. Its own solver finds paths by "
        "Dijkstra and charges the full cost of an edge when it takes flow back, where a minimum-cost flow "
        "refunds it, so later paths hardly ever correct earlier ones. Run on these files it prints 11418, "
        "17298 and 391. All flows are the same."
    )
    head = ["instance", "size", "solved by", "flow", "cost", "over exact"]
    reproduce = f"python -m {harness.module()} --authors DecCom-Python --seeds {args.seeds}"
    title = "The authors' three flow instances"
    harness.write(
        "flow-authors-instances", title, f"{text}\n\n{table(head, rows)}", reproduce=reproduce, dry=args.dry
    )


if __name__ == "__main__":
    main()
