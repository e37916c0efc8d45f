"""Replay by several processes of one numerics class that share each step's microbatches.

Every process holds the whole reference and takes every step itself. The first process adds the integer sums
of all shares and sends the total to the others, so weights are never sent. Integer sums do not depend on who
adds what: the result has the bits of a single process.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from anabranch.audit.run_inputs import Inputs, open_inputs
from anabranch.errors import UserError
from anabranch.operating_system import interrupts_blocked
from anabranch.protocol.rounds.plan import Slots
from anabranch.train.numerics.numerics_class import numerics_class
from anabranch.train.reference.reference import Reference, Share, StepRecord, Witness

PackedShare = tuple[list[npt.NDArray[np.int64]], dict[int, float], dict[int, frozenset[Witness]]]
"""Sums of the stages, and losses and overflows by microbatch, as they are sent between processes."""


class ParallelStepper:
    """`Stepper` that computes in this process together with workers; made by `parallel_stepper`. Its methods
    raise UserError if a worker that they need has ended early."""

    def __init__(self, reference: Reference, microbatches: int, pipes: Sequence[Connection]) -> None:
        self.reference = reference
        self._pipes = pipes
        self._microbatches = range(microbatches)

    def step(self, t: int) -> StepRecord:
        self._send("share", self._round(t))
        share = self.reference.share(t, _own(self.reference, t, self._microbatches, 0, len(self._pipes) + 1))
        self.reference.remember_late(t, _of_rank(self.reference.late, 0, len(self._pipes) + 1))
        for pipe in self._pipes:
            share.merge(_unpacked(t, _receive(pipe), self.reference))
        self._send("step", _packed(share))
        return self.reference.step(share)

    def skip(self, t: int) -> StepRecord:
        self._send("skip", self._round(t))
        self.reference.remember_late(t, _of_rank(self.reference.late, 0, len(self._pipes) + 1))
        return self.reference.skip(Share(t, []))

    def witnesses(self, t: int, index: int) -> frozenset[Witness]:
        """As of `Stepper`. In a round the process finds them that has the state which the slot carries;
        outside rounds this process does."""
        rank = index % (len(self._pipes) + 1) if self.reference.is_round(t) else 0
        if not rank:
            return self.reference.witnesses(t, index)
        _send(self._pipes[rank - 1], "witnesses", self._round(t, index))
        found: frozenset[Witness] = _receive(self._pipes[rank - 1])
        return found

    def _round(self, t: int, index: int = 0) -> tuple[int, Slots, Slots, int]:
        """Content of an order about iteration t: (t, slots that count in its round, late slots, `index`).
        index: microbatch or slot that the order is about, if it is about one."""
        return t, dict(self.reference.slots), dict(self.reference.late), index

    def _send(self, order: str, content: tuple[int, Slots, Slots, int] | PackedShare) -> None:
        for pipe in self._pipes:
            _send(pipe, order, content)


@contextmanager
def parallel_stepper(inputs: Inputs, own_class: str, jobs: int) -> Iterator[ParallelStepper]:
    """Stepper of a replay by this process and `jobs` - 1 worker processes, which end with the block. Each
    worker opens the run directory itself. own_class: this process's numerics class. Raises UserError if a
    worker has another, or ends early."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(1, jobs):
            here, there = context.Pipe()
            arguments = (str(inputs.directory.path), rank, jobs, there)
            process = context.Process(target=_work, args=arguments, daemon=True)
            with interrupts_blocked():  # Ctrl+C is for this process, whose end closes the pipe
                process.start()
            there.close()  # so that the end of the process closes the pipe
            pipes.append(here)
            processes.append(process)
        for pipe in pipes:
            if _receive(pipe) != own_class:
                raise UserError("a worker process computes in another numerics class; use --jobs 1")
        yield ParallelStepper(inputs.reference(), inputs.run.batch.microbatches, pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.terminate()
            process.join()


def _send(pipe: Connection, order: str, content: tuple[int, Slots, Slots, int] | PackedShare) -> None:
    with _ended_early():
        pipe.send((order, content))


def _receive(pipe: Connection) -> Any:
    with _ended_early():
        return pipe.recv()


@contextmanager
def _ended_early() -> Iterator[None]:
    """Context that turns the errors of a pipe to a worker that has ended into a UserError."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise UserError("a worker process of verify ended unexpectedly; use fewer --jobs") from None


def _work(run_dir: str, rank: int, jobs: int, pipe: Connection) -> None:
    """Main function of a worker process, number `rank` of `jobs`: send its numerics class, then do the orders
    of the first process (`do_order`) until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where a signal cannot be blocked for a new process
    with suppress(BrokenPipeError):  # the first process ends between an order and its answer
        _answer_orders(run_dir, rank, jobs, pipe)


def _answer_orders(run_dir: str, rank: int, jobs: int, pipe: Connection) -> None:
    inputs = open_inputs(Path(run_dir))
    batch = inputs.run.batch
    pipe.send(numerics_class(inputs.run.compute, batch.rows, batch.sequence)[0])
    reference = inputs.reference()
    while True:
        try:
            order, content = pipe.recv()
        except EOFError:
            return
        if (answer := do_order(reference, batch.microbatches, rank, jobs, order, content)) is not None:
            pipe.send(answer)


def do_order(
    reference: Reference, microbatches: int, rank: int, jobs: int, order: str, content: Any
) -> PackedShare | frozenset[Witness] | None:
    """Do an order of the first process, as process `rank` of `jobs`; returns the answer to send, None if
    there is none. order: "share" and "witnesses" have an answer; "step" and "skip" bring `reference` to the
    next iteration. content: the summed shares of all for "step", else as of `ParallelStepper._round`."""
    if order == "step":
        reference.step(_unpacked(reference.t + 1, content, reference))
        return None
    t, reference.slots, reference.late, index = content
    if order == "witnesses":
        return reference.witnesses(t, index)
    share = Share(t, [])
    if order == "share":
        share = reference.share(t, _own(reference, t, range(microbatches), rank, jobs))
    reference.remember_late(t, _of_rank(reference.late, rank, jobs))
    if order == "share":
        return _packed(share)
    reference.skip(share)
    return None


def _own(reference: Reference, t: int, microbatches: range, rank: int, jobs: int) -> list[int]:
    """Microbatches of iteration t, or slots of a round, that process `rank` of `jobs` computes. microbatches:
    all of an iteration. A slot is always of the same process, which has the state that it carries from round
    to round."""
    if reference.is_round(t):
        return _of_rank(reference.slots, rank, jobs)
    return list(reference.batch(t, lambda t: microbatches))[rank::jobs]


def _of_rank(slots: Slots, rank: int, jobs: int) -> list[int]:
    """Those of these slots that process `rank` of `jobs` computes, ascending."""
    return [slot for slot in sorted(slots) if slot % jobs == rank]


def _packed(share: Share) -> PackedShare:
    return [part.cpu().numpy() for part in share.sums], share.losses, share.overflows


def _unpacked(t: int, packed: PackedShare, reference: Reference) -> Share:
    """Share of iteration `t` as another process sent it, with its sums on the device of `reference`."""
    sums, losses, overflows = packed
    device = reference.states[0].weights.device
    return Share(t, [torch.from_numpy(part).to(device) for part in sums], losses, overflows)
