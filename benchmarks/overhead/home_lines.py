"""Time to a loss of eight real processes behind home lines, beside one process alone and synchronous steps.

    nice python -m benchmarks.overhead.home_lines [--models llama-tiny] [--most 300] [--verify]

Needs Linux, root, /dev/net/tun and control groups (version 1). Eight processes hold the whole model; a ninth
leads and has the corpus. Each has a fifth of a core (`core_shares`), a line of 20 Mbit/s up and down, and the
latencies of one of the ten regions. Three ways to train: synchronous steps of all, rounds of the preset
`anabranch`, rounds with agreed moments. Beside them `anabranch train --alone`: its CPU seconds, divided by
the same share, are the time that one such machine would take; it has nobody to send to.

Every run ends with its learning rate near zero and has its own batch and rate. Time counts from the opening
of the first step to the commit of the last. No run evaluates meanwhile: the loss is that of the last
checkpoint on the same held-out rows. How much faster a fleet is follows from the time that the machine alone
needs for the fleet's loss, between its runs by the logarithm.

Every run is kept in build/home-lines as soon as it ends, and the result `home-lines` is written after it;
begun again, the program goes on. `--verify` takes the fleets' steps again at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

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
from anabranch.train.recipes.presets import PRESETS
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


_PRESET = RoundSection(**{
    key.partition(".")[2]: value
    for key, value in PRESETS["anabranch"].settings.items() if key.startswith("round.")
})  # fmt: skip
_AGREED = replace(_PRESET, steps=8, start=0.02, first_moment="agree")
ALONE = "one machine alone"
MODELS = {
    "llama-tiny": Model(512, {
        ALONE: Arm(1, 1, 4, {1000: (0.005,)}),
        "synchronous": Arm(MACHINES, 8, 8, {20: (0.005,)}),
        "islands, agreed moments, H = 8": Arm(MACHINES, 8, 4, {208: (0.005,)}, _AGREED, 0.98),
        "islands, preset `anabranch`": Arm(MACHINES, 8, 4, {100: (0.005,)}, _PRESET),
    }),
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


Figures = dict[str, float]


def train_fleet(job: Job) -> Figures:
    """Figures of a run of eight machines; leaves its run directory."""
    run = complete_at_once(run_file(job))
    directory, steps, sent = create_run(run, job.folder), list[Step](), 0
    with homes(list(processes_of(run))) as places, LimitedSupervisor(1, SHARE) as supervisor:
        swarm = LocalSwarm(directory, run, supervisor, places=places)
        swarm.start()
        for event in swarm.events():
            if isinstance(event, Step):
                steps.append(event)
            elif isinstance(event, Timing):
                sent += event.bytes_activations + event.bytes_reduce
        swarm.end()
    inner = [count for step in steps for count in step.inner_steps]
    return {
        "seconds": steps[-1].time - steps[0].time + steps[0].seconds,
        "iterations": len(steps),
        "first_s": steps[0].seconds,
        "late": sum(count == 0 for count in inner),
        "bytes": sent,
    }


def train_alone(job: Job) -> Figures:
    """Figures of a run of `anabranch train --alone`, whose seconds are its CPU seconds over SHARE."""
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
    return {"seconds": took / SHARE, "iterations": job.steps}


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


def trained(job: Job) -> Figures:
    """Figures of a run, from its file if it was made before."""
    if not job.file.exists():
        shutil.rmtree(job.folder, ignore_errors=True)
        FOLDER.mkdir(parents=True, exist_ok=True)
        alone = MODELS[job.model].arms[job.arm].machines == 1
        figures = (train_alone if alone else train_fleet)(job)
        figures |= {"loss": held_out(job), "load": os.getloadavg()[0]}
        if alone:
            shutil.rmtree(job.folder)
        harness.write_whole(job.file, json.dumps(figures).encode())
        print(f"{job.label}: {figures}", file=sys.stderr, flush=True)
    found: Figures = json.loads(job.file.read_text())
    return found


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    arguments.add_argument("--arms", nargs="+", default=[])
    arguments.add_argument("--seed", type=int, default=1)
    args = arguments.parse_args()
    configure(1)
    for name in args.models:
        for arm, each in MODELS[name].arms.items():
            if args.arms and not any(arm.startswith(word) for word in args.arms):
                continue
            for steps, rates in each.runs.items():
                for rate in rates:
                    trained(Job(name, arm, steps, rate, args.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
