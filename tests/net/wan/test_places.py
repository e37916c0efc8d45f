"""Which process lives in which region."""

from __future__ import annotations

import pytest

from anabranch.net.wan.places import emulated, regions_of
from anabranch.net.wan.profile import Link, Profile, find_profile
from anabranch.net.wan.shape import WanError

SWARM = ["data-0", "relay-1.0", "relay-1.1", "relay-2.0"]


def profile(*regions: str) -> Profile:
    """Every link between two regions is alike."""
    links = {frozenset((a, b)): Link(0.05, 1e8) for a in regions for b in regions if a != b}
    return Profile("made up", regions, Link(0.001, 1e9), links)


def test_regions_are_taken_in_turn() -> None:
    assert regions_of(SWARM, profile("A", "B", "C")) == {
        "data-0": "A",
        "relay-1.0": "B",
        "relay-1.1": "C",
        "relay-2.0": "A",
    }
    assert set(regions_of(SWARM, profile("A")).values()) == {"A"}


def test_a_region_of_a_process_name_is_that_process_alone() -> None:
    assert regions_of(SWARM, profile("relay-1.1", "A", "data-0", "B")) == {
        "data-0": "data-0",
        "relay-1.0": "A",
        "relay-1.1": "relay-1.1",
        "relay-2.0": "B",
    }
    assert regions_of(SWARM, profile(*SWARM)) == {name: name for name in SWARM}


def test_a_process_without_a_region_is_refused() -> None:
    with pytest.raises(WanError, match=r"no region for relay-2\.0: name a region after it, or add one"):
        regions_of(SWARM, profile("data-0", "relay-1.0", "relay-1.1"))


def test_the_shipped_profile_has_a_name() -> None:
    assert "Tokyo" in find_profile("wan10").regions
    with pytest.raises(WanError, match=r"wan11: cannot be read: No such file"):
        find_profile("wan11")


@pytest.mark.usefixtures("needs_emulated_network")
def test_places_are_in_a_network_that_ends() -> None:
    from anabranch.net.wan.namespaces import NAMED

    with emulated(SWARM, profile("A", "B")) as places:
        assert list(places) == SWARM
        assert [place.region for place in places.values()] == ["A", "B", "A", "B"]
        assert len({place.address for place in places.values()}) == 4
        assert all((NAMED / place.namespace).exists() for place in places.values())
    assert not any((NAMED / place.namespace).exists() for place in places.values())
