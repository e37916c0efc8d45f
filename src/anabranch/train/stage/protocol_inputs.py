"""Protocol inputs derived from a run file: settings, schedule, genesis record."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from anabranch import PROTOCOL_VERSION
from anabranch.config import RunConfig, render_run_file
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Genesis
from anabranch.protocol.log.step_parameters import Schedule, StepParameters
from anabranch.train.adapters.lora import adapted, run_model
from anabranch.train.codec.sizes import coarse_bytes
from anabranch.train.model.interface import DTYPES, stage_layout
from anabranch.train.model.partition import partition
from anabranch.train.model.rounds import delay_of, inner_microbatches, iterations, rounds_of
from anabranch.train.model.sizes import (
    SCALED_BYTES,
    SUM_WIRE_BYTES,
    ModelConfig,
    block_parameters,
    end_parameters,
    token_bytes,
    total_parameters,
)
from anabranch.train.numerics.block_float import BITS
from anabranch.train.numerics.step_scalars import bias_corrections, clip_factor, learning_rate
from anabranch.train.stage.cuts import payload_bytes
from anabranch.train.stage.run_objects import initial_state, master_dtype

#: Least and greatest automatic number of iterations between snapshots; a plain choice.
SNAPSHOTS_EVERY = (5, 100)


@dataclass(frozen=True)
class Manifest:
    """Identity of a run's data."""

    corpus_fingerprint: str
    tokenizer_hash: str


def settings_of(run: RunConfig, run_id: str, model: ModelConfig, epoch: int = 1) -> Settings:
    """Protocol settings of a run file. run_id: name of the run in messages. epoch: of the log."""
    batch, whole = run.batch, run.pipeline.whole
    master = _widths(run)[1]
    trained = trained_parameters(run, model)
    # The ends of a whole model count as a share of each of its blocks.
    block = -(-trained.total // model.blocks) if whole else trained.block
    return Settings(
        run=run_id,
        epoch=epoch,
        stages=run.pipeline.relay_stages,
        microbatches=batch.microbatches,
        steps=iterations(run),
        windows=run.evaluation.windows if run.evaluation.every else 0,
        evaluate_every=run.evaluation.every,
        checkpoint_every=run.checkpoint.every,
        min_replicas=run.fleet.minimum,
        policy=run.routing.policy,
        returns="own" if run.routing.return_ == "own" else "any",
        numerics="mixed" if run.run.numerics == "mixed" else "strict",
        activation_bytes=sent_bytes(run, model),
        snapshot_every=snapshot_interval(run, model) if run.snapshots.copies else 0,
        snapshot_copies=run.snapshots.copies,
        snapshot_budget_bytes=run.snapshots.budget_bytes,
        voters=run.fleet.voters,
        recompute=run.fleet.recompute,
        rebalance=run.fleet.rebalance,
        blocks=tuple(len(spec.blocks) for spec in partition(model, run.pipeline)[1:]),
        block_bytes=math.ceil(block * sum(reduce_wire_bytes(run))),
        ends_bytes=0 if whole else math.ceil(trained.end * sum(reduce_wire_bytes(run))),
        sums_bytes=math.ceil(block * reduce_wire_bytes(run)[0]),
        state_bytes=block * (3 + run.iteration.delay) * master,
        deal=run.fleet.deal,
        spread=run.fleet.spread,
        spare=run.fleet.spare,
        audit_share=run.audit.share,
        rounds=rounds_of(run),
        round_bytes=round_bytes(run, model),
        frozen=run.lora.frozen,
        frozen_bytes=frozen_bytes(run, model),
        delay=delay_of(run),
    )


@dataclass(frozen=True)
class Trained:
    """Numbers of trained parameters: of the largest block, of stage 0 (`end`) and of the whole model."""

    block: int
    end: int
    total: int


def trained_parameters(run: RunConfig, model: ModelConfig) -> Trained:
    """Numbers of trained parameters: all of the model, or of a run with adapters only these, of which stage 0
    has none."""
    if not run.lora.rank:
        return Trained(block_parameters(model), end_parameters(model), total_parameters(model))
    shapes = run_model(run, replace(model, max_sequence=1), torch.device("cpu")).block_shapes(0)
    block = sum(map(math.prod, shapes.values()))
    return Trained(block, 0, block * model.blocks)


def frozen_bytes(run: RunConfig, model: ModelConfig) -> tuple[int, ...]:
    """Bytes of the frozen weights of stages 0 to S; () in a run that trains all weights."""
    if not run.lora.rank:
        return ()
    base, width = adapted(run, model).base, _widths(run)[0]
    return tuple(width * stage_layout(base, spec).elements for spec in partition(model, run.pipeline))


def sent_bytes(run: RunConfig, model: ModelConfig) -> int:
    """Bytes of a microbatch between two stages: its activation or input gradient, whichever has more, or its
    token ids for a whole model."""
    batch = run.batch
    if run.pipeline.whole:
        return batch.rows * (batch.sequence + 1) * token_bytes(model.vocab_size)
    return payload_bytes(run, model)


def round_bytes(run: RunConfig, model: ModelConfig) -> tuple[float, float]:
    """Bytes on the wire, of all stages together, of an island's contribution to a round and of the round's
    result; (0, 0) without islands."""
    if not run.round.slots:
        return 0.0, 0.0
    of_sum = SCALED_BYTES.get(BITS[run.round.contributions], SUM_WIRE_BYTES)
    of_result = SCALED_BYTES.get(BITS[run.round.results], float(_widths(run)[1]))
    return of_sum * total_parameters(model), of_result * total_parameters(model)


def reduce_wire_bytes(run: RunConfig) -> tuple[float, float]:
    """(Bytes of one parameter's gradient sum, bytes of its reduced gradient) on the wire in a synchronous
    reduce."""
    if run.wire.reduce == "coarse":
        return coarse_bytes(run.batch.microbatches)
    master = _widths(run)[1]
    return (SUM_WIRE_BYTES if run.run.reduction == "exact" else master), master


def _widths(run: RunConfig) -> tuple[int, int]:
    """(Bytes of an element in the compute dtype, bytes of one in the master dtype)."""
    dtype = DTYPES[run.compute.dtype]
    return dtype.itemsize, master_dtype(dtype).itemsize


def snapshot_interval(run: RunConfig, model: ModelConfig) -> int:
    """Iterations between snapshots. Unless the run file sets it: within SNAPSHOTS_EVERY, the least at which
    snapshots (weights, two moments, with a delay predicted weights) send at most a quarter of the bytes of
    activations and gradients (of the reduce, where relays hold the whole model)."""
    if run.snapshots.every:
        return run.snapshots.every
    master = _widths(run)[1]
    traffic = 2 * (run.pipeline.relay_stages + 1) * run.batch.microbatches * sent_bytes(run, model)
    if run.pipeline.whole:  # the reduce is all that is sent
        traffic = math.ceil(trained_parameters(run, model).total * sum(reduce_wire_bytes(run)))
    copied = run.snapshots.copies * (3 + run.iteration.delay) * master * trained_parameters(run, model).total
    return max(SNAPSHOTS_EVERY[0], min(SNAPSHOTS_EVERY[1], -(-4 * copied // traffic)))


def schedule_of(
    run: RunConfig, manifest_hash: Callable[[int], str] | None, tokens_per_iteration: int
) -> Schedule:
    """Scalars of each step, as pure functions of the run file and of the gradient's norm. manifest_hash: t ->
    hash of the batch; None at a peer that does not read the corpus."""

    rounds = rounds_of(run)

    def step(t: int, adam_step: int, norm: float) -> StepParameters:
        rate, corrections = learning_rate(run, rounds.progress(t)), bias_corrections(run.optimizer, adam_step)
        return StepParameters(clip_factor(norm, run.optimizer.clip), rate, corrections[0], corrections[1])

    def outer(steps: int) -> StepParameters:
        return StepParameters(1.0 / steps, run.round.outer_lr, 1.0, 1.0)

    window = run.batch.rows * run.batch.sequence
    inner_tokens = inner_microbatches(run) * window
    return Schedule(manifest_hash, step, tokens_per_iteration, window, outer, inner_tokens)


def initial_fingerprints(
    run: RunConfig, model: ModelConfig, initial: Mapping[str, Tensor] | None = None
) -> tuple[str, ...]:
    """Fingerprint of each stage's state before the first step, one stage in memory at a time. initial: as for
    `initial_state`."""
    device = torch.device("cpu")
    built = run_model(run, model, device)
    return tuple(
        initial_state(run, built, stage_layout(built, spec), initial, device).fingerprint()
        for spec in partition(model, run.pipeline)
    )


def model_hash(model: ModelConfig) -> str:
    """Hash of a model's shape; a peer with another one is refused."""
    shape = asdict(model)
    if model.rope_factor == 1.0:
        del shape["rope_factor"]  # peers of the same protocol version may not know it yet
    for key in ("head_width", "window"):
        if not shape[key]:
            del shape[key]
    if not model.subspace:
        del shape["subspace"]
    return hashlib.sha256(repr(sorted(shape.items())).encode()).hexdigest()[:32]


def genesis_of(
    run: RunConfig,
    run_id: str,
    model: ModelConfig,
    leader: str,
    manifest: Manifest,
    numerics_class: str,
    fingerprints: Sequence[str],
    epoch: int = 1,
) -> Genesis:
    """First record of a run's log. leader: id of the data node that founds and owns the run. manifest: hashes
    of its data. fingerprints: of the initial state of each stage."""
    return Genesis(
        run=run_id,
        epoch=epoch,
        protocol_version=PROTOCOL_VERSION,
        owner=leader,
        leader=leader,
        config=render_run_file(run),
        stages=run.pipeline.relay_stages,
        microbatches=run.batch.microbatches,
        parameters=total_parameters(model),
        corpus_fingerprint=manifest.corpus_fingerprint,
        tokenizer_hash=manifest.tokenizer_hash,
        numerics_class=numerics_class,
        initial_weights_hash=hashlib.sha256("".join(fingerprints).encode()).hexdigest()[:32],
        fingerprints=tuple(fingerprints),
    )
