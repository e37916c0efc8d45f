"""Driver of one live peer: feeds messages, timers and results to the protocol, and carries out its effects.

The protocol takes every decision; the driver owns sockets, files, worker threads and the clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from anabranch.background import background
from anabranch.checkpoint.proof_files import write_proof
from anabranch.errors import UserError
from anabranch.net.connection_limits import limits_of_run
from anabranch.net.errors import VANISHED
from anabranch.net.handshake import Credential
from anabranch.net.link import Link
from anabranch.net.tcp.transport import SHUTDOWN, TcpTransport
from anabranch.node.driver.allocator import free_cycles, settle
from anabranch.node.driver.checkpoint_io import CheckpointIo, StageCopy
from anabranch.node.driver.compute_ledger import Ledger
from anabranch.node.driver.connections import Connections
from anabranch.node.driver.crash_report import CrashReport
from anabranch.node.driver.event_writer import EventWriter
from anabranch.node.driver.raft_storage import RaftStorage
from anabranch.node.driver.state_cache import StateCache, kept_text
from anabranch.node.driver.vitals import VitalsMonitor
from anabranch.node.driver.worker_thread import Computer, WorkerThread
from anabranch.observe.event_log import piece_of
from anabranch.observe.events import Checkpoint
from anabranch.protocol.context.rate_limits_and_bans import RateLimits
from anabranch.protocol.interface import events as ev
from anabranch.protocol.interface.tasks import PIECE_BYTES, Payload, Result, Task
from anabranch.protocol.log.records import Genesis
from anabranch.protocol.peer.peer import Peer

#: Seconds between an event and the earliest wake-up after it, so that an overdue timer cannot spin the loop.
MIN_WAKE_S = 0.001
#: Reason with which a peer closes its links once the log has ended the run: who has only begun to join, and
#: follows no log yet, learns by it that the run is over.
RUN_OVER = "the run is over"
#: Seconds that a peer which ends may take to write its stage's state to its cache. A choice: a disk writes a
#: few GB meanwhile, and a user who waits presses Ctrl+C again.
KEEP_S = 30.0


def says_run_over(reason: str) -> bool:
    """True if `reason`, that of a LinkDown, ends with RUN_OVER, the reason of a peer at the end of the run.
    Which side gave it is not checked."""
    return reason.endswith(RUN_OVER)


class Machine(Protocol):
    """This machine's compute, for the driver. Both methods run on the worker thread and may import torch."""

    def describe(self, genesis: Genesis) -> ev.Described:
        """This machine's offer to the run of `genesis`: measured capacity and speed, and its settings. Raises
        UserError if the user has to act first."""

    def build(self, stage: int) -> tuple[Computer, str]:
        """Make the worker that computes a stage. Returns the worker in its initial state and the fingerprint
        of that state; "" if the initial state must first be fetched from other peers."""


@dataclass(frozen=True)
class Outcome:
    """End of a peer's part in the run. reason: sentence for the user.

    ok: as planned. internal: by a defect of the program or an exhausted machine, after which a new process
    may go on. again: this machine may join the run again with the same ticket. unreached: the run could not
    be reached. terminated: it was told to leave before the run was over, by SIGTERM, its hours or a pause.
    over: the run is over, all of its steps are committed.
    """

    reason: str
    ok: bool
    internal: bool = False
    again: bool = False
    unreached: bool = False
    terminated: bool = False
    over: bool = False


class LivePeer:
    """Runs one peer of the protocol (`Peer`) on this machine, over real connections, threads and files.
    make_transport: makes the transport, given the callback that takes over links dialled by other peers.
    credential: shown to the peers that it dials. events_path: of its event log, beside which a crash report
    lies. checkpoints: at the founder only; it alone writes the run's event log, too (`EventWriter`). disk: on
    peers that may vote. cache: for the stage's state when this peer ends. nice: priority of its computing
    (`lower_priority`), not of its messages. watchers: called after each event, once the protocol has handled
    it. listeners: called with each effect, before it is carried out."""

    def __init__(
        self,
        peer: Peer,
        machine: Machine,
        make_transport: Callable[[Callable[[Link], None]], TcpTransport],
        credential: Credential,
        events_path: Path,
        checkpoints: CheckpointIo | None = None,
        disk: RaftStorage | None = None,
        cache: StateCache | None = None,
        nice: int = 0,
    ) -> None:
        self.peer = peer
        self._cache = cache
        self._hurry = asyncio.Event()
        self.machine = machine
        self._loop = asyncio.get_running_loop()
        self._packer = WorkerThread(self._deliver, self._failed, nice)
        transport = make_transport(lambda link: self.links.accept(link))
        seated = lambda other: other in peer.ctx.run.membership.members  # noqa: E731
        self.links = Connections(transport, self.handle, credential, self._packer.submit, seated)
        transport.on_refused = self._connection_refused
        if transport.engine is not None:
            transport.engine.on_path = lambda peer, path: self.handle(ev.PathChanged(peer, path))
        self.watchers: list[Callable[[LivePeer, ev.Event], None]] = []
        self.listeners: list[Callable[[ev.Effect], None]] = []
        self.journal = EventWriter(
            peer.ctx.me,
            checkpoints is not None,
            peer.ctx.run.membership,
            events_path,
            lambda lines: self.handle(ev.Observed(lines)),
        )
        self._crash_report = CrashReport(events_path.parent)
        self._vitals = VitalsMonitor(peer.ctx, transport.engine.paths if transport.engine is not None else {})
        self._checkpoints = checkpoints
        self._worker = WorkerThread(self._deliver, self._failed, nice)
        self._disk = WorkerThread(self._deliver, self._failed)
        self._computer: Computer | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._ledger = Ledger.from_environment()
        self._raft_storage = disk
        self._sent_before: Counter[str] = Counter()

    # --- running -------------------------------------------------------------------------------

    async def run(self, dial: tuple[str, str] | None = None) -> Outcome:
        """Run until this peer ends, by its protocol, by `finish` or by a failure, which is an Outcome, too,
        and not raised; then close its links, threads and files. The stage's state is written to the cache,
        but not after a failure or an abort; once the run is over the cache is emptied instead
        (`_keep_state`). Meanwhile the loop's exception handler is this peer's. To be called once. dial: (peer
        id, addresses) to dial first, or None."""
        settle()
        self._loop.set_exception_handler(self._loop_failed)
        self.handle(ev.Started())
        if dial is not None:
            self.links.dial(*dial)
        try:
            return await self._outcome
        finally:
            if self._timer is not None:
                self._timer.cancel()
            with contextlib.suppress(OSError):
                await self.links.close(self._farewell())
            await self._keep_state()
            for thread in (self._worker, self._packer, self._disk):
                thread.close()
            self.journal.close()
            self._crash_report.close()
            self._loop.set_exception_handler(None)

    @property
    def running(self) -> bool:
        return not self._outcome.done()

    def stop(self, reason: str) -> None:
        """Ask the protocol, at the user's request, to leave the run cleanly, and return; `run` returns once
        it has left. reason: for the outcome and the other peers."""
        self.handle(ev.Stopping(reason))

    def abort(self, reason: str) -> None:
        """End this peer at once: without waiting for the current step, telling the run, or keeping the
        stage's state. reason: sentence of the outcome, which is not ok, unless there is one already."""
        self._hurry.set()
        self.finish(Outcome(reason, ok=False))

    def handle(self, event: ev.Event) -> None:
        """Feed one event to the protocol and carry out the effects that it returns; nothing once this peer
        has ended. An exception ends this peer: after half an event its state is worth nothing. The exception
        is caught here, as asyncio would take an OSError for an error of the connection and let the peer go
        on."""
        if self._outcome.done():
            return
        try:
            self._handle(event)
        except Exception:
            self._failed(traceback.format_exc())

    def _handle(self, event: ev.Event) -> None:
        iteration = self.peer.iteration
        self.journal.open_t = 0 if iteration is None else iteration.t
        for effect in self.peer.handle(event, self._loop.time()):
            self._carry_out(effect)
        self._vitals.watch(event)
        for watcher in self.watchers:
            watcher(self, event)
        self._plan_wake()
        if not isinstance(event, ev.Observed):
            self.journal.flush()

    def _connection_refused(self, kind: str, host: str, reason: str) -> None:
        """Write an event about refused incoming connections of a kind, with the host and reason of this one,
        at some of their counts only (`RateLimits.is_noted`); none if the caller vanished in the handshake."""
        count = self.links.transport.refusals[kind]
        if kind != VANISHED and RateLimits.is_noted(count):
            why = f"a connection from {f'[{host}]' if ':' in host else host}: {reason}"
            self.journal.note("refused", {"subject": "", "reason": why, "count": count})

    def _plan_wake(self) -> None:
        deadline = self.peer.deadline()
        if deadline >= self._timer_at and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        at = max(deadline, self._loop.time() + MIN_WAKE_S)
        self._timer = self._loop.call_at(at, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._timer_at = float("inf")
        self.handle(ev.Wake())

    def _deliver(self, action: Callable[[], None]) -> None:
        """Run an action on the event loop; called by other threads. Dropped once the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End this peer (`_failed`) for an exception that reached the event loop from a callback or a task;
        `context` is asyncio's description of it. An exception about a connection is only printed: asyncio
        closes the connection on whose bytes its code failed."""
        error = context.get("exception")
        if error is None or not {"transport", "protocol", "socket"}.isdisjoint(context):
            loop.default_exception_handler(context)
            return
        self._failed("".join(traceback.format_exception(type(error), error, error.__traceback__)))

    def _failed(self, text: str) -> None:
        """End this peer because of an unexpected exception with the traceback `text`, wherever it was raised
        (event, callback, task or thread), and write the crash report; it may join again. Nothing once this
        peer has ended."""
        if self._outcome.done():
            return
        where = self._crash_report.write(text)
        last = text.strip().splitlines()[-1].removeprefix("anabranch.errors.UserError: ")
        self.finish(Outcome(f"this peer failed: {last} ({where})", ok=False, internal=True, again=True))

    def _farewell(self) -> str:
        """Reason that this peer gives when it closes its links at its end: RUN_OVER if the run is over, else
        SHUTDOWN."""
        over = self._outcome.done() and self._outcome.result().over
        return RUN_OVER if over else SHUTDOWN

    def finish(self, outcome: Outcome) -> None:
        """End this peer's part in the run: `run` returns the first outcome given here."""
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    async def _keep_state(self) -> None:
        """Write the stage's state to the cache, for this machine's next process, within KEEP_S; empty the
        cache if the run is over. Neither if this peer failed, has to end at once, ended otherwise than
        planned and may not join again, or has applied no step."""
        cache, peer = self._cache, self.peer
        if cache is None or not cache.most_bytes or not self._outcome.done() or self._hurry.is_set():
            return
        outcome, computer, t = self._outcome.result(), self._computer, peer.replica.t
        run, stage = peer.ctx.run.settings.run, peer.ctx.run.stage
        if outcome.internal or not (outcome.ok or outcome.again) or computer is None or t <= 0:
            return
        if outcome.over:
            with contextlib.suppress(OSError):
                cache.clear()
            return
        own = peer.states.find(stage, t)
        copy = None if own is None else ev.KeptState(t, own.fingerprint, own.pieces, own.hashes)
        kept: asyncio.Future[str] = self._loop.create_future()
        self._worker.submit(
            lambda: kept_text(cache, computer, run, stage, t, copy, self._hurry.is_set),
            lambda text: None if kept.done() else kept.set_result(text),
        )
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait((kept, hurry), timeout=KEEP_S, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        self._hurry.set()  # a write that still goes on is given up
        if kept.done():
            self.journal.note("note", {"text": kept.result()})

    # --- effects -------------------------------------------------------------------------------

    def _carry_out(self, effect: ev.Effect) -> None:
        for listener in self.listeners:
            listener(effect)
        match effect:
            case ev.Send(peer, message, payload):
                self.links.send(peer, message, payload)
            case ev.Run(task, inputs):
                self._run(task, inputs)
            case ev.Dial(peer, address):
                self.links.dial(peer, address)
            case ev.HangUp(peer, reason):
                self.links.hang_up(peer, reason)
            case ev.Note(kind, fields):
                self._note(kind, fields)
            case ev.Reported(peer, lines) if peer != self.peer.ctx.me:
                self.journal.merge(peer, lines)
            case ev.Persist(number):
                self._disk.submit(lambda: self._persist(effect), lambda _: self.handle(ev.Persisted(number)))
            case ev.Describe(genesis):
                self._worker.submit(
                    lambda: self._describe(genesis), lambda found: self._described(genesis, found)
                )
            case ev.BuildStage(stage):
                self._worker.submit(lambda: self.machine.build(stage), lambda b: self._built(stage, b))
            case ev.Admitted(_, certificate):
                if certificate:
                    self.links.credential = certificate
            case ev.DialBack(peer, addresses):
                background(self._dial_back(peer, addresses))
            case ev.ReadEvents(peer, position):
                background(self._read_events(peer, position))
            case ev.ReadCheckpoint(t, stage):
                self._disk.submit(lambda: self._read_checkpoint(t, stage), self.handle)
            case ev.WriteCheckpoint(t, base, stages):
                copies = dict(stages)
                self._disk.submit(lambda: self._write_checkpoint(t, base, copies), self.handle)
            case ev.Stop(reason, ok, again, over):
                self.finish(Outcome(reason, ok, again=again, over=over))

    async def _dial_back(self, peer: str, addresses: str) -> None:
        reached, reason = await self.links.dial_back(peer, addresses)
        self.handle(ev.DialledBack(peer, addresses, reached, reason))

    async def _read_events(self, peer: str, position: int) -> None:
        """Read a piece of the event log (`piece_of`) from byte `position` on for the watcher `peer`, and hand
        the piece to the protocol. A pool thread reads it, as writes wait for the disk thread."""
        found = await self._loop.run_in_executor(None, piece_of, self.journal.path, position)
        self.handle(ev.EventsRead(peer, position, *found))

    def _run(self, task: Task, inputs: tuple[Payload, ...]) -> None:
        computer = self._computer
        assert computer is not None, "the protocol computes only after StageBuilt"

        def done(result: Result) -> None:
            if self._ledger is not None:
                ctx = self.peer.ctx
                self._ledger.add(task, ctx.run.stage, ctx.run.settings.microbatches, result.seconds)
            if result.error:
                self.journal.note("note", {"text": f"{type(task).__name__}: {result.error}"})
            self.handle(ev.Finished(task, result))

        self._worker.submit(lambda: computer.run(task, inputs), done)

    def _describe(self, genesis: Genesis) -> ev.Described | UserError:
        """This machine's offer to the run of `genesis`, or the error that says what its user has to do first;
        called on the worker thread."""
        try:
            return self.machine.describe(genesis)
        except UserError as error:
            return error

    def _described(self, genesis: Genesis, described: ev.Described | UserError) -> None:
        if isinstance(described, UserError):
            self.finish(Outcome(str(described), ok=False))
            return
        settings = described.settings
        limits = limits_of_run(
            genesis.parameters, settings.largest_share, settings.boundary_bytes, PIECE_BYTES
        )
        self.links.transport.use_limits(limits)
        settle()  # a joining peer has imported torch only now
        self.handle(described)

    def _built(self, stage: int, built: tuple[Computer, str]) -> None:
        self._computer, fingerprint = built
        run, cache = self.peer.ctx.run.settings.run, self._cache
        kept = None if cache is None else cache.load(run, stage)  # maps the file, and reads its header
        self.handle(ev.StageBuilt(stage, fingerprint, kept))

    def _note(self, kind: str, fields: Mapping[str, object]) -> None:
        if kind == "timing":
            sent = self.links.sent_bytes - self._sent_before
            activations, sums = sent["Forward"] + sent["Backward"], sent["ReducePart"] + sent["ReducedPart"]
            self._sent_before = self.links.sent_bytes.copy()
            fields = {
                **fields,
                "bytes_activations": activations,
                "bytes_reduce": sums,
                **self._vitals.end_iteration(fields),
            }
            self._loop.call_soon(free_cycles)  # a step was applied: earlier ones are garbage
            self._vitals.write_if_due(self.journal.write)
        if kind == "audit" and fields["verdict"] == "different":
            self._disk.submit(lambda: self._write_proof(fields), lambda _: None)
        self.journal.note(kind, fields)

    # --- on the disk thread --------------------------------------------------------------------

    def _persist(self, write: ev.Persist) -> None:
        assert self._raft_storage is not None
        self._raft_storage.do(write)

    def _write_proof(self, finding: Mapping[str, Any]) -> None:
        """Write the proof file of an auditor's finding; a full disk costs the proof, not the run."""
        try:
            write_proof(self.journal.path.parent, self.peer.ctx.run.settings.run, finding)
        except OSError as error:
            text = f"a proof is not written: {error.strerror}"
            self._deliver(lambda: self.journal.note("note", {"text": text}))

    def _read_checkpoint(self, t: int, stage: int) -> ev.Event:
        assert self._checkpoints is not None
        try:
            return self._checkpoints.read(t, stage)
        except UserError as error:
            self._deliver(lambda text=str(error): self.journal.note("note", {"text": text}))  # type: ignore[misc]
            return ev.CheckpointRead(t, t, stage, "", ())

    def _write_checkpoint(self, t: int, base: str, stages: Mapping[int, StageCopy]) -> ev.Event:
        assert self._checkpoints is not None
        try:
            path = self._checkpoints.write(t, base, stages)
        except (UserError, OSError) as error:
            return ev.CheckpointFailed(t, str(error))
        written = Checkpoint(peer=self.peer.ctx.me, t=t, path=str(path))
        self._deliver(lambda: self.journal.write(written))
        return ev.CheckpointWritten(t, base)
