"""Driver of this peer's flow agent: it feeds the agent with events and sends the agent's letters, which are
messages to agents at neighbours.

A neighbour of the flow is a member of an adjacent stage that serves, is linked, and has answered a heartbeat,
so that the link has a cost. A flow link lives as long as the connection, at both ends. Suspicion does not end
it: dispatch avoids a suspect, and the plan keeps it until the log removes it or the connection breaks, so a
refuted suspicion costs nothing.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence

from anabranch.counter_rng import CounterRng
from anabranch.flow.agents import interface as ev
from anabranch.flow.agents.interface import Agent, Setup, Side
from anabranch.flow.auction.messages import Answer, Offer
from anabranch.flow.gwtf.messages import GwtfLetter
from anabranch.flow.policies.registry import PLANNERS, is_published
from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.messages import Bargain, Burst, GotBurst, Route
from anabranch.protocol.routing.bandwidth_probes import BandwidthProbes
from anabranch.protocol.routing.plan_share import PlanShare
from anabranch.protocol.routing.validation import DataNodes, LinkHistory, contradiction, implausible, unfit

#: Number of relays that no swarm exceeds, and margin of the greatest link cost over the median cost of the
#: links seen first. The price of turning a microbatch away must exceed the cost of every path through the
#: residual graph, which visits no relay twice.
RELAYS_MAX = 1 << 22
COST_MARGIN = 4.0
#: Longest wait (s) for a measured bandwidth before the agent starts: link costs at the start set the scale of
#: prices and their least steps. A plain choice: several slow activations.
BEGIN_S = 300.0
#: Least and greatest cost of a link (s). Costs of zero would make a price war endless; a neighbour's own
#: figures enter into the cost, so it is bounded.
COST_MIN_S, COST_MAX_S = 1e-4, 3600.0
#: Bits of an incarnation that the agent sees: it shifts them by 32 to name units and searches, and counts in
#: letters stay below `validation.COUNT_MAX`.
INCARNATION_BITS = 29
_SIDES = tuple(Side)
_FOREIGN = "a letter of another policy than the run's"


class FlowAgentDriver(Timer):
    """Driver of the flow agent and of bandwidth probes at one peer. agent: None until the flow begins
    (`measured`), while the next iteration is a round, and if the policy has no agents. neighbours: (peer,
    side) -> cost and counts of units of each flow link that is up. told: number of events given to the agent.
    A letter is a message between the agents at both ends of a flow link."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self.restart()

    def restart(self) -> None:
        """Drop the agent, its flow and what bandwidth probes found, because this peer serves another stage
        from now on."""
        self.probes = BandwidthProbes(self.ctx)
        self.agent: Agent | None = None
        self.neighbours: dict[tuple[str, Side], LinkHistory] = {}
        self._share = PlanShare(self.ctx)
        self._capacity = self._demand = 0
        self._first_costs: dict[tuple[str, Side], float] = {}
        self._begin_at = math.inf
        self._stir = 0
        self.told = 0
        self._data_nodes = DataNodes()
        self._onward: dict[str, int] | None = None

    def deadline(self) -> float:
        agent_due, probe_due = self._agent_due(), self.probes.deadline()
        return agent_due if agent_due < probe_due else probe_due

    def price(self) -> float:
        """Cost (s) of one more microbatch from this peer to the end of the pipeline, as `Agent.price`: 0 at a
        data node; infinite if it is unknown, if there is no agent, or if the auction would have to refuse one
        more."""
        if self.ctx.run.stage == 0:
            return 0.0
        return self.agent.price() if self.agent is not None else math.inf

    def shares(self, upstream: Sequence[str]) -> dict[str, int]:
        """Number of units of the flow, for which this peer reserves capacity (confirmed along their whole
        path or not), that come from each of the peers `upstream`; peers from which none come are left out.
        Empty without an agent."""
        if self.agent is None:
            return {}
        held = Counter(held.previous for held in self.agent.held() if held.previous is not None)
        return {peer: held[peer] for peer in upstream if held[peer]}

    def onward(self) -> Mapping[str, int]:
        """Number of units of the flow, for which this peer reserves capacity, that go to each next hop; empty
        unless the policy dispatches by them (`gwtf` alone does)."""
        if self.agent is None or not self._published:
            return {}
        if self._onward is None:
            self._onward = Counter(held.next for held in self.agent.held() if held.next is not None)
        return self._onward

    # --- events --------------------------------------------------------------------------------

    def stop_before_round(self) -> None:
        """End the flow if the next iteration is a round: its plan says which machine gets which slot. The
        flow begins anew, by the next measurements, after the last round."""
        if self.ctx.run.next_is_round:
            self.agent, self._onward = None, None
            self._begin_at = math.inf
            self.neighbours.clear()
            self._first_costs.clear()

    def tick(self) -> None:
        self.probes.tick()
        if self.ctx.clock.now >= self._agent_due():
            self._give(ev.Wake())

    def measured(self, peer: str) -> None:
        """Note that the link to `peer`, or the speed of `peer`, was measured: tell the agent of a new
        neighbour, of a changed link cost, or of changed places of this relay. The agent is started with the
        first neighbour of another stage, once a bandwidth is known or BEGIN_S later. Nothing of links while
        the next iteration is a round."""
        member = self.ctx.run.membership.members.get(peer)
        if self.agent is not None and member is not None and member.stage == self.ctx.run.stage != 0:
            self._update_places()
        for side in self._sides(peer) if not self.ctx.run.next_is_round else ():
            cost = self.ctx.costs.link_cost_s(peer)
            if cost is None:
                continue
            cost = min(max(COST_MIN_S, cost), COST_MAX_S) if side is not Side.SAME else 0.0
            if (peer, side) not in self.neighbours:
                self._meet(peer, side, cost)
            elif cost != self.neighbours[peer, side].cost:
                self.neighbours[peer, side].cost = cost
                self._give(ev.CostChanged(peer, side, cost))

    def link_down(self, peer: str) -> None:
        """End the flow links to `peer`, because its connection is gone or was replaced by another."""
        self.probes.link_down(peer)
        for side in _SIDES:
            key = peer, side
            self._first_costs.pop(key, None)
            if self.neighbours.pop(key, None) is not None:
                self._give(ev.PeerDown(peer, side))

    def members_changed(self) -> None:
        """Note that the membership changed: drop the costs of peers that are neither members nor linked. If
        the routing policy plans a flow and this peer is a member, also update this data node's demand or this
        relay's places."""
        ctx = self.ctx
        ctx.costs.forget(lambda peer: peer not in ctx.run.membership.members and peer not in ctx.links.up)
        if self.agent is None:
            return
        if ctx.me not in ctx.run.membership.members:
            return
        if ctx.run.stage == 0:
            demand = self._share.demand()
            if demand != self._demand:
                self._demand = demand
                self._give(ev.DemandChanged(demand))
        else:
            self._update_places()

    def received(self, peer: str, message: Route | Bargain | Burst | GotBurst) -> str | None:
        """Handle a letter of a neighbour's agent, a bandwidth probe (answered at once) or the answer to one;
        returns the reason if it is refused, else None. A letter is ignored while this peer has no agent, or
        no flow link to `peer`."""
        match message:
            case Bargain():
                return self._bargained(peer, message)
            case Burst(number):
                self.ctx.outbox.send(peer, GotBurst(number))
                return None
            case GotBurst():
                self.probes.answered(peer, message)
                self.measured(peer)
                return None
        side = Side.PREVIOUS if message.ahead else Side.NEXT
        history, letter = self.neighbours.get((peer, side)), message.letter
        if self.agent is None or history is None:
            return None  # the other end saw the link first, and will repeat the letter
        if self._published:
            return _FOREIGN
        wrong = implausible(letter, ahead=message.ahead) or contradiction(history, letter, self._stir)
        if wrong is None:
            history.note(letter)
            self._stir = max(self._stir, letter.stir)
            self._give(ev.Received(peer, side, self._data_nodes.only_known(letter, self.ctx.run.membership)))
        return wrong

    def _bargained(self, peer: str, message: Bargain) -> str | None:
        if self.agent is None or (peer, message.side) not in self.neighbours:
            return None
        if not self._published:
            return _FOREIGN
        wrong = unfit(message.letter, message.side)
        if wrong is None:
            self._give(ev.Received(peer, message.side, message.letter))
        return wrong

    # --- the agent -----------------------------------------------------------------------------

    def _agent_due(self) -> float:
        due = self.agent.deadline() if self.agent is not None else None
        return math.inf if due is None else due

    def _sides(self, peer: str) -> list[Side]:
        """Sides on which `peer` is a neighbour of this peer in the flow (previous, next or same stage), while
        both serve and are linked."""
        ctx = self.ctx
        member = ctx.run.membership.members.get(peer)
        if member is None:
            return []
        sides = []
        if member.stage == ctx.run.previous_stage():
            sides.append(Side.PREVIOUS)
        if member.stage == ctx.run.next_stage():
            sides.append(Side.NEXT)
        if member.stage == ctx.run.stage != 0 and self._published:
            sides.append(Side.SAME)
        serves = ctx.run.membership.active_from
        if not sides or peer not in serves or ctx.me not in serves or peer not in ctx.links.up:
            return []
        if not ctx.knows_process(peer):
            return []  # a new process of a member that the log has yet to remove
        if ctx.run.near.crowded and peer not in ctx.run.near.all(ctx.run.stage):
            return []
        return sides

    @property
    def _published(self) -> bool:
        return is_published(self.ctx.run.settings.policy)

    def _meet(self, peer: str, side: Side, cost: float) -> None:
        if self.agent is None and side is not Side.SAME:
            self._first_costs[peer, side] = cost
            self._begin()
        if self.agent is not None:
            self.neighbours[peer, side] = LinkHistory(cost)
            self._give(ev.PeerUp(peer, side, cost))

    def _begin(self) -> None:
        ctx = self.ctx
        planner = PLANNERS.get(ctx.run.settings.policy)
        if planner is None:
            return
        self._begin_at = min(self._begin_at, ctx.clock.now + BEGIN_S)
        if not ctx.costs.bandwidth_known() and ctx.clock.now < self._begin_at:
            return
        if ctx.run.stage == 0:
            self._demand = self._share.demand()
        else:
            self._capacity = self._share.places()
        setup = Setup(
            id=ctx.me,
            stage=ctx.run.stage,
            stages=ctx.run.settings.stages,
            returns=ctx.run.settings.returns,
            capacity=self._capacity,
            demand=self._demand,
            incarnation=ctx.incarnation % (1 << INCARNATION_BITS),
            relays=RELAYS_MAX,
            cost_max=COST_MARGIN * statistics.median(self._first_costs.values()),
        )
        self.agent = planner.agent(setup, CounterRng(ctx.incarnation, zlib.crc32(ctx.me.encode())))
        self._first_costs.clear()

    def _update_places(self) -> None:
        capacity = self._share.changed_places()
        if capacity is not None and capacity != self._capacity:
            self._capacity = capacity
            self._give(ev.CapacityChanged(capacity))

    def _give(self, event: ev.Event) -> None:
        agent = self.agent
        if agent is None:
            return
        self.told += 1
        sends = agent.handle(event, self.ctx.clock.now)
        self._onward = None
        for peer, side, letter in sends:
            if isinstance(letter, Offer) and (peer, side) in self.neighbours:
                self.neighbours[peer, side].pushed = letter.pushed
            if isinstance(letter, Offer | Answer):
                self._stir = max(self._stir, letter.stir)
                self.ctx.outbox.send(peer, Route(side is Side.NEXT, letter))
            elif isinstance(letter, GwtfLetter):
                self.ctx.outbox.send(peer, Bargain(side.opposite, letter))
