"""Pauses of a connection whose kernel forgets its rate: the next payload's first bytes bridge them."""

from __future__ import annotations

import pytest

from anabranch.net import link as link_module
from anabranch.net.chunk_queue import ChunkQueue
from anabranch.net.framing import Blob, FrameReader
from support.network.net_world import Backend, World, backends, until

BODY = bytes(range(256)) * 16
#: Bytes of the frames of `BLOB` and its message: OPEN, CHUNK, DONE.
FRAMES_BYTES = (8 + 16 + 8 + 6) + (8 + len(BODY)) + (8 + 16)
BLOB = Blob("uint8", (len(BODY),), BODY)


def test_early_bytes_are_those_of_the_next_payload() -> None:
    """A reader of the same protocol version reads them like any others."""
    outbox, reader, received = ChunkQueue(1 << 10), FrameReader(max_payload_bytes=1 << 20), []
    for early in (0, 1, 5, 5):
        for _ in range(early):
            received += reader.feed(outbox.early_byte())
        outbox.put(b"message", BLOB, 3)
        while pieces := outbox.next_pieces():
            received += reader.feed(b"".join(pieces))
    assert [(message, bytes(blob.data)) for message, blob in received] == [(b"message", BODY)] * 4
    assert b"".join(outbox.early_byte() for _ in range(20)) == bytes([2, 0, 0, 4, 0]), "no more are known"


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("backend", backends()[:1], ids=lambda backend: backend.name)
def test_a_pause_is_bridged_where_the_kernel_forgets(
    backend: Backend, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_WARM_S", 0.001)

    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        here = await anna.dial(bert)
        there = await bert.incoming()
        bulk = here.link.bulk
        assert not bulk.forgets_rate, "loopback has nothing to forget"
        bulk.forgets_rate = forgets
        for number in (1, 2, 3):
            here.link.send(b"tensor", BLOB)
            await there.count(number)
            expected = number * FRAMES_BYTES + 5 * forgets
            await until(lambda: bulk.bytes_sent == expected)  # noqa: B023
        assert [bytes(blob.data) for _, blob in there.received if blob is not None] == [BODY] * 3
        assert not there.closings

    backend.run(scenario)
