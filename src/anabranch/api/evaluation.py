"""Evaluation of a trained model on a task: multiple choice, cloze, plain text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.errors import UserError

if TYPE_CHECKING:
    import torch

    from anabranch.api.model import TrainedModel
    from anabranch.evaluation.evaluate import Evaluation


def evaluate(
    path: str | Path | TrainedModel,
    task: str | Path,
    step: int | None = None,
    limit: int = 0,
    device: str = "cpu",
) -> Evaluation:
    """Scores of a trained model on a task: log-likelihoods of its choices, targets or texts.

    path: run directory, Hugging Face folder, or a model that `load` returned. task: file in the format of
    docs/how-to/evaluate-a-model.md. step: the checkpoint of a run directory after this step (None: the
    newest); ignored for the others. A model that this function loads configures torch for the whole process,
    as `load` does. limit: most lines of the task, 0: all. device: of torch, "cpu" or "cuda". `scores` of the
    result has each value with its standard error, `as_dict()` the result for JSON. Raises UserError for what
    is missing, damaged or ill-formed, naming file and line.

    >>> import anabranch
    >>> found = anabranch.evaluate("runs/tiny", "python_choices.jsonl")    # doctest: +SKIP
    >>> found.scores["accuracy"].value                                     # doctest: +SKIP
    0.75
    """
    from anabranch.api.model import load
    from anabranch.evaluation.task_file import read_task
    from anabranch.observe.console.progress import ticking

    if limit < 0:
        raise UserError("limit must not be negative; 0 takes all lines")
    read = read_task(task, limit)
    with ticking("loading the model"):
        trained = load(path, step) if isinstance(path, str | Path) else path

    from anabranch.evaluation.evaluate import EvaluatedModel
    from anabranch.evaluation.evaluate import evaluate as score
    from anabranch.train.model.interface import build
    from anabranch.train.model.linear import PlainWeights

    on = _device(device)
    weights = {name: tensor.to(on) for name, tensor in trained.weights.items()}
    functions = build(trained.config, on, next(iter(weights.values())).dtype)
    model = EvaluatedModel(trained.path, trained.t, functions, PlainWeights(weights), trained.tokenizer, on)
    return score(model, read)


def _device(name: str) -> torch.device:
    """Torch device by its name. Raises UserError if this machine lacks it."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    available = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if (device.index or 0) >= available:
        raise UserError(f"device {name!r} is not on this machine; choose cpu" + ", cuda" * (available > 0))
    return device
