"""Components shared by the parts of one peer: clock, outbox, task queue, links, views of the run and log.
Not in it: messages, settings and events (messages, interface), decisions of any part.

Imported by: node, protocol.audit, protocol.consensus, protocol.coordinator, protocol.failure_detection,
protocol.fleet, protocol.observers, protocol.peer, protocol.pipeline, protocol.recovery, protocol.reduce,
protocol.routing, protocol.state, sim.
"""
