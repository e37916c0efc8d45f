"""Held-out loss of the tiny model with one liar among six owners of every relay stage: attacks by defences.

    python -m benchmarks.byzantine.gradient_attacks [--processes 2] [--seeds 1 2 3] [--kept]

The reference trainer computes the contributions of six owners, one microbatch each; the liar's contribution
to every relay stage is replaced by the attack, and the stage's gradient is formed by the defence. The
defence `audit` is what runs have: contributions are drawn as with `audit.share = 0.05`, and from the first
drawn lie on the stage's liar is out, the step of that lie taken again without it. All cells
of the table are of the same program and corpus; each cell is kept in build/ until the program changes, so a
table that was cut off goes on where it was, and `--kept` writes what there is.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from anabranch.config import BatchSection, ComputeSection, RunConfig, RunSection
from anabranch.data.batches import Batches
from anabranch.data.corpus import materialise
from anabranch.protocol.audit.contribution_monitor import Contribution, ContributionMonitor
from anabranch.protocol.interface.tasks import part_bounds
from anabranch.train.model.sizes import model_config
from anabranch.train.numerics.exact import UNIT_EXPONENT
from anabranch.train.numerics.moments import moments
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.reference.reference import Reference, Share
from benchmarks import harness
from benchmarks.byzantine.attacks import ATTACKS, View
from benchmarks.byzantine.robust import centred_clip, coordinate_median

OWNERS, LIAR = 6, 0
STEPS, WINDOWS = 400, 64
ROWS, SEQUENCE = 2, 64
#: Share of audits of the defence `audit`, as in issue 22's acceptance.
AUDITED = 0.05
DEFENCES = ("none", "audit", "monitor", "clip", "median")
CORPUS = harness.CACHE / "gradient_attacks" / "corpus"


class Job(msgspec.Struct, frozen=True):
    attack: str
    defence: str
    seed: int
    steps: int


class Cell(msgspec.Struct, frozen=True):
    """Outcome of a job. held: contributions of the liar that the monitor held; false: of honest owners; of:
    contributions of all owners to relay stages. first: first iteration in which the monitor held the liar's
    contribution to some stage (0: never). lies: false contributions that counted, of all stages."""

    job: Job
    loss: float
    held: int
    false: int
    of: int
    first: int
    cpu_s: float
    lies: int


@dataclass
class Trainer:
    """Reference trainer whose relay stages have OWNERS owners and one liar."""

    job: Job

    def __post_init__(self) -> None:
        configure(1)
        run = RunConfig(
            run=RunSection(seed=self.job.seed, steps=STEPS),
            batch=BatchSection(microbatches=OWNERS, rows=ROWS, sequence=SEQUENCE),
            compute=ComputeSection(device="cpu"),
        )
        corpus = materialise(run.data, CORPUS)
        self.batches = Batches(corpus, run.batch, self.job.seed)
        self.reference = Reference(run, model_config(run.model, corpus.vocab_size), self.batches)
        self.stages = range(1, len(self.reference.states))
        self.monitors = {stage: ContributionMonitor() for stage in self.stages}
        self.first: dict[int, Tensor] = {}
        self.held = self.false = self.of = self.caught = self.lies = 0
        self.draw, self.out = random.Random(self.job.seed), set[int]()

    def run(self) -> Cell:
        begin = time.process_time()
        for t in range(1, self.job.steps + 1):
            self._step(t)
        windows = self.reference.evaluate(WINDOWS)
        loss = math.fsum(some for some, _ in windows) / sum(tokens for _, tokens in windows)
        cpu_s = time.process_time() - begin
        return Cell(self.job, loss, self.held, self.false, self.of, self.caught, cpu_s, self.lies)

    def _step(self, t: int) -> None:
        whole, sums = Share(t, []), []
        for owner in range(OWNERS):
            share = self.reference.share(t, [owner])
            sums.append([flat.clone() for flat in share.sums])
            whole.losses.update(share.losses)
            whole.overflows.update(share.overflows)
        whole.sums = [sum(of_owner[0] for of_owner in sums[1:]) + sums[0][0]]
        for stage in self.stages:
            whole.sums.append(self._aggregate(t, stage, [of_owner[stage] for of_owner in sums]))
        self.reference.step(whole)

    def _aggregate(self, t: int, stage: int, honest: list[Tensor]) -> Tensor:
        """Sum of a stage's contributions (in units of 2⁻⁴⁸) after the attack, by the defence."""
        floats = [wide(part) for part in honest]
        view = View(floats[LIAR], floats[1:], self.first.setdefault(stage, floats[LIAR].clone()))
        sent = list(honest)
        if self.job.attack != "none" and not self._is_out(stage):
            sent[LIAR] = units(ATTACKS[self.job.attack](view))
            self.lies += 1
        self.of += OWNERS
        if self.job.defence == "monitor":
            for owner in self._held(t, stage, sent):
                sent[owner] = honest[owner]  # another replica computes its units
                self.lies -= owner == LIAR and self.job.attack != "none"
        if self.job.defence in ("none", "audit", "monitor"):
            return torch.stack(sent).sum(0)
        contributions, ones = [wide(part) for part in sent], [1] * OWNERS
        if self.job.defence == "median":
            return units(coordinate_median(contributions, ones))
        return units(centred_clip(contributions, ones, self._centre(stage)))

    def _is_out(self, stage: int) -> bool:
        """True if the stage's liar is out, or is found in this step, as its contribution is drawn."""
        if self.job.defence == "audit" and self.draw.random() < AUDITED:
            self.out.add(stage)
        return stage in self.out

    def _centre(self, stage: int) -> Tensor:
        """Mean gradient of a unit by Adam's first moment, which every replica has."""
        state = self.reference.states[stage]
        correction = 1.0 - 0.9**state.adam_step if state.adam_step else 1.0
        return state.exp_avg.double() / (correction * OWNERS)

    def _held(self, t: int, stage: int, sent: Sequence[Tensor]) -> list[int]:
        """Owners whose contribution the monitor holds. Each owner sums one part and reports its moments; the
        liar reports those of another owner as its own."""
        reports = [
            list(moments([part[begin:end] for part in sent]))
            for begin, end in part_bounds(len(sent[0]), OWNERS)
        ]
        reports[LIAR][LIAR] = reports[LIAR][1]
        owners = tuple(map(str, range(OWNERS)))
        contributions = {}
        for owner, name in enumerate(owners):
            squares, dots = zip(*(part[owner] for part in reports), strict=True)
            contributions[name] = Contribution(1, squares, dots, owners)
        held = [int(owner) for owner in self.monitors[stage].judge(contributions)]
        lies = self.job.attack != "none" and LIAR in held
        self.held += lies
        self.false += len(held) - lies
        self.caught = self.caught or (t if lies else 0)
        return held


def wide(part: Tensor) -> Tensor:
    return part.double().mul_(2.0**-UNIT_EXPONENT)


def units(part: Tensor) -> Tensor:
    return part.mul(2.0**UNIT_EXPONENT).round_().to(torch.int64)


def cell(job: Job) -> Cell:
    path = kept(job)
    if not path.exists():
        harness.write_whole(path, msgspec.json.encode(Trainer(job).run()))
    return msgspec.json.decode(path.read_bytes(), type=Cell)


def kept(job: Job) -> Path:
    attack = "-".join("".join(c if c.isalnum() else " " for c in job.attack).split())
    name = f"{attack}.{job.defence}.{job.seed}.{job.steps}.json"
    return harness.CACHE / "gradient_attacks" / harness.program() / name


def written(cells: Sequence[Cell]) -> str:
    """Table of losses (attack by defence, one value for each seed), and what the monitor held."""
    attacks = [*dict.fromkeys(one.job.attack for one in cells)]
    losses: list[list[str]] = [[attack] for attack in attacks]
    for row in losses:
        for defence in DEFENCES:
            found = [one.loss for one in cells if (one.job.attack, one.job.defence) == (row[0], defence)]
            row.append(", ".join(f"{loss:.3f}" for loss in found) or "not measured")
    rows = [
        [one.job.attack, one.job.seed, one.held, one.first or "never", one.false, one.of]
        for one in cells
        if one.job.defence == "monitor"
    ]
    head = ["attack", "seed", "held of the liar", "from iteration", "held of honest owners", "contributions"]
    tables = [harness.table(["held-out loss (nats per token)", *DEFENCES], losses)]
    lies = [
        [one.job.attack, one.job.seed, one.lies]
        for one in cells
        if one.job.defence == "audit" and one.lies
    ]
    if rows:
        tables.append(harness.table(head, rows))
    if lies:
        head = ["attack, `audit`", "seed", f"lies that counted, of {cells[0].of // OWNERS:,}"]
        tables.append(harness.table(head, lies))
    return "\n\n".join(tables)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--kept", action="store_true", help="compute nothing; the table of the kept cells")
    parser.add_argument("--attacks", nargs="*", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--defences", nargs="*", default=list(DEFENCES), choices=DEFENCES)
    args = parser.parse_args()
    materialise(RunConfig().data, CORPUS)
    jobs = [Job(*each, args.steps) for each in product(args.attacks, args.defences, args.seeds)]
    if args.kept:
        jobs = [job for job in jobs if kept(job).exists()]
    cells = list(harness.in_processes(cell, jobs, args.processes, "cells"))
    setting = (
        f"One liar among {OWNERS} owners of each of 3 relay stages, one microbatch of {ROWS} x {SEQUENCE} "
        f"tokens each, llama-tiny, {args.steps} steps, {WINDOWS} held-out windows, one value for each seed. "
        f"`audit`: contributions are drawn with a share of {AUDITED:g}; from the first drawn lie on the "
        "stage's liar is out. "
        "`monitor`: a contribution that is held is computed by another owner. `clip`: centred clipping "
        "around Adam's first moment. `median`: coordinate-wise."
    )
    harness.write(
        "gradient-attacks",
        "Wrong gradients of one owner in six",
        f"{setting}\n\n{written(cells)}",
        data=cells,
        dry=args.dry,
    )


if __name__ == "__main__":
    main()
