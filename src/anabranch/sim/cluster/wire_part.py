"""Section [wire] of a scenario, with the keys and values of a run file's (docs/reference/scenario.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from anabranch.config.constraints import OneOf, Range
from anabranch.train.codec.sizes import BITS


@dataclass(frozen=True)
class WirePart:
    """Codecs of what crosses the line. activations, gradients: codec of activations and of input gradients
    between stages. block: values that share a scale (int8, int4). reduce: exact or coarse gradient sums."""

    activations: Annotated[str, OneOf(*BITS)] = "none"
    gradients: Annotated[str, OneOf(*BITS)] = "none"
    reduce: Annotated[str, OneOf("exact", "coarse")] = "exact"
    block: Annotated[int, Range(8, 1 << 16)] = 64
