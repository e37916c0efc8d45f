"""Times, bytes and verdicts of the comparison of presets, from curves and throughputs.

The seconds (or bytes) of a run are those of its synchronous beginning and of its rounds, by the optimizer
steps that each had. Where a run does not reach a loss, its whole time bounds the time to it from below: a
longer run has its learning rate high for longer, and is taken not to come there sooner.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from anabranch.sim.metrics.iteration_metrics import estimate
from benchmarks.harness import Goal, goal

Curve = list[tuple[int, float]]
"""(optimizer steps, held-out nats per token)."""
Tried = Mapping[float, Mapping[int, Curve]]
"""Learning rate -> seed -> curve."""
Found = dict[str, dict[float, dict[int, Curve]]]
"""Row -> learning rate -> seed -> curve."""


@dataclass(frozen=True)
class Pace:
    """Cost of the optimizer steps of a run, in seconds or bytes. start: steps of its synchronous beginning.
    first, after: cost of a step there, and later."""

    start: int
    first: float
    after: float

    def at(self, steps: float) -> float:
        """Cost of so many steps from the beginning of the run."""
        return self.first * min(steps, self.start) + self.after * max(0.0, steps - self.start)


@dataclass(frozen=True)
class Reached:
    """Cost of a run until it has a loss; if it never has, cost of the whole run, with `there` False."""

    cost: float
    there: bool


@dataclass(frozen=True)
class Ratio:
    """Bounds of a ratio, equal where it is known. high: infinite, and low: 0, where nothing bounds it."""

    low: float
    high: float


def best_rate(tried: Tried, seed: int) -> float:
    """Learning rate with the least loss at the end, on the seed with which rates are tuned."""
    return min((rate for rate in tried if seed in tried[rate]), key=lambda rate: tried[rate][seed][-1][1])


def next_rate(tried: Tried, seed: int, first: float) -> float | None:
    """Learning rate to try next: `first`, then half of and twice the best one, until both are worse; None
    then."""
    known = {rate for rate, curves in tried.items() if seed in curves}
    if not known:
        return first
    best = best_rate(tried, seed)
    return next((rate for rate in (best / 2, best * 2) if rate not in known), None)


def best_curves(tried: Tried | None, first: int) -> Mapping[int, Curve]:
    """Seed -> curve with the best rate; {} if rates were not tuned yet. first: seed with which they are."""
    if not tried or not any(first in curves for curves in tried.values()):
        return {}
    return tried[best_rate(tried, first)]


def steps_to(curve: Curve, loss: float) -> float | None:
    """Steps after which a curve has a loss, linear between its points; None if it never has."""
    if curve[0][1] <= loss:
        return float(curve[0][0])
    for (few, high), (many, low) in pairwise(curve):
        if low <= loss < high:
            return few + (many - few) * (high - loss) / (high - low)
    return None


def reached(runs: Sequence[tuple[Curve, Pace]], loss: float) -> Reached:
    """Cost until a loss of the run that has it first; if none has it, the whole cost of the shortest run."""
    found = [(steps_to(curve, loss), curve, pace) for curve, pace in runs]
    costs = [pace.at(steps) for steps, _, pace in found if steps is not None]
    if costs:
        return Reached(min(costs), True)
    return Reached(min(pace.at(curve[-1][0]) for _, curve, pace in found), False)


def ratio(mine: Reached, its: Reached) -> Ratio:
    """Bounds of the cost of one run over that of another."""
    over = mine.cost / its.cost
    return Ratio(over if its.there else 0.0, over if mine.there else math.inf)


def judged(ratios: Sequence[Ratio]) -> bool | None:
    """True if the ratio of the seeds is at most 1 with its interval, False if it is more; None if it may be
    either, and with one seed, which has no interval."""
    if len(ratios) < 2:
        return None
    high, low = [each.high for each in ratios], [each.low for each in ratios]
    if max(high) < math.inf:
        found = estimate(high)
        if found.mean + found.half <= 1.0:
            return True
    found = estimate(low)
    return False if found.mean - found.half > 1.0 else None


def ratio_text(ratios: Sequence[Ratio]) -> str:
    """Mean of the seeds with half of its interval, or the bound that is known."""
    if not ratios:
        return "not run"
    if all(each.low == each.high for each in ratios):
        found = estimate([each.low for each in ratios])
        return f"{found.mean:.3g} ± {found.half:.2g}" if len(ratios) > 1 else f"{found.mean:.3g} (one seed)"
    if max(each.high for each in ratios) < math.inf:
        return f"under {statistics.mean(each.high for each in ratios):.3g}"
    if max(each.low for each in ratios) > 0.0:
        return f"over {statistics.mean(each.low for each in ratios):.3g}"
    return "neither reached it"


def time_goal(name: str, rivals: Mapping[str, Sequence[Ratio]], missing: Sequence[str]) -> Goal:
    """Goal that no preset is quicker. rivals: preset -> time of ours over its, by seed. missing: presets that
    cannot be judged."""
    known = {row: ratios for row, ratios in rivals.items() if ratios}
    if not known:
        return goal(name, "at most 1", "not run", None)
    verdicts = [judged(ratios) for ratios in known.values()]
    held = False if False in verdicts else None if None in verdicts or missing else True
    # The preset that may be the quickest by its upper bound, then by its lower one.
    strongest = max(known, key=lambda row: [statistics.mean(each) for each in _sides(known[row])])
    value = f"{strongest}: {ratio_text(known[strongest])}"
    beaten = [row for row, ratios in known.items() if judged(ratios) is False]
    if beaten and strongest not in beaten:
        value += f"; {beaten[0]}: {ratio_text(known[beaten[0]])}"
    return goal(name, "at most 1", value + (f"; missing: {', '.join(missing)}" if missing else ""), held)


def _sides(ratios: Sequence[Ratio]) -> tuple[list[float], list[float]]:
    return [each.high for each in ratios], [each.low for each in ratios]


def loss_goal(name: str, ratios: Sequence[float]) -> Goal:
    """Goal of the loss over that of synchronous steps; open where its interval crosses the limit, and with
    one seed, which has none."""
    if len(ratios) < 2:
        return goal(name, "at most 1.02", f"{ratios[0]:.3f}" if ratios else "not run", None)
    found = estimate(ratios)
    held = True if found.mean + found.half <= 1.02 else False if found.mean - found.half > 1.02 else None
    return goal(name, "at most 1.02", f"{found.mean:.3f} ± {found.half:.3f}", held)
