"""Training by one process without a swarm (`anabranch train --alone`): steps, evaluations, checkpoints."""

from __future__ import annotations

import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.cli.support.outputs import Outputs, handled_signals
from anabranch.config import RunConfig
from anabranch.errors import UserError
from anabranch.observe.console.progress import Ticker, ticking

if TYPE_CHECKING:
    from anabranch.audit.run_inputs import Inputs
    from anabranch.train.reference.alone import Alone


def train_alone(path: Path, to: Outputs) -> int:
    """Train the run of a run directory in this process, from its newest checkpoint on, to its last step or
    until Ctrl+C; returns the exit status, 0. Checkpoints are written as the run file says and at the end,
    which is the present step after Ctrl+C. Raises UserError, also if the run is a swarm's, has no step left,
    or is trained by another process; KeyboardInterrupt at a second Ctrl+C, without a checkpoint."""
    with ticking("reading the run"):
        inputs, alone, t = _opened(path)
    run, directory, run_id = inputs.run, inputs.directory, uuid.uuid4().hex
    if t >= run.run.steps:
        raise UserError(f"{path}: all {run.run.steps} steps are taken; there is nothing to resume")

    def save(t: int) -> None:
        stages = {}
        for stage, state in enumerate(alone.snapshots(t)):
            stages[stage] = ([piece.numpy() for piece in state.pieces()], state.fingerprint())
        directory.write_checkpoint(t, "", run_id, stages)  # type: ignore[arg-type]
        directory.prune(run.checkpoint.keep)

    def say(text: str) -> None:
        with ticker.aside():
            to.say(text)

    def evaluate(t: int) -> None:
        if windows := run.evaluation.windows if run.evaluation.every else 0:
            say(f"held out after step {t}: loss {alone.evaluate(windows):.3f}")

    requests: list[int] = []

    def stop(number: int, *_: object) -> None:
        requests.append(number)
        if len(requests) > 1:  # in the middle of a step, whose state is not saved
            raise KeyboardInterrupt(f"the last checkpoint stays; continue with: {_resume(path)}")

    every, began = run.evaluation.every, time.monotonic()
    with directory.led(), Ticker(plain=False) as ticker, handled_signals(stop):
        ticker.begin(f"step {t + 1}")
        if not t:
            evaluate(0)
        while t < run.run.steps and not requests:
            t, at = t + 1, time.monotonic()
            step = alone.step(t)
            rate = inputs.batches.tokens_per_iteration / max(1e-9, time.monotonic() - at)
            line = f"loss {step.loss:6.3f} | {rate:7,.0f} tok/s | grad {step.norm:5.2f}"
            say(f"step {t}/{run.run.steps} | {line}")
            ticker.begin(f"step {t + 1}" if t < run.run.steps else "ending the run")
            if every and (t % every == 0 or t == run.run.steps):
                evaluate(t)
            if t % run.checkpoint.every == 0:
                save(t)
        save(t)
    if t < run.run.steps:
        to.say(f"stopped after step {t}; continue with: {_resume(path)}\nrun directory: {path}")
        return 0
    to.say(f"trained in {time.monotonic() - began:.0f} s, alone: there is no log, and nothing to verify")
    to.say(f"a sample: anabranch generate {path}\nrun directory: {path}")
    return 0


def _opened(path: Path) -> tuple[Inputs, Alone, int]:
    """Inputs of a run that one process trains, the training from its newest checkpoint on, and the step of
    that (0: none, from the initial weights). Raises UserError if the run is a swarm's."""
    from anabranch.audit.run_inputs import open_inputs
    from anabranch.train.reference.alone import Alone

    inputs = open_inputs(path, fetch=True)
    directory = inputs.directory
    if directory.log.exists():
        raise UserError(f"{path} is the run of a swarm: continue with: anabranch resume {path} --local")
    alone = Alone(inputs.run, inputs.model, inputs.batches, inputs.initial, inputs.frozen)
    if not directory.checkpoints():
        return inputs, alone, 0
    newest = directory.latest_checkpoint()
    return inputs, alone, alone.restore(
        [directory.read_stage(newest, stage) for stage in range(len(alone.states))]
    )


def _resume(path: Path) -> str:
    return f"anabranch resume {path} --alone"


def check(run: RunConfig, run_file: Path | None) -> None:
    """Raise UserError if a run cannot be trained by one process: it has rounds of islands, or a delay.
    run_file: path for the message."""
    if run.iteration.delay:
        where = run_file or "the run file"
        raise UserError(f"--alone: {where} has iteration.delay = 1; set it to 0, or leave out --alone")
    if run.round.slots:
        where = run_file or "the run file"
        has = f"{where} has round.slots = {run.round.slots}"
        raise UserError(f"--alone: {has}; set it to 0, or leave out --alone")
