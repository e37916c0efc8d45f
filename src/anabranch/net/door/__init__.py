"""Door of an open run: the puzzle that a walk-in solves, and its price. Not here: the handshake that asks for
it (`net.handshake`), what a walk-in may do afterwards (`protocol.fleet.walk_ins`).

Imported by: net.
"""
