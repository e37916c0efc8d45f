"""Payloads that take long to unpack do not keep others' waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from anabranch.net.framing import SCALED, Blob
from anabranch.net.handshake import Credential
from anabranch.net.scaled_packing import pack
from anabranch.net.tcp.transport import TcpTransport
from anabranch.node.driver.connections import Connections
from anabranch.protocol.interface.events import Event, Received
from anabranch.protocol.messages import AttemptId, ReducePart, encode
from anabranch.protocol.messages.common import Fence

COUNT = 64 * 64
ZEROS = Blob(SCALED, (COUNT,), pack(np.zeros(COUNT, np.int64)).data)


class FakeLink:
    """Link whose payloads are not held back."""

    max_payload_bytes = 8 * COUNT

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id

    def hold_payloads(self, hold: bool) -> None:
        pass


class Peer:
    """Links of a peer, whose members are "fellow" and "other", with jobs that are done one by one."""

    def __init__(self) -> None:
        self.jobs = list[tuple[Callable[[], Any], Callable[[Any], object]]]()
        self.got = list[str]()
        self.links = Connections(
            cast(TcpTransport, None),
            self._handle,
            cast(Credential, None),
            lambda work, done: self.jobs.append((work, done)),
            lambda peer: peer in ("fellow", "other"),
        )

    def _handle(self, event: Event) -> None:
        assert isinstance(event, Received)
        payload = event.payload
        assert isinstance(payload, torch.Tensor) and len(payload) == COUNT and not payload.any()
        message = event.message
        assert isinstance(message, ReducePart)
        self.got.append(f"{event.peer} {message.part}")

    def sends(self, who: str, number: int) -> None:
        link = cast(Any, self.links._links.setdefault(who, cast(Any, FakeLink(who))))
        part = ReducePart(Fence(1, 1, 1, "0" * 64, 1), 1, AttemptId(1, 1), number, b"")
        self.links._received(link, encode(part), ZEROS)

    def work_until(self, what: str) -> int:
        """Jobs done until a payload has been unpacked."""
        done = 0
        while what not in self.got:
            work, then = self.jobs.pop(0)
            then(work())
            done += 1
        return done


def test_strangers_payloads_wait_for_those_of_members() -> None:
    """Sixteen keys of one ticket, which had no seat, sent zeros that took 0.6 MB on the line and a second to
    unpack: a part of a reduce waited for a minute behind them, and its sender looked late (I4, I7)."""

    async def scenario() -> None:
        peer = Peer()
        for number in range(8):
            for stranger in range(16):
                peer.sends(f"stranger {stranger}", number)
        peer.sends("fellow", 1)
        assert peer.work_until("fellow 1") <= 2
        peer.work_until("stranger 15 7")
        assert peer.got.index("stranger 0 7") > peer.got.index("stranger 15 6")
        assert not peer.jobs and not peer.links._to_unpack and not peer.links._waiting

    asyncio.run(scenario())


def test_a_member_s_payloads_take_turns_with_those_of_others_and_end_with_its_link() -> None:
    async def scenario() -> None:
        peer = Peer()
        for number in range(50):
            peer.sends("fellow", number)
        for number in (1, 2):
            peer.sends("other", number)
        assert peer.work_until("other 1") <= 3 and peer.work_until("other 2") <= 2
        assert peer.got.index("fellow 0") < peer.got.index("fellow 1")
        del peer.links._links["fellow"]  # banned meanwhile
        peer.sends("other", 3)
        assert peer.work_until("other 3") <= 2
        assert not peer.links._to_unpack and not peer.links._waiting and len(peer.got) < 8

    asyncio.run(scenario())
