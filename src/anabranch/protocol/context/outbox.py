"""Effects of one event: messages, notes for the event log, and other requests to the driver."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from anabranch.protocol.context.clock import Clock
from anabranch.protocol.context.links import LinkTable
from anabranch.protocol.context.rate_limits_and_bans import RateLimits
from anabranch.protocol.interface.events import Effect, Note, Send
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.messages import Message
from anabranch.protocol.messages.table import ANSWER_OF


@dataclass(eq=False)
class Outbox:
    """Collector of the effects (messages, requests to the driver) that a peer's parts ask for, in order."""

    me: str
    clock: Clock
    links: LinkTable
    rate_limits: RateLimits
    unheard: Collection[str] = ()
    """Kinds of notes that the driver does not use, and that are not collected."""
    effects: list[Effect] = field(default_factory=list)
    to_self: list[tuple[Message, Payload | None]] = field(default_factory=list)
    """Messages from this peer to itself; they are received after the event."""
    payload_at: float = -math.inf
    """Time (s) at which the last payload was sent."""
    backlog: int = 0
    """Number of microbatches that wait for a credit of the next stage."""

    def send(self, peer: str, message: Message, payload: Payload | None = None) -> None:
        """Send a message to a linked peer, or to this peer itself. A message to a peer without a link is
        dropped: important messages are repeated when the link is up."""
        if peer == self.me:
            self.to_self.append((message, payload))
        elif peer in self.links.up:
            if payload is not None:
                self.payload_at = self.clock.now
            if (answer := ANSWER_OF.get(type(message))) is not None:
                self.rate_limits.asked(peer, answer)
            self.effects.append(Send(peer, message, payload))

    def emit(self, effect: Effect) -> None:
        """Ask the driver for an effect other than a message to a linked peer."""
        self.effects.append(effect)

    def note(self, kind: str, **fields: Any) -> None:
        """Ask the driver to write an event to the event log, unless it does not use that kind."""
        if kind not in self.unheard:
            self.effects.append(Note(kind, fields))

    def refuse(self, peer: str, message: str, reason: str) -> None:
        """Count a refused message of kind `message`, and note it with the reason in the event log unless the
        peer floods. The peer is not told, nor is its allowance charged."""
        count = self.rate_limits.count(peer, message)
        if self.rate_limits.is_noted(count):
            self.note("refused", subject=peer, reason=f"{message}: {reason}", count=count)

    def report_backlog(self, microbatches: int) -> None:
        self.backlog = microbatches

    def take_effects(self) -> list[Effect]:
        """Remove and return the effects collected so far, in order; messages to this peer itself (`to_self`)
        stay."""
        effects, self.effects = self.effects, []
        return effects
