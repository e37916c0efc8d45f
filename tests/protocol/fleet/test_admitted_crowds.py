"""Crowds of joiners with the longest texts about themselves, on one ticket (I5, I7)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from anabranch import PROTOCOL_VERSION
from anabranch.protocol.fleet.admission import (
    ADMISSIONS,
    JOINERS_BYTES,
    MEMBERS_BYTES,
    REMOVALS_BYTES,
    Admission,
)
from anabranch.protocol.interface.events import Send
from anabranch.protocol.log.records import Entry, Member, Members, encode_entry
from anabranch.protocol.messages import JoinRequest, Refused
from anabranch.protocol.messages.common import MAX_MESSAGE_BYTES, REMARK_MAX
from support.admission import leading

#: Address that is as long as a joiner may state it.
ADDRESS = ",".join(f"{'a' * 60}.{'b' * 45}{number}.example:9" for number in range(8))


def fat(number: int) -> Member:
    """Joiner with texts as long as they may be, which are twice as long in the log."""
    text = '"' * 128
    return Member(f"{number:064}", 1, 1, "class", 4, text, text, ADDRESS, 0.01, '"' * 48, 0.01)


def thin(number: int) -> Member:
    return Member(f"{number:064}", 1, 1, "class", 4)


def ask(admission: Admission, member: Member) -> str | None:
    return admission.on_join(member.id, JoinRequest(member, 1, PROTOCOL_VERSION, "", ""))


def records(admission: Admission) -> Iterator[Members]:
    """Records that the leader logs now, each applied at once, until it has none or has to wait."""
    while (record := admission.change()) is not None:
        admission.ctx.run.membership.apply(record)
        yield record


def line_bytes(record: Members) -> int:
    return len(encode_entry(Entry(1 << 40, 1 << 40, "f" * 64, record)))


def test_a_record_of_many_joiners_is_short_and_none_of_them_is_forgotten() -> None:
    """A thousand keys of one ticket asked at once: their record was 1.8 MB long, no message had room for it,
    and the leader's process ended."""
    admission = leading()
    crowd = [fat(number) for number in range(300)]
    assert [ask(admission, member) for member in crowd] == [None] * len(crowd)
    admitted: list[str] = []
    while len(admitted) < len(crowd):
        for record in records(admission):
            assert line_bytes(record) < JOINERS_BYTES + 1024
            admitted += [member.id for member in record.joined]
        admission.ctx.clock.now += 1.0 / ADMISSIONS.per_s
    assert admitted == [member.id for member in crowd]


def test_all_members_fit_into_the_welcome_of_a_joiner() -> None:
    """It lists them all; a member that is there may come again."""
    admission, refused = leading(), ""
    for number in range(4000):
        admission._connections.link_up(fat(number).id)
        refused = ask(admission, fat(number)) or ""
        if refused:
            break
    assert "room for" in refused
    told = [effect.message for effect in admission.ctx.outbox.take_effects() if isinstance(effect, Send)]
    assert isinstance(told[-1], Refused) and told[-1].again
    while admission.waiting:
        admission.ctx.clock.now += 1.0 / ADMISSIONS.per_s
        list(records(admission))
    members = tuple(admission.ctx.run.membership.members.values())
    assert len(members) > 400
    assert len(msgspec.msgpack.encode(members)) < MEMBERS_BYTES < MAX_MESSAGE_BYTES
    assert ask(admission, msgspec.structs.replace(fat(0), incarnation=2)) is None
    admission.remove(fat(1).id, "left")
    list(records(admission))
    assert ask(admission, fat(5000)) is None, "there is room again"


@pytest.mark.parametrize("reason", ["\x00" * REMARK_MAX, "left"])
def test_a_record_of_many_removals_is_short_and_none_of_them_is_forgotten(reason: str) -> None:
    """Each member may give a reason, whose control characters are six times as long in the log."""
    admission = leading()
    crowd = [thin(number) for number in range(400)]
    for member in crowd:
        assert ask(admission, member) is None
    while len(admission.ctx.run.membership.members) < len(crowd):
        admission.ctx.clock.now += 1.0 / ADMISSIONS.per_s
        list(records(admission))
    for member in crowd:
        admission.leave(member.id, reason)
    admission.let_go(quiet=True)
    removed: list[str] = []
    for record in records(admission):
        assert line_bytes(record) < REMOVALS_BYTES + 8 * REMARK_MAX
        assert not set(record.removed) & set(removed)
        removed += record.removed
        assert set(removed).isdisjoint(admission.going()), "they are members no more"
    assert sorted(removed) == [member.id for member in crowd]
