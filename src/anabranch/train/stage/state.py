"""State of a stage: weights, Adam's moments and counter; its fingerprint and its snapshot (safetensors)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import blake3
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from anabranch.errors import UserError
from anabranch.protocol.interface.delay import NO_DELAY, Delay
from anabranch.protocol.interface.tasks import PIECE_BYTES
from anabranch.train.devices.placement import Where, put
from anabranch.train.model.layout import Layout, raw_bytes
from anabranch.train.numerics.coarse_sums import MOST_DROPPED

SNAPSHOT_FORMAT = "anabranch-stage-1"
_KINDS = ("weights", "exp_avg", "exp_avg_sq")
#: Names of the dtypes in a safetensors file, in the order of its tensors.
_TYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.int32: "I32"}
_TYPES = list(_TYPE_NAMES)
#: Name in a snapshot of the units of a delayed iteration's sums.
_UNITS = "ahead_units"


class SnapshotError(UserError, ValueError):
    """Unusable snapshot; the message says why."""


@dataclass(frozen=True)
class Ahead:
    """Weights and units of a delayed iteration, fixed before the step before it is known. weights: flat,
    predicted. units: of its coarse sums (int32, `coarse_sums.unit_exponents`); None for other sums."""

    weights: Tensor
    units: Tensor | None = None


@dataclass(frozen=True)
class SnapshotForm:
    """Contents of a stage's snapshots besides weights and moments, for the parser. delay: the run's delayed
    iterations. segments: number of rounding units of coarse sums; 0: other sums."""

    delay: Delay = NO_DELAY
    segments: int = 0


#: Snapshots of a synchronous run.
PLAIN_FORM = SnapshotForm()


@dataclass
class StageState:
    """State of one stage after step `t`; the vectors are flat, in the master dtype. exp_avg, exp_avg_sq:
    Adam's moments (of matrices that Muon trains exp_avg is its momentum); between the first and the last
    round exp_avg is the outer momentum, unless the islands agree on moments. ahead: what iteration t + 1
    computes with, if it is delayed. rate, corrections: learning rate and bias corrections of the last step
    that was taken, from which weights are predicted; kept in runs with delay."""

    layout: Layout
    weights: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    t: int = 0
    adam_step: int = 0
    """Steps that Adam has taken, without skipped iterations."""
    ahead: Ahead | None = None
    rate: float = 0.0
    corrections: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def initial(cls, layout: Layout, weights: Tensor) -> StageState:
        return cls(layout, weights, torch.zeros_like(weights), torch.zeros_like(weights))

    def fingerprint(self, key: str = "") -> str:
        """BLAKE3 of names, shapes, Adam's counter, weights and moments in name order, and what is kept for
        delayed iterations; t is not in it. key: text hashed before them; another key's hash needs the whole
        state."""
        hasher = blake3.blake3(key.encode() + self.layout.header())
        hasher.update(f"{self.weights.dtype} {self.adam_step}".encode())
        for kind in _KINDS:
            vector: Tensor = getattr(self, kind)
            hasher.update(raw_bytes(vector))
        if self.rate:
            hasher.update(_scalars(self).encode())
        if self.ahead is not None:
            hasher.update(raw_bytes(self.ahead.weights))
            hasher.update(b"" if self.ahead.units is None else raw_bytes(self.ahead.units))
        return str(hasher.hexdigest())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by "weights/NAME", "exp_avg/NAME", "exp_avg_sq/NAME", and "ahead/NAME" before a
        delayed iteration: views in their shapes."""
        vectors: dict[str, Tensor] = {kind: getattr(self, kind) for kind in _KINDS}
        if self.ahead is not None:
            vectors["ahead"] = self.ahead.weights
        return {
            f"{kind}/{name}": view for kind, flat in vectors.items() for name, view in self.layout.views(flat)
        }

    def to_bytes(self) -> bytes:
        """Snapshot as a safetensors file with the counters in its metadata."""
        return bytes(raw_bytes(self._file()))

    def pieces(self) -> tuple[Tensor, ...]:
        """Snapshot as flat uint8 vectors of at most PIECE_BYTES, in order."""
        return tuple(torch.split(self._file(), PIECE_BYTES))

    def _file(self) -> Tensor:
        """Snapshot as one flat uint8 vector. Its bytes are copied by torch: a copy by Python, as the library
        makes it, would stop all threads of this process meanwhile."""
        tensors = self.tensors()
        if self.ahead is not None and self.ahead.units is not None:
            tensors[_UNITS] = self.ahead.units
        flat = {name: tensor.contiguous().view(-1).view(torch.uint8) for name, tensor in tensors.items()}
        metadata = {"format": SNAPSHOT_FORMAT, "t": str(self.t), "adam_step": str(self.adam_step)}
        if self.rate:
            metadata["last_step"] = _scalars(self)
        header: dict[str, object] = {"__metadata__": metadata}
        parts, end = list[Tensor](), 0
        for name in sorted(tensors, key=lambda name: (_TYPES.index(tensors[name].dtype), name)):
            begin, end = end, end + flat[name].numel()
            dtype, shape = _TYPE_NAMES[tensors[name].dtype], list(tensors[name].shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            parts.append(flat[name].cpu())
        # The library's order of the header would give replicas different bytes.
        text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        padded = text.ljust(-(-len(text) // 8) * 8)
        first = bytearray(len(padded).to_bytes(8, "little") + padded)
        return torch.cat([torch.frombuffer(first, dtype=torch.uint8), *parts])


def _scalars(state: StageState) -> str:
    """Learning rate and bias corrections of the last step as exact hexadecimal text."""
    return " ".join(value.hex() for value in (state.rate, *state.corrections))


def piece_hashes(pieces: Sequence[Tensor]) -> tuple[str, ...]:
    """BLAKE3 of each piece's bytes (32 hex characters); "" for a piece that is not of bytes."""
    return tuple(
        blake3.blake3(raw_bytes(piece.contiguous())).hexdigest()[:32] if piece.dtype == torch.uint8 else ""
        for piece in pieces
    )


def _longest_header(layout: Layout) -> int:
    """Most bytes of the header of a stage's snapshot, with a margin. Parsing JSON takes some 25 bytes of
    memory per byte, so longer headers are refused unread."""
    spelled = sum(6 * len(name) + 24 * len(shape) + 160 for name, shape in layout.shapes.items())
    return 4096 + (len(_KINDS) + 1) * spelled


def _counters(data: bytes, longest_header: int) -> tuple[int, int, tuple[float, ...]]:
    """(t, Adam's counter, scalars of the last step) from the metadata in a snapshot's JSON header. The
    scalars are the learning rate and two bias corrections; () if they are not kept. Raises SnapshotError if
    the header is longer than `longest_header` bytes, damaged, or of another format, or its numbers make no
    sense."""
    try:
        size = int.from_bytes(data[:8], "little")
        if not 0 < size <= len(data) - 8:
            raise SnapshotError("the snapshot is truncated")
        if size > longest_header:
            raise SnapshotError(
                f"the snapshot's header has {size} bytes, more than one of this stage can have: "
                "it is of another model or stage, or not a snapshot"
            )
        metadata = json.loads(data[8 : 8 + size])["__metadata__"]
        if metadata["format"] != SNAPSHOT_FORMAT:
            raise SnapshotError(f"the snapshot has format {metadata['format']!r}, not {SNAPSHOT_FORMAT!r}")
        t, adam_step = int(metadata["t"]), int(metadata["adam_step"])
        scalars = tuple(map(float.fromhex, str(metadata.get("last_step", "")).split()))
    except SnapshotError:
        raise
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise SnapshotError("the snapshot's header cannot be read: it is damaged or not a snapshot") from None
    if not 0 <= adam_step <= t:
        raise SnapshotError(f"the snapshot's counters make no sense: {adam_step} Adam steps after step {t}")
    if scalars and (len(scalars) != 3 or not all(0.0 < value < math.inf for value in scalars)):
        raise SnapshotError("the snapshot's learning rate and bias corrections make no sense")
    return t, adam_step, scalars


def parse_snapshot(
    data: bytes,
    layout: Layout,
    dtype: torch.dtype,
    device: Where,
    form: SnapshotForm = PLAIN_FORM,
) -> StageState:
    """State in a snapshot's bytes, which must have exactly the names, shapes and dtype of this stage, and the
    further contents that `form` names. Nothing in the bytes is executed, and nothing is allocated beyond the
    bytes themselves and the state. Raises SnapshotError for anything else."""
    t, adam_step, scalars = _counters(data, _longest_header(layout))
    if scalars and not form.delay.start:
        raise SnapshotError("the snapshot is of a run with iteration.delay, which this one does not have")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise SnapshotError(f"the snapshot is truncated or not a safetensors file: {error}") from None
    vectors, delayed = [], form.delay.has(t + 1)
    for kind in (*_KINDS, "ahead") if delayed else _KINDS:
        vector = torch.empty(layout.elements, dtype=dtype)
        for name, view in layout.views(vector):
            tensor = tensors.pop(f"{kind}/{name}", None)
            if tensor is None:
                raise SnapshotError(f"the snapshot lacks {kind} of {name}: it is of another model or stage")
            if tuple(tensor.shape) != layout.shapes[name] or tensor.dtype != dtype:
                raise SnapshotError(
                    f"the snapshot's {kind} of {name} is {tensor.dtype} {tuple(tensor.shape)}, "
                    f"not {dtype} {layout.shapes[name]}: it is of another model or dtype"
                )
            view.copy_(tensor)
        vectors.append(put(vector, device))
    units = tensors.pop(_UNITS, None) if delayed and form.segments else None
    if delayed and form.segments and not _are_units(units, form.segments):
        raise SnapshotError("the snapshot lacks the units of the next iteration's sums")
    if tensors:
        raise SnapshotError(f"the snapshot holds {next(iter(tensors))}, which this stage does not have")
    state = StageState(layout, vectors[0], vectors[1], vectors[2], t, adam_step)
    if delayed:
        state.ahead = Ahead(vectors[3], units)
    if scalars:
        state.rate, state.corrections = scalars[0], (scalars[1], scalars[2])
    return state


def _are_units(units: Tensor | None, segments: int) -> bool:
    """True for `segments` exponents that `coarse_sums.unit_exponents` may give."""
    if units is None or units.dtype != torch.int32 or tuple(units.shape) != (segments,):
        return False
    return bool((units >= 0).all() and (units <= MOST_DROPPED).all())


def parse_pieces(
    t: int,
    pieces: Sequence[Tensor],
    layout: Layout,
    dtype: torch.dtype,
    device: Where,
    form: SnapshotForm = PLAIN_FORM,
) -> StageState:
    """State after step t from a snapshot in pieces (flat uint8). Raises SnapshotError as `parse_snapshot`,
    and if the snapshot is of another step."""
    if any(piece.dtype != torch.uint8 for piece in pieces):
        raise SnapshotError("the pieces of a snapshot are bytes")
    data = b"".join(raw_bytes(piece.contiguous()) for piece in pieces)
    state = parse_snapshot(data, layout, dtype, device, form)
    if state.t != t:
        raise SnapshotError(f"the snapshot is of the state after step {state.t}, not {t}")
    return state
