"""Members' words about the states after the last step (R12)."""

from __future__ import annotations

from anabranch.protocol.messages import Behind
from protocol.coordinator.test_state_agreement import Stage

T = 5


def test_words_about_earlier_states_do_not_count() -> None:
    """A member of two that lacked the state after iteration T - 1 may have got one since."""
    states = Stage("h0 h1").released.stage_recovery.states
    states.on_behind("h0", Behind(T - 1, 1))
    states.on_behind("h1", Behind(T, 1))
    assert states.lacking(["h0", "h1"], T) == ["h1"]
    states.forget("h1")
    assert states.lacking(["h0", "h1"], T) == [] and states.lacked


def test_members_of_other_stages_say_nothing() -> None:
    states = Stage("h0").released.stage_recovery.states
    states.on_behind("h0", Behind(T, 2))
    states.on_behind("d0", Behind(T, 1))
    states.on_behind("stranger", Behind(T, 1))
    assert not states.lacked
