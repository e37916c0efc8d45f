"""Interface between the protocol and its drivers: events and effects, compute tasks, settings of a run.
Not here: the messages between peers (protocol.messages), the drivers themselves (node, sim).

Imported by: audit, node, protocol.audit, protocol.consensus, protocol.context, protocol.coordinator,
protocol.failure_detection, protocol.fleet, protocol.membership, protocol.observers, protocol.peer,
protocol.pipeline, protocol.placement, protocol.recovery, protocol.reduce, protocol.rounds, protocol.routing,
protocol.state, sim, train.
"""
