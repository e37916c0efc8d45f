"""Later terms that other voters name while this one has a leader: after a few without a wait (FREE) each
voter is heard less and less often, until it has named none for long.

A leader steps down, and a follower leaves its leader, for any later term. Pre-votes keep honest voters from
raising the term while there is a leader (thesis §9.6); they keep no liar from it. A message with a later term
may be ignored like one that is lost: if the term is true, this voter soon has no leader, and hears the next
message.
"""

from __future__ import annotations

#: Later terms of one voter that are heard without a wait. A choice: an election at the time of a fault may
#: raise the term twice, and leadership may be transferred after it.
FREE = 3
#: Greatest number of doublings of the wait for the next one: about ten minutes with a heartbeat of a second.
#: A plain choice.
DOUBLINGS = 8


class TermClaims:
    """Record of the later terms that other voters named lately."""

    def __init__(self) -> None:
        self._named: dict[str, tuple[int, float]] = {}
        """Voter -> number of later terms of it that were heard, time of the last one (s)."""

    def hears(self, voter: str, now: float, patience_s: float) -> bool:
        """True if a later term that `voter` names now is to be heard, which is then counted. The first FREE
        ones are; each further one only after a wait, twice as long as the one before. A voter that named none
        for twice the longest wait begins anew. patience_s: present election timeout, the first wait. now:
        time (s)."""
        forgotten = now - patience_s * 2.0 ** (DOUBLINGS + 1)
        self._named = {other: named for other, named in self._named.items() if named[1] >= forgotten}
        count, last = self._named.get(voter, (0, now))
        if count >= FREE and now < last + patience_s * 2.0 ** min(count - FREE, DOUBLINGS):
            return False
        self._named[voter] = count + 1, now
        return True
