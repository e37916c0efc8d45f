"""Rounds of islands: plans of their slots, as pure functions of the log; machines that were late.
Not here: which iterations are rounds (protocol.interface.rounds), the leader's part (protocol.coordinator).

Imported by: audit, node, protocol.consensus, protocol.context, protocol.coordinator, protocol.fleet,
protocol.peer, protocol.pipeline, protocol.recovery, sim, train.
"""
