"""Inputs of one peer to the planned flow, as numbers of microbatches: demand of a data node (how many it
sources at once) and places of a relay (how many the plan may send through it)."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.flow.dispatch.load_balance import places
from anabranch.flow.policies.registry import is_published
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.membership.assignment import split_indices
from anabranch.protocol.membership.overlay import ALL_TIMES
from anabranch.protocol.telemetry.estimators import plausible

#: Factor by which a measured time of a pass must change to count, so that places ignore noise. Plain choice.
PASS_CHANGE = 1.3


class PlanShare:
    """Calculation of this peer's demand and places from the membership and from measured compute times."""

    def __init__(self, ctx: PeerContext) -> None:
        self._ctx = ctx
        self._pass_s: dict[str, float] = {}
        self._seen: object = None
        """Inputs of the last `changed_places`."""
        self._basis: object = None
        """Inputs of `_capacity`."""
        self._capacity: dict[str, int] = {}
        """Slots of each replica of the stage that is no standby."""
        self._found: int | None = None
        """Places that follow from `_pass_s` and `_capacity`; None: to be computed."""
        self._seen_at_join: object = None
        """These inputs without measurements, if the places followed from the times offered at the join."""

    def demand(self) -> int:
        """Demand of this data node, in microbatches that it has in flight at once: its part of the batch, or
        of the capacity of the narrowest stage if that is less. 0 if it serves no longer."""
        ctx = self._ctx
        members, live = ctx.run.membership.members, ctx.run.membership.live
        working, data_nodes = ctx.standby_view.working, live(0, ALL_TIMES)
        if ctx.me not in data_nodes:
            return 0
        slots, relays = ctx.run.settings.slots, range(1, ctx.run.settings.stages + 1)
        room = [sum(slots(s, members[p].capacity) for p in working(live(s, ALL_TIMES))) for s in relays]
        return len(split_indices(min([ctx.run.settings.microbatches, *room]), data_nodes)[ctx.me])

    def changed_places(self) -> int | None:
        """Places of this relay if the members, standbys or compute times from which they follow have changed
        since the last call, else None. The number itself may be the same."""
        run, costs, spared = self._ctx.run, self._ctx.costs, self._ctx.standby_view.waits
        version = run.membership.version_of(run.stage)
        seen = (run.settings, run.membership, version, costs.changes, spared)
        if seen == self._seen:
            return None
        self._seen = seen
        seen_at_join = (run.settings, run.membership, version, spared)
        working = self._working()
        measured = self._measured_s(working)
        if seen_at_join == self._seen_at_join and measured is None:
            return None
        self._seen_at_join = None if measured is not None else seen_at_join
        return self._places(working, measured)

    def places(self) -> int:
        """Places of this relay, the number of microbatches that the plan may send through it: its part of the
        batch, which is divided over the stage's replicas by their compute times.

        Times measured in this run are used, or those offered at the join until all replicas have worked. A
        relay has as many places as slots (microbatches that it can hold) if no times are known, or under
        policy `gwtf`; under other policies a standby has none.
        """
        working = self._working()
        return self._places(working, self._measured_s(working))

    def _places(self, working: Sequence[str], measured: dict[str, float] | None) -> int:
        """Places of this relay, by the rule of `places`. working: replicas of its stage that are no standbys.
        measured: compute seconds of a pass at each of them, None unless all are known."""
        run, me, spared = self._ctx.run, self._ctx.me, self._ctx.standby_view.waits
        members = run.membership.members
        basis = (run.settings, run.membership, run.membership.version_of(run.stage), spared)
        if basis != self._basis:
            slots, stage = run.settings.slots, run.stage
            self._basis, self._found = basis, None
            self._capacity = {peer: slots(stage, members[peer].capacity) for peer in working}
        capacity = self._capacity
        published = is_published(run.settings.policy)
        if me in spared and me not in working and not published:
            return 0
        if me not in capacity or published:
            return run.settings.slots(run.stage, members[me].capacity)
        pass_s = measured or {peer: members[peer].forward_s for peer in working}
        if not all(map(plausible, pass_s.values())):
            return capacity[me]
        before = self._pass_s
        if before.keys() != pass_s.keys() or any(
            not 1.0 / PASS_CHANGE < pass_s[peer] / before[peer] < PASS_CHANGE for peer in pass_s
        ):
            self._pass_s, self._found = pass_s, None
        if self._found is None:
            self._found = places(self._pass_s, capacity, run.settings.microbatches)[me]
        return self._found

    def _working(self) -> Sequence[str]:
        """Replicas of this relay's stage that are no standbys."""
        run = self._ctx.run
        return self._ctx.standby_view.working(run.membership.live(run.stage, ALL_TIMES))

    def _measured_s(self, stage: Sequence[str]) -> dict[str, float] | None:
        """Compute seconds of a pass at each replica of `stage`; None unless all were measured in this run."""
        found = {}
        for peer in stage:
            seconds = self._ctx.costs.pass_s(peer, self._ctx.me)
            if not plausible(seconds):
                return None
            found[peer] = seconds
        return found
