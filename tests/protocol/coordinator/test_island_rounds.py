"""Speeds of machines at the leader of a run with rounds of islands."""

from __future__ import annotations

from typing import cast

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.coordinator.island_rounds import RATES_KEPT, IslandRounds
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.interface.settings import Settings


def test_speeds_of_former_peers_are_bounded() -> None:
    """Volunteers come with new keys for weeks; each left its speed with the leader for ever."""
    ctx = make_context("d", 1, 0, Settings("r", 1, 1, 3, 9), "d")
    rounds = IslandRounds(ctx, cast(Admission, None), bool)
    for number in range(RATES_KEPT + 10):
        peers = ("stays", f"p{number}")
        rounds._units = dict.fromkeys(peers, 6)
        for peer in peers:
            rounds.on_applied(peer, {"Forward": 2.0})
    assert len(rounds._rates) == RATES_KEPT
    assert rounds._rates["stays"] == rounds._rates[f"p{RATES_KEPT + 9}"] == 3.0 and "p0" not in rounds._rates
