"""Throughput of a run in which six of eight relays are behind symmetric NATs, beside one in which all are
public (root, Linux, nft, tc).

    python -m benchmarks.reach.mostly_symmetric [--steps 10] [--rounds 2] [--mbit 50]

Two stages of four relays each, a leader and two dedicated carriers, in network namespaces of this machine.
Every line has `--mbit` Mbit/s each way. The sides take turns. In a last run the carrier that most links go
through is killed half a second after step 2; the benchmark says how long each of its links took to find
another way. `verify` recomputes every step of every run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from anabranch.errors import UserError
from benchmarks import harness
from benchmarks.harness import table
from benchmarks.reach.nat_pairs import Found, Setting, run_setting

DIRECT = {f"public {letter}": "public" for letter in "abcd"}
MOSTLY_NAT = {"public": "public"} | {f"symmetric {letter}": "symmetric" for letter in "abc"}
#: Model and batch: an activation has 0.26 MB and takes 42 ms on a line of 50 Mbit/s. No checkpoint crosses
#: the lines before the end.
CHANGES = {
    "model.dim": 128, "model.heads": 4, "model.ffn": 256, "batch.microbatches": 16, "batch.rows": 4,
    "batch.sequence": 128, "checkpoint.every": 100,
}  # fmt: skip
#: Steps left out at the start: timeouts and rates are still being measured.
WARM_UP = 2


def step_s(found: Found) -> float:
    """Median seconds of a step after the warm-up."""
    return statistics.median(found.gaps_s[WARM_UP:])


def measure(kinds: Mapping[str, str], steps: int, mbit: float, kill: bool = False) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(steps, kinds, carriers=2, mbit=mbit, changes=CHANGES)
        found = run_setting(Path(folder), setting, kill)
    print(f"{found.steps} steps, {step_s(found):.2f} s a step, carried {found.carried_mb} MB", flush=True)
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--mbit", type=float, default=50.0, help="capacity of each line, Mbit/s")
    args = parser.parse_args()
    direct, carried = [], []
    try:
        for _ in range(args.rounds):
            direct.append(measure(DIRECT, args.steps, args.mbit))
            carried.append(measure(MOSTLY_NAT, args.steps, args.mbit))
        killed = measure(MOSTLY_NAT, args.steps, args.mbit, kill=True)
    except UserError as error:
        sys.exit(str(error))
    write(args.steps, args.mbit, direct, carried, killed, args.dry)


def write(
    steps: int, mbit: float, direct: list[Found], carried: list[Found], killed: Found, dry: bool
) -> None:
    """Print the result, and write it unless `dry`."""
    exact = all(found.exact for found in (*direct, *carried, killed))
    of_direct, of_carried = (statistics.median(map(step_s, side)) for side in (direct, carried))
    per_step = statistics.median(sum(found.carried_mb) / found.steps for found in carried)
    slowest = max(killed.relinked_s, default=float("nan"))
    sides = (
        ("all public", of_direct, "0"),
        ("six of eight behind symmetric NATs", of_carried, f"{per_step:.1f}"),
        ("the same, busiest carrier killed", step_s(killed), ""),
    )
    rows = [[name, f"{seconds:.2f}", f"{of_direct / seconds:.2f}", sent] for name, seconds, sent in sides]
    longest = max(killed.gaps_s[1:3], default=float("nan"))
    text = (
        f"Two stages of four relays, a leader and two dedicated carriers; every line has {mbit:g} Mbit/s. "
        f"Medians of {len(direct)} runs of {steps} steps for each side, in turns.",
        table(["", "s per step", "throughput", "MB per step over dedicated carriers"], rows),
        f"The killed carrier forwarded {len(killed.relinked_s)} ends of links that were linked again; the "
        f"last one took {slowest:.2f} s. The step in which it died took {longest:.1f} s. Relays with an "
        "address carry too; their bytes are not counted here.",
    )
    relinked = "seconds until the killed carrier's links went another way"
    harness.write(
        "mostly-symmetric",
        "Six of eight relays behind symmetric NATs",
        "\n\n".join(text),
        goals=[
            harness.at_least("steps committed with the busiest carrier killed", steps, killed.steps),
            harness.at_most(relinked, 2.0, slowest, "{:.2f}"),
            harness.goal("bits that differ by verify", "0", "0" if exact else "some", exact),
        ],
        data={
            "direct_gaps_s": [found.gaps_s for found in direct],
            "carried_gaps_s": [found.gaps_s for found in carried],
            "carried_mb": [found.carried_mb for found in carried],
            "killed_gaps_s": killed.gaps_s,
            "relinked_s": killed.relinked_s,
        },
        dry=dry,
    )


if __name__ == "__main__":
    main()
