"""Reference: one process that takes the swarm's steps on the whole model by ordinary autograd.

It shares the model's formulas, the exact sums and the optimizer with the swarm, but not the swarm's way of
working: one `autograd.grad` of the scaled loss by all parameters gives a microbatch's contributions. It knows
stages only as the ranges of digests and fingerprints, which are compared with the log. In exact mode every
value equals the swarm's bit for bit if both are of one numerics class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.protocol.log.records import Slot
from anabranch.protocol.rounds.plan import Slots
from anabranch.train.adapters.lora import LoraModel, run_model
from anabranch.train.islands.kept_contributions import contribution_digest
from anabranch.train.islands.slot_state import SlotStates
from anabranch.train.model.interface import DTYPES
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.partition import partition
from anabranch.train.model.rounds import delay_of, inner_microbatches, rounds_of
from anabranch.train.model.sizes import ModelConfig
from anabranch.train.numerics import exact
from anabranch.train.numerics.block_float import BITS, rounded_sums
from anabranch.train.numerics.numerics_class import device_of
from anabranch.train.numerics.step_scalars import bias_corrections, clip_factor, global_norm, learning_rate
from anabranch.train.stage.cuts import Cuts
from anabranch.train.stage.delayed import advance_state, ahead_of, snapshot_form
from anabranch.train.stage.inner_steps import (
    Contribution,
    Island,
    add_embedding_gradient,
    contribution_of,
    inner_place,
    private_tokens,
    slot_tokens,
    steps_with_tokens,
)
from anabranch.train.stage.muon import muon_names, take_step
from anabranch.train.stage.optimizer import StepScalars
from anabranch.train.stage.outer_step import exchange_moments, outer_step
from anabranch.train.stage.run_objects import (
    Batches,
    Ids,
    check_shape,
    initial_states,
    loss_weight,
    make_accumulator,
    master_dtype,
    next_units,
    token_ids,
    training_weights,
    working_weights,
)
from anabranch.train.stage.stage import model_loss
from anabranch.train.stage.state import Ahead, parse_snapshot

Witness = tuple[int, str]
"""(stage, tensor) of a non-finite or out-of-range value, with a worker's name for the tensor."""


@dataclass
class Share:
    """Contribution of some microbatches of iteration t, in a round of some slots: gradient sums of every
    stage, loss sums, and overflows, which void the sums. Shares of disjoint microbatches can be merged."""

    t: int
    sums: list[Tensor]
    """Unreduced flat sums of stages 0..S; the reference overwrites them with its next share."""
    losses: dict[int, float] = field(default_factory=dict)
    """Loss sum (nats over the tokens) of each microbatch."""
    overflows: dict[int, frozenset[Witness]] = field(default_factory=dict)
    """Overflows by microbatch; the sums of such a microbatch are void."""

    def merge(self, other: Share) -> None:
        """Add another share of the same iteration to this one, in place. Raises ValueError, and changes
        nothing, if a microbatch is in both."""
        if repeated := self.losses.keys() & other.losses.keys():
            raise ValueError(f"microbatches {sorted(repeated)} are in both shares")
        for mine, theirs in zip(self.sums, other.sums, strict=True):
            mine.add_(theirs)
        self.losses.update(other.losses)
        self.overflows.update(other.overflows)


@dataclass(frozen=True)
class StepRecord:
    """Values of a step that the log holds too. losses: loss sum (nats) by microbatch, in a round by slot
    (NaN: its private data are not on this machine). squares: by tensor. norm: before clipping. In a round
    squares and norm are of the summed contributions, learning_rate is that of the outer step, and clip_factor
    is 1 / all inner steps. contributions: digest by slot of those that this replay computed on private data.
    Stage-wise tuples are indexed by stage 0..S."""

    t: int
    losses: dict[int, float]
    loss: float
    """Mean nats per token."""
    fingerprints: tuple[str, ...]
    """Fingerprint of each stage's state before the step."""
    skipped: bool
    squares: dict[str, float] = field(default_factory=dict)
    digests: tuple[str, ...] = ()
    norm: float = 0.0
    clip_factor: float = 1.0
    learning_rate: float = 0.0
    bias_corrections: tuple[float, float] = (1.0, 1.0)
    contributions: dict[int, str] = field(default_factory=dict)


class PrivateRounds(Protocol):
    """Contributions and private corpora of past rounds that are at hand where a run on private data is
    replayed."""

    def step_rows(self, t: int, slot: int) -> Callable[[int, int], Ids] | None:
        """Function (slot, inner step) -> token ids (microbatches · rows, sequence + 1) from the private
        corpus that the slot had in round t; None if that corpus is not on this machine."""
        ...

    def contribution(self, t: int, slot: int) -> Tensor | None:
        """Contribution of a slot to round t (flat), as its machine kept it; None if that file is not on this
        machine."""
        ...


@dataclass(frozen=True)
class _Passed:
    """Gradients of one microbatch. loss: sum (nats). gradients: by name of the weights that were used. dx:
    of the embedding of the token ids `ids` (tokens, stream.width)."""

    loss: float
    gradients: dict[str, Tensor]
    ids: Tensor
    dx: Tensor


class Reference:
    """Training of the whole model: `step(share(t, indices))` for t = 1, 2, ... Before a round, `slots` and
    `late` are set."""

    def __init__(
        self,
        run: RunConfig,
        model: ModelConfig,
        batches: Batches,
        initial: Mapping[str, Tensor] | None = None,
        frozen: Mapping[str, Tensor] | None = None,
        private: PrivateRounds | None = None,
    ) -> None:
        """Model at its initial weights. initial: all trained tensors by name, which are copied (None: made
        from the run's seed). frozen: weights beside a run's adapters, by name, which are not trained.
        private: contributions and data of rounds, if the run's data are private. Raises ValueError if a
        tensor of `initial` is missing or has another shape, ConfigError if the run's sequences are too long
        for the model."""
        check_shape(run, model)
        self._run = run
        self._batches = batches
        self._device = device_of(run.compute)
        self._dtype = DTYPES[run.compute.dtype]
        self._master = master_dtype(self._dtype)
        self.model = run_model(run, model, self._device)
        if isinstance(self.model, LoraModel):
            self.model.use({name: tensor.to(self._device) for name, tensor in (frozen or {}).items()})
        self._cuts = Cuts(run, model)
        self.specs = partition(model, run.pipeline)
        self.states = initial_states(run, self.model, initial, self._device)
        """State of each stage 0..S."""
        self._rounds, self._delay = rounds_of(run), delay_of(run)
        self._aheads: list[Ahead | None] = []
        """By stage, what the iteration after the next one computes with; None unless it is delayed."""
        self._ends = next(spec.stage for spec in self.specs if spec.ends)
        self.slots: Slots = {}
        """Slots of the next round that are counted, set before `share`; unused in synchronous iterations."""
        self.late: Slots = {}
        """Slots of the next round whose contribution is merged in the one after it, set before `share`."""
        self._slot_states = [SlotStates() for _ in self.states]
        self._stage_of = {name: s for s, state in enumerate(self.states) for name in state.layout.names}
        self._accumulators = [
            make_accumulator(run, self.model, state.layout, self._device) for state in self.states
        ]
        self._leaves: dict[str, Tensor] = {}
        self._private = private
        self._private_digests: dict[int, str] = {}
        """Slot of the open round -> digest of its contribution, if this object computed that on private data.
        """
        self._refresh()

    def restore(self, snapshots: Sequence[bytes]) -> None:
        """Continue from the snapshots of stages 0 to S, one of each, in order; what slots carry is not in
        them. Raises SnapshotError if one is damaged or of another run's shape, and ValueError for another
        number of them."""
        self.states[:] = [
            parse_snapshot(
                data, state.layout, self._master, self._device, snapshot_form(self._run, state.layout)
            )
            for data, state in zip(snapshots, self.states, strict=True)
        ]
        self._refresh()

    @property
    def t(self) -> int:
        """Number of the last iteration whose step was taken or skipped; 0 before the first."""
        return self.states[0].t

    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprint of each stage's present state."""
        return tuple(state.fingerprint() for state in self.states)

    def tensors(self) -> dict[str, Tensor]:
        """All trained weights and their moments by "weights/NAME", "exp_avg/NAME", "exp_avg_sq/NAME", and
        predicted weights by "ahead/NAME" before a delayed iteration (views)."""
        return {name: tensor for state in self.states for name, tensor in state.tensors().items()}

    def is_round(self, t: int) -> bool:
        """True if iteration t is a round of islands."""
        return self._rounds.has(t)

    def batch(self, t: int, order: Callable[[int], Iterable[int]]) -> Iterable[int]:
        """Microbatches of iteration t in the order in which they are added, order(t); in a round the numbers
        of the slots that count (`slots`), ascending."""
        return sorted(self.slots) if self._rounds.has(t) else order(t)

    def share(self, t: int, indices: Iterable[int]) -> Share:
        """Compute and sum the contributions of these microbatches of t (in a round: of these slots), in the
        given order. An overflow is recorded in the share. The sums of an earlier share are overwritten."""
        for accumulator in self._accumulators:
            accumulator.clear()
        self._private_digests.clear()
        share = Share(t, [accumulator.flat for accumulator in self._accumulators])
        for index in indices:
            loss_sum, found = self._contribute(t, index)
            share.losses[index] = loss_sum
            if found:
                share.overflows[index] = found
        return share

    def remember_late(self, t: int, slots: Iterable[int]) -> None:
        """Compute and keep the carried states of `slots` (keys of `late`), whose contributions to round t
        came too late to count: their next round begins from these states. A slot whose private data are not
        on this machine is passed over."""
        for slot in slots:
            if self.knows(t, slot, self.late[slot]):
                self._contributions_of(t, slot, self.late[slot], set())

    def knows(self, t: int, slot: int, plan: Slot) -> bool:
        """True if this machine has the data of a slot in round t, and this object the state that the slot
        carries by its `plan`; always, unless the run's data are private."""
        if self._private is None:
            return True
        carried = self._slot_states[self._ends].find(slot, plan.carried) if plan.carried else None
        return self._private.step_rows(t, slot) is not None and bool(carried or not plan.carried)

    def witnesses(self, t: int, index: int) -> frozenset[Witness]:
        """All overflows of microbatch, or slot, `index` of t; none if there is no such one. It is computed in
        the accumulators of `share`: a share made earlier and not stepped is void. Weights and moments stay;
        what a slot carries is kept, as by `share`. Raises ValueError for a slot whose carried state was not
        replayed, or of which neither the private data nor the contribution is here."""
        if index not in (self.slots if self._rounds.has(t) else range(self._run.batch.microbatches)):
            return frozenset()
        return self.share(t, [index]).overflows.get(index, frozenset())

    def step(self, share: Share) -> StepRecord:
        """Take the optimizer step (in a round the outer step) of iteration share.t with the gradient sums of
        `share`, which must hold the whole batch; skip the step if a contribution overflowed. Returns the
        step's record, as in the log. Raises ValueError if a microbatch is missing or too many, or t is not
        next."""
        self._check_complete(share)
        if share.overflows:
            return self.skip(share)
        if self._rounds.has(share.t):
            return self._outer_step(share)
        before, run = self.fingerprints(), self._run
        gradients, squares, digests = self._reduced(share.sums)
        norm = global_norm(squares.values())
        factor = clip_factor(norm, run.optimizer.clip)
        rate = learning_rate(run, self._rounds.progress(share.t))
        corrections = bias_corrections(run.optimizer, self.states[0].adam_step + 1)
        scalars = StepScalars(rate, factor, *corrections)
        stages = zip(self.states, gradients, self._aheads, self.specs, strict=True)
        for state, gradient, ahead, spec in stages:
            matrices = muon_names(self.model, spec, run.optimizer)
            take_step(state, gradient, scalars, run.optimizer, matrices)
            advance_state(self._delay, state, share.t, ahead, scalars)
            exchange_moments(run, state, share.t)
        self._refresh()
        loss = math.fsum(share.losses.values()) / self._batches.tokens_per_iteration
        return StepRecord(
            share.t, share.losses, loss, before, False, squares, digests, norm, factor, rate, corrections
        )

    def _reduced(self, sums: Iterable[Tensor]) -> tuple[list[Tensor], dict[str, float], tuple[str, ...]]:
        """(gradient of each stage, sum of squares by tensor, digest of each gradient) of the stages' sums."""
        gradients = [exact.reduced(each, self._master) for each in sums]
        squares: dict[str, float] = {}
        for state, gradient in zip(self.states, gradients, strict=True):
            squares.update(exact.squares(state.layout, gradient))
        stages = zip(self.states, gradients, strict=True)
        return gradients, squares, tuple(exact.digest(state.layout, each) for state, each in stages)

    def _outer_step(self, share: Share) -> StepRecord:
        """Take the outer step of round share.t; returns its record."""
        before, run = self.fingerprints(), self._run
        bits = BITS[run.round.results]
        gradients, squares, digests = self._reduced(rounded_sums(sums, bits) for sums in share.sums)
        steps = sum(slot.weight for slot in self.slots.values())
        rate, factor = run.round.outer_lr, 1.0 / steps
        for state, gradient in zip(self.states, gradients, strict=True):
            outer_step(run, state, gradient, rate, factor, share.t)
            advance_state(self._delay, state, share.t, None, None)
            exchange_moments(run, state, share.t)
        self._refresh()
        tokens = steps * inner_microbatches(run) * run.batch.rows * run.batch.sequence
        loss, norm = math.fsum(share.losses.values()) / tokens, global_norm(squares.values())
        return StepRecord(
            *(share.t, share.losses, loss, before, False, squares, digests, norm, factor, rate),
            contributions=dict(self._private_digests),
        )

    def skip(self, share: Share) -> StepRecord:
        """Let iteration share.t pass without a step, as a logged skip does: no weights change, and Adam's
        counter stays. Returns a record with the share's losses."""
        before = self.fingerprints()
        for state, ahead in zip(self.states, self._aheads, strict=True):
            advance_state(self._delay, state, share.t, ahead, None)
            exchange_moments(self._run, state, share.t)
        self._refresh()
        loss = math.fsum(share.losses.values()) / self._batches.tokens_per_iteration
        return StepRecord(share.t, share.losses, loss, before, skipped=True)

    def evaluate(self, windows: int) -> list[tuple[float, int]]:
        """(loss sum in nats, tokens) of each of the first `windows` held-out windows, with the present
        weights."""
        working: dict[str, Tensor] = {}
        for state in self.states:
            working.update(working_weights(state, self._dtype))
        weights, results = PlainWeights(working), []
        first = self._run.batch.microbatches
        with torch.no_grad():
            for window in range(windows):
                ids, targets = token_ids(self._batches, first, 0, first + window, self._device)
                x = self._crossed(self.model.embed(weights, ids), 0, first + window, 0)
                for spec in self.specs[1:]:
                    for block in spec.blocks:
                        x = self.model.block(weights, block, x)
                    x = self._crossed(x, 0, first + window, spec.stage)
                weight = loss_weight(self._batches, first, 0, first + window)
                loss = model_loss(self.model, weights, x, targets, weight)
                results.append((float(loss), targets.numel()))
        return results

    def _contribute(self, t: int, index: int) -> tuple[float, frozenset[Witness]]:
        """Add one microbatch's gradients to the sums; returns its loss sum (nats) and its overflows, after
        which the sums are void."""
        if self._rounds.has(t):
            return self._contribute_slot(t, index)
        found: set[Witness] = set()
        passed = self._pass(self._leaves, t, index, 1.0 / self._batches.tokens_per_iteration, found)
        for name, gradient in passed.gradients.items():
            stage = self._stage_of[name]
            with _noting(found, stage):
                self._accumulators[stage].add(name, gradient)
        dx = passed.dx
        if self.model.embedding_scale != 1.0:
            dx = dx * self.model.embedding_scale
        for table, rows in self.model.embedding_rows(passed.ids):
            with _noting(found, self._ends):
                self._accumulators[self._ends].add_rows(table, rows, dx)
        return passed.loss, frozenset(found)

    def _pass(
        self, leaves: Mapping[str, Tensor], t: int, index: int, scale: float, found: set[Witness]
    ) -> _Passed:
        """Gradients of scale · loss of microbatch `index` of t, with the working weights `leaves` of all
        stages; overflows on the way are added to `found`."""
        ids, targets = token_ids(self._batches, self._run.batch.microbatches, t, index, self._device)
        weights = PlainWeights(leaves)
        # The embedding is looked up outside the graph: its contributions are rounded token by token from
        # the gradient of x (train/exact.py), which also keeps the two uses of a tied weight apart.
        x = self.model.embed(weights, ids).detach().requires_grad_()
        boundaries = [x]  # output of stage 0, then of each relay stage
        received = [x := self._crossed(x, t, index, 0)]
        for spec in self.specs[1:]:
            for block in spec.blocks:
                x = self.model.block(weights, block, x)
            boundaries.append(x)
            received.append(x := self._crossed(x, t, index, spec.stage))
        weight = loss_weight(self._batches, self._run.batch.microbatches, t, index)
        loss = model_loss(self.model, weights, x, targets, weight)
        # A table that is not also the head is unused.
        gradients = torch.autograd.grad(loss * scale, [*boundaries, *leaves.values()], allow_unused=True)
        at_boundary = gradients[: len(boundaries)]
        with _noting(found, self._ends):
            exact.check_finite("loss", loss)
        for stage, x in enumerate(received if not self._ends else ()):
            with _noting(found, stage):
                exact.check_finite("activation", x)  # NaN, too, where its sender could not encode it
        for stage, dx in enumerate(at_boundary[: 1 if self._ends else None]):
            # Stage s+1 returns the gradient of stage s's output; the last one comes from the head on stage 0.
            with _noting(found, (stage + 1) % len(boundaries)):
                exact.check_finite("input gradient", dx)
        dx = self.model.stream.values(at_boundary[0])
        by_name = zip(leaves, gradients[len(boundaries) :], strict=True)
        used = {name: gradient for name, gradient in by_name if gradient is not None}
        return _Passed(float(loss.detach()), used, ids, dx.reshape(-1, dx.shape[-1]))

    def _crossed(self, x: Tensor, t: int, index: int, cut: int) -> Tensor:
        """Output x of stage `cut` as the next stage receives it, encoded and decoded; its gradient, too."""
        return self._cuts.pass_through(x, self._cuts.place(t, index, cut))

    def _contribute_slot(self, t: int, slot: int) -> tuple[float, frozenset[Witness]]:
        """Add a slot's contributions to the sums of round t; returns its loss sum (nats; 0 if its inner steps
        overflow, NaN if its private data are not on this machine) and its overflows."""
        found: set[Witness] = set()
        if self._private is not None:
            return self._contribute_privately(self._private, t, slot, found), frozenset(found)
        made = self._contributions_of(t, slot, self.slots[slot], found)
        for stage, each in made.items():
            with _noting(found, stage):
                for name, view in self.states[stage].layout.views(each.change):
                    self._accumulators[stage].add(name, view, most=self._rounds.slots)
        return made[self._ends].loss if made else 0.0, frozenset(found)

    def _contribute_privately(
        self, private: PrivateRounds, t: int, slot: int, found: set[Witness]
    ) -> float:
        """Add the contribution of a slot on private data to round t: the kept one, or the computed one if
        this machine has only its data. Returns its loss sum (nats), NaN without the data; overflows are added
        to `found`. Raises ValueError if there is neither."""
        stage, loss = self._ends, math.nan
        layout, kept = self.states[stage].layout, private.contribution(t, slot)
        if self.knows(t, slot, self.slots[slot]):
            made = self._contributions_of(t, slot, self.slots[slot], found)
            if not made:
                return 0.0
            loss = made[stage].loss
            self._private_digests[slot] = contribution_digest(layout, made[stage].change)
            kept = made[stage].change if kept is None else kept
        if kept is None:
            raise ValueError(f"the contribution of slot {slot} to round {t} is not here")
        with _noting(found, stage):
            for name, view in layout.views(kept.to(self._device)):
                self._accumulators[stage].add(name, view, most=self._rounds.slots)
        return loss

    def _tokens_of(self, t: int, slot: int, plan: Slot) -> Tensor:
        """Token ids of a slot's inner steps in round t, of the run's corpus or a private one."""
        steps = steps_with_tokens(self._run, plan.steps)
        rows = None if self._private is None else self._private.step_rows(t, slot)
        if rows is None:
            return slot_tokens(self._batches, self._run, slot, plan.first, steps).to(self._device)
        return private_tokens(rows, slot, plan.first, steps).to(self._device)

    def _contributions_of(
        self, t: int, slot: int, plan: Slot, found: set[Witness]
    ) -> dict[int, Contribution]:
        """Contribution of a slot to round t at each stage that has parameters, by the inner steps that `plan`
        records; the carried states that the slot takes to its next round are kept. If there are overflows,
        they are added to `found`, and the result is empty. Raises ValueError if the source of its carried
        state was not replayed."""
        stages = (self._ends,) if self._ends else range(len(self.states))
        islands, made = dict[int, Island](), dict[int, Contribution]()
        for stage in stages:
            with _noting(found, stage):
                islands[stage] = self._island(stage, t, slot, plan)
        if found:
            return {}
        if self._ends:
            tokens = self._tokens_of(t, slot, plan)
            with _noting(found, self._ends):
                made[self._ends] = contribution_of(self._run, self.model, islands[self._ends], tokens)
        else:
            for step in range(plan.first + 1, plan.first + plan.steps + 1):
                self._inner_step(islands, slot, step, found)
                if found:
                    return {}
            for stage, island in islands.items():
                with _noting(found, stage):
                    made[stage] = island.close()
        if found:
            return {}
        for stage, each in made.items():
            if each.state is not None:
                self._slot_states[stage].keep(slot, each.state)
        return made

    def _island(self, stage: int, t: int, slot: int, plan: Slot) -> Island:
        """New island of a slot at one stage, before its inner steps of round t. Raises ValueError if the
        state that the slot carries by its `plan` was not replayed, and Overflow as `Island` does."""
        carried = self._slot_states[stage].find(slot, plan.carried) if plan.carried else None
        if plan.carried and carried is None:
            raise ValueError(f"slot {slot} carries state from round {plan.carried}, which was not replayed")
        return Island(self._run, self.states[stage], t, plan.steps, carried, plan.late > 0)

    def _inner_step(self, islands: Mapping[int, Island], slot: int, step: int, found: set[Witness]) -> None:
        """Take inner step `step` of a pipeline island, one microbatch after another through all stages;
        overflows are added to `found`."""
        count, ends, losses = inner_microbatches(self._run), islands[0], 0.0
        scale = 1.0 / (count * self._run.batch.rows * self._run.batch.sequence)
        leaves = {name: leaf for island in islands.values() for name, leaf in island.leaves().items()}
        # A tied table's gradients of the embedding are summed apart from the head's, as its stage does it.
        rows = torch.zeros_like(ends.gradient) if self.model.config.tied else ends.gradient
        for number in range(count):
            passed = self._pass(leaves, *inner_place(self._run, slot, step, number), scale, found)
            losses += passed.loss
            for name, gradient in passed.gradients.items():
                island = islands[self._stage_of[name]]
                island.local.layout.view(island.gradient, name).add_(gradient)
            add_embedding_gradient(self.model, ends.local.layout, passed.ids, passed.dx, rows)
        if rows is not ends.gradient:
            ends.gradient.add_(rows)
        for stage, island in islands.items():
            with _noting(found, stage):
                island.step(0.0 if stage else losses)

    def _refresh(self) -> None:
        """Prepare the next iteration, after a step or another state: its weights (before a delayed iteration
        the predicted ones) become the autograd leaves, and the accumulators get the fixed-point units of its
        exact sums. If the iteration after it is delayed, what that computes with is predicted and kept."""
        self._aheads = [ahead_of(self._run, self._delay, state) for state in self.states]
        for state, accumulator in zip(self.states, self._accumulators, strict=True):
            accumulator.prepare(next_units(self._run, state))
            for name, weight in training_weights(state, self._dtype).items():
                self._leaves[name] = weight.detach().requires_grad_()

    def _check_complete(self, share: Share) -> None:
        expected = set(self.slots if self._rounds.has(share.t) else range(self._run.batch.microbatches))
        if missing := expected - share.losses.keys():
            raise ValueError(f"the share lacks microbatches {sorted(missing)}")
        if strange := share.losses.keys() - expected:
            raise ValueError(f"the share has microbatches that the step has not: {sorted(strange)}")
        if share.t != self.t + 1:
            raise ValueError(f"step {share.t} does not follow step {self.t}")


@contextmanager
def _noting(found: set[Witness], stage: int) -> Iterator[None]:
    try:
        yield
    except exact.Overflow as overflow:
        found.add((stage, overflow.tensor))
