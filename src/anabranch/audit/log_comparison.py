"""Observers of a replay that compare it with the log and the checkpoints, value by value."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import blake3
import torch
from torch import Tensor

from anabranch.audit.difference_counts import DifferenceCount, distance
from anabranch.audit.log_check import LoggedRun
from anabranch.audit.run_inputs import Inputs
from anabranch.errors import UserError, os_errors_named
from anabranch.protocol.log.records import STRANDED, Commit
from anabranch.protocol.reduce.coverage import global_norm, plausible
from anabranch.protocol.rounds.plan import plan_hash, slots_of
from anabranch.train.model.layout import Layout
from anabranch.train.model.rounds import inner_microbatches, rounds_of
from anabranch.train.numerics.step_scalars import bias_corrections, clip_factor, learning_rate
from anabranch.train.reference.reference import Reference, StepRecord, Witness
from anabranch.train.stage.delayed import snapshot_form
from anabranch.train.stage.state import SnapshotError, StageState, parse_snapshot

#: Kinds of values, in the order of the report.
KINDS = (
    *("batches", "schedule", "losses", "evaluations", "contributions", "inner steps"),
    *("squares", "digests", "fingerprints"),
    *("weights", "moments"),
)
#: Relative tolerance of scalars if the log is of another numerics class, whose cosines and powers may come
#: from another library: some thousand units in the last place of fp64.
OTHER_LIBRARY = 1e-12

Label = tuple[int, str]
"""(iteration, name) of a tensor of the checkpoint after the iteration, or of a series of the log up to it."""


class RecordedValues:
    """Observer of a replay that records the values to compare by norm: tensors at these checkpoints, and
    series of losses, norms and evaluations. last_t: iteration in the labels of the series."""

    def __init__(self, checkpoints: Sequence[int], last_t: int) -> None:
        self._checkpoints = frozenset(checkpoints)
        self._last_t = last_t
        self._series: dict[str, list[float]] = {"losses": [], "norms": [], "evaluations": []}
        self._tensors: dict[Label, Tensor] = {}

    def stepped(self, commit: Commit, record: StepRecord) -> None:
        self._series["losses"] += [record.losses[index] for index in _known(record)]
        self._series["norms"].append(record.norm)

    def skipped(self, commit: Commit, record: StepRecord, witnesses: frozenset[Witness] | None) -> None:
        """Do nothing: a skipped iteration has no numbers to record."""

    def evaluated(self, t: int, windows: Sequence[tuple[float, int]]) -> None:
        self._series["evaluations"] += [loss for loss, _ in windows]

    def reached(self, t: int, reference: Reference) -> None:
        if t in self._checkpoints:
            for name, tensor in reference.tensors().items():
                self._tensors[t, name] = tensor.to("cpu", copy=True)

    def vectors(self) -> dict[Label, Tensor]:
        """{label: vector} of all recorded values: tensors by (checkpoint's step, name), series of numbers in
        fp64 by (`last_t`, name)."""
        return {**self._tensors, **as_vectors(self._last_t, self._series)}


def as_vectors(t: int, series: Mapping[str, Sequence[float]]) -> dict[Label, Tensor]:
    """{(t, name): fp64 vector} of series of numbers that go up to iteration t; empty series are left out."""
    return {(t, name): torch.tensor(values, dtype=torch.float64) for name, values in series.items() if values}


@dataclass
class Comparison:
    """Observer of a replay that counts its differences from log and checkpoints. checkpoints: steps of those
    to compare. exact: True if replay and log must agree in every bit. Otherwise only what the log derives
    from itself is counted (batches, schedule, checkpoints against the log), and the caller judges
    `distances`: those of the checkpoints' tensors from the replay's. same_class: True if all owners are of
    this machine's numerics class. counts: kind of value -> its differences. problems: sentences on what is
    wrong beside these."""

    inputs: Inputs
    log: LoggedRun
    checkpoints: Sequence[int]
    exact: bool
    same_class: bool
    counts: dict[str, DifferenceCount] = field(default_factory=dict)
    firsts: list[str] = field(default_factory=list)
    """Place of the first difference of each kind, in replay order."""
    distances: dict[Label, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences on what could not be compared."""
    unchecked: list[int] = field(default_factory=list)
    """Skipped iterations whose reason could not be computed again, as the data are private."""
    restored: Collection[int] = ()
    """Steps whose checkpoints the replay went on from: the log alone can say that they are right."""
    saved: dict[Label, Tensor] = field(default_factory=dict)
    """Tensors of the checkpoints if `keep_saved`: for comparison with a second replay."""
    keep_saved: bool = False
    deleted: list[int] = field(default_factory=list)
    """Steps whose checkpoint was deleted during the replay, by a run that goes on."""

    def __post_init__(self) -> None:
        self.counts = {kind: DifferenceCount(firsts=self.firsts) for kind in KINDS}

    def stepped(self, commit: Commit, record: StepRecord) -> None:
        t = f"step {commit.t}"
        self._schedule(commit)
        if record.skipped:
            self.problems.append(f"{t} was taken, but here a value of it is not finite or out of range")
            return
        if not self.exact:
            return
        losses = [record.losses[index] for index in _known(record)]
        sums = commit.loss_sums
        if commit.t in self.log.history.plans:  # a slot that does not count has no loss
            sums = tuple(sums[slot] for slot in _known(record) if slot < len(sums))
        self.counts["losses"].numbers(sums, losses, t, "microbatch")
        for slot, digest in record.contributions.items():
            said = commit.stages[1].contributions
            if known := said[slot] if slot < len(said) else "":
                self.counts["inner steps"].word(known, digest, f"{t}, contribution of slot {slot}")
        logged: dict[str, float] = {}
        stages = zip(commit.stages, record.digests, record.fingerprints, strict=False)
        for stage, (entry, digest, fingerprint) in enumerate(stages):
            where = f"{t}, stage {stage}"
            if repeated := logged.keys() & entry.squares.keys():
                self.problems.append(f"{where} has sums of squares of another stage: {', '.join(repeated)}")
            logged.update(entry.squares)
            self.counts["digests"].word(entry.digest, digest, where)
            self.counts["fingerprints"].word(entry.fingerprint_before, fingerprint, where)
        for name, ours in record.squares.items():
            self.counts["squares"].number(logged.pop(name, math.nan), ours, f"{t}, {name}")
        if logged:
            self.problems.append(f"{t} has sums of squares of unknown tensors: {', '.join(sorted(logged))}")

    def skipped(self, commit: Commit, record: StepRecord, witnesses: frozenset[Witness] | None) -> None:
        self._schedule(commit)
        seen = commit.witness
        if witnesses is None:
            assert seen is not None
            what = f"step {commit.t} was skipped for {seen.tensor} of slot {seen.index}"
            self.notes.append(f"{what}: only the owner of its private data can find that again")
            self.unchecked.append(commit.t)
            return
        if seen is not None and seen.tensor == STRANDED:
            return  # the log alone tells (`log_check`)
        if self.exact and seen is not None and (seen.stage, seen.tensor) not in witnesses:
            self.problems.append(
                f"step {commit.t} was skipped for {seen.tensor} of microbatch {seen.index} at stage "
                f"{seen.stage}, but here that is finite and in range"
            )

    def evaluated(self, t: int, windows: Sequence[tuple[float, int]]) -> None:
        logged, where = self.log.history.evaluations[t], f"evaluation after step {t}"
        self.counts["schedule"].word(logged.tokens, sum(tokens for _, tokens in windows), where)
        if self.exact:
            losses = [loss for loss, _ in windows]
            self.counts["evaluations"].numbers(logged.loss_sums, losses, where, "window")

    def reached(self, t: int, reference: Reference) -> None:
        if t == 0:
            self._state("the initial state", self.log.genesis.fingerprints, reference)
        elif t == self.log.history.t and t in self.log.states:
            # Other states are logged with the next step; the last one by a rollback only.
            self._state(f"the state after step {t}", self.log.states[t], reference)
        if t in self.checkpoints:
            self._checkpoint(t, reference)

    def _state(self, where: str, logged: Sequence[str], reference: Reference) -> None:
        if self.exact:
            for stage, (theirs, ours) in enumerate(zip(logged, reference.fingerprints(), strict=False)):
                self.counts["fingerprints"].word(theirs, ours, f"{where}, stage {stage}")

    def _schedule(self, commit: Commit) -> None:
        """Compare, and count, the values of a commit that need no replay: batch hash, tokens, learning rate,
        bias corrections, norm, clip factor; of a round those of `_round_schedule`."""
        run, t = self.inputs.run, commit.t
        if rounds_of(run).has(t):
            self._round_schedule(commit)
            return
        self.counts["batches"].word(commit.manifest, self.inputs.batches.manifest_hash(t), f"step {t}")
        compare = partial(self._scalar, where=f"step {t}")
        compare("tokens", commit.tokens, self.inputs.batches.tokens_per_iteration)
        compare("learning rate", commit.learning_rate, learning_rate(run, rounds_of(run).progress(t)))
        corrections = bias_corrections(run.optimizer, max(1, commit.adam_step))
        compare("first bias correction", commit.bias_correction1, corrections[0])
        compare("second bias correction", commit.bias_correction2, corrections[1])
        if commit.verdict == "step":
            norm = _norm(commit)
            compare("norm", commit.norm, norm)
            compare("clip factor", commit.clip_factor, clip_factor(norm, run.optimizer.clip))

    def _round_schedule(self, commit: Commit) -> None:
        """Compare, and count, the values of a round's commit that need no replay: hash of its plan, tokens,
        outer learning rate, norm and weight."""
        run, t, history = self.inputs.run, commit.t, self.log.history
        self.counts["batches"].word(commit.manifest, plan_hash(history.plans.get(t, ())), f"round {t}")
        compare = partial(self._scalar, where=f"round {t}")
        steps = (
            sum(slot.weight for slot in slots_of(history.plans.get(t, ()), commit).values())
            if commit.stages
            else 0
        )
        window = run.batch.rows * run.batch.sequence
        compare("tokens", commit.tokens, steps * inner_microbatches(run) * window)
        compare("outer learning rate", commit.learning_rate, run.round.outer_lr)
        if commit.verdict == "step":
            compare("norm", commit.norm, _norm(commit))
            compare("weight", commit.clip_factor, 1.0 / max(1, steps))

    def _scalar(self, name: str, logged: float, ours: float, where: str) -> None:
        if not self.same_class and math.isclose(logged, ours, rel_tol=OTHER_LIBRARY):
            logged = ours
        self.counts["schedule"].number(logged, ours, f"{where}, {name}")

    # --- checkpoints -----------------------------------------------------------------------------

    def _checkpoint(self, t: int, reference: Reference) -> None:
        """Compare the checkpoint of step t with the replay's state, which is the one after t. If the run has
        deleted it, that is recorded in `deleted`. Raises UserError as `_stage`."""
        directory = self.inputs.directory
        for stage, ours in enumerate(reference.states):
            try:
                theirs = self._stage(t, stage, ours.layout, ours.weights.dtype)
            except UserError:
                if directory.checkpoint_path(t).exists():
                    raise
                self.deleted.append(t)
                return
            if theirs is None:
                continue
            if (theirs.t, theirs.adam_step) != (ours.t, ours.adam_step):
                self.problems.append(
                    f"checkpoint of step {t}, stage {stage}: holds the state after step {theirs.t} and "
                    f"{theirs.adam_step} steps of Adam, not {ours.t} and {ours.adam_step}"
                )
            if t in self.restored:
                continue
            expected = ours.tensors()
            for name, tensor in theirs.tensors().items():
                kind = "weights" if name.startswith("weights/") else "moments"
                where = f"checkpoint of step {t}, stage {stage}, {name}"
                if self.exact:
                    self.counts[kind].tensor(tensor, expected[name], where)
                self.distances[t, name] = distance(tensor, expected[name])
                if self.keep_saved:
                    self.saved[t, name] = tensor

    def _stage(self, t: int, stage: int, layout: Layout, dtype: torch.dtype) -> StageState | None:
        """A stage's state from the checkpoint of step t; None if the checkpoint lacks it. A missing stage and
        wrong hashes are added to the problems. layout, dtype: of its tensors. Raises UserError if the file is
        outside the checkpoint's folder, cannot be read, or is no snapshot of the stage."""
        directory, where = self.inputs.directory, f"checkpoint of step {t}, stage {stage}"
        entry = directory.manifest(t).stages.get(stage)
        if entry is None:
            self.problems.append(f"{where}: is missing")
            return None
        path = directory.checkpoint_path(t) / entry.name
        if path.parent != directory.checkpoint_path(t):
            raise UserError(f"{where}: the name {entry.name!r} leads out of its folder")
        with os_errors_named(f"cannot read {path}"):
            data = path.read_bytes()
        try:
            form = snapshot_form(self.inputs.run, layout)
            state = parse_snapshot(data, layout, dtype, torch.device("cpu"), form)
        except SnapshotError as error:
            raise UserError(f"{path}: {error}") from None
        if blake3.blake3(data).hexdigest() != entry.blake3:
            self.problems.append(f"{where}: the file does not have the hash in its manifest")
        known = self.log.states.get(t, ())
        fingerprint = state.fingerprint()
        if stage < len(known) and fingerprint != known[stage]:
            self.problems.append(f"{where}: is not the state that the log has after step {t}")
        if fingerprint != entry.fingerprint:
            self.problems.append(f"{where}: the state does not have the fingerprint in its manifest")
        return state


def _known(record: StepRecord) -> list[int]:
    """Microbatches or slots of a step whose loss the replay has, ascending. The loss of a slot is NaN if it
    was filled on private data that are not on this machine."""
    return sorted(index for index, loss in record.losses.items() if not math.isnan(loss))


def _norm(commit: Commit) -> float:
    """Norm of a step's gradient from its logged sums of squares; NaN if some of these are not possible
    (`plausible`)."""
    squares = [stage.squares for stage in commit.stages]
    return global_norm(squares) if all(map(plausible, squares)) else math.nan


def usable_checkpoints(
    inputs: Inputs, log: LoggedRun, saved: Sequence[int]
) -> tuple[list[int], list[str], list[str]]:
    """(steps of the checkpoints on the log's current branch, ascending; sentences on those that belong to
    another run or to no record of the log; sentences on those of steps that were rolled back). saved: steps
    of the checkpoints that there were before the log was read; those that a run which goes on has deleted
    since are left out. Raises UserError for an unreadable manifest."""
    usable, problems, notes = [], [], []
    for t in saved:
        try:
            manifest = inputs.directory.manifest(t)
        except UserError:
            if inputs.directory.checkpoint_path(t).exists():
                raise
            continue
        if manifest.run_id != log.genesis.run:
            problems.append(f"the checkpoint of step {t} is of run {manifest.run_id}")
        elif log.history.leads_to(t, manifest.base):
            usable.append(t)
        elif manifest.base in log.bases:
            notes.append(f"the checkpoint of step {t} is of steps that were rolled back; it is not checked")
        elif t > log.history.t:
            end = log.history.t
            problems.append(f"the checkpoint of step {t} is beyond the log, which ends at step {end}")
        else:
            problems.append(f"the checkpoint of step {t} follows from no record of the log")
    return usable, problems, notes
