"""Relays that send parts of sums, or reports, just before the step stalls, in each step (I4)."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.coordinator import witnessed_reduces
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.telemetry.peer_costs import PeerCosts
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import wrong_states
from swarm.byzantine.test_review_stalls import go_on, removed, swarm

STEPS = 16


def just_in_time(
    world: World, liar: str, kind: type[msg.FencedMessage], until: int = STEPS, stalls: Collection[int] = ()
) -> list[int]:
    """From iteration 3 on, up to `until`, messages of this kind leave `liar` shortly before the leader would
    count the step as stalled. In the iterations `stalls` it waits until a reduce is repeated. Returns the
    iterations of those that were held back."""
    carry, held = world.carry, list[int]()

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if sender.id != liar or not isinstance(said, kind) or not 3 <= said.fence.t <= until:
            carry(sender, peer, message, payload)
            return

        def deliver() -> None:
            lead = world.leading().peer.lead
            current = lead.round if lead is not None else None
            due = -1.0
            if lead is not None and current is not None and current.t - said.fence.t in (0, 1):
                due = current.progress_at + 0.9 * lead.reducing.patience_s(current)
                if said.fence.t in stalls and not current.retries:
                    due = world.clock.now + 0.5
            if world.clock.now >= due:
                carry(sender, peer, message, payload)
            else:
                held.append(said.fence.t)
                world.clock.after(due - world.clock.now + 1e-6, deliver)

        deliver()

    world.carry = on_its_way  # type: ignore[method-assign]
    return held


#: (message that comes late, replicas of the stage). With three the others' reports are enough.
LATE = [(msg.ReducePart, 2), (msg.ReducePart, 3), (msg.ReducedPart, 3), (msg.Prepared, 2), (msg.Applied, 2)]


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(("kind", "replicas"), LATE)
def test_what_comes_just_before_the_step_stalls_does_not_make_the_next_steps_longer(
    kind: type[msg.FencedMessage], replicas: int
) -> None:
    """Such a wait was a part of the last step's duration, and the next one four times as long: a step of half
    a second took 5, 19, 68, 244 and 879 s."""
    world, at = swarm(replicas, stages=2, steps=STEPS), dict[int, float]()
    held = just_in_time(world, "r1.1", kind)
    world.watchers.append(lambda node, event: at.setdefault(world.history().t, world.clock.now))
    assert go_on(world, 900.0) == STEPS
    took_s = [at[t + 1] - at[t] for t in range(STEPS)]
    assert len(set(held)) > 3 and max(took_s) < 8.0, took_s
    assert wrong_states(world) == {} and not removed(world)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize("kind", [msg.Prepared, msg.ReducePart])
def test_repeated_reduces_do_not_make_the_next_steps_ever_longer(
    kind: type[msg.FencedMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of a repeated reduce counted in full in its step's duration. One that had a reduce repeated
    every fifty steps, and was in time otherwise, made steps of half a second take 36, 216 and 1,237 s."""
    monkeypatch.setattr(witnessed_reduces, "WITNESSED_FOR", 6)
    steps = 28
    world, at = swarm(2, stages=2, steps=steps), dict[int, float]()
    just_in_time(world, "r1.1", kind, steps, stalls := (5, 13, 21))
    world.watchers.append(lambda node, event: at.setdefault(world.history().t, world.clock.now))
    assert go_on(world, 3000.0) == steps
    took_s = {t: at[t] - at[t - 1] for t in range(1, steps + 1)}
    assert max(took_s[t] for t in stalls) < 120.0, took_s
    assert max(seconds for t, seconds in took_s.items() if t not in stalls) < 41.0, took_s
    assert wrong_states(world) == {} and not removed(world)


def test_reduces_that_take_longer_for_good_are_waited_for() -> None:
    """Each part of a sum takes a dozen times as long as the last steps did: the first such reduce is tried
    twice, later ones once."""
    world, slow_s = swarm(2, stages=2, steps=STEPS), 7.0
    carry = world.carry

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        slow = isinstance(said, msg.ReducePart) and said.fence.t >= 6 and sender.id == "r1.1"
        world.clock.after(slow_s * slow, lambda: carry(sender, peer, message, payload))

    world.carry = on_its_way  # type: ignore[method-assign]
    assert go_on(world, 900.0) == STEPS
    notes = (str(fields.get("text")) for _, _, _, fields in world.notes)
    assert {text for text in notes if "stuck" in text} == {
        "stage 1: the reduce of iteration 6 is stuck; once more"
    }
    assert not removed(world) and wrong_states(world) == {}


def test_reduces_over_a_line_much_slower_than_the_leaders_links_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over the leader's links the sums need as long as forty steps, over one relay's line three times as
    long. It was given more time once, of which the leader learnt no more than twenty steps' worth; in the
    next iteration the relay was expelled."""
    monkeypatch.setattr(PeerCosts, "reduce_s", lambda self, size_bytes: 20.0)
    world, slow_s = swarm(2, stages=2, steps=STEPS), {3: 7.0, 8: 58.0}
    carry = world.carry

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said, wait_s = msg.decode(message), 0.0
        if isinstance(said, msg.ReducePart) and sender.id == "r1.1":
            wait_s = next((slow_s[t] for t in sorted(slow_s, reverse=True) if said.fence.t >= t), 0.0)
        world.clock.after(wait_s, lambda: carry(sender, peer, message, payload))

    world.carry = on_its_way  # type: ignore[method-assign]
    assert go_on(world, 1500.0) == STEPS
    assert not removed(world) and wrong_states(world) == {}
