"""A hostile peer in every role: nothing crashes, memory stays bounded, and the steps stay right (I7)."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import replace

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.context.early_buffer import EARLY_MAX
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.log.records import Member
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.swarms.byzantine_peer import KINDS, Hostile
from support.swarms.faulty_network import SLOW

TROUBLE_ENDS_S, END_S = 20.0, 60.0
ROLES = {"beside": "r1.1", "data node": "d1", "last stage": "r2.1", "stranger": "stranger", "voter": "d1"}


def number(draw: random.Random) -> int:
    return draw.choice([0, 1, draw.getrandbits(64)])


class HostileTrial:
    """Three keep the log; the liar is one of them in the role of a voter only."""

    def __init__(self, seed: int, role: str) -> None:
        draw = random.Random(f"{seed} {role}")
        policy = draw.choice(["greedy", "auction", "static"])
        name = f"hostile {seed}"
        settings = Settings(name, 1, 2, 6, 10_000, 2, 3, min_replicas=2, policy=policy, activation_bytes=1024)
        settings = replace(settings, voters=3)
        self.liar, self.votes = ROLES[role], role == "voter"
        machines = [Machine(f"d{n}", 0) for n in range(2)]
        machines += [Machine(f"r{s}.{n}", s) for s in (1, 2) for n in range(2)]
        disks = {} if self.votes else {self.liar: ""}
        self.world = world = counting_world(settings, machines, seed, SLOW, disks)
        world.strict = False
        if role == "stranger":  # it is let in by a ticket, and never asks to be a member
            self._let_in(world)
        self.hostile = Hostile(world, self.liar, draw, number, 0.03, 2.0, TROUBLE_ENDS_S)
        self.invariants = Invariants(world)
        self.most_early: Counter[str] = Counter()
        world.watchers.append(lambda node, event: self._measure(node))
        self.then = 0
        world.clock.at(TROUBLE_ENDS_S, self._quiet)
        world.clock.at(END_S, lambda: world.nodes["d0"].handle(ev.Stopping("over")))

    def _let_in(self, world: World) -> None:
        member = Member("stranger", -1, 1, "whole numbers", 4, name="stranger", address="stranger:1")
        node = world.add(member, "d0", at=0.5)
        for at, other in ((1.0, "r1.0"), (1.1, "r2.0"), (1.2, "d1")):
            world.clock.at(at, lambda other=other: world.dial(node, other))  # type: ignore[misc]

    def _measure(self, node: Node) -> None:
        self.most_early[node.id] = max(self.most_early[node.id], len(node.peer.reception.early))

    def _quiet(self) -> None:
        self.then = self.world.history().t

    def carry_out(self) -> None:
        world = self.world
        if self.votes:
            with contextlib.suppress(TimeoutError):
                world.run(END_S)
            assert max(self.most_early.values()) <= EARLY_MAX * len(world.nodes)
            return  # a voter that lies may stop a run, or spoil its history; it crashes nobody
        world.run(END_S + 200.0)
        honest = [node for name, node in world.nodes.items() if name != self.liar]
        assert all(len(node.peer.ctx.log.voters) == 3 for node in honest if node.running)
        wrong = {name: text for name, text in wrong_states(world).items() if name != self.liar}
        assert not wrong, wrong
        assert world.history().t >= self.then + 3, f"{self.then} steps, then {world.history().t}"
        for name in ("d0", "r1.0", "r2.0"):
            stopped = world.nodes[name].stopped
            assert stopped is not None and stopped[1], f"{name}: {stopped}"
        assert max(self.most_early.values()) <= EARLY_MAX * len(world.nodes)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("role", ROLES)
def test_a_few(role: str) -> None:
    trial = HostileTrial(0, role)
    trial.carry_out()
    told = trial.hostile.told
    assert told["bytes: read"] and told["bytes: broken"]
    assert len({kind.__name__ for kind in KINDS} & told.keys()) > 30 and told.total() > 300
    refused = [f for _, _, kind, f in trial.world.notes if kind == "refused"]
    assert any(fields["subject"] == trial.liar for fields in refused)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("seed", "role"),
    [
        (1, "stranger"),  # Ready with a stage that is not there
        (5, "stranger"),  # a microbatch to train sent as a window to evaluate
        (212, "last stage"),  # as a new process it asks to look on first: its link is an observer's for good
    ],
)
def test_lies_that_once_stopped_a_run(seed: int, role: str) -> None:
    HostileTrial(seed, role).carry_out()


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("role", ROLES)
def test_many(role: str) -> None:
    for seed in range(100, 300):
        try:
            HostileTrial(seed, role).carry_out()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_a_flood_is_hung_up_on_and_its_log_stays_short() -> None:
    world = HostileTrial(5, "beside").world
    fence = msg.Fence(9, 1, 1, "", 1)

    def flood() -> None:
        for _ in range(5000):
            world.nodes["r2.0"].handle(ev.Received("r1.1", msg.Want(fence, 1, True, 1)))

    world.clock.at(1.9, flood)
    world.clock.at(2.0, lambda: world.nodes["d0"].handle(ev.Stopping("over")))
    world.run(300.0)
    refused = [f for _, who, kind, f in world.notes if (who, kind) == ("r2.0", "refused")]
    told = [f for f in refused if f["subject"] == "r1.1"]
    assert any("too many messages that are refused" in str(f["reason"]) for f in told)
    assert len(told) < 60


def test_who_sends_bytes_that_are_no_messages_is_not_let_in_for_a_while() -> None:
    world = HostileTrial(5, "beside").world
    liar, victim = world.nodes["r1.1"], world.nodes["r2.0"]
    told: list[tuple[float, bool]] = []

    def garble() -> None:
        linked = liar.id in victim.links
        told.append((world.clock.now, linked))
        if linked:
            world.cut(liar.id, victim.id)
            victim.handle(ev.Garbled(liar.id, "not a message"))

    for number in range(24):
        world.clock.at(3.0 + 0.5 * number, garble)
    world.clock.at(16.0, lambda: world.nodes["d0"].handle(ev.Stopping("over")))
    world.run(300.0)
    assert victim.peer.ctx.rate_limits.counts[liar.id]["bytes"] == sum(linked for _, linked in told)
    assert 4 <= sum(linked for _, linked in told) < 10
    assert world.history().t > 3
