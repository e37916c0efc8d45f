"""Recovery by the coordinator: snapshots to go back to, lost stages, members that hold steps up or withhold
states.

Imported by: protocol.coordinator, protocol.peer.
"""
