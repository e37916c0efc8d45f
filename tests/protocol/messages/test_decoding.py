"""Whatever arrives, decoding gives a message or a MessageError (I7)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.protocol import messages as msg
from anabranch.protocol.messages import MAX_MESSAGE_BYTES, Fence, MessageError, decode, encode

FENCE = Fence(1, 2, 3, "base", 1)
EXAMPLES = [
    msg.Slots(FENCE, 4, 2, 1, 0, 2),
    msg.Forward(FENCE, 5, ("d0", "r1"), True, False, True, 3),
    msg.Forward(FENCE, 5, ("d0", "r1"), True, True, True, 4, ("r2", "r3")),
    msg.Backward(FENCE, 5),
    msg.Lack(FENCE, 5, True, 3),
    msg.CallBack(FENCE, {5: 3, 7: 4}, 1),
    msg.Claim(FENCE, 0, (1, 2, 3), {0: 1.5}, {9: 2.5}),
    msg.ContributionDigests(FENCE, 1, {0: "digest", 2: "other"}, {0: 1.5, 2: 2.5}),
    msg.Attempt(FENCE, 1, msg.AttemptId(1, 2), 3, ("a", "b"), (0, 1, 0)),
    msg.Attempt(FENCE, 1, msg.AttemptId(1, 2), 3, ("a", "b"), (0, 1, 0), ("c",), (2, 0, 2)),
    msg.Prepared(FENCE, 1, msg.AttemptId(1, 2), "digest", {"w": 1e-300}),
    msg.Announce((b"line", b"other")),
    msg.Missing(FENCE, {1: (2, 3)}),
    msg.FetchState(1, -1),
    msg.Report((b"{}",)),
]
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.integers() | st.text(), inner, max_size=4),
    max_leaves=12,
)


def understood(data: bytes) -> bool:
    try:
        message = decode(data)
    except MessageError:
        return False
    assert isinstance(message, msg.Message)
    return True


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_what_is_encoded_is_decoded(message: msg.Message) -> None:
    assert decode(encode(message)) == message


@given(st.binary(max_size=400))
def test_noise(data: bytes) -> None:
    understood(data)


@given(st.integers(0, 60), st.lists(plain, max_size=8))
def test_messages_with_wrong_fields(tag: int, fields: list[object]) -> None:
    try:
        data = msgspec.msgpack.encode([tag, *fields])
    except (OverflowError, UnicodeEncodeError):
        return  # not expressible in msgpack
    understood(data)


@given(st.sampled_from(EXAMPLES), st.data())
def test_bits_that_flip_and_tails_that_are_missing(message: msg.Message, data: st.DataObject) -> None:
    encoded = bytearray(encode(message))
    position = data.draw(st.integers(0, len(encoded) - 1))
    encoded[position] ^= data.draw(st.integers(1, 255))
    understood(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


def test_deep_nesting() -> None:
    assert not understood(b"\x91" * 100_000)


def test_a_length_that_lies_allocates_nothing() -> None:
    assert not understood(b"\xdd\xff\xff\xff\xff" + b"\x00" * 10)
    assert not understood(b"\xc6\xff\xff\xff\xff" + b"\x00" * 10)


def test_oversized_messages_are_refused_on_both_sides() -> None:
    huge = msg.Announce((b"x" * MAX_MESSAGE_BYTES,))
    with pytest.raises(MessageError, match="is over"):
        encode(huge)
    with pytest.raises(MessageError, match="is over"):
        decode(msgspec.msgpack.encode(huge))


@pytest.mark.parametrize(
    "message",
    [
        msg.Backward(FENCE, -1),
        msg.Backward(Fence(1, 2, -3, "b", 1), 0),
        msg.Backward(Fence(1, 2, 3, "b", -2), 0),
        msg.Backward(Fence(1, 2, 3, "b", 4097), 0),
        msg.Backward(Fence(1, 2, 3, "b" * 200, 1), 0),
        msg.Claim(FENCE, 9999, ()),
        msg.Lack(FENCE, 1 << 40, False, 1),
        msg.Leave("x" * 257),  # it goes into others' texts, which have bounds too
    ],
)
def test_numbers_and_names_out_of_range_are_refused(message: msg.Message) -> None:
    with pytest.raises(MessageError):
        decode(msgspec.msgpack.encode(message))
