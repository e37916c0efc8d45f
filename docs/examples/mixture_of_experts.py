"""Mixture of experts for anabranch: two of four experts for each token, as torch modules of one's own.

    export ANABRANCH_MODELS=moe=mixture_of_experts:build PYTHONPATH=docs/examples
    anabranch check-model moe.toml && anabranch train moe.toml

with `architecture = "moe"` under [model] in moe.toml (docs/tutorials/own-model.md).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch import CausalModel

EXPERTS, CHOSEN = 4, 2


class Experts(nn.Module):
    """Feed-forward layer of the experts that the router likes best for a token, weighted by its opinion."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, dim, ffn))
        self.down = nn.Parameter(torch.empty(EXPERTS, ffn, dim))

    def forward(self, x: Tensor) -> Tensor:
        # All experts compute all tokens, and most results count zero: simple, exact, and fine for a few small
        # experts. Every parameter takes part in every forward pass, as a stage needs.
        opinion = torch.softmax(self.router(x), -1)
        least = opinion.topk(CHOSEN, -1).values[..., -1:]
        share = torch.where(opinion >= least, opinion, torch.zeros_like(opinion))
        share = share / share.sum(-1, keepdim=True)
        inner = F.silu(torch.einsum("rsd,edf->resf", x, self.up))
        return torch.einsum("resf,efd,rse->rsd", inner, self.down, share)


class Block(nn.Module):
    """Attention, then experts, each behind a norm."""

    def __init__(self, dim: int, heads: int, ffn: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.experts = Experts(dim, ffn)
        self.register_buffer("hidden", torch.ones(longest, longest, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        rows, sequence, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (dim // self.heads) ** 0.5
        scores = scores.masked_fill(self.hidden[:sequence, :sequence], float("-inf"))
        y = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(rows, sequence, dim)
        x = x + self.out(y)
        return x + self.experts(self.norm2(x))


def build(config) -> CausalModel:
    """Model of a run file's shape: dim, blocks, heads, ffn, vocab_size, max_sequence, tied."""
    embedding = nn.Embedding(config.vocab_size, config.dim)
    head = nn.Linear(config.dim, config.vocab_size, bias=False)
    if config.tied:
        head.weight = embedding.weight
    return CausalModel(
        embedding=embedding,
        blocks=[
            Block(config.dim, config.heads, config.ffn, config.max_sequence) for _ in range(config.blocks)
        ],
        head=nn.Sequential(nn.RMSNorm(config.dim, 1e-5), head),
        positions=nn.Embedding(config.max_sequence, config.dim),
    )
