"""Proofs that a joiner has its stage's state (R14): a hash of the state, keyed by a log entry, that serving
replicas report and the joiner must report, too."""

from __future__ import annotations

import math
from collections.abc import Callable

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.messages import Vouch
from anabranch.protocol.reduce.step_apply import PENDING_MAX

#: Steps, and time (s), within which a linked joiner that reports itself ready must show the proof of its
#: state. Choices: an honest one shows it within a few steps, and fetches a newer state after `PENDING_MAX`
#: (64); a step may take less time than a report.
SHOWN_WITHIN, SHOWN_WITHIN_S = 64, 300.0
#: Steps by which the state that a joiner reports may be older than the log as far as it has followed that. A
#: choice: an honest joiner fetches a newer state once more than `PENDING_MAX` steps wait for it, and some may
#: come while it takes one.
OLDEST = 2 * PENDING_MAX
#: Iterations whose proofs are remembered: any state that is not too old can be proved. A joiner with a slow
#: line has one that is dozens of steps old, and would fetch the next one in vain, too.
VOUCHED_KEPT = OLDEST
#: Time (s) that a joiner that never showed a proof keeps its waiting seat. A choice: in a day a line of 1
#: Mbit/s brings 10 GB; replicas prove their states at each step while somebody waits.
SEATED_S = 86400.0


class Vouchers:
    """Proofs of the stages' states after the last iterations, from each replica that reported one, and
    joiners that have not shown one yet, with how long they have had for it. log_length: function that returns
    the number of entries in this peer's log.

    `Ready` does not name the log entry that keys its proof. A joiner that has not followed a return of the
    log yet uses the former entry; how far it has followed the log is known from its heartbeats.
    """

    def __init__(self, ctx: PeerContext, log_length: Callable[[], int]) -> None:
        self.ctx = ctx
        self._log_length = log_length
        self._bases: dict[int, str] = {}
        self._lengths: dict[int, int] = {}
        """Iteration -> log length after its entry, at least."""
        self._followed: dict[str, int] = {}
        """Member that does not serve -> length of its log at its last heartbeat."""
        self._reported_at: dict[str, int] = {}
        """Joiner -> length of its log when it sent its last `Ready`, at least."""
        self._claimed: dict[str, tuple[int, float]] = {}
        """Joiner whose reports have shown no proof -> iteration after which it made the first one, and time
        (s)."""
        self._seated: dict[str, float] = {}
        """Joiner -> time (s) at which it was first seen; infinite once it showed a proof."""
        self._t = 0
        """Last committed iteration."""
        self._proofs: dict[tuple[int, int], dict[str, str]] = {}
        """(iteration, stage) -> replica -> proof."""

    def moved(self, t: int, base: str) -> None:
        """Note that the log stands at iteration t, whose entry has the hash `base`; drop proofs of much
        earlier iterations, and of t and later ones (after a rollback)."""
        self._t, kept = t, range(t - VOUCHED_KEPT, t)
        self._bases = {k: known for k, known in self._bases.items() if k in kept} | {t: base}
        length = self._log_length()
        self._lengths = {k: known for k, known in self._lengths.items() if k in kept} | {t: length}
        self._proofs = {key: proofs for key, proofs in self._proofs.items() if key[0] in kept}

    def followed(self, peer: str, length: int) -> None:
        """Note the length of a joiner's log, in entries, from its heartbeat; nothing for a peer that serves,
        or is no member."""
        membership = self.ctx.run.membership
        if peer in membership.members and peer not in membership.active_from:
            self._followed[peer] = length

    def on_ready(self, peer: str) -> None:
        """Note that a joiner's `Ready` came now: how far it had followed the log then, and with the first one
        that its time to show a proof begins (`overdue`)."""
        self._reported_at[peer] = self._followed.get(peer, 0)
        if peer not in self.ctx.run.membership.active_from:
            self._claimed.setdefault(peer, (self._t, self.ctx.clock.now))

    def shown(self, peer: str) -> None:
        """Note that a joiner showed the proof of its state: it is not `overdue`, until it reports itself
        ready again."""
        self._claimed.pop(peer, None)
        self._seated[peer] = math.inf

    def overdue(self) -> dict[str, str]:
        """Joiners that have shown no proof for too long -> reason to remove them. Those that report
        themselves ready have SHOWN_WITHIN steps and SHOWN_WITHIN_S seconds: they report states of which
        nobody can vouch any more, or claim that they have not followed the log. For a joiner out of reach
        this time begins anew. Every joiner that never showed a proof has SEATED_S, counted from the first
        call that sees it."""
        now, membership = self.ctx.clock.now, self.ctx.run.membership
        waiting = membership.members.keys() - membership.active_from.keys() - membership.auditors.keys()
        self._seated = {peer: self._seated.get(peer, now) for peer in sorted(waiting)}
        found = {
            peer: "it has not shown within a day that it has its stage's state"
            for peer, since in self._seated.items()
            if now >= since + SEATED_S
        }
        for peer in filter(lambda peer: not self.ctx.reachable(peer), self._claimed):
            self._claimed[peer] = self._t, now
        for peer, (t, since) in self._claimed.items():
            if self._t >= t + SHOWN_WITHIN and now >= since + SHOWN_WITHIN_S:
                found[peer] = "it reports itself ready, and has not shown that it has the state"
        return found

    def too_old(self, peer: str, t: int) -> bool:
        """True if a joiner's last `Ready` was of a state (after iteration t) too old to be proved: OLDEST
        steps older than the log as far as the joiner had followed it then. Nobody vouches for such a state
        any more, while an honest joiner would have fetched a newer one. False for a peer that serves."""
        if peer in self.ctx.run.membership.active_from:
            return False
        reported_at = self._reported_at.get(peer, 0)
        followed = [k for k, length in self._lengths.items() if length <= reported_at]
        return t + OLDEST < max(followed, default=0)

    def gone(self, peer: str) -> None:
        """Forget a joiner that serves now, or that was removed."""
        self._followed.pop(peer, None)
        self._reported_at.pop(peer, None)
        self._claimed.pop(peer, None)
        self._seated.pop(peer, None)

    def outdated(self, peer: str, t: int) -> bool:
        """True if the joiner's last `Ready` may be from before it knew the log entry of iteration t, so that
        the state and the proof in it may be those of another entry; the joiner repeats its report. False if
        this peer remembers no such iteration."""
        return self._reported_at.get(peer, 0) < self._lengths.get(t, 0)

    def on_vouch(self, peer: str, message: Vouch) -> str | None:
        """Enter a replica's proof of its state, if this peer knows the same log entry of that iteration (else
        it is ignored: too old, too new, or rolled back). That of a replica which serves from a later
        iteration is ignored, too, and that of one which served the stage until the open iteration: it may
        not have heard yet that it was moved or removed. Returns why it is refused, or None."""
        t, stage, membership = message.fence.t, message.stage, self.ctx.run.membership
        if membership.gone.get(peer, (-1, ""))[0] == stage != membership.stage_of(peer):
            return None
        if membership.stage_of(peer) != stage or peer not in membership.active_from:
            return "it does not serve the stage for which it vouches"
        if membership.is_live(peer, stage, t + 1) and self._bases.get(t) == message.fence.base:
            self._proofs.setdefault((t, stage), {})[peer] = message.proof
        return None

    def proves(self, t: int, stage: int, proof: str) -> bool | None:
        """True if a joiner's `proof` shows that it has the stage's state after iteration t: a serving replica
        reported the same one, or none is needed, since no serving replica can be reached or the state is the
        initial one and still the last. False if more than half of those that can be reached reported, all of
        them others; None: not known yet."""
        ctx = self.ctx
        serving = [p for p in ctx.run.membership.serving(stage) if p == ctx.me or ctx.reachable(p)]
        proofs = self._proofs.get((t, stage), {})
        if t == self._t == 0 or not serving or proof in proofs.values():
            return True
        return False if 2 * len(proofs.keys() & set(serving)) > len(serving) else None
