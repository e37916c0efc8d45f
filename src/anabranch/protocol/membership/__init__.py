"""Membership of a run according to the log, the split of an iteration's microbatches over data nodes, and the
overlay graph of neighbours. Not here: decisions about membership (protocol.coordinator, protocol.fleet) and
failure detection.

Imported by: audit, node, protocol.consensus, protocol.context, protocol.fleet, protocol.peer,
protocol.recovery, protocol.routing, sim.
"""
