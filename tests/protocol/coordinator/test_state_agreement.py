"""Decision which state of a stage is the run's, when its replicas report different ones (I2, R11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.coordinator.round import LogTip, Round
from anabranch.protocol.coordinator.state_agreement import StateAgreement
from anabranch.protocol.failure_detection.connections import Connections
from anabranch.protocol.fleet.admission import Admission
from anabranch.protocol.fleet.stragglers import REPORTED_S
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import Applied, Fence, Spared
from anabranch.protocol.recovery.snapshot_catalog import SnapshotCatalog
from anabranch.protocol.recovery.stage_recovery import StageRecovery
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from support.admission import DATA_TICKETS
from support.lying_stages import FALSE, TRUE, check_fewer_liars

T, BASE = 5, "entry"


class Stage:
    """Stage 1 of a run led by d0, after step T was committed. Names that begin with h are of honest replicas,
    those with z of liars that agree; standbys' end with s."""

    def __init__(self, names: str) -> None:
        self.names = names.split()
        ctx = self.ctx = make_context("d0", 1, 0, Settings("run", 1, 1, 4, 100), "d0")
        joined = (
            Member("d0", 0, 1, "", 4, name="d0"),
            *(Member(p, 1, 1, "", 4, name=p) for p in self.names),
        )
        ctx.run.membership.apply(Members(1, joined=joined))
        ctx.run.membership.apply(Members(2, active_from={member.id: 1 for member in joined}))
        ctx.run.membership.open(T + 1, 1)
        connections = Connections(ctx)
        for name in self.names:
            ctx.links.up[name] = AdaptiveTimeout(0.0, 1.0)
        ctx.standby_view.announced(1, Spared(1, {p: 5.0 for p in self.names if p.endswith("s")}))
        self.admission = Admission(ctx, connections, "", "", "", print, DATA_TICKETS, lambda *_: None)
        self.tip = LogTip(ctx)
        self.tip.move(T, BASE, T, ())
        catalog = SnapshotCatalog(ctx)
        self.released = StateAgreement(
            ctx, self.tip, self.admission, catalog, StageRecovery(ctx, self.admission, catalog)
        )
        self.released.begin(T, ())

    def report(self, names: Iterable[str]) -> str | None:
        """Let replicas report, in this order; returns the decided fingerprint, None if there is none yet."""
        self._applied("d0", 0, TRUE)
        for name in names:
            self._applied(name, 1, {"h": TRUE, "z": FALSE}.get(name[0], name))
            self.released.release()
            self.released.check_parity()
        return self.tip.fingerprints[1] if self.tip.fingerprints else None

    def _applied(self, peer: str, stage: int, fingerprint: str) -> None:
        self.released.on_applied(peer, Applied(Fence(1, 1, T, BASE, stage), stage, fingerprint))

    @property
    def removed(self) -> set[str]:
        return set(self.admission.going())


def test_two_liars_of_three_that_work_are_outvoted_by_standbys() -> None:
    """Their reports come before any honest one (hostile seed 6200334)."""
    stage = Stage("h1 z1 z2 h2s h3s")
    assert stage.report(["z1", "z2", "h1", "h2s"]) is None and not stage.removed
    assert stage.report(["h3s"]) == TRUE and stage.removed == {"z1", "z2"}


def test_two_liars_that_alone_work_are_outvoted_by_standbys() -> None:
    stage = Stage("z1 z2 h1s h2s h3s")
    assert stage.report(["z1", "z2", "h1s", "h2s"]) is None
    assert stage.report(["h3s"]) == TRUE and stage.removed == {"z1", "z2"}


@pytest.mark.parametrize("order", ["h1 h2", "z1 h1 h2", "z1 z2s h1 h2", "z2s h1 h2"])
def test_a_lying_standby_makes_no_tie(order: str) -> None:
    """Two of the three that work are honest, and the only standby lies or is silent. Those two decide, at
    once, as all others could not outvote them."""
    stage = Stage("h1 h2 z1 z2s")
    assert stage.report(order.split()) == TRUE and stage.released.disputed() is None
    stage.report(["z1", "z2s"])
    assert stage.removed == {"z1", "z2s"}


@pytest.mark.parametrize(
    ("names", "first"),
    [("h1 h2 h3s", 2), ("h1 h2 h3s h4s", 2), ("h1 h2 h3 h4s h5s h6s", 3), ("h1 h2 h3", 2), ("h1 h2s", 2)],
)
def test_standbys_are_not_waited_for_while_nobody_lies(names: str, first: int) -> None:
    """Unless they are more than those that work."""
    order = names.split()
    assert Stage(names).report(order[: first - 1]) is None
    assert Stage(names).report(order[:first]) == TRUE


@pytest.mark.parametrize("names", ["h1 z1", "h1 z1s", "h1 h2 z1 z2", "h1 z1 h2s z2s", "h1 z1 q1"])
def test_half_against_half_is_a_dispute(names: str) -> None:
    """Nobody is removed; the run goes back to a snapshot."""
    stage = Stage(names)
    for name in reversed(stage.names):
        assert stage.released.disputed() is None
        assert stage.report([name]) is None
    assert stage.released.disputed() == (1, sorted(stage.names)) and not stage.removed


def test_reports_repeated_in_a_dispute_take_no_memory() -> None:
    """The next return of the log may be an hour away."""
    stage = Stage("h1 z1")
    for _ in range(100):
        assert stage.report(["h1", "z1"]) is None
    assert len(stage.released._unchecked) == 3


def test_replicas_that_a_new_leader_hears_late_count() -> None:
    """Liars report to it at once, and would be all that are heard."""
    stage = Stage("z1 z2 h1 h2 h3")
    stage.admission.absent.take_over()
    stage.ctx.clock.now = REPORTED_S + 1.0
    assert stage.report(["z1", "z2"]) is None
    assert stage.report(["h1", "h2", "h3"]) == TRUE and stage.removed == {"z1", "z2"}


def test_one_that_a_new_leader_has_no_link_with_does_not_count() -> None:
    stage = Stage("h1 h2 h3 h4")
    stage.admission.absent.take_over()
    for name in ("h3", "h4"):
        del stage.ctx.links.up[name]
    assert stage.report(["h1", "h2"]) is None
    stage.ctx.clock.now = REPORTED_S + 1.0
    assert stage.report(["h1", "h2"]) == TRUE


def test_a_standby_that_withholds_its_report_is_named_only_while_it_is_needed() -> None:
    for names, needed in (("h1 h2 z1 z2s", False), ("h1 h2 z1 z2 h3s", True)):
        stage = Stage(names)
        stage.report(["z1", "h1", "h2"])
        current = Round(T + 1, BASE, 0.0, stalls=9)
        assert ("h3s" in stage.released.withheld(current)) == needed


def test_more_honest_replicas_than_liars_always_decide_and_rightly() -> None:
    check_fewer_liars(Stage, _decided)


def _decided(stage: Stage, reports: Mapping[str, str]) -> str | None:
    stage.released.t, stage.tip.fingerprints = T - 1, ()
    stage.released.applied = {0: {"d0": TRUE}, 1: dict(reports)}
    stage.released.release()
    return stage.tip.fingerprints[1] if stage.tip.fingerprints else None
