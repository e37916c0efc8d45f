"""Members that lose their seats since the run waits for them: honest ones may share their ticket."""

from __future__ import annotations

import msgspec

from anabranch import PROTOCOL_VERSION
from anabranch.protocol.interface.events import NEVER_EXPIRES_S, Send, VerifiedCredential
from anabranch.protocol.log.records import Member
from anabranch.protocol.messages import JoinRequest, Refused
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from support.admission import leading

CLUB = VerifiedCredential("relay", NEVER_EXPIRES_S, ticket="the club's")


def test_a_volunteer_whose_fellows_were_slow_comes_later_and_does_not_go_for_good() -> None:
    """It had dialled when the second of its ticket lost its seat. Its process ended at the word to try
    later."""
    admission = leading()
    ctx, members = admission.ctx, admission.ctx.run.membership.members
    admission.credentials = {"new": CLUB}
    ctx.links.add("new", AdaptiveTimeout(0.0, 1.0))
    for peer in ("a", "b", "new"):
        ctx.rate_limits.came_with(peer, CLUB.ticket)
        if peer in members:
            members[peer] = msgspec.structs.replace(members[peer], ticket=CLUB.ticket)
    for peer in ("a", "b"):
        admission.remove_idle(peer, "the run waits for it")
    assert not ctx.rate_limits.banned("a", ctx.clock.now) and ctx.rate_limits.banned("b", ctx.clock.now)
    member = Member("new", 1, 1, "class", 8, forward_s=0.01)
    assert admission.on_join("new", JoinRequest(member, 1, PROTOCOL_VERSION, "", "")) is not None
    said = [e.message for e in ctx.outbox.effects if isinstance(e, Send) and isinstance(e.message, Refused)]
    assert [refused.again for refused in said] == [True]
