"""Members of a run as the log lines on a voter's disk tell of them.

A voter that began anew is no member, and follows no log; this is all that it knows of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from anabranch.protocol.log.records import Genesis, Member, Members, Revoke, decode_entry


class LogMembers:
    """Members that the lines of a log admitted, which may be later ones than its first. admitted: newest
    admission of each, of removed ones too, in the order of joining. serving: those that serve, or are to, and
    are not revoked. founder: peer with the run's directory ("": the lines do not tell)."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.admitted: dict[str, Member] = {}
        self.serving: set[str] = set()
        self.founder = ""
        self.fold(lines)

    def fold(self, lines: Iterable[bytes]) -> None:
        """Follow further lines (encoded entries)."""
        for line in lines:
            record = decode_entry(line).record
            if isinstance(record, Genesis):
                self.founder = record.leader
            elif isinstance(record, Revoke):  # their removal may not be logged yet
                self.serving -= {m.id for m in self.admitted.values() if record.id in (m.id, m.ticket)}
            elif isinstance(record, Members):
                self.serving -= {*record.removed, *(member.id for member in record.joined)}
                for member in record.joined:
                    self.admitted.pop(member.id, None)  # the latest stand last
                    self.admitted[member.id] = member
                self.serving |= record.active_from.keys() & self.admitted.keys()

    def addresses(self, peers: Collection[str]) -> dict[str, str]:
        """Newest address of each of these peers that has one and was admitted, by name."""
        known = {peer: self.admitted[peer].address for peer in sorted(peers) if peer in self.admitted}
        return {peer: address for peer, address in known.items() if address}
