"""Compute tasks that the protocol asks of a peer's worker, and their results.

The protocol never touches a tensor. Tensors pass through it as opaque *payloads*: it receives one with a
message, gives it to a task as an input, gets others back as outputs, keeps references to those that a
neighbour may need again, and drops them when the step is released. A driver (`node/`, `sim/`) runs each task
on `train.stage.worker.Worker` (or on a stand-in with the same methods) and returns a `Result`.

A *unit* is one contribution that a stage counts. At a relay stage it is the microbatch index i; at stage 0
each microbatch has two: `head_unit(i)` and `embed_unit(i)`. Indices from the batch size on are
held-out evaluation windows: forward only, never a unit.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import pairwise

import msgspec

Payload = object

#: Covers that are kept, by stage and microbatches. A choice: as many stages as a run has.
COVERS_CACHED = 64
#: Steps for which a reduced gradient is kept, for replicas that catch up. A choice: a few steps of absence.
KEPT_GRADIENTS = 4
#: Steps for which the weights before a step are kept where it is audited. A choice: an audit takes a few
#: microbatches' time beside the usual work.
AUDIT_STEPS = 4
#: Result.error of an AuditUnit that came after these steps.
WEIGHTS_GONE = "the weights before the audited step are not kept any more"
#: Largest piece of a snapshot, or of a reduce part, on the wire.
PIECE_BYTES = 4 << 20
#: Most pieces of one state: 64 GB.
PIECES_MAX = 1 << 14


def head_unit(index: int) -> int:
    """Number of the unit that stands for head and loss of microbatch `index` at stage 0."""
    return 2 * index


def embed_unit(index: int) -> int:
    """Number of the unit that stands for the embedding of microbatch `index` at stage 0."""
    return 2 * index + 1


@cache
def unit_count(stage: int, microbatches: int) -> int:
    """Number of units of a step at `stage`: a head and an embedding of each microbatch at stage 0, else one
    unit of each."""
    return 2 * microbatches if stage == 0 else microbatches


@lru_cache(COVERS_CACHED)
def full_cover(stage: int, microbatches: int) -> frozenset[int]:
    """Units that a synchronous step counts at `stage`, each exactly once (invariant I1)."""
    return frozenset(range(unit_count(stage, microbatches)))


Moments = tuple[float, float]
"""Sum of squares of a contribution to a sum, and its inner product with that sum."""


class _TaskOfIteration(msgspec.Struct, frozen=True):
    t: int


class Task(_TaskOfIteration, frozen=True, kw_only=True):
    """Base of all tasks of a peer's worker. t: iteration to which the work belongs. hashed: True if
    Result.hashes is to have the hash of each input, then of each output."""

    hashed: bool = False


class MicrobatchTask(Task, frozen=True):
    """Base of tasks on one microbatch, on a held-out window (indices from the batch size on), or in a round
    on a slot."""

    index: int


class Embed(MicrobatchTask, frozen=True):
    """Embedding at stage 0. inputs () -> outputs (activation,). Keeps nothing: the token ids are a function
    of (t, index). In a round `index` is a slot, and the output has the token ids of its inner steps `first` +
    1 to `first` + `steps`, which the island takes; a byte, where islands take them from data of their own. In
    a round of pipeline islands it begins the slot at stage 0, with `carried` and `late` as of Forward, and
    the output is a byte."""

    first: int = 0
    steps: int = 0
    carried: int = 0
    late: int = 0


class Forward(MicrobatchTask, frozen=True):
    """Forward pass of a relay's blocks. inputs (activation,) -> outputs (activation,).

    With `train` and `keep` the worker keeps the graph under `index` until InputGradient or Discard; with
    `train` alone it computes the same and keeps nothing. steps: inner steps of a slot in a round. carried:
    round from which the worker carries state of the slot (0: it begins anew; Result.error if it does not have
    that). late: inner steps of its contribution to that round, which was late and is added to this one. In a
    round of pipeline islands this task begins the slot at its stage, takes no inner step, and gives back the
    byte that it got. first: inner steps of the slot before this round.
    """

    train: bool
    keep: bool = True
    steps: int = 0
    carried: int = 0
    late: int = 0
    first: int = 0


class Head(MicrobatchTask, frozen=True):
    """Final norm, head and loss at stage 0, with the gradient of the loss by the activation.

    inputs (activation,) -> outputs (input gradient,), loss_sum (nats, sum over tokens), tokens. The loss is
    divided by the tokens of the iteration before backward. What the weight gradients of head and final norm
    need is stored under `head_unit(index)` for WeightGradient. Without `train` (an evaluation window) outputs
    is () and nothing is kept. steps: inner steps of a slot in a round, late ones included. In a round of
    pipeline islands it ends the slot at stage 0: loss_sum is that of all inner steps, inputs and outputs are
    a byte.
    """

    train: bool
    steps: int = 0


class _InnerTask(MicrobatchTask, frozen=True):
    """Base of tasks on an inner step of a pipeline island, for the slot `index` that Embed or Forward began.
    step: number of the inner step, counted over all rounds of the slot (`first` + 1 to `first` + `steps`).
    Result.error unless the slot is open at this worker, and the step is its next one."""

    step: int


class _InnerMicrobatchTask(_InnerTask, frozen=True):
    """Base of tasks on microbatch `number` (0, 1, ... in the slot) of an inner step."""

    number: int


class InnerForward(_InnerMicrobatchTask, frozen=True):
    """Forward pass with the island's weights. inputs (activation,), at stage 0 () -> outputs (activation,).
    With `keep` the graph is kept until InnerBackward, else the input alone."""

    keep: bool = True


class InnerHead(_InnerMicrobatchTask, frozen=True):
    """Final norm, head and loss at stage 0 with the island's weights. inputs (activation,) -> outputs (input
    gradient,), loss_sum (nats), tokens. The weights' gradients are added to the island's."""


class InnerBackward(_InnerMicrobatchTask, frozen=True):
    """Backward pass with the island's weights. inputs (gradient of the stage's output,) -> outputs (gradient
    of its input,), at stage 0 (). The weights' gradients are added to the island's, so the microbatches of a
    step must come in order of `number`. again: the graph was not kept; the forward is computed again."""

    again: bool = False


class InnerStep(_InnerTask, frozen=True):
    """Optimizer step of the island with the gradients of all its microbatches, which are then cleared. inputs
    () -> outputs ()."""


class StepAhead(MicrobatchTask, frozen=True):
    """Inner step of the next round, taken by the machine that gave the contribution of slot `index` to round
    t, from its own weights and the token ids that Forward got. inputs () -> outputs (). step: its number,
    from 1. Nothing happens if it is taken already, or the slot was discarded. Steps that lack when Apply or
    Skip of the round comes are taken before it."""

    step: int


class InputGradient(MicrobatchTask, frozen=True):
    """Backward pass by the input. inputs (gradient of the stage's output,) -> outputs (gradient of its
    input,).

    Frees the graph; what the weight gradient needs is stored under `index`. again: the graph was not kept;
    the forward is computed again from inputs (gradient, received activation). In a round of pipeline islands
    it ends the slot at this stage, after its last inner step; inputs and outputs are a byte.
    """

    again: bool = False


class WeightGradient(Task, frozen=True):
    """Addition of the stored contribution of `unit` to the accumulator. inputs (), for an embed unit
    (gradient of stage 0's output,) -> outputs (). Of a slot whose data are its machine's own, the result
    has the digest of the contribution and its loss sum, for the log."""

    unit: int


class Recount(Task, frozen=True):
    """Recomputation of the whole contribution of `unit`, added `sign` (+1 or -1) times; -1 subtracts a unit
    that two replicas counted (R7). inputs (received activation, received gradient), for a head unit or a slot
    whose contribution needs no gradient, (activation,), for an embed unit (gradient,) -> outputs ()."""

    unit: int
    sign: int


class Discard(MicrobatchTask, frozen=True):
    """Removal of graph and values that the worker keeps of microbatch `index`, because this peer refused the
    microbatch or its sender took it back; nothing is added to the gradient."""


class Freeze(Task, frozen=True):
    """Frozen copy of the accumulator, cut for the reduce.

    outputs: `parts` payloads in part order, each a flat integer (exact) or float (fast) vector. The layout is
    all parameters of the stage in name order, flattened, cut into contiguous ranges of about equal length
    (`part_bounds`; coarse sums at multiples of their segment). clear: empty the accumulator.
    """

    parts: int
    clear: bool = False


class SumPart(Task, frozen=True):
    """Sum of one part of a gradient. inputs: that part from every member of a group (the stage or a cell of
    it) in order, or the sums of all groups -> outputs (reduced part in the master dtype, or as the integers
    of a coarse sum,). whole: False for a group that is not the whole stage, whose sum is not rounded.
    weighed: True if Result.moments is to have the moments of each input, where the worker's numbers have
    any."""

    whole: bool = True
    weighed: bool = False


class Assemble(Task, frozen=True):
    """Reduced gradient from its parts. inputs: all parts in order -> outputs (). Result.digest: hash of the
    tensors in name order; Result.squares: sum of squares of each. The gradient is kept for Apply, and for
    peers that catch up, until KEPT_GRADIENTS later steps were applied. witness: stage of a gradient that is
    only to be compared, and not kept; None: this worker's own stage, whose gradient is kept."""

    witness: int | None = None


class Apply(Task, frozen=True):
    """Optimizer step t with the values in the log, which are never recomputed locally. The worker then drops
    gradient sum, graphs and stored values of the iteration; those of a delayed iteration that is open, too,
    stay.

    inputs: () for the gradient assembled last, or (whole flat reduced gradient,) fetched from a peer ->
    Result.fingerprint of the state after it. digest: the gradient must have it ("": any); otherwise
    Result.error, and the state is unchanged. keep: keep a copy of the weights before the step, for AuditUnit,
    until AUDIT_STEPS later steps were applied.
    """

    learning_rate: float
    clip_factor: float
    bias_correction1: float
    bias_correction2: float
    digest: str = ""
    keep: bool = False


class HashInputs(Task, frozen=True):
    """Hash of a received payload, for the check of its seal before the payload is used. inputs (payload,) ->
    Result.hashes (one hash). The task must be made with `hashed` True."""


class AuditUnit(MicrobatchTask, frozen=True):
    """Recomputation of a relay's microbatch, or of a slot in a round, with what Apply kept of the state
    before step t. Result.error is WEIGHTS_GONE if that is not kept (any more).

    inputs (activation, gradient of the stage's output) -> outputs (activation, gradient of the input). The
    contribution is added to a sum of its own, of which there is one at a time: it begins at zero with
    `first`. Without the gradient the output is the activation alone, and nothing is added. steps: inner steps
    of a slot in a round, which are all taken again; inputs and outputs are those of Forward and
    InputGradient.
    """

    first: bool = False
    steps: int = 0


class AuditSum(Task, frozen=True):
    """Sum of the units that AuditUnit computed, cut into `parts` as by Freeze -> outputs; then dropped."""

    parts: int


class Skip(Task, frozen=True):
    """End of a skipped step t: weights, moments and Adam's counter stay as they are, work of t is dropped.
    Result.fingerprint of the (unchanged) state."""


class ReadGradient(Task, frozen=True):
    """Kept gradient. outputs (flat reduced gradient of step t,), or () if it is no longer kept."""


class Snapshot(Task, frozen=True):
    """Serialised state after step t (safetensors). outputs: pieces in order (flat uint8 vectors of at most
    PIECE_BYTES), the same at every replica with this state. Result.fingerprint of the state, Result.hashes of
    the pieces."""


class ProveState(Task, frozen=True):
    """Proof that the state after step t is held. Result.digest: hash of the state keyed by `key`, which
    cannot be computed without the state; Result.error if the worker's state is of another step."""

    key: str


class CheckState(Task, frozen=True):
    """Verification of a snapshot of any stage, or of a stage's frozen weights (`Settings.frozen_number`).
    inputs: its pieces after step t -> Result.hashes of the pieces, Result.fingerprint of the state, or
    Result.error if it cannot be read. Nothing is kept."""

    stage: int


class LoadState(Task, frozen=True):
    """State loaded from a snapshot. inputs: its pieces after step t -> Result.fingerprint, or Result.error if
    it cannot be read."""


class LoadFrozen(Task, frozen=True):
    """Frozen weights of this worker's stage, in a run that trains adapters only. inputs: their pieces, or ()
    for those that this machine has already -> outputs: their pieces, Result.fingerprint: their hash, or ""
    and nothing if this machine has none, or if the pieces are not the run's."""


class InitState(Task, frozen=True):
    """Initial state from the seed (t = 0). Result.fingerprint of it."""


class Result(msgspec.Struct, frozen=True):
    """Result of a task. outputs, digest, squares, fingerprint: as the task says. loss_sum (nats), tokens: of
    Head and InnerHead; loss_sum also of WeightGradient. hashes: of a snapshot's pieces, or of the inputs and
    outputs of a task with `hashed`. overflow: tensor with a non-finite or out-of-range value ("": none;
    otherwise outputs is ()). error: why the task could not be done ("": it was). seconds: duration of the
    task. moments: of SumPart."""

    outputs: tuple[Payload, ...] = ()
    loss_sum: float = 0.0
    tokens: int = 0
    digest: str = ""
    squares: dict[str, float] = msgspec.field(default_factory=dict)
    fingerprint: str = ""
    hashes: tuple[str, ...] = ()
    overflow: str = ""
    error: str = ""
    seconds: float = 0.0
    moments: tuple[Moments, ...] = ()


def part_bounds(elements: int, parts: int) -> list[tuple[int, int]]:
    """Bounds of `parts` contiguous ranges of `elements`, whose sizes differ by at most one."""
    base, extra = divmod(elements, parts)
    starts = [part * base + min(part, extra) for part in range(parts + 1)]
    return list(pairwise(starts))
