"""Monitor of the contributions to a stage's gradient: owners whose norm or direction is far off the others'.

An owner's contribution is the sum over its units, so owners of one stage and step are comparable: each unit
is a draw from the same batch. The monitor compares owners of the same step only, and learns from step to step
how much honest owners differ; a spike of the loss moves all of them alike. Its rule is statistical: it says
whose work is audited although the draw spared it (`FarOff`), never who lies.

Each part of a gradient is summed by another peer, who reports the moments of all contributions to it. An
owner is far off by the word of more than half of these peers, so a liar among them frames nobody, and hides
nobody. Half of them or more can hide a liar, and more than half can have an honest owner audited.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

#: Fewest owners that can be compared: of two, nobody can tell which one is off.
LEAST_OWNERS = 3
#: Deviations from the others at which an owner's norm is far off, and the least difference of log norms that
#: is (a factor of four). Plain choices: honest norms of single microbatches have heavy tails.
NORM_DEVIATIONS, NORM_FLOOR = 8.0, math.log(4.0)
#: Sequential test of ranks (Page 1954): share of steps in which a liar is the lowest owner under the
#: alternative, and log-likelihood ratio at which its contribution is far off. An honest owner of n is the
#: lowest in one step of n, whatever the distribution of gradients. So the mean number of steps until it is
#: found far off wrongly is at least exp(THRESHOLD), 1.2 million (Lorden 1971).
LIAR_IS_LOWEST, THRESHOLD = 0.5, 14.0
#: Most that a log-likelihood ratio rises above the threshold, so that a peer that mends is soon believed
#: again. Plain choice.
ABOVE = 3.0
#: Share of the running variance that is forgotten with each value: the last 200 or so count. Plain choice.
FORGET = 0.005
#: Number of values that the prior deviations count for. Plain choice: about three steps of six owners.
PRIOR_VALUES = 16.0
#: Prior deviation of log norms. Plain choice, wider than what was measured (0.1 to 0.4).
PRIOR_NORM = 0.4
#: Values beyond so many deviations count as so many in the running variance, so that a liar that is not
#: caught widens it little. A choice.
WINSOR = 3.0
#: Steps for which a peer is not found far off again. A choice: if all were wrongly found far off all the
#: time, a tenth of the contributions would be audited for it.
REST_STEPS = 10


@dataclass(frozen=True)
class Contribution:
    """Moments of one owner's contribution, by peer that summed a part and reports them: sum of squares, and
    inner product with the sum of all contributions. units: number of its units. by: these peers, the same for
    all owners of a step."""

    units: int
    squares: tuple[float, ...]
    dots: tuple[float, ...]
    by: tuple[str, ...]


class Deviation:
    """Running standard deviation of values with mean zero, weighted exponentially. It begins at `prior`, and
    never exceeds that: else one owner of fewer than WINSOR² that lies more and more could widen it at
    will."""

    def __init__(self, prior: float) -> None:
        self._weight, self._sum, self._most = PRIOR_VALUES, PRIOR_VALUES * prior * prior, prior

    @property
    def value(self) -> float:
        return min(self._most, math.sqrt(self._sum / self._weight))

    def learn(self, values: Sequence[float]) -> None:
        """Add values; a value beyond WINSOR deviations counts as so many."""
        most = WINSOR * self.value
        for value in values:
            self._weight = self._weight * (1.0 - FORGET) + 1.0
            self._sum = self._sum * (1.0 - FORGET) + min(abs(value), most) ** 2


@dataclass
class ContributionMonitor:
    """Monitor of one stage. `judge` is called once for each step.

    norms: running deviation of honest log norms. against: (owner, peer that summed a part) -> log-likelihood
    ratio that the owner's direction in the parts of that peer is the lowest of all owners too often.
    """

    norms: Deviation = field(default_factory=lambda: Deviation(PRIOR_NORM))
    against: dict[tuple[str, str], float] = field(default_factory=dict)

    def judge(self, contributions: Mapping[str, Contribution]) -> dict[str, str]:
        """Owners whose contribution to one step is far off -> reason: first those by their norm, the farthest
        first, then those by their direction. Learns from the others. Empty for fewer than LEAST_OWNERS
        owners."""
        if len(contributions) < LEAST_OWNERS:
            return {}
        norms = residuals(log_norms(contributions))
        most = max(NORM_FLOOR, NORM_DEVIATIONS * self.norms.value)
        far: dict[str, str] = {}
        for peer, residual in sorted(norms.items(), key=lambda each: -abs(each[1])):
            if not abs(residual) <= most:
                far[peer] = _of_norm(residual)
        if not far:  # otherwise the sum that all are compared with is off
            self._rank(contributions)
        for peer, each in contributions.items():
            if 2 * sum(self.against.get((peer, by), 0.0) > THRESHOLD for by in each.by) > len(each.by):
                far.setdefault(peer, "its direction is against the others'")
        self.norms.learn([norms[peer] for peer in contributions if peer not in far])
        return far

    def forget(self, peer: str, reports: bool = False) -> None:
        """Forget how often a peer's direction was the lowest. reports: True to forget its reports about
        others, too."""
        self.against = {
            (owner, by): ratio
            for (owner, by), ratio in self.against.items()
            if owner != peer and not (reports and by == peer)
        }

    def _rank(self, contributions: Mapping[str, Contribution]) -> None:
        """Update the ratios (`against`) by which owner has the lowest direction in this step, for each peer
        that reports moments. Only owners with equally many units are compared: others are not
        exchangeable."""
        alike: dict[int, dict[str, Contribution]] = {}
        for peer, each in contributions.items():
            alike.setdefault(each.units, {})[peer] = each
        for group in alike.values():
            if len(group) >= LEAST_OWNERS:
                self._rank_alike(group)

    def _rank_alike(self, group: Mapping[str, Contribution]) -> None:
        chance = 1.0 / len(group)
        share = max(LIAR_IS_LOWEST, 2.0 * chance)
        hit, miss = math.log(share / chance), math.log((1.0 - share) / (1.0 - chance))
        for part, by in enumerate(next(iter(group.values())).by):
            # Inner product of each owner's contribution with the sum of all others'.
            values = {peer: each.dots[part] - each.squares[part] for peer, each in group.items()}
            lowest = min(values.values())
            if list(values.values()).count(lowest) != 1:
                continue  # no owner stands out
            for peer, value in values.items():
                ratio = self.against.get((peer, by), 0.0) + (hit if value == lowest else miss)
                self.against[peer, by] = min(max(0.0, ratio), THRESHOLD + ABOVE)


class FarOff:
    """Choice of contributions that are audited since they are far off, at most one of each stage and step:
    the monitors of all stages, and the peers that were chosen lately. Kept by the leader alone: a new one
    begins anew, and so does one whose log went back."""

    def __init__(self) -> None:
        self._monitors: dict[int, ContributionMonitor] = {}
        self._rests: dict[str, int] = {}
        """Peer that was chosen -> first step in which it can be chosen again."""

    def choose(self, t: int, stage: int, contributions: Mapping[str, Contribution]) -> tuple[str, str]:
        """Owner whose contribution to step t is farthest off, and the reason; ("", "") if there is none that
        was not chosen in the last REST_STEPS. To be called once for each step and stage."""
        monitor = self._monitors.setdefault(stage, ContributionMonitor())
        for peer, reason in monitor.judge(contributions).items():
            if self._rests.get(peer, 0) <= t:
                self._rests[peer] = t + REST_STEPS
                monitor.forget(peer)
                return peer, reason
        return "", ""

    def removed(self, peer: str) -> None:
        """Forget a peer that left its stage."""
        self._rests.pop(peer, None)
        for monitor in self._monitors.values():
            monitor.forget(peer, reports=True)


def log_norms(contributions: Mapping[str, Contribution]) -> dict[str, tuple[list[float], ...]]:
    """Logarithm of each owner's norm less what its number of units explains: owner -> two lists, each by
    part.

    The norm of a sum over n units is between √n times that of one (noise) and n times (signal): the first
    list takes √n away, the second n.
    """
    found: dict[str, tuple[list[float], ...]] = {}
    for peer, each in contributions.items():
        logs = [0.5 * math.log(square) if 0.0 < square < math.inf else math.copysign(math.inf, square - 1.0)
                for square in each.squares]  # fmt: skip
        count = math.log(each.units)
        found[peer] = ([log - 0.5 * count for log in logs], [log - count for log in logs])
    return found


def residuals(values: Mapping[str, tuple[list[float], ...]]) -> dict[str, float]:
    """Owner -> its difference from the median owner. values: owner -> lists by part. Over the parts of a list
    the difference nearest to 0 counts that more than half of the parts reach, so that a minority of false
    reports decides nothing; over several lists the one nearest to 0, or 0 if they differ in sign."""
    lists, parts = len(next(iter(values.values()))), len(next(iter(values.values()))[0])
    found: dict[str, list[float]] = {peer: [] for peer in values}
    for which in range(lists):
        medians = [median(of_peer[which][part] for of_peer in values.values()) for part in range(parts)]
        for peer, of_peer in values.items():
            differences = sorted(
                _difference(value, middle) for value, middle in zip(of_peer[which], medians, strict=True)
            )
            low, high = differences[(parts - 1) // 2], differences[parts // 2]
            found[peer].append(low if low > 0.0 else min(high, 0.0))
    return {
        peer: 0.0 if min(some) < 0.0 < max(some) else min(some, key=abs) for peer, some in found.items()
    }


def _of_norm(residual: float) -> str:
    """Words for a norm that is far off, from its logarithm less that of the others'."""
    if math.isinf(residual):
        return "its norm is zero" if residual < 0.0 else "its norm is without bounds"
    factor = math.exp(min(max(residual, -700.0), 700.0))
    return f"its norm is {factor:.3g} times that of the others"


def _difference(value: float, middle: float) -> float:
    """value - middle; 0 if both are the same infinity, +inf if the difference is not a number."""
    if value == middle:
        return 0.0
    difference = value - middle
    return math.inf if math.isnan(difference) else difference

