"""Hierarchical reduce of a large stage: members in cells, parts, and the collector of each part.

A small stage is one cell: the gradient is cut into one part per member, and each member sends each other
member its part. A larger stage is cut into about sqrt(R) cells of about sqrt(R) members. The gradient is cut
into as many parts as the smallest cell has members. Each cell sums each part at one of its members, the
collector; sums are exact, so nothing is rounded on the way. The collectors of a part exchange the sums of
their cells, add them up in the same order, and send the reduced part to their cell. A member sends and
receives about 3·sqrt(R) payloads instead of 2·R, with s + s·C/P + 4 bytes an element (C cells, P parts, s
bytes of a packed sum) instead of s + 4.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from anabranch.protocol.interface.tasks import part_bounds
from anabranch.protocol.log.records import Member

#: Largest stage that is one cell, as a multiple of the neighbours that a peer picks. Plain choice.
FLAT = 4


@dataclass(frozen=True)
class ReduceCells:
    """Division of the members of an attempt into cells, groups that sum on their own first. A small stage is
    one cell. A member is named by its position in the attempt. bounds: of each cell, position of its first
    member and of the first one after it; at least one cell, none empty, together all members in order."""

    bounds: tuple[tuple[int, int], ...]

    @property
    def parts(self) -> int:
        """Number of parts into which the gradient is cut: the members of the smallest cell."""
        return min(end - begin for begin, end in self.bounds)

    def of(self, position: int) -> int:
        """Cell, as an index of `bounds`, of the member at `position`, which there must be."""
        return bisect_right(self.bounds, position, key=itemgetter(0)) - 1

    def fellows(self, cell: int) -> range:
        """Positions of the members of a cell (group of members that sums on its own first)."""
        return range(*self.bounds[cell])

    def part(self, position: int) -> int | None:
        """Number (from 0, the same in every cell) of the part of the gradient that the member at `position`
        sums over its cell; None if all `parts` go to members before it. There must be such a member."""
        rank = position - self.bounds[self.of(position)][0]
        return rank if rank < self.parts else None

    def collector(self, cell: int, part: int) -> int:
        """Position of the member that sums part number `part` (below `parts`) in cell number `cell`."""
        return self.bounds[cell][0] + part

    def partners(self, position: int) -> set[int]:
        """Positions of the members that the member at `position` exchanges parts with: its cell, and the
        members that sum its part in other cells; its own left out."""
        cell, part = self.of(position), self.part(position)
        found = set(self.fellows(cell))
        if part is not None:
            found |= {self.collector(other, part) for other in range(len(self.bounds))}
        return found - {position}


def is_large(members: int, picks: int) -> bool:
    """True if so many members of a reduce are divided into cells. picks: neighbours that each peer picks
    (`Settings.neighbours`)."""
    return members > FLAT * picks


def in_order(members: list[str], known: Mapping[str, Member], picks: int) -> list[str]:
    """Members of a reduce in the order in which an attempt names them: as they are, but in a large stage
    sorted by region, so that a cell mostly has members of one region. known: peer -> member record. picks:
    neighbours that each peer picks (`Settings.neighbours`)."""
    return sorted(members, key=lambda peer: known[peer].region) if is_large(len(members), picks) else members


@lru_cache(256)
def cells_of(members: int, flat: int) -> ReduceCells:
    """Cells of a stage of `members` members (1 or more): one for up to `flat` members, else about
    sqrt(members) of about the same size."""
    count = 1 if members <= flat else max(2, round(math.sqrt(members)))
    return ReduceCells(tuple(part_bounds(members, count)))
