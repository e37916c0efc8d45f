"""Every system at the same bytes on the wire, early and late, with and without churn.

    PYTHONPATH=build/compiled nice python -m benchmarks.simulation.comparison --seeds 12

Ten regions with equal and with unequal machines, and equal machines behind unequal lines, in virtual time.
Each system at its own published precision, all at fp16, and all at 8 bits: only sizes change. 24 iterations;
the *early* window is 3 to 8, the *late* one 17 to 24. Settings and cache are those of `policies`; a run that
was stopped goes on where it was. Seed by seed, so a table has as many seeds as are complete for all its rows.
`--sections` picks parts. Writes a result for each: `comparison`, `comparison-further`, `comparison-thin`,
`unstable-links` and `paced`.

Iteration times are compared seed by seed (same machines, links and crashes). Ratios are summarised by their
geometric mean and the t-interval of their logarithms, the usual way for ratios (Fleming and Wallace, CACM
1986): the ratio of A over B is then the reciprocal of B over A, and no fleet counts more because it is slow.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from anabranch.executors import Executor, Processes, executor
from anabranch.sim.metrics.iteration_metrics import Estimate, Row, estimate
from benchmarks import harness
from benchmarks.harness import Goal, table
from benchmarks.simulation.policies import (
    BY_DT_FM,
    BY_LINKS,
    IN_TURN,
    OURS,
    Cell,
    cell,
    common,
    computed,
    outcome_of,
    path_of,
    text,
)

#: Executor of what asks for no other.
HERE = Processes(1)
#: Iterations of a window, first and last.
Window = tuple[int, int]
EARLY, LATE, ALL = (3, 8), (17, 24), (3, 24)
ITERATIONS = 24
#: Bytes on the wire: of an activation's value, of a parameter's sum, and of its reduced gradient. SWARM's 8
#: bits have a scale of 4 bytes for each block of 4096 values.
Bytes = tuple[float, float, float]
BLOCKWISE = 1.0 + 4.0 / 4096.0
EXACT: Bytes = (0.0, 0.0, 0.0)
FP16: Bytes = (2.0, 2.0, 2.0)
EIGHT_BITS: Bytes = (BLOCKWISE, BLOCKWISE, BLOCKWISE)
#: `anabranch init --wire int8 --sums coarse`, as `wire-loss` meters it.
THIN: Bytes = (1.0 + 2.0 / 64.0, 1.02, 1.03)
#: Own precision of the systems whose sums are not ours. SWARM has 8-bit activations and fp16 averages, DT-FM
#: fp16.
PUBLISHED: dict[str, Bytes] = {
    "restart": FP16,
    **dict.fromkeys(("swarm-published", "swarm-as-coded", "swarm-tuned"), (BLOCKWISE, 2.0, 2.0)),
}
#: Precision -> policy -> its bytes; "" for all others. GWTF names no precision, and routes here for our
#: protocol.
PRECISIONS: dict[str, dict[str, Bytes]] = {
    "own": {"": EXACT, **PUBLISHED},
    "own, thin": {"": THIN, **PUBLISHED},
    "fp16": {"": FP16},
    "8 bits": {"": EIGHT_BITS},
}
#: A row of a table -> policy, who serves which stage.
ROWS: dict[str, tuple[str, str]] = {
    "auction": (OURS, BY_LINKS),
    "gwtf": ("gwtf", BY_LINKS),
    "swarm-published": ("swarm-published", IN_TURN),
    "swarm-as-coded": ("swarm-as-coded", IN_TURN),
    "swarm-as-coded, our placement": ("swarm-as-coded", BY_LINKS),
    "swarm-tuned": ("swarm-tuned", IN_TURN),
    "swarm-tuned, our placement": ("swarm-tuned", BY_LINKS),
    "static, DT-FM's placement": ("restart", BY_DT_FM),
    "static, our placement": ("restart", BY_LINKS),
}
SWARMS = tuple(row for row in ROWS if row.startswith("swarm"))
STATIC = tuple(row for row in ROWS if row.startswith("static"))
#: Lines of homes and small offices (bits per second), drawn for each host.
LINES = [5e7, 1e8, 2e8, 5e8, 1e9]
#: Machines -> scenario, its changes.
FLEETS: dict[str, tuple[str, dict[str, Any]]] = {
    "equal": ("wan10", {}),
    "unequal": ("wan10-mixed", {}),
    "equal, unequal lines": ("wan10", {"network.up_bps": LINES, "network.down_bps": LINES}),
}
MAIN = ("equal", "unequal")
#: Rows of the fleets in MAIN alone.
ONLY_MAIN = {"gwtf", STATIC[0]}
HETEROGENEOUS = "equal, unequal lines"
CALM, STRUCK = 0.0, 0.1
#: Links that lose, stall and change, of unequal machines; and a tenth of the relays crashing.
UNSTABLE = {
    "drift.speed": 0.2,
    "drift.links": 0.3,
    "network.loss": 0.001,
    "run.warm_up": 0,
}
UNSTABLE_ROWS = ("auction", "swarm-published", "swarm-as-coded", "swarm-tuned", "static, our placement")
#: Round trips of a paced connection's largest burst, with BBR.
PACED = {"network.burst_trips": 0.53}

Setting = tuple[str, float, str]
"""Machines, churn, precision."""


def cell_of(setting: Setting, row: str, more: Mapping[str, Any] = {}) -> Cell:
    machines, crash, precision = setting
    (policy, placement), (scenario, changes) = ROWS[row], FLEETS[machines]
    sizes = PRECISIONS[precision].get(policy, PRECISIONS[precision].get("", EXACT))
    keys = ("precision.activation_bytes", "precision.sum_bytes", "precision.reduced_bytes")
    searched = placement == BY_DT_FM
    deal = {"fleet.deal": IN_TURN if searched else placement}
    wire = dict(zip(keys, sizes, strict=True))
    each = cell(scenario, policy, {**deal, **common(crash, ITERATIONS), **wire, **changes, **more})
    return replace(each, searched=searched)


#: Settings in the order in which they are run: the most important first.
ORDER: tuple[Setting, ...] = (
    *product(MAIN, (STRUCK,), ("own", "fp16")),
    *product(MAIN, (CALM,), ("fp16", "own")),
    *product(MAIN, (STRUCK, CALM), ("8 bits",)),
    *product((HETEROGENEOUS,), (CALM,), ("fp16", "own", "8 bits")),
)
#: Settings of the second page: unequal lines with churn, and more churn.
FURTHER: tuple[Setting, ...] = (
    *product((HETEROGENEOUS,), (STRUCK,), ("fp16", "own", "8 bits")),
    *product(MAIN, (0.2,), ("fp16", "own", "8 bits")),
)
#: Settings of the third page: ours with fewer bytes.
THIN_SETTINGS: tuple[Setting, ...] = (
    *product(MAIN, (STRUCK, CALM, 0.2), ("own, thin",)),
    *product((HETEROGENEOUS,), (CALM, STRUCK), ("own, thin",)),
)
UNSTABLE_SETTINGS: tuple[Setting, ...] = tuple(product(("unequal",), (STRUCK,), ("fp16", "own", "own, thin")))
PACED_SETTINGS: tuple[Setting, ...] = tuple(product(MAIN, (CALM, STRUCK), ("fp16",)))


def rows_of_setting(setting: Setting) -> list[str]:
    """Rows of a setting's table. DT-FM's search takes most of the time and is left out under churn, `gwtf`
    and it of unequal lines. `gwtf` is not measured with our fewer bytes."""
    machines, crash, precision = setting
    left_out = {STATIC[0]} if crash else set[str]()
    left_out |= ONLY_MAIN if machines == HETEROGENEOUS else set()
    left_out |= {"gwtf"} if precision == "own, thin" else set()
    return [row for row in ROWS if row not in left_out]


def run_all(
    settings: Iterable[Setting],
    seeds: int,
    more: Mapping[str, Any],
    only: Sequence[str] = (),
    where: Executor = HERE,
) -> None:
    """Seed by seed, all rows of all settings; what is in the cache is not run again."""
    settings = list(settings)
    for seed in range(seeds):
        rows = [(setting, row) for setting in settings for row in only or rows_of_setting(setting)]
        jobs = [(cell_of(setting, row, more), seed) for setting, row in rows]
        missing = [job for job in jobs if not path_of(*job).exists()]
        for job, content in harness.completed(computed, missing, where, f"seed {seed}"):
            harness.write_whole(path_of(*job), content)


def complete_seeds(setting: Setting, seeds: int, more: Mapping[str, Any], only: Sequence[str] = ()) -> int:
    """Number of the first seeds, at most `seeds`, of which all rows of a setting are in the cache."""
    cells = [cell_of(setting, row, more) for row in only or rows_of_setting(setting)]
    for seed in range(seeds):
        if not all(path_of(each, seed).exists() for each in cells):
            return seed
    return seeds


Counts = dict[Setting, int]
"""Settings that were measured, with the number of their complete seeds."""


def measured(settings: Iterable[Setting], seeds: int, more: Mapping[str, Any]) -> Counts:
    found = {setting: complete_seeds(setting, seeds, more) for setting in settings}
    return {setting: count for setting, count in found.items() if count}


# --- figures ------------------------------------------------------------------------------------------


def rows_of(each: Cell, seed: int, window: Window) -> list[Row]:
    """Iterations of a window; none if the run failed."""
    outcome = outcome_of(each, seed)
    return [] if outcome.failure else [row for row in outcome.rows if window[0] <= row.t <= window[1]]


def seconds(each: Cell, seeds: int, window: Window) -> Estimate:
    """Mean iteration of a window, over the seeds that finished."""
    found = [rows_of(each, seed, window) for seed in range(seeds)]
    return estimate([fmean(row.seconds for row in rows) for rows in found if rows])


class Ratio(NamedTuple):
    """Geometric mean of one ratio per seed, and the ends of its 95 % interval (`mean` with one seed)."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.mean:
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ({self.low:.2f}–{self.high:.2f})"


def summarised(ratios: Sequence[float]) -> Ratio:
    """Geometric mean, with Student's t-interval of the logarithms."""
    each = estimate([math.log(ratio) for ratio in ratios])
    return Ratio(*(math.exp(each.mean + side * each.half) for side in (0.0, -1.0, 1.0)))


def ratios(ours: Cell, theirs: Cell, seeds: int, window: Window) -> list[float]:
    """Ours over theirs in mean seconds of an iteration, of each seed that both finished: the machines and the
    crashes are the same draws."""
    pairs = [(rows_of(ours, seed, window), rows_of(theirs, seed, window)) for seed in range(seeds)]
    return [_mean(one) / _mean(other) for one, other in pairs if one and other]


def quotient(ours: Cell, theirs: Cell, seeds: int, window: Window) -> Ratio:
    return summarised(ratios(ours, theirs, seeds, window))


def bound_over(ours: Cell, theirs: Cell, seeds: int, window: Window) -> Ratio:
    """Clairvoyant bound of our iterations over the time of theirs. With churn it is no law, and a few of ours
    are quicker than it: those count with their own time."""
    found = []
    for seed in range(seeds):
        bounds = [min(row.bound_s, row.seconds) for row in rows_of(ours, seed, window)]
        rows = rows_of(theirs, seed, window)
        found += [fmean(bounds) / _mean(rows)] if bounds and rows else []
    return summarised(found)


def _mean(rows: Sequence[Row]) -> float:
    return fmean(row.seconds for row in rows)


def wasted(each: Cell, seeds: int) -> Estimate:
    """Share of the computed seconds that entered no step."""
    found = [rows_of(each, seed, ALL) for seed in range(seeds)]
    return estimate(
        [sum(r.wasted_s for r in rows) / sum(r.computed_s for r in rows) for rows in found if rows]
    )


class Rival(NamedTuple):
    """System that is closest to ours, or ahead, in a setting. over: ours over it. bound: clairvoyant bound
    over it. finished: False if one of our runs was not finished."""

    over: Ratio
    bound: Ratio
    row: str
    setting: Setting
    finished: bool


def strongest(
    setting: Setting, rows: Sequence[str], seeds: int, window: Window, more: Mapping[str, Any] = {}
) -> Rival:
    """Row over which ours has the greatest ratio."""
    ours, found = cell_of(setting, OURS, more), []
    finished = all(rows_of(ours, seed, ALL) for seed in range(seeds))
    for row in rows:
        theirs = cell_of(setting, row, more)
        if ratios(ours, theirs, seeds, window):
            over = quotient(ours, theirs, seeds, window)
            found.append(Rival(over, bound_over(ours, theirs, seeds, window), row, setting, finished))
    return max(found, key=lambda rival: rival.over.mean)


def rivals(settings: Counts, rows: Sequence[str], window: Window) -> list[Rival]:
    """The strongest of some rows in each setting; the one over which ours has the greatest ratio is first."""
    able = [each for each in settings if set(rows) <= set(rows_of_setting(each))]
    found = [strongest(each, rows, settings[each], window) for each in able]
    return sorted(found, key=lambda rival: -rival.over.mean)


def title(machines: str) -> str:
    """Name of a fleet in a sentence."""
    return f"{machines} machines" if machines in MAIN else "equal machines, unequal lines"


def where(rival: Rival) -> str:
    machines, crash, _ = rival.setting
    return f"{title(machines)}, {100 * crash:.0f} % churn"


def goal(name: str, most: float, found: Sequence[Rival]) -> list[Goal]:
    """Met only if the whole interval of every setting is on the right side and ours finished all runs; no
    goal where nothing was measured. The value is that of the worst setting."""
    if not found:
        return []
    held = all(rival.over.high <= most and rival.finished for rival in found)
    return [harness.goal(name, f"at most {most:.2f}", f"{found[0].over} ({where(found[0])})", held)]


# --- telling ------------------------------------------------------------------------------------------


def table_of(setting: Setting, seeds: int, more: Mapping[str, Any]) -> str:
    ours, lines = cell_of(setting, OURS, more), []
    for row in rows_of_setting(setting):
        each = cell_of(setting, row, more)
        finished = sum(bool(rows_of(each, seed, ALL)) for seed in range(seeds))
        figures = [text(seconds(each, seeds, window), "{:.1f}") for window in (EARLY, LATE, ALL)]
        over = [""] * 3
        if row != OURS and ratios(ours, each, seeds, ALL):
            over = [str(quotient(ours, each, seeds, window)) for window in (LATE, ALL)]
            over.append(f"{bound_over(ours, each, seeds, ALL).mean:.2f}")
        lines.append(
            [row, *figures, *over, text(wasted(each, seeds), "{:.1f} %", 100.0), f"{finished} of {seeds}"]
        )
    times = ["s, 3–8", "s, 17–24", "s, 3–24"]
    over = ["ours over it, 17–24", "ours over it, 3–24", "bound over it"]
    return table(["system", *times, *over, "wasted", "finished"], lines)


def tables(settings: Counts, more: Mapping[str, Any]) -> str:
    parts = []
    for machines, crash in dict.fromkeys((machines, crash) for machines, crash, _ in settings):
        name = title(machines)
        parts.append(f"### {name[0].upper()}{name[1:]}, {100 * crash:.0f} % churn")
        for setting, seeds in settings.items():
            if setting[:2] == (machines, crash):
                precision = f"**{NAMES[setting[2]]}** ({seeds} seed{'s' * (seeds > 1)})"
                parts.append(f"{precision}\n\n{table_of(setting, seeds, more)}")
    return "\n\n".join(parts)


NAMES = {
    "own": "Each system at its own published precision",
    "own, thin": "Each system at its own published precision, ours with 8 bits and coarse sums",
    "fp16": "All at fp16",
    "8 bits": "All at 8 bits",
}


def write(
    section: str, title: str, body: str, seeds: int, goals: Sequence[Goal] = (), data: Any = None
) -> None:
    """Write a result with the command that runs its section, also where outcomes came from the cache."""
    command = f"python -m {harness.module()} --sections {section} --seeds {seeds}"
    harness.write(section, title, body, goals=goals, data=data, reproduce=command, dry=DRY)


def ratios_of_seeds(settings: Counts, more: Mapping[str, Any]) -> dict[str, list[float]]:
    """Ours over each row, iterations 3 to 24, of each seed: for other statistics than those of the tables."""
    return {
        ", ".join([title(setting[0]), f"{100 * setting[1]:.0f} % churn", setting[2], row]): [
            round(each, 4)
            for each in ratios(cell_of(setting, OURS, more), cell_of(setting, row, more), seeds, ALL)
        ]
        for setting, seeds in settings.items()
        for row in rows_of_setting(setting)
        if row != OURS
    }


COMMON_WORDS = (
    f"LLaMA-like (llama-350m), {ITERATIONS} iterations; each table says its number of seeds. Times: "
    "mean ± half of the 95 % interval over the seeds. *Own precision*: `auction` and `gwtf` route "
    "for our protocol, with fp32 activations and exact sums (4 bytes a value; 5.5 + 4 bytes a "
    "parameter in a reduce); SWARM has 8-bit activations and averages in fp16; the static "
    "arrangement has fp16. *Ours with 8 bits and coarse sums*: `auction` as `anabranch init --wire int8 "
    "--sums coarse` makes it, whose sums are exact sums of rounded contributions and which `verify` takes "
    "again to the bit ([loss](wire-loss.md)); the others as before. *All at fp16*: 2 bytes a value, 2 + 2 "
    "bytes a parameter; *all at 8 bits*: half of that. Only sizes change: no time is counted for packing, "
    "and for `auction` fewer bytes than at its own precision mean that sums are no longer exact. *static*: "
    "the best static arrangement, found centrally, which begins an iteration anew at each crash (`restart`)."
    " *Our placement* of baselines is found by a cost model that knows that they reduce evenly. "
    "*ours over it*: iteration time of `auction` over that of the row, of each seed, on the same "
    "machines, links and crashes; the geometric mean, and in brackets the 95 % interval of the mean"
    " (Student's t of the logarithms). The arithmetic mean of ratios would depend on which of the "
    "two is divided by which; the ratios of all seeds are in the JSON file. *bound over it*: the "
    "clairvoyant bound of our iterations over the time of the row, which is how low *ours over it* "
    "could be with our placement, if nothing queued and nothing was ever to be decided."
)


def goals_of(found: Counts) -> tuple[list[Goal], list[list[str]]]:
    """Goals of each precision, and for each one what it asks of an iteration, beside the bound."""
    goals: list[Goal] = []
    asked: list[list[str]] = []
    for precision in PRECISIONS:
        of = {setting: seeds for setting, seeds in found.items() if setting[2] == precision}
        main = {s: n for s, n in of.items() if s[0] in MAIN}
        struck, calm = ({s: n for s, n in main.items() if bool(s[1]) == churn} for churn in (True, False))
        unequal = {s: n for s, n in of.items() if s[0] == HETEROGENEOUS}
        for name, most, each in (
            ("the strongest SWARM, with churn", 0.60, rivals(struck, SWARMS, ALL)),
            ("the best static arrangement, without churn", 0.90, rivals(calm, STATIC, ALL)),
            ("`gwtf`, late window, without churn", 1.0, rivals(calm, ("gwtf",), LATE)),
            ("`gwtf`, late window, with churn", 1.0, rivals(struck, ("gwtf",), LATE)),
            ("the strongest SWARM, unequal lines", 0.50, rivals(unequal, SWARMS, ALL)),
        ):
            goals += goal(f"{NAMES[precision].lower()}: iteration time over that of {name}", most, each)
            for rival in each[:1]:
                over, bound = rival.over, rival.bound.mean
                needed, now = f"{most / bound:.2f}", f"{over.mean / bound:.2f}"
                figures = [f"{most:.2f}", str(over), f"{bound:.2f}", needed, now]
                asked.append([NAMES[precision], name, f"{rival.row} ({where(rival)})", *figures])
    return goals, asked


def comparison(seeds: int) -> None:
    found = measured(ORDER, seeds, {})
    goals, asked = goals_of(found)
    head = [
        "precision",
        "over",
        "which is",
        "goal",
        "ours over it",
        "bound over it",
        "goal in bounds",
        "ours in bounds",
    ]
    about = (
        "Each goal in the setting where ours is worst. *goal in bounds*: an iteration that meets the goal "
        "takes so many times the clairvoyant bound. Without churn that is a law: a goal below 1 cannot be "
        "met with this placement at these bytes, by any routing. With churn it is a yardstick: it takes the "
        "sum of a crashed replica to be lost, which is not so after its stage has reduced. *ours in bounds*: "
        "what an iteration takes now."
    )
    asks = f"### What the goals ask\n\n{about}\n\n{table(head, asked)}"
    parts = [COMMON_WORDS, asks, beside_the_paper(found), fallen(found), tables(found, {})]
    title, data = "At the same bytes: SWARM, GWTF, static", {"ours_over": ratios_of_seeds(found, {})}
    write("comparison", title, "\n\n".join(parts), seeds, goals, data)


def further(seeds: int) -> None:
    """Page of the settings of FURTHER."""
    words = (
        "The [comparison](comparison.md) with a fifth of the relays crashing in each iteration, and with a "
        "tenth crashing behind unequal lines."
    )
    _page("comparison-further", "At the same bytes: more churn, unequal lines", words, FURTHER, seeds)


def thin(seeds: int) -> None:
    """Page of the settings of THIN_SETTINGS."""
    words = "The [comparison](comparison.md) with ours at 8 bits and coarse sums."
    _page("comparison-thin", "Ours with fewer bytes, others as published", words, THIN_SETTINGS, seeds)


def _page(section: str, title: str, words: str, settings: Sequence[Setting], seeds: int) -> None:
    found = measured(settings, seeds, {})
    parts = [words, COMMON_WORDS, tables(found, {})]
    data = {"ours_over": ratios_of_seeds(found, {})}
    write(section, title, "\n\n".join(parts), seeds, goals_of(found)[0], data)


def beside_the_paper(found: Counts) -> str:
    """GWTF's claims beside what is measured here."""

    def less(settings: Counts, rows: Sequence[str]) -> str:
        each = rivals(settings, rows, ALL)
        if not each:
            return "not measured"
        mean, low, high = (f"{100 * (1 - end):.0f}" for end in each[0].over)
        return f"{mean} % ({high} to {low} %; {where(each[0])})"

    main = {s: n for s, n in found.items() if s[0] in MAIN and s[2] == "fp16"}
    struck, calm = ({s: n for s, n in main.items() if bool(s[1]) == churn} for churn in (True, False))
    unequal = {s: n for s, n in found.items() if s[0] == HETEROGENEOUS and s[2] == "fp16"}
    portrayed, strong = ("swarm-published",), SWARMS
    ours = [wasted(cell_of(s, OURS), n) for s, n in struck.items()]
    theirs = [wasted(cell_of(s, strongest(s, SWARMS, n, ALL).row), n) for s, n in struck.items()]

    def most(shares: Sequence[Estimate]) -> str:
        each = max(shares, key=lambda each: each.mean, default=None)
        return "not measured" if each is None else text(each, "{:.1f} %", 100.0)

    lost = f"{most(ours)}, nearly all died with its process"
    exact = (
        "every step is that of one process to the last bit, with exact sums ([convergence](convergence.md), "
        "[chaos](chaos.md))"
    )
    rows = [
        ["training time", "up to 45 % less than prior art", less(struck, portrayed), less(struck, strong)],
        [
            "time, links unequal",
            "up to 50 % less than SWARM",
            less(unequal, portrayed),
            less(unequal, strong),
        ],
        ["time without churn", "throughput up to 30 % higher", less(calm, portrayed), less(calm, strong)],
        ["wasted computing", "almost none", lost, f"{most(theirs)} with it"],
        ["convergence", "as centralised", exact, "fp16 and 8 bits: not trained here"],
    ]
    head = ["claim", "GWTF's paper", "here, SWARM as portrayed there", "here, strongest SWARM"]
    about = (
        "Iteration time of `auction` less than the baseline's, all at fp16, in the setting where it is "
        "worst. The paper measured real GPUs and other fleets; these are simulated iterations, so only the "
        "order of size can be compared."
    )
    return f"### Beside the paper\n\n{about}\n\n{table(head, rows)}"


#: Command, program and date of the earlier claims of this project that are compared anew here.
EARLIER = "`benchmarks.simulation.policies --seeds 5 --iterations 8`, program 0865db0, 2026-11-23"
#: Claim: value then, how it was measured, rows that it is compared with here, churn, window.
CLAIMS: tuple[tuple[str, str, str, tuple[str, ...], bool, Window], ...] = (
    (
        "of the best static arrangement, without churn",
        "0.89 ± 0.09",
        "all paid for our exact sums, and only ours had helpers in a reduce",
        STATIC,
        False,
        ALL,
    ),
    (
        "of SWARM as published, with churn",
        "0.50 ± 0.06",
        "SWARM as GWTF's comparison portrays it, which starts a microbatch again where SWARM's code calls "
        "another replica",
        SWARMS[1:3],
        True,
        ALL,
    ),
    (
        "of SWARM tuned, with churn",
        "0.69 ± 0.07",
        "SWARM with 4-byte activations and exact sums, too",
        SWARMS[3:],
        True,
        ALL,
    ),
    (
        "of `gwtf`",
        "1.04 ± 0.09",
        "in the first eight iterations, where flows of `gwtf` still improve, and with churn",
        ("gwtf",),
        False,
        LATE,
    ),
)


def fallen(found: Counts) -> str:
    """Earlier claims beside what is measured here, in the worst setting of each precision."""
    rows = []
    for claim, value, how, others, churn, window in CLAIMS:
        settings = {s: n for s, n in found.items() if s[0] in MAIN and bool(s[1]) == churn}
        now = []
        for precision in ("fp16", "own"):
            each = rivals({s: n for s, n in settings.items() if s[2] == precision}, others, window)
            now.append(f"{each[0].over} ({where(each[0])})" if each else "not measured")
        rows.append([f"iteration time over that {claim}", value, how, *now])
    head = ["claim", "then", "measured how", "here, all at fp16", "here, own precision"]
    about = (
        f"Then: {EARLIER}. Here: this page's command, program and date, in the setting where ours is worst. "
        "Without churn baselines with *our placement* were placed then as if helpers summed their gradients, "
        "which they do not have."
    )
    return f"### Earlier claims beside these\n\n{about}\n\n{table(head, rows)}"


def unstable(seeds: int) -> None:
    """Steps that were made, and their seconds."""
    words = (
        "Unequal machines (`wan10-mixed`) whose speeds and links change by the minute (`drift.speed` = 0.2, "
        "`drift.links` = 0.3), whose links lose one packet of a thousand, and a tenth of which crash in "
        f"each iteration; {seeds} seeds, {ITERATIONS} iterations, the first one included. A "
        "run ends when it has taken an hour for each iteration. With that loss a connection carries 1 to 4 "
        "Mbit/s, and at fp16 an activation of 8 MB takes 15 to 80 s. SWARM's calls time out after 30 s (60 s "
        "if tuned) and are made again, for ever; `static` begins anew at each crash."
    )
    parts: list[str] = [words]
    goals: list[Goal] = []
    for setting in UNSTABLE_SETTINGS:
        if not (count := complete_seeds(setting, seeds, UNSTABLE, UNSTABLE_ROWS)):
            continue
        precision = NAMES[setting[2]]
        cells = {row: cell_of(setting, row, UNSTABLE) for row in UNSTABLE_ROWS}
        made = {row: [len(outcome_of(each, s).rows) for s in range(count)] for row, each in cells.items()}
        rows = [_unstable_row(setting, row, made[row]) for row in UNSTABLE_ROWS]
        head = ["system", "steps made", "s per step", "slowest step s", "ours over it"]
        parts.append(f"**{precision}** (seeds run: {count})\n\n{table(head, rows)}")
        name, held = "progress in every iteration", all(steps == ITERATIONS for steps in made[OURS])
        goals.append(
            harness.goal(f"{precision.lower()}: {name}", "all iterations of all runs", rows[0][1], held)
        )
        goals.append(_over_swarm(setting, count))
    body = "\n\n".join(parts)
    write("unstable-links", "Links that lose and change", body, seeds, goals)


def _unstable_row(setting: Setting, row: str, made: Sequence[int]) -> list[str]:
    each, count = cell_of(setting, row, UNSTABLE), len(made)
    outcomes = [outcome_of(each, seed) for seed in range(count)]
    mean = [_mean(outcome.rows) for outcome in outcomes if outcome.rows]
    slowest = max((step.seconds for outcome in outcomes for step in outcome.rows), default=None)
    figures = [text(estimate(mean), "{:.0f}") if mean else "–", "–" if slowest is None else f"{slowest:.0f}"]
    found = _all_over(setting, row, count) if row != OURS else []
    steps = ", ".join(map(str, made))
    return [row, f"{steps} of {ITERATIONS}", *figures, str(summarised(found)) if found else ""]


def _over_swarm(setting: Setting, seeds: int) -> Goal:
    """Ours over the SWARM that is quickest, by the steps that both made in a run: those that SWARM did not
    make do not count against it."""
    found = [_all_over(setting, row, seeds) for row in UNSTABLE_ROWS if row in SWARMS]
    each = max((summarised(one) for one in found if one), key=lambda one: one.mean, default=None)
    over = "iteration time over that of the strongest SWARM, by the steps that it made"
    name = f"{NAMES[setting[2]].lower()}: {over}"
    if each is None:
        return harness.goal(name, "at most 0.60", "no variant of SWARM makes a step", None)
    return harness.goal(name, "at most 0.60", str(each), each.high <= 0.60)


def _all_over(setting: Setting, row: str, seeds: int) -> list[float]:
    """Ours over a row, of each seed in which both made a step, by the steps that both made."""
    found = [_over(setting, row, seed) for seed in range(seeds)]
    return [each for each in found if each is not None]


def _over(setting: Setting, row: str, seed: int) -> float | None:
    ours, theirs = (outcome_of(cell_of(setting, each, UNSTABLE), seed).rows for each in (OURS, row))
    both = min(len(ours), len(theirs))
    return _mean(ours[:both]) / _mean(theirs[:both]) if both else None


def paced(seeds: int) -> None:
    found = measured(PACED_SETTINGS, seeds, PACED)
    words = (
        "The settings of [the comparison](comparison.md) once with paced connections (`network.burst_trips` "
        "= 0.53), the model of links that was held against real swarms."
    )
    body = f"{words} {COMMON_WORDS}\n\n{tables(found, PACED)}"
    data = {"ours_over": ratios_of_seeds(found, PACED)}
    write("paced", "The comparison with paced connections", body, seeds, data=data)


SECTIONS: dict[str, tuple[tuple[Setting, ...], Mapping[str, Any], Any]] = {
    "comparison": (ORDER, {}, comparison),
    "comparison-further": (FURTHER, {}, further),
    "comparison-thin": (THIN_SETTINGS, {}, thin),
    "unstable-links": (UNSTABLE_SETTINGS, UNSTABLE, unstable),
    "paced": (PACED_SETTINGS, PACED, paced),
}
DRY = False


def main() -> int:
    global DRY
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    harness.add_executor(parser)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--only-write", action="store_true", help="run nothing; write what is in the cache")
    args = parser.parse_args()
    DRY = args.dry
    where = executor(args.executor, args.processes)
    for name in args.sections:
        settings, more, tell = SECTIONS[name]
        if not args.only_write:
            only = UNSTABLE_ROWS if name == "unstable-links" else ()
            run_all(settings, args.seeds, more, only, where)
        tell(args.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(harness.main_by_name())
