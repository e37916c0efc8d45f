"""Trial of one seed: builds the swarm, injects the faults, checks the invariants, and demands progress.

Not here: how a fault is injected (`injectors`) and how its phase is recognised (`peer_phases`).
"""

from __future__ import annotations

import time
from functools import partial

from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import AUDIT_STEPS
from anabranch.sim.checks.carried_links import CarriedLinks
from anabranch.sim.checks.invariants import Invariants
from anabranch.sim.fuzz.fault_kinds import Role, kind_named
from anabranch.sim.fuzz.guest_deeds import DEEDS
from anabranch.sim.fuzz.hostile_guests import PACE_S, HostileGuests
from anabranch.sim.fuzz.injectors import INJECTORS
from anabranch.sim.fuzz.liveness_conditions import can_be_lost, unmet
from anabranch.sim.fuzz.peer_phases import CARRYING, OF_CHOSEN, OF_JOINERS, phase_for
from anabranch.sim.fuzz.seed_drawing import DrawnSeed, FaultTarget
from anabranch.sim.fuzz.swarm_under_test import SwarmUnderTest
from anabranch.sim.fuzz.world_builder import build
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.violation import Violation
from anabranch.sim.metrics.trial_result import DeliveredFaults, Outcome
from anabranch.sim.metrics.wasted_compute import WastedCompute
from anabranch.sim.network.lined_world import LinedWorld

#: Steps that must be committed after the last fault is over, and virtual seconds that each may take (more
#: if every message takes long).
STEPS_AFTER, QUIET_S = 3, 400.0
#: Steps that may follow a false one, if all is audited, before a rollback: twice an audit's time.
FALSE_STEPS = 2 * AUDIT_STEPS
#: Virtual seconds without progress after which the conditions of progress are checked.
LOOK_S = 90.0
#: A planned fault that finds no victim in its phase in so many seconds, or steps, is injected in any phase.
#: After twice as many the fault is dropped.
SETTLE_FOR_S, SETTLE_FOR_STEPS = 12.0, 8
#: Greatest number of events of a seed, messages of guests left out, and of a virtual second on average; with
#: more than both allow the peers are considered to be in a livelock. Choices: a swarm of 25 slow peers, in
#: which nothing was wrong, had 1,470 a second for 138 s.
EVENTS_MAX, EVENTS_PER_S = 200_000, 2_000
#: Iterations with churn, in profiles that have it.
CHURN_STEPS = 3
#: Seconds after which the owner restarts a process that was removed from the run.
START_AGAIN_S = 2.0
#: Seconds for which a leader is frozen so that another peer is elected, or is down, and data nodes are
#: frozen, so that a relay is elected.
LEADER_FROZEN_S, LEADER_DOWN_S, OTHERS_FROZEN_S = 12.0, 6.0, 2.0
#: Seconds between two attempts to cause an election.
ELECT_AGAIN_S = 0.5


class SeedTrial:
    """Trial of one seed; `run` may be called once, and returns the outcome, also of a violation or of an
    unexpected error (as I7). story: (virtual time, text) of faults and other actions; notes of the peers are
    in `world.notes`. steps: last committed iteration."""

    def __init__(self, drawn: DrawnSeed) -> None:
        self.drawn = drawn
        self.world, truth = build(drawn)
        self.swarm = SwarmUnderTest(drawn, self.world)
        self.swarm.add_auditors()
        self.invariants = Invariants(self.world, truth)
        self.world.watchers.append(self._watch)
        self.waste = WastedCompute(self.world)
        self.story: list[tuple[float, str]] = []
        self.outcome = Outcome(drawn.seed, drawn.profile.name, drawn.torch, len(drawn.machines))
        self._hostile = drawn.profile.guests or drawn.profile.name == "storm"
        self._slower = 1.0 + 20.0 * drawn.model.latency_s[1] + 5.0 * drawn.payload_s
        self.carried: CarriedLinks | None = None
        if isinstance(self.world, LinedWorld):
            self.carried = CarriedLinks(self.world, drawn.profile.carriers, self._slower)
        rng, pace_s = self.swarm.rng, PACE_S * self._slower
        self.guests = HostileGuests(self.world, drawn.guests, rng, self._deed_begun, pace_s)
        self.world.strict = not self._hostile
        self.invariants.forgives = any(DEEDS[plan.deed].audited for plan in drawn.guests)
        self._pending = [_PendingFault(aim) for aim in drawn.aims]
        self.steps = self._quiet_t = 0
        self._busy_until = self._progress_at = 0.0
        self._events = self._said = 0
        """Number of events, and of messages of guests among them."""
        self._churning = CHURN_STEPS if drawn.profile.churn else 0
        self.world.clock.after(START_AGAIN_S, self._supervise)

    # --- the run -------------------------------------------------------------------------------

    def run(self) -> Outcome:
        begin, outcome = time.process_time(), self.outcome
        try:
            self._simulate()
        except Violation as violation:
            self._violated(violation.invariant, str(violation))
        except Exception as error:
            self._violated("I7", f"I7: {type(error).__name__}: {error}")
        outcome.steps, outcome.events = self.invariants.t, self._events
        outcome.virtual_s, outcome.cpu_s = self.world.clock.now, time.process_time() - begin
        outcome.computed_s, outcome.wasted_s = self.waste.computed_s, self.waste.wasted_s
        return outcome

    def _violated(self, invariant: str, text: str) -> None:
        self.outcome.invariant, self.outcome.violation = invariant, text
        self.story.append((self.world.clock.now, f"VIOLATION {text}"))

    def _simulate(self) -> None:
        clock, slower = self.world.clock, self._slower
        look_at = LOOK_S * slower
        while clock.step():
            done = not self._pending and not self._churning and self.steps >= self._quiet_t + STEPS_AFTER
            done = done and clock.now >= self._busy_until and self.guests.done(self.steps)
            done = done and (self.carried is None or self.carried.done())
            if done and self._is_true():
                self.guests.check_end()
                return
            quiet_since = max(self._busy_until, self._progress_at)
            if clock.now > look_at and clock.now > quiet_since + LOOK_S * slower:
                look_at = clock.now + LOOK_S * slower
                if clock.now > quiet_since + QUIET_S * slower or unmet(self.world, self.invariants.t):
                    break
        self._stuck()

    def _is_true(self) -> bool:
        """True if no committed step in the log is false, or if less than all work is audited (then false
        steps may stay). Raises Violation (I3) for a false step after which FALSE_STEPS steps were
        committed."""
        false_from = self.invariants.false_from
        if not false_from or self.world.settings.audit_share < 1.0:
            return True
        if self.steps >= false_from + FALSE_STEPS:
            raise Violation("I3", f"step {false_from} is false, and the log did not go back before it")
        return False

    def _stuck(self) -> None:
        """Handle a run without progress: raise Violation (I4) if all conditions of I4 hold, else record those
        that do not in outcome and story."""
        self.outcome.unmet = unmet(self.world, self.invariants.t)
        if not self.outcome.unmet:
            waiting = [str(f.get("reason")) for _, _, kind, f in self.world.notes if kind == "waiting"][-1:]
            raise Violation(
                "I4",
                f"no step in {self.world.clock.now - self._progress_at:.0f} virtual seconds after step "
                f"{self.steps}; the run says: {''.join(waiting) or 'nothing'}",
            )
        self.story.append((self.world.clock.now, f"no progress is promised: {'; '.join(self.outcome.unmet)}"))

    # --- watching ------------------------------------------------------------------------------

    def _watch(self, node: Node, event: ev.Event) -> None:
        self._events += 1
        self._said += isinstance(event, ev.Received) and event.peer in self.world.liars
        events = self._events - self._said
        if events > EVENTS_MAX and events > EVENTS_PER_S * self.world.clock.now:
            raise Violation("I4", f"{events} events: the peers go round in a circle")
        self.swarm.listen(node, event)
        if self.invariants.t != self.steps:
            self.steps, self._progress_at = self.invariants.t, self.world.clock.now
            self._committed()
        if self.drawn.guests:
            self.guests.look(node, self.steps)
        for pending in self._pending:
            if pending.aim.after_t <= self.steps and pending.attempt(self, node):
                break

    def _committed(self) -> None:
        for pending in self._pending:
            if pending.aim.phase in OF_CHOSEN and pending.aim.after_t <= self.steps:
                for node in sorted(self.world.nodes.values(), key=lambda node: node.id):
                    if pending.attempt(self, node):
                        break
        if self._churning and self.steps >= self.drawn.first_t:
            self._churning -= 1
            self._churn()

    def _churn(self) -> None:
        """Draw for each peer, with the profile's probability, a time within the next second at which it
        crashes. It does not if it is no relay then, or if the run could not go on without it."""
        rng = self.swarm.rng
        for name in sorted(self.world.nodes):
            if rng.random() < self.drawn.profile.churn:
                self.world.clock.after(rng.uniform(0.0, 1.0), partial(self._hit, name))

    def _hit(self, name: str) -> None:
        node = self.world.nodes[name]
        if self.eligible("crash", node):
            self.strike("crash", node)

    def eligible(self, kind: str, node: Node) -> bool:
        """True if a fault of this kind may hit this peer now: its process runs unfrozen, the peer serves or
        has asked for a stage, it has one of the kind's roles, and the run can go on without it
        (`can_be_lost`) if the fault loses its state."""
        if not node.running or node.frozen or (node.peer.replica.t < 0 and node.member.stage < 0):
            return False
        wanted = kind_named(kind)
        if self.role(node) not in wanted.roles:
            return False
        return not wanted.loses or can_be_lost(self.world, node, self.invariants.t)

    def role(self, node: Node) -> Role:
        if node.peer.lead is not None:
            return Role.LEADER
        return Role.RELAY if node.stage else Role.DATA

    def strike(self, kind: str, node: Node, aimed: str = "") -> bool:
        """Inject a fault of this kind into this peer now and record it. False, and nothing is recorded, if
        the injector could not. aimed: planned phase ("": none)."""
        phase = phase_for(self.world, node, self.invariants.t, aimed)
        done = INJECTORS[kind](self.swarm, node)
        if done is None:
            return False
        text, seconds = done
        now = self.world.clock.now
        self._busy_until = max(self._busy_until, now + seconds)
        if seconds:
            self.world.clock.after(seconds, self._fault_over)
        self._delivered(kind, phase, node, text, aimed)
        return True

    def _deed_begun(self, deed: str, node: Node, text: str) -> None:
        self._delivered(deed, phase_for(self.world, node, self.invariants.t, ""), node, text, "")

    def _delivered(self, kind: str, phase: str, node: Node, text: str, aimed: str) -> None:
        """Record an injected fault in outcome and story; STEPS_AFTER steps must follow it. phase: phase of
        its victim `node` at that moment. text: the fault in words. aimed: the planned phase."""
        now, self._quiet_t = self.world.clock.now, self.steps
        self.outcome.faults.append(DeliveredFaults(kind, phase, now, node.id, text, aimed=aimed))
        self.waste.struck(self.outcome.faults[-1])
        self.story.append((now, f"FAULT ({phase}) {text}"))

    def _fault_over(self) -> None:
        self._quiet_t = max(self._quiet_t, self.steps)

    def drop(self, pending: _PendingFault) -> None:
        """Remove a planned fault from those that wait: it was injected, or found no victim in time. The seed
        may end once none waits."""
        self._pending.remove(pending)

    # --- elections and restarts ----------------------------------------------------------------

    def cause_election(self, relay_wins: bool) -> bool:
        """Cause an election: freeze the leader for LEADER_FROZEN_S, or, with relay_wins, restart it and
        freeze the other data nodes, so that a relay wins. False, and nothing happens, if there is one voter,
        or the leader is frozen or cannot be lost now."""
        world, leader = self.world, self.world.leading()
        several = len(leader.peer.ctx.log.voters) > 1
        if not several or leader.frozen or not can_be_lost(world, leader, self.invariants.t):
            return False
        if not relay_wins:
            self._freeze(leader, LEADER_FROZEN_S)
            return True
        self._prepare(f"{leader.id} crashes and starts again {LEADER_DOWN_S:g} s later", LEADER_DOWN_S)
        world.crash(leader.id)
        world.clock.after(LEADER_DOWN_S, lambda: self.swarm.restart(leader))
        for node in sorted(world.nodes.values(), key=lambda node: node.id):
            if node.running and not node.frozen and not node.stage:
                self._freeze(node, OTHERS_FROZEN_S)
        return True

    def _freeze(self, node: Node, seconds: float) -> None:
        self._prepare(f"{node.id} freezes for {seconds:g} s", seconds)
        self.world.freeze(node.id, seconds)

    def _prepare(self, text: str, seconds: float) -> None:
        """Record in the story an action that prepares a planned fault, and keep the seed from ending until
        the action is over. text: the action in words. seconds: its duration."""
        now = self.world.clock.now
        self.story.append((now, text))
        self._busy_until = max(self._busy_until, now + seconds)

    def _supervise(self) -> None:
        """Restart processes that exited with an error (guests only by their plan), and let joiners that lost
        their links dial the leader again, as the command `anabranch join` does; then again every
        START_AGAIN_S."""
        for node in sorted(self.world.nodes.values(), key=lambda node: node.id):
            if node.alive and node.stopped is not None and not node.stopped[1]:
                if not self.guests.starts_again(node.id):
                    continue
                self.story.append((self.world.clock.now, f"{node.id} is started again: {node.stopped[0]}"))
                self.swarm.restart(node)
            elif node.running and not node.links and not node.peer.shared.entry.done:
                self.world.dial(node, node.peer.ctx.log.leader)
        self.world.clock.after(START_AGAIN_S, self._supervise)


class _PendingFault:
    """Planned fault that waits until a peer that it may hit is in the planned phase. aim: its plan."""

    def __init__(self, aim: FaultTarget) -> None:
        self.aim = aim
        self._skip, self._delay_s = aim.skip, aim.delay_s
        self._since: float | None = None
        self._since_t = 0
        self._scheduled = False
        self._elect_at = 0.0 if aim.elects else float("inf")

    def attempt(self, trial: SeedTrial, node: Node) -> bool:
        """Try the peer `node`, which has just handled an event, as the victim. If it fits, the fault is
        injected after its delay (`_inject`); nothing happens while one injection is pending. The first call
        lets a machine join for a phase of OF_JOINERS; an election is caused if the fault needs one. Returns
        True if the fault was dropped from the trial, because it found no victim in time; else False."""
        now = trial.world.clock.now
        if self._since is None:
            self._since, self._since_t = now, trial.steps
            if self.aim.phase in OF_JOINERS:
                trial.swarm.newcomer(trial.swarm.rng.randint(1, trial.world.settings.stages))
        self._elect(trial, now)
        if self._scheduled:
            return False
        waited = self._waited(trial)
        if waited > 2.0:
            trial.drop(self)
            return True
        if not self._meets(trial, node) or not trial.eligible(self.aim.kind, node):
            return False
        self._skip -= 1
        if self._skip >= 0 and waited < 0.5:
            return False
        self._scheduled = True
        trial.world.clock.after(self._delay_s, lambda: self._inject(trial, node))
        return False

    def _elect(self, trial: SeedTrial, now: float) -> None:
        """Cause the election that the fault needs (`SeedTrial.cause_election`), once; if that is not
        possible, try again ELECT_AGAIN_S later. The fault's time to find a victim begins anew with the
        election. Nothing if it needs none."""
        if now < self._elect_at:
            return
        if trial.cause_election(self.aim.of_leading_relays):
            self._elect_at, self._since, self._since_t = float("inf"), now, trial.steps
        else:
            self._elect_at = now + ELECT_AGAIN_S

    def _waited(self, trial: SeedTrial) -> float:
        """Time that the fault has waited for a victim, in units of what it may take: seconds / SETTLE_FOR_S
        or steps / SETTLE_FOR_STEPS, whichever is more. From 1 on any phase will do, for faults of carriers
        apart."""
        since = self._since or 0.0
        steps = (trial.steps - self._since_t) / SETTLE_FOR_STEPS
        return max((trial.world.clock.now - since) / SETTLE_FOR_S, steps)

    def _meets(self, trial: SeedTrial, node: Node) -> bool:
        phase, world = self.aim.phase, trial.world
        if phase == CARRYING:
            return isinstance(world, LinedWorld) and world.carries_work(node.id)
        return self._waited(trial) >= 1.0 or phase_for(world, node, trial.invariants.t, phase) == phase

    def _inject(self, trial: SeedTrial, node: Node) -> None:
        meets = self._meets(trial, node) and trial.eligible(self.aim.kind, node)
        if meets and trial.strike(self.aim.kind, node, self.aim.phase):
            trial.drop(self)
        else:
            self._scheduled, self._delay_s = False, 0.0
