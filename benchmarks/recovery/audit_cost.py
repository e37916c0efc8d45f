"""Cost of audits: CPU seconds of a real local swarm without audits, with all that they need but none drawn,
and with all contributions audited; what they are spent on.

    python -m benchmarks.recovery.audit_cost [--shape batch] [--sets 4] [--windows 5]

The same run by five processes over TLS (one data node, two stages of two relays), strict and exact, one torch
thread each. The three runs go on at the same time, so that whatever else the machine does strikes all alike.
CPU seconds are user + system time of all processes, as each notes when it takes a step. They count in windows
of equal length, from when all three are past their warm-up until one has ended. Several sets of three runs
follow each other; each is kept in build/audit-cost/, so a command goes on where an earlier one was stopped.

On a busy machine the same work takes another number of CPU seconds in each run and each window. So all runs
have clocks (thread time) around the forwards and backwards of microbatches, which all runs have as often, and
CPU seconds are divided by those: a run's cost is a multiple of its own passes. Runs have clocks around
hashes, signatures, receipts and recomputation, too.

Audits come later than their steps, and in a window there may be more or fewer of them than contributions. So
what the run that audits all spends beyond hashes and signatures is divided by the units that were computed
again in the window, and counts once for each unit of a step.

The cost of a share is computed: that of hashes and signatures, which every contribution has, and the share of
contributions that is drawn (`draw.chance`) of what it costs to audit all. A run of a few dozen steps with a
share of 0.05 would say little: it has two or three audits, or none.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from anabranch.config import RunConfig, config_from_dict
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Audit
from anabranch.protocol.audit.draw import chance
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.overhead.swarm_over_single import commits
from benchmarks.recovery.audit_clocks import AGAIN, PARTS_FILE, PASSES, PROCESS, run_clocked_peer

#: Shares of contributions that are audited: none; so few that none is drawn, though all are hashed and
#: signed; all.
NONE, SEALED, ALL = 0.0, 1e-12, 1.0
NAMES = {NONE: "no audits", SEALED: "hashes and signatures", ALL: "all audited"}
#: Share that the goal of issue 22 is for.
GOAL_SHARE, GOAL = 0.05, 0.06
MICROBATCHES, REPLICAS, STAGES = 8, 2, 2
#: Units of all relays in a step.
UNITS = MICROBATCHES * STAGES
#: Share of contributions that is drawn then.
DRAWN = chance(GOAL_SHARE, MICROBATCHES // REPLICAS)
#: Step after which CPU seconds count: until memory is taken (a choice), and audits have begun.
WARM_UP = 4
#: Quantiles of Student's t distribution for 95 % intervals, by the number of windows.
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36, 10: 2.26, 15: 2.14, 20: 2.09, 25: 2.06}
#: Clocks of what all runs do.
SPENT = (PASSES, PROCESS)
#: tiny: no work but that of the protocol. small: microbatches of about 0.1 s. batch: the same model with
#: four times the tokens in each: most of the time is that of its passes. wide: twice the width,
#: with which passes grow faster than what is hashed, as in the models that are worth a swarm.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"dim": 64, "ffn": 128, "rows": 1, "sequence": 64, "steps": 44},
    "small": {"dim": 256, "ffn": 704, "rows": 2, "sequence": 128, "steps": 34},
    "batch": {"dim": 256, "ffn": 704, "rows": 4, "sequence": 256, "steps": 18},
    "wide": {"dim": 512, "ffn": 1408, "rows": 4, "sequence": 256, "steps": 12},
}
TITLES = {
    "tiny": "Cost of audits with a tiny model",
    "small": "Cost of audits with a small batch",
    "batch": "Cost of audits",
    "wide": "Cost of audits with a wider model",
}


def write_corpus(folder: Path) -> None:
    """Write some text to train on; its words do not matter for the cost."""
    folder.mkdir()
    for number in range(40):
        lines = (f"line {line} of text {number}: the quick brown fox\n" for line in range(200))
        (folder / f"{number:02}.txt").write_text("".join(lines))


def configuration(shape: dict[str, int], share: float, steps: int, corpus: Path) -> RunConfig:
    heads = shape["dim"] // 32
    return config_from_dict(
        {
            "anabranch": {"version": 1},
            "run": {"name": "audit-cost", "steps": steps, "reduction": "exact", "numerics": "strict"},
            "model": {
                "size": "llama-tiny", "dim": shape["dim"], "ffn": shape["ffn"], "blocks": 4,
                "heads": heads, "kv_heads": heads // 2, "max_sequence": shape["sequence"],
            },
            "batch": {"microbatches": MICROBATCHES, "rows": shape["rows"], "sequence": shape["sequence"]},
            "pipeline": {"stages": STAGES},
            "fleet": {"data_nodes": 1, "relays_per_stage": [REPLICAS] * STAGES, "minimum": 2},
            "data": {"source": "text", "path": str(corpus), "tokenizer": "bytes"},
            "compute": {"device": "cpu", "threads": 1},
            "evaluation": {"every": 0},
            "checkpoint": {"every": 10 * steps},
            "audit": {"share": share},
        }
    )  # fmt: skip


KEPT = harness.CACHE / "audit-cost"


# --- runs -----------------------------------------------------------------------------------------------


@dataclass
class Course:
    """Course of one run. samples: time (s), CPU seconds of all processes and those in passes when each last
    took a step, and units computed again until then, at each commit. audits: contributions computed again.
    parts: CPU seconds a step by part, and calls a step."""

    share: float
    samples: list[tuple[float, float, float, float]]
    audits: int
    losses: list[float]
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def spent(self, begin: float, end: float) -> tuple[float, float, float]:
        """CPU seconds a step in this time, those in passes, and units computed again; between two commits
        all are taken to grow evenly."""
        times, *spent = zip(*self.samples, strict=True)
        ends = [np.interp((begin, end), times, each) for each in (*spent, range(len(times)))]
        cpu, passes, again, steps = (float(each[1] - each[0]) for each in ends)
        return cpu / steps, passes / steps, again / steps


def measure(job: tuple[RunConfig, Path]) -> Course:
    """Take the run of a job (configuration, directory)."""
    from anabranch.cli.support.create_directory import create
    from anabranch.node.local_swarm.local_swarm import LocalSwarm
    from anabranch.node.local_swarm.supervisor import Supervisor

    run, path = job
    steps, samples = run.run.steps, list[tuple[float, float, float, float]]()
    with Supervisor(run.compute.threads) as supervisor:
        supervisor.target = run_clocked_peer
        directory = create(run, path)
        swarm = LocalSwarm(directory, run, supervisor)
        try:
            swarm.start()
            for t in commits(directory.events, lambda: swarm.leader.running):
                if WARM_UP <= t <= steps - 2:
                    parts = parts_of(path)
                    again = parts.get(AGAIN, (0.0, 0.0))[1]
                    samples.append((time.monotonic(), parts[PROCESS][0], parts[PASSES][0], again))
            swarm.check_leader()
        finally:
            swarm.end()
    losses = [step["loss"] for step in map(json.loads, directory.events.open()) if step["kind"] == "step"]
    parts = {part: (seconds / steps, calls / steps) for part, (seconds, calls) in parts_of(path).items()}
    return Course(run.audit.share, samples, len(events_of(directory.events, Audit)), losses, parts)


def parts_of(path: Path) -> dict[str, tuple[float, float]]:
    """Seconds and calls of all processes of the run in this directory by part, as written last."""
    parts = {PASSES: (0.0, 0.0), PROCESS: (0.0, 0.0)}
    for file in path.rglob(PARTS_FILE):
        read = json.loads(file.read_bytes())
        for part, seconds in read["seconds"].items():
            former = parts.get(part, (0.0, 0.0))
            parts[part] = former[0] + seconds, former[1] + read["calls"][part]
    return parts


@dataclass
class Costs:
    """CPU seconds a step of the three runs in one window, by share, those in passes, and units computed
    again."""

    cpu_s: dict[float, float]
    passes_s: dict[float, float]
    again: dict[float, float]

    def over(self, share: float) -> float:
        """CPU seconds of a run as a multiple of its passes, relative to the run without audits."""
        both = [self.cpu_s[each] / self.passes_s[each] for each in (share, NONE)]
        return both[0] / both[1] - 1

    def of(self, share: float) -> float:
        """Cost of auditing `share` of all contributions, relative to no audits."""
        audits = (self.over(ALL) - self.over(SEALED)) * UNITS / self.again[ALL]
        return self.over(SEALED) + share * audits


def costs_of(courses: Sequence[Course], windows: int) -> list[Costs]:
    """Costs in the windows of the time that the runs have in common."""
    begin = max(course.samples[0][0] for course in courses)
    length_s = (min(course.samples[-1][0] for course in courses) - begin) / windows
    spans = [(begin + k * length_s, begin + (k + 1) * length_s) for k in range(windows)]
    found = []
    for span in spans:
        both = {course.share: course.spent(*span) for course in courses}
        found.append(Costs(*({share: each[k] for share, each in both.items()} for k in range(3))))
    return found


# --- the report -----------------------------------------------------------------------------------------


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Mean of the windows, and half of its 95 % interval (0 for a single one)."""
    if len(values) < 2:
        return values[0], 0.0
    half = T_95.get(len(values), 2.0) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def report(
    costs: Sequence[Costs], courses: Sequence[Course], run: RunConfig, sets: int
) -> tuple[str, list[Goal]]:
    """Markdown of the result, and its goals."""
    rows = []
    for course in courses:
        share = course.share
        mean, half = mean_and_half([each.over(share) for each in costs])
        more = f"{mean:+.1%} ± {half:.1%}" if share else ""
        multiple = statistics.mean(each.cpu_s[share] / each.passes_s[share] for each in costs)
        seconds = statistics.mean(each.cpu_s[share] for each in costs)
        rows.append([NAMES[share], f"{seconds:.3f}", f"{multiple:.3f}", more, course.audits])
    mean, half = mean_and_half([each.of(DRAWN) for each in costs])
    clocked = parts_sum(courses[1], costs) * (1 - DRAWN) + parts_sum(courses[2], costs) * DRAWN
    units = statistics.mean(each.again[ALL] for each in costs)
    same = len({tuple(course.losses) for course in courses}) == 1
    sizes = f"dim {run.model.dim}, {run.batch.rows} x {run.batch.sequence} tokens"
    text = [
        f"Five processes over TLS on one machine: a data node and two stages of two relays. {sizes}, 8",
        f"microbatches, {run.run.steps} steps. The three runs of a set go on at the same time. CPU seconds",
        f"a step, of all processes, in {len(costs)} windows of {sets} sets; ±: half of the 95 % interval of",
        "the mean over them.",
        "Losses of all runs are equal to the last bit." if same else "**The runs have different losses.**",
        "",
        table(["", "CPU seconds a step", "of passes", "over no audits", "audits"], rows),
        "",
        "*Of passes*: CPU seconds as a multiple of those in forwards and backwards of microbatches;",
        "*over no audits* compares these multiples.",
        f"A share of {GOAL_SHARE:g} draws {DRAWN:.4f} of contributions with {MICROBATCHES // REPLICAS}",
        "units. It costs what hashes and signatures cost, and that share of the difference of the last rows,",
        f"for {UNITS} units computed again a step (in the windows there were {units:.1f}):",
        f"{mean:+.1%} ± {half:.1%}. By the clocks below it is {clocked:.1%}.",
        "",
        "Parts (CPU seconds of threads, also of the first steps). Share of the CPU seconds of a step without",
        "audits, as multiples of passes:",
        "",
        table(["part", *(NAMES[each.share] for each in courses[1:])], parts_rows(courses, costs)),
    ]
    goal = harness.goal(
        f"more CPU seconds with audit share {GOAL_SHARE:g} ({sizes})",
        f"at most {GOAL:.1%}",
        f"{mean:.1%} ± {half:.1%}",
        True if mean + half <= GOAL else False if mean - half > GOAL else None,
    )
    return "\n".join(text), [goal]


def part_share(course: Course, part: str, costs: Sequence[Costs]) -> float:
    """CPU seconds of a part relative to those of a step without audits, both as multiples of passes."""
    base = statistics.mean(each.cpu_s[NONE] / each.passes_s[NONE] for each in costs)
    return course.parts.get(part, (0.0, 0.0))[0] / course.parts[PASSES][0] / base


def joined(sets: Sequence[Sequence[Course]]) -> list[Course]:
    """Courses of all sets as one set, by share: audits are added, parts are means; no samples."""
    found = []
    for of_share in zip(*sets, strict=True):
        names = dict.fromkeys(part for course in of_share for part in course.parts)
        parts = {}
        for part in names:
            both = [course.parts.get(part, (0.0, 0.0)) for course in of_share]
            seconds, calls = (statistics.mean(each) for each in zip(*both, strict=True))
            parts[part] = seconds, calls
        audits = sum(course.audits for course in of_share)
        losses = [loss for course in of_share for loss in course.losses]
        found.append(Course(of_share[0].share, [], audits, losses, parts))
    return found


def parts_sum(course: Course, costs: Sequence[Costs]) -> float:
    """The same of all parts of audits."""
    nested = "receipts"  # their signatures count by themselves
    parts = (part for part in course.parts if part not in SPENT and not part.startswith(nested))
    return sum(part_share(course, part, costs) for part in parts)


def parts_rows(courses: Sequence[Course], costs: Sequence[Costs]) -> list[list[str]]:
    names = list(dict.fromkeys(p for each in courses[1:] for p in each.parts if p != PROCESS))
    return [
        [
            part,
            *(
                f"{part_share(each, part, costs):.2%} ({each.parts.get(part, (0.0, 0.0))[1]:.1f} a step)"
                for each in courses[1:]
            ),
        ]
        for part in names
    ]


def one_set(name: str, number: int, steps: int) -> list[Course]:
    """Three runs at the same time, or what an earlier command kept of them."""
    path = KEPT / f"{name}-{steps}-{number}.json"
    if path.exists():
        return msgspec.json.decode(path.read_bytes(), type=list[Course])
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "texts"
        write_corpus(corpus)
        runs = [configuration(SHAPES[name], share, steps, corpus) for share in (NONE, SEALED, ALL)]
        jobs = [(run, Path(folder) / f"run-{run.audit.share}") for run in runs]
        courses = list(harness.in_processes(measure, jobs, len(jobs), f"runs of set {number + 1}"))
    harness.write_whole(path, msgspec.json.encode(courses))
    return courses


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="batch")
    parser.add_argument("--sets", type=int, default=4)
    parser.add_argument("--windows", type=int, default=5, help="of each set")
    parser.add_argument("--steps", type=int, default=0, help="steps of a run (0: those of the shape)")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    steps = arguments.steps or shape["steps"]
    sets = [one_set(arguments.shape, number, steps) for number in range(arguments.sets)]
    costs = [cost for courses in sets for cost in costs_of(courses, arguments.windows)]
    run = configuration(shape, NONE, steps, Path())
    body, goals = report(costs, joined(sets), run, len(sets))
    name = "audit-cost" if arguments.shape == "batch" else f"audit-cost-{arguments.shape}"
    data = {"costs": costs, "sets": sets}
    harness.write(name, TITLES[arguments.shape], body, goals=goals, data=data, dry=arguments.dry)


if __name__ == "__main__":
    main()
