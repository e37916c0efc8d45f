"""Check of a run by an independent implementation: a torch module, autograd and torch's AdamW in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from anabranch.audit.error_bounds import Vectors
from anabranch.audit.log_comparison import Label, as_vectors
from anabranch.audit.run_inputs import Inputs
from anabranch.protocol.consensus.log_replay import LogReplay
from anabranch.train.model.interface import DTYPES
from anabranch.train.reference.independent import IndependentReference
from anabranch.train.stage.run_objects import master_dtype


def independent_vectors(
    inputs: Inputs,
    history: LogReplay,
    checkpoints: Sequence[int],
    advance: Callable[[float], None] = lambda amount: None,
    dtype: str = "fp64",
) -> Vectors:
    """Result of training the independent module in `dtype`: its tensors at the checkpoints, and series of
    numbers with the labels of `logged_vectors` with `means`. It trains on the run's batches from the run's
    initial weights and leaves out iterations that the log skipped. checkpoints: their steps. `advance(1)` is
    called after each iteration."""
    run = replace(inputs.run, compute=replace(inputs.run.compute, dtype=dtype))
    weights = {
        name.removeprefix("weights/"): tensor.to(master_dtype(DTYPES[dtype]))
        for name, tensor in inputs.reference().tensors().items()
        if name.startswith("weights/")
    }
    independent = IndependentReference(run, inputs.model, inputs.batches, weights)
    tensors: dict[Label, Tensor] = {}
    series: dict[str, list[float]] = {"mean losses": [], "norms": [], "evaluations": []}

    def arrive(t: int) -> None:
        if t in history.evaluations:
            windows = independent.evaluate(len(history.evaluations[t].loss_sums))
            series["evaluations"] += [loss for loss, _ in windows]
        if t in checkpoints:
            for name, tensor in independent.tensors().items():
                tensors[t, name] = tensor.to("cpu", copy=True)

    arrive(0)
    for commit in history.commits:
        if commit.verdict == "step":
            step = independent.step(commit.t)
            series["mean losses"].append(step.loss)
            series["norms"].append(step.norm)
        else:
            independent.passed(commit.t)
        arrive(commit.t)
        advance(1.0)
    return {**tensors, **as_vectors(history.t, series)}
