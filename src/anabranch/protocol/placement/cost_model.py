"""Iteration time of an assignment of relays to stages, from measured pass times and links.

    T = max over stages of max(compute, line, slots) + 2 * path + longest reduce

*compute*: the batch is divided among the replicas of a stage by their speed; the last one to finish counts.
*line*: each replica sends and receives two activations per microbatch over its own access line. *slots*: by
Little's law a stage with K slots, each occupied from a microbatch's arrival to its gradient's, passes K
microbatches in that time. *path*: mean time of a microbatch through all stages, over the cheapest links.
*reduce*: every replica that works sends every other one a part of its gradient sum and receives the reduced
parts; or, where that is quicker, the sums travel over several links at once through helpers, peers close to
all replicas of the stage (`coordinator.reduce_schedule`). With `fleet.spread = "program"` it is that of the
shares of the averaging program (`averaging_program`).

In a run with standbys (`protocol.fleet.standbys`) replicas may get no share of the batch: those whose access
lines lengthen the reduce by more than they help. A standby receives the reduced gradient after the commit.

Not here: the search for a better assignment (`local_search`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member
from anabranch.protocol.placement.averaging_program import averaging_s
from anabranch.protocol.placement.rates import Batch, batch_of, first_passes, pass_s, with_slots
from anabranch.protocol.telemetry.link_table import LinkEstimate, LinkMeasurements

#: Assignment of relays to stages: relay -> stage.
Deal = dict[str, int]
#: Peers of one stage, sorted.
Group = tuple[str, ...]

#: Assumed rate of an access line with one measured link, in rates of that link: links share a line (a
#: choice).
LINE = 2.0
#: Links over which a replica's sums travel at once in a reduce with helpers (`coordinator.reduce_schedule`).
SPREAD_OVER = 5
#: Share of the sums in the bytes of a reduce; the rest is the reduced gradient.
OF_SUMS = 0.6
#: Replicas become standbys if their stage then takes at most this share of its time with all of them working.
SPARED_SHARE = 0.75
#: An access line this many times slower than the median one is left out of the reduce time where standbys are
#: not allowed (a choice): it is slow at every stage and would hide all other differences.
THIN = 8.0


def shared_out(each_s: Sequence[float], microbatches: int) -> list[int]:
    """Microbatches of each replica if a batch is divided so that the last replica finishes as early as
    possible. each_s: seconds per microbatch of each replica."""
    whole = sum(1.0 / seconds for seconds in each_s)
    shares = [int(microbatches / seconds / whole) for seconds in each_s]
    for _ in range(microbatches - sum(shares)):
        shares[min(range(len(shares)), key=lambda at: (shares[at] + 1) * each_s[at])] += 1
    return shares


def carried_s(links: Sequence[Sequence[float]], left: list[int], right: list[int]) -> float:
    """Total seconds that the microbatches of a batch spend between two stages, the cheapest links used first.
    Both lists of counts, which must have one sum, are changed: they end as zeros.

    :param links: seconds of a microbatch, from each replica of one stage to each of the next.
    :param left: microbatches of each replica of the one stage.
    :param right: microbatches of each replica of the next stage.
    """
    total_s = 0.0
    for seconds, one, other in sorted(
        (seconds, one, other) for one, row in enumerate(links) for other, seconds in enumerate(row)
    ):
        share = min(left[one], right[other])
        left[one] -= share
        right[other] -= share
        total_s += share * seconds
    return total_s


def spread_reduce_s(
    bits: float, latency_s: float, relay_bps: Iterable[float], line_bps: Iterable[float]
) -> float:
    """Seconds of a stage's gradient reduce if it goes through helpers, peers close to all of the stage's
    replicas.

    :param bits: sums and reduced gradient of one replica.
    :param latency_s: longest one-way latency between two replicas.
    :param relay_bps: for each possible helper, the rate of its slowest link to a replica.
    :param line_bps: rates of the replicas' access lines.
    """
    several_bps = sum(sorted(relay_bps, reverse=True)[:SPREAD_OVER])
    return 2.0 * latency_s + bits / min(several_bps, *line_bps)


@dataclass(frozen=True)
class Shares:
    """Division of a batch over the replicas of a stage: microbatches of each. half_pass_s: at each replica,
    half of the seconds of a forward plus an input gradient."""

    peers: Group
    half_pass_s: tuple[float, ...]
    microbatches: tuple[int, ...]


class Hops:
    """Calculator of the mean seconds of a microbatch from one stage to the next, by their division of the
    batch; half of the pass at either end is included.

    The cost between two replicas is `d_ij` of the flow problem. link_s(one, other): seconds of an activation
    between two peers, mean of both directions.
    """

    def __init__(self, microbatches: int, link_s: Callable[[str, str], float]) -> None:
        self._microbatches, self._link_s = microbatches, cache(link_s)
        self._found: dict[tuple[Shares, Shares], float] = {}

    def mean_s(self, one: Shares, other: Shares) -> float:
        key = (one, other)
        if key not in self._found:
            links = [
                [self._link_s(a, b) + (at_a + at_b) / 2.0 for b, at_b in _ends(other)]
                for a, at_a in _ends(one)
            ]
            total_s = carried_s(links, [*one.microbatches], [*other.microbatches])
            self._found[key] = total_s / self._microbatches
        return self._found[key]


def _ends(shares: Shares) -> list[tuple[str, float]]:
    return list(zip(shares.peers, shares.half_pass_s, strict=True))


@dataclass(frozen=True)
class _Stage:
    """Estimated times of one stage in an iteration. shares: division of the batch over its replicas. busy_s:
    seconds of the replica that is busy longest, in computing or on its access line. reduce_s: of the gradient
    reduce. slots: microbatches that its working replicas can hold at once."""

    shares: Shares
    busy_s: float
    reduce_s: float
    slots: int


def line_bps(rates: Collection[float]) -> float:
    """Estimated rate of a peer's access line (bits per second) from the measured rates of its links in one
    direction, at least one: the rate of the fastest link, or LINE times that rate if only one link is
    measured. More is never assumed, for to overestimate a line costs more than to leave part of it unused."""
    return max(rates) * (1.0 if len(rates) > 1 else LINE)


def fastest_bps(peer: str, others: Iterable[str], way: Callable[[str, str], LinkEstimate]) -> float:
    """Estimated rate (bits per second) of a peer's access line up, by its links alone: LINE times the fastest
    of them to any of `others`, itself left out (LINE if there is none). way: function (sender, receiver) ->
    estimate of the link; turned round for the line down."""
    return LINE * max((way(peer, other).bandwidth_bps for other in others if other != peer), default=1.0)


def access_bps(
    peer: str,
    everybody: Collection[str],
    way: Callable[[str, str], LinkEstimate],
    rates: Callable[[str], Iterable[Collection[float]]],
) -> tuple[float, float]:
    """Estimated rates (bits per second) of a peer's access line, up and down: LINE times its fastest link
    with any other of `everybody`, but no more than its measured rates allow (`line_bps`). way: function
    (sender, receiver) -> estimate of the link. rates: function peer -> measured rates of its links, a
    collection for sending and one for receiving; either may be empty or lack."""
    sent, received = (*rates(peer), (), ())[:2]
    up_bps = fastest_bps(peer, everybody, way)
    down_bps = fastest_bps(peer, everybody, lambda one, other: way(other, one))
    return (
        min(up_bps, line_bps(sent)) if sent else up_bps,
        min(down_bps, line_bps(received)) if received else down_bps,
    )


class CostModel:
    """Iteration time of any assignment of a swarm's relays, from what the leader knows of members and links.

    :param members: all members, with their slots as the capacity. Members of stage 0 stay there.
    :param blocks: number of blocks of stages 1 to S. batch: sizes of an iteration.
    :param way: function (sender, receiver) -> estimate of the link.
    :param spares: True if replicas may be standbys, without a share of the batch.
    :param rates: function peer -> measured rates of its links (bits per second), a collection for sending and
        one for receiving (none: estimated from `way`).
    :param spread: True if helpers may sum parts of a reduce.
    :param program: True if the shares of a reduce are those of the averaging program.
    """

    def __init__(
        self,
        members: Iterable[Member],
        blocks: Sequence[int],
        batch: Batch,
        way: Callable[[str, str], LinkEstimate],
        spares: bool = False,
        rates: Callable[[str], Iterable[Collection[float]]] = lambda peer: (),
        spread: bool = True,
        program: bool = False,
    ) -> None:
        self._members = {member.id: member for member in members}
        self._blocks, self._batch, self._way = blocks, batch, way
        self._ends: Group = tuple(sorted(m.id for m in self._members.values() if not m.stage))
        self._stages: dict[tuple[int, Group, Group], _Stage] = {}
        self._choices: dict[tuple[int, Group], Group] = {}
        self._spares, self._spread, self._program = spares, spread, program
        self._hops = Hops(batch.microbatches, self._link_s)
        reported = rates if spares else lambda peer: ()
        self._ways_bps = {
            peer: access_bps(peer, self._members, way, reported) for peer in self._members if program
        }
        """Peer -> rates of its access line (bits per second), up and down; empty without the program."""
        self._line_bps = {
            peer: min([fastest_bps(peer, self._members, way), *map(line_bps, filter(None, reported(peer)))])
            for peer in self._members
        }
        enough = median(self._line_bps.values()) / THIN if self._line_bps else 0.0
        self._thick = frozenset(peer for peer, bps in self._line_bps.items() if bps >= enough)

    @property
    def stages(self) -> int:
        return len(self._blocks)

    @property
    def deal(self) -> Deal:
        """Present assignment of relays to stages, relay -> stage."""
        return {member.id: member.stage for member in self._members.values() if member.stage}

    def seconds(self, deal: Mapping[str, int]) -> float:
        """Estimated iteration time (s) of the assignment `deal` (relay -> stage), with standbys where they
        are allowed and pay; infinite if a stage is empty."""
        all_work_s = self.without((), deal)
        return min(all_work_s, self.without(self._choice(deal), deal)) if self._spares else all_work_s

    def without(self, spared: Collection[str], deal: Mapping[str, int]) -> float:
        """Estimated iteration time (s) of the assignment `deal` if the peers `spared` are standbys and get no
        microbatches; infinite if a stage is empty. A stage of which all replicas are in `spared` uses
        them."""
        layers = self._layers(deal)
        if not all(layers):
            return math.inf
        counts = [0, *self._blocks]
        stages = [
            self._stage(count, group, _working(group, spared))
            for count, group in zip(counts, layers, strict=False)
        ]
        stages.append(stages[0])
        hops = [self._hops.mean_s(stages[at].shares, stages[at + 1].shares) for at in range(len(stages) - 1)]
        ahead_s, longest_s = 0.0, stages[0].busy_s
        for at in range(len(self._blocks), 0, -1):
            ahead_s += 2.0 * hops[at]
            slots_s = self._batch.microbatches * ahead_s / max(1, stages[at].slots)
            longest_s = max(longest_s, stages[at].busy_s, slots_s)
        return longest_s + 2.0 * sum(hops) + max(stage.reduce_s for stage in stages)

    def _layers(self, deal: Mapping[str, int]) -> list[Group]:
        """Sorted peers of each layer that a microbatch passes: stages 0 to S, and stage 0 once more."""
        groups: list[list[str]] = [[] for _ in self._blocks]
        for peer in sorted(deal):
            groups[deal[peer] - 1].append(peer)
        return [self._ends, *map(tuple, groups), self._ends]

    # --- choice of standbys --------------------------------------------------------------------

    def spared(self, deal: Deal, before: Collection[str] = (), known: Collection[str] = ()) -> frozenset[str]:
        """Peers that should be standbys (get no microbatches): at each stage the replicas with the slowest
        access lines, as many as make the iteration shorter.

        :param before: present standbys.
        :param known: peers whose access lines are known. A stage with any other peer is left as it is.
        """
        groups = [group for group in self._layers(deal)[1:-1] if group]
        open_to = [group for group in groups if set(group) <= set(known)]
        kept = frozenset(before).difference(*open_to)
        found, best_s = kept, self.with_mean(kept, deal)
        chosen = kept.union(*(self._choice(deal).intersection(group) for group in open_to))
        if (seconds := self.with_mean(chosen, deal)) < best_s:
            found, best_s = chosen, seconds
        for group in open_to:
            others = found.difference(group)
            for working in self._choices_of(group):
                spared = others.union(group).difference(working)
                if (seconds := self.with_mean(spared, deal)) < best_s:
                    found, best_s = spared, seconds
        return found

    def with_mean(self, spared: Collection[str], deal: Deal) -> float:
        """Estimated iteration time (s) of the assignment `deal` with the standbys `spared`, plus the mean
        over stages of busy and reduce seconds; infinite if a stage is empty. The mean tells choices apart
        that do not change the slowest stage."""
        groups = zip([0, *self._blocks], self._layers(deal)[:-1], strict=True)
        alone_s = [self._alone_s(blocks, group, _working(group, spared)) for blocks, group in groups if group]
        return self.without(spared, deal) + sum(alone_s) / len(alone_s)

    def costs_s(self, peer: str, spared: Collection[str], deal: Mapping[str, int]) -> float:
        """Seconds by which the reduce of a stage gets longer if its replica `peer`, one of the standbys
        `spared`, works and the others stay standbys. Negative if the reduce gets shorter, as it may where one
        replica works alone and sends to all standbys; 0 if all replicas of the stage are standbys. deal:
        assignment, relay -> stage."""
        group = self._layers(deal)[deal[peer]]
        blocks, working = self._blocks[deal[peer] - 1], _working(group, spared)
        more = tuple(sorted({*working, peer}))
        return self._reduce_s(blocks, more, len(group)) - self._reduce_s(blocks, working, len(group))

    def _choice(self, deal: Mapping[str, int]) -> frozenset[str]:
        """Standbys of the assignment `deal` (relay -> stage), chosen for each stage alone: its replicas with
        the slowest access lines, as many as make its busy plus reduce seconds least; none if SPARED_SHARE of
        the seconds without standbys is not undercut."""
        found: set[str] = set()
        for key in zip(self._blocks, self._layers(deal)[1:-1], strict=True):
            if key not in self._choices:
                best, best_s = key[1], SPARED_SHARE * self._alone_s(*key, key[1])
                for working in self._choices_of(key[1]):
                    seconds = self._alone_s(*key, working)
                    if seconds < best_s:
                        best, best_s = working, seconds
                self._choices[key] = tuple(peer for peer in key[1] if peer not in best)
            found.update(self._choices[key])
        return frozenset(found)

    def _alone_s(self, blocks: int, group: Group, working: Group) -> float:
        stage = self._stage(blocks, group, working)
        return stage.busy_s + stage.reduce_s

    def _choices_of(self, group: Group) -> Iterator[Group]:
        """Candidate sets of working replicas for a stage, if the rest of `group` are standbys: for each count
        from 1 to all but one, the peers with the fastest access lines."""
        ranked = sorted(group, key=lambda peer: (-self._line_bps[peer], peer))
        for count in range(1, len(group)):
            yield tuple(sorted(ranked[:count]))

    # --- a stage and its links --------------------------------------------------------------

    def _stage(self, blocks: int, group: Group, working: Group) -> _Stage:
        key = (blocks, group, working)
        if key not in self._stages:
            bits = 2.0 * 8.0 * self._batch.activation_bytes
            pass_s = [self._pass_s(peer, blocks) for peer in working]
            line_s = [bits / self._line_bps[peer] for peer in working]
            # Data nodes get equal parts. Lines count in the division only where there may be standbys.
            counted_s = line_s if self._spares and blocks else [0.0] * len(working)
            each_s = [max(one or 1.0, line) for one, line in zip(pass_s, counted_s, strict=True)]
            share = dict(zip(working, shared_out(each_s, self._batch.microbatches), strict=True))
            late_bits = self._late_bits(blocks, group, working)
            busy_s = max(
                max(share[peer] * one, (share[peer] * bits + late_bits) / self._line_bps[peer])
                for peer, one in zip(working, pass_s, strict=True)
            )
            half_pass_s = tuple(sum(first_passes(self._members[peer], blocks)) / 2.0 for peer in group)
            shares = Shares(group, half_pass_s, tuple(share.get(peer, 0) for peer in group))
            slots = sum(self._members[peer].capacity for peer in working)
            self._stages[key] = _Stage(shares, busy_s, self._reduce_s(blocks, working, len(group)), slots)
        return self._stages[key]

    def _late_bits(self, blocks: int, group: Group, working: Group) -> float:
        """Bits of reduced gradient that each working replica sends to its stage's standbys after the commit;
        0 if only one replica works, whose sending is its reduce."""
        if len(working) < 2:
            return 0.0
        back = (1.0 - OF_SUMS) * self._sums_bytes(blocks) / len(working)
        return 8.0 * back * (len(group) - len(working))

    def _sums_bytes(self, blocks: int) -> float:
        return blocks * self._batch.block_bytes if blocks else self._batch.ends_bytes

    def _pass_s(self, peer: str, blocks: int) -> float:
        return pass_s(self._members[peer], blocks) if blocks else 0.0

    def _reduce_s(self, blocks: int, working: Group, everybody: int) -> float:
        """Seconds of a stage's gradient reduce among its working replicas. everybody: number of its replicas,
        standbys included. A replica that works alone needs no reduce: it sends its gradient to all
        standbys."""
        size_bytes = self._sums_bytes(blocks)
        if len(working) == 1 < everybody:
            (alone,) = working
            return 8.0 * (1.0 - OF_SUMS) * size_bytes * (everybody - 1) / self._line_bps[alone]
        peers = working if self._spares else [peer for peer in working if peer in self._thick]
        if self._program and len(peers) > 1:
            bits = 8.0 * OF_SUMS * size_bytes, 8.0 * (1.0 - OF_SUMS) * size_bytes
            return averaging_s([self._ways_bps[peer] for peer in peers], *bits)
        each = size_bytes / len(working)
        ways = [self._way(one, other) for one in peers for other in peers if one != other]
        if not ways:
            return 0.0
        line_s = max(8.0 * each * (len(working) - 1) / self._line_bps[peer] for peer in peers)
        even_s = max(2.0 * way.latency_s + max(8.0 * each / way.bandwidth_bps, line_s) for way in ways)
        if len(working) < everybody or not self._spread:
            return even_s
        relay_bps = (
            min(self._way(peer, other).bandwidth_bps for peer in peers if peer != other)
            for other in self._members
        )
        line_bps = [self._line_bps[peer] for peer in peers]
        latency_s = max(way.latency_s for way in ways)
        return min(even_s, spread_reduce_s(8.0 * size_bytes, latency_s, relay_bps, line_bps))

    def _link_s(self, one: str, other: str) -> float:
        size = self._batch.activation_bytes
        return (self._way(one, other).seconds(size) + self._way(other, one).seconds(size)) / 2.0


def cost_model_of(
    members: Sequence[Member], settings: Settings, ways: LinkMeasurements, spares: bool
) -> CostModel | None:
    """Cost model for the members of a run; None while no latency or no bandwidth between them is measured.
    ways: link measurements that members reported. spares: True if replicas may be standbys."""
    link = ways.between({member.id: member.region for member in members})
    if link is None:
        return None
    sized = [with_slots(member, settings) for member in members]
    cached: Callable[[str, str], LinkEstimate] = cache(link)
    how = settings.spread != "never", settings.spread == "program"
    return CostModel(sized, settings.counts, batch_of(settings), cached, spares, ways.rates, *how)


def _working(group: Group, spared: Collection[str]) -> Group:
    """Replicas of the stage `group` that are no standbys; all of them if all are standbys."""
    return tuple(peer for peer in group if peer not in spared) or group
