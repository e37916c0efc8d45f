"""Result of a chaos experiment, as text and as plain values for JSON (docs/reference/formats.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from anabranch.node.chaos.metrics import VERSION, Metrics, Spread
from anabranch.node.chaos.run_record import RunRecord
from anabranch.node.chaos.wasted_compute import WastedCompute


@dataclass(frozen=True)
class Settings:
    """Settings of the experiment, as the user gave them. population: number of relays over `stages` stages.
    seed: of the faults. minutes: of the run with faults; calm_minutes: of each run without. freeze, hostile:
    shares of the faults that are freezes, and hostile guests. wan: emulated network, or "". preset: system
    whose settings the run has, or ""."""

    population: int
    stages: int
    data_nodes: int
    seed: int
    minutes: float
    calm_minutes: float
    faults_per_minute: float
    freeze: float
    wan: str
    run_directory: str
    hostile: float = 0.0
    preset: str = ""


@dataclass(frozen=True)
class Verdict:
    """Result of recomputing the run (`anabranch verify`). exact: True if the run promises every bit and keeps
    the promise. steps: number of steps that were recomputed. text: the last line of the report, or why there
    is none."""

    exact: bool
    steps: int
    text: str


@dataclass(frozen=True)
class Result:
    """Result of the experiment: the run with faults (record, metrics, verify), and those without (`calm`) to
    compare with. same_as_calm: True if all steps that the runs without faults have in common with it are the
    same there, bit for bit; None if they were not compared: there are no such runs, or they have rounds."""

    setting: Settings
    record: RunRecord
    metrics: Metrics
    verify: Verdict
    calm: list[RunRecord] = field(default_factory=list)
    same_as_calm: bool | None = None

    @property
    def problems(self) -> list[str]:
        """Reasons why the experiment failed; empty if it succeeded."""
        found = [self.record.stuck] if self.record.stuck else []
        if not self.verify.exact:
            found.append(f"the run differs from that of a single process: {self.verify.text}")
        if self.metrics.steps <= 0:
            found.append("no step was committed")
        if self.same_as_calm is False:
            found.append("the steps of the runs without faults differ")
        if lost := self.metrics.hostile.lost:
            found.append(f"honest members lost their seats: {', '.join(lost)}")
        return found

    @property
    def kept(self) -> float | None:
        """Throughput as a share of that without faults: in tokens of the steps taken if known, else in steps;
        None: unknown."""
        metrics, seconds = self.metrics, sum(record.seconds for record in self.calm)
        if (tokens := sum(record.tokens for record in self.calm)) and self.record.seconds:
            return self.record.tokens / self.record.seconds / (tokens / seconds)
        steps = sum(record.steps for record in self.calm)
        return metrics.steps / metrics.seconds / (steps / seconds) if steps and metrics.seconds else None

    def as_dict(self) -> dict[str, Any]:
        metrics: dict[str, Any] = msgspec.to_builtins(self.metrics)
        calm = [{"seconds": record.seconds, "steps": record.steps} for record in self.calm]
        return {
            "version": VERSION,
            "survived": not self.problems,
            "problems": self.problems,
            "setting": msgspec.to_builtins(self.setting),
            **metrics,
            "steps_after_last_fault": self.record.after_last,
            "calm": calm,
            "throughput_kept": self.kept,
            "same_as_calm": self.same_as_calm,
            "verify": msgspec.to_builtins(self.verify),
        }

    def lines(self) -> list[str]:
        setting, metrics, faults = self.setting, self.metrics, self.metrics.faults
        kinds = ", ".join(f"{count} {kind}" for kind, count in faults.delivered.items()) or "none"
        lines = [
            f"chaos: {setting.population} relays over {setting.stages} stages, {setting.data_nodes} data "
            f"nodes; {metrics.seconds:.0f} s, {setting.faults_per_minute:g} faults per minute, "
            f"seed {setting.seed}" + (f", links as in {setting.wan}" if setting.wan else ""),
            f"faults delivered: {faults.total} ({kinds}), {faults.processes} processes hit",
        ]
        for kind, reasons in faults.undelivered.items():
            lines += [f"not delivered: {count} {kind}: {reason}" for reason, count in reasons.items()]
        rate = metrics.steps / metrics.seconds if metrics.seconds else 0.0
        lines += [
            f"iterations: {metrics.steps} committed, {rate:.2f} per second; {metrics.rolled_back} rolled "
            f"back (rollbacks: {metrics.rollbacks}); {self.record.after_last} after the last fault",
            self._throughput_line(),
            "seconds from a fault (median, 95th percentile) to",
        ]
        for how, recovery in metrics.recovery.items():
            lines += [
                f"  {how}: its microbatch's next hop    {_spread(recovery.next_hop)}",
                f"  {how}: the next commit              {_spread(recovery.commit)}",
                f"  {how}: an active replacement        {_spread(recovery.replaced)}",
            ]
        lines += [
            f"{metrics.repaired} microbatches repaired, {metrics.removed} peers removed; without a fault "
            f"suspected {metrics.falsely_suspected}, removed {metrics.falsely_removed} "
            f"({metrics.peer_hours:.1f} peer-hours)",
            _wasted_line(metrics.compute),
        ]
        lines += metrics.hostile.lines()
        if self.same_as_calm is not None:
            same = "are the same, bit for bit" if self.same_as_calm else "DIFFER"
            lines.append(f"steps that the runs without faults committed, too, {same}")
        lines.append(self.verify.text)
        lines += [f"failed: {problem}" for problem in self.problems]
        return lines

    def _throughput_line(self) -> str:
        if self.kept is None:
            return "throughput kept: not measured (no run without faults)"
        each = " and ".join(f"{calm.steps / calm.seconds:.2f}" for calm in self.calm if calm.seconds)
        return f"throughput kept: {100 * self.kept:.0f} % of the same run without faults ({each} per second)"


def _spread(spread: Spread) -> str:
    if not spread.count:
        return "-"
    return f"{spread.median:.2f}  {spread.p95:.2f}  (maximum {spread.most:.2f}, {spread.count} measured)"


def _wasted_line(waste: WastedCompute) -> str:
    def percent(seconds: float) -> str:
        return f"{100 * waste.share(seconds):.2f} %"

    return (
        f"compute wasted: {percent(waste.wasted_s)} of {waste.computed_s:.0f} s; lost with a killed peer "
        f"{percent(waste.killed_s)}, due to a frozen peer {percent(waste.frozen_s)}, rolled back "
        f"{percent(waste.rolled_back_s)}, other {percent(waste.other_s)}"
    )
