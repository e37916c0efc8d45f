"""Process of a hostile guest: the real peer of a volunteer with one deed swapped in where messages leave it,
or a stranger without a peer. Only the chaos test starts it; no command of volunteers leads here.

It prints `id PEER`, `begun` when its deed begins, `piece STAGE` when it got a piece of a state of a stage
that is not its own, `closed REASON` and `ended REASON`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from anabranch.errors import UserError
from anabranch.net.ticket import parse_ticket
from anabranch.node.chaos.guests import stranger_attacks, worker_deeds
from anabranch.node.chaos.guests.member_deeds import DEEDS, EVERY_S, FURTHER, Deed, Guest
from anabranch.node.driver.event_loop import run_async
from anabranch.node.driver.peer_driver import LivePeer, Outcome
from anabranch.node.lifecycle.join import JoinOptions, join
from anabranch.node.local_swarm.peer_process import enter
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Payload, Result, Task
from anabranch.protocol.messages import Piece

if TYPE_CHECKING:
    from anabranch.net.ticket import Ticket
    from anabranch.node.driver.worker_thread import Computer


class LyingComputer:
    """Worker of a hostile guest: its deed `lie` changes results of `computer`. begun: called at a change."""

    def __init__(
        self, computer: Computer, lie: Callable[[Task, tuple[Payload, ...], Result], Result],
        begun: Callable[[], None],
    ) -> None:  # fmt: skip
        self._computer, self._lie, self._begun = computer, lie, begun

    def run(self, task: Task, inputs: tuple[Payload, ...] = ()) -> Result:
        right = self._computer.run(task, inputs)
        said = self._lie(task, inputs, right)
        if said is not right:
            self._begun()
        return said


class HostilePeer(LivePeer):
    """Peer of a volunteer that does a deed while it is in the deed's role, and is honest otherwise."""

    deed: Deed
    """Set on the subclass that the process makes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._guest = Guest(self.peer)
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

    def _built(self, stage: int, built: tuple[Computer, str]) -> None:
        computer, fingerprint = built
        if (lie := self.deed.compute) is not None:
            changed = lambda *task: lie(self._guest, *task)  # noqa: E731
            computer = LyingComputer(computer, changed, self._begin)
        super()._built(stage, (computer, fingerprint))

    def _carry_out(self, effect: ev.Effect) -> None:
        swap = self.deed.swap
        if swap is None or not isinstance(effect, ev.Send) or not self._guest.in_role(self.deed.role):
            super()._carry_out(effect)
            return
        said = swap(self._guest, effect)
        if len(said) != 1 or said[0] is not effect:
            self._begin()
        for each in said:
            super()._carry_out(each)

    def _talk(self) -> None:
        """Send the messages that the deed adds (`Deed.talk`), now and every EVERY_S seconds from now on."""
        if not self.running:
            return
        if self.deed.talk is not None and self._guest.in_role(self.deed.role):
            for send in self.deed.talk(self._guest):
                if send.peer in self.peer.ctx.links.up:
                    self._begin()
                    self.links.send(send.peer, send.message, send.payload)
        self._loop.call_later(EVERY_S, self._talk)

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            print("begun", flush=True)


def run_guest(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """Be a guest in this process, which a supervisor started (see `peer_process.run_peer`).

    arguments: deed, ticket, folder for its key and logs, wished stage, and address of its own.
    """
    enter(name, log, namespace, environment)
    deed, text, home, stage, host = arguments
    ticket = parse_ticket(text, now_s=time.time())
    stranger_attacks.GuestTransport.host = host
    if deed in stranger_attacks.ATTACKS:
        os.nice(stranger_attacks.NICENESS)
        asyncio.run(stranger_attacks.attack(ticket, deed))
    found = (DEEDS | FURTHER | worker_deeds.DEEDS)[deed]
    sys.exit(_be_member(found, ticket, name, Path(home), int(stage), host))


def _be_member(deed: Deed, ticket: Ticket, name: str, home: Path, stage: int, host: str) -> int:
    options = JoinOptions(ticket, home, name=name, stage=stage, host=host)
    hostile = type("HostilePeer", (HostilePeer,), {"deed": deed})
    try:
        outcome = run_async(join(options, print, hostile, stranger_attacks.GuestTransport))
    except UserError as error:
        outcome = Outcome(str(error), ok=False)
    print("ended", outcome.reason, flush=True)
    return 0 if outcome.ok else 1
