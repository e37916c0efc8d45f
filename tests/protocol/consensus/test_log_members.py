"""Members of a run by the lines of its log: who serves, and may get a vote."""

from __future__ import annotations

from anabranch.protocol.consensus.log_members import LogMembers
from anabranch.protocol.log.records import (
    NO_ENTRY,
    AnyRecord,
    Entry,
    Member,
    Members,
    Revoke,
    encode_entry,
)


def follow(*records: AnyRecord) -> LogMembers:
    lines = [Entry(index=n, term=1, previous=NO_ENTRY, record=record) for n, record in enumerate(records)]
    return LogMembers(encode_entry(line) for line in lines)


def member(peer: str, incarnation: int = 1, ticket: str = "") -> Member:
    return Member(peer, 1, incarnation, "any", 1, address=f"{peer}:{incarnation}", ticket=ticket)


def test_a_process_that_joined_again_serves_once_a_line_says_so() -> None:
    first = Members(1, joined=(member("a"), member("b")), active_from={"a": 1, "b": 1})
    again = Members(2, removed={"a": "lost"}, joined=(member("a", 2),))
    members = follow(first, again)
    assert members.serving == {"b"} and list(members.admitted) == ["b", "a"]
    assert members.addresses(["a", "c"]) == {"a": "a:2"}
    assert follow(first, again, Members(3, active_from={"a": 4})).serving == {"a", "b"}


def test_who_is_revoked_does_not_serve_though_its_removal_is_not_logged_yet() -> None:
    both = (member("a"), member("b", ticket="key"), member("c", ticket="other"))
    first = Members(1, joined=both, active_from={"a": 1, "b": 1, "c": 1})
    assert follow(first, Revoke("a", "convicted"), Revoke("key", "lent to others")).serving == {"c"}


def test_addresses_have_an_order_that_does_not_depend_on_the_process() -> None:
    """A voter dials in this order, and a set has another one in each process."""
    names = [f"peer {number:02}" for number in range(12)]
    members = follow(Members(1, joined=tuple(map(member, reversed(names)))))
    assert list(members.addresses(set(names))) == names
