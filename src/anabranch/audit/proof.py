"""Check of a proof file: the receipt of a relay, compared with its step computed again in one process.

Nothing in the file is believed but the subject's own signature; the auditor's words are not used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anabranch.audit.error_bounds import permuted
from anabranch.audit.log_check import contradictions, log_lines
from anabranch.audit.replay import SequentialStepper
from anabranch.audit.replayed_islands import IslandReplay
from anabranch.audit.replayed_work import ReplayedWork, StepReplay
from anabranch.audit.run_inputs import Inputs, check_replayable, compare_with_genesis, open_inputs
from anabranch.audit.verification_report import shortened
from anabranch.checkpoint.proof_files import ProofFile, read_proof
from anabranch.errors import UserError
from anabranch.observe.console.progress import progress
from anabranch.observe.wording import counted
from anabranch.protocol.audit.receipts import (
    Receipt,
    SumReceipt,
    UnitReceipt,
    broken_seal,
    inputs_of,
    opened,
    receipt_hash,
)
from anabranch.protocol.audit.seals import ACTIVATION, GRADIENT, PART, part_name, seal_text
from anabranch.protocol.consensus.log_replay import LogReplay, fold
from anabranch.protocol.interface.signatures import Signer
from anabranch.protocol.log.hash_chain import LogError
from anabranch.protocol.log.records import Commit, StageCommit, decode_entry, entry_hash
from anabranch.protocol.rounds.plan import late_slots, slots_of
from anabranch.train.numerics.numerics_class import numerics_class
from anabranch.train.reference.reference import Reference

#: Most parts of a gradient sum in a receipt; a part is summed by one peer. A plain choice.
PARTS_MAX = 4096
PROVED, NOT_PROVED, REFUTED = "proved", "not proved", "refuted"
#: Version of the JSON object.
PROOF_RESULT_VERSION = 1


@dataclass
class ProofResult:
    """Outcome of checking a proof file: PROVED if a statement of the receipt is false, else NOT_PROVED if one
    could not be judged, else REFUTED. false, unknown: sentences on such statements. right: number of
    statements that agree with the recomputed work."""

    proof: ProofFile
    false: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    right: int = 0

    @property
    def outcome(self) -> str:
        return PROVED if self.false else NOT_PROVED if self.unknown else REFUTED

    def lines(self) -> list[str]:
        """Lines of text for people; the last one is the outcome."""
        proof = self.proof
        about = f"the work of {proof.subject[:8]} at stage {proof.stage} in step {proof.step}"
        lines = [f"{PROVED}: {each}" for each in shortened(self.false)]
        if self.false:
            return [*lines, f"proof: {about} is false in {counted(len(self.false), 'claim')} of its receipt"]
        if self.unknown:
            lines = [f"{NOT_PROVED}: {each}" for each in shortened(self.unknown)]
            return [*lines, f"proof: nothing false is found in {about}"]
        claims = counted(self.right, "claim")
        return [
            f"{REFUTED}: the receipt is right",
            f"proof: all {claims} about {about} are what the work gives",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Outcome and sentences as plain values for JSON."""
        proof = self.proof
        return {
            "version": PROOF_RESULT_VERSION,
            "run_id": proof.run_id,
            "step": proof.step,
            "stage": proof.stage,
            "subject": proof.subject,
            "outcome": self.outcome,
            "false": self.false,
            "unknown": self.unknown,
            "right": self.right,
        }


@dataclass(frozen=True)
class _Logged:
    """Place of a contribution in the commit log. part: the stage's entry in the commit. before: history up to
    the entry before the commit. position: index of the accused peer among the members of its stage. problems:
    contradictions within the log up to the commit."""

    commit: Commit
    part: StageCommit
    position: int
    before: LogReplay
    problems: list[str]


def verify_proof(run_dir: Path, path: Path, signer: Signer, fetch: bool = False) -> ProofResult:
    """Check the proof file `path` against log, corpus and run file of a run directory. signer: checks
    signatures (its `verify` is used). fetch: as of `open_inputs`. Shows progress, and sets this process's
    numerics to the run's. If the file is about no contribution of this log, the result has an `unknown`.
    Raises UserError for anything missing or unreadable, and if run directory and log are of different
    runs."""
    proof = read_proof(path)
    inputs = open_inputs(run_dir, fetch)
    data = proof.receipt_bytes
    result = ProofResult(proof)
    receipt = opened(data, signer)
    if receipt is None:
        result.unknown.append("its receipt does not have the signature of the peer that it names")
        return result
    logged = _logged(inputs, proof)
    problem = _mismatch(proof, receipt, receipt_hash(data), logged)
    if logged is None or problem:
        result.unknown.append(problem)
        return result
    if (seal := broken_seal(receipt, signer) or _broken_part_seal(receipt, signer)) is not None:
        result.false.append(f"it signed a {seal} that the named sender never made")
        return result
    if problem := _not_replayable(inputs, logged):
        result.unknown.append(problem)
        return result
    reference = _state_before(inputs, logged)
    fingerprints = tuple(part.fingerprint_before for part in logged.commit.stages)
    if reference.fingerprints() != fingerprints:
        result.unknown.append(
            f"step {proof.step} began from another state than the steps before it give, so the inputs of its "
            "work are unknown: verify a proof of an earlier step"
        )
        return result
    summed = [total.part for total in receipt.sums]
    about = logged.part, len(receipt.parts), summed
    if inputs.run.pipeline.whole:
        plan = logged.before.plans.get(proof.step, ())
        work = IslandReplay(inputs, reference, plan).work(proof.step, *about)
    else:
        work = StepReplay(inputs, reference).work(proof.step, proof.stage, *about)
    _compare(result, receipt, logged, work)
    return result


# --- the log --------------------------------------------------------------------------------------------


def _logged(inputs: Inputs, proof: ProofFile) -> _Logged | None:
    """Place in the log of the contribution that a proof is about, which may be in a step that was rolled back
    later. None if the log does not have it, or it is of stage 0. Raises UserError if the log is missing or
    damaged."""
    path = inputs.directory.log
    lines, _ = log_lines(path)
    try:
        number = next((k for k, line in enumerate(lines) if entry_hash(line) == proof.base), None)
        before = fold(lines[:number])
    except LogError as error:
        raise UserError(f"{path} is damaged: {error}; restore it from a voter's copy") from None
    if number is None:
        return None
    record = decode_entry(lines[number]).record
    if not isinstance(record, Commit) or not 0 < proof.stage < len(record.stages):
        return None
    part = record.stages[proof.stage]
    if record.t != proof.step or proof.subject not in part.members:
        return None
    problems = contradictions(lines[: number + 1])
    return _Logged(record, part, part.members.index(proof.subject), before, problems)


def _mismatch(proof: ProofFile, receipt: Receipt, hashed: str, logged: _Logged | None) -> str:
    """First way in which a proof file does not fit the log, in words; "" if there is none. receipt, hashed:
    the file's receipt and its hash. logged: its place in the log (None: it has none, which is a mismatch)."""
    about = receipt.run, receipt.t, receipt.stage, receipt.peer
    if about != (proof.run_id, proof.step, proof.stage, proof.subject):
        return "its receipt is about another run, step, stage or peer than the file says"
    if logged is None:
        return f"the log has no commit {proof.base[:8]} of step {proof.step} with this peer at this stage"
    genesis, part = logged.before.genesis, logged.part
    if genesis is None or genesis.run != proof.run_id:
        return f"it is of run {proof.run_id}, not of this one"
    if logged.commit.previous_base != logged.before.base:
        return "its step began from another state than the log has before it"
    if logged.problems:
        return f"the log contradicts itself: {logged.problems[0]}"
    receipts = part.receipts[logged.position : logged.position + 1] or ("",)
    if receipts[0] != hashed:
        return "its receipt is not the one whose hash the commit has"
    owned = [unit for unit, owner in enumerate(part.owners) if owner == logged.position]
    if [unit.unit for unit in receipt.units] != owned or receipt.base != logged.commit.previous_base:
        return "its receipt is about other units, or another state, than the commit"
    known = range(min(len(receipt.parts), PARTS_MAX))
    if len(receipt.parts) not in range(1, PARTS_MAX + 1) or any(t.part not in known for t in receipt.sums):
        return "its receipt names parts of a sum that do not exist"
    return ""


def _broken_part_seal(receipt: Receipt, signer: Signer) -> str | None:
    """Words for the first input of a sum in the receipt whose seal its named sender did not sign; None if all
    are right."""
    for total in receipt.sums:
        name = part_name(receipt.term, receipt.number, total.part)
        for _, came in total.inputs:
            text = seal_text(receipt.run, receipt.base, came.stage, PART, name, came.hash)
            if not signer.verify(came.sender, text, came.seal):
                return f"seal of part {total.part} of the sum of {came.sender[:8]}"
    return None


def _not_replayable(inputs: Inputs, logged: _Logged) -> str:
    """Reason in words why the step cannot be recomputed here to the last bit (another numerics class); "" if
    it can. Raises UserError if the run directory is not that of the log, or a round's plan in the log cannot
    be that of a run like this. To be called only if `_mismatch` found nothing."""
    genesis, run = logged.before.genesis, inputs.run
    assert genesis is not None, "_mismatch requires it"
    if problems := compare_with_genesis(inputs, genesis):
        raise UserError(f"{inputs.directory}: {problems[0]}; use the directory in which the run was made")
    check_replayable(inputs, genesis, logged.before.plans, logged.commit.t)
    own = numerics_class(run.compute, run.batch.rows, run.batch.sequence)[0]
    named = logged.part.classes[logged.position]
    theirs = genesis.numerics_class if named == "removed" else named
    if theirs != own:
        return f"it was computed in numerics class {theirs}, and this machine is {own}: use one of that class"
    return ""


def _state_before(inputs: Inputs, logged: _Logged) -> Reference:
    """Reference model in the state before the step, replayed in this process from the nearest checkpoint on
    its branch of the log, or from the initial state; progress is shown. Raises UserError if the checkpoint
    cannot be read."""
    directory, before = inputs.directory, logged.before
    start, reference = 0, inputs.reference()
    for t in reversed(directory.checkpoints()):
        if 0 < t < logged.commit.t and before.leads_to(t, directory.manifest(t).base):
            snapshots = [directory.read_stage(t, stage) for stage in range(len(reference.specs))]
            start = t
            reference.restore(snapshots)
            break
    stepper = SequentialStepper(reference, permuted(0, inputs.run.batch.microbatches))
    commits = [commit for commit in before.commits if commit.t > start]
    with progress("taking the steps before it again", len(commits), unit="steps") as advance:
        for commit in commits:
            plan, following = before.plans.get(commit.t, ()), before.plans.get(commit.t + 1, ())
            reference.slots, reference.late = slots_of(plan, commit), late_slots(plan, following)
            take = stepper.skip if commit.verdict == "skip" else stepper.step
            take(commit.t)
            advance(1.0)
    return reference


# --- comparing ------------------------------------------------------------------------------------------


def _compare(result: ProofResult, receipt: Receipt, logged: _Logged, work: ReplayedWork) -> None:
    """Compare the receipt with the recomputed work, and add to the outcomes in `result`: units that the
    subject owns, others only if the commit names them as disputed; parts of its gradient sum if no unit is
    unknown; sums that it added up. An output is judged only if its inputs are right."""
    disputed = {(each.unit, each.output) for each in logged.part.disputed if each.position == logged.position}
    for unit in (*receipt.units, *receipt.others):
        results = {(unit.unit, unit.activation_out), (unit.unit, unit.gradient_out)}
        if unit in receipt.units or disputed & results:
            _compare_unit(result, unit, work)
    if receipt.units and not result.unknown:
        found = work.parts[logged.position]
        for part, (claimed, right) in enumerate(zip(receipt.parts, found, strict=True)):
            _judge(result, f"part {part} of the sum of its gradients", claimed, right)
    for total in receipt.sums:
        _compare_sum(result, total, logged, work)


def _compare_sum(result: ProofResult, total: SumReceipt, logged: _Logged, work: ReplayedWork) -> None:
    """Compare a part of the gradient sum that the accused peer added up, and add to the outcomes in `result`:
    unknown if what it got from the owners of units is not right."""
    came = {position: transfer.hash for position, transfer in total.inputs}
    right = {position: work.parts[position][total.part] for position in set(logged.part.owners) - {-1}}
    if came == right and not work.overflows:
        _judge(result, f"part {total.part} that it added up", total.output, work.sums[total.part])
        return
    members, positions = logged.part.members, sorted(came.keys() | right.keys())
    wrong = [k for k in positions if came.get(k) != right.get(k)]
    names = ", ".join(members[k][:8] if 0 <= k < len(members) else "nobody" for k in wrong) or "its members"
    result.unknown.append(
        f"part {total.part} that it added up: what it got from {names} is not what the work gives"
    )


def _compare_unit(result: ProofResult, unit: UnitReceipt, work: ReplayedWork) -> None:
    index = unit.unit
    if index not in work.units and index not in work.overflows:
        result.unknown.append(f"microbatch {index} is nobody's in this step")
        return
    if (tensor := work.overflows.get(index)) is not None:
        result.unknown.append(f"microbatch {index} overflows in {tensor} when it is computed again")
        return
    activation_in, gradient_in, activation_out, gradient_out = work.units[index]
    expected = {ACTIVATION: activation_in, GRADIENT: gradient_in}
    right = bool(unit.gradient_out)
    for kind, came in inputs_of(unit):
        if came.hash != expected[kind]:
            result.unknown.append(
                f"the {kind} of microbatch {index} that it got from {came.sender[:8]} is not what the work "
                "gives"
            )
            right = False
        else:
            result.right += 1
    if activation_in == unit.activation_in.hash:
        _judge(
            result, f"the activation of microbatch {index} that it sent", unit.activation_out, activation_out
        )
    if right:
        _judge(result, f"the gradient of microbatch {index} that it sent", unit.gradient_out, gradient_out)


def _judge(result: ProofResult, what: str, claimed: str, right: str) -> None:
    if claimed == right:
        result.right += 1
    else:
        result.false.append(f"{what} has hash {claimed}, and the work gives {right}")
