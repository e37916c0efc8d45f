"""Reduce schedule of a stage: the summing peer of each part, evenly or by measured links.

In an even reduce each member sums one part, so every pair of members exchanges data over the link between
them. If that link is slow, a spread reduce lets a peer near both sum the parts: another member, or a helper
(a peer of an adjacent stage). Each member then sends more bytes, but over several links at once. That pays if
single links are the bottleneck, and not the whole uplink of a machine, which only a trial shows: a stage
whose spread reduce took longer than its even one is reduced evenly for a while.

With `fleet.spread = "program"` the shares are those of a linear program over access lines and links
(`placement.averaging_program`), in whole parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from anabranch.counter_rng import CounterRng
from anabranch.protocol.context.peer_context import PeerContext
from anabranch.protocol.placement.averaging_program import Averager, AveragingProgram
from anabranch.protocol.placement.cost_model import OF_SUMS, access_bps, fastest_bps
from anabranch.protocol.reduce.hierarchy import FLAT
from anabranch.protocol.reduce.partial_sums import PARTS
from anabranch.protocol.telemetry.link_table import LinkEstimate, LinkMeasurements

#: Greatest expected duration of a spread reduce, as a share of the even one's, and least seconds saved.
SHARE, LESS_S = 0.8, 0.5
#: Most bytes of sums that one member sends to another peer (half of its own are always allowed): they share a
#: link.
MOST_BYTES = 1 << 29
#: Iterations for which a stage is reduced evenly after its spread reduce took longer.
EVEN_FOR = 50


@dataclass(frozen=True)
class ReducePlan:
    """Plan of a stage's reduce. helpers: peers that sum parts besides the members. sums: for each part the
    peer that sums it, as a position in members + helpers. Both are empty if no more is planned than that the
    members sum one part each (in a large stage as its cells arrange it)."""

    helpers: tuple[str, ...] = ()
    sums: tuple[int, ...] = ()


EVEN = ReducePlan()


class ReduceSchedule:
    """Choice of the peers that sum the parts of each reduce, by link measurements that members reported
    (`ways`) and by how long former reduces took."""

    def __init__(self, ctx: PeerContext, ways: LinkMeasurements) -> None:
        self.ctx = ctx
        self.ways = ways
        self._even_s: dict[int, tuple[tuple[str, ...], float]] = {}
        """Stage -> (members, seconds) of its last even reduce."""
        self._even_until: dict[int, int] = {}

    def of(
        self, stage: int, t: int, members: Sequence[str], able: frozenset[str], owners: Collection[int]
    ) -> ReducePlan:
        """Plan the reduce of a stage in the open iteration `t`: even, unless a spread one is estimated to be
        quicker (`fleet.spread = "always"`: a random one, for tests). Nothing is sent.

        members: of the reduce, in its order. able: peers that work in this iteration and are not silent; any
        other may not have opened it, and could not store the parts. owners: position of each unit's owner
        (-1: none); only these have sums to send, and in an even reduce they share the parts.
        """
        ctx, settings = self.ctx, self.ctx.run.settings
        crowded = ctx.run.near.crowded or len(members) > FLAT * settings.neighbours
        working = tuple(sorted(set(owners) - {-1}))
        islands = settings.rounds.has(t) and (settings.rounds.pipeline or stage > 0)
        few = len(working) < len(members) and not crowded and (islands or len(working) <= PARTS)
        evenly = ReducePlan((), working[:PARTS]) if few else EVEN
        program = settings.spread == "program"
        standbys = not ctx.standby_view.waits.keys().isdisjoint(members)  # then machines' uplinks bind
        even = settings.spread == "never" or t < self._even_until.get(stage, 0) or (standbys and not program)
        senders = [members[position] for position in working] if few else members
        if len(senders) < 2 or crowded or even or not able.issuperset(senders):
            return evenly
        beside = {(stage - 1) % (settings.stages + 1), (stage + 1) % (settings.stages + 1)} - {stage}
        helpers = [
            peer
            for other in sorted(beside)
            for peer in ctx.run.membership.live(other, t)
            if peer in able and ctx.reachable(peer) and self._linked(peer, senders)
        ]
        if settings.spread == "always":
            return evenly if few else by_chance(members, helpers, ctx.rng)
        size = settings.counts[stage - 1] * settings.block_bytes if stage else settings.ends_bytes
        of_sums = OF_SUMS
        if islands:
            contribution, result = settings.round_bytes_of(stage)
            size = math.ceil(contribution + result)
            of_sums = contribution / max(1, size)
        regions = {peer: ctx.run.membership.members[peer].region for peer in [*members, *helpers]}
        way = self.ways.between(regions)
        if way is None or not size:
            return evenly
        if program:
            found = by_program(members, helpers, size, way, self.ways.rates, working, of_sums)
            return evenly if found == EVEN else found
        known, even_s = self._even_s.get(stage, ((), 0.0))
        even_s = even_s if known == tuple(members) and not few else 0.0
        found = spread(members, helpers, size, way, even_s, working if few else (), of_sums, islands)
        return evenly if found == EVEN else found

    def _linked(self, helper: str, members: Sequence[str]) -> bool:
        """True if a measurement of each member's link with `helper` was reported (two home machines may be
        unable to connect); always with `fleet.spread = "always"`, for tests."""
        return self.ctx.run.settings.spread == "always" or all(
            self.ways.measured(helper, member) for member in members
        )

    def failed(self, stage: int, t: int) -> None:
        """Reduce the stage evenly (each member sums one part) for EVEN_FOR iterations. Called when a spread
        reduce, in which chosen peers sum the parts, failed in iteration `t` or its results differed: a helper
        may be at fault."""
        self._even_until[stage] = t + EVEN_FOR

    def took(self, stage: int, t: int, members: tuple[str, ...], spread: bool, seconds: float) -> None:
        """Record how long a reduce took from its order to its end (`seconds`). Of an even one (`spread`
        False) that is kept for comparison. If a spread one took longer than the last even one of the same
        members, the stage is reduced evenly for EVEN_FOR iterations. Nothing with `fleet.spread =
        "program"`."""
        if self.ctx.run.settings.spread == "program":
            return
        known, even_s = self._even_s.get(stage, ((), 0.0))
        if not spread:
            self._even_s[stage] = members, seconds
        elif known == members and seconds > even_s:
            self._even_until[stage] = t + EVEN_FOR


def spread(
    members: Sequence[str],
    helpers: Sequence[str],
    size_bytes: float,
    way: Callable[[str, str], LinkEstimate],
    even_s: float = 0.0,
    working: Sequence[int] = (),
    of_sums: float = OF_SUMS,
    down: bool = False,
) -> ReducePlan:
    """Plan of a spread reduce of two or more `members`, or EVEN if that is not clearly quicker (SHARE,
    LESS_S). EVEN has every member sum one part: with `working` the caller puts an even plan of those in its
    place. Parts are assigned one by one, each to the peer with which the whole reduce takes least time.

    helpers: other peers that may sum parts. size_bytes: bytes (above 0) of all sums and of the reduced
    gradient that one member exchanges. way: function (sender, receiver) -> estimate of the link. even_s:
    measured seconds of an even reduce of these members, 0 if there was none; the even reduce is taken to last
    as long at least. working: positions of the members that have sums to send; no other member sums a part,
    and the even reduce that is compared is shared by these; empty: all. of_sums: share of `size_bytes` that
    are sums, above 0. down: True if a machine's downlink may be faster than its uplink (else both count as
    equal).
    """
    everybody, way = [*members, *helpers], cache(way)
    senders = tuple(working) or tuple(range(len(members)))
    even = _Plan(everybody, len(members), senders, size_bytes / len(senders), way, of_sums, down)
    for position in senders:
        even.give(position)
    plan = _Plan(everybody, len(members), senders, size_bytes / PARTS, way, of_sums, down)
    most = max(PARTS // 2, int(PARTS * MOST_BYTES / (of_sums * size_bytes)))
    sums: list[int] = []
    for _ in range(PARTS):
        # Ties go to the position that sends least, then to a member, then to the first.
        able = (k for k in range(len(everybody)) if k in senders or k >= len(members))
        free = (k for k in able if sums.count(k) < most)
        best = min(free, key=lambda k: (plan.seconds(k), k >= len(members), k))
        plan.give(best)
        sums.append(best)
    even_s = max(even_s, even.seconds())
    if plan.seconds() > min(SHARE * even_s, even_s - LESS_S):
        return EVEN
    return _plan_of(sums, members, helpers)


def by_program(
    members: Sequence[str],
    helpers: Sequence[str],
    size_bytes: float,
    way: Callable[[str, str], LinkEstimate],
    rates: Callable[[str], Iterable[Collection[float]]],
    senders: Collection[int],
    of_sums: float = OF_SUMS,
) -> ReducePlan:
    """Plan of a reduce with the shares of the averaging program, or EVEN if even shares are as quick.

    helpers: peers that may sum parts besides `members`. size_bytes: bytes of all sums and of the reduced
    gradient that one member exchanges; of_sums: share of them that are sums. way: function (sender, receiver)
    -> estimate of the link. rates: function peer -> measured rates of its links (bits per second), a
    collection for sending and one for receiving. senders: positions of the members that have sums to send, at
    least one; all members get the result.
    """
    everybody, way = [*members, *helpers], cache(way)
    receivers = range(len(members))
    peers = []
    for k in range(len(everybody)):
        up_bps, down_bps = access_bps(everybody[k], everybody, way, rates)
        froms = (way(everybody[at], everybody[k]).bandwidth_bps for at in senders if at != k)
        tos = (way(everybody[k], everybody[at]).bandwidth_bps for at in receivers if at != k)
        slowest = min(froms, default=math.inf), min(tos, default=math.inf)
        sends = k in senders
        receives = k in receivers
        peers.append(Averager(up_bps, down_bps, *slowest, sends, receives, sends or not receives))
    program = AveragingProgram(peers, 8.0 * of_sums * size_bytes, 8.0 * (1.0 - of_sums) * size_bytes)
    counts = program.in_parts(PARTS)
    even = [peer.sends / len(senders) for peer in peers]
    if program.seconds([count / PARTS for count in counts]) >= program.seconds(even):
        return EVEN
    return _plan_of([k for k, count in enumerate(counts) for _ in range(count)], members, helpers)


def _plan_of(sums: Sequence[int], members: Sequence[str], helpers: Sequence[str]) -> ReducePlan:
    """Plan from the summing peer of each part, given as positions in members + all helpers; helpers that sum
    none are left out, and the others get the positions that follow from it."""
    used = sorted({position for position in sums if position >= len(members)})
    at = {position: len(members) + number for number, position in enumerate(used)}
    chosen = tuple(helpers[position - len(members)] for position in used)
    return ReducePlan(chosen, tuple(at.get(position, position) for position in sums))


def by_chance(members: Sequence[str], helpers: Sequence[str], rng: CounterRng) -> ReducePlan:
    """Random plan of a reduce, for tests: at most three helpers, each with at least one part; the other parts
    are summed by any of the members (at least one) and these helpers."""
    drawn = list(helpers)
    rng.shuffle(drawn)
    chosen = tuple(drawn[: rng.below(4)])
    everybody = len(members) + len(chosen)
    more = [rng.below(everybody) for _ in range(1 + rng.below(PARTS - 3))]
    sums = [*range(len(members), everybody), *more]
    rng.shuffle(sums)
    return ReducePlan(chosen, tuple(sums))


class _Plan:
    """Assignment of parts under construction: bits that each link, uplink and downlink carries in the two
    phases ("there": the sums; "back": the reduced gradient), and the seconds of the slowest in each phase."""

    def __init__(
        self,
        everybody: Sequence[str],
        members: int,
        senders: Collection[int],
        part_bytes: float,
        way: Callable[[str, str], LinkEstimate],
        of_sums: float,
        down: bool,
    ) -> None:
        self._everybody, self._members, self._way = everybody, members, way
        self._senders = {everybody[position] for position in senders}
        self._bits = (8.0 * of_sums * part_bytes, 8.0 * (1.0 - of_sums) * part_bytes)
        self._carried: dict[tuple[object, ...], float] = defaultdict(float)
        self._longest_s = [0.0, 0.0]
        self._line_bps = self._down_bps = {peer: fastest_bps(peer, everybody, way) for peer in everybody}
        if down:
            self._down_bps = {
                peer: fastest_bps(peer, everybody, lambda one, other: way(other, one)) for peer in everybody
            }

    def seconds(self, position: int | None = None) -> float:
        """Estimated seconds of the whole exchange with the parts given so far; with `position`, as if that
        peer summed one more part, which is not given by that."""
        there_s, back_s = self._longest_s if position is None else self._with(position)
        return there_s + back_s

    def give(self, position: int) -> None:
        """Assign one more part to the peer at `position`, and count the bits that this adds to links and
        lines."""
        self._longest_s = self._with(position)
        for key, bits, _, _ in self._loads(position):
            self._carried[key] += bits

    def _with(self, position: int) -> list[float]:
        longest = list(self._longest_s)
        for key, bits, bps, latency_s in self._loads(position):
            phase = int(key[0] == "back")
            longest[phase] = max(longest[phase], latency_s + (self._carried[key] + bits) / bps)
        return longest

    def _loads(self, position: int) -> list[tuple[tuple[object, ...], float, float, float]]:
        """Transfers that one more part summed at `position` would add, each as (what carries it, bits, bits
        per second, latency in s). What carries it is a link or a machine's uplink or downlink, in one of the
        two phases."""
        there, back = self._bits
        middle = self._everybody[position]
        found: list[tuple[tuple[object, ...], float, float, float]] = []
        others = [peer for peer in self._everybody[: self._members] if peer != middle]
        sending = [peer for peer in others if peer in self._senders]
        for peer in sending:
            to = self._way(peer, middle)
            found += [
                (("there", peer, middle), there, to.bandwidth_bps, to.latency_s),
                (("there", peer, "up"), there, self._line_bps[peer], 0.0),
            ]
        for peer in others:
            fro = self._way(middle, peer)
            found += [
                (("back", middle, peer), back, fro.bandwidth_bps, fro.latency_s),
                (("back", peer, "down"), back, self._down_bps[peer], 0.0),
            ]
        found += [
            (("there", middle, "down"), there * len(sending), self._down_bps[middle], 0.0),
            (("back", middle, "up"), back * len(others), self._line_bps[middle], 0.0),
        ]
        return found
