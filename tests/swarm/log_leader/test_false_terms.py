"""False terms: one costs a peer a while at most, and a huge one nothing (R9)."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.consensus.leader_view import PROOF_S
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member, Members
from anabranch.protocol.messages import AttemptId
from anabranch.protocol.peer.log_sources import NO_VOTER_S
from anabranch.protocol.peer.peer import Peer
from anabranch.protocol.raft.term_claims import TermClaims
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from support.swarms.leaving_voters import SLOW, until
from support.swarms.voters import LONG

AT = 4.0
HUGE = 1 << 61


def settled(seed: int) -> tuple[World, Node, str]:
    """A swarm with three voters, a member that is none, and a voter that does not lead."""
    stages = {"d0": 0, "d1": 0, "r1.0": 1, "r1.1": 1, "r2.0": 2, "r2.1": 2}
    machines = [Machine(name, stage) for name, stage in stages.items()]
    world = counting_world(replace(LONG, steps=1000), machines, seed, SLOW)
    Invariants(world)
    until(world, AT)
    ctx = world.nodes["d0"].peer.ctx
    keepers = [voter.partition("/")[0] for voter in ctx.log.voters]
    assert len(keepers) == 3 and ctx.log.leads
    plain = next(node for name, node in world.nodes.items() if name[0] == "r" and name not in keepers)
    return world, plain, next(name for name in keepers if name != "d0")


def says_it_leads(node: Node, liar: str, term: int) -> None:
    ping = msg.Ping(1, node.peer.progress.position.index + 1, term, node.peer.ctx.run.settings.epoch)
    node.handle(ev.Received(liar, ping))


def rate_limits(world: World, node: Node) -> list[str]:
    return [str(f["reason"]) for _, who, kind, f in world.notes if (who, kind) == (node.id, "refused")]


@pytest.mark.parametrize("ahead", [1, 40])
def test_a_voter_that_says_it_leads_is_followed_until_it_should_have_shown_a_line(ahead: int) -> None:
    """It goes on saying so, in ever higher terms, and even orders a reduce."""
    world, plain, liar = settled(1)
    term = plain.peer.ctx.log.term + ahead

    def lie(n: int) -> None:
        says_it_leads(plain, liar, term + n)
        iteration, ctx = plain.peer.iteration, plain.peer.ctx
        if ctx.log.leader == liar and iteration is not None:
            members = ctx.run.membership.live(ctx.run.stage, iteration.t)
            owners = tuple(members.index(ctx.me) for _ in range(6))
            id_ = AttemptId(ctx.log.term, 1)
            fence = msg.Fence(1, 1, iteration.t, iteration.base, world.nodes[liar].member.stage)
            plain.handle(ev.Received(liar, msg.Attempt(fence, ctx.run.stage, id_, 1, tuple(members), owners)))

    for n in range(60):
        world.clock.after(0.5 * n, lambda n=n: lie(n))  # type: ignore[misc]
    lie(0)
    assert plain.peer.ctx.log.leader == liar
    then = until(world, AT + PROOF_S + 3.0)
    assert plain.peer.ctx.log.leader == "d0"
    assert until(world, AT + PROOF_S + 6.0) >= then + 2
    last = world.history().commits[-1]
    assert plain.id in last.stages[plain.peer.ctx.run.stage].members and world.history().removals == 0


@pytest.mark.parametrize("who", ["voter", "member"])
def test_a_huge_term_is_refused(who: str) -> None:
    world, plain, liar = settled(2)
    liar = liar if who == "voter" else next(n for n in plain.links if n[0] == "r" and n != liar)
    before = plain.peer.ctx.log.term
    says_it_leads(plain, liar, HUGE)
    assert (plain.peer.ctx.log.leader, plain.peer.ctx.log.term) == ("d0", before)
    assert who == "member" or rate_limits(world, plain) == [f"Ping: nobody is in term {HUGE}"]


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("forced", [False, True], ids=["answers", "forced elections"])
def test_a_voter_that_names_ever_higher_terms_disturbs_the_others_less_and_less(forced: bool) -> None:
    """The leader stepped down for each of them: two steps in a minute, and no more later, with such answers;
    twelve with elections that it says that the leader wants."""
    world, _, liar = settled(1)
    node, raft = world.nodes[liar], world.nodes[liar].peer.voter.raft

    def calls() -> None:
        term = max(other.peer.ctx.log.term for other in world.nodes.values()) + 1
        for voter in (each for each in raft.log.voters if each != raft.me):
            order = msg.AskVote(raft.me, voter, term, False, 0, 0, True)
            world.send(node, voter.partition("/")[0], order, None)
        world.clock.after(0.5, calls)

    if forced:
        calls()
    else:
        world.mouths[liar] = lambda said: (
            msgspec.structs.replace(said, term=said.term + 1) if isinstance(said, msg.Appended) else said
        )
    steps = [until(world, AT + seconds) for seconds in (0.0, 60.0, 90.0)]
    assert steps[1] > steps[0] + 20 and steps[2] > steps[1] + 20 and world.history().removals == 0


def test_a_voter_is_heard_again_when_it_named_no_later_term_for_long() -> None:
    claims, now, heard = TermClaims(), 0.0, list[float]()
    while now < 2000.0:
        if claims.hears("liar", now, 1.0):
            heard.append(now)
        now += 0.5
    assert heard == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, *range(512, 2000, 256)]
    assert claims.hears("another", now, 1.0) and not claims.hears("liar", now, 1.0)
    assert [claims.hears("liar", now + 600.0, 1.0) for _ in range(4)] == [True] * 3 + [False]


def test_who_votes_asks_its_own_raft() -> None:
    world, _, keeper = settled(3)
    node = world.nodes[keeper]
    others = (voter.partition("/")[0] for voter in node.peer.ctx.log.voters)
    other = next(name for name in others if name not in ("d0", keeper))
    says_it_leads(node, other, node.peer.ctx.log.term + 1)
    assert node.peer.ctx.log.leader == "d0"


@pytest.mark.parametrize("term", [1, HUGE])
def test_who_is_linked_to_no_voter_believes_nobody_about_terms(term: int) -> None:
    """It is cut off from all who keep the log while a member says that it leads; then it goes on."""
    world, plain, _ = settled(4)
    keepers = [voter.partition("/")[0] for voter in plain.peer.ctx.log.voters]
    liar = next(name for name in plain.links if name not in keepers)
    for keeper in keepers:
        world.cut(plain.id, keeper, 1.5)
    world.carrier_to = lambda node, peer, carriers: ""  # type: ignore[method-assign]
    until(world, AT + 0.5)
    assert not set(keepers) & plain.links.keys() and liar in plain.links
    says_it_leads(plain, liar, plain.peer.ctx.log.term + term)
    assert plain.peer.ctx.log.leader == "d0"
    then = until(world, AT + 4.0)
    assert plain.running and until(world, AT + 7.0) >= then + 2


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_who_knows_none_of_the_voters_any_more_learns_of_them_from_members(seed: int) -> None:
    """All that it takes for voters are gone, and then the leader dies, too."""
    world, plain, _ = settled(50 + seed)
    plain.peer.ctx.log.elect(("gone/0", "gone too/0", "long gone/0"))
    world.crash("d0")
    then = until(world, AT + 12.0)
    assert until(world, AT + 15.0) >= then + 2
    assert "gone/0" not in plain.peer.ctx.log.voters and plain.peer.committed >= then


def test_who_knows_one_voter_whose_machine_lost_its_disk_learns_of_the_others() -> None:
    """The machine is back, and linked, and knows nothing of the log that it kept; then the leader dies."""
    world, plain, _ = settled(60)
    keepers = [voter.partition("/")[0] for voter in plain.peer.ctx.log.voters]
    back = next(name for name in sorted(world.nodes) if name not in (*keepers, plain.id))
    plain.peer.ctx.log.elect((f"{back}/{world.nodes[back].member.disk}",))
    world.crash(back)
    world.add(world.nodes[back].next_life(without_disk=True), "d0", world.clock.now + 0.1)
    until(world, AT + 4.0)
    assert back in plain.links and plain.peer.ctx.log.keeps_log(back)
    world.crash("d0")
    then = until(world, AT + 16.0)
    assert until(world, AT + 19.0) >= then + 2 and plain.peer.committed >= then
    assert set(keepers) & {voter.partition("/")[0] for voter in plain.peer.ctx.log.voters}


def test_the_only_voter_leads_again_after_a_learner_in_a_later_term() -> None:
    """A learner of the log had stood for election before, in a term that nobody else had heard of."""
    machines = [Machine("d0", 0), Machine("r1.0", 1)]
    world = counting_world(Settings("alone", 1, 1, 4, 8, voters=3), machines, 0)
    Invariants(world)
    while world.history().t < 2:
        world.clock.step()
    leading = world.nodes["d0"].peer
    assert leading.ctx.log.leads and leading.ctx.log.voters == ("d0/0",)
    leading.voter.raft.add_learner("r1.0/0")
    term = leading.ctx.log.term + 4
    world.nodes["d0"].handle(ev.Received("r1.0", msg.Appended("r1.0/0", "d0/0", term, False, 0, 1)))
    assert not leading.ctx.log.leads
    world.run(60.0)
    assert world.history().t == 8 and leading.ctx.log.term == term + 1


@pytest.mark.parametrize(
    ("incarnation", "disk", "believed"),
    [(1, "0", False), (2, "0", True), (1, "0+", True)],
    ids=["the voter", "a process that the log does not know", "another disk"],
)
def test_a_voter_is_a_peer_and_its_disk(incarnation: int, disk: str, believed: bool) -> None:
    """A member that keeps no log, and is linked to this machine of a voter, takes another member's lines or
    not, by the voter's id."""
    peer = Peer("a", 1, "gone", Settings("run", 1, 1, 2, 10, voters=3))
    members = tuple(Member(name, 1, 1, "", 4, disk=disk) for name in ("a", "b", "v"))
    peer.ctx.run.membership.apply(Members(1, members))
    peer.ctx.log.elect(("v/0",))
    peer.handle(ev.LinkUp("b", 1), 0.0)
    assert not peer.sources.believes("b")  # for as long as a guest may keep its links broken
    peer.handle(ev.Received("b", msg.Ping(1, 0)), NO_VOTER_S)
    assert peer.sources.believes("b")
    peer.handle(ev.LinkUp("v", incarnation), NO_VOTER_S)
    assert peer.sources.believes("b") == believed
    assert peer.sources.believes("v")
