"""Data nodes that are heard and hold every step up: others get their microbatches (R2)."""

from __future__ import annotations

import msgspec
import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Embed, Task, full_cover
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world, wrong_states
from support.grids import every_value
from swarm.byzantine.test_review_stalls import altered, go_on, removed

STEPS, SINCE = 8, 4


def swarm(data_nodes: int = 2, stages: int = 1, steps: int = STEPS, windows: int = 0) -> World:
    """Two replicas per stage. The liar is d1, the leader d0."""
    settings = Settings("late", 1, stages, 6, steps, windows, 2 if windows else 0, min_replicas=2)
    machines = [Machine(f"d{number}", 0) for number in range(data_nodes)]
    machines += [Machine(f"r{stage}.{n}", stage) for stage in range(1, stages + 1) for n in range(2)]
    world = counting_world(settings, machines, 1)
    Invariants(world)
    return world


def withheld(world: World, *kinds: type[msg.Message], liar: str = "d1") -> None:
    """Have `liar` send no messages of these kinds from iteration SINCE on."""

    def lose(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        said = isinstance(message, kinds) and isinstance(message, msg.FencedMessage)
        return None if sender.id == liar and said and message.fence.t >= SINCE else message  # type: ignore[attr-defined]

    altered(world, lose)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    ("kinds", "data_nodes"),
    every_value([(msg.Claim,), (msg.Forward,), (msg.Forward, msg.Claim, msg.Backward)], [2, 3]),
)
def test_a_data_node_that_holds_the_steps_up_is_removed(
    kinds: tuple[type[msg.Message], ...], data_nodes: int
) -> None:
    world = swarm(data_nodes)
    withheld(world, *kinds)
    assert go_on(world, 400.0) == STEPS
    assert set(removed(world)) == {"d1"} and "of this data node" in removed(world)["d1"]
    assert wrong_states(world).keys() <= {"d1"} and world.clock.now < 150.0


@pytest.mark.parametrize("kinds", [(msg.Claim,), (msg.Forward, msg.Claim, msg.Backward)])
def test_where_steps_take_long_it_costs_dozens_of_them(kinds: tuple[type[msg.Message], ...]) -> None:
    """Stalls take twice as long each, and the fourth came after sixty usual steps: of 13 s each, 12 and 13
    minutes, as long as what is asked for by time (twelve steps) five times."""
    world, at = swarm(), dict[int, float]()
    plain = world.task_s
    world.task_s = lambda node, task: 60.0 * plain(node, task)  # type: ignore[method-assign]
    world.watchers.append(lambda node, event: at.setdefault(world.history().t, world.clock.now))
    withheld(world, *kinds)
    assert go_on(world, 1500.0) == STEPS and set(removed(world)) == {"d1"}
    took_s = [at[t + 1] - at[t] for t in range(STEPS)]
    assert max(took_s[:3]) > 10.0 and took_s[3] < 36.0 * took_s[2], took_s


def test_a_data_node_that_claims_what_it_never_sent_is_removed() -> None:
    world = swarm()
    withheld(world, msg.Forward)

    def lie(node: Node, event: ev.Event) -> None:
        iteration = node.peer.iterations.current
        if node.id != "d1" or iteration is None or iteration.t < SINCE:
            return
        own = {2 * index + 1 for index in iteration.source.assignments[0].of("d1")}
        if not own <= iteration.claims.held:
            iteration.claims.held |= own & full_cover(0, 6)
            iteration.claims.send()

    world.bookkeepers.append(lie)
    assert go_on(world, 400.0) == STEPS
    assert set(removed(world)) == {"d1"} and world.clock.now < 150.0


def test_windows_whose_loss_a_data_node_withholds_are_evaluated_by_another() -> None:
    """It claims its microbatches, and no evaluation."""
    world = swarm(windows=4)

    def lose(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        if sender.id == "d1" and isinstance(message, msg.Claim) and message.fence.t >= SINCE:
            return msgspec.structs.replace(message, evaluations={})
        return message

    altered(world, lose)
    assert go_on(world, 400.0) == STEPS
    assert removed(world) == {}


def test_a_data_node_that_begins_no_evaluation_is_removed() -> None:
    world = swarm(windows=4)

    def lose(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        window = isinstance(message, msg.Forward) and not message.train and message.fence.t >= SINCE
        return None if sender.id == "d1" and window else message

    altered(world, lose)
    assert go_on(world, 400.0) == STEPS
    assert set(removed(world)) == {"d1"} and world.clock.now < 150.0


@pytest.mark.parametrize(("again", "banned"), [(False, []), (True, ["d1"])])
def test_one_that_was_removed_for_that_before_is_expelled(again: bool, banned: list[str]) -> None:
    world = swarm()
    withheld(world, msg.Claim)

    def look(node: Node, event: ev.Event) -> None:
        coordinator = node.peer.shared.coordination.coordinator
        if node.id == "d0" and coordinator is not None and again:
            coordinator.reducing.sources._removed.setdefault("d1", 0)

    world.bookkeepers.append(look)
    assert go_on(world, 400.0) == STEPS
    limits = world.nodes["d0"].peer.ctx.rate_limits
    bans = [peer for peer in ("d0", "d1", "r1.0", "r1.1") if limits.banned(peer, world.clock.now)]
    assert set(removed(world)) == {"d1"} and bans == banned


def test_a_slow_data_node_keeps_its_seat() -> None:
    """Its embeddings take dozens of times as long as a whole step did."""
    world, slow = swarm(), list[int]()
    task_s = world.task_s

    def slower(node: Node, task: Task) -> float:
        if node.id == "d1" and isinstance(task, Embed) and task.t >= SINCE:
            slow.append(task.t)
            return 15.0
        return task_s(node, task)

    world.task_s = slower  # type: ignore[method-assign]
    assert go_on(world, 1000.0) == STEPS
    assert slow and removed(world) == {} and wrong_states(world) == {}


@pytest.mark.parametrize("kind", [msg.Claim, msg.Backward])
def test_two_relays_that_withhold_cost_no_data_node_its_seat(kind: type[msg.Message]) -> None:
    """Relays of both stages: what they got of any data node goes to the other replicas. (343 s, when one
    microbatch came to the same liar again and again.)"""
    world = swarm(stages=2)

    def lose(sender: Node, peer: str, message: msg.Message) -> msg.Message | None:
        lies = sender.id in ("r1.1", "r2.1") and isinstance(message, kind)
        return None if lies and message.fence.t >= SINCE else message  # type: ignore[attr-defined]

    altered(world, lose)
    assert go_on(world, 1000.0) == STEPS
    assert removed(world).keys().isdisjoint({"d0", "d1"}) and world.clock.now < 60.0
