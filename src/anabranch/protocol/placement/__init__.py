"""Assignment of relays to stages: rates, a model of the iteration time, a local search, a joiner's stage. Not
here: when the leader places or moves relays (protocol.fleet). Everything but `proven_speeds` is a pure
function.

Imported by: protocol.context, protocol.coordinator, protocol.fleet, protocol.peer, protocol.pipeline,
sim.
"""
