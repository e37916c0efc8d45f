"""Worlds of flow agents on an instance: graphs that change, checks of what stands, settling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations

from hypothesis import HealthCheck, Phase, settings

from anabranch.flow.agents import interface as ev
from anabranch.flow.agents.interface import AgentFactory, Side, UnitId
from anabranch.flow.auction import AuctionAgent
from anabranch.flow.graph.problem import Flow, Instance
from anabranch.sim.routing_lab.agent_world import FlowWorld, Weather
from benchmarks.flow.feasibility import violations

few = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


class CheckedWorld(FlowWorld):
    """A world whose graph changes while agents work, and whose standing flow is checked.

    on_event: called with a node's name after each event there.
    """

    def __init__(
        self,
        instance: Instance,
        factory: AgentFactory,
        *,
        seed: int = 0,
        weather: Weather | None = None,
        same_stage: bool = True,
    ) -> None:
        self.on_event: Callable[[str], None] | None = None
        self._same_stage = same_stage
        self._wounded: set[UnitId] = set()
        self._shrunk: dict[str, int] = {}
        """Relay that must give up places after a cut in capacity -> how many it had."""
        self._links_ever = dict(instance.links)
        self._looked: dict[str, tuple[list[ev.Held], list[ev.Held]]] = {}
        super().__init__(instance, factory, seed=seed, weather=weather, same_stage=same_stage)

    def handle(self, name: str, event: ev.Event) -> None:
        super().handle(name, event)
        if self.on_event is not None:
            self.on_event(name)

    def crash(self, names: Iterable[str]) -> None:
        names = list(names)
        self._looked.clear()
        for name in names:
            self._wounded.update(held.unit for held in self.agents[name].held())
        super().crash(names)

    def linked(self, start: str, end: str) -> bool:
        """True if a link of the instance is there now: neither cut nor an end dead."""
        return (end, Side.NEXT) in self._links.get(start, ()) and end in self.agents

    def cut(self, start: str, end: str) -> None:
        """Close a link; each end learns of it after a delay of its own."""
        link, _ = self._links[start].pop((end, Side.NEXT))
        self._wounded.update(held.unit for held in self.agents[start].held() if held.next == end)
        self._wounded.update(held.unit for held in self.agents[end].held() if held.previous == start)
        del self._links[end][start, Side.PREVIOUS]
        self._later_down(start, end, Side.NEXT, link, 0)
        self._later_down(end, start, Side.PREVIOUS, link, 1)

    def join(self, name: str, links: dict[tuple[str, str], float] | None = None) -> None:
        """Bring a crashed node of the instance back, with a new incarnation and its links as they were."""
        known = self.instance.links if links is None else links
        self._make(name)
        for (start, end), cost in known.items():
            if name in (start, end) and start in self.agents and end in self.agents:
                self._connect(start, end, False, cost)
        stage = self.instance.relay[name].stage if self._same_stage and name in self.instance.relay else None
        level = [r.id for r in self.instance.relays if r.stage == stage and r.id in self.agents]
        for pair in combinations(level, 2):
            if name in pair:
                self._connect(*pair, True, 0.0)

    def change_cost(self, start: str, end: str, cost: float) -> None:
        """Change a link's cost; both ends measure it at once."""
        link, _ = self._links[start][end, Side.NEXT]
        link.cost = cost
        self.handle(start, ev.CostChanged(end, Side.NEXT, cost))
        self.handle(end, ev.CostChanged(start, Side.PREVIOUS, cost))

    def change_capacity(self, name: str, capacity: int) -> None:
        self._looked.clear()
        relays = tuple(replace(r, capacity=capacity) if r.id == name else r for r in self.instance.relays)
        self.instance = replace(self.instance, relays=relays)
        if len(self.agents[name].held()) > capacity:
            self._shrunk[name] = len(self.agents[name].held())
            self._wounded.update(held.unit for held in self.agents[name].held())
        self.handle(name, ev.CapacityChanged(capacity))

    def change_demand(self, name: str, demand: int) -> None:
        self._looked.clear()
        nodes = self.instance.data_nodes
        changed = tuple(replace(n, microbatches=demand) if n.id == name else n for n in nodes)
        self.instance = replace(self.instance, data_nodes=changed)
        self.handle(name, ev.DemandChanged(demand))

    def changed(self, name: str) -> bool:
        """True if anything that `violations` reads may have changed by the event at node `name`: its places,
        or a node or capacity since the last call for it."""
        agent = self.agents[name]
        now = list(agent.held()), list(agent.standing())
        before, self._looked[name] = self._looked.get(name), now
        return now != before

    def violations(self) -> list[str]:
        """Broken rules of the standing flow and the places held, at this moment.

        A unit may be broken from the death of a node or link on its path until its source has learnt of it.
        """
        paths = list(self._standing())
        wrong: list[str] = []
        for unit, path in paths:
            if path[-1] not in self.instance.data and unit not in self._wounded:
                wrong.append(f"{unit} stands at its source, but its path ends at {path[-1]}")
        for name, agent in self.agents.items():
            relay = self.instance.relay.get(name)
            if relay is None:
                continue
            places = len(agent.held())
            if places <= relay.capacity:
                self._shrunk.pop(name, None)
            elif places > self._shrunk.get(name, 0):
                wrong.append(f"{name} keeps {places} places with capacity {relay.capacity}")
        roomy = tuple(
            replace(relay, capacity=max(relay.capacity, self._shrunk.get(relay.id, 0)))
            for relay in self.instance.relays
        )
        whole = Flow(tuple(path for _, path in paths if path[-1] in self.instance.data))
        wrong += violations(whole, replace(self.instance, relays=roomy, links=self._links_ever))
        return wrong

    def disagreements(self) -> list[str]:
        """Once quiet: places held for no standing unit, and units that only one end of a link holds."""
        # A data node may hold a unit twice, as it departs and as it arrives: all that it holds counts.
        sent = {(name, h.unit, h.next) for name, agent in self.agents.items() for h in agent.held()}
        received = {(h.previous, h.unit, name) for name, agent in self.agents.items() for h in agent.held()}
        wrong = []
        for name, agent in self.agents.items():
            departures = {held.unit for held in agent.standing()}
            for held in agent.held():
                if held.previous is None and held.unit not in departures:
                    wrong.append(f"{name} keeps {held.unit}, which does not stand")
                if held.next is not None and (name, held.unit, held.next) not in received:
                    wrong.append(f"{name} sends {held.unit} to {held.next}, which does not hold it so")
                if held.previous is not None and (held.previous, held.unit, name) not in sent:
                    wrong.append(f"{name} has {held.unit} from {held.previous}, which does not send it")
        return wrong


def world_of(instance: Instance, seed: int = 0, weather: Weather | None = None) -> CheckedWorld:
    return CheckedWorld(instance, AuctionAgent, seed=seed, weather=weather, same_stage=False)


def watch(world: CheckedWorld) -> None:
    """Fail at the first moment at which what stands breaks a rule."""

    def look(name: str) -> None:
        if not world.changed(name):
            return
        wrong = world.violations()
        assert not wrong, f"at {world.now:.3f} s, after an event at {name}: {wrong}"

    world.on_event = look


def settle(world: CheckedWorld) -> Flow:
    """Until quiet; returns what stands, on which both ends of every link then agree."""
    assert world.run(world.now + 20_000), "never quiet"
    assert not world.violations()
    assert not world.disagreements()
    return world.flow()
