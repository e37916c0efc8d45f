"""Injection of each kind of fault into a peer of the simulated world."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from anabranch.protocol.interface import events as ev
from anabranch.protocol.messages import MessageError, decode, encode
from anabranch.sim.fuzz import byzantine_messages as hostile
from anabranch.sim.fuzz.swarm_under_test import SwarmUnderTest
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.network.lined_world import LinedWorld

#: Duration of duplicated or reordered messages (s; a choice).
DISORDER_S = 5.0
#: Durations of faults that end (s), drawn evenly: long ones are rare, because the whole trial waits for them.
_LASTING_S = (0.3, 3.0, 3.0, 8.0, 8.0, 20.0)
#: Description of an injected fault and seconds until the fault is over; None: it cannot be injected now.
Injected = tuple[str, float] | None
Injector = Callable[[SwarmUnderTest, Node], Injected]


def crash(swarm: SwarmUnderTest, victim: Node) -> Injected:
    swarm.world.crash(victim.id)
    if swarm.rng.random() < 0.7:
        wait_s = swarm.rng.uniform(0.2, 4.0)
        swarm.newcomer_later(victim.stage, wait_s)
        return f"{victim.id} crashes; another joins its stage {wait_s:.1f} s later", wait_s
    return f"{victim.id} crashes", 0.0


def vanish(swarm: SwarmUnderTest, victim: Node) -> Injected:
    """Fault: remove the machine of the victim without a reset of its links; another joins its stage 0.2 to 4
    s later. Returns (text for the story, seconds until it joins)."""
    swarm.world.vanish(victim.id)
    wait_s = swarm.rng.uniform(0.2, 4.0)
    swarm.newcomer_later(victim.stage, wait_s)
    return f"{victim.id} vanishes without a word; another joins its stage {wait_s:.1f} s later", wait_s


def restart(swarm: SwarmUnderTest, victim: Node) -> Injected:
    swarm.world.crash(victim.id)
    wait_s, without = swarm.rng.choice([0.01, 0.5, 4.0]), swarm.rng.random() < 0.3
    swarm.world.clock.after(wait_s, lambda: swarm.restart(victim, without))
    return f"{victim.id} crashes and starts again {wait_s:g} s later" + ", without its disk" * without, wait_s


def stage_loss(swarm: SwarmUnderTest, victim: Node) -> Injected:
    """Fault: kill every replica of the victim's stage at the same instant; two newcomers join it within 4 s.
    Returns (text for the story, 4 s)."""
    stage = victim.stage
    for node in sorted(swarm.world.nodes.values(), key=lambda node: node.id):
        if node.running and node.stage == stage:
            swarm.world.crash(node.id)
    for _ in range(2):
        swarm.newcomer_later(stage, swarm.rng.uniform(0.2, 4.0))
    return f"every replica of stage {stage} crashes; two join it within 4 s", 4.0


def leave(swarm: SwarmUnderTest, victim: Node) -> Injected:
    victim.handle(ev.Stopping("the user stopped it"))
    return f"{victim.id} leaves", 0.0


def join(swarm: SwarmUnderTest, victim: Node) -> Injected:
    stage = victim.stage or swarm.rng.randint(1, swarm.world.settings.stages)
    return f"{swarm.newcomer(stage)} joins stage {stage}", 0.0


def freeze(swarm: SwarmUnderTest, victim: Node) -> Injected:
    seconds = swarm.rng.choice(_LASTING_S)
    swarm.world.freeze(victim.id, seconds)
    return f"{victim.id} freezes for {seconds:g} s", seconds


def slow_node(swarm: SwarmUnderTest, victim: Node) -> Injected:
    factor, seconds = swarm.rng.choice([5.0, 20.0]), swarm.rng.choice([2.0, 10.0])
    victim.slowness *= factor

    def recover() -> None:
        victim.slowness /= factor

    swarm.world.clock.after(seconds, recover)
    return f"{victim.id} computes {factor:g} times slower for {seconds:g} s", seconds


def slow_link(swarm: SwarmUnderTest, victim: Node) -> Injected:
    other = swarm.neighbour(victim)
    if other is None:
        return None
    seconds = swarm.rng.choice([3.0, 3.0, 10.0, 10.0, 30.0])
    swarm.world.crawl(victim.id, other.id, 100.0, seconds)
    return f"the link of {victim.id} and {other.id} has 1 % of its speed for {seconds:g} s", seconds


def cut(swarm: SwarmUnderTest, victim: Node) -> Injected:
    other, seconds = swarm.neighbour(victim), swarm.rng.choice([0.0, 1.0, 6.0])
    if other is None or not swarm.world.cut(victim.id, other.id, seconds):
        return None
    return f"the link of {victim.id} and {other.id} breaks, for {seconds:g} s it stays down", seconds


def partition(swarm: SwarmUnderTest, victim: Node) -> Injected:
    """Fault: cut the victim and some other peers (never the leader, unless it is the victim) off from all the
    rest for 0.3 to 20 s: their links break, or messages over them are held back. Returns (text for the story,
    seconds)."""
    world, seconds = swarm.world, swarm.rng.choice(_LASTING_S)
    names = sorted(node.id for node in world.nodes.values() if node.running)
    leader = world.leading().id
    island = {victim.id} | {n for n in names if n != leader and swarm.rng.random() < 0.3}
    breaks = swarm.rng.random() < 0.5
    if breaks:
        for one in sorted(island):
            for other in sorted(set(names) - island):
                world.cut(one, other, seconds)
    else:
        world.partition(sorted(island), seconds)
    how = "links break" if breaks else "nothing arrives"
    return f"{', '.join(sorted(island))} are cut off from the others for {seconds:g} s: {how}", seconds


def one_way(swarm: SwarmUnderTest, victim: Node) -> Injected:
    other, seconds = swarm.neighbour(victim), swarm.rng.choice(_LASTING_S)
    if other is None:
        return None
    swarm.world.lose(victim.id, other.id, seconds)
    return f"nothing that {victim.id} sends reaches {other.id} for {seconds:g} s", seconds


def duplication(swarm: SwarmUnderTest, victim: Node) -> Injected:
    """Fault: for DISORDER_S seconds 30 % or all of the messages that the victim sends and receives arrive
    twice, and each up to a second late. In 30 % of the draws instead: break all links of the victim, which
    come back at once, so that both ends send again what may be lost. Returns (text for the story, seconds);
    None if there is no link to break."""
    if swarm.rng.random() < 0.3:
        others = [other for other in sorted(victim.links) if swarm.world.cut(victim.id, other)]
        if not others:
            return None
        text = f"all {len(others)} links of {victim.id} are replaced, and what may be lost is said again"
        return text, 0.0
    share = swarm.rng.choice([0.3, 1.0])
    swarm.world.disorder(share, swarm.rng.choice([0.0, 0.1, 1.0]), DISORDER_S, [victim.id])
    return f"of what {victim.id} says and hears {share:.0%} comes twice for {DISORDER_S:g} s", DISORDER_S


def reordering(swarm: SwarmUnderTest, victim: Node) -> Injected:
    """Fault: for DISORDER_S seconds each message that the victim sends and receives comes up to half a second
    late, so that messages overtake each other, also on the same connection. Returns (text for the story,
    seconds)."""
    late_s = swarm.rng.choice([0.02, 0.1, 0.5])
    swarm.world.disorder(0.0, late_s, DISORDER_S, [victim.id])
    what = f"what {victim.id} says and hears comes in any order, up to {late_s:g} s late"
    return f"{what}, for {DISORDER_S:g} s", DISORDER_S


def clock_jump(swarm: SwarmUnderTest, victim: Node) -> Injected:
    seconds = swarm.rng.choice([-20.0, -2.0, 2.0, 30.0, 3600.0])
    swarm.world.nodes[victim.id].jump_clock(seconds)
    return f"the clock of {victim.id} jumps by {seconds:g} s", max(0.0, -seconds)


def corrupt_bytes(swarm: SwarmUnderTest, victim: Node) -> Injected:
    """Fault: corrupt bytes on a link of the victim, which breaks it, since the transport's authentication
    fails. Also decodes corrupted copies of messages that the victim has received lately, and raises what
    `decode` raises other than MessageError. Returns (text for the story, 0 s); None, without either, if the
    victim has no link that can break."""
    other = swarm.neighbour(victim)
    if other is None or not swarm.world.cut(victim.id, other.id):
        return None
    for event in list(swarm.heard.get(victim.id, ())):
        data = bytearray(encode(event.message))
        data[swarm.rng.randrange(len(data))] ^= 1 << swarm.rng.randrange(8)
        with contextlib.suppress(MessageError):
            decode(bytes(data))
    return f"bytes on the link of {victim.id} and {other.id} are corrupted: it is closed", 0.0


def copied_key(swarm: SwarmUnderTest, victim: Node) -> Injected:
    """Fault: start a second process with the victim's key, on a disk of its own, while the first one goes on.
    Returns (text for the story, 0 s); None for the founder, whose second process would found another run
    without the run's directory."""
    if victim.id == swarm.world.genesis.leader:
        return None
    swarm.restart(victim, without_disk=True)
    return f"a second process starts with the key of {victim.id}", 0.0


def carrier_crash(swarm: SwarmUnderTest, victim: Node) -> Injected:
    done = crash(swarm, victim)
    return done and (f"{done[0]}; it carried for others", done[1])


def slow_carrier(swarm: SwarmUnderTest, victim: Node) -> Injected:
    """Fault: narrow the victim's access line to 10 or 2 % for 0.3 to 20 s, so that all that it carries
    crawls. Returns (text for the story, seconds). Only for a `LinedWorld`."""
    assert isinstance(swarm.world, LinedWorld)
    traffic, share, seconds = swarm.world.traffic, swarm.rng.choice([0.1, 0.02]), swarm.rng.choice(_LASTING_S)
    traffic.scale_line(victim.id, share)
    swarm.world.clock.after(seconds, lambda: traffic.scale_line(victim.id, 1.0 / share))
    text = f"the line of {victim.id}, which carries for others, has {share:.0%} of its rate for {seconds:g} s"
    return text, seconds


INJECTORS: dict[str, Injector] = {
    "crash": crash,
    "restart": restart,
    "vanish": vanish,
    "data crash": crash,
    "leader crash": crash,
    "stage loss": stage_loss,
    "leave": leave,
    "join": join,
    "freeze": freeze,
    "slow node": slow_node,
    "slow link": slow_link,
    "cut": cut,
    "partition": partition,
    "one way": one_way,
    "duplication": duplication,
    "reordering": reordering,
    "clock jump": clock_jump,
    "corrupt bytes": corrupt_bytes,
    "garbage": hostile.garbage,
    "flood": hostile.flood,
    "replay": hostile.replay,
    "copied key": copied_key,
    "carrier crash": carrier_crash,
    "slow carrier": slow_carrier,
}
