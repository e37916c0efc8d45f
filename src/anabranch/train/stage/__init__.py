"""Pipeline stage on one peer: its state, its tasks, its optimizer, and the settings of a run file.

Not here: models (`train.model`) and the protocol that issues the tasks (`protocol`).

Imported by: audit, node, sim, train.reference, train.workers.
"""
