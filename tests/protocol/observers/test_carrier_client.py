"""A dedicated carrier waits for a leader whose addresses name it, and dials any other."""

from __future__ import annotations

import pytest

from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages import Carry
from anabranch.protocol.observers.carrier_client import CarrierClient

LEADER, ME, OTHER = (letter * 64 for letter in "abc")


@pytest.mark.parametrize(
    ("addresses", "dials"),
    [
        ("my.host:7700", True),
        (f"my.host:7700,far.host:443/{OTHER}", True),
        (f"far.host:443/{ME}", False),
        (f"my.host:7700,far.host:443/{ME}", False),
    ],
)
def test_a_carrier_forwards_to_a_leader_that_dialled_it(addresses: str, dials: bool) -> None:
    client = CarrierClient(LEADER, addresses, "far.host:443", me=ME)
    expected: list[ev.Effect] = [ev.Dial(LEADER, addresses)] if dials else []
    assert client.handle(ev.Started(), 0.0) == expected
    assert client.handle(ev.Wake(), client.deadline()) == expected
    linked = client.handle(ev.LinkUp(LEADER, 1, None), 20.0)
    assert linked == [ev.Send(LEADER, Carry("far.host:443"))]
