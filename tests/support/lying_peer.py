"""Peer of a hostile guest whose worker lies, and that tells what it is sent: for deeds that only tests do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anabranch.node.chaos.guests.guest_process import HostilePeer
from anabranch.node.chaos.guests.member_deeds import Deed, Guest
from anabranch.node.driver.worker_thread import Computer
from anabranch.protocol import messages as msg
from anabranch.protocol.interface.events import Event, Received
from anabranch.protocol.interface.tasks import Payload, Result, Task


@dataclass
class WorkerGuest(Guest):
    """Hostile peer as its deed sees it, with its worker once that is built."""

    computer: Computer | None = None


Compute = Callable[[WorkerGuest, Task, tuple[Payload, ...], Result], Result]
Hear = Callable[[Guest, Received], bool]


@dataclass(frozen=True)
class WorkerDeed(Deed):
    """Deed of a guest that computes falsely, or looks at what it is sent. compute: gets each task of its
    worker with the inputs and the right result, returns the result used instead, on the worker's thread.
    hear: gets each message that the guest receives, returns False if its peer is not to get that."""

    compute: Compute | None = None
    hear: Hear | None = None


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


class LyingPeer(HostilePeer):
    """Hostile peer whose worker lies, too, if that is its deed."""

    guest: WorkerGuest

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.guest = WorkerGuest(self.peer)

    def _built(self, stage: int, built: tuple[Computer, str]) -> None:
        computer, fingerprint = built
        self.guest.computer = computer
        lie = self.deed.compute if isinstance(self.deed, WorkerDeed) else None
        if lie is not None:
            computer = LyingComputer(computer, lambda *task: lie(self.guest, *task), self.begin)
        super()._built(stage, (computer, fingerprint))

    def _handle(self, event: Event) -> None:
        received = event if isinstance(event, Received) else None
        message = None if received is None or received.payload is None else received.message
        if isinstance(message, msg.Gradient):
            print("gradient", message.stage, flush=True)
        hear = self.deed.hear if isinstance(self.deed, WorkerDeed) else None
        if hear is None or received is None or hear(self.guest, received):
            super()._handle(event)
