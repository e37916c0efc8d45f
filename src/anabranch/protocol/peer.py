"""One peer: composes the parts, checks every message's fence, and follows the log.

`handle(event, now) -> effects` is the whole interface, with `deadline()` for the next time it wants to be
woken (style of h11 and aioquic). It does no I/O and owns no clock. `node/` and `sim/` drive the same class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from anabranch.protocol import events as ev
from anabranch.protocol import messages as msg
from anabranch.protocol.audience import ROLE, Audience
from anabranch.protocol.clippings import Clippings
from anabranch.protocol.contacts import Contacts
from anabranch.protocol.control import Wishes
from anabranch.protocol.core import Core
from anabranch.protocol.download import Download, State
from anabranch.protocol.iteration import Iteration
from anabranch.protocol.joining import Joining
from anabranch.protocol.leader import Leader
from anabranch.protocol.leadership import Leadership
from anabranch.protocol.leaving import Leaving
from anabranch.protocol.log import Known, LogError, Position, follow
from anabranch.protocol.owntime import OwnTime
from anabranch.protocol.placement import first_passes
from anabranch.protocol.records import (
    AnyRecord,
    Closing,
    Commit,
    Control,
    Genesis,
    Member,
    Members,
    Rollback,
    entry_hash,
)
from anabranch.protocol.refusals import GARBLED, Early, Kind
from anabranch.protocol.replica import Replica
from anabranch.protocol.routing import Router
from anabranch.protocol.settings import Settings
from anabranch.protocol.snapshots import Snapshots
from anabranch.protocol.suspicion import Overdue, Verdict
from anabranch.protocol.tasks import Payload
from anabranch.protocol.transfer import StateServer
from anabranch.protocol.voter import Kept, Voter
from anabranch.protocol.voting import RaftMessage

#: Bases of the run's history that are remembered.
BASES_KNOWN = 256
#: Seconds between repetitions of cumulative reports while an iteration is open: of so many members, in
#: proportion longer of more.
REPEAT_S, REPEATING = 2.0, 64

# Types of messages, by what is asked of their sender: a set says at once whether a type is in it.
_FROM_NEXT = frozenset({msg.Slots, msg.Backward, msg.Have, msg.Lack})
_FROM_BESIDE = frozenset({msg.Got})
_FROM_PREVIOUS = frozenset({msg.Ask, msg.Return, msg.Forward, msg.Want})
_FROM_STAGE = frozenset({msg.ReducePart, msg.ReducedPart})
_FROM_LEADER = frozenset({msg.Attempt, msg.Missing})
_FENCED = _FROM_NEXT | _FROM_PREVIOUS | _FROM_BESIDE | _FROM_STAGE | _FROM_LEADER
_LEADERS_ALONE = frozenset({
    msg.Announce, msg.Release, msg.Welcome, msg.Refused, msg.About,
    msg.Keep, msg.KeepGradient, msg.Complete, msg.Holders, msg.Steps,
})  # fmt: skip
_TO_LEADER = frozenset({
    msg.Claim, msg.Prepared, msg.Applied, msg.Overflow, msg.Enquire, msg.JoinRequest,
    msg.Ready, msg.Leave, msg.Report, msg.Holds, msg.WhoHas, msg.Behind, msg.Spoilt, msg.Wish,
})  # fmt: skip
_HEARTBEATS = frozenset({msg.Ping, msg.Pong})
#: Short questions with long answers.
_COSTLY = frozenset({
    msg.FetchLog, msg.Enquire, msg.JoinRequest, msg.FetchState, msg.FetchGradient, msg.WhoHas, msg.Watch
})  # fmt: skip


class Peer:
    """A data node or relay. `leader` is whom it takes for the log's leader at first; the founder of a run may
    have `lead` set before its first event. kept: what its disk holds of the log."""

    def __init__(
        self,
        me: str,
        incarnation: int,
        leader: str,
        settings: Settings,
        stage_wanted: int = -1,
        kept: Kept | None = None,
    ) -> None:
        self.core = Core(me, incarnation, max(0, stage_wanted), settings, leader)
        self.lead: Leader | None = None
        self.iteration: Iteration | None = None
        self._bases: deque[str] = deque([""], maxlen=BASES_KNOWN)
        self.position = Position()
        self.stopped = False
        self._time = OwnTime(settings.heartbeat_s)
        self._due: float | None = None
        """When something is to be done next, unless an event comes before."""
        self.core.in_use = self._in_use
        self.contacts = Contacts(self.core)
        self.contacts.hung_up = lambda peer: self._link_down(peer, "not a neighbour", refused=False)
        self.replica = Replica(self.core, self._on_applied, self._fell_behind)
        self.router = Router(self.core)
        self.states = StateServer(self.core, lambda: self.replica.t, self._read_checkpoint)
        self.snapshots = Snapshots(self.core, self.states)
        self.wishes = Wishes(self.core)
        self.audience = Audience(self.core)
        self.joining = Joining(self, stage_wanted)
        self.leadership = Leadership(self)
        self.voter = Voter(
            self.core, kept or Kept(), self._chosen, self.leadership.became, self.leadership.may_lead
        )
        self.roles: dict[str, str] = {}
        self.certify: Callable[[Member], bytes] = _no_certificate
        self._retained: list[Iteration] = []
        self._early = Early()
        self._repeat_at = float("inf")
        self._applied: msg.Applied | None = None
        self._stop_logged: str | None = None
        self._closed = False
        self.leaving = Leaving(self)
        self.clippings = Clippings(self.core)
        self.committed = 0

    @property
    def base(self) -> str:
        """Hash of the last Genesis, Commit or Rollback entry."""
        return self._bases[-1]

    @base.setter
    def base(self, base: str) -> None:
        self._bases.append(base)

    # --- the interface -------------------------------------------------------------------------

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        """Take in one event; what is to be done about it."""
        core = self.core
        core.now = self._time.take(now)
        if self.stopped:
            return []
        talk, told = self._small_talk(event), self.router.told
        self._dispatch(event)
        if not (talk and self._nothing_follows(told)):
            self._due = None
            self._tick()
            self._settle()
        effects, core.effects = core.effects, []
        return effects

    def deadline(self) -> float:
        """When `Wake` is wanted next."""
        if self._due is None:
            self._due = self._deadline()
        return self._time.awaits(self._due)

    def _deadline(self) -> float:
        times = [self._repeat_at, self.contacts.deadline(), self.replica.deadline(), self.joining.deadline()]
        times += [self.router.deadline(), self.snapshots.deadline(), self.voter.deadline()]
        times += [self.leaving.deadline(), self.clippings.deadline()]
        if self.iteration is not None:
            times.append(self.iteration.sender.deadline())
        if self.lead is not None:
            times.append(self.lead.deadline())
        return min(times)

    def _small_talk(self, event: ev.Event) -> bool:
        """Whether the event is a heartbeat, or the answer to one, before anything else is due."""
        heartbeat = isinstance(event, ev.Received) and type(event.message) in _HEARTBEATS
        return heartbeat and self._due is not None and self.core.now < self._due

    def _nothing_follows(self, stir: int) -> bool:
        """Whether no more came of an event than one answer. stir: `router.told` before."""
        core = self.core
        answered = not core.effects or (len(core.effects) == 1 and isinstance(core.effects[0], ev.Send))
        return answered and not core.to_self and self.router.told == stir

    def _settle(self) -> None:
        """Let the consequences play out: messages to myself, the leader's decisions, the next task."""
        core = self.core
        while True:
            while core.to_self:
                message, payload = core.to_self.pop(0)
                self._receive(core.me, message, payload)
            core.start_next()
            if self.iteration is not None and self.iteration.claim_changed and not core.queue.adding:
                self.iteration.send_claim()
            if self.lead is not None and not self.stopped:
                self.lead.released.check_parity()
                self.lead.consider()
            if not core.to_self:
                return

    # --- events --------------------------------------------------------------------------------

    def _dispatch(self, event: ev.Event) -> None:
        match event:
            case ev.Received(peer, message, payload):
                if self.contacts.heard(peer) and self.iteration is not None:
                    self.iteration.sender.pump()
                self._receive(peer, message, payload)
            case ev.Finished(task, result):
                then = self.core.queue.finish(task)
                if then is not None:
                    then(result)
                self.replica.resume()
                self.core.costs.computed(type(task).__name__, result.seconds, self.core.now)
            case ev.LinkUp(peer, incarnation, role):
                self.core.linked_incarnation[peer] = incarnation
                self._link_up(peer, role)
            case ev.Garbled(peer, reason):
                self._garbled(peer, reason)
            case ev.LinkDown(peer, reason, refused):
                self._link_down(peer, reason, refused)
            case ev.Persisted(number):
                self.voter.persisted(number)
            case ev.CheckpointRead(asked_t, t, stage, fingerprint, pieces, hashes):
                state = State(stage, t, fingerprint, pieces, hashes) if pieces else None
                self.states.checkpoint_read(asked_t, state, stage)
            case ev.CheckpointWritten(t) if self.lead is not None:
                self.lead.checkpoints.written(t)
            case ev.Described() | ev.StageBuilt():
                self.joining.answered(event)
            case ev.Observed(lines):
                self.core.send(self.core.leader, msg.Report(lines))
            case ev.Stopping(reason):
                self.leadership.stop(reason)
            case ev.Wished(action, steps):
                self.wishes.wish(action, steps)
                self._repeat()
            case ev.EventsRead():
                self.audience.read(event)
            case ev.Started():
                self.joining.start()
                self.voter.begin()
                self.joining.doors |= self.contacts.fellows
            case ev.Wake():
                pass

    def _stop(self, reason: str, ok: bool) -> None:
        self.stopped = True
        self.core.effects.append(ev.Stop(reason, ok))

    # --- links ---------------------------------------------------------------------------------

    def _link_up(self, peer: str, role: str) -> None:
        core = self.core
        if core.refusals.banned(peer, core.now):
            core.effects.append(ev.HangUp(peer, "too many of its messages were refused; not for a while"))
            return
        if self.contacts.outdated(peer):
            core.effects.append(ev.HangUp(peer, "another process of this peer has been admitted since"))
            self.contacts.redial(peer)
            return
        self.roles[peer] = role
        if role == ROLE:
            return
        self.contacts.link_up(peer)
        self.router.link_down(peer)
        if self.lead is not None:
            self.lead.admission.link_up(peer)
            self.lead.repeat(peer)
        if peer == core.leader:
            self.joining.leader_up()
            self.snapshots.report()
            self._repeat()
        elif core.membership.stage_of(peer) == core.stage:
            self.joining.applied()  # a joiner may have waited for that link
        self.replica.repeat_parts(peer)
        self.snapshots.gradients.link_up(peer)
        for download in self._downloads():
            download.link_up(peer)
        iteration = self.iteration
        if iteration is not None:
            iteration.link_up(peer)

    def _link_down(self, peer: str, reason: str, refused: bool) -> None:
        core = self.core
        if refused and peer in core.links:
            return  # the peer has called us in the meantime
        if self.audience.gone(peer) or self.roles.get(peer) == ROLE:
            return
        silence = self.contacts.link_down(peer)
        self.router.link_down(peer)
        if self.iteration is not None:
            self.iteration.link_down(peer, reason)
        if self.lead is not None and peer != core.me:
            patience = silence.patience_s if silence else 2.0
            self.lead.admission.link_down(peer, reason, refused, patience)
        self.voter.lost(peer)
        if peer == core.leader:
            self.joining.leader_down(reason)
        for download in self._downloads():
            download.link_down(peer)
        self.contacts.redial(peer)

    def _in_use(self) -> set[str]:
        """With whom this peer shares work just now."""
        found = self.iteration.partners if self.iteration is not None else set()
        if self.replica.reduce is not None:
            found.update(self.replica.reduce.partners)
        for download in self._downloads():
            found.update(download.sources)
        return found

    def _look_around(self) -> None:
        """Who serves has changed: capacity, demand and neighbours follow."""
        self.router.members_changed()
        self.connect()

    def connect(self) -> None:
        """Who is a member has changed: hang up on former processes, dial the neighbours."""
        for peer in [peer for peer in self.core.links if self.contacts.outdated(peer)]:
            reason = "another process of this peer has been admitted"
            self.core.effects.append(ev.HangUp(peer, reason))
            self._link_down(peer, reason, refused=False)
        self.contacts.connect()

    # --- time ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        core = self.core
        for overdue in self.contacts.tick(self.position.index):
            self._suspect(overdue)
        if core.now >= self._repeat_at:
            self._repeat()
        if self.iteration is not None and core.now >= self.iteration.sender.deadline():
            self.iteration.sender.tick()
        self.router.tick()
        self.replica.tick()
        self.joining.tick()
        self.snapshots.tick()
        self.voter.tick()
        self.leaving.tick()
        self.clippings.tick()
        if self.lead is not None:
            self.lead.tick()

    def _suspect(self, overdue: Overdue) -> None:
        if self.contacts.suspect(overdue) and self.iteration is not None:
            self.iteration.peer_lost(overdue.peer, str(overdue))
        if overdue.verdict is Verdict.BAD_LINK:
            self._link_down(overdue.peer, self.contacts.renew(overdue), refused=False)
        elif self.lead is not None:
            self.lead.admission.silent(overdue)

    def _repeat(self) -> None:
        """Say again what the leader may have missed (all of it is cumulative)."""
        self._repeat_at = float("inf")
        again_at = self.core.now + self._repeat_s()
        if self.iteration is not None:
            self._repeat_at = again_at
            self.iteration.send_claim()
            self.replica.repeat_prepared()
        if self._applied is not None:
            self._repeat_at = again_at
            self.core.send(self.core.leader, self._applied)
        if self.wishes.open:
            self._repeat_at = self.core.now + REPEAT_S
            self.wishes.repeat()
        if self.leaving.reason is not None:
            self._repeat_at = self.core.now + REPEAT_S
            self.leaving.repeat()

    def _repeat_s(self) -> float:
        """Seconds between cumulative reports: the leader hears no more of them in a larger swarm."""
        return REPEAT_S * max(1.0, len(self.core.membership.members) / REPEATING)

    # --- messages ------------------------------------------------------------------------------

    def _receive(self, peer: str, message: msg.AnyMessage, payload: Payload | None) -> None:
        refusal: str | None = None
        kind = type(message)
        costly = kind in _COSTLY and peer != self.core.me
        if costly and not self.core.refusals.take(peer, Kind.COSTLY, self.core.now):
            refusal = "asked too often"
        elif isinstance(message, msg.Watch):
            refusal = self._watched(peer, message)
        elif peer in self.audience or self.roles.get(peer) == ROLE:
            refusal = "it may look on, and nothing else"
        elif kind in _FENCED:
            refusal = self._fenced(peer, message, payload)
        elif kind in _LEADERS_ALONE:
            lines = isinstance(message, msg.Announce) and self.leadership.believes(peer)
            if peer == self.core.leader or lines:
                refusal = self._from_leader(message)
            else:
                refusal = "only the leader says that"
        elif self.lead is not None and kind in _TO_LEADER:
            refusal = self._to_leader(self.lead, peer, message)
        elif kind not in _HEARTBEATS and isinstance(message, RaftMessage):
            refusal = self.voter.receive(peer, message)
        else:
            refusal = self._plain(peer, message, payload)
        if refusal is not None:
            self._refuse(peer, message, refusal)

    def _watched(self, peer: str, message: msg.Watch) -> str | None:
        """Somebody looks on. It was taken for a peer on its way in, unless its ticket said so."""
        if not self.leadership.founder:
            return "the run's events are with the data node that founded it"
        refusal = self.audience.asked(peer, message)
        if peer in self.audience and peer in self.core.links:
            self.contacts.link_down(peer)
        return refusal

    def _refuse(self, peer: str, message: msg.AnyMessage, reason: str) -> None:
        """Count it; who says too much that is refused is hung up on."""
        core = self.core
        core.refuse(peer, type(message).__name__, reason)
        flood = peer != core.me and not core.refusals.take(peer, Kind.REFUSAL, core.now)
        looks_on = peer in self.audience or self.roles.get(peer) == ROLE
        if flood and (looks_on or peer in core.links):
            reason = f"too many messages that are refused (the last: {reason})"
            core.note("refused", subject=peer, reason=f"the connection: {reason}", count=1)
            core.refusals.ban(peer, core.now)
            core.effects.append(ev.HangUp(peer, reason))
            self._link_down(peer, reason, refused=False)

    def _garbled(self, peer: str, reason: str) -> None:
        """Its link is closed already. Who does so again and again is not let in for a while."""
        core = self.core
        core.refuse(peer, "bytes", reason)
        if not core.refusals.take(peer, Kind.REFUSAL, core.now, GARBLED):
            core.refusals.ban(peer, core.now)
        self._link_down(peer, reason, refused=False)

    def _fenced(self, peer: str, message: msg.AnyMessage, payload: Payload | None) -> str | None:
        """A message about an iteration: process it, keep it for later, or say why not."""
        fence: msg.Fence = message.fence  # type: ignore[union-attr]
        core = self.core
        member = core.membership.members.get(peer)
        if fence.epoch != core.settings.epoch:
            return f"epoch {fence.epoch}, not {core.settings.epoch}"
        if member is not None and fence.incarnation != member.incarnation:
            if member.incarnation < fence.incarnation == core.linked_incarnation.get(peer):
                return self._keep_early(peer, message, payload, fence.t)  # the log has yet to tell of it
            return f"incarnation {fence.incarnation}, not {member.incarnation}"
        iteration = self.iteration
        if iteration is None or fence.t > iteration.t:
            if fence.t <= self.replica.t:
                return None
            return self._keep_early(peer, message, payload, fence.t)
        if fence.base not in self._bases:
            # The log may have gone back, and this come before the news: then it is taken up again.
            self._keep_early(peer, message, payload, fence.t)
        if fence.t < iteration.t:
            return None
        if fence.base != iteration.base:
            return f"iteration {fence.t} on another base"
        if member is None:
            # One that is admitted finds those whom the log has yet to tell of it.
            return self._keep_early(peer, message, payload, fence.t) if peer in core.links else "not a member"
        return self._current(iteration, peer, member.stage, message, payload)

    def _keep_early(
        self, peer: str, message: msg.AnyMessage, payload: Payload | None, t: int
    ) -> str | None:
        ahead = max(0, t - max(self.replica.t, self.committed))
        return self._early.keep(peer, message, payload, ahead)

    def _current(
        self, iteration: Iteration, peer: str, stage: int, message: msg.AnyMessage, payload: Payload | None
    ) -> str | None:
        core = self.core
        kind = type(message)
        if kind in _FROM_LEADER:
            if peer != core.leader:
                return "only the leader says that"
        elif not core.membership.is_live(peer, stage, iteration.t):
            return self._keep_early(peer, message, payload, iteration.t)  # the log may say so in a moment
        if kind in _FROM_NEXT and stage != core.next_stage():
            return f"stage {stage} does not follow mine"
        if kind in _FROM_PREVIOUS and stage != core.previous_stage():
            return f"stage {stage} does not precede mine"
        if kind in _FROM_BESIDE and stage not in (core.previous_stage(), core.next_stage()):
            return f"stage {stage} is not beside mine"
        if kind in _FROM_STAGE and stage != core.stage:
            return f"stage {stage} is not mine"
        match message:
            case msg.Slots():
                iteration.on_slots(peer, message)
            case msg.Ask():
                return iteration.on_ask(peer, message)
            case msg.Return():
                iteration.on_return(peer, message)
            case msg.Forward():
                refusal = iteration.on_forward(peer, message, payload)
                if refusal is not None:
                    iteration.lack(peer, message.index, message.way, refused=True)
                return refusal
            case msg.Backward():
                return iteration.on_backward(peer, message, payload)
            case msg.Want():
                iteration.on_want(peer, message)
            case msg.Got():
                iteration.on_got(peer, message)
            case msg.Have():
                iteration.sender.on_have(peer, message.index, message.way)
            case msg.Lack():
                iteration.sender.on_lack(peer, message.index, message.refused, message.way)
            case msg.Attempt():
                if message.stage != core.stage:
                    return f"stage {message.stage} is not mine"
                return self.replica.on_attempt(message)
            case msg.ReducePart() | msg.ReducedPart():
                return self.replica.on_part(peer, message, payload)
            case msg.Missing():
                self._recheck(iteration, message)
        return None

    def _recheck(self, iteration: Iteration, message: msg.Missing) -> None:
        """Nobody claims these units: whoever sent one on asks after it (R6)."""
        following = self.core.next_stage()
        units = message.units.get(following, ())
        if following == 0:
            iteration.sender.recheck([unit // 2 for unit in units if unit % 2 == 0])
        else:
            iteration.sender.recheck(list(units))
        if self.core.stage == 0:
            iteration.sender.recheck([unit // 2 for unit in message.units.get(0, ()) if unit % 2 == 1])
        if units == () and not message.units:
            self._repeat()

    def _from_leader(self, message: msg.AnyMessage) -> str | None:
        match message:
            case msg.Announce(entries):
                for line in entries:
                    self._follow(line)
            case msg.Release(fence):
                self._retained = [kept for kept in self._retained if kept.t > fence.t]
                if self._applied is not None and self._applied.fence.base == fence.base:
                    self._applied = None
            case msg.Welcome():
                self.joining.welcomed(message)
            case msg.About():
                self.joining.about(message)
            case msg.Refused(reason):
                self._stop(reason, ok=False)
            case msg.Keep() | msg.KeepGradient() if not self.joining.done:
                pass  # for my former process: there is nothing here yet to check it with
            case msg.Keep():
                return self.snapshots.on_keep(message)
            case msg.KeepGradient():
                return self.snapshots.gradients.on_keep(message)
            case msg.Steps():
                return self.joining.fetching.told_steps(message)
            case msg.Complete(t) if t <= self.committed:  # what is later may have been gone back from
                self.snapshots.complete(t)
            case msg.Holders():
                self.joining.fetching.told_holders(message)
        return None

    def _to_leader(self, lead: Leader, peer: str, message: msg.AnyMessage) -> str | None:
        member, fence = self.core.membership.members.get(peer), getattr(message, "fence", None)
        if member is not None and fence is not None and fence.incarnation != member.incarnation:
            return f"incarnation {fence.incarnation}, not {member.incarnation}"
        match message:
            case msg.Claim():
                return lead.reports.on_claim(peer, message)
            case msg.Prepared():
                return lead.reports.on_prepared(peer, message)
            case msg.Applied():
                lead.released.on_applied(peer, message)
            case msg.Overflow():
                lead.reports.on_overflow(peer, message)
            case msg.Enquire():
                self.core.send(peer, msg.About(self.joining.genesis, self._doors()))
            case msg.JoinRequest():
                return lead.admission.on_join(peer, message)
            case msg.Ready() if peer not in self.core.membership.members:
                self.core.send(peer, msg.Refused("you are no longer a member of the run: join it again"))
            case msg.Ready():
                agreed = lead.released.fingerprint_at(message.t, message.stage)
                fingerprint = agreed or lead.restoring.brought_up(message, lead.t)
                return lead.admission.on_ready(peer, message, fingerprint)
            case msg.Leave(reason):
                lead.admission.leave(peer, reason)
            case msg.Report():
                return self._reported(peer, message)
            case msg.Wish(done=True) if peer == self.core.me:
                self.wishes.answered(message)
            case msg.Wish() if peer != self.core.founder:
                return "only the run's owner decides that"
            case msg.Wish():
                lead.asked.wish = message
            case msg.Holds():
                lead.keeping.on_holds(peer, message)
            case msg.Spoilt():
                lead.keeping.on_spoilt(peer, message)
            case msg.WhoHas():
                lead.restoring.on_who_has(peer, message, lead.t)
            case msg.Behind():
                lead.restoring.on_behind(peer, message)
        return None

    def _reported(self, peer: str, message: msg.Report) -> str | None:
        """Lines for the run's event log, which the founder has. It is told by those who keep the log, too, of
        what others reported while it was away."""
        core, founder = self.core, self.leadership.founder
        if not core.refusals.take(peer, Kind.LINES, core.now, len(message.events)):
            return "too many lines for the event log"
        if message.origin and not (founder and core.keeps_log(peer)):
            return "lines of another peer"
        if founder:
            core.effects.append(ev.Reported(message.origin or peer, message.events))
        else:
            self.clippings.keep(peer, message.events)
        return None

    def _plain(self, peer: str, message: msg.AnyMessage, payload: Payload | None) -> str | None:
        core = self.core
        match message:
            case msg.Report() if self.leadership.founder and core.keeps_log(peer):
                return self._reported(peer, message)
            case msg.Ping(number):
                self.contacts.pinged(peer)
                core.send(peer, self._pong(peer, number))
                return self.leadership.heard(peer, message)
            case msg.Pong(_, forward_s, backward_s, bandwidth_bps, price):
                trip_s = self.contacts.pong(message)
                core.costs.of(peer).told_speed(forward_s, backward_s, bandwidth_bps, price)
                if trip_s is not None:
                    core.costs.answered(peer, trip_s, core.now)
                self.router.measured(peer)
            case msg.FetchLog(start):
                lines = self.voter.since(start)
                if lines:
                    core.send(peer, msg.Announce(lines))
            case (
                msg.Claim() | msg.Prepared() | msg.Applied() | msg.Overflow() | msg.Ready() | msg.Report()
                | msg.Holds() | msg.WhoHas() | msg.Behind() | msg.Spoilt() | msg.Leave()
                | msg.Wish(done=False)
            ) if self.voter.minds or (core.keeps_log(core.me) and len(core.voters) > 1):
                pass  # it takes me for the leader; it is told who leads, and says it again there
            case msg.Enquire() | msg.JoinRequest():
                self.leadership.elsewhere(peer)
            case msg.Wish(done=True) if peer == core.leader:
                self.wishes.answered(message)
            case msg.Elsewhere() if peer == core.leader:
                self.joining.elsewhere(message)
            case msg.Route() | msg.Bargain() | msg.Burst() | msg.GotBurst():
                return self.router.received(peer, message)
            case msg.FetchGradient():
                if self.replica.t < 0 and not self.snapshots.gradients.has(message):
                    core.send(peer, msg.Gradient(message.t, message.stage))
                elif message.stage == core.stage and not self.snapshots.gradients.has(message):
                    self.replica.on_fetch_gradient(peer, message)
                elif core.settings.redo == "gradients":
                    self.snapshots.gradients.on_fetch(peer, message)
                else:
                    return f"stage {message.stage} is not mine"
            case msg.Gradient():
                self.snapshots.gradients.on_gradient(peer, message, payload)
                self.replica.on_gradient(peer, message, payload)
            case msg.FetchState():
                self.states.on_fetch_state(peer, message)
            case msg.FetchPiece():
                self.states.on_fetch_piece(peer, message)
            case msg.StateOffer():
                for download in self._downloads():
                    download.on_offer(peer, message)
            case msg.Piece():
                for download in self._downloads():
                    download.on_piece(peer, message, payload)
            case msg.Probe() | msg.Probed():
                return self.contacts.witnesses.received(peer, message)
            case _:
                return "I am not the leader"
        return None

    def _pong(self, peer: str, number: int) -> msg.Pong:
        costs = self.core.costs
        measured_bps = costs.of(peer).link.out_bps(costs.activation_bytes) or 0.0
        return msg.Pong(number, *self._passes(), measured_bps, self.router.price())

    def _passes(self) -> tuple[float, float]:
        """Seconds of a microbatch's forward and backward here: as measured in this run, or before both were
        as this machine measured a block when it joined."""
        core = self.core
        measured, member = (core.costs.forward_s, core.costs.backward_s), core.membership.members.get(core.me)
        if all(measured) or member is None:
            return measured
        if core.stage == 0:
            return measured[0] or member.forward_s, measured[1]
        blocks = core.settings.blocks
        return first_passes(member, blocks[core.stage - 1] if blocks else 1)

    def _downloads(self) -> list[Download]:
        fetched = self.joining.fetching.download
        own = [fetched] if fetched is not None else []
        own += self.snapshots.downloads.values()
        return own + (self.lead.checkpoints.downloads if self.lead is not None else [])

    # --- the log -------------------------------------------------------------------------------

    def _follow(self, line: bytes) -> None:
        """Fold one chosen entry, in order; a gap is fetched."""
        try:
            entry, position = follow(self.position, line)
        except Known:
            return
        except LogError:
            if self.joining.done:
                self._ask_for_log()
            return
        self.position = position
        self.leadership.following.line(entry.term)
        if self.core.settings.redo == "gradients":
            self.core.taken.follow(entry.record, line)
        self._fold(entry.record, entry_hash(line))

    def _ask_for_log(self, peer: str = "") -> None:
        self.core.send(peer or self.core.leader, msg.FetchLog(self.position.index))

    def _chosen(self, line: bytes) -> None:
        """The voters chose a line. Who leads tells everyone, then folds it (which may end this peer). A peer
        on its way in is told where the run stands."""
        self.leadership.missed(line)
        if not self.joining.done:
            return
        if self.lead is not None:
            self.lead.telling.chosen(line)
        self._follow(line)

    def _fold(self, record: AnyRecord, line_hash: str) -> None:
        self.leadership.fold(record)
        match record:
            case Genesis():
                self.base, self.committed = line_hash, 0
            case Members():
                self._members(record)
            case Commit():
                self.base, self.committed = line_hash, record.t
                if record.evaluation is not None:
                    self.core.note("evaluation", t=record.evaluation.t, evaluation=record.evaluation)
                self.core.note("step", record=record, base=line_hash)
                self.replica.commit(record, line_hash)
            case Rollback(t, _, reason):
                self.base, self.committed = line_hash, t
                self.core.note("rollback", t=t, reason=reason)
                self._roll_back(record, line_hash)
            case Closing(t, evaluation):
                self.core.note("evaluation", t=t, evaluation=evaluation)
                self._closed = True
                self.iteration = None
            case Control("stop", _):
                self._stop_logged = self.lead.end_reason if self.lead else "the run is over"
            case Control(action, t):
                self.core.note("control", action=action, t=t)
        self.core.membership.open(self.committed + 1, self.core.settings.stages)
        if self.lead is not None:
            self.lead.chosen(record, line_hash)
        if self._stop_logged is not None:
            self._stop(self._stop_logged, ok=True)
        self._open()

    def _roll_back(self, record: Rollback, base: str) -> None:
        """Everything after record.t is void: forget it, and go on from the state there."""
        known = set(self._bases) - {base}
        self._early.forget(lambda message: message.fence.base in known)  # type: ignore[union-attr]
        self._forget_work(record.t)
        self._closed = False
        self.core.membership.rolled_back(record.t)
        self.states.rolled_back(record.t)
        self.snapshots.rolled_back(record.t)
        self.joining.fetching.roll_back(record, base)

    def _forget_work(self, t: int) -> None:
        """Nothing of the iterations after t is of use here any more."""
        self.iteration, self._applied = None, None
        self._retained = []
        self.core.queue.drop_after(t)
        self.replica.roll_back()

    def _move(self, stage: int) -> None:
        """The log gave me another stage."""
        self.core.note("note", text=f"going over from stage {self.core.stage} to stage {stage}")
        self._forget_work(-1)
        self.states.abandon(-1)
        self.snapshots.moved()
        self.core.stage = stage
        self.router = Router(self.core)
        self.joining.fetching.move()

    def _members(self, record: Members) -> None:
        core = self.core
        stages = {peer: core.membership.stage_of(peer) for peer in record.removed}
        members = core.membership.members
        fenced = {peer: members[peer].incarnation for peer in record.removed if peer in members}
        core.membership.apply(record)
        moved = {member.id: member.stage for member in record.joined if member.id in record.removed}
        for peer, reason in record.removed.items():
            stage = stages[peer]
            core.note("peer_removed", subject=peer, stage=stage if stage is not None else -1, reason=reason)
            if peer == core.me:
                if peer in moved:
                    self._move(moved[peer])
                    continue
                if self.lead is not None and self.lead.opening:
                    continue  # it removes its own former process when it takes the run up again
                left = self.leaving.reason is not None
                self._stop(reason if left else f"removed from the run: {reason}", ok=left)
                return
            if self.iteration is not None and stage is not None:
                self.iteration.peer_removed(peer, stage, reason)
            self.router.link_down(peer)
            if peer in moved:
                continue
            self.contacts.forget(peer)
            if peer in core.links and core.linked_incarnation.get(peer, 0) <= fenced.get(peer, 0):
                core.send(peer, msg.Refused(f"removed from the run: {reason}"))
                core.links.pop(peer)
                core.effects.append(ev.HangUp(peer, reason))
        for member in record.joined:
            core.note("peer_joined", member=member)
            self.welcome(member)
        for peer, t in record.active_from.items():
            core.note("peer_active", subject=peer, from_iteration=t)
        self.joining.members_changed(record)
        touched = core.me in record.active_from or any(member.id == core.me for member in record.joined)
        if touched or not core.near.crowded:
            self._look_around()
        else:
            self.contacts.at_beat = self._look_around  # in a large swarm somebody comes or goes all the time
        if record.active_from and self.iteration is not None:
            self._take_early(self.iteration)
            if any(core.membership.stage_of(peer) == core.next_stage() for peer in record.active_from):
                self.iteration.sender.pump()

    # --- iterations ----------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the iteration after the applied one, if I serve and every stage has somebody (R1)."""
        core = self.core
        t = self.replica.t + 1
        if self.iteration is not None or t < 1 or self.stopped or self.replica.pending:
            return
        if not core.course.opens(t):
            return
        if not core.membership.is_live(core.me, core.stage, t):
            return
        stages = range(core.settings.stages + 1)
        if not all(core.membership.count(stage, t) for stage in stages):
            return
        last = core.steps
        windows = core.settings.windows if core.settings.evaluates(t - 1, last) else 0
        if t > last and (self._closed or not windows or t > last + 1):
            return
        capacity = core.membership.members[core.me].capacity
        plan = self.router.shares(core.near.beside(core.previous_stage(), core.stage, t))
        iteration = Iteration(core, t, self.joining.state_base, capacity, windows, t <= last, plan)
        self.iteration = iteration
        self.replica.open(iteration)
        self.contacts.trim()
        self._repeat_at = core.now + self._repeat_s()
        self._early.forget(lambda message: message.fence.t < t)  # type: ignore[union-attr]
        self._take_early(iteration)

    def _take_early(self, iteration: Iteration) -> None:
        """Look again at what came before its time, and is of this iteration."""
        for peer, message, payload in self._early.take():
            fence: msg.Fence = message.fence  # type: ignore[union-attr]
            if fence.t == iteration.t and fence.base == iteration.base:
                self._receive(peer, message, payload)
            elif fence.t > iteration.t or fence.base not in self._bases:
                self._keep_early(peer, message, payload, fence.t)

    def _on_applied(self, t: int, base: str, fingerprint: str) -> None:
        core = self.core
        self.joining.state_base = base
        if self.iteration is not None and self.iteration.t <= t:
            self._retained = [self.iteration]  # C_t was proposed when t - 1 had been released (R11)
            self.iteration = None
        core.queue.drop(t)
        self.states.applied(t)
        self.snapshots.applied(t)
        timing = dict(core.seconds)
        core.seconds.clear()
        if core.me in core.membership.active_from:
            self.tell_applied(timing)
            core.note("timing", t=t, stage=core.stage, seconds=timing)
        self.joining.applied()
        self._open()

    def tell_applied(self, timing: dict[str, float]) -> None:
        """Tell the leader which step was taken last (R9)."""
        core, replica = self.core, self.replica
        fence = core.fence(replica.t, self.joining.state_base)
        self._applied = msg.Applied(fence, core.stage, replica.fingerprint, timing, core.costs.links())
        self._repeat_at = core.now + self._repeat_s()
        core.send(core.leader, self._applied)

    def _fell_behind(self, step: int) -> None:
        """The gradient of a step that I missed is kept by nobody: fetch the whole state again."""
        self.iteration = None
        self.core.queue.drop(self.committed)
        self.joining.fetching.fell_behind(step)

    def _read_checkpoint(self, t: int, stage: int) -> bool:
        if self.lead is None or not self.lead.has_directory:
            return False
        self.core.effects.append(ev.ReadCheckpoint(t, stage))
        return True

    def welcome(self, member: Member) -> None:
        """Tell an admitted peer where the run stands (leader only)."""
        lead, core = self.lead, self.core
        if lead is None or member.id == core.me:
            return
        core.send(
            member.id,
            msg.Welcome(
                member.stage,
                tuple(sorted(core.membership.members.values(), key=lambda m: core.membership.order[m.id])),
                dict(core.membership.active_from),
                core.membership.number,
                self.position.index,
                self.position.previous,
                lead.base,
                lead.t,
                lead.tip.adam_step,
                lead.log.term,
                lead.released.fingerprint_at(lead.t, member.stage) or "",
                self.certify(member),
                core.voters,
                self.leadership.skips,
                core.course.steps,
                core.course.held,
            ),
        )

    def _doors(self) -> tuple[tuple[str, str], ...]:
        """Those who keep the log, for a joiner whose leader is gone before it is in."""
        members = self.core.membership.members
        return tuple((p, m.address) for p, m in members.items() if m.address and self.core.keeps_log(p))


def _no_certificate(member: Member) -> bytes:
    """Drivers without connections need none."""
    return b""
