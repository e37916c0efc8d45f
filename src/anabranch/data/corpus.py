"""Corpus of a run: tokens of a text source, written once into the run directory and identified by hash.

Four files lie in a corpus directory:

    train.tokens     ids of the training documents, each followed by the separator; little-endian integers
    heldout.tokens   the same for every 20th document
    tokenizer.json   the tokenizer (`data/tokenizers.py`)
    manifest.json    version, counts, hashes, source of the text; written last: a directory without it is
                     unfinished and is written again

Conversations have masks besides, and a corpus of whole documents their ends:

    train.mask       a byte for each training id, 1 if it counts as a target (heldout.mask for the others)
    train.ends       positions behind the training documents; little-endian int64 (heldout.ends)

The *fingerprint* is the hash of everything in a corpus that determines a batch: all its files but the
manifest, the width of an id in them, and the sources of a mixture with their weights.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from anabranch.config import DataSection
from anabranch.data.chat import Piece
from anabranch.data.corpus_cache import LEAST_BYTES, CorpusCache, content_key
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
#: Further files, of conversations and of whole documents.
MASKS, ENDS = ("train.mask", "heldout.mask"), ("train.ends", "heldout.ends")
OPTIONAL_FILES = ((), MASKS, ENDS, (*MASKS, *ENDS))
#: Tokens of a BPE without merges: bytes and the separator.
BYTE_TOKENS = 257
#: Bytes of the standard library's source from which a BPE learns less than one token: half of Python 3.11's.
STDLIB_BYTES_PER_TOKEN = 80
#: Characters of one batch of documents for the tokenizer: enough to keep its threads busy.
GROUP_CHARACTERS = 1 << 20

_ADVICE = "copy the corpus again from another data node, or start a new run directory"

#: progress(activity, bytes of the source done, bytes of the source in all)
Progress = Callable[[str, int, int], None]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True)
class CorpusFile:
    """Entry of one corpus file: name below the corpus directory, size in bytes, and BLAKE3 (hex)."""

    name: str
    size_bytes: int
    hash: str


@dataclass(frozen=True)
class Part:
    """Counts of the training or held-out part of a corpus. tokens: separators included. text_bytes: UTF-8
    bytes without separators."""

    documents: int
    tokens: int
    text_bytes: int


class Component(msgspec.Struct, frozen=True):
    """Source of a mixture: its sequences in each cycle (`weight`), and its number of training tokens, which
    follow those of the sources before it."""

    source: str
    weight: int
    tokens: int


class Corpus:
    """Opened corpus directory. `train_tokens` and `held_out_tokens` are read-only memory maps (tokens,) of
    uint16 or uint32; `token_bytes` is int64 (vocab_size,), the number of UTF-8 bytes that each id stands for.
    Masks are uint8 (tokens,), 1 where an id counts as a target, or None if all do; ends int64 (documents,),
    the positions behind each document, or None if sequences are cut from the stream of all. `mixture`:
    sources, if several. `position`: documents of the source up to the last one read, those that data.skip
    left out included; 0 for a mixture."""

    def __init__(self, directory: Path, manifest: _Manifest) -> None:
        self.directory = directory
        self.fingerprint = manifest.fingerprint
        self.source = manifest.source
        self.train = manifest.train
        self.held_out = manifest.held_out
        self.documents = self.train.documents + self.held_out.documents
        self.tokenizer = TextTokenizer(directory / TOKENIZER)
        self.tokenizer_hash = self.tokenizer.hash
        self.vocab_size = self.tokenizer.vocab_size
        self.separator = self.tokenizer.separator
        self.token_bytes = self.tokenizer.token_bytes
        self.train_tokens: Tokens = _open_array(directory / TRAIN, f"<{manifest.token_type}")
        self.held_out_tokens: Tokens = _open_array(directory / HELD_OUT, f"<{manifest.token_type}")
        names = [file.name for file in manifest.files]
        self.train_mask, self.held_out_mask = (
            _open_array(directory / name, "u1") if name in names else None for name in MASKS
        )
        self.train_ends, self.held_out_ends = (
            _open_array(directory / name, "<i8") if name in names else None for name in ENDS
        )
        self.mixture = tuple(manifest.mixture)
        self.position = manifest.position

def materialise(
    section: DataSection,
    directory: Path,
    progress: Progress | None = None,
    tell: Callable[[str], None] = lambda text: None,
    cache: CorpusCache | None = None,
) -> Corpus:
    """Write the corpus that `section` describes into `directory`, or open it if it already exists. progress:
    see `Progress`. tell: gets sentences about files that were left out or are not UTF-8, and about tokens
    from the cache. cache: of tokenized corpora, from which a source of LEAST_BYTES or more is taken, or into
    which it is put, unless it is streamed; None to tokenize in any case. Raises ConfigError if the source
    cannot be read, has fewer than 20 documents or too little text for the vocabulary, or if the directory
    holds a damaged corpus or one of other settings."""
    if (directory / MANIFEST).is_file():
        return _open_same(section, directory)
    report = progress or (lambda activity, done, total: None)
    documents = open_documents(section)
    _check_possible(section, documents)
    directory.mkdir(parents=True, exist_ok=True)
    key = ""
    # The size of a stream is not known, and its hash would cost another download.
    if cache is not None and documents.files and documents.size_bytes >= LEAST_BYTES:
        key = content_key(section, documents, report)
        if (kept := _from_cache(section, directory, cache, key)) is not None:
            for remark in documents.remarks():
                tell(remark)
            tell("the same text was tokenized before: its tokens are taken from the cache")
            return kept
    corpus = _tokenized(section, directory, documents, report)
    for remark in documents.remarks():
        tell(remark)
    if cache is not None and key:
        cache.put(key, (*corpus_files(section), MANIFEST), directory)
    return corpus


def corpus_files(section: DataSection) -> tuple[str, ...]:
    """Names of the files that a corpus of these settings has beside its manifest."""
    masks = MASKS if section.format == "chat" else ()
    return (*HASHED_FILES, *masks, *(ENDS if section.packing == "whole" else ()))


def _from_cache(section: DataSection, directory: Path, cache: CorpusCache, key: str) -> Corpus | None:
    """Corpus that the cache has under `key`, put into `directory` with source and position of this section;
    None if there is none, or a damaged one, which is deleted from the cache."""
    names = (*corpus_files(section), MANIFEST)
    if not cache.take(key, names, directory):
        return None
    try:
        open_corpus(directory)
    except ConfigError:  # damaged
        cache.forget(key)
        for name in names:
            (directory / name).unlink(missing_ok=True)
        return None
    manifest = _read_manifest(directory)
    manifest.source = _source(section)
    manifest.position = _position(section, manifest.train.documents + manifest.held_out.documents)
    _write_manifest(directory, manifest)
    return Corpus(directory, manifest)


def _tokenized(section: DataSection, directory: Path, documents: Documents, report: Progress) -> Corpus:
    """Corpus of the documents, written into `directory`. Raises ConfigError if there is too little text, or
    text or tokenizer cannot be read."""
    with _unfinished(directory / TOKENIZER) as path:
        write_tokenizer(section, _training_texts(documents, report), path)
    tokenizer = TextTokenizer(directory / TOKENIZER)
    _check_vocabulary_reached(section, documents, tokenizer)
    token_type = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")

    names = corpus_files(section)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(stack.enter_context(_unfinished(directory / name)).open("wb"))
            for name in names
            if name != TOKENIZER
        }
        train, held_out = (
            _PartWriter(files[name], tokenizer, token_type, files.get(mask), files.get(ends))
            for name, mask, ends in zip((TRAIN, HELD_OUT), MASKS, ENDS, strict=True)
        )
        read = 0
        for number, document in enumerate(documents):
            read = document.position if section.source == "hub" else number + 1
            (held_out if is_held_out(number) else train).add(document)
            report("tokenizing", document.position, documents.size_bytes)
        parts = train.finish(), held_out.finish()
        _check_enough_documents(documents, parts[0].documents + parts[1].documents)

    manifest = _Manifest(
        token_type="u2" if token_type.itemsize == 2 else "u4",
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        train=parts[0],
        held_out=parts[1],
        source=_source(section),
        files=[
            CorpusFile(name, (directory / name).stat().st_size, _hash_file(directory / name))
            for name in names
        ],
        mixture=_components(section, train.tokens_of),
        position=_position(section, read),
    )
    manifest.fingerprint = manifest.computed_fingerprint()
    _write_manifest(directory, manifest)
    return Corpus(directory, manifest)


def _position(section: DataSection, read: int) -> int:
    """Position of a corpus in its source (`Corpus.position`). read: documents that were read from data.skip
    on; of a stream its records, empty ones included, as data.skip counts them."""
    return 0 if section.mixture else section.skip + read


def _components(section: DataSection, tokens: Sequence[int]) -> list[Component]:
    """Sources of a mixture. tokens: training tokens of each, in order; the last ones are missing if they had
    no text. Raises ConfigError for a source without text."""
    found = []
    for number, name in enumerate(section.mixture):
        count = tokens[number] if number < len(tokens) else 0
        if not count:
            raise ConfigError(f'data.mixture: "{name}" has no text to train on; leave it out')
        found.append(Component(name, section.weights[number] if section.weights else 1, count))
    return found


def _source(section: DataSection) -> dict[str, Any]:
    """Settings of the text's source, for the manifest; with Python's version for the standard library."""
    python = {"python": platform.python_version()} if section.source == "stdlib" else {}
    return {**_text_settings(section), **python}


def _text_settings(section: DataSection) -> dict[str, Any]:
    """Settings that say which text is read, and how it is cut and tokenized."""
    return {key: value for key, value in asdict(section).items() if key != "private"}


def _write_manifest(directory: Path, manifest: _Manifest) -> None:
    with _unfinished(directory / MANIFEST) as path:
        path.write_text(json.dumps(msgspec.to_builtins(manifest), indent=1) + "\n", encoding="utf-8")


def _check_possible(section: DataSection, documents: Documents) -> None:
    """Raise ConfigError, before anything is read, if there is no text, or if a BPE of it cannot have
    data.vocab_size tokens: each merge takes a byte of text at least, of program text many more. A stream is
    not checked."""
    if not documents.files:  # a stream, which counts records
        return
    if not documents.size_bytes:
        _check_enough_documents(documents, 0)
    if section.tokenizer not in ("auto", "bpe"):
        return
    each = STDLIB_BYTES_PER_TOKEN if section.source == "stdlib" else 1
    most = BYTE_TOKENS + documents.size_bytes // each
    if section.vocab_size > most:
        few = f"{documents.label} has {documents.size_bytes:,} bytes, from which a BPE learns "
        raise _vocabulary_error(section, f"{few}less than {most:,} tokens", most // 4)


def _check_vocabulary_reached(section: DataSection, documents: Documents, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError, before tokenizing, if the trained BPE has fewer tokens than data.vocab_size."""
    found = tokenizer.vocab_size
    if section.tokenizer in ("auto", "bpe") and found < section.vocab_size:
        raise _vocabulary_error(section, f"a BPE trained on {documents.label} has {found} tokens", found)


def _vocabulary_error(section: DataSection, why: str, most: int) -> ConfigError:
    return ConfigError(
        f"the corpus is too small for data.vocab_size = {section.vocab_size}: {why}; set data.vocab_size to "
        f"{max(BYTE_TOKENS, most)} or less, or data.source and data.path to more text"
    )


def _check_enough_documents(documents: Documents, count: int) -> None:
    if count < HELD_OUT_EVERY:
        raise ConfigError(
            f"the corpus is too small: {documents.label} has {count} document(s) with text, and at least "
            f"{HELD_OUT_EVERY} are needed, of which every {HELD_OUT_EVERY}th is held out; "
            "set data.source and data.path to more text"
        )


def open_corpus(directory: Path) -> Corpus:
    """Open a corpus directory after checking every file against its hash. Raises ConfigError if a file is
    missing or damaged, or the directory is of another version."""
    manifest = _read_manifest(directory)
    for file in manifest.files:
        _check_file(directory / file.name, file)
    if manifest.fingerprint != manifest.computed_fingerprint():
        raise ConfigError(f"{directory / MANIFEST} is damaged: its fingerprint does not match; {_ADVICE}")
    return Corpus(directory, manifest)


def write_part(corpus: Corpus, part: int, parts: int, directory: Path) -> Corpus:
    """Write part `part` (0, 1, ...) of `parts` equal ones of a corpus of running text into `directory`, as a
    corpus of its own, and open it: a stretch of its training tokens, and of its held-out ones. Counts of
    documents and bytes of text are the whole corpus's, divided. Masks, ends and the sources of a mixture are
    not written."""
    directory.mkdir(parents=True, exist_ok=True)
    counts = []
    for name, tokens, whole in (
        (TRAIN, corpus.train_tokens, corpus.train),
        (HELD_OUT, corpus.held_out_tokens, corpus.held_out),
    ):
        begin, end = (len(tokens) * place // parts for place in (part, part + 1))
        with _unfinished(directory / name) as path:
            path.write_bytes(tokens[begin:end].tobytes())
        counts.append(Part(whole.documents // parts, end - begin, whole.text_bytes // parts))
    with _unfinished(directory / TOKENIZER) as path:
        path.write_bytes((corpus.directory / TOKENIZER).read_bytes())
    manifest = _Manifest(
        token_type="u2" if corpus.train_tokens.itemsize == 2 else "u4",
        vocab_size=corpus.vocab_size,
        separator=corpus.separator,
        train=counts[0],
        held_out=counts[1],
        source={**corpus.source, "part": part, "parts": parts},
        files=[
            CorpusFile(name, (directory / name).stat().st_size, _hash_file(directory / name))
            for name in HASHED_FILES
        ],
    )
    manifest.fingerprint = manifest.computed_fingerprint()
    _write_manifest(directory, manifest)
    return Corpus(directory, manifest)


def is_held_out(number: int) -> bool:
    """True if document `number` (from 0, in the order of the source) is held out: the last of each
    HELD_OUT_EVERY."""
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
    """Writer of the files of one part (training or held-out) of a corpus: tokenizes the added documents in
    groups, and appends their ids and, if these files are given, masks and ends. `finish` writes the last
    group and returns the part's counts."""

    def __init__(
        self,
        file: BinaryIO,
        tokenizer: TextTokenizer,
        token_type: np.dtype[Any],
        mask: BinaryIO | None,
        ends: BinaryIO | None,
    ) -> None:
        self._file, self._mask, self._ends = file, mask, ends
        self._tokenizer = tokenizer
        self._token_type = token_type
        self._group: list[Document] = []
        self._characters = 0
        self._documents = self._tokens = self._text_bytes = 0
        self.tokens_of: list[int] = []
        """Tokens of each source of a mixture."""

    def add(self, document: Document) -> None:
        self._group.append(document)
        self._characters += len(document.text)
        self._text_bytes += len(document.text.encode())
        if self._characters >= GROUP_CHARACTERS:
            self._write_group()

    def finish(self) -> Part:
        self._write_group()
        return Part(self._documents, self._tokens, self._text_bytes)

    def _write_group(self) -> None:
        texts = [
            piece.text
            for document in self._group
            for piece in (document.pieces or (Piece(document.text, counts=True),))
        ]
        encoded = iter(self._tokenizer.encode_many(texts))
        for document in self._group:
            ids, counts = self._ids_of(document, encoded)
            self._file.write(np.asarray(ids, dtype=self._token_type).tobytes())
            if self._mask is not None:
                self._mask.write(bytes(counts))
            self._tokens += len(ids)
            if self._ends is not None:
                self._ends.write(self._tokens.to_bytes(8, "little"))
            self.tokens_of += [0] * (document.component + 1 - len(self.tokens_of))
            self.tokens_of[document.component] += len(ids)
        self._documents += len(self._group)
        self._group = []
        self._characters = 0

    def _ids_of(self, document: Document, encoded: Iterator[list[int]]) -> tuple[list[int], list[bool]]:
        """Token ids of a document with the separator behind it, and for each id True if it counts as a target
        of the loss. encoded: iterator of the ids of each piece of this document and the following ones; the
        pieces of this document are taken from it."""
        ids: list[int] = []
        counts: list[bool] = []
        for piece in document.pieces or (Piece(document.text, counts=True),):
            of_piece = next(encoded)
            marker = self._tokenizer.marker(piece.text) if piece.marker else None
            ids += of_piece if marker is None else [marker]
            counts += [piece.counts] * (len(ids) - len(counts))
        return [*ids, self._tokenizer.separator], [*counts, True]


@contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """Context manager: name of a temporary file that the block writes; it is flushed to the disk and renamed
    to `path` on success, and deleted after an error."""
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
    """Contents of manifest.json, which describes a corpus directory."""

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
    mixture: list[Component] = []
    position: int = 0
    """Documents of the source up to the last one that was read, skipped ones included; 0 for a mixture."""

    def computed_fingerprint(self) -> str:
        files = [[file.name, file.hash] for file in self.files]
        mixture = [msgspec.to_builtins(self.mixture)] if self.mixture else []
        described = [FORMAT, VERSION, self.token_type, files, *mixture]
        return str(blake3(json.dumps(described).encode()).hexdigest())


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
    names = tuple(file.name for file in manifest.files)
    if names[: len(HASHED_FILES)] != HASHED_FILES or names[len(HASHED_FILES) :] not in OPTIONAL_FILES:
        raise ConfigError(f"{path} is damaged: it does not list the files of a corpus; {_ADVICE}")
    return manifest


def _open_same(section: DataSection, directory: Path) -> Corpus:
    corpus = open_corpus(directory)
    usual = asdict(DataSection())
    for key, wanted in _text_settings(section).items():
        found = corpus.source.get(key, usual[key])  # corpora of earlier releases lack later keys
        if (tuple(found) if isinstance(found, list) else found) != wanted:
            raise ConfigError(
                f"{directory} holds a corpus made with data.{key} = {found!r}, "
                f"not {wanted!r}; restore the setting, or start a new run directory"
            )
    return corpus


def _open_array(path: Path, kind: str) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=kind)
    return np.memmap(path, dtype=kind, mode="r")


def _hash_file(path: Path) -> str:
    return str(blake3().update_mmap(path).hexdigest())
