"""Links of a peer to others: heartbeats, detection of silent peers, and the choice of members to stay
connected with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from anabranch.addresses import own_addresses
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.failure_detection.indirect_probes import IndirectProbes
from anabranch.protocol.failure_detection.slow_payloads import SLOW_TO, SlowPayloads
from anabranch.protocol.failure_detection.verdict import Overdue, Verdict
from anabranch.protocol.interface.events import Dial, HangUp
from anabranch.protocol.messages import Ping, Pong
from anabranch.protocol.telemetry.adaptive_timeout import DOUBT, AdaptiveTimeout

#: Time (s) without a link to any voter after which a member dials the voters itself.
SEEK_S = 8.0
#: Heartbeat intervals without a message after which a link that leads to no neighbour may be closed.
IDLE_HEARTBEATS = 3.0
#: In a large swarm a peer pings only links that were silent for a heartbeat interval, LOOKS times per
#: interval, and every neighbour at least once in MEASURED intervals.
LOOKS, MEASURED = 2, 8.0
#: Heartbeat intervals for which a silent peer is pinged like others, and share by which its silence must have
#: grown since the last ping after that. A stopped process answers all pings at once when it goes on, which
#: must not look like a flood: they are about 200 in a day. Choices: far longer than any silence timeout.
SILENT_HEARTBEATS, GROWN = 64.0, 0.125
#: Heartbeats whose answers are still expected.
PINGS_KEPT = 32
#: Seconds that a round trip through a carrier may take longer than one to the carrier, and number of slower
#: ones in a row after which the carrier is left. A choice: a satellite takes 0.6 s, and payloads of other
#: links delay some heartbeats, but not eight.
SLOW_S, SLOW_PINGS = 1.0, 8
#: Seconds until a member whose link a carrier forwards is dialled directly again, and longest such wait; it
#: doubles with each try. A choice: a try costs a few packets, and a success what was under way on the link.
DIRECT_S, DIRECT_MAX_S = 60.0, 960.0


def is_pinged(silent: float) -> bool:
    """True if a silent peer is pinged at this heartbeat: always at first, later at growing intervals. silent:
    heartbeat intervals since its last message."""
    if silent <= SILENT_HEARTBEATS:
        return True
    return math.floor(math.log(silent) / GROWN) > math.floor(math.log(silent - 1.0) / GROWN)


class Connections:
    """Manager of one peer's links: heartbeats, silence timeouts, dials. The timeout of a member outlives the
    link to it."""

    def __init__(self, ctx: PeerContext, hung_up: Callable[[str], object] | None = None) -> None:
        """hung_up: called with a peer after `trim` closed the link to that peer; by default `link_down`."""
        self.ctx = ctx
        self._hung_up = hung_up or self.link_down
        self._ping_at = self._beat_at = 0.0
        self._hurries = False
        self._pings: dict[int, float] = {}
        self._number = 0
        self._next_index = 0
        self._slow: dict[str, int] = {}
        """Number of successive slow round trips of the present link to a peer, which a carrier forwards."""
        self._payloads: dict[str, SlowPayloads] = {}
        """Payloads of the present link to a peer, which a carrier forwards."""
        self._slow_to: dict[str, set[str]] = {}
        """Carrier -> peers to which its payloads became slow, while these are few."""
        self._direct: dict[str, tuple[float, float]] = {}
        """Member that a carrier linked -> time (s) of the next direct dial, and wait (s) after it."""
        self._known: dict[str, AdaptiveTimeout] = {}
        self._at_beat: Callable[[], object] | None = None
        """Action to run once, with the next heartbeat."""
        self._near: frozenset[str] = frozenset()
        """In a large swarm: members to keep links with, as of the last heartbeat."""
        self._pinged_at: dict[str, float] = {}
        """In a large swarm: time of the last ping to each watched peer."""
        self._none_silent_before = math.inf
        """Earliest time (s) at which a watched link can have been silent for so long that others are asked
        about its peer."""
        self._alone_since = math.inf
        """Since when no voter is linked (inf: one is)."""
        self._listened: dict[str, AdaptiveTimeout] | None = None
        """Watched links; None: all links."""
        self.indirect_probes = IndirectProbes(ctx, self._ping)

    def deadline(self) -> float:
        """Time of the next call of `tick` (s)."""
        ctx = self.ctx
        due = min(min(self._ping_at, self.indirect_probes.deadline()), ctx.dialer.deadline())
        if ctx.clock.now < self._none_silent_before:
            return min(due, self._none_silent_before)
        for peer, silence in self._listening().items():
            due = min(due, max(silence.doubted_at(), self._ask_at(peer, silence)))
            if peer not in ctx.links.suspects:
                due = min(due, silence.suspected_at())
        return due

    def _ask_at(self, peer: str, silence: AdaptiveTimeout) -> float:
        """Earliest time (s) at which this peer asks other members about the silent `peer` (again)."""
        return self.indirect_probes.asked_at(peer) + DOUBT * silence.patience_s

    def silence_due(self, next_index: int) -> bool:
        """True if a watched link may have been silent for the share DOUBT of its timeout, or one loses
        payloads, so that `tick` has to look. next_index: length of this peer's log, stored for pings."""
        self._next_index = next_index
        return self.ctx.clock.now >= self._none_silent_before or bool(self.ctx.links.lossy)

    def tick(self, next_index: int) -> list[Overdue]:
        """Send the pings, dials and indirect probes that are due. Returns the watched peers that have been
        silent for longer than their timeouts, or for the share DOUBT of them if they are silent to all.
        next_index: length of this peer's log, sent with pings."""
        ctx = self.ctx
        self._next_index = next_index
        if ctx.clock.now >= self._ping_at:
            self._beat()
        ctx.dialer.tick()
        self.indirect_probes.tick()
        if ctx.clock.now < self._none_silent_before:
            return []
        links = self._listening()
        self._none_silent_before = min((s.doubted_at() for s in links.values()), default=math.inf)
        now, doubted = ctx.clock.now, {p: s for p, s in links.items() if ctx.clock.now >= s.doubted_at()}
        found = [(s, self.overdue(p, now - s.last_heard, s.patience_s)) for p, s in doubted.items()]
        for peer, silence in doubted.items():
            if now >= self._ask_at(peer, silence):
                self.indirect_probes.ask(peer, silence.patience_s)
        return [overdue for silence, overdue in found if now >= silence.suspected_at() or overdue.to_all]

    def _listening(self) -> Mapping[str, AdaptiveTimeout]:
        """Watched links: links with heartbeats, on which silence means a failure."""
        return self.ctx.links.up if self._listened is None else self._listened

    def _listen(self) -> Mapping[str, AdaptiveTimeout]:
        """Choose and store the watched links: all, or in a large swarm those to neighbours, to peers that
        this peer may wait for, to voters and to peers that are no members. A voter watches all links, and so
        does everybody while stages are to be assigned by links."""
        ctx, before = self.ctx, self._listened
        if ctx.run.near.crowded:
            self._near = self._around()
        if not ctx.run.near.crowded or ctx.run.deals or ctx.me in self._keepers():
            self._listened = None
            return ctx.links.up
        wanted = self._near.union(ctx.links.waited_for())
        members = ctx.run.membership.members
        self._listened = {p: s for p, s in ctx.links.up.items() if p in wanted or p not in members}
        for peer, silence in self._listened.items():
            if before is not None and peer not in before:
                silence.last_heard = ctx.clock.now
                self._none_silent_before = min(self._none_silent_before, silence.doubted_at())
        return self._listened

    def _beat(self) -> None:
        """Send the pings that are due. Peers are pinged together once per heartbeat interval; in a large
        swarm a part of them at a time. Once per interval this also runs the action of `at_next_beat`, chooses
        the watched links anew, and dials voters if that is due (`_seek`)."""
        ctx, heartbeat_s = self.ctx, self.ctx.run.settings.heartbeat_s
        whole = ctx.clock.now >= self._beat_at - 0.5 * heartbeat_s / LOOKS  # parts of it need not add up
        if whole:
            self._beat_at = ctx.clock.now + heartbeat_s
            at_beat, self._at_beat = self._at_beat, None
            if at_beat is not None:
                at_beat()
            self._listen()
        self._ping_at = ctx.clock.now + heartbeat_s / (LOOKS if ctx.run.near.crowded else 1)
        self._ping(*self._turns(whole))
        if ctx.clock.now < self._none_silent_before:  # a bound that was found long ago, for links heard since
            links = self._listening()
            self._none_silent_before = min((s.doubted_at() for s in links.values()), default=math.inf)
        if whole:
            self._seek()

    def _turns(self, whole: bool) -> list[str]:
        """Peers to ping now, which count as pinged from then on: all watched ones; in a large swarm, unless
        `hurry` was called, only those from which nothing came for a heartbeat interval, and those not pinged
        for MEASURED intervals (pings also measure links and carry the length of the log). whole: True at the
        heartbeat itself, False between two."""
        links, ctx, everyone = self._listening(), self.ctx, self._hurries
        self._hurries = False
        if not ctx.run.near.crowded or everyone:
            return list(links)
        now, heartbeat_s, before = ctx.clock.now, ctx.run.settings.heartbeat_s, self._pinged_at
        if whole:
            self._pinged_at = {p: before.get(p, -math.inf if p in self._near else now) for p in links}
        pinged_at, silent, long = self._pinged_at, now - heartbeat_s, now - MEASURED * heartbeat_s
        due = [p for p, s in links.items() if s.last_heard <= silent or pinged_at.get(p, now) <= long]
        pinged_at.update(dict.fromkeys(due, now))
        return due

    def _ping(self, *peers: str) -> None:
        """Ping peers, those that are silent for long seldom."""
        self._number += 1
        now, heartbeat_s = self.ctx.clock.now, self.ctx.run.settings.heartbeat_s
        self._pings[self._number] = now
        self._pings.pop(self._number - PINGS_KEPT, None)
        ping = Ping(self._number, self._next_index, self.ctx.log.leads, self.ctx.run.settings.epoch)
        for peer in peers:
            silence = self.ctx.links.up.get(peer)
            if silence is None or is_pinged((now - silence.last_heard) / heartbeat_s):
                self.ctx.outbox.send(peer, ping)

    def overdue(self, peer: str, silence_s: float, patience_s: float) -> Overdue:
        """Make the evidence about a member that has been silent for `silence_s`, from which its verdict
        follows. patience_s: the member's timeout (s)."""
        account, linked = self.indirect_probes.account(peer), peer in self.ctx.links.up
        return Overdue(peer, silence_s, patience_s, account, self._alone(peer), linked)

    def suspect(self, overdue: Overdue) -> bool:
        """Mark the silent peer of `overdue` as suspected and note it in the event log; False if it was
        suspected before."""
        ctx = self.ctx
        if overdue.peer in ctx.links.suspects:
            return False
        ctx.links.suspects.add(overdue.peer)
        ctx.outbox.note("suspected", subject=overdue.peer, reason=str(overdue), **overdue.numbers())
        return True

    def renew(self, overdue: Overdue) -> str:
        """Ask the driver to close the link to the peer of `overdue`, as the link is judged bad, and note it
        in the event log; returns the reason. The caller reports the link as down, so that the peer is dialled
        again."""
        reason = f"the link is bad: {overdue}; connecting anew"
        self.ctx.outbox.note("suspected", subject=overdue.peer, reason=reason, **overdue.numbers())
        self.ctx.outbox.emit(HangUp(overdue.peer, reason))
        return reason

    def stranded(self, peer: str) -> list[tuple[str, str]]:
        """Suspected peers whose carrier is suspected, too, each with the reason to close the link, which the
        caller does: `peer`, which is suspected now, or those that it carries. Each is noted in the event log
        as a bad link, again with each call. The link may be sound but for the carrier, and nobody dials a
        peer whose link is up."""
        links, gone = self.ctx.links, []
        for other, via in sorted(links.carriers.items()):
            if peer in (other, via) and other in links.suspects and via in links.suspects:
                gone.append((other, self._leave_carrier(other, "is silent, too")))
        return gone

    def _alone(self, peer: str) -> bool:
        """True if this peer may itself be cut off, so that the silence of `peer` proves nothing: it hears no
        other member although there are some."""
        ctx, watched = self.ctx, self._listening()
        members = ctx.run.membership.members.keys()
        links = [watched[other] for other in members & watched.keys() - {peer}]
        if not links:
            return len(members - {peer, ctx.me}) > 0
        return all(ctx.clock.now >= silence.doubted_at() for silence in links)

    def at_next_beat(self, action: Callable[[], object]) -> None:
        """Plan to call `action` once, together with the next heartbeat, in place of an action planned
        before."""
        self._at_beat = action

    def hurry(self) -> None:
        """Plan a ping to all watched peers at the next `tick`."""
        self._ping_at = self._beat_at = self.ctx.clock.now
        self._hurries = True

    # --- links ---------------------------------------------------------------------------------

    def link_up(self, peer: str) -> None:
        """Begin to watch a new link to `peer`, with the timeout learnt before; cancel planned dials. If all
        watched links had been silent this peer was cut off, and all silences begin anew."""
        ctx = self.ctx
        if self._alone(peer):
            for link in self._listening().values():
                link.last_heard = ctx.clock.now
        silence = self._known.pop(peer, None) or AdaptiveTimeout(ctx.clock.now, ctx.run.settings.heartbeat_s)
        silence.last_heard = ctx.clock.now
        ctx.links.add(peer, silence)
        if self._listened is not None:
            self._listened[peer] = silence  # until the watched links are chosen anew
        self._none_silent_before = min(self._none_silent_before, silence.doubted_at())
        self.indirect_probes.forget(peer)
        ctx.dialer.cancel(peer)

    def link_down(self, peer: str) -> AdaptiveTimeout | None:
        """Drop the link to `peer`, which broke; returns the peer's timeout if it is a member (None: it is not
        known)."""
        self.indirect_probes.link_down(peer)
        self._slow.pop(peer, None)
        payloads = self._payloads.pop(peer, None)
        if payloads is not None and payloads.slowed and peer in self.ctx.links.carriers:
            self._note_slow(peer)  # the other end has left the carrier first
        if peer in self.ctx.costs.neighbours:
            self.ctx.costs.of(peer).broke()
        silence = self.ctx.links.drop(peer)
        if self._listened is not None:
            self._listened.pop(peer, None)
        if silence is not None and peer in self.ctx.run.membership.members:
            self._known[peer] = silence
        if peer not in self.ctx.run.membership.members:
            self.indirect_probes.forget(peer)
        self.forget_stranger(peer)
        return self._known.get(peer)

    def forget_stranger(self, peer: str) -> None:
        """Drop all that was measured of a peer without a link that never was a member, and is no carrier: a
        stranger comes with another key each time. Nothing while this peer is no member: it knows none."""
        ctx = self.ctx
        members = ctx.run.membership
        if ctx.me in members.members and not members.knew(peer) and peer not in ctx.dialer.carriers.listed():
            ctx.costs.drop(peer)
            ctx.links.forget_process(peer)
            ctx.links.forget_carriers(peer)

    def heard(self, peer: str) -> bool:
        """Note that a message of `peer` arrived, and end a suspicion; True if `peer` was suspected until now.
        If all watched links had been silent this peer was cut off, and all silences begin anew."""
        silence = self.ctx.links.up.get(peer)
        if silence is None:
            return False
        ctx, now = self.ctx, self.ctx.clock.now
        if now >= self._none_silent_before:
            links = self._listening()
            if len(links) > 1 and all(now >= s.doubted_at() for s in links.values()):
                for link in links.values():  # this peer was cut off
                    link.last_heard = now
        silent_s, doubted = now - silence.last_heard, now >= silence.doubted_at()
        if self._listened is None or peer in self._listened:
            silence.heard(now)
            doubted_at = silence.doubted_at()
            if doubted_at < self._none_silent_before:
                self._none_silent_before = doubted_at
        else:
            silence.last_heard = now  # its silence was no sign: nobody pinged it
        self.indirect_probes.heard(peer)
        if doubted:
            self.indirect_probes.forget(peer)
        if peer not in ctx.links.suspects:
            return False
        ctx.links.suspects.discard(peer)
        reason = f"refuted: heard again after {silent_s:.1f} s; patience is now {silence.patience_s:.1f} s"
        ctx.outbox.note("suspected", subject=peer, reason=reason, verdict=Verdict.REFUTED.value,
                  silence_s=silent_s, patience_s=silence.patience_s)  # fmt: skip
        return True

    def pong(self, message: Pong) -> float | None:
        """Round trip (s) of the ping that the Pong `message` answers; None if that ping is too old or was
        never sent."""
        sent_at = self._pings.get(message.number)
        return None if sent_at is None else self.ctx.clock.now - sent_at

    def slow_carrier(self, peer: str, trip_s: float) -> str:
        """Reason to leave the carrier of the link to `peer`, whose latest round trip took `trip_s`; "" to
        stay. It is left after SLOW_PINGS in a row took SLOW_S longer than those to the carrier itself, by the
        end that dials, or once payloads have become slow, by their sender; while there is another carrier
        through which no circuit failed yet. To be called once for each answered ping; the reason is noted in
        the event log."""
        ctx, via = self.ctx, self.ctx.links.carriers.get(peer, "")
        known = ctx.costs.neighbours.get(peer) if via else None
        if known is not None:
            payloads = self._payloads.setdefault(peer, SlowPayloads())
            took_s = payloads.look(known, ctx.costs.activation_bytes)
            if took_s and self._another_carrier(peer):
                self._note_slow(peer)
                return self._leave_carrier(peer, f"has become slow: a payload takes {took_s:.1f} s")
        leg = ctx.costs.neighbours.get(via)
        leg_s = leg.link.latency.round_trip_s() if leg is not None else None
        if not via or trip_s < (leg_s or 0.0) + SLOW_S or not ctx.run.membership.dials(ctx.me, peer):
            self._slow.pop(peer, None)
            return ""
        self._slow[peer] = slow = self._slow.get(peer, 0) + 1
        if slow < SLOW_PINGS:
            return ""
        if not self._another_carrier(peer):
            return ""
        return self._leave_carrier(peer, f"is slow: a round trip takes {trip_s:.1f} s")

    def _note_slow(self, peer: str) -> None:
        """Note that payloads to `peer` became slow over its carrier. If those to SLOW_TO peers did, and to no
        fewer than they did not, the carrier is at fault and not their lines: other links through it, such as
        those between replicas of one stage, are left, too."""
        links, via = self.ctx.links, self.ctx.links.carriers[peer]
        slow_to = self._slow_to.setdefault(via, set())
        slow_to.add(peer)
        others = {other for other, carrier in links.carriers.items() if carrier == via and other != peer}
        quick = [other for other in others - slow_to if self._is_quick(other)]
        if len(slow_to) >= max(SLOW_TO, len(quick)):
            del self._slow_to[via]
            links.lossy |= others

    def _is_quick(self, peer: str) -> bool:
        """True if payloads over the carried link to `peer` are timed, and are not slow."""
        payloads = self._payloads.get(peer)
        return payloads is not None and payloads.at > -math.inf and not payloads.slowed

    def _another_carrier(self, peer: str) -> bool:
        """True if there is another carrier to `peer`, not suspected, through which no circuit failed yet. A
        carrier must forward the present link."""
        links = self.ctx.links
        others = {way.rpartition("/")[2] for way in self.ctx.dialer.carriers.ways(peer)}
        others -= {links.carriers[peer], *links.suspects}
        return not all(links.broken_circuits[peer, other] for other in others)

    def leave_lossy(self) -> list[tuple[str, str]]:
        """Peers whose carried links lose payloads, each with the reason to close the link, which the caller
        does and which is noted in the event log; from now on no link counts as `lossy`. A link without
        another carrier stays: through the same one a slow line would begin its payloads anew for ever. The
        next carrier gets more time, as it may have been the line."""
        why, leave = "passes heartbeats on, and payloads do not come in time", []
        for peer in sorted(self.ctx.links.lossy):
            if self._another_carrier(peer):
                leave.append((peer, self._leave_carrier(peer, why)))
                self.ctx.costs.of(peer).lost_payloads()
            self.ctx.links.payloads_come(peer)
        return leave

    def _leave_carrier(self, peer: str, why: str) -> str:
        reason = f"carrier {self.ctx.links.carriers[peer][:8]} {why}; trying another way"
        self.ctx.outbox.note("suspected", subject=peer, reason=reason, verdict=Verdict.BAD_LINK.value)
        return reason

    def outdated(self, peer: str) -> bool:
        """True if the link leads to a former process of the peer, or to another machine with its key (I7)."""
        known = self.ctx.run.membership.incarnation(peer)
        return self.ctx.links.incarnations.get(peer, known) < known

    # --- dialling ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Dial carriers, and the members that this peer wants a link with, lacks, and is the one to dial;
        plan to dial others that nobody can dial directly. Nothing while this peer is no member."""
        ctx = self.ctx
        if ctx.me not in ctx.run.membership.members:
            return
        for carrier in ctx.dialer.carriers.listed():
            ctx.dialer.reach(carrier)
        for peer in self._wanted():
            if ctx.run.membership.dials(ctx.me, peer):
                ctx.dialer.reach(peer)
            else:
                ctx.dialer.stand_by(peer)

    def seek_direct(self) -> None:
        """Dial members whose links a carrier forwards at their own addresses again, where that is due; called
        when an iteration begins, as little is under way then. The driver replaces a link if one answers."""
        ctx, now = self.ctx, self.ctx.clock.now
        for peer, via in ctx.links.carriers.items():
            member = ctx.run.membership.members.get(peer)
            address = "" if member is None or via == "iroh" else own_addresses(member.address)
            if not address or not ctx.run.membership.dials(ctx.me, peer):
                continue
            at, wait_s = self._direct.setdefault(peer, (now + DIRECT_S, 2.0 * DIRECT_S))
            if now >= at:
                self._direct[peer] = now + wait_s, min(2.0 * wait_s, DIRECT_MAX_S)
                ctx.outbox.emit(Dial(peer, address))

    def was_carried(self, peer: str) -> bool:
        """True if `seek_direct` has found a carried link to this member before."""
        return peer in self._direct

    def _wanted(self) -> Iterable[str]:
        """Members that this peer wants a link with, in the order of joining: members of its own and adjacent
        stages, and voters; for a voter, and while stages are to be assigned by links, all members; in a large
        swarm neighbours and voters that are not linked yet."""
        ctx, members = self.ctx, self.ctx.run.membership.members
        if ctx.log.keeps_log(ctx.me) or ctx.run.deals:
            return members
        if ctx.run.near.crowded:
            missing = self._around().difference(ctx.links.up, ctx.dialer.dialled)
            known = [peer for peer in missing if peer in members]
            return sorted(known, key=ctx.run.membership.order.__getitem__)
        keepers = self._keepers()
        stages = {ctx.run.stage, ctx.run.next_stage(), ctx.run.previous_stage()}
        return [peer for peer, member in members.items() if member.stage in stages or peer in keepers]

    def _around(self) -> frozenset[str]:
        """Members that this peer wants links with in a large swarm: neighbours and voters."""
        return self.ctx.run.near.all(self.ctx.run.stage) | self._keepers()

    def _keepers(self) -> frozenset[str]:
        """Known voters and the leader, which keep the log: every peer wants links to them, and they watch all
        their links."""
        return self.ctx.log.voting_peers | {self.ctx.log.leader}

    def trim(self) -> None:
        """Close idle links to members of other stages that are no neighbours and exchange no work with this
        peer, in a large swarm; none if this peer watches all its links, as a voter does. Called when an
        iteration begins."""
        ctx, members = self.ctx, self.ctx.run.membership.members
        watched = self._listen()
        if watched is ctx.links.up:
            return
        idle_s, kept = IDLE_HEARTBEATS * ctx.run.settings.heartbeat_s, ctx.links.in_use().union(watched)
        for peer, silence in list(ctx.links.up.items()):
            other = members.get(peer)
            if peer in kept or other is None or other.stage == ctx.run.stage:
                continue
            if ctx.clock.now > silence.last_heard + idle_s and not ctx.log.keeps_log(peer):
                ctx.outbox.emit(HangUp(peer, "not a neighbour any more"))
                self._hung_up(peer)

    def _seek(self) -> None:
        """Dial all voters if none has been linked for SEEK_S, even those that should dial this peer: it may
        have been removed meanwhile, and then nobody dials it any more."""
        ctx = self.ctx
        if ctx.log.leads or any(map(ctx.log.keeps_log, ctx.links.up)):
            self._alone_since = math.inf
            return
        self._alone_since = min(ctx.clock.now, self._alone_since)
        if ctx.clock.now >= self._alone_since + SEEK_S:
            for peer in filter(ctx.log.keeps_log, ctx.run.membership.members):
                ctx.dialer.reach(peer)

    def redial(self, peer: str) -> None:
        """Plan to dial `peer`, whose link broke: a carrier, a fellow voter, or a member with which this peer
        still wants a link; one that is to dial this peer only if nobody can dial it directly, and later."""
        run, log, dialer = self.ctx.run, self.ctx.log, self.ctx.dialer
        mine = peer in run.membership.members and run.membership.dials(self.ctx.me, peer)
        all_wanted = not run.near.crowded or run.deals or log.keeps_log(self.ctx.me)
        wanted = all_wanted or peer in self._near or peer in self._keepers()
        if (mine and wanted) or peer in dialer.fellows or peer in dialer.carriers.listed():
            dialer.plan(peer)
        elif wanted:
            dialer.stand_by(peer)

    def forget(self, peer: str) -> None:
        """Drop what is known of `peer`, no longer a member: planned dials, timeout, others' statements."""
        self.ctx.dialer.cancel(peer)
        self.ctx.links.forget_carriers(peer)
        self._known.pop(peer, None)
        self._direct.pop(peer, None)
        self._slow_to.pop(peer, None)
        if self._listened is not None:
            self._listened.pop(peer, None)
        self.indirect_probes.forget(peer)
