"""Result of a verification: text for people, plain values for JSON (docs/reference/json-results.md)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from anabranch.audit.difference_counts import DifferenceCount
from anabranch.observe.wording import counted

#: Version of the JSON result.
RESULT_VERSION = 1

#: Guarantee of a run and this machine -> meaning. "bits" needs exact sums, and both one numerics class.
PROMISES = {
    "bits": "every bit is that of a single process",
    "bound": "every tensor is within its bound of a single process",
    "parity": "every unit is counted exactly once and replicas agree; distances are reported, not promised",
}
#: Kinds of values whose differing bits are not counted.
_WORDS = ("batches", "contributions", "inner steps", "digests", "fingerprints")
_NAMES = {"moments": "optimizer state"}


@dataclass(frozen=True)
class Distance:
    """Relative L2 distance of a tensor after iteration t, or of a series of the log's numbers up to it. of:
    its name. bound: greatest allowed distance; None if nothing is promised. usual: a yardstick, if there is
    one: the distance that rounding in the run's precision causes in the implementation that the run is
    compared with."""

    t: int
    of: str
    distance: float
    bound: float | None
    usual: float | None = None

    @property
    def holds(self) -> bool:
        return self.bound is None or (math.isfinite(self.distance) and self.distance <= self.bound)

    @property
    def strain(self) -> float:
        """Distance as a multiple of its bound (infinite if that is 0), or the distance itself if it is 0 or
        has no bound."""
        if self.bound is None or self.distance == 0.0:
            return self.distance
        return self.distance / self.bound if self.bound else float("inf")

    def as_dict(self) -> dict[str, Any]:
        """Distance as plain values, for JSON; None stands for infinity and NaN, which JSON lacks."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }

    def __str__(self) -> str:
        allowed = "" if self.bound is None else f" (allowed {self.bound:.1e})"
        usual = "" if self.usual is None else f" (by rounding alone {self.usual:.1e})"
        return f"{self.distance:.1e}{allowed}{usual}: {self.of} after step {self.t}"


@dataclass(frozen=True)
class Report:
    """Findings of `verify`. steps: iterations taken again, skipped ones included; skipped: number of those.
    microbatches: in each step. reduction, dtype: kind of gradient sums, and of numbers. rolled_back: commits
    made void by the `rollbacks`. removals: peers removed. classes, own_class: numerics classes of the owners
    and of this machine. promise: key of PROMISES. independent: distances to the independent implementation
    (None: not asked for). problems, notes: sentences on what is wrong, and on what was not checked. holds:
    True if nothing that was checked is wrong; `left_out` names what was not."""

    run_id: str
    steps: int
    skipped: int
    microbatches: int
    reduction: str
    dtype: str
    rollbacks: int
    rolled_back: int
    removals: int
    classes: Sequence[str]
    own_class: str
    promise: str
    counts: dict[str, DifferenceCount]
    """Kind of value -> its differences."""
    first: str
    """Place of the first difference of all; "": there is none."""
    distances: Sequence[Distance]
    permutations: int
    """Permutations of the order that were replayed to measure bounds."""
    independent: Sequence[Distance] | None
    problems: Sequence[str]
    notes: Sequence[str]
    policy: str
    """Text for the kind of steps: synchronous, delayed, or in rounds, with the rules of these."""
    left_out: Sequence[int] = ()
    """Iterations of a run on private data that could not be taken again, as a contribution is not here, or
    the data for which one was skipped."""
    holds: bool = field(init=False)

    def __post_init__(self) -> None:
        apart = [*self.distances, *(self.independent or ())]
        holds = not self.problems and not self.differ and all(distance.holds for distance in apart)
        object.__setattr__(self, "holds", holds)

    @property
    def differ(self) -> int:
        return sum(count.differ for count in self.counts.values())

    @property
    def bits(self) -> int:
        return sum(count.bits for count in self.counts.values())

    def as_dict(self) -> dict[str, Any]:
        """All findings as plain values for JSON (docs/reference/json-results.md)."""
        compared = {
            kind: {"values": c.compared, "differ": c.differ, "bits": c.bits, "first": c.first}
            for kind, c in self.counts.items()
        }
        others = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "counts"}
        return {
            "version": RESULT_VERSION,
            **others,
            "compared": compared,
            "distances": [distance.as_dict() for distance in self.distances],
            "independent": self.independent and [distance.as_dict() for distance in self.independent],
        }

    def lines(self) -> list[str]:
        """Lines of text for people; the last one is the verdict."""
        classes = ", ".join(self.classes) or "none"
        mine = "this machine's" if classes == self.own_class else f"this machine is {self.own_class}"
        lines = [
            f"{self.reduction} sums in {self.dtype}; numerics class {classes} ({mine})",
            f"promised: {PROMISES[self.promise]}",
            f"replayed: {self.policy}",
            f"{'':16}{'compared':>14}{'differ':>10}{'bits':>10}",
        ]
        for kind, count in self.counts.items():
            if count.compared:
                name, bits = _NAMES.get(kind, kind), "" if kind in _WORDS else f"{count.bits:>10,}"
                lines.append(f"{name:16}{count.compared:>14,}{count.differ:>10,}{bits}")
        lines += _distance_lines("relative distance to a single process", self.distances)
        if self.permutations:
            orders = counted(self.permutations, "permutation")
            lines.append(f"bounds: twice the largest distance over {orders} of the order")
        lines += _distance_lines(
            "relative distance to the independent implementation", self.independent or ()
        )
        if any(distance.usual is not None for distance in self.independent or ()):
            lines.append(
                f"rounding alone: the independent implementation in {self.dtype} beside itself in fp64. A "
                "run at about its distance computed the same; a wrong formula is orders of magnitude beyond"
            )
        lines += [f"problem: {problem}" for problem in shortened(self.problems)]
        lines += [f"note: {note}" for note in self.notes]
        return [*lines, self.verdict()]

    def verdict(self) -> str:
        """Line of text: numbers of steps, peers removed and rollbacks, and what differs or holds."""
        counts = [f"{counted(self.steps, 'step')}", f"{counted(self.microbatches, 'microbatch', 'es')} each"]
        if self.skipped:
            counts.append(f"{self.skipped} skipped")
        counts += [f"{counted(self.removals, 'peer')} removed", counted(self.rollbacks, "rollback")]
        return f"verify: {', '.join(counts)}: {self._outcome()}"

    def _outcome(self) -> str:
        failures = []
        if self.differ:
            failures.append(
                f"{counted(self.differ, 'value')} {'differs' if self.differ == 1 else 'differ'} "
                f"in {counted(self.bits, 'bit')}, first at {self.first}"
            )
        for name, distances in (("", self.distances), ("independent ", self.independent or ())):
            beyond = [distance for distance in distances if not distance.holds]
            if beyond:
                worst = max(beyond, key=lambda distance: distance.strain)
                failures.append(f"{counted(len(beyond), name + 'distance')} beyond the bound, worst {worst}")
        if self.problems:
            failures.append(counted(len(self.problems), "problem"))
        if failures:
            return "; ".join(failures)
        if self.left_out:
            count = counted(len(self.left_out), "iteration")
            return f"nothing differs in what was checked; {count} could not be checked, see the notes"
        if self.promise == "bits":
            return "zero bits differ"
        worst_kept = max(self.distances, key=lambda distance: distance.strain, default=None)
        if self.promise == "bound":
            return f"within bounds, worst {worst_kept}" if worst_kept else "within bounds"
        largest = f"; largest distance {worst_kept}" if worst_kept else ""
        return f"every unit counted once, replicas in parity{largest} (reported, not promised)"


def _distance_lines(title: str, distances: Sequence[Distance]) -> list[str]:
    """Lines of text: a title, and of each kind (weights, moments, each series) the distance of the greatest
    `strain`. One line if all distances are 0, none without distances."""
    if not distances:
        return []
    if all(distance.distance == 0.0 for distance in distances):
        return [f"{title}: 0 for all {len(distances)} tensors"]
    worst: dict[str, Distance] = {}
    for distance in distances:
        kind = distance.of.split("/")[0]
        if kind not in worst or distance.strain > worst[kind].strain:
            worst[kind] = distance
    return [f"{title}, worst of each kind:", *(f"  {distance}" for distance in worst.values())]


def shortened(problems: Sequence[str], most: int = 5) -> list[str]:
    """First `most` of the sentences; if there are more, followed by one with the number of those left out."""
    more = len(problems) - most
    return [*problems[:most], *([f"... and {more} more"] if more > 0 else [])]
