"""Time to a loss of eight real processes behind home lines, beside one process alone and synchronous steps.

    python -m benchmarks.overhead.home_lines --verify [--models llama-tiny] [--arms synchronous]

Needs Linux, root, /dev/net/tun and control groups (version 1). Eight processes hold the whole model; a ninth
leads and has the corpus. Each has a fifth of a core (`core_shares`), a line of 20 Mbit/s up and down, and the
latencies of one of the ten regions. Three ways to train: synchronous steps of all, rounds with an estimated
first moment, rounds with agreed moments. Beside them `anabranch train --alone`: its CPU seconds, divided by
the same share, are the time that one such machine would take; it has nobody to send to.

Every run ends with its learning rate near zero and has its own batch and rate. Time counts from the opening
of the first step to the commit of the last. No run evaluates meanwhile: the loss is that of the last
checkpoint on the same held-out rows. How much faster a fleet is follows from the time that the machine alone
needs for the fleet's loss, between its runs by the logarithm.

Every run is kept in build/home-lines as soon as it ends, and the result `home-lines` is written after it;
begun again, the program goes on. `--verify` takes the fleets' steps again at the end. All runs should take
about an hour and a half on two quiet cores (an estimate). Other work on the machine leaves a fleet its share,
but makes less of what is computed in it, as of the machine alone.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import msgspec

from anabranch.api.run import complete_at_once
from anabranch.audit.run_inputs import open_inputs
from anabranch.audit.verify import verify
from anabranch.config import RoundSection, RunConfig, render_run_file, with_changes
from anabranch.net.wan.emulated_network import EmulatedNetwork
from anabranch.net.wan.places import Place, regions_of
from anabranch.net.wan.profile import find_profile
from anabranch.net.wan.shape import Host
from anabranch.node.lifecycle.create_run import create_run
from anabranch.node.local_swarm.local_swarm import LocalSwarm, processes_of
from anabranch.observe.events import Step, Timing
from anabranch.train.model.sizes import model_config, total_parameters
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.recipes.recipes import recipe_run
from anabranch.train.reference.alone import Alone
from benchmarks import harness
from benchmarks.harness import table
from benchmarks.overhead.core_shares import LimitedSupervisor

#: Machines, the share of a core that each has, and bits per second of its line, in each direction.
MACHINES, SHARE, LINE_BPS = 8, 0.2, 20e6
SEQUENCE = 64
FOLDER = harness.CACHE / "home-lines"


@dataclass(frozen=True)
class Arm:
    """Way to train. machines: 1 is one process without a swarm. rounds: None for synchronous steps.
    microbatches, rows: of a step of all machines. runs: optimizer steps of each run -> its learning rates."""

    machines: int
    microbatches: int
    rows: int
    runs: Mapping[int, tuple[float, ...]]
    rounds: RoundSection | None = None
    beta2: float = 0.95

    @property
    def step_tokens(self) -> int:
        return self.microbatches * self.rows * SEQUENCE


@dataclass(frozen=True)
class Model:
    """Model of the benchmark. shape: changes of llama-tiny. held_out: rows on which losses are measured."""

    held_out: int
    arms: Mapping[str, Arm]
    shape: Mapping[str, object] = field(default_factory=dict)


#: Rules of the preset `anabranch` until 2026-11-29.
_ESTIMATED = RoundSection(
    slots=MACHINES,
    steps=50,
    start=0.25,
    outer_lr=1.0,
    outer_momentum=0.0,
    first_moment="estimate",
    contributions="int4",
    results="int8",
    late="drop",
)
#: Rounds with agreed moments after a few synchronous steps (at least one).
_AGREED = replace(_ESTIMATED, steps=8, start=0.008, first_moment="agree")
ALONE, SYNCHRONOUS = "one machine alone", "synchronous"
#: 23.9 million parameters with a vocabulary of 512 tokens; Small init (recipes).
_24M = {
    "model.dim": 512, "model.blocks": 8, "model.heads": 8, "model.kv_heads": 4, "model.ffn": 1408,
    "model.initial_std": 0.028,
}  # fmt: skip
MODELS = {
    "llama-tiny": Model(512, {
        ALONE: Arm(
            1, 1, 4,
            dict.fromkeys((400, 1000), (0.005,)) | dict.fromkeys((1900, 3800), (0.0025, 0.005))
            | {7600: (0.0025,)},
        ),
        f"{ALONE}, 512 tokens": Arm(1, 1, 8, {1300: (0.0025, 0.005), 2600: (0.0025, 0.005), 5200: (0.0025,)}),
        f"{ALONE}, 1,024 tokens": Arm(1, 1, 16, {1500: (0.005,), 3000: (0.005,)}),
        SYNCHRONOUS: Arm(MACHINES, 16, 16, {50: (0.01,)}),
        "islands, moment estimated, H = 50": Arm(MACHINES, 8, 16, {200: (0.005,)}, _ESTIMATED),
        "islands, agreed moments, H = 8": Arm(MACHINES, 8, 8, {508: (0.005,)}, _AGREED, 0.98),
        "islands, agreed moments, H = 16": Arm(
            MACHINES, 8, 8, {772: (0.005,), 1540: (0.005,)}, replace(_AGREED, steps=16, start=0.0052), 0.98
        ),
    }),
    "llama-24m": Model(128, {
        ALONE: Arm(1, 1, 2, {25: (0.001,), 100: (0.001,), 400: (0.001,)}),
        SYNCHRONOUS: Arm(MACHINES, 8, 8, {3: (0.001,)}),
        "islands, agreed moments, H = 32": Arm(
            MACHINES, 8, 2, {129: (0.001,)}, replace(_AGREED, steps=32, start=0.001), 0.98
        ),
    }, _24M),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Run of the benchmark."""

    model: str
    arm: str
    steps: int
    rate: float
    seed: int

    @property
    def label(self) -> str:
        words = "".join(c if c.isalnum() else "-" for c in self.arm).replace("--", "-")
        return f"{self.model}-{words}-{self.steps}-{self.rate:g}-{self.seed}"

    @property
    def folder(self) -> Path:
        """Run directory, which a fleet leaves until it is verified."""
        return FOLDER / self.label

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.label}.json"


def run_file(job: Job) -> RunConfig:
    """Run file of a job."""
    model = MODELS[job.model]
    arm, relays = model.arms[job.arm], MACHINES
    changes: dict[str, object] = {"run.name": "home", "run.steps": job.steps, "run.seed": job.seed}
    changes |= {"batch.microbatches": arm.microbatches, "batch.rows": arm.rows, "batch.sequence": SEQUENCE}
    changes |= {"optimizer.lr": job.rate, "optimizer.schedule": "linear", "optimizer.min_lr_ratio": 0.02}
    changes |= {"optimizer.warmup_steps": max(2, round(0.05 * job.steps)), "optimizer.beta2": arm.beta2}
    changes |= {"pipeline.stages": 0, "fleet.data_nodes": 1, "fleet.relays": relays, "snapshots.copies": 0}
    changes |= {"compute.device": "cpu", "compute.dtype": "bf16", "evaluation.every": 0}
    changes |= {"checkpoint.every": job.steps}
    config = with_changes(recipe_run("llama-tiny"), changes | dict(model.shape))
    return replace(config, round=arm.rounds or RoundSection())


@contextmanager
def homes(names: Sequence[str]) -> Iterator[dict[str, Place]]:
    """Emulated network with a home for each process: a line of LINE_BPS, in one of the ten regions."""
    profile = find_profile("wan10")
    regions = regions_of(names, profile)
    hosts = {name: Host(region, LINE_BPS, LINE_BPS) for name, region in regions.items()}
    with EmulatedNetwork(hosts, profile) as wan:
        yield {name: Place(wan.namespace(name), wan.address(name), regions[name]) for name in names}


@dataclass(frozen=True)
class Outcome:
    """Run that was made. seconds: from the opening of the first step to the commit of the last. loss: on the
    held-out rows, at its end. Of a fleet also: seconds of the first step; share of the time that a machine
    computes; megabytes that one sends; slots that were late or lost; bits that `verify` found to differ (None
    before); (seconds, training loss) of each step or round."""

    seconds: float
    loss: float
    iterations: int
    load: float
    first_s: float = 0.0
    busy: float = 0.0
    sent_mb: float = 0.0
    late: int = 0
    differ: int | None = None
    curve: list[tuple[float, float]] = field(default_factory=list)


def train_fleet(job: Job) -> Outcome:
    """Run of eight machines; leaves its run directory."""
    run = complete_at_once(run_file(job))
    directory, steps, timings = create_run(run, job.folder), list[Step](), list[Timing]()
    with homes(list(processes_of(run))) as places, LimitedSupervisor(1, SHARE) as supervisor:
        swarm = LocalSwarm(directory, run, supervisor, places=places)
        swarm.start()
        for event in swarm.events():
            if isinstance(event, Step):
                steps.append(event)
            elif isinstance(event, Timing) and event.stage:
                timings.append(event)
        swarm.end()
    opened = steps[0].time - steps[0].seconds
    seconds, sent = steps[-1].time - opened, sum(each.bytes_reduce for each in timings)
    computing = sum(
        each.forward_s + each.input_gradient_s + each.weight_gradient_s + each.reduce_s + each.apply_s
        for each in timings
    )
    return Outcome(
        seconds, held_out(job), len(steps), os.getloadavg()[0],
        first_s=steps[0].seconds,
        busy=computing / (MACHINES * seconds),
        sent_mb=sent / MACHINES / 1e6,
        late=sum(count <= 0 for step in steps for count in step.inner_steps),
        curve=[(step.time - opened, step.loss or math.inf) for step in steps],
    )  # fmt: skip


def train_alone(job: Job) -> Outcome:
    """Run of `anabranch train --alone`, whose seconds are its CPU seconds over SHARE."""
    path = FOLDER / f"{job.label}.toml"
    path.write_text(render_run_file(run_file(job)))
    words = ["train", str(path), "--alone", "--run-dir", str(job.folder), "--no-page"]
    command = [sys.executable, "-u", "-m", "anabranch", *words]
    marks = list[float]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                marks.append(cpu_s(process.pid))
    if process.returncode or len(marks) != job.steps:
        raise SystemExit(f"{job.label}: ended with status {process.returncode} after {len(marks)} steps")
    took = (marks[-1] - marks[0]) * job.steps / (job.steps - 1)  # the first one loads kernels
    loss = held_out(job)
    shutil.rmtree(job.folder)
    return Outcome(took / SHARE, loss, job.steps, os.getloadavg()[0])


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def held_out(job: Job) -> float:
    """Loss of a run's last checkpoint on its model's held-out rows."""
    inputs = open_inputs(job.folder)
    alone = Alone(inputs.run, inputs.model, inputs.batches, inputs.initial)
    last = inputs.directory.latest_checkpoint()
    alone.restore([inputs.directory.read_stage(last, stage) for stage in range(len(alone.states))])
    return alone.evaluate(MODELS[job.model].held_out // inputs.run.batch.rows)


def kept(job: Job) -> Outcome | None:
    """Run that was made before."""
    return msgspec.json.decode(job.file.read_bytes(), type=Outcome) if job.file.exists() else None


def trained(job: Job) -> Outcome:
    """Make a run and keep it."""
    shutil.rmtree(job.folder, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    alone = MODELS[job.model].arms[job.arm].machines == 1
    outcome = (train_alone if alone else train_fleet)(job)
    harness.write_whole(job.file, msgspec.json.encode(outcome))
    print(f"{job.label}: {replace(outcome, curve=[])}", file=sys.stderr, flush=True)
    return outcome


def verified(job: Job, outcome: Outcome, jobs: int = 1) -> Outcome:
    """The run with the number of bits in which it differs from its steps taken again by one process."""
    if outcome.differ is None and job.folder.exists():
        report = verify(job.folder, jobs)
        outcome = replace(outcome, differ=report.bits)
        if not report.holds:
            raise SystemExit("\n".join([job.label, *report.lines()]))
        harness.write_whole(job.file, msgspec.json.encode(outcome))
    return outcome


# --- the result ---------------------------------------------------------------------------------------


def front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """(seconds, loss) of the runs that no quicker run beats, in order of time."""
    found = list[tuple[float, float]]()
    for seconds, loss in sorted(points):
        if not found or loss < found[-1][1]:
            found.append((seconds, loss))
    return found


def seconds_to(loss: float, curve: Sequence[tuple[float, float]]) -> float | None:
    """Seconds of a machine alone to a loss, between its runs by the logarithm; None outside them."""
    for (less, high), (more, low) in pairwise(curve):
        if low <= loss <= high:
            return math.exp(math.log(less) + (high - loss) / (high - low) * math.log(more / less))
    return None


def over_alone(outcome: Outcome, curve: Sequence[tuple[float, float]]) -> str:
    """How many times as long a machine alone needs for a fleet's loss."""
    if found := seconds_to(outcome.loss, curve):
        return f"{found / outcome.seconds:.2f}"
    if outcome.loss < curve[-1][1]:
        return f"over {curve[-1][0] / outcome.seconds:.2f}"
    return f"below {curve[0][0] / outcome.seconds:.2f}"


def over_synchronous(outcome: Outcome, other: Outcome) -> str:
    """How many times as long the synchronous run needed for its last loss as islands until the training loss
    of a round was as low, with their rate still high."""
    reached = next((seconds for seconds, loss in outcome.curve if loss <= other.loss), None)
    return f"{other.seconds / reached:.2f}" if reached else "–"


Found = dict[str, dict[str, dict[int, dict[float, Outcome]]]]
"""Model -> arm -> steps -> learning rate -> run."""


def rows_of(model: str, arms: Mapping[str, Mapping[int, Mapping[float, Outcome]]]) -> list[list[str]]:
    """Rows of a model's table: each arm and length, with its best rate."""
    best = {
        (arm, steps): min(rates.items(), key=lambda pair: pair[1].loss)
        for arm, lengths in arms.items() for steps, rates in lengths.items()
    }  # fmt: skip
    known = MODELS[model].arms
    alone = front((one.seconds, one.loss) for (arm, _), (_, one) in best.items() if known[arm].machines == 1)
    synchronous = next((one for (arm, _), (_, one) in best.items() if arm == SYNCHRONOUS), None)
    rows = []
    for (arm, steps), (rate, one) in best.items():
        fleet, tokens = known[arm].machines > 1, known[arm].step_tokens
        others = ", ".join(
            f"{each.loss:.3f} ({other:g})" for other, each in arms[arm][steps].items() if other != rate
        )
        rows.append([
            arm, f"{steps:,} × {tokens:,}", f"{one.seconds:.0f}", f"{rate:g}", f"{one.loss:.3f}",
            over_alone(one, alone) if fleet and alone else "",
            over_synchronous(one, synchronous) if known[arm].rounds and synchronous else "",
            f"{100 * one.busy:.0f} %" if fleet else "", f"{one.sent_mb:.0f}" if fleet else "",
            f"{one.late}" if fleet else "",
            ("not yet" if one.differ is None else str(one.differ)) if fleet else "",
            f"{one.load:.1f}", others,
        ])  # fmt: skip
    return rows


def write(found: Found, dry: bool) -> None:
    """Write the result of the runs that exist."""
    columns = [
        "", "steps × tokens", "seconds", "rate", "loss", "× alone", "× synchronous", "busy", "MB sent, each",
        "late slots", "bits that differ", "load", "other rates",
    ]  # fmt: skip
    parts = [
        f"{MACHINES} processes that hold the whole model and one that leads and has the corpus, each with "
        f"{100 * SHARE:.0f} % of a core and a line of {LINE_BPS / 1e6:.0f} Mbit/s up and down in one of the "
        f"ten regions; this machine has {os.cpu_count()} cores, of which the fleet takes at most "
        f"{(MACHINES + 1) * SHARE:.1f} and the emulated network some of the rest. The seconds of one process "
        f"alone (`anabranch train --alone`) are its CPU seconds over {SHARE:g}. Sequences of {SEQUENCE} "
        "tokens, bf16, one seed. Steps of islands are inner steps, whose tokens are those of all islands. "
        "*× alone*: seconds of one machine alone to the loss of this row, over those of the row; with other "
        "batches and lengths the better one counts. *× synchronous*: seconds of the synchronous run to its "
        "last loss, over those of islands until the training loss of a round was as low, with their rate "
        "still high. *busy*: share of the time in which a machine computes. Rates are the best of the row."
    ]
    for model, arms in found.items():
        if arms:
            run = run_file(Job(model, next(iter(arms)), 100, 1e-3, 1))
            parameters = total_parameters(model_config(run.model, run.data.vocab_size))
            parts.append(f"{model}: {parameters:,} parameters.\n\n{table(columns, rows_of(model, arms))}")
    title = "Time to a loss of eight real processes behind home lines"
    command = "python -m benchmarks.overhead.home_lines --verify"
    harness.write("home-lines", title, "\n\n".join(parts), data=found, reproduce=command, dry=dry)


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments.add_argument("--arms", nargs="+", default=[""], help="beginnings of the arms' names")
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--kept", action="store_true", help="begin no run: only those that were made")
    arguments.add_argument("--verify", action="store_true", help="take the fleets' steps again at the end")
    args = arguments.parse_args()
    configure(1)
    jobs = [
        Job(name, arm, steps, rate, args.seed)
        for name in args.models
        for arm, each in MODELS[name].arms.items() for steps, rates in each.runs.items() for rate in rates
    ]  # fmt: skip
    outcomes = {job: outcome for job in jobs if (outcome := kept(job))}
    for job in jobs:
        wanted = any(job.arm.startswith(word) for word in args.arms) and not args.kept
        if wanted and job not in outcomes:
            outcomes[job] = trained(job)
            write(in_rows(outcomes), args.dry)
    if args.verify:
        outcomes = {job: verified(job, outcome) for job, outcome in outcomes.items()}
    write(in_rows(outcomes), args.dry)
    return 0


def in_rows(outcomes: Mapping[Job, Outcome]) -> Found:
    """Runs by model, arm, steps and rate, in the order of MODELS."""
    found: Found = {name: {} for name in MODELS}
    for job, one in outcomes.items():
        found[job.model].setdefault(job.arm, {}).setdefault(job.steps, {})[job.rate] = one
    return {
        name: {arm: arms[arm] for arm in MODELS[name].arms if arm in arms} for name, arms in found.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
