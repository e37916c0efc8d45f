"""Scores of a task from the log-likelihoods of its texts, with standard errors.

Definitions are those of the EleutherAI harness, whose names stand in brackets in `Score.meaning`. A standard
error of a mean is the sample's deviation over sqrt(n); of a ratio of sums and of an exponential it is the
first-order one (delta method).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.evaluation.task_file import Item


@dataclass(frozen=True)
class Scored:
    """Continuation of an item: nats of its tokens (at most 0), their number, True if each was likeliest."""

    nats: float
    tokens: int
    greedy: bool


@dataclass(frozen=True)
class Score:
    """Score with its standard error. value: None if it overflows. standard_error: None with fewer than two
    samples, or if the value overflows. meaning: text for people."""

    value: float | None
    standard_error: float | None
    meaning: str


def choice_scores(items: Sequence[Item], scored: Sequence[Sequence[Scored]]) -> dict[str, Score]:
    """Scores of multiple choice by name: the share of items whose right choice has the highest log-likelihood
    (as a whole, per character, per token; of equal ones the first counts), and the share that drawing a
    choice would get. scored: for each item its choices, in their order. There must be an item."""

    def accuracy(meaning: str, weights: Sequence[Sequence[float]]) -> Score:
        right = []
        for item, choices, weight in zip(items, scored, weights, strict=True):
            values = [each.nats / size for each, size in zip(choices, weight, strict=True)]
            right.append(float(values.index(max(values)) == item.answer))
        return _mean(right, meaning)

    chance = statistics.fmean(1 / len(item.continuations) for item in items)
    return {
        "accuracy": accuracy("highest log-likelihood (acc)", [[1.0 for _ in each] for each in scored]),
        "accuracy_by_character": accuracy(
            "highest log-likelihood per character (acc_norm)",
            [[float(len(text)) for text in item.continuations] for item in items],
        ),
        "accuracy_by_token": accuracy(
            "highest log-likelihood per token", [[float(each.tokens) for each in row] for row in scored]
        ),
        "chance": Score(chance, None, "accuracy of drawing a choice"),
    }


def cloze_scores(scored: Sequence[Scored]) -> dict[str, Score]:
    """Scores of targets after their contexts, as for LAMBADA, by name: share of targets that are the
    likeliest tokens throughout, perplexity, nats per token. scored: one target of each item; there must be
    one."""
    mean = _mean([-each.nats for each in scored], "")
    rate = _ratio([-each.nats for each in scored], [each.tokens for each in scored])
    return {
        "accuracy": _mean([float(each.greedy) for each in scored], "greedy decoding gives the target (acc)"),
        "perplexity": _exponential(mean, "exp of the mean nats per target (perplexity)"),
        "nats_per_token": Score(*rate, "mean nats per token of the targets"),
    }


@dataclass(frozen=True)
class TextSample:
    """Sample of plain text: a document, or a window if the task has one document. nats: log-likelihood, at
    most 0. size_bytes: of its UTF-8. words: number of words between white space. Both are 0 for a window."""

    nats: float
    tokens: int
    size_bytes: int
    words: int


def text_scores(samples: Sequence[TextSample], whole: TextSample) -> dict[str, Score]:
    """Scores of plain text by name: per token, byte and word. samples: documents, or the windows of a single
    one; there must be one. whole: all text as one sample. Values are those of the samples together, with
    standard errors over the samples (None if there is only one). Windows have no bytes and words: then scores
    per byte and word are those of `whole`, with the relative error of the score per token."""
    nats = [-each.nats for each in samples]
    value, error = _ratio(nats, [each.tokens for each in samples])
    of_documents = all(each.size_bytes for each in samples)

    def rate(sizes: Sequence[int], total: int, scale: float = 1.0) -> tuple[float, float | None]:
        if of_documents:
            own, its_error = _ratio(nats, sizes)
        else:
            own = -whole.nats / total
            its_error = None if error is None else error * own / value if value else 0.0
        return own / scale, None if its_error is None else its_error / scale

    by_byte = rate([each.size_bytes for each in samples], whole.size_bytes, math.log(2))
    by_word = Score(*rate([each.words for each in samples], whole.words), "")
    return {
        "perplexity": _exponential(Score(value, error, ""), "exp of the mean nats per token"),
        "nats_per_token": Score(value, error, "mean nats per token, as a run's held-out loss"),
        "bits_per_byte": Score(*by_byte, "bits per byte of UTF-8 (bits_per_byte)"),
        "word_perplexity": _exponential(by_word, "exp of the nats per word (word_perplexity)"),
    }


def _mean(values: Sequence[float], meaning: str) -> Score:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Score(statistics.fmean(values), error, meaning)


def _ratio(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, float | None]:
    """Ratio of two sums, with its standard error over the pairs (None: fewer than two)."""
    total, n = math.fsum(bottoms), len(tops)
    value = math.fsum(tops) / total
    if n < 2:
        return value, None
    squares = math.fsum((top - value * bottom) ** 2 for top, bottom in zip(tops, bottoms, strict=True))
    return value, math.sqrt(squares * n / (n - 1)) / total


def _exponential(mean: Score, meaning: str) -> Score:
    assert mean.value is not None
    try:
        value = math.exp(mean.value)
    except OverflowError:
        return Score(None, None, meaning)
    return Score(value, None if mean.standard_error is None else value * mean.standard_error, meaning)
