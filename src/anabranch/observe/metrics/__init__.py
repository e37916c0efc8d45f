"""Metrics of a run for other programs: Prometheus, TensorBoard, Weights & Biases, MLflow, Trackio.

Not here: the state from which they are taken (`observe.view`).

Imported by: api, cli, observe.page.
"""
