"""This peer's agent of the flow: fed with neighbours, costs, capacity and demand; asked for slots and prices.

A neighbour of the flow is a member of an adjacent stage that serves, is linked, and has answered a heartbeat,
so that the link has a cost. The life of a flow link is that of the connection: it ends with it, at both ends.
Suspicion is no end: dispatch avoids a suspect, and what the plan says of it is kept until the log removes it
or the connection breaks (a refuted suspicion costs nothing).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from anabranch.flow.agent import (
    Agent,
    CapacityChanged,
    CostChanged,
    DemandChanged,
    Event,
    PeerDown,
    PeerUp,
    Received,
    Setup,
    Side,
    Wake,
)
from anabranch.flow.auction.messages import Answer, Offer
from anabranch.flow.balance import places
from anabranch.flow.dice import Dice
from anabranch.flow.policy import planner
from anabranch.protocol.core import Core
from anabranch.protocol.estimates import plausible
from anabranch.protocol.membership import split_indices
from anabranch.protocol.messages import Route

#: The price of turning a microbatch away must exceed that of every way through the residual graph, which
#: visits no relay twice: a number of relays, and a link cost, that no swarm exceeds. The median cost of the
#: links seen first sets the scale: also the least steps of prices, so it waits until an activation was sent,
#: but not for ever (s).
RELAYS_MAX = 1 << 22
COST_MARGIN = 4.0
BEGIN_S = 300.0
#: The least cost (s) of a link: costs of nothing would make a price war endless. The greatest: what a
#: neighbour says of itself enters into it.
COST_MIN_S, COST_MAX_S = 1e-4, 3600.0
#: Seconds of a pass that moved by less than this factor are the same: places do not follow noise.
PASS_CHANGE = 1.3
#: Bounds of what a letter may speak of: counts, prices (s), units or searches by name, and a name's length.
COUNT_MAX = 1 << 62
PRICE_MAX_S = 1e12
NAMES_MAX = 1 << 12
NAME_MAX = 128
#: By so much at most a letter may raise the count of changes heard of. All take over the greatest, so at the
#: bound of counts nobody's letters would be believed any more.
STIR_MAX = 1 << 32
#: Names of data nodes that are believed before the log (here) has heard of them, in all. Every name costs
#: memory here and at those who are told of it, and every pair of names what it costs to exchange them.
STRANGERS_MAX = 16
#: Incarnations are told apart by so many bits: the agent multiplies them to name units and searches.
INCARNATION_BITS = 29


@dataclass
class Said:
    """What was said over one flow link. cost: last told to the agent (s). pushed: units handed over to the
    next hop, in all. heard: the greatest such count (or of units handed back) that came from there."""

    cost: float
    pushed: int = 0
    heard: int = 0


class Router:
    """None of it acts before this peer serves, or where the policy plans nothing (`greedy`, `static`)."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.agent: Agent | None = None
        self.neighbours: dict[tuple[str, Side], Said] = {}
        """Flow links that are up."""
        self._capacity = self._demand = 0
        self._pass_s: dict[str, float] = {}
        self._first_costs: dict[tuple[str, Side], float] = {}
        self._begin_at = math.inf
        self._stir = 0
        self._strangers: set[str] = set()

    def deadline(self) -> float:
        due = self.agent.deadline() if self.agent is not None else None
        return math.inf if due is None else due

    def price(self) -> float:
        """Cost to go (s) of one more microbatch that comes here; infinite while nothing is known. At a data
        node it has arrived: what one that departs there would cost is of no concern to who sends one home."""
        if self.core.stage == 0:
            return 0.0
        return self.agent.price() if self.agent is not None else math.inf

    def shares(self, upstream: Sequence[str]) -> dict[str, int]:
        """Units of the standing flow that come from each of `upstream`."""
        if self.agent is None:
            return {}
        held = Counter(held.previous for held in self.agent.held() if held.previous is not None)
        return {peer: held[peer] for peer in upstream if held[peer]}

    # --- events --------------------------------------------------------------------------------

    def tick(self) -> None:
        if self.core.now >= self.deadline():
            self._give(Wake())

    def measured(self, peer: str) -> None:
        """Something was learnt of the link to `peer`, or of its speed."""
        member = self.core.membership.members.get(peer)
        if self.agent is not None and member is not None and member.stage == self.core.stage != 0:
            self._balance()
        for side in self._sides(peer):
            cost = self.core.costs.link_cost_s(peer, self.core.now)
            if cost is None:
                continue
            cost = min(max(COST_MIN_S, cost), COST_MAX_S)
            if (peer, side) not in self.neighbours:
                self._meet(peer, side, cost)
            elif cost != self.neighbours[peer, side].cost:
                self.neighbours[peer, side].cost = cost
                self._give(CostChanged(peer, side, cost))

    def link_down(self, peer: str) -> None:
        """The connection is gone, or another has taken its place."""
        for side in (Side.PREVIOUS, Side.NEXT):
            self._first_costs.pop((peer, side), None)
            if self.neighbours.pop((peer, side), None) is not None:
                self._give(PeerDown(peer, side))

    def members_changed(self) -> None:
        """The log says who serves: capacity and demand follow from it."""
        core = self.core
        core.costs.forget_all_but(core.membership.members.keys() | core.links.keys())
        if self.agent is None:
            return
        me = self.core.membership.members.get(self.core.me)
        if me is None:
            return
        if self.core.stage == 0:
            demand = self._demanded()
            if demand != self._demand:
                self._demand = demand
                self._give(DemandChanged(demand))
        else:
            self._balance()

    def received(self, peer: str, message: Route) -> str | None:
        """A neighbour's agent speaks; returns why it is refused, if it is."""
        side = Side.PREVIOUS if message.ahead else Side.NEXT
        said, letter = self.neighbours.get((peer, side)), message.letter
        if self.agent is None or said is None:
            return None  # it saw the link first, and will say it again
        wrong = implausible(letter, ahead=message.ahead) or self._contradiction(said, letter)
        if wrong is None:
            said.heard = letter.pushed if isinstance(letter, Offer) else letter.returned
            self._stir = max(self._stir, letter.stir)
            self._give(Received(peer, side, self._of_known_data_nodes(letter)))
        return wrong

    # --- inside --------------------------------------------------------------------------------

    def _sides(self, peer: str) -> list[Side]:
        """On which sides of this peer `peer` stands, while both serve and are linked."""
        core = self.core
        member, serves = core.membership.members.get(peer), core.membership.active_from
        if member is None or not {peer, core.me} <= serves.keys() or peer not in core.links:
            return []
        if core.linked_incarnation.get(peer) != member.incarnation:
            return []  # a new process under the name of one that the log has yet to remove
        sides = []
        if member.stage == core.previous_stage():
            sides.append(Side.PREVIOUS)
        if member.stage == core.next_stage():
            sides.append(Side.NEXT)
        return sides

    def _meet(self, peer: str, side: Side, cost: float) -> None:
        if self.agent is None:
            self._first_costs[peer, side] = cost
            self._begin()
        if self.agent is not None:
            self.neighbours[peer, side] = Said(cost)
            self._give(PeerUp(peer, side, cost))

    def _begin(self) -> None:
        core = self.core
        make = planner(core.settings.policy)
        if make is None:
            return
        self._begin_at = min(self._begin_at, core.now + BEGIN_S)
        if not core.costs.bandwidth_known() and core.now < self._begin_at:
            return
        if core.stage == 0:
            self._demand = self._demanded()
        else:
            self._capacity = self._rebalance()
        setup = Setup(
            id=core.me,
            stage=core.stage,
            stages=core.settings.stages,
            returns=core.settings.returns,
            capacity=self._capacity,
            demand=self._demand,
            incarnation=core.incarnation % (1 << INCARNATION_BITS),
            relays=RELAYS_MAX,
            cost_max=COST_MARGIN * statistics.median(self._first_costs.values()),
        )
        self.agent = make(setup, Dice(core.incarnation))
        self._first_costs.clear()

    def _demanded(self) -> int:
        """Microbatches at once from this data node: its part of the batch, or of what the narrowest stage
        holds where that is less (more would only be turned away)."""
        core = self.core
        serving = [core.membership.members[peer] for peer in core.membership.active_from]
        data_nodes = [member.id for member in serving if member.stage == 0]
        if core.me not in data_nodes:
            return 0
        room = [
            sum(member.capacity for member in serving if member.stage == stage)
            for stage in range(1, core.settings.stages + 1)
        ]
        return len(split_indices(min([core.settings.microbatches, *room]), data_nodes)[core.me])

    def _balance(self) -> None:
        capacity = self._rebalance()
        if capacity != self._capacity:
            self._capacity = capacity
            self._give(CapacityChanged(capacity))

    def _rebalance(self) -> int:
        """Places of this relay in the plan (`flow.balance`), by what its stage's replicas measured: so far
        in this run, or when they joined where not all have worked yet. All that it can hold where one knows
        nothing. Passes that have hardly changed are the same passes."""
        core = self.core
        stage = [core.membership.members[peer] for peer in core.membership.active_from]
        stage = [member for member in stage if member.stage == core.stage]
        capacity = {member.id: member.capacity for member in stage}
        if core.me not in capacity:
            return core.membership.members[core.me].capacity
        pass_s = {member.id: core.costs.pass_s(member.id, core.me) for member in stage}
        if not all(map(plausible, pass_s.values())):
            pass_s = {member.id: member.forward_s for member in stage}
        if not all(map(plausible, pass_s.values())):
            return capacity[core.me]
        before = self._pass_s
        if before.keys() != pass_s.keys() or any(
            not 1.0 / PASS_CHANGE < pass_s[peer] / before[peer] < PASS_CHANGE for peer in pass_s
        ):
            self._pass_s = pass_s
        return places(self._pass_s, capacity, core.settings.microbatches)[core.me]

    def _give(self, event: Event) -> None:
        agent = self.agent
        if agent is None:
            return
        for peer, side, letter in agent.handle(event, self.core.now):
            if isinstance(letter, Offer) and (peer, side) in self.neighbours:
                self.neighbours[peer, side].pushed = letter.pushed
            elif isinstance(letter, Answer) and len(letter.exchanges) > NAMES_MAX:
                letter = msgspec.structs.replace(letter, exchanges=())  # data nodes squared: too long to send
            if isinstance(letter, Offer | Answer):
                self._stir = max(self._stir, letter.stir)
                self.core.send(peer, Route(side is Side.NEXT, letter))

    def _contradiction(self, said: Said, letter: Offer | Answer) -> str | None:
        """Why a letter cannot follow what was said before. (A link delivers in order.)"""
        count = letter.pushed if isinstance(letter, Offer) else letter.returned
        if count < said.heard:
            return f"a count of {said.heard} that falls to {count}"
        if isinstance(letter, Offer) and letter.recalled > letter.pushed:
            return f"{letter.recalled} units recalled of {letter.pushed}"
        if isinstance(letter, Answer) and letter.returned > said.pushed:
            return f"{letter.returned} units handed back of {said.pushed}"
        if letter.stir > self._stir + STIR_MAX:
            return f"{letter.stir} changes, after {self._stir}"
        return None

    def _of_known_data_nodes(self, letter: Offer | Answer) -> Offer | Answer:
        """The letter, without what it says of data nodes that nobody knows."""
        known = self._known
        changes: dict[str, object] = {
            "searches": tuple(search for search in letter.searches if known(search.source)),
            "findings": tuple(finding for finding in letter.findings if known(finding.source)),
        }
        if isinstance(letter, Offer):
            changes["mix"] = tuple(part for part in letter.mix if known(part[0]))
            changes["ceded"] = tuple(part for part in letter.ceded if known(part[0]))
            changes["share"] = letter.share if letter.share and known(letter.share.source) else None
        else:
            pairs = letter.exchanges
            changes["exchanges"] = tuple(pair for pair in pairs if known(pair.given) and known(pair.taken))
            changes["shares"] = tuple(share for share in letter.shares if known(share.source))
            changes["homes"] = tuple(home for home in letter.homes if known(home[0]))
        return msgspec.structs.replace(letter, **changes)

    def _known(self, name: str) -> bool:
        """Whether `name` may be a data node: a member, or one of a few that the log may yet bring."""
        membership = self.core.membership
        if name in membership.incarnations:  # what has gone is no longer of interest
            return membership.stage_of(name) == 0
        if len(self._strangers) < STRANGERS_MAX:
            self._strangers.add(name)
        return name in self._strangers


def implausible(letter: Offer | Answer, ahead: bool) -> str | None:
    """What no honest neighbour would say: a number out of range, a name too long, too many names."""
    if isinstance(letter, Offer) is not ahead:
        return f"{type(letter).__name__} in the wrong direction"
    if isinstance(letter, Answer) and letter.price < 0.0:
        return f"a price of {letter.price}"
    # Nobody bids yet: -inf. No price is known: inf.
    endless = -math.inf if isinstance(letter, Offer) else math.inf
    level = letter.bid if isinstance(letter, Offer) else letter.price
    if level == endless:
        letter = msgspec.structs.replace(letter, **{"bid" if ahead else "price": 0.0})
    return _implausible(msgspec.structs.astuple(letter))


def _implausible(value: object) -> str | None:
    if isinstance(value, int) and not 0 <= value <= COUNT_MAX:
        return f"a count of {value}"
    if isinstance(value, float) and not abs(value) <= PRICE_MAX_S:
        return "a price that is no number" if math.isnan(value) else f"a price of {value}"
    if isinstance(value, str) and len(value) > NAME_MAX:
        return f"a name of {len(value)} letters"
    if isinstance(value, tuple):
        if len(value) > NAMES_MAX:
            return f"more than {NAMES_MAX} names"
        return next((wrong for wrong in map(_implausible, value) if wrong is not None), None)
    return None
