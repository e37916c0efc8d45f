"""`verify` where bits cannot be equal: fast sums, and the independent opinion, by norm and within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from anabranch.audit import error_bounds
from anabranch.audit.error_bounds import Vectors, distances, measured_bounds, permuted
from anabranch.audit.verification_report import Report
from anabranch.audit.verify import verify
from anabranch.checkpoint.directory import RunDirectory
from anabranch.protocol.log.records import Commit
from support.audited_runs import change_step, flip_bits, make_run, small_run

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Six fp32 steps whose sums are of floats, in the order in which the swarm came to them."""
    return make_run(tmp_path_factory.mktemp("fast"), small_run(run__reduction="fast"), seed=4)


@pytest.fixture(scope="module")
def report(fast: RunDirectory) -> Report:
    return verify(fast.path)


def test_a_fast_fp32_run_is_within_the_spread_of_permutations(report: Report) -> None:
    assert report.promise == "bound" and report.holds, report.verdict()
    assert any(distance.distance > 0 for distance in report.distances)
    assert all(distance.bound is not None for distance in report.distances)
    assert 1 <= report.permutations <= error_bounds.PERMUTATIONS
    assert {d.of for d in report.distances} >= {"losses", "norms", "evaluations", f"weights/{UP}"}
    assert "within bounds" in report.verdict()


@pytest.mark.costly
def test_the_number_of_processes_does_not_change_the_bounds(fast: RunDirectory, report: Report) -> None:
    assert verify(fast.path, jobs=2).as_dict() == report.as_dict()


def test_a_fast_run_with_a_wrong_weight_is_beyond_its_bound(fast: RunDirectory, tmp_path: Path) -> None:
    copy = make_run(tmp_path, small_run(run__reduction="fast", run__steps=2), seed=4)
    flip_bits(copy, 2, 2, f"weights/{UP}", [(3, 20)], rehash=True)
    report = verify(copy.path)
    wrong = [distance for distance in report.distances if not distance.holds]
    assert [(distance.t, distance.of) for distance in wrong] == [(2, f"weights/{UP}")]
    assert report.permutations == error_bounds.PERMUTATIONS, "all are needed to say that it is beyond"
    assert not report.holds and "1 distance beyond the bound, worst" in report.verdict()


def test_a_wrong_loss_of_a_fast_run_is_beyond_its_bound(tmp_path: Path) -> None:
    copy = make_run(tmp_path, small_run(run__reduction="fast", compute__dtype="fp64", run__steps=3))

    def nudge(commit: Commit) -> Commit:
        first, *rest = commit.loss_sums
        return msgspec.structs.replace(commit, loss_sums=(first * (1 + 1e-6), *rest))

    change_step(copy, 2, nudge)
    report = verify(copy.path)
    assert [distance.of for distance in report.distances if not distance.holds] == ["losses"]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("architecture", "half"),
    [("llama", 10), *(pytest.param(name, 25, marks=pytest.mark.soak) for name in ("llama", "gpt"))],
)
def test_fp64_runs_agree_with_the_independent_opinion(architecture: str, half: int, tmp_path: Path) -> None:
    run = small_run(
        architecture,
        2 * half,
        run__reduction="fast",
        compute__dtype="fp64",
        evaluation__every=half,
        checkpoint__every=half,
    )
    report = verify(make_run(tmp_path, run).path, independent=True)
    assert report.holds and report.promise == "bound" and report.permutations == 0
    assert report.independent is not None
    assert {d.of for d in report.independent if "/" in d.of} == {
        d.of for d in report.distances if "/" in d.of
    }
    assert {d.t for d in report.independent} == {half, 2 * half}
    for distance in (*report.distances, *report.independent):
        assert distance.bound == 1e-9
        assert distance.distance <= 1e-9, distance
    assert max(distance.distance for distance in report.independent) > 0, "two ways to compute, one result?"


def test_the_independent_opinion_of_an_exact_run_is_told_not_judged(tmp_path: Path) -> None:
    report = verify(make_run(tmp_path, small_run()).path, independent=True)
    assert report.holds and report.independent is not None
    assert all(distance.bound is None for distance in report.independent)
    assert 0 < max(distance.distance for distance in report.independent) < 1e-3
    for each in report.independent:  # the yardstick: as near as the same module in the run's own precision
        assert each.usual is not None and each.distance <= 30 * each.usual + 1e-9, each
    lines = "\n".join(report.lines())
    assert "(by rounding alone " in lines
    assert "rounding alone: the independent implementation in fp32" in lines
    assert "zero bits differ" in report.verdict()


def test_permutations_are_replayed_only_while_a_distance_is_beyond() -> None:
    label = (1, "weights/a")
    ours = {label: torch.ones(4)}
    asked = []

    def orders(*apart: float) -> Iterator[Vectors]:
        for number, value in enumerate(apart):
            asked.append(number)
            yield {label: torch.ones(4) * (1 + value)}

    assert measured_bounds("fp32", {label: 0.9}, ours, orders(0.25, 0.5, 4.0)) == ({label: 1.0}, 2)
    assert measured_bounds("fp32", {label: 2.0}, ours, orders(0.25, 0.5)) == ({label: 1.0}, 2)
    assert asked == [0, 1, 0, 1]


def test_one_rounding_of_every_value_is_within_each_bound() -> None:
    """No permutation changes a digit of the first losses, but a sum of replicas' sums is no permutation."""
    label = (1, "losses")
    ours = {label: torch.ones(4)}
    assert measured_bounds("fp32", {label: 2.0**-24}, ours, iter([ours])) == ({label: 2.0**-23}, 0)
    assert measured_bounds("fp32", {label: 2.0**-22}, ours, iter([ours])) == ({label: 2.0**-23}, 1)
    assert measured_bounds("fp64", {label: 2.0**-50}, ours, iter([ours])) == ({label: 2.0**-52}, 1)


def test_permutations_are_of_the_whole_batch_and_their_own() -> None:
    assert list(permuted(0, 5)(3)) == [0, 1, 2, 3, 4]
    orders = [tuple(permuted(number, 5)(t)) for number in range(1, 5) for t in range(1, 5)]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert len(set(orders)) > 10
    assert tuple(permuted(2, 5)(3)) == tuple(permuted(2, 5)(3))


def test_what_only_one_side_has_is_infinitely_far() -> None:
    a = {(1, "x"): torch.ones(2), (1, "y"): torch.ones(2)}
    b = {(1, "x"): torch.ones(3), (2, "y"): torch.ones(2)}
    assert distances(a, b) == {(1, "x"): float("inf"), (1, "y"): float("inf"), (2, "y"): float("inf")}
