"""Metrics of a simulated run: a row per iteration, and summaries over seeds with confidence intervals."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from anabranch.protocol.interface.delay import LEAST_START
from anabranch.sim.cluster.scenario import Fleet
from anabranch.sim.kernel.clock import Clock
from anabranch.sim.metrics.lower_bound import LowerBound, download_s
from anabranch.sim.metrics.phase_breakdown import COMPUTED, PHASES
from anabranch.sim.network.drift import Drift

VERSION = 1
#: Quantiles of Student's t (two-sided, 95 %) for 1, 2, ... degrees of freedom, and for more.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
STUDENT_MANY = 2.1


class Row(msgspec.Struct):
    """Metrics of one simulated iteration; all seconds are virtual. seconds: from the previous step to this
    one. bound_s: lower bound with the relays that were alive (`LowerBound.overlapped_s` where two iterations
    are in flight; NaN in rounds). crashes: of relays. spared: crashes that were drawn but did not happen,
    because the relay was the last of its stage. recoveries: microbatches sent again. computed_s, wasted_s:
    seconds that all nodes computed for microbatches, and those whose result entered no step; died_s: wasted
    seconds that were lost with a crashed process. busy_s, alive_s: seconds of computing and of being alive,
    summed over the relays. communicating_s: seconds in which a relay had a payload in flight that it sent
    (mean). twice: contributions that a gradient contains beyond the first. messages, kinds: control messages,
    in all and by kind. message_bytes, payload_bytes: bytes of these and of payloads. phases: see
    `phase_breakdown`; phases and kinds are empty for baselines. microbatches: number that count (0: the
    batch)."""

    t: int
    seconds: float
    bound_s: float
    computed_s: float
    wasted_s: float
    busy_s: float
    alive_s: float
    communicating_s: float
    crashes: int
    spared: int
    recoveries: int
    twice: int
    messages: int
    message_bytes: float
    payload_bytes: float
    phases: dict[str, float] = {}
    died_s: float = 0.0
    kinds: dict[str, int] = {}
    microbatches: int = 0


class Outcome(msgspec.Struct):
    """Result of one simulated seed under one policy. rows: one per committed iteration, in order; an
    iteration that is committed again after a rollback has the row of its first commit. rollbacks: number in
    the log. failure: reason why the run did not finish, or is wrong; "" if neither. alone_tokens_per_s:
    tokens per second of the fleet's best machine, if it trained the whole model alone. carried_bytes: bytes
    that hosts carried for others, by host (those that carried none are left out)."""

    policy: str
    seed: int
    rows: list[Row]
    rollbacks: int = 0
    failure: str = ""
    alone_tokens_per_s: float = 0.0
    carried_bytes: dict[str, float] = {}


class Estimate(msgspec.Struct):
    """Mean over seeds, and half the width of its 95 % confidence interval (0 with one seed)."""

    mean: float
    half: float


class MetricsRecorder:
    """Recorder of a simulated run's metrics: `add` counts, `commit` makes the row of an iteration. rows:
    metrics of the committed iterations. totals: sums since the beginning of the run."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self.fleet, self.clock = replace(fleet, drift=Drift()), clock
        self._clairvoyant = LowerBound(self.fleet)
        self.rows: list[Row] = []
        self.relays = [host.id for host in fleet.hosts.values() if host.stage]
        self.totals: dict[str, float] = dict.fromkeys(_SUMS, 0)
        self._before = dict(self.totals)
        self._kinds: dict[str, int] = {}
        self._begun_at = 0.0
        self._down_at = dict.fromkeys(sorted(fleet.trace.absent), 0.0)
        self._missed_s = dict.fromkeys(self.relays, 0.0)
        self._able_at = dict.fromkeys(self.relays, 0.0)

    def add(self, what: str, amount: float = 1) -> None:
        """Add `amount` to the total named `what`, a field of `Row` that is a sum (a key of `totals`)."""
        self.totals[what] += amount

    def down(self, relay: str) -> None:
        """Record that a relay crashed now; it counts as absent until `up`."""
        self.add("crashes")
        self._down_at.setdefault(relay, self.clock.now)

    def up(self, relay: str) -> None:
        """Record that a relay's machine is back now. It counts as alive, and for the lower bound once it
        could have downloaded its state. Nothing happens if it was not down."""
        at = self._down_at.pop(relay, None)
        if at is not None:
            self._missed_s[relay] += self.clock.now - max(at, self._begun_at)
            self._able_at[relay] = self.clock.now + download_s(self.fleet, relay)

    def commit(
        self,
        t: int,
        members: Mapping[int, Sequence[str]],
        totals: Mapping[str, float] | None = None,
        phases: Mapping[str, float] | None = None,
        kinds: Mapping[str, int] | None = None,
    ) -> Row:
        """Append the row of iteration t, which ends now, to `rows` and return it; the next iteration begins.
        members: stage -> replicas whose sums entered the step. totals: sums that the caller counts itself, by
        name; kinds: control messages by kind; both since the beginning of the run. phases: seconds of each
        phase of this iteration."""
        now, seconds = self.clock.now, self.clock.now - self._begun_at
        self.totals.update(totals or {})
        for relay, at in self._down_at.items():
            self._missed_s[relay] += now - max(at, self._begun_at)
            self._down_at[relay] = now
            self._able_at[relay] = now
        alive = {relay: max(0.0, seconds - missed) for relay, missed in self._missed_s.items()}
        # A relay in the sum contributed all its time; any other one only since it has the state again.
        counted = {name for names in members.values() for name in names}
        able = {
            relay: alive[relay] if relay in counted else max(0.0, now - max(at, self._begun_at))
            for relay, at in self._able_at.items()
        }
        shares = {relay: each / seconds for relay, each in able.items()}
        sums: dict[str, Any] = {key: self.totals[key] - self._before[key] for key in _SUMS}
        sums |= {key: round(sums[key]) for key in _COUNTS}
        sums["communicating_s"] /= max(1, len(self.relays))
        counts = {stage: len(names) for stage, names in members.items()}
        islands = self.fleet.scenario.round.slots and t > self.fleet.scenario.round.start
        overlap = self.fleet.scenario.run.delay and t > LEAST_START
        least = self._clairvoyant.overlapped_s if overlap else self._clairvoyant.bound_s
        bound = math.nan if islands else least(shares, counts)
        alive_s, phases = sum(alive.values()), dict(phases or {})
        sent = {kind: count - self._kinds.get(kind, 0) for kind, count in (kinds or {}).items()}
        self._kinds = dict(kinds or {})
        row = Row(t=t, seconds=seconds, bound_s=bound, alive_s=alive_s, phases=phases, kinds=sent, **sums)
        self.rows.append(row)
        self._before, self._begun_at = dict(self.totals), now
        self._missed_s = dict.fromkeys(self.relays, 0.0)
        return row


_COUNTS = ("crashes", "spared", "recoveries", "twice", "messages")
_SUMS = (
    *_COUNTS, "computed_s", "wasted_s", "died_s", "busy_s", "communicating_s", "message_bytes",
    "payload_bytes",
)  # fmt: skip


def _microbatches(rows: Sequence[Row], microbatches: int) -> float:
    """Mean number of microbatches per iteration whose results entered the step. microbatches: of a batch, for
    rows that give no number."""
    return statistics.mean(row.microbatches or microbatches for row in rows)


def _mean(key: str, rows: Sequence[Row], *unused: int) -> float:
    return float(statistics.mean(getattr(row, key) for row in rows))


def _phase(name: str, rows: Sequence[Row], *unused: int) -> float:
    return statistics.mean(row.phases.get(name, 0.0) for row in rows)


#: Reported figures: name -> function of a run's counted rows, microbatches and tokens per microbatch.
FIGURES: dict[str, Callable[[Sequence[Row], int, int], float]] = {
    "iteration_s": lambda rows, m, n: _mean("seconds", rows),
    "bound_s": lambda rows, m, n: _mean("bound_s", rows),
    "over_bound": lambda rows, m, n: _mean("seconds", rows) / _mean("bound_s", rows),
    "seconds_per_microbatch": lambda rows, m, n: _mean("seconds", rows) / _microbatches(rows, m),
    "tokens_per_s": lambda rows, m, n: _microbatches(rows, m) * n / _mean("seconds", rows),
    "communicating_s": lambda rows, m, n: _mean("communicating_s", rows),
    "utilisation": lambda rows, m, n: _share(rows, "busy_s", "alive_s"),
    "wasted_s": lambda rows, m, n: _mean("wasted_s", rows),
    "wasted_share": lambda rows, m, n: _share(rows, "wasted_s", "computed_s"),
    "died_share": lambda rows, m, n: _share(rows, "died_s", "computed_s"),
    "beyond_share": lambda rows, m, n: (
        _share(rows, "wasted_s", "computed_s") - _share(rows, "died_s", "computed_s")
    ),
    **{key: partial(_mean, key) for key in (*_COUNTS, "message_bytes", "payload_bytes")},
    **{name: partial(_phase, name) for name in (*PHASES, *COMPUTED)},
}


class Summary(msgspec.Struct):
    """Summary of a policy over its seeds, without warm-up iterations. seeds: number of seeds that finished.
    iterations: of these seeds together. figures: estimate of each of FIGURES, of the tokens per second of the
    best machine alone (`alone_tokens_per_s`), and of the swarm's over these (`over_alone`). failures: a line
    for each seed that failed. kinds: control messages per node and iteration, by kind."""

    policy: str
    seeds: int
    iterations: int
    figures: dict[str, Estimate]
    failures: list[str]
    kinds: dict[str, float] = {}


def summary(outcomes: Sequence[Outcome], fleet: Fleet) -> Summary:
    """Summary of the outcomes of one policy, one at least. Figures are of the seeds that finished with more
    iterations than the warm-up; `failures` has a line for each seed that failed. fleet: of any of the seeds,
    for the sizes of the scenario."""
    model, warm_up = fleet.scenario.model, fleet.scenario.run.warm_up
    tokens = fleet.scenario.work.tokens
    counted = [o.rows[warm_up:] for o in outcomes if not o.failure and len(o.rows) > warm_up]
    figures = {
        name: estimate([figure(rows, model.microbatches, tokens) for rows in counted])
        for name, figure in FIGURES.items()
    }
    alone = [o.alone_tokens_per_s for o in outcomes if not o.failure and len(o.rows) > warm_up]
    figures["over_alone"] = estimate(
        [
            FIGURES["tokens_per_s"](rows, model.microbatches, tokens) / rate if rate else math.nan
            for rows, rate in zip(counted, alone, strict=True)
        ]
    )
    figures["alone_tokens_per_s"] = estimate(alone)
    failures = [f"seed {o.seed}: {o.failure}" for o in outcomes if o.failure]
    iterations = sum(map(len, counted))
    kinds: Counter[str] = Counter()
    for row in itertools.chain(*counted):
        kinds.update(row.kinds)
    of_each = {kind: count / iterations / len(fleet.hosts) for kind, count in kinds.most_common()}
    return Summary(outcomes[0].policy, len(counted), iterations, figures, failures, of_each)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % confidence interval from one value per seed (Student's t); NaN without values, an
    interval of 0 with one value."""
    if not values:
        return Estimate(math.nan, 0.0)
    mean, degrees = statistics.mean(values), len(values) - 1
    if not degrees:
        return Estimate(mean, 0.0)
    student = STUDENT[degrees - 1] if degrees <= len(STUDENT) else STUDENT_MANY
    return Estimate(mean, student * statistics.stdev(values) / math.sqrt(len(values)))


def _share(rows: Sequence[Row], part: str, whole: str) -> float:
    total = sum(getattr(row, whole) for row in rows)
    return float(sum(getattr(row, part) for row in rows) / total) if total else 0.0
