"""Settings of a run that decisions of the protocol depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from anabranch.flow.graph.problem import Return
from anabranch.protocol.interface.delay import NO_DELAY, Delay
from anabranch.protocol.interface.rounds import NO_ROUNDS, Rounds
from anabranch.protocol.interface.tasks import PIECE_BYTES, full_cover

#: Defaults of `heartbeat_s`, `neighbours` and `newcomer_s`. Choices.
HEARTBEAT_S, NEIGHBOURS, NEWCOMER_S = 1.0, 4, 2.0


@dataclass(frozen=True)
class Settings:
    """Part of the run's configuration that the protocol reads. Sizes of 0 are not known.

    run: id of the run. epoch: counts the owner's replacements of its voters. stages: number of relay stages.
    microbatches: of each iteration. steps: iterations of the run. windows: held-out windows per evaluation
    (0: none). evaluate_every, checkpoint_every: in optimizer steps (0: never). min_replicas: relays that each
    stage must have before the run begins. policy: routing policy of microbatches. returns: "own" if each
    microbatch ends at the data node where it began. numerics: "strict" admits one numerics class only,
    "mixed" any. activation_bytes: one activation on the wire. heartbeat_s: seconds between pings. voters:
    greatest number of peers that vote on the log.

    snapshot_every: iterations between snapshots that peers keep for each other (0: none). snapshot_copies:
    peers outside a stage that hold its state. snapshot_budget_bytes: memory of a peer for such copies.
    blocks: model blocks of stages 1 to S (empty: one each). block_bytes, ends_bytes: sums and reduced
    gradient of one block, and of stage 0, on the wire (0: not known). sums_bytes: the part of block_bytes
    that is sums. state_bytes: weights and moments of a block. piece_bytes: largest piece of a state on the
    wire.

    recompute: credits of a relay beyond its capacity, as a share of it; for these microbatches it keeps the
    received activation only and computes the forward again. rebalance: iterations in a row in which moves of
    relays must pay before they are made (0: never); once a relay departed, moves that pay are made at once if
    nobody moved for as many. neighbours: peers of an adjacent stage that each peer picks for its links
    (`membership.overlay`). deal: initial assignment to stages: "arrival" (order of joining) or "links"
    (measured links, `fleet.initial_assignment`). spread: summing of reduce parts by peers of adjacent stages:
    "links" (where it saves time), "program" (`placement.averaging_program`), "always" (at random, for tests),
    "never". newcomer_s: seconds of work, by the last step, that must be left in the open iteration for a new
    relay to serve in it. spare: standby replicas (`fleet.standbys`): "links" (where they would delay the
    reduce), "always" (at random, for tests), "never". audit_share: probability that a relay's contribution to
    a step is computed again by another replica (0: no receipts, no audits). rounds: which iterations are
    rounds of islands. round_bytes: an island's contribution, and the result, of the whole model on the wire
    (0: not known). frozen: hashes of the frozen weights of stages 0 to S, in a run that trains adapters
    (empty: all weights are trained). frozen_bytes: their sizes (empty: not known). delay: which iterations
    begin before the step before them.
    """

    run: str
    epoch: int
    stages: int
    microbatches: int
    steps: int
    windows: int = 0
    evaluate_every: int = 0
    checkpoint_every: int = 0
    min_replicas: int = 1
    policy: str = "greedy"
    returns: Return = "any"
    numerics: str = "strict"
    activation_bytes: int = 0
    heartbeat_s: float = HEARTBEAT_S
    snapshot_every: int = 0
    snapshot_copies: int = 2
    snapshot_budget_bytes: int = 4 << 30
    voters: int = 1
    blocks: tuple[int, ...] = ()
    recompute: float = 0.0
    rebalance: int = 0
    neighbours: int = NEIGHBOURS
    block_bytes: int = 0
    ends_bytes: int = 0
    sums_bytes: int = 0
    state_bytes: int = 0
    piece_bytes: int = PIECE_BYTES
    deal: str = "arrival"
    spread: str = "links"
    newcomer_s: float = NEWCOMER_S
    spare: str = "never"
    audit_share: float = 0.0
    rounds: Rounds = NO_ROUNDS
    round_bytes: tuple[float, float] = (0.0, 0.0)
    frozen: tuple[str, ...] = ()
    frozen_bytes: tuple[int, ...] = ()
    delay: Delay = NO_DELAY

    @property
    def audits(self) -> bool:
        """True if relays sign receipts of their work, and a share of them is audited."""
        return self.audit_share > 0.0

    def evaluates(self, t: int, last: int) -> bool:
        """True if the state after iteration t is evaluated (its held-out windows are sent in iteration t +
        1). last: the run's last iteration, which is evaluated too if the run evaluates at all."""
        if not self.windows or not self.evaluate_every:
            return False
        return self.rounds.passes(t, self.evaluate_every) or t == last

    def checkpoints_at(self, t: int) -> bool:
        """True if a checkpoint is written after iteration t."""
        return self.checkpoint_every > 0 and self.rounds.passes(t, self.checkpoint_every)

    def snapshots_at(self, t: int) -> bool:
        """True if every stage takes a snapshot of its state after iteration t."""
        return self.snapshot_every > 0 and t % self.snapshot_every == 0

    @property
    def boundary_bytes(self) -> int:
        """Bytes of the largest payload between two stages: an activation; in a run whose islands hold the
        whole model, the token ids of all inner steps that a slot of a round may have."""
        if not self.rounds.inner or self.rounds.pipeline:
            return self.activation_bytes
        inner = self.microbatches // self.rounds.slots
        return self.activation_bytes * inner * self.rounds.most_steps

    def slots(self, stage: int, capacity: int) -> int:
        """Number of credits that a peer of `stage` can grant if it can keep the activations of `capacity`
        microbatches: more than that if it computes some forwards again (`recompute`)."""
        return capacity + (int(capacity * self.recompute) if stage else 0)

    def share(self, t: int, capacity: int) -> int:
        """Microbatches of a peer's `capacity` that iteration t may use: all, or half where two iterations are
        in flight at a time."""
        if self.delay.has(t) or self.delay.has(t + 1):
            return max(1, (capacity + t % 2) // 2)
        return capacity

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of model blocks of each of the stages 1 to S."""
        return self.blocks or (1,) * self.stages

    def frozen_hash(self, stage: int) -> str:
        """Hash of a stage's frozen weights; "" if it has none."""
        return self.frozen[stage] if stage < len(self.frozen) else ""

    def frozen_number(self, stage: int) -> int:
        """Number that stands for a stage's frozen weights wherever states are fetched by stage number (as a
        state after iteration 0); greater than the number of any stage."""
        return self.stages + 1 + stage

    def state_bytes_of(self, stage: int) -> float:
        """Bytes of weights and moments of a whole stage (0: not known); of its frozen weights if `stage` is
        the number of those (`frozen_number`), infinite if their size is not known."""
        if stage > self.stages:
            whose = stage - self.stages - 1
            return self.frozen_bytes[whose] if whose < len(self.frozen_bytes) else math.inf
        return self.state_bytes * self._blocks(stage)

    def gradient_bytes_of(self, stage: int, t: int = 0) -> float:
        """Bytes of the reduced gradient of iteration t of a whole stage on the wire, or of the result if t is
        a round (0: not known)."""
        if self.rounds.has(t):
            return self.round_bytes_of(stage)[1]
        return (self.block_bytes - self.sums_bytes) * self._blocks(stage)

    def reduced_bytes_of(self, stage: int) -> float:
        """Bytes of sums and reduced gradient of a whole stage on the wire (0: not known)."""
        return self.block_bytes * self._blocks(stage)

    def round_bytes_of(self, stage: int) -> tuple[float, float]:
        """Bytes of a stage's part of an island's contribution, and of the result, on the wire (0: not
        known)."""
        sizes = [self._blocks(each) for each in range(self.stages + 1)]
        share = sizes[stage] / sum(sizes)
        return self.round_bytes[0] * share, self.round_bytes[1] * share

    @property
    def largest_share(self) -> float:
        """Share of the model's parameters in its largest stage (1: not known)."""
        if not self.block_bytes:
            return 1.0
        sizes = [self._blocks(stage) for stage in range(self.stages + 1)]
        return max(sizes) / sum(sizes)

    def _blocks(self, stage: int) -> float:
        """Size of a stage in model blocks; that of stage 0 (embedding, norm, head) is its bytes in a reduce
        over those of one block."""
        if stage:
            return self.counts[stage - 1]
        return self.ends_bytes / self.block_bytes if self.block_bytes else 0.0

    def cover(self, stage: int) -> frozenset[int]:
        """Units that a synchronous step counts at a stage: its microbatches, or at stage 0 their heads and
        embeddings (`tasks`). `RunView.cover` has those of any iteration."""
        return full_cover(stage, self.microbatches)
