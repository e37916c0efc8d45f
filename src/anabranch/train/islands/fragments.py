"""Fragments of a model: groups of tensors that islands agree on by turns (Douillard et al., "Streaming
DiLoCo", arXiv 2501.18512). Each round is the turn of one fragment."""

from __future__ import annotations

import re

from anabranch.train.model.layout import Layout

_BLOCK = re.compile(r"\.(\d+)\.")

Bounds = list[tuple[int, int]]
"""Ranges of a flat vector, in order, none next to another."""


def fragment_of(name: str, fragments: int) -> int:
    """Fragment of a tensor: block b is of fragment b mod `fragments` (blocks far apart, as in the paper);
    embedding, final norm and head are of the last one."""
    block = _BLOCK.search(name)
    return int(block[1]) % fragments if block else fragments - 1


def turn(round_number: int, fragments: int) -> int:
    """Fragment, counted from 0, that is exchanged in the n-th round (n = 1, 2, ...): the first round
    exchanges fragment 0, and the fragments take turns."""
    return (round_number - 1) % fragments


def fragment_bounds(layout: Layout, fragments: int, fragment: int) -> Bounds:
    """Ranges of the flat vector that a fragment has; with one fragment the whole vector."""
    found: Bounds = []
    for name in layout.names:
        if fragment_of(name, fragments) != fragment:
            continue
        begin, end = layout.bounds[name]
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found
