"""Table of the routing policies of a run by name: how each dispatches microbatches, and whether it plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from anabranch.counter_rng import CounterRng
from anabranch.flow.agents.interface import AgentFactory
from anabranch.flow.auction import AuctionAgent
from anabranch.flow.dispatch.next_hop_policies import Dispatch, Greedy, Planned, Policy, Static
from anabranch.flow.dispatch.swarm_queue import SwarmQueue
from anabranch.flow.gwtf.agent import GwtfAgent


class Planner(NamedTuple):
    """Planning part of a policy: an agent at every peer plans the flow with its neighbours' agents. agent:
    factory of the agents. published: True for GWTF's published algorithm, in which peers of one stage
    negotiate too, a relay takes part with its whole capacity, and microbatches follow the plan."""

    agent: AgentFactory
    published: bool = False


#: Name -> maker of one node's dispatch policy; the argument is its source of random numbers.
POLICIES: dict[str, Callable[[CounterRng], Policy]] = {
    "auction": lambda rng: Dispatch(),
    "greedy": lambda rng: Greedy(),
    "gwtf": lambda rng: Planned(),
    "static": lambda rng: Static(),
    "swarm": SwarmQueue,
}
PLANNERS: dict[str, Planner] = {
    "auction": Planner(AuctionAgent),
    "gwtf": Planner(GwtfAgent, published=True),
}


def is_published(name: str) -> bool:
    """True if the policy `name` plans by GWTF's published algorithm."""
    return name in PLANNERS and PLANNERS[name].published


def make_policy(name: str, rng: CounterRng | None = None) -> Policy:
    """Make the dispatch policy `name` for one node. rng: for a policy that draws (None: the same numbers each
    time). Raises ValueError for an unknown name."""
    if name not in POLICIES:
        raise ValueError(f"no routing policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name](rng or CounterRng(0))
