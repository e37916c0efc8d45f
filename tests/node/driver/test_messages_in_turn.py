"""Messages, with payload and without, are handled in turn: a link that sends many holds up its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

import pytest

from anabranch.net.framing import MAX_MESSAGE_BYTES, Blob
from anabranch.net.handshake import Credential
from anabranch.net.link import Link, Way
from anabranch.net.tcp.transport import TcpTransport
from anabranch.node.driver.connections import Connections
from anabranch.node.driver.message_turns import PROMPT, WAITING_BYTES, WAITING_MESSAGES, Turns
from anabranch.protocol.interface.events import Event, Garbled, LinkDown, LinkUp, Received
from anabranch.protocol.messages import Backward, Fence, Ping, encode


class CountingLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock the test moves. By the machine's, a process that is held up for 2 ms between two
    messages would end a turn there, and the order of messages is what these tests look at."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


def run(scenario: Coroutine[Any, Any, None]) -> None:
    loop = CountingLoop()
    try:
        loop.run_until_complete(scenario)
    finally:
        loop.close()


class FakeLink:
    """Link that keeps how it was held back."""

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id
        self.holds = list[bool]()

    def hold_messages(self, hold: bool) -> None:
        self.holds.append(hold)


class Links:
    """Links of a peer whose members' ids begin with "m", and what they brought, as it was handled."""

    def __init__(self) -> None:
        self.loop = cast(CountingLoop, asyncio.get_running_loop())
        self.turns = Turns(lambda peer: peer.startswith("m"))
        self.links = dict[str, FakeLink]()
        self.handled = list[tuple[str, int]]()
        self._count = 0

    def bring(self, who: str, count: int = 1, size_bytes: int = 0, work_s: float = 0.0) -> None:
        """Let messages of `who` come, each of `size_bytes`, whose handling takes `work_s` seconds."""
        link = cast(Link, cast(Any, self.links.setdefault(who, FakeLink(who))))

        for _ in range(count):
            self._count += 1
            self.turns.put(link, partial(self._handle, who, self._count, work_s), size_bytes)

    def _handle(self, who: str, number: int, work_s: float) -> None:
        self.loop.now_s += work_s
        self.handled.append((who, number))

    async def all_handled(self) -> list[str]:
        while len(self.handled) < self._count:
            await asyncio.sleep(0)
            self.loop.now_s += 0.0005
        return [who for who, _ in self.handled]


def test_links_take_turns() -> None:
    async def scenario() -> None:
        links = Links()
        links.bring("member", 1000)
        links.bring("m2", 3)
        assert (await links.all_handled())[:6] == ["member", "m2"] * 3
        numbers = [number for who, number in links.handled if who == "member"]
        assert numbers == sorted(numbers), "the messages of a link keep their order"

    run(scenario())


def test_strangers_come_after_members() -> None:
    async def scenario() -> None:
        links = Links()
        for number in range(8):
            links.bring(f"stranger {number}", 100)
        links.bring("member", 5)
        order = await links.all_handled()
        assert order[:5] == ["member"] * 5
        assert len(set(order[5:13])) == 8, "strangers take turns, too"

    run(scenario())


def test_a_member_beyond_its_share_comes_after_others() -> None:
    async def scenario() -> None:
        links = Links()
        links.bring("member", most := int(PROMPT.burst))
        await links.all_handled()
        links.bring("member", most)
        links.bring("m2", 20)
        order = (await links.all_handled())[most:]
        # While the others wait the flood gets a message now and then, at its rate.
        assert order.index("m2") < 5 and order[:80].count("m2") == 20

    run(scenario())


def test_a_link_with_many_waiting_is_read_no_further() -> None:
    async def scenario() -> None:
        links = Links()
        links.bring("member", WAITING_MESSAGES - 1)
        assert links.links["member"].holds == []
        links.bring("member")
        assert links.links["member"].holds == [True]
        await links.all_handled()
        assert links.links["member"].holds == [True, False]

    run(scenario())


def test_a_link_with_many_bytes_waiting_is_read_no_further() -> None:
    """Strangers' messages of a MiB came in faster than they were handled, and a thousand of each link would
    have been kept."""

    async def scenario() -> None:
        links = Links()
        links.bring("stranger", 1, MAX_MESSAGE_BYTES)
        assert links.links["stranger"].holds == [True]
        await links.all_handled()
        assert links.links["stranger"].holds == [True, False]
        links.bring("stranger", 3, WAITING_BYTES // 4)
        await links.all_handled()
        assert links.links["stranger"].holds == [True, False]
        assert not links.turns._bytes and not links.turns._held

    run(scenario())


def test_a_long_turn_of_a_stranger_is_not_followed_by_a_long_rest() -> None:
    """A process may be stopped for a minute in the middle of a turn."""

    async def scenario() -> None:
        links = Links()
        links.bring("stranger", 1, work_s=0.5)
        await links.all_handled()
        loop = asyncio.get_running_loop()
        assert loop.time() < links.turns._rests_until <= loop.time() + 1.0

    run(scenario())


def test_a_message_whose_handling_fails_costs_no_other_its_turn() -> None:
    """Else the others waited until some link brought another message: for ever if all were held."""

    async def scenario() -> None:
        links, failures = Links(), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, what: failures.append(what["exception"]))

        def fails() -> None:
            raise OSError("the disk is full")

        failing = cast(Link, cast(Any, FakeLink("m2")))
        links.turns.put(failing, fails)
        links.bring("member", 3)
        links.bring("stranger", 3)
        assert len(await asyncio.wait_for(links.all_handled(), 1.0)) == 6
        assert [str(failure) for failure in failures] == ["the disk is full"]

    run(scenario())


def test_who_becomes_a_member_while_its_messages_wait_comes_with_the_members() -> None:
    """A joiner learns from its first log lines that who sends them is a member."""

    async def scenario() -> None:
        links, members = Links(), set[str]()
        links.turns = Turns(lambda peer: peer in members)
        links.bring("leader", 2, work_s=0.1)
        while not links.handled:
            await asyncio.sleep(0)
        members.add("leader")
        links.bring("leader", 100)
        await links.all_handled()
        numbers = [number for _, number in links.handled]
        assert numbers == sorted(numbers), "its messages keep their order"
        loop = asyncio.get_running_loop()
        assert loop.time() < links.turns._rests_until, "it waited for strangers' rest"

    run(scenario())


class Ending(FakeLink):
    """Link of a peer that ends when the test says so."""

    incarnation, credential, max_payload_bytes = 1, None, 1 << 20

    def __init__(self, peer_id: str, via: str = "") -> None:
        super().__init__(peer_id)
        self.way, self.closed_reason, self.broke_framing = Way(via=via), cast("str | None", None), False

    def start(
        self, on_message: Callable[[bytes, Blob | None], None], on_closed: Callable[[str], None]
    ) -> None:
        self.brings, self._on_closed = on_message, on_closed

    def close(self, reason: str) -> None:
        self.end(reason)

    async def end_late(self, reason: str, broke_framing: bool = False) -> None:
        """End with so many messages waiting that the end waits for its turn, too."""
        for _ in range(WAITING_MESSAGES):
            self.brings(encode(Ping(1, 0)), None)
        self.end(reason, broke_framing)
        await asyncio.sleep(0)

    def end(self, reason: str, broke_framing: bool = False) -> None:
        self.closed_reason, self.broke_framing = reason, broke_framing
        asyncio.get_running_loop().call_soon(self._on_closed, reason)


class NoEngine:
    engine = None


def accepting(seated: bool = False) -> tuple[Callable[..., Ending], list[Event]]:
    """A peer's links: a function that takes over a new one, and what the protocol is told."""
    told = list[Event]()
    transport, credential = cast(TcpTransport, cast(Any, NoEngine())), cast(Credential, None)
    links = Connections(transport, told.append, credential, seated=lambda peer: seated)

    def accept(peer: str, via: str = "") -> Ending:
        link = Ending(peer, via)
        links.accept(cast(Link, cast(Any, link)))
        return link

    return accept, told


def kinds(told: list[Event]) -> list[type[Event]]:
    """Kinds of the events that tell of links."""
    return [type(event) for event in told if not isinstance(event, Received)]


def test_a_broken_link_whose_end_waits_is_told_before_the_next_one() -> None:
    """Else its peer would not be banned for it: "replaced" says nothing."""

    async def scenario() -> None:
        accept, told = accepting()
        await accept("peer").end_late("broken frame", broke_framing=True)
        accept("peer")
        assert kinds(told) == [LinkUp, Garbled, LinkUp]

    run(scenario())


@pytest.mark.parametrize("seated", [False, True])
def test_payloads_are_handled_in_turn(seated: bool) -> None:
    """Strangers that sent gradients of a byte, within their budgets, stopped a run for as long as they
    came."""

    async def scenario() -> None:
        accept, told = accepting(seated)
        link = accept("peer")
        gradient = encode(Backward(Fence(1, 1, 300, "0" * 64, 1), 0))
        for _ in range(WAITING_MESSAGES):
            link.brings(gradient, Blob("uint8", (1,), bytearray(1)))
        assert [type(event) for event in told] == [LinkUp] and link.holds == [True]
        large = accept("another")
        large.brings(gradient, Blob("uint8", (WAITING_BYTES,), bytearray(WAITING_BYTES)))
        assert large.holds == ([] if seated else [True])
        large.brings(gradient, Blob("uint8", (1,), bytearray(1)))
        assert large.holds == [True]
        while len(told) < WAITING_MESSAGES + 4:
            await asyncio.sleep(0)
        assert link.holds == large.holds == [True, False]
        assert Counter(map(type, told)) == {LinkUp: 2, Received: WAITING_MESSAGES + 2}

    run(scenario())


def test_a_dead_direct_link_does_not_keep_a_carried_one_out() -> None:
    async def scenario() -> None:
        accept, told = accepting()
        await accept("peer").end_late("the connection broke")
        carried = accept("peer", "carrier")
        assert carried.closed_reason is None
        assert kinds(told) == [LinkUp, LinkDown, LinkUp]

    run(scenario())
