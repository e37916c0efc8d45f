"""Conversations as text with the parts that are trained on: records, templates, turns.

A template is chosen by name from a few; no template language is executed. Markers such as <|im_start|> are
single tokens where the tokenizer has them, and else text. Text of a record never becomes a marker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from anabranch.errors import ConfigError

#: Names of the field with the messages, if the run file names none.
MESSAGES = ("messages", "conversations", "conversation")
#: Names of the fields of a prompt, of an addition to it, and of the answer.
PROMPTS = ("prompt", "instruction", "question")
ADDITIONS = ("input", "context")
ANSWERS = ("completion", "response", "output", "answer")
FIELDS = (*MESSAGES, *PROMPTS, *ADDITIONS, *ANSWERS)
#: Other names of roles.
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


@dataclass(frozen=True)
class Piece:
    """Part of a conversation's text. counts: True if its tokens count as targets of the loss. marker: True if
    it is encoded as the one token of that spelling, where the tokenizer has such a token."""

    text: str
    counts: bool = False
    marker: bool = False


def pieces_of(record: Mapping[str, Any], field: str, template: str, name: str) -> tuple[Piece, ...]:
    """Pieces of the conversation in a record. field: key of its messages, which is tried before the usual
    ones (MESSAGES) and a prompt with an answer. template: "plain" or "chatml". name: of the record, for error
    messages. Raises ConfigError if there is no conversation, a malformed one, or no answer in it."""
    turns = list(_turns(record, field, name))
    if not any(role == "assistant" for role, _ in turns):
        raise ConfigError(f"{name}: nobody answers in this conversation; remove it")
    build = {"plain": _plain, "chatml": _chatml}[template]
    return tuple(piece for role, text in turns for piece in build(role, text) if piece.text)


def _turns(record: Mapping[str, Any], field: str, name: str) -> Iterator[tuple[str, str]]:
    """(role, text) of each turn of the conversation in a record. Raises ConfigError if there is none, or a
    message of it has no known role or no text."""
    of_messages = next((key for key in (field, *MESSAGES) if isinstance(record.get(key), list)), None)
    if of_messages is not None:
        for message in record[of_messages]:
            if not isinstance(message, Mapping):
                raise ConfigError(f'{name}: a message in "{of_messages}" has no role and content')
            role = message.get("role", message.get("from"))
            text = message.get("content", message.get("value"))
            role = ROLES.get(str(role), str(role))
            if role not in ("system", "user", "assistant") or not isinstance(text, str):
                raise ConfigError(
                    f"{name}: a message has role {role!r} and content of type {type(text).__name__}; roles "
                    "are system, user and assistant, and content is text"
                )
            yield role, clean(text)
        return
    prompt, answer = _first(record, PROMPTS), _first(record, ANSWERS)
    if prompt is None or answer is None:
        raise ConfigError(
            f"{name} has neither messages ({', '.join(dict.fromkeys((field, *MESSAGES)))}) nor a prompt "
            f"({', '.join(PROMPTS)}) with its answer ({', '.join(ANSWERS)}); its fields are "
            f"{', '.join(record) or '(none)'}: set data.text_field"
        )
    addition = _first(record, ADDITIONS)
    yield "user", clean(f"{prompt}\n\n{addition}" if addition else prompt)
    yield "assistant", clean(answer)


def _first(record: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    return next((record[name] for name in names if isinstance(record.get(name), str)), None)


def clean(text: str) -> str:
    """Text with halves of surrogate pairs, which JSON can spell and UTF-8 cannot hold, joined to characters;
    single halves become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", errors="replace")


def _plain(role: str, text: str) -> Iterator[Piece]:
    if role == "assistant":
        yield Piece("Assistant: ")
        yield Piece(f"{text}\n\n", counts=True)
    else:
        yield Piece(f"User: {text}\n\n" if role == "user" else f"{text}\n\n")


def _chatml(role: str, text: str) -> Iterator[Piece]:
    counts = role == "assistant"
    yield Piece("<|im_start|>", marker=True)
    yield Piece(f"{role}\n")
    yield Piece(text, counts=counts)
    yield Piece("<|im_end|>", counts=counts, marker=True)
    yield Piece("\n")
