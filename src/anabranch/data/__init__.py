"""Corpora, tokenizers, and batches as pure functions. Nothing here imports torch."""
