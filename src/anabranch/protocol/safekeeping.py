"""Gradients kept outside their stage (`redo = "gradients"`, DESIGN §3): the leader's part.

A step may be proposed when, for each stage, enough peers of other stages hold what the stage reduced. A stage
that loses all its replicas is then brought up from a snapshot by them, and the log need not go back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from anabranch.protocol.core import Core
from anabranch.protocol.keeping import SOURCES_NAMED, Keeping, Point, candidates, choose
from anabranch.protocol.messages import KeepGradient, Steps

#: Seconds after which another peer is asked to keep what the first does not.
ORDER_AGAIN_S = 10.0


class Safekeeping:
    """Orders gradients to be kept, and knows which stage can be brought up by them."""

    def __init__(self, core: Core, keeping: Keeping) -> None:
        self.core = core
        self.keeping = keeping
        self._t = -1
        self._ordered: dict[int, dict[str, float]] = {}
        self._again_at = math.inf

    @property
    def wanted(self) -> bool:
        settings = self.core.settings
        return settings.redo == "gradients" and settings.snapshot_every > 0

    def secure(self, t: int, stage: int, digest: str, sources: Sequence[str]) -> bool:
        """Whether enough peers outside the stage hold its gradient of t; if not, more are asked to.
        sources: replicas that have it."""
        if not self.wanted:
            return True
        if t != self._t:
            self._t, self._ordered, self._again_at = t, {}, math.inf
        membership, now = self.core.membership, self.core.now
        held = [p for p in self.holders(stage, t, digest) if membership.stage_of(p) != stage]
        willing = [p for p in candidates(membership, stage) if self.core.reachable(p)]
        wanted = min(self.core.settings.snapshot_copies, len({*willing, *held}))
        ordered = self._ordered.setdefault(stage, {})
        if len(held) >= wanted:
            return True
        asked = [p for p in willing if p not in held and now < ordered.get(p, -math.inf) + ORDER_AGAIN_S]
        load = Counter(peer for orders in self._ordered.values() for peer in orders)
        while len(held) + len(asked) < wanted:
            rest = [p for p in willing if p not in held and p not in asked]
            fresh = [p for p in rest if p not in ordered] or rest
            peer = choose(membership, stage, fresh, held + asked, load)
            asked.append(peer)
            ordered[peer] = now
            load[peer] += 1
            self.core.send(peer, KeepGradient(stage, t, digest, tuple(sources[:SOURCES_NAMED])))
        self._again_at = min([self._again_at, *(ordered[peer] + ORDER_AGAIN_S for peer in asked)])
        return False

    def holders(self, stage: int, t: int, digest: str) -> list[str]:
        """Members that hold the gradient of the step."""
        members = self.core.membership.members
        held = self.keeping.gradients
        return sorted(p for p in members if held.get(p, {}).get((stage, t)) == digest)

    def point(self, stage: int, t: int) -> Point | None:
        """The last point from which kept gradients bring the stage to the state after t."""
        if not self.wanted:
            return None
        for start in sorted(self.keeping.points, reverse=True):
            if start <= t and self.keeping.has(start, stage) and self._keepers(stage, start, t) is not None:
                return self.keeping.points[start]
        return None

    def steps(self, stage: int, start: int, t: int) -> list[Steps]:
        """What a peer has to know that brings the stage from the state after `start` to that after t."""
        return self.core.taken.tell(stage, start, t, self._keepers(stage, start, t) or ())

    def _keepers(self, stage: int, start: int, t: int) -> list[str] | None:
        """Who holds the gradients of the steps after `start`; None if one of them is held by nobody."""
        steps = self.core.taken.since(start, t)
        if steps is None:
            return None
        keepers: set[str] = set()
        for step in steps:
            if step.verdict == "skip":
                continue
            holders = self.holders(stage, step.t, step.stages[stage].digest)
            if not holders:
                return None
            keepers.update(holders)
        return sorted(keepers)

    def deadline(self) -> float:
        """When what was ordered is due."""
        return self._again_at if self._again_at > self.core.now else math.inf
