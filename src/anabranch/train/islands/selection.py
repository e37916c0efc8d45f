"""Selection of the values of an island's change that are sent in a round; the others count as zero."""

from __future__ import annotations

import torch
from torch import Tensor

from anabranch.config import RoundSection
from anabranch.train.islands.fragments import fragment_bounds, turn
from anabranch.train.model.layout import Layout

#: Values of a chunk, of which the greatest are sent: those of the SparseLoCo paper (64 x 64).
CHUNK = 4096


def selected(
    part: RoundSection, layout: Layout, change: Tensor, weights: Tensor, round_number: int
) -> Tensor | None:
    """Mask (flat, bool) of the values of a change that are sent in the n-th round; None: all of them. With
    several fragments those of the fragment whose turn it is, else by `round.select`. part: the run file's
    section on rounds. change: flat. weights: those before the round, flat."""
    if part.fragments > 1:
        mask = torch.zeros_like(change, dtype=torch.bool)
        for begin, end in fragment_bounds(layout, part.fragments, turn(round_number, part.fragments)):
            mask[begin:end] = True
        return mask
    if part.select == "largest":
        return largest(change, part.select_share)
    if part.select == "significant":
        return significant(change, weights, part.threshold / round_number**0.5)
    return None


def largest(change: Tensor, share: float) -> Tensor:
    """Mask (flat, bool) of the values of greatest magnitude of a change, which must be flat: of each CHUNK
    adjacent values round(share · CHUNK), at least one; of a shorter last chunk as many (Sarfi et al.,
    "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706)."""
    missing = -len(change) % CHUNK
    padded = torch.cat((change.abs(), change.new_full((missing,), -1.0)))
    table = padded.view(-1, CHUNK)
    count = max(1, round(share * CHUNK))
    chosen = table.topk(count, dim=1, sorted=False).indices
    mask = torch.zeros_like(table, dtype=torch.bool).scatter_(1, chosen, True)
    return mask.view(-1)[: len(change)]


def significant(change: Tensor, weights: Tensor, threshold: float) -> Tensor:
    """Mask (flat, bool) of the values of a change whose magnitude is at least `threshold` times that of their
    weight (Hsieh et al., "Gaia", NSDI 2017)."""
    return change.abs() >= weights.abs().mul_(threshold)
