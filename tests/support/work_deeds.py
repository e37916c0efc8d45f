"""Deeds of hostile guests about microbatches and slots: requests, claims and overflows without end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from msgspec import structs

from anabranch.node.chaos.guests.member_deeds import Deed, Guest, Role, withhold
from anabranch.protocol import messages as msg
from anabranch.protocol.interface.events import HangUp, Received, Send
from anabranch.protocol.interface.tasks import embed_unit, head_unit
from support.lying_peer import WorkerDeed

#: Seconds for which a guest keeps its report of a reduce back, so that others have all of theirs open.
OPEN_S = 1.0
#: Seconds for which a guest keeps microbatches back, so that a test can kill who has another of them.
KEPT_S = 2.0
#: Changes of a microbatch's owner that a guest sends at once: more than a leader handles in a round trip.
CHANGES = 20
#: Seconds between two overflows that are made up one after the other: less than a step may stall.
NEXT_S = 2.0
#: Beginning of the names of all guests.
GUESTS = "guest-"

_ways = itertools.count(1000)
_kept: list[tuple[float, Send]] = []
"""Reports that a guest keeps back, with the times (s) at which it sends them."""
_double: dict[int, tuple[int, str, str]] = {}
"""Iteration -> microbatch that was sent to two relays, and these."""


def _want_again(guest: Guest) -> Iterator[Send]:
    """Ask each relay of the next stage for every gradient of the open iteration, each time as if anew."""
    run, iteration = guest.peer.ctx.run, guest.peer.iteration
    if iteration is None or run.stage >= run.settings.stages:
        return
    fence = guest.peer.ctx.fence(iteration.t, iteration.base)
    for peer in run.membership.live(run.stage + 1, iteration.t):
        for index in range(run.settings.microbatches):
            yield Send(peer, msg.Want(fence, index, True, next(_ways)))
    print("wanted", iteration.t, flush=True)


def _tell_gradients(guest: Guest, event: Received) -> bool:
    """Print each gradient of a microbatch that comes, and if the guest sent that microbatch."""
    message, iteration = event.message, guest.peer.iteration
    if isinstance(message, msg.Backward) and event.payload is not None:
        print("came", event.peer, message.fence.t, message.fence.base, message.index, flush=True)
        if iteration is not None and iteration.t == message.fence.t:
            whose = "own" if message.index in iteration.units else "foreign"
            print(whose, message.fence.t, message.index, flush=True)
    return True


def _send_double(guest: Guest, send: Send) -> list[Send]:
    """Send one microbatch of each iteration to two relays; name now the one and now the other as the one that
    gave it back with each claim, and keep the report of the reduce for OPEN_S."""
    message, run = send.message, guest.peer.ctx.run
    if isinstance(message, msg.Prepared) and guest.once("kept", message.fence, message.attempt):
        _kept.append((guest.peer.ctx.clock.now + OPEN_S, send))
        return []
    if isinstance(message, msg.Claim) and message.fence.t in _double:
        return list(_change_owner(guest)) or [send]
    if not isinstance(message, msg.Forward) or not message.train or message.fence.t in _double:
        return [send]
    others = [peer for peer in run.membership.live(run.stage + 1, message.fence.t) if peer != send.peer]
    if not others:
        return [send]
    _double[message.fence.t] = message.index, send.peer, others[0]
    return [send, structs.replace(send, peer=others[0])]


def _change_owner(guest: Guest) -> Iterator[Send]:
    """Name now the one and now the other relay as the one that gave the microbatch of `_send_double` back,
    CHANGES times at once."""
    iteration, run = guest.peer.iteration, guest.peer.ctx.run
    if iteration is None or iteration.t not in _double:
        return
    index, *peers = _double[iteration.t]
    sent_on = {
        peer: (tuple(i for i in given if i != index), tuple(i for i in sent if i != index))
        for peer, (given, sent) in iteration.sender.holders().items()
    }
    fence, units = guest.peer.ctx.fence(iteration.t, iteration.base), tuple(sorted(iteration.claims.held))
    print("owner", iteration.t, flush=True)
    for number in range(CHANGES):
        given, sent = sent_on.get(peer := peers[number % 2], ((), ()))
        holders = {**sent_on, peer: (tuple(sorted((*given, index))), sent)}
        yield guest.to_leader(msg.Claim(fence, run.stage, units, holders=holders))


def _talk_of_owners(guest: Guest) -> Iterator[Send]:
    """Send what was kept for long enough, and change owners again."""
    yield from _send_kept(guest)
    yield from _change_owner(guest)


def _vouch_for_all(guest: Guest, send: Send) -> list[Send]:
    """Say that another guest, of the next stage, gave all microbatches back; print those that are here."""
    message, membership = send.message, guest.peer.ctx.run.membership
    if isinstance(message, msg.Claim):
        print("has", message.fence.t, *message.units, flush=True)
    if not isinstance(message, msg.Claim) or not message.holders:
        return [send]
    next_stage = membership.live(message.stage + 1, message.fence.t)
    friends = [peer for peer in next_stage if membership.members[peer].name.startswith(GUESTS)]
    every = tuple(range(guest.peer.ctx.run.settings.microbatches))
    holders = dict.fromkeys(friends, (every, ()))
    return [structs.replace(send, message=structs.replace(message, holders=holders))]


def _overflow_in_turn(guest: Guest) -> Iterator[Send]:
    """Report an overflow in another microbatch of the open iteration every NEXT_S seconds."""
    run, iteration = guest.peer.ctx.run, guest.peer.iteration
    if iteration is None or not guest.once("turn", int(guest.peer.ctx.clock.now / NEXT_S)):
        return
    index = sum(("overflow", iteration.t, k) in guest.told for k in range(run.settings.microbatches))
    senders = run.membership.live(run.stage - 1, iteration.t)
    if index < run.settings.microbatches and senders:
        guest.told.add(("overflow", iteration.t, index))
        print("overflow", iteration.t, index, flush=True)
        fence = guest.peer.ctx.fence(iteration.t, iteration.base)
        yield guest.to_leader(msg.Overflow(fence, run.stage, index, "made up", senders[0]))


def _overflow_alone(guest: Guest, send: Send) -> list[Send]:
    """Report an overflow in each iteration in which the guest is the only replica of its stage."""
    message, run = send.message, guest.peer.ctx.run
    if not isinstance(message, msg.Slots) or not guest.once("alone", message.fence.t):
        return [send]
    if run.membership.live(run.stage, message.fence.t) != [guest.peer.ctx.me]:
        guest.told.discard(("alone", message.fence.t))
        return [send]
    print("overflow", message.fence.t, flush=True)
    overflow = msg.Overflow(message.fence, run.stage, 0, "made up", guest.peer.ctx.log.leader)
    return [guest.to_leader(overflow), send]


def _forge_and_withhold(guest: Guest, send: Send) -> list[Send]:
    """Send the leader one gradient with a bad seal, and from then on nothing that the guest owes to sums."""
    message = send.message
    if isinstance(message, msg.ReducePart | msg.ReducedPart | msg.Prepared):
        return [] if "forged" in {told[0] for told in guest.told if isinstance(told, tuple)} else [send]
    if not isinstance(message, msg.Backward) or send.peer != guest.peer.ctx.log.leader or not message.seal:
        return [send]
    if not guest.once("forged"):
        return [send]
    print("forged", flush=True)
    return [structs.replace(send, message=structs.replace(message, seal=b"0" * 32))]


def _cut_and_withhold(guest: Guest, send: Send) -> list[Send]:
    """Send nothing that the guest owes to sums, and cut its link to the leader instead, which may dial it."""
    message, leader = send.message, guest.peer.ctx.log.leader
    if not isinstance(message, msg.ReducePart | msg.ReducedPart | msg.Prepared):
        return [send]
    if leader in guest.peer.ctx.links.up:
        if guest.once("cut", message.fence.t, message.attempt):
            print("cut", flush=True)
        guest.peer.ctx.outbox.emit(HangUp(leader, "cut"))
    return []


def _claim_unbegun(guest: Guest) -> Iterator[Send]:
    """Claim the embeddings and heads of the guest's microbatches, of which it begins none."""
    iteration, run = guest.peer.iteration, guest.peer.ctx.run
    if iteration is None or not guest.once("unbegun", iteration.t, iteration.base):
        return
    own = iteration.source.assignments[0].of(guest.peer.ctx.me)
    units = tuple(sorted(unit for index in own for unit in (head_unit(index), embed_unit(index))))
    fence, losses = guest.peer.ctx.fence(iteration.t, iteration.base), dict.fromkeys(own, 1.0)
    yield guest.to_leader(msg.Claim(fence, 0, units, losses, {}, run.manifest(iteration.t)))


def _no_slot_of_others(guest: Guest, send: Send) -> list[Send]:
    """Keep each slot of a round that is another machine's: neither its losses nor a claim of it goes out."""
    message, run = send.message, guest.peer.ctx.run
    if not isinstance(message, msg.Forward | msg.Backward | msg.Claim) or not run.plan(message.fence.t):
        return [send]
    plan = run.plan(message.fence.t)
    others = {index for index, slot in enumerate(plan) if slot.peer != guest.peer.ctx.me}
    if isinstance(message, msg.Claim):
        units = tuple(unit for unit in message.units if unit not in others)
        return [structs.replace(send, message=structs.replace(message, units=units))] if units else []
    if message.index not in others:
        return [send]
    print("kept", message.fence.t, message.index, flush=True)
    return []


def _tell_digests(guest: Guest, send: Send) -> list[Send]:
    """Report digests of no contribution before each claim, in a run whose data are not private."""
    message = send.message
    if not isinstance(message, msg.Claim):
        return [send]
    if guest.once("digests", message.fence.t):
        print("digests", message.fence.t, flush=True)
    report = msg.ContributionDigests(message.fence, message.stage, {}, {})
    return [structs.replace(send, message=report), send]


def _overflow_own(guest: Guest) -> Iterator[Send]:
    """Report an overflow in the first microbatch of each iteration that is this data node's."""
    iteration = guest.peer.iteration
    if iteration is None or not guest.once("own", iteration.t, iteration.base):
        return
    own = iteration.source.assignments[0].of(guest.peer.ctx.me)
    if own:
        print("overflow", iteration.t, own[0], flush=True)
        fence = guest.peer.ctx.fence(iteration.t, iteration.base)
        yield guest.to_leader(msg.Overflow(fence, 0, own[0], "made up"))


def _send_once(guest: Guest, send: Send) -> list[Send]:
    """Send each microbatch on once, whoever dies with it: the first of an iteration at once, and tell to
    whom, the others KEPT_S later, so that somebody can."""
    message = send.message
    if not isinstance(message, msg.Forward) or not message.train:
        return [send]
    first = guest.once("first", message.fence.t, message.fence.base)
    if not guest.once("sent", message.fence.t, message.fence.base, message.index):
        print("kept", message.fence.t, message.index, flush=True)
        return []
    if first:
        print("first", message.fence.t, send.peer, flush=True)
        return [send]
    _kept.append((guest.peer.ctx.clock.now + KEPT_S, send))
    return []


def _evaluate_nothing(guest: Guest, send: Send) -> list[Send]:
    """Send no held-out window on."""
    message = send.message
    if not isinstance(message, msg.Forward) or message.train:
        return [send]
    print("window", message.fence.t, message.index, flush=True)
    return []


def _send_kept(guest: Guest) -> Iterator[Send]:
    """Send what was kept for long enough."""
    for kept in [each for each in _kept if each[0] <= guest.peer.ctx.clock.now]:
        _kept.remove(kept)
        yield kept[1]


WORK_DEEDS: dict[str, Deed] = {
    deed.name: deed
    for deed in (
        WorkerDeed("wants gradients again and again", Role.SERVES, None, _want_again, hear=_tell_gradients),
        Deed("names two owners in turn", Role.SERVES, _send_double, _talk_of_owners),
        Deed("vouches for a claimer", Role.SERVES, _vouch_for_all),
        Deed("sends each microbatch once", Role.SERVES, _send_once, _send_kept),
        Deed("evaluates no window", Role.SERVES, _evaluate_nothing),
        Deed("overflows in turn", Role.SERVES, withhold(msg.Claim), _overflow_in_turn),
        Deed("overflows alone", Role.SERVES, _overflow_alone),
        Deed("reports digests", Role.SERVES, _tell_digests),
        Deed("claims nothing and overflows", Role.SERVES, withhold(msg.Claim), _overflow_own),
        Deed("forges and withholds", Role.SERVES, _forge_and_withhold),
        Deed("cuts and withholds", Role.SERVES, _cut_and_withhold),
        Deed("begins no microbatch", Role.SERVES, withhold(msg.Forward)),
        Deed("claims what it never began", Role.SERVES, withhold(msg.Forward, msg.Claim), _claim_unbegun),
        Deed("begins and claims no slot", Role.SERVES, withhold(msg.Forward, msg.Claim)),
        Deed(
            "computes no slot",
            Role.SERVES,
            withhold(msg.Slots, msg.Forward, msg.Backward, msg.Claim, msg.Lack),
        ),
        Deed("computes no slot of others", Role.SERVES, _no_slot_of_others),
    )
}
