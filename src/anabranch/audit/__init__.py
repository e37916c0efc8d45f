"""Verification of a run: a replay of every step in one process, compared with log and checkpoints; proofs of
wrong work, and contributions on record.

Not here: the model and its numerics (`train`) and the rules of the log itself (`protocol.log`).

Imported by: api, cli.
"""
