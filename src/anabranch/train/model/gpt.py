"""GPT-2: learned positions, LayerNorm, GELU (tanh form), biases everywhere, tied or untied head.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Parameter names are those of
Hugging Face's `GPT2LMHeadModel`; linear weights are (out, in) here and (in, out) there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.train.model.attention import CausalAttention
from anabranch.train.model.layout import Shape
from anabranch.train.model.linear import Weights
from anabranch.train.model.residual import StreamModel, residual_stream
from anabranch.train.model.sizes import ModelConfig

EMBEDDING = "transformer.wte.weight"
POSITIONS = "transformer.wpe.weight"
FINAL_NORM = "transformer.ln_f"
HEAD = "lm_head.weight"


class GPT(StreamModel):
    """GPT-2 as functions of its weights; see `train.model.interface.Model`."""

    tables: tuple[str, ...] = (EMBEDDING, POSITIONS)
    end_names = EMBEDDING, FINAL_NORM, HEAD

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.stream = residual_stream(config, device, dtype)
        self._attention = CausalAttention(device, dtype)

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return self.stream.constants

    def block_shapes(self, block: int) -> dict[str, Shape]:
        c, layer = self.config, f"transformer.h.{block}"
        written = c.dim if block == c.free_block else c.stream
        return {
            f"{layer}.ln_1.weight": (c.dim,),
            f"{layer}.ln_1.bias": (c.dim,),
            f"{layer}.attn.c_attn.weight": (3 * c.dim, c.dim),  # queries, keys and values in one product
            f"{layer}.attn.c_attn.bias": (3 * c.dim,),
            f"{layer}.attn.c_proj.weight": (written, c.dim),
            f"{layer}.attn.c_proj.bias": (written,),
            f"{layer}.ln_2.weight": (c.dim,),
            f"{layer}.ln_2.bias": (c.dim,),
            f"{layer}.mlp.c_fc.weight": (c.ffn, c.dim),
            f"{layer}.mlp.c_fc.bias": (c.ffn,),
            f"{layer}.mlp.c_proj.weight": (written, c.ffn),
            f"{layer}.mlp.c_proj.bias": (written,),
        }

    def end_shapes(self) -> dict[str, Shape]:
        c = self.config
        return self._ends(
            {
                EMBEDDING: (c.vocab_size, c.stream),
                POSITIONS: (c.max_sequence, c.stream),
                f"{FINAL_NORM}.weight": (c.dim,),
                f"{FINAL_NORM}.bias": (c.dim,),
            }
        )

    def embed(self, weights: Weights, ids: Tensor) -> Tensor:
        z = F.embedding(ids, weights.table(EMBEDDING)) + weights.table(POSITIONS)[: ids.shape[1]]
        return self.stream.begin(z, ids)

    def embedding_rows(self, ids: Tensor) -> tuple[tuple[str, Tensor], ...]:
        positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        return ((EMBEDDING, ids.reshape(-1)), (POSITIONS, positions.reshape(-1)))

    def is_residual_output(self, name: str) -> bool:
        return name.endswith("c_proj.weight")

    def _layers(self, weights: Weights, block: int, z: Tensor, wide: Callable[[Tensor], Tensor]) -> Tensor:
        layer = f"transformer.h.{block}"
        z = z + self._attend(weights, f"{layer}.attn", self._norm(weights, f"{layer}.ln_1", wide(z)))
        h = self._norm(weights, f"{layer}.ln_2", wide(z))
        h = weights.linear(h, f"{layer}.mlp.c_fc.weight", f"{layer}.mlp.c_fc.bias")
        h = F.gelu(h, approximate="tanh")
        return z + weights.linear(h, f"{layer}.mlp.c_proj.weight", f"{layer}.mlp.c_proj.bias")

    def _attend(self, weights: Weights, attention: str, h: Tensor) -> Tensor:
        rows, sequence, _ = h.shape
        c = self.config
        qkv = weights.linear(h, f"{attention}.c_attn.weight", f"{attention}.c_attn.bias")
        q, k, v = qkv.view(rows, sequence, 3, c.heads, c.head_dim).unbind(2)
        y = self._attention(q, k, v)
        return weights.linear(y, f"{attention}.c_proj.weight", f"{attention}.c_proj.bias")

    def _norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        gain, bias = weights.small(f"{name}.weight"), weights.small(f"{name}.bias")
        return F.layer_norm(x, (self.config.dim,), gain, bias, self.config.norm_eps)
