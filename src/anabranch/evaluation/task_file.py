"""Task files: lines of JSON (.jsonl), each a question with choices, a text with its target, or a plain text.

Lines by kind, which is the same for the whole file:

    choice   {"context": "The sky is", "choices": ["blue", "square"], "answer": 0}
    cloze    {"context": "Mary had a little", "target": "lamb"}
    text     {"text": "A document, whose tokens are all predicted."}

A delimiter, a space unless the line has the key "delimiter", stands between a context and its continuation.
"id" may name a line. A file with another ending than .jsonl is one plain text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from blake3 import blake3

from anabranch.errors import UserError

#: Kind of a task -> the keys that each of its lines has.
KEYS = {"choice": ("context", "choices", "answer"), "cloze": ("context", "target"), "text": ("text",)}
#: Keys that a line of a kind may have besides.
FURTHER = {"choice": ("delimiter", "id"), "cloze": ("delimiter", "id"), "text": ("id",)}
#: Key by which the kind of a line is known.
MARKS = {"choices": "choice", "target": "cloze", "text": "text"}
FORMAT = "see docs/how-to/evaluate-a-model.md for the format"


@dataclass(frozen=True)
class Item:
    """Line of a task. where: file and line, for messages. continuations: texts that are scored after
    `context`: the choices, the target, or the plain text. delimiter: text between `context` and each of them.
    answer: number of the right choice, from 0. is_text: True for plain text."""

    where: str
    context: str
    continuations: tuple[str, ...]
    delimiter: str = ""
    answer: int = 0
    is_text: bool = False


@dataclass(frozen=True)
class Task:
    """Task as its file has it. kind: "choice", "cloze" or "text", of all its items. fingerprint: BLAKE3 of
    the whole file, lines that were not taken included."""

    path: Path
    kind: str
    items: tuple[Item, ...]
    fingerprint: str


def read_task(path: str | Path, limit: int = 0) -> Task:
    """Task in the file `path`. limit: most lines to take, from the front; 0: all. Lines behind them are not
    checked, and a plain text is taken whole. Raises UserError naming file and line for what is not a task."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"task {path} cannot be read ({error.strerror}); name a .jsonl or a text file"
        ) from None
    fingerprint = blake3(data).hexdigest()
    if path.suffix != ".jsonl":
        text = _decoded(data, str(path))
        if not text.strip():
            raise UserError(f"{path} holds no text; name a file with some")
        return Task(path, "text", (Item(str(path), "", (text,), is_text=True),), fingerprint)
    lines = ((number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip())
    kind, items = "", []
    for number, line in islice(lines, limit or None):
        where = f"{path}, line {number}"
        own, record = _record(line, where)
        kind = kind or own
        if own != kind:
            raise UserError(f"{where} is of the kind {own}, the lines before it {kind}; write two files")
        items.append(_item(kind, record, where))
    if not items:
        raise UserError(f"{path} has no line; {FORMAT}")
    return Task(path, kind, tuple(items), fingerprint)


def _record(line: bytes, where: str) -> tuple[str, dict[str, Any]]:
    """(kind, value) of a line. Raises UserError if it is no JSON object with the keys of its kind."""
    try:
        record = json.loads(_decoded(line, where))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); {FORMAT}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where} is not a JSON object; {FORMAT}")
    kind = next((kind for mark, kind in MARKS.items() if mark in record), None)
    if kind is None:
        raise UserError(f"{where} has none of the keys {', '.join(MARKS)}; {FORMAT}")
    for key in KEYS[kind]:
        if key not in record:
            raise UserError(f"{where} lacks the key {key}; {FORMAT}")
    for key in record:
        if key not in KEYS[kind] + FURTHER[kind]:
            raise UserError(f"{where} has the unknown key {key!r}; remove it ({FORMAT})")
    return kind, record


def _item(kind: str, record: dict[str, Any], where: str) -> Item:
    if kind == "text":
        return Item(where, "", (_text(record, "text", where),), is_text=True)
    context = _text(record, "context", where, may_be_empty=True)
    delimiter = _text({"delimiter": " ", **record}, "delimiter", where, may_be_empty=True)
    if not context:
        delimiter = ""  # nothing to divide: the continuation begins the document
    if kind == "cloze":
        return Item(where, context, (_text(record, "target", where),), delimiter)
    choices = record["choices"]
    if not isinstance(choices, list) or len(choices) < 2:
        raise UserError(f"{where}: choices must be a list of two texts or more")
    texts = tuple(_text({f"choice {n}": each}, f"choice {n}", where) for n, each in enumerate(choices))
    answer = record["answer"]
    if type(answer) is not int or not 0 <= answer < len(texts):
        raise UserError(f"{where}: answer must be the number of a choice, 0 to {len(texts) - 1}")
    return Item(where, context, texts, delimiter, answer)


def _text(record: dict[str, Any], key: str, where: str, may_be_empty: bool = False) -> str:
    value = record[key]
    if not isinstance(value, str) or not (value or may_be_empty):
        raise UserError(f"{where}: {key} must be a text" + ("" if may_be_empty else " that is not empty"))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: {key} has half a surrogate pair, which no text has; correct it") from None
    return value


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text (byte {error.start}); convert it") from None
