"""Rounds of an island: inner optimizer steps, and the contribution that they give.

A contribution is a pure function of the run file, the state at the beginning of the round, the round, the
slot, the slot's counters, and what the slot carries from the round before, which is such a function, too
(`train.islands.slot_state`): whoever computes it finds the same bits (within a numerics class). The inner
optimizer is AdamW. It begins each round with the second moment that the synchronous steps left in the state,
and without a first one, unless the run carries moments, agrees on them (`train.islands.agreed_moments`) or
estimates the first one (`round.first_moment`).

Not here: the outer step, by which the contributions change the state (`outer_step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.train.islands.agreed_moments import course, normalise, round_scalars
from anabranch.train.islands.fragments import fragment_bounds, turn
from anabranch.train.islands.selection import selected
from anabranch.train.islands.slot_state import KEPT, Moments, SlotState
from anabranch.train.model.interface import DTYPES, Model
from anabranch.train.model.layout import Layout
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.rounds import inner_microbatches, rounds_of
from anabranch.train.numerics import exact
from anabranch.train.numerics.block_float import BITS, rounded
from anabranch.train.numerics.step_scalars import bias_corrections, clip_factor, global_norm, learning_rate
from anabranch.train.stage.optimizer import StepScalars, adamw, blocks_of
from anabranch.train.stage.outer_step import adam_scale, outer_scale
from anabranch.train.stage.run_objects import Batches, Ids, working_weights
from anabranch.train.stage.stage import model_loss
from anabranch.train.stage.state import StageState


def steps_with_tokens(run: RunConfig, steps: int) -> int:
    """Number of inner steps that a slot needs tokens for in a round: its `steps`, and those of the next round
    that its machine takes while the contribution is exchanged (`round.overlap`)."""
    return steps + rounds_of(run).ahead(steps)


#: Vectors of an island when it closes: weights, two moments, gradient, change, its weighted copy, and what is
#: sent. With steps ahead all but the two in the middle stay until these are taken.
_CLOSING = 7
#: Vectors of an island between its begin and its end: the first four of these.
_OPEN = 4


def island_vectors(run: RunConfig, closing: bool = True) -> int:
    """Most memory that an island and what slots carry take beside the stage's state, as a number of vectors
    with an element for each parameter of the stage; 0 in a run without rounds. closing: False for an island
    that stays open, as of two at one worker one alone closes at a time."""
    part, rounds = run.round, rounds_of(run)
    if not part.slots:
        return 0
    carried = 2 * (part.first_moment == "keep") + (part.unsent != "drop") + rounds.merges + (part.mix > 0)
    return (_CLOSING if closing else _OPEN) + KEPT * carried


def inner_place(run: RunConfig, slot: int, step: int, number: int) -> tuple[int, int]:
    """(t, index), in the run's batches, of microbatch `number` (0 to n - 1) of a slot's inner step `step`
    (1, 2, ..., counted over all rounds). Inner step c of slot k has microbatches k·n to k·n + n - 1 of the
    batch of iteration start + c: the K slots together pass through the batches that synchronous steps would
    have had."""
    return rounds_of(run).start + step, slot * inner_microbatches(run) + number


def slot_tokens(batches: Batches, run: RunConfig, slot: int, first: int, steps: int) -> Tensor:
    """Token ids (int32) of a slot's inner steps first+1 to first+steps, counted over all rounds, from the
    run's corpus: (steps · microbatches · rows, sequence+1)."""
    rows = []
    for step in range(first + 1, first + steps + 1):
        for number in range(inner_microbatches(run)):
            ids, targets = batches.microbatch(*inner_place(run, slot, step, number))
            rows.append(np.concatenate((ids, targets[:, -1:]), axis=1))
    return torch.from_numpy(np.concatenate(rows).astype(np.int32))


def private_tokens(step_rows: Callable[[int, int], Ids], slot: int, first: int, steps: int) -> Tensor:
    """Token ids as of `slot_tokens`, but of a machine's private corpus (`data.private`). step_rows: (slot,
    inner step) -> token ids of that step (microbatches · rows, sequence+1)."""
    rows = [step_rows(slot, step) for step in range(first + 1, first + steps + 1)]
    return torch.from_numpy(np.concatenate(rows).astype(np.int32))


class Contribution(NamedTuple):
    """Contribution of a slot to a round: flat, in the state's layout; loss sum of its inner steps (nats; 0 at
    a stage that computes no loss); state that its machine carries to the next round, if the run carries any.
    """

    change: Tensor
    loss: float
    state: SlotState | None = None


def contribution_of(run: RunConfig, model: Model, island: Island, tokens: Tensor) -> Contribution:
    """Contribution of a slot whose island of a whole model has begun: takes the inner steps that the island
    lacks, those ahead included, with `tokens` of all of them (`slot_tokens` of `steps_with_tokens` steps). It
    is steps · (weights before - weights after), of which some values are sent, rounded as the run file says.
    Raises Overflow if a loss, a gradient or the change is not finite."""
    take_steps(run, model, island, tokens, island.steps)
    made = island.close()
    if island.lacks:
        go_ahead(run, model, island, tokens, island.ahead)
        made = made._replace(state=island.carry())
    return made


def take_steps(run: RunConfig, model: Model, island: Island, tokens: Tensor, last: int) -> None:
    """Take those inner steps of the round that an island of a whole model lacks, up to number `last`. tokens:
    token ids of all steps of the round and of those ahead. Raises Overflow as `contribution_of`."""
    of_step = tokens.view(-1, inner_microbatches(run), run.batch.rows, tokens.shape[-1])
    for microbatches in of_step[island.taken : last]:
        island.step(_add_all(model, island, microbatches))


def go_ahead(run: RunConfig, model: Model, island: Island, tokens: Tensor, last: int) -> None:
    """Take those steps ahead of the next round that an island lacks after its contribution, up to number
    `last` (1, 2, ...). tokens: as for `take_steps`. An overflow does not raise: it ends the steps ahead and
    is noted in island.overflow, and the slot's next round begins with that overflow."""
    try:
        take_steps(run, model, island, tokens, island.steps + last)
    except exact.Overflow as overflow:
        island.overflow = overflow.tensor


def _add_all(model: Model, island: Island, microbatches: Tensor) -> float:
    """Add the gradient of one inner step's mean loss, on token ids (microbatches, rows, sequence + 1), to
    island.gradient; returns the loss sum (nats)."""
    total, scale = 0.0, 1.0 / microbatches[..., 1:].numel()
    leaves = island.leaves()
    for ids in microbatches.long():
        total += add_gradient(model, island.local, leaves, ids, island.gradient, scale)
    return total


class Island:
    """Weights, moments and gradient of a slot in round t, of a whole model or of one stage of it: begun from
    the state and from what the slot carries, changed by inner steps, closed to a contribution. Who computes
    the gradient adds it to `gradient` (flat) before each `step`. taken: inner steps of this round that were
    taken, those taken in advance included; steps ahead of the next round count on from there."""

    def __init__(
        self,
        run: RunConfig,
        state: StageState,
        t: int,
        steps: int,
        carried: SlotState | None = None,
        late: bool = False,
    ) -> None:
        """steps: inner steps that the slot takes in the round. carried: state of the slot after the round
        before; None if it begins anew. late: True if the contribution to that round was late; what was sent
        of it is added to this one. `state` is read, not changed. Raises Overflow if `carried` notes one in a
        step that was taken ahead of the round."""
        if carried is not None and carried.overflow:
            raise exact.Overflow(carried.overflow)
        self._run, self._state, self._t, self.steps = run, state, t, steps
        self._carried, self._late = carried, late
        own = carried.moments if carried is not None else None
        weights = _first_weights(run, state, carried)
        first = torch.zeros_like(state.weights) if own is None else own.first.clone()
        second = (state.exp_avg_sq if own is None else own.second).clone()
        self.local = StageState(state.layout, weights, first, second, adam_step=state.adam_step)
        self._first_steps = 0 if own is None else own.first_steps
        self._second_steps = state.adam_step if own is None else own.second_steps
        self._held = 0.0
        """Weight of squares in a second moment that the island holds; 0: it has its own."""
        if run.round.first_moment == "agree":
            self._held = 1.0 / run.round.slots**2
            self._first_steps = self._second_steps = rounds_of(run).progress(t - 1)
            self.local.exp_avg.copy_(state.exp_avg)
        elif run.round.first_moment == "estimate":
            self._first_steps = state.adam_step
            self.local.exp_avg.copy_(state.exp_avg).mul_(adam_scale(run, state)).div_(outer_scale(run, t))
        self.gradient = torch.zeros_like(weights)
        self._sent: Tensor | None = None
        """Change that was sent, once the island is closed."""
        self.overflow = ""
        """Tensor that overflowed in a step ahead; "": none did."""
        self.ahead = rounds_of(run).ahead(steps)
        """Number of steps ahead of the next round that it takes after this one."""
        self.taken, self._loss = (carried.ahead, carried.ahead_loss) if carried is not None else (0, 0.0)
        self._ahead_losses: list[float] = []

    def leaves(self) -> dict[str, Tensor]:
        """Present weights by name in the compute dtype, as autograd leaves; to be made anew after a step."""
        weights = working_weights(self.local, DTYPES[self._run.compute.dtype])
        return {name: weight.detach().requires_grad_() for name, weight in weights.items()}

    def step(self, loss: float = 0.0) -> None:
        """Take the next inner step with `gradient`, clipped by its own norm (of the stage, if this is one),
        and set that to zero; `leaves` made before are void. loss: sum of its microbatches (nats); 0 at a
        stage that computes none. Raises Overflow if the norm is not finite: no step was taken, and `gradient`
        stays. The island is void then, unless the step was one ahead of the next round: its `carry` is still
        needed (`go_ahead`)."""
        run, local = self._run, self.local
        norm = global_norm(exact.squares(local.layout, self.gradient).values())
        if not math.isfinite(norm):
            raise exact.Overflow("gradient")
        self._first_steps += 1
        self._second_steps += not self._held
        first, _ = bias_corrections(run.optimizer, self._first_steps)
        _, second = bias_corrections(run.optimizer, self._second_steps)
        scalars = StepScalars(self._rate(), clip_factor(norm, run.optimizer.clip), first, second)
        adamw(local, self.gradient, scalars, run.optimizer, held=self._held)
        self.gradient.zero_()
        if self.taken < self.steps:
            self._loss += loss
        else:
            self._ahead_losses.append(loss)
        self.taken += 1

    def _rate(self) -> float:
        """Learning rate of the next inner step. Slots of all speeds follow the schedule from the round's
        first to its last optimizer step."""
        rounds = rounds_of(self._run)
        at = rounds.progress(self._t - 1)
        if self.taken < self.steps:
            at += -(-(self.taken + 1) * rounds.length(self._t) // self.steps)
        else:  # taken in advance, from the next round
            at = rounds.progress(self._t)
        return learning_rate(self._run, at)

    @property
    def lacks(self) -> bool:
        """True while inner steps, those ahead of the next round included, are still to be taken before
        `carry`. False after an overflow in a step ahead: no other is taken then."""
        return not self.overflow and self.taken < self.steps + self.ahead

    def close(self) -> Contribution:
        """Contribution of the slot, after the round's inner steps. If the slot takes steps ahead
        (`round.overlap`), the carried state in the result is None, and `carry` returns it after them. Raises
        Overflow if the change is not finite."""
        rounds, part, state, carried = rounds_of(self._run), self._run.round, self._state, self._carried
        if part.first_moment == "agree":
            self._normalise()
        change = torch.sub(state.weights, self.local.weights)
        if carried is not None and carried.unsent is not None and part.unsent == "feedback":
            change.add_(carried.unsent, alpha=part.unsent_decay)
        exact.check_finite("contribution", change)
        chosen = selected(part, state.layout, change, state.weights, self._t - rounds.start)
        weighted = change.mul(float(self.steps))
        sent = rounded(weighted if chosen is None else weighted.mul_(chosen), BITS[part.contributions])
        whole = sent
        if self._late and carried is not None and carried.sent is not None:
            whole = sent + carried.sent
        self._sent = sent
        kept = self._carry(change) if rounds.keeps and not self.ahead else None
        return Contribution(whole, self._loss, kept)

    def _normalise(self) -> None:
        """Move the weights of a slot that took fewer or more steps than the round has (`Rounds.length`) to
        where that number of steps with the same mean gradient would have ended (`agreed_moments.normalise`).
        """
        run, state, t = self._run, self._state, self._t
        own, scalars = course(run, t, self.steps), round_scalars(run, t)
        for part, decay in blocks_of(run.optimizer, state):
            moments = state.exp_avg[part], state.exp_avg_sq[part]
            local, weights = self.local.weights[part], state.weights[part]
            normalise(local, weights, *moments, own, scalars, run.optimizer.eps, decay)

    def carry(self) -> SlotState:
        """State that the slot carries to its next round. Called after `close` and the steps ahead, and before
        the round's outer step changes the state from which the island began."""
        return self._carry(torch.sub(self._state.weights, self.local.weights))

    def _carry(self, change: Tensor) -> SlotState:
        """State that the slot carries. change (flat): weights before the round minus present ones, with what
        it did not send before; it is overwritten."""
        rounds, part, sent = rounds_of(self._run), self._run.round, self._sent
        assert sent is not None, "the island is not closed"
        return SlotState(
            self._t,
            sent if rounds.merges else None,
            change.sub_(sent, alpha=1.0 / self.steps) if part.unsent != "drop" else None,
            self.local.weights if part.mix else None,
            self._moments if part.first_moment == "keep" else None,
            self.ahead,
            math.fsum(self._ahead_losses),
            self.overflow,
        )

    @property
    def _moments(self) -> Moments:
        local = self.local
        return Moments(local.exp_avg, local.exp_avg_sq, self._first_steps, self._second_steps)


def _first_weights(run: RunConfig, state: StageState, carried: SlotState | None) -> Tensor:
    """Weights (flat, a copy) with which an island begins its inner steps: the committed ones and, if
    `round.unsent` is "local", its own change that was not sent yet. With fragments or overlap, the fragment
    exchanged in the slot's last round begins instead at the average of committed and own weights
    (`round.mix`: share of its own), unless `round.ahead` keeps the change of the steps ahead."""
    part, weights = run.round, state.weights.clone()
    if carried is None or carried.unsent is None or part.unsent != "local":
        return weights
    weights.sub_(carried.unsent)
    if (part.fragments > 1 or part.overlap) and part.ahead == "mix":
        fragment = turn(carried.t - rounds_of(run).start, part.fragments)
        for begin, end in fragment_bounds(state.layout, part.fragments, fragment):
            weights[begin:end] = state.weights[begin:end]
            if carried.weights is not None:
                weights[begin:end].lerp_(carried.weights[begin:end], part.mix)
    return weights


def add_gradient(
    model: Model, state: StageState, leaves: dict[str, Tensor], ids: Tensor, gradient: Tensor, scale: float
) -> float:
    """Add the gradient of scale · loss of one microbatch to the flat vector `gradient`; returns the loss sum
    (nats). leaves: working weights that require gradients. ids: (rows, sequence + 1). Raises Overflow of the
    loss."""
    inputs, targets = ids[:, :-1], ids[:, 1:].contiguous()
    weights = PlainWeights(leaves)
    x = begin = model.embed(weights, inputs).detach().requires_grad_()
    for block in range(model.config.blocks):
        x = model.block(weights, block, x)
    loss = model_loss(model, weights, x, targets)
    exact.check_finite("loss", loss)
    dx, *found = torch.autograd.grad(loss * scale, [begin, *leaves.values()], allow_unused=True)
    add_gradients(state.layout, leaves, found, gradient)
    add_embedding_gradient(model, state.layout, inputs, dx, gradient)
    return float(loss.detach())


def add_gradients(
    layout: Layout, names: Iterable[str], found: Iterable[Tensor | None], gradient: Tensor
) -> None:
    """Add the gradients of tensors to the flat vector `gradient`. found: that of each name in order; None: it
    has none."""
    for name, one in zip(names, found, strict=True):
        if one is not None:
            layout.view(gradient, name).add_(one)


def add_embedding_gradient(model: Model, layout: Layout, ids: Tensor, dx: Tensor, gradient: Tensor) -> None:
    """Add the gradient of the embedding of token ids (rows, sequence) to the flat vector `gradient`. dx: that
    of the embedding's output (rows, sequence, stream.width)."""
    dx = dx.reshape(-1, dx.shape[-1])
    if model.embedding_scale != 1.0:
        dx = dx * model.embedding_scale
    dx = dx.to(gradient.dtype)
    for table, rows in model.embedding_rows(ids):
        layout.view(gradient, table).index_add_(0, rows, dx)
