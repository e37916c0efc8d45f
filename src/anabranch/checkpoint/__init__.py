"""Run directories, checkpoints on disk, and exchange of models with Hugging Face.

Not here: the contents of a stage's snapshot (`train.stage.state`).

Imported by: api, audit, cli, node.
"""
