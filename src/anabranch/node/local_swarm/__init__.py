"""Local swarm: the processes of a run on this machine, how they are forked, watched and ended.

Not here: faults on a schedule (`node.chaos`).

Imported by: api, cli, node.chaos, node.operator.
"""
