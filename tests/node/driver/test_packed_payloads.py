"""Sums of a reduce go packed over a live link, on another thread than the link's, and arrive as they were."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from anabranch.net.errors import FrameError
from anabranch.net.framing import PACKED, Blob
from anabranch.net.handshake import Gate
from anabranch.net.identity import Identity
from anabranch.net.link import Link
from anabranch.net.packing import size_bounds
from anabranch.net.tcp.transport import TcpTransport
from anabranch.net.ticket import issue_certificate
from anabranch.node.driver import tensor_codec as payloads
from anabranch.node.driver.connections import ASKED_AHEAD_BYTES, ASKED_WAITING, Connections
from anabranch.node.driver.worker_thread import WorkerThread
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.messages import AttemptId, Piece, ReducedPart, ReducePart, encode
from anabranch.protocol.messages.common import Fence

RUN = "run"
OWNER, OTHER = (Identity.from_seed(name.ljust(32)) for name in (b"owner", b"other"))
FENCE = Fence(1, 1, 1, "0" * 64, 1)
N = 300_000
#: Sums as of half a batch: values below 2^39 units.
SUMS = torch.randint(-(1 << 39), 1 << 39, (N,), generator=torch.Generator().manual_seed(1))
REDUCED = torch.linspace(-1.0, 1.0, N)


class End:
    """Side of a live link: a peer's links without a protocol behind them."""

    def __init__(self, who: Identity) -> None:
        loop = asyncio.get_running_loop()
        self.packer = WorkerThread(loop.call_soon_threadsafe, pytest.fail)
        self.got: list[ev.Event] = []
        self.changed = asyncio.Event()
        gate = Gate(RUN, OWNER.peer_id, lambda hello: None)
        transport = TcpTransport(who, 1, gate, lambda link: self.links.accept(link))
        expires = int(time.time()) + 3600
        mine = issue_certificate(OWNER, run=RUN, peer_id=who.peer_id, role="relay", expires_at_s=expires)
        self.links = Connections(transport, self._handle, mine, self.packer.submit)

    def _handle(self, event: ev.Event) -> None:
        self.got.append(event)
        self.changed.set()

    async def until(self, found: Callable[[ev.Event], bool]) -> ev.Event:
        while True:
            for event in self.got:
                if found(event):
                    return event
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60.0)

    async def received(self, kind: type) -> Payload:
        event = await self.until(lambda event: isinstance(event, ev.Received) and type(event.message) is kind)
        assert isinstance(event, ev.Received)
        return event.payload

    def link(self, peer: Identity) -> Link:
        return self.links._links[peer.peer_id]

    async def close(self) -> None:
        await self.links.close()
        self.packer.close()


async def linked() -> tuple[End, End]:
    here, there = End(OWNER), End(OTHER)
    host, port = await here.links.transport.listen("127.0.0.1", 0)
    there.links.dial(OWNER.peer_id, f"{host}:{port}")
    for end in (here, there):
        await end.until(lambda event: isinstance(event, ev.LinkUp))
    return here, there


def part(number: int) -> ReducePart:
    return ReducePart(FENCE, 1, AttemptId(1, 1), number)


def test_sums_travel_packed_and_the_reduced_part_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[str]] = {"pack": set(), "unpack": set()}
    for name, seen in threads.items():
        plain = getattr(payloads, name)

        def noted(*given: object, seen: set[str] = seen, plain: Callable[..., object] = plain) -> object:
            seen.add(threading.current_thread().name)
            return plain(*given)

        monkeypatch.setattr(payloads, name, noted)

    async def scenario() -> None:
        here, there = await linked()
        here.links.send(OTHER.peer_id, part(0), SUMS)
        got = await there.received(ReducePart)
        assert isinstance(got, torch.Tensor) and got.dtype == torch.int64 and torch.equal(got, SUMS)
        sent = here.links.sent_bytes["ReducePart"]
        least, _ = size_bounds(N)
        assert sent == least + 4 * N  # five bytes a value
        assert sent < here.link(OTHER).bulk.bytes_sent < sent * 1.01
        here.links.send(OTHER.peer_id, ReducedPart(FENCE, 1, AttemptId(1, 1), 0), REDUCED)
        reduced = await there.received(ReducedPart)
        assert isinstance(reduced, torch.Tensor) and torch.equal(reduced, REDUCED)
        assert here.links.sent_bytes["ReducedPart"] == 4 * N
        for end in (here, there):
            await end.close()

    asyncio.run(scenario())
    assert threads == {"pack": {"anabranch worker"}, "unpack": {"anabranch worker"}}


def test_the_memory_of_a_payload_is_told_in_the_largest_that_the_link_accepts() -> None:
    """Unpacked, as it is kept: packed zeros take almost nothing on the way."""

    async def scenario() -> None:
        here, there = await linked()
        most_bytes = 16 * N
        there.links.transport.links.limit_payloads(most_bytes)
        here.links.send(OTHER.peer_id, part(0), torch.zeros(N, dtype=torch.int64))
        here.links.send(OTHER.peer_id, ReducedPart(FENCE, 1, AttemptId(1, 1), 0), REDUCED)
        for kind, share in ((ReducePart, 0.5), (ReducedPart, 0.25)):
            await there.received(kind)
            (event,) = [e for e in there.got if isinstance(e, ev.Received) and type(e.message) is kind]
            assert event.share == share
        for end in (here, there):
            await end.close()

    asyncio.run(scenario())


def test_parts_arrive_in_the_order_in_which_they_were_sent() -> None:
    async def scenario() -> None:
        here, there = await linked()
        for number in range(20):
            here.links.send(OTHER.peer_id, part(number), SUMS[:5000] + number)
        await there.until(lambda event: isinstance(event, ev.Received) and event.message == part(19))
        messages = [event for event in there.got if isinstance(event, ev.Received)]
        assert [event.message for event in messages] == [part(number) for number in range(20)]
        for number, event in enumerate(messages):
            assert isinstance(event.payload, torch.Tensor)
            assert torch.equal(event.payload, SUMS[:5000] + number)
        for end in (here, there):
            await end.close()

    asyncio.run(scenario())


def test_a_payload_that_is_not_packed_breaks_the_link() -> None:
    async def scenario() -> None:
        here, there = await linked()
        here.link(OTHER).send(encode(part(0)), Blob(PACKED, (3,), bytes([1, 2, 3, 9, 0])))
        garbled = await there.until(lambda event: isinstance(event, ev.Garbled))
        assert isinstance(garbled, ev.Garbled)
        assert garbled.peer == OWNER.peer_id
        assert garbled.reason == "broken payload: packed values of 9 to 9 bytes each"
        await here.until(lambda event: isinstance(event, ev.LinkDown))
        for end in (here, there):
            await end.close()

    asyncio.run(scenario())


def test_packed_values_with_another_hash_than_stated_break_the_link() -> None:
    """The frame's checksum is compared after the values were unpacked, before anybody gets them."""

    async def scenario() -> None:
        here, there = await linked()
        false = replace(payloads.to_blob(SUMS), hash="0" * 32)
        here.link(OTHER).send(encode(part(0)), false)
        garbled = await there.until(lambda event: isinstance(event, ev.Garbled))
        assert isinstance(garbled, ev.Garbled) and garbled.peer == OWNER.peer_id
        assert garbled.reason.startswith("broken payload: a payload's checksum is wrong")
        assert not any(isinstance(event, ev.Received) for event in there.got)
        for end in (here, there):
            await end.close()

    asyncio.run(scenario())


def test_a_link_is_held_by_what_its_payloads_are_once_they_are_unpacked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Zeros take two bytes for 64 values on the line: a short payload must not ask for much memory (I7)."""
    monkeypatch.setattr("anabranch.node.driver.connections.UNPACK_BYTES", 4 * N)
    waiting: list[Callable[[], None]] = []

    async def scenario() -> None:
        here, there = await linked()
        came = asyncio.Event()

        def later(work: Callable[[], object], done: Callable[[object], None]) -> None:
            waiting.append(lambda: done(work()))
            came.set()

        there.links._offload = later
        here.links.send(OTHER.peer_id, part(0), torch.zeros(N, dtype=torch.int64))
        await asyncio.wait_for(came.wait(), 60.0)
        assert here.links.sent_bytes["ReducePart"] < N / 16
        assert there.link(OWNER)._holds
        waiting.pop()()
        assert not there.link(OWNER)._holds
        got = await there.received(ReducePart)
        assert isinstance(got, torch.Tensor) and not got.any() and len(got) == N
        for end in (here, there):
            await end.close()

    asyncio.run(scenario())


def pieces() -> list[torch.Tensor]:
    floats = torch.randn(5000, generator=torch.Generator().manual_seed(2)) * 0.02
    state = floats.view(torch.uint8)
    noise = torch.randint(0, 256, (4001,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    short = [noise[:size].clone() for size in (0, 1, 3, 4, 5, 8)]
    return [state, state[:-1], state[1:-2], noise, torch.zeros(4096, dtype=torch.uint8), *short]


@pytest.mark.parametrize("number", range(len(pieces())))
def test_pieces_of_a_state_come_back(number: int) -> None:
    piece = pieces()[number]
    sent = payloads.deflated(piece)
    assert len(sent) <= len(piece) + 1
    assert torch.equal(payloads.inflated(sent, len(piece)), piece)
    with pytest.raises(FrameError):
        payloads.inflated(sent, len(piece) - 1)


def test_weights_take_a_sixth_less() -> None:
    state = pieces()[0]
    assert len(payloads.deflated(state)) < 0.85 * len(state)


def test_garbage_is_no_piece() -> None:
    """Nothing else than a FrameError, and never more than was allowed (I7)."""
    draw, sent = random.Random(4), payloads.deflated(pieces()[0][:400])
    for _ in range(2000):
        bad = sent.clone()
        for _ in range(draw.randrange(1, 4)):
            bad[draw.choice((0, 1, 2, 3, 4, draw.randrange(len(bad))))] = draw.randrange(256)
        bad = bad[: draw.choice((len(bad), draw.randrange(len(bad))))]
        try:
            assert len(payloads.inflated(bad, 400)) <= 400
        except FrameError:
            continue
    zeros = payloads.deflated(torch.zeros(1 << 16, dtype=torch.uint8))
    for bad in (
        zeros[:-1],
        torch.cat((zeros, zeros[:1])),
        zeros[:0],
        zeros.to(torch.int32),
        zeros.view(1, -1),
    ):
        with pytest.raises(FrameError):
            payloads.inflated(bad, 1 << 20)


def test_a_piece_of_a_state_travels_deflated() -> None:
    async def scenario() -> None:
        here, there = await linked()
        here.links.send(OTHER.peer_id, Piece(1, 2, 3), pieces()[0])
        got = await there.received(Piece)
        assert isinstance(got, torch.Tensor) and torch.equal(got, pieces()[0])
        assert here.links.sent_bytes["Piece"] < 0.85 * len(got)
        here.link(OTHER).send(encode(Piece(1, 2, 4)), Blob("uint8", (3,), bytes([7, 0, 0])))
        garbled = await there.until(lambda event: isinstance(event, ev.Garbled))
        assert isinstance(garbled, ev.Garbled) and "piece" in garbled.reason
        for end in (here, there):
            await end.close()

    asyncio.run(scenario())


def test_what_was_being_packed_when_the_link_went_is_dropped() -> None:
    async def scenario() -> None:
        here, there = await linked()
        here.links.send(OTHER.peer_id, part(0), SUMS)
        here.links.hang_up(OTHER.peer_id, "enough")
        await there.until(lambda event: isinstance(event, ev.LinkDown))
        assert not any(isinstance(event, ev.Received) for event in there.got)
        assert not here.links.sent_bytes
        for end in (here, there):
            await end.close()

    asyncio.run(scenario())


def test_a_peer_that_reads_none_of_the_pieces_it_asks_for_holds_little_memory() -> None:
    """It asked for the same piece again and again, and 1 GiB of them waited for it at each replica (I5)."""
    piece = torch.randn(1 << 18, generator=torch.Generator().manual_seed(5)).view(torch.uint8)

    async def scenario() -> None:
        here, there = await linked()
        there.link(OWNER).hold_payloads(True)
        queue = here.link(OTHER)._queue
        most_bytes = 0
        for _ in range(60):
            for number in range(4):
                here.links.send(OTHER.peer_id, Piece(1, 2, number), piece)
            await asyncio.sleep(0.02)
            most_bytes = max(most_bytes, queue.queued_bytes)
        assert most_bytes <= ASKED_AHEAD_BYTES + len(piece)
        there.link(OWNER).hold_payloads(False)
        sent = lambda: len([each for each in there.got if isinstance(each, ev.Received)])  # noqa: E731
        while here.links._asked:
            await asyncio.sleep(0.01)
        await there.until(lambda event: sent() > ASKED_WAITING)
        here.links.send(OTHER.peer_id, Piece(1, 2, 99), piece)
        await there.until(lambda event: isinstance(event, ev.Received) and event.message == Piece(1, 2, 99))
        for number in range(2 * ASKED_WAITING):
            here.links.send(OTHER.peer_id, Piece(1, 2, number), piece)
        here.links.hang_up(OTHER.peer_id, "enough")
        while here.links._asked:
            await asyncio.sleep(0.01)
        for end in (here, there):
            await end.close()

    asyncio.run(asyncio.wait_for(scenario(), 120.0))


def test_payloads_wait_at_their_sender_while_messages_are_held() -> None:
    """Payloads of a stranger that wait for their turn would fill the memory if they were read all the
    same."""
    piece = torch.randn(1 << 18, generator=torch.Generator().manual_seed(5)).view(torch.uint8)

    async def scenario() -> None:
        here, there = await linked()
        there.link(OWNER).hold_messages(True)
        for number in range(ASKED_WAITING):
            here.links.send(OTHER.peer_id, Piece(1, 2, number), piece)
        await asyncio.sleep(0.5)
        assert not any(isinstance(event, ev.Received) for event in there.got)
        there.link(OWNER).hold_messages(False)
        sent = lambda: len([each for each in there.got if isinstance(each, ev.Received)])  # noqa: E731
        await there.until(lambda event: sent() == ASKED_WAITING)
        for end in (here, there):
            await end.close()

    asyncio.run(asyncio.wait_for(scenario(), 120.0))


def test_sums_for_links_that_are_gone_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that makes its link anew, again and again, gets its parts of the reduce again each time. The
    parts of others would wait for all of them to be packed."""
    packed, go_on, plain = list[int](), threading.Event(), payloads.pack

    def slow(values: Any) -> Any:
        go_on.wait(60.0)
        packed.append(len(values))
        return plain(values)

    monkeypatch.setattr(payloads, "pack", slow)

    async def scenario() -> None:
        here, there = await linked()
        links = set[Link]()
        for number in range(12):
            here.links.send(OTHER.peer_id, part(0), SUMS[:5000])
            links.add(there.link(OWNER))
            address = here.links.dialled_at(OTHER.peer_id) or there.links.dialled_at(OWNER.peer_id)
            assert address is not None
            there.links.accept(
                await there.links.transport.dial(
                    OWNER.peer_id, address.host, address.port, there.links.credential
                )
            )
            await here.until(lambda _, number=number: ups(here) == number + 2)  # type: ignore[misc]
        here.links.send(OTHER.peer_id, part(1), SUMS[:5000])
        go_on.set()
        await there.received(ReducePart)
        assert len(links) == 12 and len(packed) <= 2, packed
        for end in (here, there):
            await end.close()

    asyncio.run(scenario())


def ups(end: End) -> int:
    """Links of this side that came up so far."""
    return sum(isinstance(event, ev.LinkUp) for event in end.got)
