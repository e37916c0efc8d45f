"""Trials of many seeds of `simtest`, in one or several processes or on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from anabranch.executors import Executor, Processes
from anabranch.sim.fuzz.seed_drawing import draw, profile_of
from anabranch.sim.fuzz.trial import SeedTrial
from anabranch.sim.metrics.trial_result import Outcome


def run_seed(seed: int, profile: str = "") -> Outcome:
    """Run one seed in this process and return its outcome, which also tells of a violation or an unexpected
    error. profile: name of the fault profile ("": the seed's own). Raises KeyError for an unknown profile."""
    return SeedTrial(draw(seed, profile or profile_of(seed))).run()


def run_seeds(seeds: Iterable[int], profile: str = "", where: Executor | None = None) -> Iterator[Outcome]:
    """Run seeds and yield each outcome as it is there, in any order. profile: as of `run_seed`. where:
    executor that runs them; None: this process, one after the other."""
    for _, outcome in (where or Processes(1)).completed(partial(run_seed, profile=profile), seeds):
        yield outcome
