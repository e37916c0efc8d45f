"""Messages that arrive before their iteration is open (R1)."""

from __future__ import annotations

from anabranch.protocol.context.early_buffer import (
    EARLY_BYTES,
    EARLY_LARGEST,
    EARLY_MAX,
    EARLY_PARTS_MAX,
    EARLY_PAYLOADS_MAX,
    STRANGERS_BYTES,
    STRANGERS_LARGEST,
    EarlyBuffer,
)
from anabranch.protocol.interface.settings import NEIGHBOURS
from anabranch.protocol.messages import (
    AttemptId,
    Fence,
    Forward,
    ReducedPart,
    ReducePart,
    Slots,
    encode,
)
from anabranch.protocol.reduce.hierarchy import FLAT, cells_of
from anabranch.protocol.reduce.partial_sums import PARTS

FENCE = Fence(1, 1, 3, "base", 1)


def part(
    kind: type[ReducePart | ReducedPart], number: int, at: int, stage: int = 1
) -> ReducePart | ReducedPart:
    return kind(FENCE, stage, AttemptId(1, number), at)


def forward(index: int, path: tuple[str, ...] = ()) -> Forward:
    return Forward(FENCE, index, path, True, False, False, index, ())


def kept(early: EarlyBuffer) -> list[object]:
    return [message for _, message, *_ in early.take()]


def test_parts_of_an_older_attempt_make_room_for_those_of_a_newer_one() -> None:
    """A replica that is behind gets the same over slow links again and again; what counts came last."""
    early = EarlyBuffer()
    newest = EARLY_PARTS_MAX + 2
    for number in range(1, newest + 1):
        for message in (part(ReducePart, number, 0), part(ReducedPart, number, 1)):
            assert early.keep("a", message, b"x", 1) is None
    assert kept(early) == [part(ReducePart, newest, 0), part(ReducedPart, newest, 1)]


def test_what_is_late_of_an_older_attempt_is_left_out() -> None:
    early = EarlyBuffer()
    assert early.keep("a", part(ReducedPart, 2, 0), b"x", 1) is None
    assert early.keep("a", part(ReducedPart, 1, 0), b"x", 1) is None
    assert kept(early) == [part(ReducedPart, 2, 0)]


def test_parts_of_others_and_of_other_stages_stay() -> None:
    early = EarlyBuffer()
    for peer, stage in (("a", 1), ("b", 1), ("a", 2)):
        assert early.keep(peer, part(ReducePart, 1, 0, stage), b"x", 1) is None
    assert early.keep("a", part(ReducePart, 2, 0), b"x", 1) is None
    assert kept(early) == [part(ReducePart, 1, 0), part(ReducePart, 1, 0, 2), part(ReducePart, 2, 0)]


def test_parts_without_their_payloads_make_room_for_none() -> None:
    early = EarlyBuffer()
    for number in range(1, 9):
        assert early.keep("a", part(ReducePart, number, 0), None, 1) is None
    assert early.keep("a", part(ReducePart, 9, 0), b"x", 1) is None
    assert len(early) == 9


def test_the_parts_of_a_whole_attempt_are_kept_and_no_more() -> None:
    """A replica may open the iteration after one peer summed all its parts: nobody sends them again."""
    early = EarlyBuffer()
    for at in range(PARTS):
        for kind in (ReducePart, ReducedPart):
            for _ in range(2):  # a part that comes again takes no room
                assert early.keep("a", part(kind, 1, at), b"x", 1) is None
    assert len(early) == 2 * PARTS == EARLY_PARTS_MAX
    assert early.keep("a", part(ReducedPart, 1, 0, 2), b"x", 1)
    assert early.keep("a", part(ReducePart, 1, 0, 2), b"x", 1)
    assert early.keep("b", part(ReducePart, 1, 0, 2), b"x", 1) is None


def test_a_sender_that_is_no_member_fills_no_memory_with_parts() -> None:
    """Anybody with a ticket may be linked: it has sent no work yet, and may make up what it likes."""
    early = EarlyBuffer()
    for at in range(EARLY_PAYLOADS_MAX - 1):
        assert early.keep("a", part(ReducePart, 1, at), b"x", 1, member=False) is None
    assert early.keep("a", forward(0), b"x", 1, member=False) is None
    early.forget(lambda message: False)
    assert early.keep("a", part(ReducePart, 1, 9), b"x", 1, member=False)
    assert early.keep("a", forward(0), b"x", 1, member=False)
    assert len(early) == EARLY_PAYLOADS_MAX
    assert early.keep("a", part(ReducePart, 1, 9), b"x", 1) is None, "it has been admitted"


def test_parts_of_numbers_that_only_an_even_reduce_has_are_few() -> None:
    """Only in an even reduce of more than PARTS members do numbers go on beyond; there one peer sends another
    one part of its sum and one reduced part."""
    early = EarlyBuffer()
    for at in range(PARTS, PARTS + EARLY_PAYLOADS_MAX):
        assert early.keep("a", part(ReducePart, 1, at), b"x", 1) is None
    assert early.keep("a", part(ReducePart, 1, 10**9), b"x", 1)
    assert early.keep("a", part(ReducePart, 1, 0), b"x", 1) is None
    assert early.keep("a", part(ReducePart, 2, PARTS), b"x", 1) is None
    assert kept(early) == [part(ReducePart, 2, PARTS)]


def test_an_even_reduce_of_a_large_stage_has_more_parts_than_others() -> None:
    """So a part's number does not tell that it was made up."""
    assert cells_of(2 * PARTS, FLAT * 8).parts > PARTS, "eight neighbours"
    assert cells_of(320, FLAT * NEIGHBOURS).parts > PARTS


def test_tensors_beside_parts_are_few() -> None:
    early = EarlyBuffer()
    early.keep("a", part(ReducePart, 1, 0), b"x", 1)
    for index in range(EARLY_PAYLOADS_MAX):
        assert early.keep("a", Forward(FENCE, index, (), True, False, False, 0, ()), b"x", 1) is None
    assert early.keep("a", Forward(FENCE, 9, (), True, False, False, 0, ()), b"x", 1)
    assert early.keep("a", part(ReducePart, 2, 0), b"x", 1) is None
    assert early.keep("a", Forward(FENCE, 9, (), True, False, False, 0, ()), b"x", 1)


def test_what_a_peer_granted_goes_with_its_link() -> None:
    """With the next link it gives another account: the larger one of the former would be believed."""
    early = EarlyBuffer()
    slots, other = Slots(FENCE, 8, 0, 0, 0, 8), part(ReducePart, 1, 0)
    for peer in "ab":
        assert early.keep(peer, slots, None, 1) is None
        assert early.keep(peer, other, b"x", 1) is None
    early.link_down("a")
    early.link_down("nobody")
    assert early.take() == [("a", other, b"x", 0.0), ("b", slots, None, 0.0), ("b", other, b"x", 0.0)]


def test_the_payloads_of_a_sender_fit_into_a_few_of_the_largest() -> None:
    """36 payloads, each as large as its link accepts, were kept of each member."""
    early = EarlyBuffer()
    said = [early.keep("a", part(ReducePart, 1, at), b"x", 1, share=1.0) for at in range(PARTS)]
    assert said[:EARLY_LARGEST] == [None] * EARLY_LARGEST and all(said[EARLY_LARGEST:])
    early.forget(lambda message: False)  # nothing goes, and all of it still counts
    assert early.keep("a", part(ReducedPart, 1, 0), b"x", 1, share=0.1)
    assert early.keep("a", Slots(FENCE, 8, 0, 0, 0, 8), None, 1) is None
    assert early.keep("b", part(ReducedPart, 1, 0), b"x", 1, share=1.0) is None
    early.forget(lambda message: isinstance(message, ReducePart) and message.part > 2)
    assert early.keep("a", part(ReducedPart, 1, 0), b"x", 1, share=1.0) is None


def test_the_largest_payloads_of_an_honest_sender_have_room() -> None:
    """A few microbatches, and the parts of a whole reduce: sums of a stage, and its reduced gradient."""
    early = EarlyBuffer()
    for index in range(EARLY_PAYLOADS_MAX):
        assert early.keep("a", forward(index), b"x", 1, share=1.0) is None
    for at in range(PARTS):
        for kind in (ReducePart, ReducedPart):
            assert early.keep("a", part(kind, 1, at), b"x", 1, share=1.0 / PARTS) is None


def test_messages_of_a_sender_are_short_together() -> None:
    """256 messages of a megabyte each, which take thirty times that once they are decoded, were kept of each
    sender: two keys of one ticket had the leader take 3 GB in a quarter of a minute."""
    early, long = EarlyBuffer(), ("12",) * 340_000
    assert early.keep("a", forward(0, long), None, 1)
    assert len(early) == 0
    said = [early.keep("a", forward(index, long[:1000]), None, 1) for index in range(EARLY_MAX)]
    took = said.count(None)
    assert 0 < took < EARLY_MAX and not any(said[:took])
    assert sum(len(encode(message)) for _, message, *_ in early._kept) <= EARLY_BYTES
    early.forget(lambda message: isinstance(message, Forward) and message.index < took // 2)
    assert early.keep("a", forward(1, long[:1000]), None, 1) is None, "there is room again"


def test_strangers_share_a_budget_and_the_greediest_makes_room() -> None:
    """Keys are free: each of a hundred had as much kept as any member."""
    early = EarlyBuffer()
    assert early.keep("member", part(ReducePart, 1, 0), b"x", 1, share=1.0) is None
    assert early.keep("honest", forward(0), b"x", 1, member=False, share=1.0) is None
    for number in range(20):
        for index in range(EARLY_PAYLOADS_MAX):
            assert early.keep(f"key {number}", forward(index), b"x", 1, member=False, share=1.0) is None
    of = [peer for peer, *_ in early._kept]
    assert sum(share for peer, *_, share in early._kept if peer != "member") <= STRANGERS_LARGEST
    assert "honest" in of and "member" in of and "key 19" in of
    for number in range(20):
        for index in range(EARLY_MAX - EARLY_PAYLOADS_MAX):
            early.keep(f"key {number}", forward(index, ("12",) * 300), None, 1, member=False)
    size_bytes = sum(len(encode(message)) for peer, message, *_ in early._kept if peer != "member")
    assert EARLY_BYTES < size_bytes <= STRANGERS_BYTES
    assert {"honest", "member"} <= {peer for peer, *_ in early._kept}


def test_what_a_stranger_sent_goes_with_its_link() -> None:
    """It comes again with another key."""
    early = EarlyBuffer()
    for peer, member in (("stranger", False), ("member", True)):
        assert early.keep(peer, part(ReducePart, 1, 0), b"x", 1, member=member) is None
        early.forget(lambda message: False)
        early.link_down(peer)
    assert [peer for peer, *_ in early.take()] == ["member"]
