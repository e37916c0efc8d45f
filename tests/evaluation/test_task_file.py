"""Task files: their lines, and errors that name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.errors import UserError
from anabranch.evaluation.task_file import read_task

CHOICE = b'{"context": "a", "choices": ["b", "c"], "answer": 1, "id": "x"}\n'
CLOZE = b'{"context": "a", "target": "b", "delimiter": ""}\n'


def task_of(folder: Path, data: bytes) -> Path:
    path = folder / "task.jsonl"
    path.write_bytes(data)
    return path


def test_lines_of_each_kind(tmp_path: Path) -> None:
    task = read_task(task_of(tmp_path, CHOICE + b"\n" + CHOICE))
    assert (task.kind, len(task.items)) == ("choice", 2)
    [item, last] = task.items
    assert (item.context, item.continuations, item.delimiter, item.answer) == ("a", ("b", "c"), " ", 1)
    assert last.where.endswith("task.jsonl, line 3")
    assert len(read_task(task.path, limit=1).items) == 1

    [item] = read_task(task_of(tmp_path, CLOZE)).items
    assert (item.context, item.continuations, item.delimiter) == ("a", ("b",), "")
    [item] = read_task(task_of(tmp_path, b'{"context": "", "target": "b"}')).items
    assert item.delimiter == ""
    [item] = read_task(task_of(tmp_path, b'\xef\xbb\xbf{"text": "b c"}')).items
    assert item.is_text and item.continuations == ("b c",)


def test_another_file_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "held-out.txt"
    path.write_text('{"no": "JSON"}\nline\n')
    task = read_task(path)
    assert task.kind == "text" and [item.continuations for item in task.items] == [
        ('{"no": "JSON"}\nline\n',)
    ]


@pytest.mark.parametrize(
    "line, problem",
    [
        (b"{", "is not JSON"),
        (b"[1]", "is not a JSON object"),
        (b'{"question": "a"}', "none of the keys choices, target, text"),
        (b'{"context": "a", "choices": ["b", "c"]}', "lacks the key answer"),
        (b'{"choices": ["b", "c"], "answer": 0}', "lacks the key context"),
        (b'{"context": "a", "choices": ["b", "c"], "answer": 0, "delimeter": ""}', "unknown key 'delimeter'"),
        (b'{"context": "a", "choices": ["b"], "answer": 0}', "two texts or more"),
        (b'{"context": "a", "choices": "bc", "answer": 0}', "two texts or more"),
        (b'{"context": "a", "choices": ["b", ""], "answer": 0}', "choice 1 must be a text that is not empty"),
        (b'{"context": "a", "choices": ["b", 3], "answer": 0}', "choice 1 must be a text"),
        (b'{"context": "a", "choices": ["b", "c"], "answer": 2}', "number of a choice, 0 to 1"),
        (b'{"context": "a", "choices": ["b", "c"], "answer": true}', "number of a choice, 0 to 1"),
        (b'{"context": "a", "choices": ["b", "c"], "answer": "b"}', "number of a choice, 0 to 1"),
        (b'{"context": null, "choices": ["b", "c"], "answer": 0}', "context must be a text"),
        (b'{"context": "\\ud800", "choices": ["b", "c"], "answer": 0}', "half a surrogate pair"),
        (b'{"context": "\xff", "choices": ["b", "c"], "answer": 0}', "is not UTF-8 text"),
        (b'{"context": "a", "target": "b"}', "is of the kind cloze, the lines before it choice"),
    ],
)
def test_a_bad_line_is_named(line: bytes, problem: str, tmp_path: Path) -> None:
    path = task_of(tmp_path, CHOICE + line + b"\n")
    with pytest.raises(UserError, match=r"task\.jsonl, line 2\b") as found:
        read_task(path)
    assert problem in str(found.value)


def test_files_without_a_task_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.jsonl cannot be read"):
        read_task(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="has no line"):
        read_task(task_of(tmp_path, b"\n\n"))
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(UserError, match="holds no text"):
        read_task(tmp_path / "blank.txt")
