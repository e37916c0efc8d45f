"""Proofs that a joiner has its stage's state (R14): a hash of the state, keyed by a log entry, that serving
replicas report and the joiner must report, too."""

from __future__ import annotations

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.messages import Vouch

#: Iterations whose proofs are remembered: a joiner reports the state that it has, which may be a few steps
#: old. Plain choice.
VOUCHED_KEPT = 16


class Vouchers:
    """Proofs of the stages' states after the last iterations, from each replica that reported one."""

    def __init__(self, ctx: PeerContext) -> None:
        self.ctx = ctx
        self._bases: dict[int, str] = {}
        self._proofs: dict[tuple[int, int], dict[str, str]] = {}
        """(iteration, stage) -> replica -> proof."""
        self._void: set[str] = set()
        """Proofs that the last return of the log made void, as the entries that key them count no longer."""

    def moved(self, t: int, base: str) -> None:
        """Note that the log stands at iteration t, whose entry has the hash `base`; drop proofs of much
        earlier iterations, and of t and later ones (after a rollback)."""
        void = {proof for key, proofs in self._proofs.items() if key[0] >= t for proof in proofs.values()}
        self._void = void or self._void
        kept = range(t - VOUCHED_KEPT, t)
        self._bases = {k: known for k, known in self._bases.items() if k in kept} | {t: base}
        self._proofs = {key: proofs for key, proofs in self._proofs.items() if key[0] in kept}

    def on_vouch(self, peer: str, message: Vouch) -> str | None:
        """Enter a replica's proof of its state; returns the reason if it is refused."""
        t, stage, membership = message.fence.t, message.stage, self.ctx.run.membership
        if not (membership.is_live(peer, stage, t) or membership.is_live(peer, stage, t + 1)):
            return "it does not serve the stage for which it vouches"
        if self._bases.get(t) == message.fence.base:
            self._proofs.setdefault((t, stage), {})[peer] = message.proof
        return None

    def proves(self, t: int, stage: int, proof: str) -> bool | None:
        """True if a joiner's `proof` shows that it has the stage's state after iteration t: a serving replica
        reported the same one, or none is needed, since no serving replica can be reached or the state is the
        initial one. False if more than half of those that can be reached reported, all of them others; None:
        not known yet, or the proof is from before a rollback, after which the joiner gives another one."""
        ctx = self.ctx
        serving = [p for p in ctx.run.membership.serving(stage) if p == ctx.me or ctx.reachable(p)]
        proofs = self._proofs.get((t, stage), {})
        if t == 0 or not serving or proof in proofs.values():
            return True
        if proof in self._void:
            return None
        return False if 2 * len(proofs.keys() & set(serving)) > len(serving) else None
