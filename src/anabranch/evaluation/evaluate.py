"""Evaluation of a whole model on a task: windows, their log-likelihoods, scores."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from anabranch.errors import UserError
from anabranch.evaluation.log_likelihood import Likelihood, Window, log_likelihoods
from anabranch.evaluation.scores import (
    Score,
    Scored,
    TextSample,
    choice_scores,
    cloze_scores,
    text_scores,
)
from anabranch.evaluation.task_file import Item, Task
from anabranch.evaluation.windows import Tokenizer, continuation_window, text_windows
from anabranch.observe.console.progress import progress
from anabranch.train.model.interface import Model
from anabranch.train.model.linear import PlainWeights

#: Version of the JSON result.
VERSION = 1


@dataclass(frozen=True)
class Evaluation:
    """Result of a task. model, step: path that was loaded and the step of its weights. task, kind: path and
    kind of the file (`task_file`). fingerprint: BLAKE3 of the task's file. items: number of lines taken.
    samples: over what standard errors are taken, "items", "documents" or "windows". scored: each item's
    continuations, in the order of the file; of a text its windows."""

    model: str
    step: int
    task: str
    kind: str
    fingerprint: str
    items: int
    samples: str
    scores: dict[str, Score]
    scored: tuple[tuple[Scored, ...], ...] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Result as `anabranch evaluate --json` prints it."""
        scores = {
            name: {"value": score.value, "standard_error": score.standard_error}
            for name, score in self.scores.items()
        }
        names = ("model", "step", "task", "kind", "fingerprint", "items", "samples")
        return {"version": VERSION, **{name: getattr(self, name) for name in names}, "scores": scores}

    def lines(self) -> list[str]:
        """Lines of text for a terminal: one that names task, model and step, then one for each score."""
        count = f"{self.items} {'texts' if self.kind == 'text' else 'items'}"
        found = [f"{self.task}: {count}, {self.model} after step {self.step}"]
        for name, score in self.scores.items():
            value = "too large" if score.value is None else f"{score.value:.4g}"
            error = "" if score.standard_error is None else f" ± {score.standard_error:.2g}"
            found.append(f"  {name:<22}{value + error:<20}{score.meaning}")
        return found


@dataclass(frozen=True)
class EvaluatedModel:
    """Model as it is evaluated. path, step: place and step of its weights, for the result. functions: the
    model's computations, in the dtype and on the device of `weights`."""

    path: Path
    step: int
    functions: Model
    weights: PlainWeights
    tokenizer: Tokenizer
    device: torch.device


def evaluate(model: EvaluatedModel, task: Task) -> Evaluation:
    """Scores of `model` on `task`; a bar shows the progress. Raises UserError for a line that cannot be
    scored, or a model that gives no probabilities of tokens."""
    if getattr(model.functions, "loss", None) is not None:
        raise UserError(
            f"{model.path}: this model has a loss of its own, so its outputs are no logits; tasks need a "
            "model whose loss is cross-entropy"
        )
    windows = [_windows(model, item) for item in task.items]
    _check_vocabulary(model, windows)
    scored = _scored(model, task, windows)
    samples = "items"
    if task.kind == "choice":
        scores = choice_scores(task.items, scored)
    elif task.kind == "cloze":
        scores = cloze_scores([each for [each] in scored])
    else:
        texts = [_sample(item, parts) for item, parts in zip(task.items, scored, strict=True)]
        samples = "documents" if len(texts) > 1 else "windows"
        parts = texts if len(texts) > 1 else [TextSample(p.nats, p.tokens, 0, 0) for p in scored[0]]
        scores = text_scores(parts, reduce(_added, texts))
    found = (str(model.path), model.step, str(task.path), task.kind, task.fingerprint, len(task.items))
    return Evaluation(*found, samples, scores, tuple(map(tuple, scored)))


def _windows(model: EvaluatedModel, item: Item) -> list[Window]:
    """Windows of an item: one for each choice or for the target, or those of its text. Raises UserError for a
    continuation that cannot be scored."""
    most, tokenizer = model.functions.config.max_sequence, model.tokenizer
    if item.is_text:
        return list(text_windows(tokenizer, tokenizer.encode(item.continuations[0]), most))
    return [
        continuation_window(tokenizer, item.context, item.delimiter + text, most, item.where)
        for text in item.continuations
    ]


def _check_vocabulary(model: EvaluatedModel, windows: list[list[Window]]) -> None:
    largest = max((max(window.ids) for window in chain(*windows)), default=0)
    size = model.functions.config.vocab_size
    if largest >= size:
        raise UserError(
            f"{model.path}: its tokenizer has the id {largest}, its model {size} ids; put the model's own "
            "tokenizer.json beside it"
        )


def _scored(model: EvaluatedModel, task: Task, windows: list[list[Window]]) -> list[list[Scored]]:
    """Results of all windows, in the order of `windows`: for each item, for each of its windows. Computes
    them with a progress bar. Raises UserError if a likelihood is not finite."""
    flat = list(chain(*windows))
    found: dict[int, Likelihood] = {}
    with progress("scoring", sum(len(window.ids) for window in flat), unit="tokens") as advance:
        for number, one in log_likelihoods(model.functions, model.weights, model.device, flat):
            found[number] = one
            advance(len(flat[number].ids))
    numbers = iter(range(len(flat)))
    scored = []
    for item, own in zip(task.items, windows, strict=True):
        likelihoods = [found[next(numbers)] for _ in own]
        if not all(math.isfinite(each.nats) for each in likelihoods):
            raise UserError(f"{item.where}: the model's logits are not finite; its weights are damaged")
        scored.append(
            [
                Scored(each.nats, window.scored, each.greedy)
                for each, window in zip(likelihoods, own, strict=True)
            ]
        )
    return scored


def _sample(item: Item, parts: list[Scored]) -> TextSample:
    text = item.continuations[0]
    nats, tokens = math.fsum(part.nats for part in parts), sum(part.tokens for part in parts)
    return TextSample(nats, tokens, len(text.encode()), len(re.split(r"\s+", text)))


def _added(a: TextSample, b: TextSample) -> TextSample:
    return TextSample(a.nats + b.nats, a.tokens + b.tokens, a.size_bytes + b.size_bytes, a.words + b.words)
