"""Stages in which some replicas lie, and the check that fewer liars than honest replicas decide nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from typing import Protocol, TypeVar

TRUE, FALSE = "true", "false"


class _Named(Protocol):
    names: list[str]


_S = TypeVar("_S", bound=_Named)


def stages(most: int) -> Iterator[str]:
    """Stages of up to `most` replicas, at least one of which works and less than half of which lie. Names
    that begin with h are of honest replicas, those with z of liars; standbys' end with s."""
    for of_each in product(range(most + 1), repeat=4):
        honest, liars, _, lying_standbys = of_each
        if honest + liars and 2 * (liars + lying_standbys) < sum(of_each) <= most:
            kinds = zip(("h{}", "z{}", "h{}s", "z{}s"), of_each, strict=True)
            yield " ".join(kind.format(n) for kind, count in kinds for n in range(count))


def check_fewer_liars(
    make: Callable[[str], _S], decided: Callable[[_S, Mapping[str, str]], str | None]
) -> None:
    """Check that nothing false is decided, and that the reports of the honest ones are enough, whichever have
    reported so far. make: stage of these names. decided: what it decides by the reports of some replicas."""
    count = 0
    for names in stages(6):
        stage = make(names)
        honest = {name for name in stage.names if name.startswith("h")}
        for number in range(len(stage.names) + 1):
            for heard in combinations(stage.names, number):
                found = decided(stage, {name: TRUE if name in honest else FALSE for name in heard})
                assert found in (None, TRUE), (names, heard)
                assert found == TRUE or not honest <= set(heard), (names, heard)
                count += 1
    assert count > 1000
