"""Relays behind real NATs (nftables in network namespaces) train; the carrier of their links is killed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from anabranch.errors import UserError
from benchmarks.reach.nat_pairs import KINDS, measure

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("nft") is None,
        reason="needs root, network namespaces and nft",
    ),
]


def test_every_pair_is_linked_by_the_way_that_the_docs_promise(tmp_path: Path) -> None:
    """Directly if one of both has a public address, through a carrier else; zero bits differ (I3)."""
    try:
        found = measure(tmp_path, steps=6, kill=True)
    except UserError as error:
        if "failed: mount" in str(error) or "Operation not permitted" in str(error):
            pytest.skip(str(error))
        raise
    expected = {
        (f"1: {one}", f"2: {other}"): "direct" if "public" in (one, other) else "carried"
        for one in KINDS
        for other in KINDS
    }
    assert found.ways == expected
    assert found.exact and found.steps == 6


def test_a_machine_whose_address_changes_goes_on(tmp_path: Path) -> None:
    """Its connections are dead without a word, as when a laptop moves to another network; no step is lost."""
    found = measure(tmp_path, steps=12, kill=False, move="r22")
    assert found.exact and found.steps == 12
