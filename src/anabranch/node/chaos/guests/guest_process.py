"""Process of a hostile guest: the real peer of a volunteer with one deed swapped in where messages leave it,
or a stranger without a peer. Only the chaos test starts it; no command of volunteers leads here.

It prints `id PEER`, `begun` when its deed begins, `piece STAGE` when it got a piece of a state of a stage
that is not its own, or of any while it is no member, `closed REASON` and `ended REASON`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from anabranch.errors import UserError
from anabranch.net.ticket import parse_ticket
from anabranch.node.chaos.guests import stranger_attacks
from anabranch.node.chaos.guests.member_deeds import DEEDS, EVERY_S, Deed, Guest
from anabranch.node.driver.event_loop import run_async
from anabranch.node.driver.peer_driver import LivePeer, Outcome
from anabranch.node.lifecycle.join import JoinOptions, join
from anabranch.node.local_swarm.peer_process import enter
from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages import Piece


class HostilePeer(LivePeer):
    """Peer of a volunteer that does a deed while it is in the deed's role, and is honest otherwise."""

    deed: Deed
    """Set on the class before the process makes its peer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.guest = Guest(self.peer)
        self._begun = False

    async def run(self, dial: tuple[str, str] | None = None) -> Outcome:
        print("id", self.peer.ctx.me, flush=True)
        self._talk()
        return await super().run(dial)

    def _handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.Received) and isinstance(piece := event.message, Piece):
            member = self.peer.ctx.me in self.peer.ctx.run.membership.members
            if not member or piece.stage != self.peer.ctx.run.stage:
                print("piece", piece.stage, flush=True)
        super()._handle(event)

    def _carry_out(self, effect: ev.Effect) -> None:
        swap = self.deed.swap
        if swap is None or not isinstance(effect, ev.Send) or not self.guest.in_role(self.deed.role):
            super()._carry_out(effect)
            return
        said = swap(self.guest, effect)
        if len(said) != 1 or said[0] is not effect:
            self.begin()
        for each in said:
            super()._carry_out(each)

    def _talk(self) -> None:
        """Send the messages that the deed adds (`Deed.talk`), now and every EVERY_S seconds from now on."""
        if not self.running:
            return
        if self.deed.talk is not None and self.guest.in_role(self.deed.role):
            for send in self.deed.talk(self.guest):
                if send.peer in self.peer.ctx.links.up:
                    self.begin()
                    self.links.send(send.peer, send.message, send.payload)
        self._loop.call_later(EVERY_S, self._talk)

    def begin(self) -> None:
        """Print that the deed begins, for the chaos test; nothing at later calls."""
        if not self._begun:
            self._begun = True
            print("begun", flush=True)


def run_guest(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str],
    deeds: Mapping[str, Deed] = DEEDS, peer: type[HostilePeer] = HostilePeer,
) -> NoReturn:  # fmt: skip
    """Be a hostile guest in this process, which never leaves this call, and which a supervisor started. name,
    log, namespace, environment: as in `peer_process.enter`. arguments: deed, ticket, folder for its key and
    logs, wished stage, address of its own, and, of a data node, the corpus. deeds, peer: of members; tests
    have more of them. The process exits with 0, or 1 if the guest's part ended with an error; a stranger
    attacks until it is killed."""
    enter(name, log, namespace, environment)
    deed, text, home, stage, host, *corpus = arguments
    ticket = parse_ticket(text, now_s=time.time())
    stranger_attacks.GuestTransport.host = host
    if deed in stranger_attacks.ATTACKS:
        os.nice(stranger_attacks.NICENESS)
        asyncio.run(stranger_attacks.attack(ticket, deed))
    peer.deed = deeds[deed]
    options = JoinOptions(ticket, Path(home), name=name, stage=int(stage), host=host)
    options = replace(options, corpus=Path(corpus[0]) if corpus else None)
    try:
        outcome = run_async(join(options, print, peer, stranger_attacks.GuestTransport))
    except UserError as error:
        outcome = Outcome(str(error), ok=False)
    print("ended", outcome.reason, flush=True)
    sys.exit(0 if outcome.ok else 1)
