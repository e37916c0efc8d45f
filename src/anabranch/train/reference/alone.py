"""Training of the whole model by one process at torch's own speed: autograd and torch's AdamW.

The model, the batches and the schedule are the run file's. Sums are plain floats and the optimizer is torch's
fused one, so the bits are not those of a swarm: there is no log and nothing to verify.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.errors import ConfigError
from anabranch.train.adapters.lora import LoraModel, run_model
from anabranch.train.model.interface import DTYPES
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.sizes import ModelConfig
from anabranch.train.numerics.numerics_class import device_of
from anabranch.train.numerics.step_scalars import learning_rate
from anabranch.train.stage.optimizer import decays
from anabranch.train.stage.run_objects import Batches, check_shape, initial_states, loss_weight, token_ids
from anabranch.train.stage.stage import model_loss
from anabranch.train.stage.state import StageState, parse_snapshot


@dataclass(frozen=True)
class AloneStep:
    """Result of a step: mean loss (nats per token), global norm before clipping, learning rate."""

    t: int
    loss: float
    norm: float
    learning_rate: float


class _Leaves(PlainWeights):
    """Parameters for ordinary autograd; other than in `PlainWeights` gradients reach lookup tables too."""

    def table(self, name: str) -> Tensor:
        return self._weights[name]


class Alone:
    """Training of a whole model in this process by autograd and torch's AdamW: `step(t)` for t = 1, 2, ...
    Codecs, coarse sums, delay and rounds of the run file have no effect here. No step is skipped: a gradient
    that is not finite spoils the weights."""

    def __init__(
        self,
        run: RunConfig,
        model: ModelConfig,
        batches: Batches,
        initial: Mapping[str, Tensor] | None = None,
        frozen: Mapping[str, Tensor] | None = None,
    ) -> None:
        """initial: tensors to start from instead of the seed's. frozen: those that a run of adapters leaves
        as they are. Raises ConfigError for another optimizer than AdamW and for sequences that are too long,
        ValueError for missing or misshapen tensors."""
        check_shape(run, model)
        if run.optimizer.kind != "adamw":
            raise ConfigError(
                f'optimizer.kind = "{run.optimizer.kind}": one process alone has AdamW only; train in a swarm'
            )
        self._run, self._batches, self._device = run, batches, device_of(run.compute)
        self._dtype = DTYPES[run.compute.dtype]
        self.model = run_model(run, model, self._device)
        if isinstance(self.model, LoraModel):
            self.model.use({name: tensor.to(self._device) for name, tensor in (frozen or {}).items()})
        self.states = initial_states(run, self.model, initial, self._device)
        """State of each stage of the run file's pipeline; the parameters are views of their weights."""
        self._parameters = {
            name: torch.nn.Parameter(view)
            for state in self.states
            for name, view in state.layout.views(state.weights)
        }
        o, every = run.optimizer, self._parameters.values()
        groups = [
            {"params": [p for p in every if decays(tuple(p.shape))], "weight_decay": o.weight_decay},
            {"params": [p for p in every if not decays(tuple(p.shape))], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        self._optimizer = torch.optim.AdamW(
            groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True
        )

    def restore(self, snapshots: Sequence[bytes]) -> int:
        """Continue from the snapshots of all stages, in order; returns the step after which they were taken.
        Raises SnapshotError if one is damaged or of another model, ValueError for another number of them."""
        for data, state in zip(snapshots, self.states, strict=True):
            kept = parse_snapshot(data, state.layout, state.weights.dtype, self._device)
            state.weights.copy_(kept.weights)
            state.t = state.adam_step = kept.t
            for name in state.layout.names if kept.t else ():
                parameter = self._parameters[name]
                self._optimizer.state[parameter] = {
                    "step": torch.tensor(float(kept.t), device=parameter.device),
                    "exp_avg": state.layout.view(kept.exp_avg, name).clone(),
                    "exp_avg_sq": state.layout.view(kept.exp_avg_sq, name).clone(),
                }
        return self.states[0].t

    def step(self, t: int) -> AloneStep:
        """Take step t, which follows the last one, on the whole batch; changes the weights."""
        run, total = self._run, torch.zeros((), device=self._device)
        for index in range(run.batch.microbatches):
            loss = self._loss(t, index)
            (loss / self._batches.tokens_per_iteration).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        clip = run.optimizer.clip if run.optimizer.clip > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), clip)
        rate = learning_rate(run, t)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return AloneStep(t, float(total) / self._batches.tokens_per_iteration, float(norm), rate)

    def evaluate(self, windows: int) -> float:
        """Mean loss (nats per token) of the first `windows` (at least one) held-out windows."""
        first, batch = self._run.batch.microbatches, self._run.batch
        with torch.no_grad():
            sums = [float(self._loss(0, first + window)) for window in range(windows)]
        return sum(sums) / (windows * batch.rows * batch.sequence)

    def snapshots(self, t: int) -> list[StageState]:
        """States of all stages after the last step, for comparison or saving: torch's moments are copied in,
        and the counters set to t, the number of that step. They are this object's own states, not copies:
        `step` changes their weights."""
        for state in self.states:
            state.t = state.adam_step = t
            for name in state.layout.names:
                kept = self._optimizer.state.get(self._parameters[name], {})
                for kind in ("exp_avg", "exp_avg_sq"):
                    if kind in kept:
                        state.layout.view(getattr(state, kind), name).copy_(kept[kind])
        return self.states

    def _loss(self, t: int, index: int) -> Tensor:
        ids, targets = token_ids(self._batches, self._run.batch.microbatches, t, index, self._device)
        working: Mapping[str, Tensor] = self._parameters
        if self._dtype not in (torch.float32, torch.float64):
            working = {name: parameter.to(self._dtype) for name, parameter in self._parameters.items()}
        weights = _Leaves(working)
        x = self.model.embed(weights, ids)
        for block in range(self.model.config.blocks):
            x = self.model.block(weights, block, x)
        weight = loss_weight(self._batches, self._run.batch.microbatches, t, index)
        return model_loss(self.model, weights, x, targets, weight)
