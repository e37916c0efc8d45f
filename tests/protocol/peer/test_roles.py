"""Roles of peers: they come from the credential that a peer showed when it dialled, whoever dials later."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from anabranch.net.identity import Identity
from anabranch.net.ticket import check_certificate
from anabranch.node.lifecycle.create_run import CERTIFICATE_S, _certifier
from anabranch.protocol import messages as msg
from anabranch.protocol.consensus.raft_node import SavedVoterState
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.log.step_parameters import Schedule, StepParameters
from anabranch.protocol.peer.bootstrap import lead
from anabranch.protocol.peer.peer import Peer
from anabranch.sim.workers.integer_world import Machine, genesis_of, member_of

SETTINGS = Settings("roles", 1, 1, 4, 3)
RELAY = ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S)
DATA = ev.VerifiedCredential("data", ev.NEVER_EXPIRES_S)


@pytest.fixture
def founder() -> Peer:
    schedule = Schedule("batch {}".format, lambda t, step, norm: StepParameters(1.0, 1.0, 1.0, 1.0), 2, 1)
    peer = lead(
        member_of(Machine("d0", 0)), SETTINGS, schedule, genesis_of(SETTINGS, "d0"), SavedVoterState("0")
    )
    peer.handle(ev.Started(), 0.0)
    return peer


def applies(peer: Peer, stage: int) -> list[ev.Effect]:
    """Effects of the application of "eve" for a stage."""
    member = Member("eve", stage, 1, peer.shared.entry.genesis.numerics_class, 4)
    request = msg.JoinRequest(
        member,
        stage,
        peer.shared.entry.genesis.protocol_version,
        "",
        peer.shared.entry.genesis.corpus_fingerprint,
    )
    return peer.handle(ev.Received("eve", request), 1.0)


def refusals(effects: list[ev.Effect]) -> list[str]:
    sent = [effect.message for effect in effects if isinstance(effect, ev.Send)]
    return [message.reason for message in sent if isinstance(message, msg.Refused)]


def test_a_relays_ticket_makes_no_data_node_when_the_founder_dials(founder: Peer) -> None:
    """The link that the founder dialled shows no credential, and takes none away."""
    founder.handle(ev.LinkUp("eve", 1, RELAY), 0.1)
    founder.handle(ev.LinkDown("eve", "gone"), 0.2)
    founder.handle(ev.LinkUp("eve", 1), 0.3)
    [reason] = refusals(applies(founder, 0))
    assert "lets you in as a relay" in reason


def test_a_peer_that_showed_no_ticket_gets_no_seat(founder: Peer) -> None:
    """It is not refused for good: it is to dial itself."""
    founder.handle(ev.LinkUp("eve", 1), 0.1)
    effects = applies(founder, 1)
    assert [effect.peer for effect in effects if isinstance(effect, ev.HangUp)] == ["eve"]
    assert not refusals(effects)
    founder.handle(ev.LinkUp("eve", 1, RELAY), 0.5)
    assert not [effect for effect in applies(founder, 1) if isinstance(effect, ev.HangUp)]


def test_a_certificate_neither_outlives_nor_outranks_its_ticket(tmp_path: Path) -> None:
    owner = Identity.generate()
    certify = _certifier(owner, "roles-1")
    member = Member(Identity.generate().peer_id, 0, 1, "class", 4)
    now, ticket = int(time.time()), "ab" * 32
    assert certify(member, None) == b""
    for expires, role in ((now + 60, "relay"), (ev.NEVER_EXPIRES_S, "data")):
        sealed = certify(member, ev.VerifiedCredential(role, expires, ticket))
        shown = check_certificate(sealed, run="roles-1", now_s=now)
        assert (shown.role, shown.ticket) == (role, ticket)
        assert shown.expires_at_s <= min(expires, int(time.time()) + CERTIFICATE_S)


def test_a_member_that_also_watches_is_linked_again(founder: Peer) -> None:
    """Its owner looks on with the same key and a watch ticket; then the founder dials the member."""
    member = Member("eve", 1, 1, founder.shared.entry.genesis.numerics_class, 4, "eve", address="eve:1")
    founder.handle(ev.LinkUp("eve", 1, RELAY), 0.1)
    founder.ctx.run.membership.apply(Members(2, joined=(member,)))
    founder.handle(ev.LinkDown("eve", "replaced by a new connection"), 0.2)
    founder.handle(ev.LinkUp("eve", 1, ev.VerifiedCredential("watch", ev.NEVER_EXPIRES_S)), 0.2)
    founder.handle(ev.LinkDown("eve", "gone"), 0.3)
    founder.handle(ev.LinkUp("eve", 1), 0.4)
    assert "eve" in founder.ctx.links.up
