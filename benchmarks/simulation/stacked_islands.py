"""Many training runs of one small LLaMA at once: their weights stacked, so that each operation serves all.

The formulas are those of `sync_methods.Trainer`, which calls a run's own modules: inner AdamW steps; rounds
with the mean or Nesterov; estimated, zero, kept or agreed moments; rounded contributions and results. Sums
are taken in fp32 and in another order, so bits differ; `tests/benchmarks/test_stacked_islands.py` compares
the two.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.data.batches import Batches
from anabranch.data.corpus import Corpus
from anabranch.train.islands.agreed_moments import course, normalise, rebase, round_scalars, update_moments
from anabranch.train.model.interface import build, stage_layout
from anabranch.train.model.llama import EMBEDDING, FINAL_NORM
from anabranch.train.model.partition import partition
from anabranch.train.model.rounds import inner_microbatches, rounds_of
from anabranch.train.model.sizes import model_config
from anabranch.train.numerics.block_float import BITS, rounded
from anabranch.train.numerics.step_scalars import CLIP_EPSILON, bias_corrections, learning_rate
from anabranch.train.stage.optimizer import decays
from anabranch.train.stage.run_objects import initial_state

CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Carried:
    """State that islands carry to the next round (runs · slots, parameters): moments; change that was not
    sent; weights after the steps ahead."""

    first: Tensor
    second: Tensor
    unsent: Tensor
    weights: Tensor


class Stack:
    """Runs that differ in learning rates and seeds only. weights, first, second: (runs, parameters); first
    is Adam's first moment while steps are synchronous, then the outer momentum."""

    def __init__(
        self, runs: Sequence[RunConfig], corpus: Corpus, lengths: Sequence[int] = (), lost: float = 0.0
    ) -> None:
        """lengths: inner steps of each slot in a round; empty: those of the run. lost: share of the
        contributions that count in no round. Both are for rounds without state of slots."""
        run = runs[0]
        shape = model_config(run.model, corpus.vocab_size)
        self.runs, self.run, self.rounds = runs, run, rounds_of(run)
        self.model = build(shape, CPU, torch.float32)
        self.layout = stage_layout(self.model, partition(shape, run.pipeline)[1])
        states = [initial_state(each, self.model, self.layout, None, CPU) for each in runs]
        self.weights = torch.stack([state.weights for state in states])
        self.first, self.second = torch.zeros_like(self.weights), torch.zeros_like(self.weights)
        self.steps = 0
        seeds = {each.run.seed: Batches(corpus, each.batch, each.run.seed) for each in runs}
        self.batches = [seeds[each.run.seed] for each in runs]
        self._carried: _Carried | None = None
        self._lengths, self._lost, self._taken = tuple(lengths), lost, [0] * self.rounds.slots
        self._draws = [random.Random(f"lost {each.run.seed}") for each in runs]
        self._decays = torch.zeros(self.weights.shape[1])
        for name, (begin, end) in self.layout.bounds.items():
            self._decays[begin:end] = float(decays(self.layout.shapes[name]))
        # Half of Hugging Face's angles: both halves of a head turn by the same ones.
        self._cos, self._sin = self.model.constants[0][:, 0], self.model.constants[1][:, 0]

    def iterate(self, t: int) -> None:
        """Take iteration t of every run: a step or a round."""
        if self.rounds.has(t):
            self._round(t)
            if t == self.rounds.last:
                self._end_rounds()
        else:
            self._step(t)
            if t == self.rounds.start:
                self._begin_rounds()

    def held_out(self, windows: int) -> list[float]:
        """Mean loss (nats per token) of each run on held-out microbatches."""
        with torch.no_grad():
            sums = torch.zeros(len(self.runs), dtype=torch.float64)
            for window in range(windows):
                pairs = [batches.evaluation_window(window) for batches in self.batches]
                ids, targets = (torch.from_numpy(np.stack(each)) for each in zip(*pairs, strict=True))
                sums += self._losses(self._views(self.weights), ids, targets).double()
        return [float(each) / windows for each in sums]

    def _step(self, t: int) -> None:
        count = self.run.batch.microbatches
        tokens = [self._tokens(k, t, range(count)) for k in range(len(self.runs))]
        self.steps += 1
        rates = torch.tensor([[learning_rate(run, self.rounds.progress(t))] for run in self.runs])
        scalars = bias_corrections(self.run.optimizer, self.steps)
        self._adamw(self.weights, self.first, self.second, tokens, rates, scalars)

    def _round(self, t: int) -> None:
        part, rounds, slots = self.run.round, self.rounds, self.rounds.slots
        begun, length, carried = rounds.progress(t - 1), rounds.length(t), self._carried
        before = self.weights.repeat_interleave(slots, 0)
        local = before.clone()
        second = self.second.repeat_interleave(slots, 0)
        steps = second_steps = self.steps
        agreed = part.first_moment == "agree"
        if agreed:
            first, steps, second_steps = self.first.repeat_interleave(slots, 0), begun, begun
        elif part.first_moment == "estimate":
            first = (self.first * self._adam_scale() / self._outer_scale(t)).repeat_interleave(slots, 0)
        else:
            first, steps = torch.zeros_like(local), 0
        taken = 0
        if carried is not None:
            if part.overlap and part.ahead == "mix":
                local.lerp_(carried.weights, part.mix)
            elif part.unsent == "local":
                local.sub_(carried.unsent)
            taken = part.overlap
            if part.first_moment == "keep":
                first, second = carried.first, carried.second
                steps, second_steps = begun + taken - rounds.start, self.steps + begun + taken - rounds.start
        lengths = self._lengths if length == part.steps and self._lengths else (length,) * slots
        for step in range(taken + 1, max(lengths) + 1):
            steps, second_steps = steps + 1, second_steps + (not agreed)
            self._inner_step((local, first, second), t, lengths, step, (steps, second_steps))
        if agreed and self._lengths:
            self._normalise(local, t, lengths)
        counted = self._counted(lengths)
        sent = self._rounded((before - local) * counted.view(-1, 1), part.contributions)
        for step in range(length + 1, length + part.overlap + 1):
            steps, second_steps = steps + 1, second_steps + 1
            self._inner_step((local, first, second), t, lengths, step, (steps, second_steps))
        if rounds.carries:
            self._carried = _Carried(first, second, before - local - sent / float(length), local)
        self._taken = [taken + steps for taken, steps in zip(self._taken, lengths, strict=True)]
        total = self._rounded(sent.view(len(self.runs), slots, -1).sum(1), part.results)
        mean, momentum = total / counted.sum(1, keepdim=True), part.outer_momentum
        if agreed:
            self._agree(mean, t)
            self.weights.sub_(mean * part.outer_lr)
            return
        self.first.mul_(momentum).add_(mean)
        self.weights.sub_((mean + momentum * self.first) * part.outer_lr)

    def _counted(self, lengths: Sequence[int]) -> Tensor:
        """Weight of each contribution (runs, slots): inner steps of the slot; 0 if it is lost. The first slot
        of a run is not lost."""
        kept = [
            [float(steps * (k == 0 or draws.random() >= self._lost)) for k, steps in enumerate(lengths)]
            for draws in self._draws
        ]
        return torch.tensor(kept)

    def _normalise(self, local: Tensor, t: int, lengths: Sequence[int]) -> None:
        """Move the weights of each island to where the round's own number of steps would have ended."""
        optimizer = self.run.optimizer
        for k, run in enumerate(self.runs):
            scalars = round_scalars(run, t)
            courses = {steps: course(run, t, steps) for steps in set(lengths)}
            for slot, steps in enumerate(lengths):
                row = local[k * len(lengths) + slot]
                for begin, end in self.layout.bounds.values():
                    parts = [one[begin:end] for one in (row, self.weights[k], self.first[k], self.second[k])]
                    decay = optimizer.weight_decay * float(self._decays[begin])
                    normalise(*parts, courses[steps], scalars, optimizer.eps, decay)

    def _agree(self, mean: Tensor, t: int) -> None:
        """Bring the moments of each run past round t, whose mean change is `mean`."""
        for k, run in enumerate(self.runs):
            vectors = self.first[k], self.second[k], mean[k], self.weights[k]
            scalars = round_scalars(run, t)
            for begin, end in self.layout.bounds.values():
                parts = [vector[begin:end] for vector in vectors]
                decay = run.optimizer.weight_decay * float(self._decays[begin])
                update_moments(*parts, scalars, run.optimizer.eps, decay)

    def _inner_step(
        self, vectors: tuple[Tensor, ...], t: int, lengths: Sequence[int], step: int, taken: tuple[int, int]
    ) -> None:
        """Take inner step `step` (1, 2, ...) of round t in place, of each island that has as many, ahead of
        the round or not. vectors: weights, first and second moment of all islands. lengths: steps of each
        slot. taken: steps of each moment, this one included."""
        run, rounds, count = self.run, self.rounds, inner_microbatches(self.run)
        begun, length, ahead = rounds.progress(t - 1), rounds.length(t), step > max(lengths)
        active = [slot for slot, steps in enumerate(lengths) if ahead or step <= steps]
        tokens = [
            self._tokens(k, rounds.start + self._taken[slot] + step, range(slot * count, (slot + 1) * count))
            for k in range(len(self.runs))
            for slot in active
        ]
        at = [begun - (-min(step, lengths[slot]) * length // lengths[slot]) for slot in active]
        rates = torch.tensor([[learning_rate(each, one)] for each in self.runs for one in at])
        one, _ = bias_corrections(run.optimizer, taken[0])
        _, two = bias_corrections(run.optimizer, taken[1])
        held = 1.0 / rounds.slots**2 if run.round.first_moment == "agree" else 0.0
        if len(active) == len(lengths):
            self._adamw(*vectors, tokens, rates, (one, two), held)
            return
        rows = torch.tensor([k * len(lengths) + slot for k in range(len(self.runs)) for slot in active])
        parts = tuple(vector[rows] for vector in vectors)
        self._adamw(*parts, tokens, rates, (one, two), held)
        for vector, part in zip(vectors, parts, strict=True):
            vector[rows] = part

    @staticmethod
    def _rounded(values: Tensor, kind: str) -> Tensor:
        return torch.stack([rounded(each, BITS[kind]) for each in values]) if BITS[kind] else values

    def _begin_rounds(self) -> None:
        if self.run.round.first_moment == "estimate":
            self.first = self.first * self._outer_scale(self.rounds.start + 1) / self._adam_scale()
        elif self.run.round.first_moment != "agree":
            self.first.zero_()

    def _end_rounds(self) -> None:
        if self.run.round.first_moment == "estimate":
            self.first = self.first * self._adam_scale() / self._outer_scale(self.rounds.last + 1)
        elif self.run.round.first_moment == "agree":
            rebase(
                *(self.run.optimizer, self.first, self.second),
                *(self.rounds.progress(self.rounds.last), self.steps),
            )
        else:
            self.first.zero_()

    def _adam_scale(self) -> Tensor:
        one, two = bias_corrections(self.run.optimizer, max(1, self.steps))
        scale: Tensor = one * (self.second.sqrt() / two**0.5 + self.run.optimizer.eps)
        return scale

    def _outer_scale(self, t: int) -> Tensor:
        rounds = self.rounds
        last, length = rounds.progress(t - 1), rounds.length(t - 1 if rounds.has(t - 1) else t)
        steps = range(max(1, last - length + 1), last + 1)
        sums = [[math.fsum(learning_rate(run, at) for at in steps)] for run in self.runs]
        return torch.tensor(sums) / (1.0 - self.run.round.outer_momentum)

    def _tokens(self, k: int, t: int, indices: range) -> Tensor:
        """Token ids (rows, sequence + 1) of microbatches of iteration t of run k."""
        length = self.run.batch.sequence
        numbers = [number for index in indices for number in self.batches[k].window_numbers(t, index)]
        corpus = self.batches[k]._corpus.train_tokens  # windows of its stream: no masks, no whole documents
        rows = [
            torch.from_numpy(corpus[number * length : (number + 1) * length + 1].astype("int64"))
            for number in numbers
        ]
        return torch.stack(rows)

    def _adamw(
        self, weights: Tensor, first: Tensor, second: Tensor, tokens: list[Tensor], rates: Tensor,
        corrections: tuple[float, float], held: float = 0.0,
    ) -> None:  # fmt: skip
        """Take an AdamW step in place, each row with its own tokens and rate. held: weight of squares in a
        second moment that does not fade; 0: it does."""
        self._apply(self._gradients(weights, tokens), weights, first, second, rates, corrections, held)

    def _gradients(self, weights: Tensor, tokens: list[Tensor]) -> Tensor:
        """Gradient of the mean loss of each row of `weights` on its own tokens (rows, parameters)."""
        ids = torch.stack(tokens)
        leaves = {name: view.detach().requires_grad_() for name, view in self._views(weights).items()}
        loss = self._losses(leaves, ids[..., :-1], ids[..., 1:]).sum()
        found = torch.autograd.grad(loss, list(leaves.values()))
        return torch.cat([one.reshape(len(weights), -1) for one in found], 1)

    def _apply(
        self, g: Tensor, weights: Tensor, first: Tensor, second: Tensor, rates: Tensor,
        corrections: tuple[float, float], held: float = 0.0,
    ) -> None:  # fmt: skip
        """Take an AdamW step in place with the gradients `g`, which are overwritten; as `_adamw`."""
        optimizer = self.run.optimizer
        if optimizer.clip:
            norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
            g.mul_((optimizer.clip / (norm + CLIP_EPSILON)).clamp_(max=1.0))
        first.lerp_(g, 1.0 - optimizer.beta1)
        if not held:
            second.mul_(optimizer.beta2)
        second.addcmul_(g, g, value=(1.0 - optimizer.beta2) * (held or 1.0))
        torch.sqrt(second, out=g).div_(corrections[1] ** 0.5).add_(optimizer.eps)
        weights.mul_(1.0 - rates * optimizer.weight_decay * self._decays)
        weights.sub_(torch.div(first, g, out=g).mul_(rates / corrections[0]))

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        return {
            name: flat[:, slice(*self.layout.bounds[name])].view(-1, *self.layout.shapes[name])
            for name in self.layout.names
        }

    def _losses(self, weights: dict[str, Tensor], ids: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of each row of the stack (runs,). ids, targets: (runs, rows, sequence)."""
        c = self.model.config
        runs, rows, length = ids.shape
        table = weights[EMBEDDING]
        offsets = torch.arange(runs)[:, None, None] * c.vocab_size
        x = F.embedding(ids + offsets, table.reshape(-1, c.dim)).view(runs, rows * length, c.dim)

        def norm(x: Tensor, name: str) -> Tensor:
            return F.rms_norm(x, (c.dim,), None, c.norm_eps) * weights[f"{name}.weight"][:, None]

        def linear(x: Tensor, name: str) -> Tensor:
            return torch.bmm(x, weights[f"{name}.weight"].transpose(1, 2))

        cos, sin = self._cos[:length], self._sin[:length]

        def split(x: Tensor, heads: int, turned: bool) -> Tensor:
            x = x.view(runs * rows, length, heads, c.head_dim).transpose(1, 2)
            if turned:
                one, two = x.chunk(2, -1)
                x = x * cos + torch.cat((-two, one), -1) * sin
            return x.repeat_interleave(c.heads // heads, 1) if heads < c.heads else x

        for block in range(c.blocks):
            layer = f"model.layers.{block}"
            h = norm(x, f"{layer}.input_layernorm")
            q = split(linear(h, f"{layer}.self_attn.q_proj"), c.heads, True)
            k = split(linear(h, f"{layer}.self_attn.k_proj"), c.kv_heads, True)
            v = split(linear(h, f"{layer}.self_attn.v_proj"), c.kv_heads, False)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y.transpose(1, 2).reshape(runs, rows * length, c.dim)
            x = x + linear(y, f"{layer}.self_attn.o_proj")
            h = norm(x, f"{layer}.post_attention_layernorm")
            gate, up = F.silu(linear(h, f"{layer}.mlp.gate_proj")), linear(h, f"{layer}.mlp.up_proj")
            x = x + linear(gate * up, f"{layer}.mlp.down_proj")
        logits = torch.bmm(norm(x, FINAL_NORM), table.transpose(1, 2)).view(-1, c.vocab_size)
        each = F.cross_entropy(logits, targets.reshape(-1), reduction="none")
        return each.view(runs, -1).mean(1)
