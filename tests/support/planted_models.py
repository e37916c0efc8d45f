"""Models with one planted fault each, for `check-model`; `sound` has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.train.model.registry import CausalModel


class Block(nn.Module):
    """Running mean over the tokens so far, through a linear layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)

    def mixed(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype).view(1, -1, 1)
        return x.cumsum(1) / counts

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(self.mixed(x)))


class Dropout(Block):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.1, training=self.training)


class State(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return super().forward(x)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(0.5)
        return super().forward(x)


class Future(Block):
    def mixed(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x)


class Unused(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.spare = nn.Parameter(torch.zeros(dim))


class Shape(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[..., :-1]


class Passing(Block):
    """Hands its input on to the next block outside x."""

    passed: list[Tensor]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = y + self.passed[-1] if self.passed and self.passed[-1].shape == x.shape else y
        self.passed.append(self.layer.weight.sum() * x)
        return y


def _model(config: Any, kind: type[Block]) -> CausalModel:
    if kind is Passing:
        Passing.passed = []
    blocks = [kind(config.dim) for _ in range(config.blocks)]
    head = nn.Linear(config.dim, config.vocab_size)
    return CausalModel(nn.Embedding(config.vocab_size, config.dim), blocks, head)


def sound(config: Any) -> CausalModel:
    return _model(config, Block)


def dropout(config: Any) -> CausalModel:
    return _model(config, Dropout)


def state(config: Any) -> CausalModel:
    return _model(config, State)


def in_place(config: Any) -> CausalModel:
    return _model(config, InPlace)


def future(config: Any) -> CausalModel:
    return _model(config, Future)


def unused(config: Any) -> CausalModel:
    return _model(config, Unused)


def shape(config: Any) -> CausalModel:
    return _model(config, Shape)


def passing(config: Any) -> CausalModel:
    return _model(config, Passing)


def wrong(config: Any) -> str:
    return "not a model"


def mean(config: Any) -> CausalModel:
    return replace(_model(config, Block), loss=lambda y, targets: y.square().mean())


class _BrokenHead(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no head for this")


def head(config: Any) -> CausalModel:
    return replace(mean(config), head=_BrokenHead())
