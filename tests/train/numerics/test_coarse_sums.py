"""Sums in coarse units: the same whoever adds what, invertible, and small on the line."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from anabranch.config import ConfigError, config_from_dict
from anabranch.net import scaled_packing
from anabranch.net.packing import pack
from anabranch.protocol.interface import tasks
from anabranch.train.codec.sizes import COARSE_BYTES, coarse_bytes, coarse_digits
from anabranch.train.model.layout import Layout
from anabranch.train.numerics import exact
from anabranch.train.numerics.coarse_sums import (
    MOST_DROPPED,
    SEGMENT,
    CoarseAccumulator,
    segments,
    unit_exponents,
)
from anabranch.train.numerics.exact import ExactAccumulator, Overflow
from anabranch.train.reference.reference import Reference
from support.divisors import Divisors
from support.grids import every_value
from support.small_training import MadeUpBatches, SmallSwarm, done, small_model, small_run, with_section

CPU = torch.device("cpu")
#: A vector that ends amid a segment, a table of several, an odd rest.
LAYOUT = Layout({"a": (100,), "b": (30, 96), "c": (7, 11)})


def draws(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def moments() -> Tensor:
    """Second moments after one step: of another size in each tensor."""
    found = draws(LAYOUT.elements).square()
    for name, size in (("a", 1e-2), ("b", 1e-8), ("c", 1e-12)):
        LAYOUT.flat(found, name).mul_(size * 0.05)
    return found


def coarse(digits: int = 3, steps: int = 1) -> CoarseAccumulator:
    sums = CoarseAccumulator(LAYOUT, dict.fromkeys(LAYOUT.names, 64), torch.float32, CPU)
    sums.prepare(unit_exponents(LAYOUT, moments(), 0.95, steps, digits))
    return sums


def test_segments_are_those_of_tensors_and_of_blocks() -> None:
    found = segments(LAYOUT, CPU)
    lengths = found.lengths.tolist()
    assert lengths[:4] == [64, 36, 28, 64] and lengths[-3:] == [36, 28, 49]  # "b" begins at 100, "c" at 2,980
    assert sum(lengths) == LAYOUT.elements and SEGMENT == scaled_packing.BLOCK
    begin = 0
    for length, total in zip(lengths, found.sums(moments()).tolist(), strict=True):
        assert total == pytest.approx(float(moments()[begin : begin + length].double().sum()), rel=1e-12)
        begin += length


@pytest.mark.parametrize(
    ("shapes", "lengths"),
    [
        ({"nothing": (0, 4)}, []),
        ({"one": (1,)}, [1]),
        ({"a": (64,), "b": (64,)}, [64, 64]),
        ({"a": (3,), "b": (0,), "c": (2,), "d": (70,)}, [3, 2, 59, 11]),
    ],
)
def test_segments_of_odd_layouts(shapes: dict[str, tuple[int, ...]], lengths: list[int]) -> None:
    layout = Layout(shapes)
    found = segments(layout, CPU)
    assert found.lengths.tolist() == lengths
    assert found.sums(torch.ones(layout.elements)).tolist() == [float(length) for length in lengths]
    assert len(unit_exponents(layout, torch.ones(layout.elements), 0.95, 3, 4)) == len(lengths)


def test_sums_of_segments_are_added_in_one_order() -> None:
    """A fixed tree of additions in fp64: the same bits on every machine and for any number of threads."""
    many = Layout({"x": (SEGMENT * 5000 + 5,), "y": (77,)})
    values = draws(many.elements).square()
    sums, begin = segments(many, CPU).sums(values).tolist(), 0
    for length, total in zip(segments(many, CPU).lengths.tolist(), sums, strict=True):
        row = values[begin : begin + length].double().tolist() + [0.0] * (SEGMENT - length)
        while len(row) > 1:
            row = [one + other for one, other in zip(row[: len(row) // 2], row[len(row) // 2 :], strict=True)]
        assert total == row[0]
        begin += length


def test_no_division_by_a_plain_number() -> None:
    """CUDA multiplies by the reciprocal instead, which rounds otherwise."""
    with Divisors() as divisors:
        unit_exponents(LAYOUT, moments(), 0.95, 2, 4)
    assert divisors.plain == []


@pytest.mark.parametrize("digits", [3, 5])
def test_a_unit_is_a_share_of_the_root_mean_square(digits: int) -> None:
    exponents = unit_exponents(LAYOUT, moments(), 0.95, 1, digits)
    mean = segments(LAYOUT, CPU).sums(moments()) / segments(LAYOUT, CPU).lengths / (1.0 - 0.95)
    for exponent, square in zip(exponents.tolist(), mean.tolist(), strict=True):
        unit = math.ldexp(1.0, exponent - exact.UNIT_EXPONENT)
        assert 2.0**digits <= math.sqrt(square) / unit < 2.0 ** (digits + 1)


def test_without_a_moment_sums_are_exact() -> None:
    zeros = torch.zeros(LAYOUT.elements)
    assert not unit_exponents(LAYOUT, zeros, 0.95, 0, 3).any()
    assert not unit_exponents(LAYOUT, zeros, 0.95, 7, 3).any()
    assert not unit_exponents(LAYOUT, torch.full_like(zeros, math.inf), 0.95, 7, 3).any()
    assert int(unit_exponents(LAYOUT, zeros + 1e12, 0.95, 7, 3).max()) == MOST_DROPPED
    mine = CoarseAccumulator(LAYOUT, dict.fromkeys(LAYOUT.names, 64), torch.float32, CPU)
    mine.prepare(unit_exponents(LAYOUT, zeros, 0.95, 0, 3))
    theirs = ExactAccumulator(LAYOUT, dict.fromkeys(LAYOUT.names, 64), torch.float32, CPU)
    for sums in (mine, theirs):
        sums.add("a", draws(100))
        sums.add_rows("b", torch.tensor([3, 3, 29, 0]), draws(4, 96, seed=2))
    assert torch.equal(mine.flat, theirs.flat)


def test_contributions_are_multiples_of_their_unit() -> None:
    sums, exponents = coarse(), unit_exponents(LAYOUT, moments(), 0.95, 1, 3)
    units = torch.repeat_interleave(2 ** exponents.long(), segments(LAYOUT, CPU).lengths)
    gradient = draws(30, 96) * 1e-4
    sums.add("b", gradient)
    assert not (sums.flat % units).any()
    error = LAYOUT.view(sums.flat, "b").double() - gradient.double() * 2.0**exact.UNIT_EXPONENT
    assert float((error.abs() / LAYOUT.view(units, "b")).max()) <= 0.5
    rows = torch.tensor([5, 1, 5, 5])
    tokens = draws(4, 96, seed=3) * 1e-4
    before = sums.flat.clone()
    sums.add_rows("b", rows, tokens)
    assert not (sums.flat % units).any()
    true = torch.zeros(30, 96, dtype=torch.float64).index_add_(0, rows, tokens.double())
    error = LAYOUT.view(sums.flat - before, "b").double() - true * 2.0**exact.UNIT_EXPONENT
    assert float((error.abs() / LAYOUT.view(units, "b")).max()) <= 0.5 + 1e-6
    untouched = [row for row in range(30) if row not in (1, 5)]
    assert not LAYOUT.view(sums.flat - before, "b")[untouched].any()


def test_order_and_owners_leave_no_trace_and_every_sum_can_be_undone() -> None:
    """Any split and order of the work gives one sum (I1, I3)."""
    work = [
        (draws(30, 96, seed=n) * 1e-4, draws(100, seed=n), torch.tensor([n % 30, 4, 4])) for n in range(6)
    ]

    def add(sums: CoarseAccumulator, number: int, sign: int = 1) -> None:
        matrix, vector, rows = work[number]
        sums.add("b", matrix, sign)
        sums.add("a", vector, sign)
        sums.add_rows("b", rows, matrix[:3], sign)

    whole = coarse()
    for number in range(6):
        add(whole, number)
    for seed in range(3):
        order = random.Random(seed).sample(range(6), 6)
        first, second = coarse(), coarse()
        for number in order:
            add(first if number % (seed + 2) else second, number)
        add(first, 3)
        add(first, 3, -1)  # counted twice, and taken back
        assert torch.equal(first.flat + second.flat, whole.flat)
    for number in range(6):
        add(whole, number, -1)
    assert not whole.flat.any()


def test_what_is_out_of_range_is_refused() -> None:
    sums = coarse()
    for value in (math.nan, math.inf, 1e6):
        with pytest.raises(Overflow):
            sums.add("a", torch.full((100,), value))
        with pytest.raises(Overflow):
            sums.add_rows("b", torch.tensor([1]), torch.full((1, 96), value))
    assert not sums.flat.any()


def coarse_run(stages: int = 2, **changes: object):  # type: ignore[no-untyped-def]
    return with_section(small_run(stages=stages), "wire", reduce="coarse", **changes)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("stages", "seed"), every_value([1, 4], [1, 2]))
def test_a_swarm_takes_the_steps_of_the_reference(stages: int, seed: int) -> None:
    """(I3) Whatever the replicas, the owners and the number of parts."""
    run = coarse_run(stages, activations="int8", gradients="int8")
    swarm, reference = SmallSwarm(run, seed=seed), Reference(run, small_model(run), MadeUpBatches(run))
    for t in range(1, 5):
        step = swarm.step(t)
        record = reference.step(reference.share(t, range(5)))
        assert (step.losses, step.squares, step.digests) == (record.losses, record.squares, record.digests)
        assert step.fingerprints == reference.fingerprints()


def test_coarse_steps_are_others_after_the_first() -> None:
    """The first step has no second moment: its sums are exact."""
    found = []
    for run in (small_run(), coarse_run()):
        reference = Reference(run, small_model(run), MadeUpBatches(run))
        found.append([reference.step(reference.share(t, range(5))).digests for t in (1, 2)])
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]


def test_a_restored_reference_and_a_joiner_have_the_units_of_the_state() -> None:
    run = coarse_run(1)
    swarm, reference = SmallSwarm(run, 1, (1, 2)), Reference(run, small_model(run), MadeUpBatches(run))
    for t in (1, 2):
        swarm.step(t)
        reference.step(reference.share(t, range(5)))
    other = Reference(run, small_model(run), MadeUpBatches(run))
    other.restore([state.to_bytes() for state in reference.states])
    joiner = swarm.stages[1][1]
    pieces = done(swarm.stages[1][0].run(tasks.Snapshot(2))).outputs
    done(joiner.run(tasks.InitState(0)))
    done(joiner.run(tasks.LoadState(2), pieces))
    step = swarm.step(3)
    assert step.digests == reference.step(reference.share(3, range(5))).digests
    assert step.digests == other.step(other.share(3, range(5))).digests


def test_sums_and_results_take_one_to_two_bytes() -> None:
    """Parts and results are small after a first step."""
    run = coarse_run(1)
    reference = Reference(run, small_model(run), MadeUpBatches(run))
    for t in (1, 2, 3):
        reference.step(reference.share(t, range(5)))
    for microbatches in ([0, 1], range(5)):
        sums = reference.share(4, microbatches).sums[1]
        assert scaled_packing.pays(sums.numpy())
        assert 0.5 <= len(scaled_packing.pack(sums.numpy())) / len(sums) < 2.1
    exactly = Reference(small_run(stages=1), small_model(run), MadeUpBatches(run))
    sums = exactly.share(1, range(5)).sums[1]
    assert len(pack(sums.numpy())) / len(sums) > 4.0


def test_digits_grow_with_the_root_of_the_microbatches() -> None:
    assert [coarse_digits(n) for n in (1, 16, 17, 64, 65, 256, 257)] == [4, 4, 5, 5, 6, 6, 7]
    assert coarse_bytes(8) == COARSE_BYTES[4] and coarse_bytes(1 << 16) == COARSE_BYTES[7]


def test_float_sums_have_no_units() -> None:
    keys = {"anabranch": {"version": 1}, "run": {"reduction": "fast"}, "wire": {"reduce": "coarse"}}
    with pytest.raises(ConfigError, match=r"needs run.reduction"):
        config_from_dict(keys, "run.toml")
