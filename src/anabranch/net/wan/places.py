"""Places (network namespaces and regions) of a swarm's processes in an emulated network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle

from anabranch.net.wan.emulated_network import EmulatedNetwork
from anabranch.net.wan.profile import Profile
from anabranch.net.wan.shape import Host, WanError


@dataclass(frozen=True)
class Place:
    """Network namespace of a process in the emulated network, its IPv4 address there, and its region."""

    namespace: str
    address: str
    region: str = ""


def regions_of(names: Sequence[str], profile: Profile) -> dict[str, str]:
    """Region in `profile` of each process in `names`, by name. A region with the process's name is its own;
    the other processes take the remaining regions in turn. Raises WanError if there is none for them."""
    shared = [region for region in profile.regions if region not in names]
    others = [name for name in names if name not in profile.regions]
    if others and not shared:
        raise WanError(
            f"the network profile has no region for {others[0]}: name a region after it, or add one whose "
            "name is not that of a process"
        )
    return {name: name for name in names if name in profile.regions} | dict(
        zip(others, cycle(shared), strict=False)
    )


@contextmanager
def emulated(names: Sequence[str], profile: Profile) -> Iterator[dict[str, Place]]:
    """Run an emulated network with a host for each process, in the regions of `regions_of`, while the context
    is entered; yields process name -> namespace, address and region. The processes must end before the
    context does. Raises WanError as `regions_of` and `EmulatedNetwork` do."""
    regions = regions_of(names, profile)
    with EmulatedNetwork({name: Host(region=region) for name, region in regions.items()}, profile) as wan:
        yield {
            name: Place(wan.namespace(name), wan.address(name), region) for name, region in regions.items()
        }
