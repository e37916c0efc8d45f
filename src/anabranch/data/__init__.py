"""Corpora, tokenizers, and batches as pure functions of corpus, seed and iteration.

Not here: anything that needs torch; models and training are in `train`.

Imported by: api, audit, checkpoint, cli, node.
"""
