"""Cost of audits: CPU seconds of a real local swarm without audits, with all that they need but none drawn,
and with all contributions audited; what they are spent on.

    python -m benchmarks.recovery.audit_cost [--shape small] [--windows 4]

The same run by five processes over TLS (one data node, two stages of two relays), strict and exact, one torch
thread each. The three runs go on at the same time, so that whatever else the machine does strikes all alike.
CPU seconds are user + system time of all processes. They count in windows of equal length, from
when all three are past their warm-up until one has ended.

The cost of a share is computed: that of hashes and signatures, which every contribution has, and the share of
what it costs to audit all. A run of a few dozen steps with a share of 0.05 would say little: it has two or
three audits, or none. One more run of each kind has clocks around hashes, signatures, receipts and
recomputation.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anabranch.config import RunConfig, config_from_dict
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Audit
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.overhead.swarm_over_single import commits, cpu_seconds
from benchmarks.recovery.audit_clocks import PARTS_FILE, run_clocked_peer

#: Shares of contributions that are audited: none; so few that none is drawn, though all are hashed and
#: signed; all.
NONE, SEALED, ALL = 0.0, 1e-12, 1.0
NAMES = {NONE: "no audits", SEALED: "hashes and signatures", ALL: "all audited"}
#: Share that the goal of issue 22 is for.
GOAL_SHARE, GOAL = 0.05, 0.06
#: Step after which CPU seconds count: until memory is taken (a choice), and audits have begun.
WARM_UP = 4
#: Steps of the runs with clocks.
CLOCKED_STEPS = 10
#: Quantiles of Student's t distribution for 95 % intervals, by the number of windows.
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}
#: tiny: no work but that of the protocol. small: microbatches of about 0.1 s. batch: the same model with
#: four times the tokens in each.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"dim": 64, "ffn": 128, "rows": 1, "sequence": 64, "steps": 44},
    "small": {"dim": 256, "ffn": 704, "rows": 2, "sequence": 128, "steps": 34},
    "batch": {"dim": 256, "ffn": 704, "rows": 4, "sequence": 256, "steps": 18},
}
TITLES = {
    "tiny": "Cost of audits with a tiny model",
    "small": "Cost of audits",
    "batch": "Cost of audits with a larger batch",
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
            "batch": {"microbatches": 8, "rows": shape["rows"], "sequence": shape["sequence"]},
            "pipeline": {"stages": 2},
            "fleet": {"data_nodes": 1, "relays_per_stage": [2, 2], "minimum": 2},
            "data": {"source": "text", "path": str(corpus), "tokenizer": "bytes"},
            "compute": {"device": "cpu", "threads": 1},
            "evaluation": {"every": 0},
            "checkpoint": {"every": 10 * steps},
            "audit": {"share": share},
        }
    )  # fmt: skip


# --- runs -----------------------------------------------------------------------------------------------


@dataclass
class Course:
    """Course of one run. samples: (time (s), CPU seconds of all processes so far) at each commit. audits:
    contributions computed again. parts: CPU seconds a step by part, and calls a step, if it had clocks."""

    share: float
    samples: list[tuple[float, float]]
    audits: int
    losses: list[float]
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def cpu_s(self, begin: float, end: float) -> float:
        """CPU seconds a step in this time; between two commits both are taken to grow evenly."""
        times, cpu = zip(*self.samples, strict=True)
        spent, steps = (np.diff(np.interp((begin, end), times, each)) for each in (cpu, range(len(cpu))))
        return float(spent[0] / steps[0])


def measure(job: tuple[RunConfig, Path, bool]) -> Course:
    """Take the run of a job (configuration, directory, with clocks or not)."""
    from anabranch.cli.support.create_directory import create
    from anabranch.node.local_swarm.local_swarm import LocalSwarm
    from anabranch.node.local_swarm.supervisor import Supervisor

    run, path, clocked = job
    steps, samples = run.run.steps, list[tuple[float, float]]()
    with Supervisor(run.compute.threads) as supervisor:
        supervisor.target = run_clocked_peer if clocked else run_peer
        directory = create(run, path)
        swarm = LocalSwarm(directory, run, supervisor)
        try:
            swarm.start()
            for t in commits(directory.events, lambda: swarm.leader.running):
                if WARM_UP <= t <= steps - 2:
                    pids = [process.pid for process in swarm.processes.values()]
                    spent_s = sum(cpu_seconds(Path(f"/proc/{pid}/stat")) for pid in pids)
                    samples.append((time.monotonic(), spent_s))
            swarm.check_leader()
        finally:
            swarm.end()
    losses = [step["loss"] for step in map(json.loads, directory.events.open()) if step["kind"] == "step"]
    course = Course(run.audit.share, samples, len(events_of(directory.events, Audit)), losses)
    for file in path.rglob(PARTS_FILE):
        read = json.loads(file.read_bytes())
        for part, seconds in read["seconds"].items():
            former = course.parts.get(part, (0.0, 0.0))
            course.parts[part] = former[0] + seconds / steps, former[1] + read["calls"][part] / steps
    return course


@dataclass
class Costs:
    """CPU seconds a step of the three runs in one window, by share."""

    cpu_s: dict[float, float]

    def of(self, share: float) -> float:
        """Cost of auditing `share` of all contributions, relative to no audits."""
        cpu = self.cpu_s
        return (cpu[SEALED] + share * (cpu[ALL] - cpu[SEALED])) / cpu[NONE] - 1


def costs_of(courses: Sequence[Course], windows: int) -> list[Costs]:
    """Costs in the windows of the time that the runs have in common."""
    begin = max(course.samples[0][0] for course in courses)
    length_s = (min(course.samples[-1][0] for course in courses) - begin) / windows
    spans = [(begin + k * length_s, begin + (k + 1) * length_s) for k in range(windows)]
    return [Costs({course.share: course.cpu_s(*span) for course in courses}) for span in spans]


# --- the report -----------------------------------------------------------------------------------------


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Mean of the windows, and half of its 95 % interval (0 for a single one)."""
    if len(values) < 2:
        return values[0], 0.0
    half = T_95.get(len(values), 2.0) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def report(
    costs: Sequence[Costs], courses: Sequence[Course], clocked: Sequence[Course], run: RunConfig
) -> tuple[str, list[Goal]]:
    """Markdown of the result, and its goals."""
    rows = []
    for course in courses:
        share = course.share
        seconds = [each.cpu_s[share] for each in costs]
        mean, half = mean_and_half([each.cpu_s[share] / each.cpu_s[NONE] - 1 for each in costs])
        more = f"{mean:+.1%} ± {half:.1%}" if share else ""
        rows.append([NAMES[share], *(f"{s:.3f}" for s in seconds), more, course.audits])
    mean, half = mean_and_half([each.of(GOAL_SHARE) for each in costs])
    base_s = statistics.mean(each.cpu_s[NONE] for each in costs)
    same = len({tuple(course.losses) for course in courses}) == 1
    sizes = f"dim {run.model.dim}, {run.batch.rows} x {run.batch.sequence} tokens"
    text = [
        f"Five processes over TLS on one machine: a data node and two stages of two relays. {sizes}, 8",
        f"microbatches, {run.run.steps} steps. The three runs go on at the same time. CPU seconds a step,",
        "of all processes, in windows of equal length; ±: half of the 95 % interval of the mean over them.",
        "Losses of all runs are equal to the last bit." if same else "**The runs have different losses.**",
        "",
        table(["", *(f"window {n + 1}" for n in range(len(costs))), "over no audits", "audits"], rows),
        "",
        f"A share of {GOAL_SHARE:g} costs what hashes and signatures cost, and {GOAL_SHARE:g} of the",
        f"difference between the last two rows: {mean:+.1%} ± {half:.1%}.",
        "",
        "Parts, from one more run of each kind with clocks (CPU seconds of threads, also of the first",
        "steps). Share of the CPU seconds of a step without audits:",
        "",
        table(["part", *(NAMES[each.share] for each in clocked)], parts_rows(clocked, base_s)),
    ]
    goal = harness.at_most(
        f"more CPU seconds with audit share {GOAL_SHARE:g} ({sizes})", GOAL, mean, "{:.1%}", half
    )
    return "\n".join(text), [goal]


def parts_rows(clocked: Sequence[Course], base_s: float) -> list[list[str]]:
    names = list(dict.fromkeys(part for each in clocked for part in each.parts))
    rows = []
    for part in names:
        found = [each.parts.get(part, (0.0, 0.0)) for each in clocked]
        rows.append([part, *(f"{seconds / base_s:.2%} ({calls:.1f} a step)" for seconds, calls in found)])
    return rows


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=0, help="steps of a run (0: those of the shape)")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "texts"
        write_corpus(corpus)

        def side_by_side(name: str, shares: Sequence[float], steps: int, clocked: bool) -> list[Course]:
            runs = [configuration(shape, share, steps, corpus) for share in shares]
            jobs = [(run, Path(folder) / f"{name}-{run.audit.share}", clocked) for run in runs]
            return list(harness.in_processes(measure, jobs, len(jobs), f"runs of {name}"))

        steps = arguments.steps or shape["steps"]
        courses = side_by_side("all", (NONE, SEALED, ALL), steps, clocked=False)
        clocked = side_by_side("clocks", (SEALED, ALL), CLOCKED_STEPS, clocked=True)
        costs = costs_of(courses, arguments.windows)
        body, goals = report(costs, courses, clocked, configuration(shape, NONE, steps, corpus))
    name = "audit-cost" if arguments.shape == "small" else f"audit-cost-{arguments.shape}"
    data = {"costs": costs, "runs": courses, "clocked": clocked}
    harness.write(name, TITLES[arguments.shape], body, goals=goals, data=data, dry=arguments.dry)


if __name__ == "__main__":
    main()
