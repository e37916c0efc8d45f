"""Fleet management by the coordinator: admission, removal, stage assignment, standbys.

The open iteration is in `protocol.coordinator`.

Imported by: protocol.coordinator, protocol.peer, protocol.recovery, protocol.routing, sim.fuzz.
"""
