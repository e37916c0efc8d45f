"""Materialised corpora: files, fingerprints, damage."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from anabranch.config import DataSection
from anabranch.data.corpus import HASHED_FILES, MANIFEST, Corpus, is_held_out, materialise, open_corpus
from anabranch.errors import ConfigError
from support.small_corpus import text_section, write_folder


def documents_of(corpus: Corpus, tokens: np.ndarray) -> list[str]:  # type: ignore[type-arg]
    ends = np.flatnonzero(tokens == corpus.separator)
    return [corpus.tokenizer.decode(part.tolist()) for part in np.split(tokens, ends + 1)[:-1]]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_twentieth_document_is_held_out_and_nothing_is_lost(tmp_path: Path, tokenizer: str) -> None:
    folder = write_folder(tmp_path / "text", 45)
    corpus = materialise(text_section(folder, tokenizer), tmp_path / "corpus")
    originals = [path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())]
    train, held_out = documents_of(corpus, corpus.train_tokens), documents_of(corpus, corpus.held_out_tokens)
    assert held_out == [originals[19], originals[39]]
    assert train == [text for number, text in enumerate(originals) if not is_held_out(number)]
    assert not set(train) & set(held_out)
    assert corpus.train.documents == 43 and corpus.train.tokens == len(corpus.train_tokens)
    assert corpus.train.text_bytes == sum(len(text.encode()) for text in train)
    assert corpus.train.text_bytes == corpus.token_bytes[corpus.train_tokens].sum()


def test_the_same_text_gives_the_same_fingerprint_and_other_text_another(tmp_path: Path) -> None:
    fingerprints = []
    for name in ("one", "two", "three"):
        folder = write_folder(tmp_path / name, 20)
        if name == "three":
            with (folder / "part-007.txt").open("a") as file:
                file.write(".")
        corpus = materialise(text_section(folder), tmp_path / f"corpus-{name}")
        fingerprints.append((corpus.fingerprint, corpus.tokenizer_hash))
    assert fingerprints[0] == fingerprints[1]
    assert fingerprints[0][0] != fingerprints[2][0]
    other_tokenizer = materialise(text_section(tmp_path / "one", "bpe"), tmp_path / "corpus-bpe")
    assert other_tokenizer.fingerprint != fingerprints[0][0]
    assert other_tokenizer.tokenizer_hash != fingerprints[0][1]


def test_it_is_written_once_and_never_again(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text", 20)
    section = text_section(folder)
    first = materialise(section, tmp_path / "corpus")
    for path in folder.iterdir():
        path.unlink()
    assert materialise(section, tmp_path / "corpus").fingerprint == first.fingerprint
    with pytest.raises(ConfigError, match=r"data.tokenizer = 'bytes', not 'bpe'"):
        materialise(replace(section, tokenizer="bpe"), tmp_path / "corpus")


def test_a_run_that_was_cut_short_is_written_anew(tmp_path: Path) -> None:
    section = text_section(write_folder(tmp_path / "text", 20))

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "tokenizing" and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        materialise(section, tmp_path / "corpus", interrupt)
    assert not list((tmp_path / "corpus").glob("*.partial"))
    with pytest.raises(ConfigError, match="no corpus"):
        open_corpus(tmp_path / "corpus")
    reference = materialise(section, tmp_path / "reference")
    assert materialise(section, tmp_path / "corpus").fingerprint == reference.fingerprint


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    section = text_section(write_folder(tmp_path / "text", 20), "bpe")
    materialise(section, tmp_path / "corpus", lambda *call: calls.append(call))
    last = {what: (done, total) for what, done, total in calls}
    assert list(last) == ["training the tokenizer", "tokenizing"]
    assert all(done == total > 0 for done, total in last.values())


def test_a_vocabulary_that_no_training_can_reach_is_refused_before_the_text_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard library's text with llama-1b's 128,256 tokens was refused after a minute of tokenizing."""

    def forbidden(*_: object) -> None:
        raise AssertionError("nothing is trained")

    monkeypatch.setattr("anabranch.data.corpus.write_tokenizer", forbidden)
    stdlib = DataSection(source="stdlib", vocab_size=128_256)
    few = text_section(write_folder(tmp_path / "text", 30), "bpe", vocab_size=60_000)
    for section in (stdlib, few):
        with pytest.raises(ConfigError, match=rf"vocab_size = {section.vocab_size}: .* less"):
            materialise(section, tmp_path / "corpus")
    with pytest.raises(AssertionError, match="nothing is trained"):
        materialise(replace(stdlib, vocab_size=50_257), tmp_path / "corpus")


def test_a_vocabulary_that_training_does_not_reach_is_refused_before_the_text_is_tokenized(
    tmp_path: Path,
) -> None:
    section = text_section(write_folder(tmp_path / "text", 60), "bpe", vocab_size=4_000)
    told: list[str] = []
    with pytest.raises(ConfigError, match=r"has \d+ tokens; set data\.vocab_size to"):
        materialise(section, tmp_path / "corpus", lambda what, done, total: told.append(what))
    assert set(told) == {"training the tokenizer"}
    assert not (tmp_path / "corpus" / "manifest.json").exists()


def test_no_text_is_said_whatever_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"too small: .* has 0 document\(s\) with text"):
        materialise(text_section(tmp_path / "empty.txt", "bpe", vocab_size=512), tmp_path / "corpus")


def test_too_few_documents_name_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text('{"text": "short"}\n' * 19)
    section = replace(text_section(tmp_path), source="jsonl", path=str(file))
    with pytest.raises(ConfigError, match=r"too small: .*few.jsonl.* has 19 document.*set data.source"):
        materialise(section, tmp_path / "corpus")


@pytest.mark.parametrize("name", [*HASHED_FILES, MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_refused_by_the_name_of_the_file(tmp_path: Path, name: str, damage: str) -> None:
    materialise(text_section(write_folder(tmp_path / "text", 20)), tmp_path / "corpus")
    path = tmp_path / "corpus" / name
    data = path.read_bytes()
    if damage == "flip":
        # The manifest is damaged where its fingerprint must notice it.
        middle = data.index(b'"u2"') + 2 if name == "manifest.json" else len(data) // 2
        path.write_bytes(data[:middle] + (b"4" if name == "manifest.json" else b"~") + data[middle + 1 :])
    elif damage == "truncate":
        path.write_bytes(data[:-3])
    else:
        path.unlink()
    with pytest.raises(ConfigError, match=name) as caught:
        open_corpus(tmp_path / "corpus")
    assert "data node" in str(caught.value)


def test_another_version_is_refused(tmp_path: Path) -> None:
    materialise(text_section(write_folder(tmp_path / "text", 20)), tmp_path / "corpus")
    path = tmp_path / "corpus" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    with pytest.raises(ConfigError, match="version 2"):
        open_corpus(tmp_path / "corpus")


def test_large_vocabularies_take_four_bytes_a_token(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text", 20)
    small = materialise(text_section(folder), tmp_path / "small")
    tokenizer = json.loads((small.directory / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocabulary |= {f"<filler {number}>": 257 + number for number in range(1 << 16)}
    (tmp_path / "large.json").write_text(json.dumps(tokenizer))
    large = materialise(text_section(folder, str(tmp_path / "large.json")), tmp_path / "large")
    assert large.train_tokens.dtype == np.uint32 and small.train_tokens.dtype == np.uint16
    assert large.train_tokens.tolist() == small.train_tokens.tolist()
    assert open_corpus(tmp_path / "large").vocab_size == 257 + (1 << 16)


def test_the_room_does_not_import_torch() -> None:
    code = "import sys, anabranch.data.batches; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
