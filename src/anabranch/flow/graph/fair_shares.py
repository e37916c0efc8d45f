"""Max-min fair shares: the part of each data node's demand that a fair flow admits, from the whole graph.

If the relays cannot hold all demand, no data node's share can grow without reducing one that is not greater
(Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). A sequence of linear programs finds the shares
with fractional microbatches, so they bound the shares in whole microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array, hstack

from anabranch.flow.graph.oracle import FlowProgram, Vector, minimise
from anabranch.flow.graph.problem import Instance

#: Difference below which two shares are equal: the solver's tolerance.
TOLERANCE = 1e-7


@dataclass(frozen=True)
class FairShares:
    """Max-min fair flow. shares: data node with a demand -> the part of it that is admitted (0 to 1). flow:
    microbatches in all, not always a whole number. cost: least total cost of such a flow."""

    shares: dict[str, float]
    flow: float
    cost: float


def fairest(instance: Instance, least_flow: float = 0.0) -> FairShares:
    """The max-min fair shares among flows of at least `least_flow` microbatches. With the return rule "any"
    the fairest flow is a maximum flow. With "own" it can be smaller; the maximum as `least_flow` then puts
    throughput before fairness. Raises OracleError if no flow is so large."""
    program = _FairProgram(instance, least_flow)
    demands = {node.id: node.microbatches for node in instance.data_nodes if node.microbatches}
    settled: dict[str, float] = {}
    while len(settled) < len(demands):
        free = [name for name in demands if name not in settled]
        level = program.raise_together(settled, free)
        best = {name: program.raise_alone(name, settled, free, level) for name in free}
        stuck = [name for name in free if best[name] <= level + TOLERANCE]
        settled |= dict.fromkeys(stuck or [min(free, key=best.__getitem__)], level)
    flow = sum(share * demands[name] for name, share in settled.items())
    return FairShares(settled, flow, program.least_cost(settled))


class _FairProgram:
    """Linear program of the flow with one more variable (the last): a share that several data nodes have. In
    its methods `settled` and `shares` map data nodes to shares that they get at least."""

    def __init__(self, instance: Instance, least_flow: float) -> None:
        program = FlowProgram(instance)
        self._costs = np.append(program.costs, 0.0)
        self._conserve = _with_column(program.conserve)
        self._bound = _with_column(program.bound)
        self._limits = program.limits
        self._most = np.append(np.full(len(program.costs), np.inf), 1.0)
        self._departs = np.append(program.departs, 0.0)
        self._least_flow = least_flow
        self._demand = {node.id: node.microbatches for node in instance.data_nodes}
        self._departs_from = {
            name: np.array([float(hop[0] == name) for hop in program.hops] + [0.0]) for name in instance.data
        }

    def raise_together(self, settled: dict[str, float], free: list[str]) -> float:
        """Greatest share (admitted part of the demand) that all data nodes in `free` can have together, while
        the others have at least their `settled` shares. Raises OracleError if they cannot have these."""
        goal = np.zeros(len(self._costs))
        goal[-1] = -1.0
        return float(self._solve(goal, settled, free)[-1])

    def raise_alone(self, name: str, settled: dict[str, float], free: list[str], level: float) -> float:
        """Greatest share (admitted part of the demand) that data node `name` can have, while the others in
        `free` have at least the share `level`, and those in `settled` theirs. Raises OracleError if they
        cannot have these."""
        departs = self._departs_from[name]
        others = [other for other in free if other != name]
        amounts = self._solve(-departs, settled | dict.fromkeys(others, level), [])
        return float(np.dot(departs, amounts)) / self._demand[name]

    def least_cost(self, shares: dict[str, float]) -> float:
        return float(np.dot(self._costs, self._solve(self._costs, shares, [])))

    def _solve(self, goal: Vector, shares: dict[str, float], free: list[str]) -> Vector:
        """Variables of the program that minimise `goal`. shares: data node -> share that it gets at least.
        free: data nodes that get at least the common share, the last variable. Raises OracleError if no
        values satisfy this."""
        rows, right = [-self._departs], [TOLERANCE - self._least_flow]
        for name, share in shares.items():
            rows.append(-self._departs_from[name])
            right.append((TOLERANCE - share) * self._demand[name])
        for name in free:
            row = -self._departs_from[name]
            row[-1] = self._demand[name]
            rows.append(row)
            right.append(0.0)
        constraints = [
            (self._conserve, 0.0, 0.0),
            (self._bound, -np.inf, self._limits),
            (csr_array(np.array(rows)), -np.inf, np.array(right)),
        ]
        return minimise(goal, constraints, self._most)


def _with_column(matrix: csr_array) -> csr_array:
    return csr_array(hstack([matrix, csr_array((matrix.shape[0], 1))]))
