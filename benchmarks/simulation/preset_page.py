"""Page of the comparison of presets: tables, verdicts and picture, from the curves and figures there are."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from anabranch.observe.plots import style
from anabranch.observe.plots.style import INK, RED, STYLE, save
from anabranch.sim.metrics.iteration_metrics import estimate
from anabranch.train.recipes.presets import PRESETS
from anabranch.train.recipes.recipes import recipe_run
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.simulation import preset_fleets
from benchmarks.simulation.preset_fleets import (
    EACH,
    FLEETS,
    ISLANDS,
    LIKE_SYNCHRONOUS,
    OURS,
    OURS_STEPS,
    ROWS,
    SAYS,
    SYNCHRONOUS,
    Figures,
    ours,
    with_row,
)
from benchmarks.simulation.preset_times import (
    Curve,
    Found,
    Pace,
    Ratio,
    best_curves,
    best_rate,
    loss_goal,
    next_rate,
    ratio,
    ratio_text,
    reached,
    time_goal,
)

PICTURE = harness.ROOT / "docs" / "images" / "sync-presets.svg"
COLOURS = {
    SYNCHRONOUS: INK, "swarm": style.PINK, "dedloc": "#7fb8ff", OURS: RED,
    f"{OURS}-10": "#ff9d9d", f"{OURS}-1": "#8c1c2b", "diloco": style.BLUE,
    "streaming-diloco": style.TEAL, "opendiloco": style.PURPLE, "ravnest": style.OCHRE,
    "sparse": style.GREEN, "gaia": style.ORANGE,
}  # fmt: skip
_RIVALS = [row for row in ROWS if row not in OURS_STEPS]
#: Preset -> figures that its paper states.
PUBLISHED = {
    "gwtf": "training time down by up to 45 %, by up to 50 % beside SWARM, where links differ; converges as "
    "a centralised run",
    "swarm": "a model of 1 billion shared parameters on preemptible T4 with less than 200 Mbit/s",
    "dedloc": "a language model by 40 volunteers; performance comparable to traditional set-ups",
    "diloco": "8 workers are as good as synchronous steps with 500 times less traffic",
    "opendiloco": "90 to 95 % of the time computing, on two continents",
    "streaming-diloco": "quality of synchronous training with two orders of magnitude less bandwidth",
    "sparse": "1 to 3 % of the values in 2 bits, with a lower loss than DiLoCo in full precision",
    "gaia": "1.8 to 53.5 times as fast as two other systems over wide-area links, and within 0.94 to 1.40 "
    "times the speed on a local network",
}


@dataclass(frozen=True)
class Trained:
    """Curves of a model. step_tokens: of an optimizer step. first: seed with which rates are tuned. steps:
    of the runs that are compared at equal tokens. found: their curves. longer: curves of longer runs, by
    their steps."""

    model: str
    step_tokens: int
    first: int
    steps: int
    found: Found
    longer: Mapping[int, Found]

    def curves(self, row: str, steps: int = 0) -> Mapping[int, Curve]:
        """Seed -> curve of a row with its best rate in runs of the common length. steps: length of the run;
        0: that one."""
        row = SYNCHRONOUS if row in LIKE_SYNCHRONOUS else row
        curves = best_curves(self.found.get(row), self.first)
        if not steps or not curves:
            return curves
        return self.longer[steps].get(row, {}).get(best_rate(self.found[row], self.first), {})

    def ratios(self, row: str) -> list[float]:
        """Loss at the end over that of synchronous steps with the same seed, each with its best rate."""
        base = self.curves(SYNCHRONOUS)
        return [curve[-1][1] / base[seed][-1][1] for seed, curve in self.curves(row).items() if seed in base]


AllFigures = Mapping[str, Mapping[str, Figures | None]]
"""Fleet -> row -> figures, None if there are none."""


def begun(row: str, steps: int) -> int:
    """Steps of a run of a row that are synchronous before its rounds."""
    if row not in ISLANDS:
        return 0
    return max(1, int(steps * with_row(recipe_run("llama-tiny"), row).round.start))


def step_of(fleet: str) -> int:
    """Tokens of an optimizer step on a fleet."""
    scenario = preset_fleets.load_scenario(*FLEETS[fleet])
    return scenario.work.tokens * EACH * scenario.fleet.relays


def seconds(figures: AllFigures, fleet: str, row: str, steps: int, alone: bool = False) -> Pace | None:
    """Seconds of the steps of a run on a fleet; None without figures. alone: synchronous steps, those of
    beginnings too, are taken by the fleet's best machine, if that is quicker than its pipeline."""
    mine, its = figures[fleet].get(row), figures[fleet].get(SYNCHRONOUS)
    if not mine or not its:
        return None
    first = max(its.tokens_per_s, its.alone_tokens_per_s * alone)
    after = first if row == SYNCHRONOUS else mine.tokens_per_s
    return Pace(begun(row, steps), step_of(fleet) / first, step_of(fleet) / after)


def sent(figures: AllFigures, fleet: str, row: str, steps: int) -> Pace | None:
    """Bytes of the steps of a run on a fleet, of all machines; None without figures."""
    mine, its = figures[fleet].get(row), figures[fleet].get(SYNCHRONOUS)
    if not mine or not its:
        return None
    each = step_of(fleet)
    return Pace(begun(row, steps), each * its.bytes_per_token, each * mine.bytes_per_token)


def over(
    trained: Trained, figures: AllFigures, fleet: str, row: str, to: str = SYNCHRONOUS, alone: bool = False
) -> list[Ratio]:
    """Time of our row of the fleet over that of a row, for each seed with which both ran, to the loss with
    which the row `to` ends."""
    found, own = list[Ratio](), ours(figures[fleet])
    for seed, target in trained.curves(to).items():
        runs = [list(_runs(trained, figures, fleet, each, seed, alone)) for each in (own, row)]
        if all(runs):
            mine, its = (reached(each, target[-1][1]) for each in runs)
            found.append(ratio(mine, its))
    return found


def _runs(
    trained: Trained, figures: AllFigures, fleet: str, row: str, seed: int, alone: bool
) -> Iterator[tuple[Curve, Pace]]:
    """Runs of a row with a seed, of each length, with their seconds."""
    for steps in (0, *trained.longer):
        curve = trained.curves(row, steps).get(seed)
        pace = seconds(figures, fleet, row, steps or trained.steps, alone)
        if curve and pace:
            yield curve, pace


# --- verdicts -----------------------------------------------------------------------------------------------


def goals_of(trained: Trained, figures: AllFigures) -> list[Goal]:
    """Goals of a model: loss at equal tokens, and time to the synchronous loss on each fleet."""
    name = trained.model
    used = sorted({ours(figures[fleet]) for fleet in FLEETS})
    found = [loss_goal(f"loss over synchronous, {name}, {row}", trained.ratios(row)) for row in used]
    for fleet in FLEETS:
        for alone in (False, True):
            rivals = {row: over(trained, figures, fleet, row, alone=alone) for row in _RIVALS}
            missing = [row for row, ratios in rivals.items() if not ratios]
            how = ", synchronous steps on the best machine" if alone else ""
            text = f"time to the synchronous loss over that of the quickest preset, {name}, {fleet}{how}"
            if not alone or _quicker_alone(figures, fleet):
                found.append(time_goal(text, rivals, missing))
    return found


def _quicker_alone(figures: AllFigures, fleet: str) -> bool:
    """True if the best machine of a fleet is quicker than the fleet's pipeline."""
    its = figures[fleet].get(SYNCHRONOUS)
    return its is not None and its.alone_tokens_per_s > its.tokens_per_s


def missing_of(trained: Trained, seeds: Sequence[int], rate: float) -> str:
    """Sentence on the runs of a model that are missing; "" if there are none."""
    parts = list[str]()
    for row in (SYNCHRONOUS, *ISLANDS):
        tried = trained.found.get(row, {})
        tuned = [rate for rate, curves in tried.items() if trained.first in curves]
        ran, more = trained.curves(row), next_rate(tried, trained.first, rate)
        if not tuned:
            parts.append(f"{row} (all)")
        elif more is not None or len(ran) < len(seeds):
            rates = "" if more is None else f"rate {more:g}, "
            parts.append(f"{row} ({rates}{len(seeds) - len(ran)} seeds)")
    return f"Not run of {trained.model}: {', '.join(parts)}." if parts else ""


# --- tables -------------------------------------------------------------------------------------------------


def loss_table(trained: Trained, figures: AllFigures) -> str:
    """Losses of the rows of a model at equal tokens, bytes, and time to the synchronous loss."""
    head = ["preset", "best rate", "seeds", "held-out loss", "against synchronous", "GB a million tokens",
            *(f"time, {fleet}" for fleet in FLEETS)]  # fmt: skip
    return table(head, [_loss_row(row, trained, figures) for row in (SYNCHRONOUS, *ISLANDS)])


def _loss_row(row: str, trained: Trained, figures: AllFigures) -> list[str]:
    curves, ratios = trained.curves(row), trained.ratios(row)
    if not curves:
        return [row, "not run", "", "", "", "", *[""] * len(FLEETS)]
    tried = trained.found[row]
    rate = f"{best_rate(tried, trained.first):g} of {len(tried)}"
    loss = statistics.mean(curve[-1][1] for curve in curves.values())
    against = f"{100 * (statistics.mean(ratios) - 1):+.1f}{_half(ratios)} %" if ratios else "–"
    pace = sent(figures, next(iter(FLEETS)), row, trained.steps)
    tokens = trained.steps * step_of(next(iter(FLEETS)))
    traffic = f"{pace.at(trained.steps) / tokens / 1e3:,.2f}" if pace else "not run"
    times = [_time_cell(fleet, row, trained, figures) for fleet in FLEETS]
    return [row, rate, str(len(curves)), f"{loss:.3f}", against, traffic, *times]


def _half(ratios: Sequence[float]) -> str:
    """Half of the interval of the seeds, in per cent; "" with one seed, which has none."""
    return f" ± {100 * estimate(ratios).half:.1f}" if len(ratios) > 1 else ""


def _time_cell(fleet: str, row: str, trained: Trained, figures: AllFigures) -> str:
    """Time to the synchronous run's final loss over that of the synchronous run: mean of the seeds."""
    found, least = list[float](), list[float]()
    for seed, target in trained.curves(SYNCHRONOUS).items():
        runs = list(_runs(trained, figures, fleet, row, seed, False))
        its = list(_runs(trained, figures, fleet, SYNCHRONOUS, seed, False))
        if runs and its:
            mine, whole = reached(runs, target[-1][1]), reached(its, target[-1][1])
            (found if mine.there else least).append(mine.cost / whole.cost)
    if least:
        return f"over {statistics.mean(least + found):.3g}"
    return f"{statistics.mean(found):.3g}" if found else "not run"


def ratio_table(trained: Trained, figures: AllFigures, to: str, alone: bool = False) -> str:
    """Time of ours over that of each row to the loss with which the row `to` ends."""
    rows = [
        [row, *(ratio_text(over(trained, figures, fleet, row, to, alone)) for fleet in FLEETS)]
        for row in _RIVALS
    ]
    own = [f"{fleet} ({ours(figures[fleet])})" for fleet in FLEETS]
    return table([f"time of {OURS} over that of", *own], rows)


def fleet_table(figures: AllFigures) -> str:
    """Throughput and bytes of the rows on the fleets, and what their figures leave out."""
    head = ["", *(f"tokens/s, {fleet}" for fleet in FLEETS), *(f"bytes a token, {fleet}" for fleet in FLEETS)]
    rows = []
    for row in ROWS:
        each = [figures[fleet].get(row) for fleet in FLEETS]
        speeds = [f"{one.tokens_per_s:,.0f}" if one else "not run" for one in each]
        sizes = [f"{one.bytes_per_token:,.0f}" if one else "" for one in each]
        rows.append([row, *speeds, *sizes, SAYS[row]])
    return table([*head, "as counted"], rows)


def published_table(trained: Sequence[Trained], figures: AllFigures) -> str:
    """Figures that the papers state, beside ours."""
    rows = []
    for preset, says in PUBLISHED.items():
        row = SYNCHRONOUS if preset == "gwtf" else preset
        found = [each.ratios(row) if row in ISLANDS else [] for each in trained]
        cells = [f"{100 * (statistics.mean(one) - 1):+.1f} %" if one else "–" for one in found]
        rows.append([preset, says, *cells, _less_traffic(figures, row), PRESETS[preset].source])
    losses = [f"loss here, {each.model}" for each in trained]
    return table(["preset", "its paper", *losses, "traffic here, times less", "source"], rows)


def _less_traffic(figures: AllFigures, row: str) -> str:
    """Bytes a token of whole models that reduce each step (`dedloc`), over those of a row in its rounds."""
    whole, mine = (figures[next(iter(FLEETS))].get(each) for each in ("dedloc", row))
    return f"{whole.bytes_per_token / mine.bytes_per_token:,.1f}" if whole and mine else "–"


# --- picture ------------------------------------------------------------------------------------------------


def draw(all_trained: Sequence[Trained], figures: AllFigures) -> None:
    """Draw the curves of the seed with which rates are tuned: a column for each model; rows: tokens, bytes,
    and time on each fleet."""
    first = next(iter(FLEETS))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.0 * (2 + len(FLEETS))), layout="constrained")
        grid = figure.subplots(2 + len(FLEETS), len(all_trained), squeeze=False, sharey="col")
        for column, trained in enumerate(all_trained):
            axes = grid[:, column]
            axes[0].set_title(f"{trained.model}: optimizer steps", fontsize=10)
            axes[1].set_title(f"terabytes that all machines of {first} send", fontsize=10)
            for steps, row in product((0, *trained.longer), ROWS):
                curve, length = trained.curves(row, steps).get(trained.first), steps or trained.steps
                if not curve or (steps and row in LIKE_SYNCHRONOUS):
                    continue
                if row not in LIKE_SYNCHRONOUS:
                    _line(axes[0], row, curve, Pace(0, 0.0, 1.0), 1.0, bool(steps))
                _line(axes[1], row, curve, sent(figures, first, row, length), 1e12, bool(steps))
                for fleet, below in zip(FLEETS, axes[2:], strict=True):
                    _line(below, row, curve, seconds(figures, fleet, row, length), 3600.0, bool(steps))
            for fleet, below in zip(FLEETS, axes[2:], strict=True):
                below.set_title(f"simulated hours, {fleet}", fontsize=10)
            for each in axes[1:]:
                each.set_xscale("log")
                each.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
                each.xaxis.set_minor_formatter(NullFormatter())
        for left in grid[:, 0]:
            left.set_ylabel("held-out nats a token")
        lines = {line.get_label(): line for each in grid.flat for line in each.get_lines()}
        if lines:
            names = [*lines]
            figure.legend([lines[name] for name in names], names, loc="outside upper center", ncols=5)
        save(figure, PICTURE)


def _line(axes: Axes, row: str, curve: Curve, pace: Pace | None, unit: float, longer: bool) -> None:
    """Draw a curve over what its steps cost, in `unit`; nothing if that is not known."""
    if pace:
        width = 2.2 if row in OURS_STEPS else 1.2
        dashes = "--" if longer else ":" if row in LIKE_SYNCHRONOUS else "-"
        label = f"{row}, longer" if longer else row
        at, losses = [pace.at(steps) / unit for steps, _ in curve], [loss for _, loss in curve]
        axes.plot(at, losses, dashes, color=COLOURS[row], linewidth=width, label=label)


# --- page ---------------------------------------------------------------------------------------------------


def write(
    all_trained: Sequence[Trained],
    seeds: Sequence[int],
    rate: float,
    windows: int,
    most_steps: int,
    dry: bool,
) -> None:
    """Write the result with what was kept, and its picture. rate: learning rate that is tried first. windows:
    held-out ones. most_steps: of a round in the runs."""
    figures: AllFigures = {fleet: {row: preset_fleets.kept(fleet, row) for row in ROWS} for fleet in FLEETS}
    text = [_setting(all_trained[0], windows, most_steps)]
    goals = [one for trained in all_trained for one in goals_of(trained, figures)]
    missing = [sentence for each in all_trained if (sentence := missing_of(each, seeds, rate))]
    missing += [
        f"Not simulated on {fleet}: {', '.join(absent)}."
        for fleet in FLEETS
        if (absent := [row for row in ROWS if not figures[fleet][row]])
    ]
    text += [f"**Missing.** {' '.join(missing)}"] * bool(missing)
    for trained in all_trained:
        text += [f"**{trained.model}**", loss_table(trained, figures)]
        text += [f"To the loss with which synchronous steps end, {trained.model}:"]
        text += [ratio_table(trained, figures, SYNCHRONOUS)]
        for row in sorted({ours(figures[fleet]) for fleet in FLEETS}):
            text += [f"To the loss with which `{row}` ends, {trained.model}:"]
            text += [ratio_table(trained, figures, row)]
        if any(_quicker_alone(figures, fleet) for fleet in FLEETS):
            how = "with synchronous steps on the fleet's best machine, where that is quicker"
            text += [f"To the loss with which `{OURS}` ends, {trained.model}, {how}:"]
            text += [ratio_table(trained, figures, OURS, alone=True)]
    text += ["**Throughput and bytes**", fleet_table(figures), _FLEETS_TEXT]
    text += ["**What the papers state**", published_table(all_trained, figures), _PUBLISHED_TEXT]
    if not dry:
        draw(all_trained, figures)
    text.append(f"![held-out loss over steps, bytes and simulated hours](../images/{PICTURE.name})")
    title = "Presets at equal tokens, and their time to the synchronous loss"
    data = {each.model: {str(each.steps): each.found, **_named(each.longer)} for each in all_trained}
    harness.write(
        "sync-presets", title, "\n\n".join(text), goals=goals, data=data | {"fleets": figures}, dry=dry
    )


def _named(longer: Mapping[int, Found]) -> dict[str, Found]:
    return {str(steps): found for steps, found in longer.items() if found}


def _setting(trained: Trained, windows: int, most_steps: int) -> str:
    longer = ", ".join(f"{steps:,}" for steps, found in trained.longer.items() if found)
    return (
        f"{trained.steps:,} steps of {trained.step_tokens} tokens, fp32, four slots, rounds of at most "
        f"{most_steps} steps; the last round may end up to {most_steps} steps later. {windows} held-out "
        "windows. *Best rate*: of so many that were run on the first seed, until half of it and twice it are "
        "worse; the other seeds have the best. "
        "*Time*: to the synchronous run's final loss with the same seed, over the time of that run, mean of "
        "the seeds; *over*: not reached by the end of the run, which takes as long. The steps of a run "
        "before its first round have throughput and bytes of the pipeline (row synchronous). GB: sent by all "
        "machines of volunteers. Losses are those of the small models, throughputs and bytes those of "
        "llama-350m with as many steps: right as far as a preset costs both the same share of its tokens. "
        + (f"Runs of {longer} steps count too where they are quicker. " if longer else "")
        + "An interval is that of the seeds; it has nothing of the fleets, of which one draw was simulated. "
        "*Under*, *over* in ratios: one of both did not reach the loss, and its whole run bounds the ratio."
    )


_FLEETS_TEXT = (
    f"llama-350m, no churn, one draw, steps of {EACH} microbatches for each relay (786,432 tokens on both "
    "home fleets, 1,048,576 on wan10), all relays in every row. Of rounds two are counted after two, of "
    "steps in flight two after four. What is cheaper than the preset is so in its favour; times of such a "
    "row are lower bounds. `ravnest` is an estimate, not a bound."
)
_PUBLISHED_TEXT = (
    "The papers' models are a hundred to ten thousand times as large as those whose losses are here, and "
    "none of the papers has these fleets. *Traffic*: bytes a token of `dedloc`, which reduces whole models "
    "in each step, over those of the row in its rounds. Of Ravnest no figure is in our sources."
)
