"""Work of a machine with the whole model in a past step or round, computed again in one process: hashes of
all that was received and sent."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from anabranch.audit.replayed_work import ReplayedWork
from anabranch.audit.run_inputs import Inputs
from anabranch.protocol.interface.tasks import AuditSum, AuditUnit
from anabranch.protocol.log.records import StageCommit
from anabranch.protocol.rounds.plan import Plan
from anabranch.train.model.interface import DTYPES
from anabranch.train.model.rounds import rounds_of
from anabranch.train.numerics import exact
from anabranch.train.numerics.block_float import BITS, rounded_sums
from anabranch.train.numerics.exact import Overflow
from anabranch.train.reference.reference import Reference
from anabranch.train.stage.audit import payload_hash
from anabranch.train.stage.inner_steps import slot_tokens
from anabranch.train.stage.run_objects import make_accumulator, master_dtype, token_ids
from anabranch.train.workers.rounds_worker import ANSWER
from anabranch.train.workers.whole_audit import AuditedWholeSteps
from anabranch.train.workers.whole_worker import packed_ids


class IslandReplay:
    """Whole model in the state before a step or round, which `reference` has, to recompute its work. plan:
    slots of the round; () if it is a step."""

    def __init__(self, inputs: Inputs, reference: Reference, plan: Plan) -> None:
        run = self._run = inputs.run
        self._inputs, self._plan = inputs, plan
        self._dtype = DTYPES[run.compute.dtype]
        state, model = reference.states[1], reference.model
        self._device = state.weights.device
        self._audits = AuditedWholeSteps(
            *(run, model, reference.specs[1], self._dtype),
            lambda: make_accumulator(run, model, state.layout, self._device),
            self._device,
        )
        self._audits.keep(state)

    def work(self, t: int, commit: StageCommit, parts: int, summed: Collection[int]) -> ReplayedWork:
        """Hashes of the recomputed work of those members of the relays' stage that own units in iteration t.
        commit: the stage's entry in the commit, which says which units they own. parts: number of parts into
        which a sum is cut. summed: parts whose total over the members is wanted."""
        found = ReplayedWork()
        kept: dict[int, list[Tensor]] = {part: [] for part in summed}
        for position in sorted(set(commit.owners) - {-1}):
            first = True
            for unit, owner in enumerate(commit.owners):
                if owner == position and self._unit(t, unit, first, found):
                    first = False
            cut = self._audits.sum(AuditSum(t, parts)) or ()
            found.parts[position] = tuple(map(payload_hash, cut))
            for part, tensors in kept.items():
                tensors += cut[part : part + 1]
        found.sums = {part: payload_hash(self._summed(t, each)) for part, each in kept.items() if each}
        return found

    def _unit(self, t: int, index: int, first: bool, found: ReplayedWork) -> bool:
        """Compute one microbatch or slot, and enter its hashes, or the tensor that overflowed, in `found`.
        first: True for the first one of its owner, with which a new sum begins. Returns True unless it
        overflowed."""
        steps, vocabulary = (self._plan[index].steps if self._plan else 0), self._inputs.model.vocab_size
        if steps:
            ids = slot_tokens(self._inputs.batches, self._run, index, self._plan[index].first, steps).long()
        else:
            count = self._run.batch.microbatches
            given, targets = token_ids(self._inputs.batches, count, t, index, self._device)
            ids = torch.cat((given, targets[:, -1:]), 1)
        task = AuditUnit(t, index, first, steps)
        try:
            made = self._audits.unit(task, ids.to(self._device), ANSWER)
        except Overflow as overflow:
            found.overflows[index] = overflow.tensor
            return False
        assert made is not None, "the state before the iteration is kept"
        tokens = packed_ids(ids, vocabulary).cpu()
        hashes = tuple(map(payload_hash, (tokens, ANSWER, *made)))
        found.units[index] = hashes[0], hashes[1], hashes[2], hashes[3]
        return True

    def _summed(self, t: int, parts: list[Tensor]) -> Tensor:
        """Sum of one part of all contributions, rounded as the peer that sums it sends it. parts: that part
        of each contribution."""
        bits = BITS[self._run.round.results] if rounds_of(self._run).has(t) else 0
        if not bits:
            return exact.sum_part(parts, master_dtype(self._dtype))
        return rounded_sums(exact.sum_part(parts, parts[0].dtype), bits)
