"""State machines of a peer refuse transitions that their tables do not have; every message has a handler."""

from __future__ import annotations

import pytest

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.messages.table import ROW_OF
from anabranch.protocol.peer.fencing import HANDLER_OF
from anabranch.protocol.peer.shared_state import NEXT_STEPS, Coordination, Entry, LeadRole, Step

SETTINGS = Settings("run", 1, 1, 2, 3)


@pytest.mark.parametrize("step", Step)
def test_a_joiner_takes_no_step_that_the_table_does_not_allow(step: Step) -> None:
    for following in Step:
        entry = Entry(make_context("a", 1, 0, SETTINGS, "b"))
        entry.step = step
        if following in NEXT_STEPS[step]:
            entry.advance(following)
            assert entry.step is following
        else:
            with pytest.raises(AssertionError, match=f"{step.name} to {following.name}"):
                entry.advance(following)


def test_a_member_never_becomes_a_stranger_again() -> None:
    inside = (Step.BUILDING, Step.FETCHING, Step.LOADING, Step.READY)
    assert all(NEXT_STEPS[step] <= set(inside) for step in inside)


def test_a_peer_that_does_not_lead_cannot_resign() -> None:
    coordination = Coordination(make_context("a", 1, 0, SETTINGS, "b"))
    with pytest.raises(AssertionError, match="FOLLOWER to FOLLOWER"):
        coordination.resign()
    coordination.elected(3)
    assert coordination.role is LeadRole.ELECTED
    coordination.resign()
    assert coordination.role is LeadRole.FOLLOWER


def test_each_message_type_has_a_handler() -> None:
    assert HANDLER_OF.keys() == ROW_OF.keys()
