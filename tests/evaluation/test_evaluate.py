"""Scores of a model whose logits are known, against values that are calculated by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.errors import UserError
from anabranch.evaluation import log_likelihood
from anabranch.evaluation.evaluate import EvaluatedModel, Evaluation, evaluate
from anabranch.evaluation.task_file import read_task
from anabranch.train.model.linear import PlainWeights

#: Characters of the known model, in order of their ids; "|" separates documents.
LETTERS = "|abc d"
#: Probability of the next letter after each letter; a row for each of LETTERS.
NEXT = [
    [0.05, 0.5, 0.2, 0.1, 0.1, 0.05],  # after |
    [0.05, 0.1, 0.6, 0.1, 0.1, 0.05],  # after a
    [0.05, 0.1, 0.1, 0.4, 0.3, 0.05],  # after b
    [0.05, 0.2, 0.3, 0.1, 0.3, 0.05],  # after c
    [0.05, 0.3, 0.2, 0.1, 0.1, 0.25],  # after a space
    [0.5, 0.1, 0.1, 0.1, 0.1, 0.1],  # after d
]


class Letters:
    """Tokenizer with an id for each of LETTERS, and "ab" as a token of its own if `merges`."""

    separator = 0

    def __init__(self, merges: bool = False) -> None:
        self._merges = merges

    def encode(self, text: str) -> list[int]:
        if self._merges:
            text = text.replace("ab", "d")
        return [LETTERS.index(letter) for letter in text]


class Bigrams:
    """Model whose logits depend on the last token alone: logs of NEXT, times a factor that cancels. Raises if
    a sequence is longer than max_sequence."""

    def __init__(self, max_sequence: int = 16) -> None:
        self.config = SimpleNamespace(blocks=1, vocab_size=len(LETTERS), max_sequence=max_sequence)
        self.rows: list[int] = []

    def embed(self, weights: object, ids: Tensor) -> Tensor:
        assert ids.shape[1] <= self.config.max_sequence
        self.rows.append(len(ids))
        return torch.nn.functional.one_hot(ids, len(LETTERS)).float()

    def block(self, weights: object, block: int, x: Tensor) -> Tensor:
        return x

    def head(self, weights: object, x: Tensor, at: int | None = None) -> Tensor:
        return x @ (torch.tensor(NEXT).log() + 3.0)


def known(max_sequence: int = 16, merges: bool = False, **changes: Any) -> EvaluatedModel:
    functions: Any = Bigrams(max_sequence)
    for name, value in changes.items():
        setattr(functions, name, value)
    cpu = torch.device("cpu")
    return EvaluatedModel(Path("known"), 7, functions, PlainWeights({}), Letters(merges), cpu)


def scores(
    folder: Path, lines: str, model: EvaluatedModel | None = None, name: str = "task.jsonl"
) -> Evaluation:
    (folder / name).write_text(lines)
    return evaluate(model or known(), read_task(folder / name))


def value(found: Evaluation, name: str) -> float:
    [score] = [score for key, score in found.scores.items() if key == name]
    assert score.value is not None
    return score.value


def error(found: Evaluation, name: str) -> float | None:
    return found.scores[name].standard_error


def test_multiple_choice(tmp_path: Path) -> None:
    found = scores(
        tmp_path,
        # after "a": p(b) = 0.6, p(bc) = 0.6·0.4 = 0.24, p(a) = 0.1
        '{"context": "a", "choices": ["b", "bc", "a"], "answer": 0, "delimiter": ""}\n'
        # the sum prefers "a" (0.1), the mean per letter "bcb": (0.6·0.4·0.3)^(1/3) = 0.42
        '{"context": "a", "choices": ["a", "bcb"], "answer": 1, "delimiter": ""}\n'
        # after "a" a space (0.1): then p(d) = 0.25, p(a) = 0.3; the delimiter counts for neither's length
        '{"context": "a", "choices": ["d", "a"], "answer": 1}\n'
        # an empty context is the separator: p(a) = 0.5
        '{"context": "", "choices": ["b", "a"], "answer": 1}\n',
    )
    assert (found.kind, found.items, found.samples, found.step) == ("choice", 4, "items", 7)
    sums = [[each.nats for each in item] for item in found.scored]
    expected = [[0.6, 0.24, 0.1], [0.1, 0.072], [0.1 * 0.25, 0.1 * 0.3], [0.2, 0.5]]
    for got, probabilities in zip(sums, expected, strict=True):
        assert got == pytest.approx([math.log(p) for p in probabilities], rel=1e-6)
    assert [each.tokens for each in found.scored[2]] == [2, 2]
    assert value(found, "accuracy") == 0.75 and value(found, "accuracy_by_character") == 1.0
    assert value(found, "accuracy_by_token") == 1.0
    assert error(found, "accuracy") == pytest.approx(0.25)  # deviation of (1, 0, 1, 1) is 0.5, over sqrt(4)
    assert error(found, "accuracy_by_character") == 0.0
    assert value(found, "chance") == pytest.approx((1 / 3 + 1 / 2 + 1 / 2 + 1 / 2) / 4)


def test_characters_and_tokens_may_disagree(tmp_path: Path) -> None:
    """Choice "ab" is one token of p = 0.05, "cb" two of 0.1 and 0.3: 0.17 a token and a letter (0.22)."""
    line = '{"context": "c", "choices": ["ab", "cb"], "answer": 1, "delimiter": ""}'
    found = scores(tmp_path, line, known(merges=True))
    assert [each.tokens for each in found.scored[0]] == [1, 2]
    assert value(found, "accuracy") == 0.0 and value(found, "accuracy_by_character") == 0.0
    assert value(found, "accuracy_by_token") == 1.0 and error(found, "accuracy") is None


def test_cloze(tmp_path: Path) -> None:
    found = scores(
        tmp_path,
        '{"context": "a", "target": "bc", "delimiter": ""}\n'  # 0.6·0.4, both the most likely
        '{"context": "a", "target": "bb", "delimiter": ""}\n'  # 0.6·0.1
        '{"context": "b ", "target": "a", "delimiter": ""}\n',  # the space is the target's: 0.3·0.3
    )
    nats = [-math.log(p) for p in (0.24, 0.06, 0.09)]
    assert [each.greedy for [each] in found.scored] == [True, False, False]
    assert [each.tokens for [each] in found.scored] == [2, 2, 2]
    assert value(found, "accuracy") == pytest.approx(1 / 3)
    mean = sum(nats) / 3
    deviation = math.sqrt(sum((each - mean) ** 2 for each in nats) / 2)
    assert value(found, "perplexity") == pytest.approx(math.exp(mean), rel=1e-6)
    assert error(found, "perplexity") == pytest.approx(math.exp(mean) * deviation / math.sqrt(3), rel=1e-6)
    assert value(found, "nats_per_token") == pytest.approx(mean / 2, rel=1e-6)


def bigram_nats(text: str) -> float:
    pairs = zip("|" + text, text, strict=False)
    return -sum(math.log(NEXT[LETTERS.index(a)][LETTERS.index(b)]) for a, b in pairs)


@pytest.mark.parametrize("max_sequence", [3, 4, 7, 16])
def test_a_plain_text_is_predicted_once_in_windows(max_sequence: int, tmp_path: Path) -> None:
    text = "abc ab dab"
    found = scores(tmp_path, text, known(max_sequence), "text.txt")
    tokens, nats = len(text), bigram_nats(text)
    assert sum(each.tokens for each in found.scored[0]) == tokens
    assert len(found.scored[0]) == -(-tokens // max_sequence) and found.samples == "windows"
    assert value(found, "nats_per_token") == pytest.approx(nats / tokens, rel=1e-6)
    assert value(found, "perplexity") == pytest.approx(math.exp(nats / tokens), rel=1e-6)
    assert value(found, "bits_per_byte") == pytest.approx(nats / tokens / math.log(2), rel=1e-6)
    assert value(found, "word_perplexity") == pytest.approx(math.exp(nats / 3), rel=1e-6)
    errors = [score.standard_error for score in found.scores.values()]
    assert all(each is None for each in errors) == (max_sequence == 16)


def test_documents_are_the_samples(tmp_path: Path) -> None:
    texts = ["abc", "ab ab", "d"]
    found = scores(tmp_path, "".join(f'{{"text": "{text}"}}\n' for text in texts))
    nats, sizes = [bigram_nats(text) for text in texts], [3, 5, 1]
    rate = sum(nats) / 9
    squares = sum((n - rate * size) ** 2 for n, size in zip(nats, sizes, strict=True))
    assert found.samples == "documents" and found.items == 3
    assert value(found, "nats_per_token") == pytest.approx(rate, rel=1e-6)
    assert error(found, "nats_per_token") == pytest.approx(math.sqrt(squares * 3 / 2) / 9, rel=1e-5)
    assert error(found, "bits_per_byte") == pytest.approx(
        math.sqrt(squares * 3 / 2) / 9 / math.log(2), rel=1e-5
    )


def test_batches_change_no_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(f'{{"text": "{"abc d"[: 1 + n % 5] * (1 + n)}"}}\n' for n in range(9))
    together = scores(tmp_path, lines, model := known(64))
    assert model.functions.rows == [9]  # type: ignore[attr-defined]
    monkeypatch.setattr(log_likelihood, "BATCH_ROWS", 2)
    monkeypatch.setattr(log_likelihood, "POSITIONS", 3)
    apart = scores(tmp_path, lines, model := known(64))
    assert model.functions.rows == [2, 2, 2, 2, 1]  # type: ignore[attr-defined]
    for name, score in together.scores.items():
        assert value(apart, name) == pytest.approx(score.value, rel=1e-6)


def test_a_long_context_loses_its_beginning(tmp_path: Path) -> None:
    found = scores(tmp_path, f'{{"context": "{"abc" * 20}", "target": "a", "delimiter": ""}}', known(4))
    assert found.scored[0][0].nats == pytest.approx(math.log(0.2), rel=1e-6)


def test_lines_that_cannot_be_scored_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 1: 'bab ab' .* has 6 tokens, .* at most 4"):
        scores(tmp_path, '{"context": "a", "target": "bab ab", "delimiter": ""}', known(4))
    with pytest.raises(UserError, match=r"line 1: 'b' has no token of its own"):
        scores(tmp_path, '{"context": "a", "target": "b", "delimiter": ""}', known(merges=True))
    with pytest.raises(UserError, match="a loss of its own"):
        scores(tmp_path, '{"text": "a"}', known(loss=print))
    infinite = known(head=lambda weights, x, at=None: x @ torch.full((6, 6), math.nan))
    with pytest.raises(UserError, match=r"line 1: the model's logits are not finite"):
        scores(tmp_path, '{"text": "a"}', infinite)
    few = known()
    few.functions.config.vocab_size = 5  # type: ignore[misc]
    with pytest.raises(UserError, match="tokenizer has the id 5, its model 5 ids"):
        scores(tmp_path, '{"text": "d"}', few)
