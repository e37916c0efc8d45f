"""Iteration times with one and with two iterations in flight (`iteration.delay`), by codec, fleet and churn.

    nice python -m benchmarks.simulation.delayed_steps [--seeds 6] [--iterations 16] [--kept]

Virtual time; both sides of a seed have the same machines, links and draws of crashes. Every seed of a row is
kept in build/ until it is deleted; `--kept` writes what there is. Writes the result `delayed-steps`.
"""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean
from typing import Any

import msgspec

from anabranch.net.wan.profile import find_profile
from anabranch.sim.experiment.run import simulate
from anabranch.sim.metrics.iteration_metrics import Estimate, estimate
from benchmarks import harness
from benchmarks.simulation.policies import CHURN, OURS, Cell, cell, common, text

FLEETS = ("wan10", "wan10-mixed")
CODECS = ("fp16", "int8")
FOLDER = harness.CACHE / "delayed-steps"
#: Largest iteration time without churn over the bound for iterations that overlap.
LIMIT = 1.15
#: Iterations that are not counted: the synchronous ones, and those in which the swarm settles.
WARM_UP = 4


class Job(msgspec.Struct, frozen=True):
    fleet: str
    codec: str
    crash: float
    delay: int
    seed: int
    iterations: int

    @property
    def name(self) -> str:
        return f"{self.fleet}-{self.codec}-{self.crash:g}-{self.delay}-{self.seed}-{self.iterations}"

    @property
    def cell(self) -> Cell:
        changes = common(self.crash, self.iterations)
        changes |= {"wire.activations": self.codec, "wire.gradients": self.codec}
        return cell(self.fleet, OURS, {**changes, "run.delay": self.delay, "fleet.deal": "links"})


class Kept(msgspec.Struct):
    """Means over the counted iterations, in virtual seconds. bound_s: infinite where a stage was lost.
    failure: reason why the run did not end, or ""."""

    job: Job
    iteration_s: float
    bound_s: float
    wasted_share: float
    busy_share: float
    rollbacks: int
    failure: str


def outcome(job: Job, run: bool) -> Kept | None:
    path = FOLDER / f"{job.name}.json"
    if path.is_file():
        kept = msgspec.json.decode(path.read_bytes(), type=Kept | None)
        return kept
    if not run:
        return None
    found = simulate(job.cell.load(), find_profile("wan10"), OURS, job.seed)
    rows = found.rows[WARM_UP:-1]  # with the last iteration no other one is in flight
    bounds = [row.bound_s for row in rows if math.isfinite(row.bound_s)]
    kept = Kept(
        job,
        fmean(row.seconds for row in rows),
        fmean(bounds) if bounds else -1.0,
        sum(row.wasted_s for row in rows) / sum(row.computed_s for row in rows),
        sum(row.busy_s for row in rows) / sum(row.alive_s for row in rows),
        found.rollbacks,
        found.failure,
    )
    harness.write_whole(path, msgspec.json.encode(kept))
    print(f"{job.name}: {kept.iteration_s:.2f} s, bound {kept.bound_s:.2f} s {kept.failure}", flush=True)
    return kept


def report(found: list[Kept], dry: bool) -> None:
    by_job = {kept.job: kept for kept in found if not kept.failure}
    rows, goals = [], []
    for fleet, codec, crash in product(FLEETS, CODECS, CHURN):
        pairs = [
            (by_job[other], kept)
            for job, kept in by_job.items()
            if (job.fleet, job.codec, job.crash, job.delay) == (fleet, codec, crash, 1)
            and (other := msgspec.structs.replace(job, delay=0)) in by_job
        ]
        if not pairs:
            continue

        def mean(side: int, key: str, pairs: list[Any] = pairs) -> Estimate:
            return estimate([getattr(pair[side], key) for pair in pairs])

        quotient = estimate([after.iteration_s / before.iteration_s for before, after in pairs])
        over = estimate([after.iteration_s / after.bound_s for _, after in pairs])
        before_over = estimate([before.iteration_s / after.bound_s for before, after in pairs])
        rows.append([
            fleet, codec, f"{100 * crash:.0f} %", text(mean(0, "iteration_s")), text(mean(1, "iteration_s")),
            text(quotient), *(f"{100 * mean(side, 'busy_share').mean:.0f} %" for side in (0, 1)),
            *(f"{100 * mean(side, 'wasted_share').mean:.1f} %" for side in (0, 1)),
            *((text(mean(1, "bound_s")), text(before_over), text(over)) if not crash else "–––"), len(pairs),
        ])  # fmt: skip
        if not crash:
            name = f"iteration over the bound for overlapping iterations, {fleet}, {codec}, no churn"
            goals.append(harness.at_most(name, LIMIT, over.mean, "{:.2f}", over.half))
    head = [
        "fleet", "cuts", "churn", "delay 0, s", "delay 1, s", "delay 1 over 0", "busy, 0", "busy, 1",
        "wasted, 0", "wasted, 1", "bound, s", "delay 0 over it", "delay 1 over it", "seeds",
    ]  # fmt: skip
    body = (
        "llama-350m, ten regions; iteration times in virtual seconds, mean ± half of the 95 % interval over "
        f"the seeds. The first {WARM_UP} iterations are not counted (the delay begins with the third), nor "
        "is the last one. Churn is per iteration: a relay crashes with this probability in each, also where "
        "they are shorter. The bound is that of iterations that overlap: the computing of the slowest stage, "
        "or what the lines of a stage's replicas must carry, whichever is more (it holds without churn)."
        f"\n\n{harness.table(head, rows)}"
    )
    failed = [kept for kept in found if kept.failure]
    if failed:
        body += f"\n\n{len(failed)} runs did not end: " + ", ".join(kept.job.name for kept in failed)
    jobs = [kept.job for kept in found]
    seeds, iterations = 1 + max(job.seed for job in jobs), jobs[0].iterations
    reproduce = f"python -m benchmarks.simulation.delayed_steps --seeds {seeds} --iterations {iterations}"
    harness.write("delayed-steps", "Two iterations in flight: iteration times", body, goals=goals,
                  data=found, dry=dry, reproduce=reproduce)  # fmt: skip


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--churn", type=float, nargs="+", default=list(CHURN))
    parser.add_argument("--kept", action="store_true", help="simulate nothing; write what there is")
    args = parser.parse_args()
    found = [
        kept
        for seed, crash, fleet, codec, delay in product(range(args.seeds), args.churn, FLEETS, CODECS, (0, 1))
        if (kept := outcome(Job(fleet, codec, crash, delay, seed, args.iterations), not args.kept))
    ]
    report(found, args.dry)


if __name__ == "__main__":
    main()
