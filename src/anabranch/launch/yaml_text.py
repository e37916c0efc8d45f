"""Plain values as YAML text, for files that people read: mappings, lists, scalars, texts of several lines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

#: Texts that mean the same without quotes: words that YAML takes for nothing else.
_PLAIN = re.compile(r"[A-Za-z_/][\w./-]*")
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def document(values: Mapping[str, object], comment: str = "") -> str:
    """YAML document; `comment` is put before it, a `#` before each of its lines."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    return head + "\n".join(_lines(values)) + "\n"


def _lines(value: object) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, inner in value.items() for line in _entry(f"{_scalar(key)}:", inner)]
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return [line for inner in value for line in _item(inner)]
    return [_scalar(value)]


def _entry(key: str, value: object) -> list[str]:
    if isinstance(value, str) and "\n" in value and _is_block(value):
        return [f"{key} |", *(f"  {line}" if line else "" for line in value[:-1].split("\n"))]
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str) and value:
        return [key, *(f"  {line}" for line in _lines(value))]
    return [f"{key} {_scalar(value)}"]


def _item(value: object) -> list[str]:
    if isinstance(value, str):
        return _entry("-", value)
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" if line else "" for line in rest)]


def _is_block(text: str) -> bool:
    """True if `text`, of several lines, can be written as a YAML literal block (`|`) without a change."""
    ends = text.endswith("\n") and not text.endswith("\n\n") and not text.startswith((" ", "\n"))
    return ends and all(line.isprintable() and line.strip() for line in text[:-1].split("\n"))


def _scalar(value: object) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    # JSON's scalars and empty collections are YAML's, too.
    return json.dumps(value)
