"""Bitwise comparison of the steps of two runs, whichever peers computed them."""

from __future__ import annotations

from anabranch.checkpoint.directory import RunDirectory
from anabranch.node.lifecycle.tickets import history_of
from anabranch.protocol.log.records import Commit


def same_steps(one: RunDirectory, other: RunDirectory) -> bool:
    """True if all steps that both runs committed, and did not roll back, have the same losses, gradients and
    states, bit for bit; also if they have no step in common. Raises UserError for a damaged log."""
    histories = map(history_of, (one, other))
    first, second = ({commit.t: _values(commit) for commit in each.commits} for each in histories)
    return all(first[t] == second[t] for t in first.keys() & second.keys())


def tokens_of(directory: RunDirectory, after: int, last: int) -> int:
    """Target tokens of the steps that a run took after iteration `after`, up to and with iteration `last`;
    those of skipped steps, which have their batch's tokens in the log, do not count. Raises UserError for a
    damaged log."""
    steps = (commit for commit in history_of(directory).commits if commit.verdict == "step")
    return sum(commit.tokens for commit in steps if after < commit.t <= last)


def _values(commit: Commit) -> object:
    """Values of a committed step that two equal runs share, without the names of the peers that computed it:
    verdict, loss sums, each stage's fingerprint before the step, digest and sums of squares, clip factor,
    learning rate."""
    stages = [(stage.fingerprint_before, stage.digest, stage.squares) for stage in commit.stages]
    return commit.verdict, commit.loss_sums, stages, commit.clip_factor, commit.learning_rate
