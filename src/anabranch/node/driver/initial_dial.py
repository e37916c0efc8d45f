"""Dialling of the run's data node by a volunteer: retries with back-off, messages for the user, giving up.

A data node that was reached once may come back after hours: whenever its link is lost, it is dialled until
the ticket expires, unless it refuses for good, the run is over, or another voter is linked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from anabranch.addresses import parse_addresses
from anabranch.background import background
from anabranch.counter_rng import CounterRng
from anabranch.net import errors
from anabranch.net.tcp.ways import attempts, repair_of, told, way_of
from anabranch.net.ticket import Ticket
from anabranch.node.driver.peer_driver import RUN_OVER, LivePeer, Outcome, says_run_over
from anabranch.observe.wording import ID_DIGITS, duration
from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages import About

#: First and longest back-off (s) between two attempts; it doubles, with jitter.
FIRST_S = 0.5
LAST_S = 15.0
#: Seconds to dial a data node whose run was over, as its owner may have resumed it; a plain choice.
OVER_S = 10.0
#: First and longest time (s) between two sentences that the data node still does not answer; they double. A
#: choice: nobody is to read thousands of lines in the morning.
REMIND_S, REMIND_MAX_S = 60.0, 3600.0
#: Seconds of a day.
DAY_S = 24 * 3600.0
#: Kinds of refusal after which another dial may succeed.
TRANSIENT = frozenset({errors.BUSY, errors.LANE, errors.TIMEOUT, errors.VANISHED})
#: Kinds of refusal after which no dial with this ticket and this release succeeds. Any other refusal by an
#: address where the run once was may end: another program, or another run, listens there for the time being.
LASTING = frozenset({errors.EXPIRED, errors.NOT_AUTHORIZED, errors.TICKET, errors.VERSION})


class Reminder:
    """Rhythm in which the user is told, ever more rarely, that the data node still does not answer."""

    def __init__(self) -> None:
        self._since = self._at = 0.0
        self._wait_s = REMIND_S

    def begin(self, now: float) -> None:
        """Begin anew, as the user has just been told that the data node does not answer. now: clock (s)."""
        self._since, self._at, self._wait_s = now, now + REMIND_S, REMIND_S

    def due(self, now: float) -> float:
        """Seconds since `begin` if the user is to be told now, and plan the next time; else 0."""
        if now < self._at:
            return 0.0
        self._wait_s = min(REMIND_MAX_S, 2 * self._wait_s)
        self._at = now + self._wait_s
        return now - self._since


class InitialDial:
    """Dials the data node that a volunteer's ticket names, again and again while there is no link to it, for
    the peer `live`. Stops the peer when the data node says that the run is over or refuses it for good, when
    the ticket has expired, or after `patience_s` seconds if the data node was never reached. A peer with a
    link to another voter needs no link to this data node. say: prints a sentence for the user. reached: True
    once the data node was reached, in this part of the run or an earlier one. over: how the run ended when
    this machine last took part; "" if it did not. If it is given, `patience_s` is at most OVER_S, and a data
    node that does not answer is no failure: the run is over."""

    def __init__(
        self,
        live: LivePeer,
        ticket: Ticket,
        patience_s: float,
        say: Callable[[str], None],
        reached: bool = False,
        over: str = "",
    ) -> None:
        self._live = live
        self._ticket = ticket
        leader = ticket.first_peer
        self._leader, self._address = leader.peer_id, ticket.first_addresses
        self._patience_s = min(patience_s, OVER_S) if over else patience_s
        self._over = over
        self._say = say
        self.reached = reached
        self._first = not reached
        self._trying: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._lost_at: float | None = None
        self._reminder = Reminder()
        self._backoff = Backoff(CounterRng(time.time_ns()), FIRST_S, LAST_S)

    def watch(self, live_peer: LivePeer, event: ev.Event) -> None:
        """Plan the next dial, or stop the peer, when the link to the data node is lost or a dial of it
        failed; reset the back-off when the link is up; when the run first names further peers, try the ways
        to them. Called after each event of the peer."""
        match event:
            case ev.LinkUp(peer) if peer == self._leader:
                if self._lost_at is not None or not self.reached:
                    again = " again" if self.reached else ""
                    self._say(f"connected to the run's data node{again}, {self._way()}")
                self._lost_at, self.reached = None, True
                self._backoff.reset()
            case ev.LinkDown(peer, reason) if peer == self._leader and self._run_over(reason):
                self._live.finish(Outcome(RUN_OVER, ok=True, over=True))
            case ev.Received(_, About(doors=doors)) if self._first:
                self._first = False
                self._trying = background(self._try_ways(dict(doors)))
            case ev.LinkDown(peer, reason) if peer == self._leader:
                self._lost(reason)

    def close(self) -> None:
        """End the trials of ways to further peers, if they still go on; to be called when the peer has
        ended."""
        if self._trying is not None:
            self._trying.cancel()

    def _run_over(self, reason: str) -> bool:
        """True if the data node closed its link for `reason` because the run is over, and this machine is not
        a member (a member learns that from the log)."""
        context = self._live.peer.ctx
        return says_run_over(reason) and context.me not in context.run.membership.members

    def _way(self) -> str:
        address = self._live.links.dialled_at(self._leader)
        return way_of(address) if address is not None else "which dialled this machine"

    async def _try_ways(self, doors: dict[str, str]) -> None:
        """Try which ways lead to further peers that the run named (`doors`: peer id -> addresses), while this
        machine is measured, and tell the user. No link is made. Peers that no way leads to are reached
        through a carrier, if the run has one."""
        doors.pop(self._leader, None)
        links = self._live.links
        for peer, text in doors.items():
            try:
                addresses = parse_addresses(text)
            except ValueError:
                continue  # a peer's own words
            tried = await attempts(links.transport, peer, addresses, links.credential)
            self._say(f"{peer[:ID_DIGITS]}, which keeps the run's log: {told(tried)}")

    def _lost(self, reason: str) -> None:
        if self._refused_for_good():
            return
        if self._has_voter():
            self._lost_at = None
            self._backoff.reset()
            return
        now = self._loop.time()
        if self._lost_at is None:
            self._lost_at = now
            self._say(f"no connection to the run's data node at {self._address}: {reason}; {self._plan()}")
            self._reminder.begin(now)
        elif waited_s := self._reminder.due(now):
            since = f"for {duration(waited_s)}"
            self._say(f"still no connection to the run's data node {since}: {reason}; {self._plan()}")
        wait_s = self._backoff.next() or LAST_S
        if time.time() + wait_s >= self._ticket.grant.expires_at_s:
            why = "the ticket has expired: ask the run's owner for a new one"
            self._live.finish(Outcome(why, ok=False))
        elif not self.reached and now + wait_s > self._lost_at + self._patience_s:
            if self._over:
                self._live.finish(Outcome(f"{self._over}; its data node does not answer", ok=True))
                return
            self._live.finish(
                Outcome(
                    f"the run's data node at {self._address} could not be reached for "
                    f"{duration(self._patience_s)} ({reason}): check that the run is running and that its "
                    "address is reachable from here (anabranch doctor TICKET), then join again; a resumed "
                    "run may need a new ticket",
                    ok=False,
                    unreached=True,
                )
            )
        else:
            self._loop.call_later(wait_s, self._dial)

    def _refused_for_good(self) -> bool:
        """Stop the peer (`LivePeer.finish`) if its last dial of the data node was refused for good; returns
        True if that is so. Before the data node was first reached any refusal but the TRANSIENT ones is for
        good, later the LASTING ones alone."""
        refusal = self._live.links.refusals.get(self._leader)
        if refusal is None or refusal.kind in TRANSIENT:
            return False
        if self.reached and refusal.kind not in LASTING:
            return False
        # A certificate may expire before the ticket, with which this machine can join again.
        again = refusal.kind == errors.EXPIRED and self._live.links.credential is not self._ticket
        reason = f"the run's data node refuses this machine: {refusal}"
        if refusal.kind == errors.SERVER_KEY:  # it was not asked
            reason = f"the run's data node was not reached: {refusal}; {repair_of(refusal)}"
        self._live.finish(Outcome(reason, ok=False, again=again))
        return True

    def _plan(self) -> str:
        """Phrase that tells the user for how long this peer goes on dialling the data node."""
        if not self.reached:
            return f"retrying for {duration(self._patience_s)}"
        good = f"the ticket is good for {left(self._ticket)}"
        return f"trying again until it answers ({good}; if the run is over, it will not); Ctrl+C leaves"

    def _has_voter(self) -> bool:
        """True if the peer has a link to the leader or to a voter, which may become the leader."""
        ctx = self._live.peer.ctx
        return any(peer == ctx.log.leader or ctx.log.keeps_log(peer) for peer in ctx.links.up)

    def _dial(self) -> None:
        if self._lost_at is not None and self._live.running:
            self._live.links.dial(self._leader, self._address)


def left(ticket: Ticket) -> str:
    """Time for which a ticket is still good, in words such as "3 days" or "50 minutes"."""
    seconds = max(0.0, ticket.grant.expires_at_s - time.time())
    if seconds >= 2 * DAY_S:
        return f"{seconds / DAY_S:.0f} days"
    return f"{seconds / 3600:.0f} hours" if seconds >= 7200 else f"{seconds / 60:.0f} minutes"
