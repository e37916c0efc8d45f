"""Invariants I1 to I6, and demands on carried links, checked after every event of a simulated run.
Not here: when progress must be made (sim.fuzz).

Imported by: sim.fuzz.
"""
