"""Agents of `greedy` and `swarm` in the flow lab: they plan one path after the other and never change one.

A unit (path of one microbatch) walks from its data node, depth first: each node hands it to the first next
hop in its order that has capacity left, and that hop hands it back if it finds no way on. No node is tried
twice for a unit. `greedy`: the least link cost first. `swarm` (SWARM, Ryabinin et al., ICML 2023, arXiv
2301.11913): the least virtual time first. A node keeps a virtual time for each next hop; it grows by the link
cost with each unit that is handed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from anabranch.counter_rng import CounterRng
from anabranch.flow.agents import interface as ev
from anabranch.flow.agents.interface import Held, Message, Send, Setup, Side, UnitId

#: Seconds until a message without an answer is repeated; it doubles up to the second. Plain choices.
REPEAT_S, REPEAT_MAX_S = 2.0, 32.0
#: Seconds between confirmations to a neighbour. A plain choice.
CONFIRM_S = 10.0


class Try(Message, frozen=True):
    """Request to a next hop to take a unit. step: number of this hand-over (one attempt to pass the unit
    on), by which late copies are recognised."""

    unit: UnitId
    step: int


class Done(Message, frozen=True):
    """Confirmation to the previous hop: the unit that it handed over (extended by one hop) with number `step`
    has a whole path from the sender to a data node."""

    unit: UnitId
    step: int


class Refused(Message, frozen=True):
    """Refusal to the previous hop: the sender found no way on for the unit that was handed over (extended by
    one hop) to it with number `step`. used: number of hand-overs of the unit so far."""

    unit: UnitId
    step: int
    used: int


class Drop(Message, frozen=True):
    """Message to the next hop: the unit handed over with number `step` is withdrawn and forgotten."""

    unit: UnitId
    step: int


class Confirm(Message, frozen=True):
    """Periodic list of the units that use the link from sender to receiver, with their hand-over numbers."""

    confirms: ClassVar[bool] = True
    units: tuple[tuple[UnitId, int], ...]


class LeastCost:
    """Order of next hops in `greedy`: the least link cost first."""

    def order(self, costs: dict[str, float]) -> list[str]:
        return sorted(costs, key=lambda peer: (costs[peer], peer))

    def used(self, peer: str, cost: float) -> None:
        """Called when a unit was handed over to `peer` over a link of this cost; does nothing in this class.
        """


class VirtualTime(LeastCost):
    """Order of next hops in the policy `swarm`: least virtual time first. A hop's virtual time grows by the
    link cost with each unit that is handed over to it; a new hop starts with the least of the others."""

    def __init__(self) -> None:
        self._time: dict[str, float] = {}

    def order(self, costs: dict[str, float]) -> list[str]:
        head = min((self._time[peer] for peer in costs if peer in self._time), default=0.0)
        for peer in costs:
            self._time.setdefault(peer, head)
        return sorted(costs, key=lambda peer: (self._time[peer], costs[peer], peer))

    def used(self, peer: str, cost: float) -> None:
        self._time[peer] += cost


@dataclass(slots=True)
class _Walk:
    """Unit (path of a microbatch) at one node, with its previous and next node. step, out_step: numbers of
    its hand-over to this node and to the next one. used: hand-overs so far. done: True if its path is whole
    from this node on. stood: True if it was done before: if it then finds no way on, the next unit is tried
    all the same. tried: next hops that were asked to take it."""

    previous: str | None
    step: int
    next: str | None = None
    out_step: int = 0
    used: int = 0
    done: bool = False
    stood: bool = False
    tried: set[str] = field(default_factory=set)
    repeat_at: float = 0.0
    repeat_s: float = REPEAT_S


class WiringAgent:
    """Agent of `greedy` or `swarm` at one node (`flow.agents.interface.Agent`). A data node sends one unit
    after the other."""

    def __init__(self, setup: Setup, rng: CounterRng, rule: LeastCost) -> None:
        self._setup = setup
        self._dice = rng
        self._rule = rule
        self._next: dict[str, float] = {}
        self._previous: set[str] = set()
        self._walks: dict[UnitId, _Walk] = {}
        """Units through a relay, or units that begin at a data node."""
        self._arrived: dict[UnitId, _Walk] = {}
        """Units that end at a data node."""
        self._refused: dict[UnitId, int] = {}
        """Unit that was at this node and left it -> its hand-overs at that time."""
        self._capacity = setup.capacity
        self._demand = setup.demand
        self._count = setup.incarnation << 32
        self._hopeless = False
        """True if the last unit found no path and neither next hops nor demand have changed since."""
        self._confirm_at: float | None = None
        self._now = 0.0

    # -- driver ------------------------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> Sequence[Send]:
        self._now = now
        if self._confirm_at is None:
            self._confirm_at = now + CONFIRM_S * self._dice.uniform(0.5, 1.5)
        sends: list[Send] = []
        match event:
            case ev.Received(peer, side, message):
                sends += self._receive(peer, side, message)
            case ev.PeerUp(peer, Side.NEXT, cost):
                self._next[peer] = cost
                self._hopeless = False
            case ev.PeerUp(peer, Side.PREVIOUS):
                self._previous.add(peer)
            case ev.CostChanged(peer, Side.NEXT, cost):
                self._next[peer] = cost
            case ev.PeerDown(peer, Side.NEXT):
                self._next.pop(peer, None)
                for unit in [unit for unit, walk in self._walks.items() if walk.next == peer]:
                    sends += self._onward(unit)
            case ev.PeerDown(peer, Side.PREVIOUS):
                self._previous.discard(peer)
                for table in (self._walks, self._arrived):
                    for unit in [unit for unit, walk in table.items() if walk.previous == peer]:
                        sends += self._drop(unit, table)
            case ev.CapacityChanged(capacity):
                self._capacity = capacity
                while not self._setup.is_data and len(self._walks) > capacity:
                    sends += self._give_back(next(reversed(self._walks)))
            case ev.DemandChanged(demand):
                self._demand = demand
                self._hopeless = False
                for unit in list(self._walks)[demand:] if self._setup.is_data else []:
                    sends += self._drop(unit, self._walks)
            case _:
                sends += self._repeat()
        return sends + self._start()

    def deadline(self) -> float | None:
        repeats = [walk.repeat_at for walk in self._walks.values() if not walk.done]
        return min([*repeats, *([self._confirm_at] if self._confirm_at is not None else [])], default=None)

    def standing(self) -> list[Held]:
        if not self._setup.is_data:
            return []
        return [Held(unit, None, walk.next) for unit, walk in self._walks.items() if walk.done]

    def held(self) -> list[Held]:
        tables = (self._walks, self._arrived)
        return [Held(unit, walk.previous, walk.next) for table in tables for unit, walk in table.items()]

    def price(self) -> float:
        return min(self._next.values(), default=0.0 if self._setup.is_data else float("inf"))

    def quiet(self) -> bool:
        return all(walk.done for walk in self._walks.values())

    # -- walking -----------------------------------------------------------------------------------------

    def _start(self) -> list[Send]:
        """At a data node: start the next unit up to its demand, once all before it have whole paths or were
        given up; none after one that found no path, until next hops or demand change. Returns the messages.
        """
        if not self._setup.is_data or not self._next or self._hopeless:
            return []
        if len(self._walks) >= self._demand or not self.quiet():
            return []
        self._count += 1
        unit = UnitId(self._setup.id, self._count)
        self._walks[unit] = _Walk(None, 0)
        return self._onward(unit)

    def _onward(self, unit: UnitId) -> list[Send]:
        """Hand the unit over to the first next hop that was not tried; give it back if there is none. Returns
        the messages."""
        walk = self._walks[unit]
        walk.done = False
        left = {peer: cost for peer, cost in self._next.items() if peer not in walk.tried}
        if self._setup.stage == self._setup.stages and self._setup.returns == "own":
            left = {peer: cost for peer, cost in left.items() if peer == unit.source}
        if not left:
            return self._give_back(unit)
        peer = self._rule.order(left)[0]
        self._rule.used(peer, left[peer])
        walk.tried.add(peer)
        walk.next = peer
        walk.used += 1
        walk.out_step = walk.used
        walk.repeat_s = REPEAT_S
        walk.repeat_at = self._now + REPEAT_S
        return [Send(peer, Side.NEXT, Try(unit, walk.out_step))]

    def _give_back(self, unit: UnitId) -> list[Send]:
        """Remove a unit, notify its next hop (if it has one that is still linked), and refuse it, now and
        later, to the previous node, which tries another. At its data node none starts until next hops or
        demand change, unless this one was whole before. Returns the messages."""
        walk = self._walks.pop(unit)
        sends = []
        if walk.next is not None and walk.next in self._next:
            sends.append(Send(walk.next, Side.NEXT, Drop(unit, walk.out_step)))
        if walk.previous is None:
            self._hopeless = not walk.stood
            return sends
        self._refused[unit] = walk.used
        return [*sends, Send(walk.previous, Side.PREVIOUS, Refused(unit, walk.step, walk.used))]

    def _drop(self, unit: UnitId, table: dict[UnitId, _Walk]) -> list[Send]:
        """Remove a unit that is given up from `table`; returns the message to its next node, [] if it has
        none. If it comes to this node again, it is refused. Raises KeyError if it is not in `table`."""
        walk = table.pop(unit)
        self._refused[unit] = walk.used
        if walk.next is None:
            return []
        return [Send(walk.next, Side.NEXT, Drop(unit, walk.out_step))]

    def _receive(self, peer: str, side: Side, message: Message) -> list[Send]:
        match message:
            case Try(unit, step):
                return self._tried(peer, unit, step)
            case Done(unit, step):
                return self._finished(peer, unit, step)
            case Refused(unit, step, used):
                walk = self._walks.get(unit)
                if walk is not None and (walk.next, walk.out_step) == (peer, step):
                    walk.used = max(used, walk.used)
                    walk.next = None
                    return self._onward(unit)
            case Drop(unit, step):
                for table in (self._walks, self._arrived):
                    walk = table.get(unit)
                    if walk is not None and (walk.previous, walk.step) == (peer, step):
                        return self._drop(unit, table)
            case Confirm(units):
                return self._confirmed(peer, side, units)
        return []

    def _tried(self, peer: str, unit: UnitId, step: int) -> list[Send]:
        table = self._arrived if self._setup.is_data else self._walks
        walk = table.get(unit)
        if walk is not None:
            if walk.step == step and walk.done:
                return [Send(peer, Side.PREVIOUS, Done(unit, step))]
            return []
        if unit in self._refused or peer not in self._previous:
            # It was here before and found no way on; the hand-overs of that time count as well.
            used = max(step, self._refused.get(unit, 0))
            return [Send(peer, Side.PREVIOUS, Refused(unit, step, used))]
        if self._setup.is_data:
            self._arrived[unit] = _Walk(peer, step, done=True)
            return [Send(peer, Side.PREVIOUS, Done(unit, step))]
        if len(self._walks) >= self._capacity:
            self._refused[unit] = step
            return [Send(peer, Side.PREVIOUS, Refused(unit, step, step))]
        self._walks[unit] = _Walk(peer, step, used=step)
        return self._onward(unit)

    def _finished(self, peer: str, unit: UnitId, step: int) -> list[Send]:
        walk = self._walks.get(unit)
        if walk is None or walk.done or (walk.next, walk.out_step) != (peer, step):
            return []
        walk.done = walk.stood = True
        if walk.previous is None:
            return []
        return [Send(walk.previous, Side.PREVIOUS, Done(unit, walk.step))]

    # -- upkeep ------------------------------------------------------------------------------------------

    def _repeat(self) -> list[Send]:
        """Messages that are due: requests without an answer again, and the periodic lists of the units shared
        with each neighbour."""
        sends: list[Send] = []
        for unit, walk in self._walks.items():
            if not walk.done and walk.repeat_at <= self._now and walk.next is not None:
                walk.repeat_s = min(2 * walk.repeat_s, REPEAT_MAX_S)
                walk.repeat_at = self._now + walk.repeat_s
                sends.append(Send(walk.next, Side.NEXT, Try(unit, walk.out_step)))
        if self._confirm_at is not None and self._confirm_at <= self._now:
            self._confirm_at = self._now + CONFIRM_S
            shared: dict[tuple[str, Side], list[tuple[UnitId, int]]] = {}
            for table in (self._walks, self._arrived):
                for unit, walk in table.items():
                    if walk.next is not None and walk.done:
                        shared.setdefault((walk.next, Side.NEXT), []).append((unit, walk.out_step))
                    if walk.previous is not None:
                        shared.setdefault((walk.previous, Side.PREVIOUS), []).append((unit, walk.step))
            sends += [Send(peer, side, Confirm(tuple(units))) for (peer, side), units in shared.items()]
        return sends

    def _confirmed(self, peer: str, side: Side, units: Sequence[tuple[UnitId, int]]) -> list[Send]:
        """Answers to a neighbour's `Confirm`: they refuse (to a previous hop) or drop (at a next hop) the
        listed units that this node does not share. Its own units do not change."""
        sends: list[Send] = []
        for unit, step in units:
            if side is Side.PREVIOUS:
                walk = (self._arrived if self._setup.is_data else self._walks).get(unit)
                if walk is None or (walk.previous, walk.step) != (peer, step):
                    used = max(step, self._refused.get(unit, 0))
                    sends.append(Send(peer, side, Refused(unit, step, used)))
            else:
                walk = self._walks.get(unit)
                if walk is None or (walk.next, walk.out_step) != (peer, step):
                    sends.append(Send(peer, side, Drop(unit, step)))
        return sends


def greedy_agent(setup: Setup, rng: CounterRng) -> WiringAgent:
    return WiringAgent(setup, rng, LeastCost())


def swarm_agent(setup: Setup, rng: CounterRng) -> WiringAgent:
    return WiringAgent(setup, rng, VirtualTime())
