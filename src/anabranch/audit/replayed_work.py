"""Work of a stage in a past step, computed again in one process: hashes of all that was received and sent."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anabranch.audit.run_inputs import Inputs
from anabranch.protocol.interface.tasks import head_unit
from anabranch.protocol.log.records import StageCommit
from anabranch.train.model.interface import DTYPES
from anabranch.train.numerics import exact
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.audit import payload_hash
from anabranch.train.stage.cuts import ACTIVATION, GRADIENT, Cuts
from anabranch.train.stage.run_objects import (
    is_coarse,
    loss_weight,
    make_accumulator,
    master_dtype,
    part_alignment,
    token_ids,
    units_of,
    working_weights,
)
from anabranch.train.stage.stage import Stage


@dataclass
class ReplayedWork:
    """Hashes of one stage's work in a step. units: microbatch -> hashes of activation in, gradient in,
    activation out, gradient out. parts: member's position in the commit -> hashes of the parts of its
    gradient sum. sums: part -> hash of the members' parts added up, for the parts that were asked for.
    overflows: microbatch that has no hashes -> tensor that overflowed."""

    units: dict[int, tuple[str, str, str, str]] = field(default_factory=dict)
    parts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    sums: dict[int, str] = field(default_factory=dict)
    overflows: dict[int, str] = field(default_factory=dict)


class StepReplay:
    """All stages of a model in the state before a step, which `reference` has, to recompute the work of that
    step."""

    def __init__(self, inputs: Inputs, reference: Reference) -> None:
        run = inputs.run
        self._inputs, self._reference = inputs, reference
        self._cuts = Cuts(run, inputs.model)
        self._dtype = DTYPES[run.compute.dtype]
        self._device = reference.states[0].weights.device
        self._stages = []
        for spec, state in zip(reference.specs, reference.states, strict=True):
            accumulator = make_accumulator(run, reference.model, state.layout, self._device)
            accumulator.prepare(units_of(run, state))
            weights = working_weights(state, self._dtype)
            self._stages.append(Stage(reference.model, spec, weights, accumulator))

    def work(
        self, t: int, stage: int, commit: StageCommit, parts: int, summed: Collection[int]
    ) -> ReplayedWork:
        """Hashes of the recomputed work of all members of relay stage `stage` in step t. commit: the stage's
        entry in the step's commit, which says which units they own. parts: number of parts into which a
        gradient sum is cut. summed: parts whose total over the members is wanted."""
        found = ReplayedWork()
        accumulator = self._stages[stage].accumulator
        kept: dict[int, list[Tensor]] = {part: [] for part in summed}
        for position in range(len(commit.members)):
            accumulator.clear()
            for unit, owner in enumerate(commit.owners):
                if owner == position:
                    self._unit(t, stage, unit, found)
            cut = exact.cut(accumulator.flat, parts, part_alignment(self._inputs.run))
            found.parts[position] = tuple(payload_hash(part) for part in cut)
            for part, tensors in kept.items():
                tensors.append(cut[part])
        dtype = torch.int64 if is_coarse(self._inputs.run) else master_dtype(self._dtype)
        found.sums = {part: payload_hash(exact.sum_part(each, dtype)) for part, each in kept.items()}
        return found

    def _unit(self, t: int, stage: int, index: int, found: ReplayedWork) -> None:
        """Take one microbatch through all stages and back, add its weight gradients to the sum of `stage`,
        and enter its hashes, or the tensor that overflowed, in `found`."""
        batch = self._inputs.run.batch
        ids, targets = token_ids(self._inputs.batches, batch.microbatches, t, index, self._device)
        relays = range(1, len(self._stages))
        hashes: dict[tuple[str, int], str] = {}

        def crossed(kind: str, cut: int, values: Tensor) -> Tensor:
            # Encoded and decoded, as the stage on the other side gets it. cut: number of the stage before it.
            payload = self._cuts.encode(kind, values, self._cuts.place(t, index, cut)).cpu()
            hashes[kind, cut] = payload_hash(payload)
            return self._cuts.decode(kind, payload, self._device)

        try:
            x = crossed(ACTIVATION, 0, self._stages[0].embed(ids))
            for each in relays:
                x = crossed(ACTIVATION, each, self._stages[each].forward(index, x))
            scale = 1.0 / self._inputs.batches.tokens_per_iteration
            weight = loss_weight(self._inputs.batches, batch.microbatches, t, index)
            gradient, _ = self._stages[0].head(head_unit(index), x, targets, scale, weight)
            dy = crossed(GRADIENT, len(relays), gradient)
            for each in reversed(relays):
                dy = crossed(GRADIENT, each - 1, self._stages[each].input_gradient(index, dy))
            self._stages[stage].weight_gradient(index)
        except exact.Overflow as overflow:
            found.overflows[index] = overflow.tensor
        else:
            received = hashes[ACTIVATION, stage - 1], hashes[GRADIENT, stage]
            found.units[index] = (*received, hashes[ACTIVATION, stage], hashes[GRADIENT, stage - 1])
        for each in relays:
            self._stages[each].discard(index)
        self._stages[0].discard(head_unit(index))
