"""Budgets of event-log lines: neither a peer nor all peers of a ticket can fill the disk of the founder."""

from __future__ import annotations

from anabranch.protocol.context.rate_limits_and_bans import PEERS_KEPT
from anabranch.protocol.messages.table import Allowance
from anabranch.protocol.observers.report_budget import ALL, PEER, TICKET, VOTER, ReportBudget

SIZE = 1000


def accepted(
    budget: ReportBudget, peers: int, ticket: str, seconds: int = 0, hands_over: bool = False
) -> int:
    """Bytes accepted in so many seconds from peers that report as much as they can."""
    total = 0
    for now in range(seconds + 1):
        for peer in range(peers):
            while budget.take(f"p{peer}", ticket, SIZE, float(now), hands_over):
                total += SIZE
    return total


def most(limit: Allowance, seconds: int = 0) -> float:
    return limit.burst + seconds * limit.per_s


def test_a_peer_and_a_ticket_have_budgets() -> None:
    assert most(PEER, 5) - 6 * SIZE <= accepted(ReportBudget(), 1, "t", 5) <= most(PEER, 5)
    assert most(TICKET) - SIZE <= accepted(ReportBudget(), 100, "t") <= most(TICKET), "keys are free"


def test_all_together_have_a_budget() -> None:
    budget = ReportBudget()
    assert sum(accepted(budget, 100, f"ticket {n}") for n in range(8)) <= most(ALL)


def test_a_flood_with_one_ticket_leaves_room_for_others() -> None:
    budget = ReportBudget()
    accepted(budget, 100, "flood")
    assert budget.take("honest", "other", SIZE, 0.0)
    assert budget.take("voter", "flood", SIZE, 0.0, hands_over=True)


def test_a_voter_that_hands_over_has_a_budget_of_its_own() -> None:
    assert accepted(ReportBudget(), 1, "t", hands_over=True) <= most(VOTER)


def test_memory_is_bounded() -> None:
    budget = ReportBudget()
    for peer in range(2 * PEERS_KEPT):
        budget.take(f"p{peer}", "t", 1, 0.0)
    assert all(len(buckets) <= PEERS_KEPT for buckets in budget._limits._buckets.values())
