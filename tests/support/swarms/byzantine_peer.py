"""A hostile peer: an honest process whose mouth is not its own.

It sends well-formed messages of every kind whose fields lie (drawn by their types, from what is true and
from the edges of what can be said), messages overheard before (replays), and messages with changed bytes.
What arrives as no message breaks the link, as it does live. Removed, it comes back as a new process.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as types

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Payload
from anabranch.protocol.messages.table import ROW_OF
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World

#: Messages that are remembered to be replayed, changed and mutated.
OVERHEARD = 400
KINDS = tuple(ROW_OF)
type_info = cache(types.type_info)
#: Messages by which an admitted member spoils, in its own name, its part of a sum, its own account. Lies of
#: these kinds are told under others' names and of other epochs only (docs/reference, "What an admitted peer
#: can do").
OWN_ACCOUNT = (msg.Claim, msg.ReducePart, msg.ReducedPart, msg.Prepared, msg.Overflow, msg.Applied, msg.Leave)
#: It can also send a wrong activation or gradient: those of the batch come without one in its own name.
OWN_TENSORS = (msg.Forward, msg.Backward)


class Fabricator:
    """Draws values by type. `words`, `numbers`: true ones, to lie plausibly with."""

    def __init__(self, draw: random.Random, words: Sequence[str], numbers: Sequence[int]) -> None:
        self.draw = draw
        self.words = words
        self.numbers = numbers

    def message(self, kind: type[msg.Message]) -> msg.Message:
        made = self.value(type_info(kind))
        assert isinstance(made, msg.Message)
        return made

    def value(self, info: types.Type) -> Any:
        draw = self.draw
        match info:
            case types.BoolType():
                return draw.random() < 0.5
            case types.IntType(ge=least, le=most):
                low, high = least if least is not None else -5, most if most is not None else 1 << 62
                edge = draw.choice([0, 1, 2, high, *self.numbers])
                return min(max(int(low), edge), int(high))
            case types.FloatType():
                return draw.choice([0.0, 1.0, -1.0, 1e308, float("inf"), float("nan"), draw.random()])
            case types.StrType(max_length=most):
                return draw.choice([*self.words, "", "x" * (most or 4096)])
            case types.BytesType():
                return draw.randbytes(draw.choice([0, 1, 40]))
            case types.VarTupleType(item_type=item, max_length=most) | types.ListType(
                item_type=item, max_length=most
            ):
                return tuple(self.value(item) for _ in range(min(draw.choice([0, 1, 2, 12]), most or 12)))
            case types.TupleType(item_types=items):
                return tuple(self.value(item) for item in items)
            case types.DictType(key_type=key, value_type=value):
                return {self.value(key): self.value(value) for _ in range(draw.choice([0, 1, 4]))}
            case types.UnionType(types=choices):
                return self.value(draw.choice(choices))
            case types.StructType(cls=cls, fields=fields) | types.NamedTupleType(cls=cls, fields=fields):
                return cls(**{field.name: self.value(field.type) for field in fields})
            case types.LiteralType(values=values):
                return draw.choice(list(values))
            case types.EnumType(cls=enum):
                return draw.choice(list(enum))
            case types.NoneType():
                return None
        raise TypeError(f"no values of {info} are known")


class Hostile:
    """`name` says a lie every `every_s` seconds, to somebody that it is linked to, from `begin_s` to `end_s`.

    payload: makes a payload (a lie may carry one). told: lies by kind of message, and mutated bytes as
    "bytes: read" (a message all the same) or "bytes: broken". broken: called as the link breaks by them.
    """

    def __init__(
        self,
        world: World,
        name: str,
        draw: random.Random,
        payload: Callable[[random.Random], Payload],
        every_s: float = 0.05,
        begin_s: float = 3.0,
        end_s: float = 20.0,
    ) -> None:
        self.world = world
        self.name = name
        self.told: Counter[str] = Counter()
        self._draw = draw
        self._payload = payload
        self._every_s = every_s
        self._end_s = end_s
        self._overheard: deque[msg.Message] = deque(maxlen=OVERHEARD)
        world.liars.add(name)
        world.watchers.append(self._overhear)
        world.clock.at(begin_s, self._speak)

    def _overhear(self, node: Node, event: ev.Event) -> None:
        if isinstance(event, ev.Received):
            self._overheard.append(event.message)

    def _speak(self) -> None:
        world, draw = self.world, self._draw
        node = world.nodes[self.name]
        if world.clock.now > self._end_s:
            return
        if not node.running:
            self._come_back(node)
        elif node.links:
            victim = draw.choice(sorted(node.links))
            if draw.random() < 0.25 and self._overheard:
                self._mutate(node, victim)
            else:
                message, payload = self._lie(node)
                if message is not None:
                    self.told[type(message).__name__] += 1
                    world.carry(node, victim, msg.encode(message), payload)
        world.clock.after(self._every_s * draw.uniform(0.1, 2.0), self._speak)

    def _come_back(self, node: Node) -> None:
        member = msgspec.structs.replace(node.member, incarnation=node.member.incarnation + 1)
        self.world.add(member, self.world.leading().id, self.world.clock.now)

    def _fabricator(self, node: Node) -> Fabricator:
        peer = node.peer
        t = peer.iteration.t if peer.iteration is not None else peer.replica.t + 1
        base = peer.iteration.base if peer.iteration is not None else peer.progress.base
        words = [*self.world.nodes, base, base, base, peer.replica.fingerprint, self.name]
        numbers = [1, 1, max(0, t), max(0, t), max(0, t), t + 1, max(0, t - 1), 3, 5, 6]
        return Fabricator(self._draw, words, numbers)

    def _lie(self, node: Node) -> tuple[msg.Message | None, Payload | None]:
        draw = self._draw
        payload = self._payload(draw) if draw.random() < 0.5 else None
        if draw.random() < 0.3 and self._overheard:
            message = draw.choice(list(self._overheard))
            if draw.random() < 0.7:
                message = self._changed(node, message)
        else:
            message = self._fabricator(node).message(draw.choice(KINDS))
        if self._spoils(node, message):
            return None, None
        if isinstance(message, OWN_TENSORS) and message.index < self.world.settings.microbatches:
            payload = None if self._in_its_name(node, message.fence) else payload
        return message, payload if type(message) in msg.PAYLOAD_PRIORITY else None

    def _changed(self, node: Node, message: msg.Message) -> msg.Message:
        """The message with another value in one field."""
        info = types.type_info(type(message))
        assert isinstance(info, types.StructType)
        if not info.fields:
            return message
        field = self._draw.choice(info.fields)
        return msgspec.structs.replace(message, **{field.name: self._fabricator(node).value(field.type)})

    def _spoils(self, node: Node, message: msg.Message) -> bool:
        """True if it might be accepted, as it is this member's own account."""
        if not self._is_member() or not isinstance(message, OWN_ACCOUNT):
            return False
        return isinstance(message, msg.Leave) or self._in_its_name(node, message.fence)

    def _is_member(self) -> bool:
        return self.name in self.world.leading().peer.ctx.run.membership.members

    def _in_its_name(self, node: Node, fence: msg.Fence) -> bool:
        return self._is_member() and fence.incarnation == node.member.incarnation

    def _mutate(self, node: Node, victim: str) -> None:
        """Bytes of a message are changed on their way: read as another message, or the link breaks."""
        draw = self._draw
        data = bytearray(msg.encode(draw.choice(list(self._overheard))))
        for _ in range(draw.choice([1, 1, 2, 8])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
        try:
            message = msg.decode(bytes(data))
        except msg.MessageError:
            self.told["bytes: broken"] += 1
            if self._draw.random() < 0.05:  # a link is broken now and then: the others have work to do
                self.world.cut(self.name, victim)
            return
        if not self._spoils(node, message):
            self.told["bytes: read"] += 1
            self.world.carry(node, victim, bytes(data), None)
