"""Squares and projections of the contributions to a sum, by which the leader compares their senders
(`protocol.audit.contribution_monitor`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anabranch.protocol.interface.tasks import Moments
from anabranch.train.numerics.exact import BLOCK, UNIT_EXPONENT


def moments(parts: Sequence[Tensor]) -> tuple[Moments, ...]:
    """(Sum of squares, scalar product with the sum of all parts) of each of `parts`. A part is what one
    replica, or in a reduce by cells one cell, adds to a sum: vectors of one length and type, as in
    `sum_part`.

    Integers are taken as units of 2⁻⁴⁸. Products are summed in fp64, a block of BLOCK elements at a time, so
    that no more than a block of each part is copied. The last bits may depend on the number of threads:
    nobody computes them again. A value beyond the range of floats gives inf or nan.
    """
    squares, dots = [0.0] * len(parts), [0.0] * len(parts)
    for begin in range(0, len(parts[0]) if parts else 0, BLOCK):
        wide = [part[begin : begin + BLOCK].double() for part in parts]
        total = wide[0].clone()
        for one in wide[1:]:
            total.add_(one)
        for position, one in enumerate(wide):
            squares[position] += float(torch.dot(one, one))
            dots[position] += float(torch.dot(one, total))
    scale = 2.0 ** (-2 * UNIT_EXPONENT) if parts and parts[0].dtype == torch.int64 else 1.0
    return tuple((square * scale, dot * scale) for square, dot in zip(squares, dots, strict=True))
