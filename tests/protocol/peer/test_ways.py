"""Lines of the event log about the ways of links: of linked peers alone, and few of each."""

from __future__ import annotations

from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.step_parameters import Schedule, StepParameters
from anabranch.protocol.peer.bootstrap import lead
from anabranch.protocol.peer.link_events import WAYS
from anabranch.protocol.peer.peer import Peer
from anabranch.sim.workers.integer_world import Machine, genesis_of, member_of

SETTINGS = Settings("ways", 1, 1, 4, 3)


def founder() -> Peer:
    schedule = Schedule("batch {}".format, lambda t, step, norm: StepParameters(1.0, 1.0, 1.0, 1.0), 2, 1)
    genesis = genesis_of(SETTINGS, "d0")
    peer = lead(member_of(Machine("d0", 0)), SETTINGS, schedule, genesis, SavedVoterState("0"))
    peer.handle(ev.Started(), 0.0)
    return peer


def notes(peer: Peer, event: ev.Event, now: float) -> list[str]:
    found = [effect for effect in peer.handle(event, now) if isinstance(effect, ev.Note)]
    return [str(effect.fields["text"]) for effect in found if effect.kind == "note"]


def test_strangers_without_a_ticket_write_nothing_into_the_event_log() -> None:
    """iroh tells the path of everybody who connects, before anything but a key is proved; each was a line."""
    peer = founder()
    for number in range(100):
        assert not notes(peer, ev.PathChanged(f"stranger {number}", f"192.0.2.{number}:1"), 0.1)
    peer.handle(ev.LinkUp("eve", 1, ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S), "iroh"), 0.2)
    assert notes(peer, ev.PathChanged("eve", "192.0.2.1:1"), 0.3) == [
        "eve is reached through iroh directly, at 192.0.2.1:1"
    ]


def test_a_peer_whose_path_changes_all_the_time_writes_few_lines() -> None:
    peer = founder()
    peer.handle(ev.LinkUp("eve", 1, ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S), "iroh"), 0.0)
    changes = [ev.PathChanged("eve", path) for path in ("relay", "192.0.2.1:1")] * 300
    written = [text for k, event in enumerate(changes) for text in notes(peer, event, 0.5 * k)]
    assert len(written) <= WAYS.burst + 0.5 * len(changes) * WAYS.per_s + 1
