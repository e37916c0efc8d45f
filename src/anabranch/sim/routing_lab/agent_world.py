"""Simulation of planning agents without training, in virtual time: bad links, crashes, counts of datagrams.

The agents are those of live peers. The simulation shows which flow a policy finds, how many datagrams it
takes, and the cost of a crash.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations

from anabranch.counter_rng import CounterRng
from anabranch.flow.agents import interface as ev
from anabranch.flow.agents.interface import Agent, AgentFactory, Held, Message, Setup, Side, UnitId
from anabranch.flow.graph.problem import Flow, Instance, Path


@dataclass(frozen=True)
class Weather:
    """Quality of the links of a simulation. delay_s: range (s) from which the delay of each link and
    direction is drawn, once. loss, duplicate, reorder: probabilities for each datagram; a reordered one takes
    a second such delay in addition. notice_s: range (s) of the time from a crash until a neighbour learns of
    it."""

    delay_s: tuple[float, float] = (0.01, 0.3)
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    notice_s: tuple[float, float] = (0.1, 1.0)


@dataclass
class Counts:
    """Counts of datagrams sent since the last reset: total; of these confirmations, which only repeat the
    agreed state; by_node. workers: nodes that sent more than confirmations."""

    total: int = 0
    confirmations: int = 0
    by_node: Counter[str] = field(default_factory=Counter)
    workers: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Link:
    """A link between two nodes from its opening to its end. ends: the two nodes, the one of the earlier stage
    first. sides: for each end, on which side it sees the other. delays: for each end, delay (s) of datagrams
    from it. open: for each end, True if its agent has seen the link come up."""

    ends: tuple[str, str]
    sides: tuple[Side, Side]
    cost: float
    delays: tuple[float, float]
    open: list[bool] = field(default_factory=lambda: [False, False])


#: Event in the heap: an action, the name of a node to wake, or a datagram (its link, index of the receiving
#: end, message, and True unless it is a confirmation).
_Planned = Callable[[], None] | str | tuple[_Link, int, Message, bool]
_WAKE = ev.Wake()
#: No planned wake: its time and the number of its entry.
_NEVER = (math.inf, 0)


class FlowWorld:
    """Simulated agents of one policy on one instance, in virtual seconds; everything follows from `seed`.
    now: current time. in_flight: number of datagrams in transit, confirmations left out, plus actions planned
    with `at`; wake-ups of agents do not count. last_work: time when a datagram that is no confirmation was
    last sent or delivered. agents: by node, without crashed ones."""

    def __init__(
        self,
        instance: Instance,
        factory: AgentFactory,
        *,
        seed: int = 0,
        weather: Weather | None = None,
        same_stage: bool = True,
    ) -> None:
        """Make the agents of all nodes with `factory`, and plan the opening of their links. same_stage: True
        if relays of one stage are neighbours, for policies in which they negotiate."""
        self.instance = instance
        self.weather = weather or Weather()
        self.now = 0.0
        self.counts = Counts()
        self.in_flight = 0
        self.last_work = 0.0
        self.agents: dict[str, Agent] = {}
        self._factory = factory
        self._seed = seed
        self._dice = CounterRng(seed, stream=1)
        self._heap: list[tuple[float, int, _Planned]] = []
        self._planned = 0
        self._popped = 0
        """Number of the entry of the heap that is being processed."""
        self._wakes: dict[str, tuple[float, int]] = {}
        """Time of each node's next wake, and number of its entry in the heap."""
        self._busy: set[str] = set()
        self._links: dict[str, dict[tuple[str, Side], tuple[_Link, int]]] = {}
        self._incarnations: Counter[str] = Counter()
        for name in instance.stage:
            self._make(name)
        for (start, end), cost in instance.links.items():
            self._connect(start, end, False, cost)
        if same_stage:
            self._connect_stages()
        self.neighbour_links = sum(map(len, self._links.values())) // 2
        """Number of pairs of neighbours at the start."""

    @property
    def quiet(self) -> bool:
        """True if no agent is busy, no datagram but confirmations is in transit, and no action is planned."""
        return not self.in_flight and not self._busy

    # -- events ------------------------------------------------------------------------------------------

    def run(self, until: float, *, stop_when_quiet: bool = True) -> bool:
        """Process events until virtual time `until` (s); with `stop_when_quiet` only until nothing is left to
        do. Returns `quiet`: True if nothing is."""
        heap, busy, pop = self._heap, self._busy, heapq.heappop
        while heap and heap[0][0] <= until:
            if stop_when_quiet and not busy and not self.in_flight:
                return True
            self.now, self._popped, what = pop(heap)
            if isinstance(what, tuple):
                self._deliver(*what)
            elif isinstance(what, str):
                self._wake(what)
            else:
                self.in_flight -= 1
                what()
        return self.quiet

    def restart_counts(self) -> None:
        """Begin new counts of datagrams at 0; `last_work` becomes the current time."""
        self.counts = Counts()
        self.last_work = self.now

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Plan to call `action` at virtual time `time` (s); until then the world is not quiet."""
        self.in_flight += 1
        self._plan(time, action)

    def crash(self, names: Iterable[str]) -> None:
        """Crash nodes now; each neighbour learns of it after a delay of its own. Raises KeyError for a node
        that has crashed."""
        for name in names:
            del self.agents[name]
            self._busy.discard(name)
            self._wakes[name] = _NEVER
            for (peer, side), (link, end) in self._links.pop(name).items():
                link.open[end] = False
                self._later_down(peer, name, side.opposite, link, 1 - end)

    def handle(self, name: str, event: ev.Event) -> None:
        """Pass an event to the agent of node `name`, and send the messages that it returns. The agent's next
        wake-up is planned, too. Raises KeyError for a node that has crashed."""
        agent = self.agents[name]
        sends = agent.handle(event, self.now)
        if sends:
            links = self._links[name]
            for peer, side, message in sends:
                self._send(name, links.get((peer, side)), message)
        if agent.quiet():
            self._busy.discard(name)
        else:
            self._busy.add(name)
        deadline = agent.deadline()
        if deadline is not None and deadline < self._wakes[name][0]:
            self._plan_wake(name, max(deadline, self.now))

    # -- the standing flow -------------------------------------------------------------------------------

    def flow(self) -> Flow:
        """Standing flow as a solution: the paths that are reserved now from a data node through all stages to
        a data node."""
        return Flow(tuple(path for _, path in self._standing() if path[-1] in self.instance.data))

    def _standing(self) -> Iterable[tuple[UnitId, Path]]:
        """(unit, part of its path that is reserved now, from its source on) of each confirmed unit."""
        onward: dict[tuple[str, UnitId], Held] = {}
        for name, agent in self.agents.items():
            if name in self.instance.relay:
                for held in agent.held():
                    onward[name, held.unit] = held
        for source in self.instance.data:
            if source not in self.agents:
                continue
            for held in self.agents[source].standing():
                path = [source]
                step: Held | None = held
                while step is not None and step.next is not None and len(path) < self.instance.stages + 2:
                    path.append(step.next)
                    step = onward.get((step.next, held.unit))
                yield held.unit, tuple(path)

    # -- links -------------------------------------------------------------------------------------------

    def _make(self, name: str) -> None:
        instance = self.instance
        self._incarnations[name] += 1
        setup = Setup(
            id=name,
            stage=instance.stage[name],
            stages=instance.stages,
            returns=instance.returns,
            capacity=instance.relay[name].capacity if name in instance.relay else 0,
            demand=instance.data[name].microbatches if name in instance.data else 0,
            incarnation=self._incarnations[name],
            relays=len(instance.relays),
            cost_max=instance.cost_max,
        )
        stream = 2 + 1_000_003 * self._incarnations[name] + list(instance.stage).index(name)
        self.agents[name] = self._factory(setup, CounterRng(self._seed, stream=stream))
        self._links[name] = {}
        self._wakes.setdefault(name, _NEVER)

    def _connect_stages(self) -> None:
        levels: dict[int, list[str]] = {}
        for relay in self.instance.relays:
            levels.setdefault(relay.stage, []).append(relay.id)
        for level in levels.values():
            for pair in combinations(level, 2):
                self._connect(*pair, True, 0.0)

    def _connect(self, start: str, end: str, same: bool, cost: float) -> None:
        low, high = self.weather.delay_s
        delays = (self._dice.uniform(low, high), self._dice.uniform(low, high))
        sides = (Side.SAME, Side.SAME) if same else (Side.NEXT, Side.PREVIOUS)
        link = _Link((start, end), sides, cost, delays)
        for at, (name, peer) in enumerate(((start, end), (end, start))):
            before = self._links[name].get((peer, link.sides[at]))
            self._links[name][peer, link.sides[at]] = (link, at)
            # The two ends need not see the link at the same time.
            opener = partial(self._open_end, name, peer, link, at, before[0] if before else None)
            self.at(self.now + self._dice.uniform(low, high), opener)

    def _open_end(self, name: str, peer: str, link: _Link, end: int, before: _Link | None) -> None:
        side = link.sides[end]
        if name not in self.agents or self._links[name].get((peer, side), (None,))[0] is not link:
            return
        if before is not None and before.open[end]:
            before.open[end] = False
            self.handle(name, ev.PeerDown(peer, side))
        link.open[end] = True
        self.handle(name, ev.PeerUp(peer, side, link.cost))

    def _later_down(self, name: str, peer: str, side: Side, link: _Link, end: int) -> None:
        def close_end() -> None:
            if name not in self.agents:
                return
            # An end that has not seen the link open by now never will.
            if self._links[name].get((peer, side), (None,))[0] is link:
                del self._links[name][peer, side]
            if link.open[end]:
                link.open[end] = False
                self.handle(name, ev.PeerDown(peer, side))

        self.at(self.now + self._dice.uniform(*self.weather.notice_s), close_end)

    def _send(self, name: str, at: tuple[_Link, int] | None, message: Message) -> None:
        counts = self.counts
        counts.total += 1
        counts.by_node[name] += 1
        works = not message.confirms
        if works:
            counts.workers.add(name)
            self.last_work = self.now
        else:
            counts.confirmations += 1
        if at is None:
            return
        weather, rng = self.weather, self._dice
        link, end = at
        if weather.loss and rng.uniform() < weather.loss:
            return
        copies = 2 if weather.duplicate and rng.uniform() < weather.duplicate else 1
        for _ in range(copies):
            delay = link.delays[end]
            if weather.reorder and rng.uniform() < weather.reorder:
                delay += rng.uniform(*weather.delay_s)
            self.in_flight += works
            self._plan(self.now + delay, (link, 1 - end, message, works))

    def _deliver(self, link: _Link, end: int, message: Message, works: bool) -> None:
        self.in_flight -= works
        if works:
            self.last_work = self.now
        name = link.ends[end]
        if link.open[end] and name in self.agents:
            self.handle(name, ev.Received(link.ends[1 - end], link.sides[end], message))

    def _wake(self, name: str) -> None:
        """Carry out a planned wake-up of node `name`'s agent, or plan it again if the agent's deadline is
        later. Nothing happens if another wake-up has replaced this one."""
        if self._wakes[name] != (self.now, self._popped):
            return
        self._wakes[name] = _NEVER
        deadline = self.agents[name].deadline()
        if deadline is not None and deadline > self.now:
            self._plan_wake(name, deadline)
        elif deadline is not None:
            self.handle(name, _WAKE)

    def _plan_wake(self, name: str, time: float) -> None:
        """Plan to wake the agent of node `name`, which has not crashed, at `time` (s); replaces any wake-up
        planned before. It does not count in `in_flight`."""
        self._plan(time, name)
        self._wakes[name] = (time, self._planned)

    def _plan(self, time: float, what: _Planned) -> None:
        self._planned += 1
        heapq.heappush(self._heap, (time, self._planned, what))
