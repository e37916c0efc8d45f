"""Price of the door: bits of work asked of walk-ins, by the address block that they come from.

Each walk-in that was let in from a block within WINDOW_S doubles the work of the next one; above MOST_BITS
the door is closed to the block until one of them is older. A key that comes again counts once.
"""

from __future__ import annotations

#: Work of the first walk-in of a block. A choice: 2^14 hashes, a fiftieth of a second in Python, more than
#: the 2 ms that a handshake costs the server.
BASE_BITS = 14
#: Work above which a block is refused: 2^20 hashes, about a second of the 10 s of a handshake.
MOST_BITS = 20
#: Seconds for which a walk-in counts. A choice: seven of one block an hour.
WINDOW_S = 3600.0
#: Blocks that are remembered; it bounds memory against many addresses.
BLOCKS_KEPT = 4096


class DoorPrices:
    """Price of entry for walk-ins, in bits of proof of work: it rises by one bit with each walk-in that was
    let in from the same address block within WINDOW_S."""

    def __init__(self) -> None:
        self._came: dict[str, dict[str, float]] = {}
        """Address block -> key -> time (s) of its last entry; the block that changed last stands last."""

    def bits(self, block: str, now: float) -> int:
        """Work to ask of a caller from `block` whose key is not known yet; at most MOST_BITS, also while its
        block is closed."""
        return min(MOST_BITS, BASE_BITS + len(self._recent(block, now)))

    def pay(self, block: str, key: str, work: int, now: float) -> str | None:
        """Let the walk-in `key` in for `work` bits, which the caller has verified: count it, and return None.
        Else return the reason: the bits are too few by now, as others came from its block since it was asked,
        or the block is closed, as the price is above MOST_BITS. A key that comes again counts once, and not
        in its own price."""
        recent = self._recent(block, now)
        price = BASE_BITS + len(recent.keys() - {key})
        if price > MOST_BITS:
            came = f"{len(recent)} peers without an invitation came from your network in the last hour"
            return f"{came}: try again later"
        if work < price:
            return "the price of the door has risen since you asked: try again"
        recent[key] = now
        self._came.pop(block, None)
        self._came[block] = recent
        if len(self._came) > BLOCKS_KEPT:
            self._came.pop(next(iter(self._came)))
        return None

    def _recent(self, block: str, now: float) -> dict[str, float]:
        return {key: at for key, at in self._came.get(block, {}).items() if now < at + WINDOW_S}
