"""Fleet management by the coordinator: admission, removal, stage assignment, standbys, recovery of stages.

The open iteration is in `protocol.coordinator`.

Imported by: protocol.coordinator, protocol.peer, protocol.routing, sim.fuzz.
"""
