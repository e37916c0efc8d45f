"""Entry point of `anabranch verify`: joins the replay, the comparison with the log and the promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from anabranch.audit.error_bounds import (
    PERMUTATIONS,
    Vectors,
    distances,
    fixed_bounds,
    logged_vectors,
    measured_bounds,
    permutations,
    permuted,
)
from anabranch.audit.independent_check import independent_vectors
from anabranch.audit.log_check import LoggedRun, read_log
from anabranch.audit.log_comparison import Comparison, Label, RecordedValues, usable_checkpoints
from anabranch.audit.parallel_replay import parallel_stepper
from anabranch.audit.private_rounds import KeptRounds, kept_rounds
from anabranch.audit.replay import Observer, SequentialStepper, Stepper, replay
from anabranch.audit.run_inputs import Inputs, check_replayable, compare_with_genesis, open_inputs
from anabranch.audit.verification_report import Distance, Report
from anabranch.config import RoundSection, RunConfig
from anabranch.errors import UserError
from anabranch.observe.console.progress import Advance, progress, ticking
from anabranch.observe.wording import counted
from anabranch.protocol.log.records import Commit
from anabranch.train.numerics.numerics_class import numerics_class
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.state import SnapshotError


def verify(
    run_dir: Path, jobs: int = 1, independent: bool = False, rounds: tuple[int, int] | None = None,
    fetch: bool = False, contributions: Sequence[Path] = (), private_data: Sequence[Path] = (),
) -> Report:  # fmt: skip
    """Recompute every step of a run and compare it with log and checkpoints. Up to `jobs` processes share the
    work; the result does not depend on their number. independent: True to compare with another
    implementation, too. rounds: first and last iteration to recompute, from the last usable checkpoint before
    them; None: all. fetch: as of `open_inputs`. contributions: folders of kept contributions to a run on
    private data, beside those of its directory. private_data: private corpora, whose machines' inner steps
    are taken again. Shows progress, and sets this process's numerics to the run's. Raises UserError for
    anything missing or unreadable, and for `rounds` that cannot be judged alone."""
    inputs, log, saved = _opened(run_dir, fetch, independent)
    history, run = log.history, inputs.run
    own_class = numerics_class(run.compute, run.batch.rows, run.batch.sequence)[0]
    # A run without a step has no owners; its numerics class is that of its founder.
    same_class = set(log.classes or (log.genesis.numerics_class,)) <= {own_class}
    usable, problems, notes = usable_checkpoints(inputs, log, saved)
    exact = same_class and run.run.reduction == "exact"
    begin, end = _span(log, usable, exact and not independent, rounds)
    checkpoints = [t for t in usable if begin <= t <= end]
    kept = kept_rounds(inputs, log, range(begin + 1, end + 1), contributions, private_data)
    gaps = kept.gaps(begin, end, checkpoints)
    comparison = Comparison(inputs, log, checkpoints, exact, same_class, keep_saved=independent)
    comparison.restored = [after.t for after in gaps.values() if after is not None]
    resumable = exact and not (independent or gaps or contributions or private_data)
    recorded = RecordedValues(checkpoints, history.t)
    # In exact mode series and tensors are compared bit by bit: no distance is left to judge.
    observers: list[Observer] = [comparison] if exact else [comparison, recorded]
    with (
        _stepper(inputs, own_class, jobs if begin == 0 else 1, kept) as stepper,
        progress("taking every step again", end - begin, unit="steps") as advance,
        _rest_named(inputs, comparison, begin, end, resumable, advance) as count,
    ):
        restore = partial(_restore, stepper.reference, inputs)
        if begin:
            restore(history.commits[begin - 1])
        replay(history, stepper, observers, count, end, gaps, restore)
    comparison.counts["contributions"].compared = kept.checked
    there = [t for t in checkpoints if t not in comparison.deleted]
    found, bounds, used = _judged(inputs, log, comparison, recorded, there, jobs)
    left_out = sorted({*kept.left_out(gaps, end), *comparison.unchecked})
    taken = set(range(begin + 1, end + 1)).difference(left_out)
    return Report(
        **_facts(inputs, log),
        steps=end - begin - len(left_out),
        skipped=sum(commit.verdict == "skip" for commit in history.commits if commit.t in taken),
        own_class=own_class,
        promise="bits" if exact else "bound" if same_class else "parity",
        counts=comparison.counts,
        first=comparison.firsts[0] if comparison.firsts else "",
        distances=_labelled(found, bounds),
        permutations=used,
        independent=_independent(inputs, log, there, comparison.saved) if independent else None,
        problems=[*_problems(inputs, log), *problems, *kept.problems, *comparison.problems],
        notes=[
            *(*_span_notes(begin, end, rounds), *kept.notes(gaps, end), *notes, *comparison.notes),
            *_notes(log, usable, comparison.deleted),
        ],
        left_out=left_out,
    )


def _facts(inputs: Inputs, log: LoggedRun) -> dict[str, Any]:
    """{field of the report: value} of those that follow from run file and log alone."""
    run, history = inputs.run, log.history
    return {
        "run_id": log.genesis.run,
        "microbatches": run.batch.microbatches,
        "reduction": run.run.reduction,
        "dtype": run.compute.dtype,
        "rollbacks": log.rollbacks,
        "rolled_back": history.rolled_back,
        "removals": history.removals,
        "classes": log.classes,
        "policy": policy_of(run),
    }


def _judged(
    inputs: Inputs,
    log: LoggedRun,
    comparison: Comparison,
    recorded: RecordedValues,
    checkpoints: Sequence[int],
    jobs: int,
) -> tuple[dict[Label, float], dict[Label, float], int]:
    """(distances of a replay from log and checkpoints, their bounds, number of further replays that measured
    these). Bounds are empty where nothing is promised, and in exact mode, in which every bit is compared
    instead. checkpoints: steps of those compared. jobs: processes for the further replays, which are done
    here."""
    if comparison.exact:
        return comparison.distances, {}, 0
    ours, found = recorded.vectors(), {**comparison.distances}
    if not inputs.run.data.private:  # else the replay lacks the losses of others
        # Tensors were compared when the replay reached their checkpoint.
        series = {label: vector for label, vector in ours.items() if "/" not in label[1]}
        found |= distances(logged_vectors(log.history), series)
    if not comparison.same_class:
        return found, {}, 0
    return found, *_bounds(inputs, log, checkpoints, found, ours, jobs)


def _opened(run_dir: Path, fetch: bool, independent: bool) -> tuple[Inputs, LoggedRun, list[int]]:
    """(inputs, log, steps of the checkpoints) of a run that can be replayed. Shows progress. Raises UserError
    if it cannot be."""
    with ticking("reading the run and its log"):
        inputs = open_inputs(run_dir, fetch)
        saved = inputs.directory.checkpoints()  # before the log, to which a run that goes on adds steps
        log = read_log(inputs.directory.log)
        _check_replayable(inputs, log)
    if inputs.run.data.private and independent:
        raise UserError("--independent does not work where data are private: leave it out")
    return inputs, log, saved


def policy_of(run: RunConfig) -> str:
    """Line of text on how a run's steps follow each other: synchronous, delayed or in rounds, with all
    unusual rules of these."""
    if not run.round.slots:
        delayed = ", then two in flight, each on weights predicted one step ahead" * run.iteration.delay
        return f"synchronous steps{delayed}"
    rules, usual = run.round, RoundSection()
    values = {field.name: getattr(rules, field.name) for field in fields(rules)}
    others = (
        f"{name} = {value}"
        for name, value in values.items()
        if name not in ("slots", "steps", "grace") and value != getattr(usual, name)
    )
    data = " on data of their own" * run.data.private
    islands = counted(rules.slots, "island")
    head = f"synchronous steps, then rounds of {islands} with {rules.steps} steps each{data}"
    return "; ".join([head, *others])


def _span(
    log: LoggedRun, checkpoints: Sequence[int], possible: bool, rounds: tuple[int, int] | None
) -> tuple[int, int]:
    """(iteration from whose state the replay begins, last iteration that it takes). checkpoints: steps of the
    usable ones. possible: False if only the whole run can be judged: with float sums, other numerics classes,
    or --independent. rounds: first and last iteration wanted; None: all. Raises UserError if the log lacks
    some of these, or if they are wanted and not `possible`."""
    history = log.history
    if rounds is None:
        return 0, history.t
    first, last = rounds
    if not 1 <= first <= last <= history.t:
        raise UserError(f"--rounds {first}:{last}: the log has iterations 1 to {history.t}")
    if not possible:
        raise UserError(
            "--rounds needs a run with exact sums on machines of this one's numerics class, and works without"
            " --independent: leave --rounds out"
        )
    carries = {t for t, plan in history.plans.items() if any(slot.carried for slot in plan)}
    usable = [t for t in checkpoints if t < first and t + 1 not in carries]
    return max(usable, default=0), last


@contextmanager
def _rest_named(
    inputs: Inputs, comparison: Comparison, begin: int, end: int, possible: bool, advance: Advance
) -> Iterator[Advance]:
    """Run the block with a replay of the steps after `begin` up to `end`; if Ctrl+C ends it,
    KeyboardInterrupt says how to go on later. Yields the function that the replay calls with the number of
    steps taken, which also calls `advance`. possible: False if the rest cannot be judged alone: steps before
    it are left out, it needs the same folders, or only the whole run can be."""
    reached = begin

    def count(steps: float) -> None:
        nonlocal reached
        reached += int(steps)
        advance(steps)

    try:
        yield count
    except KeyboardInterrupt:
        what = f"{reached - begin} of {end - begin} steps were taken; the same command begins again"
        if reached > begin and possible and not comparison.firsts:
            command = f"anabranch verify {inputs.directory.path} --rounds {reached + 1}:{end}"
            what = f"no bit differs in steps {begin + 1} to {reached}; the rest: {command}"
        raise KeyboardInterrupt(what) from None


def _span_notes(begin: int, end: int, rounds: tuple[int, int] | None) -> list[str]:
    if rounds is None:
        return []
    where = f"the checkpoint of step {begin}, which is the log's" if begin else "the initial state"
    return [f"only iterations {begin + 1} to {end} were taken again, from {where}"]


def _restore(reference: Reference, inputs: Inputs, commit: Commit) -> None:
    """Load the checkpoint of the step that `commit` ended into `reference`. Raises UserError if it cannot be
    read, or is of another step."""
    directory, t = inputs.directory, commit.t
    try:
        reference.restore([directory.read_stage(t, stage) for stage in range(len(reference.states))])
    except SnapshotError as error:
        raise UserError(f"{directory.checkpoint_path(t)}: {error}") from None
    for stage, state in enumerate(reference.states):
        if (state.t, state.adam_step) != (t, commit.adam_step):
            raise UserError(
                f"{directory.checkpoint_path(t)}: stage {stage} has the state after step {state.t} and "
                f"{state.adam_step} steps of Adam, not {t} and {commit.adam_step}: leave --rounds out"
            )


def _check_replayable(inputs: Inputs, log: LoggedRun) -> None:
    """Raise UserError if run file and log do not allow a replay: the log has no step, lacks some, or
    `check_replayable` refuses."""
    history = log.history
    if not history.commits:
        raise UserError(f"{inputs.directory.log}: no step of this run was committed yet: nothing to verify")
    complete = history.t == len(history.commits)
    check_replayable(inputs, log.genesis, history.plans, history.t if complete else 0)
    if not complete or any(t != c.t for t, c in enumerate(history.commits, start=1)):
        raise UserError(f"{inputs.directory.log}: its steps do not follow one another: {log.problems[0]}")


def _stepper(
    inputs: Inputs, own_class: str, jobs: int, kept: KeptRounds
) -> AbstractContextManager[Stepper]:
    microbatches = inputs.run.batch.microbatches
    jobs = min(jobs, microbatches)
    if inputs.run.data.private:  # kept contributions are added in no time
        return nullcontext(SequentialStepper(inputs.reference(kept), permuted(0, microbatches)))
    if jobs > 1 and inputs.run.run.reduction == "exact":
        return parallel_stepper(inputs, own_class, jobs)
    return nullcontext(SequentialStepper(inputs.reference(), permuted(0, microbatches)))


def _bounds(
    inputs: Inputs,
    log: LoggedRun,
    checkpoints: Sequence[int],
    found: Mapping[Label, float],
    ours: Vectors,
    jobs: int,
) -> tuple[dict[Label, float], int]:
    """(greatest allowed distance of each label in `found`, number of replays in other orders that measured
    them). found: label -> distance of the run. ours: result of the replay. Shows progress. Raises UserError
    as `permutations`."""
    fixed = fixed_bounds(inputs.run.compute.dtype, found)
    unbounded = {label: apart for label, apart in found.items() if label not in fixed}
    with progress("measuring the bounds", None, unit=f"steps of at most {PERMUTATIONS} replays") as advance:
        orders = permutations(inputs, log.history, checkpoints, jobs, advance)
        measured, used = measured_bounds(inputs.run.compute.dtype, unbounded, ours, orders)
        orders.close()
    return {**fixed, **measured}, used


def _independent(
    inputs: Inputs, log: LoggedRun, checkpoints: Sequence[int], saved: Vectors
) -> list[Distance]:
    """Distances between the run and the independent implementation in fp64, which is trained here with
    progress shown. saved: tensors of the run's checkpoints. `usual` of each: the distance of the independent
    implementation in the run's precision from itself in fp64. Bounded only if the run used fp64 with float
    sums, and up to step `FP64_STEPS`: exact sums round each contribution, fp32 rounds everything."""
    history, run = log.history, inputs.run
    dtype, steps = run.compute.dtype, len(history.commits)
    with progress("training the independent implementation", steps, unit="steps") as advance:
        independent = independent_vectors(inputs, history, checkpoints, advance)
    found = distances({**saved, **logged_vectors(history, means=True)}, independent)
    bounds = fixed_bounds(dtype, found) if run.run.reduction == "fast" else {}
    usual: Mapping[Label, float] = {}
    if dtype != "fp64":
        with progress(f"training it in {dtype}, for comparison", steps, unit="steps") as advance:
            rounded = independent_vectors(inputs, history, checkpoints, advance, dtype)
        usual = distances(rounded, independent)
    return [replace(each, usual=usual.get((each.t, each.of))) for each in _labelled(found, bounds)]


def _labelled(found: Mapping[Label, float], bounds: Mapping[Label, float]) -> list[Distance]:
    return [Distance(t, of, found[t, of], bounds.get((t, of))) for t, of in sorted(found)]


def _problems(inputs: Inputs, log: LoggedRun) -> list[str]:
    """Sentences on contradictions in the log and between log and run directory, and on owners of other
    numerics classes unless `run.numerics` is "mixed"; [] if there are none."""
    problems = [*log.problems, *compare_with_genesis(inputs, log.genesis)]
    others = [name for name in log.classes if name != log.genesis.numerics_class]
    if inputs.run.run.numerics != "mixed" and others:
        problems.append(f"run.numerics is strict, but some owners were of class {', '.join(others)}")
    return problems


def _notes(log: LoggedRun, checkpoints: Sequence[int], deleted: Sequence[int]) -> list[str]:
    notes = [
        f"the checkpoint of step {t} was deleted meanwhile, as the run goes on; the log alone was compared"
        for t in deleted
    ]
    newest, end = max(checkpoints, default=None), log.history.t
    if log.torn_bytes:
        notes.append(f"the log's last line was cut off by a crash ({log.torn_bytes} bytes) and is left out")
    if newest is None:
        notes.append("there is no checkpoint: the steps are compared with the log alone")
    elif newest < end:
        notes.append(
            f"the newest checkpoint is of step {newest}: later steps are compared with the log alone"
        )
    return notes
