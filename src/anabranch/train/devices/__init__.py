"""A stage on several devices of one machine: placement of its vectors, and the model that moves activations.

Not here: the choice of devices (`numerics.numerics_class`) and what a worker does on them (`stage`).

Imported by: train.adapters, train.numerics, train.stage, train.workers.
"""
