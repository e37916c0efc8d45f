"""A run of a local swarm for a given time, with or without faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from anabranch.checkpoint.directory import RunDirectory
from anabranch.config import RunConfig
from anabranch.node.chaos.fault_injector import ChaosSwarm, FaultInjector
from anabranch.node.chaos.fault_schedule import PlannedFault
from anabranch.node.chaos.run_record import RunRecord
from anabranch.node.local_swarm.local_swarm import LEADER
from anabranch.node.local_swarm.supervisor import Supervisor
from anabranch.observe.wording import duration

if TYPE_CHECKING:
    from anabranch.net.wan.places import Place

#: Steps that must be committed, with the whole population active, before the clock starts.
WARM_UP_STEPS = 3
#: Steps that must be committed after the last fault.
STEPS_AFTER = 3
#: Seconds without a commit after which a swarm is given up: longer than any wait that the protocol allows.
STUCK_S = 120.0
#: Seconds after the last fault within which honest members must have their seats again: a removed one joins
#: again in some seconds, and a ban of half a minute must not keep it out.
SEATS_S = 60.0
#: Seconds that the leader may take to end the run.
STOP_S = 90.0


class _GivenUp(Exception):
    """Raised to break off a run that does not progress or end; the message is the reason."""


class _Timer:
    """Clock of a run with faults: starts the injector's clock once all peers are active and WARM_UP_STEPS
    steps are committed, stops it after `length_s` seconds, and ends the run once STEPS_AFTER steps are
    committed since the last fault, the leader serves and the seats are taken again (`_stop_when_settled`).
    `poll`, which does so, must be called about ten times a second."""

    def __init__(self, swarm: ChaosSwarm, injector: FaultInjector, length_s: float) -> None:
        self._swarm, self._injector, self._length_s = swarm, injector, length_s
        self._progress_at = time.time()
        self._t = -1
        self._stop_at = 0.0

    def poll(self) -> None:
        """Do what is due: start the injector's clock, stop it, or end the run. Called about ten times a
        second. Raises _GivenUp if the swarm hangs."""
        injector, record, now = self._injector, self._injector.record, time.time()
        t = injector.tracker.t
        if t != self._t:
            self._t, self._progress_at = t, now
        if not record.began:
            if t >= WARM_UP_STEPS and injector.complete:
                injector.begin()
        elif not record.ended:
            if now >= record.began + self._length_s:
                injector.end()
        elif not self._stop_at and record.after_last >= STEPS_AFTER and LEADER in injector.tracker.serving:
            self._stop_when_settled(now)
        if record.began:
            injector.poll()
        if self._stop_at and now > self._stop_at:
            raise _GivenUp(f"the run did not stop within {duration(STOP_S)}")
        if not self._stop_at and now > self._progress_at + STUCK_S:
            raise _GivenUp(f"nothing was committed for {duration(STUCK_S)} after step {t}")

    def _stop_when_settled(self, now: float) -> None:
        """If all seats are taken again, or SEATS_S have passed since the last fault: complete the record, and
        ask the leader to end the run, within STOP_S. Else nothing."""
        if self._injector.settled or now > self._injector.record.ended + SEATS_S:
            self._injector.close()
            self._stop_at = now + STOP_S
            self._swarm.stop()


def timed_run(
    directory: RunDirectory,
    config: RunConfig,
    supervisor: Supervisor,
    schedule: Sequence[PlannedFault],
    length_s: float,
    say: Callable[[str], None],
    places: Mapping[str, Place] | None = None,
) -> RunRecord:
    """Start a swarm, inject faults for `length_s` seconds once all its peers are active, and end it. config:
    its run file. supervisor: starts its processes. schedule: the faults, by seconds after the clock starts.
    say: prints a sentence for the user. places: as in `LocalSwarm`. Returns the record; its `stuck` has the
    reason if the run hung or ended too early. All processes are killed at the end. Raises UserError or
    LeaderFailed if the swarm cannot start."""
    swarm = ChaosSwarm(directory, config, supervisor, places=places, ledgers=True)
    try:
        swarm.start()
        injector = FaultInjector(swarm, schedule, say)
        timer = _Timer(swarm, injector, length_s)
        try:
            for event in swarm.events(timer.poll):
                injector.on_event(event)
            if not injector.record.ended:
                injector.record.stuck = "the run ended before its time"
        except _GivenUp as reason:
            injector.record.stuck = str(reason)
            if injector.record.began and not injector.record.ended:
                injector.end()
        return injector.record
    finally:
        swarm.kill()  # also kills peers that were not admitted any more
