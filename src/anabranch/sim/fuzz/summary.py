"""Summary of many seeds of `simtest`: faults by kind and phase, their cost, and failures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from anabranch.observe.wording import table
from anabranch.sim.fuzz.fault_kinds import CARRIER_KINDS, KINDS, matrix_cells
from anabranch.sim.fuzz.guest_deeds import DEEDS
from anabranch.sim.fuzz.peer_phases import PHASES, ROUND_PHASES
from anabranch.sim.metrics.trial_result import Outcome

VERSION = 1
#: All kinds of faults, in the order of the table.
_KINDS = (*KINDS, *CARRIER_KINDS, *DEEDS)


class Cell(msgspec.Struct):
    """Counts of one (phase, kind of fault) pair over all seeds. delivered: injected faults. repaired,
    wasted_s: microbatches that were sent again, and virtual seconds of compute that were wasted, from each of
    these faults until the next fault of its seed."""

    delivered: int = 0
    repaired: int = 0
    wasted_s: float = 0.0


class Failure(msgspec.Struct):
    """Seed that failed. invariant: code of what was violated (I7 for an unexpected error). text: how.
    reproduce: command that runs the seed again and prints its story."""

    seed: int
    profile: str
    invariant: str
    text: str
    reproduce: str


class FuzzSummary(msgspec.Struct):
    """Result of `anabranch simtest --json` over seeds `first` to `end` - 1. docs/reference/json-results.md
    describes the fields."""

    first: int
    end: int
    profile: str
    version: int = VERSION
    seeds: int = 0
    seeds_by_profile: dict[str, int] = {}
    with_tensors: int = 0
    steps: int = 0
    events: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    seeds_per_s: float = 0.0
    median_seed_s: float = 0.0
    faults: dict[str, int] = {}
    matrix: dict[str, dict[str, Cell]] = {}
    thinnest_cell: int = 0
    computed_s: float = 0.0
    wasted_s: float = 0.0
    violations: dict[str, int] = {}
    failures: list[Failure] = []
    not_promised: dict[str, int] = {}

    @property
    def failed(self) -> bool:
        return bool(self.failures)


def summarize(outcomes: Iterable[Outcome], first: int, end: int, profile: str, wall_s: float) -> FuzzSummary:
    """Summary of the outcomes of seeds `first` to `end` - 1, in whatever order they come. profile: name given
    by the user ("": none). wall_s: real seconds that all seeds took together."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.seed)
    found = FuzzSummary(first, end, profile, seeds=len(ordered), wall_s=wall_s)
    found.seeds_by_profile = dict(Counter(outcome.profile for outcome in ordered))
    found.seeds_per_s = len(ordered) / wall_s if wall_s else 0.0
    found.median_seed_s = statistics.median(o.cpu_s for o in ordered) if ordered else 0.0
    found.matrix = {phase: {} for phase in (*PHASES, *ROUND_PHASES)}
    faults: Counter[str] = Counter()
    not_promised: Counter[str] = Counter()
    found.steps = sum(outcome.steps for outcome in ordered)
    found.events = sum(outcome.events for outcome in ordered)
    found.virtual_s = sum(outcome.virtual_s for outcome in ordered)
    found.computed_s = sum(outcome.computed_s for outcome in ordered)
    found.wasted_s = sum(outcome.wasted_s for outcome in ordered)
    for outcome in ordered:
        not_promised.update(condition.split(":")[0] for condition in outcome.unmet)
        for fault in outcome.faults:
            faults[fault.kind] += 1
            cell = found.matrix[fault.phase].setdefault(fault.kind, Cell())
            cell.delivered += 1
            cell.repaired += fault.repaired
            cell.wasted_s += fault.wasted_s
    found.with_tensors = sum(outcome.torch for outcome in ordered)
    found.failures = [
        Failure(o.seed, o.profile, o.invariant, o.violation, reproduce(o)) for o in ordered if o.failed
    ]
    found.faults = {kind: faults[kind] for kind in _KINDS if faults[kind]}
    found.violations = dict(Counter(failure.invariant for failure in found.failures))
    found.not_promised = dict(sorted(not_promised.items()))
    found.thinnest_cell = min(
        (found.matrix[phase].get(kind, Cell()).delivered for kind, phase in matrix_cells()), default=0
    )
    return found


def reproduce(outcome: Outcome) -> str:
    """Command that runs one seed again and prints its story."""
    return f"anabranch simtest --trace {outcome.seed} --profile {outcome.profile}"


def report(found: FuzzSummary) -> str:
    """Summary as text: a table of faults, totals, and a line for each failure."""
    lines = [_table(found, PHASES), ""]
    if any(found.matrix[phase] for phase in ROUND_PHASES):
        lines += [_table(found, ROUND_PHASES), ""]
    share = found.wasted_s / found.computed_s if found.computed_s else 0.0
    lines += [
        f"{found.seeds} seeds ({found.with_tensors} with tensors), {found.steps} steps committed, "
        f"{sum(found.faults.values())} faults delivered; {100 * share:.1f} % of the compute was wasted",
        f"{found.seeds_per_s:.1f} seeds per second; median {found.median_seed_s:.2f} s of a core a seed",
    ]
    for condition, count in found.not_promised.items():
        lines.append(f"{count} seed{'' if count == 1 else 's'} could not go on, for want of {condition}")
    for failure in found.failures:
        lines.append(f"FAILED seed {failure.seed} ({failure.profile}) {failure.text} | {failure.reproduce}")
    count = len(found.failures)
    failed = f"{count} seed{'' if count == 1 else 's'} failed"
    lines.append(failed if found.failures else "no invariant was violated")
    return "\n".join(lines)


def _table(found: FuzzSummary, phases: Sequence[str]) -> str:
    """Table, as text, of the faults that hit peers in these phases: a row for each kind, a column for each
    phase; "-" where the pair cannot occur."""
    reached = matrix_cells()
    kinds = [kind for kind in _KINDS if any(kind in found.matrix[phase] for phase in phases)]
    rows = [["delivered", *phases, "repaired", "wasted"]]
    for kind in kinds:
        cells = [found.matrix[phase].get(kind, Cell()) for phase in phases]
        counts = [
            str(cell.delivered) if cell.delivered or (kind, phase) in reached else "-"
            for cell, phase in zip(cells, phases, strict=True)
        ]
        repaired, wasted_s = sum(cell.repaired for cell in cells), sum(cell.wasted_s for cell in cells)
        rows.append([kind, *counts, str(repaired), f"{wasted_s:.1f} s"])
    return "\n".join(table(rows, right=True))
