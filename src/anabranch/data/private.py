"""Corpus of one machine alone, on which it takes the inner steps of its slots (`data.private`).

Inner step c of slot k takes samples (c - 1)·n to c·n - 1 of the corpus, n being the sequences of an inner
step. Samples are numbered and permuted as those of a run (`data.batches`), with a key that names the slot:
sample s is the (s mod N)-th window of epoch ⌊s / N⌋, so that every window comes once in each epoch. The
tokens are a pure function of corpus, seed, slot and step.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anabranch.config import RunConfig
from anabranch.data.batches import Ids, Windows, window_of
from anabranch.data.corpus import MANIFEST, Corpus, open_corpus
from anabranch.errors import ConfigError, UserError

#: Ids that are compared with the vocabulary at a time. A choice: bounds the memory of the check.
CHECKED_AT_ONCE = 1 << 22
#: Option that names a private corpus, for messages.
OPTION = "--private-data"


class PrivateData:
    """Sequences of a machine's own corpus, by slot and inner step. inner: microbatches of an inner step."""

    def __init__(self, corpus: Corpus, run: RunConfig, inner: int) -> None:
        batch = run.batch
        self.fingerprint = corpus.fingerprint
        self._windows = Windows(corpus.train_tokens, None, None, batch.sequence, corpus.separator)
        self.windows = self._windows.count
        """Number of windows of the corpus."""
        self.rows = inner * batch.rows
        """Sequences of an inner step."""
        self._key = f"{corpus.fingerprint}/{corpus.tokenizer_hash}/{run.run.seed}"

    def step_rows(self, slot: int, step: int) -> Ids:
        """Token ids (microbatches · rows, sequence + 1) of inner step `step` (1, 2, ..., over all rounds) of
        a slot."""
        first = (step - 1) * self.rows
        return np.stack([self._windows.ids(self.window(slot, first + row)) for row in range(self.rows)])

    def window(self, slot: int, sample: int) -> int:
        """Number of the corpus window that the slot reads as its sample `sample` (0, 1, ..., over all inner
        steps)."""
        return window_of(f"{self._key}/private {slot}", self.windows, sample)


def open_private(folder: Path, run: RunConfig, tokenizer_hash: str, vocabulary: int) -> PrivateData:
    """Open the private corpus in `folder` for a run whose tokenizer has the hash `tokenizer_hash`.

    vocabulary: rows of the model's embedding. Raises UserError for a folder that is no corpus, for a corpus
    of another tokenizer or form or with ids outside the vocabulary, and for one that is too short.
    """
    where = f"{OPTION} {folder}"
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{where}: there is no corpus; prepare one of your text with `anabranch data FILE.toml --out "
            "DIR`, where data.tokenizer is the run's tokenizer.json"
        )
    try:
        corpus = open_corpus(folder)
    except ConfigError as error:
        why = str(error).partition("; copy the corpus")[0]
        raise UserError(f"{where}: {why}; prepare it again") from None
    if corpus.tokenizer_hash != tokenizer_hash:
        raise UserError(
            f"{where}: its tokenizer is not the run's (hash {corpus.tokenizer_hash[:12]}, not "
            f"{tokenizer_hash[:12]}); prepare it with data.tokenizer = the tokenizer.json of the run's "
            "corpus folder, which the run's owner has"
        )
    if corpus.mixture or corpus.train_mask is not None or corpus.train_ends is not None:
        raise UserError(
            f"{where}: a private corpus is running text of one source; prepare it without data.mixture, with "
            'data.format = "text" and data.packing = "stream"'
        )
    if (largest := _largest_id(corpus)) >= vocabulary:
        raise UserError(
            f"{where}: it has the token id {largest}, and the model's vocabulary ends at {vocabulary - 1}; "
            "prepare it again"
        )
    data = PrivateData(corpus, run, run.batch.microbatches // max(1, run.round.slots))
    if data.windows < data.rows:
        raise UserError(
            f"{where}: the corpus is too short: its {corpus.train.tokens} training tokens are {data.windows} "
            f"windows of batch.sequence = {run.batch.sequence}, and an inner step needs {data.rows}; prepare "
            "more text"
        )
    return data


def _largest_id(corpus: Corpus) -> int:
    """Largest token id of the training part; -1 if that is empty."""
    tokens = corpus.train_tokens
    starts = range(0, len(tokens), CHECKED_AT_ONCE)
    return max((int(tokens[begin : begin + CHECKED_AT_ONCE].max()) for begin in starts), default=-1)
