"""Time to a loss: islands on a fleet at home against the best of its machines alone.

    nice python -m benchmarks.simulation.time_to_loss --seeds 0 1 2

Both train the same model on the same corpus and end with their learning rate near zero, each with its own
batch. A run is counted by its tokens. One machine alone takes them one after another; the fleet takes those
of its rounds as much faster as the result `islands` says of llama-350m on `volunteers` (inner steps,
exchange and late islands included), and those of the synchronous beginning no faster: one machine begins, so
that nothing crosses a line. So the time is in tokens of the best machine. How much faster the fleet is at a
loss follows from the tokens that the machine alone needs for it, between its runs by the logarithm.

Every run is kept in build/time-to-loss as soon as it ends, and the result `time-to-loss` is written after it;
begun again, the program goes on. Shorter runs come first.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise

from anabranch.config import PipelineSection, RoundSection, with_changes
from anabranch.data.corpus import materialise, open_corpus
from anabranch.train.numerics.numerics_class import configure
from anabranch.train.recipes.recipes import DEFAULT_SIZE, recipe_run
from benchmarks import harness
from benchmarks.harness import Goal, at_least, table
from benchmarks.simulation.sync_methods import Trainer

SEQUENCE, HELD_OUT_ROWS = 128, 512
#: Rows of a batch of the machine alone, and of an island. Alone, 4 rows gave 2.609 and 2.591 nats (in
#: bf16, rates 0.005 and 0.0025) after 1.5 million tokens, 48 rows 2.741 (rate 0.007); others were not tried.
ALONE_ROWS, ISLAND_ROWS = 4, 2
MACHINES = 24
_MEAN = RoundSection(
    slots=MACHINES, steps=16, first_steps=1, start=0.02, outer_lr=1.0, outer_momentum=0.0,
    first_moment="estimate",
)  # fmt: skip
#: Row -> rounds; None: the best machine alone.
ROWS: dict[str, RoundSection | None] = {
    "best machine alone": None,
    "islands, mean": _MEAN,
    "islands, Nesterov 0.7": replace(_MEAN, outer_momentum=0.7, first_moment="zero"),
}
#: Tokens of the runs of the machine alone, and of the fleet.
ALONE_TOKENS = (240_000, 480_000, 960_000, 1_920_000, 3_840_000, 7_680_000)
FLEET_TOKENS = (1_200_000, 4_000_000, 16_000_000)
Run = tuple[str, int, float, int]
"""Row, tokens, learning rate, seed."""


def train(run: Run, model: str) -> dict[str, float]:
    """Loss, tokens of the beginning and of the rounds, and CPU seconds of a run, from the cache if it was
    taken before."""
    name, tokens, rate, seed = run
    label = f"{model}-fp32-{name.replace(' ', '-')}-{tokens}-{rate:g}-{seed}"
    path = harness.CACHE / "time-to-loss" / f"{label}.json"
    if path.exists():
        return dict(json.loads(path.read_text()))
    rounds = ROWS[name]
    slots, rows = (rounds.slots, ISLAND_ROWS) if rounds else (1, ALONE_ROWS)
    steps = max(1, round(tokens / (slots * rows * SEQUENCE)))
    changes = {"compute.device": "cpu", "compute.dtype": "fp32", "run.steps": steps, "run.seed": seed}
    changes |= {"batch.microbatches": slots, "batch.rows": rows, "batch.sequence": SEQUENCE}
    changes |= {"optimizer.lr": rate, "optimizer.schedule": "linear", "optimizer.min_lr_ratio": 0.02}
    config = with_changes(
        recipe_run(model), changes | {"optimizer.warmup_steps": max(2, round(0.03 * steps))}
    )
    config = replace(config, pipeline=PipelineSection(stages=0), round=rounds or RoundSection())
    folder = harness.CACHE / "sync-methods-corpus"
    if not folder.exists():
        materialise(config.data, folder, None, lambda text: None)
    trainer, begun = Trainer(config, open_corpus(folder)), time.process_time()
    last = trainer.rounds.iterations(steps)
    for t in range(1, last + 1):
        trainer.iterate(t)
    of_step = slots * rows * SEQUENCE
    start = trainer.rounds.start if rounds else trainer.rounds.progress(last)
    found = {
        "loss": trainer.held_out(HELD_OUT_ROWS // rows),
        "alone": start * of_step,
        "together": (trainer.rounds.progress(last) - start) * of_step,
        "cpu_s": time.process_time() - begun,
    }
    harness.write_whole(path, json.dumps(found).encode())
    print(f"{run}: {found}", file=sys.stderr, flush=True)
    return found


def speed_up() -> float:
    """Throughput of the fleet over that of its best machine, by the result `islands`."""
    data = json.loads((harness.RESULTS / "islands.json").read_text())["data"]
    return statistics.mean(data["islands"]["over_alone"])


def ratio(loss: float, took: float, alone: list[tuple[float, float]]) -> float | None:
    """Tokens that the machine alone needs for a loss, over `took`; None outside its runs. alone: (tokens,
    loss) of each of its runs."""
    curve = sorted(alone)
    for (few, high), (many, low) in pairwise(curve):
        if low <= loss <= high and high > low:
            share = (high - loss) / (high - low)
            return math.exp(math.log(few) + share * math.log(many / few)) / took
    return None


Found = dict[str, dict[float, dict[int, dict[int, dict[str, float]]]]]
"""Row -> learning rate -> seed -> tokens -> figures."""


def write(args: Namespace, found: Found) -> None:
    faster, rows, best = speed_up(), list[list[str]](), 0.0
    for name, of_rate in found.items():
        for rate, of_seed in of_rate.items():
            for seed, of_tokens in of_seed.items():
                for tokens, one in sorted(of_tokens.items()):
                    took = one["alone"] + one["together"] / faster
                    alone = [
                        (few, each["loss"])
                        for few in ALONE_TOKENS
                        for each in [least(found, seed, few)]
                        if each is not None
                    ]
                    gain = ratio(one["loss"], took, alone) if ROWS[name] else None
                    best = max(best, gain or 0.0)
                    rows.append(
                        [
                            name,
                            f"{rate:g}",
                            str(seed),
                            f"{tokens / 1e6:.2f}",
                            f"{took / 1e6:.3f}",
                            f"{one['loss']:.3f}",
                            f"{gain:.2f}" if gain else "–",
                        ]
                    )
    columns = ["", "rate", "seed", "tokens, million", "time, million tokens of one", "loss", "× alone"]
    text = (
        f"{args.model}, computed in fp32; {MACHINES} islands of {ISLAND_ROWS * SEQUENCE} tokens an inner "
        f"step against one machine with {ALONE_ROWS * SEQUENCE} a step; equal islands, none late. In rounds "
        f"the fleet has {faster:.1f} times the throughput of the machine (`islands`). *× alone*: time of the "
        "machine alone to this loss over that of the fleet; – where no two of its runs enclose the loss.\n\n"
        f"{table(columns, rows)}"
    )
    goals: list[Goal] = [
        at_least("time to a loss, × the best machine alone (best row)", 10.0, best, "{:.2f}")
    ]
    harness.write("time-to-loss", "Time to a loss: islands against the best machine alone", text,
                  goals=goals, data=found, dry=args.dry)  # fmt: skip


def least(found: Found, seed: int, tokens: int) -> dict[str, float] | None:
    """Figures of the machine alone after so many tokens, with the rate that was best then."""
    rates = found.get("best machine alone", {}).values()
    figures = [of_seed[seed][tokens] for of_seed in rates if tokens in of_seed.get(seed, {})]
    return min(figures, key=lambda one: one["loss"], default=None)


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--model", default=DEFAULT_SIZE)
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.005, 0.0025])
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--most", type=float, default=math.inf, help="most tokens of a run, millions")
    arguments.add_argument("--minutes", type=float, default=math.inf, help="begin no run later")
    args = arguments.parse_args()
    configure(1)
    runs = [
        (name, tokens, rate, seed)
        for name, rounds in ROWS.items()
        for tokens in (FLEET_TOKENS if rounds else ALONE_TOKENS)
        for rate in args.rates
        for seed in args.seeds
        if tokens <= 1e6 * args.most
    ]
    found, begun = Found(), time.monotonic()
    for run in sorted(runs, key=lambda run: (run[3], run[1], -run[2])):
        if time.monotonic() - begun > 60 * args.minutes:
            break
        name, tokens, rate, seed = run
        of_rate = found.setdefault(name, {}).setdefault(rate, {})
        of_rate.setdefault(seed, {})[tokens] = train(run, args.model)
        write(args, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
