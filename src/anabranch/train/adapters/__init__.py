"""Low-rank adapters: a model whose own weights are frozen, and the frozen weights by their hash.

Not here: the model underneath (`train.model`) and how frozen weights travel (`protocol.peer.catch_up`).

Imported by: api, audit, checkpoint, node, train.reference, train.stage, train.workers.
"""
