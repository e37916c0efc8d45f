"""Checks of invariants I1 to I6 after every event of a simulated run (docs/explanation/invariants.md).

`Invariants(world)` installs the checks; a violation raises from inside the event that caused it. With a
`GroundTruth` every state and every committed value is compared with the result of a single machine (I3). I7
(no message crashes a peer) needs no check here: the exception leaves `World.run`.
"""

from __future__ import annotations

from typing import Protocol

from anabranch.protocol import messages as msg
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface import tasks
from anabranch.protocol.log.records import Commit, Genesis, Rollback, StageCommit, decode_entry, entry_hash
from anabranch.protocol.peer.shared_state import Progress
from anabranch.protocol.rounds.plan import (
    Plan,
    Slots,
    active,
    counted,
    next_plan_problem,
    slots_of,
    units_of,
    with_owners,
)
from anabranch.sim.checks.resource_bounds import check_account, check_bounds, check_plan, cycle
from anabranch.sim.kernel.simulated_peer import Node
from anabranch.sim.kernel.swarm_world import World
from anabranch.sim.kernel.violation import Violation

#: Kinds of notes after which microbatches of that iteration may be computed twice without violating I6.
_TROUBLE = ("suspected", "peer_removed", "refused")
#: Events between two searches for a cycle of the wait-for graph; a deadlock does not go away.
CYCLE_EVERY = 64
#: Messages that do not change slots.
_CHANGE_NO_SLOTS = frozenset({msg.Ping, msg.Pong, msg.Route, msg.Report})


class GroundTruth(Protocol):
    """Results of a single machine, with which a swarm's are compared. A key, of any type, stands for the
    state after a history of steps taken and skipped."""

    first: object
    """Key of the initial state."""

    def after(self, key: object, t: int, stepped: bool, slots: Slots, plan: Plan) -> object:
        """Key of the state after iteration t, made of the state with `key`. stepped: False if t was skipped.
        slots, plan: in a round, the slots that count and the plan of all; both empty otherwise."""
        ...

    def fingerprints(self, key: object, t: int) -> tuple[str, ...]:
        """Fingerprint of each stage from 0 on in the state with `key`, which is one after iteration t."""
        ...

    def step(self, key: object, t: int, slots: Slots) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """(digest of each stage's gradient, loss of each microbatch or counted slot) of iteration t, taken
        from the state with `key`. slots: those that count in a round; empty otherwise."""
        ...


class Invariants:
    """Observer of a world that checks the invariants after every event, and raises Violation from it. truth:
    results to compare with (None: I3 is not checked). t: last committed iteration. forgives: True if relays
    compute falsely: then a false step is no violation at once, but the log must go back before it
    (`false_from`). computed: (base, t, stage, unit) -> processes (id, incarnation) that added the weight
    gradient of the unit (a microbatch's share of the gradient sum) to their sum. applied: (base, stage, t) ->
    first peer that reached the state after t, and its fingerprint. A base is the hash of the log entry that
    an iteration starts from."""

    def __init__(self, world: World, truth: GroundTruth | None = None) -> None:
        self.world = world
        self.truth = truth
        self.t = 0
        self.forgives = False
        self._bases: list[tuple[int, str]] = []
        """Commits that were not rolled back: (iteration, hash of the log entry)."""
        self.computed: dict[tuple[str, int, int, int], set[tuple[str, int]]] = {}
        self.applied: dict[tuple[str, int, int], tuple[str, str]] = {}
        self._keys: dict[str, tuple[int, object]] = {}
        self._plans: dict[str, Plan] = {}
        """Base -> plan of the iteration that starts from it; () if that is no round."""
        self._first_plan: dict[int, Plan] = {}
        """Round -> its plan as a commit had it."""
        self._chain: dict[int, str] = {}
        self._positions: dict[Node, int] = {}
        self._log_read, self._former = 0, len(world.log)
        self._notes_read = 0
        self._assembled: dict[tuple[int, int, str], set[str]] = {}
        self._repair_free: dict[tuple[Node, int], bool] = {}
        self._progress = Progress()
        """Progress along the world's log, for the bases of delayed iterations."""
        self._repaired: set[tuple[object, object]] = set()
        self._troubled: set[int] = set()
        self._events = 0
        world.watchers.append(self)

    def __call__(self, node: Node, event: ev.Event) -> None:
        world = self.world
        if len(world.notes) > self._notes_read:
            self._read_notes()
        message = type(event.message) if isinstance(event, ev.Received) else None
        if message not in _CHANGE_NO_SLOTS:
            check_bounds(node)
            self._repair_slot(node, event)
        if isinstance(event, ev.Received):
            if message is msg.Slots and event.peer not in world.liars:
                check_account(world, node, event.peer)
        elif isinstance(event, ev.Finished):
            self._finished(node, event)
        elif isinstance(event, ev.LinkUp | ev.LinkDown):
            check_plan(node, event.peer)
        if node.peer.progress.position.index != self._positions.get(node):
            self._one_history(node)
        if len(world.log) > self._log_read:
            self._read_log()
        self._events += 1
        if self._events % CYCLE_EVERY == 0 and (found := cycle(world)):
            raise Violation("I5", "they wait for each other: " + " -> ".join(found))

    def _read_notes(self) -> None:
        """Record from the peers' new notes which microbatches were repaired and which iterations had trouble:
        only their work may be computed twice (I6)."""
        notes = self.world.notes
        for _, peer, kind, fields in notes[self._notes_read :]:
            if kind == "repair":
                self._repaired.add((fields.get("t"), fields.get("index")))
            elif kind in _TROUBLE:
                node = self.world.nodes.get(peer)
                iteration = node.peer.iteration if node is not None else None
                self._troubled.update({self.t + 1, self.t + 2, iteration.t if iteration else 0})
        self._notes_read = len(notes)

    def _repair_slot(self, node: Node, event: ev.Event) -> None:
        """Check an event of `node` against I5, or raise Violation: an asked peer grants its repair slot only
        to a microbatch that is sent again after a loss."""
        message = event.message if isinstance(event, ev.Received) else None
        for place, iteration in enumerate(node.peer.iterations.in_flight):
            before, now = self._repair_free.get((node, place), True), iteration.credits.ledger.repair_free
            self._repair_free[node, place] = now
            if not isinstance(message, msg.Ask) or message.fence.t != iteration.t:
                continue
            if before and not now and not message.repair:
                raise Violation("I5", f"{node.id} gives its repair slot to a microbatch that needs no repair")

    # --- a peer's work -------------------------------------------------------------------------

    def _finished(self, node: Node, event: ev.Finished) -> None:
        task, result, stage = event.task, event.result, node.peer.ctx.run.stage
        if isinstance(task, tasks.WeightGradient):
            iteration = node.peer.iterations.at(task.t)
            if iteration is not None and not (result.error or result.overflow):
                self._added(node, iteration.base, stage, task)
        elif isinstance(task, tasks.Assemble) and task.witness is not None:
            return
        elif isinstance(task, tasks.Assemble) and node.peer.replica.all_reduce.prepared is not None:
            self._assembled.setdefault((task.t, stage, result.digest), set()).add(node.id)
        elif isinstance(task, tasks.Apply | tasks.Skip | tasks.LoadState) and not result.error:
            self._check_state(node, stage)
            if isinstance(task, tasks.LoadState):
                self._dropped(node, stage, task.t)

    def _dropped(self, node: Node, stage: int, loaded_t: int) -> None:
        """Forget that a process added units of iterations after `loaded_t` at `stage`, since its worker
        dropped them when it loaded the state after `loaded_t`. (With two iterations in flight there may be
        some.) Units that it added at a stage that it served before stay, as their sums may have been sent."""
        process = (node.id, node.member.incarnation)
        for (_, t, of_stage, _), processes in self.computed.items():
            if t > loaded_t and of_stage == stage:
                processes.discard(process)

    def _added(self, node: Node, base: str, stage: int, task: tasks.WeightGradient) -> None:
        t, unit = task.t, task.unit
        processes = self.computed.setdefault((base, t, stage, unit), set())
        process = (node.id, node.member.incarnation)
        if process in processes:
            raise Violation("I1", f"{node.id} added unit {unit} of {t} at stage {stage} twice")
        processes.add(process)
        if len(processes) > 1 and t not in self._troubled:
            index = unit // 2 if stage == 0 else unit
            if (t, index) not in self._repaired:
                who = " and ".join(sorted(peer for peer, _ in processes))
                raise Violation("I6", f"unit {unit} of {t} at stage {stage} was computed by {who} unprovoked")

    def _check_state(self, node: Node, stage: int) -> None:
        """Check the state that `node` has reached, or raise Violation: it is that of the other replicas after
        the same log entry (I2), and that of one machine (I3)."""
        replica, base = node.peer.replica, node.peer.replica.base
        if replica.t < 0 or not base:
            return
        peer, known = self.applied.setdefault((base, stage, replica.t), (node.id, replica.fingerprint))
        if known != replica.fingerprint:
            raise Violation("I2", f"after {replica.t} {node.id} and {peer} of stage {stage} differ")
        if self.truth is None or base not in self._keys:
            return
        t, key = self._keys[base]
        if t != replica.t or self.truth.fingerprints(key, t)[stage] != replica.fingerprint:
            text = f"{node.id} of stage {stage} is not in the state that one machine has after {replica.t}"
            raise Violation("I3", text)

    # --- the log -------------------------------------------------------------------------------

    def _one_history(self, node: Node) -> None:
        """Check the log that `node` has followed, or raise Violation (I4): no other peer has another entry in
        its place."""
        position = node.peer.progress.position
        self._positions[node] = position.index
        known = self._chain.setdefault(position.index, position.previous)
        if known != position.previous:
            raise Violation("I4", f"{node.id} has another entry {position.index - 1} of the log: a fork")

    def _read_log(self) -> None:
        for number, line in enumerate(self.world.log[self._log_read :], start=self._log_read):
            record, base = decode_entry(line).record, entry_hash(line)
            if isinstance(record, Commit | Rollback):
                self._planned(record, base)
            if isinstance(record, Commit):
                if number >= self._former:
                    self._exactly_once(record)
                self._equal(record, base)
                self._bases.append((record.t, base))
                self._progress.rebase(base, record.t)
                self.t = record.t
            elif isinstance(record, Genesis):
                self._progress.rebase(base, 0)
                if self.truth is not None:
                    self._keys[base] = (0, self.truth.first)
            elif isinstance(record, Rollback):
                self._progress.rebase(base, record.t)
                self.t = record.t
                self._bases = [each for each in self._bases if each[0] <= record.t]
                false = any(t == record.t and former not in self._keys for t, former in self._bases)
                keys = [key for t, key in self._keys.values() if t == record.t]
                if keys and not false:  # else the step to which the run returns is false itself
                    self._keys[base] = (record.t, keys[-1])
        self._log_read = len(self.world.log)

    @property
    def false_from(self) -> int:
        """First committed step still in the log that is false, or follows a false one; 0 if there is none."""
        if self.truth is None:
            return 0
        return next((t for t, base in self._bases if base not in self._keys), 0)

    def _planned(self, record: Commit | Rollback, base: str) -> None:
        """Record the plan of the next round in a log record, whose hash is `base`. Raises Violation (I1)
        unless over rounds each inner step counts exactly once: a slot's counter rises by the steps that
        counted, and by no others; a rollback plans the same steps as were planned before."""
        plan = record.slots or ()
        self._plans[base] = plan
        if isinstance(record, Rollback):
            inner = [(slot.done, slot.steps) for slot in plan]
            known = [(slot.done, slot.steps) for slot in self._first_plan.get(record.t + 1, ())]
            if inner != known:
                raise Violation("I1", f"the rollback to {record.t} changes the steps of round {record.t + 1}")
            return
        before = self._plans.get(record.previous_base, ())
        if wrong := next_plan_problem(before, plan, record):
            raise Violation("I1", f"after round {record.t}: {wrong}")
        self._first_plan[record.t + 1] = plan

    def _exactly_once(self, commit: Commit) -> None:
        """Check a commit, or raise Violation (I1): at every stage the owners' units are the whole batch (in a
        round active slots, the same at every stage), each was added to its owner's sum, and no loss is
        missing. Nothing is checked for a skipped step."""
        if commit.verdict != "step":
            return
        if any(loss != loss for loss in commit.loss_sums):
            raise Violation("I1", f"iteration {commit.t} is committed without some of its losses")
        bases = {commit.previous_base}
        if self.world.settings.delay.has(commit.t):
            bases.add(self._progress.base_of(commit.t, True))
        for stage, entry in enumerate(commit.stages):
            plan = self._plans.get(commit.previous_base, ())
            units = units_of(stage, range(len(plan))) if plan else self.world.settings.cover(stage)
            counts = {unit for unit, owner in enumerate(entry.owners) if owner >= 0}
            allowed = units_of(stage, active(plan)) if plan else units
            if not counts or not (counts <= allowed if plan else counts == units):
                raise Violation("I1", f"units {sorted(counts)} count at stage {stage} of {commit.t}")
            if plan and counts != units_of(stage, counted(commit.stages[1].owners)):
                raise Violation("I1", f"the slots that count in round {commit.t} differ by stage")
            if len(entry.owners) != len(units):
                text = f"{len(entry.owners)} units are covered at stage {stage} of {commit.t}"
                raise Violation("I1", text)
            for unit in sorted(counts):
                owner = entry.members[entry.owners[unit]]
                added = {p for b in bases for p in self.computed.get((b, commit.t, stage, unit), ())}
                if all(peer != owner for peer, _ in added):
                    raise Violation("I1", f"{owner} owns unit {unit} of {commit.t} and never added it")
            self._prepared(commit, stage, entry)

    def _prepared(self, commit: Commit, stage: int, entry: StageCommit) -> None:
        """Check a commit at one stage (`entry`), or raise Violation (I4): two of its live replicas (or the
        only one) have the reduced gradient, so that one may be lost."""
        awake = [node for node in self.world.nodes.values() if node.running and not node.frozen]
        # A frozen former leader may lag.
        reader = max(awake, key=lambda node: node.peer.progress.position.index)
        live = reader.peer.ctx.run.membership.live(stage, commit.t)
        prepared = self._assembled.get((commit.t, stage, entry.digest), set())
        if len(prepared & set(live)) < min(2, len(live)):
            who = ", ".join(sorted(prepared)) or "nobody"
            raise Violation("I4", f"step {commit.t} is committed when of stage {stage} {who} is PREPARED")

    def _equal(self, commit: Commit, base: str) -> None:
        """Check a commit, or raise Violation (I3): its gradients and losses equal those of a single machine.
        Records the state that follows, under the commit's hash `base`. With `forgives` a false step raises
        nothing and has no state, and steps after it are not checked."""
        if self.truth is None or commit.previous_base not in self._keys:
            return
        _, key = self._keys[commit.previous_base]
        stepped = commit.verdict == "step"
        plan = with_owners(self._plans.get(commit.previous_base, ()), commit)
        slots = slots_of(plan, commit)
        if self.world.settings.rounds.private and stepped and slots:
            said = commit.stages[1].contributions
            if any(not said[slot] for slot in slots):
                raise Violation("I3", f"a contribution to round {commit.t} has no digest in the log")
        if stepped:
            digests, losses = self.truth.step(key, commit.t, slots)
            logged = [commit.loss_sums[slot] for slot in sorted(slots) or range(len(commit.loss_sums))]
            wrong = [stage for stage, entry in enumerate(commit.stages) if entry.digest != digests[stage]]
            if (wrong or tuple(logged) != losses) and self.forgives:
                return
            if wrong:
                text = f"the gradient of stage {wrong[0]} in step {commit.t} is not the sum over its batch"
                raise Violation("I3", text)
            if tuple(logged) != losses:
                raise Violation("I3", f"the losses of step {commit.t} are not those of its batch")
        self._keys[base] = (commit.t, self.truth.after(key, commit.t, stepped, slots, plan))
