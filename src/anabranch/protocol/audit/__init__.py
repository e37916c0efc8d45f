"""Audit of relays' work: seals on what is sent, signed receipts, unpredictable draws, the choice of what is
far off, the auditor. Not here: what follows from a finding (protocol.coordinator), computing again
(train.stage).

Imported by: audit, node, protocol.coordinator, protocol.peer, protocol.pipeline, protocol.reduce, sim.
"""
