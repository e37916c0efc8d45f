r"""Batches of token ids as a pure function of (corpus, tokenizer, seed, iteration).

The packed stream of the training part is cut into *windows*: window w covers tokens
[w·L, w·L + L] for sequence length L, inputs without the last and targets without the first of these L + 1
tokens, so that neighbouring windows share one token and every token but the first is a target once.

Samples are numbered through the whole run: with R rows an iteration, row r of iteration t ≥ 1 is sample
k = (t − 1)·R + r, the (k mod N)-th window of epoch ⌊k / N⌋, where an epoch is a permutation of all N windows.
The permutation is computed, not stored: window(k) takes O(1) time, and a restart or a new data node needs
only t.

A corpus of whole documents has *rows* instead: documents in order, as many as fit into L + 1 tokens, filled
up with separators. They take the place of windows. Of a mixture each source has windows of its own: W samples
in succession, W being the sum of the weights, have as many of each source as its weight says, in a fixed
order that spreads them, and the samples of a source are numbered and permuted among themselves.

The permutation. Write p = x·b + y with a·b ≥ N, x < a, y < b. A round adds a keyed hash of one coordinate to
the other,

    x ← (x + H(round, y)) mod a      y ← (y + H(round, x)) mod b

each of which can be undone, so any number of rounds is a permutation of a·b values (a generalised Feistel
network). A value ≥ N is put through the network again until it falls below N: following a cycle of a
permutation restricted to a subset is a permutation of that subset (Black & Rogaway, CT-RSA 2002).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Permutation of range(size) that a key determines; computed, not stored. A call maps a position to its
    value, and raises IndexError outside range(size)."""

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


#: Target of a position that does not count.
NOT_COUNTED = -100


@lru_cache(maxsize=256)
def _permutation(size: int, key: str) -> Permutation:
    return Permutation(size, blake2b(key.encode(), digest_size=32).digest())


def window_of(key: str, windows: int, sample: int) -> int:
    """Window, of `windows`, that is read as sample `sample` (0, 1, ...): in each epoch all of them, by a
    permutation that epoch and `key` determine."""
    epoch, position = divmod(sample, windows)
    return _permutation(windows, f"{key}/{epoch}")(position)


class Windows:
    """Sequences of a part of a corpus, numbered from 0: windows of its stream, or rows of whole documents.
    mask: not 0 where a token counts as a target; None: all count. ends: positions behind the documents; None:
    windows of the stream. sequence: targets in each. separator: id that fills short ones up."""

    def __init__(
        self,
        tokens: Tokens,
        mask: npt.NDArray[np.uint8] | None,
        ends: npt.NDArray[np.int64] | None,
        sequence: int,
        separator: int,
    ) -> None:
        self._tokens, self._mask = tokens, mask
        self._sequence, self._separator = sequence, separator
        self._rows = None if ends is None else packed_rows(ends, sequence + 1)
        self.count = max(0, (len(tokens) - 1) // sequence) if self._rows is None else len(self._rows)
        self.all_count = mask is None and self._rows is None
        """True if every target counts."""

    def ids(self, number: int) -> Ids:
        """Token ids (int64) of sequence `number`, shape (sequence + 1,), filled up with separators."""
        begin, end = self._bounds(number)
        found = self._tokens[begin:end].astype(np.int64)
        missing = self._sequence + 1 - len(found)
        return np.pad(found, (0, missing), constant_values=self._separator) if missing else found

    def counts(self, number: int) -> npt.NDArray[np.bool_]:
        """Shape (sequence + 1,): for each id of sequence `number`, True if it counts as a target; False for
        separators that fill it up."""
        begin, end = self._bounds(number)
        counts = np.zeros(self._sequence + 1, dtype=np.bool_)
        counts[: end - begin] = True if self._mask is None else self._mask[begin:end] != 0
        return counts

    def _bounds(self, number: int) -> tuple[int, int]:
        if self._rows is None:
            return number * self._sequence, (number + 1) * self._sequence + 1
        begin, end = self._rows[number]
        return int(begin), int(end)


def packed_rows(ends: Sequence[int] | npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    """Begin and end (rows, 2) of stretches of at most `room` tokens (2 or more), in order, the end excluded:
    as many whole documents as fit. ends: position behind each document, ascending. A longer document is cut
    into stretches that share a token, as windows do; its last one goes on with the documents after it.
    Stretches of one token are left out."""
    rows: list[tuple[int, int]] = []
    begin = last = 0
    for end in map(int, ends):
        if end - begin > room:
            if last > begin:
                rows.append((begin, last))
            begin = last
            while end - begin > room:
                rows.append((begin, begin + room))
                begin += room - 1
        last = end
    if last - begin > 1:  # a single token has no target
        rows.append((begin, last))
    return np.array([row for row in rows if row[1] - row[0] > 1], dtype=np.int64).reshape(-1, 2)


def spread(weights: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Order of a mixture's sources in a cycle of sum(weights) samples, by smooth weighted round robin: for
    each sample (source, number of samples that this source had before in the cycle)."""
    credit, taken, order = [0] * len(weights), [0] * len(weights), []
    for _ in range(sum(weights)):
        credit = [had + weight for had, weight in zip(credit, weights, strict=True)]
        source = max(range(len(weights)), key=lambda each: (credit[each], -each))
        credit[source] -= sum(weights)
        order.append((source, taken[source]))
        taken[source] += 1
    return tuple(order)


@dataclass(frozen=True)
class _Source:
    """Part of the training sequences: all, or a source of a mixture. name: part of the key of its
    permutations. weight: its samples in a cycle of the mixture. first: number of its first window among those
    of all sources."""

    name: str
    weight: int
    first: int
    windows: Windows


class Batches:
    """Batches of a run, computed on demand. Iterations count from 1, microbatches and rows from 0. Arrays of
    token ids are int64 (rows, sequence); targets that do not count are -100."""

    def __init__(self, corpus: Corpus, batch: BatchSection, seed: int) -> None:
        """Raises ConfigError if the training part has fewer windows than one iteration has rows, or the
        held-out part or a source of a mixture has none."""
        self._corpus = corpus
        self._batch = batch
        self._rows_per_iteration = batch.microbatches * batch.rows
        self._sources = _sources(corpus, batch.sequence)
        self._turns = spread([source.weight for source in self._sources])
        held_out = corpus.held_out_tokens, corpus.held_out_mask, corpus.held_out_ends
        self._held_out = Windows(*held_out, batch.sequence, corpus.separator)
        self.windows = sum(source.windows.count for source in self._sources)
        """Windows of the training part; an epoch has as many rows (of a mixture each source has epochs of its
        own)."""
        self.held_out_windows = self._held_out.count
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
        self._key = f"{corpus.fingerprint}/{corpus.tokenizer_hash}/{seed}"
        self._counted = lru_cache(maxsize=8)(self._count_targets)
        self._all_count = all(source.windows.all_count for source in self._sources)

    def microbatch(self, t: int, index: int) -> tuple[Ids, Ids]:
        """Token ids (inputs, targets) of microbatch `index` of iteration `t`, each (rows, sequence). Raises
        IndexError if there is none."""
        return self._cut([self._train(number) for number in self.window_numbers(t, index)])

    def weight(self, t: int) -> float:
        """Factor of the losses of iteration t: all its positions over those whose target counts; 1 if all
        do."""
        if self._all_count:
            return 1.0
        return self.tokens_per_iteration / max(1, self._counted(t))

    def window_weight(self, window: int) -> float:
        """Factor of the loss of held-out microbatch `window`: all its positions over those whose target
        counts; 1 if all do."""
        if self._held_out.all_count:
            return 1.0
        targets = self.evaluation_window(window)[1]
        return targets.size / max(1, int((targets != NOT_COUNTED).sum()))

    def _count_targets(self, t: int) -> int:
        return sum(
            int((self.microbatch(t, index)[1] != NOT_COUNTED).sum())
            for index in range(self._batch.microbatches)
        )

    def window_numbers(self, t: int, index: int) -> list[int]:
        """For each row of microbatch `index` of iteration `t` the number of its corpus window, after the
        epoch's permutation. The windows of a mixture are numbered one source after the other. Raises
        IndexError if there is no such microbatch."""
        if t < 1 or not 0 <= index < self._batch.microbatches:
            raise IndexError(f"there is no microbatch {index} in iteration {t}")
        first = (t - 1) * self._rows_per_iteration + index * self._batch.rows
        return [self._sample(first + row) for row in range(self._batch.rows)]

    def _sample(self, number: int) -> int:
        """Number of the corpus window that the run reads as its sample `number` (rows of all iterations,
        counted from 0): source by the cycle of the mixture, place by the epoch's permutation."""
        cycle, place = divmod(number, len(self._turns))
        turn = self._turns[place]
        source = self._sources[turn[0]]
        sample = cycle * source.weight + turn[1]
        return source.first + window_of(f"{self._key}/{source.name}", source.windows.count, sample)

    def evaluation_window(self, window: int) -> tuple[Ids, Ids]:
        """Token ids (inputs, targets) of held-out microbatch `window` (0, 1, ...: any, as the held-out part
        repeats), the same in every evaluation. Raises IndexError for a negative one."""
        if window < 0:
            raise IndexError(f"there is no evaluation window {window}")
        samples = range(window * self._batch.rows, (window + 1) * self._batch.rows)
        key = f"{self._key}/held out"
        windows = [window_of(key, self.held_out_windows, sample) for sample in samples]
        return self._cut([(self._held_out, window) for window in windows])

    def evaluation_bytes(self, window: int) -> int:
        """Number of UTF-8 bytes that those targets of `evaluation_window(window)` stand for that count;
        separators have none."""
        return self._bytes(self.evaluation_window(window)[1])

    def iteration_bytes(self, t: int) -> int:
        """Number of UTF-8 bytes that those targets of iteration `t` stand for that count; reads the whole
        batch."""
        return sum(self._bytes(self.microbatch(t, index)[1]) for index in range(self._batch.microbatches))

    def _bytes(self, targets: Ids) -> int:
        return int(self._corpus.token_bytes[targets[targets != NOT_COUNTED]].sum())

    def manifest_hash(self, t: int) -> str:
        """BLAKE3 (hex) of every row of iteration `t`: its window's number, its sequence + 1 tokens, and, in a
        corpus where some targets do not count, which of them do. Raises IndexError for t < 1."""
        hasher = blake3(b"anabranch batch manifest 1")
        for index in range(self._batch.microbatches):
            for window in self.window_numbers(t, index):
                hasher.update(window.to_bytes(8, "little"))
                windows, own = self._train(window)
                hasher.update(windows.ids(own).astype("<i8").tobytes())
                if not windows.all_count:
                    hasher.update(windows.counts(own).tobytes())
        return str(hasher.hexdigest())

    def _train(self, number: int) -> tuple[Windows, int]:
        """(Sequences of the source, number within that source) of training window `number`, which counts the
        windows of all sources, one source after the other."""
        source = next(each for each in reversed(self._sources) if number >= each.first)
        return source.windows, number - source.first

    @staticmethod
    def _cut(chosen: list[tuple[Windows, int]]) -> tuple[Ids, Ids]:
        """(inputs, targets) of the sequences `chosen`, given as (windows, number there); each int64
        (len(chosen), sequence), contiguous, with -100 for targets that do not count."""
        rows = np.stack([windows.ids(number) for windows, number in chosen])
        inputs, targets = np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])
        for row, (windows, number) in enumerate(chosen):
            if not windows.all_count:
                targets[row, ~windows.counts(number)[1:]] = NOT_COUNTED
        return inputs, targets


def _sources(corpus: Corpus, sequence: int) -> list[_Source]:
    """Sources of the training sequences: one for each source of a mixture, else one for the corpus. sequence:
    targets in each sequence. Raises ConfigError if a source of a mixture does not fill one sequence."""
    tokens, mask, ends = corpus.train_tokens, corpus.train_mask, corpus.train_ends
    if not corpus.mixture:
        return [_Source("train", 1, 0, Windows(tokens, mask, ends, sequence, corpus.separator))]
    found: list[_Source] = []
    begin = first = 0
    for number, component in enumerate(corpus.mixture):
        end = begin + component.tokens
        own = None if ends is None else ends[(ends > begin) & (ends <= end)] - begin
        part = Windows(
            tokens[begin:end], None if mask is None else mask[begin:end], own, sequence, corpus.separator
        )
        if not part.count:
            raise ConfigError(
                f'data.mixture: "{component.source}" has {component.tokens} tokens, which do not fill one '
                f"sequence of batch.sequence = {sequence}; leave it out, or lower batch.sequence"
            )
        found.append(_Source(f"train {number}", component.weight, first, part))
        begin, first = end, first + part.count
    return found
