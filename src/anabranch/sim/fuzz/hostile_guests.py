"""Hostile guests of one seed: they join a running swarm, do their deeds, and demands G1 to G5 are checked.

G1: steps go on, each within PACE_S, and none is skipped on a false word. G2: no honest member is removed
unless its process was killed or ended well. G3: a guest whose deed is proven loses its seat (false work: if
all of its work is audited). G4: no guest gets a seat that its ticket does not give (walk-ins: no majority of
a stage), nor comes to serve without its stage's state where others that have it are heard, nor gets states
that it does not need. G5: a pair that meets at a harmful carrier leaves it. (That no bit of the run differs
is invariant I3.) Not here: what a deed is (`guest_deeds`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from msgspec import structs

from anabranch.protocol.audit.draw import convicts
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import AUDIT_STEPS
from anabranch.protocol.log.records import Commit, Member, Members, decode_entry
from anabranch.protocol.messages import Keep, Piece
from anabranch.protocol.peer.shared_state import Step
from anabranch.sim.fuzz.guest_deeds import (
    DEEDS,
    EVERY_S,
    OPEN_DOOR,
    Guest,
    GuestRole,
    cells,
)
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.kernel.violation import Violation

#: Steps that are committed under attack before a seed ends; a guest that must lose its seat has as many from
#: its first lie (a false witness is removed after three false overflows).
STEPS_UNDER_ATTACK = 8
#: Greatest virtual time of a step under attack (s), times the seed's slowness.
PACE_S = 90.0
#: Virtual time (s) that a guest has to come into its role; after that its deed is dropped.
ARRIVES_S = 60.0
#: Share of seeds whose first guest does one of the deeds that came later (a choice: these are a third of all
#: pairs, and the others have been drawn for long).
LATER_SHARE = 0.25
#: Virtual time (s) for which a seed goes on after a carrier began its deed, and the most links of a pair that
#: go through it meanwhile (G5): either end may find out for itself, and try it once more when the other
#: carriers have failed, too.
CARRIES_S, TAKEN = 30.0, 4
#: Roles of guests that serve nothing.
APART = (GuestRole.ADMITTED, GuestRole.STRANGER)


@dataclass(frozen=True)
class GuestPlan:
    """Planned arrival of a hostile guest. deed: key of DEEDS. It joins `stage` after `after_t` committed
    steps. first: True if its id sorts before all others, False if after them. returns: True if its process is
    started again when it was removed from the run."""

    deed: str
    role: GuestRole
    stage: int
    after_t: int
    first: bool
    returns: bool

    def name(self, number: int) -> str:
        return f"{'a' if self.first else 'z'}.guest{number}"


def draw_guests(
    rng: random.Random,
    stages: int,
    undefended: bool,
    audits: bool = False,
    later: random.Random | None = None,
) -> tuple[GuestPlan, ...]:
    """Plans of the one or two guests of a seed, in the order in which they come; each draws a deed, a role
    and a stage.

    If both come after the same step and the first never serves, they are accomplices: the second has the
    first's deed, role and stage. Guests that serve are no accomplices, since two serving replicas that agree
    on a lie are believed (docs/explanation/trust.md).

    undefended: True if the first guest does a deed of `guest_deeds.OPEN`. audits: True in a seed with audits;
    there the first guest computes falsely in half of the seeds. later: generator that draws another deed and
    role for the first guest in some seeds (`guest_deeds.LATER`); None: in no seed.
    """
    defended = cells(False, audits)
    false_work = [(deed, role) for deed, role in defended if deed.audited]
    drawn: list[GuestPlan] = []
    for number in range(rng.choice((1, 2))):
        deed, role = rng.choice(cells(True) if undefended and not number else defended)
        if false_work and not number and rng.random() < 0.5:
            deed, role = rng.choice(false_work)
        if number and rng.random() < 0.3 and (deed, drawn[0].role) in defended:
            role = drawn[0].role
        stage = 0 if role is GuestRole.DATA else rng.randint(1, stages)
        returns = role is GuestRole.STRANGER or rng.random() < 0.5
        plan = GuestPlan(deed.name, role, stage, rng.randint(1, 3), rng.random() < 0.5, returns)
        if drawn and plan.after_t == drawn[0].after_t and drawn[0].role in APART:
            plan = replace(drawn[0], first=plan.first)
        drawn.append(plan)
    if later is not None and later.random() < LATER_SHARE:
        deed, role = later.choice(cells(False, audits, later=True))
        stage = 0 if role is GuestRole.DATA else later.randint(1, stages)
        drawn[0] = replace(drawn[0], deed=deed.name, role=role, stage=stage)
    return tuple(drawn)


class HostileGuests:
    """Hostile guests of one seed, and the demands on a run with them, which raise Violation. plans: guests
    that come. begun(deed, node, text): called when a guest does its deed for the first time. pace_s: virtual
    seconds that a step may take under attack."""

    def __init__(
        self,
        world: World,
        plans: tuple[GuestPlan, ...],
        rng: random.Random,
        begun: Callable[[str, Node, str], None],
        pace_s: float,
    ) -> None:
        self.world, self._plans, self._rng, self._begun, self._pace_s = world, plans, rng, begun, pace_s
        self.guests: list[Guest] = []
        self._first_t: dict[str, int] = {}
        """Guest -> steps that were committed when it did its deed first."""
        self._carries_since: dict[str, tuple[float, Counter[tuple[str, frozenset[str]]]]] = {}
        """Guest that carries -> time of its first deed, and the links made until then."""
        self.put_out: dict[str, str] = {}
        """Guest -> reason of its first removal after its deed began."""
        self._left: dict[str, float] = {}
        """Guest that did nothing yet -> time at which its deed is dropped."""
        self._seen: tuple[object, ...] = ()
        self._audits: list[tuple[int, str, set[str], int]] = []
        """(step, guest, honest replicas of its stage) for each step that counts work of a guest that lied in
        it; without those that left or moved while the work could be audited."""
        self._had_states: set[tuple[str, int]] = set()
        """(guest, incarnation) that had its state once; after a missed step it may fetch a later one."""
        self._keeps: set[tuple[str, int, int]] = set()
        """(guest, stage, iteration) of states that the leader had it keep while it served."""
        self._log_read, self._committed_at = 0, 0.0
        if plans:
            world.watchers.append(self._heard)

    # --- their life ----------------------------------------------------------------------------

    def look(self, node: Node, steps: int) -> None:
        """Do the guests' part after an event of the peer `node`: invite those whose time has come, read new
        log entries, let guests do their deeds if the leader's round has changed. Raises Violation if a demand
        (G1, G2, G4) is not met. steps: last committed iteration."""
        for number, plan in enumerate(self._plans[len(self.guests) :], start=len(self.guests)):
            if plan.after_t > steps:
                break
            self._invite(plan, plan.name(number + 1))
        if len(self.world.log) > self._log_read:
            self._read_log(steps)
        self._in_time()
        lead = node.peer.lead
        if lead is None or not self.guests:
            return
        seen = (lead.tip.base, lead.round is None or tuple(lead.round.attempts.values()))
        if seen != self._seen:
            self._seen = seen
            for guest in self.guests:
                self._talk(guest, steps)

    def _invite(self, plan: GuestPlan, name: str) -> None:
        """Add the guest of `plan` to the world under this name, and let its process dial the leader. It has
        no disk, so it never keeps the log."""
        world, stage = self.world, plan.stage
        like = next(n.member for n in world.nodes.values() if n.member.stage == stage)
        member: Member = structs.replace(
            like, id=name, name=name, address=f"{name}:1", incarnation=1, capacity=4, disk=""
        )
        guest = Guest(world, name, DEEDS[plan.deed], plan.role, self._rng)
        self.guests.append(guest)
        world.liars.add(name)
        if plan.role is GuestRole.WALK_IN:
            world.tickets[name] = OPEN_DOOR
        world.mouths[name] = guest.mouth
        self._left[name] = world.clock.now + ARRIVES_S
        world.add(member, world.leading().id, world.clock.now)
        world.clock.after(EVERY_S, lambda: self._beat(guest))

    def _beat(self, guest: Guest) -> None:
        self._talk(guest, self._steps())
        self.world.clock.after(EVERY_S, lambda: self._beat(guest))

    def _steps(self) -> int:
        return self.world.leading().peer.committed

    def _talk(self, guest: Guest, steps: int) -> None:
        if not guest.node.running or not self._in_role(guest):
            return
        guest.begun = True
        if guest.deed.talk is not None:
            guest.deed.talk(guest)
        if guest.told and guest.name in self._left:
            del self._left[guest.name]
            if not self._first_t:
                self._committed_at = self.world.clock.now
            self._first_t[guest.name] = steps
            if guest.deed.hides:
                self._carries_since[guest.name] = self.world.clock.now, self.world.circuits_made.copy()
            role = f"{guest.role.value} (stage {guest.stage})"
            text = f"{guest.name}, {role}, begins its deed: {guest.deed.name}"
            self._begun(guest.deed.name, guest.node, text)

    def _in_role(self, guest: Guest) -> bool:
        member = guest.name in self.world.leading().peer.ctx.run.membership.members
        if guest.role is GuestRole.STRANGER:
            return bool(guest.node.links) and not member
        if guest.deed.early:
            return member
        return guest.serves if guest.role is not GuestRole.ADMITTED else member and not guest.serves

    def starts_again(self, name: str) -> bool:
        """True if a process that was removed from the run is started again: always if it is honest, else as
        the guest's plan has drawn it."""
        guests = [guest.name for guest in self.guests]
        return name not in guests or self._plans[guests.index(name)].returns

    # --- demands -------------------------------------------------------------------------------

    def done(self, steps: int) -> bool:
        """True if no guest is to come or to begin its deed any more, and the time of all deeds is over:
        STEPS_UNDER_ATTACK steps since each began, CARRIES_S since a carrier began. A guest that is not in its
        role after ARRIVES_S begins none."""
        if len(self.guests) < len(self._plans):
            return False
        if any(self.world.clock.now < until for until in self._left.values()):
            return False
        if any(self.world.clock.now < since + CARRIES_S for since, _ in self._carries_since.values()):
            return False
        return all(steps >= t + STEPS_UNDER_ATTACK for t in self._first_t.values())

    def check_end(self) -> None:
        """Raise Violation at the end of a seed if a guest whose deed can be proven was never removed after it
        (G3); for false work only if all of the guest's work is audited and enough honest replicas could audit
        a step in which it lied. Or if a pair of honest peers met at a harmful carrier more than TAKEN times
        (G5)."""
        for name, (_, before) in self._carries_since.items():
            for (carrier, pair), made in (self.world.circuits_made - before).items():
                if carrier == name and made > TAKEN and self.world.liars.isdisjoint(pair):
                    raise Violation("G5", f"{' and '.join(sorted(pair))} meet at {name} {made} times")
        for guest in self.guests:
            proven = guest.role in guest.deed.proven and guest.name in self._first_t
            if guest.deed.audited:
                # Some step in which it lied counts its work, and enough honest replicas could audit that:
                # fewer convict nobody (the log goes back).
                audits = (each for each in self._audits if each[1] == guest.name)
                enough = (len(able) >= least for _, _, able, least in audits)
                all_audited = self.world.settings.audit_share == 1.0 or guest.role is GuestRole.WALK_IN
                proven = proven and all_audited and any(enough)
            if proven and guest.name not in self.put_out:
                raise Violation("G3", f"{guest.name} still has its seat: {guest.deed.name}")

    def _heard(self, node: Node, event: ev.Event) -> None:
        """Check an event of the peer `node`: raise Violation if a guest whose role is to serve nothing
        receives a piece of another stage's state (G4). A stranger that applies may have been admitted, and
        have served, before it began its deed: states that the leader had it keep then may still arrive after
        it was moved to another stage."""
        message = event.message if isinstance(event, ev.Received) else None
        if node.id in self.world.liars and node.peer.joining.step is Step.READY:
            self._had_states.add((node.id, node.member.incarnation))
        if not isinstance(message, Keep | Piece):
            return
        members = self.world.leading().peer.ctx.run.membership.members
        for guest in (guest for guest in self.guests if guest.name == node.id):
            state = guest.name, message.stage, message.t
            if isinstance(message, Keep):
                if guest.serves:
                    self._keeps.add(state)
                continue
            admitted = guest.role is GuestRole.ADMITTED or guest.name in members
            needs = guest.serves or (admitted and message.stage == guest.stage) or state in self._keeps
            if guest.role in APART and not needs:
                raise Violation("G4", f"{node.id} gets the state of stage {message.stage}")

    def _note_audits(self, commit: Commit) -> None:
        """Record in `_audits` the guests that computed falsely in a committed step which counts their work,
        with the honest replicas that may audit it."""
        for guest in self.guests:
            if ("false work", commit.t) not in guest.told:
                continue
            for stage in commit.stages:
                if dict(zip(stage.members, stage.receipts, strict=False)).get(guest.name):
                    able = set(stage.members) - self.world.liars
                    self._audits.append((commit.t, guest.name, able, convicts(len(stage.members))))

    def _in_time(self) -> None:
        silence_s = self.world.clock.now - self._committed_at
        if self._first_t and silence_s > self._pace_s:
            raise Violation("G1", f"no step in {silence_s:.0f} virtual seconds under attack")

    def _read_log(self, steps: int) -> None:
        for line in self.world.log[self._log_read :]:
            record = decode_entry(line).record
            if isinstance(record, Commit):
                self._committed_at = self.world.clock.now
                self._note_audits(record)
                if record.verdict == "skip" and self._plans:
                    raise Violation("G1", f"step {record.t} is skipped on a false word")
            elif isinstance(record, Members):
                self._removed(record)
                self._seated(record, steps)
        self._log_read = len(self.world.log)

    def _removed(self, record: Members) -> None:
        self._outnumbered(record)
        for member in record.joined:
            relay = member.id in self.world.liars and self.world.nodes[member.id].member.stage > 0
            if relay and member.stage == 0:
                raise Violation("G4", f"{member.id}, which has a relay's ticket, becomes a data node")
        moved = {member.id for member in record.joined}
        for peer, reason in record.removed.items():
            node = self.world.nodes.get(peer)
            for t, _, able, _ in self._audits:
                if t > self._steps() - AUDIT_STEPS:
                    able.discard(peer)
            if peer in self.world.liars:
                if peer in self._first_t:
                    self.put_out.setdefault(peer, reason)
            elif self.guests and peer not in moved and node is not None and _goes_on(node):
                raise Violation("G2", f"{peer}, which is honest, is removed: {reason}")

    def _outnumbered(self, record: Members) -> None:
        """Check a Members record: raise Violation if it admits a walk-in to a stage where invited members are
        then no majority (G4)."""
        members = self.world.history().membership.members.values()
        for stage in {member.stage for member in record.joined if member.walk_in is True}:
            here = [member.walk_in is True for member in members if member.stage == stage]
            if 2 * sum(here) >= len(here):
                raise Violation("G4", f"{sum(here)} of {len(here)} members of stage {stage} are walk-ins")

    def _seated(self, record: Members, steps: int) -> None:
        """Check a Members record: raise Violation if a guest comes to serve by it that never had its stage's
        state, although the leader hears an honest replica that could say so (G4). Before the first step
        (`steps` = 0) it may."""
        context = self.world.leading().peer.ctx
        for guest in self.guests:
            node = guest.node
            had = (node.id, node.member.incarnation) in self._had_states
            if had or node.id not in record.active_from or node.peer.joining.step is not Step.FETCHING:
                continue
            honest = set(context.run.membership.serving(guest.stage)) - self.world.liars
            if steps and any(peer == context.me or context.reachable(peer) for peer in honest):
                raise Violation("G4", f"{guest.name} comes to serve stage {guest.stage} without its state")


def _goes_on(node: Node) -> bool:
    """True if nothing outside the protocol ended this process of a member: it runs, or has given up with an
    error. If the run removes the member then, that is the guests' doing."""
    return node.running or (node.alive and node.stopped is not None and not node.stopped[1])
