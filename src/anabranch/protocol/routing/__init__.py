"""Routing in a live peer: the driver of its flow agent (the part of a distributed routing algorithm that runs
at one peer), that agent's inputs, and bandwidth probes.

Not in it: the agents and policies (`flow`), and the sending of microbatches (`protocol.pipeline`).

Imported by: protocol.peer, sim.
"""
