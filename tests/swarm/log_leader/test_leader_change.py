"""Whoever leads dies, freezes or is cut off, at any moment: another leads, and every bit is right."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import Commit, Rollback, Voters, decode_entry
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, member_of, wrong_states
from support.grids import every_value, first_of
from support.swarms.fault_points import Fault, Moment, ended, received
from support.swarms.small_swarm import MadeUpBatches, check_equal, small_model, small_run
from support.swarms.training_world import training_world
from support.swarms.voters import LONG, come_back, has_voters, leads, long_swarm, one_history, records

RUN = small_run(minimum=2, steps=5, checkpoint_every=2)


def swarm(seed: int = 3, replicas: tuple[int, ...] = (2, 2), data_nodes: int = 2) -> World:
    world = training_world(
        RUN, small_model(RUN), MadeUpBatches(RUN), replicas, data_nodes, seed, voters=3
    )
    Invariants(world)
    return world


def proposed(t: int) -> Moment:
    """C_t is in the leader's log, and nobody else knows."""

    def moment(node: Node, event: ev.Event) -> bool:
        raft = node.peer.voter.raft
        if not leads(node) or not raft.busy:
            return False
        record = decode_entry(raft.log.line(raft.log.length - 1)).record
        return isinstance(record, Commit) and record.t == t

    return moment


def chosen_by_leader(t: int) -> Moment:
    """The leader has folded C_t; what it announced may be lost with it."""
    return lambda node, event: leads(node) and node.peer.committed == t


def at_the_leader(moment: Moment) -> Moment:
    return lambda node, event: leads(node) and moment(node, event)


def crash(world: World, node: Node) -> None:
    world.crash(node.id)


PHASES: dict[str, Callable[[], Moment]] = {
    "claims are coming": lambda: at_the_leader(received(msg.Claim, 3, 2)),
    "in the middle of the reduce": lambda: at_the_leader(received(msg.ReducePart, 3)),
    "its stage is summed": lambda: at_the_leader(ended(tasks.Assemble, 3)),
    "PREPARED is coming": lambda: at_the_leader(received(msg.Prepared, 3)),
    "between proposal and choice": lambda: proposed(3),
    "chosen and not announced": lambda: chosen_by_leader(3),
    "it has taken the step": lambda: at_the_leader(ended(tasks.Apply, 3)),
    "others have": lambda: at_the_leader(received(msg.Applied, 3, 2)),
}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("phase", PHASES)
def test_the_leader_crashes(phase: str, seed: int) -> None:
    world = swarm(seed)
    fault = Fault(world, ("d0",), PHASES[phase](), crash)
    world.run(until_s=600)
    history = check_equal(world, RUN)
    assert fault.delivered and history.term > 1 and has_voters(world)


@pytest.mark.costly
def test_relays_vote_where_data_nodes_are_few_and_lead_without_the_corpus() -> None:
    world = swarm(5, data_nodes=2)
    struck = Fault(world, ("d0",), chosen_by_leader(2), crash)
    world.run(until_s=600)
    assert struck.delivered
    check_equal(world, RUN)
    votes = [record.ids for record in records(world, Voters)]
    assert any(any(voter.startswith("r") for voter in ids) for ids in votes)
    assert all(ids[0] != "d0/0" for ids in votes[-1:])  # a dead voter is replaced


def test_each_leader_in_turn_is_lost() -> None:
    """Two leaders die, each after the other was replaced as a voter."""
    world = swarm(7, replicas=(3, 3), data_nodes=3)
    lost: list[str] = []

    def strike(world: World, node: Node) -> None:
        lost.append(node.id)
        world.crash(node.id)

    def replaced(node: Node, event: object) -> bool:
        return full_again(node) and not {f"{each}/0" for each in lost} & set(node.peer.ctx.log.voters)

    Fault(world, ("d0",), replaced, strike)
    Fault(world, tuple(i for i in world.nodes if i != "d0"), replaced, strike)
    world.run(until_s=900)
    history = check_equal(world, RUN)
    assert len(lost) == 2 and history.term >= 3


def full_again(node: Node) -> bool:
    """It leads, and all of three voters are members."""
    members = node.peer.ctx.run.membership.members
    voters = [voter.partition("/")[0] for voter in node.peer.ctx.log.voters]
    whole = len(voters) == 3 and all(voter in members for voter in voters)
    return leads(node) and whole and not node.peer.voter.busy


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("seconds", [2.0, 12.0, 60.0])
def test_the_leader_freezes_and_wakes(seconds: float) -> None:
    world = swarm(8)
    fault = Fault(world, ("d0",), chosen_by_leader(2), lambda w, node: w.freeze(node.id, seconds))
    world.run(until_s=900)
    assert fault.delivered
    check_equal(world, RUN)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("company", "moment"),
    every_value(
        [(), ("r1.0",), ("r2.0", "r1.1")], ["between proposal and choice", "chosen and not announced"]
    ),
)
def test_the_leader_is_cut_off(company: tuple[str, ...], moment: str) -> None:
    """No second history: what it proposes meanwhile gives way when the partition has healed."""
    world = swarm(9)
    side = ("d0", *company)
    fault = Fault(world, ("d0",), PHASES[moment](), lambda w, node: w.partition(side, 40.0))
    world.run(until_s=900)
    assert fault.delivered
    check_equal(world, RUN)
    one_history(world)


def check_counted(world: World) -> None:
    """Every step is committed once, and every state is that of a single machine."""
    assert [commit.t for commit in world.history().commits] == list(range(1, LONG.steps + 1))
    assert wrong_states(world) == {}


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("changes", "after_s"), every_value([{}, {"disk": "1"}], [1.0, 60.0]))
def test_the_founder_comes_back_and_leads_again(changes: dict[str, str], after_s: float) -> None:
    """It follows, fetches its state from the others, votes, and is given the lead: the directory is there."""
    world = long_swarm(10)
    back: list[int] = []

    def strike(world: World, node: Node) -> None:
        world.crash(node.id)
        come_back(world, node.id, after_s, "d1", **changes)
        world.clock.after(after_s, lambda: back.append(1))

    fault = Fault(world, ("d0",), chosen_by_leader(3), strike)
    world.run(until_s=900)  # the founder is not there: over when all is committed
    if not back:
        while not back:
            world.clock.step()
        world.run(until_s=900)
    assert fault.delivered
    check_counted(world)
    founder = world.nodes["d0"]
    assert founder.stopped is not None and founder.stopped[1]
    assert founder.peer.lead is not None and max(world.checkpoints) == 14
    assert records(world, Voters)[-1].ids == (f"d0/{changes.get('disk', '0')}",)
    assert changes or founder.disk.lines == world.log


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_joiners_find_the_new_leader(seed: int) -> None:
    """The leader dies while others are on their way in, at whatever step of it."""
    world = long_swarm(20 + seed)

    def strike(world: World, node: Node) -> None:
        for number in range(4):
            like = world.nodes["d1"].member
            member = msgspec.structs.replace(like, id=f"late{number}", stage=-1, address=f"late{number}:1")
            world.add(member, "d0", at=world.clock.now + 0.03 * number)
        world.clock.after(0.1 + 0.02 * seed, lambda: world.crash("d0"))

    Fault(world, ("d0",), chosen_by_leader(3), strike)
    world.run(until_s=900)
    check_counted(world)
    leading = next(node for node in world.nodes.values() if node.running and leads(node))
    members = leading.peer.ctx.run.membership.members
    assert all(f"late{number}" in members for number in range(4))


@pytest.mark.parametrize("seed", first_of([101, 117, 129], 1))
def test_who_was_just_welcomed_stays_a_member(seed: int) -> None:
    """The leader dies as its joiner is welcomed: nobody else has folded that yet, the new leader neither."""
    world = long_swarm(seed)

    def come(world: World, node: Node) -> None:
        member = msgspec.structs.replace(world.nodes["d1"].member, id="late", stage=-1, address="late:1")
        world.add(member, "d0", at=world.clock.now)

    Fault(world, ("d0",), chosen_by_leader(3), come)
    fault = Fault(world, ("late",), received(msg.Welcome, 0), lambda world, node: world.crash("d0"))
    world.run(until_s=900)
    check_counted(world)
    leading = next(node for node in world.nodes.values() if node.running and leads(node))
    assert fault.delivered and "late" in leading.peer.ctx.run.membership.members


@pytest.mark.parametrize("seed", first_of([10, 11, 12], 1))
def test_what_a_step_takes_is_not_the_time_that_a_new_leader_took_to_fold_it(seed: int) -> None:
    """C_3 is chosen and nobody but the dead leader has folded it: the next one opens the round of 3 as it
    takes over, and folds C_3 a round trip later. That is not what a step takes."""
    world = long_swarm(seed)
    steps: list[float] = []
    found: list[float] = []

    def look(node: Node, event: ev.Event) -> None:
        lead = node.peer.lead
        if lead is None:
            return
        if node.id == "d0" and lead.reducing.step_s and (not steps or steps[-1] != lead.reducing.step_s):
            steps.append(lead.reducing.step_s)
        if node.id != "d0" and not found and lead.reducing.step_s:
            found.append(lead.reducing.step_s)

    world.watchers.append(look)
    fault = Fault(world, ("d0",), chosen_by_leader(3), crash)
    world.run(until_s=900)
    assert fault.delivered and found
    assert found[0] > 0.5 * statistics.median(steps), (steps, found)


@pytest.mark.costly
def test_without_a_majority_nothing_is_committed_and_it_goes_on_when_one_is_back() -> None:
    world = long_swarm(30)
    voters: list[str] = []

    def strike(world: World, node: Node) -> None:
        voters.extend(voter.partition("/")[0] for voter in node.peer.ctx.log.voters)
        for voter in voters[1:]:
            world.vanish(voter)

    Fault(world, ("d0",), lambda node, event: full_again(node) and node.peer.committed >= 2, strike)
    with pytest.raises(TimeoutError):
        world.run(until_s=200)
    committed = world.history().t
    assert committed < 14
    for voter in voters[1:]:
        come_back(world, voter, 0.0, "d0")
    world.run(until_s=900)
    check_counted(world)
    one_history(world)


def test_the_only_data_node_of_an_iteration_is_lost() -> None:
    """Another, which was to serve from the next one on, takes all its microbatches over."""
    stages = {"d0": 0, "r1.0": 1, "r1.1": 1, "r2.0": 2, "r2.1": 2}
    world = counting_world(LONG, [Machine(name, stage) for name, stage in stages.items()], 31)
    Invariants(world)
    late = world.add(member_of(Machine("d1", 0)), "d0", at=1.5)

    def moment(node: Node, event: ev.Event) -> bool:
        """Claims are coming for an iteration that d1 has the state for and does not serve."""
        lead, t = node.peer.lead, node.peer.committed
        later = node.peer.ctx.run.membership.active_from.get("d1", 0) > t + 1
        has_state = late.peer.replica.t == t > 0
        return later and has_state and lead is not None and lead.round is not None and bool(lead.round.claims)

    fault = Fault(world, ("d0",), moment, crash)
    world.run(until_s=300)
    assert fault.delivered
    check_counted(world)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("which", [1, 2])
def test_a_voter_dies_when_the_run_ends(which: int) -> None:
    """The founder is left as the only voter; the dead one is let go first."""
    world = long_swarm(32)

    def strike(world: World, node: Node) -> None:
        world.crash(node.peer.ctx.log.voters[which].partition("/")[0])

    fault = Fault(world, ("d0",), chosen_by_leader(14), strike)
    world.run(until_s=300)
    assert fault.delivered
    assert world.nodes["d0"].stopped == ("all 14 steps are committed", True)
    check_counted(world)


def keeps_snapshots(seed: int) -> World:
    stages = {"d0": 0, "d1": 0, "d2": 0, "r1.0": 1, "r1.1": 1, "r2.0": 2, "r2.1": 2}
    settings = replace(LONG, snapshot_every=2)
    world = counting_world(settings, [Machine(name, stage) for name, stage in stages.items()], seed)
    Invariants(world)
    return world


def lose_stage_1(world: World) -> None:
    for name in ("r1.0", "r1.1"):
        world.crash(name)
        newcomer = member_of(Machine(f"new {name}", 1))
        world.clock.after(1.0, lambda newcomer=newcomer: world.add(newcomer, "d1", world.clock.now) and None)  # type: ignore[misc]


def snapshot_complete(node: Node, event: ev.Event) -> bool:
    """Three data nodes vote, and the run can go back to a step that it computed."""
    lead = node.peer.lead
    return lead is not None and lead.catalog.complete_t >= 2 and full_again(node)


def rollback_proposed(node: Node, event: ev.Event) -> bool:
    raft = node.peer.voter.raft
    last = decode_entry(raft.log.line(raft.log.length - 1)).record if raft.log.length else None
    return leads(node) and raft.busy and isinstance(last, Rollback)


def rollback_chosen(node: Node, event: ev.Event) -> bool:
    raft = node.peer.voter.raft
    last = decode_entry(raft.log.line(raft.commit_index - 1)).record if raft.commit_index else None
    return leads(node) and isinstance(last, Rollback)


def test_a_stage_is_lost_with_the_leader() -> None:
    """The next leader learns from everyone which snapshots there are, and goes back to one."""
    world = keeps_snapshots(41)

    def strike(world: World, node: Node) -> None:
        world.crash(node.id)
        lose_stage_1(world)

    fault = Fault(world, ("d0",), snapshot_complete, strike)
    world.run(until_s=600)
    assert fault.delivered and records(world, Rollback)
    check_counted(world)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("moment", "how"), every_value([rollback_proposed, rollback_chosen], ["crash", "cut off"])
)
def test_the_leader_is_lost_with_a_rollback(moment: Moment, how: str) -> None:
    """Proposed, or chosen and not announced: there is one history, which goes back once or twice."""
    world = keeps_snapshots(42)
    lost = Fault(world, ("d0",), snapshot_complete, lambda world, node: lose_stage_1(world))

    def strike(world: World, node: Node) -> None:
        if how == "crash":
            world.crash(node.id)
        else:
            world.partition([node.id], 40.0)

    fault = Fault(world, ("d0",), moment, strike)
    world.run(until_s=900)
    assert lost.delivered and fault.delivered and records(world, Rollback)
    check_counted(world)
    one_history(world)
