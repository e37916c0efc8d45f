"""Capacity with which each replica of a stage takes part in the flow's plan ("places").

The flow problem charges the same for all microbatches of a relay up to its capacity; in truth each one waits
for those before it. So a relay offers no more places than it computes in the least time that its whole stage
needs for the batch, and a quarter more.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from functools import lru_cache

#: Extra time, as a share of the stage's least, in which places are counted: room for cheap links. A choice.
SLACK = 0.25
#: Most stages in the cache: the replicas of a simulated stage all compute the same places.
STAGES_KEPT = 64


def places(pass_s: Mapping[str, float], capacity: Mapping[str, int], batch: int) -> Mapping[str, int]:
    """Number of microbatches that each replica of a stage offers to the plan; from 1 (0 for one without
    capacity) to its capacity. pass_s: replica -> seconds per microbatch (all positive). capacity: replica ->
    most microbatches that it can hold. batch: microbatches of an iteration, all of which the stage serves."""
    return _places(tuple([(peer, seconds, capacity[peer]) for peer, seconds in pass_s.items()]), batch)


@lru_cache(STAGES_KEPT)
def _places(replicas: tuple[tuple[str, float, int], ...], batch: int) -> Mapping[str, int]:
    """`places` with the replicas as a tuple, for the cache: (peer, seconds per microbatch, capacity in
    microbatches) of each."""
    most_s = _time_s(replicas, batch) * (1.0 + SLACK)
    return {peer: min(room, max(1, int(most_s / pass_s + 1e-9))) for peer, pass_s, room in replicas}


def _time_s(replicas: tuple[tuple[str, float, int], ...], batch: int) -> float:
    """Least seconds in which a stage's replicas together can compute `batch` microbatches, or, if that is
    more than all of them can hold, as many as they can hold. replicas: as for `_places`."""
    first = [(pass_s, peer, 1, pass_s, capacity) for peer, pass_s, capacity in replicas if capacity > 0]
    heapq.heapify(first)
    time_s = 0.0
    for _ in range(min(batch, sum(capacity for _, _, capacity in replicas))):
        ends_s, peer, load, pass_s, capacity = first[0]
        time_s = max(time_s, ends_s)
        if load < capacity:
            heapq.heapreplace(first, ((load + 1) * pass_s, peer, load + 1, pass_s, capacity))
        else:
            heapq.heappop(first)
    return time_s
