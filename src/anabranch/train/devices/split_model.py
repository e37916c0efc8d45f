"""Model whose blocks are computed on several devices of one machine, one block after the other."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from anabranch.train.model.interface import build
from anabranch.train.model.layout import Shape
from anabranch.train.model.linear import Weights
from anabranch.train.model.residual import ResidualStream
from anabranch.train.model.sizes import ModelConfig


class SplitModel:
    """Model of which each block is computed on its device; see `interface.Model`. Embedding and head are on
    the device of the first block. There x enters, and there it leaves behind the last block; in between it is
    moved. A move changes no bit, and every operation has the shapes that it has on one device: so results and
    gradients keep their bits, if the devices are alike."""

    def __init__(self, config: ModelConfig, at: Mapping[int, torch.device], dtype: torch.dtype) -> None:
        """at: block -> device, of all blocks that this peer computes, in order."""
        self.config, self._at = config, dict(at)
        self._models = {device: build(config, device, dtype) for device in dict.fromkeys(at.values())}
        self.home, self._last = next(iter(at.values())), max(at)
        self._first = self._models[self.home]
        self.tables: tuple[str, ...] = self._first.tables
        self.embedding_scale: float = self._first.embedding_scale
        self.initial_gain: float = self._first.initial_gain
        self.loss = getattr(self._first, "loss", None)

    @property
    def stream(self) -> ResidualStream:
        return self._first.stream

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return tuple(tensor for model in self._models.values() for tensor in model.constants)

    def block_shapes(self, block: int) -> dict[str, Shape]:
        return self._first.block_shapes(block)

    def end_shapes(self) -> dict[str, Shape]:
        return self._first.end_shapes()

    def embed(self, weights: Weights, ids: Tensor) -> Tensor:
        return self._first.embed(weights, ids)

    def block(self, weights: Weights, block: int, x: Tensor) -> Tensor:
        device = self._at[block]
        y = self._models[device].block(weights, block, moved(x, device))
        return moved(y, self.home) if block == self._last else y

    def head(self, weights: Weights, x: Tensor, at: int | None = None) -> Tensor:
        return self._first.head(weights, x, at)

    def embedding_rows(self, ids: Tensor) -> tuple[tuple[str, Tensor], ...]:
        return self._first.embedding_rows(ids)

    def is_residual_output(self, name: str) -> bool:
        return self._first.is_residual_output(name)


def moved(x: Tensor, device: torch.device) -> Tensor:
    """Copy of x on `device` (x itself if it is there), as part of its autograd graph: the gradient comes back
    to the device of x."""
    return x.to(device)
