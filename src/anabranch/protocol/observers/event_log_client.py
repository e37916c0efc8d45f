"""Observer's client of the event log: reads the log from the run's founder piece by piece, and resumes after
a break."""

from __future__ import annotations

import zlib

from anabranch.counter_rng import CounterRng
from anabranch.protocol.context.backoff import Backoff
from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages import Shown, Watch

#: Time (s) between two requests while there is more to read, and after an answer without news.
NEXT_S, IDLE_S = 0.15, 0.5
#: Time (s) after which an unanswered request ends the connection.
ANSWER_S = 20.0
#: First and longest time (s) between attempts to connect.
REDIAL_S, REDIAL_MAX_S = 0.5, 15.0
#: Longest decompressed piece (bytes): a hostile answer must not fill the memory.
PIECE_MAX = 4 << 20


class EventLogClient:
    """Protocol state machine of an observer, with the same interface to drivers as `peer.Peer`. position:
    number of bytes of the event log read so far. size: number of bytes that the founder has."""

    def __init__(self, founder: str, address: str, position: int, seed: int = 0) -> None:
        self.position = position
        self.size = 0
        self._founder, self._address = founder, address
        self._linked = False
        self._asked = False
        self._at = float("inf")
        self._backoff = Backoff(CounterRng(seed), REDIAL_S, REDIAL_MAX_S)

    def deadline(self) -> float:
        """Time on the driver's clock (s) at which the next `Wake` event is wanted."""
        return self._at

    def handle(self, event: ev.Event, now: float) -> list[ev.Effect]:
        match event:
            case ev.Started():
                return [ev.Dial(self._founder, self._address)]
            case ev.LinkUp(peer) if peer == self._founder:
                self._linked = True
                self._backoff.reset()
                return self._ask(now)
            case ev.LinkDown(peer) if peer == self._founder:
                self._linked = self._asked = False
                self._at = now + (self._backoff.next() or REDIAL_MAX_S)
            case ev.Received(peer, Shown() as shown) if peer == self._founder and self._asked:
                return self._shown(shown, now)
            case ev.Wake() if now >= self._at and self._asked:
                self._linked = self._asked = False
                self._at = now + REDIAL_S
                return [ev.HangUp(self._founder, "no answer")]
            case ev.Wake() if now >= self._at:
                self._at = float("inf")
                return self._ask(now) if self._linked else [ev.Dial(self._founder, self._address)]
        return []

    def _ask(self, now: float) -> list[ev.Effect]:
        self._asked, self._at = True, now + ANSWER_S
        return [ev.Send(self._founder, Watch(self.position))]

    def _shown(self, shown: Shown, now: float) -> list[ev.Effect]:
        self._asked = False
        self._at = now + IDLE_S
        if 0 < shown.size < self.position:
            text = "there is more of the event log here than the run's data node has: name another --home"
            return [ev.Stop(text, ok=False)]
        if shown.position != self.position or not shown.data:
            return []
        inflating = zlib.decompressobj()
        try:
            data = inflating.decompress(shown.data, PIECE_MAX)
        except zlib.error:
            return [ev.Stop("what the run's data node says of the event log cannot be read", ok=False)]
        start, self.position = self.position, self.position + len(data)
        self.size = max(shown.size, self.position)
        if self.position < self.size:
            self._at = now + NEXT_S
        return [ev.Showed(start, data)]
