"""Audit of a past step at one worker: its weights, microbatches computed again with them, hashes of payloads.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import blake3
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from anabranch.protocol.interface import tasks
from anabranch.train.model.interface import Model
from anabranch.train.model.layout import raw_bytes
from anabranch.train.model.partition import StageSpec
from anabranch.train.numerics import exact
from anabranch.train.numerics.exact import Accumulator
from anabranch.train.stage.stage import Stage
from anabranch.train.stage.state import StageState

#: Tensor -> its version and hash. A replica's own part of a sum is hashed when it is frozen, and not again
#: when it is summed, assembled or sent; a payload that came was hashed on arrival. A tensor that was changed
#: in between has another version.
_hashes: MutableMapping[Tensor, tuple[int, str]] = WeakIdKeyDictionary()


def payload_hash(payload: Tensor) -> str:
    """BLAKE3 (32 hex characters) of a tensor's type, shape and bytes. It is remembered until the tensor is
    changed or freed, so a second call computes nothing."""
    found = known_hash(payload)
    if not found:
        found = _hash_of(payload)
        note_hash(payload, found)
    return found


def known_hash(payload: Tensor) -> str:
    """Hash that `payload_hash` or `note_hash` remembered of a tensor; "" if there is none, or the tensor was
    changed in place since. Nothing is computed."""
    known = _hashes.get(payload)
    return known[1] if known is not None and known[0] == payload._version else ""


def note_hash(payload: Tensor, found: str) -> None:
    """Remember `found` as the result of `payload_hash` for this tensor, of which this process hashed the same
    bytes when they arrived. It is not checked, so it must not be a hash that a peer claims."""
    _hashes[payload] = payload._version, found


def _hash_of(payload: Tensor) -> str:
    hasher = blake3.blake3(f"{payload.dtype} {tuple(payload.shape)}".encode())
    data = payload.detach().cpu().contiguous().reshape(-1)
    if data.numel():
        hasher.update(raw_bytes(data.view(torch.uint8)))
    return hasher.hexdigest()[:32]


class AuditedSteps:
    """Auditor's work at one worker: the weights before the last steps that may be audited, and the sum of the
    contributions that the present audit computes again. weights_of(state): working weights of a state.
    units_of(state): exponents of the sums' units. accumulator(): makes an empty gradient sum. align: number
    of elements; parts of a sum begin at its multiples."""

    def __init__(
        self,
        model: Model,
        spec: StageSpec,
        weights_of: Callable[[StageState], dict[str, Tensor]],
        units_of: Callable[[StageState], Tensor | None],
        accumulator: Callable[[], Accumulator],
        align: int = 1,
    ) -> None:
        self._model, self._spec = model, spec
        self._weights_of, self._units_of = weights_of, units_of
        self._accumulator, self._align = accumulator, align
        self._weights: dict[int, tuple[dict[str, Tensor], Tensor | None]] = {}
        self._stage: Stage | None = None

    def keep(self, state: StageState) -> None:
        """Keep a copy of the working weights of `state`, so that its next step, state.t + 1, can be audited
        after they have changed."""
        weights = self._weights_of(state)
        copies = {name: tensor.clone() for name, tensor in weights.items()}
        self._weights[state.t + 1] = copies, self._units_of(state)

    def stepped(self, t: int) -> None:
        """Drop the weights of steps up to t - AUDIT_STEPS, after step t was applied."""
        self._weights = {k: kept for k, kept in self._weights.items() if k > t - tasks.AUDIT_STEPS}

    def clear(self) -> None:
        """Drop the kept weights of all steps and the audit's sum, as another state replaced the stage's."""
        self._weights.clear()
        self._stage = None

    def unit(self, task: tasks.AuditUnit, x: Tensor, dy: Tensor | None) -> tuple[Tensor, ...] | None:
        """Compute a microbatch again, from the stage's input x and output gradient dy, with the weights of
        step task.t; returns (y, dx), and adds its contribution to the audit's sum, which `task.first` begins
        anew. Without dy it returns (y,) and adds nothing. None if the weights are not kept. Raises Overflow
        if a result is not finite."""
        kept = self._weights.get(task.t)
        if kept is None:
            return None
        if task.first or self._stage is None:
            weights, units = kept
            self._stage = Stage(self._model, self._spec, weights, self._accumulator())
            self._stage.accumulator.prepare(units)
        y = self._stage.forward(task.index, x)
        if dy is None:
            self._stage.discard(task.index)
            return (y,)
        dx = self._stage.input_gradient(task.index, dy)
        self._stage.weight_gradient(task.index)
        return y, dx

    def sum(self, task: tasks.AuditSum) -> tuple[Tensor, ...] | None:
        """Sum of the contributions that the audit computed again, cut into task.parts parts on the CPU; None
        if it computed none. Ends the audit: the sum is dropped, and the next unit begins another."""
        stage, self._stage = self._stage, None
        return None if stage is None else exact.cut(stage.accumulator.flat, task.parts, self._align)
