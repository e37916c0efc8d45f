"""Roundings of the benchmark `coarse_loss` against those of a run's own sums."""

from __future__ import annotations

import torch

from anabranch.train.model.layout import Layout
from anabranch.train.numerics.coarse_sums import CoarseAccumulator, segments, unit_exponents
from anabranch.train.numerics.exact import reduced
from benchmarks.wire.coarse_loss import in_units

CPU = torch.device("cpu")


def test_contributions_are_rounded_as_in_a_coarse_sum() -> None:
    generator = torch.Generator().manual_seed(1)
    layout = Layout({"one": (30, 5), "two": (70,)})
    contributions = torch.randn(4, layout.elements, generator=generator) * 1e-3
    second = torch.rand(layout.elements, generator=generator) * 1e-6
    exponents = unit_exponents(layout, second, 0.95, 7, 4)
    sums = CoarseAccumulator(layout, dict.fromkeys(layout.names, 4), torch.float32, CPU)
    sums.prepare(exponents)
    for some in contributions:
        for name in layout.names:
            sums.add(name, layout.view(some, name))
    units = torch.ldexp(torch.ones(len(exponents)), exponents)
    units = units.repeat_interleave(segments(layout, CPU).lengths)
    found = in_units(contributions, units).sum(0)
    assert torch.equal(found.float(), reduced(sums.flat, torch.float32))
    assert not torch.equal(found, contributions.double().sum(0))
