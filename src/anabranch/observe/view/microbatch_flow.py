"""Flow of a committed step's microbatches through the stages, from the owners of its units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

#: Most hops kept of one step, the widest ones: a page draws each as a ribbon.
HOPS_MAX = 1500

#: (column of the sender, sender, receiver, data node that embedded the microbatches) -> microbatches. Columns
#: are 0..S+1; the last one holds the data nodes again.
Hops = Counter[tuple[int, str, str, str]]


def hops_of(owners: Mapping[int, Mapping[int, str]], stages: int) -> Hops:
    """Hops of a step's microbatches (see `Hops`): the HOPS_MAX with most microbatches. owners: stage -> unit
    -> peer (`events.Step.owners`). stages: relay stages. At relay stages a unit is a microbatch, in a round a
    slot, which counts as one; at stage 0, unit 2i is the head of microbatch i, and unit 2i + 1 its embedding.
    A microbatch goes from the data node that embedded it through a replica of each stage to the data node
    that computed its loss."""
    hops: Hops = Counter()
    ends = owners.get(0, {})
    for unit, source in ends.items():
        if unit % 2 == 0:
            continue
        index = unit // 2
        path = [source, *(owners.get(stage, {}).get(index, "") for stage in range(1, stages + 1))]
        path.append(ends.get(2 * index, source))
        for column, (start, end) in enumerate(pairwise(path)):
            if start and end:
                hops[column, start, end, source] += 1
    return Counter(dict(hops.most_common(HOPS_MAX)))


def shares_of(owners: Mapping[int, Mapping[int, str]]) -> dict[str, float]:
    """{peer: microbatches of a step that it computed, in a round slots}; a data node's units count one half
    each. owners: as for `hops_of`."""
    shares: Counter[str] = Counter()
    halves: Counter[str] = Counter()
    for stage, units in owners.items():
        (halves if stage == 0 else shares).update(units.values())
    return {**shares, **{peer: count / 2 + shares[peer] for peer, count in halves.items()}}
