"""Loss of a real swarm under churn beside that of one process, on a model of at least 20 million parameters.

    nice python -m benchmarks.recovery.convergence --minutes 60 --steps 200

`anabranch chaos` trains a llama of 24 million parameters with 8 relays over 4 stages, whose processes are
killed and replaced all the time. Then one process computes the same steps from the run's own batches, and the
losses of both are compared step by step. `--steps` bounds how many are compared. Writes the result
`convergence`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from anabranch.observe.event_log import read_events
from anabranch.observe.events import Step
from benchmarks import harness
from benchmarks.harness import table
from benchmarks.overhead.single_process import collect, go, start

#: 24 million parameters with the default tokenizer of 512 tokens.
RUN = """[anabranch]
version = 1
[model]
size = "llama-tiny"
dim = 512
blocks = 8
heads = 8
kv_heads = 4
ffn = 1408
[pipeline]
stages = 4
[fleet]
relays = 8
[batch]
microbatches = 8
rows = 1
sequence = 64
[optimizer]
lr = 1e-3
"""
#: Rows of the printed table.
ROWS = 12


def swarm_losses(run: Path, most: int) -> dict[int, list[float]]:
    """Step -> loss sum of each microbatch, as the run committed them."""
    steps = [event for event in read_events(run / "events.jsonl") if isinstance(event, Step)]
    return {step.t: list(step.loss_sums or []) for step in steps if step.t <= most}


def report(
    swarm: dict[int, list[float]], single: dict[int, dict[int, float]], tokens: int
) -> tuple[str, int]:
    """Markdown of both losses, and the number of steps that differ in a bit."""
    common = sorted(swarm.keys() & single.keys() - {0})
    differ = [t for t in common if dict(enumerate(swarm[t])) != single[t]]
    shown = common[:: max(1, len(common) // ROWS)]
    rows = [
        [str(t), f"{sum(swarm[t]) / tokens:.6f}", f"{sum(single[t].values()) / tokens:.6f}"] for t in shown
    ]
    span = f"{common[0]} to {common[-1]}" if common else "none"
    words = f"{len(common)} steps compared ({span}), {len(differ)} differ in a bit."
    return f"{words}\n\n{table(['step', 'swarm under churn', 'one process'], rows)}", len(differ)


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="length of the run with faults")
    parser.add_argument("--steps", type=int, default=40, help="steps that one process computes again")
    parser.add_argument("--faults-per-minute", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="convergence-") as folder:
        config, run = Path(folder) / "run.toml", Path(folder) / "run"
        config.write_text(RUN)
        options = ["--minutes", f"{args.minutes}", "--calm-minutes", "0", "--seed", str(args.seed), "--json"]
        rate = ["--faults-per-minute", f"{args.faults_per_minute}", "--run-dir", str(run)]
        command = [sys.executable, "-m", "anabranch", "chaos", str(config), *options, *rate]
        result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        swarm = swarm_losses(run, args.steps)
        process = start(run, min(args.steps, max(swarm, default=0)))
        go(process)
        single = collect(process).losses
    body, differ = report(swarm, single, 8 * 1 * 64)
    faults = sum(result["faults"]["delivered"].values())
    about = (
        f"{faults} faults in {args.minutes:g} minutes; {result['steps']} steps in these minutes, besides "
        f"those before and after; {result['steps_after_last_fault']} steps follow the last fault"
    )
    words = f"A llama of 24 million parameters, 8 relays over 4 stages, {about}. "
    goals = [
        harness.at_most("steps whose loss differs in a bit", 0, differ),
        harness.at_least("steps compared", 40, len(swarm.keys() & single.keys() - {0})),
    ]
    harness.write("convergence", "Convergence under churn", words + body, goals=goals, dry=args.dry)
    return 0


if __name__ == "__main__":
    sys.exit(main())
