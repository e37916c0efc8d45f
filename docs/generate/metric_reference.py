"""Reference of the figures that a run publishes: Prometheus metrics, TensorBoard and Weights & Biases."""

from __future__ import annotations

from anabranch.observe.metrics.prometheus import METRICS
from anabranch.observe.metrics.writers import EXPORTED
from generate import code, escaped, table


def prometheus() -> str:
    """Table of the metrics that `GET /metrics` answers."""
    rows = [[code(name), kind, escaped(words)] for name, (kind, words) in METRICS.items()]
    return table(["name", "type", "meaning"], rows)


def writers() -> str:
    """Table of the figures that go to TensorBoard, MLflow, Trackio and Weights & Biases."""
    return table(["figure", "meaning"], [[code(name), escaped(words)] for name, words in EXPORTED.items()])
