"""Private data of machines, in runs whose rounds are on such data: of this machine, and of a local swarm's
relays.

Not here: which sequences an inner step takes (`data.private`), and how contributions are written
(`train.islands.kept_contributions`).

Imported by: node.lifecycle, node.local_swarm.
"""
