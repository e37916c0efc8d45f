"""Private data of this machine, in a run whose rounds are on such data, and what it keeps of its
contributions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.config import RunConfig
from anabranch.errors import UserError, words_of
from anabranch.operating_system import lower_priority
from anabranch.protocol.log.records import Genesis

if TYPE_CHECKING:
    from torch import Tensor

    from anabranch.data.batches import Ids
    from anabranch.data.private import PrivateData
    from anabranch.train.islands.kept_contributions import ContributionFolder, Kept

#: Folder, in a peer's own, of the contributions that it keeps.
CONTRIBUTIONS = "contributions"


@dataclass(frozen=True)
class OwnFolders:
    """Folders of a machine's private data. corpus: prepared, None: it has none. contributions: kept ones, of
    at most `most_bytes` together. tell: prints a sentence for the user. nice: priority with which they are
    written (`operating_system.lower_priority`)."""

    corpus: Path | None
    contributions: Path
    most_bytes: int
    tell: Callable[[str], None] = lambda text: None
    nice: int = 0


class OwnedData:
    """Sequences of this machine's private corpus, for its worker, and the contributions made of them, which a
    thread of its own writes."""

    def __init__(
        self, data: PrivateData, kept: ContributionFolder, run: str, peer: str, folders: OwnFolders
    ) -> None:
        """data: the private corpus, opened for the run. kept: folder of the kept contributions. run, peer:
        ids of the run and of this peer. folders: for its `tell` and `nice`."""
        self._data, self._kept = data, kept
        self._run, self._peer, self._tell = run, peer, folders.tell
        self._failed = False
        # A pool's thread ends its work before the process ends.
        self._writer = ThreadPoolExecutor(1, "anabranch kept", lower_priority, (folders.nice,))
        self._written: Future[None] | None = None

    def step_rows(self, slot: int, step: int) -> Ids:
        return self._data.step_rows(slot, step)

    def keep(self, t: int, slot: int, digest: str, change: Tensor) -> None:
        """Wait until the former contribution is written, then begin to write this one and return, so that the
        exchange need not wait for the disk. t, slot: round and slot of the contribution. digest: its hash in
        the log. change: the contribution, which the caller must not change any more."""
        from anabranch.train.islands.kept_contributions import Kept

        about = Kept(
            run=self._run, t=t, slot=slot, peer=self._peer, corpus=self._data.fingerprint, digest=digest,
            elements=change.numel(), dtype=str(change.dtype),
        )  # fmt: skip
        self.wait()
        self._written = self._writer.submit(self._write, about, change)

    def wait(self) -> None:
        """Wait until the last contribution given to `keep` is written or left out; nothing without one."""
        if self._written is not None:
            self._written.result()

    def _write(self, about: Kept, change: Tensor) -> None:
        """Write the contribution `change` with its description `about`. If the disk refuses it, or it is too
        large for the folder, the user is told, the first time only: the run goes on, and `verify` cannot
        check the round."""
        try:
            why = self._kept.keep(about, change)
            advice = "let it take more (--keep), or make room on its disk"
        except OSError as error:
            why, advice = words_of(error), "make room or repair the disk"
        if why and not self._failed:
            self._failed = True
            self._tell(
                f"the contribution to round {about.t} cannot be kept: {why}: `verify` will not check this "
                f"round; {advice}"
            )


def own_data_of(
    folders: OwnFolders, run: RunConfig, genesis: Genesis, peer: str, relay: bool
) -> OwnedData | None:
    """Private data with which a machine takes part in the run of `genesis`; None if it needs none. peer: its
    id. relay: False for a data node or an auditor. Raises UserError if it needs data and has none, if its
    data do not fit the run, or if it has some and the run takes none."""
    from anabranch.data.private import OPTION, open_private
    from anabranch.train.islands.kept_contributions import ContributionFolder

    if not run.data.private:
        if folders.corpus is not None:
            raise UserError(f"{OPTION}: this run sends its machines the tokens to train on: leave it out")
        return None
    if not relay:
        if folders.corpus is not None:
            raise UserError(f"{OPTION} is for machines that take inner steps: leave it out here")
        return None
    if folders.corpus is None:
        raise UserError(
            "this run trains on data that stay with its machines (data.private): join with "
            f"{OPTION} FOLDER, a corpus of your own text, prepared with the run's tokenizer"
        )
    assert run.model.vocab_size is not None  # the run's founder filled it in
    data = open_private(folders.corpus, run, genesis.tokenizer_hash, run.model.vocab_size)
    kept = ContributionFolder(folders.contributions, folders.most_bytes)
    folders.tell(
        f"private data: {data.windows:,} windows of {run.batch.sequence} tokens, {data.rows} a step; they "
        f"stay here, and contributions are kept in {folders.contributions}"
    )
    return OwnedData(data, kept, genesis.run, peer, folders)
