"""The command `evaluate`: a run directory and its exported folder, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import anabranch
from anabranch.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "python_choices.jsonl"
#: Largest difference of a log-likelihood in nats.
TOLERANCE = 1e-5
LINES = {
    "choice": [
        {"context": "line 3 of", "choices": ["text", "the quick brown fox", "größe"], "answer": 0},
        {"context": "", "choices": ["line", "xyz"], "answer": 0},
        {"context": "the quick brown" * 12, "choices": ["fox", "dog"], "answer": 0},
    ],
    "cloze": [{"context": "the quick brown", "target": "fox"}, {"context": "line 1 of text", "target": "7:"}],
    "text": [{"text": "line 2 of text 3: the quick brown fox\n" * n} for n in (1, 4)],
}


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    assert main(["evaluate", *map(str, arguments), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


def task_of(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES[kind]))
    return path


@pytest.mark.parametrize("kind", LINES)
def test_log_likelihoods_are_those_of_transformers(kind: str, trained: Path, tmp_path: Path) -> None:
    """Log-likelihoods of a run and of its exported folder equal those that `transformers` gives, one row at a
    time, with the library's own tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = anabranch.export(trained, tmp_path / "hf")
    task = task_of(tmp_path, kind)
    ours = anabranch.evaluate(folder, task)
    assert ours.scores == anabranch.evaluate(trained, task).scores

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    most, separator = theirs.config.max_position_embeddings, 256

    def nats(before: list[int], ids: list[int]) -> float:
        """Log-likelihood of `ids` after `before`, each token from as many before it as fit."""
        total, whole = 0.0, before + ids
        for begin in range(len(before), len(whole), most):
            end = min(begin + most, len(whole))
            window = whole[max(0, end - most - 1) : end]
            with torch.no_grad():
                logits = theirs(torch.tensor([window[:-1]])).logits[0]
            log_p = torch.log_softmax(logits.double(), -1)
            rows = range(len(window) - 1 - (end - begin), len(window) - 1)
            total += sum(float(log_p[row, window[row + 1]]) for row in rows)
        return total

    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    for line, scored in zip(LINES[kind], ours.scored, strict=True):
        context, delimiter = str(line.get("context", "")), " " if line.get("context") else ""
        texts = line.get("choices", [line.get("target", line.get("text"))])
        assert isinstance(texts, list)
        # Bytes are the tokens here, so that the parts of a text may be encoded apart.
        expected = [nats(encoded(context) or [separator], encoded(delimiter + text)) for text in texts]
        got = [one.nats for one in scored]
        assert (sum(got) if kind == "text" else got) == pytest.approx(
            sum(expected) if kind == "text" else expected, abs=TOLERANCE
        )


def test_the_command_and_the_interface_agree(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_of(tmp_path, "choice")
    result = evaluated(capsys, trained, "--task", task)
    assert result == evaluated(capsys, trained, "--task", task)
    assert (result["version"], result["kind"], result["items"], result["step"]) == (1, "choice", 3, 3)
    found = anabranch.evaluate(anabranch.load(trained), task)
    assert found.as_dict() == result
    assert evaluated(capsys, trained, "--task", task, "--limit", 2)["items"] == 2

    assert main(["evaluate", str(trained), "--task", str(task)]) == 0
    printed = capsys.readouterr().out
    assert "3 items" in printed and "accuracy_by_character" in printed and "±" in printed


def test_the_example_task_is_well_formed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluated(capsys, trained, "--task", EXAMPLE)
    scores = result["scores"]
    assert isinstance(scores, dict) and result["items"] == 24
    assert scores["chance"] == {"value": 0.25, "standard_error": None}
    answers = [json.loads(line)["answer"] for line in EXAMPLE.read_text("utf-8").splitlines()]
    assert {answers.count(number) for number in range(4)} == {6}  # a model that prefers a place gains nothing


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (("--task", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("--task", "bad.jsonl"), "bad.jsonl, line 2 lacks the key answer"),
        (("--task", "bad.jsonl", "--limit", "-1"), "--limit"),
        (("--task", "good.jsonl", "--device", "cuda:99"), "is not on this machine"),
        (("--task", "good.jsonl", "--device", "abacus"), "is not on this machine"),
        (("--task", "good.jsonl", "--step", "4"), "step"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...],
    problem: str,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    good = json.dumps(LINES["choice"][0])
    Path("good.jsonl").write_text(good)
    Path("bad.jsonl").write_text(good + '\n{"context": "a", "choices": ["b", "c"]}\n')
    assert main(["evaluate", str(trained), *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and problem in message
