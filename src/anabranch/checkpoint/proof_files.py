"""Proof files of a run directory: findings of auditors with the receipt that the audited peer signed.

A file is `proofs/step-T-stage-S-PEER.json`; `anabranch verify --proof` checks it (`audit.proof`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from anabranch.errors import UserError
from anabranch.operating_system import write_atomically

#: Version of the format.
PROOF_VERSION = 1
FOLDER = "proofs"
#: Most files in the folder: liars are convicted after two findings, so more is a flood. A plain choice.
PROOFS_MAX = 1000
#: Largest file that is read (bytes): four times the largest message, in which a receipt travels.
SIZE_MAX = 4 << 20
#: Characters of the peer's id in a file's name.
NAME_CHARS = 16


class ProofFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Finding of `auditor`: the work of `subject` at `stage` in `step` is another than its receipt says.
    base: hash of the log entry of the step's commit. what: the first thing that differs; found, claimed: its
    hash as computed again and in the receipt. receipt: the signed receipt, base64."""

    version: int
    run_id: str
    base: str
    step: int
    stage: int
    subject: str
    auditor: str
    what: str
    found: str
    claimed: str
    receipt: str

    @property
    def receipt_bytes(self) -> bytes:
        """Signed receipt. Raises UserError if it is not base64."""
        try:
            return base64.b64decode(self.receipt, validate=True)
        except (binascii.Error, ValueError):
            raise UserError("the field receipt of the proof is not base64") from None


def write_proof(run_dir: Path, run_id: str, finding: Mapping[str, Any]) -> Path | None:
    """Write an auditor's finding to a new proof file in the run directory; no earlier file is replaced.
    finding: fields of the event log's `audit` note with verdict "different". Returns the file's path, or
    None, with nothing written, if there are PROOFS_MAX files already. Raises OSError."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    if sum(1 for _ in folder.iterdir()) >= PROOFS_MAX:
        return None
    same = {
        name: finding[name] for name in ("base", "stage", "subject", "auditor", "what", "found", "claimed")
    }
    receipt = finding["receipt"]
    proof = ProofFile(version=PROOF_VERSION, run_id=run_id, step=finding["t"], receipt=receipt, **same)
    stem = f"step-{proof.step:06}-stage-{proof.stage}-{proof.subject[:NAME_CHARS]}"
    path, number = folder / f"{stem}.json", 1
    while path.exists():  # another auditor's finding, or of the step as it was taken again
        number += 1
        path = folder / f"{stem}-{number}.json"
    write_atomically(path, msgspec.json.format(msgspec.json.encode(proof), indent=2) + b"\n")
    return path


def read_proof(path: Path) -> ProofFile:
    """Contents of a proof file. Raises UserError naming the file if it is missing, larger than SIZE_MAX, or
    no proof of this version."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; proofs are in the folder {FOLDER} of the run directory")
    if path.stat().st_size > SIZE_MAX:
        raise UserError(f"{path} is no proof: it has more than {SIZE_MAX} bytes")
    try:
        proof = msgspec.json.decode(path.read_bytes(), type=ProofFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is no proof: {error}") from None
    if proof.version != PROOF_VERSION:
        raise UserError(f"{path} has version {proof.version}, this release reads version {PROOF_VERSION}")
    return proof
