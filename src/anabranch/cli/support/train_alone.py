"""Training by one process without a swarm (`anabranch train --alone`): steps, evaluations, checkpoints."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

from anabranch.cli.support.outputs import Outputs
from anabranch.config import RunConfig
from anabranch.errors import UserError


def train_alone(path: Path, to: Outputs) -> int:
    """Train the run of a run directory in this process; returns the exit status, 0. Checkpoints are written
    as the run file says and at the end, also after Ctrl+C."""
    from anabranch.audit.run_inputs import open_inputs
    from anabranch.train.reference.alone import Alone

    inputs = open_inputs(path)
    run, directory, run_id = inputs.run, inputs.directory, uuid.uuid4().hex
    alone = Alone(run, inputs.model, inputs.batches, inputs.initial, inputs.frozen)

    def save(t: int) -> None:
        stages = {}
        for stage, state in enumerate(alone.snapshots(t)):
            stages[stage] = ([piece.numpy() for piece in state.pieces()], state.fingerprint())
        directory.write_checkpoint(t, "", run_id, stages)  # type: ignore[arg-type]
        directory.prune(run.checkpoint.keep)

    def evaluated(t: int) -> str:
        windows = run.evaluation.windows if run.evaluation.every else 0
        return f"held out after step {t}: loss {alone.evaluate(windows):.3f}" if windows else ""

    every, t = run.evaluation.every, 0
    first = evaluated(0)
    if first:
        to.say(first)
    began = time.monotonic()
    try:
        for t in range(1, run.run.steps + 1):
            at = time.monotonic()
            step = alone.step(t)
            rate = inputs.batches.tokens_per_iteration / max(1e-9, time.monotonic() - at)
            line = f"loss {step.loss:6.3f} | {rate:7,.0f} tok/s | grad {step.norm:5.2f}"
            to.say(f"step {t}/{run.run.steps} | {line}")
            if every and (t % every == 0 or t == run.run.steps):
                to.say(evaluated(t))
            if t % run.checkpoint.every == 0:
                save(t)
    except KeyboardInterrupt:
        t -= 1
        to.say(f"stopped after step {t}")
    save(t)
    to.say(f"trained in {time.monotonic() - began:.0f} s, alone: there is no log, and nothing to verify")
    to.say(f"a sample: anabranch generate {path}\nrun directory: {path}")
    return 0


def check(run: RunConfig, run_file: Path | None) -> None:
    """Raise UserError if a run cannot be trained by one process: it has rounds of islands, or a delay.
    run_file: for the message."""
    if run.iteration.delay:
        where = run_file or "the run file"
        raise UserError(f"--alone: {where} has iteration.delay = 1; set it to 0, or leave out --alone")
    if run.round.slots:
        where = run_file or "the run file"
        has = f"{where} has round.slots = {run.round.slots}"
        raise UserError(f"--alone: {has}; set it to 0, or leave out --alone")
