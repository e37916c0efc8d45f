"""Routing under attack: what a neighbour may say without stopping, blinding or swelling an honest peer."""

from __future__ import annotations

from anabranch.protocol.slots import SlotLedger


def test_handing_back_more_than_one_has_costs_no_more_than_one_has() -> None:
    ledger = SlotLedger(4)
    ledger.deal(["a", "b"])
    told = ledger.give_back("a", 1 << 40)
    assert len(told) <= 2
    assert sum(grant.held for grant in ledger.grants.values()) + ledger.pool == 4
    assert ledger.grants["a"].unused == 2  # standing slots come back to whom they stand for
