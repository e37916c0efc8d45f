"""LLaMA: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, tied or untied head.

Touvron et al., "LLaMA" (2023) and "Llama 2" (2023). Parameter names are those of Hugging Face's
`LlamaForCausalLM`; the rotary halves are laid out as there ("rotate half").
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.train.model.attention import CausalAttention
from anabranch.train.model.layout import Shape
from anabranch.train.model.linear import Weights
from anabranch.train.model.residual import StreamModel, residual_stream
from anabranch.train.model.sizes import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm"
HEAD = "lm_head.weight"
#: Sequence (tokens) that Llama 3 was trained with before its context was stretched, and the bounds of the
#: blend as fractions of it (1/4, 1/1). Values of every published Llama 3.1, 3.2 and 3.3.
ROPE_ORIGINAL_SEQUENCE, ROPE_HIGH_FACTOR, ROPE_LOW_FACTOR = 8192, 4.0, 1.0


class Llama(StreamModel):
    """LLaMA as functions of its weights; see `train.model.interface.Model`."""

    tables: tuple[str, ...] = (EMBEDDING,)
    end_names = EMBEDDING, FINAL_NORM, HEAD
    #: Activation of the gates of a feed-forward layer.
    gate: Callable[[Tensor], Tensor] = staticmethod(F.silu)

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.stream = residual_stream(config, device, dtype)
        self._attention = CausalAttention(device, dtype)
        # Angles are taken in fp32 as Hugging Face does (in fp64 for an fp64 run).
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        even = torch.arange(0, config.head_dim, 2, dtype=precise)
        frequency = 1.0 / config.rope_theta ** (even / config.head_dim)
        if config.rope_factor != 1.0:
            frequency = scaled_frequencies(frequency, config.rope_factor)
        angle = torch.outer(torch.arange(config.max_sequence, dtype=precise), frequency)
        angle = torch.cat((angle, angle), -1)[:, None, :]  # (sequence, 1, head_dim)
        self._cos = angle.cos().to(dtype).to(device)
        self._sin = angle.sin().to(dtype).to(device)

    @property
    def constants(self) -> tuple[Tensor, ...]:
        return (self._cos, self._sin, *self.stream.constants)

    def block_shapes(self, block: int) -> dict[str, Shape]:
        c, layer = self.config, f"model.layers.{block}"
        written = c.dim if block == c.free_block else c.stream
        return {
            f"{layer}.input_layernorm.weight": (c.dim,),
            f"{layer}.self_attn.q_proj.weight": (c.dim, c.dim),
            f"{layer}.self_attn.k_proj.weight": (c.kv_dim, c.dim),
            f"{layer}.self_attn.v_proj.weight": (c.kv_dim, c.dim),
            f"{layer}.self_attn.o_proj.weight": (written, c.dim),
            f"{layer}.post_attention_layernorm.weight": (c.dim,),
            f"{layer}.mlp.gate_proj.weight": (c.ffn, c.dim),
            f"{layer}.mlp.up_proj.weight": (c.ffn, c.dim),
            f"{layer}.mlp.down_proj.weight": (written, c.ffn),
        }

    def end_shapes(self) -> dict[str, Shape]:
        c = self.config
        return self._ends({EMBEDDING: (c.vocab_size, c.stream), f"{FINAL_NORM}.weight": (c.dim,)})

    def embed(self, weights: Weights, ids: Tensor) -> Tensor:
        return self.stream.begin(F.embedding(ids, weights.table(EMBEDDING)), ids)

    def embedding_rows(self, ids: Tensor) -> tuple[tuple[str, Tensor], ...]:
        return ((EMBEDDING, ids.reshape(-1)),)

    def is_residual_output(self, name: str) -> bool:
        return name.endswith(("o_proj.weight", "down_proj.weight"))

    def _layers(self, weights: Weights, block: int, z: Tensor, wide: Callable[[Tensor], Tensor]) -> Tensor:
        layer = f"model.layers.{block}"
        h = self._norm(weights, f"{layer}.input_layernorm", wide(z))
        z = z + self._attend(weights, f"{layer}.self_attn", h)
        h = self._norm(weights, f"{layer}.post_attention_layernorm", wide(z))
        gate = self.gate(weights.linear(h, f"{layer}.mlp.gate_proj.weight"))
        up = weights.linear(h, f"{layer}.mlp.up_proj.weight")
        return z + weights.linear(gate * up, f"{layer}.mlp.down_proj.weight")

    def _attend(self, weights: Weights, attention: str, h: Tensor) -> Tensor:
        rows, sequence, _ = h.shape
        c = self.config
        q = self._project(weights, h, f"{attention}.q_proj").view(rows, sequence, c.heads, c.head_dim)
        k = self._project(weights, h, f"{attention}.k_proj").view(rows, sequence, c.kv_heads, c.head_dim)
        v = self._project(weights, h, f"{attention}.v_proj").view(rows, sequence, c.kv_heads, c.head_dim)
        y = self._attention(self._rotate(q), self._rotate(k), v)
        return weights.linear(y, f"{attention}.o_proj.weight")

    def _project(self, weights: Weights, h: Tensor, name: str) -> Tensor:
        """Queries, keys or values (rows, sequence, heads·d) of h by the linear layer `name`."""
        return weights.linear(h, f"{name}.weight")

    def _rotate(self, x: Tensor) -> Tensor:
        """Turn each pair (x[i], x[i + d/2]) by its position's angle; x (rows, sequence, heads, d)."""
        sequence = x.shape[1]
        first, second = x.chunk(2, -1)
        return x * self._cos[:sequence] + torch.cat((-second, first), -1) * self._sin[:sequence]

    def _norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """x / rms(x) · gain, the gain being the weight `name`.weight; the mean square in fp32 at least."""
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.config.norm_eps)
        return scaled.to(x.dtype) * weights.small(f"{name}.weight")


def scaled_frequencies(frequency: Tensor, factor: float) -> Tensor:
    """Rotary frequencies (radians per token) by Llama 3.1's rule: those with a wavelength of more than 8,192
    tokens are divided by `factor`, those with less than a quarter of that stay, and others are blended.
    Grattafiori et al. 2024 name the aim; the rule is the published code's, Hugging Face's "llama3"."""
    turns = ROPE_ORIGINAL_SEQUENCE * frequency / (2 * math.pi)  # in the original sequence
    kept = ((turns - ROPE_LOW_FACTOR) / (ROPE_HIGH_FACTOR - ROPE_LOW_FACTOR)).clamp(0.0, 1.0)
    return (1 - kept) * frequency / factor + kept * frequency
