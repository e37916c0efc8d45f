"""The same text is tokenized once, wherever it lies; anything else is tokenized anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.config import DataSection
from anabranch.data.corpus import TRAIN, Corpus, materialise, open_corpus
from anabranch.data.corpus_cache import CACHE_VARIABLE, KEPT, LEAST_BYTES, CorpusCache, default_cache

SAID = "taken from the cache"


@pytest.fixture
def section(tmp_path: Path) -> DataSection:
    folder = tmp_path / "texts"
    folder.mkdir()
    line = "a line of a text that is long enough to be kept\n"
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number}: {line}" * (LEAST_BYTES // 40 // len(line) + 1))
    return DataSection(source="text", path=str(folder), tokenizer="bytes")


def made(section: DataSection, directory: Path, cache: CorpusCache) -> tuple[Corpus, bool]:
    """A corpus, and whether it came from the cache."""
    said: list[str] = []
    corpus = materialise(section, directory, tell=said.append, cache=cache)
    return corpus, any(SAID in text for text in said)


def test_the_same_text_elsewhere_is_taken_from_the_cache(tmp_path: Path, section: DataSection) -> None:
    cache = CorpusCache(tmp_path / "cache")
    first, taken = made(section, tmp_path / "first", cache)
    assert not taken
    moved = Path(section.path).rename(tmp_path / "moved")
    elsewhere = replace(section, path=str(moved))
    second, taken = made(elsewhere, tmp_path / "second", cache)
    assert taken and second.fingerprint == first.fingerprint
    assert second.source["path"] == str(moved) and first.source["path"] != str(moved)
    assert open_corpus(tmp_path / "first").source["path"] == section.path, "its own manifest stays"
    materialise(elsewhere, tmp_path / "second")  # opened again, it is checked against the section


def test_the_same_text_further_back_has_another_position(tmp_path: Path, section: DataSection) -> None:
    """`anabranch data` advises the position as the next data.skip."""
    cache = CorpusCache(tmp_path / "cache")
    first, _ = made(section, tmp_path / "first", cache)
    assert first.position == 40
    Path(section.path, "+.txt").write_text("a text before all others\n")
    second, taken = made(replace(section, skip=1), tmp_path / "second", cache)
    assert taken and second.fingerprint == first.fingerprint and second.position == 41


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("change", ["text", "tokenizer", "damage"])
def test_anything_else_is_tokenized(tmp_path: Path, section: DataSection, change: str) -> None:
    cache = CorpusCache(tmp_path / "cache")
    first, _ = made(section, tmp_path / "first", cache)
    if change == "text":
        (Path(section.path) / "00.txt").write_text("other text\n")
    elif change == "tokenizer":
        section = replace(section, tokenizer="bpe", vocab_size=280)
    else:
        (kept,) = (tmp_path / "cache").iterdir()
        tokens = kept / TRAIN
        data = tokens.read_bytes()
        tokens.unlink()  # the run has the same file
        tokens.write_bytes(data[:-2] + b"xx")
    second, taken = made(section, tmp_path / "second", cache)
    assert not taken and (second.fingerprint == first.fingerprint) is (change == "damage")
    assert made(section, tmp_path / "third", cache)[1]


def test_few_corpora_are_kept_and_a_cache_that_cannot_be_written_costs_nothing(
    tmp_path: Path, section: DataSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CorpusCache(tmp_path / "cache")
    made(section, tmp_path / "first", cache)
    others = [tmp_path / "cache" / name for name in ("photos", "novel.txt")]
    for other in others:
        other.mkdir()
    for number in range(2 * KEPT):
        cache.put(f"{number:064}", (TRAIN,), tmp_path / "first")
    assert len(list((tmp_path / "cache").iterdir())) == KEPT + len(others)
    assert all(other.exists() for other in others), "the user may name a folder that has other things"
    (tmp_path / "file").write_text("")
    assert made(section, tmp_path / "second", CorpusCache(tmp_path / "file" / "cache"))[1] is False
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert default_cache() is None
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "named"))
    named = default_cache()
    assert named is not None and named.folder == tmp_path / "named"
