"""Dense model with the same logits as a subspace model: U folded into the weights, fixed embeddings added.

What a subspace layer writes, W h with W (k, in), enters the stream as U W h: the dense layer's weight is U W
and its bias U b. The embedding of tokens is the fixed one + T Uᵀ, that of positions P Uᵀ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from anabranch.train.model.interface import all_shapes, build
from anabranch.train.model.residual import fixed_embedding, subspace_basis
from anabranch.train.model.sizes import ModelConfig


def dense_equivalent(
    weights: Mapping[str, Tensor], config: ModelConfig
) -> tuple[dict[str, Tensor], ModelConfig]:
    """Tensors by name, each in its dtype on the CPU, and shape of the dense model. `weights` are all tensors
    of the subspace model `config`. Products are taken in fp64 and rounded once. Raises KeyError if a tensor
    is missing."""
    dense = replace(config, subspace=0, blocks=config.blocks + 1)  # with the free block
    basis = torch.from_numpy(subspace_basis(config.dim, config.subspace))
    model = build(dense, torch.device("cpu"), torch.float32)
    tensors = {}
    for name, shape in all_shapes(model).items():
        narrow = weights[name].detach().cpu()
        if tuple(narrow.shape) == shape:
            tensors[name] = narrow
            continue
        wide = narrow.double()
        if name in model.tables:
            wide = wide @ basis.T
            if name == model.tables[0]:  # tokens; a second table has positions
                wide += torch.from_numpy(fixed_embedding(shape[0], config.dim))
        else:
            wide = basis @ wide
        tensors[name] = wide.to(narrow.dtype)
    return tensors, dense
