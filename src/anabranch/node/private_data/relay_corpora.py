"""Private corpora of a local swarm's relays, prepared when its run directory is made.

A corpus that is prepared here, or cut off a larger one, lies in the relay's folder, in `private/`. Else the
file `private-data` there has the path of the relay's corpus.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import DataSection, RunConfig, load_run_file, relays_by_stage
from anabranch.errors import UserError, os_errors_named

#: File with the path of a relay's private corpus, and folder of one that was made for it, in the relay's own.
PATH_FILE, FOLDER = "private-data", "private"
OPTION = "--private-data"


def check_private(run: RunConfig, given: Sequence[Path]) -> None:
    """Raise UserError unless the private data that are `given` for a local swarm can be those of its relays:
    as many as relays, or one to be cut, in a run on private data."""
    relays = sum(relays_by_stage(run))
    if not run.data.private:
        if given:
            raise UserError(f"{OPTION}: this run's data are not private: set data.private, or leave it out")
        return
    if not given:
        raise UserError(
            f"data.private: give the relays data of their own with {OPTION} DIR..., one folder of text or "
            f"corpus for each of the {relays} relays, or one for all, which is cut into {relays} parts"
        )
    if len(given) not in (1, relays):
        raise UserError(f"{OPTION} names {len(given)} folders for {relays} relays: name {relays}, or one")
    for path in given:
        if not path.exists():
            raise UserError(f"{OPTION} {path}: there is no such file or folder")


def give_private(
    directory: RunDirectory,
    relays: Sequence[str],
    given: Sequence[Path],
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Give each of the `relays` of a new run directory, by name, its private corpus: of the text or corpus
    `given` for it, or a part of the only one. tell: gets a sentence. Raises UserError if one cannot be
    used."""
    from anabranch.data.corpus import MANIFEST, Corpus, materialise, open_corpus, write_part
    from anabranch.data.private import open_private

    run = load_run_file(directory.run_file)
    tokenizer, vocabulary = open_corpus(directory.corpus).tokenizer_hash, run.model.vocab_size
    assert vocabulary is not None  # the run's founder filled it in
    section = DataSection(source="text", tokenizer=str(directory.corpus / "tokenizer.json"))

    def corpus_of(path: Path, folder: Path) -> Corpus:
        """Corpus at `path`, or one prepared in `folder` of the text there."""
        if (path / MANIFEST).is_file():
            open_private(path, run, tokenizer, vocabulary)  # its parts would not show masks and sources
            return open_corpus(path)
        return materialise(replace(section, path=str(path)), folder)

    parts = []
    with tempfile.TemporaryDirectory() as temporary, os_errors_named("cannot prepare private data"):
        whole = corpus_of(given[0], Path(temporary)) if len(given) == 1 < len(relays) else None
        for number, name in enumerate(relays):
            home = directory.peer(name)
            if whole is not None:
                corpus = write_part(whole, number, len(relays), home / FOLDER)
            else:
                corpus = corpus_of(given[number], home / FOLDER)
            open_private(corpus.directory, run, tokenizer, vocabulary)
            if corpus.directory != home / FOLDER:
                (home / PATH_FILE).write_text(str(corpus.directory.resolve()), "utf-8")
            parts.append(f"{name} {corpus.train.tokens:,}")
    tell(f"private data, tokens to train on: {', '.join(parts)}")


def private_options(directory: RunDirectory, name: str) -> list[str]:
    """Options of `anabranch join` with which the relay `name` of a local swarm takes part on its private
    corpus; [] if it has none."""
    home = directory.peers_path / name
    if (home / FOLDER).is_dir():
        return [OPTION, str(home / FOLDER)]
    path = home / PATH_FILE
    return [OPTION, path.read_text("utf-8")] if path.is_file() else []
