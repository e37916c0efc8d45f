"""Run directory: layout on disk of one run, and its checkpoints.

    runs/NAME/
      version                     layout version, one number
      run.toml                    the run file
      corpus/                     token files and manifest (data/corpus.py)
      events.jsonl                event log (observe/event_log.py)
      log.jsonl                   commit log, kept by the voters
      checkpoints/step-000400/    state after step 400: one file per stage, and manifest.json
      peers/NAME/                 key and incarnation of each peer on this machine
      frozen/                     frozen weights by hash, of a run that trains adapters

A checkpoint is written under a temporary name, flushed to the disk, then renamed: a folder named `step-...`
is complete. `docs/reference/run-directory.md` documents these files and those of other modules.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from anabranch import RUN_DIRECTORY_VERSION
from anabranch.errors import UserError, os_errors_named
from anabranch.operating_system import flush_folder, lock, write_atomically

#: Version of a checkpoint's manifest.
CHECKPOINT_VERSION = 1
#: Piece of a snapshot: any object with the buffer protocol.
Piece = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

_STEP = re.compile(r"step-(\d{6,})")
_UNFINISHED = ".unfinished-"


class StageFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Manifest entry of a stage's file in a checkpoint. blake3: of its bytes. fingerprint: of its state."""

    name: str
    size_bytes: int
    blake3: str
    fingerprint: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Manifest of a checkpoint. version: of this format. t: step after which the state is. `base`: hash of
    the log record (`Genesis`, `Commit` or `Rollback`) that led to the state. stages: stage -> its file."""

    version: int
    run_id: str
    t: int
    base: str
    stages: dict[int, StageFile]


class RunDirectory:
    """Directory of a run, made by `create` or `open` (the constructor itself checks nothing); paths are
    attributes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run_file = self.path / "run.toml"
        self.corpus = self.path / "corpus"
        self.events = self.path / "events.jsonl"
        self.log = self.path / "log.jsonl"
        self.checkpoints_path = self.path / "checkpoints"
        self.peers_path = self.path / "peers"
        self.frozen = self.path / "frozen"
        self._version_file = self.path / "version"
        self._folders = (self.corpus, self.checkpoints_path, self.peers_path, self.frozen)

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def create(cls, path: str | Path) -> RunDirectory:
        """Create a run directory. Raises UserError if something but an empty folder is at `path`, or it
        cannot be written; a part of a new one is removed again."""
        directory = cls(path)
        if directory.path.exists() and (not directory.path.is_dir() or any(directory.path.iterdir())):
            raise UserError(
                f"{path} exists already; continue it with `anabranch resume {path}`, "
                "give the run another name, or remove the folder"
            )
        with os_errors_named(f"cannot create the run directory {path}"):
            directory.checkpoints_path.mkdir(parents=True)
            try:
                directory.peers_path.mkdir()
                write_atomically(directory._version_file, f"{RUN_DIRECTORY_VERSION}\n".encode())
            except BaseException:  # a partial directory, which is new, would block the next attempt
                shutil.rmtree(directory.path, ignore_errors=True)
                raise
        return directory

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open a run directory after a check of its version and files; takes no lock. Raises UserError if it
        is none or of another version, or for a link to a file or a special file in it."""
        directory = cls(path)
        try:
            if not directory._version_file.is_file():
                raise FileNotFoundError
            version = directory._version_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            raise UserError(
                f"{path} is not a run directory (it has no file `version`); give the path that "
                "`anabranch train` or `anabranch start` printed"
            ) from None
        if version != str(RUN_DIRECTORY_VERSION):
            raise UserError(
                f"{path} is a run directory of version {version[:20]}, but this program reads version "
                f"{RUN_DIRECTORY_VERSION}; use the release that made it"
            )
        directory._check_files()
        return directory

    def _check_files(self) -> None:
        """Raise UserError if an entry is a link to a file, or neither a file nor a folder. A directory may
        come from somebody else. Reading a FIFO in it would never end, and a symbolic link would let it name
        any file of this machine to be read, appended to or replaced. A folder that its owner has moved to
        another disk may be a link. A folder that its leader renames or removes meanwhile is passed over."""
        waiting = [self.path]
        while waiting:
            folder = waiting.pop()
            with os_errors_named(f"cannot read {folder}"):
                try:
                    entries = list(os.scandir(folder))
                except FileNotFoundError:
                    continue  # a checkpoint that is finished or pruned
                for entry in entries:
                    if entry.is_dir():
                        ours = folder != self.path or self.path / entry.name in self._folders
                        if ours and not (entry.is_symlink() and folder != self.path):
                            waiting.append(folder / entry.name)
                    elif not entry.is_file(follow_symlinks=False):
                        kind = "a symbolic link" if entry.is_symlink() else "not a file"
                        raise UserError(
                            f"{folder / entry.name} is {kind}: a run directory has only files and folders; "
                            "remove it, or copy the file itself there"
                        )

    @contextmanager
    def led(self) -> Iterator[None]:
        """Context manager that holds the lock of the process that leads the run, since two such processes
        would write one log. The lock ends with the context, or with the process. Raises UserError at once if
        another process holds it."""
        with open(self._version_file, "rb") as file:
            try:
                lock(file.fileno())
            except OSError:
                raise UserError(
                    f"another process leads the run in {self.path} already; end that one (Ctrl+C) first"
                ) from None
            yield

    def peer(self, name: str) -> Path:
        """Folder of a peer on this machine (its key and incarnation). If missing it is created, readable by
        its owner only, as it holds a private key."""
        path = self.peers_path / name
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    def checkpoint_path(self, t: int) -> Path:
        """Path of the folder of the checkpoint after step t, whether there is one or not."""
        return self.checkpoints_path / f"step-{t:06}"

    def checkpoints(self) -> list[int]:
        """Numbers of the steps with a checkpoint on disk, ascending; by the folders' names, whose contents
        are not checked."""
        if not self.checkpoints_path.is_dir():
            return []
        found = (_STEP.fullmatch(entry.name) for entry in self.checkpoints_path.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def latest_checkpoint(self) -> int:
        """Number of the step of the last of `checkpoints`. Raises UserError if there is none."""
        steps = self.checkpoints()
        if not steps:
            raise UserError(
                f"{self.path} has no checkpoint yet; the first is written after checkpoint.every steps"
            )
        return steps[-1]

    def write_checkpoint(
        self, t: int, base: str, run_id: str, stages: Mapping[int, tuple[Iterable[Piece], str]]
    ) -> Path:
        """Write the state after step t atomically; returns its folder. base: hash of the log record that led
        to the state. stages: stage -> (pieces of its snapshot in order, fingerprint). An existing checkpoint
        of t is replaced. Raises UserError if it cannot be written."""
        final = self.checkpoint_path(t)
        temporary = self.checkpoints_path / f"{_UNFINISHED}{final.name}"
        replaced = self.checkpoints_path / f"{_UNFINISHED}replaced-{final.name}"
        advice = f"make room, then `anabranch resume {self.path}`"
        with os_errors_named(f"cannot write the checkpoint {final}", advice):
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(replaced, ignore_errors=True)
            try:
                temporary.mkdir(parents=True)
                files = {
                    stage: _write_stage(temporary / f"stage-{stage}.safetensors", pieces, fingerprint)
                    for stage, (pieces, fingerprint) in sorted(stages.items())
                }
                manifest = CheckpointManifest(
                    version=CHECKPOINT_VERSION, run_id=run_id, t=t, base=base, stages=files
                )
                text = json.dumps(msgspec.to_builtins(manifest, str_keys=True), indent=2) + "\n"
                write_atomically(temporary / "manifest.json", text.encode())
            except OSError:
                shutil.rmtree(temporary, ignore_errors=True)  # the commit log needs the room
                raise
            if final.exists():
                os.rename(final, replaced)
            os.rename(temporary, final)
            shutil.rmtree(replaced, ignore_errors=True)
            flush_folder(self.checkpoints_path)
        return final

    def prune(self, keep: int, newest: int | None = None) -> list[int]:
        """Delete unfinished checkpoints, and of those of steps up to `newest` (None: of every step) all but
        the last `keep`, which may be 0; returns the steps whose checkpoint was deleted, ascending. Later
        checkpoints, which may be damaged or rolled back, stay."""
        for leftover in self.checkpoints_path.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        counted = [t for t in self.checkpoints() if newest is None or t <= newest]
        old = counted[:-keep] if keep > 0 else counted
        for t in old:
            # Renamed first, so that no half-deleted folder has the name of a checkpoint.
            doomed = self.checkpoints_path / f"{_UNFINISHED}delete-{t:06}"
            os.rename(self.checkpoint_path(t), doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        return old

    def manifest(self, t: int) -> CheckpointManifest:
        """Manifest of the checkpoint of step t. Raises UserError (missing, damaged, another version)."""
        path = self.checkpoint_path(t) / "manifest.json"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            listed = ", ".join(map(str, self.checkpoints())) or "none"
            raise UserError(f"{path}: no such checkpoint; checkpoints of this run: {listed}") from None
        except OSError as error:
            raise self._damaged(t, path, error.strerror or str(error)) from None
        try:
            manifest = msgspec.json.decode(data, type=CheckpointManifest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._damaged(t, path, f"is not a manifest ({error})") from None
        if manifest.version != CHECKPOINT_VERSION:
            raise UserError(
                f"{path}: a checkpoint of version {manifest.version}, but this program reads version "
                f"{CHECKPOINT_VERSION}; use the release that wrote it"
            )
        if manifest.t != t:
            raise self._damaged(t, path, f"is of step {manifest.t}")
        if any("\0" in entry.name for entry in manifest.stages.values()):
            raise self._damaged(t, path, "names a file that no file system has")
        return manifest

    def read_stage(self, t: int, stage: int) -> bytes:
        """Read one stage's snapshot bytes from the checkpoint of step t, checked for size and hash. Raises
        UserError if it is missing or damaged, with what to use instead."""
        entry = self.manifest(t).stages.get(stage)
        if entry is None:
            raise UserError(f"{self.checkpoint_path(t)} has no stage {stage}; the run had fewer stages")
        path = self.checkpoint_path(t) / entry.name
        if path.name != entry.name:
            raise self._damaged(t, path, "has a name that leads out of its folder")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise self._damaged(t, path, error.strerror or str(error)) from None
        if len(data) != entry.size_bytes:
            raise self._damaged(t, path, f"has {len(data)} bytes instead of {entry.size_bytes}")
        if blake3.blake3(data).hexdigest() != entry.blake3:
            raise self._damaged(t, path, "does not have the hash in its manifest")
        return data

    def _damaged(self, t: int, path: Path, problem: str) -> UserError:
        earlier = [step for step in self.checkpoints() if step < t]
        if earlier:
            advice = f"move {self.checkpoint_path(t)} away to go on from the checkpoint of step {earlier[-1]}"
        else:
            advice = "there is no earlier checkpoint: restore this one from a copy, or start the run again"
        return UserError(f"{path}: {problem}; {advice}")


def _write_stage(path: Path, pieces: Iterable[Piece], fingerprint: str) -> StageFile:
    digest = blake3.blake3()
    size = 0
    with open(path, "wb") as file:
        for piece in pieces:
            view = memoryview(piece)  # type: ignore[arg-type]  # Python 3.10 types: numpy arrays are buffers
            file.write(view)
            digest.update(view)
            size += view.nbytes
        file.flush()
        os.fsync(file.fileno())
    return StageFile(name=path.name, size_bytes=size, blake3=digest.hexdigest(), fingerprint=fingerprint)
