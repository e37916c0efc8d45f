"""Causal self-attention with a deterministic backward."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


class CausalAttention:
    """Causal attention softmax(q kᵀ / sqrt(d) + mask) v, grouped queries included.

    On CPUs it is written out as two products and a softmax: measured faster than
    `scaled_dot_product_attention` at these sizes, and deterministic. Accelerators use the flash kernel where
    the dtype allows it (its backward honours `use_deterministic_algorithms`) or plain math. The
    memory-efficient kernel is never used: its backward adds in no fixed order.

    window: tokens that a token attends to, itself included; 0 for all before it. On accelerators a sequence
    that is longer than the window is computed with plain math.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, window: int = 0) -> None:
        self._window = window
        self._on_cpu = device.type == "cpu"
        self._dtype = dtype
        self._masks: dict[int, Tensor] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (rows, sequence, heads, d), k, v (rows, sequence, kv_heads, d) -> (rows, sequence, heads·d)."""
        rows, sequence, heads, d = q.shape
        kv_heads = k.shape[2]
        if not self._on_cpu:
            mask = self._mask(sequence).to(q.device) if 0 < self._window < sequence else None
            flash = [SDPBackend.FLASH_ATTENTION] if mask is None else []
            with sdpa_kernel([*flash, SDPBackend.MATH], set_priority=True):
                y = F.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask, is_causal=mask is None,
                    enable_gqa=kv_heads != heads,
                )  # fmt: skip
            return y.transpose(1, 2).reshape(rows, sequence, heads * d)
        group = heads // kv_heads
        # Query heads of a group share their keys: they become further rows of the same product.
        q = (q / math.sqrt(d)).view(rows, sequence, kv_heads, group, d).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows, kv_heads, group * sequence, d)
        scores = q @ k.permute(0, 2, 3, 1)
        scores = scores.view(rows, kv_heads, group, sequence, sequence) + self._mask(sequence)
        p = torch.softmax(scores, -1).view(rows, kv_heads, group * sequence, sequence)
        y = (p @ v.transpose(1, 2)).view(rows, kv_heads, group, sequence, d)
        return y.permute(0, 3, 1, 2, 4).reshape(rows, sequence, heads * d)

    def _mask(self, sequence: int) -> Tensor:
        """Additive mask (sequence, sequence): -inf after a token and before its window, else 0."""
        if sequence not in self._masks:
            hidden = torch.ones(sequence, sequence, dtype=torch.bool).triu(1)
            if self._window:
                hidden |= torch.ones(sequence, sequence, dtype=torch.bool).tril(-self._window)
            self._masks[sequence] = torch.zeros(sequence, sequence, dtype=self._dtype).masked_fill(
                hidden, float("-inf")
            )
        return self._masks[sequence]
