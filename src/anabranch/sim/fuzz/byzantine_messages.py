"""Messages that no honest peer sends, from a hostile member or from a stranger with a ticket.

Not here: plausible lies (a wrong gradient, or a false claim to have computed a microbatch). A member can tell
them, and the protocol does not promise to detect them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from msgspec import structs

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.log.records import Entry, Member, NoOp, encode_entry
from anabranch.protocol.peer.peer import Peer
from anabranch.sim.fuzz.swarm_under_test import SwarmUnderTest
from anabranch.sim.kernel.simulated_peer import Link, Node

#: Number of messages of `garbage`, of a flood, and of a replay (a choice).
VOLLEY, FLOOD, REPLAY = 12, 600, 40
#: Name of the process that has a ticket and is no member.
STRANGER = "stranger"


def garbage(swarm: SwarmUnderTest, victim: Node) -> tuple[str, float] | None:
    """Fault: send VOLLEY messages that no honest peer sends to a random neighbour of the victim. Their sender
    is the victim, or a process with a ticket that is no member. Returns (text for the story, 0 s); None, and
    nothing is sent, if the victim has no neighbour."""
    target = swarm.neighbour(victim)
    if target is None:
        return None
    sender = victim.id
    if swarm.rng.random() < 0.5:
        sender = _stranger(swarm, target)
    makers = _MAKERS if sender == STRANGER else _OF_MEMBERS
    for _ in range(VOLLEY):
        message, payload = swarm.rng.choice(makers)(swarm.rng, target)
        _send(swarm, sender, target, message, payload)
    return f"{sender} sends {VOLLEY} messages to {target.id} that no honest peer sends", 0.0


def flood(swarm: SwarmUnderTest, victim: Node) -> tuple[str, float] | None:
    target = swarm.neighbour(victim)
    if target is None:
        return None
    for _ in range(FLOOD):
        message, payload = swarm.rng.choice(_FLOODS)(swarm.rng, target)
        _send(swarm, victim.id, target, message, payload)
    return f"{victim.id} floods {target.id} with {FLOOD} messages", 0.0


def replay(swarm: SwarmUnderTest, victim: Node) -> tuple[str, float] | None:
    """Fault: deliver to the victim once more the last REPLAY messages that it has received from peers to
    which it still has a link. Returns (text for the story, 0 s); None if there are none."""
    heard = [event for event in swarm.heard.get(victim.id, ()) if event.peer in victim.links][-REPLAY:]
    if not heard:
        return None
    for event in heard:
        swarm.world.clock.after(0.0, lambda event=event: victim.handle(event))  # type: ignore[misc]
    return f"{len(heard)} messages that {victim.id} received come once more", 0.0


def _stranger(swarm: SwarmUnderTest, target: Node) -> str:
    """Connect a process that has a relay's ticket but is no member to the peer `target`; returns the
    process's name (STRANGER). What peers send to the process is lost."""
    world = swarm.world
    if STRANGER not in world.nodes:
        peer = Peer(STRANGER, 1, world.genesis.leader, world.settings)
        node = Node(
            world, peer, Member(id=STRANGER, stage=-1, incarnation=1, numerics_class="", capacity=1), 1.0
        )
        node.alive = False
        world.nodes[STRANGER] = node
    target.link_up(
        Link(world.nodes[STRANGER], target), STRANGER, 1, ev.VerifiedCredential("relay", ev.NEVER_EXPIRES_S)
    )
    return STRANGER


def _send(swarm: SwarmUnderTest, sender: str, target: Node, message: msg.AnyMessage, payload: object) -> None:
    fence = getattr(message, "fence", None)
    if fence is not None and fence.stage == _OWN:
        fence = structs.replace(fence, stage=swarm.world.nodes[sender].stage)
        message = structs.replace(message, fence=fence)
    received = ev.Received(sender, msg.decode(msg.encode(message)), payload)

    def arrive() -> None:
        if sender in target.links:
            target.handle(received)

    swarm.world.clock.after(swarm.rng.uniform(0.0, 0.02), arrive)


# --- the messages ---------------------------------------------------------------------------------------

Maker = Callable[[random.Random, Node], tuple[msg.AnyMessage, object]]
_HUGE = 1 << 30
#: Placeholder for the sender's stage in the fence of a message (run epoch, iteration, base hash, stage).
_OWN = -1


def _fence(rng: random.Random, target: Node) -> msg.Fence:
    """Fence (fields that date a message) of the target's open iteration. In at most five of six draws one of
    its five fields is false."""
    peer = target.peer
    t, base, epoch = peer.replica.t + 1, peer.progress.base, peer.ctx.run.settings.epoch
    wrong = rng.randrange(6)
    return msg.Fence(
        epoch + 1 if wrong == 0 else epoch,
        rng.choice([0, 1, 2, _HUGE]) if wrong == 1 else 1,
        max(0, t + rng.choice([-1, 1, 5, _HUGE])) if wrong == 2 else max(0, t),
        "f" * 32 if wrong == 3 else base,
        rng.choice([0, 1, 2]) if wrong == 4 else _OWN,
    )


def _index(rng: random.Random) -> int:
    return rng.choice([1000, _HUGE])


def _payload(rng: random.Random) -> object:
    """Draw an unusable payload: none at all, not finite, of the wrong type or of the wrong shape."""
    return rng.choice([None, math.nan, "text", (1, 2, 3)])


def _forward(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    path = rng.choice([(), ("d0",), ("x",) * 12])
    repair, way = rng.random() < 0.5, rng.choice([0, 1, _HUGE])
    message = msg.Forward(_fence(rng, target), _index(rng), path, True, repair, True, way)
    return message, _payload(rng)


def _backward(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    return msg.Backward(_fence(rng, target), _index(rng)), _payload(rng)


def _reduce_part(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    fence, attempt = _fence(rng, target), msg.AttemptId(_HUGE, _HUGE)
    choices: list[msg.AnyMessage] = [
        msg.ReducePart(fence, target.stage, attempt, _HUGE),
        msg.ReducedPart(fence, target.stage, attempt, 0),
    ]
    return rng.choice(choices), _payload(rng)


def _attempt(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    fence, stage = _fence(rng, target), target.stage
    return msg.Attempt(fence, stage, msg.AttemptId(_HUGE, 1), 1, (target.id,), (0, 0)), None


def _prepared(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    squares = {"sum": rng.choice([-1.0, math.nan, math.inf, 1e308])}
    return msg.Prepared(_fence(rng, target), _stage(rng), msg.AttemptId(1, 1), "00", squares), None


def _stage(rng: random.Random) -> int:
    return rng.choice([0, 1, 2, 4096])


def _leader_message(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    """Draw (message that only the run's leader may send, None for its payload). Its content is false."""
    fence = _fence(rng, target)
    choices: list[msg.AnyMessage] = [
        msg.Announce((b"{}", b"not an entry")),
        msg.Release(fence),
        msg.Refused("go away"),
        msg.Missing(fence, {1: (0, 1, 2)}),
        msg.Keep(1, 1, "00", ("nobody",)),
        msg.Holders(target.stage, 0, "00", ("nobody",)),
    ]
    return rng.choice(choices), None


def _state(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    stage, t = _stage(rng), rng.choice([0, 1, _HUGE])
    choices: list[msg.AnyMessage] = [
        msg.FetchState(stage, t),
        msg.StateOffer(stage, t, "00", _HUGE),
        msg.FetchPiece(stage, t, _HUGE),
        msg.Piece(stage, t, _HUGE),
        msg.FetchGradient(t, stage),
        msg.Gradient(t, stage),
        msg.FetchLog(_HUGE),
    ]
    return rng.choice(choices), _payload(rng)


def _talk(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    absurd = rng.choice([-1.0, 0.0, 1e300, math.inf, math.nan])
    choices: list[msg.AnyMessage] = [
        msg.Ping(_HUGE, _HUGE),
        msg.Pong(rng.randrange(200), absurd, absurd, absurd, absurd),
        msg.Enquire(),
    ]
    return rng.choice(choices), None


def _slots(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    fence = _fence(rng, target)
    choices: list[msg.AnyMessage] = [
        msg.Ask(fence, _index(rng), rng.random() < 0.5),
        msg.Want(fence, rng.choice([0, 1, _HUGE]), True, rng.choice([0, _HUGE])),
        msg.Have(fence, _index(rng), rng.choice([0, 1, 2])),
        msg.Got(fence, _index(rng), rng.random() < 0.5),
    ]
    return rng.choice(choices), None


def _request(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    """Draw (join request of STRANGER with absurd figures, None for its payload)."""
    capacity, speed = rng.choice([0, -1, 1 << 40]), rng.choice([-1.0, math.nan, math.inf])
    member = Member(
        id=STRANGER,
        stage=1,
        incarnation=1,
        numerics_class="another class",
        capacity=capacity,
        forward_s=speed,
    )
    return msg.JoinRequest(member, rng.choice([-1, 1, 4096]), rng.choice([0, 1, 99]), "", ""), None


def _line(rng: random.Random, target: Node) -> tuple[msg.AnyMessage, object]:
    """(Announcement of a log entry, None for its payload). The entry follows the last one that the target
    knows and is well-formed, but no majority of the voters committed it."""
    position = target.peer.progress.position
    line = encode_entry(Entry(index=position.index, term=1, previous=position.previous, record=NoOp()))
    return msg.Announce((line,)), None


_OF_MEMBERS: list[Maker] = [
    _forward, _backward, _reduce_part, _attempt, _prepared, _leader_message, _state, _talk, _slots,
]  # fmt: skip
#: Messages of a stranger. A member does not send the last two: a join request would declare that the member
#: has restarted, and the protocol trusts voters about the log.
_MAKERS: list[Maker] = [*_OF_MEMBERS, _request, _line]
_FLOODS: list[Maker] = [_talk, _slots, _state, _forward]
