"""Deeds of hostile guests that the tests of live runs alone do: other payloads for some peers or in answers,
links made anew all the time, payloads that nobody asked for, messages of which a field is changed, gradients
for others."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
from msgspec import structs

from anabranch.background import background
from anabranch.net.errors import NetError
from anabranch.net.framing import Blob
from anabranch.node.chaos.guests.guest_process import run_guest
from anabranch.node.chaos.guests.member_deeds import EVERY_S, Deed, Guest, Role, withhold
from anabranch.protocol import messages as msg
from anabranch.protocol.interface.events import Received, Send
from anabranch.protocol.interface.tasks import PIECE_BYTES
from support.lying_peer import LyingPeer, WorkerDeed
from support.patient_strangers import PER_S, gradients

#: Seconds for which a guest keeps its report of a reduce back, so that those of the others come first.
KEPT_S = 0.4
#: Links that a guest makes to each peer at the same time.
AT_ONCE = 8
#: Payloads that a guest sends each peer every tenth of a second, while few of them wait.
BURSTS, WAITING_BYTES = 16, 32 << 20
#: Shape of the activations of small runs, and a gradient of it that overflows where it is used.
SHAPE = (1, 16, 16)
HUGE = struct.pack("<f", 3e38) * math.prod(SHAPE)

_kept: list[tuple[float, Send]] = []


@dataclass(frozen=True)
class DriverDeed(WorkerDeed):
    """Deed of a guest that uses its links itself. act: called every tenth of a second in the deed's role."""

    act: Callable[[DrivenPeer], None] | None = None


class DrivenPeer(LyingPeer):
    """Hostile peer that uses its links itself, too, if that is its deed."""

    def _talk(self) -> None:
        act = self.deed.act if isinstance(self.deed, DriverDeed) else None
        if act is not None and self.running and self.guest.in_role(self.deed.role):
            act(self)
        super()._talk()


def _two_sums(guest: Guest, send: Send) -> list[Send]:
    """Send one replica of the stage, always the same, another reduced part than the others; report the
    gradient of the others once all of them have reported."""
    message, ctx = send.message, guest.peer.ctx
    if isinstance(message, msg.Prepared):
        _kept.append((ctx.clock.now + KEPT_S, send))
        return []
    live = ctx.run.membership.live(ctx.run.stage, ctx.run.membership.opening.t)
    victim = min((peer for peer in live if peer != ctx.me), default="")
    if not isinstance(message, msg.ReducedPart) or send.peer != victim or len(live) < 3:
        return [send]
    print("false", message.fence.t, victim, flush=True)
    payload: Any = send.payload
    return [structs.replace(send, payload=payload + 1)]


def _send_kept(guest: Guest) -> Iterator[Send]:
    for kept in [each for each in _kept if each[0] <= guest.peer.ctx.clock.now]:
        _kept.remove(kept)
        yield kept[1]


def _dial_anew(peer: DrivenPeer) -> None:
    """Make new links to all replicas of the guest's stage, AT_ONCE to each at the same time; each closes the
    one before."""
    ctx = peer.peer.ctx
    fellows = ctx.run.membership.live(ctx.run.stage, ctx.run.membership.opening.t)
    members = ctx.run.membership.members

    async def anew(other: str) -> None:
        host, _, port = members[other].address.partition(",")[0].rpartition(":")
        try:
            link = await peer.links.transport.dial(other, host, int(port), peer.links.credential)
        except NetError:
            return
        peer.links.accept(link)
        print("linked", other, flush=True)

    for other in fellows:
        if other != ctx.me and members[other].address:
            for _ in range(AT_ONCE):
                background(anew(other))
    peer.begin()


def _pour(peer: DrivenPeer) -> None:
    """Send each linked peer large payloads that nobody asked for, as quickly as the line takes them."""
    blob = Blob("uint8", (PIECE_BYTES,), bytes(PIECE_BYTES))
    for link in peer.links._links.values():
        for number in range(BURSTS):
            if link._queue.queued_bytes < WAITING_BYTES:
                link.send(msg.encode(msg.Burst(number, b"")), blob, priority=5)
                print("poured", flush=True)
    peer.begin()


def _answer_nonsense(guest: Guest, send: Send) -> list[Send]:
    """Answer each question for a piece of work, a gradient or a piece of a state with another payload in
    turn, of which none fits."""
    import torch

    message = send.message
    if not isinstance(message, msg.Work | msg.Gradient | msg.Piece):
        return [send]
    other = [
        torch.empty((0, 7, 1 << 20)),
        torch.full((1, 1, 1, 1), float("nan"), dtype=torch.float64),
        torch.full((3, 5), 1 << 62, dtype=torch.int64),
        torch.zeros(1 << 20, dtype=torch.uint8),
        torch.tensor([1, 0, 0, 0, 64, 7], dtype=torch.uint8),
        torch.full((16, 16), float("inf"), dtype=torch.bfloat16),
        None,
    ]
    print("nonsense", type(message).__name__, flush=True)
    guest.told.add(("nonsense", number := len(guest.told)))
    return [structs.replace(send, payload=other[number % len(other)])]


def _mutated(value: Any, rng: random.Random, others: Sequence[Any]) -> Any:
    """Value of the same type as one field of a message, or of a message before (`others`), changed at one
    place."""
    if isinstance(value, msgspec.Struct):
        name = rng.choice(value.__struct_fields__) if value.__struct_fields__ else ""
        changed = {name: _mutated(getattr(value, name), rng, others)} if name else {}
        return structs.replace(value, **changed)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 0, -1, 1, 1 << 31, 1 << 40, value + 1000))
    if isinstance(value, float):
        return rng.choice((0.0, -1.0, math.nan, math.inf, 1e300, 5e-324))
    if isinstance(value, str):
        return rng.choice(("", "x" * 128, value[::-1], *(one for one in others if isinstance(one, str))))
    if isinstance(value, bytes):
        return rng.choice((b"", value[::-1], bytes(64)))
    if isinstance(value, tuple) and value:
        at = rng.randrange(len(value))
        one = _mutated(value[at], rng, others)
        return rng.choice(((*value[:at], one, *value[at + 1 :]), value[:at], value * 2, value[::-1]))
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        other = {_mutated(key, rng, others): value[key]}
        return rng.choice(({**value, key: _mutated(value[key], rng, others)}, {}, other))
    return value


def _mutate(guest: Guest, send: Send) -> list[Send]:
    """Send each twentieth message with one field changed, and each fortieth a second time so."""
    if (chance := _rng.random()) > 0.05 or isinstance(send.message, msg.Ping | msg.Pong):
        return [send]
    members = list(guest.peer.ctx.run.membership.members)
    changed = _mutated(send.message, _rng, members)
    try:
        msg.decode(msg.encode(changed))
    except Exception:
        return [send]  # an honest peer would not even read it
    print("mutated", type(changed).__name__, flush=True)
    return [structs.replace(send, message=changed), *([send] if chance < 0.025 else [])]


def _forwarded(guest: Guest, received: Received) -> bool:
    """Note the microbatches that the guest is sent, by their sender and iteration."""
    message = received.message
    if isinstance(message, msg.Forward) and message.train:
        _asked.setdefault((received.peer, message.fence.t), set()).add(message.index)
    return True


def _give_for_others(peer: DrivenPeer) -> None:
    """Give a gradient that overflows for each microbatch that the guest was sent in the open iteration, again
    and again."""
    iteration = peer.peer.iteration
    for (sender, t), indices in list(_asked.items()):
        link = peer.links._links.get(sender)
        if iteration is None or link is None or t != iteration.t:
            continue
        for index in indices:
            said = msg.Backward(peer.peer.ctx.fence(t, iteration.base), index)
            link.send(msg.encode(said), Blob("float32", SHAPE, HUGE), priority=0)
            peer.begin()


def _send_small(peer: DrivenPeer) -> None:
    """Send the leader gradients of a byte about a step far ahead, as many as the budget permits."""
    link = peer.links._links.get(peer.peer.ctx.log.leader)
    if link is not None and link.bulk.writable:
        link.bulk.write((gradients(int(PER_S * EVERY_S)),))
        print("sent", flush=True)
    peer.begin()


_rng = random.Random(14)
_asked: dict[tuple[str, int], set[int]] = {}

TRANSPORT_DEEDS: dict[str, Deed] = {
    deed.name: deed
    for deed in (
        Deed("sums falsely for one", Role.SERVES, _two_sums, _send_kept),
        DriverDeed("dials anew", Role.SERVES, act=_dial_anew),
        DriverDeed("pours", Role.SERVES, act=_pour),
        DriverDeed("sends small payloads", Role.MEMBER, act=_send_small),
        Deed("answers nonsense", Role.SERVES, _answer_nonsense),
        Deed("changes fields", Role.SERVES, _mutate),
        DriverDeed(
            *("gives for others", Role.SERVES, withhold(msg.Forward, msg.Backward)),
            act=_give_for_others,
            hear=_forwarded,
        ),
    )
}


def run_transport_guest(
    name: str, arguments: Sequence[str], log: str, namespace: str, environment: Mapping[str, str]
) -> NoReturn:
    """Be a guest that does one of these deeds (see `run_guest`)."""
    run_guest(name, arguments, log, namespace, environment, TRANSPORT_DEEDS, DrivenPeer)
