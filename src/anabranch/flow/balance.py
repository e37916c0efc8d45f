"""How much of a batch each replica of a stage should carry: node costs are convex, and the flow's are not.

Inside the market a relay's microbatches all cost the same up to its capacity. In truth each waits for those
before it. So a relay takes part with no more places than it can work through in the time that its whole
stage needs at least: the last microbatch then is nowhere later than it must be.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Places beyond the balance, as a share of the time: room for the flow to choose cheap links.
SLACK = 0.25


def places(pass_s: Mapping[str, float], capacity: Mapping[str, int], batch: int) -> dict[str, int]:
    """Places of each replica. pass_s: its seconds per microbatch (all positive); capacity: what it can hold;
    batch: microbatches at once, or as many as fit. At least one
    each, where there is room."""
    load = dict.fromkeys(pass_s, 0)
    time_s = 0.0
    for _ in range(min(batch, sum(capacity.values()))):
        able = [peer for peer in load if load[peer] < capacity[peer]]
        first = min(able, key=lambda peer: ((load[peer] + 1) * pass_s[peer], peer))
        load[first] += 1
        time_s = max(time_s, load[first] * pass_s[first])
    return {
        peer: min(capacity[peer], max(1, int(time_s * (1.0 + SLACK) / pass_s[peer] + 1e-9)))
        for peer in pass_s
    }
