"""Commit log: its records and their encoding, its hash chain, and the optimizer parameters that each step
logs. Not here: replication of the log (protocol.raft), reading a whole log (protocol.consensus.log_replay).

Imported by: api, audit, cli, node, protocol.audit, protocol.consensus, protocol.context,
protocol.coordinator, protocol.fleet, protocol.interface, protocol.membership, protocol.messages,
protocol.peer, protocol.pipeline, protocol.placement, protocol.raft, protocol.recovery, protocol.reduce,
protocol.rounds, sim, train.
"""
