"""Independent implementation: the model as an ordinary torch module, trained by torch's own AdamW.

It shares only the batches, the shape and its partition, the constants of a subspace model, the schedule, the
delay, and the draws of stochastic rounding with the rest of this package, and is given the initial weights.
Codecs at the cuts are written a second time. All else is torch's: layers, fused attention, rotary embeddings
as complex rotations, one backward through everything, `clip_grad_norm_`, `torch.optim.AdamW`. In fp64 its
steps agree with a run's up to rounding (`verify --independent`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anabranch.config import RunConfig
from anabranch.config.schema import WireSection
from anabranch.errors import ConfigError
from anabranch.train.codec.dither import dither, draw_key
from anabranch.train.model.interface import DTYPES
from anabranch.train.model.partition import partition
from anabranch.train.model.residual import fixed_embedding, subspace_basis
from anabranch.train.model.rounds import delay_of
from anabranch.train.model.sizes import ModelConfig
from anabranch.train.numerics.numerics_class import device_of
from anabranch.train.numerics.step_scalars import learning_rate
from anabranch.train.stage.run_objects import Batches, check_shape, loss_weight, master_dtype, token_ids

Widen = Callable[[Tensor], Tensor]
"""Values that a layer writes (..., stream) -> what enters the residual stream (..., dim)."""


class _LlamaAttention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.dim, c.dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.kv_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.kv_dim, bias=False)
        self.o_proj = nn.Linear(c.dim, c.stream, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        shape = (*h.shape[:2], -1, self.c.head_dim)
        q, k, v = (p(h).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(
            self._rotate(q), self._rotate(k), v, is_causal=True, enable_gqa=True
        )
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding of x (rows, heads, sequence, d): each (x[i], x[i + d/2]) is a complex number."""
        half = self.c.head_dim // 2
        turn = torch.arange(half, dtype=x.dtype, device=x.device) * 2 / self.c.head_dim
        position = torch.arange(x.shape[2], dtype=x.dtype, device=x.device)
        angle = torch.outer(position, self._stretched(self.c.rope_theta**-turn))
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), -1)

    def _stretched(self, frequency: Tensor) -> Tensor:
        """Frequencies by Llama 3.1's rule, written by wavelength with a case for each of its three bands."""
        if self.c.rope_factor == 1.0:
            return frequency
        stretched = []
        for each in frequency.tolist():
            wavelength = 2 * math.pi / each
            share = (8192 / wavelength - 1) / 3
            if wavelength > 8192:
                stretched.append(each / self.c.rope_factor)
            elif wavelength < 2048:
                stretched.append(each)
            else:
                stretched.append((1 - share) * each / self.c.rope_factor + share * each)
        return torch.tensor(stretched, dtype=frequency.dtype, device=frequency.device)


class _LlamaMLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.dim, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.stream, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return y


class _Block(nn.Module):
    """Pre-norm block of `parts` by name, in order: norm, attention, norm, feed-forward layer. What the last
    layers of both write is taken to full width by `widen`."""

    def __init__(self, widen: Widen, **parts: nn.Module) -> None:
        super().__init__()
        self.widen = widen
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        norm1, attention, norm2, mlp = self.children()
        x = x + self.widen(attention(norm1(x)))
        y: Tensor = x + self.widen(mlp(norm2(x)))
        return y


def _llama_block(c: ModelConfig, widen: Widen) -> _Block:
    return _Block(
        widen,
        input_layernorm=nn.RMSNorm(c.dim, c.norm_eps),
        self_attn=_LlamaAttention(c),
        post_attention_layernorm=nn.RMSNorm(c.dim, c.norm_eps),
        mlp=_LlamaMLP(c),
    )


class _GPTAttention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.c_attn = nn.Linear(c.dim, 3 * c.dim)
        self.c_proj = nn.Linear(c.dim, c.stream)

    def forward(self, h: Tensor) -> Tensor:
        shape = (*h.shape[:2], self.c.heads, self.c.head_dim)
        q, k, v = (x.view(shape).transpose(1, 2) for x in self.c_attn(h).split(self.c.dim, -1))
        y: Tensor = self.c_proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return y


def _gpt_block(c: ModelConfig, widen: Widen) -> _Block:
    return _Block(
        widen,
        ln_1=nn.LayerNorm(c.dim, c.norm_eps),
        attn=_GPTAttention(c),
        ln_2=nn.LayerNorm(c.dim, c.norm_eps),
        mlp=nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(c.dim, c.ffn), gelu=nn.GELU("tanh"), c_proj=nn.Linear(c.ffn, c.stream)
            )
        ),
    )


class IndependentModel(nn.Module):
    """Module: ids (rows, sequence) -> logits (rows, sequence, vocabulary); the run's parameter names."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        if c.subspace:
            self.register_buffer("basis", torch.from_numpy(subspace_basis(c.dim, c.subspace)))
            self.register_buffer("fixed", torch.from_numpy(fixed_embedding(c.vocab_size, c.dim)))
        free: list[_Block] = []
        if c.subspace:
            block = _llama_block if c.architecture == "llama" else _gpt_block
            free.append(block(replace(c, subspace=0), lambda z: z))
        body: dict[str, nn.Module]
        if c.architecture == "llama":
            body = {
                "embed_tokens": nn.Embedding(c.vocab_size, c.stream),
                "layers": nn.Sequential(*(_llama_block(c, self.widen) for _ in range(c.blocks)), *free),
                "norm": nn.RMSNorm(c.dim, c.norm_eps),
            }
            self.model = nn.ModuleDict(body)
        else:
            body = {
                "wte": nn.Embedding(c.vocab_size, c.stream),
                "wpe": nn.Embedding(c.max_sequence, c.stream),
                "h": nn.Sequential(*(_gpt_block(c, self.widen) for _ in range(c.blocks)), *free),
                "ln_f": nn.LayerNorm(c.dim, c.norm_eps),
            }
            self.transformer = nn.ModuleDict(body)
        if not c.tied:
            self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, ids: Tensor, cut: Callable[[Tensor, int], Tensor] = lambda x, blocks: x) -> Tensor:
        """Logits of token ids. cut(x, blocks): what is received of x, the output of that many blocks."""
        if self.c.architecture == "llama":
            m = self.model
            table, x = m.get_parameter("embed_tokens.weight"), m["embed_tokens"](ids)
            blocks, norm = m["layers"], m["norm"]
        else:
            m = self.transformer
            table, x = m.get_parameter("wte.weight"), m["wte"](ids)
            x = x + m["wpe"](torch.arange(ids.shape[1], device=ids.device))
            blocks, norm = m["h"], m["ln_f"]
        x = self.embedded(ids, x)
        x = cut(x, 0)
        for number, block in enumerate(blocks.children(), start=1):
            x = cut(block(x), number)
        y = norm(x)
        logits: Tensor = F.linear(y, table) if self.c.tied else self.lm_head(y)
        return logits

    def widen(self, z: Tensor) -> Tensor:
        """Values z of the residual stream at the model's width: U z in a subspace model, else z."""
        return z @ self.get_buffer("basis").T if self.c.subspace else z

    def embedded(self, ids: Tensor, z: Tensor) -> Tensor:
        """Residual stream before the first block, from the trained embedding z."""
        return self.widen(z) + self.get_buffer("fixed")[ids] if self.c.subspace else z


class _Cut(torch.autograd.Function):
    """Rounding of an activation, and of its gradient, as the codecs of the run file do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: WireSection, key: int) -> Tensor:
        ctx.wire, ctx.key = wire, key
        return _rounded(x, wire.activations, wire.block, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        key = ctx.key if ctx.wire.gradient_rounding == "stochastic" else None
        return _rounded(dy, ctx.wire.gradients, ctx.wire.block, key), None, None


def _rounded(x: Tensor, codec: str, block: int, key: int | None) -> Tensor:
    """Decoded value of x encoded by `codec` (blocks of `block` values). key: of the draws of stochastic
    rounding; None: to the nearest."""
    if codec == "none":
        return x.clone()
    if codec in ("bf16", "fp16"):
        return x.to(torch.bfloat16 if codec == "bf16" else torch.float16).to(x.dtype)
    levels = {"int8": 127, "int4": 7}[codec]
    padded = F.pad(x.reshape(-1), (0, -x.numel() % block)).view(-1, block)
    mantissa, exponent = torch.frexp((padded.abs().amax(1, keepdim=True) / levels).float())
    scale = torch.ldexp(torch.ceil(mantissa * 256) / 256, exponent).to(x.dtype)
    steps = padded / torch.where(scale > 0, scale, torch.ones_like(scale))
    if key is None:
        steps = torch.round(steps)
    else:
        draws = dither(key, 0, steps.numel(), x.device).to(x.dtype).view_as(steps)
        steps = torch.floor(steps + draws).clamp(-levels, levels)
    return (steps * scale).view(-1)[: x.numel()].view_as(x)


@dataclass(frozen=True)
class IndependentStep:
    """Result of a step: mean loss (nats per token), global norm before clipping, learning rate."""

    t: int
    loss: float
    norm: float
    learning_rate: float


class IndependentReference:
    """Training of `IndependentModel` on the run's batches: `step(t)` for t = 1, 2, ..."""

    def __init__(
        self, run: RunConfig, model: ModelConfig, batches: Batches, initial: Mapping[str, Tensor]
    ) -> None:
        """Start from the weights `initial`, by name, in the run's master dtype. Raises ConfigError for
        sequences that are too long, and for what this implementation lacks: models but llama and gpt,
        optimizers but AdamW, adapters, codecs in a subspace, rounds of islands."""
        check_shape(run, model)
        if model.architecture not in ("llama", "gpt"):
            raise ConfigError(
                f"the independent implementation has llama and gpt only, not {model.architecture}: verify "
                "without --independent"
            )
        if run.optimizer.kind != "adamw":
            raise ConfigError("the independent implementation has AdamW only: verify without --independent")
        if run.lora.rank:
            raise ConfigError("the independent implementation has no adapters: verify without --independent")
        if run.round.slots:
            raise ConfigError("the independent implementation has no islands: verify without --independent")
        if model.subspace and (run.wire.activations, run.wire.gradients) != ("none", "none"):
            raise ConfigError(
                "the independent implementation has no codecs within a subspace: verify without --independent"
            )
        self._run, self._batches, self._device = run, batches, device_of(run.compute)
        dtype = master_dtype(DTYPES[run.compute.dtype])
        self._cuts = {spec.last_block + 1: spec.stage for spec in partition(model, run.pipeline)}
        self.module = IndependentModel(model).to(dtype).to(self._device)
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(initial[name])
        o = run.optimizer
        parameters = list(self.module.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": o.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
        self._delay = delay_of(run)
        self._seen: dict[int, list[Tensor]] = {}
        """Delayed iteration -> parameters that it computes with."""

    def step(self, t: int) -> IndependentStep:
        """Take step t, which follows the last one, on the whole batch; changes the weights, and calls
        `passed`."""
        run = self._run
        self.optimizer.zero_grad()
        own = self._exchange(self._seen.pop(t, None))
        total = 0.0
        for index in range(run.batch.microbatches):
            loss = self._loss(t, index)
            (loss / self._batches.tokens_per_iteration).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self._exchange(own)
        clip = run.optimizer.clip if run.optimizer.clip > 0 else float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip))
        rate = learning_rate(run, t)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.passed(t)
        return IndependentStep(t, total / self._batches.tokens_per_iteration, norm, rate)

    def passed(self, t: int) -> None:
        """Predict the parameters with which iteration t + 2 computes, if that is delayed. `step` calls it;
        the caller does after an iteration t that the run skipped."""
        if not self._delay.has(t + 2):
            return
        seen = []
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                kept, value = self.optimizer.state.get(parameter), parameter.detach().clone()
                if kept:
                    n = float(kept["step"])
                    mean = kept["exp_avg"] / (1 - self._run.optimizer.beta1**n)
                    square = kept["exp_avg_sq"] / (1 - self._run.optimizer.beta2**n)
                    value -= group["lr"] * group["weight_decay"] * value
                    value -= group["lr"] * mean / (square.sqrt() + self._run.optimizer.eps)
                seen.append(value)
        self._seen[t + 2] = seen

    def _exchange(self, values: list[Tensor] | None) -> list[Tensor] | None:
        """Put `values` (in the optimizer's order) into the parameters and return the former values, so that a
        delayed iteration's gradients come from predicted weights. Does nothing, and returns None, for
        None."""
        if values is None:
            return None
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        former = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        return former

    def evaluate(self, windows: int) -> list[tuple[float, int]]:
        """(loss sum in nats, tokens) of each of the first `windows` held-out windows."""
        first, batch = self._run.batch.microbatches, self._run.batch
        with torch.no_grad():
            return [(float(self._loss(0, first + w)), batch.rows * batch.sequence) for w in range(windows)]

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments by "weights/NAME", "exp_avg/NAME", "exp_avg_sq/NAME"."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.module.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            tensors[f"weights/{name}"] = parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                tensors[f"{moment}/{name}"] = state.get(moment, torch.zeros_like(parameter)).detach()
        return tensors

    def _loss(self, t: int, index: int) -> Tensor:
        ids, targets = token_ids(self._batches, self._run.batch.microbatches, t, index, self._device)

        def cut(x: Tensor, blocks: int) -> Tensor:
            if blocks not in self._cuts:
                return x
            key = draw_key("wire", self._run.run.seed, t, index, self._cuts[blocks])
            crossed: Tensor = _Cut.apply(x, self._run.wire, key)  # type: ignore[no-untyped-call]
            return crossed

        weight = loss_weight(self._batches, self._run.batch.microbatches, t, index)
        loss = F.cross_entropy(self.module(ids, cut).flatten(0, 1), targets.flatten(), reduction="sum")
        return loss * weight
