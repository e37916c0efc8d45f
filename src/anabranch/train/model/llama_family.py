"""Relatives of LLaMA: Mistral (sliding window), Qwen2 (biases of queries, keys and values), Gemma.

Jiang et al., "Mistral 7B" (2023); Yang et al., "Qwen2 Technical Report" (2024); Gemma Team, "Gemma" (2024).
Parameter names are those of Hugging Face's `MistralForCausalLM`, `Qwen2ForCausalLM` and `GemmaForCausalLM`.
The width of a head is a value of its own (`ModelConfig.head_width`) in all of them.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.train.model.attention import CausalAttention
from anabranch.train.model.layout import Shape
from anabranch.train.model.linear import Weights
from anabranch.train.model.llama import Llama
from anabranch.train.model.sizes import ModelConfig


class Mistral(Llama):
    """Mistral: a token attends to the last `window` tokens only, itself included."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device, dtype)
        self._attention = CausalAttention(device, dtype, config.window)

    def block_shapes(self, block: int) -> dict[str, Shape]:
        c, attention = self.config, f"model.layers.{block}.self_attn"
        return super().block_shapes(block) | {
            f"{attention}.q_proj.weight": (c.attention_dim, c.dim),
            f"{attention}.o_proj.weight": (c.dim, c.attention_dim),
        }


class Qwen2(Mistral):
    """Qwen2: queries, keys and values have biases."""

    def block_shapes(self, block: int) -> dict[str, Shape]:
        c, attention = self.config, f"model.layers.{block}.self_attn"
        return super().block_shapes(block) | {
            f"{attention}.q_proj.bias": (c.attention_dim,),
            f"{attention}.k_proj.bias": (c.kv_dim,),
            f"{attention}.v_proj.bias": (c.kv_dim,),
        }

    def _project(self, weights: Weights, h: Tensor, name: str) -> Tensor:
        return weights.linear(h, f"{name}.weight", f"{name}.bias")


class Gemma(Mistral):
    """Gemma: embeddings times sqrt(dim), norms that multiply by 1 + gain, GELU gates (tanh form)."""

    #: Gain of a norm in initial weights; 1 is added to it.
    initial_gain = 0.0
    gate = staticmethod(partial(F.gelu, approximate="tanh"))

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, device, dtype)
        # Rounded to the dtype, as in the published model.
        self.embedding_scale = float(torch.tensor(math.sqrt(config.dim)).to(dtype))

    def embed(self, weights: Weights, ids: Tensor) -> Tensor:
        return super().embed(weights, ids) * self.embedding_scale

    def _norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        """x / rms(x) · (1 + gain), all of it in fp32 at least, then in the dtype of x. The gain is the weight
        `name`.weight."""
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.config.norm_eps)
        return (scaled * (1.0 + weights.small(f"{name}.weight").to(wide.dtype))).to(x.dtype)
