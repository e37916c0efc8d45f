"""Coverage of the batch by claims: owner of each unit, its check at a replica, checks of reported norms.

A unit is one microbatch at a relay stage; at stage 0 a microbatch has two, its head and its embedding. The
cover of a stage is the set of units that a step has to count, each once: 0 to n-1, in a round those of its
slots. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from anabranch.protocol.messages import MAX_MESSAGE_BYTES, Attempt

#: No peer is named for any unit.
NO_NAMES: Mapping[int, Collection[str]] = MappingProxyType({})


def missing(cover: frozenset[int], claims: Mapping[str, Iterable[int]]) -> set[int]:
    """Units of the cover that no replica claims (claims: replica -> units); the whole cover without
    claims."""
    return set(cover.difference(*claims.values()))


def not_returned(stage: int, claims: Mapping[int, Mapping[str, Iterable[int]]]) -> set[int]:
    """Microbatches that a relay stage claims and nobody claims at the stage before: whoever computed them
    gave no gradient back yet, or the stage before withholds its claim. claims: stage -> replica -> units;
    stage 0 has embeddings (odd units)."""
    claimed, before = (frozenset().union(*claims.get(s, {}).values()) for s in (stage, stage - 1))
    return set(claimed - (before if stage > 1 else {unit // 2 for unit in before if unit % 2}))


def not_sent_on(
    stage: int, covers: Mapping[int, frozenset[int]], claims: Mapping[int, Mapping[str, Iterable[int]]]
) -> set[int]:
    """Microbatches that a relay stage claims and nobody claims at a later stage: a peer that had them there
    was lost, and whoever computed them at this stage did not send them again yet, or a later stage does
    nothing. covers: units that a step has to count at the stages that are looked at; of stage 0 the heads
    count. claims: as of `not_returned`."""
    lacking = set[int]()
    for later, cover in covers.items():
        units = missing(cover, claims.get(later, {})) if later == 0 or later > stage else set()
        lacking |= units if later else {unit // 2 for unit in units if unit % 2 == 0}
    return lacking.intersection(frozenset().union(*claims.get(stage, {}).values()))


def settle(
    cover: frozenset[int],
    claims: Mapping[str, Iterable[int]],
    members: Sequence[str],
    named: Mapping[int, Collection[str]] = NO_NAMES,
) -> tuple[int, ...]:
    """Owner of every unit as a position in `members`, in unit order (R7).

    A unit with several claims goes to a peer that is `named` for it (unit -> peers), else, and of several
    named ones, to the lowest peer id. Claims of others than `members` do not count. Raises ValueError if no
    member claims a unit.
    """
    holders: dict[int, list[int]] = {unit: [] for unit in sorted(cover)}
    for position in sorted(range(len(members)), key=lambda position: members[position]):
        for unit in cover.intersection(claims.get(members[position], ())):
            holders[unit].append(position)
    owners = []
    for unit, positions in holders.items():
        if not positions:
            raise ValueError(f"unit {unit} is claimed by none of {list(members)}")
        names = named.get(unit, ())
        owners.append(next((each for each in positions if members[each] in names), positions[0]))
    return tuple(owners)


def settle_slots(
    stage: int,
    slots: int,
    counts: frozenset[int],
    claims: Mapping[str, Iterable[int]],
    members: Sequence[str],
    named: Mapping[int, Collection[str]] = NO_NAMES,
) -> tuple[int, ...]:
    """Owner of every unit of a round with `slots` slots, as a position in `members` (see `settle`), in unit
    order: one for each slot, two at stage 0; -1 for units that do not count. counts: units that do. Raises
    ValueError if no member claims one of those."""
    found = dict(zip(sorted(counts), settle(counts, claims, members, named), strict=True))
    return tuple(found.get(unit, -1) for unit in range(slots if stage else 2 * slots))


def refused_cover(message: Attempt, cover: frozenset[int], slots: int = 0) -> str | None:
    """Reason why a replica refuses the unit owners that the leader names in an attempt, or None.

    `message.owners` has one entry per unit, so no unit can have two owners. This function checks that every
    unit has an owner and that each owner is a member of the attempt. cover: units of the step. slots: most
    slots of a round, which may leave out late ones, but not all; 0: no round.
    """
    members = len(message.members)
    if slots:
        counts = {unit for unit, owner in enumerate(message.owners) if owner >= 0}
        odd = message.stage == 0 and any((unit ^ 1) not in counts for unit in counts)
        whole = len(message.owners) == (slots if message.stage else 2 * slots)
        if not whole or odd or not counts or not counts <= cover or max(message.owners) >= members:
            return "a cover that is no part of the round, each unit at most once"
        return None
    if any(owner < 0 for owner in message.owners):
        return "a cover that leaves out units"
    if len(message.owners) != len(cover) or any(owner >= members for owner in message.owners):
        return "a cover that is not the whole batch, each unit once"
    return None


#: Largest total of the sums of squares. Chosen below the float64 maximum (1.8e308), so that the norm is
#: finite.
MOST_SQUARES = 1e300
#: Most bytes of all stages' sums of squares in a log line, half of the message that the line has to fit in. A
#: model of 500 blocks needs as many.
SQUARES_BYTES = MAX_MESSAGE_BYTES // 2


def squares_bytes(stage: int, blocks: Sequence[int]) -> int:
    """Bytes that a stage's sums of squares may take in a log line: its part of SQUARES_BYTES by its model
    blocks, counting one more at each stage. stage: 0 to S. blocks: model blocks of stages 1 to S."""
    mine = 1 + (blocks[stage - 1] if stage else 0)
    return SQUARES_BYTES * mine // (1 + len(blocks) + sum(blocks))


def plausible(squares: Mapping[str, float], most_bytes: int = SQUARES_BYTES) -> bool:
    """True if a peer's sums of squares (tensor name -> sum) can be logged and added up: finite, not negative,
    together below MOST_SQUARES, with printable names, and at most `most_bytes` long in the log. An empty
    mapping is plausible."""
    least_odd = MOST_SQUARES / (len(squares) + 1)
    fit = all(name.isprintable() and 0.0 <= value < least_odd for name, value in squares.items())
    return fit and len(msgspec.json.encode(squares)) <= most_bytes


def global_norm(squares: Iterable[Mapping[str, float]]) -> float:
    """2-norm of the gradient from sums of squares (finite, not negative) per stage and tensor, the same for
    any partition; 0 of none."""
    return math.sqrt(math.fsum(value for stage in squares for value in stage.values()))
