"""Revoked peers and tickets of a run, folded from the `Revoke` records of its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anabranch.protocol.log.records import AnyRecord, Member, Revoke


class Revocations:
    """Ids of revoked peers and keys of revoked tickets, with the reasons. None is ever lifted."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        """Reasons of all revocations, by peer id or ticket key."""

    def __contains__(self, target: str) -> bool:
        return target in self.reasons

    def fold(self, record: AnyRecord) -> None:
        """Add the revocation, if the next record of the log is one; the first reason of a target stays."""
        if isinstance(record, Revoke):
            self.add({record.id: record.reason})

    def add(self, reasons: Mapping[str, str]) -> None:
        """Add revocations (peer id or ticket key -> reason) that are known from elsewhere: a resumed run's
        log, or a `Welcome`. The first reason of a target stays."""
        for target, reason in reasons.items():
            self.reasons.setdefault(target, reason)

    def refusal(self, peer: str, ticket: str) -> str | None:
        """Reason why a peer with a credential of this ticket may not take part; None: it may. ticket: "" if
        the peer has none."""
        if peer in self.reasons:
            return f"the run's owner expelled this peer: {self.reasons[peer]}"
        if ticket and ticket in self.reasons:
            return f"the run's owner revoked this peer's ticket: {self.reasons[ticket]}"
        return None

    def refused(self, members: Iterable[Member]) -> dict[str, str]:
        """Those of the given members that may not take part, as they or their tickets are revoked: id ->
        reason."""
        if not self.reasons:
            return {}
        found = {member.id: self.refusal(member.id, member.ticket) for member in members}
        return {peer: reason for peer, reason in found.items() if reason is not None}
