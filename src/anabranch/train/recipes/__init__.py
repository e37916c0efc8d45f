"""Recipes: run-file settings of the named sizes and of published systems. Imports no torch.

Imported by: api, cli, node, sim.
"""
