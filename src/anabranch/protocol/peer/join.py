"""Joining a run: find the leader, enquire, describe this machine, be admitted, build the stage, report (R14).

The leader of a new run takes the same steps without the messages. `catch_up` fetches the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from anabranch import PROTOCOL_VERSION
from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.context.clock import Timer
from anabranch.protocol.context.links import LostLink
from anabranch.protocol.context.run_view import RunCourse
from anabranch.protocol.interface.events import Admitted, BuildStage, Describe, Described, Dial, StageBuilt
from anabranch.protocol.log.hash_chain import Position
from anabranch.protocol.log.overflow_streak import OverflowStreak
from anabranch.protocol.log.records import NO_ENTRY, Members
from anabranch.protocol.messages import About, Elsewhere, Enquire, JoinRequest, Reached, Ready, Welcome
from anabranch.protocol.peer.catch_up import CatchUp
from anabranch.protocol.peer.iterations import Iterations
from anabranch.protocol.peer.shared_state import SharedParts, Step

#: First and longest wait (s) before an unanswered request is repeated, and number of requests: about a
#: quarter of an hour, in which a run that lost its leader elects another.
ASK_AGAIN = (2.0, 30.0, 30)
#: Time (s) that a dial and a question at one of the run's known addresses take at most before the next one is
#: tried, and between two turns through all of them.
KNOCK_S = 2.0
#: Time (s) between reports of a joiner that has loaded its state and waits for the record that lets it serve.
REPORT_S = 2.0


class JoinProcess(Timer):
    """Steps of a joiner from STRANGER to BUILDING, and its report that it has loaded the state.

    doors: addresses, by peer, at which a stranger asks for the run's leader. model_hash: hash of the model
    that this machine trains.
    """

    def __init__(
        self,
        shared: SharedParts,
        iterations: Iterations,
        stage_wanted: int,
        doors: Mapping[str, str],
        connect: Callable[[], None],
        address: str = "",
    ) -> None:
        """connect: brings the links up to date with the members. address: addresses of this machine that the
        leader is to try ("": none)."""
        self._ctx, self._progress, self._exit = shared.ctx, shared.progress, shared.exit
        self._entry, self._coordination, self._summary = shared.entry, shared.coordination, shared.summary
        self._following = shared.following
        self._snapshots, self._founder_requests = shared.snapshots, shared.founder_requests
        self._iterations, self._connect = iterations, connect
        self._stage_wanted = stage_wanted
        self._request: JoinRequest | None = None
        self._asks = Backoff(shared.ctx.rng, *ASK_AGAIN)
        self.model_hash, self._address = "", address
        self.doors = dict(doors)
        self.begins_at = (0, NO_ENTRY)
        """Index of the first log line that this peer follows, and hash of the line before it."""
        self._knock_at, self._knocks = math.inf, 0
        self._refused_by = ""
        """Last asked peer, if it knew of no leader or is silent: the next address is tried though its link is
        up."""
        self.fetching = CatchUp(shared, iterations.replica, self._has_state)

    @property
    def step(self) -> Step:
        return self._entry.step

    # --- finding the leader --------------------------------------------------------------------

    def start(self) -> None:
        """Begin: a leader admits itself, others wait for a link and dial further addresses (`doors`)
        meanwhile. Called once."""
        if self._coordination.coordinator is not None:
            self.admit_self()
        elif self.doors:
            self._knock_at = self._ctx.clock.now + KNOCK_S

    def admit_self(self) -> None:
        """Take this peer, which leads the log, for one that has asked to be admitted: it follows the log from
        now on, needs no welcome, and builds its stage once the log admits it."""
        self._entry.done = True
        self._entry.advance(Step.REQUESTED)
        self._entry.repeat_at = math.inf
        self._knock_at = math.inf

    def lost_lead(self) -> None:
        """Become a stranger again: this founder, which was elected and began to resume the run, lost the lead
        before the log admitted it."""
        self._entry.done = False
        self._entry.advance(Step.STRANGER)
        self._entry.repeat_at = math.inf
        self._knock_at = self._ctx.clock.now + KNOCK_S

    def leader_up(self) -> None:
        """Send the peer that is taken for the leader, whose link came up, the question, request or report
        that is due at this step of joining; no further address is tried while it is linked."""
        self._asks.reset()
        self._founder_requests.repeat()
        if self.step in (Step.STRANGER, Step.ENQUIRED):
            self._enquire()
        elif self.step is Step.REQUESTED:
            self._send_request()
        else:
            self.report()
        self._knock_at = math.inf

    def on_elsewhere(self, message: Elsewhere) -> None:
        """Ask the leader that another peer named in `message`, dialling it if need be. If the message names
        nobody, or this peer itself, the next address is tried. Ignored by a peer that has joined or leads,
        and if the named leader is the one that is asked already."""
        ctx, leader = self._ctx, message.leader
        self._asks.reset()
        if self._entry.done or ctx.log.leads or leader == ctx.log.leader:
            return  # the request is repeated later
        if leader in ("", ctx.me):  # it knows no leader, but another address may
            self._refused_by = ctx.log.leader
            self._knock_at = self._next_knock()
            if self._doors_here():
                self._entry.repeat_at = math.inf  # a question that is repeated would put off the knock
            return
        self.doors.setdefault(leader, message.address)
        ctx.log.follow_leader(leader)
        if leader in ctx.links.up:
            self.leader_up()
        elif message.address:
            ctx.outbox.emit(Dial(leader, message.address))

    def _next_knock(self) -> float:
        """Time (s) at which the next address is tried: now, or after a wait once all were."""
        all_tried = self._knocks % max(1, len(self._doors_here())) == 0
        return self._ctx.clock.now + (KNOCK_S if all_tried else 0.0)

    def _doors_here(self) -> list[str]:
        """Other peers that can be asked who leads the run, by id: those at known addresses, and the last one
        that knew of no leader while its link is up, since it may know one later."""
        ctx = self._ctx
        return sorted((self.doors.keys() | ({self._refused_by} & ctx.links.up.keys())) - {ctx.me})

    def _knock(self) -> None:
        """Ask the next peer of `_doors_here`, in turn, who leads the run; it is dialled if need be. Nothing
        if there is none."""
        ctx, doors = self._ctx, self._doors_here()
        self._knock_at = ctx.clock.now + KNOCK_S
        if not doors:
            return
        door = doors[self._knocks % len(doors)]
        ctx.log.follow_leader(door)
        self._knocks += 1
        if door in ctx.links.up:
            self.leader_up()
        else:
            ctx.outbox.emit(Dial(door, self.doors[door]))

    # --- being admitted ------------------------------------------------------------------------

    def _enquire(self) -> None:
        self._entry.advance(Step.ENQUIRED)
        self._ctx.outbox.send(self._ctx.log.leader, Enquire(self._address))
        self._ask_again()

    def on_reached(self, message: Reached) -> None:
        """Note in the event log whether other peers can dial this machine directly, or only reach it through
        a carrier."""
        if message.addresses:
            text = f"others reach this machine directly, at {message.addresses}"
        else:
            text = (
                f"nobody can dial this machine at {self._address} ({message.reason}): it dials the others, "
                "and others reach it through a carrier; to be dialled, forward the port on the router and "
                "name the public address with --advertise"
            )
        self._ctx.outbox.note("note", text=text)

    def on_about(self, message: About) -> None:
        """Store the description of the run, and have the driver measure this machine for it; stop this peer
        if the run speaks another protocol version. Unless this peer waits for it, only addresses are
        stored."""
        genesis = message.genesis
        self.doors.update(message.doors)
        if self.step is not Step.ENQUIRED:
            return
        self._entry.learn_genesis(genesis)
        self._answered()
        if genesis.protocol_version != PROTOCOL_VERSION:
            self._exit.stop(
                f"the run speaks protocol version {genesis.protocol_version}, this release "
                f"{PROTOCOL_VERSION}: install the release that the run uses",
                ok=False,
            )
            return
        self._entry.advance(Step.DESCRIBING)
        self._ctx.outbox.emit(Describe(genesis))

    def described(self, event: Described) -> None:
        """Use the run's settings, and ask to be admitted with this machine's measurements; ignored if this
        peer did not wait for them."""
        if self.step is not Step.DESCRIBING:
            return
        self._ctx.use_settings(event.settings)
        self.model_hash = event.model_hash
        self._ctx.run.describe(event.schedule)
        self._request = JoinRequest(
            event.member, self._stage_wanted, PROTOCOL_VERSION, event.model_hash, event.corpus_fingerprint
        )
        self._entry.advance(Step.REQUESTED)
        self._send_request()

    def _send_request(self) -> None:
        """Ask the peer that is taken for the leader to admit this one, and plan the next repetition; after
        the last one stop this peer (`_ask_again`). Nothing at a leader that admits itself, which has no
        request."""
        if self._request is not None:
            self._ctx.outbox.send(self._ctx.log.leader, self._request)
            self._ask_again()

    def on_welcome(self, welcome: Welcome) -> None:
        """Enter the run: begin at the log position in `welcome`, and build the stage. Ignored unless this
        peer has asked to be admitted; a plan of the next round that no honest leader makes stops this
        peer."""
        if self.step is not Step.REQUESTED:
            return
        ctx, run, t = self._ctx, self._ctx.run, welcome.t
        self._entry.done = True
        self.begins_at = (welcome.next_index, welcome.last_hash)
        self._answered()
        run.assign_stage(welcome.stage)
        run.membership.enter(welcome.members, welcome.active_from, welcome.number)
        ctx.dialer.use_fellows({})
        ctx.log.elect(welcome.voters)
        self._following.admitted(welcome.term)
        run.resume_course(RunCourse(welcome.steps, welcome.held))
        if wrong := run.plan_round(t + 1, welcome.slots):
            reason = f"the run's leader plans the next round as no honest one does: {wrong}"
            self._exit.stop(reason, ok=False)
            return
        run.revoked.add(welcome.revoked)
        run.use_carriers(welcome.carriers)
        self._summary.start(welcome.adam_step)
        self._summary.overflows = OverflowStreak.unseen(welcome.skips)
        base, _, former = welcome.base.partition(" ")
        self._progress.start(Position(welcome.next_index, welcome.last_hash), base, t, former)
        run.membership.open(t + 1, run.settings.stages)
        self.fetching.announce(t, base, welcome.fingerprint)
        self._entry.advance(Step.BUILDING)
        ctx.outbox.emit(Admitted(welcome.stage, welcome.certificate))
        ctx.outbox.emit(BuildStage(welcome.stage))
        self._connect()

    def built(self, event: StageBuilt) -> None:
        if self.step is not Step.BUILDING:
            return
        lead, seeded = self._coordination.coordinator, self._entry.genesis.fingerprints[self._ctx.run.stage]
        if lead is not None and event.fingerprint == seeded:
            lead.catalog.begun_as_seeded()
        self.fetching.built(event.fingerprint, event.kept)

    def members_changed(self, record: Members) -> None:
        """React to a membership record: if this peer begins to serve by it, the last step is reported as
        applied; if the record admits this peer while it leads the log, stage 0 is built."""
        ctx = self._ctx
        if ctx.me in record.active_from:
            if self.step is Step.READY:  # else this peer lost its state and fetches it again
                self._entry.repeat_at = math.inf
            self._report_applied()
        lead = self._coordination.coordinator if self.step is Step.REQUESTED else None
        if lead is not None and any(member.id == ctx.me for member in record.joined):
            ctx.dialer.use_fellows({})
            self.fetching.announce(lead.t, lead.base, lead.tip.fingerprints[0])
            self._entry.advance(Step.BUILDING)
            ctx.outbox.emit(BuildStage(0))

    # --- reports -------------------------------------------------------------------------------

    def _has_state(self) -> None:
        """Report that the state is loaded, apply the steps after it, and open the next iteration. A member
        that only audits just applies them."""
        if self._ctx.me in self._ctx.run.membership.auditors:
            t = self._iterations.replica.t
            text = f"auditing stage {self._ctx.run.stage}, from its state after iteration {t} on"
            self._ctx.outbox.note("note", text=text)
        self.report()
        self._report_applied()
        self._iterations.replica.advance()
        self._iterations.open()

    def report(self) -> None:
        """Report the state and its proof to the leader, once it is loaded; repeated until the log lets this
        peer serve. Nothing before it is loaded, or by a member that only audits."""
        if self.step is not Step.READY:
            return
        ctx, replica = self._ctx, self._iterations.replica
        membership = ctx.run.membership
        if ctx.me in membership.active_from or ctx.me in membership.auditors:
            self._entry.repeat_at = math.inf  # it serves, or never will
            return
        links = ctx.costs.links(ctx.run.membership.members) if ctx.run.deals else {}
        proof = self._iterations.possession.get()
        if proof is not None:  # else it is computed, and reported then
            ready = Ready(replica.t, ctx.run.stage, replica.fingerprint, ctx.apart(), links, proof)
            ctx.outbox.send(ctx.log.leader, ready)
        self._entry.repeat_at = ctx.clock.now + REPORT_S * ctx.rng.uniform(0.75, 1.0)

    def _report_applied(self) -> None:
        """Report to the leader, as applied, the step that led to the loaded state; nothing unless this peer
        serves. If the other replicas of the stage are gone, the leader needs this report: only a step that
        replicas of every stage have applied is released, and the next one taken (R11)."""
        serves = self._ctx.me in self._ctx.run.membership.active_from
        if self.step is Step.READY and serves and self._iterations.replica.t > 0:
            self._iterations.report_applied({})

    # --- timer and link observer ---------------------------------------------------------------

    def _ask_again(self) -> None:
        """Plan the next repetition of a question; after the last one, stop this peer."""
        wait_s = self._asks.next()
        if wait_s is None:
            asked = "what the run is" if self.step is Step.ENQUIRED else "to be admitted"
            reason = f"the run's leader is linked and did not answer {self._asks.tries} times (asked {asked})"
            self._exit.stop(f"{reason}: see whether the run goes on", ok=False, again=True)
        else:
            self._entry.repeat_at = self._ctx.clock.now + wait_s

    def _answered(self) -> None:
        self._entry.repeat_at = math.inf
        self._asks.reset()

    def deadline(self) -> float:
        return min(min(self._entry.repeat_at, self._knock_at), self.fetching.deadline())

    def tick(self) -> None:
        self.fetching.tick()
        ctx, now = self._ctx, self._ctx.clock.now
        if now >= self._knock_at:
            self._knock_at = math.inf
            shut = ctx.log.leader not in ctx.links.up or ctx.log.leader == self._refused_by
            if shut and not self._entry.done and not ctx.log.leads:
                self._knock()
        if now < self._entry.repeat_at:
            return
        self._entry.repeat_at = math.inf
        silent = {ctx.log.leader} & ctx.links.suspects
        if self.step in (Step.ENQUIRED, Step.REQUESTED) and silent and {*self._doors_here()} - silent:
            self._refused_by = ctx.log.leader  # if it vanished, its link stays all the same
            self._knock()
        elif self.step is Step.ENQUIRED:
            self._enquire()
        elif self.step is Step.REQUESTED:
            self._send_request()
        elif self.step in (Step.FETCHING, Step.LOADING):
            self.fetching.begin()
        else:
            self.report()

    def link_up(self, peer: str) -> None:
        if peer == self._ctx.log.leader:
            self.leader_up()
            self._snapshots.report()
            self._iterations.repeat()
            self._iterations.auditor.repeat()
        elif self._ctx.run.membership.stage_of(peer) == self._ctx.run.stage:
            self.report()  # a joiner may have waited for that link

    def link_down(self, lost: LostLink) -> None:
        if lost.peer != self._ctx.log.leader:
            return
        self._ctx.outbox.note("waiting", reason=f"the link to the leader is down: {lost.reason}")
        if not self._entry.done and self.doors:
            self._knock_at = min(self._knock_at, self._next_knock())
