"""Pauses of a connection whose kernel forgets its rate: frames without meaning bridge them, and then end."""

from __future__ import annotations

import asyncio

import pytest

from anabranch.net import link as link_module
from anabranch.net.framing import Blob
from support.network.net_world import Backend, World, backends, until

BODY = bytes(range(256)) * 16
#: Bytes of the frames of `BLOB` and its message: OPEN, CHUNK, DONE.
FRAMES_BYTES = (8 + 16 + 8 + 6) + (8 + len(BODY)) + (8 + 16)
BLOB = Blob("uint8", (len(BODY),), BODY)


@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("backend", backends()[:1], ids=lambda backend: backend.name)
def test_a_pause_is_bridged_where_the_kernel_forgets(
    backend: Backend, forgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By MAX_PAUSES frames at most, which the other end reads and hands to nobody; an idle link is silent."""
    monkeypatch.setattr(link_module, "_WARM_S", 0.001)
    monkeypatch.setattr(link_module, "MAX_PAUSES", 7)

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
            expected = number * FRAMES_BYTES + number * 7 * 8 * forgets
            await until(lambda: bulk.bytes_sent == expected)  # noqa: B023
            await asyncio.sleep(0.05)
            assert bulk.bytes_sent == expected and there.link.bulk.bytes_received == expected
        assert [bytes(blob.data) for _, blob in there.received if blob is not None] == [BODY] * 3
        assert not there.closings

    backend.run(scenario)


@pytest.mark.parametrize("backend", backends()[:1], ids=lambda backend: backend.name)
def test_a_pause_is_bridged_after_a_chunk_that_left_slowly(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection took nothing at the first look after the payload, as a slow line's does."""
    monkeypatch.setattr(link_module, "_WARM_S", 0.001)

    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        here = await anna.dial(bert)
        there = await bert.incoming()
        bulk = here.link.bulk
        bulk.forgets_rate = True
        here.link.send(b"tensor", BLOB)
        await until(lambda: bulk.bytes_sent >= FRAMES_BYTES)
        bulk.pause_writing()
        sent = bulk.bytes_sent
        await asyncio.sleep(0.05)
        assert bulk.bytes_sent == sent
        bulk.resume_writing()
        await until(lambda: bulk.bytes_sent > sent)
        assert not there.closings

    backend.run(scenario)
