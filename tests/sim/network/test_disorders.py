"""Messages that come twice, or in any order, while several such faults last."""

from __future__ import annotations

import math
import random

from anabranch.sim.kernel.network_faults import LinkDisorder, NetworkFaults

ENDS = frozenset(("a", "b"))


def faults(*duplicated: float) -> NetworkFaults:
    made = NetworkFaults(random.Random(1))
    made.disorders += [LinkDisorder(share, 0.5, None) for share in duplicated]
    return made


def test_a_message_comes_twice_at_most_however_many_faults_last() -> None:
    """A request and its answer have four copies at most, which a peer may send (`COPIES`)."""
    assert len(faults(1.0, 1.0, 0.0).arrivals(ENDS, 1.0)) == 2
    assert len(faults(0.0, 0.0).arrivals(ENDS, 1.0)) == 1
    assert faults().arrivals(ENDS, 1.0) == []
    assert all(1.0 <= at <= 1.5 < math.inf for at in faults(1.0, 1.0).arrivals(ENDS, 1.0))
