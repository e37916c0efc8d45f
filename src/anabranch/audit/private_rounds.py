"""Rounds of a run on private data, for `verify`: contributions that machines kept, and data of their owner.

Whose contribution counted, and its digest, is in the log. A file counts if its values have that digest. A
round that lacks one is a gap: the replay goes on from the next checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from anabranch.audit.log_check import LoggedRun
from anabranch.audit.run_inputs import Inputs
from anabranch.data.batches import Ids
from anabranch.data.private import OPTION, PrivateData, open_private
from anabranch.errors import UserError, words_of
from anabranch.observe.console.progress import progress
from anabranch.observe.wording import counted
from anabranch.protocol.log.records import Commit
from anabranch.protocol.rounds.plan import with_owners
from anabranch.train.adapters.lora import run_model
from anabranch.train.islands.kept_contributions import (
    BadFile,
    Kept,
    contribution_files,
    read_contribution,
    read_header,
)
from anabranch.train.model.interface import DTYPES, stage_layout
from anabranch.train.model.partition import partition
from anabranch.train.stage.run_objects import master_dtype

Place = tuple[int, int]
"""(Round, slot) of a contribution."""


@dataclass
class KeptRounds:
    """Contributions and private data at hand of the rounds of a run (`Reference.PrivateRounds`). For a run on
    its own corpus all is empty. whose: place -> machine that filled the slot. read: gives the values of a
    file; raises OSError, or BadFile if they do not have the digest in its header. commits: iteration ->
    commit. files: place -> file of the contribution that counts. owners: machines of which data are here.
    owned: machine -> its private data, of those whose contributions all name one corpus. made_of: place ->
    private data that the contribution names, of machines that had several corpora. lacking: round that cannot
    be taken again -> sentence on a contribution that is not here. fragile: the same for rounds that can be
    taken only if none before is left out: private data that are here give the contribution, but the slot
    carries state. checked: number of contributions that have the digest in the log. problems: sentences on
    files that are not what the log says."""

    whose: Mapping[Place, str] = field(default_factory=dict)
    read: Callable[[Path], Tensor] = lambda path: torch.empty(0)
    commits: Mapping[int, Commit] = field(default_factory=dict)
    files: dict[Place, Path] = field(default_factory=dict)
    owners: set[str] = field(default_factory=set)
    owned: dict[str, PrivateData] = field(default_factory=dict)
    made_of: dict[Place, PrivateData] = field(default_factory=dict)
    lacking: dict[int, str] = field(default_factory=dict)
    fragile: dict[int, str] = field(default_factory=dict)
    checked: int = 0
    problems: list[str] = field(default_factory=list)

    def step_rows(self, t: int, slot: int) -> Callable[[int, int], Ids] | None:
        data = self.data_of(t, slot)
        return None if data is None else data.step_rows

    def data_of(self, t: int, slot: int) -> PrivateData | None:
        """Private data of which the contribution of a slot to round t was made; None if they are not here."""
        return self.owned.get(self.whose.get((t, slot), "")) or self.made_of.get((t, slot))

    def contribution(self, t: int, slot: int) -> Tensor | None:
        path = self.files.get((t, slot))
        return None if path is None else self.read(path)

    def gaps(self, begin: int, end: int, checkpoints: Sequence[int]) -> dict[int, Commit | None]:
        """{first iteration of each gap: commit of the next checkpoint, with whose state the replay goes on};
        None for a gap without one, which ends the replay. begin: iteration from whose state the replay
        begins. end: last iteration that it takes. checkpoints: their steps, ascending."""
        found: dict[int, Commit | None] = {}
        reached = begin
        for t in sorted(self.lacking.keys() | self.fragile.keys()):
            if reached < t <= end and (found or t in self.lacking):
                after = next((each for each in checkpoints if each >= t), 0)
                found[t] = self.commits[after] if after else None
                reached = after or end
        return found

    @staticmethod
    def left_out(gaps: Mapping[int, Commit | None], end: int) -> list[int]:
        """Iterations that are in the gaps (as `gaps` returns them), in order; the iteration of the checkpoint
        that ends a gap is one of them, and a gap without a checkpoint goes to `end`."""
        spans = (range(t, (end if after is None else after.t) + 1) for t, after in gaps.items())
        return [t for span in spans for t in span]

    def notes(self, gaps: Mapping[int, Commit | None], end: int) -> list[str]:
        """Sentences for the report on the gaps of a replay up to `end`, and on which private data were
        used."""
        notes = []
        for t, after in gaps.items():
            last = end if after is None else after.t
            span = f"iteration {t} was" if last == t else f"iterations {t} to {last} were"
            then = "no checkpoint follows" if after is None else f"the checkpoint of step {last} follows"
            what = self.lacking.get(t) or self.fragile[t]
            notes.append(f"{span} not taken again, as {what} is not here; {then}")
        if self.owners:
            notes.append(f"inner steps of {counted(len(self.owners), 'machine')} were taken again")
        elif self.whose:
            notes.append(f"no inner step on private data was taken again: its owner can, with {OPTION}")
        theirs = [place for place in self.files if self.whose.get(place) in self.owners]
        if others := sum(self.data_of(*place) is None for place in theirs):
            what = f"{counted(others, 'contribution')} of theirs"
            notes.append(f"inner steps of {what} were not, as these name another corpus")
        return notes


def kept_rounds(
    inputs: Inputs, log: LoggedRun, span: range, folders: Iterable[Path], data: Sequence[Path]
) -> KeptRounds:
    """Contributions and private data for the iterations `span` of a run whose data are private; empty for
    another run. They are looked for in the peers' folders of the run directory and in `folders`; `data` are
    paths of private corpora. Shows progress. Raises UserError for a corpus that is not of this run, or that
    no contribution names, and for any corpus if the run's data are not private."""
    run = inputs.run
    if not run.data.private:
        if data:
            raise UserError(f"{OPTION}: the data of this run are not private: leave it out")
        return KeptRounds()
    spec = partition(inputs.model, run.pipeline)[1]
    layout = stage_layout(run_model(run, inputs.model, torch.device("cpu")), spec)
    dtype = master_dtype(DTYPES[run.compute.dtype])
    commits = {commit.t: commit for commit in log.history.commits}
    kept = KeptRounds(_owners(log), lambda path: read_contribution(path, layout, dtype)[1], commits)
    by_place: dict[Place, list[tuple[Path, Kept]]] = {}
    for path, header in _headers([inputs.directory.peers_path, *folders], log.genesis.run, kept.problems):
        by_place.setdefault((header.t, header.slot), []).append((path, header))
    headers = [header for of_place in by_place.values() for _, header in of_place]
    corpora: dict[str, set[str]] = {}
    for header in headers:
        corpora.setdefault(header.peer, set()).add(header.corpus)
    for corpus in data:
        opened = open_private(corpus, run, log.genesis.tokenizer_hash, inputs.model.vocab_size)
        peers = {peer for peer, names in corpora.items() if opened.fingerprint in names}
        if not peers:
            raise UserError(
                f"{OPTION} {corpus}: no contribution that is here was made of this corpus; name the folder "
                "of its machine's contributions with --contributions"
            )
        kept.owners |= peers
        kept.owned |= {peer: opened for peer in peers if len(corpora[peer]) == 1}
        for header in headers:
            place = header.t, header.slot
            counts = _digest(commits.get(header.t), header.slot) in ("", header.digest)
            if header.corpus == opened.fingerprint and header.peer == kept.whose.get(place) and counts:
                kept.made_of[place] = opened
    with progress("checking the contributions", len(span), unit="iterations") as advance:
        for t in span:
            if t in log.history.plans and commits[t].verdict == "step":
                _check_round(kept, log, commits[t], by_place)
            advance(1.0)
    return kept


def _digest(commit: Commit | None, slot: int) -> str:
    """Digest of a slot's contribution in a round's commit; "" if it has none."""
    known = commit.stages[1].contributions if commit is not None and len(commit.stages) > 1 else ()
    return known[slot] if 0 <= slot < len(known) else ""


def _owners(log: LoggedRun) -> dict[Place, str]:
    """{(round, slot): machine that filled the slot}, by the round's commit or, for a slot that does not
    count, by its plan."""
    found: dict[Place, str] = {}
    for commit in log.history.commits:
        plan = log.history.plans.get(commit.t, ())
        owned = enumerate(with_owners(plan, commit))
        found |= {(commit.t, k): slot.peer for k, slot in owned if slot.peer}
    return found


def _headers(folders: Iterable[Path], run: str, problems: list[str]) -> Iterator[tuple[Path, Kept]]:
    """Yield (file, header) of each contribution in `folders` to the run with the id `run`. Files that cannot
    be read as contributions are entered in `problems`; those to other runs are left out."""
    for path in contribution_files(list(folders)):
        try:
            header = read_header(path)
        except (BadFile, OSError) as error:
            problems.append(f"{path}: {error if isinstance(error, BadFile) else words_of(error)}")
            continue
        if header.run == run:
            yield path, header


def _check_round(
    kept: KeptRounds, log: LoggedRun, commit: Commit, files: Mapping[Place, list[tuple[Path, Kept]]]
) -> None:
    """Find the contribution of each slot that counts in a round among `files`, and check its values against
    the log. Enters in `kept` the file, and in `problems` what is wrong. Without a file the round is entered
    in `lacking`, or in `fragile` if private data that are here give the contribution but the slot carries
    state; in neither if they give it alone."""
    t, stage = commit.t, commit.stages[1]
    for slot, owner in enumerate(stage.owners):
        if owner < 0:
            continue
        peer = stage.members[owner]
        where = f"the contribution of slot {slot} to round {t}, by {name_of(log, peer)}"
        logged = _digest(commit, slot)
        if not logged:
            kept.problems.append(f"{where}: the log does not have its digest")
        found = [(path, each) for path, each in files.get((t, slot), ()) if each.peer == peer]
        same = [path for path, each in found if each.digest == logged]
        if intact := _intact(kept, same, where):
            kept.files[t, slot] = intact
            kept.checked += 1
        elif found and not same and not log.history.rolled_back:
            kept.problems.append(f"{where}: {found[0][0]} is not the one that the log has")
        carries = bool(log.history.plans[t][slot].carried)
        # The state that a slot of a machine with several corpora carries may be of one that is not here.
        if not intact and (kept.data_of(t, slot) is None or (carries and peer not in kept.owned)):
            kept.lacking.setdefault(t, where)
        elif not intact and carries:
            kept.fragile.setdefault(t, where)


def _intact(kept: KeptRounds, paths: Sequence[Path], where: str) -> Path | None:
    """First of the files whose values have the digest in the file's own header, which the caller has compared
    with the log's; None if none has. Files before it that have not, or cannot be read, are entered in
    `kept.problems`. where: words for the contribution, for messages."""
    for path in paths:
        try:
            kept.read(path)
            return path
        except (BadFile, OSError) as error:
            why = error if isinstance(error, BadFile) else words_of(error)
            kept.problems.append(f"{where}: {path}: {why}")
    return None


def name_of(log: LoggedRun, peer: str) -> str:
    """Name of a machine as its owner chose it, with the beginning of its id; that beginning alone if it has
    no name, or is no member at the end of the log."""
    members = log.history.membership.members
    name = members[peer].name if peer in members else ""
    return f"{name} ({peer[:8]})" if name else peer[:8]
