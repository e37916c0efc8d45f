"""Fault trials of `anabranch simtest` by the thousand, all profiles in turn, and their outcomes.

    nice python -m benchmarks.recovery.fault_seeds --seeds 0:20000 --minutes 60
    python -m benchmarks.recovery.fault_seeds --report

Each chunk of seeds is kept in build/seeds/ with the commit that ran it, so a run that was stopped goes on
where it was. With `--minutes` no chunk starts after so long. `--report` runs nothing and writes the result
`seeds` from all that is kept.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median, quantiles

import msgspec

from anabranch.sim.fuzz.fault_kinds import OTHERS, PROFILES, matrix_cells
from anabranch.sim.fuzz.peer_phases import PHASES, ROUND_PHASES
from anabranch.sim.fuzz.runner import run_seed
from anabranch.sim.fuzz.summary import Cell, FuzzSummary, report, summarize
from anabranch.sim.metrics.trial_result import Outcome
from benchmarks import harness
from benchmarks.harness import Goal, table

KEPT = harness.CACHE / "seeds"
#: Seeds of a chunk: as many of each profile, but for `rounds`, which has a third.
CHUNK = 3 * len(OTHERS) * 5
#: Goals of 20,000 seeds: deliveries in every reachable cell, and seconds of a core a seed.
ASKED_SEEDS, ASKED_IN_CELL, ASKED_SEED_S = 20_000, 100, 0.25
#: Cells that are named in the report, from the thinnest on.
THINNEST = 8


class Chunk(msgspec.Struct):
    """Outcomes of seeds, in order, and the program's commit."""

    commit: str
    outcomes: list[Outcome]


def run_chunk(first: int, end: int, into: Path, commit: str) -> None:
    path = into / f"{first:06}-{end:06}.json"
    if path.exists():
        return
    outcomes = []
    for seed in range(first, end):
        outcome = run_seed(seed)
        outcomes.append(outcome)
        if outcome.failed:
            print(f"seed {seed} {outcome.profile}: {outcome.violation}", flush=True)
    harness.write_whole(path, msgspec.json.encode(Chunk(commit, outcomes)))
    cpu_s = [outcome.cpu_s for outcome in outcomes]
    print(f"{path.stem} {commit}: median {median(cpu_s):.3f} s, sum {sum(cpu_s):.0f} s", flush=True)


def kept(into: Path) -> list[Chunk]:
    return [msgspec.json.decode(path.read_bytes(), type=Chunk) for path in sorted(into.glob("*.json"))]


def report_of(chunks: Iterable[Chunk]) -> tuple[str, list[Goal]]:
    """Markdown of the result, and its goals."""
    commits = Counter[str]()
    outcomes: list[Outcome] = []
    for chunk in chunks:
        commits[chunk.commit] += len(chunk.outcomes)
        outcomes += chunk.outcomes
    seeds = [outcome.seed for outcome in outcomes]
    cpu_s = [outcome.cpu_s for outcome in outcomes]
    found = summarize(outcomes, min(seeds), max(seeds) + 1, "", sum(cpu_s))
    ran = ", ".join(f"`{commit}` {count:,}" for commit, count in commits.items())
    of_steps, of_rounds = (
        ASKED_SEEDS * min(count for count, _, phase in _cells(found) if phase in phases) // found.seeds
        for phases in (PHASES, ROUND_PHASES)
    )
    in_each = f"of {ASKED_SEEDS:,} seeds: deliveries in each cell of a"
    goals = [
        harness.goal(
            "seeds that violate an invariant",
            "0",
            f"{len(found.failures)} of {found.seeds:,}",
            not found.failures,
        ),
        harness.at_least(f"{in_each} step", ASKED_IN_CELL, of_steps),
        harness.at_least(f"{in_each} round", ASKED_IN_CELL, of_rounds),
        harness.at_most("seconds of one core a seed, median", ASKED_SEED_S, median(cpu_s), "{:.2f} s"),
    ]
    text = [
        f"{found.seeds:,} of the seeds {found.first}:{found.end}, by commit of the program: {ran}.",
        f"Seconds of one core that a seed takes: mean {sum(cpu_s) / len(cpu_s):.2f},",
        f"95 % at most {quantiles(cpu_s, n=20)[-1]:.2f}.",
        *_thinnest(found),
    ]
    head = ["profile", "seeds", "steps", "faults", "median s", "not promised", "failed"]
    rows = [_of_profile(name, [o for o in outcomes if o.profile == name]) for name in PROFILES]
    matrix = f"```text\n{report(found)}\n```"
    return "\n\n".join([" ".join(text), table(head, rows), matrix]), goals


def _of_profile(name: str, outcomes: list[Outcome]) -> list[object]:
    steps, faults = sum(o.steps for o in outcomes), sum(len(o.faults) for o in outcomes)
    seconds = f"{median([o.cpu_s for o in outcomes] or [0.0]):.2f}"
    unmet, failed = sum(bool(o.unmet) for o in outcomes), sum(o.failed for o in outcomes)
    return [name, len(outcomes), steps, faults, seconds, unmet, failed]


def _cells(found: FuzzSummary) -> list[tuple[int, str, str]]:
    """Deliveries, fault kind and phase of every reachable cell, the rarest first."""
    return sorted(
        (found.matrix[phase].get(kind, Cell()).delivered, kind, phase) for kind, phase in matrix_cells()
    )


def _thinnest(found: FuzzSummary) -> list[str]:
    """Sentences on the rarest cells of the matrix."""
    counts = _cells(found)
    times = ASKED_SEEDS / found.seeds
    named = ", ".join(f"{kind} in {phase} {count}" for count, kind, phase in counts[:THINNEST])
    short = sum(count * times < ASKED_IN_CELL for count, _, _ in counts)
    return [
        f"Thinnest of the {len(counts)} cells: {named}.",
        f"At that rate {ASKED_SEEDS:,} seeds bring at least {counts[0][0] * times:.0f} deliveries to each; "
        f"{short} cells fall short of {ASKED_IN_CELL}.",
    ]


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", default=f"0:{ASKED_SEEDS}", metavar="A:B")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--into", type=Path, default=KEPT, help="where chunks are kept")
    parser.add_argument("--report", action="store_true", help="run nothing, write the result")
    args = parser.parse_args()
    if args.report:
        body, goals = report_of(kept(args.into))
        reproduce = f"python -m {harness.module()}"
        title = "Seeds of the fault simulation"
        harness.write("seeds", title, body, goals=goals, reproduce=reproduce, dry=args.dry)
        return 0
    args.into.mkdir(parents=True, exist_ok=True)
    first, last = map(int, args.seeds.split(":"))
    until, commit = time.monotonic() + 60.0 * args.minutes, harness.program()
    for begin in range(first, last, CHUNK):
        if time.monotonic() > until:
            break
        run_chunk(begin, min(begin + CHUNK, last), args.into, commit)
    print(report_of(kept(args.into))[0])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
