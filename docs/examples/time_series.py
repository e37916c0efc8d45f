"""Forecast of a time series for anabranch: no language model, with a loss of its own.

    export ANABRANCH_MODELS=series=time_series:build PYTHONPATH=docs/examples
    anabranch check-model series.toml && anabranch train series.toml

with `architecture = "series"` under [model] in series.toml. A reading is a level from 0 to 94, written as one
character of a text file (chr(32 + level)), a series is a line, and `tokenizer = "bytes"` reads it as it is.
The model predicts the next level as a number, and the loss is the squared error.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from anabranch import CausalModel

FIRST, LEVELS, KERNEL = 32, 95, 5


class Block(nn.Module):
    """Convolution over the last KERNEL readings, then a feed-forward layer, each behind a norm."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
        self.mix = nn.Conv1d(dim, dim, KERNEL)
        self.up, self.down = nn.Linear(dim, ffn), nn.Linear(ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(self.norm1(x).transpose(1, 2), (KERNEL - 1, 0))
        x = x + F.silu(self.mix(past)).transpose(1, 2)
        return x + self.down(F.silu(self.up(self.norm2(x))))


def squared_error(prediction: Tensor, targets: Tensor) -> Tensor:
    """Sum of squared errors of predictions (rows, sequence, 1), in units of the whole range of levels. Line
    ends and masked positions do not count."""
    counts = (targets >= FIRST) & (targets < FIRST + LEVELS)
    error = (prediction.float().squeeze(-1) - (targets - FIRST) / (LEVELS - 1)) * counts
    return (error * error).sum()


def build(config) -> CausalModel:
    """Model of a run file's shape: dim, blocks, ffn, vocab_size."""
    return CausalModel(
        embedding=nn.Embedding(config.vocab_size, config.dim),
        blocks=[Block(config.dim, config.ffn) for _ in range(config.blocks)],
        head=nn.Sequential(nn.RMSNorm(config.dim, 1e-5), nn.Linear(config.dim, 1)),
        loss=squared_error,
    )
