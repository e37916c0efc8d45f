"""Gaps of a verification of rounds on private data: from the first round that lacks a contribution up to the
next checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.audit.log_comparison import Comparison
from anabranch.audit.private_rounds import KeptRounds

COMMITS: dict[int, Any] = {t: SimpleNamespace(t=t) for t in range(1, 31)}


def gaps(begin: int, end: int, checkpoints: list[int], *lacking: int, fragile: tuple[int, ...] = ()) -> Any:
    kept = KeptRounds(
        commits=COMMITS,
        lacking=dict.fromkeys(lacking, "what"),
        fragile=dict.fromkeys(fragile, "what"),
    )
    found = kept.gaps(begin, end, checkpoints)
    return {t: after and after.t for t, after in found.items()}, kept.left_out(found, end), kept


def test_a_gap_ends_at_the_next_checkpoint() -> None:
    found, left_out, kept = gaps(0, 30, [10, 20, 30], 4, 7, 20, 23)
    assert found == {4: 10, 20: 20, 23: 30}
    assert left_out == [*range(4, 11), 20, *range(23, 31)]
    spans = [note.split(" not taken")[0] for note in kept.notes(kept.gaps(0, 30, [10, 20, 30]), 30)]
    assert spans == ["iterations 4 to 10 were", "iteration 20 was", "iterations 23 to 30 were"]


def test_it_is_said_that_no_inner_step_was_taken_again() -> None:
    """Without anybody's data contributions are summed alone; a run on its own corpus has nothing to say."""
    assert "no inner step" in KeptRounds(whose={(3, 0): "r1.0"}).notes({}, 5)[0]
    assert KeptRounds().notes({}, 5) == []


def test_without_a_checkpoint_nothing_after_it_is_checked() -> None:
    found, left_out, kept = gaps(0, 30, [10], 12, 25)
    assert found == {12: None} and left_out == list(range(12, 31))
    assert kept.notes(kept.gaps(0, 30, [10]), 30)[0].endswith("no checkpoint follows")


def test_gaps_outside_of_the_span_are_none() -> None:
    assert gaps(10, 20, [10, 20], 4, 10, 21)[0] == {}
    assert gaps(0, 30, [])[:2] == ({}, [])


def test_what_only_data_give_lacks_its_carried_state_after_a_gap() -> None:
    """Inner steps that begin from a state of the round before can be taken if that round was."""
    assert gaps(0, 30, [10, 20], fragile=(3, 15))[0] == {}
    assert gaps(0, 30, [10, 20], 12, fragile=(3, 15, 22))[0] == {12: 20, 22: None}


def test_a_skip_that_only_the_datas_owner_can_check_is_not_called_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Comparison, "_schedule", lambda comparison, commit: None)
    nothing: Any = None
    comparison = Comparison(nothing, nothing, [], True, True, keep_saved=False)
    commit: Any = SimpleNamespace(t=7, witness=SimpleNamespace(tensor="loss", index=2, stage=1))
    comparison.skipped(commit, nothing, None)
    assert comparison.unchecked == [7] and "only the owner" in comparison.notes[0]
