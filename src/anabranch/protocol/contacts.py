"""Whom this peer can talk to: dialling, heartbeats, silence, suspicion."""

from __future__ import annotations

from typing import NamedTuple

from anabranch.protocol.core import Core
from anabranch.protocol.detector import Silence
from anabranch.protocol.events import Dial
from anabranch.protocol.messages import Ping, Pong

#: Seconds between attempts to reach a peer (doubling to the maximum).
REDIAL_S = 0.5
REDIAL_MAX_S = 8.0
#: Heartbeats whose answers are still waited for.
PINGS_KEPT = 32


class Overdue(NamedTuple):
    """A linked peer that is silent for longer than its own history explains."""

    peer: str
    silence_s: float
    patience_s: float


class Contacts:
    """The links of one peer as the protocol sees them (`core.links`, `core.suspects`)."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._ping_at = 0.0
        self._pings: dict[int, float] = {}
        self._number = 0
        self._dials: dict[str, tuple[float, float]] = {}

    def deadline(self) -> float:
        """When `tick` wants to be called next."""
        core = self.core
        times = [self._ping_at]
        times += [at for at, _ in self._dials.values()]
        times += [s.suspected_at() for p, s in core.links.items() if p not in core.suspects]
        return min(times)

    def tick(self, next_index: int) -> list[Overdue]:
        """Heartbeats and dials that are due; returns who is overdue."""
        core = self.core
        if core.now >= self._ping_at:
            self._ping_at = core.now + core.settings.heartbeat_s
            self._number += 1
            self._pings[self._number] = core.now
            self._pings.pop(self._number - PINGS_KEPT, None)
            for peer in list(core.links):
                core.send(peer, Ping(self._number, next_index))
        self._dial_again()
        return [
            Overdue(peer, core.now - silence.last_heard, silence.patience_s)
            for peer, silence in core.links.items()
            if core.now >= silence.suspected_at()
        ]

    # --- links ---------------------------------------------------------------------------------

    def link_up(self, peer: str) -> None:
        self.core.links[peer] = Silence(self.core.now, self.core.settings.heartbeat_s)
        self.core.suspects.discard(peer)
        self._dials.pop(peer, None)

    def link_down(self, peer: str) -> Silence | None:
        """Forget the link; returns what was known of its silences."""
        self.core.suspects.discard(peer)
        return self.core.links.pop(peer, None)

    def heard(self, peer: str) -> bool:
        """A message of `peer` came; returns whether that refutes a suspicion."""
        silence = self.core.links.get(peer)
        if silence is None:
            return False
        silence.heard(self.core.now)
        if peer not in self.core.suspects:
            return False
        self.core.suspects.discard(peer)
        self.core.note("suspected", subject=peer, reason="refuted: it is heard again")
        return True

    def pong(self, message: Pong) -> float | None:
        """Seconds of the round trip that `message` ends; None if its ping is forgotten."""
        sent_at = self._pings.get(message.number)
        return None if sent_at is None else self.core.now - sent_at

    # --- dialling ------------------------------------------------------------------------------

    def connect(self) -> None:
        """Dial the neighbours that it is on me to dial: adjacent stages, my own, the leader."""
        core = self.core
        if core.me not in core.membership.members:
            return
        near = {core.stage, core.next_stage(), core.previous_stage()}
        for peer, member in core.membership.members.items():
            wanted = member.stage in near or peer == core.leader
            if not wanted or peer == core.me or peer in core.links or peer in self._dials:
                continue
            if member.address and core.membership.dials(core.me, peer):
                self._dials[peer] = (core.now + REDIAL_S, REDIAL_S)
                core.effects.append(Dial(peer, member.address))

    def redial(self, peer: str) -> None:
        """Plan to dial a member whose link broke, if that is on me."""
        membership = self.core.membership
        if peer in membership.members and membership.dials(self.core.me, peer):
            _, wait = self._dials.get(peer, (0.0, REDIAL_S / 2.0))
            wait = min(REDIAL_MAX_S, 2.0 * wait)
            self._dials[peer] = (self.core.now + wait, wait)

    def forget(self, peer: str) -> None:
        """`peer` is no member any more: it is not dialled."""
        self._dials.pop(peer, None)

    def _dial_again(self) -> None:
        core = self.core
        for peer, (at, wait) in list(self._dials.items()):
            if core.now < at:
                continue
            member = core.membership.members.get(peer)
            if member is None or peer in core.links:
                del self._dials[peer]
            else:
                wait = min(REDIAL_MAX_S, 2.0 * wait)
                self._dials[peer] = (core.now + wait, wait)
                core.effects.append(Dial(peer, member.address))
