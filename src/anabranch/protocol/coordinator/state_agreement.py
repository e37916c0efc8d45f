"""Agreement on the states after the last step: replicas' fingerprints are compared, and the step is released
(peers may free what they kept for it) once enough replicas of every stage reported the same (R9, R11)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.round import LogTip, Round
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.messages import Applied, Release
from anabranch.protocol.recovery.snapshot_catalog import SnapshotCatalog
from anabranch.protocol.recovery.stage_recovery import StageRecovery

#: Number of iterations whose agreed fingerprints are remembered, for joiners whose download took long.
AGREED_KEPT = 1024
#: Stalls of the open step after which a replica is removed that does not report its state: one that works on
#: that state, and any other. Plain choices: reports are repeated several times meanwhile; each stall takes
#: twice as long as the one before, the last of them several minutes or thirty steps.
WITHHELD_STALLS, AWAITED_STALLS = 3, 6
#: Stalls of a replica in former steps that a step without one forgives. A plain choice: a replica that has
#: every fourth step stall keeps its seat. Stalls of each step that do not count in later ones for a replica
#: that may not have applied the last step yet, as it claims nothing of the open one: an honest one takes
#: several times as long now and then.
FORGIVEN, UNCOUNTED = 0.25, 2


@dataclass(eq=False)
class StateAgreement:
    """Agreement on the states after the last step, at the leader, and its release. t: last released step.
    applied: stage -> peer -> fingerprint of its state after the last step, as reported.

    Only replicas that serve decide which fingerprint is agreed, by majority: one report never overrides one
    other, and a few that lie never override more that do not, whichever of them are standbys.
    """

    ctx: PeerContext
    tip: LogTip
    admission: Admission
    catalog: SnapshotCatalog
    stage_recovery: StageRecovery
    t: int = 0
    applied: dict[int, dict[str, str]] = field(default_factory=dict)
    unopened: Round | None = None
    """Round that counts the stalls of the last step's release while no step is open."""
    _unchecked: dict[tuple[str, int], None] = field(default_factory=dict)
    """(peer, stage) of reports that are not compared with the agreed fingerprint yet."""
    _agreed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Iteration -> agreed fingerprint of each stage."""
    _held: dict[str, float] = field(default_factory=dict)
    """Replica -> stalls of this step and former ones in which the release waited for its report, less those
    forgiven."""
    _stalls: tuple[int, int] = (-1, 0)
    """Step whose stalls are counted in `_held`, and their number."""
    _holding: set[str] = field(default_factory=set)
    """Replicas for which these were counted."""

    @property
    def last(self) -> bool:
        """True if the last step is released."""
        return self.t >= self.tip.t

    def begin(self, t: int, fingerprints: tuple[str, ...]) -> None:
        """Start at step t, when this peer begins to lead or the log went back. fingerprints: agreed state
        hashes of all stages; empty if they are not known, then step t is yet to be released (unless it is
        0)."""
        self._agreed = {t: fingerprints} if fingerprints else {}
        self.t = t if fingerprints or t == 0 else t - 1

    def committed(self) -> None:
        """Drop the reports about the step before, because a new step was committed."""
        self.applied = {}

    def removed(self, peer: str) -> None:
        self._held.pop(peer, None)
        for applied in self.applied.values():
            applied.pop(peer, None)

    def on_applied(self, peer: str, message: Applied) -> None:
        if message.fence.t != self.tip.t or message.fence.base != self.tip.base:
            if self.fingerprint_at(message.fence.t, message.stage) == message.fingerprint:
                self.admission.absent.has(peer, message.fence.t)
            return
        if self.ctx.run.membership.stage_of(peer) == message.stage:
            self.applied.setdefault(message.stage, {})[peer] = message.fingerprint
            self.admission.ways.told(peer, message.links)
            self._unchecked[peer, message.stage] = None
            self.admission.absent.back(peer)
            self.stage_recovery.forget(peer)

    def has_last(self, peer: str) -> bool:
        """True if `peer` has the state after the last step, as it reported that, or made a claim of the open
        iteration: an honest replica makes its first one once it has applied the last step, in a delayed
        iteration too. False for one that is no member."""
        stage = self.ctx.run.membership.stage_of(peer)
        if stage is None:
            return False
        claims = self.tip.round.claims.get(stage, {}) if self.tip.round is not None else {}
        return peer in self.applied.get(stage, {}) or peer in claims

    def release(self) -> None:
        """Release the last step if it is not released yet and the state after it is agreed at every stage, by
        at least two reports (one at a stage of one replica) and a majority (`_majority`): enter the
        fingerprints in the tip and the catalog of snapshots, and tell all members. Else nothing."""
        if self.last:
            return
        agreed = []
        for stage in range(self.ctx.run.settings.stages + 1):
            fingerprint = self._decided(stage)
            if fingerprint is None:
                return
            agreed.append(fingerprint)
        self.tip.fingerprints = tuple(agreed)
        self._agreed[self.tip.t] = self.tip.fingerprints
        self._agreed.pop(self.tip.t - AGREED_KEPT, None)
        self.catalog.released(self.tip.t, self.tip.fingerprints, self.tip.adam_step)
        self.t = self.tip.t
        self._forgive()
        fence = self.ctx.fence(self.tip.t, self.tip.base)
        for peer in list(self.ctx.run.membership.members):
            self.ctx.outbox.send(peer, Release(fence))

    def lacks(self, stage: int) -> bool:
        """True if the last step is not released, and reports of this stage do not agree on a fingerprint
        yet."""
        return not self.last and self._decided(stage) is None

    def _decided(self, stage: int) -> str | None:
        """Fingerprint of a stage's state after the last step on which enough reports agree; None: not yet."""
        live, applied = self._reported(stage)
        if not live or len(applied) < min(2, len(live)):
            return None
        return self._majority(live, applied)

    def _reported(self, stage: int) -> tuple[list[str], dict[str, str]]:
        """Electorate of `stage`, the replicas that may decide its fingerprint ([] if nobody serves), and the
        fingerprints that they reported. They served in the last step; if those died after the commit, the
        replicas that serve from the next iteration on decide. If those that served contradict each other
        without a majority, replicas that serve from a later iteration on count as well once they report: they
        took the step from an agreed state."""
        membership, reported = self.ctx.run.membership, self.applied.get(stage, {})
        live = membership.live(stage, self.tip.t) or membership.live(stage, self.tip.t + 1)
        applied = {peer: reported[peer] for peer in live if peer in reported}
        if len(set(applied.values())) > 1 and len(applied) == len(live) and not self._majority(live, applied):
            later = [peer for peer in sorted(reported) if peer in membership.active_from and peer not in live]
            live = [*live, *later]
            applied.update((peer, reported[peer]) for peer in later)
        return live, applied

    def _majority(self, live: list[str], applied: Mapping[str, str]) -> str | None:
        """Fingerprint that a stage's electorate `live` decided on; None: there is none yet. applied: peer ->
        fingerprint.

        More than half of those that are heard decide. If these cannot any more, more than half of those that
        work decide: so standbys, which get the gradient later, are waited for only where they could outvote
        the others. One that works alone decides nothing.
        """
        absent = self.admission.absent
        working, heard = absent.jury(live), absent.heard(live)
        votes = Counter(applied[peer] for peer in heard if peer in applied)
        for fingerprint, count in votes.items():
            if 2 * count > len(heard):
                return fingerprint
        unknown = len(heard) - votes.total()
        for fingerprint, count in Counter(applied[peer] for peer in working if peer in applied).items():
            most_other = max((n for other, n in votes.items() if other != fingerprint), default=0) + unknown
            if len(working) > 1 and 2 * count > len(working) and 2 * most_other <= len(heard):
                return fingerprint
        return None

    def disputed(self) -> tuple[int, list[str]] | None:
        """Disputed stage and its replicas: all reported, not all the same, and no fingerprint has a majority.
        None: no dispute, or the last step is released already."""
        if self.last:
            return None
        for stage in range(self.ctx.run.settings.stages + 1):
            live, applied = self._reported(stage)
            differ = len(set(applied.values())) > 1  # else those that agree may not be heard any more
            if differ and len(applied) == len(live) and self._majority(live, applied) is None:
                return stage, live
        return None

    def withheld(self, current: Round) -> dict[str, str]:
        """Replicas whose missing report of their state blocks the release of the last step -> reason to
        remove them, for the caller to do. Each stall of the open step `current` counts once, however often
        this is called. Empty if the last step is released, or nothing has stalled.

        A replica that claimed units of the open step has applied the last one, and an honest one repeats its
        report: it is named after WITHHELD_STALLS stalls of the step, or tries of its stage's reduce. Any
        other may still be fetching the state: it is named after AWAITED_STALLS, and then has to fetch it as a
        joiner, for which the run does not wait. While no replica of the stage has reported, those included
        that serve only from the next iteration on, a replica is named only if it claimed such units and there
        is a snapshot to go back to, or if another one says that it cannot get the state: the log goes back
        for a stage only once all its replicas say so. Where others serve, a replica's stalls of former steps
        count, too (`_held`): it could have each step stall twice.
        """
        if self.last or not max(current.stalls, *current.retries.values(), 0):
            return {}
        found, again = {}, self._stalled(current)
        for stage in range(self.ctx.run.settings.stages + 1):
            live, applied = self._reported(stage)
            silent = [peer for peer in live if peer not in applied and peer != self.ctx.me]
            enough = len(applied) >= min(2, len(live))
            later = self.ctx.run.membership.live(stage, self.tip.t + 1)
            claims = current.claims.get(stage, {})
            if self.applied.get(stage, {}).keys().isdisjoint((*live, *later)):
                lacking = self.stage_recovery.states.lacking(live, self.tip.t)
                point = self.catalog.newest(self.tip.t)
                others = [peer for peer in silent if lacking and peer not in lacking]
                silent = [peer for peer in silent if claims.get(peer)] if point is not None else []
                silent += [peer for peer in others if peer not in silent]
            if enough and self._majority(live, applied) is not None:
                continue
            fetching = self.stage_recovery.witnesses.fetching(stage, self.tip.t)
            for peer in (peer for peer in silent if claims.get(peer) or peer not in fetching):
                if again and len(live) > 1 and (claims.get(peer) or current.stalls > UNCOUNTED):
                    self._held[peer] = self._held.get(peer, 0.0) + 1.0
                    self._holding.add(peer)
                tried = current.retries.get(stage, 0) if claims.get(peer) else 0
                held = self._held.get(peer, 0.0) if current.stalls else 0.0
                waits = max(float(max(current.stalls, tried)), held)
                if waits >= (WITHHELD_STALLS if claims.get(peer) else AWAITED_STALLS):
                    found[peer] = f"the run waits for its report of its state after iteration {self.tip.t}"
        return found

    def _stalled(self, current: Round) -> bool:
        """True if the open step has stalled again since the last call."""
        if self._stalls[0] != current.t:
            self._stalls, self._holding = (current.t, 0), set()
        again = current.stalls > self._stalls[1]
        self._stalls = current.t, current.stalls
        return again

    def _forgive(self) -> None:
        """Take FORGIVEN of a stall from the count (`_held`) of each replica for whose report the step just
        released did not stall."""
        held = ((peer, count - FORGIVEN * (peer not in self._holding)) for peer, count in self._held.items())
        self._held, self._holding = {peer: count for peer, count in held if count > 0.0}, set()

    def check_parity(self) -> None:
        """Once the last step is released, remove replicas that reported another state after it than the one
        agreed then: all replicas of a stage are equal to the bit (I2). They have to join again; the second
        time within an hour they are expelled, unless machines of any numerics class are admitted, where an
        honest one may differ. Each report is looked at once; before the release nothing happens."""
        if not self.last:
            return
        unchecked, self._unchecked = self._unchecked, {}
        for peer, stage in unchecked:
            fingerprint = self.applied.get(stage, {}).get(peer)
            if fingerprint is not None and fingerprint != self.tip.fingerprints[stage]:
                reason = f"state after iteration {self.tip.t} differs from its stage's"
                mixed = self.ctx.run.settings.numerics == "mixed"
                (self.admission.remove if mixed else self.admission.remove_idle)(peer, reason)

    def fingerprint_at(self, t: int, stage: int) -> str | None:
        """Agreed fingerprint of a stage after iteration `t`; None if not known."""
        agreed = self._agreed.get(t)
        return None if agreed is None or stage >= len(agreed) else agreed[stage]
