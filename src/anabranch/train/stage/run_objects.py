"""Construction of tensors, states and accumulators from a run's configuration, for worker and reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from anabranch.config import ConfigError, RunConfig
from anabranch.train.adapters.lora import LoraModel
from anabranch.train.codec.sizes import coarse_digits
from anabranch.train.devices.placement import Placement, Where, put, shared_out
from anabranch.train.model.interface import (
    DTYPES,
    Model,
    initial_weights,
    stage_layout,
    weights_from_tensors,
)
from anabranch.train.model.layout import Layout
from anabranch.train.model.partition import StageSpec, partition
from anabranch.train.model.sizes import ModelConfig
from anabranch.train.numerics.coarse_sums import SEGMENT, CoarseAccumulator, unit_exponents
from anabranch.train.numerics.exact import Accumulator, ExactAccumulator, FastAccumulator
from anabranch.train.numerics.numerics_class import size_of
from anabranch.train.stage.state import StageState

Ids = npt.NDArray[np.int64]


class Batches(Protocol):
    """Source of a run's batches, each a pure function of its arguments (data/batches.py)."""

    tokens_per_iteration: int

    def microbatch(self, t: int, index: int) -> tuple[Ids, Ids]:
        """(inputs, targets), each (rows, sequence)."""
        ...

    def evaluation_window(self, window: int) -> tuple[Ids, Ids]:
        """(inputs, targets) of a held-out window, each (rows, sequence)."""
        ...

    def weight(self, t: int) -> float:
        """Factor of the loss of iteration t's microbatches: all positions over those whose target counts."""
        ...

    def window_weight(self, window: int) -> float:
        """Factor of a held-out window's loss: all its positions over those whose target counts."""
        ...


def token_ids(
    batches: Batches, microbatches: int, t: int, index: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(inputs, targets), each (rows, sequence) and on `device`, of microbatch `index` of iteration t, or from
    index `microbatches` (those of a batch) on of held-out window `index - microbatches`."""
    if index < microbatches:
        ids, targets = batches.microbatch(t, index)
    else:
        ids, targets = batches.evaluation_window(index - microbatches)
    # Copied: batches may hand out read-only views of a memory-mapped corpus.
    return torch.tensor(ids, device=device), torch.tensor(targets, device=device)


def loss_weight(batches: Batches, microbatches: int, t: int, index: int) -> float:
    """Factor of the loss of microbatch `index` (from `microbatches` on: of a held-out window), with which the
    mean over all positions is the mean over those whose target counts."""
    return batches.weight(t) if index < microbatches else batches.window_weight(index - microbatches)


def check_shape(run: RunConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the run's sequences are longer than the model accepts."""
    if run.batch.sequence > model.max_sequence:
        raise ConfigError(
            f"batch.sequence: {run.batch.sequence} tokens are more than "
            f"model.max_sequence = {model.max_sequence}"
        )


def check_devices(run: RunConfig, specs: Sequence[StageSpec], devices: int) -> None:
    """Raise ConfigError if several devices are too many: more than a relay's stage has blocks, or in a run
    with rounds of islands. One device always fits. specs: stages of the run. devices: their number."""
    if devices == 1:
        return
    least = min(specs[1:], key=lambda spec: len(spec.blocks))
    if len(least.blocks) < devices:
        raise ConfigError(
            f"{run.compute.device}: {devices} devices are more than the blocks of stage {least.stage} of "
            f"this run: name at most {len(least.blocks)}, or let one peer join for each (--gpus)"
        )
    if run.round.slots:
        raise ConfigError(
            f"{run.compute.device}: an island computes on one device: name one, or join for each (--gpus)"
        )


def share_out(spec: StageSpec, devices: Sequence[torch.device]) -> dict[int, torch.device]:
    """Block -> device, for a stage that lies on several devices; each gets contiguous blocks in proportion to
    its memory. Empty if there is one device, and for a stage without blocks, which is on the first."""
    if len(devices) == 1 or not spec.blocks:
        return {}
    return shared_out(spec.blocks, devices, [size_of(device) for device in devices])


def placement(model: Model, layout: Layout, at: Mapping[int, torch.device]) -> Placement:
    """Placement on several devices of a stage's vectors in `layout`, of trained or of frozen weights. at:
    device of each block, not empty; the first block's device has all tensors that belong to no block."""
    models = (model, model.base) if isinstance(model, LoraModel) else (model,)
    names = {name: at[block] for block in at for one in models for name in one.block_shapes(block)}
    return Placement(layout, names, next(iter(at.values())))


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of weights and moments: fp32 at least."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def working_weights(state: StageState, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights by name in the type `dtype` (the compute dtype): views of the state's, which a step changes, or
    copies if the type is another."""
    return dict(state.layout.views(state.weights.to(dtype)))


def training_weights(state: StageState, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights with which the iteration after `state` trains, in the compute dtype: the working weights, or
    those that were predicted for a delayed iteration."""
    if state.ahead is None:
        return working_weights(state, dtype)
    return dict(state.layout.views(state.ahead.weights.to(dtype)))


def initial_state(
    run: RunConfig,
    model: Model,
    layout: Layout,
    initial: Mapping[str, Tensor] | None,
    device: Where,
) -> StageState:
    """State of a stage before the first step, on `device`, from the tensors `initial` by name (others than
    those of `layout` are ignored) or, if None, from the run's seed. Raises ValueError if a tensor is missing
    or has another shape."""
    master = master_dtype(DTYPES[run.compute.dtype])
    if initial is None:
        flat = initial_weights(model, layout, run.run.seed, master, run.model.initial_std)
    else:
        flat = weights_from_tensors(layout, initial, master)
    return StageState.initial(layout, put(flat, device))


def initial_states(
    run: RunConfig, model: Model, initial: Mapping[str, Tensor] | None, device: torch.device
) -> list[StageState]:
    """States of all stages 0..S before the first step; arguments as for `initial_state`."""
    return [
        initial_state(run, model, stage_layout(model, spec), initial, device)
        for spec in partition(model.config, run.pipeline)
    ]


def contributions(run: RunConfig, model: Model, name: str) -> int:
    """Most contributions that tensor `name` may get in one synchronous iteration; bounds the magnitude of
    each. (In a round the number of slots does.) A tensor gets one per microbatch, a lookup table one per
    token, a tied table both."""
    batch = run.batch
    if name not in model.tables:
        return batch.microbatches
    head_uses = batch.microbatches if model.config.tied else 0
    return batch.microbatches * batch.rows * batch.sequence + head_uses


def is_coarse(run: RunConfig) -> bool:
    """True if the run has coarse sums (`wire.reduce`): contributions to them are rounded to units that depend
    on the state."""
    return run.wire.reduce == "coarse"


def units_of(run: RunConfig, state: StageState) -> Tensor | None:
    """Rounding units of coarse sums in the step after `state`: for each segment (up to 64 adjacent
    parameters) an exponent e, the unit being 2^(e - 48) (`coarse_sums.unit_exponents`). None in a run without
    coarse sums."""
    if not is_coarse(run):
        return None
    digits = coarse_digits(run.batch.microbatches)
    return unit_exponents(state.layout, state.exp_avg_sq, run.optimizer.beta2, state.adam_step, digits)


def next_units(run: RunConfig, state: StageState) -> Tensor | None:
    """Rounding units (exponents by segment) of coarse sums in the iteration after `state`; for a delayed one
    those fixed a step earlier with its weights. None in a run without coarse sums."""
    return units_of(run, state) if state.ahead is None else state.ahead.units


def part_alignment(run: RunConfig) -> int:
    """Elements to whose multiples the parts of a gradient sum are cut: a segment of coarse sums, else 1."""
    return SEGMENT if is_coarse(run) else 1


def make_accumulator(run: RunConfig, model: Model, layout: Layout, device: Where) -> Accumulator:
    """Empty gradient accumulator of the run file's kind: fast, coarse or exact."""
    master = master_dtype(DTYPES[run.compute.dtype])
    limits = {name: contributions(run, model, name) for name in layout.names}
    if run.run.reduction == "fast":
        return FastAccumulator(layout, master, device, max(limits.values(), default=1))
    if is_coarse(run):
        return CoarseAccumulator(layout, limits, master, device)
    return ExactAccumulator(layout, limits, master, device)
