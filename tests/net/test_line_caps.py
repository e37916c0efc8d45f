"""Caps of a machine's line: no more bytes of payloads in any time than rate and burst allow."""

from __future__ import annotations

import pytest

from anabranch.net.connection_limits import LineCaps
from anabranch.net.framing import Blob
from anabranch.net.lane import TokenBucket
from anabranch.net.link import LineBuckets
from anabranch.net.tcp.transport import CAP_BURST_S, _bucket
from support.network.net_world import Backend, Peer, World, backends

BODY = bytes(range(256)) * 1024
RATE = 8.0 * len(BODY)
#: Bytes that may pass although no token is left: what a read or write of each of two links brings, and what
#: the TLS layer holds then.
ONCE = 4 * len(BODY)


@pytest.fixture(params=backends(), ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    found = request.param
    assert isinstance(found, Backend)
    return found


class Meter(TokenBucket):
    """Token bucket that writes down when bytes passed."""

    def __init__(self) -> None:
        super().__init__(RATE, CAP_BURST_S * RATE)
        self.passed: list[tuple[float, int]] = []

    def pause_s(self, size_bytes: int, now: float) -> float:
        if size_bytes:
            self.passed.append((now, size_bytes))
        return super().pause_s(size_bytes, now)

    def check(self) -> None:
        """Check that no stretch of time had more bytes than rate and burst allow; a slow machine only makes
        it longer."""
        for first, (start, _) in enumerate(self.passed):
            total = 0
            for at, size_bytes in self.passed[first:]:
                total += size_bytes
                assert total <= CAP_BURST_S * RATE + RATE * (at - start) + ONCE


def test_a_bucket_lets_no_more_pass_than_its_rate() -> None:
    bucket, now, passed = TokenBucket(1000.0, 250.0), 0.0, 0
    while now < 60.0:
        passed += 100
        now += bucket.pause_s(100, now)
    assert 60_000 <= passed <= 60_000 + 250 + 200


def test_links_of_a_capped_line_take_turns() -> None:
    """All ask at the same moments, always in the same order: the last would never write. One gives up."""
    bucket, now, turns = TokenBucket(1000.0, 250.0), 0.0, list[str]()
    bucket.pause_s(500, now)
    asks = {who: bucket.turn_s(who, now) for who in "abc"}
    while len(turns) < 30:
        now = min(asks.values())
        for who in [each for each, at in asks.items() if at <= now]:
            asks[who] = now + bucket.turn_s(who, now)
            if asks[who] == now:
                turns.append(who)
                bucket.pause_s(500, now)
                asks[who] = now + bucket.turn_s(who, now)
        if len(turns) == 15:
            asks.pop("c", None)
    assert turns[:15] == ["a", "b", "c"] * 5 and set(turns[16:]) == {"a", "b"}
    assert turns[16:].count("a") == turns[16:].count("b")


def capped(peer: Peer, line: LineBuckets) -> None:
    peer.transport.links.line = line


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("way", ["up", "down"])
def test_links_of_a_machine_share_its_cap(backend: Backend, way: str) -> None:
    async def scenario(world: World) -> None:
        anna, meter = await world.peer("anna"), Meter()
        capped(anna, LineBuckets(**{way: meter}))
        for name in ("bert", "cleo"):
            await anna.dial(await world.peer(name))
        ends = [peer.inboxes[0] for peer in world._peers[1:]]
        mine = [link for link in anna.transport.links.links]
        sends, receives = (mine, ends) if way == "up" else ([end.link for end in ends], None)
        for link in sends:
            for _ in range(6):
                link.send(b"tensor", Blob("uint8", (len(BODY),), BODY))
        if receives is not None:
            for end in receives:
                await end.count(6)
        else:
            await anna_received(anna, 12)
        meter.check()
        assert sum(size for _, size in meter.passed) >= 12 * len(BODY)

    backend.run(scenario)


async def anna_received(anna: Peer, number: int) -> None:
    from support.network.net_world import until

    await until(lambda: sum(link._finished for link in anna.transport.links.links) >= number)


def test_messages_do_not_wait_for_a_capped_line(backend: Backend) -> None:
    """A heartbeat passes while payloads wait for tokens."""

    async def scenario(world: World) -> None:
        anna, bert = await world.peer("anna"), await world.peer("bert")
        capped(anna, LineBuckets(up=TokenBucket(1.0, 1.0)))
        here = await anna.dial(bert)
        for _ in range(4):
            here.link.send(b"tensor", Blob("uint8", (len(BODY),), BODY))
        here.link.send(b"heartbeat")
        there = await bert.incoming()
        await there.count(1)
        assert there.messages[0] == b"heartbeat" or b"heartbeat" in there.messages
        assert here.link._queue

    backend.run(scenario)


def test_no_cap_is_no_bucket() -> None:
    assert _bucket(LineCaps().up_bytes_per_s) is None and _bucket(1.0) is not None
