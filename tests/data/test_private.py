"""Private corpora: which windows an inner step takes, what is refused, how one corpus is cut into several."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from anabranch.config import RunConfig, with_changes
from anabranch.data.batches import Windows
from anabranch.data.corpus import Corpus, _Manifest, _write_manifest, materialise, open_corpus, write_part
from anabranch.data.private import PrivateData, open_private
from anabranch.errors import UserError
from support.small_corpus import text_section, write_folder

RUN = with_changes(
    RunConfig(),
    {
        "run.seed": 5,
        "data.private": True,
        "pipeline.stages": 0,
        "round.slots": 3,
        "batch.microbatches": 6,
        "batch.rows": 2,
        "batch.sequence": 16,
    },
)


def test_each_window_comes_once_in_an_epoch_of_a_slot(corpus: Corpus) -> None:
    """A slot passes through the whole corpus of its machine, not through a share of it."""
    data = PrivateData(corpus, RUN, 2)
    assert data.rows == 4
    for slot in (0, 2):
        samples = [data.window(slot, sample) for sample in range(2 * data.windows)]
        assert sorted(samples[: data.windows]) == sorted(samples[data.windows :]) == list(range(data.windows))
    orders = [[data.window(slot, sample) for sample in range(data.windows)] for slot in range(3)]
    assert len({tuple(order) for order in orders}) == 3  # machines with one corpus take different windows


def test_a_step_has_the_windows_of_its_slot_and_counter(corpus: Corpus) -> None:
    """Steps follow one another without a gap, and depend on nothing else: a machine that comes back takes the
    same again."""
    data, again = PrivateData(corpus, RUN, 2), PrivateData(corpus, RUN, 2)
    windows = Windows(corpus.train_tokens, None, None, 16, corpus.separator)
    for step in (1, 2, 57):
        rows = data.step_rows(1, step)
        assert rows.shape == (4, 17) and np.array_equal(rows, again.step_rows(1, step))
        expected = [data.window(1, 4 * (step - 1) + row) for row in range(4)]
        assert [tuple(row) for row in rows] == [tuple(windows.ids(number)) for number in expected]
    other = PrivateData(corpus, with_changes(RUN, {"run.seed": 6}), 2)
    assert not np.array_equal(data.step_rows(1, 1), other.step_rows(1, 1))


def test_parts_of_a_corpus_have_all_its_tokens_once(corpus: Corpus, tmp_path: Path) -> None:
    for number in range(3):
        write_part(corpus, number, 3, tmp_path / str(number))
    parts = [open_corpus(tmp_path / str(number)) for number in range(3)]  # with all hashes
    assert np.array_equal(np.concatenate([part.train_tokens for part in parts]), corpus.train_tokens)
    assert {part.tokenizer_hash for part in parts} == {corpus.tokenizer_hash}
    assert len({part.fingerprint for part in parts}) == 3
    assert max(part.train.tokens for part in parts) - min(part.train.tokens for part in parts) <= 1


@pytest.fixture(scope="module")
def prepared(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Another text with the tokenizer of `corpus`."""
    root = tmp_path_factory.mktemp("private")
    texts = write_folder(root / "texts", 25, lines=9)
    return materialise(text_section(texts, str(corpus.directory / "tokenizer.json")), root / "corpus")


def opened(folder: Path, corpus: Corpus, **changes: Any) -> PrivateData:
    run = with_changes(RUN, {key.replace("__", "."): value for key, value in changes.items()})
    return open_private(folder, run, corpus.tokenizer_hash, corpus.vocab_size)


def test_a_corpus_of_the_runs_tokenizer_is_taken(prepared: Corpus, corpus: Corpus) -> None:
    data = opened(prepared.directory, corpus)
    assert data.fingerprint == prepared.fingerprint != corpus.fingerprint and data.rows == 4


def test_what_does_not_fit_is_refused_by_name(prepared: Corpus, corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no corpus; prepare one of your text"):
        opened(tmp_path, corpus)
    texts = write_folder(tmp_path / "texts", 25)
    other = materialise(text_section(texts), tmp_path / "bytes")
    with pytest.raises(UserError, match="its tokenizer is not the run's"):
        opened(other.directory, corpus)
    with pytest.raises(UserError, match=r"too short: its \d+ training tokens are \d+ windows of batch.seq"):
        opened(prepared.directory, corpus, batch__rows=3000)
    section = text_section(texts, str(corpus.directory / "tokenizer.json"))
    whole = materialise(replace(section, packing="whole"), tmp_path / "whole")
    with pytest.raises(UserError, match="running text of one source"):
        opened(whole.directory, corpus)
    mixed = replace(section, source="stdlib", path="", mixture=(f"text:{texts}", f"text:{texts}"))
    with pytest.raises(UserError, match="running text of one source"):
        opened(materialise(mixed, tmp_path / "mixed").directory, corpus)
    (other.directory / "train.tokens").write_bytes(b"x")
    with pytest.raises(UserError, match=r"is damaged: 1 bytes instead of .*; prepare it again"):
        opened(other.directory, corpus)


def test_an_id_outside_the_vocabulary_is_refused(prepared: Corpus, corpus: Corpus, tmp_path: Path) -> None:
    """With hashes that are right: whoever made the folder made the manifest, too."""
    part = write_part(prepared, 0, 1, tmp_path / "part")
    tokens = np.array(part.train_tokens)
    tokens[7] = corpus.vocab_size
    del part
    (tmp_path / "part" / "train.tokens").write_bytes(tokens.tobytes())
    manifest = msgspec.json.decode((tmp_path / "part" / "manifest.json").read_bytes(), type=_Manifest)
    from anabranch.data.corpus import _hash_file

    manifest.files[0] = replace(manifest.files[0], hash=_hash_file(tmp_path / "part" / "train.tokens"))
    manifest.fingerprint = manifest.computed_fingerprint()
    _write_manifest(tmp_path / "part", manifest)
    assert Counter(np.array(tokens).tolist())[corpus.vocab_size] == 1
    with pytest.raises(UserError, match=f"token id {corpus.vocab_size}, and the model's vocabulary ends at"):
        opened(tmp_path / "part", corpus)
