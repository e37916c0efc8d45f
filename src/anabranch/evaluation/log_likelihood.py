"""Log-likelihoods of token sequences under a whole model, in batches of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.train.model.interface import Model, logits_of
from anabranch.train.model.linear import PlainWeights

#: Most logits of one batch (256 MiB in fp32); a single row may have more.
BATCH_LOGITS = 1 << 26
#: Most rows of one batch: more make no product of a tiny model faster.
BATCH_ROWS = 32
#: Positions whose log-probabilities are made at a time, in fp64.
POSITIONS = 256


@dataclass(frozen=True)
class Window:
    """Tokens of which the last `scored` are predicted, each from all before it; at least one comes before."""

    ids: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class Likelihood:
    """Sum of log-probabilities (nats) of a window's scored tokens. greedy: each is the most likely one."""

    nats: float
    greedy: bool


def log_likelihoods(
    model: Model, weights: PlainWeights, device: torch.device, windows: Sequence[Window]
) -> Iterator[tuple[int, Likelihood]]:
    """Yield (index in `windows`, likelihood) for each window, longest first, a batch at a time. A window has
    at most `max_sequence` + 1 tokens. Shorter rows of a batch are padded at the end, which changes no
    result."""
    order = sorted(range(len(windows)), key=lambda number: -len(windows[number].ids))
    while order:
        length = _padded(len(windows[order[0]].ids) - 1, model.config.max_sequence)
        rows = max(1, min(BATCH_ROWS, BATCH_LOGITS // (length * model.config.vocab_size)))
        batch, order = order[:rows], order[rows:]
        inputs = [[*windows[number].ids[:-1]] for number in batch]
        ids = torch.tensor([row + [0] * (length - len(row)) for row in inputs], device=device)
        with torch.inference_mode():
            logits = logits_of(model, weights, ids)
            for row, number in enumerate(batch):
                yield number, _likelihood(logits[row], windows[number])


def _padded(length: int, most: int) -> int:
    """Length (tokens) to which the rows of a batch are padded: `length` or up to a quarter more (up to 15
    tokens for short ones), at most `most`. Few lengths occur, as each needs a mask."""
    step = max(16, 1 << (length.bit_length() - 3)) if length > 4 else 16
    return min(most, -(-length // step) * step)


def _likelihood(logits: Tensor, window: Window) -> Likelihood:
    """Likelihood of a window's scored tokens. logits: (sequence, vocabulary), for the tokens but the last;
    any padding behind them is ignored."""
    end = len(window.ids) - 1
    begin, nats, greedy = end - window.scored, 0.0, True
    for first in range(begin, end, POSITIONS):
        last = min(end, first + POSITIONS)
        some = torch.log_softmax(logits[first:last].double(), -1)
        targets = torch.tensor(window.ids[first + 1 : last + 1], device=logits.device)
        nats += float(some.gather(1, targets[:, None]).sum())
        greedy = greedy and bool((some.argmax(-1) == targets).all())
    return Likelihood(nats, greedy)
