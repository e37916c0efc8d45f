"""Claims of a megabyte, which list the same things again and again, or holders that are not there (I7)."""

from __future__ import annotations

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages.commit import SentOn
from swarm.byzantine.test_review_stalls import swarm

#: Parts of a claim: units, holders. Each makes it nearly as long as a message may be.
LONG: dict[str, tuple[tuple[int, ...], SentOn]] = {
    "units": ((0,) * 1_000_000, {}),
    "given": ((0,), {"r2.0": ((0,) * 1_000_000, ())}),
    "asked": ((0,), {"r2.0": ((), (0,) * 1_000_000)}),
    "peers": ((0,), {f"peer{number:06d}": ((), (number % 6,)) for number in range(60_000)}),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_claim_that_is_longer_than_any_honest_one_is_refused(kind: str) -> None:
    """It was kept and compared with the next one, and not refused, so nobody was banned for four a second."""
    world, (units, holders) = swarm(3, stages=2, steps=40), LONG[kind]
    leader, liar = world.nodes["d0"], world.nodes["r1.1"]
    while world.clock.now < 3.0 or liar.peer.iteration is None or leader.peer.lead is None:
        world.clock.step()
    iteration, lead = liar.peer.iteration, leader.peer.lead
    while lead.round is None or lead.round.t != iteration.t:
        world.clock.step()
        assert liar.peer.iteration is not None
        iteration = liar.peer.iteration
    claim = msg.Claim(liar.peer.ctx.fence(iteration.t, iteration.base), 1, units, holders=holders)
    assert len(msg.encode(claim)) > 900_000
    leader.handle(ev.Received("r1.1", claim, None))
    assert leader.peer.ctx.rate_limits.counts["r1.1"]["Claim"] == 1
    assert "r1.1" not in lead.round.holders.get(2, {})
