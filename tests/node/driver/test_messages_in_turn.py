"""Messages without payload are handled in turn: a link that sends many holds up its own."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from anabranch.net.link import Link
from anabranch.node.driver.connections import PROMPT, WAITING_MESSAGES, Turns


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
        self.turns = Turns(lambda peer: peer.startswith("m"))
        self.links = dict[str, FakeLink]()
        self.handled = list[tuple[str, int]]()
        self._count = 0

    def bring(self, who: str, count: int = 1) -> None:
        link = self.links.setdefault(who, FakeLink(who))
        for _ in range(count):
            self._count += 1
            self.turns.put(cast(Link, cast(Any, link)), lambda each=self._count: self._handle(who, each))  # type: ignore[misc]

    def _handle(self, who: str, number: int) -> None:
        self.handled.append((who, number))

    async def all_handled(self) -> list[str]:
        while len(self.handled) < self._count:
            await asyncio.sleep(0)
        return [who for who, _ in self.handled]


def test_links_take_turns() -> None:
    async def scenario() -> None:
        links = Links()
        links.bring("member", 1000)
        links.bring("m2", 3)
        assert (await links.all_handled())[:6] == ["member", "m2"] * 3
        numbers = [number for who, number in links.handled if who == "member"]
        assert numbers == sorted(numbers), "the messages of a link keep their order"

    asyncio.run(scenario())


def test_strangers_come_after_members() -> None:
    async def scenario() -> None:
        links = Links()
        for number in range(8):
            links.bring(f"stranger {number}", 100)
        links.bring("member", 5)
        order = await links.all_handled()
        assert order[:5] == ["member"] * 5
        assert len(set(order[5:13])) == 8, "strangers take turns, too"

    asyncio.run(scenario())


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

    asyncio.run(scenario())


def test_a_link_with_many_waiting_is_read_no_further() -> None:
    async def scenario() -> None:
        links = Links()
        links.bring("member", WAITING_MESSAGES - 1)
        assert links.links["member"].holds == []
        links.bring("member")
        assert links.links["member"].holds == [True]
        await links.all_handled()
        assert links.links["member"].holds == [True, False]

    asyncio.run(scenario())
