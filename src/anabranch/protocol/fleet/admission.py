"""Admission and removal of members: the coordinator's part in membership (R3, R14).

A joiner is admitted to a stage, fetches the stage's state, and reports that it is ready; the log says from
which iteration it serves. Not here: when a member is removed because it cannot be reached (`lost_members`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache

import msgspec

from anabranch import PROTOCOL_VERSION
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.rate_limits_and_bans import TokenBucket, charge_all
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.fleet import auditors
from anabranch.protocol.fleet.dial_backs import DialBacks
from anabranch.protocol.fleet.lost_members import LostMembers, StepQueries
from anabranch.protocol.fleet.offers import absurd
from anabranch.protocol.fleet.unreachable_pairs import UnreachablePairs
from anabranch.protocol.fleet.walk_ins import marked, open_stages, walks_in
from anabranch.protocol.interface.events import VerifiedCredential
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Holders, JoinRequest, Ready, Refused
from anabranch.protocol.messages.common import MAX_MESSAGE_BYTES
from anabranch.protocol.messages.table import Allowance
from anabranch.protocol.placement.join_placement import KEPT_FIRST, best_stage, neediest_stage
from anabranch.protocol.placement.proven_speeds import ProvenSpeeds
from anabranch.protocol.placement.rates import SEARCHED, batch_of, stage_counts, with_slots
from anabranch.protocol.telemetry.link_table import LinkMeasurements

#: Longest time (s) that a leaving voter stays a member until another peer has its vote.
VOTE_S = 15.0
#: Records that admit joiners: at once, and per second; each admits all that wait. A choice: while guests come
#: and leave all the time, most entries of the log are still steps.
ADMISSIONS = Allowance(32.0, 0.5)
#: Most bytes of the joiners, and of the removals, in one record, but one of them at least: each record is
#: sent to all members in one message. A choice: a record has room for eighteen honest joiners, or a thousand
#: lost members; so ADMISSIONS.burst admits 500 machines that come at once, and a guest whose keys join and
#: leave all the time has the leader send each member 4 KiB a second.
JOINERS_BYTES, REMOVALS_BYTES = 8 << 10, MAX_MESSAGE_BYTES // 4
#: Most bytes, as in the log, of all members' statements, with MEMBER_BYTES more for each: a joiner's Welcome
#: lists all members, in one message, and the rest of it has the other quarter.
MEMBERS_BYTES = 3 * MAX_MESSAGE_BYTES // 4
#: Bytes of a member in a record or Welcome beside its statements: id, since when it serves. Rounded up.
MEMBER_BYTES = 96
#: Sizes of joiners and removals that are remembered: more than the list of members has room for. A choice.
MEASURED_KEPT = 4096
#: Searches for the best stage of a joiner, at once and per second; beyond them it gets the neediest stage. A
#: search takes 0.2 s in the largest swarm that is searched (64 members at 8 stages). A choice: as ADMISSIONS.
SEARCHES = Allowance(32.0, 0.5)
#: Time (s) for which a joiner that asks again before it is admitted gets the same stage. A plain choice.
CHOSEN_S = 60.0
#: States that are not the run's with which a joiner keeps its seat: a liar may have given it one. A choice:
#: it asks others each time, so as many liars that answer first are needed to keep an honest joiner out.
FALSE_STATES = 3
#: Time (s) after which a newcomer may serve although it and a replica of its stage cannot reach each other,
#: at a stage with fewer than ENOUGH replicas that serve: the leader sums their parts then. Choices: a link
#: through a carrier is there much sooner; of three replicas one can hold nothing up.
APART_S, ENOUGH = 30.0, 3
#: Time (s) for which it is remembered that a member lost its seat since it held the run up. A plain choice:
#: as long as a ban counts (`rate_limits_and_bans.FORGIVEN_S`).
HELD_UP_S = 3600.0
#: Peers that a refusal for a full quota names; a plain choice.
NAMED = 8


class Admission:
    """Admission and removal by the coordinator: joiners, leaving members, and the next membership change to
    log. lost: members that cannot be reached; absent: those that reduces leave out. The numerics class,
    corpus fingerprint and model hash that it is made with are the run's: a joiner must have the same class if
    the run is strict, the same corpus as a data node, and the same model if it names one."""

    def __init__(
        self,
        ctx: PeerContext,
        connections: Connections,
        numerics_class: str,
        corpus_fingerprint: str,
        model_hash: str,
        welcome: Callable[[Member], None],
        credentials: Mapping[str, VerifiedCredential],
        hang_up: Callable[[str, str], None],
        step: StepQueries | None = None,
    ) -> None:
        """welcome: sends a member its Welcome. credentials: by peer, the credential (ticket) that it showed
        when it dialled. hang_up(peer, reason): closes a link. step: answers about the open step; by default
        no member has the last step's state, and every stage is waited for."""
        step = self._step = step or StepQueries()
        self.has_last, self.fetching, self.worth_s = step.has_last, step.fetching, step.worth_s
        self.ctx, self._connections = ctx, connections
        self._welcome = welcome
        self.ready: dict[str, Member] = {}
        """Members that have their stage's state and do not serve yet."""
        self._ready_t: dict[str, int] = {}
        """Ready member -> last iteration of the state that it has."""
        self.anywhere: set[str] = set()
        """Peers that asked for any stage, without walk-ins and auditors."""
        self.ways = LinkMeasurements(lambda peer: peer in ctx.run.membership.members)
        self.speeds = ProvenSpeeds()
        self.parted = UnreachablePairs(ctx)
        self._numerics_class = numerics_class
        self._corpus_fingerprint = corpus_fingerprint
        self._model_hash = model_hash
        self.credentials, self._hang_up = credentials, hang_up
        self._unproven: dict[str, Ready] = {}
        self._apart_since: dict[str, float] = {}
        """Joiner -> time (s) since which it is ready and cannot reach a replica of its stage."""
        self._admits = TokenBucket(ADMISSIONS.burst, ctx.clock.now)
        self._searches = TokenBucket(SEARCHES.burst, ctx.clock.now)
        self._chosen: dict[str, tuple[int, float]] = {}
        """Joiner that asked for any stage, and is not admitted -> stage chosen for it, until when (s)."""
        self._false: dict[str, set[tuple[int, str]]] = {}
        """Joiner -> states that it reported and that are not the run's: iteration, fingerprint."""
        self._joining: dict[str, Member] = {}
        self._coming: dict[str, Member] = {}
        """Members that the last record admits, which may not be committed yet."""
        self._removals: dict[str, str] = {}
        """Members to remove with the next record -> reason."""
        self._going: set[str] = set()
        """Members that the last record removes, which may not be committed yet."""
        self._leaving: dict[str, tuple[str, float]] = {}
        """Members that asked to leave -> reason, and time at which they are removed even if they vote."""
        self.dial_backs = DialBacks(ctx)
        self._held_up: dict[str, float] = {}
        """Ticket, or peer without one, that held the run up -> when it lost its seat for that (s)."""
        self.lost = LostMembers(ctx, connections, step, self.going, self.remove, self._wait)
        self.absent = self.lost.absent
        self._waiting_for = ""
        self._judged = (-1, 0)
        """Version of the membership, and number of revocations, that were compared last."""
        self._stated = (-1, 0)
        """Version of the membership, and bytes of its members' statements."""

    # --- in ------------------------------------------------------------------------------------

    def on_join(self, peer: str, request: JoinRequest) -> str | None:
        """Handle the join request of `peer`. If it may be admitted, it is noted for a following record
        (`change`), and its former process, if that is a member, is removed. Returns the reason if it is
        refused, which the joiner is told, too; else None. A member that asks again gets its Welcome again. A
        peer that this side dialled has shown no ticket: its link is closed, so that it dials, and None is
        returned."""
        credential = self.credentials.get(peer)
        if credential is None:
            self._hang_up(peer, "it was dialled from here: it is to dial again, and show its ticket")
            return None
        reason, full = self._refusal(peer, request, credential), None
        if reason is None:
            reason = full = (
                self._over_quota(peer, credential)
                or self._no_seat(peer, request, credential)
                or self._no_room(peer, request.member)
            )
        if reason is not None:
            later = full is not None or self.ctx.rate_limits.banned(peer, self.ctx.clock.now)
            self.ctx.outbox.send(peer, Refused(reason, again=later))
            return reason
        # The id is proved by the TLS connection, the ticket by the handshake.
        address = self.dial_backs.confirmed(peer, request.member.address)
        member = msgspec.structs.replace(
            request.member, id=peer, ticket=credential.ticket, address=address, walk_in=msgspec.UNSET
        )
        if walks_in(credential):
            member = marked(member)
        elif auditors.audits(credential):
            member = auditors.marked(member)
        known, asked = self.ctx.run.membership.members.get(peer), self._joining.get(peer)
        if known is not None and known.incarnation >= member.incarnation:
            self._welcome(known)
            return None
        if known is not None:
            self.remove(peer, "it came back as a new process")
        stage = request.stage
        self.anywhere.discard(peer)
        if stage < 0 and member.walk_in is True:
            stage = self._open_stages(peer)[0] if asked is None else asked.stage
        elif stage < 0 and member.is_auditor:
            chosen = auditors.stage_to_audit(self._others(peer), self.ctx.run.settings.stages)
            stage = chosen if asked is None else asked.stage
        elif stage < 0:
            self.anywhere.add(peer)
            stage = self._chosen_stage(member) if asked is None else asked.stage
        self._joining[peer] = msgspec.structs.replace(member, stage=stage)
        return None

    def _refusal(self, peer: str, request: JoinRequest, credential: VerifiedCredential) -> str | None:
        member, role = request.member, credential.role
        settings = self.ctx.run.settings
        if request.protocol_version != PROTOCOL_VERSION:
            return (
                f"this run speaks protocol version {PROTOCOL_VERSION}, you speak "
                f"{request.protocol_version}: install the same release of anabranch"
            )
        if request.stage > settings.stages:
            return f"there is no stage {request.stage}; stages are 0 to {settings.stages}"
        if walks_in(credential) and not settings.audits:
            return "this run has no audits (audit.share), so nobody can come without an invitation"
        if walks_in(credential) and settings.rounds.inner:
            return "only auditors check work in rounds of islands: nobody can come without an invitation"
        if auditors.audits(credential) and not settings.audits:
            return "this run has no audits (audit.share), so there is nothing for an auditor to compute again"
        if request.stage == 0 and role != "data":
            kind = "an auditor" if auditors.audits(credential) else "a relay"
            return f"your ticket lets you in as {kind}, not as a data node; ask the owner for a data ticket"
        if request.model_hash and request.model_hash != self._model_hash:
            return "your run file describes another model: join without a run file, or use this run's"
        if request.stage == 0 and request.corpus_fingerprint != self._corpus_fingerprint:
            return (
                "your corpus is not this run's (fingerprint "
                f"{request.corpus_fingerprint[:12] or 'none'}, not {self._corpus_fingerprint[:12]}): "
                "copy the run directory's corpus folder to this machine"
            )
        if settings.numerics == "strict" and member.numerics_class != self._numerics_class:
            return (
                f"this run admits numerics class {self._numerics_class[:12]} only and yours is "
                f"{member.numerics_class[:12]} (same torch build, device model, threads and dtype are "
                'needed; a run with numerics = "mixed" admits any)'
            )
        if (reason := absurd(member)) is not None:
            return reason
        if self.ctx.rate_limits.banned(peer, self.ctx.clock.now):
            return (
                "you, or a peer with your ticket or from your network, were expelled a while ago: try later"
            )
        seen = self.ctx.run.membership.incarnation(peer)
        if member.incarnation < seen:
            return f"incarnation {member.incarnation} is older than {seen}, which was seen already"
        return self.ctx.run.revoked.refusal(peer, credential.ticket)

    def _over_quota(self, peer: str, credential: VerifiedCredential) -> str | None:
        """Reason why the ticket of `peer` has no seat left: others have as many as its quota allows. None: a
        seat is left, or the ticket has no quota. A seat of `peer` itself, and those of members that are being
        removed, are free."""
        if not credential.ticket or not credential.quota:
            return None
        seated = [other.id for other in self._others(peer) if other.ticket == credential.ticket]
        if len(seated) < credential.quota:
            return None
        who = ", ".join(other[:8] for other in sorted(seated)[:NAMED])
        return (
            f"your ticket has a quota of {credential.quota}, and as many peers are members with it ({who}): "
            "wait until one leaves, or ask the owner for another ticket"
        )

    def _others(self, peer: str) -> list[Member]:
        """Members other than `peer`, admitted joiners included, members that are being removed left out."""
        known = {**self._coming, **self.ctx.run.membership.members, **self._joining}
        out = {peer, *self._removals, *self._going}
        return [member for member in known.values() if member.id not in out]

    def _open_stages(self, peer: str) -> list[int]:
        """Stages with a seat for the walk-in `peer`, those with the fewest members first; [] if there is
        none. A seat that it has itself counts as free."""
        serving, stages = self.ctx.run.membership.active_from, self.ctx.run.settings.stages
        return open_stages(self._others(peer), serving, stages)

    def _no_seat(self, peer: str, request: JoinRequest, credential: VerifiedCredential) -> str | None:
        """Reason why the walk-in `peer` gets no seat at the stage that it asks for (-1: at any); None: it
        gets one, is a member with this process already, or is no walk-in."""
        known = self.ctx.run.membership.members.get(peer)
        if not walks_in(credential) or (known and known.incarnation >= request.member.incarnation):
            return None
        seats = self._open_stages(peer)
        if seats and (request.stage < 0 or request.stage in seats):
            return None
        return (
            "at every stage invited peers must outnumber those without an invitation, and too few of them "
            "serve now: wait, or ask the owner for a ticket of your own"
        )

    def _no_room(self, peer: str, joiner: Member) -> str | None:
        """Reason why the list of members has no room for what a joiner states about itself (MEMBERS_BYTES);
        None: it has, or `peer` is in it."""
        membership = self.ctx.run.membership
        if peer in membership.members:
            return None
        if self._stated[0] != membership.version:
            self._stated = membership.version, sum(map(_logged_bytes, membership.members.values()))
        coming = {**self._coming, **self._joining}
        others = (m for m in coming.values() if m.id != peer and m.id not in membership.members)
        if self._stated[1] + _logged_bytes(joiner) + sum(map(_logged_bytes, others)) <= MEMBERS_BYTES:
            return None
        return "the run's list of members has no room for one more: wait until some leave"

    def _chosen_stage(self, joiner: Member) -> int:
        """Stage for a joiner that asked for any: as it was chosen for it in the last CHOSEN_S seconds, else
        chosen now."""
        now = self.ctx.clock.now
        self._chosen = {peer: choice for peer, choice in self._chosen.items() if choice[1] > now}
        if joiner.id not in self._chosen:
            self._chosen[joiner.id] = self._stage_for(joiner), now + CHOSEN_S
        return self._chosen[joiner.id][0]

    def _stage_for(self, joiner: Member) -> int:
        """Stage for a joiner that asked for any. It is chosen by measured links if some are measured, every
        stage has KEPT_FIRST replicas, the swarm has at most SEARCHED members and few others came lately (each
        such choice uses up some of SEARCHES); else by the stages' rates."""
        settings = self.ctx.run.settings
        blocks = settings.counts
        known = {**self._coming, **self.ctx.run.membership.members, **self._joining}
        known.pop(joiner.id, None)
        members = [with_slots(member, settings) for member in known.values() if not member.is_auditor]
        relays = {m.id: m for m in self.speeds.believed([member for member in members if member.stage])}
        members = [relays.get(member.id, member) for member in members]
        if len(members) > SEARCHED or not any(member.stage == 0 for member in members):
            return neediest_stage(members, blocks)
        joiner = msgspec.structs.replace(joiner, capacity=settings.slots(1, joiner.capacity))
        link = self.ways.between({member.id: member.region for member in [*members, joiner]})
        if link is None or min(stage_counts(members, blocks)) < KEPT_FIRST:
            return neediest_stage(members, blocks)
        self._searches.fill(SEARCHES.burst, SEARCHES.per_s, self.ctx.clock.now)
        if not charge_all([self._searches], 1.0):
            return neediest_stage(members, blocks)
        return best_stage(joiner, members, blocks, batch_of(settings), link)

    def on_ready(
        self, peer: str, message: Ready, fingerprint: str | None, proven: bool | None
    ) -> str | None:
        """Handle the report of `peer` that it has its stage's state after iteration message.t. It may serve
        (is kept in `ready`) if the state is right and it reaches all serving replicas of its stage that this
        leader reaches; if it does not, after a while at a stage with few replicas (`_may_be_apart`). With a
        wrong state it is told, and removed once it reported more than FALSE_STATES of them; without the proof
        of the right state it is removed. fingerprint: agreed fingerprint of that state; None: not known yet.
        proven: True if the report shows the proof of that state, False if it does not; None: not known yet.
        If either is not known, the report waits to be repeated. Returns the reason if the report is refused
        (another stage's), else None; nothing happens for a peer that serves already, an auditor or a
        stranger."""
        member = self.ctx.run.membership.members.get(peer)
        if member is not None and member.stage != message.stage:
            return f"its stage is {member.stage}, not {message.stage}"
        if member is None or member.is_auditor:
            return None  # an auditor never serves
        if peer in self.ctx.run.membership.active_from or fingerprint is None:
            return None
        self._unproven.pop(peer, None)
        fellows = set(self.ctx.run.membership.serving(member.stage))
        if proven is None:
            self._unproven[peer] = msgspec.structs.replace(message, links={})
        elif message.fingerprint != fingerprint:
            self._reported_false(peer, message, fingerprint)
        elif not proven:  # a state with this fingerprint has the proof: this joiner has no state
            self._false_state(peer, message)
        elif (
            unreached := sorted(filter(self.ctx.reachable, fellows.intersection(message.apart)))
        ) and not self._may_be_apart(peer, member.stage, fellows):
            self.ready.pop(peer, None)  # fellows that this leader does not reach either are not demanded
            others = " and ".join(other[:8] for other in unreached)
            self._wait(f"{peer[:8]} is ready, but cannot reach {others} of its stage to reduce with")
        else:
            self.ready[peer], self._ready_t[peer] = member, message.t
        return None

    def has_state(self, peer: str, t: int) -> bool:
        """True if a member has its stage's state after iteration t, the last committed one: it is ready with
        it, or reported that step."""
        return (peer in self.ready and self._ready_t.get(peer) == t) or self.has_last(peer)

    def _may_be_apart(self, peer: str, stage: int, fellows: Collection[str]) -> bool:
        """True if a joiner that cannot reach some replicas of its stage (`fellows`: all that serve it) may
        serve all the same: it has waited for APART_S, the stage has fewer than ENOUGH replicas, and this
        leader can sum the parts of its reduces, which it does from now on. The joiner or one of the replicas
        may refuse the link on purpose; at a stage of two one replica could so keep all others out."""
        since = self._apart_since.setdefault(peer, self.ctx.clock.now)
        return self.ctx.clock.now >= since + APART_S and len(fellows) < ENOUGH and self._step.sums(stage)

    def _reported_false(self, peer: str, message: Ready, fingerprint: str) -> None:
        """Tell a joiner that the state which it fetched is not the run's, so that it fetches another one, and
        count it as not ready; after more than FALSE_STATES different ones remove it. fingerprint: that of the
        right state."""
        self.ready.pop(peer, None)
        told = self._false.setdefault(peer, set())
        told.add((message.t, message.fingerprint))
        if len(told) > FALSE_STATES:
            self._false_state(peer, message)
        else:
            self.ctx.outbox.send(peer, Holders(message.stage, message.t, fingerprint, ()))

    def _false_state(self, peer: str, message: Ready) -> None:
        self.remove(peer, f"the state it fetched (after iteration {message.t}) is not the run's")

    def unproven(self, t: int, stage: int) -> list[tuple[str, Ready]]:
        """(Joiner, its report) for each joiner that reported a state of `stage` after iteration t for which
        no replica has reported a proof to compare with yet; each is to be judged again once one has."""
        return [(p, ready) for p, ready in self._unproven.items() if (ready.t, ready.stage) == (t, stage)]

    def serve_at_once(self, stage: int, t: int) -> None:
        """Make members of `stage` ready that the log has serve only from a later iteration than t, so that
        the next `change` may have them serve from t on. They have the stage's state already. Called if the
        stage's active replicas are gone, or do nothing."""
        membership = self.ctx.run.membership
        for peer, member in membership.members.items():
            if member.stage == stage and not member.is_auditor and membership.active_from.get(peer, t) > t:
                self.ready[peer] = member
                if self.has_last(peer):
                    self._ready_t[peer] = t - 1

    # --- out -----------------------------------------------------------------------------------

    def leave(self, peer: str, reason: str) -> None:
        """Note that a member asked to leave; `let_go` removes it when the run can do without it. A joiner
        that is not a member yet is dropped at once. A repeated request changes nothing."""
        if peer in self.ctx.run.membership.members:
            self._leaving.setdefault(peer, (reason, self.ctx.clock.now + VOTE_S))
        else:
            self._joining.pop(peer, None)

    @property
    def leaving(self) -> Collection[str]:
        """Members that asked to leave the run."""
        return self._leaving.keys()

    def let_go(self, quiet: bool) -> None:
        """Plan the removal of revoked members, and of members that asked to leave. Of the latter voters stay
        until VOTE_S have passed, and members that serve stay while they are the last replica of their stage
        or `quiet` is False. quiet: False if a removal now would lose much work."""
        revoked, membership = self.ctx.run.revoked, self.ctx.run.membership
        if (judged := (membership.version, len(revoked.reasons))) != self._judged:
            self._judged = judged
            for peer, why in revoked.refused(membership.members.values()).items():
                self.remove(peer, why)
        for peer, (reason, latest) in list(self._leaving.items()):
            if self.ctx.log.keeps_log(peer) and self.ctx.clock.now < latest:
                continue
            serves = peer in self.ctx.run.membership.active_from
            if not serves or (quiet and not self.lost.last_of_its_stage(peer)):
                self.remove(peer, f"left: {reason}")

    def remove(self, peer: str, reason: str) -> None:
        """Plan the removal of the member `peer`, which `change` makes a record of; the first reason stays. A
        joiner that is not a member yet is dropped. Nothing for this peer itself and for a stranger."""
        self._joining.pop(peer, None)
        self.ready.pop(peer, None)
        self._ready_t.pop(peer, None)
        self._unproven.pop(peer, None)
        self._false.pop(peer, None)
        self._apart_since.pop(peer, None)
        self.lost.forget(peer)
        self._leaving.pop(peer, None)
        if peer in self.ctx.run.membership.members and peer != self.ctx.me:
            self._removals.setdefault(peer, reason)

    def expel(self, peer: str, reason: str) -> None:
        """Plan to remove a member for misconduct that this peer itself observed, and ban it: it, and
        strangers with its ticket or from its address block, are not admitted for a while, each time for
        longer. Nothing if its removal is planned or logged already, for a stranger, and for this peer."""
        if peer in self.ctx.run.membership.members and peer not in self.going() and peer != self.ctx.me:
            self.ctx.rate_limits.ban(peer, self.ctx.clock.now)
            self.remove(peer, reason)

    def remove_idle(self, peer: str, reason: str) -> None:
        """Plan to remove a member for which the run waits, or whose state differs, and which may be honest.
        It is expelled if a member with its ticket lost its seat for the same within HELD_UP_S: otherwise a
        peer that comes back at once holds the run up again in its first step. Nothing if its removal is
        planned, for a stranger, and for this peer."""
        member = self.ctx.run.membership.members.get(peer)
        if member is None or peer in self.going() or peer == self.ctx.me:
            return
        now, name = self.ctx.clock.now, peer if member.walk_in is True else member.ticket or peer
        self._held_up = {other: at for other, at in self._held_up.items() if now < at + HELD_UP_S}
        (self.expel if name in self._held_up else self.remove)(peer, reason)
        self._held_up[name] = now

    def going(self) -> Collection[str]:
        """Members whose removal is planned or logged, but not committed yet."""
        if not self._removals and not self._going:
            return ()
        members = self.ctx.run.membership.members
        return [peer for peer in {**self._removals, **dict.fromkeys(self._going)} if peer in members]

    def link_down(self, peer: str, reason: str, refused: bool, patience_s: float) -> None:
        """Handle a link to `peer` that broke, or a failed dial, as `LostMembers.link_down` says. A joiner
        that is no member is dropped; nothing for a member that has another link."""
        if peer not in self.ctx.run.membership.members or peer in self.ctx.links.up:
            self._joining.pop(peer, None)
            return
        self.lost.link_down(peer, reason, refused, patience_s)

    def link_up(self, peer: str) -> None:
        """Note a new link to `peer`. If it leads to a later process than the log has as a member, the member
        is removed, since its state is gone."""
        self.lost.forget(peer)
        member = self.ctx.run.membership.members.get(peer)
        if member is not None and self.ctx.links.incarnations.get(peer, 0) > member.incarnation:
            self.remove(peer, "it came back as a new process")

    def _wait(self, reason: str) -> None:
        """Note in the event log why the run waits, unless that was the last reason noted."""
        if reason != self._waiting_for:
            self._waiting_for = reason
            self.ctx.outbox.note("waiting", reason=reason)

    def deadline(self) -> float:
        """Time of the next `tick` (s)."""
        due = self.lost.deadline()
        if self._joining and not self._may_admit():
            due = min(due, self.ctx.clock.now + (1.0 - self._admits.left) / ADMISSIONS.per_s)
        return due

    def _may_admit(self) -> bool:
        """True if joiners may be admitted now (`ADMISSIONS`)."""
        self._admits.fill(ADMISSIONS.burst, ADMISSIONS.per_s, self.ctx.clock.now)
        return self._admits.left > 1.0 - 1e-6  # `deadline` is rounded

    @property
    def waiting(self) -> bool:
        """True if members are to be removed, to be admitted or ready to serve, so that `change` may have a
        record."""
        return bool(self._removals or self._joining or self.ready)

    # --- the record ----------------------------------------------------------------------------

    def change(self, begins: Callable[[int, int], int | None] = lambda stage, t: None) -> Members | None:
        """Next Members record, which the caller must log, or None. It holds removals if any are planned, else
        joiners (as often as ADMISSIONS allows), as many as fit in a record, else members that begin to serve.
        Its contents are planned no longer. To be called once the record before is committed. begins(stage,
        t): iteration from which a ready member that has the stage's state after t serves; None: not yet."""
        if not (self.waiting or self._going or self._coming):
            return None  # asked after each event, and most of the time nothing is planned
        number = self.ctx.run.membership.number + 1
        members = self.ctx.run.membership.members
        planned = [(peer, reason) for peer, reason in self._removals.items() if peer in members]
        now = _fitting(planned, REMOVALS_BYTES)
        removed, self._removals = dict(planned[:now]), dict(planned[now:])
        self._going = set(removed)
        if removed:
            return Members(number, removed=removed)
        # A joiner may repeat its request before it knows of the record that admits it.
        known = {(peer, member.incarnation) for peer, member in members.items()}
        joined = [m for m in self._joining.values() if (m.id, m.incarnation) not in known]
        if not joined:
            self._joining, self._coming = {}, {}
        elif self._may_admit():
            self._admits.left -= 1.0
            now = _fitting(joined, JOINERS_BYTES)
            self._coming = {member.id: member for member in joined[:now]}
            self._joining = {member.id: member for member in joined[now:]}
            self._chosen = {p: choice for p, choice in self._chosen.items() if p not in self._coming}
            return Members(number, joined=tuple(joined[:now]))
        found = {peer: begins(m.stage, self._ready_t.get(peer, -1)) for peer, m in self.ready.items()}
        serving = {peer: t for peer, t in found.items() if t is not None}
        for peer in serving:
            del self.ready[peer]
        earlier = self.ctx.run.membership.active_from
        serving = {peer: t for peer, t in serving.items() if earlier.get(peer, t + 1) > t}
        return Members(number, active_from=serving) if serving else None


@lru_cache(maxsize=MEASURED_KEPT)
def _logged_bytes(planned: Member | tuple[str, str]) -> int:
    """Bytes that a joiner, or a removal (peer, reason), takes in a record of the log."""
    return len(msgspec.json.encode(planned)) + MEMBER_BYTES


def _fitting(planned: Sequence[Member | tuple[str, str]], most_bytes: int) -> int:
    """Number of joiners or removals, counted from the first, that a record of `most_bytes` has room for; one
    at least, if there is any."""
    size_bytes = 0
    for count, each in enumerate(planned):
        size_bytes += _logged_bytes(each)
        if size_bytes > most_bytes:
            return max(1, count)
    return len(planned)
