"""Frozen weights of a stage: their hash, their pieces on the wire, and a folder of them by hash.

The weights are one flat vector in the compute dtype, in the order of the stage's `Layout`. Nothing describes
itself: names and shapes follow from the run file, so a reader knows the size before the bytes come.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import blake3
import numpy as np
import torch
from torch import Tensor

from anabranch.config import RunConfig
from anabranch.errors import UserError
from anabranch.protocol.interface.tasks import PIECE_BYTES
from anabranch.train.adapters.lora import LoraModel
from anabranch.train.devices.placement import Where, put
from anabranch.train.model.interface import DTYPES, stage_layout, weights_from_tensors
from anabranch.train.model.layout import Layout, raw_bytes
from anabranch.train.model.partition import partition

#: Bytes of a disk that frozen weights leave free: for the log and checkpoints. Plain choice.
LEFT_BYTES = 256 << 20


class FrozenError(ValueError):
    """Bytes that are not the frozen weights of the stage; the message says why."""


class FrozenWeights:
    """Frozen weights of one stage, flat in `layout` on the CPU."""

    def __init__(self, layout: Layout, flat: Tensor) -> None:
        self.layout, self.flat = layout, flat

    @classmethod
    def of_tensors(cls, layout: Layout, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> FrozenWeights:
        """Weights from named tensors of the whole model. Raises ValueError if one is missing or of another
        shape."""
        return cls(layout, weights_from_tensors(layout, tensors, dtype))

    @classmethod
    def of_pieces(cls, layout: Layout, pieces: Sequence[Tensor], dtype: torch.dtype) -> FrozenWeights:
        """Weights from their bytes (flat uint8). Raises FrozenError if these have another size."""
        wanted = layout.elements * dtype.itemsize
        found = sum(piece.numel() for piece in pieces)
        if found != wanted or any(piece.dtype != torch.uint8 or piece.dim() != 1 for piece in pieces):
            raise FrozenError(f"the frozen weights of this stage are {wanted} bytes, not {found}")
        return cls(layout, torch.cat(tuple(pieces)).view(dtype))

    @property
    def data(self) -> Tensor:
        """All bytes (flat uint8)."""
        return self.flat.view(torch.uint8)

    def pieces(self) -> tuple[Tensor, ...]:
        """Bytes as flat uint8 vectors of at most PIECE_BYTES, in order: views."""
        return tuple(torch.split(self.data, PIECE_BYTES))

    def hash(self) -> str:
        """BLAKE3 (hex) of names, shapes, dtype and values; "" for a stage without weights."""
        if not self.layout.elements:
            return ""
        hasher = blake3.blake3(b"anabranch frozen weights 1" + self.layout.header())
        hasher.update(str(self.flat.dtype).encode())
        hasher.update(raw_bytes(self.data))
        return str(hasher.hexdigest())

    def tensors(self, device: Where) -> dict[str, Tensor]:
        """Every tensor by name in its shape: views of one vector on `device`, or placed on several."""
        return dict(self.layout.views(put(self.flat, device)))


class FrozenStore:
    """Folder of frozen weights, a file for each hash. Methods raise OSError, and FrozenError (a ValueError)
    for a name that is no hash."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, wanted: str) -> Path:
        """File of the weights with this hash. Raises FrozenError (a ValueError) if `wanted` is no hash."""
        if len(wanted) != 64 or not set(wanted) <= set("0123456789abcdef"):
            raise FrozenError(f"{wanted[:80]!r} is not the hash of frozen weights")
        return self.folder / f"{wanted}.bin"

    def put(self, weights: FrozenWeights) -> str:
        """Write weights unless there is a file of their hash, whatever it contains; returns their hash; "",
        and nothing is written, for a stage without weights. Raises OSError if the disk would keep less than
        LEFT_BYTES free, or writing fails; then no part stays."""
        found = weights.hash()
        if not found or self.path(found).exists():
            return found
        self.folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self.folder).free < weights.data.numel() + LEFT_BYTES:
            raise OSError(errno.ENOSPC, f"no room for {weights.data.numel()} bytes", str(self.folder))
        unfinished = self.folder / f".{found}.{os.getpid()}"
        try:
            with open(unfinished, "wb") as file:
                file.write(raw_bytes(weights.data))
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self.path(found))
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        return found

    def data(self, wanted: str) -> Tensor:
        """Bytes (flat uint8) of the file of the hash `wanted`, mapped into memory; they are not compared with
        the hash."""
        return torch.from_numpy(np.memmap(self.path(wanted), dtype=np.uint8, mode="c"))

    def get(self, wanted: str, layout: Layout, dtype: torch.dtype) -> FrozenWeights:
        """Weights, in `layout` and of `dtype`, from the file of the hash `wanted`. Raises FrozenError if the
        contents do not have that hash or size, ValueError for an empty file, OSError if the file is missing.
        For hash "" and an empty layout no file is read, and the weights are empty."""
        if not layout.elements and not wanted:
            return FrozenWeights(layout, torch.empty(0, dtype=dtype))
        weights = FrozenWeights.of_pieces(layout, (self.data(wanted),), dtype)
        if weights.hash() != wanted:
            raise FrozenError(f"{self.path(wanted)} does not have the hash in its name: remove it")
        return weights


class FrozenLoader:
    """Reader of the frozen weights of a run's stages, whose hashes the run file names: from a peer's pieces
    or from `store`, this machine's folder (None: there is none)."""

    def __init__(self, run: RunConfig, model: LoraModel, store: FrozenStore | None = None) -> None:
        self._run, self._model, self._store = run, model, store
        self._dtype = DTYPES[run.compute.dtype]
        self._specs = partition(model.config, run.pipeline)

    @property
    def stages(self) -> int:
        """Number of stages, stage 0 included."""
        return len(self._specs)

    def layout(self, stage: int) -> Layout:
        return stage_layout(self._model.base, self._specs[stage])

    def from_pieces(self, stage: int, pieces: Sequence[Tensor]) -> FrozenWeights:
        """Weights of a stage from all their bytes, not compared with the hash. Raises FrozenError (size)."""
        return FrozenWeights.of_pieces(self.layout(stage), pieces, self._dtype)

    def at_hand(self, stage: int) -> FrozenWeights | None:
        """Weights of a stage from the store, with the hash that the run file names; None if they are missing
        or damaged there, or there is no store. A stage without frozen weights has empty ones, even without a
        store. Raises FrozenError if the run file names no hashes."""
        layout, wanted = self.layout(stage), self.wanted(stage)
        if self._store is None and wanted:
            return None
        try:
            return (self._store or FrozenStore(Path())).get(wanted, layout, self._dtype)
        except (OSError, ValueError):
            return None

    def keep(self, weights: FrozenWeights) -> None:
        """Put weights into the store, if there is one. A disk that refuses them raises nothing: the weights
        are downloaded again later."""
        if self._store is not None:
            with contextlib.suppress(OSError):
                self._store.put(weights)

    def wanted(self, stage: int) -> str:
        """Hash of a stage's frozen weights that the run file names; "" for a stage without any. Raises
        FrozenError if the run file does not name one for every stage."""
        if len(self._run.lora.frozen) != self.stages:
            raise FrozenError("the run file does not name the frozen weights of every stage")
        return self._run.lora.frozen[stage]


def whole_frozen(run: RunConfig, model: LoraModel, store: FrozenStore) -> dict[str, Tensor]:
    """Frozen weights of all stages by name, on the CPU, from the store. Raises UserError if some are missing
    or damaged there, FrozenError if the run file does not name those of every stage."""
    loader, tensors = FrozenLoader(run, model, store), dict[str, Tensor]()
    for stage in range(loader.stages):
        weights = loader.at_hand(stage)
        if weights is None:
            raise UserError(
                f"{store.folder}: the frozen weights of stage {stage} are missing or damaged; restore the "
                "folder from a copy"
            )
        tensors |= weights.tensors(torch.device("cpu"))
    return tensors


def frozen_of_folder(
    run: RunConfig, model: LoraModel, tensors: Mapping[str, Tensor], store: FrozenStore | None = None
) -> tuple[str, ...]:
    """Hashes of the frozen weights of stages 0, 1, ... ("" for one without), from all tensors of the model;
    they are put into `store` (None: nowhere). Raises ValueError if a tensor is missing or has another shape,
    and OSError if the store's disk refuses them."""
    loader, hashes = FrozenLoader(run, model), []
    for stage in range(loader.stages):
        weights = FrozenWeights.of_tensors(loader.layout(stage), tensors, DTYPES[run.compute.dtype])
        hashes.append(weights.hash())
        if store is not None:
            store.put(weights)
    return tuple(hashes)
