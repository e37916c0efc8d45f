"""Deeds of one liar beside honest machines: those of `sim.fuzz.guest_deeds`, and silences, delays and claims
that attackers found since.

A deed changes, drops or delays what the liar's process says (`change`), says more (`talk`), or both, from the
moment on at which the liar begins. It goes on with it in each process of its machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from random import Random

from msgspec import structs

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import Payload
from anabranch.sim.fuzz.guest_deeds import DEEDS as GUEST_DEEDS
from anabranch.sim.fuzz.guest_deeds import EVERY_S, Deed, Guest, GuestRole
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World

#: Seconds by which the liar's late messages are late: of work, more than twice a usual step; of reports and
#: claims, less than the least time after which a step stalls (5 s), so that they are never missed.
LATE_S, JUST_S = 6.0, 4.5
#: Share of the leader's wait for which a liar holds back what comes just in time.
JUST = 0.85
#: Seconds between two crashes of the liar, two departures, and two times that it hangs up. Choices.
CRASHES_S, LEAVES_S, HANGS_UP_S = 9.0, 15.0, 3.0
#: Copies of each message of a liar that repeats itself.
COPIES = 3

Said = msg.AnyMessage
#: (liar, receiver, message of its honest process) -> messages in its place, each with the seconds by which it
#: is later.
Change = Callable[["Liar", str, Said], Collection[tuple[float, Said]]]


@dataclass(frozen=True)
class LiarDeed:
    """name: for tables. early: True if the liar begins as soon as it has joined. audited: True if it needs a
    run with audits. hides: True if it needs relays that are reached through carriers only."""

    name: str
    change: Change | None = None
    talk: Callable[[Liar], None] | None = None
    early: bool = False
    audited: bool = False
    hides: bool = False


class Liar(Guest):
    """Liar of a run. victim: honest machine that deeds against one peer are done to. did: number of messages
    that it changed, or said beyond its honest process."""

    def __init__(
        self, world: World, name: str, deed: LiarDeed, role: GuestRole, victim: str, seed: int
    ) -> None:
        guest_deed = GUEST_DEEDS.get(deed.name) or Deed(deed.name, frozenset({role}))
        super().__init__(world, name, guest_deed, role, Random(seed))
        self.liar_deed, self.victim, self.did = deed, victim, 0
        self.next_s = 0.0
        world.liars.add(name)
        self._carry = world.carry
        world.carry = self._on_its_way  # type: ignore[method-assign]
        if deed.name in GUEST_DEEDS:
            world.mouths[name] = self.mouth

    def begin(self) -> None:
        self.begun = True
        self._beat()

    def _beat(self) -> None:
        talk = self.liar_deed.talk or self.deed.talk
        if talk is not None and self.node.running and self.in_run:
            talk(self)
        self.world.clock.after(EVERY_S, self._beat)

    @property
    def in_run(self) -> bool:
        return self.name in self.world.leading().peer.ctx.run.membership.members

    def say(self, peer: str, message: Said, once: object = None) -> None:
        self.did += 1
        super().say(peer, message, once)

    def every(self, seconds: float) -> bool:
        """True once in so many seconds."""
        now = self.world.clock.now
        due = now >= self.next_s
        if due:
            self.next_s = now + seconds
            self.did += 1
        return due

    def _on_its_way(self, sender: Node, peer: str, message: bytes, payload: Payload | None) -> None:
        change = self.liar_deed.change
        if sender.id != self.name or not self.begun or change is None:
            self._carry(sender, peer, message, payload)
            return
        said = msg.decode(message)
        changed = change(self, peer, said)
        self.did += list(changed) != [(0.0, said)]
        for late_s, each in changed:
            data = message if each is said else msg.encode(each)
            if late_s:
                self.world.clock.after(late_s, partial(self._carry, sender, peer, data, payload))
            else:
                self._carry(sender, peer, data, payload)


# --- changes ---------------------------------------------------------------------------------------------


def drops(*kinds: type[Said]) -> Change:
    return lambda liar, peer, said: () if isinstance(said, kinds) else ((0.0, said),)


def drops_to_victim(*kinds: type[Said]) -> Change:
    """Change: say nothing of these kinds to the victim (no kinds: nothing at all)."""
    return lambda liar, peer, said: (
        () if peer == liar.victim and isinstance(said, kinds or msg.Message) else ((0.0, said),)
    )


def delays(late_s: float, *kinds: type[Said]) -> Change:
    return lambda liar, peer, said: ((late_s if isinstance(said, kinds) else 0.0, said),)


def drops_now_and_then(*kinds: type[msg.FencedMessage]) -> Change:
    """Change: say nothing of these kinds about every third iteration."""
    return lambda liar, peer, said: (
        () if isinstance(said, kinds) and said.fence.t % 3 == 0 else ((0.0, said),)
    )


def just_in_time(*kinds: type[msg.FencedMessage]) -> Change:
    """Change: delay messages of these kinds until just before the step stalls (it knows how long that is)."""

    def change(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
        lead, late_s = liar.lead, 0.0
        current = lead.round if lead is not None else None
        if isinstance(said, kinds) and lead is not None and current is not None:
            due_s = current.progress_at + JUST * lead.reducing.patience_s(current)
            late_s = max(0.0, due_s - liar.world.clock.now)
        return ((late_s, said),)

    return change


def _repeats(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
    return [(0.3 * number, said) for number in range(COPIES)]


def _claims_all(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
    if isinstance(said, msg.Claim):
        said = structs.replace(said, units=tuple(sorted(liar.world.settings.cover(said.stage))))
    return ((0.0, said),)


def _claims_all_gives_nothing(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
    return () if isinstance(said, msg.Forward | msg.Backward | msg.Have) else _claims_all(liar, peer, said)


def _false_links(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
    """Change: report that links to honest peers are slow, and round trips to the victim take seconds."""
    if isinstance(said, msg.Applied | msg.Measured):
        slow = {other: (3.0 if other == liar.victim else 0.3, 1e4) for other in liar.world.nodes}
        said = structs.replace(said, links=slow)
    return ((0.0, said),)


def _false_speed(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
    """Change: report a millionth of the seconds of its own work, and no cost to the pipeline's end."""
    if isinstance(said, msg.Applied):
        said = structs.replace(said, timing={kind: 1e-6 * seconds for kind, seconds in said.timing.items()})
    if isinstance(said, msg.Pong):
        said = structs.replace(said, forward_s=1e-9, backward_s=1e-9, bandwidth_bps=1e12, price=1e-9)
    return ((0.0, said),)


def _false_witness(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
    """Change: answer each probe that its subject has no link and has been silent for an hour."""
    if isinstance(said, msg.Probed):
        said = structs.replace(said, linked=False, heard=False, silence_s=3600.0)
    return ((0.0, said),)


def _hears_the_dead(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
    if isinstance(said, msg.Probed):
        said = structs.replace(said, linked=True, heard=True, silence_s=0.0)
    return ((0.0, said),)


def _false_vouch(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
    if isinstance(said, msg.Vouch):
        said = structs.replace(said, proof="0" * len(said.proof))
    return ((0.0, said),)


def _false_audit(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
    """Change: find the work of each peer that it audits different."""
    if isinstance(said, msg.Audited):
        said = structs.replace(said, verdict="different", what="sum", found="0" * 16, claimed="1" * 16)
    return ((0.0, said),)


def _no_receipt(liar: Liar, peer: str, said: Said) -> Collection[tuple[float, Said]]:
    return ((0.0, structs.replace(said, receipt=b"") if isinstance(said, msg.Prepared) else said),)


# --- talk ------------------------------------------------------------------------------------------------


def _behind(liar: Liar) -> None:
    """Talk: say after each step that it cannot get the state."""
    lead = liar.lead
    if lead is not None and lead.t > 0:
        liar.tell_leader(msg.Behind(lead.t, liar.stage), once=("behind", lead.base))


def _spoils(liar: Liar) -> None:
    """Talk: call each copy of each state spoilt."""
    lead = liar.lead
    for t in list(lead.catalog.points) if lead is not None else ():
        for stage in range(liar.world.settings.stages + 1):
            for holder in sorted(liar.world.nodes):
                liar.tell_leader(msg.Spoilt(stage, t, holder), once=("spoilt", t, stage, holder))


def _hangs_up(liar: Liar) -> None:
    if liar.victim in liar.node.links and liar.every(HANGS_UP_S):
        liar.world.hang_up(liar.node, liar.victim, "busy")


def _crashes(liar: Liar) -> None:
    if liar.serves and liar.every(CRASHES_S):
        liar.world.crash(liar.name)


def _crashes_at_once(liar: Liar) -> None:
    """Talk: crash half a second after it comes to serve, each time."""
    if liar.serves and liar.every(1.0):
        node = liar.node
        liar.world.clock.after(0.5, lambda: liar.world.crash(liar.name) if liar.node is node else None)


def _leaves(liar: Liar) -> None:
    if liar.serves and liar.every(LEAVES_S):
        liar.node.handle(ev.Stopping("the user stopped it"))


def _swallows(liar: Liar) -> None:
    """Talk: forward nothing of what it carries for others."""
    if liar.world.carries(liar.name) and liar.name not in liar.world.swallows:
        liar.did += 1
        liar.world.swallows.add(liar.name)


def _breaks(liar: Liar) -> None:
    if liar.world.carries(liar.name) and liar.every(1.0):
        liar.world.end_circuits(liar.name)


_FROM_FUZZ = ("black hole", "no iteration", "false state", "wrong digest", "false apart", "false holds",
              "false overflow", "blame", "false reports", "log flood")  # fmt: skip
_PARTS = (msg.ReducePart, msg.ReducedPart)

DEEDS = {
    deed.name: deed
    for deed in (
        *map(LiarDeed, _FROM_FUZZ),
        LiarDeed("false work", audited=True),
        LiarDeed("gives work late", delays(LATE_S, msg.Forward, msg.Backward)),
        LiarDeed("gives no gradients", drops(msg.Backward)),
        LiarDeed("claims all, gives nothing", _claims_all_gives_nothing),
        LiarDeed("claims all", _claims_all),
        LiarDeed("claims nothing", drops(msg.Claim)),
        LiarDeed("claims late", delays(JUST_S, msg.Claim)),
        LiarDeed("never PREPARED", drops(msg.Prepared)),
        LiarDeed("PREPARED late", delays(JUST_S, msg.Prepared)),
        LiarDeed("sends no parts", drops(*_PARTS)),
        LiarDeed("sends one peer no parts", drops_to_victim(*_PARTS)),
        LiarDeed("sends parts late", delays(LATE_S, *_PARTS)),
        LiarDeed("claims just in time", just_in_time(msg.Claim)),
        LiarDeed("PREPARED just in time", just_in_time(msg.Prepared)),
        LiarDeed("parts just in time", just_in_time(*_PARTS)),
        LiarDeed("applied just in time", just_in_time(msg.Applied)),
        LiarDeed("no claims now and then", drops_now_and_then(msg.Claim)),
        LiarDeed("no parts now and then", drops_now_and_then(*_PARTS)),
        LiarDeed("not PREPARED now and then", drops_now_and_then(msg.Prepared)),
        LiarDeed("not applied now and then", drops_now_and_then(msg.Applied)),
        LiarDeed("never applied", drops(msg.Applied)),
        LiarDeed("applied late", delays(JUST_S, msg.Applied)),
        LiarDeed("gives no states", drops(msg.StateOffer, msg.Piece, msg.Gradient, msg.Vouch)),
        LiarDeed("gives states slowly", delays(LATE_S, msg.StateOffer, msg.Piece, msg.Gradient)),
        LiarDeed("vouches falsely", _false_vouch),
        LiarDeed("says it is behind", talk=_behind),
        LiarDeed("never ready", drops(msg.Ready), early=True),
        LiarDeed("calls copies spoilt", talk=_spoils),
        LiarDeed("false links", _false_links),
        LiarDeed("false speed", _false_speed),
        LiarDeed("hears nobody", _false_witness),
        LiarDeed("hears the dead", _hears_the_dead),
        LiarDeed("repeats all", _repeats),
        LiarDeed("silent to one peer", drops_to_victim()),
        LiarDeed("silent to all", drops(msg.Message)),
        LiarDeed("hangs up on one peer", talk=_hangs_up),
        LiarDeed("crashes again and again", talk=_crashes),
        LiarDeed("crashes whenever it serves", talk=_crashes_at_once),
        LiarDeed("leaves again and again", talk=_leaves),
        LiarDeed("false audits", _false_audit, audited=True),
        LiarDeed("withholds audits", drops(msg.Audited, msg.Work), audited=True),
        LiarDeed("no receipts", _no_receipt, audited=True),
        LiarDeed("swallows what it carries", talk=_swallows, hides=True),
        LiarDeed("breaks what it carries", talk=_breaks, hides=True),
    )
}
