"""State transfer: snapshots, downloads from several peers, and the server of states.

Not here: the leader's choice of the peers that keep copies (`protocol.recovery`).

Imported by: protocol.coordinator, protocol.peer, protocol.recovery.
"""
