"""The handshake's state machines, without a network."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.net import errors, handshake
from anabranch.net.errors import Refused
from anabranch.net.handshake import (
    CONTROL,
    MAX_BODY_BYTES,
    MAX_REASON_CHARS,
    ClientHandshake,
    Credential,
    Hello,
    ServerHandshake,
)
from anabranch.net.identity import Identity
from support.network.net_world import NOW_S, OWNER, RUN, certificate, gate, identity, ticket

SERVER, CLIENT = identity("server"), identity("client")
BINDING = b"this connection"
NONCE = bytes(range(32))


def server(
    who: Identity = SERVER, *, binding: bytes = BINDING, nonce: bytes | None = NONCE, incarnation: int = 4
) -> ServerHandshake:
    return ServerHandshake(who, incarnation, gate(), binding=binding, nonce=nonce)


def client(
    credential: Credential | None = None, *, run: str = RUN, lane: str = CONTROL, who: Identity = CLIENT
) -> ClientHandshake:
    return ClientHandshake(
        who,
        3,
        run=run,
        server=SERVER.peer_id,
        server_certificate_key=SERVER.peer_id,
        lane=lane,
        link_id=b"i" * 16,
        credential=certificate(who) if credential is None else credential,
        binding=BINDING,
    )


def hello_for(there: ServerHandshake, credential: Credential | None = None) -> bytes:
    return client(credential).receive(there.greeting())


def refusal(there: ServerHandshake, hello: bytes) -> str:
    with pytest.raises(Refused) as caught:
        there.receive(hello, now_s=NOW_S)
    return caught.value.kind


@pytest.mark.parametrize("piece_bytes", [1, 7, 10_000])
@pytest.mark.parametrize("kind", ["ticket", "certificate"])
def test_two_honest_sides_agree(kind: str, piece_bytes: int) -> None:
    here, there = client(ticket() if kind == "ticket" else None), server()
    greeting = there.greeting()
    sent = b"".join(
        here.receive(greeting[at : at + piece_bytes]) for at in range(0, len(greeting), piece_bytes)
    )
    assert here.server_incarnation == 4
    pieces = [sent[at : at + piece_bytes] for at in range(0, len(sent), piece_bytes)]
    results = [there.receive(piece, now_s=NOW_S) for piece in pieces]
    assert results[:-1] == [None] * (len(results) - 1)
    hello = results[-1]
    assert isinstance(hello, Hello)
    assert (hello.peer_id, hello.incarnation, hello.lane) == (CLIENT.peer_id, 3, CONTROL)
    assert here.receive(there.accept() + b"first frame") == b""
    assert here.accepted
    assert here.rest() == b"first frame"


def test_nonces_are_fresh() -> None:
    assert server(nonce=None).greeting() != server(nonce=None).greeting()


def test_a_hello_counts_once() -> None:
    there = server()
    hello = hello_for(there)
    assert there.receive(hello, now_s=NOW_S) is not None
    assert refusal(there, hello) == errors.REPLAY


def test_a_hello_is_worth_nothing_elsewhere() -> None:
    """Not with another nonce, server, incarnation of it, or connection: all are in the signature."""
    hello = hello_for(server())
    assert refusal(server(nonce=bytes(32)), hello) == errors.REPLAY
    assert refusal(server(identity("other")), hello) == errors.SIGNATURE
    assert refusal(server(incarnation=5), hello) == errors.SIGNATURE
    assert refusal(server(binding=b"another connection"), hello) == errors.SIGNATURE
    assert server().receive(hello, now_s=NOW_S) is not None


def test_the_credential_is_signed_too() -> None:
    """Nobody can put another certificate of the same peer in its place."""
    hello = msgspec.msgpack.decode(hello_for(server())[10:], type=handshake._HelloBody)
    swapped = msgspec.structs.replace(hello, credential=certificate(CLIENT, hours=1000))
    assert refusal(server(), handshake._encode(swapped)) == errors.SIGNATURE


def test_the_ticket_alone_is_not_enough() -> None:
    """Someone who saw a grant go by cannot use it: the ticket's key must sign each connection."""
    there = server()
    seen = ticket()
    hello = handshake._decode(handshake._HelloBody, hello_for(there, seen)[10:])
    # The thief signs with a key of its own, with the grant and the ticket signature of another connection.
    thief = identity("thief")
    other = server(nonce=bytes(32))
    unsigned = msgspec.structs.replace(hello, peer_id=thief.peer_id, nonce=bytes(32), signature=b"")
    statement = handshake._statement(unsigned, server=SERVER.peer_id, server_incarnation=4, binding=BINDING)
    forged = msgspec.structs.replace(unsigned, signature=thief.sign(handshake._IDENTITY_PURPOSE, statement))
    assert refusal(other, handshake._encode(forged)) == errors.TICKET


def test_wrong_runs_are_refused_on_both_sides() -> None:
    with pytest.raises(Refused) as caught:
        client(run="tiny-2").receive(server().greeting())
    assert caught.value.kind == errors.RUN
    foreign = ServerHandshake(SERVER, 4, gate(run="tiny-2"), binding=BINDING, nonce=NONCE)
    assert refusal(foreign, hello_for(server())) == errors.RUN


def test_an_unknown_lane_is_refused() -> None:
    there = server()
    assert refusal(there, client(lane="express").receive(there.greeting())) == errors.LANE


def test_nothing_is_sent_to_another_key() -> None:
    for key in (OWNER.peer_id, None):
        with pytest.raises(Refused) as caught:
            ClientHandshake(
                CLIENT,
                1,
                run=RUN,
                server=SERVER.peer_id,
                server_certificate_key=key,
                lane=CONTROL,
                link_id=bytes(16),
                credential=ticket(),
                binding=BINDING,
            )
        assert caught.value.kind == errors.SERVER_KEY


def test_another_version_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    greeting, hello, ours = server().greeting(), hello_for(server()), handshake.WIRE_VERSION
    monkeypatch.setattr(handshake, "WIRE_VERSION", ours + 1)
    with pytest.raises(Refused, match=f"version {ours}, the other {ours + 1}") as caught:
        client().receive(greeting)
    assert caught.value.kind == errors.VERSION
    assert refusal(server(), hello) == errors.VERSION
    assert refusal(server(), hello[:10]) == errors.VERSION, "the prefix alone is enough"


def test_a_refusal_reaches_the_caller_with_its_reason() -> None:
    here, there = client(), server()
    here.receive(there.greeting())
    with pytest.raises(Refused, match="this run is full") as caught:
        here.receive(there.refuse(Refused(errors.NOT_AUTHORIZED, "this run is full")))
    assert caught.value.kind == errors.NOT_AUTHORIZED
    here = client()
    here.receive(there.greeting())
    with pytest.raises(Refused) as caught:
        here.receive(there.refuse(Refused("x" * 100, "y" * 10_000)))
    assert caught.value.reason.endswith("y" * MAX_REASON_CHARS)


@given(st.binary(max_size=MAX_BODY_BYTES * 2))
def test_random_bytes_are_refused_or_waited_for(data: bytes) -> None:
    prefix = b"anbr\0\1\0\0" + len(data).to_bytes(2, "big")
    for sent in (data, prefix + data):
        for feed in (
            lambda sent: server().receive(sent, now_s=NOW_S),
            lambda sent: client().receive(sent),
        ):
            try:
                assert not feed(sent)
            except Refused as error:
                assert error.reason


HELLOS = [hello_for(server(), credential) for credential in (certificate(CLIENT), ticket())]


@given(st.sampled_from(HELLOS), st.data())
@settings(max_examples=300)
def test_a_flipped_byte_never_gets_in(hello: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(hello) - 1))
    damaged = bytearray(hello)
    damaged[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(Refused):
        assert server().receive(bytes(damaged), now_s=NOW_S) is None


@given(st.data())
def test_a_damaged_greeting_never_yields_a_usable_hello(data: st.DataObject) -> None:
    greeting = bytearray(server().greeting())
    at = data.draw(st.integers(0, len(greeting) - 1))
    greeting[at] ^= data.draw(st.integers(1, 255))
    try:
        hello = client().receive(bytes(greeting))
        assert not hello or refusal(server(), hello)
    except Refused:
        pass
