"""Server of the run's event log at the founder, for observers (clients whose ticket permits only to read it).

Observers are no peers: nobody waits for them, probes them, or logs that they come and go. Each observer
requests one piece at a time, so at most one answer is on its way to it. All share one allowance of bytes.
"""

from __future__ import annotations

from collections import Counter

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.interface.events import EventsRead, HangUp, ReadEvents, Send
from anabranch.protocol.messages import Shown, Watch

#: Role in the ticket of an observer.
ROLE = "watch"
#: Number of observers served at once.
OBSERVERS_MAX = 16
#: Time (s) without a request after which an observer makes room for another.
IDLE_S = 60.0
#: Time (s) for which an observer whose ticket has no more than its share keeps its seat while others wait.
SEAT_S = 30.0
#: Allowance of all observers together (compressed bytes): burst, and refill a second.
BURST_BYTES, BYTES_PER_S = 1 << 20, 128 << 10


class EventLogServer:
    """Server side of the event log: recently served observers, and the bytes that all of them together may
    still read now."""

    def __init__(self, ctx: PeerContext) -> None:
        self._ctx = ctx
        self.asked_at: dict[str, float] = {}
        """Observer -> time (s) of its last request. Read only by others."""
        # Observer -> key of its ticket, and when it was seated; the longest seated is first.
        self._seats: dict[str, tuple[str, float]] = {}
        self._reading: set[str] = set()
        self._left, self._left_at = float(BURST_BYTES), 0.0

    def __contains__(self, peer: str) -> bool:
        return peer in self.asked_at

    def asked(self, peer: str, message: Watch, ticket: str = "") -> str | None:
        """Handle an observer's request for the event log: have the driver read the piece, which `read` sends.
        Returns the reason if it is refused (of a member, or before the last request was answered), else None.
        The observer is disconnected if there is no seat for it, and gets an empty answer while the allowance
        of bytes is used up. ticket: key of the ticket that it showed, by which seats are shared out."""
        ctx = self._ctx
        if peer in ctx.run.membership.members:
            return "it takes part in the run, and does not look on"
        if peer not in self and not self._make_room(ticket):
            reason = f"{OBSERVERS_MAX} look on already, and no more may; try again later"
            ctx.outbox.emit(HangUp(peer, reason))
            return None
        self.asked_at[peer] = ctx.clock.now
        self._seats.setdefault(peer, (ticket, ctx.clock.now))
        if peer in self._reading:
            return "asked again before it was answered"
        self._left = min(BURST_BYTES, self._left + BYTES_PER_S * max(0.0, ctx.clock.now - self._left_at))
        self._left_at = ctx.clock.now
        if self._left <= 0:
            ctx.outbox.emit(Send(peer, Shown(message.position, b"", 0)))
            return None
        self._reading.add(peer)
        ctx.outbox.emit(ReadEvents(peer, message.position))
        return None

    def read(self, event: EventsRead) -> None:
        """Send an observer the piece of the event log that the driver has read for it, which counts against
        the allowance of bytes; nothing if none was being read for it."""
        if event.peer not in self._reading:
            return
        self._reading.discard(event.peer)
        self._left -= len(event.data)
        self._ctx.outbox.emit(Send(event.peer, Shown(event.position, event.data, event.size)))

    def gone(self, peer: str) -> bool:
        """Drop an observer whose link broke; True if `peer` was one."""
        self._reading.discard(peer)
        self._seats.pop(peer, None)
        return self.asked_at.pop(peer, None) is not None

    def _make_room(self, ticket: str) -> bool:
        """Make room for one more observer with `ticket`; True if there is room.

        Idle observers are disconnected. If all seats stay taken, the ticket with most seats gives one up,
        that of its longest seated observer: at once if it still has as many as `ticket` then, else after
        SEAT_S, so that observers take turns. (Keys are free: one ticket may take all seats.)
        """
        now = self._ctx.clock.now
        for peer, at in list(self.asked_at.items()):
            if now > at + IDLE_S:
                self._unseat(peer, "it did not ask for anything for long")
        if len(self.asked_at) < OBSERVERS_MAX:
            return True
        seats = Counter(seat[0] for seat in self._seats.values())
        crowded, most = seats.most_common(1)[0]
        longest, (_, since) = next(item for item in self._seats.items() if item[1][0] == crowded)
        if most <= seats[ticket] + 1 and now < since + SEAT_S:
            return False
        self._unseat(longest, "others wait for its seat; ask again later")
        return True

    def _unseat(self, peer: str, reason: str) -> None:
        self.gone(peer)
        self._ctx.outbox.emit(HangUp(peer, reason))
