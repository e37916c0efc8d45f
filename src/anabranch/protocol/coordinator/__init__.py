"""Coordinator: the log leader's work on the open iteration, from members' reports to the record of the step.

Not in it: membership and placement of members (protocol.fleet).

Imported by: protocol.peer, sim.
"""
