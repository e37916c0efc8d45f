"""Sums of gradient parts at a member or helper of a reduce: contributions, checks, parts that came early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.context.task_queue import TaskPriority
from anabranch.protocol.interface.tasks import Assemble, Moments, Payload, Result, SumPart
from anabranch.protocol.messages import Attempt, ReducedPart, ReducePart
from anabranch.protocol.reduce.coverage import refused_cover

#: Number of parts into which a gradient is cut if helpers sum some of them; also the most parts that a peer
#: may send. Plain choice.
PARTS = 16
#: Most memory of the parts that a peer sends of one attempt, in largest payloads of the run (the limit of the
#: links): those of a stage's sum and of its reduced gradient, each of which is one payload at most.
PARTS_LARGEST = 2.0
TOO_LARGE = "more bytes than a stage's sum and its reduced gradient take"
#: Attempts whose sets are kept: members of a simulated swarm share the message. A choice.
ATTEMPTS_CACHED = 8
APart = ReducePart | ReducedPart


class PartialSums:
    """Sums of the parts that this peer adds up in one attempt; each is computed once all members contributed.

    mine: parts that this peer adds up. positions: positions of the members that contribute. whole: True if
    the result is the sum of the whole stage, which is rounded; False for the sum of a cell. weighed: True if
    the results are to have the moments of the contributions. then: called with this object, the part, the
    inputs and the result, which may be an error.
    """

    def __init__(
        self,
        ctx: PeerContext,
        t: int,
        mine: Collection[int],
        positions: Collection[int],
        whole: bool,
        weighed: bool,
        then: Callable[[PartialSums, int, tuple[Payload, ...], Result], None],
    ) -> None:
        self.ctx = ctx
        self.mine = mine
        self._task = SumPart(t, whole, weighed=weighed, hashed=ctx.run.settings.audits)
        self._positions = positions
        self._then = then
        self._contributions: dict[int, dict[int, Payload]] = {part: {} for part in mine}
        self._kept: dict[int, dict[int, Payload]] | None = None
        """Position -> part -> contribution; None if contributions are dropped with their sum."""
        self.sent: Counter[int] = Counter()
        """Position -> number of parts that came from it."""
        self.unusable: set[int] = set()
        """Positions whose contribution makes no gradient, as `examine` found, or has a part without the
        member's own seal (entered by the owner of this object)."""

    def keep(self) -> None:
        """Keep the parts of each member beside their sums, so that `examine` can check the members one by
        one. To be called before the first part is added."""
        self._kept = {position: {} for position in self._positions}

    def lacking(self) -> dict[int, int]:
        """Positions that have not sent all the parts that this peer sums -> number of parts that came (0 or
        more); empty once all have."""
        return {p: self.sent[p] for p in self._positions if self.sent[p] < len(self.mine)}

    def examine(self, stage: int) -> None:
        """After a failed sum, find the members whose contribution alone makes no gradient of `stage` and
        enter them in `unusable`, once the tasks that check them are done; members whose parts did not all
        come are passed over. Needs `keep`; else, and in a second call, nothing happens."""
        kept, self._kept = self._kept or {}, None
        for position, parts in kept.items():
            if len(parts) == len(self.mine):
                self._examine(position, stage, [parts[part] for part in sorted(parts)])

    def _examine(self, position: int, stage: int, parts: list[Payload]) -> None:
        """Start the check that the parts of the member at `position` alone make a gradient of the stage, of
        the right size and in range; otherwise the member is entered in `unusable`."""
        rounded: list[Payload] = []

        def summed(result: Result) -> None:
            if not result.outputs:
                self.unusable.add(position)
                return
            rounded.append(result.outputs[0])
            if len(rounded) == len(parts):
                task = Assemble(self._task.t, stage)
                self.ctx.tasks.submit(TaskPriority.STEP, task, tuple(rounded), assembled)

        def assembled(result: Result) -> None:
            if not result.digest or result.error or result.overflow:
                self.unusable.add(position)

        for payload in parts:
            self.ctx.tasks.submit(TaskPriority.STEP, self._task, (payload,), summed)

    def add(self, part: int, position: int, payload: Payload) -> None:
        """Store the contribution of the member at `position` to a part; the last one to arrive starts the
        part's sum. A second one, and one to a part that this peer does not sum, is ignored."""
        contributions = self._contributions.get(part)
        if contributions is None or position in contributions:
            return  # the sum is being computed
        contributions[position] = payload
        self.sent[position] += 1
        if self._kept is not None:
            self._kept[position][part] = payload
        if len(contributions) < len(self._positions):
            return
        del self._contributions[part]
        inputs = tuple(contributions[position] for position in self._positions)
        self.ctx.tasks.submit(TaskPriority.STEP, self._task, inputs, partial(self._then, self, part, inputs))


class PartMemory:
    """Count of the memory that the parts of one attempt take, by sender, in largest payloads of the run: it
    bounds what one peer can have this peer hold (`exceeded`)."""

    def __init__(self) -> None:
        self._shares: dict[str, dict[tuple[type[APart], int], float]] = {}
        """Sender -> kind and number of a part -> its memory."""

    def exceeded(self, peer: str, message: APart, share: float) -> bool:
        """True if a part of the sender `peer`, with a payload of memory `share`, is beyond PARTS_LARGEST;
        else it is counted, the first time that it comes."""
        shares, key = self._shares.setdefault(peer, {}), (type(message), message.part)
        if key not in shares and share + sum(shares.values()) > PARTS_LARGEST:
            return True
        shares.setdefault(key, share)
        return False


class ReduceAccount(NamedTuple):
    """First-hand account of a witnessed reduce by the peer that sums all its parts, the coordinator.

    lacking: members that have not sent all their parts -> number of parts that came. unusable: members whose
    parts alone make no gradient (wrong size, overflow), or one of whose parts lacks the member's own seal.
    summed: True if all parts are summed and sent to the members. result: digest and sums of squares of the
    gradient; None: not known (yet). moments: of the contributions, in the order of their members; () if they
    are not known.
    """

    lacking: Mapping[str, int]
    unusable: Collection[str]
    summed: bool
    result: tuple[str, Mapping[str, float]] | None
    moments: tuple[Moments, ...] = ()


def witnessed(message: Attempt, peer: str) -> bool:
    """True if `peer` sums all parts of an attempt that names who sums them, and so knows who sent its
    contribution, and the result."""
    return bool(message.sums) and set(collectors(message)) == {peer}


def collectors(message: Attempt) -> tuple[str, ...]:
    """Peer that sums each part, by part; empty if the attempt leaves that to `ReduceCells`."""
    everybody = (*message.members, *message.helpers)
    return tuple(everybody[position] for position in message.sums)


def contributors(message: Attempt) -> tuple[int, ...]:
    """Positions, in order, of the members that own a unit, and so have a sum to send. The others only receive
    the result."""
    return tuple(sorted(set(message.owners) - {-1}))


def over_parts(moments: Collection[tuple[Moments, ...]]) -> tuple[Moments, ...]:
    """Moments of the contributions over several parts, from those of each part; () if a part has none."""
    by_contribution = zip(*moments, strict=False)
    return tuple((sum(square for square, _ in of), sum(dot for _, dot in of)) for of in by_contribution)


class AttemptSets:
    """Sets that follow from an attempt, worked out once; not to be changed.

    positions: member -> its position. units: position -> units that the attempt assigns to the member there;
    no entry for a member without units (`units_of` has them for any member), -1 -> units that nobody owns.
    """

    def __init__(self, message: Attempt) -> None:
        self.message = message
        self.positions = {peer: position for position, peer in enumerate(message.members)}
        units: dict[int, set[int]] = {}
        for unit, owner in enumerate(message.owners):
            units.setdefault(owner, set()).add(unit)
        self.units = {owner: frozenset(owned) for owner, owned in units.items()}
        self._refusal: tuple[frozenset[int], int, str | None] | None = None

    def units_of(self, peer: str) -> frozenset[int]:
        """Units that the attempt assigns to a member; empty if it only receives the result. KeyError for a
        peer that is no member."""
        return self.units.get(self.positions[peer], frozenset())

    def refusal(self, cover: frozenset[int], slots: int) -> str | None:
        """Reason why a member refuses the attempt, whatever it holds itself, or None. cover: units of the
        step. slots: most slots of a round, 0 in another iteration (`refused_cover`)."""
        known = self._refusal
        if known is None or known[0] is not cover or known[1] != slots:
            why = refused_cover(self.message, cover, slots) or misdealt(self.message)
            known = self._refusal = cover, slots, why
        return known[2]


_sets: dict[int, AttemptSets] = {}


def attempt_sets(message: Attempt) -> AttemptSets:
    """Sets of an attempt, worked out once for the object `message` and shared by its members in a simulated
    swarm: not to be changed."""
    found = _sets.get(id(message))
    if found is None or found.message is not message:
        if len(_sets) >= ATTEMPTS_CACHED:
            _sets.clear()
        found = _sets[id(message)] = AttemptSets(message)
    return found


def misdealt(message: Attempt) -> str | None:
    """Reason to refuse an attempt, or None: more than PARTS parts, a peer named twice, or parts that nobody
    sums."""
    everybody = (*message.members, *message.helpers)
    if len(message.sums) > PARTS:
        return f"{len(message.sums)} parts that {len(message.members)} members are to send"
    if len(set(everybody)) < len(everybody):
        return "a reduce that names somebody twice"
    if any(position >= len(everybody) for position in message.sums) or (message.helpers and not message.sums):
        return "parts that nobody sums"
    return None


def account_of(
    message: Attempt, summing: PartialSums, reduced: int, result: tuple[str, Mapping[str, float]] | None
) -> ReduceAccount:
    """Account of an attempt whose parts this peer sums all, for the leader at this peer: what members sent,
    and the result. summing: its sums. reduced: number of parts that are summed. result: digest and sums of
    squares of the gradient; None: not known yet. The account has no moments."""
    lacking = {message.members[position]: count for position, count in summing.lacking().items()}
    unusable = {message.members[position] for position in summing.unusable}
    return ReduceAccount(lacking, unusable, reduced == len(message.sums), result)


class EarlyParts:
    """Parts that arrived before this peer began their attempt, with the memory of their payloads (in largest
    payloads of the run); of each sender only those of its newest attempt."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, APart, Payload, float]] = []

    def keep(self, peer: str, message: APart, payload: Payload, share: float = 0.0) -> str | None:
        """Keep a part of the sender `peer`, and drop its parts of older attempts. Not kept: a part of an
        older attempt, a second one of the same number and kind (of a sum, or reduced), and more than PARTS of
        a kind. Returns the reason if it is refused: its sender's parts would take more than PARTS_LARGEST."""
        of_peer = [(m, s) for p, m, _, s in self._kept if p == peer]
        if any(m.attempt > message.attempt for m, _ in of_peer):
            return None
        of_attempt = [(m, s) for m, s in of_peer if m.attempt == message.attempt]
        alike = {m.part for m, _ in of_attempt if type(m) is type(message)}
        if message.part in alike or len(alike) >= PARTS:
            return None
        if share + sum(s for _, s in of_attempt) > PARTS_LARGEST:
            return TOO_LARGE
        self._kept = [kept for kept in self._kept if kept[0] != peer or kept[1].attempt == message.attempt]
        self._kept.append((peer, message, payload, share))
        return None

    def __len__(self) -> int:
        return len(self._kept)

    def take(self) -> list[tuple[str, APart, Payload, float]]:
        """Remove and return all parts, in order of arrival."""
        kept, self._kept = self._kept, []
        return kept
