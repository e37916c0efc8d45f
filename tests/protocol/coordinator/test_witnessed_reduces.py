"""Members that block a reduce whose parts the coordinator sums: who loses its seat, who gets more time."""

from __future__ import annotations

from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.coordinator.witnessed_reduces import WITNESSED_FOR
from anabranch.protocol.reduce.partial_sums import ReduceAccount
from protocol.coordinator.test_prepared import BASE, TRUE, Stage, T


class Stalls(Stage):
    """Stalls of witnessed reduces of a stage of three."""

    def __init__(self) -> None:
        super().__init__("a b c", summed=TRUE)
        self.admission.has_last = lambda peer: True

    def stall(self, current: Round, *lacking: str, unusable: str = "") -> tuple[set[str], list[str]]:
        """Members to remove, and members that are given more time, as the parts of `lacking` did not come and
        the sum of `unusable` is no gradient."""
        account = ReduceAccount(dict.fromkeys(lacking, 0), {unusable}, not lacking, None)
        self.reduces.witnessing.account = lambda _: account
        found = self.reduces.witnessing.at_fault(current, self.attempt, {})
        assert found is not None
        return set(found[0]), found[1]


def in_iteration(t: int) -> Round:
    return Round(t, BASE, 0.0)


def test_a_late_member_gets_more_time_once() -> None:
    stalls, current = Stalls(), in_iteration(T)
    assert stalls.stall(current, "a") == (set(), ["a"])
    assert stalls.stall(current, "a") == ({"a"}, [])
    assert stalls.stall(in_iteration(T + WITNESSED_FOR), "a", "b") == ({"a"}, ["b"])
    assert stalls.stall(in_iteration(T + WITNESSED_FOR + 1), "a") == (set(), ["a"])


def test_a_repeated_reduce_gives_no_more_time() -> None:
    """Its patience is doubled already."""
    stalls, current = Stalls(), in_iteration(T)
    current.retries[1] = 1
    assert stalls.stall(current, "a") == ({"a"}, [])


def test_a_sum_that_is_no_gradient_is_no_matter_of_time() -> None:
    assert Stalls().stall(in_iteration(T), unusable="a") == ({"a"}, [])


def test_a_report_withheld_by_all_is_asked_for_again_first() -> None:
    stalls, current = Stalls(), in_iteration(T)
    assert stalls.stall(current) == (set(), [])
    assert stalls.stall(current) == (set(), ["a", "b", "c"])
