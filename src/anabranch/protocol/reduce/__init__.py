"""All-reduce of a stage's gradient: attempts, partial sums, cells, helpers; applying the committed steps.
Not here: the leader's part of a reduce (protocol.coordinator), exact summation itself (train).

Imported by: audit, protocol.coordinator, protocol.peer, protocol.state, sim.
"""
