"""Trials of many seeds of `simtest`, in one or several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from functools import partial

from anabranch.sim.fuzz.seed_drawing import draw, profile_of
from anabranch.sim.fuzz.trial import SeedTrial
from anabranch.sim.metrics.trial_result import Outcome

#: Seeds per work item of a process (a choice: a few seconds of work).
CHUNK = 8


def run_seed(seed: int, profile: str = "") -> Outcome:
    """Run one seed and return its outcome. profile: name of the fault profile ("": the seed's own)."""
    return SeedTrial(draw(seed, profile or profile_of(seed))).run()


def run_seeds(seeds: Iterable[int], profile: str = "", jobs: int = 1) -> Iterator[Outcome]:
    """Run seeds in `jobs` processes and yield the outcomes as they finish, in any order."""
    run = partial(run_seed, profile=profile)
    if jobs <= 1:
        yield from map(run, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(run, seeds, CHUNK)
