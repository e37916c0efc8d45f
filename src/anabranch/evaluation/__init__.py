"""Evaluation tasks: files of questions, log-likelihoods of their answers under a model, scores with errors.

Not here: the held-out loss of a run, which its leader measures (`train.stage`).

Imported by: api, cli.
"""
