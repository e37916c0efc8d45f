"""Speeds of relays as the leader believes them: what each relay says, within bounds of what it did.

Stages are given to joiners, and relays moved between stages, by the pass times that relays state. One that
called itself a million times as quick as it is seemed to be a stage's worth by itself: no others came to its
stage, and those that were there were moved away, until it was one of two replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

import msgspec

from anabranch.protocol.interface.rounds import MOST_RATE
from anabranch.protocol.log.records import Commit, Member
from anabranch.protocol.placement.rates import BACKWARD_OF_FORWARD, pass_s

#: Times what a relay did in a step up to which its word on its speed counts. A choice: a relay of a stage
#: that waits for others does half of what it could, or less; moves go on after the next steps then. One liar
#: among ten relays costs a tenth of the steps.
MORE = 2.0
#: Share of the work of one step that still counts in the next, if a relay does less: its units vary.
KEPT = 0.8


class ProvenSpeeds:
    """Work that each relay did in the last steps, by which one leader limits the speeds that relays state. A
    new leader limits by it after two steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._done: dict[str, float] = {}
        """Relay -> blocks a second through which it passed microbatches, in the last steps."""

    def committed(self, record: Commit, worked_s: float, blocks: Sequence[int]) -> None:
        """Note who owns what of a synchronous step; nothing if that was skipped. worked_s: seconds in which
        its microbatches were computed; nothing is noted if that is 0. blocks: of each of the stages 1 to S. A
        leader's first step does not count: it may have been computed before this peer led."""
        if record.verdict != "step" or worked_s <= 0.0:
            return
        self._steps += 1
        if self._steps == 1:
            return
        done = Counter[str]()
        for part, count in zip(record.stages[1:], blocks, strict=False):
            for owner in part.owners:
                if owner >= 0:
                    done[part.members[owner]] += count
        kept = {peer: rate * KEPT for peer, rate in self._done.items() if rate * KEPT > 1e-9}
        self._done = kept | {peer: max(units / worked_s, kept.get(peer, 0.0)) for peer, units in done.items()}

    def believed(self, relays: Sequence[Member]) -> list[Member]:
        """The same relays, their pass times brought within limits. No time is more than MOST_RATE times
        shorter or longer than the median of all. Once steps are known, a relay that states a shorter time
        than the median has to have done as much: its time is at least that of MORE times the work that it
        did, or the median if it did none. [] for none."""
        if not relays:
            return []
        said = {relay.id: pass_s(relay, 1) for relay in relays}
        usual_s = median(said.values())
        return [self._bounded(relay, said[relay.id], usual_s) for relay in relays]

    def _bounded(self, relay: Member, said_s: float, usual_s: float) -> Member:
        least_s, most_s = usual_s / MOST_RATE, usual_s * MOST_RATE
        if self._steps > 1:
            done = self._done.get(relay.id, 0.0)
            least_s = max(least_s, min(usual_s, 1.0 / (MORE * done)) if done else usual_s)
        if least_s <= said_s <= most_s:
            return relay
        forward_s = min(max(said_s, least_s), most_s) / (1.0 + BACKWARD_OF_FORWARD)
        return msgspec.structs.replace(
            relay, forward_s=forward_s, backward_s=BACKWARD_OF_FORWARD * forward_s
        )
