"""Decision which result of a stage's reduce is the run's, if its replicas may report different ones (R8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.coordinator.reduce_attempts import ReduceAttempts
from anabranch.protocol.coordinator.round import Round
from anabranch.protocol.coordinator.step_receipts import StepReceipts
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.convictions import Convictions
from anabranch.protocol.fleet.operator_control import RevocationRequests
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Attempt, AttemptId, Fence, Prepared, Spared
from anabranch.protocol.reduce.partial_sums import PARTS, ReduceAccount
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from support.admission import DATA_TICKETS
from support.lying_stages import FALSE, TRUE, check_fewer_liars

T, BASE, UNITS = 5, "entry", 4


class Stage:
    """Reduce of stage 1, which d0 leads. Names that begin with h are of honest replicas, those with z of
    liars that agree; standbys' end with s. summed: digest that d0 found, if it sums all parts."""

    def __init__(self, names: str, summed: str | None = None) -> None:
        self.names = names.split()
        ctx = make_context("d0", 1, 0, Settings("run", 1, 1, UNITS, 100), "d0")
        joined = tuple(Member(p, int(p != "d0"), 1, "", 4, name=p) for p in ("d0", *self.names))
        ctx.run.membership.apply(Members(1, joined=joined))
        ctx.run.membership.apply(Members(2, active_from={member.id: 1 for member in joined}))
        ctx.run.membership.open(T, 1)
        connections = Connections(ctx)
        for name in self.names:
            ctx.links.up[name] = AdaptiveTimeout(0.0, 1.0)
        ctx.standby_view.announced(1, Spared(1, {p: 5.0 for p in self.names if p.endswith("s")}))
        self.admission = Admission(ctx, connections, "", "", "", print, DATA_TICKETS, lambda *_: None)
        account = ReduceAccount({}, (), True, None if summed is None else (summed, {}))
        log = cast(Any, SimpleNamespace(raft=SimpleNamespace(term=1)))
        receipts = StepReceipts(ctx, self.admission, Convictions(ctx, RevocationRequests(ctx).revoke))
        self.reduces = ReduceAttempts(ctx, log, self.admission, receipts, lambda _: account)
        fence = Fence(1, 1, T, BASE, 1)
        own = [k for k, name in enumerate(self.names) if not name.endswith("s")]
        helps = {} if summed is None else {"helpers": ("d0",), "sums": (len(self.names),) * PARTS}
        self.attempt = Attempt(fence, 1, AttemptId(1, 1), 2, tuple(self.names),
            tuple(own[unit % len(own)] for unit in range(UNITS)), **helps)  # fmt: skip

    def decided(self, reports: Mapping[str, str]) -> str | None:
        """Digest that is decided when these replicas have reported; None if none is."""
        current = Round(T, BASE, 0.0, attempts={1: self.attempt})
        fence = Fence(1, 1, T, BASE, 1)
        current.prepared[1] = {
            peer: Prepared(fence, 1, self.attempt.attempt, digest, {}) for peer, digest in reports.items()
        }
        found = self.reduces.prepared(current, 1)
        return found.digest if found is not None else None

    def of(self, heard: Iterable[str]) -> str | None:
        return self.decided({name: TRUE if name.startswith("h") else FALSE for name in heard})


@pytest.mark.parametrize("names", ["h1 z1 z2 h2s h3s", "h1 h2 z1 z2 z3 h3s h4s", "z1 z2 h1s h2s h3s"])
def test_liars_most_of_those_that_work_are_outvoted_by_standbys(names: str) -> None:
    """They report first."""
    stage = Stage(names)
    liars = [name for name in stage.names if name.startswith("z")]
    honest = [name for name in stage.names if name.startswith("h")]
    assert stage.of(liars) is None
    for number in range(len(honest)):
        assert stage.of([*liars, *honest[:number]]) is None
    assert stage.of([*liars, *honest]) == TRUE


@pytest.mark.parametrize(
    ("names", "first"),
    [("h1 h2 h3s", 2), ("h1 h2 h3s h4s", 2), ("h1 h2 h3s h4s h5s", 3), ("h1 h2 h3 h4s", 2),
     ("h1 h2 h3 h4s h5s h6s", 3), ("h1 h2 h3", 2), ("h1 h2s", 2), ("h1 h2s h3s h4s", 2)],
)  # fmt: skip
def test_standbys_are_not_waited_for_unless_they_are_most(names: str, first: int) -> None:
    order = names.split()
    assert Stage(names).of(order[: first - 1]) is None
    assert Stage(names).of(order[:first]) == TRUE


def test_a_report_that_one_that_works_withholds_is_made_up_for_by_a_standby() -> None:
    stage = Stage("h1 h2 z1 h3s h4s")
    assert stage.of(["h1", "h2"]) is None
    assert stage.of(["h1", "h2", "h3s"]) == TRUE


def test_fewer_liars_than_honest_replicas_decide_nothing() -> None:
    check_fewer_liars(Stage, Stage.decided)


def test_the_sum_that_the_coordinator_made_outweighs_all_that_agree_on_another() -> None:
    """It waits for one that confirms its sum; then the liars are out, and the others decide."""
    stage = Stage("z1 z2 h1", summed=TRUE)
    assert stage.of(["z1", "z2"]) is None and not stage.admission.going()
    assert stage.of(["z1", "z2", "h1"]) is None and set(stage.admission.going()) == {"z1", "z2"}
    assert Stage("h1 h2 h3", summed=TRUE).of(["h1", "h2"]) == TRUE


def test_a_sum_of_the_coordinator_that_nobody_confirms_removes_nobody() -> None:
    stage = Stage("h1 h2 h3", summed=FALSE)
    assert stage.of(["h1", "h2"]) is None
    assert stage.of(["h1", "h2", "h3"]) == TRUE and not stage.admission.going()
