"""Time to a loss: islands on a fleet at home against the best of its machines alone.

    nice python -m benchmarks.simulation.time_to_loss

Both train the same model on the same corpus and end with their learning rate near zero, each with its own
batch and rates. Time is counted in tokens that the best machine takes alone. The synchronous beginning of a
fleet is computed by that machine, so that nothing crosses a line. A round is as much faster as the result
`islands` says of llama-350m on `volunteers` with rounds that are as long (STEPS_OF). Steps ahead take the
place of idle time (exchange, late islands), as far as they last. How much faster the fleet is at a loss
follows from the tokens that the machine alone needs for it, between its runs by the logarithm. One row has
no rounds: steps on the batch of all machines, as if exchanges took no time. It says what the batch costs;
what islands lack beyond it is theirs.

The model is small (20 thousand parameters, bytes), so that runs of hundreds of rounds fit into an hour of one
core (`stacked_islands`). Every run is kept in build/time-to-loss as soon as it ends, and the result
`time-to-loss` is written after it; begun again, the program goes on. Shorter runs come first.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from anabranch.config import PipelineSection, RoundSection, RunConfig, with_changes
from anabranch.data.corpus import Corpus, materialise
from anabranch.train.model.rounds import rounds_of
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.recipes.recipes import recipe_run
from benchmarks import harness
from benchmarks.harness import Goal, at_least, table
from benchmarks.simulation.stacked_islands import Stack

SEQUENCE, HELD_OUT_ROWS, MACHINES = 64, 512, 24
#: Shape of the model, and a vocabulary of bytes.
SHAPE = {
    "model.dim": 32,
    "model.blocks": 1,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.ffn": 88,
    "model.initial_std": 0.1,
    "pipeline.stages": 1,
    "data.vocab_size": 257,
}
#: Inner steps of a round here -> row of the result `islands` with rounds that are as long: 31.25 steps there
#: take as long as one here, by choice. Rounds with results of 4 bits have rows of their own (FOUR_BITS).
STEPS_OF = {16: "islands", 4: "islands, 125 steps", 2: "islands, 62 steps", 1: "islands, 32 steps"}
FOUR_BITS = ", 4-bit results"
_MEAN = RoundSection(
    slots=MACHINES, steps=16, first_steps=1, outer_lr=1.0, outer_momentum=0.0, first_moment="estimate"
)
_KEPT = replace(_MEAN, first_moment="keep")
_AHEAD = replace(_KEPT, first_steps=0, unsent="local", ahead="keep")
_AGREED = replace(_MEAN, first_steps=0, first_moment="agree")
_FOUR_BITS = replace(_AGREED, results="int4")
_RATES = 0.01, 0.02, 0.04
#: Inner steps of each island in a round of four on average, by the speeds of the relays of `volunteers`, seed
#: 0; share of the contributions that are lost with their machines.
UNEQUAL = (9,) * 4 + (6,) * 4 + (4,) * 4 + (3,) * 3 + (2,) * 2 + (1,) * 7
LOST = 0.05


@dataclass(frozen=True)
class Row:
    """Row of the result: rounds (None: synchronous), microbatches of a step, rows in each; tokens of each run
    -> its learning rates; decay of the second moment; tokens of a run -> share of its synchronous beginning;
    inner steps of each island in a round (empty: all equal); share of the contributions that are lost."""

    rounds: RoundSection | None
    microbatches: int
    rows: int
    lengths: Mapping[int, tuple[float, ...]]
    beta2: float = 0.95
    start: Mapping[int, float] = field(default_factory=dict)
    inner: tuple[int, ...] = ()
    lost: float = 0.0

    @property
    def step_tokens(self) -> int:
        return self.microbatches * self.rows * SEQUENCE


ALONE, TOGETHER = "best machine alone", "all 24, synchronous, lines free"
ALONE_256, ALONE_512, ALONE_1024 = (f"{ALONE}, {tokens} tokens a step" for tokens in (256, 512, 1024))
#: Rows with which the others are compared, by the better one of each length.
ALONES = ALONE, ALONE_256, ALONE_512, ALONE_1024
#: Alone, 0.99 as the second moment's decay was worse (500,000 tokens: 1.781 instead of 1.749).
ROWS = {
    ALONE: Row(
        None, 1, 2,
        dict.fromkeys((125_000, 250_000, 500_000, 1_000_000, 2_000_000), (0.005, 0.01, 0.02))
        | {4_000_000: (0.0025, 0.005, 0.01)}
        | dict.fromkeys((8_000_000, 16_000_000), (0.0025, 0.005)),
    ),
    ALONE_256: Row(
        None, 1, 4,
        {2_000_000: (0.005, 0.01)} | dict.fromkeys((4_000_000, 8_000_000, 16_000_000), (0.0025, 0.005)),
    ),
    ALONE_512: Row(
        None, 1, 8,
        dict.fromkeys((2_000_000, 4_000_000, 8_000_000), (0.005, 0.01)) | {16_000_000: (0.005,)},
    ),
    ALONE_1024: Row(None, 1, 16, dict.fromkeys((4_000_000, 8_000_000), (0.01, 0.02)), 0.98),
    TOGETHER: Row(None, MACHINES, 1, {1_500_000: (0.01, 0.02, 0.04), 6_000_000: (0.01, 0.02)}),
    "islands, H = 16": Row(
        _MEAN, MACHINES, 1, {1_500_000: _RATES, 6_000_000: (0.02,)},
        start={1_500_000: 0.02, 6_000_000: 0.02},
    ),
    "islands, H = 4": Row(
        replace(_MEAN, steps=4), MACHINES, 1, {1_500_000: (0.02,), 3_000_000: (0.02,)},
        0.99, {1_500_000: 0.04, 3_000_000: 0.02},
    ),
    "islands, H = 4, moments kept": Row(
        replace(_KEPT, steps=4), MACHINES, 1,
        {1_500_000: _RATES, 3_000_000: (0.01, 0.02), 6_000_000: (0.02,)},
        0.99, {1_500_000: 0.04, 3_000_000: 0.02, 6_000_000: 0.01},
    ),
    "islands, H = 4, moments kept, 2 steps ahead": Row(
        replace(_AHEAD, steps=4, overlap=2), MACHINES, 1,
        {1_500_000: (0.01, 0.02), 3_000_000: (0.02,), 6_000_000: (0.02,)},
        0.99, {1_500_000: 0.04, 3_000_000: 0.02, 6_000_000: 0.01},
    ),
    "islands, H = 3, moments kept, 2 steps ahead": Row(
        replace(_AHEAD, steps=3, overlap=2), MACHINES, 1, {6_000_000: (0.02,)}, 0.99, {6_000_000: 0.01},
    ),
    "islands, H = 2, moments kept, 1 step ahead": Row(
        replace(_AHEAD, steps=2, overlap=1), MACHINES, 1,
        {1_500_000: (0.01, 0.02), 6_000_000: (0.02,)},
        0.99, {1_500_000: 0.04, 6_000_000: 0.01},
    ),
    "islands, H = 4, moments agreed": Row(
        replace(_AGREED, steps=4), MACHINES, 1,
        {1_500_000: _RATES, 3_000_000: (0.02,), 6_000_000: (0.01, 0.02)},
        0.98, {1_500_000: 0.04, 3_000_000: 0.02, 6_000_000: 0.01},
    ),
    "islands, H = 2, moments agreed": Row(
        replace(_AGREED, steps=2), MACHINES, 1, {3_000_000: (0.02,), 6_000_000: (0.02,)},
        0.98, {3_000_000: 0.02, 6_000_000: 0.01},
    ),
    "islands, H = 1, moments agreed": Row(
        replace(_AGREED, steps=1), MACHINES, 1, {6_000_000: (0.02,)}, 0.98, {6_000_000: 0.01},
    ),
    "islands, H = 4, moments agreed, 4-bit results": Row(
        replace(_FOUR_BITS, steps=4), MACHINES, 1, {3_000_000: (0.02,), 6_000_000: (0.02,)},
        0.98, {3_000_000: 0.02, 6_000_000: 0.01},
    ),
    "islands, H = 2, moments agreed, 4-bit results": Row(
        replace(_FOUR_BITS, steps=2), MACHINES, 1, {3_000_000: (0.02,)}, 0.98, {3_000_000: 0.02},
    ),
    "islands, H = 4, moments agreed, unequal machines": Row(
        replace(_AGREED, steps=4), MACHINES, 1, {6_000_000: (0.02,)}, 0.98, {6_000_000: 0.01}, UNEQUAL,
    ),
    "islands, H = 4, moments agreed, unequal machines, 5 % lost": Row(
        replace(_AGREED, steps=4), MACHINES, 1, {6_000_000: (0.02,)}, 0.98, {6_000_000: 0.01}, UNEQUAL, LOST,
    ),
    "islands, H = 16, moments agreed": Row(
        replace(_AGREED, steps=16), MACHINES, 1,
        {1_500_000: (0.01, 0.02), 6_000_000: (0.02,)},
        0.98, {1_500_000: 0.04, 6_000_000: 0.01},
    ),
}  # fmt: skip


def run_file(name: str, tokens: int, rate: float, seed: int) -> RunConfig:
    """Run file of a row of the result."""
    row = ROWS[name]
    steps = max(1, round(tokens / row.step_tokens))
    changes = {"compute.device": "cpu", "compute.dtype": "fp32", "run.steps": steps, "run.seed": seed}
    changes |= {"batch.microbatches": row.microbatches, "batch.rows": row.rows, "batch.sequence": SEQUENCE}
    changes |= {"optimizer.lr": rate, "optimizer.schedule": "linear", "optimizer.min_lr_ratio": 0.02}
    changes |= {"optimizer.warmup_steps": max(2, round(0.03 * steps)), "optimizer.beta2": row.beta2}
    config = with_changes(recipe_run("llama-tiny"), SHAPE | changes)
    rounds = replace(row.rounds, start=row.start[tokens]) if row.rounds else RoundSection()
    return replace(config, pipeline=PipelineSection(stages=0), round=rounds)


def kept(name: str, tokens: int, rate: float, seed: int) -> Path:
    """File of the figures of a run."""
    label = f"{name.replace(' ', '-').replace(',', '')}-{tokens}-{rate:g}-{seed}"
    return harness.CACHE / "time-to-loss" / f"{label}.json"


def train(name: str, tokens: int, pairs: list[tuple[float, int]], corpus: Corpus) -> list[dict[str, float]]:
    """Figures of runs of one length that differ in learning rate and seed, those from the cache that were
    taken before: loss, CPU seconds, rounds, and time in tokens of one machine."""
    paths = {pair: kept(name, tokens, *pair) for pair in pairs}
    missing = [pair for pair, path in paths.items() if not path.exists()]
    if missing:
        for pair, one in zip(missing, together(name, tokens, missing, corpus), strict=True):
            harness.write_whole(paths[pair], json.dumps(one).encode())
            print(f"{name}, {tokens:,} tokens, {pair}: {one}", file=sys.stderr, flush=True)
    # Files of former programs have a time, by what rounds took then.
    return [json.loads(path.read_text()) | {"time": took(name, tokens)} for path in paths.values()]


def together(
    name: str, tokens: int, pairs: list[tuple[float, int]], corpus: Corpus
) -> list[dict[str, float]]:
    """Figures of runs that are trained as one stack."""
    row, begun = ROWS[name], time.process_time()
    stack = Stack([run_file(name, tokens, rate, seed) for rate, seed in pairs], corpus, row.inner, row.lost)
    rounds, steps = stack.rounds, stack.run.run.steps
    last = rounds.iterations(steps)
    for t in range(1, last + 1):
        stack.iterate(t)
    cpu = (time.process_time() - begun) / len(pairs)
    other = {"cpu_s": cpu, "rounds": last - rounds.start if row.rounds else 0}
    return [{"loss": loss} | other for loss in stack.held_out(HELD_OUT_ROWS // row.rows)]


def took(name: str, tokens: int) -> float:
    """Time of a run, in tokens of the best machine alone."""
    row, run = ROWS[name], run_file(name, tokens, 0.01, 0)
    whole = float(run.run.steps * row.step_tokens)
    if name in ALONES:
        return whole
    if not row.rounds:
        return whole / fleet(16, row.rounds)[0]
    rounds = rounds_of(run)
    last = rounds.iterations(run.run.steps)
    full, idle = fleet(max(steps for steps in STEPS_OF if steps <= row.rounds.steps), row.rounds)
    count, idle = last - rounds.start, max(0.0, idle - row.rounds.overlap)
    inner = rounds.progress(last) - rounds.start + count * idle
    return (rounds.start + inner / full) * row.step_tokens


def fleet(steps: int, rounds: RoundSection | None) -> tuple[float, float]:
    """Throughput over that of its best machine that the fleet would have if it computed all the time, and the
    idle time of a round of so many steps, in steps; by the result `islands`. rounds: those of the row."""
    name = STEPS_OF[steps] + FOUR_BITS * (rounds is not None and rounds.results == "int4")
    data = json.loads((harness.RESULTS / "islands.json").read_text())["data"][name]
    over, busy = statistics.mean(data["over_alone"]), statistics.mean(data["busy"])
    return over / busy, steps * (1.0 - busy) / busy


def ratio(loss: float, took: float, alone: Sequence[tuple[float, float]]) -> float | None:
    """Tokens that the machine alone needs for a loss, over `took`; None outside its runs. alone: (tokens,
    loss) of each of its runs."""
    curve = sorted(alone)
    for (few, high), (many, low) in pairwise(curve):
        if low <= loss <= high and high > low:
            share = (high - loss) / (high - low)
            return math.exp(math.log(few) + share * math.log(many / few)) / took
    return None


Found = dict[str, dict[int, dict[float, dict[int, dict[str, float]]]]]
"""Row -> tokens -> learning rate -> seed -> figures."""


def best(of_rate: dict[float, dict[int, dict[str, float]]]) -> float:
    """Learning rate with the least mean loss of all seeds."""
    return min(of_rate, key=lambda rate: mean_loss(of_rate[rate]))


def mean_loss(of_seed: dict[int, dict[str, float]]) -> float:
    """Mean loss of a run's seeds."""
    return statistics.mean(one["loss"] for one in of_seed.values())


def write(args: Namespace, found: Found) -> None:
    lines, most = list[list[str]](), 0.0
    speeds = ", ".join(
        f"{full * steps / (steps + idle):.1f} (H = {steps}{words})"
        for rounds, words in ((None, ""), (_FOUR_BITS, FOUR_BITS))
        for steps in STEPS_OF if steps < 16 or not rounds
        for full, idle in [fleet(steps, rounds)]
    )  # fmt: skip
    rows = [found.get(name, {}) for name in ALONES]
    alone = {
        tokens: min((row[tokens][best(row[tokens])] for row in rows if tokens in row), key=mean_loss)
        for tokens in {tokens for row in rows for tokens in row}
    }
    for name, of_tokens in found.items():
        for tokens, of_rate in sorted(of_tokens.items()):
            rate = best(of_rate)
            gains, known = list[str](), list[float]()
            for seed, one in of_rate[rate].items():
                curve = [(few, each[seed]["loss"]) for few, each in alone.items() if seed in each]
                gain = None if name in ALONES else ratio(one["loss"], one["time"], curve)
                beyond = name not in ALONES and bool(curve) and one["loss"] < min(loss for _, loss in curve)
                least = max((few for few, _ in curve), default=0.0) / one["time"]
                gains.append(f"{gain:.2f}" if gain else f"over {least:.1f}" if beyond else "–")
                known.append(gain or least * beyond)
            most = max(most, min(known)) if ROWS[name].rounds else most
            figures = of_rate[rate].values()
            of_all = [(few, mean_loss(each)) for few, each in alone.items() if len(each) == len(figures)]
            mean = ratio(mean_loss(of_rate[rate]), next(iter(figures))["time"], of_all)
            by_mean = f"{mean:.2f}" if mean and name not in ALONES else "–"
            losses = " · ".join(f"{one['loss']:.3f}" for one in figures)
            others = ", ".join(
                f"{next(iter(each.values()))['loss']:.3f} ({other:g})"
                for other, each in of_rate.items() if other != rate
            )
            first = next(iter(figures))
            lines.append([
                name, f"{tokens / 1e6:g}", f"{first['rounds']:g}" if first["rounds"] else "–",
                f"{first['time'] / 1e6:.3f}", f"{rate:g}", losses, " · ".join(gains), by_mean, others,
            ])  # fmt: skip
    columns = ["", "tokens, million", "rounds", "time, million tokens of one", "rate", "loss, each seed",
               "× alone, each seed", "× alone, mean loss", "other rates, first seed"]  # fmt: skip
    text = (
        f"LLaMA of 20 thousand parameters (dim 32, one block, bytes), fp32, sequences of {SEQUENCE}. A step "
        f"of the machine alone has {ROWS[ALONE].step_tokens} tokens, if nothing else is said; with other "
        "batches the better one counts. An "
        f"inner step of each of {MACHINES} islands has {SEQUENCE}; they are equal and none is late, if "
        "nothing else is said. *Unequal machines*: an island has as many steps in a round as its machine is "
        "quick, by the relays of `volunteers`; *5 % lost*: that share of the contributions counts in no "
        f"round. Times the throughput of the machine, by rounds of as long a time (`islands`): {speeds}. "
        "*× alone*: time of the machine alone to this loss over that of the fleet; "
        "– where no two of its runs enclose the loss; *over*: none of its runs came so low; *mean loss*: "
        "that of all seeds, of both. The rate of a "
        f"row is that with the least mean loss.\n\n{table(columns, lines)}"
    )
    goals: list[Goal] = [
        at_least("time to a loss, × the best machine alone (best row, its least seed)", 10.0, most, "{:.2f}")
    ]
    harness.write("time-to-loss", "Time to a loss: islands against the best machine alone", text,
                  goals=goals, data=found, dry=args.dry)  # fmt: skip


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    arguments.add_argument("--most", type=float, default=math.inf, help="most tokens of a run, millions")
    arguments.add_argument("--kept", action="store_true", help="begin no run: only those that were taken")
    arguments.add_argument("--minutes", type=float, default=math.inf, help="begin no run later")
    args = arguments.parse_args()
    configure(1)
    data = with_changes(recipe_run("llama-tiny"), SHAPE).data
    corpus = materialise(data, harness.CACHE / "time-to-loss-bytes", None, lambda text: None)
    runs = [
        (name, tokens) for name in args.rows for tokens in ROWS[name].lengths if tokens <= 1e6 * args.most
    ]
    found, begun = Found(), time.monotonic()
    for name, tokens in sorted(runs, key=lambda run: run[1]):
        if time.monotonic() - begun > 60 * args.minutes:
            break
        pairs = [(rate, seed) for rate in ROWS[name].lengths[tokens] for seed in args.seeds]
        if args.kept:
            pairs = [pair for pair in pairs if kept(name, tokens, *pair).exists()]
        for (rate, seed), one in zip(pairs, train(name, tokens, pairs, corpus), strict=True):
            found.setdefault(name, {}).setdefault(tokens, {}).setdefault(rate, {})[seed] = one
        write(args, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
