"""Windows of tokens for a task's texts, as the EleutherAI harness cuts them.

Context and continuation are encoded together, so that the first token of the continuation is the one that the
text has; spaces at the end of a context go to the continuation. An empty context is the token that separates
documents. A context that is too long loses its beginning. A plain text is cut into windows of `max_sequence`
predicted tokens; the last one also sees the tokens before it that fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from anabranch.errors import UserError
from anabranch.evaluation.log_likelihood import Window


class Tokenizer(Protocol):
    """Tokenizer of a model; `separator` is the token before a document."""

    separator: int

    def encode(self, text: str) -> list[int]: ...


def continuation_window(
    tokenizer: Tokenizer, context: str, continuation: str, max_sequence: int, where: str
) -> Window:
    """Window that scores `continuation` after `context`. Raises UserError, naming `where`, if the
    continuation has no token of its own, or more than `max_sequence`."""
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    whole, before = tokenizer.encode(context + continuation), tokenizer.encode(context) if context else []
    scored = len(whole) - len(before)
    if scored < 1:
        raise UserError(
            f"{where}: {continuation[:40]!r} has no token of its own after its context, as the tokenizer "
            "merges both; divide them elsewhere, or by a delimiter"
        )
    if scored > max_sequence:
        raise UserError(
            f"{where}: {continuation[:40]!r} ... has {scored} tokens, and a sequence of the model at most "
            f"{max_sequence}; shorten it"
        )
    ids = whole if before else [tokenizer.separator, *whole]
    return Window(tuple(ids[-(max_sequence + 1) :]), scored)


def text_windows(tokenizer: Tokenizer, ids: Sequence[int], max_sequence: int) -> Iterator[Window]:
    """Windows, in order, in which each token of a text (`ids`) is predicted once; none for an empty text."""
    whole = (tokenizer.separator, *ids)
    for begin in range(0, len(ids), max_sequence):
        end = min(begin + max_sequence, len(ids))
        yield Window(whole[max(0, end - max_sequence) : end + 1], end - begin)
