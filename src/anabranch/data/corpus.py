"""A corpus: tokens of a source, written once into the run directory and identified by their hash.

Four files lie in a corpus directory:

    train.tokens     ids of the training documents, each followed by the separator; little-endian integers
    heldout.tokens   the same of every 20th document
    tokenizer.json   the tokenizer (`data/tokenizers.py`)
    manifest.json    version, counts, hashes, where the text came from; written last, so that a directory
                     without it is unfinished and is written anew

The *fingerprint* is the hash of everything that decides a batch: token files, token width and tokenizer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from anabranch.config import DataSection
from anabranch.data.sources import Document, Documents, open_documents
from anabranch.data.tokenizers import TextTokenizer, write_tokenizer
from anabranch.errors import ConfigError

FORMAT = "anabranch-corpus"
VERSION = 1
#: Every so-manieth document is held out.
HELD_OUT_EVERY = 20
TRAIN, HELD_OUT, TOKENIZER, MANIFEST = "train.tokens", "heldout.tokens", "tokenizer.json", "manifest.json"
#: All files of a corpus directory; a listing from a peer must name exactly these.
FILE_NAMES = (TRAIN, HELD_OUT, TOKENIZER, MANIFEST)
#: Documents are handed to the tokenizer in groups of about so many characters.
GROUP_CHARACTERS = 1 << 20

#: progress(what is being done, bytes of the source done, bytes of the source in all)
Progress = Callable[[str, int, int], None]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class CorpusFile:
    """Name below the corpus directory, size, and BLAKE3 (hex) of the bytes."""

    name: str
    size_bytes: int
    hash: str


@dataclass(frozen=True)
class Part:
    """Counts of the training or the held-out part; `text_bytes` is UTF-8 bytes without separators."""

    documents: int
    tokens: int
    text_bytes: int


class Corpus:
    """An opened corpus directory.

    `train_tokens` and `held_out_tokens` are memory maps (tokens,) of uint16 or uint32, read-only;
    `token_bytes` int64 (vocab_size,) the UTF-8 bytes that each id stands for.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.fingerprint: str = manifest["fingerprint"]
        self.source: dict[str, Any] = manifest["source"]
        self.train = Part(**manifest["train"])
        self.held_out = Part(**manifest["held_out"])
        self.tokenizer = TextTokenizer(directory / TOKENIZER)
        self.tokenizer_hash = self.tokenizer.hash
        self.vocab_size = self.tokenizer.vocab_size
        self.separator = self.tokenizer.separator
        self.token_bytes = self.tokenizer.token_bytes
        self.train_tokens = _open_tokens(directory / TRAIN, manifest["token_type"])
        self.held_out_tokens = _open_tokens(directory / HELD_OUT, manifest["token_type"])

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without separators."""
        return self.tokenizer.decode(ids)


def materialise(section: DataSection, directory: Path, progress: Progress | None = None) -> Corpus:
    """Write the corpus that `section` describes into `directory`, or open it if it is there already.

    Raises ConfigError if the source cannot be read or has fewer than 20 documents or too little text for the
    vocabulary, or if the directory holds a corpus of other settings.
    """
    if (directory / MANIFEST).is_file():
        return _open_same(section, directory)
    report = progress or _no_progress
    documents = open_documents(section)
    directory.mkdir(parents=True, exist_ok=True)

    with _Unfinished(directory / TOKENIZER) as path:
        write_tokenizer(section, _training_texts(documents, report), path)
    tokenizer = TextTokenizer(directory / TOKENIZER)
    token_type = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

    with _Unfinished(directory / TRAIN) as train_path, _Unfinished(directory / HELD_OUT) as held_out_path:
        with train_path.open("wb") as train_file, held_out_path.open("wb") as held_out_file:
            train = _PartWriter(train_file, tokenizer, token_type)
            held_out = _PartWriter(held_out_file, tokenizer, token_type)
            for number, document in enumerate(documents):
                (held_out if is_held_out(number) else train).add(document.text)
                report("tokenizing", document.position, documents.size_bytes)
            parts = train.finish(), held_out.finish()
        count = parts[0].documents + parts[1].documents
        if count < HELD_OUT_EVERY:
            raise ConfigError(
                f"the corpus is too small: {documents.place} has {count} document(s) with text, and at least "
                f"{HELD_OUT_EVERY} are needed, of which every {HELD_OUT_EVERY}th is held out; "
                "set data.source and data.path to more text"
            )
        if section.tokenizer == "bpe" and tokenizer.vocab_size < section.vocab_size:
            raise ConfigError(
                f"the corpus is too small for data.vocab_size = {section.vocab_size}: a BPE trained on "
                f"{documents.place} has {tokenizer.vocab_size} tokens; set data.vocab_size to "
                f"{tokenizer.vocab_size} or less, or data.source and data.path to more text"
            )

    source = {**asdict(section), **_source_version(section)}
    manifest = _manifest(directory, token_type.str[1:], tokenizer, parts, source)
    with _Unfinished(directory / MANIFEST) as path:
        path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return Corpus(directory, manifest)


def open_corpus(directory: Path) -> Corpus:
    """Open a corpus directory after checking every file against its hash.

    Raises ConfigError if a file is missing or damaged, or the directory is of another version.
    """
    manifest = _read_manifest(directory)
    check_files(directory, _listed_files(manifest))
    if manifest["fingerprint"] != _fingerprint(manifest):
        raise ConfigError(f"{directory / MANIFEST} is damaged: its fingerprint does not fit; {_WHAT_NOW}")
    return Corpus(directory, manifest)


def is_held_out(number: int) -> bool:
    """Whether document `number` (from 0, in sorted order) is held out."""
    return number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


# ---- fetching a corpus from a peer ----------------------------------------------------------------


def corpus_files(directory: Path) -> list[CorpusFile]:
    """What a peer must fetch to have this corpus, the manifest last."""
    manifest = directory / MANIFEST
    own = CorpusFile(MANIFEST, manifest.stat().st_size, _hash_file(manifest))
    return [*_listed_files(_read_manifest(directory)), own]


def check_listing(files: Sequence[CorpusFile]) -> None:
    """Refuse (ConfigError) a peer's listing that names anything but the files of a corpus, each once."""
    names = sorted(file.name for file in files)
    if names != sorted(FILE_NAMES):
        raise ConfigError(f"the peer's corpus lists {names}, not {sorted(FILE_NAMES)}; ask another data node")
    for file in files:
        if file.size_bytes < 0 or not re.fullmatch("[0-9a-f]{64}", file.hash):
            raise ConfigError(
                f"the peer's corpus lists {file.name} with an impossible size or hash; ask another data node"
            )


def check_files(directory: Path, files: Sequence[CorpusFile]) -> None:
    """Raises ConfigError naming the first file below `directory` that is missing or not as listed."""
    for file in files:
        path = directory / file.name
        if not path.is_file():
            raise ConfigError(f"{path} is missing; {_WHAT_NOW}")
        size = path.stat().st_size
        if size != file.size_bytes:
            raise ConfigError(f"{path} is damaged: {size} bytes instead of {file.size_bytes}; {_WHAT_NOW}")
        if _hash_file(path) != file.hash:
            raise ConfigError(f"{path} is damaged: its hash is not {file.hash}; {_WHAT_NOW}")


_WHAT_NOW = "fetch the corpus again from a data node, or start a new run directory"


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


class _Unfinished:
    """`with _Unfinished(path) as temporary:` renames `temporary` to `path` once the block ends well and its
    bytes are on the disk, and deletes it otherwise."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")

    def __enter__(self) -> Path:
        return self._temporary

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self._temporary.unlink(missing_ok=True)
            return
        with self._temporary.open("rb+") as file:
            os.fsync(file.fileno())
        self._temporary.replace(self._path)


def _training_texts(documents: Documents, report: Progress) -> Iterator[str]:
    document: Document
    for number, document in enumerate(documents):
        report("training the tokenizer", document.position, documents.size_bytes)
        if not is_held_out(number):
            yield document.text


def _no_progress(what: str, done: int, total: int) -> None:
    pass


def _source_version(section: DataSection) -> dict[str, str]:
    import platform

    return {"python": platform.python_version()} if section.source == "stdlib" else {}


# ---- the manifest ---------------------------------------------------------------------------------


def _manifest(
    directory: Path,
    token_type: str,
    tokenizer: TextTokenizer,
    parts: tuple[Part, Part],
    source: dict[str, Any],
) -> dict[str, Any]:
    names = (TRAIN, HELD_OUT, TOKENIZER)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "token_type": token_type,
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
        "train": asdict(parts[0]),
        "held_out": asdict(parts[1]),
        "source": source,
        "files": [
            asdict(CorpusFile(name, (directory / name).stat().st_size, _hash_file(directory / name)))
            for name in names
        ],
    }
    manifest["fingerprint"] = _fingerprint(manifest)
    return manifest


def _fingerprint(manifest: dict[str, Any]) -> str:
    files = [[file["name"], file["hash"]] for file in manifest["files"]]
    decisive = [FORMAT, VERSION, manifest["token_type"], files]
    return str(blake3(json.dumps(decisive).encode()).hexdigest())


def _read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, its keys and types checked. Raises ConfigError."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"there is no corpus in {directory} ({path.name}: {error.strerror}); {_WHAT_NOW}"
        ) from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is damaged: it is not JSON; {_WHAT_NOW}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ConfigError(f"{path} is not the manifest of a corpus; {_WHAT_NOW}")
    if manifest.get("version") != VERSION:
        raise ConfigError(
            f"{directory} holds a corpus of version {manifest.get('version')}, and this anabranch reads "
            f"version {VERSION}; use the anabranch that wrote it, or start a new run directory"
        )
    try:
        listed = [file.name for file in _listed_files(manifest)]
        complete = (
            listed == [TRAIN, HELD_OUT, TOKENIZER]
            and manifest["token_type"] in ("u2", "u4")
            and isinstance(manifest["source"], dict)
            and isinstance(manifest["fingerprint"], str)
        )
        for part in ("train", "held_out"):
            Part(**manifest[part])
    except (KeyError, TypeError, AttributeError):
        complete = False
    if not complete:
        raise ConfigError(f"{path} is damaged: keys are missing; {_WHAT_NOW}")
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


def _listed_files(manifest: dict[str, Any]) -> list[CorpusFile]:
    return [CorpusFile(**file) for file in manifest["files"]]


def _open_tokens(path: Path, token_type: str) -> Tokens:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=f"<{token_type}")
    return np.memmap(path, dtype=f"<{token_type}", mode="r")


def _hash_file(path: Path) -> str:
    return str(blake3().update_mmap(path).hexdigest())
