"""The small scenario of the tests of `simulate`: a fleet over wan10 that a few iterations tell enough of."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "model.size": "llama-tiny",
    "model.stages": 2,
    "model.rows": 64,
    "model.sequence": 128,
    "model.microbatches": 8,
    "fleet.relays": 5,
    "fleet.achieved": 0.01,
    "run.iterations": 5,
    "run.warm_up": 1,
}
