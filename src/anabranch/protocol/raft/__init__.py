"""Raft without I/O: one voter's election, replication, membership change, leadership transfer, durable log.
Not here: the peer that owns a voter, and who should vote or lead (protocol.consensus). Log indices and
lengths are exclusive bounds: commit_index n means that entries 0 to n - 1 are committed.

Imported by: node, protocol.consensus, protocol.peer, sim.fuzz.
"""
