"""State of one attempt of a reduce at one member: its position, parts, and the peers that sum each part.

The flat gradient is cut into parts. Each member sends each part of its sum to that part's collector, the peer
that adds it up over all members and sends the reduced part back. One part per member is bandwidth-optimal; a
large stage uses `hierarchy`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.messages import Attempt
from anabranch.protocol.reduce.hierarchy import ReduceCells
from anabranch.protocol.reduce.partial_sums import (
    PartialSums,
    PartMemory,
    attempt_sets,
    collectors,
    contributors,
)
from anabranch.protocol.reduce.work_receipt import WorkReceipt

#: Share of the payloads of a kind that this replica expects in a reduce from which on the others are late. A
#: choice: payloads that share a full line come at about the same time, and a link that broke delays nothing
#: before that.
LATE_SHARE = 0.75


@dataclass
class ReduceAttempt:
    """State of a reduce attempt at this replica.

    message: the leader's order. receipt: this replica's receipt. position: index of this replica among the
    members. cells: division of the members into cells (groups, in a large stage; else one). parts: parts of
    its own sum. summing: sums in progress. sums: cell -> sum of the cell for the part that this replica
    collects. reduced: part -> reduced part. memory: of the parts that came. added: True once all cells' sums
    of its part are being added up. assembled: True if this replica has all reduced parts. begun_at: time (s)
    at which this replica began the attempt.

    Computed: positions: member -> its position. collectors: peer that sums each part for this replica. mine:
    parts that this replica sums. senders: positions in this replica's cell that send parts. first: positions
    that get the reduced parts at once. told_late: True if this replica is a standby, which gets the reduced
    parts later.
    """

    message: Attempt
    receipt: WorkReceipt
    position: int
    cells: ReduceCells
    parts: tuple[Payload, ...] = ()
    summing: PartialSums | None = None
    sums: dict[int, Payload] = field(default_factory=dict)
    reduced: dict[int, Payload] = field(default_factory=dict)
    memory: PartMemory = field(default_factory=PartMemory)
    added: bool = False
    assembled: bool = False
    begun_at: float = 0.0

    def __post_init__(self) -> None:
        self.cell = self.cells.of(self.position)
        self.positions: Mapping[str, int] = attempt_sets(self.message).positions
        cells, dealt = self.cells, collectors(self.message)
        of_cell = [self.members[cells.collector(self.cell, part)] for part in range(cells.parts)]
        self.collectors: Sequence[str] = dealt or of_cell
        me = self.members[self.position]
        self.mine = [part for part, peer in enumerate(self.collectors) if peer == me]
        several = len(self.cells.bounds) > 1
        self.senders: Sequence[int] = self.fellows if several else contributors(self.message)
        self.first: Collection[int] = self.fellows
        self.told_late = False

    @property
    def count(self) -> int:
        """Number of parts into which the gradient is cut."""
        return len(self.collectors)

    @property
    def fellows(self) -> range:
        """Positions of the members of this replica's cell (its group in a large stage; else all members),
        this replica included."""
        return self.cells.fellows(self.cell)

    @cached_property
    def partners(self) -> list[str]:
        """Peers that this replica exchanges parts with, helpers included, itself left out."""
        collectors = list(dict.fromkeys(self.collectors))
        if self.message.sums and self.members[self.position] not in collectors:
            return collectors
        fellows = [self.members[position] for position in sorted(self.cells.partners(self.position))]
        return [*fellows, *self.message.helpers]

    def late(self) -> list[str]:
        """Peers whose payloads are late, this replica left out: LATE_SHARE of those of the same kind (parts
        of members' sums, sums of other cells, reduced parts) have come. Empty before the sum is cut."""
        if self.summing is None:
            return []
        found = _late([self.members[position] for position in self.summing.lacking()], len(self.senders))
        cells = range(len(self.cells.bounds))
        if self.mine and len(cells) > 1:
            part, lacking = self.mine[0], [cell for cell in cells if cell not in self.sums]
            found += _late([self.members[self.cells.collector(cell, part)] for cell in lacking], len(cells))
        collectors = [peer for part, peer in enumerate(self.collectors) if part not in self.reduced]
        found += _late(collectors, self.count)
        return [peer for peer in dict.fromkeys(found) if peer != self.members[self.position]]

    @property
    def members(self) -> tuple[str, ...]:
        return self.message.members


def _late(lacking: list[str], expected: int) -> list[str]:
    """`lacking`, the peers whose payload has not come, if they are at most the share 1 - LATE_SHARE of the
    `expected` payloads; else []."""
    return lacking if len(lacking) <= (1.0 - LATE_SHARE) * expected else []
