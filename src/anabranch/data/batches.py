r"""Batches of token ids as a pure function of (corpus, tokenizer, seed, iteration).

The packed stream of the training part is cut into *windows*: window w covers tokens
[w·L, w·L + L] for sequence length L, inputs without the last and targets without the first of these L + 1
tokens, so that neighbouring windows share one token and every token but the first is a target once.

Samples are numbered through the whole run: with R rows an iteration, row r of iteration t ≥ 1 is sample
k = (t − 1)·R + r, the (k mod N)-th window of epoch ⌊k / N⌋, where an epoch is a permutation of all N windows.
The permutation is computed, not stored: window(k) takes O(1) time, and a restart or a new data node needs
only t.

The permutation. Write p = x·b + y with a·b ≥ N, x < a, y < b. A round adds a keyed hash of one coordinate to
the other,

    x ← (x + H(round, y)) mod a      y ← (y + H(round, x)) mod b

each of which can be undone, so any number of rounds is a permutation of a·b values (a generalised Feistel
network). A value ≥ N is put through the network again until it falls below N: following a cycle of a
permutation restricted to a subset is a permutation of that subset (Black & Rogaway, CT-RSA 2002).
"""

from __future__ import annotations

import math
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from anabranch.config import BatchSection
from anabranch.data.corpus import Corpus, Tokens
from anabranch.errors import ConfigError

#: Rounds of the network, two additions each: four, as Luby and Rackoff need for a strong permutation.
ROUNDS = 4

Ids = npt.NDArray[np.int64]


class Permutation:
    """A keyed permutation of range(size)."""

    def __init__(self, size: int, key: bytes) -> None:
        self.size = size
        self._key = key
        self._a = max(1, math.isqrt(size))
        self._b = -(-size // self._a)

    def __call__(self, position: int) -> int:
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} is not in a permutation of {self.size}")
        value = self._network(position)
        while value >= self.size:
            value = self._network(value)
        return value

    def _network(self, value: int) -> int:
        x, y = divmod(value, self._b)
        for round_ in range(ROUNDS):
            x = (x + self._hash(2 * round_, y)) % self._a
            y = (y + self._hash(2 * round_ + 1, x)) % self._b
        return x * self._b + y

    def _hash(self, step: int, coordinate: int) -> int:
        message = step.to_bytes(1, "little") + coordinate.to_bytes(8, "little")
        return int.from_bytes(blake2b(message, key=self._key, digest_size=8).digest(), "little")


class Batches:
    """Batches of a run, computed on demand. Iterations count from 1, microbatches and rows from 0. Arrays of
    token ids are int64 (rows, sequence)."""

    def __init__(self, corpus: Corpus, batch: BatchSection, seed: int) -> None:
        """Raises ConfigError if the training part has fewer windows than one iteration has rows, or the
        held-out part has none."""
        self._corpus = corpus
        self._batch = batch
        self._rows_per_iteration = batch.microbatches * batch.rows
        self.windows = _count_windows(corpus.train_tokens, batch.sequence)
        """Windows of the training part; an epoch has as many rows."""
        self.held_out_windows = _count_windows(corpus.held_out_tokens, batch.sequence)
        self.tokens_per_iteration = self._rows_per_iteration * batch.sequence
        if self.windows < self._rows_per_iteration:
            raise ConfigError(
                f"the corpus is too small: {corpus.train.tokens} training tokens are {self.windows} windows "
                f"of batch.sequence = {batch.sequence}, and one iteration needs {self._rows_per_iteration} "
                "(batch.microbatches * batch.rows); set data.source and data.path to more text, "
                "or lower these"
            )
        if self.held_out_windows < 1:
            raise ConfigError(
                f"the corpus is too small: its held-out part of {corpus.held_out.tokens} tokens does not "
                f"fill one window of batch.sequence = {batch.sequence}; set data.source and data.path to "
                "more text, or lower batch.sequence"
            )
        self._seed_key = f"{corpus.fingerprint}/{corpus.tokenizer_hash}/{seed}"
        self._permutation = lru_cache(maxsize=8)(self._make_permutation)

    def microbatch(self, t: int, index: int) -> tuple[Ids, Ids]:
        """Token ids (inputs, targets) of microbatch `index` of iteration `t`, each (rows, sequence)."""
        return self._cut(self._corpus.train_tokens, self.window_numbers(t, index))

    def window_numbers(self, t: int, index: int) -> list[int]:
        """For each row of microbatch `index` of iteration `t` the number of its corpus window, after the
        epoch's permutation."""
        if t < 1 or not 0 <= index < self._batch.microbatches:
            raise IndexError(f"there is no microbatch {index} in iteration {t}")
        first = (t - 1) * self._rows_per_iteration + index * self._batch.rows
        return [self._window("train", self.windows, first + row) for row in range(self._batch.rows)]

    def evaluation_window(self, window: int) -> tuple[Ids, Ids]:
        """Token ids (inputs, targets) of held-out microbatch `window`, the same in every evaluation of the
        run."""
        if window < 0:
            raise IndexError(f"there is no evaluation window {window}")
        samples = range(window * self._batch.rows, (window + 1) * self._batch.rows)
        windows = [self._window("held out", self.held_out_windows, sample) for sample in samples]
        return self._cut(self._corpus.held_out_tokens, windows)

    def evaluation_bytes(self, window: int) -> int:
        """Number of UTF-8 bytes that the targets of `evaluation_window(window)` stand for; separators have
        none."""
        return int(self._corpus.token_bytes[self.evaluation_window(window)[1]].sum())

    def iteration_bytes(self, t: int) -> int:
        """Number of UTF-8 bytes that the targets of iteration `t` stand for."""
        return sum(
            int(self._corpus.token_bytes[self.microbatch(t, index)[1]].sum())
            for index in range(self._batch.microbatches)
        )

    def manifest_hash(self, t: int) -> str:
        """BLAKE3 (hex) of every row of iteration `t`: its window and its sequence + 1 tokens."""
        hasher = blake3(b"anabranch batch manifest 1")
        for index in range(self._batch.microbatches):
            for window in self.window_numbers(t, index):
                hasher.update(window.to_bytes(8, "little"))
                hasher.update(self._row(self._corpus.train_tokens, window).astype("<i8").tobytes())
        return str(hasher.hexdigest())

    def _window(self, part: str, windows: int, sample: int) -> int:
        epoch, position = divmod(sample, windows)
        return self._permutation(part, windows, epoch)(position)

    def _make_permutation(self, part: str, windows: int, epoch: int) -> Permutation:
        key = blake2b(f"{self._seed_key}/{part}/{epoch}".encode(), digest_size=32).digest()
        return Permutation(windows, key)

    def _cut(self, tokens: Tokens, windows: list[int]) -> tuple[Ids, Ids]:
        rows = np.stack([self._row(tokens, window) for window in windows])
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])

    def _row(self, tokens: Tokens, window: int) -> Ids:
        """Token ids of a corpus window, shape (sequence + 1,)."""
        start = window * self._batch.sequence
        return tokens[start : start + self._batch.sequence + 1].astype(np.int64)


def _count_windows(tokens: Tokens, sequence: int) -> int:
    return max(0, (len(tokens) - 1) // sequence)
