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
UNSTABLE = {"drift.speed": 0.2, "drift.links": 0.3, "network.loss": 0.001}
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
    ("equal", CALM, "own"),
    ("equal", STRUCK, "fp16"),
    ("equal", CALM, "fp16"),
    ("unequal", STRUCK, "fp16"),
    ("unequal", CALM, "fp16"),
    ("equal", STRUCK, "own"),
    ("unequal", STRUCK, "own"),
    ("unequal", CALM, "own"),
    *product((HETEROGENEOUS,), (CALM, STRUCK), ("fp16", "own")),
    *product(MAIN, (CALM, STRUCK), ("8 bits",)),
    *product(MAIN, (0.2,), ("fp16", "own")),
)
UNSTABLE_SETTINGS: tuple[Setting, ...] = tuple(product(("unequal",), (CALM, STRUCK), ("own", "fp16")))
PACED_SETTINGS: tuple[Setting, ...] = tuple(product(MAIN, (CALM, STRUCK), ("fp16",)))


def rows_of_setting(setting: Setting) -> list[str]:
    """Rows of a setting's table. Under churn at a common precision those are left out that take most of the
    time and decide no goal: DT-FM's search, as a static arrangement begins anew at each crash, and `gwtf`."""
    left = ("gwtf", STATIC[0]) if setting[1] and setting[2] != "own" else ()
    return [row for row in ROWS if row not in left]


def run_all(settings: Iterable[Setting], seeds: int, more: Mapping[str, Any]) -> None:
    """Each setting, all rows and seeds; what is in the cache is not run again."""
    for setting in settings:
        rows = rows_of_setting(setting)
        jobs = [(cell_of(setting, row, more), seed) for seed in range(seeds) for row in rows]
        missing = [job for job in jobs if not path_of(*job).exists()]
        for done, job in enumerate(missing, 1):
            outcome_of(*job)
            print(f"{setting}: {done} of {len(missing)}", file=sys.stderr, flush=True)


def complete(settings: Iterable[Setting], seeds: int, more: Mapping[str, Any]) -> list[Setting]:
    """Settings of which all rows and seeds are in the cache."""
    return [
        setting
        for setting in settings
        if all(
            path_of(cell_of(setting, row, more), seed).exists()
            for row in rows_of_setting(setting)
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


def goal(name: str, most: float, found: tuple[Estimate, Setting] | None) -> list[Goal]:
    """Met only if the whole interval is on the right side; no goal where nothing was measured."""
    if found is None:
        return []
    each, (machines, crash, _) = found
    where = f" ({machines} machines, {100 * crash:.0f} % churn)"
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
        parts.append(f"### {machines} machines, {100 * crash:.0f} % churn".capitalize())
        for setting in settings:
            if setting[:2] == (machines, crash):
                parts.append(f"**{NAMES[setting[2]]}**\n\n{table_of(setting, seeds, more)}")
    return "\n\n".join(parts)


NAMES = {
    "own": "Each system at its own published precision",
    "fp16": "All at fp16",
    "8 bits": "All at 8 bits",
}


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
    body = f"{common_words(seeds)}\n\n{tables(found, seeds, {})}"
    harness.write("comparison", "At the same bytes: SWARM, GWTF, static", body, goals=goals, dry=DRY)


def unstable(seeds: int) -> None:
    found = complete(UNSTABLE_SETTINGS, seeds, UNSTABLE)
    goals: list[Goal] = []
    done = [
        rows_of(cell_of(s, OURS, UNSTABLE), seed, (1, ITERATIONS)) for s in found for seed in range(seeds)
    ]
    if done:
        value = f"{sum(len(rows) == ITERATIONS for rows in done)} of {len(done)} runs"
        each = all(len(rows) == ITERATIONS for rows in done)
        goals.append(harness.goal("progress in every iteration", "all runs finish", value, each))
    swarm = worst(found, SWARMS, seeds, ALL, UNSTABLE)
    goals += goal("iteration time over that of the strongest SWARM", 0.60, swarm)
    words = (
        "Unequal machines (`wan10-mixed`) whose speeds and links change by the minute (`drift.speed` = 0.2, "
        "`drift.links` = 0.3), and whose links lose one packet of a thousand."
    )
    body = f"{words} {common_words(seeds)}\n\n{tables(found, seeds, UNSTABLE)}"
    harness.write("unstable-links", "Links that lose and change", body, goals=goals, dry=DRY)


def paced(seeds: int) -> None:
    found = complete(PACED_SETTINGS, seeds, PACED)
    words = (
        "The settings of [the comparison](comparison.md) once with paced connections (`network.burst_trips` "
        "= 0.53), the model of links that was held against real swarms."
    )
    body = f"{words} {common_words(seeds)}\n\n{tables(found, seeds, PACED)}"
    harness.write("paced", "The comparison with paced connections", body, dry=DRY)


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
            run_all(settings, args.seeds, more)
        tell(args.seeds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
