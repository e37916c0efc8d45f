"""Bytes of a step of adapters over those of full fine-tuning, in real swarms on one machine.

    nice python -m benchmarks.wire.adapters

A small llama is trained for some steps, exported, and fine-tuned twice on other texts by a swarm of two data
nodes and four relays: all weights, and adapters of every linear layer. Every step is verified. Writes the
result `adapters`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import anabranch
from anabranch.observe.event_log import events_of
from anabranch.observe.events import Timing
from benchmarks import harness
from benchmarks.harness import at_most

SHAPE = {"dim": 256, "blocks": 4, "heads": 4, "kv_heads": 4, "ffn": 704}
FULL, ADAPTERS = "all weights", "adapters"


def tuned(folder: Path, base: Path, steps: int, lora: dict[str, Any], lr: float) -> dict[str, float]:
    """Figures of one fine-tuning run."""
    config = {
        "model.initial_weights": str(base),
        "lora": lora,
        "data": {"source": "text", "path": str(Path(anabranch.__file__).parent / "sim")},
        "batch": {"microbatches": 8, "rows": 1, "sequence": 64},
        "optimizer": {"lr": lr, "warmup_steps": 2},
        "pipeline": {"stages": 2},
        "fleet": {"data_nodes": 2, "relays": 4},
        "evaluation": {"every": 0},
        "compute": {"device": "cpu"},
        "run.steps": steps,
    }
    with anabranch.Run.create(config, folder) as run:
        losses = [step.loss for step in run.metrics()]
    report = run.verify()
    assert report.holds and report.steps == steps, "the run does not verify"
    found = [event for event in events_of(folder / "events.jsonl", Timing) if event.t > 1]
    count = len({event.t for event in found})
    states = sum(path.stat().st_size for path in folder.glob(f"checkpoints/step-{steps:06}/*.safetensors"))
    return {
        "reduce_bytes": sum(event.bytes_reduce for event in found) / count,
        "activation_bytes": sum(event.bytes_activations for event in found) / count,
        "checkpoint_bytes": states,
        "first_loss": losses[0],
        "last_loss": sum(losses[-3:]) / 3,
    }


def main() -> int:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--rank", type=int, default=8)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        config = {
            "model": SHAPE,
            "data": {"source": "text", "path": str(Path(anabranch.__file__).parent / "protocol")},
            "batch": {"microbatches": 8, "rows": 1, "sequence": 64},
            "optimizer": {"lr": 1e-3, "warmup_steps": 5},
            "pipeline": {"stages": 1}, "fleet": {"data_nodes": 1, "relays": 1},
            "evaluation": {"every": 0}, "compute": {"device": "cpu"}, "run.steps": 3 * args.steps,
        }  # fmt: skip
        with anabranch.Run.create(config, root / "first") as run:
            for _ in run.metrics():
                pass
        base = run.load().export(root / "base")
        lora = {"rank": args.rank, "alpha": 2.0 * args.rank}
        figures = {
            FULL: tuned(root / "full", base, args.steps, {}, 3e-4),
            ADAPTERS: tuned(root / "lora", base, args.steps, lora, 3e-3),
        }
    full, adapters = figures[FULL], figures[ADAPTERS]
    share = adapters["reduce_bytes"] / full["reduce_bytes"]
    rows = [
        (name, f"{f['reduce_bytes'] / 1e6:.2f}", f"{f['activation_bytes'] / 1e6:.2f}",
         f"{f['checkpoint_bytes'] / 1e6:.2f}", f"{f['first_loss']:.3f}", f"{f['last_loss']:.3f}")
        for name, f in figures.items()
    ]  # fmt: skip
    text = (
        f"A llama of 3.4 million parameters (4 blocks, dim 256), {args.steps} steps of 512 tokens, 2 stages "
        f"of 2 relays and 2 data nodes. Adapters of rank {args.rank} at every linear layer. Bytes are those "
        "that all peers sent, per step. Losses in nats per token: of the first step, and the mean of the "
        "last three. Every step was verified: zero bits differ."
    )
    head = ("trained", "reduce, MB", "activations, MB", "checkpoint, MB", "first loss", "last loss")
    goals = [at_most("Bytes of sums of adapters over those of all weights", 0.1, share, "{:.3f}")]
    body = text + "\n\n" + harness.table(head, rows)
    harness.write("adapters", "Fine-tuning by adapters", body, goals=goals, data=figures, dry=args.dry)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
