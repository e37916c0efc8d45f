"""Phases of a doubted stage."""

from __future__ import annotations

from itertools import product

import pytest

from anabranch.protocol.recovery.witnesses import FOLLOWING, Doubt, Phase


@pytest.mark.parametrize(("phase", "following"), [*product(Phase, Phase)])
def test_a_phase_is_followed_only_by_those_of_the_table(phase: Phase, following: Phase) -> None:
    doubt = Doubt(phase, 1.0)
    if following in FOLLOWING[phase]:
        doubt.advance(following, 2.0)
        assert (doubt.phase, doubt.at) == (following, 2.0)
    else:
        with pytest.raises(ValueError, match="cannot follow"):
            doubt.advance(following, 2.0)
        assert (doubt.phase, doubt.at) == (phase, 1.0)


def test_the_leader_acts_on_doubts_that_stand() -> None:
    assert {phase for phase in Phase if Doubt(phase).stands} == {Phase.DOUBTED, Phase.AWAITED}
