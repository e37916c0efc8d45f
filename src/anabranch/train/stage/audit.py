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
#: when it is summed or assembled. A tensor that was changed in between has another version.
_hashes: MutableMapping[Tensor, tuple[int, str]] = WeakIdKeyDictionary()


def payload_hash(payload: Tensor) -> str:
    """BLAKE3 (32 hex characters) of a tensor's type, shape and bytes."""
    known = _hashes.get(payload)
    if known is None or known[0] != payload._version:
        known = payload._version, _hash_of(payload)
        _hashes[payload] = known
    return known[1]


def _hash_of(payload: Tensor) -> str:
    hasher = blake3.blake3(f"{payload.dtype} {tuple(payload.shape)}".encode())
    data = payload.detach().cpu().contiguous().reshape(-1)
    if data.numel():
        hasher.update(raw_bytes(data.view(torch.uint8)))
    return hasher.hexdigest()[:32]


class AuditedSteps:
    """Weights before the last steps that are audited here, and the sum of the units computed again.

    weights_of(state): working weights of a state. accumulator(): makes an empty gradient sum.
    """

    def __init__(
        self,
        model: Model,
        spec: StageSpec,
        weights_of: Callable[[StageState], dict[str, Tensor]],
        accumulator: Callable[[], Accumulator],
    ) -> None:
        self._model, self._spec = model, spec
        self._weights_of, self._accumulator = weights_of, accumulator
        self._weights: dict[int, dict[str, Tensor]] = {}
        self._stage: Stage | None = None

    def keep(self, state: StageState) -> None:
        """Keep a copy of the weights of `state`, before its next step."""
        weights = self._weights_of(state)
        self._weights[state.t + 1] = {name: tensor.clone() for name, tensor in weights.items()}

    def stepped(self, t: int) -> None:
        """Drop the weights before steps that are too old: step t was applied."""
        self._weights = {k: kept for k, kept in self._weights.items() if k > t - tasks.AUDIT_STEPS}

    def clear(self) -> None:
        """Drop everything: the state was replaced by one that did not follow from it."""
        self._weights.clear()
        self._stage = None

    def unit(self, task: tasks.AuditUnit, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor] | None:
        """(y, dx) of a microbatch computed again, whose contribution is added to the audit's sum; None if the
        weights are not kept."""
        weights = self._weights.get(task.t)
        if weights is None:
            return None
        if task.first or self._stage is None:
            self._stage = Stage(self._model, self._spec, weights, self._accumulator())
        y = self._stage.forward(task.index, x)
        dx = self._stage.input_gradient(task.index, dy)
        self._stage.weight_gradient(task.index)
        return y, dx

    def sum(self, task: tasks.AuditSum) -> tuple[Tensor, ...] | None:
        """Sum of the audited units in parts; None if there is none."""
        stage, self._stage = self._stage, None
        return None if stage is None else exact.cut(stage.accumulator.flat, task.parts)
