"""A live peer from start to end: run directories, leading a run, joining one, a new epoch.

Not here: the event loop of a running peer (`node.driver`), and processes of a local swarm
(`node.local_swarm`).

Imported by: api, cli, node.chaos, node.diagnostics, node.local_swarm, node.operator.
"""
