"""Microbatches that two replicas of a relay stage claim: the next stage says whose they are (R6, R7).

A claim is the word of one peer. The replica of the next stage that had a microbatch knows who sent it the
activation, so no single peer gets the work of others by claiming it. Nobody is asked while no two claims name
one microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.messages import Attempt, Claim, Missing

#: Iterations after a double claim in which a stage's claims need the word of the next stage from the start: a
#: liar that claims everything at once would else have a reduce ordered before others claim. Plain choice.
WATCHED = 8
#: Iterations running in which at least half of what a peer claims was the work of others, after which it is
#: removed. Plain choice: a microbatch that was sent twice over a broken link makes one of them.
FALSE_CLAIMS = 3


class DoubleClaims:
    """Doubtful claims of the open round at the leader, and the peers that made false ones before."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self._watched: dict[int, int] = {}
        """Stage -> last iteration in which its claims are doubted from the start."""
        self._false: dict[str, int] = {}
        """Peer -> iterations running with false claims."""

    def entered(self, current: Round, peer: str, message: Claim, fresh: frozenset[int]) -> None:
        """Doubt a stage in which two peers claim one microbatch, ask the next stage who sent them, and take
        its answers; called when a claim was entered. fresh: units that it claims for the first time."""
        stage, stages = message.stage, self.ctx.run.settings.stages
        if stage and fresh:
            doubled = any(fresh & units for other, units in current.claims[stage].items() if other != peer)
            if doubled:
                self._watched[stage] = current.t + WATCHED
            if current.t <= self._watched.get(stage, 0) and stage not in current.doubted:
                current.doubted[stage] = True
                for other in current.claims.get(stage + 1 if stage < stages else 0, {}):
                    self._ask(current, other)
        if not (before := stage - 1 if stage else stages):
            return
        if message.senders:
            found = {index: sender for sender, each in message.senders.items() for index in each}
            known = current.senders.setdefault(before, {})
            if known.get(peer) != found:
                known[peer] = found
                current.reported[before] = current.reported.get(before, 0) + 1
        elif fresh and before in current.doubted:
            self._ask(current, peer)

    def _ask(self, current: Round, peer: str) -> None:
        self.ctx.outbox.send(peer, Missing(self.ctx.fence(current.t, current.base), {}))

    def named(self, current: Round, stage: int) -> Mapping[int, Collection[str]]:
        """Microbatch -> peers of a doubted stage that sent it on, as the next stage says; empty for any other
        stage."""
        found = defaultdict[int, set[str]](set)
        if stage in current.doubted:
            for senders in current.senders.get(stage, {}).values():
                for index, peer in senders.items():
                    found[index].add(peer)
        return found

    def awaits(
        self,
        current: Round,
        stage: int,
        cover: frozenset[int],
        claims: Mapping[str, frozenset[int]],
        here: Collection[str],
    ) -> bool:
        """True if a doubted stage has a microbatch that nobody is known to have sent on, or whose sender is
        present and has not claimed it. claims: those of the members that are present (`here`)."""
        if not current.doubted.get(stage):
            return False
        named = self.named(current, stage)
        for unit in cover:
            present = [peer for peer in named.get(unit, ()) if peer in here]
            if unit not in named or (present and all(unit not in claims.get(peer, ()) for peer in present)):
                return True
        return False

    def wrong(self, current: Round, attempt: Attempt) -> bool:
        """True if an attempt gives a microbatch to another than a peer that claims it and sent it on."""
        claims, named = current.claims.get(attempt.stage, {}), self.named(current, attempt.stage)
        for unit, senders in named.items():
            owner = attempt.owners[unit] if unit < len(attempt.owners) else -1
            if owner < 0 or attempt.members[owner] in senders:
                continue
            if any(peer in attempt.members and unit in claims.get(peer, ()) for peer in senders):
                return True
        return False

    def stalled(self, current: Round, stage: int) -> None:
        """Take the claims of a doubted stage as they are, once the step has stalled: the replica that could
        say whose they are may be gone, or lie."""
        if current.doubted.get(stage):
            current.doubted[stage] = False
            current.looked.pop(stage, None)

    def false_claims(self, current: Round) -> dict[str, str]:
        """Count the iterations in which a peer claimed the work of others; called when the step of `current`
        was committed. Returns peers that did so repeatedly -> reason to remove them.

        Not counted where other replicas were told to repeat work.
        """
        found: dict[str, str] = {}
        for stage in current.doubted:
            attempt, named = current.attempts.get(stage), self.named(current, stage)
            if attempt is None or current.redone.get(stage):
                continue
            sent_on = {
                unit: attempt.members[owner]
                for unit, owner in enumerate(attempt.owners)
                if owner >= 0 and attempt.members[owner] in named.get(unit, ())
            }
            for peer, units in current.claims.get(stage, {}).items():
                others = {unit for unit in units if sent_on.get(unit, peer) != peer}
                false = [unit for unit in others if peer not in named[unit]]
                if not false or 2 * len(false) < len(units):
                    self._false.pop(peer, None)
                    continue
                self._false[peer] = count = self._false.get(peer, 0) + 1
                text = f"{peer[:8]} claimed {len(false)} microbatches of iteration {current.t}"
                self.ctx.outbox.note("note", text=f"{text} that others computed; they are not its own")
                if count >= FALSE_CLAIMS and peer != self.ctx.me:
                    found[peer] = f"it claimed the work of others in {count} iterations running"
        return found
