"""Numerics of a run: order-independent sums, scalars of a step, numerics class of a machine.

Not here: the optimizer's tensor update (`train.stage.optimizer`).

Imported by: api, audit, cli, node, sim, train.islands, train.reference, train.stage, train.workers.
"""
