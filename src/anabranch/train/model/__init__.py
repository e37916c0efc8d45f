"""Language models as functions of their weights: shapes, layers, partition into stages, initial values.

Not here: gradient sums (`train.numerics`) and the work of one stage (`train.stage`).

Imported by: api, audit, checkpoint, cli, evaluation, node, sim, train.adapters, train.devices,
train.islands, train.numerics, train.recipes, train.reference, train.stage, train.workers.
"""
