"""Bounds on the relative L2 distance between two runs of one seed that add floats in different orders.

In fp64 the bound up to step `FP64_STEPS` is a constant. Every other bound is twice the largest distance that
seeded permutations of the order cause in a single process, and at least one rounding (of fp64, else of fp32),
as no permutation may change a digit of a short series. The largest of all permutations is at least the
largest of the first few: once a run is within twice that, it is within the bound, and no further permutation
is replayed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from anabranch.audit.difference_counts import distance
from anabranch.audit.log_check import read_log
from anabranch.audit.log_comparison import Label, RecordedValues, as_vectors
from anabranch.audit.replay import Order, SequentialStepper, replay
from anabranch.audit.run_inputs import Inputs, open_inputs
from anabranch.executors import Processes, in_order
from anabranch.protocol.consensus.log_replay import LogReplay
from anabranch.protocol.log.records import Commit

#: Most permutations that are replayed to bound an fp32 run; a plain choice.
PERMUTATIONS = 20
#: Bound as a multiple of the largest distance of any permutation; a plain choice.
SLACK = 2.0
#: Least bound that is measured: the distance that one rounding of every value makes, in fp64 and otherwise.
FP64_ROUNDING, FP32_ROUNDING = 2.0**-52, 2.0**-23
#: Bound per tensor in fp64 up to FP64_STEPS steps; later, rounding errors have had time to grow.
FP64_BOUND = 1e-9
FP64_STEPS = 100

Vectors = Mapping[Label, Tensor]
Arrays = dict[Label, npt.NDArray[Any]]
"""Vectors as they travel between processes: as tensors each would take a file descriptor."""


def fixed_bounds(dtype: str, labels: Iterable[Label]) -> dict[Label, float]:
    """{label (of a tensor or series): greatest allowed distance from a single process} for those labels for
    which a constant is allowed: in fp64, up to step `FP64_STEPS`. Empty for another dtype. The bounds of
    other labels have to be measured."""
    return {(t, name): FP64_BOUND for t, name in labels if dtype == "fp64" and t <= FP64_STEPS}


def distances(theirs: Vectors, ours: Vectors) -> dict[Label, float]:
    """{label (of a tensor or series): L2 distance of `theirs` from `ours` over the norm of `ours`}. It is
    infinite if only one side has the label or the shapes differ."""
    found = {}
    for label in theirs.keys() | ours.keys():
        a, b = theirs.get(label), ours.get(label)
        found[label] = float("inf") if a is None or b is None or a.shape != b.shape else distance(a, b)
    return found


def logged_vectors(history: LogReplay, means: bool = False) -> dict[Label, Tensor]:
    """Losses and norms of the steps in the log that were not skipped, and losses of evaluations, as fp64
    vectors with the labels of `RecordedValues.vectors`. means: True for the mean loss of each step ("mean
    losses", as in `independent_vectors`) in place of each microbatch's sum ("losses")."""
    steps = [commit for commit in history.commits if commit.verdict == "step"]
    mean_losses = {"mean losses": [math.fsum(commit.loss_sums) / commit.tokens for commit in steps]}
    loss_sums = {"losses": [loss for commit in steps for loss in _counted_losses(commit)]}
    series = {
        **(mean_losses if means else loss_sums),
        "norms": [commit.norm for commit in steps],
        "evaluations": [
            loss for t in sorted(history.evaluations) for loss in history.evaluations[t].loss_sums
        ],
    }
    return as_vectors(history.t, series)


def _counted_losses(commit: Commit) -> list[float]:
    """Loss sums of a step's microbatches, or of the slots that count in a round."""
    owners = commit.stages[1].owners if len(commit.stages) > 1 else ()
    left_out = {k for k, owner in enumerate(owners) if owner < 0}
    return [loss for k, loss in enumerate(commit.loss_sums) if k not in left_out]


def permuted(number: int, microbatches: int) -> Order:
    """Order that gives, for an iteration, its microbatches 0 to `microbatches` - 1 in permutation `number`, a
    random one of its own for each iteration (0: ascending)."""

    def order(t: int) -> Sequence[int]:
        indices = list(range(microbatches))
        if number:
            random.Random(f"{number}/{t}").shuffle(indices)
        return indices

    return order


def replay_permutation(
    inputs: Inputs,
    history: LogReplay,
    checkpoints: Sequence[int],
    number: int,
    advance: Callable[[float], None] = lambda amount: None,
) -> Vectors:
    """Result of a replay of the whole log that adds the gradients of each iteration's microbatches in another
    order: tensors at the checkpoints, and series of numbers. number: which of the seeded random orders
    (`permuted`). checkpoints: their steps. `advance(1)` is called after each iteration."""
    recorded = RecordedValues(checkpoints, history.t)
    stepper = SequentialStepper(inputs.reference(), permuted(number, inputs.run.batch.microbatches))
    replay(history, stepper, [recorded], advance)
    return recorded.vectors()


def permutations(
    inputs: Inputs,
    history: LogReplay,
    checkpoints: Sequence[int],
    jobs: int,
    advance: Callable[[float], None],
) -> Generator[Vectors, None, None]:
    """Yield results of replays in the random orders 1, 2, ... of the microbatches (`replay_permutation`),
    `PERMUTATIONS` at most. jobs: processes that work at the same time; each replay runs in one, as shared
    float sums depend on their number. `advance` is called with the number of iterations replayed since its
    last call. Closing the generator ends the replays under way. Raises UserError if a worker process ends
    early."""
    if jobs == 1:
        for number in range(1, PERMUTATIONS + 1):
            yield replay_permutation(inputs, history, checkpoints, number, advance)
        return
    work = partial(_replay_in_worker, str(inputs.directory.path), list(checkpoints))
    where = Processes(jobs, died="a worker process of verify ended unexpectedly; use fewer --jobs")
    for arrays in in_order(where.completed(work, range(1, PERMUTATIONS + 1))):
        advance(len(history.commits))
        yield {label: torch.from_numpy(values) for label, values in arrays.items()}


def measured_bounds(
    dtype: str, found: Mapping[Label, float], ours: Vectors, permutations: Iterator[Vectors]
) -> tuple[dict[Label, float], int]:
    """(bound of every label in `found`, number of permutations used). A bound is `SLACK` times the largest
    distance of a permutation's result from `ours`, and at least one rounding of every value. dtype: of the
    computation. found: label -> distance of the run, to be judged. ours: result in the usual order.
    permutations: results in other orders, drawn until each distance is within its bound or they end."""
    least = FP64_ROUNDING if dtype == "fp64" else FP32_ROUNDING
    largest = dict.fromkeys(found, least / SLACK)
    used = 0
    while any(found[label] > SLACK * largest[label] for label in found):
        vectors = next(permutations, None)
        if vectors is None:
            break
        used += 1
        for label, apart in distances(vectors, ours).items():
            if label in largest:
                largest[label] = max(largest[label], apart)
    return {label: SLACK * value for label, value in largest.items()}, used


def _replay_in_worker(run_dir: str, checkpoints: Sequence[int], number: int) -> Arrays:
    inputs = open_inputs(Path(run_dir))
    history = read_log(inputs.directory.log).history
    vectors = replay_permutation(inputs, history, checkpoints, number)
    return {label: tensor.numpy() for label, tensor in vectors.items()}
