"""Interface of planning agents, each of which is one node's part of a decentralised policy, and their events.

An agent plans the flow with its neighbours' agents by messages. It knows its own capacity or demand and its
neighbours: peers of the previous stage, of the next stage and, where the policy needs them, of its own stage.
A data node stands at both ends of the pipeline: relays of stage 1 are its next neighbours, relays of stage S
its previous ones. With one stage a relay has the same data node on both sides, so a neighbour is always named
by (peer, side). A "unit" is the path of one microbatch in the plan.

The driver promises: a link's life begins with `PeerUp` and ends with `PeerDown`; messages of an earlier life
are never delivered; messages to an end that has not seen `PeerUp` are lost; when one end has seen `PeerDown`,
the other will later. Within a life messages may be lost, doubled, late and out of order. `now` never falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol

import msgspec

from anabranch.counter_rng import CounterRng
from anabranch.flow.graph.problem import Return


class Side(Enum):
    """Stage of a neighbour relative to this node: the one before, the one after, or the same."""

    PREVIOUS = "previous"
    NEXT = "next"
    SAME = "same"

    @property
    def opposite(self) -> Side:
        """Side on which the neighbour at the other end of the link sees this node."""
        return _OPPOSITE[self]

    # An enum's own hash is a Python call, and (peer, side) is a key in every agent's hottest tables.
    __hash__ = object.__hash__


_OPPOSITE = {Side.PREVIOUS: Side.NEXT, Side.NEXT: Side.PREVIOUS, Side.SAME: Side.SAME}


class UnitId(NamedTuple):
    """Name of a unit (path of one microbatch in the plan). source: data node where it begins. Under `gwtf`
    single hops and requests have such names, too, and `source` is the node that made them. No node uses a
    number twice."""

    source: str
    number: int


class Held(NamedTuple):
    """Entry of a node's plan: a unit (path of a microbatch), and the nodes before and after this one on the
    path. previous: None at the data node where the path begins. next: None where it ends."""

    unit: UnitId
    previous: str | None
    next: str | None


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of every policy's messages; one message is one datagram. confirms: True for a periodic message
    that only repeats the agreed state, which is not counted as activity (`Agent.quiet`)."""

    confirms: ClassVar[bool] = False


@dataclass(frozen=True)
class Setup:
    """Facts that a node's agent is given when it is made. stage: 0 for a data node. capacity: of a relay, in
    microbatches. demand: of a data node, in microbatches. incarnation: number of this process of the node,
    higher after each restart. returns: "any" if a unit may end at any data node, "own" if only where it
    began. relays, cost_max: upper bounds of the number of relays and of link costs, from which a policy may
    derive the cost of a refusal."""

    id: str
    stage: int
    stages: int
    returns: Return = "any"
    capacity: int = 0
    demand: int = 0
    incarnation: int = 0
    relays: int = 0
    cost_max: float = 0.0

    @cached_property
    def is_data(self) -> bool:
        return self.stage == 0


class PeerUp(msgspec.Struct, frozen=True):
    """Event: a neighbour has become reachable. cost: d_ij (s) from the node of the earlier stage to the other
    (0: `Side.SAME`)."""

    peer: str
    side: Side
    cost: float = 0.0


class PeerDown(msgspec.Struct, frozen=True):
    """Event: the neighbour is dead or the link to it closed; messages over the link no longer count."""

    peer: str
    side: Side


class CostChanged(msgspec.Struct, frozen=True):
    """Event: the measured cost of a link has changed. The other end gets its own event, maybe later."""

    peer: str
    side: Side
    cost: float


class CapacityChanged(msgspec.Struct, frozen=True):
    capacity: int


class DemandChanged(msgspec.Struct, frozen=True):
    demand: int


class Received(msgspec.Struct, frozen=True):
    """Event: `message` has arrived from the neighbour `peer`. side: its stage, as seen from this node: the
    previous or next one or, under policy `gwtf`, the same one."""

    peer: str
    side: Side
    message: Message


class Wake(msgspec.Struct, frozen=True):
    """Event: the time has come that the agent's `deadline` returned."""


Event = PeerUp | PeerDown | CostChanged | CapacityChanged | DemandChanged | Received | Wake


class Send(NamedTuple):
    """Effect: send `message` to the neighbour `peer` on `side`, which gets it as from `side.opposite`."""

    peer: str
    side: Side
    message: Message


class Agent(Protocol):
    """Planner of one node. It does no I/O and reads no clock; random numbers come from its `rng` alone."""

    def handle(self, event: Event, now: float) -> Sequence[Send]:
        """Handle one event at time `now` (s); return the messages to send."""
        ...

    def deadline(self) -> float | None:
        """Time (s) at which the agent needs a `Wake` event; None if it only waits for other events."""
        ...

    def standing(self) -> Sequence[Held]:
        """Units that begin at this node and are confirmed along their whole path; none at a relay. At every
        moment the path is complete: from node to node, the unit's entry in that node's `held` names the next
        one, up to a data node that holds the unit (with return "own" the one where it began), unless a node
        or link on the path has just died."""
        ...

    def held(self) -> Sequence[Held]:
        """All units for which this node reserves capacity, whether confirmed along their whole path or not. A
        relay never holds more than its capacity, except after the capacity shrank until it has given up
        enough units. A data node lists the units that begin and those that end at it."""
        ...

    def price(self) -> float:
        """Estimated cost (s) of one more microbatch from this node to the end of the pipeline. The price of
        this node's own scarce capacity is not included: dispatch sees its queue. math.inf if no cost is
        known, and in the auction if one more microbatch would have to be refused. The agents of `gwtf` answer
        0 at a data node, those of `flow.policies.wiring` the least link cost alone."""
        ...

    def quiet(self) -> bool:
        """True if this agent awaits no answer and plans no change; periodic `confirms` do not count."""
        ...


class AgentFactory(Protocol):
    """Callable that makes the agent of one node."""

    def __call__(self, setup: Setup, rng: CounterRng) -> Agent: ...
