"""Fleet management by the coordinator: admission, removal, convictions, stage assignment, standbys; the
operator's requests.

The open iteration is in `protocol.coordinator`.

Imported by: node, protocol.coordinator, protocol.peer, protocol.recovery, protocol.routing, sim.fuzz.
"""
