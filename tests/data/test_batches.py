"""Batches of the corpus: every window once an epoch, the same on every peer."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.config import BatchSection
from anabranch.data.batches import Batches, Permutation
from anabranch.data.corpus import Corpus, materialise, open_corpus
from anabranch.errors import ConfigError
from support.small_corpus import text_section, write_folder

BATCH = BatchSection(microbatches=3, rows=2, sequence=16)


@given(size=st.integers(1, 700), key=st.binary(min_size=1, max_size=64))
@settings(max_examples=60, deadline=None)
def test_a_permutation_hits_every_value_once(size: int, key: bytes) -> None:
    permutation = Permutation(size, key)
    assert sorted(permutation(position) for position in range(size)) == list(range(size))
    for outside in (-1, size):
        with pytest.raises(IndexError):
            permutation(outside)


def test_a_permutation_of_many_values_is_shuffled() -> None:
    """Neighbours are scattered: mean distance of a random permutation is size / 3."""
    size = 10_000
    values = np.array([Permutation(size, b"key")(position) for position in range(size)])
    assert abs(np.abs(np.diff(values)).mean() / (size / 3) - 1) < 0.05
    assert abs(np.corrcoef(values, np.arange(size))[0, 1]) < 0.05
    assert (values == np.arange(size)).sum() < 10


@pytest.mark.costly
@given(rows=st.integers(1, 5), microbatches=st.integers(1, 5), sequence=st.integers(1, 90))
@settings(max_examples=25, deadline=None)
def test_an_epoch_covers_every_window_exactly_once(
    corpus: Corpus, rows: int, microbatches: int, sequence: int
) -> None:
    batches = Batches(corpus, BatchSection(microbatches, rows, sequence), seed=7)
    rows_per_iteration = rows * microbatches
    iterations = 2 * batches.windows // rows_per_iteration + 1
    order = [
        window
        for t in range(1, iterations + 1)
        for index in range(microbatches)
        for window in batches.window_numbers(t, index)
    ]
    for epoch in (0, 1):
        part = order[epoch * batches.windows : (epoch + 1) * batches.windows]
        assert sorted(part) == list(range(batches.windows))
    if batches.windows >= 20:
        assert order[: batches.windows] != order[batches.windows : 2 * batches.windows]


@given(sequence=st.integers(1, 200))
@settings(max_examples=20, deadline=None)
def test_every_token_but_the_first_is_a_target_once(corpus: Corpus, sequence: int) -> None:
    batches = Batches(corpus, BatchSection(1, 1, sequence), seed=1)
    targets = np.empty(batches.windows * sequence, dtype=np.int64)
    for t in range(1, batches.windows + 1):
        (window,) = batches.window_numbers(t, 0)
        inputs, row = batches.microbatch(t, 0)
        assert inputs.shape == row.shape == (1, sequence) and inputs.dtype == row.dtype == np.int64
        assert np.array_equal(inputs[0, 1:], row[0, :-1])
        assert inputs[0, 0] == corpus.train_tokens[window * sequence]
        targets[window * sequence : (window + 1) * sequence] = row[0]
    assert np.array_equal(targets, corpus.train_tokens[1 : len(targets) + 1])
    assert len(corpus.train_tokens) - 1 - len(targets) < sequence


@given(
    asked=st.lists(st.tuples(st.integers(1, 10**9), st.integers(0, 2)), min_size=1, max_size=6),
    seed=st.integers(0, 2**63),
)
@settings(max_examples=30, deadline=None)
def test_a_batch_depends_on_nothing_that_was_asked_before(
    corpus: Corpus, asked: list[tuple[int, int]], seed: int
) -> None:
    kept = Batches(corpus, BATCH, seed)
    for t, index in asked:
        fresh = Batches(corpus, BATCH, seed)
        for one, other in zip(kept.microbatch(t, index), fresh.microbatch(t, index), strict=True):
            assert np.array_equal(one, other)
        assert kept.manifest_hash(t) == fresh.manifest_hash(t)


def test_another_process_draws_the_same_batches(corpus: Corpus) -> None:
    code = (
        "import sys; from pathlib import Path; from anabranch.config import BatchSection\n"
        "from anabranch.data.batches import Batches; from anabranch.data.corpus import open_corpus\n"
        "batches = Batches(open_corpus(Path(sys.argv[1])), BatchSection(3, 2, 16), 5)\n"
        "print([batches.manifest_hash(t) for t in (1, 2, 77)])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code, str(corpus.directory)], capture_output=True, text=True, check=True
    ).stdout
    batches = Batches(corpus, BATCH, 5)
    assert output.strip() == str([batches.manifest_hash(t) for t in (1, 2, 77)])


def test_seed_text_tokenizer_and_iteration_each_change_the_batch(corpus: Corpus, tmp_path: Path) -> None:
    folder = Path(corpus.source["path"])
    other_tokenizer = materialise(text_section(folder, "bpe", 290), tmp_path / "tokenizer")
    other_text = materialise(text_section(write_folder(tmp_path / "text", 61), "bpe"), tmp_path / "other")
    hashes = [
        Batches(corpus, BATCH, 1).manifest_hash(1),
        Batches(corpus, BATCH, 1).manifest_hash(2),
        Batches(corpus, BATCH, 2).manifest_hash(1),
        Batches(other_tokenizer, BATCH, 1).manifest_hash(1),
        Batches(other_text, BATCH, 1).manifest_hash(1),
    ]
    assert len(set(hashes)) == len(hashes)
    assert Batches(open_corpus(corpus.directory), BATCH, 1).manifest_hash(1) == hashes[0]


def test_the_manifest_hash_sees_every_token_of_the_iteration_and_no_other(corpus: Corpus) -> None:
    """A data node whose tokens differ from its manifest would be found out by this hash."""
    damaged = open_corpus(corpus.directory)
    tokens = damaged.train_tokens = np.array(corpus.train_tokens)
    batches, reference = Batches(damaged, BATCH, 1), Batches(corpus, BATCH, 1).manifest_hash(2)
    used = {
        window * BATCH.sequence + offset
        for index in range(BATCH.microbatches)
        for window in batches.window_numbers(2, index)
        for offset in range(BATCH.sequence + 1)
    }
    for place in range(len(tokens)):
        tokens[place] ^= 1
        assert (batches.manifest_hash(2) != reference) == (place in used)
        tokens[place] ^= 1


def test_evaluation_reads_the_held_out_part_only_and_counts_its_bytes(corpus: Corpus) -> None:
    batch = BatchSection(microbatches=3, rows=2, sequence=16)
    batches = Batches(corpus, batch, seed=1)
    starts = Counter()
    for w in range(batches.held_out_windows // batch.rows):
        inputs, targets = batches.evaluation_window(w)
        assert inputs.shape == targets.shape == (2, 16)
        text_bytes = 0
        for row, target in zip(inputs, targets, strict=True):
            window = [
                start
                for start in range(0, 16 * batches.held_out_windows, 16)
                if np.array_equal(corpus.held_out_tokens[start : start + 17], [*row, target[-1]])
            ]
            assert window, "a row that is not in the held-out part"
            starts[window[0]] += 1
            text_bytes += sum(int(corpus.token_bytes[token]) for token in target)
        assert batches.evaluation_bytes(w) == text_bytes > 0
    assert set(starts.values()) == {1}
    first, again = batches.evaluation_window(0), Batches(corpus, batch, seed=1).evaluation_window(0)
    assert np.array_equal(first, again)


def test_bytes_of_an_iteration_are_those_of_its_targets(corpus: Corpus) -> None:
    batches = Batches(corpus, BATCH, seed=1)
    targets = np.concatenate([batches.microbatch(4, index)[1].ravel() for index in range(3)])
    assert batches.tokens_per_iteration == targets.size == 96
    assert batches.iteration_bytes(4) == corpus.token_bytes[targets].sum()


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (BatchSection(microbatches=1000, rows=100, sequence=16), r"one iteration needs 100000"),
        (BatchSection(microbatches=1, rows=1, sequence=10**6), r"0 windows of batch.sequence = 1000000"),
        (BatchSection(microbatches=1, rows=1, sequence=1500), r"held-out part of \d+ tokens"),
    ],
)
def test_a_corpus_too_small_for_the_batch_is_refused(corpus: Corpus, batch: BatchSection, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"too small.*{words}") as caught:
        Batches(corpus, batch, seed=1)
    assert "data.source" in str(caught.value)


@pytest.mark.parametrize(("t", "index"), [(0, 0), (1, 3), (1, -1)])
def test_there_is_no_batch_outside_the_run(corpus: Corpus, t: int, index: int) -> None:
    with pytest.raises(IndexError):
        Batches(corpus, BATCH, seed=1).microbatch(t, index)
