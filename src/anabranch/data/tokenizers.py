"""Tokenizers, each defined by a `tokenizer.json` file that is written once, hashed and read back.

Text is encoded without the tokenizer's own template (no begin-of-sequence token) and without reading special
tokens out of the text; a *separator* token stands after every document.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from anabranch.config import DataSection
from anabranch.errors import ConfigError

#: Separator of the tokenizers that this module writes.
SEPARATOR = "<|endoftext|>"
#: Tokens that end a document in published tokenizers, in order of preference.
KNOWN_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
#: First characters of the corpus on which a BPE is trained: more cost memory and change little.
TRAINING_CHARACTERS = 1 << 26
#: Largest vocabulary accepted, sixty times the largest published. Ids of a forged file could take 32 GiB.
VOCABULARY_MAX = 1 << 24


@contextmanager
def _panics_named(path: Path) -> Iterator[None]:
    """Context manager that turns a panic of the tokenizer library about `path` into ConfigError: a panic is a
    BaseException that no handler of Exception sees, and would end a thread or a process without a word."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{path}: the tokenizer library failed on this file ({error})") from None


class TextTokenizer:
    """Loaded tokenizer.json. `hash` is the BLAKE3 of the file's bytes, `vocab_size` one more than the largest
    id, `separator` the id of the token that ends a document, `token_bytes` int64 (vocab_size,): UTF-8 bytes
    of text that each id stands for (special tokens: 0). The lengths are exact for byte-level and
    byte-fallback tokenizers. Others may normalise text: there they are the bytes of the token's spelling."""

    def __init__(self, path: Path) -> None:
        """Load the file `path`. Raises ConfigError, also for no separator or ids beyond `VOCABULARY_MAX`."""
        self._path = path
        try:
            data = path.read_bytes()
            with _panics_named(path):
                self._read(path, data)
        except OSError as error:
            raise ConfigError(
                f"tokenizer {path} cannot be read ({error.strerror}); "
                'set data.tokenizer to "bytes", "bpe" or the path of a tokenizer.json'
            ) from None
        except ConfigError:
            raise
        except Exception as error:  # the library raises bare Exception for what it cannot parse
            raise ConfigError(f"{path} is not a tokenizer.json ({error}); see data.tokenizer") from None

    def _read(self, path: Path, data: bytes) -> None:
        self._tokenizer = Tokenizer.from_buffer(data)
        self.hash: str = blake3(data).hexdigest()
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that spells "<|endoftext|>" is text, not the end of a document.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        if self.vocab_size > VOCABULARY_MAX:
            raise ConfigError(f"{path} has token ids up to {self.vocab_size - 1:,}, which is too many")
        separator = next((token for token in KNOWN_SEPARATORS if token in vocabulary), None)
        if separator is None:
            raise ConfigError(
                f"{path} has no token that ends a document (one of {', '.join(KNOWN_SEPARATORS)}); "
                "add one to its added_tokens, or choose another data.tokenizer"
            )
        self.separator_token = separator
        self.separator: int = vocabulary[separator]
        self.token_bytes = self._byte_lengths(json.loads(data), vocabulary)

    def encode(self, text: str) -> list[int]:
        return self.encode_many([text])[0]

    def encode_many(self, texts: list[str]) -> list[list[int]]:
        with _panics_named(self._path):
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def marker(self, text: str) -> int | None:
        """Id of the token that is spelled `text`; None if there is none."""
        number: int | None = self._tokenizer.token_to_id(text)
        return number

    def decode(self, ids: Iterable[int]) -> str:
        """Text for the token ids `ids`; separators and other special tokens are left out. Raises ConfigError
        if the library fails on them."""
        with _panics_named(self._path):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def _byte_lengths(self, definition: dict[str, Any], vocabulary: dict[str, int]) -> npt.NDArray[np.int64]:
        added = {entry["id"]: entry for entry in definition.get("added_tokens", [])}
        byte_level = _mentions(definition.get("decoder"), "ByteLevel")
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in vocabulary.items():
            if number in added:
                lengths[number] = 0 if added[number]["special"] else len(token.encode())
            else:
                # Byte-level vocabularies spell each byte as one character.
                lengths[number] = len(token) if byte_level else _spelt_bytes(token)
        lengths[self.separator] = 0
        return lengths


def write_tokenizer(section: DataSection, texts: Iterable[str], path: Path) -> None:
    """Write the tokenizer that `section` asks for to `path`. `texts` is read only to train a BPE. Raises
    ConfigError for an unusable tokenizer.json."""
    if section.tokenizer == "bytes":
        path.write_text(_bytes_tokenizer().to_str(pretty=True), encoding="utf-8")
    elif section.tokenizer in ("auto", "bpe"):
        path.write_text(_train_bpe(texts, section.vocab_size).to_str(pretty=True), encoding="utf-8")
    else:
        given = tokenizer_file(section)
        TextTokenizer(given)  # refuses an unusable file before it is copied
        path.write_bytes(given.read_bytes())


def tokenizer_file(section: DataSection) -> Path:
    """Path of the tokenizer.json that `section` names, directly or by its folder."""
    given = Path(section.tokenizer).expanduser()
    return given / "tokenizer.json" if given.is_dir() else given


def _bytes_tokenizer() -> Tokenizer:
    """Tokenizer without merges: ids 0..255 are bytes and 256 is the separator."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = _byte_level(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([SEPARATOR])
    return tokenizer


def _train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the first TRAINING_CHARACTERS of the texts. The same texts give the
    same file: ties go by token order."""
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        initial_alphabet=_byte_characters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_front(texts, TRAINING_CHARACTERS), trainer)
    return tokenizer


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _front(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Texts from the front, together at most `characters` long; the last one is cut."""
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def _byte_characters() -> list[str]:
    """Characters with which byte-level tokenizers write the bytes 0..255 (as GPT-2 does), in order. Printable
    Latin-1 bytes stand for themselves; the others are numbered from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = itertools.count(0x100)
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _spelt_bytes(token: str) -> int:
    """UTF-8 bytes of a token as of SentencePiece (▁ is a space, <0x0A> a byte) or WordPiece (##ing)."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.removeprefix("##").replace("▁", " ").encode())


def _mentions(component: object, kind: str) -> bool:
    """True if a (possibly nested) component of a tokenizer.json is of type `kind`."""
    if isinstance(component, dict):
        return component.get("type") == kind or any(_mentions(part, kind) for part in component.values())
    if isinstance(component, list):
        return any(_mentions(part, kind) for part in component)
    return False
