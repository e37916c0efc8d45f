"""Adapter of a user's torch modules to the interface of a model: a functional call for each block.

All parameters but the embedding tables get their gradients with the input gradient, by the very autograd that
a single process uses; nothing of a block's backward is deferred.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from anabranch.train.model.layout import Shape
from anabranch.train.model.linear import Weights
from anabranch.train.model.registry import parts_of
from anabranch.train.model.residual import FullStream, ResidualStream
from anabranch.train.model.sizes import ModelConfig

EMBEDDING, POSITIONS = "embedding.weight", "positions.weight"


class ModuleModel:
    """Registered model as functions of its weights; see `train.model.interface.Model`."""

    embedding_scale: float = 1.0
    initial_gain: float = 1.0

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        parts = parts_of(config)
        self.config = config
        self.loss = parts.loss
        self.stream: ResidualStream = FullStream(config.dim)
        self._blocks = [_Part(block, f"blocks.{n}", {}) for n, block in enumerate(parts.blocks)]
        self._head = _Part(parts.head, "head", {id(parts.embedding.weight): EMBEDDING})
        self._ends: dict[str, Shape] = {EMBEDDING: tuple(parts.embedding.weight.shape), **self._head.shapes}
        if parts.positions is not None:
            self._ends[POSITIONS] = tuple(parts.positions.weight.shape)
        self.tables = tuple(name for name in (EMBEDDING, POSITIONS) if name in self._ends)
        for part in (*self._blocks, self._head):
            part.hollow(device, dtype)

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Buffers of all modules."""
        return tuple(buffer for part in (*self._blocks, self._head) for buffer in part.module.buffers())

    def block_shapes(self, block: int) -> dict[str, Shape]:
        return dict(self._blocks[block].shapes)

    def end_shapes(self) -> dict[str, Shape]:
        return dict(self._ends)

    def embed(self, weights: Weights, ids: Tensor) -> Tensor:
        x = F.embedding(ids, weights.table(EMBEDDING))
        return x + weights.table(POSITIONS)[: ids.shape[1]] if POSITIONS in self._ends else x

    def block(self, weights: Weights, block: int, x: Tensor) -> Tensor:
        return self._blocks[block](weights, x)

    def head(self, weights: Weights, x: Tensor, at: int | None = None) -> Tensor:
        # A head may mix positions, so all logits are made even where one is wanted.
        logits = self._head(weights, x)
        return logits if at is None else logits[:, at : at + 1]

    def embedding_rows(self, ids: Tensor) -> tuple[tuple[str, Tensor], ...]:
        rows: tuple[tuple[str, Tensor], ...] = ((EMBEDDING, ids.reshape(-1)),)
        if POSITIONS in self._ends:
            positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
            rows += ((POSITIONS, positions.reshape(-1)),)
        return rows

    def is_residual_output(self, name: str) -> bool:
        return False


class _Part:
    """Module of a user's model, called with weights that the caller gives. prefix: begins the names of its
    parameters in the model. shared: id of a parameter that belongs to another part -> its name there."""

    def __init__(self, module: nn.Module, prefix: str, shared: Mapping[int, str]) -> None:
        self.module = module
        #: Name in the module -> name in the model.
        self._names = {
            name: shared.get(id(one), f"{prefix}.{name}") for name, one in module.named_parameters()
        }
        self.shapes: dict[str, Shape] = {
            self._names[name]: tuple(parameter.shape)
            for name, parameter in module.named_parameters()
            if id(parameter) not in shared
        }

    def hollow(self, device: torch.device, dtype: torch.dtype) -> None:
        """Free the module's own parameters; move its buffers to the device and, if floating, to the dtype."""
        for owner in self.module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                hollow = torch.empty(parameter.shape, device="meta")
                setattr(owner, name, nn.Parameter(hollow, requires_grad=False))
            for name, buffer in owner.named_buffers(recurse=False):
                setattr(owner, name, buffer.to(device, dtype if buffer.is_floating_point() else None))

    def __call__(self, weights: Weights, x: Tensor) -> Tensor:
        given = {name: weights.small(outer) for name, outer in self._names.items()}
        y: Tensor = functional_call(self.module, given, (x,))
        return y
