"""Model with low-rank adapters: y = W x + b + (alpha / rank) B A x, where only A and B are trained.

Hu et al., "LoRA" (2021), arXiv 2106.09685. Names, shapes, scale and initial values are those of Hugging
Face's PEFT without dropout: A (rank, in) uniform in ±1/sqrt(in), B (out, rank) zero. The adapters are
ordinary linear layers of the stage: their weight gradients are deferred and summed as all others are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.config import LoraSection, RunConfig
from anabranch.errors import ConfigError
from anabranch.train.devices.split_model import SplitModel
from anabranch.train.model.interface import DTYPES, LORA_A, LORA_B, Model, build
from anabranch.train.model.layout import Shape
from anabranch.train.model.linear import Weights
from anabranch.train.model.registry import ARCHITECTURES
from anabranch.train.model.residual import ResidualStream
from anabranch.train.model.sizes import ModelConfig

_WEIGHT = "weight"


def adapter_names(weight: str) -> tuple[str, str]:
    """Names of the adapters A and B of a linear layer's weight."""
    layer = weight.removesuffix(_WEIGHT)
    return layer + LORA_A, layer + LORA_B


class LoraModel:
    """Model whose weights are frozen, with adapters as its only parameters; see `interface.Model`."""

    tables: tuple[str, ...] = ()
    embedding_scale: float = 1.0
    initial_gain: float = 1.0

    def __init__(self, base: Model, lora: LoraSection) -> None:
        """base: the plain model. Raises ConfigError for an unknown target, and for a model of an architecture
        that gets no adapters."""
        self.base, self.config = base, base.config
        self.rank, self.alpha = lora.rank, lora.alpha
        self.scale = lora.alpha / lora.rank
        self._targets = _targets(base, lora.targets)
        self.frozen: dict[str, Tensor] = {}
        """Frozen weights of the stage by name, in the compute dtype; empty until `use`."""

    def use(self, frozen: Mapping[str, Tensor]) -> None:
        """Set the frozen weights, by name, which replace those set before; the mapping is copied, the tensors
        are not."""
        self.frozen = dict(frozen)

    @property
    def stream(self) -> ResidualStream:
        return self.base.stream

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return (*self.base.constants, *self.frozen.values())

    def block_shapes(self, block: int) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for weight, shape in self.base.block_shapes(block).items():
            if self.is_target(weight):
                a, b = adapter_names(weight)
                shapes |= {a: (self.rank, shape[1]), b: (shape[0], self.rank)}
        return shapes

    def end_shapes(self) -> dict[str, Shape]:
        return {}

    @property
    def targets(self) -> list[str]:
        """Names of the kinds of linear layers that have adapters in every block, such as `q_proj`."""
        return [target.split(".")[1] for target in self._targets]

    def is_target(self, weight: str) -> bool:
        """True if a parameter of a block is the weight of a layer with adapters."""
        return weight.endswith(self._targets)

    def embed(self, weights: Weights, ids: Tensor) -> Tensor:
        return self.base.embed(self._adapted(weights), ids)

    def block(self, weights: Weights, block: int, x: Tensor) -> Tensor:
        return self.base.block(self._adapted(weights), block, x)

    def head(self, weights: Weights, x: Tensor, at: int | None = None) -> Tensor:
        return self.base.head(self._adapted(weights), x, at)

    def embedding_rows(self, ids: Tensor) -> tuple[tuple[str, Tensor], ...]:
        return ()

    def is_residual_output(self, name: str) -> bool:
        return False

    def _adapted(self, weights: Weights) -> _Adapted:
        return _Adapted(self, weights)


class _Adapted:
    """Parameters as the plain model reads them in a LoRA forward: frozen weights, and for a layer with
    adapters the adapters' output, scaled by alpha / rank, is added to the frozen layer's; the weights are not
    merged. The frozen weights are those that `LoraModel.use` set before this is made (none: reading raises
    KeyError)."""

    def __init__(self, model: LoraModel, adapters: Weights) -> None:
        self._model, self._adapters, self._frozen = model, adapters, model.frozen

    def linear(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        y = F.linear(x, self._frozen[weight], None if bias is None else self._frozen[bias])
        if not self._model.is_target(weight):
            return y
        a, b = adapter_names(weight)
        return y + self._adapters.linear(self._adapters.linear(x, a), b) * self._model.scale

    def small(self, name: str) -> Tensor:
        return self._frozen[name]

    def table(self, name: str) -> Tensor:
        return self._frozen[name]


def _targets(base: Model, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Endings of the names of the weights that get adapters. wanted: names of kinds of linear layers in a
    block; empty: all of them. Raises ConfigError for a layer that the model does not have, and for an
    architecture without adapters."""
    config = base.config
    if config.architecture not in ARCHITECTURES or config.subspace:
        raise ConfigError(
            f"lora.rank: adapters are for {', '.join(ARCHITECTURES)} without subspace, not for "
            f"{config.architecture}: set lora.rank to 0"
        )
    layers = [name for name, shape in base.block_shapes(0).items() if len(shape) == 2]
    known = [name.split(".")[-2] for name in layers]
    for target in wanted:
        if not any(name.endswith(f".{target}.{_WEIGHT}") for name in layers):
            raise ConfigError(
                f"lora.targets: a {config.architecture} has no layer {target!r}; choose among "
                f"{', '.join(dict.fromkeys(known))}"
            )
    return tuple(f".{target}.{_WEIGHT}" for target in wanted or dict.fromkeys(known))


def run_model(
    run: RunConfig, config: ModelConfig, device: torch.device, at: Mapping[int, torch.device] | None = None
) -> Model:
    """Model of a run in its compute dtype, with adapters if it has some; their frozen weights are set by
    `LoraModel.use`. at: block -> device, if its blocks are computed on several. Raises ConfigError if
    adapters and model do not fit."""
    dtype = DTYPES[run.compute.dtype]
    model: Model = SplitModel(config, at, dtype) if at else build(config, device, dtype)
    return LoraModel(model, run.lora) if run.lora.rank else model


def adapted(run: RunConfig, config: ModelConfig) -> LoraModel:
    """`run_model` of a run that trains adapters, on the CPU."""
    return LoraModel(build(config, torch.device("cpu"), DTYPES[run.compute.dtype]), run.lora)


def merged(model: LoraModel, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights by name of a plain model with the same results: W + (alpha / rank) B A where `adapters` has A
    and B by name, computed in fp64 and rounded to the dtype of W, and W itself elsewhere. The frozen weights
    W must be set (`LoraModel.use`)."""
    weights = dict(model.frozen)
    for name, weight in weights.items():
        a, b = adapter_names(name)
        if a in adapters:
            change = adapters[b].double() @ adapters[a].double() * model.scale
            weights[name] = (weight.double() + change).to(weight.dtype)
    return weights
