"""Exact solver of the flow problem from the whole graph: policy `optimal`, and the yardstick of the others.

With the return rule "any" or one data node there is one commodity, and two linear programs (greatest flow,
then least cost at that flow) have integral solutions, which is checked. "own" with several data nodes is a
multicommodity problem: the linear programs give bounds; integer programs solve small instances. The solver is
HiGHS, called through scipy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from anabranch.errors import UserError
from anabranch.flow.graph.problem import Flow, Instance, Path, paths_from_link_flows

Vector = NDArray[np.float64]

#: Most variables of an integer program that `solve` tries. A plain choice: larger ones can take minutes.
INTEGER_LIMIT = 4_000
#: Costs are scaled up until the greatest is at least this: the solver's tolerances are absolute.
SCALE = 1e6


class OracleError(RuntimeError):
    """Raised if the solver finds no solution, or one in fractions where it must be whole."""


@dataclass(frozen=True)
class Solution:
    """Optimal flow (microbatches) and its cost. exact: True if it is proven optimal in whole microbatches.
    Otherwise `flow` is an upper bound, `cost` that of the linear program at this flow, and paths is None."""

    flow: float
    cost: float
    exact: bool
    paths: Flow | None = None


def solve(instance: Instance) -> Solution:
    """Greatest flow of least cost of an instance; only an upper bound of the flow for an instance of over
    INTEGER_LIMIT variables with several data nodes whose paths must end where they began (return "own").
    Raises OracleError if the solver fails."""
    program = FlowProgram(instance)
    if not program.several:
        amounts = program.best()
        if np.abs(np.rint(amounts) - amounts).max(initial=0.0) > 1e-4:
            raise OracleError("the optimum of a single commodity came back in fractions")
        return _whole_solution(instance, program, np.rint(amounts))
    return solve_integer(instance) if program.width <= INTEGER_LIMIT else linear_bound(instance)


def optimal(instance: Instance) -> Flow:
    """Flow of the policy `optimal`: as many microbatches as possible, at the least total cost. Raises
    UserError if the instance is too large for an exact solution, OracleError if the solver fails."""
    flow = solve(instance).paths
    if flow is None:
        raise UserError("optimal: too large for an exact answer with several data nodes and return own")
    return flow


def linear_bound(instance: Instance) -> Solution:
    """Greatest flow in fractional microbatches, an upper bound of the flow, and its least cost. Raises
    OracleError if the solver fails."""
    program = FlowProgram(instance)
    amounts = program.best()
    return Solution(program.value(amounts), program.cost(amounts), exact=False)


def solve_integer(instance: Instance) -> Solution:
    """Optimal flow in whole microbatches by integer programs; exponential time in the worst case. Raises
    OracleError if the solver fails."""
    program = FlowProgram(instance)
    return _whole_solution(instance, program, program.best(integer=True))


def _whole_solution(instance: Instance, program: FlowProgram, amounts: Vector) -> Solution:
    paths: list[Path] = []
    for part in program.by_commodity(amounts):
        paths += paths_from_link_flows(instance, part)
    flow = Flow(tuple(paths))
    return Solution(flow.value, flow.cost(instance), exact=True, paths=flow)


class FlowProgram:
    """Matrices of the flow problem as a linear program. Variables: microbatches of each commodity on each
    link. Return "own" has one commodity for each data node, "any" a single one. hops: link of each variable;
    those that cannot be used are left out. width: number of variables with these. conserve: matrix whose rows
    (one for each commodity and relay) must give 0. bound, limits: matrix and right side of the capacities and
    demands. costs: link cost of each variable. departs: for each variable, 1 if its link leaves a data node,
    else 0. several: True if there are several commodities."""

    def __init__(self, instance: Instance) -> None:
        data = instance.data
        own = instance.returns == "own"
        commodities = [{name} for name in data] if own else [set(data)]
        self.several = len(commodities) > 1
        self.hops: list[tuple[str, str]] = []
        self._parts: list[slice] = []
        for members in commodities:
            start = len(self.hops)
            self.hops += [
                hop for hop in instance.links if all(end not in data or end in members for end in hop)
            ]
            self._parts.append(slice(start, len(self.hops)))
        self.width = len(commodities) * len(instance.links)
        self.costs = np.array([instance.links[hop] for hop in self.hops], dtype=np.float64)
        self.departs = np.array([hop[0] in data for hop in self.hops], dtype=np.float64)
        self._add_constraints(instance)

    def _add_constraints(self, instance: Instance) -> None:
        limits = {node.id: node.capacity for node in instance.relays}
        limits |= {node.id: node.microbatches for node in instance.data_nodes}
        row_of = {name: row for row, name in enumerate(limits)}
        bound = [(row_of[start], column, 1.0) for column, (start, _) in enumerate(self.hops)]
        conserve = [
            (commodity * len(row_of) + row_of[name], column, sign)
            for commodity, part in enumerate(self._parts)
            for column in range(part.start, part.stop)
            for name, sign in zip(self.hops[column], (1.0, -1.0), strict=True)
            if name in instance.relay
        ]
        self.conserve = _matrix(conserve, len(self._parts) * len(row_of), len(self.hops))
        self.bound = _matrix(bound, len(row_of), len(self.hops))
        self.limits = np.array(list(limits.values()), dtype=np.float64)

    def best(self, *, integer: bool = False) -> Vector:
        """Values of the variables, one for each of `hops`, in the greatest flow of least cost. integer: True:
        whole microbatches. Raises OracleError if the solver fails."""
        if not self.hops:
            return np.zeros(0)
        constraints = [(self.conserve, 0.0, 0.0), (self.bound, -np.inf, self.limits)]
        flow = self.value(minimise(-self.departs, constraints, integer=integer))
        flow = float(round(flow)) if integer else round(flow, 6)
        whole = (csr_array(self.departs[None, :]), flow, flow)
        return minimise(self._scaled_costs, [*constraints, whole], integer=integer)

    @property
    def _scaled_costs(self) -> Vector:
        greatest = float(self.costs.max(initial=0.0))
        return self.costs * max(1.0, SCALE / max(greatest, 1e-200))

    def value(self, amounts: Vector) -> float:
        return float(np.dot(self.departs, amounts))

    def cost(self, amounts: Vector) -> float:
        return float(np.dot(self.costs, amounts))

    def by_commodity(self, amounts: Vector) -> list[dict[tuple[str, str], int]]:
        return [
            {self.hops[column]: round(float(amounts[column])) for column in range(part.start, part.stop)}
            for part in self._parts
        ]


def minimise(
    objective: Vector,
    constraints: Sequence[tuple[csr_array, Any, Any]],
    most: Vector | float = np.inf,
    *,
    integer: bool = False,
) -> Vector:
    """Values x, each from 0 to `most`, that minimise objective · x. constraints: (matrix, least, most), each
    of which demands least <= matrix · x <= most. integer: True if the values must be integers. Raises
    OracleError if the solver finds none."""
    result = milp(
        objective,
        constraints=[LinearConstraint(*each) for each in constraints],
        bounds=Bounds(0.0, most),
        integrality=np.full(len(objective), int(integer)),
    )
    if result.x is None:
        raise OracleError(result.message)
    return np.rint(result.x) if integer else np.asarray(result.x, dtype=np.float64)


def _matrix(entries: list[tuple[int, int, float]], rows: int, columns: int) -> csr_array:
    if not entries:
        return csr_array((rows, columns))
    row, column, values = (list(part) for part in zip(*entries, strict=True))
    return csr_array((values, (row, column)), shape=(rows, columns))
