"""Single-process training and generation, against which the swarm is compared.

Not here: the comparison itself (`audit`).

Imported by: api, audit, cli, sim.
"""
