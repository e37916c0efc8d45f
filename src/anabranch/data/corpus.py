"""Corpus of a run: tokens of a text source, written once into the run directory and identified by hash.

Four files lie in a corpus directory:

    train.tokens     ids of the training documents, each followed by the separator; little-endian integers
    heldout.tokens   the same for every 20th document
    tokenizer.json   the tokenizer (`data/tokenizers.py`)
    manifest.json    version, counts, hashes, source of the text; written last: a directory without it is
                     unfinished and is written again

The *fingerprint* is the hash of everything that determines a batch: token files, token width and tokenizer.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from anabranch.config import DataSection
from anabranch.data.sources import Document, Documents, open_documents
from anabranch.data.tokenizers import TextTokenizer, write_tokenizer
from anabranch.errors import ConfigError

FORMAT = "anabranch-corpus"
VERSION = 1
#: Distance between held-out documents: 5 % of all. A plain choice; part of the corpus format.
HELD_OUT_EVERY = 20
TRAIN, HELD_OUT, TOKENIZER, MANIFEST = "train.tokens", "heldout.tokens", "tokenizer.json", "manifest.json"
#: Files that the manifest lists with their hashes.
HASHED_FILES = (TRAIN, HELD_OUT, TOKENIZER)
#: Characters of one batch of documents for the tokenizer: enough to keep its threads busy.
GROUP_CHARACTERS = 1 << 20

_ADVICE = "copy the corpus again from another data node, or start a new run directory"

#: progress(activity, bytes of the source done, bytes of the source in all)
Progress = Callable[[str, int, int], None]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class CorpusFile:
    """File of a corpus: name below the corpus directory, size, and BLAKE3 (hex) of the bytes."""

    name: str
    size_bytes: int
    hash: str


@dataclass(frozen=True)
class Part:
    """Counts of the training or the held-out part; `text_bytes` are UTF-8 bytes without separators."""

    documents: int
    tokens: int
    text_bytes: int


class Corpus:
    """Opened corpus directory.

    `train_tokens` and `held_out_tokens` are read-only memory maps (tokens,) of uint16 or uint32;
    `token_bytes` is int64 (vocab_size,), the number of UTF-8 bytes that each id stands for.
    """

    def __init__(self, directory: Path, manifest: _Manifest) -> None:
        self.directory = directory
        self.fingerprint = manifest.fingerprint
        self.source = manifest.source
        self.train = manifest.train
        self.held_out = manifest.held_out
        self.tokenizer = TextTokenizer(directory / TOKENIZER)
        self.tokenizer_hash = self.tokenizer.hash
        self.vocab_size = self.tokenizer.vocab_size
        self.separator = self.tokenizer.separator
        self.token_bytes = self.tokenizer.token_bytes
        self.train_tokens = _open_tokens(directory / TRAIN, manifest.token_type)
        self.held_out_tokens = _open_tokens(directory / HELD_OUT, manifest.token_type)

def materialise(
    section: DataSection,
    directory: Path,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Corpus:
    """Write the corpus that `section` describes into `directory`, or open it if it already exists.

    tell: gets sentences about files that were left out or are not UTF-8. Raises ConfigError if the source
    cannot be read, has fewer than 20 documents or too little text for the vocabulary, or if the directory
    holds a corpus of other settings.
    """
    if (directory / MANIFEST).is_file():
        return _open_same(section, directory)
    report = progress or (lambda activity, done, total: None)
    documents = open_documents(section)
    directory.mkdir(parents=True, exist_ok=True)

    with _unfinished(directory / TOKENIZER) as path:
        write_tokenizer(section, _training_texts(documents, report), path)
    tokenizer = TextTokenizer(directory / TOKENIZER)
    token_type = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

    with _unfinished(directory / TRAIN) as train_path, _unfinished(directory / HELD_OUT) as held_out_path:
        with train_path.open("wb") as train_file, held_out_path.open("wb") as held_out_file:
            train = _PartWriter(train_file, tokenizer, token_type)
            held_out = _PartWriter(held_out_file, tokenizer, token_type)
            for number, document in enumerate(documents):
                (held_out if is_held_out(number) else train).add(document.text)
                report("tokenizing", document.position, documents.size_bytes)
            parts = train.finish(), held_out.finish()
        _check_large_enough(section, documents, tokenizer, parts[0].documents + parts[1].documents)

    for remark in documents.remarks():
        tell(remark)
    python = {"python": platform.python_version()} if section.source == "stdlib" else {}
    manifest = _Manifest(
        token_type="u2" if token_type.itemsize == 2 else "u4",
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        train=parts[0],
        held_out=parts[1],
        source={**asdict(section), **python},
        files=[
            CorpusFile(name, (directory / name).stat().st_size, _hash_file(directory / name))
            for name in HASHED_FILES
        ],
    )
    manifest.fingerprint = manifest.computed_fingerprint()
    with _unfinished(directory / MANIFEST) as path:
        path.write_text(json.dumps(msgspec.to_builtins(manifest), indent=1) + "\n", encoding="utf-8")
    return Corpus(directory, manifest)


def _check_large_enough(
    section: DataSection, documents: Documents, tokenizer: TextTokenizer, count: int
) -> None:
    if count < HELD_OUT_EVERY:
        raise ConfigError(
            f"the corpus is too small: {documents.label} has {count} document(s) with text, and at least "
            f"{HELD_OUT_EVERY} are needed, of which every {HELD_OUT_EVERY}th is held out; "
            "set data.source and data.path to more text"
        )
    if section.tokenizer in ("auto", "bpe") and tokenizer.vocab_size < section.vocab_size:
        raise ConfigError(
            f"the corpus is too small for data.vocab_size = {section.vocab_size}: a BPE trained on "
            f"{documents.label} has {tokenizer.vocab_size} tokens; set data.vocab_size to "
            f"{tokenizer.vocab_size} or less, or data.source and data.path to more text"
        )


def open_corpus(directory: Path) -> Corpus:
    """Open a corpus directory after checking every file against its hash.

    Raises ConfigError if a file is missing or damaged, or the directory is of another version.
    """
    manifest = _read_manifest(directory)
    for file in manifest.files:
        _check_file(directory / file.name, file)
    if manifest.fingerprint != manifest.computed_fingerprint():
        raise ConfigError(f"{directory / MANIFEST} is damaged: its fingerprint does not match; {_ADVICE}")
    return Corpus(directory, manifest)


def is_held_out(number: int) -> bool:
    """True if document `number` (from 0, in sorted order) is held out."""
    return number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def _check_file(path: Path, file: CorpusFile) -> None:
    if not path.is_file():
        raise ConfigError(f"{path} is missing; {_ADVICE}")
    size = path.stat().st_size
    if size != file.size_bytes:
        raise ConfigError(f"{path} is damaged: {size} bytes instead of {file.size_bytes}; {_ADVICE}")
    if _hash_file(path) != file.hash:
        raise ConfigError(f"{path} is damaged: its hash is not {file.hash}; {_ADVICE}")


# ---- writing --------------------------------------------------------------------------------------


class _PartWriter:
    """Tokenizes documents in groups and appends their ids to a file."""

    def __init__(self, file: BinaryIO, tokenizer: TextTokenizer, token_type: np.dtype[Any]) -> None:
        self._file = file
        self._tokenizer = tokenizer
        self._token_type = token_type
        self._group: list[str] = []
        self._characters = 0
        self._documents = self._tokens = self._text_bytes = 0

    def add(self, text: str) -> None:
        self._group.append(text)
        self._characters += len(text)
        self._text_bytes += len(text.encode())
        if self._characters >= GROUP_CHARACTERS:
            self._write_group()

    def finish(self) -> Part:
        self._write_group()
        return Part(self._documents, self._tokens, self._text_bytes)

    def _write_group(self) -> None:
        for ids in self._tokenizer.encode_many(self._group):
            ids.append(self._tokenizer.separator)
            self._file.write(np.asarray(ids, dtype=self._token_type).tobytes())
            self._tokens += len(ids)
        self._documents += len(self._group)
        self._group = []
        self._characters = 0


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """Temporary file that is flushed and renamed to `path` on success, and deleted after an error."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _training_texts(documents: Documents, report: Progress) -> Iterator[str]:
    document: Document
    for number, document in enumerate(documents):
        report("training the tokenizer", document.position, documents.size_bytes)
        if not is_held_out(number):
            yield document.text


# ---- the manifest ---------------------------------------------------------------------------------


class _Manifest(msgspec.Struct, kw_only=True):
    """Contents of manifest.json."""

    format: str = FORMAT
    version: int = VERSION
    token_type: Literal["u2", "u4"]
    vocab_size: int
    separator: int
    train: Part
    held_out: Part
    source: dict[str, Any]
    files: list[CorpusFile]
    fingerprint: str = ""

    def computed_fingerprint(self) -> str:
        files = [[file.name, file.hash] for file in self.files]
        return str(blake3(json.dumps([FORMAT, VERSION, self.token_type, files]).encode()).hexdigest())


def _read_manifest(directory: Path) -> _Manifest:
    path = directory / MANIFEST
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(
            f"there is no corpus in {directory} ({path.name}: {error.strerror}); {_ADVICE}"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not the manifest of a corpus ({error}); {_ADVICE}") from None
    if values.get("format") != FORMAT:
        raise ConfigError(f"{path} is not the manifest of a corpus; {_ADVICE}")
    if values.get("version") != VERSION:
        raise ConfigError(
            f"{directory} holds a corpus of version {values.get('version')}, and this anabranch reads "
            f"version {VERSION}; use the anabranch that wrote it, or start a new run directory"
        )
    try:
        manifest = msgspec.convert(values, _Manifest)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is damaged: {error}; {_ADVICE}") from None
    if [file.name for file in manifest.files] != list(HASHED_FILES):
        raise ConfigError(f"{path} is damaged: it does not list the files of a corpus; {_ADVICE}")
    return manifest


def _open_same(section: DataSection, directory: Path) -> Corpus:
    corpus = open_corpus(directory)
    for key, wanted in asdict(section).items():
        if corpus.source.get(key) != wanted:
            raise ConfigError(
                f"{directory} holds a corpus made with data.{key} = {corpus.source.get(key)!r}, "
                f"not {wanted!r}; restore the setting, or start a new run directory"
            )
    return corpus


def _open_tokens(path: Path, token_type: str) -> Tokens:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=f"<{token_type}")
    return np.memmap(path, dtype=f"<{token_type}", mode="r")


def _hash_file(path: Path) -> str:
    return str(blake3().update_mmap(path).hexdigest())
