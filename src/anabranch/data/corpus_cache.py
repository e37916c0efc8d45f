"""Cache of tokenized corpora by content: the same text with the same tokenizer settings is tokenized once.

A corpus is kept in a folder named by the hash of its text and of the settings that determine its tokens. Its
files are hard links where that is possible: they take no room while a run has them, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers
from blake3 import blake3

from anabranch.config import DataSection
from anabranch.data.sources import Documents
from anabranch.data.tokenizers import tokenizer_file

#: Environment variable with the folder of the cache, or "off".
CACHE_VARIABLE, OFF = "ANABRANCH_CORPORA", "off"
#: Bytes of text from which a corpus is kept: smaller ones are tokenized within a few seconds.
LEAST_BYTES = 1 << 20
#: Corpora that are kept, the ones used last; a plain choice. Other folders in the cache's are not its own.
KEPT, KEY = 8, re.compile("[0-9a-f]{64}")


class CorpusCache:
    """Tokenized corpora in `folder`, by key (`content_key`). Methods raise nothing if the folder cannot be
    read or written: the corpus is tokenized again then."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def take(self, key: str, names: Sequence[str], directory: Path) -> bool:
        """Link or copy the files `names` of a kept corpus into `directory`, and mark it as just used. False
        if one of them is missing; then no file of these names is left in `directory`."""
        kept = self.folder / key
        try:
            for name in names:
                _link(kept / name, directory / name)
            os.utime(kept)
        except OSError:
            for name in names:
                (directory / name).unlink(missing_ok=True)
            return False
        return True

    def put(self, key: str, names: Sequence[str], directory: Path) -> None:
        """Keep the files `names` of the corpus in `directory` under `key`, in place of what was there; then
        delete all but the `KEPT` corpora used last. Nothing is raised if the folder cannot be written."""
        unfinished = self.folder / f".{key}.{os.getpid()}.unfinished"
        with contextlib.suppress(OSError):
            self.forget(key)
            unfinished.mkdir(parents=True)
            for name in names:
                _link(directory / name, unfinished / name)
            unfinished.rename(self.folder / key)
            kept = [path for path in self.folder.iterdir() if KEY.fullmatch(path.name)]
            for old in sorted(kept, key=lambda path: -path.stat().st_mtime)[KEPT:]:
                shutil.rmtree(old, ignore_errors=True)
        shutil.rmtree(unfinished, ignore_errors=True)

    def forget(self, key: str) -> None:
        shutil.rmtree(self.folder / key, ignore_errors=True)


def default_cache() -> CorpusCache | None:
    """Cache of this user, `~/.anabranch/corpora` unless the environment names another; None if it is off."""
    named = os.environ.get(CACHE_VARIABLE, "")
    if named == OFF:
        return None
    return CorpusCache(Path(named).expanduser() if named else Path.home() / ".anabranch" / "corpora")


def content_key(section: DataSection, documents: Documents, report: Callable[[str, int, int], None]) -> str:
    """Hash of the documents' text and of everything else that determines the tokens. report(activity, done,
    total) is called after each document, with bytes of the source (`corpus.Progress`). Raises ConfigError if
    the text cannot be read; an unreadable tokenizer is refused later."""
    digest = blake3()
    trained = section.tokenizer in ("auto", "bpe")
    settings = [section.tokenizer, section.vocab_size if trained else 0, tokenizers.__version__]
    if not trained and section.tokenizer != "bytes":
        with contextlib.suppress(OSError):  # an unreadable file is refused where it is opened
            settings[0] = blake3(tokenizer_file(section).read_bytes()).hexdigest()
    if section.format != "text" or section.packing != "stream" or section.mixture:
        settings += [section.format, section.packing, list(section.mixture), list(section.weights)]
    digest.update(json.dumps(settings).encode())
    for document in documents:
        text = document.text.encode()
        digest.update(len(text).to_bytes(8, "little") + text)
        for piece in document.pieces:
            digest.update(bytes((piece.counts, piece.marker)) + len(piece.text).to_bytes(8, "little"))
        report("reading the corpus", document.position, documents.size_bytes)
    return digest.hexdigest()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
