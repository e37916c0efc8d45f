"""Which host of an emulated network each process of a swarm lives on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

from anabranch.net.wan.profile import Profile
from anabranch.net.wan.router import WanRouter
from anabranch.net.wan.shape import Host, WanError


@dataclass(frozen=True)
class Place:
    """Where a process runs: the network namespace that it enters before it opens a socket, the address that
    it listens on there, and the region that it is said to be in."""

    namespace: str
    address: str
    region: str = ""


def regions_of(names: Sequence[str], profile: Profile) -> dict[str, str]:
    """The region of each process: the one of its own name where the profile has one; the others take those
    that are no process's name in turn. Raises WanError when there is none for them."""
    shared = [region for region in profile.regions if region not in names]
    others = [name for name in names if name not in profile.regions]
    if others and not shared:
        raise WanError(
            f"the network profile has no region for {others[0]}: name one after it, or add one that is no "
            "process's name"
        )
    return {name: name for name in names if name in profile.regions} | dict(
        zip(others, cycle(shared), strict=False)
    )


def places_of(wan: WanRouter, regions: Mapping[str, str]) -> dict[str, Place]:
    """The places of a network whose hosts have the processes' names."""
    return {name: Place(wan.namespace(name), wan.address(name), region) for name, region in regions.items()}


@contextmanager
def emulated(names: Sequence[str], profile: Profile) -> Iterator[dict[str, Place]]:
    """A network with a host for each process, by `regions_of`; end the processes before it ends.
    Raises WanError."""
    regions = regions_of(names, profile)
    with WanRouter({name: Host(region=region) for name, region in regions.items()}, profile) as wan:
        yield places_of(wan, regions)
