"""Plots of a run from its event log: `loss` and `throughput`, each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import mul
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from scipy.signal import lfilter

from anabranch.errors import UserError, os_errors_named
from anabranch.observe import events as log
from anabranch.observe.event_log import read_events
from anabranch.observe.plots.style import BLUE, GREEN, ORANGE, PURPLE, RED, STYLE, save, stage_colour

#: Kind of mark -> colour and marker.
MARKS = {"fault": (RED, "v"), "repair": (GREEN, "o"), "redo": (ORANGE, "s"), "skip": (PURPLE, "X")}


@dataclass
class History:
    """Events of a run, by step, that the plots show."""

    title: str = ""
    steps: dict[int, log.Step] = field(default_factory=dict)
    evaluations: dict[int, log.Evaluation] = field(default_factory=dict)
    marks: dict[str, list[float]] = field(default_factory=dict)
    """Kind of mark -> fractional steps at which it happened."""

    def bits_per_nat(self) -> float | None:
        """Factor from nats per token to bits per byte, from the last evaluation that has both; None if
        unknown."""
        for _, evaluation in sorted(self.evaluations.items(), reverse=True):
            if evaluation.loss and evaluation.bits_per_byte:
                return evaluation.bits_per_byte / evaluation.loss
        return None


def read_history(events: Iterable[log.Event | log.Unknown]) -> History:
    """Collect the events for the plots. A step taken again (after a rollback or a resume) replaces the former
    one."""
    history = History()
    faults: list[float] = []
    for event in events:
        match event:
            case log.RunStarted():
                history.title = f"{event.run}: {event.model}, {_short(event.parameters)} parameters"
            case log.Step():
                history.steps[event.t] = event
            case log.Evaluation():
                history.evaluations[event.t] = event
            case log.FaultDelivered():
                faults.append(event.time)
            case log.Repair() | log.Redo() | log.Skip():
                history.marks.setdefault(type(event).__name__.lower(), []).append(event.t)
    if faults:
        history.marks["fault"] = [_step_at(history.steps, time) for time in faults]
    return history


def plot_run(run_dir: str | Path, out_dir: str | Path) -> list[Path]:
    """Draw `loss` and `throughput` of the run in `run_dir` into `out_dir`, which is created if missing.

    Returns the files written: loss.png, loss.svg, throughput.png, throughput.svg. Raises UserError if there
    is no event log, no step in it, or the files cannot be written.
    """
    path = Path(run_dir) / "events.jsonl"
    try:
        history = read_history(read_events(path))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give the directory of a run") from None
    if not history.steps:
        raise UserError(f"{path} holds no step yet; there is nothing to draw")
    written = [Path(out_dir) / f"{name}.{kind}" for name in ("loss", "throughput") for kind in ("png", "svg")]
    with matplotlib.rc_context(STYLE):
        figures = {"loss": draw_loss(history), "throughput": draw_throughput(history)}
        for target in written:
            with os_errors_named(f"cannot write {target}", "give another folder with --out"):
                target.parent.mkdir(parents=True, exist_ok=True)
                save(figures[target.stem], target)
    return written


def draw_loss(history: History) -> Figure:
    """Figure of training and held-out loss over steps, in nats per token and bits per byte."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    steps = [(t, step.loss) for t, step in sorted(history.steps.items()) if step.loss is not None]
    if steps:
        at, losses = zip(*steps, strict=True)
        axes.plot(at, losses, color=BLUE, alpha=0.3, linewidth=0.8)
        axes.plot(at, smooth(losses, _span(losses)), color=BLUE, linewidth=1.8, label="training (smoothed)")
    held_out = [(t, e.loss) for t, e in sorted(history.evaluations.items()) if e.loss is not None]
    if held_out:
        at, losses = zip(*held_out, strict=True)
        axes.plot(at, losses, color=ORANGE, marker="o", markersize=5, linewidth=1.4, label="held out")
        axes.annotate(
            _final(history.evaluations[at[-1]]), (at[-1], losses[-1]), color=ORANGE,
            xytext=(0, 14), textcoords="offset points", ha="right",
        )  # fmt: skip
    _finish(axes, "loss (nats per token)", history.title)
    axes.set_xlabel("step")
    ratio = history.bits_per_nat()
    if ratio is not None:
        to_bits, to_nats = partial(mul, ratio), partial(mul, 1 / ratio)
        right = axes.secondary_yaxis("right", functions=(to_bits, to_nats))
        right.set_ylabel("bits per byte")
        right.spines["right"].set_visible(True)
    return figure


def draw_throughput(history: History) -> Figure:
    """Figure of tokens per second over steps with faults and repairs, and of the peers alive per stage."""
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    at = sorted(history.steps)
    rates = [s.tokens / s.seconds if s.seconds > 0 else 0.0 for s in (history.steps[t] for t in at)]
    upper.plot(at, rates, color=BLUE, alpha=0.3, linewidth=0.8)
    evened = smooth(rates, _span(rates))
    upper.plot(at, evened, color=BLUE, linewidth=1.8, label="tokens per second (smoothed)")
    top = max(rates, default=0.0) * 1.12 or 1.0
    upper.set_ylim(0, top)
    for kind, (colour, marker) in MARKS.items():
        places = history.marks.get(kind, [])
        if places:
            upper.scatter(
                places, [top * 0.95] * len(places), color=colour, marker=marker, s=28, zorder=3,
                label=f"{kind} ({len(places)})", linewidths=0,
            )  # fmt: skip
            for axes in (upper, lower):
                axes.vlines(
                    places, 0, 1, transform=axes.get_xaxis_transform(), color=colour, alpha=0.25, lw=1
                )
    _finish(upper, "tokens per second", history.title)
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))

    alive_at = [history.steps[t].alive for t in at]
    stages = max(map(len, alive_at), default=0)
    for stage in range(stages):
        # Lines of equal height are shifted apart a little; otherwise only the last would be visible.
        shift = 0.07 * (stage - (stages - 1) / 2)
        heights = [alive[stage] + shift if stage < len(alive) else shift for alive in alive_at]
        lower.plot(
            at, heights, drawstyle="steps-post", linewidth=1.8,
            color=stage_colour(stage), label=f"stage {stage}" if stage else "data nodes",
        )  # fmt: skip
    most = max((count for alive in alive_at for count in alive), default=1)
    lower.set_ylim(0, most + 0.6)
    lower.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    _finish(lower, "peers alive", "", columns=max(1, stages))
    lower.set_xlabel("step")
    return figure


def _span(values: Sequence[float]) -> int:
    """Number of steps to average over: fewer in a short run, where the average would lag far behind."""
    return max(1, min(15, len(values) // 8))


def smooth(values: Sequence[float], span: int = 15) -> list[float]:
    """Exponential moving average without initial bias; a span of n weighs about the last n values."""
    filtered = [lfilter([1.0], [1.0, 2 / (span + 1) - 1], each) for each in (values, np.ones(len(values)))]
    smoothed: list[float] = (filtered[0] / filtered[1]).tolist()
    return smoothed


def _finish(axes: Axes, label: str, title: str, columns: int = 1) -> None:
    axes.set_ylabel(label)
    axes.set_title(title, loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", ncols=columns)


def _step_at(steps: dict[int, log.Step], time: float) -> float:
    """Fractional step at the moment `time` (unix seconds), interpolated between the commits around it."""
    commits = sorted((step.time, t) for t, step in steps.items())
    times, numbers = zip(*commits, strict=True) if commits else ((0.0,), (0,))
    return float(np.interp(time, times, numbers))


def _final(evaluation: log.Evaluation) -> str:
    bits = evaluation.bits_per_byte
    return f"{evaluation.loss:.3f}" + (f"  ({bits:.3f} bits per byte)" if bits is not None else "")


def _short(count: int) -> str:
    """A count as short text: 1,234,567 -> "1.2M"."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
