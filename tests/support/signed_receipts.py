"""Receipts of an honest relay for a step of a simulated run, made of the work as it is computed again, and a
log that has them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import msgspec

from anabranch.audit.error_bounds import permuted
from anabranch.audit.log_check import read_log
from anabranch.audit.replay import SequentialStepper
from anabranch.audit.replayed_work import ReplayedWork, StepReplay
from anabranch.audit.run_inputs import open_inputs
from anabranch.checkpoint.directory import RunDirectory
from anabranch.checkpoint.proof_files import write_proof
from anabranch.net.identity import Identity, IdentitySigner
from anabranch.protocol.audit.receipts import Receipt, SumReceipt, Transfer, UnitReceipt, receipt_hash, signed
from anabranch.protocol.audit.seals import ACTIVATION, GRADIENT, PART, part_name, seal_text
from anabranch.protocol.log.records import AnyRecord, Commit, Dispute, Members
from support.audited_runs import rewrite_log


class SignedRun:
    """Simulated run whose peers have real keys: ids in the log are replaced by those of `keys`.

    Receipts are of the member at `position` of `stage` in step t, which has `parts` parts and summed part 0.
    """

    def __init__(self, directory: RunDirectory, t: int, stage: int, position: int) -> None:
        self.directory, self.t, self.stage, self.position = directory, t, stage, position
        commits = read_log(directory.log).history.commits
        peers = {peer for commit in commits for part in commit.stages for peer in part.members}
        self.keys = {peer: Identity.from_seed(peer.encode().ljust(32, b"-")[:32]) for peer in sorted(peers)}
        self._rename({peer: key.peer_id for peer, key in self.keys.items()})
        self.by_id = {key.peer_id: IdentitySigner(key) for key in self.keys.values()}
        self.commit = next(c for c in self._commits() if c.t == t)
        self.part = self.commit.stages[stage]
        self.subject = self.part.members[position]
        self.work = self._work()

    def _commits(self) -> list[Commit]:
        return read_log(self.directory.log).history.commits

    def _rename(self, ids: dict[str, str]) -> None:
        """Replace ids in all records that verification reads."""

        def renamed(record: AnyRecord) -> AnyRecord:
            if not isinstance(record, Commit | Members):
                return record
            text = msgspec.json.encode(record).decode()
            for old, new in ids.items():
                text = text.replace(f'"{old}"', f'"{new}"')
            return msgspec.json.decode(text, type=Commit if isinstance(record, Commit) else Members)

        rewrite_log(self.directory, lambda records: [renamed(record) for record in records])

    def _work(self) -> ReplayedWork:
        inputs = open_inputs(self.directory.path)
        reference = inputs.reference()
        stepper = SequentialStepper(reference, permuted(0, inputs.run.batch.microbatches))
        for t in range(1, self.t):
            stepper.step(t)
        return StepReplay(inputs, reference).work(self.t, self.stage, self.part, 2, [0])

    def receipt(self) -> Receipt:
        """Receipt as an honest relay signs it."""
        run, base, last = self.commit.run, self.commit.previous_base, len(self.commit.stages) - 1
        after = (self.stage + 1) % (last + 1)

        def transfer(stage: int, kind: str, name: str, hashed: str, sender: str = "") -> Transfer:
            peer = sender or self.commit.stages[stage].members[0]
            text = seal_text(run, base, stage, kind, name, hashed)
            return Transfer(hashed, peer, stage, self.by_id[peer].sign(text))

        units = []
        for unit, owner in enumerate(self.part.owners):
            if owner == self.position:
                x, dy, y, dx = self.work.units[unit]
                activation = transfer(self.stage - 1, ACTIVATION, str(unit), x)
                gradient = transfer(after, GRADIENT, str(unit), dy)
                units.append(UnitReceipt(unit, activation, gradient, y, dx))
        inputs = tuple(
            (k, transfer(self.stage, PART, part_name(1, 1, 0), self.work.parts[k][0], self.part.members[k]))
            for k in sorted(set(self.part.owners))
        )
        sums = (SumReceipt(0, inputs, self.work.sums[0]),)
        about = run, base, self.t, self.stage, self.subject, 1, 1
        return Receipt(*about, tuple(units), self.work.parts[self.position], sums, ())

    def sealed_again(self, transfer: Transfer, kind: str, name: str, hashed: str) -> Transfer:
        """Transfer of another payload, sealed by its sender."""
        base = self.commit.previous_base
        text = seal_text(self.commit.run, base, transfer.stage, kind, name, hashed)
        return msgspec.structs.replace(transfer, hash=hashed, seal=self.by_id[transfer.sender].sign(text))

    def proof(
        self,
        change: Callable[[Receipt], Receipt] = lambda receipt: receipt,
        disputed: tuple[Dispute, ...] = (),
    ) -> Path:
        """Proof file about the receipt with `change`, whose hash enters the log with the results that are
        disputed."""
        data = signed(change(self.receipt()), self.by_id[self.subject])
        receipts = tuple(
            receipt_hash(data) if k == self.position else "" for k in range(len(self.part.members))
        )

        def entered(record: AnyRecord) -> AnyRecord:
            if not isinstance(record, Commit) or record.t != self.t:
                return record
            stages = list(record.stages)
            found = {"receipts": receipts, "disputed": disputed}
            stages[self.stage] = msgspec.structs.replace(stages[self.stage], **found)
            return msgspec.structs.replace(record, stages=tuple(stages))

        rewrite_log(self.directory, lambda records: [entered(record) for record in records])
        base = read_log(self.directory.log).history.bases[self.t]
        finding = {"t": self.t, "base": base, "stage": self.stage, "subject": self.subject}
        finding |= {"auditor": "somebody", "what": "", "found": "", "claimed": ""}
        finding |= {"receipt": base64.b64encode(data).decode()}
        path = write_proof(self.directory.path, self.commit.run, finding)
        assert path is not None
        return path
