"""Moves while the run goes on: relays go over to stages that hold all others up (the leader's part).

The bottleneck is the stage that passes the fewest microbatches a second (`placement.stage_rates`, by what its
members measured). Where two stages are as slow no single move helps, so a few moves are judged together: each
takes the slowest stage as far as one relay can, and of the first one, two, ... those are made that pay best:
the seconds that every later iteration is shorter for, less those that the next ones are longer for while who
moves downloads the state and serves nobody. A swarm must not thrash: moves must have been worth it at each of
so many iterations in a row, and after them the count begins anew.

SWARM (Ryabinin et al., ICML 2023, section on adaptive rebalancing) moves a peer of the least loaded stage to
the most loaded one at fixed times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec

from anabranch.protocol.core import Core
from anabranch.protocol.placement import pass_s, stage_rates
from anabranch.protocol.records import Member, Members

#: Moves must raise the least rate by this share of it: what was measured is not exact.
GAIN = 0.05
#: A stage keeps as many replicas when one leaves it.
KEEPS = 2
#: Iterations for which who moves serves nobody: the one that is open, and one for the download.
AWAY = 2
#: A gain is counted for so many iterations at most: members come and go.
HORIZON = 50
#: So many move at once at most, and so many of a stage are tried, from the slowest to the quickest.
TOGETHER, TRIED = 4, 8


class Rebalancing:
    """Looks at the swarm once in each iteration."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._looked_t = 0
        self._stood = 0

    def decide(self, t: int, quiet: bool) -> Members | None:
        """The moves to be logged, if any; `t` is the last committed iteration. quiet: little would be lost by
        moving peers now."""
        wanted = self.core.settings.rebalance
        if not wanted or not self.core.membership.begun:
            return None
        if t > self._looked_t:
            self._looked_t = t
            self._stood = self._stood + 1 if self._plan(t) else 0
        if not quiet or self._stood < wanted:
            return None
        plan = self._plan(t)
        if not plan:
            return None
        self._stood = 0
        membership = self.core.membership
        moved = tuple(msgspec.structs.replace(membership.members[peer], stage=plan[peer]) for peer in plan)
        reasons = {peer: f"moves to stage {stage}, which holds the others up" for peer, stage in plan.items()}
        return Members(membership.number + 1, removed=reasons, joined=moved)

    def _plan(self, t: int) -> dict[str, int]:
        """Who is to move to which stage, if that pays."""
        relays = {member.id: member for member in self._relays()}
        now = min(self._rates(relays.values()))
        most = sum(1.0 / pass_s(member, 1) for member in relays.values()) / sum(self._blocks())
        if now <= 0.0 or most <= now * (1.0 + GAIN):
            return {}  # a stage without anybody is for `restoring`; no deal of these relays is much better
        best, plan, moved = 0.0, {}, dict[str, int]()
        for _ in range(TOGETHER):
            following = self._next(t, relays, moved)
            if following is None:
                break
            moved[following.id] = following.stage
            relays[following.id] = following
            after = min(self._rates(relays.values()))
            away = min(self._rates([member for member in relays.values() if member.id not in moved]))
            worth = self._worth(t, now, away, after)
            if after > now * (1.0 + GAIN) and worth > best:
                best, plan = worth, dict(moved)
        return plan

    def _next(self, t: int, relays: dict[str, Member], moved: dict[str, int]) -> Member | None:
        """The relay, at its new stage, that takes the slowest stage furthest, and then the next slowest; None
        if nobody makes the rates, from the least on, any greater."""
        rates = self._rates(relays.values())
        slowest = rates.index(min(rates)) + 1
        best, found = sorted(rates), None
        for member in self._movable(t, relays.values(), slowest, moved):
            there = msgspec.structs.replace(member, stage=slowest)
            after = sorted(self._rates([*(m for m in relays.values() if m.id != member.id), there]))
            if after > best:
                best, found = after, there
        return found

    def _movable(
        self, t: int, relays: Iterable[Member], slowest: int, moved: dict[str, int]
    ) -> Iterator[Member]:
        """Of every other stage that can spare one, a few from the slowest to the quickest."""
        relays = list(relays)
        for stage in range(1, self.core.settings.stages + 1):
            here = [member for member in relays if member.stage == stage]
            if stage == slowest or len(here) <= KEEPS:
                continue
            able = [member for member in here if member.id not in moved and self._may_go(member, t)]
            able.sort(key=lambda member: (-pass_s(member, 1), member.id))
            step = max(1.0, (len(able) - 1) / (TRIED - 1))
            yield from [able[round(k * step)] for k in range(min(TRIED, len(able)))]

    def _may_go(self, member: Member, t: int) -> bool:
        """It serves and can be reached; the leader and those who keep the log stay where they are."""
        core, live = self.core, self.core.membership.live(member.stage, t + 1)
        stays = member.id == core.me or core.keeps_log(member.id)
        return not stays and member.id in live and len(live) > KEEPS and core.reachable(member.id)

    def _worth(self, t: int, now: float, away: float, after: float) -> float:
        """Seconds that are won for each microbatch of an iteration. Rates, microbatches per second: now,
        while those who move are away, and with them at their new stages."""
        left = min(HORIZON, self.core.steps - t - AWAY)
        cost = AWAY * (1.0 / away - 1.0 / now) if away > 0.0 else math.inf
        return left * (1.0 / now - 1.0 / after) - cost

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

    def _rates(self, relays: Iterable[Member]) -> list[float]:
        return stage_rates(relays, self._blocks())
