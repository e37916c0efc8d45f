"""States that a peer left on its disk: what its next process need not fetch, and what it must."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec import structs

from anabranch.protocol import messages as msg
from anabranch.protocol.context.peer_context import make_context
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.settings import Settings
from anabranch.protocol.interface.tasks import Result
from anabranch.protocol.messages import FetchPiece, Piece, StateOffer
from anabranch.protocol.peer.shared_state import Step
from anabranch.protocol.state.download import Download, State
from anabranch.protocol.telemetry.adaptive_timeout import AdaptiveTimeout
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from support.grids import first_of
from support.swarms.lost_stages import EVERY, SOON_S, check_whole, rollbacks, swarm

PAUSE, GO_ON = ev.Wished("pause"), ev.Wished("continue")


def pieces_of(world: World, name: str) -> Counter[int]:
    """Pieces of states, by stage, that `name` gets as the world runs."""
    got: Counter[int] = Counter()

    def look(node: Node, event: ev.Event) -> None:
        if node.id == name and isinstance(event, ev.Received) and isinstance(event.message, Piece):
            got[event.message.stage] += 1

    world.watchers.append(look)
    return got


def leaves_and_returns(world: World, name: str, leaves_s: float, returns_s: float) -> None:
    """The user of `name` ends it, and starts it again: its disk is the same."""
    world.clock.at(leaves_s, lambda: world.nodes[name].handle(ev.Stopping("Ctrl+C")))
    world.clock.at(returns_s, lambda: world.add(world.nodes[name].next_life(), "d0", returns_s))


def notes(world: World, name: str) -> list[str]:
    return [str(fields.get("text", "")) for _, peer, _, fields in world.notes if peer == name]


def paused_swarm(seed: int = 0, snapshot_every: int = EVERY) -> World:
    """Swarm that is paused from 2 s to 60 s; r1.0 leaves at 10 s and is back at 30 s."""
    world = swarm(seed, replicas=3, snapshot_every=snapshot_every)
    world.keeps_states = True
    world.clock.at(2.0, lambda: world.nodes["d0"].handle(PAUSE))
    world.clock.at(60.0, lambda: world.nodes["d0"].handle(GO_ON))
    leaves_and_returns(world, "r1.0", 10.0, 30.0)
    return world


@pytest.mark.parametrize("seed", first_of(range(2)))
def test_a_peer_that_returns_to_the_same_state_fetches_none_of_it(seed: int) -> None:
    world = paused_swarm(seed)
    world.clock.at(29.0, lambda: got.clear())
    got = pieces_of(world, "r1.0")
    world.run(SOON_S)
    check_whole(world)
    assert world.nodes["r1.0"].member.incarnation == 2 and world.nodes["r1.0"].stage == 1
    assert any("is on this machine's disk: not fetched" in text for text in notes(world, "r1.0"))
    assert got[1] == 0


def test_without_the_cache_it_fetches_every_piece() -> None:
    world = paused_swarm()
    world.keeps_states = False
    world.clock.at(29.0, lambda: got.clear())
    got = pieces_of(world, "r1.0")
    world.run(SOON_S)
    check_whole(world)
    assert got[1] > 0


def test_a_damaged_state_on_the_disk_is_fetched_anew_and_blames_nobody() -> None:
    world = paused_swarm()

    def damage() -> None:
        states = world.nodes["r1.0"].disk.states
        pieces = tuple(piece + 1 for piece in states[1].pieces)  # type: ignore[operator]
        states[1] = structs.replace(states[1], pieces=pieces)

    world.strict = False  # the worker may not load it
    world.clock.at(29.0, damage)
    got = pieces_of(world, "r1.0")
    spoilt: list[str] = []

    def look(node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received) and isinstance(event.message, msg.Spoilt):
            spoilt.append(event.message.holder)

    world.watchers.append(look)
    world.run(SOON_S)
    check_whole(world)
    assert got[1] > 0 and not spoilt


def test_an_old_answer_about_a_state_costs_no_other_one() -> None:
    """Holders without peers says that a state is not the run's, or that nobody has it. A second answer comes
    when the peer has the right one."""
    world, told = paused_swarm(), list[int]()

    def look(node: Node, event: ev.Event) -> None:
        replica, active = node.peer.replica, node.peer.ctx.run.membership.active_from
        waits = node.peer.shared.entry.step is Step.READY and node.id not in active
        if node.id == "r1.0" and node.member.incarnation == 2 and waits and not told:
            told.append(replica.t)
            answer = msg.Holders(1, replica.t, replica.fingerprint, ())
            node.handle(ev.Received("d0", answer, None))

    world.watchers.append(look)
    world.run(SOON_S)
    check_whole(world)
    assert told and not any("another is fetched" in text for text in notes(world, "r1.0"))


def test_hashes_of_the_file_are_offered_to_nobody() -> None:
    """The state is right, but a hash in the file is not: who fetched the snapshot would blame this peer."""
    world = paused_swarm(snapshot_every=1)
    offered: list[tuple[str, ...]] = []

    def damage() -> None:
        states = world.nodes["r1.0"].disk.states
        states[1] = structs.replace(states[1], hashes=("wrong", *states[1].hashes[1:]))

    def look(node: Node, event: ev.Event) -> None:
        if node.id == "r1.0":
            offered.extend(state.hashes for state in node.peer.states.pinned.values())

    world.clock.at(29.0, damage)
    world.watchers.append(look)
    world.run(SOON_S)
    check_whole(world)
    assert any("is on this machine's disk: not fetched" in text for text in notes(world, "r1.0"))
    assert offered and not any("wrong" in hashes for hashes in offered)


def test_steps_that_were_taken_meanwhile_cost_a_whole_state() -> None:
    """All of a state changes with a step; the state is fetched, and right."""
    world = swarm(1, replicas=3, steps=30)
    world.keeps_states = True
    leaves_and_returns(world, "r1.0", 4.0, 8.0)
    got = pieces_of(world, "r1.0")
    world.run(SOON_S)
    check_whole(world)
    assert got[1] > 0


@pytest.mark.parametrize("seed", first_of(range(3), 1))
def test_the_only_replica_of_a_stage_takes_the_run_up_with_the_state_it_left(seed: int) -> None:
    """No snapshots, no checkpoints: nobody else has the state, so the run waits for this disk."""
    world = swarm(seed, replicas=1, snapshot_every=0, min_replicas=1, steps=150)
    world.keeps_states = True
    leaves_and_returns(world, "r2.0", 2.0 + seed / 7, 90.0)
    got = pieces_of(world, "r2.0")
    while world.clock.now < 85.0:
        world.clock.step()
    assert 0 < world.history().t < world.settings.steps and not world.nodes["r2.0"].running
    world.run(4 * SOON_S)
    check_whole(world)
    assert not got and not rollbacks(world)


# --- pieces ------------------------------------------------------------------------------------


class Downloading:
    """Download of stage 1 after iteration 7 in three pieces from `b`, with pieces of a state on disk."""

    def __init__(self, kept: State, hashes: tuple[str, ...] = ("h0", "h1", "h2")) -> None:
        self.ctx = make_context("a", 1, 1, Settings("run", 1, 1, 2, 10, state_bytes=1 << 20), "d")
        self.ctx.links.up["b"] = AdaptiveTimeout(0.0, 1.0)
        self.found: list[State] = []
        self.failed: list[str] = []
        self.download = Download(
            self.ctx, 1, 7, ["b"], self.found.append, self.failed.append, "seven", kept=kept
        )
        self.download.start()
        self.download.on_offer("b", StateOffer(1, 7, "seven", 3, hashes))

    def asked(self) -> list[int]:
        sends = [effect for effect in self.ctx.outbox.take_effects() if isinstance(effect, ev.Send)]
        return [send.message.piece for send in sends if isinstance(send.message, FetchPiece)]

    def bring(self, *pieces: int) -> None:
        for piece in pieces:
            self.download.on_piece("b", Piece(1, 7, piece), f"p{piece}")

    def check(self, *hashes: str, fingerprint: str = "seven") -> None:
        """Answer the download's CheckState."""
        following = self.ctx.tasks.next()
        assert following is not None
        then = self.ctx.tasks.finish(following[0])
        assert then is not None
        then(Result(fingerprint=fingerprint, hashes=hashes))


def test_equal_pieces_of_another_state_are_not_fetched() -> None:
    """Pieces are compared by hash, wherever they lay."""
    one = Downloading(State(1, 6, "six", ("p2", "other", "p0"), ("h2", "x", "h0")))
    assert one.asked() == [1]
    one.bring(1)
    one.check("h0", "h1", "h2")
    assert [state.pieces for state in one.found] == [("p0", "p1", "p2")]


def test_a_kept_piece_that_is_not_what_its_hash_says_is_fetched() -> None:
    one = Downloading(State(1, 6, "six", ("bad", "p1"), ("h0", "h1")))
    assert one.asked() == [2]
    one.bring(2)
    one.check("wrong", "h1", "h2")
    assert one.asked() == [0]
    one.bring(0)
    one.check("h0", "h1", "h2")
    assert [state.pieces for state in one.found] == [("p0", "p1", "p2")] and not one.failed


def test_of_a_checkpoint_without_hashes_the_same_state_counts_and_is_fetched_if_damaged() -> None:
    one = Downloading(State(1, 7, "seven", ("p0", "bad", "p2"), ("h0", "h1", "h2")), hashes=())
    assert one.asked() == []
    one.check("h0", "wrong", "h2", fingerprint="another")
    assert one.asked() == [0, 1]
    one.bring(0, 1, 2)
    one.check("h0", "h1", "h2")
    assert [state.pieces for state in one.found] == [("p0", "p1", "p2")] and not one.failed
