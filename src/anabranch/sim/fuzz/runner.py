"""Trials of many seeds of `simtest`, in one or several processes or on a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from anabranch.executors import Executor, Processes
from anabranch.sim.fuzz.seed_drawing import draw, profile_of
from anabranch.sim.fuzz.trial import SeedTrial
from anabranch.sim.metrics.trial_result import Outcome


def run_seed(seed: int, profile: str = "") -> Outcome:
    """Run one seed and return its outcome. profile: name of the fault profile ("": the seed's own)."""
    return SeedTrial(draw(seed, profile or profile_of(seed))).run()


def run_seeds(seeds: Iterable[int], profile: str = "", where: Executor | None = None) -> Iterator[Outcome]:
    """Run seeds, in this process (None) or `where`, and yield the outcomes as they finish, in any order."""
    for _, outcome in (where or Processes(1)).completed(partial(run_seed, profile=profile), seeds):
        yield outcome
