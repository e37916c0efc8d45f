"""Interface of a model, and its initial weights as a function of the seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import blake3
import numpy as np
import torch
from torch import Tensor

from anabranch.train.model.layout import Layout, Shape
from anabranch.train.model.linear import Weights
from anabranch.train.model.partition import StageSpec
from anabranch.train.model.residual import ResidualStream
from anabranch.train.model.sizes import ModelConfig

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
#: Standard deviation of initial weights unless the run file has another, as in GPT-2.
INITIAL_STD = 0.02
#: Endings of the names of a linear layer's low-rank adapters (`train.adapters`).
LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"


class Model(Protocol):
    """A decoder-only language model as functions of its weights. A stage is the model with its other blocks
    left out: it calls `block` for the blocks that it holds, and stage 0 calls `embed` and `head`. x is (rows,
    sequence, stream.columns) throughout."""

    config: ModelConfig
    tables: tuple[str, ...]
    """Names of lookup tables, whose gradients come row by row from `embedding_rows`."""

    @property
    def stream(self) -> ResidualStream:
        """Residual stream: the layout of x between blocks."""
        ...

    @property
    def constants(self) -> tuple[Tensor, ...]:
        """Tensors on the device that every forward uses and that are not parameters."""
        ...

    embedding_scale: float
    """Factor of a table's rows in the output of `embed`."""
    initial_gain: float
    """Value of norm gains in initial weights."""

    def block_shapes(self, block: int) -> dict[str, Shape]:
        """Names and shapes of a block's parameters (linear weights are (out, in))."""
        ...

    def end_shapes(self) -> dict[str, Shape]:
        """Names and shapes of embedding (and learned positions), free block of a subspace model, final norm
        and untied head."""
        ...

    def embed(self, weights: Weights, ids: Tensor) -> Tensor:
        """Embedding of token ids (rows, sequence) as the input x (rows, sequence, stream.columns) of the
        first block; learned positions are added. In a subspace model x also carries the ids."""
        ...

    def block(self, weights: Weights, block: int, x: Tensor) -> Tensor:
        """Residual stream x after transformer block number `block`, from x before it."""
        ...

    def head(self, weights: Weights, x: Tensor, at: int | None = None) -> Tensor:
        """x -> logits (rows, sequence, vocabulary): free block of a subspace model, final norm and head. The
        head of a model with a loss of its own may give another width. at: the only position whose logits are
        wanted; the sequence of the result is then 1."""
        ...

    def embedding_rows(self, ids: Tensor) -> tuple[tuple[str, Tensor], ...]:
        """For each table that `embed` looks up: its name, and for every token (rows·sequence,) the table's
        row to which the gradient of the token's embedding is added."""
        ...

    def is_residual_output(self, name: str) -> bool:
        """True if the weight writes into the residual stream (initialised smaller by sqrt(2·blocks)). False
        for other and unknown names, and for every name of a user's own model or of adapters."""
        ...


def build(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Model:
    """Model of `config` with constants on `device`, computing in `dtype`; its functions get the weights.
    Raises ConfigError if the architecture is neither built in nor registered on this machine, or its function
    cannot be used."""
    from anabranch.train.model.gpt import GPT
    from anabranch.train.model.llama import Llama
    from anabranch.train.model.llama_family import Gemma, Mistral, Qwen2
    from anabranch.train.model.modules import ModuleModel

    kinds: dict[str, Callable[[ModelConfig, torch.device, torch.dtype], Model]] = {
        "llama": Llama, "gpt": GPT, "mistral": Mistral, "qwen2": Qwen2, "gemma": Gemma,
    }  # fmt: skip
    return kinds.get(config.architecture, ModuleModel)(config, device, dtype)


def logits_of(model: Model, weights: Weights, ids: Tensor, at: int | None = None) -> Tensor:
    """Logits (rows, sequence, vocabulary) of token ids (rows, sequence); with `at` (rows, 1, vocabulary), of
    the position `at` alone."""
    x = model.embed(weights, ids)
    for block in range(model.config.blocks):
        x = model.block(weights, block, x)
    return model.head(weights, x, at)


def all_shapes(model: Model) -> dict[str, Shape]:
    """Names and shapes of all parameters of a model."""
    shapes = model.end_shapes()
    for block in range(model.config.blocks):
        shapes.update(model.block_shapes(block))
    return shapes


def stage_layout(model: Model, spec: StageSpec) -> Layout:
    """Flat layout of the parameters of the stage `spec`, embedding and head included where it has them."""
    shapes: dict[str, Shape] = model.end_shapes() if spec.ends else {}
    for block in spec.blocks:
        shapes.update(model.block_shapes(block))
    return Layout(shapes)


def initial_tensor(
    model: Model, name: str, shape: Sequence[int], seed: int, std: float = INITIAL_STD
) -> Tensor:
    """Initial value (fp32, CPU) of one tensor: a pure function of the arguments. Norm gains are 1 (Gemma's,
    which are relative to 1, are 0), biases (vectors with names in .bias) 0, other vectors as norm gains, all
    else normal with deviation `std`, over sqrt(2·blocks) where the result enters the residual stream (GPT-2).
    Of adapters A is uniform in ±1/sqrt(in) and B is 0. Each tensor has its own counter-based generator, keyed
    by a hash of (seed, name), so the partition does not matter."""
    if name.endswith(LORA_B):
        return torch.zeros(*shape)
    if len(shape) == 1:
        return torch.zeros(*shape) if name.endswith(".bias") else torch.full(shape, model.initial_gain)
    if model.is_residual_output(name):
        std /= math.sqrt(2 * model.config.blocks)
    key = int.from_bytes(blake3.blake3(f"{seed}/{name}".encode()).digest()[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    if name.endswith(LORA_A):
        drawn = generator.random(tuple(shape), dtype=np.float32)
        return torch.from_numpy((2 * drawn - 1) * np.float32(1 / math.sqrt(shape[1])))
    values = generator.standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(values * np.float32(std))


def initial_weights(
    model: Model, layout: Layout, seed: int, dtype: torch.dtype, std: float = INITIAL_STD
) -> Tensor:
    """A stage's initial weights as a flat vector in `layout`, on the CPU (`initial_tensor`)."""
    flat = torch.empty(layout.elements, dtype=dtype)
    for name, view in layout.views(flat):
        view.copy_(initial_tensor(model, name, layout.shapes[name], seed, std))
    return flat


def weights_from_tensors(layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """A flat vector in `layout`, of `dtype` on the CPU, from named tensors; others than the layout's are
    ignored. Raises ValueError if one is missing or of another shape."""
    flat = torch.empty(layout.elements, dtype=dtype)
    for name, view in layout.views(flat):
        if name not in tensors:
            raise ValueError(f"the initial weights lack the tensor {name}")
        if tuple(tensors[name].shape) != layout.shapes[name]:
            raise ValueError(
                f"the initial weights' {name} has shape {tuple(tensors[name].shape)}, "
                f"not {layout.shapes[name]}"
            )
        view.copy_(tensors[name])
    return flat
