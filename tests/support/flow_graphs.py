"""Random small instances and troubles for property tests."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from anabranch.flow.graph.problem import DataNode, Flow, Instance, Path, Relay
from anabranch.sim.routing_lab.agent_world import Weather
from benchmarks.flow.feasibility import violations
from support.flow_worlds import CheckedWorld


@st.composite
def instances(draw: st.DrawFn, returns: tuple[str, ...] = ("any", "own")) -> Instance:
    """1-3 stages of 0-3 relays, capacities from 0, any share of the links, costs equal, odd or huge."""
    stages = draw(st.integers(1, 3))
    data = tuple(DataNode(f"d{at}", draw(st.integers(0, 4))) for at in range(draw(st.integers(1, 2))))
    relays = tuple(
        Relay(f"s{stage}r{at}", stage, draw(st.integers(0, 3)))
        for stage in range(1, stages + 1)
        for at in range(draw(st.integers(0, 3)))
    )
    cost = draw(st.sampled_from([st.just(1.0), st.integers(0, 20).map(float), st.floats(0, 1e9)]))
    levels = [[node.id for node in data]]
    levels += [[relay.id for relay in relays if relay.stage == stage] for stage in range(1, stages + 1)]
    hops = [
        (start, end)
        for here, there in zip(levels, levels[1:] + levels[:1], strict=True)
        for start in here
        for end in there
    ]
    absent = (
        draw(st.sets(st.sampled_from(hops), max_size=len(hops))) if draw(st.booleans()) and hops else set()
    )
    links = {hop: draw(cost) for hop in hops if hop not in absent}
    return Instance(stages, draw(st.sampled_from(returns)), data, relays, links)  # type: ignore[arg-type]


weathers = st.builds(
    Weather,
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    duplicate=st.sampled_from([0.0, 0.2]),
    reorder=st.sampled_from([0.0, 0.3]),
)


@dataclass(frozen=True)
class Trouble:
    """Something that happens at `at_s`; `pick` chooses to what."""

    at_s: float
    kind: str
    pick: int
    amount: int

    def strike(self, world: CheckedWorld) -> None:
        relays = [relay.id for relay in world.instance.relays]
        alive = [name for name in relays if name in world.agents]
        dead = [name for name in relays if name not in world.agents]
        links = [hop for hop in world.instance.links if world.linked(*hop)]
        if self.kind == "crash" and alive:
            world.crash([alive[self.pick % len(alive)]])
        elif self.kind == "join" and dead:
            world.join(dead[self.pick % len(dead)])
        elif self.kind == "cut" and links:
            world.cut(*links[self.pick % len(links)])
        elif self.kind == "cost" and links:
            world.change_cost(*links[self.pick % len(links)], float(self.amount * 7 % 20))
        elif self.kind == "capacity" and alive:
            world.change_capacity(alive[self.pick % len(alive)], self.amount)
        elif self.kind == "demand":
            data = world.instance.data_nodes
            world.change_demand(data[self.pick % len(data)].id, self.amount)


troubles = st.lists(
    st.builds(
        Trouble,
        at_s=st.floats(0.0, 60.0),
        kind=st.sampled_from(["crash", "join", "cut", "cost", "capacity", "demand"]),
        pick=st.integers(0, 1000),
        amount=st.integers(0, 4),
    ),
    max_size=5,
)


def all_paths(instance: Instance) -> list[Path]:
    paths: list[Path] = [(name,) for name in instance.data]
    for _ in range(instance.stages + 1):
        paths = [(*path, end) for path in paths for end in instance.successors[path[-1]]]
    return [path for path in paths if not violations(Flow((path,)), instance)]
