"""Choice of the checkpoint from which a run is resumed, and refusals where none is good.

Training never begins again at step 1 because of damage: the run stops, and nothing is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.checkpoint.directory import RunDirectory
from anabranch.errors import UserError
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Checkpoint
from anabranch.protocol.consensus.log_replay import LogReplay
from anabranch.protocol.log.records import entry_hash
from anabranch.protocol.peer.bootstrap import SavedCheckpoint


class SavedCheckpoints:
    """Checkpoints in a run directory, compared with the commit log in it. history: state of the run after
    that log.

    lines: of the log. alone: True if the log has no other voters, from which lost entries could come back.
    notices: sentences for the user on damaged checkpoints and on where the run goes on.
    """

    def __init__(
        self, directory: RunDirectory, history: LogReplay, lines: Iterable[bytes], alone: bool
    ) -> None:
        self._directory, self._history, self._alone = directory, history, alone
        self._lines = lines
        self.notices: list[str] = []

    def newest_good(self) -> SavedCheckpoint | None:
        """Newest undamaged checkpoint of a step that is in the log's history; `notices` get what is wrong
        with others. None if the run goes on without: other voters have the log, or no checkpoint was written
        yet and training begins at step 1. Raises UserError if this is the only voter and checkpoints or log
        entries are damaged or lost so that no checkpoint is good."""
        directory, history = self._directory, self._history
        for t in reversed(directory.checkpoints()):
            try:
                base, found = self._read(t)
            except UserError as error:
                self.notices.append(f"damaged checkpoint: {str(error).partition('; ')[0]}")
                continue
            if t == 0 or history.leads_to(t, base):
                if self.notices:
                    self.notices.append(f"the run goes on from the checkpoint of step {t}")
                return found
            if self._alone and base not in map(entry_hash, self._lines):
                ends = f"it ends at step {history.t}, a checkpoint at step {t}"
                text = f"entries of {directory.log} are lost: {ends}"
                self.notices.append(text)  # else the checkpoint belongs to steps that were rolled back
        if not self._alone or (history.t == 0 and not self.notices):
            return None
        if self.notices or self._was_written():
            where = f"{directory.checkpoints_path} and {directory.log.name}"
            raise UserError(
                f"{'; '.join(self.notices) or f'{directory} has no checkpoint any more'}. The run reached "
                f"step {history.t}, and no good checkpoint is left: restore {where} from a copy, or train "
                f"anew with `anabranch start {directory.run_file} --run-dir NEW`. Nothing was changed"
            )
        self.notices.append(
            f"the run ended at step {history.t}, before its first checkpoint: it begins again at step 1"
        )
        return None

    def _read(self, t: int) -> tuple[str, SavedCheckpoint]:
        """Base and fingerprints of the checkpoint of step t, all of whose files are read for that. Raises
        UserError if it is damaged."""
        manifest = self._directory.manifest(t)
        for stage in manifest.stages:
            self._directory.read_stage(t, stage)
        fingerprints = tuple(manifest.stages[stage].fingerprint for stage in sorted(manifest.stages))
        return manifest.base, SavedCheckpoint(t, fingerprints)

    def _was_written(self) -> bool:
        """True if the event log tells of a checkpoint of step 1 or later; without any, all were lost."""
        return any(event.t > 0 for event in events_of(self._directory.events, Checkpoint))
