"""Payloads that peers ask for do not keep others' waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import torch

from anabranch.net.handshake import Credential
from anabranch.net.tcp.transport import TcpTransport
from anabranch.node.driver.connections import ASKED_WAITING, Connections
from anabranch.protocol.messages import AttemptId, Piece, ReducePart
from anabranch.protocol.messages.common import Fence

PIECE = torch.zeros(64, dtype=torch.uint8)


class FakeLink:
    """Link that counts what it is given."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id, self.sent = peer_id, 0

    def send(self, message: bytes, payload: object = None, *, priority: int = 0) -> None:
        self.sent += 1

    def when_room(self, most_bytes: int, then: Callable[[], None]) -> None:
        then()


def test_a_part_of_a_reduce_waits_behind_few_pieces_that_a_guest_asked_for() -> None:
    """A newcomer asked for four thousand pieces of the state at once, each of which takes 46 ms to deflate:
    the next part of a reduce was packed three minutes later."""

    async def run() -> None:
        jobs = list[tuple[Callable[[], Any], Callable[[Any], object]]]()
        links = Connections(
            cast(TcpTransport, None),
            lambda event: None,
            cast(Credential, None),
            lambda work, done: jobs.append((work, done)),
        )
        guest, fellow = FakeLink("guest"), FakeLink("fellow")
        links._links = cast(Any, {"guest": guest, "fellow": fellow})
        for number in range(4096):
            links.send("guest", Piece(1, 1, number), PIECE)
        part = ReducePart(Fence(1, 1, 1, "0" * 64, 1), 1, AttemptId(1, 1), 0, b"")
        links.send("fellow", part, torch.ones(8, dtype=torch.int64))
        done = 0
        while not fellow.sent:
            work, then = jobs.pop(0)
            then(work())
            done += 1
        assert done <= 2
        while jobs:
            work, then = jobs.pop(0)
            then(work())
        assert guest.sent == ASKED_WAITING and not links._asked

    asyncio.run(run())
