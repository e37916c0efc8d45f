"""Driver of one live peer: it feeds messages, timers and results to the protocol and carries out its effects.

Not here: decisions (`protocol`), and how a peer is set up (`node.lifecycle`).

Imported by: api, cli, node.chaos, node.diagnostics, node.lifecycle, node.local_swarm, node.operator.
"""
