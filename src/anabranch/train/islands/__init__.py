"""Islands' part of a round that is a pure function of vectors: what a slot carries to the next round, which
values of a change are sent, fragments, the moments that follow from the mean change.

Not here: inner steps (`train.stage.inner_steps`), the outer step (`train.stage.outer_step`), plans of rounds
(`protocol.rounds`).

Imported by: audit, node, train.reference, train.stage, train.workers.
"""
