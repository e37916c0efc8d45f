"""Membership lists of simulated peers, which share one copy as long as they have read the same log.

A thousand peers that know each other are a million entries; shared copies save 0.76 MiB a peer.
"""

from __future__ import annotations

from collections.abc import Callable

from anabranch.protocol.membership.view import Membership

#: Number of the latest lists that are kept for a peer that reaches an equal list by other changes. A choice:
#: the logs of the peers of a swarm differ by a few records.
VALUES_KEPT = 64


class _Value:
    """Membership list of several simulated peers, which they must not change. after: (key of a change, shared
    list that the change made of this one), the last such change; None: none yet, or the pool has dropped this
    list."""

    __slots__ = ("after", "membership")

    def __init__(self, membership: Membership) -> None:
        self.membership = Membership()
        self.membership.adopt(membership)
        self.after: tuple[tuple[object, ...], _Value] | None = None


class MembershipPool:
    """Latest VALUES_KEPT different membership lists in a swarm, so that peers with equal lists share one
    copy."""

    def __init__(self) -> None:
        self._values: dict[tuple[object, ...], _Value] = {}

    def value_of(self, made: Membership) -> _Value:
        """Shared list that is equal to `made`; if there is none yet, a copy of `made` becomes one."""
        # Members in the order of joining: it decides who dials.
        members = made.number, tuple(made.members), len(made.active_from), made.begun
        openings = made.opening, made.former, made.reopened_t
        key = (members, openings, made._long_gone, tuple(made.gone.items()))
        known = self._values.get(key)
        if known is not None:
            same = known.membership
            if same.members == made.members and same.active_from == made.active_from:
                return known
        value = self._values[key] = _Value(made)
        if len(self._values) > VALUES_KEPT:
            # A dead peer that still refers to it must not keep all later ones alive.
            self._values.pop(next(iter(self._values))).after = None
        return value


class SharedMembership(Membership):
    """Membership list of one simulated peer, whose contents are shared with equal lists of the same pool. A
    change that the log causes (a Members record, the opening of an iteration, a rollback) looks up the shared
    list with that change, or makes it. After a change without a key (`enter`) the list is not shared until
    the next change with one."""

    __slots__ = ("_pool", "_value")

    def __init__(self, pool: MembershipPool) -> None:
        super().__init__()
        self._pool = pool
        self._value: _Value | None = None

    def _change(self, key: tuple[object, ...] | None, change: Callable[[], None]) -> None:
        former = self._value
        if former is not None and former.after is not None and former.after[0] == key:
            self._value = former.after[1]
        else:
            super()._change(key, change)
            if key is None:
                self._value = None
                return
            self._value = self._pool.value_of(self)
            if former is not None:
                former.after = key, self._value
        self.adopt(self._value.membership)
