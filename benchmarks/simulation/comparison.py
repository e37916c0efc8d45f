"""Every system at the same bytes on the wire, early and late, with and without churn.

    nice python -m benchmarks.simulation.comparison --seeds 5

Ten regions with equal and with unequal machines, and equal machines behind unequal lines, in virtual time.
Each system at its own published precision, all at fp16, and all at 8 bits: only sizes change. 24 iterations;
the *early* window is 3 to 8, the *late* one 17 to 24. Settings and cache are those of `policies`; a run that
was stopped goes on where it was. `--sections` picks parts. Writes the results `comparison`, `unstable-links`
and `paced`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any

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
    outcome_of,
    path_of,
    text,
)

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
#: Precision -> policy -> its bytes; "" for all others. Of its own SWARM has 8-bit activations and fp16
#: averages, DT-FM fp16; GWTF names none, and routes here for our protocol.
PRECISIONS: dict[str, dict[str, Bytes]] = {
    "own": {
        "": EXACT,
        "restart": FP16,
        **dict.fromkeys(("swarm-published", "swarm-as-coded", "swarm-tuned"), (BLOCKWISE, 2.0, 2.0)),
    },
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
    *product((HETEROGENEOUS,), (CALM, STRUCK), ("fp16", "own")),
    *product(MAIN, (0.2,), ("fp16", "own", "8 bits")),
)
UNSTABLE_SETTINGS: tuple[Setting, ...] = tuple(product(("unequal",), (STRUCK,), ("fp16", "own")))
PACED_SETTINGS: tuple[Setting, ...] = tuple(product(MAIN, (CALM, STRUCK), ("fp16",)))


def rows_of_setting(setting: Setting) -> list[str]:
    """Rows of a setting's table. `gwtf` and DT-FM's search take most of the time. They are left out under
    churn, where only SWARM is compared, and of unequal lines."""
    machines, crash, _ = setting
    return [row for row in ROWS if not (crash or machines == HETEROGENEOUS) or row not in ("gwtf", STATIC[0])]


def run_all(
    settings: Iterable[Setting], seeds: int, more: Mapping[str, Any], only: Sequence[str] = ()
) -> None:
    """Each setting, all rows and seeds; what is in the cache is not run again."""
    for setting in settings:
        rows = only or rows_of_setting(setting)
        jobs = [(cell_of(setting, row, more), seed) for seed in range(seeds) for row in rows]
        missing = [job for job in jobs if not path_of(*job).exists()]
        for done, job in enumerate(missing, 1):
            outcome_of(*job)
            print(f"{setting}: {done} of {len(missing)}", file=sys.stderr, flush=True)


def complete(
    settings: Iterable[Setting], seeds: int, more: Mapping[str, Any], only: Sequence[str] = ()
) -> list[Setting]:
    """Settings of which all rows and seeds are in the cache."""
    return [
        setting
        for setting in settings
        if all(
            path_of(cell_of(setting, row, more), seed).exists()
            for row in only or rows_of_setting(setting)
            for seed in range(seeds)
        )
    ]


# --- figures ------------------------------------------------------------------------------------------


def rows_of(each: Cell, seed: int, window: Window) -> list[Row]:
    """Iterations of a window; none if the run failed."""
    outcome = outcome_of(each, seed)
    return [] if outcome.failure else [row for row in outcome.rows if window[0] <= row.t <= window[1]]


def seconds(each: Cell, seeds: int, window: Window) -> Estimate:
    """Mean iteration of a window, over the seeds that finished."""
    found = [rows_of(each, seed, window) for seed in range(seeds)]
    return estimate([fmean(row.seconds for row in rows) for rows in found if rows])


def quotient(ours: Cell, theirs: Cell, seeds: int, window: Window) -> Estimate:
    """Ours over theirs, of each seed, then the mean: the crashes are the same draws."""
    pairs = [(rows_of(ours, seed, window), rows_of(theirs, seed, window)) for seed in range(seeds)]
    return estimate([_mean(one) / _mean(other) for one, other in pairs if one and other])


def _mean(rows: Sequence[Row]) -> float:
    return fmean(row.seconds for row in rows)


def wasted(each: Cell, seeds: int) -> Estimate:
    """Share of the computed seconds that entered no step."""
    found = [rows_of(each, seed, ALL) for seed in range(seeds)]
    return estimate(
        [sum(r.wasted_s for r in rows) / sum(r.computed_s for r in rows) for rows in found if rows]
    )


def strongest(setting: Setting, rows: Sequence[str], seeds: int, more: Mapping[str, Any]) -> str:
    """Row with the shortest mean iteration among those that finished all seeds."""
    means = {row: seconds(cell_of(setting, row, more), seeds, ALL).mean for row in rows}
    return min(means, key=lambda row: means[row])


def worst(
    settings: Iterable[Setting], rows: Sequence[str], seeds: int, window: Window, more: Mapping[str, Any]
) -> tuple[Estimate, Setting] | None:
    """Ours over the strongest of some rows, in the setting where the interval ends highest."""
    found = []
    for setting in settings:
        if not set(rows) <= set(rows_of_setting(setting)):
            continue
        other = cell_of(setting, strongest(setting, rows, seeds, more), more)
        found.append((quotient(cell_of(setting, OURS, more), other, seeds, window), setting))
    return max(found, key=lambda pair: pair[0].mean + pair[0].half, default=None)


def title(machines: str) -> str:
    """Name of a fleet in a sentence."""
    return f"{machines} machines" if machines in MAIN else "equal machines, unequal lines"


def goal(name: str, most: float, found: tuple[Estimate, Setting] | None) -> list[Goal]:
    """Met only if the whole interval is on the right side; no goal where nothing was measured."""
    if found is None:
        return []
    each, (machines, crash, _) = found
    where = f" ({title(machines)}, {100 * crash:.0f} % churn)"
    held = each.mean + each.half <= most
    return [harness.goal(name, f"at most {most:.2f}", text(each) + where, held)]


# --- telling ------------------------------------------------------------------------------------------


def table_of(setting: Setting, seeds: int, more: Mapping[str, Any]) -> str:
    ours, lines = cell_of(setting, OURS, more), []
    for row in rows_of_setting(setting):
        each = cell_of(setting, row, more)
        finished = sum(bool(rows_of(each, seed, ALL)) for seed in range(seeds))
        figures = [text(seconds(each, seeds, window), "{:.1f}") for window in (EARLY, LATE, ALL)]
        over = (
            [text(quotient(ours, each, seeds, window)) for window in (LATE, ALL)] if row != OURS else ["", ""]
        )
        lines.append(
            [row, *figures, *over, text(wasted(each, seeds), "{:.1f} %", 100.0), f"{finished} of {seeds}"]
        )
    head = [
        "system",
        "s, 3–8",
        "s, 17–24",
        "s, 3–24",
        "ours over it, 17–24",
        "ours over it, 3–24",
        "wasted",
        "finished",
    ]
    return table(head, lines)


def tables(settings: Sequence[Setting], seeds: int, more: Mapping[str, Any]) -> str:
    parts = []
    for machines, crash in dict.fromkeys((machines, crash) for machines, crash, _ in settings):
        name = title(machines)
        parts.append(f"### {name[0].upper()}{name[1:]}, {100 * crash:.0f} % churn")
        for setting in settings:
            if setting[:2] == (machines, crash):
                parts.append(f"**{NAMES[setting[2]]}**\n\n{table_of(setting, seeds, more)}")
    return "\n\n".join(parts)


NAMES = {
    "own": "Each system at its own published precision",
    "fp16": "All at fp16",
    "8 bits": "All at 8 bits",
}


def write(section: str, title: str, body: str, seeds: int, goals: Sequence[Goal] = ()) -> None:
    """Write a result with the command that runs its section, also where outcomes came from the cache."""
    command = f"python -m {harness.module()} --sections {section} --seeds {seeds}"
    harness.write(section, title, body, goals=goals, reproduce=command, dry=DRY)


def common_words(seeds: int) -> str:
    return (
        f"LLaMA-like (llama-350m), {seeds} seeds, {ITERATIONS} iterations, mean ± half of the 95 % interval "
        "over the seeds. *Own precision*: `auction` and `gwtf` route for our protocol, with fp32 "
        "activations and exact sums (4 bytes a value; 5.5 + 4 bytes a parameter in a reduce); SWARM has "
        "8-bit activations and averages in fp16; the static arrangement has fp16. *All at fp16*: 2 bytes a "
        "value, 2 + 2 bytes a parameter; *all at 8 bits*: half of that. Only sizes change: no time is "
        "counted for packing, and for `auction` fewer bytes than at its own precision mean that sums are no "
        "longer exact. *static*: the best static arrangement, found centrally, which begins an iteration "
        "anew at each crash (`restart`). *Our placement* of baselines is found by a cost model that knows "
        "that they reduce evenly. *ours over it*: iteration time of `auction` over that of the row, of each "
        "seed, then the mean."
    )


def comparison(seeds: int) -> None:
    found = complete(ORDER, seeds, {})
    goals: list[Goal] = []
    for precision in PRECISIONS:
        main = [s for s in found if s[0] in MAIN and s[2] == precision]
        struck, calm = [s for s in main if s[1]], [s for s in main if not s[1]]
        name, over = NAMES[precision].lower(), "iteration time over that of"
        goals += goal(
            f"{name}: {over} the strongest SWARM, with churn", 0.60, worst(struck, SWARMS, seeds, ALL, {})
        )
        static = worst(calm, STATIC, seeds, ALL, {})
        goals += goal(f"{name}: {over} the best static arrangement, without churn", 0.90, static)
        goals += goal(f"{name}: {over} `gwtf`, late window", 1.0, worst(main, ("gwtf",), seeds, LATE, {}))
        unequal = [s for s in found if s[0] == HETEROGENEOUS and s[2] == precision]
        goals += goal(
            f"{name}: {over} the strongest SWARM, unequal lines", 0.50, worst(unequal, SWARMS, seeds, ALL, {})
        )
    parts = [tables(found, seeds, {}), beside_the_paper(found, seeds), fallen(found, seeds)]
    body = "\n\n".join([common_words(seeds), *parts])
    write("comparison", "At the same bytes: SWARM, GWTF, static", body, seeds, goals)


def beside_the_paper(found: Sequence[Setting], seeds: int) -> str:
    """GWTF's claims beside what is measured here."""

    def less(settings: Sequence[Setting], rows: Sequence[str]) -> str:
        each = worst(settings, rows, seeds, ALL, {})
        if each is None:
            return "not measured"
        quotient, (machines, crash, _) = each
        share = f"{100 * (1 - quotient.mean):.0f} ± {100 * quotient.half:.0f} %"
        return f"{share} ({title(machines)}, {100 * crash:.0f} % churn)"

    main = [s for s in found if s[0] in MAIN and s[2] == "fp16"]
    struck, calm = [s for s in main if s[1]], [s for s in main if not s[1]]
    unequal = [s for s in found if s[0] == HETEROGENEOUS and s[2] == "fp16"]
    portrayed, strong = ("swarm-published",), SWARMS
    ours = [wasted(cell_of(s, OURS), seeds) for s in struck]
    theirs = [wasted(cell_of(s, strongest(s, SWARMS, seeds, {})), seeds) for s in struck]

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


def fallen(found: Sequence[Setting], seeds: int) -> str:
    """Earlier claims beside what is measured here, in the worst setting of each precision."""
    rows = []
    for claim, value, how, rivals, churn, window in CLAIMS:
        settings = [s for s in found if s[0] in MAIN and bool(s[1]) == churn]
        now = []
        for precision in ("fp16", "own"):
            each = worst([s for s in settings if s[2] == precision], rivals, seeds, window, {})
            found_in = each and f"{text(each[0])} ({each[1][0]}, {100 * each[1][1]:.0f} % churn)"
            now.append(found_in or "not measured")
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
    for setting in complete(UNSTABLE_SETTINGS, seeds, UNSTABLE, UNSTABLE_ROWS):
        precision = NAMES[setting[2]]
        cells = {row: cell_of(setting, row, UNSTABLE) for row in UNSTABLE_ROWS}
        made = {row: [len(outcome_of(each, s).rows) for s in range(seeds)] for row, each in cells.items()}
        rows = [_unstable_row(row, cells[row], made[row]) for row in UNSTABLE_ROWS]
        head = ["system", "steps made", "s per step", "slowest step s"]
        parts.append(f"**{precision}**\n\n{table(head, rows)}")
        name, held = "progress in every iteration", all(count == ITERATIONS for count in made[OURS])
        goals.append(
            harness.goal(f"{precision.lower()}: {name}", "all iterations of all runs", rows[0][1], held)
        )
        goals.append(_over_swarm(setting, seeds))
    body = "\n\n".join(parts)
    write("unstable-links", "Links that lose and change", body, seeds, goals)


def _unstable_row(row: str, each: Cell, made: Sequence[int]) -> list[str]:
    outcomes = [outcome_of(each, seed) for seed in range(len(made))]
    mean = [_mean(outcome.rows) for outcome in outcomes if outcome.rows]
    slowest = max((step.seconds for outcome in outcomes for step in outcome.rows), default=None)
    figures = [text(estimate(mean), "{:.0f}") if mean else "–", "–" if slowest is None else f"{slowest:.0f}"]
    return [row, ", ".join(f"{count} of {ITERATIONS}" for count in made), *figures]


def _over_swarm(setting: Setting, seeds: int) -> Goal:
    """Ours over the SWARM that is quickest, by the steps that both made in a run: those that SWARM did not
    make do not count against it."""
    found = []
    for row in UNSTABLE_ROWS:
        ratios = [_over(setting, row, seed) for seed in range(seeds)] if row in SWARMS else []
        found.append(estimate([ratio for ratio in ratios if ratio is not None]))
    each = max((one for one in found if one.mean == one.mean), key=lambda one: one.mean, default=None)
    over = "iteration time over that of the strongest SWARM, by the steps that it made"
    name = f"{NAMES[setting[2]].lower()}: {over}"
    if each is None:
        return harness.goal(name, "at most 0.60", "no variant of SWARM makes a step", None)
    return harness.goal(name, "at most 0.60", text(each), each.mean + each.half <= 0.60)


def _over(setting: Setting, row: str, seed: int) -> float | None:
    ours, theirs = (outcome_of(cell_of(setting, each, UNSTABLE), seed).rows for each in (OURS, row))
    both = min(len(ours), len(theirs))
    return _mean(ours[:both]) / _mean(theirs[:both]) if both else None


def paced(seeds: int) -> None:
    found = complete(PACED_SETTINGS, seeds, PACED)
    words = (
        "The settings of [the comparison](comparison.md) once with paced connections (`network.burst_trips` "
        "= 0.53), the model of links that was held against real swarms."
    )
    body = f"{words} {common_words(seeds)}\n\n{tables(found, seeds, PACED)}"
    write("paced", "The comparison with paced connections", body, seeds)


SECTIONS: dict[str, tuple[tuple[Setting, ...], Mapping[str, Any], Any]] = {
    "comparison": (ORDER, {}, comparison),
    "unstable-links": (UNSTABLE_SETTINGS, UNSTABLE, unstable),
    "paced": (PACED_SETTINGS, PACED, paced),
}
DRY = False


def main() -> int:
    global DRY
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    parser.add_argument("--only-write", action="store_true", help="run nothing; write what is in the cache")
    args = parser.parse_args()
    DRY = args.dry
    for name in args.sections:
        settings, more, tell = SECTIONS[name]
        if not args.only_write:
            run_all(settings, args.seeds, more, UNSTABLE_ROWS if name == "unstable-links" else ())
        tell(args.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
