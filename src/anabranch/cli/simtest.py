"""Run the real protocol in virtual time on swarms and fault schedules drawn from seeds, and check the
invariants after every event. Exit status 1 if any was violated.

examples:
  anabranch simtest                                300 seeds, of all profiles in turn
  anabranch simtest --seeds 0:20000 --json         many seeds, the result for a program
  anabranch simtest --profile storm --seeds 0:500  one kind of fault schedule
  anabranch simtest --seeds 0:20000 --executor ray on the cluster of RAY_ADDRESS
  anabranch simtest --trace 1234                   one seed, with what happened in words

profiles: phases in every third seed; calm, churn10, churn20, storm, partition, hostile;
by name only: rounds, undefended, islands, crews, private, delayed, carriers, tickets

`--profile hostile` lets guests with a relay's ticket lie, withhold or flood, alone and in pairs, each deed a
kind of fault. `--profile undefended` draws deeds whose defence is not built yet: its seeds may fail.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from anabranch.cli.support.arguments import JOBS, add_executor, add_jobs, add_json, check_range
from anabranch.errors import UserError
from anabranch.executors import executor

if TYPE_CHECKING:
    from anabranch.sim.metrics.trial_result import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", default="0:300", metavar="A:B", help="seeds A to B-1")
    add("--profile", default="", metavar="NAME", help="profile of every seed (default: all in turn)")
    add_jobs(parser)
    add_executor(parser)
    add("--trace", type=int, metavar="SEED", help="run this seed only, and narrate it")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from anabranch.observe.console.progress import ticking
    from anabranch.sim.fuzz.fault_kinds import BY_NAME, PROFILES
    from anabranch.sim.fuzz.runner import run_seeds
    from anabranch.sim.fuzz.summary import report, reproduce, summarize

    known = (*PROFILES, *BY_NAME)
    if args.profile and args.profile not in known:
        raise UserError(f"--profile {args.profile}: choose one of {', '.join(known)}")
    check_range("--jobs", args.jobs, JOBS)
    if args.trace is not None:
        return _trace(args.trace, args.profile, args.json)
    first, last = _range(args.seeds)
    where = executor(args.executor, args.jobs or os.cpu_count() or 1)
    begin = time.monotonic()
    outcomes: list[Outcome] = []
    try:
        with ticking("drawing swarms") as ticker:
            for outcome in run_seeds(range(first, last), args.profile, where):
                outcomes.append(outcome)
                if outcome.failed:
                    with ticker.aside():
                        print(
                            f"seed {outcome.seed}: {outcome.violation} | {reproduce(outcome)}",
                            file=sys.stderr,
                        )
                rate = len(outcomes) / (time.monotonic() - begin)
                ticker.update(f"{len(outcomes)} of {last - first} seeds, {rate:.1f} per second")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_rest(outcomes, first, last)) from None
    summary = summarize(outcomes, first, last, args.profile, time.monotonic() - begin)
    print(msgspec.json.encode(summary).decode() if args.json else report(summary))
    return 1 if summary.failed else 0


def _rest(outcomes: Sequence[Outcome], first: int, last: int) -> str:
    """Sentence on what an interrupted test of the seeds `first` to `last` - 1 found, and how to run the rest:
    all from the first seed on that was not run. outcomes: of the seeds that were run."""
    done, failed = {outcome.seed for outcome in outcomes}, sum(outcome.failed for outcome in outcomes)
    left = next(seed for seed in range(first, last + 1) if seed not in done)
    return f"{len(done)} of {last - first} seeds were run, {failed} failed; the rest: --seeds {left}:{last}"


def _trace(seed: int, profile: str, as_json: bool) -> int:
    from anabranch.observe.console.progress import ticking
    from anabranch.sim.fuzz.narrative import story
    from anabranch.sim.fuzz.seed_drawing import draw, profile_of
    from anabranch.sim.fuzz.trial import SeedTrial

    trial = SeedTrial(draw(seed, profile or profile_of(seed)))
    with ticking(f"seed {seed}"):
        outcome = trial.run()
    print(msgspec.json.encode(outcome).decode() if as_json else "\n".join(story(trial)))
    return 1 if outcome.failed else 0


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise UserError(f"--seeds {text}: write it as 0:300, the first seed and the one after the last")
    return int(first), int(last)
