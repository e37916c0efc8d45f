"""Wording of texts for people: untrusted names made safe to show, numbers, durations, lists, tables."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping

#: Most characters of a name or region, and of a sentence.
NAME_MAX, SENTENCE_MAX = 48, 400
#: Most characters of an error, which may name several paths, and of a text in an own event.
ERROR_MAX = 4000
#: Unicode categories of invisible or reordering characters, which could make one name look like another.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
#: host:port with a numeric or named host, or a numeric host alone.
_ADDRESS = re.compile(
    r"\[[0-9a-fA-F:.%]+\](:\d+)?|\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b"
    r"|\b(localhost|([\w-]+\.)+[A-Za-z][\w-]*):\d{2,5}\b"
)
#: Digits of a peer's id in texts of the protocol.
ID_DIGITS = 8
_ID = re.compile(r"\b[0-9a-f]{8}\b")
#: Most accents on one letter; more would be drawn over other lines.
_ACCENTS_MAX = 2


def plain(text: str, longest: int = SENTENCE_MAX) -> str:
    """Copy of `text` on one line, without control and reordering characters, of at most `longest` characters
    (the last is "…" if it was cut). Every text that another machine could have written passes through here,
    or through `plain_lines`, before it reaches a terminal or the event log."""
    if text.isascii() and text.isprintable() and len(text) <= longest and "  " not in text:
        return text.strip()
    shown: list[str] = []
    accents = 0
    for character in text[: 4 * longest]:
        category = unicodedata.category(character)
        accents = accents + 1 if category in ("Mn", "Me") else 0
        if category not in _HIDDEN:
            if accents <= _ACCENTS_MAX:
                shown.append(character)
        elif character.isspace():
            shown.append(" ")
    words = " ".join("".join(shown).split())
    return words if len(words) <= longest else words[: longest - 1] + "…"


def plain_lines(text: str) -> str:
    """Copy of `text`, such as a report or generated text, without control and reordering characters; line
    breaks and tabs stay."""
    if text.isprintable():
        return text
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in _HIDDEN)


def escaped(line: str) -> str:
    """Line of JSON with the same meaning whose control and reordering characters are escaped, as JSON permits
    in its strings."""
    if line.isprintable():
        return line
    return "".join(
        c if c.isprintable() or unicodedata.category(c) not in _HIDDEN else json.dumps(c)[1:-1] for c in line
    )


def without_addresses(text: str) -> str:
    """Copy of `text` with "its address" in place of each network address, which viewers must not learn of
    volunteers."""
    return _ADDRESS.sub("its address", text)


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Copy of `text` in which beginnings of peers' ids (ID_DIGITS digits) are replaced by names. names:
    beginning -> name; others stay."""
    return _ID.sub(lambda found: names.get(found[0]) or found[0], text)


def counted(number: int, noun: str, ending: str = "s") -> str:
    """Number with its noun: "1 microbatch", "1,200 microbatches". ending: what the plural adds to the
    noun."""
    return f"{number:,} {noun}{'' if number == 1 else ending}"


def listed(names: list[str], most: int = 3) -> str:
    """Names in words: "a, b and c", "a, b, c and 4 others"; "nobody" without names. most: names that are
    given before "others"; one more is given, too, if it is the last."""
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} others"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "nobody"


def duration(seconds: float) -> str:
    """Seconds, rounded, as m:ss or h:mm:ss; negative ones as 0:00."""
    hours, rest = divmod(max(0, round(seconds)), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def number(value: float | None, form: str = ".3f", missing: str = "not finite") -> str:
    """Text of `value` in the format `form` (a format specification); the text `missing` for None."""
    return missing if value is None else f"{value:{form}}"


def table(rows: list[list[str]], right: bool = False) -> list[str]:
    """Lines of a table with aligned columns, two spaces apart. rows: texts of each row's cells, equally many.
    right: True to align all columns but the first to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if right and column else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
