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

from anabranch.errors import UserError, os_errors_named
from anabranch.observe import events as log
from anabranch.observe.event_log import read_events
from anabranch.observe.plots.style import BLUE, GREEN, ORANGE, PURPLE, RED, STYLE, save, stage_colour

#: Most stages of relays with a line each, entries in a row of a legend, and height of a row (points).
LISTED, COLUMNS, ROW_POINTS = 6, 4, 18
#: Kind of mark -> colour and marker.
MARKS = {"fault": (RED, "v"), "repair": (GREEN, "o"), "skip": (PURPLE, "X")}


@dataclass
class History:
    """Events of a run that the plots show. title: run and model. steps, evaluations: by step. marks: kind of
    mark (MARKS) -> fractional steps at which it happened."""

    title: str = ""
    steps: dict[int, log.Step] = field(default_factory=dict)
    evaluations: dict[int, log.Evaluation] = field(default_factory=dict)
    marks: dict[str, list[float]] = field(default_factory=dict)

    def bits_per_nat(self) -> float | None:
        """Factor from a loss in nats per token to bits per byte, by the last evaluation that has both; None
        if none has."""
        for _, evaluation in sorted(self.evaluations.items(), reverse=True):
            if evaluation.loss and evaluation.bits_per_byte:
                return evaluation.bits_per_byte / evaluation.loss
        return None


def read_history(events: Iterable[log.Event | log.Unknown]) -> History:
    """History of these events, for the plots. A step that is taken again replaces the former one."""
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
            case log.Repair() | log.Skip():
                history.marks.setdefault(type(event).__name__.lower(), []).append(event.t)
    if faults:
        history.marks["fault"] = [_step_at(history.steps, time) for time in faults]
    return history


def plot_run(run_dir: str | Path, out_dir: str | Path) -> list[Path]:
    """Draw `loss` and `throughput` of the run in `run_dir` into `out_dir`, which is created if missing.
    Returns the files written: loss.png, loss.svg, throughput.png, throughput.svg. Raises UserError if there
    is no event log, no step in it, or the files cannot be written."""
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
    """Figure of training loss (smoothed, too) and held-out loss over steps, in nats per token; with a second
    scale in bits per byte if the factor is known."""
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
        label = f"held out, at last {_final(history.evaluations[at[-1]])}"
        axes.plot(at, losses, color=ORANGE, marker="o", markersize=5, linewidth=1.4, label=label)
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
    """Figure of tokens per second over steps, with marks for faults, repairs and skipped steps, and of the
    peers alive per stage."""
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    at = sorted(history.steps)
    timed = [t for t in at if history.steps[t].seconds > 0]
    rates = [history.steps[t].tokens / history.steps[t].seconds for t in timed]
    upper.plot(timed, rates, color=BLUE, alpha=0.3, linewidth=0.8)
    evened = smooth(rates, _span(rates))
    upper.plot(timed, evened, color=BLUE, linewidth=1.8, label="tokens per second (smoothed)")
    top = max(rates, default=0.0) * 1.12 or 1.0
    upper.set_ylim(0, top)
    for row, (kind, (colour, marker)) in enumerate(MARKS.items()):
        places = history.marks.get(kind, [])
        if places:
            upper.scatter(
                places, [top * (0.97 - 0.05 * row)] * len(places), color=colour, marker=marker, s=28,
                zorder=3, label=f"{kind} ({len(places)})", linewidths=0,
            )  # fmt: skip
            for axes in (upper, lower):
                axes.vlines(
                    places, 0, 1, transform=axes.get_xaxis_transform(), color=colour, alpha=0.25, lw=1
                )
    _finish(upper, "tokens per second", history.title)
    upper.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))

    lines = _alive_lines([history.steps[t].alive for t in at])
    for number, (label, counts) in enumerate(lines.items()):
        # Lines of equal height are shifted apart a little; otherwise only the last would be visible.
        shift = 0.07 * (number - (len(lines) - 1) / 2)
        lower.plot(
            at, [count + shift for count in counts], drawstyle="steps-post", linewidth=1.8,
            color=stage_colour(number), label=label,
        )  # fmt: skip
    most = max((count for counts in lines.values() for count in counts), default=1)
    lower.set_ylim(0, most + 0.6)
    lower.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    _finish(lower, "peers alive", "")
    lower.set_xlabel("step")
    return figure


def _alive_lines(alive_at: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """{label of a line: peers alive at each step}: a line for each stage. For more than LISTED relay stages
    it is one for data nodes, one for the relay stage with fewest peers at each step, and one for that with
    most. alive_at: peers at each stage, by step."""
    stages = max(map(len, alive_at), default=0)
    by_stage = [[alive[s] if s < len(alive) else 0 for alive in alive_at] for s in range(stages)]
    if stages - 1 <= LISTED:
        return {f"stage {s}" if s else "data nodes": counts for s, counts in enumerate(by_stage)}
    of_relays = list(zip(*by_stage[1:], strict=True))
    return {
        "data nodes": by_stage[0],
        f"fewest at one of {stages - 1} stages": [min(counts) for counts in of_relays],
        "most": [max(counts) for counts in of_relays],
    }


def _span(values: Sequence[float]) -> int:
    """Number of values to average over: 15, fewer in a short run, where the average would lag far behind."""
    return max(1, min(15, len(values) // 8))


def smooth(values: Sequence[float], span: int = 15) -> list[float]:
    """Exponential moving average without initial bias, as long as `values`. span: about so many of the latest
    values have weight."""
    from scipy.signal import lfilter  # takes most of a second to load

    filtered = [lfilter([1.0], [1.0, 2 / (span + 1) - 1], each) for each in (values, np.ones(len(values)))]
    smoothed: list[float] = (filtered[0] / filtered[1]).tolist()
    return smoothed


def _finish(axes: Axes, label: str, title: str) -> None:
    """Label the y axis of a plot, and place its legend above it, in rows, where it covers no line; the title
    ("": none) stands above that."""
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01)
    count = len(axes.get_legend_handles_labels()[0])
    if count:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=COLUMNS, borderaxespad=0.1)
    if title:
        axes.set_title(title, loc="left", pad=8 + ROW_POINTS * -(-count // COLUMNS))


def _step_at(steps: dict[int, log.Step], time: float) -> float:
    """Fractional step at the moment `time` (unix seconds), interpolated between the commits around it; before
    the first one or after the last one, that step (0 without steps)."""
    commits = sorted((step.time, t) for t, step in steps.items())
    times, numbers = zip(*commits, strict=True) if commits else ((0.0,), (0,))
    return float(np.interp(time, times, numbers))


def _final(evaluation: log.Evaluation) -> str:
    bits = evaluation.bits_per_byte
    return f"{evaluation.loss:.3f}" + (f"  ({bits:.3f} bits per byte)" if bits is not None else "")


def _short(count: int) -> str:
    """A count as short text: 1,234,567 -> "1.23M"."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= 0.9995 * size:  # 999.5 k and more round to 1 M
            return f"{count / size:.3g}{unit}"
    return str(count)
