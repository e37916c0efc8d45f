"""Proof files: the receipt that a relay signed is compared with its step as it is computed again; a file that
the log or a signature does not bear out proves nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from anabranch.audit import proof as proofs
from anabranch.audit.proof import NOT_PROVED, PROVED, REFUTED, ProofResult, verify_proof
from anabranch.audit.run_inputs import open_inputs
from anabranch.checkpoint import proof_files
from anabranch.checkpoint.directory import RunDirectory
from anabranch.cli.main import main
from anabranch.config import load_run_file, render_run_file, with_changes
from anabranch.net.identity import Identity, IdentitySigner
from anabranch.protocol.audit.receipts import Receipt, UnitReceipt
from anabranch.protocol.audit.seals import NOTHING
from anabranch.protocol.log.records import (
    NO_ENTRY,
    AnyRecord,
    Commit,
    Dispute,
    Entry,
    Genesis,
    Rollback,
    StageCommit,
    decode_entry,
    encode_entry,
    entry_hash,
)
from support.audited_runs import copy_of, make_run, rewrite_log, small_run
from support.signed_receipts import SignedRun

replace = msgspec.structs.replace
ANYBODY = IdentitySigner(Identity.generate())
WRONG = "0" * 32


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Six steps; checkpoints after 3 and 6."""
    return make_run(tmp_path_factory.mktemp("exact"), small_run())


@pytest.fixture
def run(clean: RunDirectory, tmp_path: Path) -> SignedRun:
    """Receipts of the first member of stage 1 in step 5."""
    return SignedRun(copy_of(clean, tmp_path), 5, 1, 0)


def check(run: SignedRun, path: Path) -> ProofResult:
    return verify_proof(run.directory.path, path, ANYBODY)


def first_unit(change: Callable[[UnitReceipt], UnitReceipt]) -> Callable[[Receipt], Receipt]:
    def changed(receipt: Receipt) -> Receipt:
        return replace(receipt, units=(change(receipt.units[0]), *receipt.units[1:]))

    return changed


def test_a_right_receipt_is_refuted(run: SignedRun) -> None:
    result = check(run, run.proof())
    assert result.outcome == REFUTED, result.lines()
    assert result.lines()[0] == "refuted: the receipt is right"
    assert result.right == 4 * len(run.receipt().units) + 2 + 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (first_unit(lambda unit: replace(unit, activation_out=WRONG)), "the activation of microbatch"),
        (first_unit(lambda unit: replace(unit, gradient_out=WRONG)), "the gradient of microbatch"),
        (
            lambda receipt: replace(receipt, parts=(receipt.parts[0], WRONG)),
            "part 1 of the sum of its gradients",
        ),
        (lambda r: replace(r, sums=(replace(r.sums[0], output=WRONG),)), "part 0 that it added up"),
    ],
    ids=["activation", "gradient", "part", "sum"],
)
def test_a_false_claim_is_proved_and_named(
    run: SignedRun, change: Callable[[Receipt], Receipt], what: str
) -> None:
    result = check(run, run.proof(change))
    assert result.outcome == PROVED and len(result.false) == 1, result.lines()
    assert result.false[0].startswith(what) and f"has hash {WRONG}, and the work gives" in result.false[0]


@pytest.mark.parametrize("forward", [True, False])
def test_a_disputed_result_of_a_unit_of_others_is_proved(run: SignedRun, forward: bool) -> None:
    """The relay sent a false activation on, and another one owns the microbatch."""
    honest = run.receipt().units[0]
    change = {"activation_out" if forward else "gradient_out": WRONG}
    other = replace(honest, **change)
    if forward:
        other = replace(other, gradient_in=NOTHING, gradient_out="")
    listed = partial(replace, others=(other,))
    assert check(run, run.proof(listed)).outcome == REFUTED  # nobody asked about it
    result = check(run, run.proof(listed, (Dispute(run.position, honest.unit, WRONG),)))
    assert result.outcome == PROVED and len(result.false) == 1, result.lines()


def test_a_step_that_was_rolled_back_can_be_proved(run: SignedRun) -> None:
    path = run.proof(first_unit(lambda unit: replace(unit, activation_out=WRONG)))
    rolled_back = Rollback(3, 3, "audit", ("",) * 3)
    rewrite_log(run.directory, lambda records: [*records, rolled_back])
    assert check(run, path).outcome == PROVED


def test_without_a_checkpoint_the_steps_are_replayed_from_the_start(run: SignedRun) -> None:
    path = run.proof()
    shutil.rmtree(run.directory.checkpoints_path)
    run.directory.checkpoints_path.mkdir()
    assert check(run, path).outcome == REFUTED


def test_work_on_an_input_that_is_wrong_is_not_judged(run: SignedRun) -> None:
    """The relay before it sealed another activation: the liar is that one, or what it sent is unknown."""

    def fed(unit: UnitReceipt) -> UnitReceipt:
        came = run.sealed_again(unit.activation_in, "activation", str(unit.unit), WRONG)
        return replace(unit, activation_in=came, activation_out=WRONG, gradient_out=WRONG)

    result = check(run, run.proof(first_unit(fed)))
    assert result.outcome == NOT_PROVED, result.lines()
    assert any("that it got from" in each for each in result.unknown)


def test_a_seal_that_its_sender_never_made_is_proved(run: SignedRun) -> None:
    def forged(unit: UnitReceipt) -> UnitReceipt:
        return replace(unit, activation_in=replace(unit.activation_in, hash=WRONG))

    result = check(run, run.proof(first_unit(forged)))
    assert result.outcome == PROVED and "that the named sender never made" in result.false[0]


def doctored(path: Path, **changes: Any) -> Path:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step": 4}, "about another run, step, stage or peer than the file says"),
        ({"subject": "ab" * 32}, "about another run, step, stage or peer than the file says"),
        ({"run_id": "other"}, "about another run"),
        ({"base": "ab" * 16}, "the log has no commit abababab of step 5"),
        ({"receipt": "AAAA"}, "does not have the signature"),
    ],
)
def test_a_doctored_file_proves_nothing(run: SignedRun, changes: dict[str, Any], reason: str) -> None:
    path = doctored(run.proof(first_unit(lambda unit: replace(unit, activation_out=WRONG))), **changes)
    result = check(run, path)
    assert result.outcome == NOT_PROVED and reason in result.unknown[0], result.lines()


def test_a_receipt_that_the_log_does_not_have_proves_nothing(run: SignedRun) -> None:
    """The subject may sign what it likes; only the receipt whose hash was committed is its work."""
    other = run.proof(first_unit(lambda unit: replace(unit, activation_out=WRONG)))
    receipt = json.loads(other.read_text())["receipt"]
    result = check(run, doctored(run.proof(), receipt=receipt))
    assert result.outcome == NOT_PROVED and "not the one whose hash the commit has" in result.unknown[0]


def retold(run: SignedRun, change: Callable[[AnyRecord], AnyRecord], path: Path) -> Path:
    """Proof of the same receipt with a log of other records, chained without a seam but for the base of the
    step's commit, which is the one that the receipt names."""
    lines, previous, base = [], NO_ENTRY, ""
    for line in run.directory.log.read_bytes().splitlines():
        entry = decode_entry(line)
        record = change(entry.record)
        if isinstance(record, Commit) and record.t != run.t:
            record = replace(record, previous_base=base)
        written = encode_entry(Entry(entry.index, entry.term, previous, record))
        lines.append(written + b"\n")
        previous = entry_hash(written)
        if isinstance(record, Genesis | Commit):
            base = previous
            if isinstance(record, Commit) and record.t == run.t:
                path = doctored(path, base=base)
    run.directory.log.write_bytes(b"".join(lines))
    return path


def test_a_log_of_another_history_convicts_nobody(clean: RunDirectory, tmp_path: Path) -> None:
    """Whoever gives the run directory made it up: with another rotary base the same embedding goes into
    stage 1, and another activation comes out."""
    run = SignedRun(copy_of(clean, tmp_path), 1, 1, 0)
    path = run.proof()
    assert check(run, path).outcome == REFUTED
    other = with_changes(load_run_file(run.directory.run_file), {"model.rope_theta": 77.0})
    run.directory.run_file.write_text(render_run_file(other))
    shutil.rmtree(run.directory.checkpoints_path)
    states = open_inputs(run.directory.path).reference().fingerprints()

    def change(record: AnyRecord) -> AnyRecord:
        if isinstance(record, Genesis):
            return replace(record, config=render_run_file(other), fingerprints=states)
        if isinstance(record, Commit) and record.t == 1:
            stages = zip(record.stages, states, strict=True)
            return replace(record, stages=tuple(replace(s, fingerprint_before=f) for s, f in stages))
        return record

    result = check(run, retold(run, change, path))
    assert result.outcome == NOT_PROVED and "another state" in result.unknown[0], result.lines()


@pytest.mark.parametrize(
    "part",
    [
        lambda part: replace(part, owners=tuple(each + 7 * (each != 0) for each in part.owners)),
        lambda part: replace(part, owners=part.owners * 300),
        lambda part: replace(part, classes=()),
        lambda part: replace(part, receipts=()),
    ],
    ids=["owners that are no members", "units without end", "no classes", "no receipts"],
)
def test_a_log_of_nonsense_convicts_nobody_and_is_told_not_raised(
    run: SignedRun, part: Callable[[StageCommit], StageCommit]
) -> None:
    def change(record: AnyRecord) -> AnyRecord:
        if isinstance(record, Commit) and record.t == run.t:
            return replace(record, stages=tuple(map(part, record.stages)))
        return record

    path = run.proof(first_unit(lambda unit: replace(unit, activation_out=WRONG)))
    assert check(run, retold(run, change, path)).outcome == NOT_PROVED


def test_a_disputed_result_of_a_microbatch_that_is_not_there_is_told_not_raised(run: SignedRun) -> None:
    other = replace(run.receipt().units[0], unit=99)
    came = run.sealed_again(other.activation_in, "activation", "99", other.activation_in.hash)
    back = run.sealed_again(other.gradient_in, "gradient", "99", other.gradient_in.hash)
    other = replace(other, activation_in=came, gradient_in=back, gradient_out=WRONG)
    path = run.proof(partial(replace, others=(other,)), (Dispute(run.position, 99, WRONG),))
    assert check(run, path).outcome == NOT_PROVED


def test_another_numerics_class_proves_nothing(run: SignedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.proof(first_unit(lambda unit: replace(unit, activation_out=WRONG)))
    monkeypatch.setattr(proofs, "numerics_class", lambda *shape: ("elsewhere", {}))
    result = check(run, path)
    assert result.outcome == NOT_PROVED and "this machine is elsewhere" in result.unknown[0]


def test_the_command_has_an_exit_status_for_each_outcome(
    run: SignedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(run.directory.path)
    assert main(["verify", folder, "--proof", str(run.proof())]) == 1
    assert "refuted: the receipt is right" in capsys.readouterr().out
    path = run.proof(first_unit(lambda unit: replace(unit, activation_out=WRONG)))
    assert main(["verify", folder, "--proof", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "proved"
    forged = doctored(path, subject="x\nproved", receipt="AAAA")
    assert main(["verify", folder, "--proof", str(forged)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and not any(line.startswith("proved") for line in lines)
    path.write_text("{}")
    assert main(["verify", folder, "--proof", str(path)]) == 2
    assert main(["verify", folder, "--proof", "nowhere.json"]) == 2
    assert "nowhere.json: no such file" in capsys.readouterr().err


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_files, "PROOFS_MAX", 2)
    finding = {"t": 1, "stage": 1, "subject": "s" * 64}
    finding |= dict.fromkeys(("base", "auditor", "what", "found", "claimed", "receipt"), "")
    written = [proof_files.write_proof(tmp_path, "run", finding) for _ in range(3)]
    assert [path.name if path else None for path in written] == [
        f"step-000001-stage-1-{'s' * 16}.json",
        f"step-000001-stage-1-{'s' * 16}-2.json",
        None,
    ]
