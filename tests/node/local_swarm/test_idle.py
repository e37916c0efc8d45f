"""A volunteer hands over as its owner comes back to an idle machine or pauses it, and joins again later."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from anabranch import hours, lending
from anabranch.cli.main import main
from anabranch.launch.fleet import AGAIN
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerActive, PeerJoined, PeerRemoved, Step
from anabranch.operating_system import OtherPrograms
from support.grids import first_of
from support.local_swarms import check_exact, created, history_of, small_run, swarm_of
from support.unhurried_peer import run_unhurried_peer

pytestmark = pytest.mark.slow

GUEST = "guest"


def run_on_desktop(name: str, arguments: list[str], log: str, *rest: object) -> NoReturn:
    """Run a peer on a machine whose owner uses as many cores as a file beside its log says."""
    used = Path(log).with_name("cores")
    lending.LOOK_S, hours.LOOK_S, hours.IDLE_S = 0.1, 0.1, 0.3
    OtherPrograms.cores = lambda self: float(used.read_text() or 9.0)  # type: ignore[method-assign]
    run_peer(name, arguments, log, *rest)  # type: ignore[arg-type]


@pytest.mark.costly
@pytest.mark.skipif(sys.platform == "win32", reason="it does not tell its load")
def test_the_owner_comes_back_and_goes_away(tmp_path: Path, texts: Path, supervisor: Supervisor) -> None:
    run = small_run(texts, run__steps=100_000, evaluation__every=0, checkpoint__every=1000)
    directory = created(tmp_path / "run", run)
    cores = directory.peer(GUEST) / "cores"
    cores.write_text("0.0")
    with swarm_of(directory, run, supervisor, target=run_on_desktop) as swarm:
        guest = swarm.join(GUEST, swarm.ticket(), ["--hours", "when idle"], once=False)

        def active(times: int) -> bool:
            peers = {event.subject for event in swarm.of(PeerJoined) if event.name == GUEST}
            return sum(event.subject in peers for event in swarm.of(PeerActive)) >= times

        swarm.until(lambda _: active(1))
        cores.write_text("2.0")
        swarm.until(lambda _: any(event.subject == swarm.peer_id(GUEST) for event in swarm.of(PeerRemoved)))
        [removed] = [event for event in swarm.of(PeerRemoved) if event.subject == swarm.peer_id(GUEST)]
        assert "in use again" in removed.reason, "announced, not suspected"
        cores.write_text("0.0")
        swarm.until(lambda _: active(2))
        steps = len(swarm.of(Step))
        swarm.until(lambda _: len(swarm.of(Step)) > steps)
        assert guest.log.read_text().count("this machine is lent when idle; waiting until then") == 2
        swarm.stop()
        swarm.to_the_end(guest)
    check_exact(directory, history_of(directory).t)


@pytest.mark.costly
@pytest.mark.parametrize("once", first_of([False, True]))
def test_a_paused_guest_hands_over_and_joins_again(
    once: bool, tmp_path: Path, texts: Path, supervisor: Supervisor
) -> None:
    """With --once its process ends when it has left, and its next one waits until the pause is ended."""
    run = small_run(texts, run__steps=100_000, evaluation__every=0, checkpoint__every=1000)
    directory = created(tmp_path / "run", run)
    home = str(directory.peer(GUEST))
    with swarm_of(directory, run, supervisor, target=run_unhurried_peer) as swarm:
        ticket = swarm.ticket()
        guest = swarm.join(GUEST, ticket, once=once)

        def active(times: int) -> bool:
            peers = {event.subject for event in swarm.of(PeerJoined) if event.name == GUEST}
            return sum(event.subject in peers for event in swarm.of(PeerActive)) >= times

        swarm.until(lambda _: active(1))
        assert main(["pause", "--home", home, "--minutes", "60"]) == 0
        swarm.until(lambda _: any(event.subject == swarm.peer_id(GUEST) for event in swarm.of(PeerRemoved)))
        [removed] = [event for event in swarm.of(PeerRemoved) if event.subject == swarm.peer_id(GUEST)]
        assert "paused by its user" in removed.reason, "announced, not suspected"
        if once:
            assert guest.wait(60.0) and guest.status == AGAIN
            guest = swarm.join(GUEST, ticket, once=True)
        waits = "this machine is paused until "
        swarm.until(lambda _: waits in guest.log.read_text())
        steps = len(swarm.of(Step))
        swarm.until(lambda _: len(swarm.of(Step)) > steps)
        assert main(["pause", "--home", home, "--end"]) == 0
        swarm.until(lambda _: active(2))
        steps = len(swarm.of(Step))
        swarm.until(lambda _: len(swarm.of(Step)) > steps)
        assert guest.log.read_text().count(waits) == 1
        guest.signal(signal.SIGTERM)
        assert guest.wait(60.0) and guest.status == AGAIN, "a scheduler starts it again"
        swarm.stop()
        swarm.to_the_end()
    check_exact(directory, history_of(directory).t)
