"""Reading and writing of a run's checkpoints by its founder, the data node with the run directory. Each
stage's state is handed over in pieces."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import PIECE_BYTES, Payload

#: Disk bytes that a checkpoint leaves free for the logs. A choice: a day of a small run.
SPARE_BYTES = 4 << 20
#: Pieces of a stage's state, and its fingerprint.
StageCopy = tuple[tuple[Payload, ...], str]


class CheckpointIo:
    """Checkpoints of a run directory. The methods block. run_id: of the run, written into them. newest: step
    of the checkpoint that the run continues from (0: none); younger ones are damaged, or of steps that were
    never announced. keep: number of checkpoints to keep. frozen: hashes of stages' frozen weights, if there
    are any."""

    def __init__(
        self, directory: RunDirectory, run_id: str, keep: int, newest: int, frozen: Sequence[str] = ()
    ) -> None:
        self._frozen = frozen
        self._directory = directory
        self._run_id = run_id
        self._keep = keep
        self._newest = newest

    def read(self, t: int, stage: int) -> ev.CheckpointRead:
        """Read a stage's state in the checkpoint after step t (-1: the newest). In a run with frozen weights
        for its S + 1 stages, the number S + 1 + n in place of a stage, with t = 0, reads the frozen weights
        of stage n. Raises UserError if what is asked for is not there or damaged."""
        import torch

        from anabranch.train.stage.state import piece_hashes

        if self._frozen and stage >= len(self._frozen):
            return self._read_frozen(t, stage)
        found = t if t >= 0 else self._newest
        data = self._directory.read_stage(found, stage)
        fingerprint = self._directory.manifest(found).stages[stage].fingerprint
        pieces = torch.split(torch.frombuffer(bytearray(data), dtype=torch.uint8), PIECE_BYTES)
        return ev.CheckpointRead(t, found, stage, fingerprint, tuple(pieces), piece_hashes(pieces))

    def _read_frozen(self, t: int, number: int) -> ev.CheckpointRead:
        """Read the frozen weights of a stage, mapped into memory, in the form of a checkpoint's stage. t: 0.
        number: the stage plus the number of frozen stages, as in `read`. Raises UserError for another t or
        number, and if they cannot be read."""
        import torch

        from anabranch.train.adapters.frozen import FrozenStore
        from anabranch.train.stage.state import piece_hashes

        stage = number - len(self._frozen)
        if t != 0 or stage >= len(self._frozen) or not self._frozen[stage]:
            raise UserError(f"there are no frozen weights number {stage} of iteration {t}")
        try:
            data = FrozenStore(self._directory.frozen).data(self._frozen[stage])
        except (OSError, ValueError) as error:
            raise UserError(f"the frozen weights of stage {stage} cannot be read: {error}") from None
        pieces = torch.split(data, PIECE_BYTES)
        return ev.CheckpointRead(0, 0, number, self._frozen[stage], tuple(pieces), piece_hashes(pieces))

    def write(self, t: int, base: str, stages: Mapping[int, StageCopy]) -> Path:
        """Write the checkpoint after step t, and delete all but the `keep` newest of steps up to t; returns
        its path.

        base: hash of the log entry that committed step t. stages: pieces and fingerprint of every stage's
        state. Raises UserError if the disk has too little room or the checkpoint cannot be written.
        """
        import torch

        parts = {
            stage: ([piece.numpy() for piece in pieces if isinstance(piece, torch.Tensor)], fingerprint)
            for stage, (pieces, fingerprint) in stages.items()
        }
        self._check_room(t, sum(piece.nbytes for pieces, _ in parts.values() for piece in pieces))
        path = self._directory.write_checkpoint(t, base, self._run_id, parts)
        self._newest = t
        self._directory.prune(self._keep, t)
        return path

    def _check_room(self, t: int, size_bytes: int) -> None:
        """Raise UserError if the checkpoint of step t, of this size, would leave fewer than SPARE_BYTES of
        the disk free, which the commit log needs."""
        free = shutil.disk_usage(self._directory.checkpoints_path).free
        if free < size_bytes + SPARE_BYTES:
            raise UserError(
                f"cannot write the checkpoint {self._directory.checkpoint_path(t)}: it needs "
                f"{(size_bytes + SPARE_BYTES) / 1e6:.0f} MB and the disk has {free / 1e6:.0f} MB free; "
                "make room"
            )
