"""Messages between `gwtf` agents; each is one datagram."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from anabranch.flow.agents.interface import Message, UnitId
from anabranch.flow.agents.reservations import Release, Reserve, Reserved, Stale


class Advertise(Message, frozen=True):
    """Offer to the previous stage. costs: sink -> least cost of a free unit. version: grows with each."""

    version: int
    costs: dict[str, float]


class RequestFlow(Message, frozen=True):
    """Request to a node of the next stage for a unit (`link`) to `sink`, which it advertised at `cost`."""

    link: UnitId
    sink: str
    cost: float


class RequestChange(Message, frozen=True):
    """Request to a node of the same stage to exchange outflows: each gets the other's unit to the same sink,
    and keeps its own inflow. The receiver chooses which of its units it gives. number: id of the request,
    repeated by the `Answer`. link, peer, sink: name, next hop and sink of the unit that the sender offers.
    cost: of the sender's link to `peer`. told: cost of that unit from `peer` to `sink`. costs: next hop ->
    cost of the sender's link to it."""

    number: UnitId
    link: UnitId
    sink: str
    peer: str
    cost: float
    told: float
    costs: dict[str, float]


class RequestRedirect(Message, frozen=True):
    """Request to a node of the same stage: the sender wants to take the receiver's place on a path. number:
    id of the request, repeated by the `Answer`. costs_in, costs_out: previous, or next,
    hop -> cost of the link to it."""

    number: UnitId
    costs_in: dict[str, float]
    costs_out: dict[str, float]


class Answer(Message, frozen=True):
    """Answer to the request `number`. taken: True if the request is granted. A refusal of RequestFlow has the
    sender's newest offer (`version`, `costs`). A granted change or redirect has the outflow that the
    requester gets: `link` to `peer`, at cost `told` from `peer` to the sink; a redirect also its inflow:
    `link_in` from `peer_in`."""

    number: UnitId
    taken: bool
    sink: str = ""
    version: int = 0
    costs: dict[str, float] = msgspec.field(default_factory=dict)
    peer: str = ""
    link: UnitId | None = None
    told: float = 0.0
    peer_in: str = ""
    link_in: UnitId | None = None


class Moved(Message, frozen=True):
    """Notice that the sender has replaced another node at one end of unit `link`. told: cost from the sender
    to the sink; 0 in a notice to the next node."""

    link: UnitId
    told: float


class PushBack(Message, frozen=True):
    """Notice to the previous node: the sender has dropped these units, or lacks them, and the receiver drops
    them too. Causes: no way on to a sink, or no capacity or demand for them."""

    links: tuple[UnitId, ...]


class Cancel(Message, frozen=True):
    """Notice to the next node: the sender has dropped these units, or lacks them, and the receiver drops them
    too. Causes: no unit of the previous stage needs them, or no capacity or demand for them."""

    links: tuple[UnitId, ...]


class CostNow(Message, frozen=True):
    """Notice to the previous node. links: (unit, its new cost from the sender to its sink)."""

    links: tuple[tuple[UnitId, float], ...]


class Confirm(Message, frozen=True):
    """Periodic list of the working units (`links`) and reservations (`units`) shared with the receiver.
    version, costs: to a previous node the sender's newest offer, as in `Advertise`; to a next node none."""

    confirms: ClassVar[bool] = True
    links: tuple[UnitId, ...]
    units: tuple[UnitId, ...] = ()
    version: int = 0
    costs: dict[str, float] = msgspec.field(default_factory=dict)


#: Messages allowed from the next stage, from the previous one, and from a node of the same stage.
FROM_NEXT = (Advertise, Answer, Moved, PushBack, CostNow, Confirm, Reserved, Stale)
FROM_PREVIOUS = (RequestFlow, Moved, Cancel, Confirm, Reserve, Release)
FROM_SAME = (RequestChange, RequestRedirect, Answer)

GwtfLetter = (
    Advertise | RequestFlow | RequestChange | RequestRedirect | Answer | Moved | PushBack | Cancel | CostNow
    | Confirm | Reserve | Reserved | Stale | Release
)  # fmt: skip
