"""Whom a step does without: members that the leader does not hear (R7).

The reduce of a stage needs min(2, live) replicas. Where so many are left, one that is silent is not waited
for: the attempt names the others, and what only it had added is redone by them. It stays a member; heard
again, it takes the steps that it missed, and is named again when it has. Where too few are left the step does
need it, and its verdict is not put off once it is silent to all. Stage 0 does without nobody: who serves an
index is for the log to say (R2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from anabranch.protocol.core import Core

#: A link that breaks is given so long (s) to be back.
BACK_S = 1.0


class Since(Protocol):
    """A member whose link is down since a time."""

    @property
    def since(self) -> float: ...


class Absent:
    """`lost`: members whose link is down."""

    def __init__(self, core: Core, lost: Mapping[str, Since]) -> None:
        self.core = core
        self._lost = lost
        self._without: set[str] = set()

    def silent(self) -> frozenset[str]:
        """Members that the step may have to do without: who is silent now, or was named in no attempt."""
        if not (self._without or self._lost or self.core.suspects):
            return frozenset()
        return frozenset(self._without | set(filter(self._silent, {*self._lost, *self.core.suspects})))

    def present(self, stage: int, t: int) -> list[str]:
        """The members of a stage that its reduce is made of."""
        live, silent = self.core.membership.live(stage, t), self.silent() if stage else self._without
        if not silent:
            return live
        there = [peer for peer in live if peer not in silent]
        if len(there) < min(2, len(live)) or not there:
            return live
        self._without |= silent.intersection(live)
        return there

    def needed(self, peer: str) -> bool:
        """Whether the step that is open waits for a member."""
        membership = self.core.membership
        stage = membership.stage_of(peer)
        return stage is not None and peer in self.present(stage, membership.opening_t)

    def back(self, peer: str) -> None:
        """It has a part in the open iteration again, or is no member any more."""
        self._without.discard(peer)

    def _silent(self, peer: str) -> bool:
        """Whether it is silent, and nobody says that it hears it."""
        core = self.core
        down = peer in self._lost and core.now >= self._lost[peer].since + BACK_S
        out = down or peer in core.suspects
        return out and not core.contacts.witnesses.account(peer).heard
