"""Units that two replicas of a stage claim: who gave a microbatch back to its owner at the stage before owns
it (R6, R7).

A claim is the word of one peer. The peer that sent a microbatch on knows who gave it back, so no single relay
gets the work of others by claiming it. Its word counts for microbatches that it owns itself, as the stage
before it says in turn; the first link of this chain is the log, which says what each data node begins. So two
liars of adjacent stages get no more than what the first of them computed. Stage 0 follows the last stage: its
heads are given back to that one, and embeddings belong to the data node that the log names. Nobody is asked
while no two claims name one unit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.interface.tasks import embed_unit, head_unit
from anabranch.protocol.messages import Attempt, Claim, Missing

#: Iterations after a double claim in which a stage's claims need the word of the stage before from the start:
#: a liar that claims everything at once would else have a reduce ordered before others claim. Plain choice.
WATCHED = 8
#: Doubted iterations running in which at least half of what a peer claims was the work of others, and had
#: not been sent to it, after which it is removed. Plain choice.
FALSE_CLAIMS = 3


class DoubleClaims:
    """Claims of the open round that name a unit twice, as the leader settles them, and how often each peer
    claimed the work of others."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self._watched: dict[int, int] = {}
        """Stage -> last iteration in which its claims are doubted from the start."""
        self._false: dict[str, int] = {}
        """Peer -> iterations running with false claims, of those in which its stage was doubted."""

    def entered(self, current: Round, peer: str, message: Claim, fresh: bool, doubled: bool) -> None:
        """Look at the claim `message` of `peer`, which was just entered in `current.claims`. If another peer
        of its stage claims one of the same units, the stage's claims are doubted in this iteration and the
        next WATCHED ones, and the peers of the stage before that have claimed are asked to whom they sent
        their microbatches. What the claim itself says of that (`holders`) is kept in `current.holders`.
        fresh: True if it claims units for the first time. doubled: True if another peer claims one of
        these."""
        stage, after = message.stage, self._after(message.stage)
        if fresh:
            if doubled:
                self._watched[stage] = current.t + WATCHED
            if current.t <= self._watched.get(stage, 0) and stage not in current.doubted:
                current.doubted[stage] = True
                for other in current.claims.get(self._before(stage), {}):
                    self._ask(current, other)
        known = current.holders.setdefault(after, {})
        if message.holders and known.get(peer) != message.holders:
            known[peer] = message.holders
        elif fresh and not message.holders and after in current.doubted:
            self._ask(current, peer)
        elif not fresh:
            return
        for each in current.doubted:  # the chain of words may say more now
            current.reported[each] = current.reported.get(each, 0) + 1

    def _after(self, stage: int) -> int:
        return stage + 1 if stage < self.ctx.run.settings.stages else 0

    def _before(self, stage: int) -> int:
        return stage - 1 if stage else self.ctx.run.settings.stages

    def _ask(self, current: Round, peer: str) -> None:
        """Ask a peer to whom it sent its microbatches, unless it was asked in this round: all its later
        claims say so."""
        if peer not in current.asked:
            current.asked.add(peer)
            self.repeat(current, peer)

    def repeat(self, current: Round, peer: str) -> None:
        """Send `peer`, whose link came up, the question to whom it sent its microbatches (an empty
        `Missing`), if it was asked that in this round; else nothing."""
        if peer in current.asked:
            self.ctx.outbox.send(peer, Missing(self.ctx.fence(current.t, current.base), {}))

    def named(self, current: Round, stage: int) -> Mapping[int, Collection[str]]:
        """Each unit of a stage -> the peers that gave it back to the peer of the stage before from which they
        got it, by the word of that one, if it owns the microbatch itself; for an embedding the data node that
        the log names. Only for a stage that is or was doubted in this round; empty for any other. A unit of
        which nobody says that is missing. Several peers stand at a unit where several claim to own the
        microbatch at the stage before."""
        found = dict[int, set[str]]()
        if stage not in current.doubted:
            return found
        before, begins = self._before(stage), self.ctx.run.split(current.t).holder
        if not stage:
            found = {embed_unit(index): {peer} for index, peer in begins.items()}
        owners = self.named(current, before) if before else {}
        certain = not before or current.doubted.get(before, False)
        for witness, holders in current.holders.get(stage, {}).items():
            own = self._own(current, before, witness, begins)
            for peer, (given, _) in holders.items():
                for index in own.intersection(given):
                    if witness in owners.get(index, () if before and certain else (witness,)):
                        found.setdefault(_unit(stage, index), set()).add(peer)
        return found

    def _own(self, current: Round, stage: int, peer: str, begins: Mapping[int, str]) -> frozenset[int]:
        """Microbatches that the relay `peer` of `stage` claims, or at stage 0 those that the log has the data
        node `peer` begin. begins: microbatch -> data node. Empty if it has none."""
        if stage:
            return current.claims.get(stage, {}).get(peer, frozenset())
        return frozenset(index for index, begun_by in begins.items() if begun_by == peer)

    def awaits(
        self,
        current: Round,
        stage: int,
        cover: frozenset[int],
        claims: Mapping[str, frozenset[int]],
        here: Collection[str],
    ) -> bool:
        """True if a stage's reduce has to wait because its claims are doubted: of some unit in `cover` nobody
        is known to have given it back, or those that did are present and have not claimed it. claims: of the
        members that are present (`here`). False where no claim is doubted, or the step has stalled since
        (`stalled`)."""
        if not current.doubted.get(stage):
            return False
        named = self.named(current, stage)
        for unit in cover:
            present = [peer for peer in named.get(unit, ()) if peer in here]
            if unit not in named or (present and all(unit not in claims.get(peer, ()) for peer in present)):
                return True
        return False

    def wrong(self, current: Round, attempt: Attempt) -> bool:
        """True if an attempt counts a microbatch as one peer's, although others gave it back (`named`) and
        one of these, a member too, claims it. The caller then gives the attempt up.

        Each microbatch gives True only once in an iteration: a peer of the stage before could else name one
        peer after the other, and no attempt would end.
        """
        stage = attempt.stage
        claims, overruled = current.claims.get(stage, {}), current.overruled.setdefault(stage, set())
        found = set[int]()
        for unit, givers in self.named(current, stage).items():
            owner = attempt.owners[unit] if unit < len(attempt.owners) else -1
            if owner < 0 or attempt.members[owner] in givers:
                continue
            if any(peer in attempt.members and unit in claims.get(peer, ()) for peer in givers):
                found.add(unit)
        new = not found <= overruled
        overruled |= found
        return new

    def stalled(self, current: Round, stage: int) -> None:
        """Doubt a stage no more in this round, once the step has stalled: its claims count as they are, as
        the peer that could say whose the units are may be gone, or lie. Nothing for a stage that is not
        doubted."""
        if current.doubted.get(stage):
            current.doubted[stage] = False
            current.looked.pop(stage, None)

    def false_claims(self, current: Round) -> dict[str, str]:
        """Peers other than this one that claimed the work of others in FALSE_CLAIMS iterations running ->
        reason to remove them. To be called once for each step that was taken, as it counts: an iteration
        counts for a peer if at least half of its claimed units were another's, and no peer of the stage
        before says to have sent them to it; each is noted. An iteration in which the peer's stage was doubted
        without that ends its count; one in which the stage was not doubted does not.

        The witnesses who say whose the work was must be more than half of the stage before, and at least two
        relays, or the log: fewer could send an honest peer their work, and say that an accomplice gave it
        back. If a peer of the stage before says that it sent the work to the peer, and claims that microbatch
        too, it excuses the peer.
        """
        found: dict[str, str] = {}
        for stage in current.doubted:
            attempt, named = current.attempts.get(stage), self.named(current, stage)
            if attempt is None:
                continue
            before, begins = self._before(stage), self.ctx.run.split(current.t).holder
            said = current.holders.get(stage, {})
            own = {witness: self._own(current, before, witness, begins) for witness in said}
            gave = {
                witness: {_unit(stage, k) for each, _ in holders.values() for k in own[witness] & {*each}}
                for witness, holders in said.items()
            }
            needed = max(2 if before else 1, 1 + self.ctx.run.membership.count(before, current.t) // 2)
            for peer, units in current.claims.get(stage, {}).items():
                false = {unit for unit in units if self._others(attempt, unit, named, peer)}
                for witness, holders in said.items():
                    sent = own[witness].intersection(frozenset().union(*holders.get(peer, ())))
                    false.difference_update(_unit(stage, index) for index in sent)
                by = [witness for witness, given in gave.items() if not false.isdisjoint(given)]
                logged = not stage and any(unit % 2 for unit in false)
                if not false or 2 * len(false) < len(units) or (len(by) < needed and not logged):
                    self._false.pop(peer, None)
                    continue
                self._false[peer] = count = self._false.get(peer, 0) + 1
                text = f"{peer[:8]} claimed {len(false)} microbatches of iteration {current.t}"
                self.ctx.outbox.note("note", text=f"{text} that others computed; it was not sent them")
                if count >= FALSE_CLAIMS and peer != self.ctx.me:
                    found[peer] = f"it claimed the work of others in {count} iterations running"
        return found

    @staticmethod
    def _others(
        attempt: Attempt, unit: int, named: Mapping[int, Collection[str]], peer: str
    ) -> bool:
        """True if the attempt counts `unit` as the work of another member than `peer`, and that one gave it
        back. named: unit -> peers that gave it back."""
        owner = attempt.owners[unit] if unit < len(attempt.owners) else -1
        return owner >= 0 and attempt.members[owner] != peer and attempt.members[owner] in named.get(unit, ())


def _unit(stage: int, index: int) -> int:
    """Number of the unit that a peer of `stage` claims for a microbatch whose gradient it gave back to the
    stage before: at stage 0 that of the head part."""
    return index if stage else head_unit(index)
