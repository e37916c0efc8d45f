"""Number of microbatches to call back from peers of the next stage when a new peer begins to serve there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from anabranch.protocol.pipeline.credits import Credit
from anabranch.protocol.telemetry.peer_costs import PeerCosts


def units_to_recall(
    costs: PeerCosts, credits: Mapping[str, Credit], units: Mapping[str, int], newcomer: str
) -> Mapping[str, int]:
    """Number of microbatches to call back, by peer: as many as shorten the time until the last one is done,
    if the other senders do likewise, and no more than the newcomer has credits for. Empty while a compute
    time is unknown.

    credits: peer -> this sender's credits, of all `units` and the newcomer. units: peer -> microbatches of
    this sender that it has, at least one. newcomer: new peer, which is to get them, not among `units`.
    """
    ahead = {peer: float(count + credits[peer].others) for peer, count in units.items()}
    each = {peer: ahead[peer] / count for peer, count in units.items()}
    work_s = {peer: costs.of(peer).work_s for peer in [*units, newcomer]}
    most: Counter[str] = Counter()
    if not all(work_s.values()):
        return most
    load_s = costs.of(newcomer).hop_s + work_s[newcomer] * (1 + credits[newcomer].others)
    for _ in range(credits[newcomer].free):
        left = [peer for peer in units if most[peer] < units[peer]]
        longest = max(left, key=lambda peer: (ahead[peer] * work_s[peer], peer), default=None)
        if longest is None or ahead[longest] * work_s[longest] <= load_s:
            break
        most[longest] += 1
        ahead[longest] -= each[longest]
        load_s += each[longest] * work_s[newcomer]
    return most
