"""States of stages on a volunteer's disk, for its next process: one file for each stage, within a bound.

A file is trusted in nothing: what is read from it is compared with the hashes of the run before it is used.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from anabranch.errors import words_of
from anabranch.node.driver.worker_thread import Computer
from anabranch.operating_system import delete_oldest
from anabranch.protocol.interface.events import KeptState
from anabranch.protocol.interface.tasks import PIECE_BYTES, PIECES_MAX, Snapshot

if TYPE_CHECKING:
    import torch

#: Largest header of a file (bytes): PIECES_MAX hashes and sizes.
_HEADER_MAX = 64 * PIECES_MAX
#: Share of the disk's free room that the files may take together. A plain choice: a guest leaves most of it.
_FREE_SHARE = 0.5


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    """Beginning of a file of the cache, as JSON after its length in 4 bytes; the pieces of the state follow.
    run, stage, t, fingerprint: of the state. sizes, hashes: of its pieces in order (bytes)."""

    run: str
    stage: int
    t: int
    fingerprint: str
    sizes: list[int]
    hashes: list[str]


class StateCache:
    """Folder of kept states. most_bytes: of all its files together; 0: nothing is kept."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self.most_bytes = folder, most_bytes

    def path(self, run: str, stage: int) -> Path:
        return self.folder / f"{blake3(run.encode()).hexdigest()[:16]}-{stage}.state"

    def keep(
        self, run: str, stage: int, state: KeptState, stopped: Callable[[], bool] = lambda: False
    ) -> str:
        """Write a state in place of the stage's former one, which stays until the new one is whole if there
        is room for both; the oldest files make room. Returns "" or why it is not kept; a state too large for
        the cache deletes the former one. stopped: asked before each piece; True to give up. Raises OSError if
        the disk refuses it."""
        if not self.most_bytes:
            return "the cache is switched off"
        views = [_bytes_of(piece) for piece in state.pieces]
        sizes = [len(view) for view in views]
        header = msgspec.json.encode(
            _Header(run, stage, state.t, state.fingerprint, sizes, list(state.hashes))
        )
        path, needed = self.path(run, stage), 4 + len(header) + sum(sizes)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._clear_unfinished()
        used = sum(path.stat().st_size for path in self.folder.glob("*.state"))
        room = min(self.most_bytes, used + int(_FREE_SHARE * shutil.disk_usage(self.folder).free))
        if needed > room:
            path.unlink(missing_ok=True)
            return f"it has {needed} bytes, and the cache has room for {room} (--cache)"
        delete_oldest(self.folder.glob("*.state"), room - needed)
        unfinished = self.folder / f".{path.name}.unfinished"
        with open(unfinished, "xb") as file:
            file.write(len(header).to_bytes(4, "little") + header)
            for view in views:
                if stopped():
                    return "there was no time to write it"
                file.write(view)
        os.replace(unfinished, path)
        return ""

    def load(self, run: str, stage: int) -> KeptState | None:
        """Kept state of a stage, its pieces mapped from the file, which the caller compares with the hashes
        of the run; None if there is none, or the file is damaged. With `most_bytes` 0 all files are deleted,
        and there is none."""
        try:
            if self.most_bytes:
                return self._read(self.path(run, stage), run, stage)
            self.clear()
            return None
        except (OSError, ValueError, RecursionError):
            return None

    def clear(self) -> None:
        """Delete all files: the run is over, or nothing is to be kept."""
        self._clear_unfinished()
        delete_oldest(self.folder.glob("*.state"), 0)

    def _read(self, path: Path, run: str, stage: int) -> KeptState | None:
        import numpy as np
        import torch

        with open(path, "rb") as file:
            size = int.from_bytes(file.read(4), "little")
            if size > _HEADER_MAX:
                return None
            header = msgspec.json.decode(file.read(size), type=_Header)
        count, sizes = len(header.hashes), header.sizes
        same = (header.run, header.stage, len(sizes)) == (run, stage, count)
        whole = 4 + size + sum(sizes) == path.stat().st_size
        if not same or not whole or not 0 < count <= PIECES_MAX:
            return None
        if min(sizes) < 0 or max(sizes) > PIECE_BYTES:
            return None
        data = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=0))[4 + size :]
        return KeptState(header.t, header.fingerprint, torch.split(data, sizes), tuple(header.hashes))

    def _clear_unfinished(self) -> None:
        for path in self.folder.glob(".*.unfinished"):
            path.unlink()


def kept_text(
    cache: StateCache,
    computer: Computer,
    run: str,
    stage: int,
    t: int,
    copy: KeptState | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> str:
    """Write the state of `stage` after iteration `t`, or after t + 1 if the worker has just taken that step,
    to the cache; returns a sentence on what was done, or why it was not, for the event log. Errors of the
    disk and of memory are such reasons, and are not raised. copy: of the state, if there is one: in a round
    the worker's own state is ahead of it. stopped: as in `StateCache.keep`."""
    try:
        state = copy or _snapshot(computer, t) or _snapshot(computer, t + 1)
        why = "the worker has another" if state is None else cache.keep(run, stage, state, stopped)
    except OSError as error:
        why = words_of(error)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError where memory ends
        why = str(error) or "memory is used up"
    if why or state is None:
        return f"the state of stage {stage} is not kept on this machine's disk: {why}"
    return f"the state of stage {stage} after iteration {state.t} is kept on this machine's disk"


def _snapshot(computer: Computer, t: int) -> KeptState | None:
    found = computer.run(Snapshot(t))
    return None if found.error else KeptState(t, found.fingerprint, found.outputs, found.hashes)


def _bytes_of(piece: object) -> memoryview:
    """Bytes of a piece (flat uint8 tensor), not a copy."""
    tensor: torch.Tensor = piece  # type: ignore[assignment]
    return tensor.contiguous().numpy().data
