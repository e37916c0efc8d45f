"""Moves while the run goes on: a relay goes over to the stage that holds all others up (the leader's part).

The bottleneck is the stage that passes the fewest microbatches a second (`placement.stage_rates`, by what its
members measured). A relay of a stage that can spare it moves there if that pays: the seconds that every later
iteration is shorter for, against those that the next ones are longer for while it downloads the state and
serves nobody. A swarm must not thrash: the same stage must have been the bottleneck, and a move worth it, at
each of so many iterations in a row, and after a move the count begins anew.

SWARM (Ryabinin et al., ICML 2023, section on adaptive rebalancing) moves a peer of the least loaded stage to
the most loaded one at fixed times.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from anabranch.protocol.core import Core
from anabranch.protocol.placement import stage_rates
from anabranch.protocol.records import Member, Members

#: A move must raise the least rate by this share of it: what was measured is not exact.
GAIN = 0.15
#: A stage keeps as many replicas when one leaves it.
KEEPS = 2
#: Iterations for which who moves serves nobody: the one that is open, and one for the download.
AWAY = 2
#: A gain is counted for so many iterations at most: members come and go.
HORIZON = 50


class Rebalancing:
    """Looks at the swarm once in each iteration."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._looked_t = 0
        self._bottleneck = 0
        self._stood = 0

    def decide(self, t: int, quiet: bool) -> Members | None:
        """The move to be logged, if any; `t` is the last committed iteration. quiet: little would be lost by
        moving a peer now."""
        wanted = self.core.settings.rebalance
        if not wanted or not self.core.membership.begun:
            return None
        if t > self._looked_t:
            self._looked_t = t
            self._look(t)
        if not quiet or self._stood < wanted:
            return None
        peer = self._best(t)
        if peer is None:
            return None
        self._stood = 0
        membership = self.core.membership
        moved = msgspec.structs.replace(membership.members[peer], stage=self._bottleneck)
        reason = f"moves to stage {self._bottleneck}, which holds the others up"
        return Members(membership.number + 1, removed={peer: reason}, joined=(moved,))

    def _look(self, t: int) -> None:
        rates = self._rates(self._relays())
        slowest = rates.index(min(rates)) + 1
        if slowest != self._bottleneck:
            self._bottleneck, self._stood = slowest, 0
        self._stood = self._stood + 1 if self._best(t) is not None else 0

    def _best(self, t: int) -> str | None:
        """Whose move to the bottleneck raises the least rate most, if it pays."""
        relays = self._relays()
        counts = Counter(member.stage for member in relays)
        now = min(self._rates(relays))
        if now <= 0.0:
            return None  # a stage without anybody is for `restoring`
        best, peer = now, None
        for member in sorted(relays, key=lambda m: m.id):
            spare = member.stage != self._bottleneck and counts[member.stage] > KEEPS
            if not spare or not self._may_go(member, t):
                continue
            others = [other for other in relays if other.id != member.id]
            after = min(self._rates([*others, msgspec.structs.replace(member, stage=self._bottleneck)]))
            if after > max(best, now * (1.0 + GAIN)) and self._pays(t, now, min(self._rates(others)), after):
                best, peer = after, member.id
        return peer

    def _may_go(self, member: Member, t: int) -> bool:
        """It serves and can be reached; the leader and those who keep the log stay where they are."""
        core, live = self.core, self.core.membership.live(member.stage, t + 1)
        stays = member.id == core.me or core.keeps_log(member.id)
        return not stays and member.id in live and len(live) > KEEPS and core.reachable(member.id)

    def _pays(self, t: int, now: float, away: float, after: float) -> bool:
        """Rates, microbatches per second: now, while the peer is away, and with it at its new stage."""
        left = min(HORIZON, self.core.steps - t - AWAY)
        cost = AWAY * (1.0 / away - 1.0 / now) if away > 0.0 else math.inf
        return left * (1.0 / now - 1.0 / after) > cost

    def _relays(self) -> list[Member]:
        """With what their hearts told of their speed, where the leader hears them; capacity: their slots."""
        core, found = self.core, []
        for member in core.membership.members.values():
            if not member.stage:
                continue
            blocks, told = self._blocks()[member.stage - 1], core.costs.neighbours.get(member.id)
            slots = core.settings.slots(member.stage, member.capacity)
            member = msgspec.structs.replace(member, capacity=slots)
            if told is not None and told.backward_s:
                passes = (told.forward_s / blocks, (told.work_s - told.forward_s) / blocks)
                member = msgspec.structs.replace(member, forward_s=passes[0], backward_s=passes[1])
            found.append(member)
        return found

    def _blocks(self) -> tuple[int, ...]:
        settings = self.core.settings
        return settings.blocks or (1,) * settings.stages

    def _rates(self, relays: Sequence[Member]) -> list[float]:
        return stage_rates(relays, self._blocks())
