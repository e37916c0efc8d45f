"""Guests that hold steps up, and report overflows that nobody else could have found: steps were skipped on
their word, and the run ended after three."""

from __future__ import annotations

from collections import Counter

import pytest

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.rounds import Rounds
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.workers.integer_world import Machine, counting_world
from swarm.byzantine.test_review_stalls import go_on, removed

STEPS, SINCE, STALLS = 14, 4, 2


def holding_world(liar: str, windows: int, index: int) -> tuple[World, Counter[int]]:
    """World of two data nodes and two relays. From iteration SINCE on `liar` reports an overflow of
    microbatch `index` (-1: nothing), and keeps what the step waits for until that has stalled STALLS times: a
    relay its report of the last state, a data node its claims. Returns the stalls by iteration, too."""
    settings = Settings("skips", 1, 1, 6, STEPS, windows=windows, evaluate_every=100, min_replicas=2)
    machines = [Machine(name, int(name[0] == "r")) for name in ("d0", "d1", "r1.0", "r1.1")]
    world, stalls, told = counting_world(settings, machines, 1), Counter[int](), set[int]()
    carry = world.carry

    def on_its_way(sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        said = msg.decode(message)
        if isinstance(said, msg.Missing) and peer == liar:
            stalls[said.fence.t] += 1
        iteration = sender.peer.iterations.current if sender.id == liar and index >= 0 else None
        if iteration is not None and iteration.t >= SINCE and iteration.t not in told:
            told.add(iteration.t)
            fence = sender.peer.ctx.fence(iteration.t, iteration.base)
            overflow = msg.Overflow(fence, int(liar[0] == "r"), index, "made up")
            carry(sender, "d0", msg.encode(overflow), None)
        late = isinstance(said, msg.Applied) and said.fence.t >= SINCE - 1
        late = late and stalls[said.fence.t + 1] < STALLS and liar[0] == "r"
        late |= isinstance(said, msg.Claim) and said.fence.t >= SINCE and liar[0] == "d"
        if sender.id != liar or not late:
            carry(sender, peer, message, payload)

    world.carry = on_its_way  # type: ignore[method-assign]
    return world, stalls


@pytest.mark.parametrize(("liar", "windows", "index"), [("r1.1", 2, 6), ("d1", 2, 6), ("d1", 0, 5)])
def test_who_holds_steps_up_and_makes_overflows_up_stops_no_run(liar: str, windows: int, index: int) -> None:
    """Index 6 is a held-out window, in iterations without an evaluation: nobody claims it. Each step stalled
    twice, and was skipped then; the third one ended the run, after 40 s."""
    world, stalls = holding_world(liar, windows, index)
    assert go_on(world, 900.0) == STEPS
    verdicts = [commit.verdict for commit in world.history().commits]
    assert max(stalls.values()) >= STALLS and verdicts.count("skip") <= 2, verdicts
    assert list(removed(world)) == [liar]


@pytest.mark.parametrize("stalls", [1, 2])
def test_who_keeps_its_report_back_for_some_stalls_of_each_step_loses_its_seat(
    stalls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three stalls of one step cost its seat, so it had each step stall twice: those of 0.2 s took 13 s."""
    monkeypatch.setattr(f"{__name__}.STALLS", stalls)
    world, counts = holding_world("r1.1", 0, -1)
    assert go_on(world, 900.0) == STEPS
    assert list(removed(world)) == ["r1.1"] and sum(counts.values()) == 3


def test_overflows_of_what_the_iteration_does_not_have_are_refused() -> None:
    """Microbatch 5 in a round of three slots, and a window in an iteration without an evaluation."""
    rounds = Rounds(start=2, inner=3, slots=3, drops=False)
    settings = Settings("none", 1, 1, 6, 5, windows=2, evaluate_every=100, min_replicas=3, rounds=rounds)
    machines = [Machine("d0", 0), *(Machine(f"r1.{n}", 1) for n in range(3))]
    world, told = counting_world(settings, machines, 1), set[int]()

    def tell(node: Node, event: ev.Event) -> None:
        iteration = node.peer.iterations.current
        if node.id == "r1.1" and iteration is not None and iteration.t not in told:
            told.add(iteration.t)
            fence = node.peer.ctx.fence(iteration.t, iteration.base)
            index = 5 if rounds.has(iteration.t) else 6
            world.carry(node, "d0", msg.encode(msg.Overflow(fence, 1, index, "made up")), None)

    world.watchers.append(tell)
    assert go_on(world, 300.0) == 5 and len(told) >= 4
    reasons = [fields["reason"] for _, name, kind, fields in world.notes if (name, kind) == ("d0", "refused")]
    assert sum("slot or window, in iteration" in str(reason) for reason in reasons) >= 4
