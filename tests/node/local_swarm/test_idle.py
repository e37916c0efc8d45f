"""A volunteer whose machine is lent when idle hands over as its owner comes back, and joins again later."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import pytest

from anabranch import hours
from anabranch.node.local_swarm.peer_process import run_peer
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.events import PeerActive, PeerJoined, PeerRemoved, Step
from anabranch.operating_system import OtherPrograms
from support.local_swarms import check_exact, created, history_of, small_run, swarm_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="it does not tell its load"),
]

GUEST = "guest"


def run_on_desktop(name: str, arguments: list[str], log: str, *rest: object) -> NoReturn:
    """Run a peer on a machine whose owner uses as many cores as a file beside its log says."""
    used = Path(log).with_name("cores")
    hours.LOOK_S, hours.IDLE_S = 0.1, 0.3
    OtherPrograms.cores = lambda self: float(used.read_text() or 9.0)  # type: ignore[method-assign]
    run_peer(name, arguments, log, *rest)  # type: ignore[arg-type]


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
