"""Machines of islands that are late with their slots in one round after the other: they get no slot for a
while.

Each round waits for late slots for `round.grace` of its time. A machine that is too slow for its slot gets
fewer steps until it is in time. One that never delivers costs all others that wait in each round; the leader
cannot tell it from one whose line is down, so it keeps its seat, and tries again after a while.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: Late rounds running after which a machine gets no slot. Each of them halves its steps, so one that became
#: sixteen times as slow is in time before that. Plain choice.
LATE_ROUNDS = 5
#: Rounds for which it gets none the first time, twice as many each further time that it is late, and the
#: most. Plain choice: a machine that never delivers then holds up one round in 65.
RESTS, LONGEST_REST = 8, 64


class LateMachines:
    """Machines that were late in the last rounds in which they had slots, at the leader. A new leader counts
    anew."""

    def __init__(self) -> None:
        self._late: dict[str, tuple[int, int]] = {}
        """Machine -> rounds running in which it was late, of those in which it had a slot; the last one."""

    def judged(self, t: int, late: Collection[str], prompt: Collection[str]) -> None:
        """Note which machines were late with a slot in round t, and which were in time. The count of late
        rounds running of one in time ends; that of a late one grows by one for a round, however often it is
        named. One that is named as both has its first late round."""
        for peer in prompt:
            self._late.pop(peer, None)
        for peer in late:
            count, last = self._late.get(peer, (0, t - 1))
            if last < t:
                self._late[peer] = count + 1, t

    def kept(self, members: Collection[str]) -> None:
        """Forget machines that are no members any more."""
        self._late = {peer: known for peer, known in self._late.items() if peer in members}

    def able(self, peers: Sequence[str], t: int) -> list[str]:
        """Those of `peers` that may have a slot in round t, as they do not rest for being late; all of them
        if all rest."""
        return [peer for peer in peers if not self._rests(peer, t)] or list(peers)

    def _rests(self, peer: str, t: int) -> bool:
        count, last = self._late.get(peer, (0, t))
        return count >= LATE_ROUNDS and t <= last + min(RESTS << (count - LATE_ROUNDS), LONGEST_REST)
