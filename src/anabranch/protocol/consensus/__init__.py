"""Consensus on the log: a peer's Raft node, the choice of voters, a peer's view of the leader, replay of a
whole log.

Raft's algorithm itself is in `protocol.raft`.

Imported by: audit, cli, node, protocol.coordinator, protocol.peer, sim.
"""
