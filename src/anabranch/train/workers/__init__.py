"""Kinds of workers, by what a run file asks for: pipelines, whole models, rounds of islands of both; and this
machine's capacity for them.

Not here: tasks that all of them do alike (`train.stage.worker`), and the passes of a stage (`train.stage`).

Imported by: audit, node, sim.
"""
