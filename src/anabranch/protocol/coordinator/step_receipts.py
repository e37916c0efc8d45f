"""Receipts of the open iteration at the leader: what signed receipts prove before the step is committed.

A relay is convicted if what it signed proves it a liar (`receipts.contradictions`, `tracing`), or if its
receipt hides a result that it sealed. Audits after the commit are in `audit_cases`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from anabranch.protocol.audit.contribution_monitor import Contribution, FarOff
from anabranch.protocol.audit.receipts import (
    Receipt,
    contradictions,
    inputs_of,
    mismatch,
    mismatches,
    opened,
    receipt_hash,
)
from anabranch.protocol.audit.seals import ACTIVATION
from anabranch.protocol.audit.tracing import DisputedResult, traced
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.convictions import Convictions
from anabranch.protocol.interface.tasks import Moments
from anabranch.protocol.log.records import Dispute
from anabranch.protocol.messages import Attempt, Prepared
from anabranch.protocol.messages.audit import Transfer
from anabranch.protocol.reduce.hierarchy import FLAT
from anabranch.protocol.reduce.partial_sums import PARTS, contributors, witnessed
from anabranch.protocol.reduce.work_receipt import refused_sums

#: Seconds that a relay has to send a receipt that lists what it sealed: PREPARED is repeated every two.
UNLISTED_S = 10.0


@dataclass(eq=False)
class StepReceipts:
    """Receipts that members send with PREPARED reports, and what the commit says of them. Without audits in
    the settings (`on` is False) nothing is checked or kept."""

    ctx: PeerContext
    admission: Admission
    convictions: Convictions
    _far_off: FarOff = field(default_factory=FarOff)
    _ends: dict[str, set[str]] = field(default_factory=dict)
    """Data node whose activation or gradient differed from this peer's -> relays that took part each time."""
    _checked: tuple[object, ...] = ()
    """Inputs of the last comparison of receipts."""

    @property
    def on(self) -> bool:
        return self.ctx.run.settings.audits

    def removed(self, peer: str) -> None:
        """Forget what the contributions of `peer`, which left its stage, were like."""
        self._far_off.removed(peer)

    def rolled_back(self) -> None:
        """Compare receipts and contributions anew, as the log went back."""
        self._far_off, self._checked = FarOff(), ()

    def refused(self, peer: str, message: Prepared, attempt: Attempt, current: Round) -> str | None:
        """Check the receipt of a PREPARED report and keep it in `current`. It must be signed by `peer`, be of
        this attempt, list the parts that `peer` had to sum and the moments of what it added up, and contain
        only seals of peers that served. Returns why it is refused, else None; without audits, or if `peer` is
        no member of `attempt`, nothing is checked or kept."""
        if not self.on or peer not in attempt.members:
            return None
        run, receipt = self.ctx.run, opened(message.receipt, self.ctx.signer)
        if receipt is None:
            return "PREPARED without a receipt that it signed"
        if wrong := mismatch(receipt, peer, attempt, run.settings.run, run.settings.stages):
            return wrong
        if wrong := refused_sums(receipt, attempt, FLAT * run.settings.neighbours):
            return wrong
        if message.moments and (not receipt.sums or len(message.moments) != len(receipt.sums[0].inputs)):
            return "moments of other contributions than it added up"
        came = [part for unit in receipt.units for part in (unit.activation_in, unit.gradient_in)]
        came += [part for other in receipt.others for _, part in inputs_of(other)]
        came += [end.came for end in receipt.ends]
        if any(not self._served(current, part) for part in came):
            return "a receipt with the seal of a peer that did not serve"
        current.receipts.setdefault(attempt.stage, {})[peer] = receipt
        return None

    def later_receipt(self, peer: str, message: Prepared, attempt: Attempt, current: Round) -> str | None:
        """Take the receipt of a repeated PREPARED report in place of the first one's, if it lists more
        results beside its own units. `peer` must have reported before (KeyError else). Returns why it is
        refused; None if it is taken, or ignored: without audits, if it is the same, lists no more, or is not
        signed."""
        before = current.prepared[attempt.stage][peer]
        if not self.on or message.receipt == before.receipt:
            return None
        listed = len(current.receipts[attempt.stage][peer].others)
        receipt = opened(message.receipt, self.ctx.signer)
        if receipt is None or len(receipt.others) <= listed:
            return None
        if wrong := self.refused(peer, message, attempt, current):
            return wrong
        current.prepared[attempt.stage][peer] = msgspec.structs.replace(before, receipt=message.receipt)
        return None

    def _served(self, current: Round, came: Transfer) -> bool:
        membership = self.ctx.run.membership
        if membership.is_live(came.sender, came.stage, current.t):
            return True
        # A leader that took over in this iteration did not see all who served: some were removed before.
        removed = came.sender in membership.gone_from(came.stage)
        return removed or (came.stage, came.sender) in current.served

    def complete(self, attempt: Attempt, prepared: Mapping[str, Prepared]) -> bool:
        """True if every owner of units in this attempt has reported PREPARED, and so sent its receipt; always
        without audits. An owner that left without a receipt could not be audited: other replicas compute its
        units again. prepared: member -> its report."""
        if not self.on:
            return True
        return all(attempt.members[position] in prepared for position in set(attempt.owners) - {-1})

    def summing(self, stage: int, t: int, owners: tuple[int, ...]) -> tuple[int, ...]:
        """Positions of the members that sum one part each in iteration t. With audits they are at most PARTS
        of the owners of units, other ones in each iteration: only owners have a receipt in the commit, by
        which their sums are audited. owners: position of each unit's owner, -1 for none. () without audits,
        where all members sum, and at stage 0."""
        able = tuple(sorted(set(owners) - {-1}))
        if not self.on or not stage:
            return ()
        first = t * PARTS % len(able) if len(able) > PARTS else 0
        return (*able[first:], *able[:first])[:PARTS]

    def hashes(self, current: Round, attempt: Attempt) -> tuple[str, ...]:
        """For the commit, in the order of the attempt's members: hash of the receipt of each that owns units
        or has a disputed result, "" for any other; () without audits."""
        if not self.on:
            return ()
        prepared, position = current.prepared[attempt.stage], set(attempt.owners)
        position |= {each.position for each in self.disputed(current, attempt)}
        receipts = [
            prepared[peer].receipt if k in position and peer in prepared else b""
            for k, peer in enumerate(attempt.members)
        ]
        return tuple(map(receipt_hash, receipts))

    @staticmethod
    def disputed(current: Round, attempt: Attempt) -> tuple[Dispute, ...]:
        """Disputed results of the attempt's stage, for the commit, as `consistent` left them in `current`; ()
        if there are none. Raises ValueError if a peer that made one is no member of the attempt."""
        return tuple(
            Dispute(attempt.members.index(each.peer), each.index, each.output)
            for each in current.disputed
            if each.stage == attempt.stage
        )

    def far_off(self, current: Round, attempt: Attempt, found: tuple[Moments, ...] = ()) -> int:
        """For the commit, position of the member whose contribution to the attempt's stage is far off the
        others', so that it is audited; it is told as a note. -1: none, as at stage 0, in a round and without
        audits. To be called once, when the step is proposed. found: moments of the contributions, if this
        peer summed all parts; else those count that members report."""
        if not self.on or not attempt.stage or current.slots:
            return -1  # slots of a round differ in length, and their changes with it
        reports = {peer: each.moments for peer, each in current.prepared[attempt.stage].items()}
        contributions = contributions_of(attempt, {self.ctx.me: found} if found else reports)
        peer, reason = self._far_off.choose(current.t, attempt.stage, contributions)
        if not peer:
            return -1
        about = f"the work of {peer[:8]} at stage {attempt.stage} in step {current.t}"
        self.ctx.outbox.note("note", text=f"{about} is audited, as {reason}")
        return attempt.members.index(peer)

    def consistent(self, current: Round) -> bool:
        """True if the step may be committed as far as receipts tell: nothing is audited, all stages' receipts
        agree, or the results that two relays dispute can be computed again after the commit (they are left in
        `current.disputed`), and the step is void later. Else False: a receipt is awaited, a reduce is to be
        repeated (its stage is left in `current.repeat`), or the log has to go back (`Convictions.returns`).
        Peers that contradict themselves are convicted. A second call compares again only if a receipt is
        new."""
        late = self.ctx.clock.now >= current.unlisted_since + UNLISTED_S
        if not self.on or self._checked == (late, *self._state(current)):
            return self._is_settled(current)
        self._checked = late, *self._state(current)
        receipts = [receipt for stage in current.receipts.values() for receipt in stage.values()]
        liars = contradictions(receipts, self.ctx.signer)
        for peer, reason in liars.items():
            self.convictions.convict(peer, f"in iteration {current.t} {reason}", current.t)
        current.disputed, current.unlisted_since = [], math.inf if liars else current.unlisted_since
        if not liars and (apart := unlinked(receipts)):
            reason = f"the receipts of iteration {current.t} contradict each other at {apart}"
            self._trace(receipts, current, late, reason)
        elif not liars:
            current.unlisted_since = math.inf
        return self._is_settled(current)

    def _is_settled(self, current: Round) -> bool:
        return not self.convictions.returns and current.unlisted_since == math.inf and not current.repeat

    def _trace(self, receipts: Sequence[Receipt], current: Round, late: bool, reason: str) -> None:
        """Decide what follows from receipts of one step that contradict each other, by who made the results
        in which the contradictions end. A liar is convicted. Results of two relays that can be computed again
        go into the commit (`current.disputed`). A relay whose receipt is lacking, or does not list what it
        sealed, has UNLISTED_S to send a full one, and the step waits; after that (`late`) one that gave a
        receipt is convicted. For one that gave none the stage's reduce is first repeated once
        (`current.repeat`), so that it gets from this peer the sums that another may withhold; then it loses
        its seat. The log goes back in both cases, and also for everything else: if the results of two data
        nodes differ (the one that is not this peer is expelled where `_differ` says so), or if the relay left
        the stage, when nobody is convicted. reason: why the log goes back."""
        found, t = traced(receipts, self.ctx.signer), current.t
        for peer, liar in found.liars.items():
            self.convictions.convict(peer, f"in iteration {t} {liar}", t)
        if found.liars:
            return
        waits = [key for key in found.unlisted if self.ctx.run.membership.stage_of(key[1]) == key[0]]
        if waits and not late:
            current.unlisted_since = min(current.unlisted_since, self.ctx.clock.now)
            return
        current.unlisted_since = math.inf
        silent = {stage for stage, peer in waits if peer not in current.receipts.get(stage, {})}
        if silent := silent - current.repeated:
            current.repeat |= silent
            current.repeated |= silent
            return
        if found.unlisted:
            for stage, peer in waits:
                self._hid(current, stage, peer, found.unlisted[stage, peer])
            self.convictions.go_back(reason, t)
            self.convictions.settled = True  # the sender is out, or has left
        elif found.disputed and all(self._has_receipt(current, each) for each in found.disputed):
            current.disputed = found.disputed
        else:
            self.convictions.go_back(reason, t)
            for kind, ends in found.apart:
                self._differ(current, kind, ends)

    def _differ(self, current: Round, kind: str, ends: Sequence[tuple[str, str]]) -> None:
        """Expel a data node whose result differs from this peer's own, or that made two different ones. For
        an activation it is expelled at once, as that has no input; for a gradient only when no relay took
        part in all its differences, as such a relay may have lied about the activation that it sent. Nothing
        if the two results are of two data nodes other than this peer. kind: activation or gradient, as seals
        call it. ends: for each of the two results, the data node that made it and the relay that received
        it."""
        others = {node for node, _ in ends} - {self.ctx.me}
        if len(others) > 1:
            return  # nobody can tell which of the two lied
        for peer in others:
            relays = {relay for _, relay in ends}
            self._ends[peer] = self._ends.get(peer, relays) & relays
            if kind == ACTIVATION or not self._ends[peer]:
                self.admission.expel(peer, f"in iteration {current.t} it signed a false {kind}")
                self.convictions.settled = True

    @staticmethod
    def _has_receipt(current: Round, each: DisputedResult) -> bool:
        return each.peer in current.prepared.get(each.stage, {})

    def _hid(self, current: Round, stage: int, peer: str, name: str) -> None:
        """Convict a relay whose receipt does not list an activation or gradient (`name`) that it sealed. A
        relay that gave no receipt is only expelled, if it is reachable and this peer sent it the sums of the
        reduce, else removed without a ban; so is a relay that began to serve with this iteration, which may
        have sealed that in a former process."""
        text = f"in iteration {current.t} it sealed another {name} than its owner, "
        since = self.ctx.run.membership.active_from.get(peer, current.t)
        if peer in current.receipts.get(stage, {}) and since < current.t:
            self.convictions.convict(peer, f"{text}which its receipt does not list", current.t)
        elif self.ctx.reachable(peer) and witnessed(current.attempts[stage], self.ctx.me):
            self.admission.expel(peer, f"{text}and gave no receipt of it")
        else:  # it may be cut off from those that have the sums
            self.admission.remove(peer, f"{text}and gave no receipt of it")

    @staticmethod
    def _state(current: Round) -> tuple[object, ...]:
        counts = tuple(
            (stage, len(each), sum(len(receipt.others) for receipt in each.values()))
            for stage, each in sorted(current.receipts.items())
        )
        return (current.t, current.base, counts, *(a.attempt for a in current.attempts.values()))


def unlinked(receipts: Sequence[Receipt]) -> str:
    """Words that name the first microbatch with two receipts that disagree: a received activation or gradient
    is not the one that the microbatch's owner sent. "" if all agree. receipts: of all stages, of one step."""
    for wrong in mismatches(receipts):
        return f"microbatch {wrong.index} between stages {wrong.came.stage} and {wrong.receiver.stage}"
    return ""


def contributions_of(
    attempt: Attempt, reports: Mapping[str, tuple[Moments, ...]]
) -> dict[str, Contribution]:
    """Contributions to a reduce attempt: owner -> number of its units and the moments (sum of squares, inner
    product with the sum of all contributions) that each peer reports which summed parts, one entry per peer
    however many parts it summed. reports: peer -> moments of all contributions in the order of
    `contributors`, or (). Empty if nobody reports any."""
    by = tuple(sorted(peer for peer, moments in reports.items() if moments))
    if not by:
        return {}
    found = {}
    for rank, position in enumerate(contributors(attempt)):
        squares = tuple(reports[peer][rank][0] for peer in by)
        dots = tuple(reports[peer][rank][1] for peer in by)
        units = attempt.owners.count(position)
        found[attempt.members[position]] = Contribution(units, squares, dots, by)
    return found
