"""The door of an open run: the puzzle, its price, and what the handshake makes of both."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from anabranch.net import errors, handshake
from anabranch.net.door import prices as price_list
from anabranch.net.door import puzzle
from anabranch.net.door.prices import BASE_BITS, BLOCKS_KEPT, MOST_BITS, WINDOW_S, DoorPrices
from anabranch.net.errors import Refused
from anabranch.net.handshake import BULK, CARRY, CONTROL, ClientHandshake, Credential, ServerHandshake
from anabranch.net.identity import Identity
from anabranch.net.ticket import Grant, Ticket, issue_ticket
from support.network.net_world import NOW_S, OWNER, RUN, World, gate, identity, make_tcp, ticket

SERVER, CLIENT, OTHER = identity("server"), identity("client"), identity("other")
PRICE = 8


def open_ticket(hours: int = 1) -> Ticket:
    return issue_ticket(OWNER, run=RUN, role="open", expires_at_s=NOW_S + hours * 3600, peers=[])


def server(price: int = PRICE, *, binding: bytes = b"here", fill: int = 7) -> ServerHandshake:
    nonce = bytes((price,)) + bytes((fill,)) * 31
    return ServerHandshake(SERVER, 4, gate(), binding=binding, nonce=nonce)


def client(credential: Credential, lane: str = CONTROL, who: Identity = CLIENT) -> ClientHandshake:
    return ClientHandshake(
        who, 3, run=RUN, server=SERVER.peer_id, server_certificate_key=SERVER.peer_id, lane=lane,
        link_id=b"i" * 16, credential=credential, binding=b"here",
    )  # fmt: skip


def refusal(there: ServerHandshake, hello: bytes) -> str:
    with pytest.raises(Refused) as caught:
        there.receive(hello, now_s=NOW_S)
    return caught.value.kind


def forged(hello: bytes, who: Identity = CLIENT, **changes: object) -> bytes:
    """Hello with other fields, signed again by `who`: all that a caller can do by itself."""
    body = msgspec.structs.replace(handshake._decode(handshake._HelloBody, hello[10:]), **changes)
    body = msgspec.structs.replace(body, peer_id=who.peer_id)
    statement = handshake._statement(body, server=SERVER.peer_id, server_incarnation=4, binding=b"here")
    signature = who.sign(handshake._IDENTITY_PURPOSE, statement)
    return handshake._encode(msgspec.structs.replace(body, signature=signature))


def test_an_answer_has_the_work_that_was_asked() -> None:
    for bits in (0, 1, 5, 12):
        answer = puzzle.solve(b"statement", bits)
        assert puzzle.work_in(b"statement", answer) >= bits
    assert puzzle.work_in(b"statement", b"") == puzzle.work_in(b"statement", bytes(9)) == 0


@pytest.mark.parametrize("lane", [CONTROL, CARRY])
def test_work_lets_a_walk_in_in(lane: str) -> None:
    here, there = client(open_ticket(), lane), server()
    assert here.works
    hello = there.receive(here.receive(there.greeting()), now_s=NOW_S)
    assert hello is not None and hello.work >= PRICE
    assert isinstance(hello.credential, Grant) and hello.credential.role == "open"
    assert not here.works


def test_a_bulk_connection_was_paid_for_by_its_control_connection() -> None:
    here, there = client(open_ticket(), BULK), server(price=puzzle.MOST_SOLVED)
    assert not here.works
    assert there.receive(here.receive(there.greeting()), now_s=NOW_S) is not None


def test_a_wrong_answer_is_refused() -> None:
    hello = client(open_ticket()).receive(server(16).greeting())
    answer = handshake._decode(handshake._HelloBody, hello[10:]).ticket_signature
    for wrong in (b"", answer + b"\0", bytes(8), bytes(64)):
        assert refusal(server(16), forged(hello, ticket_signature=wrong)) == errors.WORK


def test_too_cheap_an_answer_is_refused() -> None:
    """The server's word on the price counts, not the client's: this client believes that the price is 1."""
    there = server(20)
    hello = client(open_ticket()).receive(server(1).greeting())
    assert refusal(there, forged(hello, nonce=there._nonce)) == errors.WORK


def test_a_stale_answer_is_refused() -> None:
    """It was made for an earlier nonce, which this server asks no longer."""
    hello = client(open_ticket()).receive(server(16, fill=1).greeting())
    assert refusal(server(16, fill=2), hello) == errors.REPLAY
    assert refusal(server(16, fill=2), forged(hello, nonce=server(16, fill=2)._nonce)) == errors.WORK


def test_a_replayed_answer_is_refused() -> None:
    """Neither twice on one connection, nor on another one, nor by another key."""
    there = server(16)
    hello = client(open_ticket()).receive(there.greeting())
    assert there.receive(hello, now_s=NOW_S) is not None
    assert refusal(there, hello) == errors.REPLAY
    assert refusal(server(16, binding=b"elsewhere"), hello) == errors.WORK
    assert refusal(server(16), forged(hello, who=OTHER)) == errors.WORK


def test_work_is_checked_before_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger without work costs one hash: the signatures are not looked at."""
    hello = client(open_ticket()).receive(server(1).greeting())
    there = server(20)
    hello = forged(hello, nonce=there._nonce)
    monkeypatch.setattr(handshake, "verify", lambda *_: pytest.fail("a signature was checked"))
    assert refusal(there, hello) == errors.WORK


def test_an_open_tickets_key_opens_nothing() -> None:
    """The key is public with the ticket: whoever signs with it has done no work."""
    shown = open_ticket()
    there = server(20)
    hello = client(ticket()).receive(there.greeting())
    body = handshake._decode(handshake._HelloBody, hello[10:])
    body = msgspec.structs.replace(body, credential=shown.sealed_grant, credential_kind="ticket")
    statement = handshake._statement(body, server=SERVER.peer_id, server_incarnation=4, binding=b"here")
    signed = shown.key.sign(handshake._TICKET_PURPOSE, statement)
    assert refusal(there, forged(handshake._encode(body), ticket_signature=signed)) == errors.TICKET


def test_work_opens_with_an_open_ticket_only() -> None:
    """A secret ticket's grant can be seen by whoever is dialled; work does not replace its key."""
    there = server(1)
    hello = client(open_ticket()).receive(there.greeting())
    for number in range(64):  # every second answer has a bit of work
        stolen = forged(hello, credential=ticket().sealed_grant, ticket_signature=number.to_bytes(8, "big"))
        kind = refusal(server(1), stolen)
        assert kind in (errors.WORK, errors.TICKET)
        if kind == errors.TICKET:
            return
    pytest.fail("no answer had a bit of work")


def test_an_expired_open_ticket_is_refused() -> None:
    there = server()
    assert refusal(there, client(open_ticket(hours=-1)).receive(there.greeting())) == errors.EXPIRED


def test_a_server_that_asks_too_much_is_left() -> None:
    with pytest.raises(Refused) as caught:
        client(open_ticket()).receive(server(puzzle.MOST_SOLVED + 1).greeting())
    assert caught.value.kind == errors.WORK


# --- the price -------------------------------------------------------------------------------------------


def test_each_walk_in_doubles_the_work_of_the_next_one_of_its_block() -> None:
    prices = DoorPrices()
    for number in range(MOST_BITS - BASE_BITS + 1):
        bits = prices.bits("a", 10.0)
        assert bits == BASE_BITS + number
        assert prices.pay("a", f"key {number}", bits, 10.0) is None
    assert prices.bits("b", 10.0) == BASE_BITS
    assert prices.pay("a", "one more", 200, 10.0) is not None
    assert prices.bits("a", 10.0 + WINDOW_S) == BASE_BITS
    assert prices.pay("a", "one more", BASE_BITS, 10.0 + WINDOW_S) is None


def test_callers_that_asked_at_once_do_not_all_pay_the_first_price() -> None:
    prices = DoorPrices()
    asked = [prices.bits("a", 0.0) for _ in range(5)]
    paid = [prices.pay("a", f"key {n}", bits, 0.0) is None for n, bits in enumerate(asked)]
    assert paid == [True, False, False, False, False]


def test_a_key_that_came_before_pays_no_more_for_itself() -> None:
    prices = DoorPrices()
    for _ in range(20):
        assert prices.pay("a", "key", BASE_BITS, 0.0) is None
    assert prices.bits("a", 0.0) == BASE_BITS + 1


def test_blocks_beyond_a_number_are_forgotten() -> None:
    prices = DoorPrices()
    for number in range(BLOCKS_KEPT + 1):
        assert prices.pay(f"block {number}", "key", BASE_BITS, 0.0) is None
    assert prices.bits("block 0", 0.0) == BASE_BITS and prices.bits("block 1", 0.0) == BASE_BITS + 1


def test_the_door_over_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Walk-ins of one address get in until their price is too high; a guest with a ticket comes all the
    same, and so does a walk-in that has been here."""
    monkeypatch.setattr(price_list, "BASE_BITS", 3)
    monkeypatch.setattr(price_list, "MOST_BITS", 5)

    async def story() -> None:
        world = World(make_tcp)
        house = await world.peer("house")
        walk_ins = [await world.peer(f"walk-in {n}") for n in range(4)]
        for one in walk_ins[:3]:
            await one.dial(house, open_ticket())
            came = await house.incoming()
            assert came.link.credential is not None and came.link.credential.role == "open"
        with pytest.raises(Refused) as caught:
            await walk_ins[3].dial(house, open_ticket())
        assert caught.value.kind == errors.BUSY and "3 peers without an invitation" in str(caught.value)
        await walk_ins[0].dial(house, open_ticket())
        await walk_ins[3].dial(house, ticket())
        assert house.transport.refusals[errors.BUSY] == 1
        await world.close()

    asyncio.run(story())
